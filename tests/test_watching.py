"""Watching a run: periodic evaluation, callbacks, `fdg eval`, `fdg plot`, logs; none of it changes what is learned."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fdg
from fdg.algorithms.reinforce import REINFORCE, PolicyActor, PolicyLearner
from fdg.algorithms.td3 import TD3
from fdg.cli import app
from fdg.console import summary
from fdg.errors import UsageError, users_place
from fdg.plot import draw, read_run
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import Result, launch

SMALL: Any = dict(actors=2, envs=2, episodes_per_iter=4, hidden_dim=8, iterations=4, lr=0.05, seed=1)
PLACES = [
    ("local", "inprocess"),
    ("single_learner_coarse", "inprocess"),
    ("single_learner_fine", "inprocess"),
    ("sharded_replay", "process"),
    ("single_learner_coarse", "process"),
]


class Restless(PolicyActor):
    """Samples when evaluated, and remembers how often it was."""

    count = 0

    def evaluate(self, td: Any) -> Any:
        self.count += 1
        return self.act(td) if self.count % 3 else super().evaluate(td)


class Watched(REINFORCE):
    """Evaluates on its own account, now and then."""

    def agent(self, spec: Any) -> Any:
        agent = super().agent(spec)
        return fdg.Agent(Restless(agent.actor.policy), agent.learner)

    def train(self) -> None:
        super().train()
        self.msrl.log(self.config.iterations, score=self.msrl.evaluate(3))


class Notes(fdg.Callback):
    """Writes down what it is told, and draws random numbers of all kinds."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, *what: Any) -> None:
        self.seen.append((name, *what))
        torch.rand(3), np.random.rand(), random.random()

    def on_iteration(self, row: dict[str, Any]) -> None:
        self.note("iteration", row["iteration"], row["episodic_return"], row["values"])

    def on_evaluation(self, evaluation: dict[str, Any]) -> None:
        self.note("evaluation", evaluation["iteration"], evaluation["returns"], evaluation["mean_return"])

    def on_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note("checkpoint", checkpoint["turns"], checkpoint["path"])

    def on_end(self, metrics: dict[str, Any]) -> None:
        self.note("end", metrics["params_sha256"], metrics["mean_reward"])


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learned(result: Result) -> Any:
    """All but times and periodic evaluations."""
    names = ("iteration", "frames", "episodes", "episodic_return", "values")
    return result.params_sha256, [{name: row[name] for name in names} for row in result.history]


def evaluated(result: Result) -> list[Any]:
    return [row.get("evaluation") for row in result.history]


# ---- what is logged


class Answering(PolicyLearner):
    """Answers something else than its losses."""

    def __init__(self, *parts: Any, answers: list[Any]) -> None:
        super().__init__(*parts)
        self.answers = answers

    def learn(self, rows: Any) -> Any:
        super().learn(rows)
        return self.answers[min(self.updates, len(self.answers)) - 1]


class Answers(REINFORCE):
    answers: list[Any] = [None]

    def agent(self, spec: Any) -> Any:
        actor = super().agent(spec).actor
        return fdg.Agent(actor, Answering(actor.policy, self.config, answers=self.answers))


class Diverges(Answers):
    answers = [
        {"loss": 1.0, "spread": 2.0},
        {"loss": 1.0, "spread": float("inf")},
        {"loss": float("nan"), "spread": 2.0},
    ]


class Silent(Answers):
    """Logs None once, and nothing once."""

    def train(self) -> None:
        super().train()
        self.msrl.log(self.config.iterations)


class LateAnswers(Answers):
    answers = [None, None, 0.5]


class Unlogged(Answers):
    """Logs no value, be it None."""

    def train(self) -> None:
        td = self.msrl.env_reset()
        td = self.msrl.env_step(self.msrl.agent_act(td))
        td["return"] = td["next", "reward"].squeeze(-1)
        self.msrl.agent_learn(td)
        self.msrl.log(0)


class Words(Answers):
    answers = [{"loss": 1.0, "state": {"now": "done"}}]


class Functions(Answers):
    answers = [len]


@pytest.mark.parametrize("policy, engine", PLACES)
def test_the_first_value_that_is_not_finite_is_told(policy: str, engine: str) -> None:
    told: list[str] = []
    result = launch(Diverges, policy=policy, engine=engine, notice=told.append, **SMALL)
    assert len(result.history) == 4 and result.metrics["not_finite"] == "spread is inf at iteration 1"
    assert told == ["spread is inf at iteration 1; the run goes on, and what it learns from there may be worth nothing"]
    assert "  not finite     spread is inf at iteration 1" in summary(result.metrics)


def test_finite_values_are_not_told(unwatched: Result) -> None:
    assert unwatched.metrics["not_finite"] is None
    assert not any("not finite" in line for line in summary(unwatched.metrics))


def test_a_run_that_goes_on_knows_what_was_not_finite(here: Path) -> None:
    told: list[str] = []
    launch(Diverges, checkpoint_every=3, folder=here, notice=told.append, **SMALL)
    again = launch(Diverges, resume=here / "checkpoints" / "00000003.fdg", notice=told.append)
    assert len(told) == 1 and again.metrics["not_finite"] == "spread is inf at iteration 1"


@pytest.mark.parametrize(
    "trainer, notices", [(Silent, 1), (LateAnswers, 0), (Unlogged, 0)], ids=["none", "none at first", "no value"]
)
@pytest.mark.parametrize("policy", ["local", "single_learner_coarse"])
def test_a_run_that_only_logged_none_says_so(trainer: Any, notices: int, policy: str) -> None:
    told: list[str] = []
    launch(trainer, policy=policy, notice=told.append, **SMALL)
    said = "no number was logged in this run, only None: let `learn` return a loss or a dict of losses"
    assert told == [said] * notices


@pytest.mark.parametrize(
    "trainer, seen", [(Words, "state/now is 'done', a str"), (Functions, "the value is <built-in ")]
)
@pytest.mark.parametrize("policy", ["local", "single_learner_coarse"])
def test_what_is_no_number_cannot_be_logged(trainer: Any, seen: str, policy: str) -> None:
    with pytest.raises(UsageError) as refusal:
        launch(trainer, policy=policy, **SMALL)
    assert f"self.msrl.log: {seen}" in str(refusal.value)
    assert str(refusal.value).endswith("; log numbers, tensors, lists of numbers, or dicts of these")
    assert users_place(refusal.value).endswith(": self.msrl.log(i, metrics)")


# ---- evaluation and callbacks


@pytest.fixture(scope="module")
def unwatched() -> Result:
    return launch(Watched, **SMALL)


@pytest.fixture(scope="module")
def expected() -> tuple[Result, list[Any]]:
    notes = Notes()
    watched = dict(eval_every=2, eval_every_episodes=3, eval_episodes=5, checkpoint_every=3, callbacks=[notes])
    return launch(Watched, **watched, **SMALL), notes.seen


def test_watching_changes_nothing(unwatched: Result, expected: tuple[Result, list[Any]]) -> None:
    watched, seen = expected
    assert learned(watched) == learned(unwatched) and evaluated(unwatched) == [None] * 5
    means = evaluated(watched)
    assert [mean is None for mean in means] == [True, False, True, False, True] and means[1] != means[3]
    assert [item[:2] for item in seen if item[0] != "end"] == [
        ("iteration", 0),
        ("iteration", 1),
        ("evaluation", 1),
        ("iteration", 2),
        ("checkpoint", 3),
        ("iteration", 3),
        ("evaluation", 3),
        ("checkpoint", 4),
        ("iteration", 4),
        ("evaluation", None),
    ]
    assert [len(item[2]) for item in seen if item[0] == "evaluation"] == [3, 3, 5]
    assert seen[-1] == ("end", watched.params_sha256, watched.metrics["mean_reward"])
    assert watched.metrics["phases"]["evaluate"] > 0 and "evaluate" not in unwatched.metrics["phases"]


@pytest.mark.parametrize("policy, engine", PLACES)
def test_watching_is_alike_everywhere(policy: str, engine: str, expected: tuple[Result, list[Any]]) -> None:
    notes = Notes()
    watched = dict(eval_every=2, eval_every_episodes=3, eval_episodes=5, checkpoint_every=3, callbacks=[notes])
    result = launch(Watched, policy=policy, engine=engine, **watched, **SMALL)
    assert learned(result) == learned(expected[0]) and evaluated(result) == evaluated(expected[0])
    assert notes.seen == expected[1]


def test_a_resumed_run_has_the_same_evaluations(expected: tuple[Result, list[Any]], here: Path) -> None:
    often: Any = dict(eval_every=2, eval_every_episodes=3)
    launch(Watched, checkpoint_every=3, folder=here, **often, **SMALL)
    config = Watched.config_class()(**SMALL)
    early = here / "checkpoints" / "00000003.fdg"
    again = launch(Watched, config, resume=early, policy="single_learner_coarse", **often)
    assert again.params_sha256 == expected[0].params_sha256
    assert evaluated(again)[:4] == evaluated(expected[0])[:4]


class Enough(fdg.Callback):
    def on_evaluation(self, evaluation: dict[str, Any]) -> None:
        raise fdg.StopTraining


@pytest.mark.parametrize("policy, engine", PLACES[:2] + PLACES[-1:])
def test_a_callback_ends_training(policy: str, engine: str) -> None:
    result = launch(REINFORCE, policy=policy, engine=engine, eval_every=2, eval_episodes=2, callbacks=[Enough], **SMALL)
    assert len(result.history) == 2 and result.metrics["mean_reward"] is not None


def test_an_error_in_a_callback_is_the_users() -> None:
    def wrong(row: dict[str, Any]) -> None:
        raise ValueError(f"mine, at {row['iteration']}")

    with pytest.raises(ValueError, match="mine, at 0"):
        launch(REINFORCE, callbacks=[wrong], **SMALL)
    with pytest.raises(UsageError, match="callback 3 has none of on_iteration, on_evaluation"):
        launch(REINFORCE, callbacks=[3], **SMALL)


MINE = """
import fdg

SEEN = []

class Noisy(fdg.Callback):
    def on_iteration(self, row):
        print("saw", row["iteration"])

def each(row):
    SEEN.append(row["frames"])

NUMBER = 3
"""
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def ran(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2, done.output
    return done.stderr


def test_callbacks_from_the_command_line(here: Path) -> None:
    Path("mine.py").write_text(MINE)
    words = ("train", "reinforce", *FLAGS, "--callback")
    said = ran(*words, "mine.py:Noisy", "--callback", "mine.py:each", "-q", "--checkpoint-every", "2")
    assert said == "saw 0\nsaw 1\nsaw 2\nsaw 3\n"
    (folder,) = Path("runs").iterdir()
    said = ran("train", "--resume", str(folder), "--iterations", "5", "-q")  # the algorithm is known, and the callbacks
    assert said == "saw 4\n"
    assert "did you mean 'Noisy'" in refused(*words, "mine.py:Noysi")
    assert "callback 3 has none of" in refused(*words, "mine.py:NUMBER")
    assert "write FILE.py:NAME" in refused(*words, "mine.py")
    assert "no file 'none.py'" in refused(*words, "none.py:x")


# ---- what a run leaves


@pytest.fixture
def own(here: Path) -> Path:
    """A run of a user's own trainer, with workers that print."""
    Path("own.py").write_text(
        "from fdg.algorithms.reinforce import REINFORCE, PolicyActor, PolicyLearner\n"
        "class Loud(PolicyActor):\n    def act(self, td):\n        print('acting')\n        return super().act(td)\n"
        "class Own(REINFORCE):\n    def agent(self, spec):\n        agent = super().agent(spec)\n"
        "        agent.actor.__class__ = Loud\n        return agent\n"
    )
    flags = ("--eval-every", "2", "--eval-episodes", "6", "--checkpoint-every", "2", "--plot")
    said = ran("train", "own.py", *FLAGS, *flags, "--dist-policy", "single_learner_coarse", "--workers", "2")
    (folder,) = Path("runs").iterdir()
    assert "acting" not in said and f"workers wrote  actors-0.log, actors-1.log in {folder / 'logs'}" in said
    assert f"plot {folder / 'plot.png'}" in said
    return folder


def test_the_run_folder(own: Path) -> None:
    names = {path.name for path in own.iterdir() if not path.name.startswith("events.out.tfevents")}
    assert names == {
        *("config.json", "launch.json", "graph.json", "graph.txt", "fragments", "metrics.csv", "metrics.json"),
        *("logs", "checkpoints", "policy.fdg", "plot.png"),
    }
    assert {path.stem for path in (own / "logs").iterdir()} == {"actors", "learner", "actors-0", "actors-1"}
    assert set((own / "logs" / "actors-1.log").read_text().splitlines()) == {"acting"}
    assert "4 calls  collect" in (own / "logs" / "actors.log").read_text()
    rows = list(csv.DictReader((own / "metrics.csv").open()))
    assert [bool(row["eval/episodic_return"]) for row in rows] == [False, True, False, True]


def test_event_names_are_cleanrls(own: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(own)).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {"charts/episodic_return", "charts/SPS", "charts/episodes", "losses/loss", "eval/episodic_return"}
    frames = [int(row["frames"]) for row in csv.DictReader((own / "metrics.csv").open())]
    assert [event.step for event in events.Scalars("eval/episodic_return")] == [frames[1], frames[3], frames[3]]
    assert [event.step for event in events.Scalars("losses/loss")] == frames


def test_eval_tells_what_the_run_learned(own: Path) -> None:
    mean = json.loads((own / "metrics.json").read_text())["mean_reward"]
    said = ran("eval", str(own), "--json", "e.json")  # as many episodes as at the run's end
    assert f"own on CartPole-v1: mean return {mean:.1f} ± " in said
    told = json.loads(Path("e.json").read_text())
    assert told["mean_return"] == mean == sum(told["returns"]) / 6
    ran("eval", str(own), "--episodes", "6", "--seed", "5", "--json", "other.json")
    assert json.loads(Path("other.json").read_text())["returns"] != told["returns"]
    rows = list(csv.DictReader((own / "metrics.csv").open()))
    middle = ran("eval", str(own / "checkpoints" / "00000002.fdg"), "--episodes", "6")
    assert f"mean return {float(rows[1]['eval/episodic_return']):.1f} " in middle
    (own / "policy.fdg").unlink()
    assert f"mean return {mean:.1f} " in ran("eval", str(own), "--episodes", "6")  # of the newest checkpoint


def test_numbers_of_a_launch_are_numbers_and_older_ones_are_read(own: Path) -> None:
    file = own / "launch.json"
    flags = json.loads(file.read_text())
    assert (flags["eval_episodes"], flags["workers"], flags["deadline"]) == (6, 2, 60.0)
    texts = {name: str(value) if type(value) in (int, float) else value for name, value in flags.items()}
    file.write_text(json.dumps(texts))
    assert "over 6 episodes" in ran("eval", str(own))
    ran("train", "--resume", str(own), "--iterations", "5")
    assert json.loads(file.read_text()) == flags
    for none in ({"eval_episodes": 0}, {}):
        file.write_text(json.dumps({"algorithm": flags["algorithm"], **none}))
        assert "over 100 episodes" in ran("eval", str(own))


def test_eval_says_what_is_wrong(own: Path) -> None:
    assert "is no run folder: name one that fdg train made" in refused("eval", "runs")
    assert "--episodes is 0; it must be at least 1" in refused("eval", str(own), "--episodes", "0")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "hidden_dim": 9}))
    done = CliRunner().invoke(app, ["eval", str(own)])
    assert done.exit_code and "the actor" in done.stderr
    Path("own.py").unlink()
    assert f"no file '{Path('own.py').absolute()}'" in refused("eval", str(own))


def test_plots_group_runs_by_all_but_the_seed(own: Path, here: Path) -> None:
    for seed in ("1", "2"):
        ran("train", "reinforce", *FLAGS, "--seed", seed, "-q", "--eval-episodes", "0")
    ran("train", "reinforce", *FLAGS, "--env", f"{Path(__file__).parent / 'three_steps.py'}:make_env", "-q")
    folders = sorted(str(folder) for folder in Path("runs").iterdir())
    assert any(folder.startswith("runs/three_steps.make_env__reinforce__local__") for folder in folders)
    assert ran("plot", *folders, "-o", "out/all.svg", "--title", "Some runs") == "plot out/all.svg\n"
    text = Path("out/all.svg").read_text()
    for word in ("CartPole-v1", "three_steps.py:make_env", "own · single_learner_coarse · process", "Some runs"):
        assert f">{word}</text>" in text
    assert ">reinforce · local, 2 seeds</text>" in text and ">reinforce · local</text>" in text
    for phase in ("collect", "learn", "evaluate"):
        assert f">{phase}</text>" in text
    ran("plot", *folders)
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")


def test_plots_of_what_is_no_run_are_refused(own: Path) -> None:
    assert "nowhere does not exist: name folders that fdg train made" in refused("plot", "nowhere")
    assert "runs is no run folder" in refused("plot", "runs")
    assert "a plot is written as .png" in refused("plot", str(own), "-o", "plot.txt")
    (own / "metrics.csv").unlink()
    assert "there is no return to draw" in refused("plot", str(own))


def test_a_plot_says_in_what_runs_differ(here: Path) -> None:
    for settings in (["gamma=0.9"], ["gamma=0.8"], ["gamma=0.8"]):
        ran("train", "reinforce", *FLAGS, "-q", "--eval-episodes", "0", "--set", *settings)
    ran("plot", *sorted(str(folder) for folder in Path("runs").iterdir()), "-o", "rates.svg")
    text = Path("rates.svg").read_text()
    assert ">reinforce · local · gamma 0.9</text>" in text and ">reinforce · local · gamma 0.8, 2 runs</text>" in text


def test_a_run_without_a_return_is_not_drawn(here: Path) -> None:
    flags = ("--env", "Pendulum-v1", "--set", "envs=1", "steps=2", "iterations=3", "-q", "--eval-episodes", "0")
    done = CliRunner().invoke(app, ["train", "td3", *flags, "--plot"])
    assert done.exit_code == 0 and "no plot: " in done.stderr and "no episode had ended" in done.stderr
    (empty,) = Path("runs").iterdir()
    assert "no episode had ended" in refused("plot", str(empty))
    ran("train", "reinforce", *FLAGS, "-q", "--eval-episodes", "0")
    full = next(folder for folder in Path("runs").iterdir() if folder != empty)
    done = CliRunner().invoke(app, ["plot", str(full), str(empty), "-o", "p.svg"])
    assert done.exit_code == 0 and f"left out: {empty}" in done.stderr and Path("p.svg").is_file()


def test_a_run_that_learned_nothing_says_so() -> None:
    told: list[str] = []
    small: dict[str, Any] = dict(env="Pendulum-v1", envs=1, steps=2, iterations=3, notice=told.append)
    launch(TD3, **small)
    assert told == ["nothing was learned in these 6 frames, agent_learn was never called: learning_starts is 1,000"]
    launch(TD3, learning_starts=2, batch_size=2, **small)
    assert len(told) == 1


def test_a_run_that_goes_on_can_be_drawn(own: Path) -> None:
    (own / "metrics.json").unlink()
    run = read_run(own)
    assert run.name == "own · single_learner_coarse · process" and not run.phases and len(run.evaluations) == 2
    assert draw([run], "half.png").is_file()
