"""Runs from the command line: workers, checkpoints, stopping and going on."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import fdg, here, ran, refused  # noqa: F401

from fdg.compare import Row, Watch, difference
from fdg.runtime.forkserver import ForkServer, forkserver
from fdg.runtime.run import Result
from fdg.runtime.runfolder import RunFolder

SMALL = (
    *(
        "--actors",
        "2",
        "--envs",
        "4",
        "--steps",
        "4",
        "--updates",
        "2",
        "--learning-starts",
        "16",
        "--batch-size",
        "16",
    ),
    *("--eval-episodes", "0"),
)
COARSE, SHARDED = ("--dist-policy", "single_learner_coarse"), ("--dist-policy", "sharded_replay")
TIMES = ("seconds", "frames_per_second")


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


def run_folder(where: Path) -> Path:
    (folder,) = (where / "runs").iterdir()
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    """metrics.csv without times."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file.open())]


def outcome(file: Path) -> tuple[str, list[Any]]:
    metrics = json.loads(file.read_text())
    return metrics["params_sha256"], [{k: v for k, v in row.items() if k not in TIMES} for row in metrics["iterations"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six iterations that nothing has interrupted."""
    where = tmp_path_factory.mktemp("whole")
    ran("train", "dqn", *SMALL, "--iterations", "6", "-q", "--log-dir", where / "runs")
    return run_folder(where)


@pytest.fixture
def interrupted(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The folder of such a run that Ctrl-C has stopped in its fourth iteration, in processes."""
    log = RunFolder.on_log

    def interrupt(folder: RunFolder, row: dict[str, Any]) -> None:
        log(folder, row)
        if row["iteration"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "on_log", interrupt)
        result = fdg("train", "dqn", *SMALL, "--iterations", "6", *COARSE, "--engine", "process", "--workers", "2")
    assert result.exit_code == 130, result.output
    folder = run_folder(here)
    assert f"stopped with a checkpoint; go on with: fdg train dqn --resume runs/{folder.name}\n" in result.stderr
    assert [row["iteration"] for row in rows(folder / "metrics.csv")] == ["0", "1", "2", "3"]
    return folder


def test_an_interrupted_run_goes_on_as_it_was_launched(interrupted: Path, whole: Path) -> None:
    ran("train", "dqn", "--resume", interrupted, "-q")
    metrics = json.loads((interrupted / "metrics.json").read_text())
    assert (metrics["policy"], metrics["engine"]) == ("single_learner_coarse", "process")
    assert outcome(interrupted / "metrics.json") == outcome(whole / "metrics.json")
    assert rows(interrupted / "metrics.csv") == rows(whole / "metrics.csv")
    assert list(interrupted.parent.iterdir()) == [interrupted]


def test_a_run_that_went_on_has_a_checkpoint_of_its_end(interrupted: Path) -> None:
    """Going on once more repeats nothing."""
    assert "going on after turn 4\n" in ran("train", "dqn", "--resume", interrupted)
    before = rows(interrupted / "metrics.csv")
    said = ran("train", "--resume", interrupted, "--iterations", "7")
    assert "going on after turn 6\n" in said and not (interrupted / "superseded").exists()
    assert rows(interrupted / "metrics.csv")[:6] == before and len(rows(interrupted / "metrics.csv")) == 7


STUBBORN = """
import os
import signal

from fdg.algorithms.dqn import DQN
from fdg import step_mdp

class Stubborn(DQN):
    def train(self):
        schedule = (0.99**k for k in range(100))
        td = self.msrl.env_reset()
        for i in range(8):
            td = self.msrl.agent_act(td, 0.5)
            td = self.msrl.env_step(td)
            self.msrl.replay_buffer_insert(td)
            td = step_mdp(td)
            self.msrl.log(i, epsilon=next(schedule))
            if i == 4:
                os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("place", [("--local",), COARSE, (*COARSE, "--engine", "process", "--workers", "1")])
def test_ctrl_c_keeps_the_policy_where_there_can_be_no_checkpoint(here, place, capfd) -> None:  # noqa: F811
    """It is said early, and nothing is promised."""
    (here / "stubborn.py").write_text(STUBBORN)
    result = fdg("train", "stubborn.py", "--envs", "2", "--eval-episodes", "0", *place)
    assert result.exit_code == 130, result.output
    first, then, last = capfd.readouterr().err.splitlines()
    assert first.startswith("this run can have no checkpoint: `schedule` is a generator")
    assert then.startswith("stopping at the end of this iteration, with its policy alone")
    assert last == "stopped without a checkpoint; the policy is kept for fdg eval"
    folder = run_folder(here)
    assert not (folder / "checkpoints").exists() and "mean return" in ran("eval", folder, "--episodes", "2")


def test_ctrl_c_keeps_the_policy_of_a_loop_without_boundaries(here, capfd) -> None:  # noqa: F811
    text = STUBBORN.replace("for i in range(8):", "turns = iter(range(8))\n        for i in turns:")
    (here / "stubborn.py").write_text(text)
    result = fdg("train", "stubborn.py", "--envs", "2", "--eval-episodes", "0")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("stopped without a checkpoint (") and "stubborn.py:13" in said
    assert "mean return" in ran("eval", run_folder(here), "--episodes", "2")


def test_an_error_in_the_program_names_the_checkpoint(here) -> None:  # noqa: F811
    text = STUBBORN.replace("os.kill(os.getpid(), signal.SIGINT)", "raise ValueError('mine')").replace(
        "next(schedule)", "i"
    )
    (here / "stubborn.py").write_text(text.replace("schedule = (0.99**k for k in range(100))", ""))
    result = fdg("train", "stubborn.py", "--envs", "2", "--checkpoint-every", "2", "-q")
    assert result.exit_code == 1 and "ValueError: mine" in result.stderr
    command = f"fdg train stubborn.py --resume runs/{run_folder(here).name}"
    assert f"there is a checkpoint; go on with: {command}\n" in result.stderr


@pytest.mark.parametrize("place", [["--local"], [*SHARDED], [*SHARDED, "--engine", "process", "--workers", "1"]])
def test_it_goes_on_elsewhere_too(place: list[str], interrupted: Path, whole: Path) -> None:
    ran("train", "dqn", "--resume", interrupted, *(["--engine", "inprocess"] if len(place) < 3 else []), *place, "-q")
    assert outcome(interrupted / "metrics.json") == outcome(whole / "metrics.json")
    assert rows(interrupted / "metrics.csv") == rows(whole / "metrics.csv")
    assert not (interrupted / "superseded").exists()


def test_rows_after_the_checkpoint_are_replaced(here: Path) -> None:  # noqa: F811
    """A run that was killed after its last checkpoint has rows, events and a half line that it makes anew."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran("train", "dqn", *SMALL, "--iterations", "6", "--checkpoint-every", "4", "-q")
    folder = run_folder(here)
    expected = rows(folder / "metrics.csv"), outcome(folder / "metrics.json")
    with (folder / "metrics.csv").open("a") as file:
        file.write("6,99")
    (events,) = folder.glob("events*")
    events.rename(folder / events.name.replace(events.name.split(".")[3], "1000000000"))  # of another second
    first, last = sorted((folder / "checkpoints").iterdir())
    assert int(first.stem) == 4, "after four iterations"
    old, aside = (folder / "metrics.csv").read_text(), folder / "superseded"
    said = ran("train", "dqn", "--resume", first)
    names = [last.name, "metrics.json", "policy.fdg"]
    assert f"going on after turn 4: {', '.join(names)} and metrics.csv as they were are kept in {aside}" in said
    assert sorted(file.name for file in aside.iterdir()) == sorted([*names, "metrics.csv"])
    assert (aside / "metrics.csv").read_text() == old and old.endswith("6,99")
    assert (rows(folder / "metrics.csv"), outcome(folder / "metrics.json")) == expected
    seen = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in seen.Scalars("charts/SPS")] == [int(row["frames"]) for row in expected[0]]


def test_what_is_given_anew_is_named(here: Path) -> None:  # noqa: F811
    ran("train", "dqn", *SMALL, "--iterations", "2", "--checkpoint-every", "2", "-q")
    folder = run_folder(here)
    said = ran("train", "dqn", "--resume", folder, "--iterations", "4", "--set", "lr=0.01", "--actors", "2")
    assert said.startswith("resumed with iterations = 4 (was 2), lr = 0.01 (was 0.003)\n")
    assert [row["iteration"] for row in rows(folder / "metrics.csv")] == ["0", "1", "2", "3"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["iterations"], config["lr"], config["envs"]) == (4, 0.01, 4)
    said = ran("train", "--resume", folder, "--learning-rate", "0.02", "--updates=3", "--iterations", "5")
    assert said.startswith("resumed with iterations = 5 (was 4), updates = 3 (was ") and "lr = 0.02 (was 0.01)" in said
    assert "no flag --updatse for this algorithm; did you mean '--updates'?" in refused(
        "train", "--resume", folder, "--updatse", "3"
    )
    message = "actors is 3, and the checkpoint was taken with actors = 2, which cannot change while a run goes on"
    assert message in refused("train", "dqn", "--resume", folder, "--actors", "3")
    assert "seed is 5, and" in refused("train", "dqn", "--resume", folder, "--seed", "5")
    before = (folder / "metrics.csv").read_text()
    message = refused("train", "dqn", "--resume", folder, "--iterations", "1")
    assert "iterations is 1, and" in message and "nothing to train" in message
    assert (folder / "metrics.csv").read_text() == before


def test_wrong_checkpoints_are_refused(here: Path) -> None:  # noqa: F811
    ran("train", "dqn", *SMALL, "--iterations", "3", "--checkpoint-every", "1", "-q")
    folder = run_folder(here)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert "nowhere does not exist" in refused("train", "dqn", "--resume", "nowhere")
    assert "runs has no checkpoints" in refused("train", "dqn", "--resume", "runs")
    assert re.search("checkpoint of DQN, not of REINFORCE", refused("train", "reinforce", "--resume", folder))
    assert {file: file.read_bytes() for file in before} == before
    file = max((folder / "checkpoints").iterdir())
    file.write_bytes(file.read_bytes()[:-10])
    message = refused("train", "dqn", "--resume", folder)
    assert f"the checkpoint {file} is damaged" in message and "the one before is" in message
    assert "no checkpoint of FDG" in refused("train", "dqn", "--resume", folder / "metrics.csv")


LOOPLESS = """
from fdg.algorithms.dqn import DQN

class Loopless(DQN):
    def train(self):
        self.msrl.log(0, rows=self.msrl.env_reset().numel())
"""


def test_a_program_without_boundaries_trains_but_has_no_checkpoints(here: Path) -> None:  # noqa: F811
    Path("loopless.py").write_text(LOOPLESS)
    ran("train", "loopless.py", "--eval-episodes", "0", "-q")
    assert "`train` has no loop with component calls" in refused("train", "loopless.py", "--checkpoint-every", "1")


# ---- what a run needs


def test_a_run_says_what_it_starts_and_needs(here: Path) -> None:  # noqa: F811
    process = ("--engine", "process", "--workers", "2", "--replay-shards", "2")
    said = ran("train", "dqn", *SMALL, "--iterations", "1", *SHARDED, *process).splitlines()
    assert said[0].startswith("replay buffer 10.0 MB when full (200,000 rows)")
    assert said[1].startswith("5 worker processes: actors[0], actors[1], learner, replay[0], replay[1]; ")
    said = ran("train", "dqn", *SMALL, "--iterations", "1").splitlines()
    assert said[1].startswith("all in this process; ")


def test_more_than_the_machine_has_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    process = (*COARSE, "--engine", "process")
    message = refused("train", "dqn", *SMALL, *process, "--workers", "3")
    assert "workers is 3, and there are only 2 actors to share: write --workers 2, or --actors 3" in message
    monkeypatch.setattr("fdg.capacity.memory", lambda: (2e9, 3e8))
    ran("train", "dqn", *SMALL, "--iterations", "1", "-q")
    message = refused("train", "dqn", *SMALL, *process, "--workers", "2")
    assert "for a replay buffer of 200,000 rows and 525.0 MB for 3 worker processes, and 300.0 MB of 2.0 GB" in message
    monkeypatch.setattr("fdg.capacity.memory", lambda: (2e9, 5e6))
    assert "needs 10.0 MB for a replay buffer" in refused("train", "dqn", *SMALL)
    assert len(list(Path("runs").iterdir())) == 1


LOCKED = """
import threading
from fdg.algorithms.dqn import DQN

class Locked(DQN):
    def agent(self, spec):
        agent = super().agent(spec)
        agent.learner.lock = threading.Lock()
        return agent
"""


def test_what_cannot_be_copied_is_named(here: Path) -> None:  # noqa: F811
    """Alike by every engine, and by `fdg check`, which runs nothing."""
    Path("locked.py").write_text(LOCKED)
    whole = (
        "the learner cannot be copied into a fragment: `learner.lock` is a lock (cannot pickle '_thread.lock' object)"
    )
    assert whole in refused("check", "locked.py")
    for flags in (("--local",), COARSE, (*COARSE, "--engine", "process")):
        assert whole in refused("train", "locked.py", *flags)
    Path("deep.py").write_text(
        LOCKED.replace("agent.learner.lock = ", "agent.actor.network[1].notes = [0, {'to': open('notes', 'a')}]  #")
    )
    message = refused("train", "deep.py", "--local")
    assert (
        "the actor cannot be copied into a fragment: `actor.network.1.notes[1]['to']` is a TextIOWrapper (" in message
    )
    assert "or write None in __init__, and make it when it is first used" in message


TWINS = """
from copy import deepcopy
from fdg.algorithms.dqn import DQN
from fdg import Agent

class Twins(DQN):
    def agent(self, spec):
        agent = super().agent(spec)
        return Agent(deepcopy(agent.actor), agent.learner)

class Frozen(Twins):
    def agent(self, spec):
        agent = super().agent(spec)
        agent.actor.network.requires_grad_(False)
        return agent

class Alone(Twins):
    def agent(self, spec):
        return Agent(super().agent(spec).actor)
"""


def test_an_actor_that_nothing_learned_reaches_is_told_of(here: Path, capfd: Any) -> None:  # noqa: F811
    Path("twins.py").write_text(TWINS)
    told = "actor and learner share no tensors: nothing that is learned reaches the actor; give both the same module"
    said = ran("check", "twins.py:Twins", "--dist-policy", "local")
    assert re.search(rf"^-- +agent +QActor and QLearner on CartPole-v1: {told}", said, re.M)
    for name in ("dqn", "twins.py:Frozen", "twins.py:Alone"):
        assert re.search(r"^OK +agent .* on CartPole-v1$", ran("check", name, "--dist-policy", "local"), re.M)
    for flags in ((), COARSE):
        capfd.readouterr()
        ran("train", "twins.py:Twins", *SMALL, *flags, "--iterations", "1", "-q")
        assert capfd.readouterr().err.count(told) == 1
    ran("train", "twins.py:Frozen", *SMALL, "--iterations", "1", "-q")
    assert told not in capfd.readouterr().err


def test_files_named_like_modules_do_not_stop_workers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    Path("json.py").write_text("raise SystemExit('mine')\n")
    monkeypatch.syspath_prepend(str(here))
    server = ForkServer()
    try:
        server.preload(["json"])
    finally:
        server.stop()


def test_flags_of_a_launch_are_checked() -> None:
    assert "--deadline is 'soon'; expected a number" in refused("train", "dqn", "--deadline", "soon")
    assert "--deadline is 0; it must be more than 0" in refused("train", "dqn", "--deadline", "0")
    assert "--checkpoint-every is -1; it must be at least 0" in refused("train", "dqn", "--checkpoint-every=-1")
    text = ran("train", "--help")
    for flag in ("workers", "sample-parallelism", "sample-work", "deadline", "checkpoint-every", "resume", "engine"):
        assert f"--{flag} " in text


# ---- compare and check


LEAKY = """
from fdg.algorithms.dqn import DQN, QActor, QLearner

SEEN = [0]

class Counting(QLearner):
    def learn(self, batch):
        SEEN[0] += 1
        return super().learn(batch)

class Looking(QActor):
    def act(self, td, epsilon):
        return super().act(td, 1.0 if SEEN[0] else epsilon)

class Leaky(DQN):
    def agent(self, spec):
        agent = super().agent(spec)
        SEEN[0], agent.learner.__class__, agent.actor.__class__ = 0, Counting, Looking
        return agent
"""


def test_compare_finds_policies_equal(here: Path) -> None:  # noqa: F811
    policies = ("--dist-policy", "local,single_learner_coarse", "--engine", "inprocess,process", "--workers", "2")
    said = ran("compare", "dqn", *SMALL[:-2], "--iterations", "3", *policies, "--json", "c.json")
    header, *lines = said.splitlines()
    assert header.split()[:4] == ["policy", "engine", "result", "seconds"]
    assert [line.split()[:3] for line in lines[:3]] == [
        ["local", "inprocess", "reference"],
        ["single_learner_coarse", "inprocess", "equal"],
        ["single_learner_coarse", "process", "equal"],
    ]
    assert re.search(r"single_learner_coarse on process: .*actors → learner rows1 [\d.]+ kB", said)
    runs = json.loads(Path("c.json").read_text())["runs"]
    assert len({run["params_sha256"] for run in runs}) == 1 and all(run["equal"] for run in runs)
    assert runs[2]["calls"] == runs[1]["calls"] != runs[0]["calls"] and runs[1]["bytes"]["actors->learner:rows1"] > 0
    assert not Path("runs").exists()


def test_compare_names_the_first_difference(here: Path) -> None:  # noqa: F811
    Path("leaky.py").write_text(LEAKY)
    places = (*COARSE, "--engine", "inprocess,process")
    result = fdg("compare", "leaky.py:Leaky", *SMALL[:-2], "--iterations", "4", *places, "--epsilon-start", "0")
    assert result.exit_code == 1, result.output
    assert re.search(r"^single_learner_coarse +process +DIFFERS", result.stdout, re.M)
    said = next(line for line in result.stdout.splitlines() if "carries another value" in line)
    assert re.fullmatch(
        r"single_learner_coarse on process: by iteration (\d): learner → driver `loss` carries another value; "
        r"iteration \1: loss is [\d.e-]+, expected [\d.e-]+",
        said,
    )


@pytest.mark.parametrize(
    "turn, said",
    [
        (1, "by iteration 7: learner → driver `loss` carries another value; iteration 7: loss is 2.0, expected 1.0"),
        (2, "after iteration 7: learner → driver `loss` carries another value; the parameters differ by up to 1"),
    ],
)
def test_compare_names_the_step_that_was_logged(turn: int, said: str) -> None:
    """A trainer that logs iterations 5 and 7 only."""

    def row(value: float) -> Row:
        losses = [1.0, value if turn == 1 else 1.0]
        counts = dict(frames=0, episodes=0, episodic_return=None)
        history = [dict(iteration=i, values={"loss": x}, **counts) for i, x in zip((5, 7), losses, strict=True)]
        metrics = {"params_sha256": str(value), "learners_draw": False}
        result = Result(None, None, metrics, history, {"weight": torch.tensor(value)})  # type: ignore[arg-type]
        watch = Watch()
        watch.iterations = [{"learner → driver `loss`": {str(value if at == turn else 0)}} for at in range(3)]
        return Row("single_learner_coarse", "process", True, result, watch=watch)

    assert difference(row(1.0), row(2.0)) == said


GLOBAL = """
from fdg.algorithms.dqn import DQN, QLearner

COUNT = 0

class Counting(QLearner):
    def learn(self, batch):
        global COUNT
        COUNT += 1
        batch["next", "reward"] *= 0.9 ** COUNT
        return super().learn(batch)

class Counted(DQN):
    def agent(self, spec):
        agent = super().agent(spec)
        agent.learner.__class__ = Counting
        return agent
"""


def test_compare_begins_each_run_with_the_module_as_it_was(here: Path) -> None:  # noqa: F811
    Path("counted.py").write_text(GLOBAL)
    places = ("--dist-policy", "local,single_learner_coarse", "--engine", "inprocess,process")
    said = ran("compare", "counted.py", *SMALL[:-2], "--iterations", "3", *places)
    assert [line.split()[2] for line in said.splitlines()[1:4]] == ["reference", "equal", "equal"]


NOISY = """
import torch
from fdg import Agent
from fdg.algorithms.reinforce import REINFORCE, PolicyLearner

class Noise(PolicyLearner):
    def learn(self, rows):
        rows["return"] = rows["return"] + torch.rand_like(rows["return"])
        return super().learn(rows)

class Noisy(REINFORCE):
    def agent(self, spec):
        actor = super().agent(spec).actor
        return Agent(actor, Noise(actor.policy, self.config))
"""


def test_compare_says_what_it_cannot_compare(here: Path) -> None:  # noqa: F811
    Path("noisy.py").write_text(NOISY)
    sizes = ("--actors", "2", "--envs", "2", "--episodes-per-iter", "4", "--hidden-dim", "8", "--iterations", "2")
    places = ("--dist-policy", "local,multi_learner", "--engine", "process", "--workers", "2")
    for algorithm, outcome in (("noisy.py", "not compared"), ("reinforce", "close")):
        said = ran("compare", algorithm, *sizes, *places, "--json", "c.json")
        assert re.search(rf"^multi_learner +process +{outcome} +\d", said, re.M)
        reason = "not compared: `learn` draws random numbers, and each learner draws for its own rows\n"
        assert (reason in said) == (outcome == "not compared")
        assert json.loads(Path("c.json").read_text())["runs"][1]["outcome"] == outcome


def test_compare_refuses_before_it_runs(here: Path) -> None:  # noqa: F811
    assert "did you mean 'local'" in refused("compare", "dqn", "--dist-policy", "locl")
    assert "no engine 'proces'" in refused("compare", "dqn", "--engine", "inprocess,proces")
    assert "--workers is 0" in refused("compare", "dqn", "--workers", "0")


def test_check_says_what_a_run_would_need(here: Path) -> None:  # noqa: F811
    Path("loopless.py").write_text(LOOPLESS)
    said = ran("check", "dqn", "--actors", "2", "--engine", "process", "--workers", "2", *COARSE)
    assert re.search(r"^OK +memory +replay buffer 10.0 MB when full", said, re.M)
    assert re.search(r"^OK +processes", said, re.M)
    assert re.search(r"^OK +checkpoints +between turns of the loop in line \d+ of dqn.py, with td, loss$", said, re.M)
    assert "\n    3 worker processes: actors[0], actors[1], learner\n" in said
    Path("locked.py").write_text(LOCKED.replace("agent.learner.lock", "self.lock"))
    said = ran("check", "locked.py", "--dist-policy", "local")
    stuck = r"`self.lock` of the trainer cannot go to another process: `self.lock` is a lock \(cannot pickle"
    assert re.search(rf"^-- +processes +{stuck}", said, re.M)
    said = ran("check", "loopless.py", "--dist-policy", "local")
    assert re.search(r"^-- +checkpoints +loopless.py:5: this trainer cannot be checkpointed: ", said, re.M)


def test_compile_update_is_recorded(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:  # noqa: F811
    """It is part of the experiment. Here there is no compiler, so that Python makes the updates and a line says so."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    ran("train", "dqn", *SMALL, "--iterations", "2", "--hidden-dim", "3", "--compile-update")
    folder = run_folder(here)
    assert json.loads((folder / "launch.json").read_text())["compile_update"] is True
    assert json.loads((folder / "metrics.json").read_text())["compiled_updates"] == 0
    assert "is not compiled: there is no C++ compiler; install g++" in capfd.readouterr().err
