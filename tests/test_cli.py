"""The command line as users meet it: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fdg import __version__, registry
from fdg.cli import app
from fdg.config import Config
from fdg.console import FIRST_LINES, ROWS_SHOWN, RunConsole
from fdg.errors import UsageError
from fdg.flags import flag_table
from fdg.graph import Fragment, Graph
from fdg.runtime.run import launch
from fdg.runtime.runfolder import RunFolder, write_json

FDG = str(Path(sys.executable).with_name("fdg"))
POLICIES = ("local", "single_learner_coarse", "sharded_replay")
TINY = ("--iterations", "3", "--eval-episodes", "2")

TRAINER = """
from dataclasses import dataclass
from fdg.algorithms.dqn import DQN, DQNConfig

@dataclass
class MineConfig(DQNConfig):
    bonus: float = 0.5
    '''Added to nothing.'''

class Mine(DQN):
    '''A variant of DQN.'''
    config: MineConfig

    def agent(self, spec):
        if self.config.bonus < 0:
            raise ArithmeticError("negative bonus")
        return super().agent(spec)
"""

ENDLESS = """
from fdg.algorithms.dqn import DQN

class Endless(DQN):
    '''An iteration that does not end.'''

    def train(self):
        for i in range(10):
            self.msrl.env_reset()
            print("begun", flush=True)
            while True:
                pass
"""

STARS = """
from starred_base import *

class Starred(DQN):
    '''Has its names by a star, from a file that has them by a star.'''

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = step_mdp(self.msrl.env_step(self.msrl.agent_act(td, halved(0.5))))
            self.msrl.log(i, reward=self.msrl.mean(td["observation"]))
"""

OWN_POLICY = """
from fdg.policies import Policy

class Own(Policy):
    name = "own"
    fragments = {"actors": ("env", "actor"), "rest": ("buffer", "learner")}

"""


def fdg(*arguments: str | Path) -> Result:
    """Run a command in this process, which has paid for importing torch."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    """The message of a command that must be refused: code 2, stderr only, no traceback."""
    result = fdg(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.stderr
    return " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


def ran(*arguments: str | Path) -> str:
    result = fdg(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mine(here: Path) -> Path:
    file = here / f"trainer_{abs(hash(here.name))}.py"  # modules are cached by name: each test has its own
    file.write_text(TRAINER)
    return file


# ---- light commands


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["--version"],
        ["train", "--help"],
        ["train", "dqn", "--help"],
        ["train", "dqm"],
        ["graph", "dqn", "--dist-policy", "single_learner_coarse"],
        ["graph", "reinforce", "--dist-policy", "sharded_replay", "--actors", "2", "--format", "svg"],
        ["graph", "dqn", "--source"],
    ],
)
def test_help_lists_and_graphs_need_no_torch(arguments):
    code = """
import sys
from fdg.cli import main
try:
    main()
except SystemExit as end:
    print("code", end.code)
print("heavy", {"torch", "torchrl", "tensordict", "gymnasium"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(f"code {2 if 'dqm' in arguments else 0}\nheavy set()\n"), done


@pytest.mark.parametrize("flags", ["--gama 1", "--gamma 2", "--env cartpool", "--metrics-json .", "--set lr=x"])
def test_wrong_flags_of_a_bundled_algorithm_are_refused_before_torch_is_imported(flags):
    code = """
import sys
from fdg.cli import main
try:
    main()
except SystemExit as end:
    sys.exit("torch was imported" if "torch" in sys.modules else end.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "dqn", *flags.split()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.startswith("error: "), done


@pytest.mark.parametrize("target", registry.algorithms(), ids=lambda target: target.name)
def test_the_light_config_is_the_algorithms_own(target):
    light = target.light_config()
    assert light is not None and flag_table(light) == flag_table(target.load().config_class())


def test_version():
    assert ran("--version") == f"fdg {__version__}\n"


def test_list_names_what_there_is():
    listing = ran("list")
    for name in ("dqn", "reinforce", *POLICIES, "inprocess", "cartpole", "CartPole-v1"):
        assert re.search(rf"\b{name}\b", listing), name


def test_help_of_an_algorithm_lists_its_own_flags(mine):
    text = ran("train", mine, "--help")
    assert "--dist-policy" in text
    assert re.search(r"--bonus.*float.*0\.5.*Added to nothing", text)
    text = ran("train", "dqn", "-h")
    for flag in ("--lr", "--envs", "--iterations", "--local"):
        assert len(re.findall(rf"[│ ]{flag} ", text)) == 1, flag
    assert re.search(r"--envs[^-]*default: 64", text)  # DQN's own default


def test_doctor_says_what_is_there_and_what_to_do():
    result = fdg("doctor")
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "torchrl's C++ part", "cores", "memory", "mujoco", "flamepy", "Flame servers"):
        assert re.search(rf"^(ok|note) +{re.escape(word)} ", result.stdout, re.M), word
    assert os.environ["FDG_CACHE"] in result.stdout
    for line, below in zip(result.stdout.splitlines(), [*result.stdout.splitlines()[1:], ""], strict=True):
        if line.startswith(("note", "bad")):
            assert "→" in below, line


# ---- graph and check


@pytest.mark.parametrize(
    ("format", "sign"),
    [("text", "actor"), ("mermaid", "flowchart"), ("dot", "digraph"), ("svg", "<svg"), ("json", "{")],
)
def test_graph_is_drawn_in_every_format(here, format, sign):
    drawn = ran("graph", "dqn", "--dist-policy", "sharded-replay", "--actors", "2", "--format", format)
    assert sign in drawn
    name = {"mermaid": "g.mmd"}.get(format, f"g.{format}") if format != "text" else "g.txt"
    assert ran("graph", "dqn", "--dist-policy", "sharded-replay", "--actors", "2", "--output", name) == ""
    assert (here / name).read_text().strip() == drawn.strip()


def test_graph_counts_what_was_asked_for():
    graph = Graph.from_json(
        ran(
            "graph",
            "dqn",
            "--dist-policy",
            "ShardedReplay",
            "--actors",
            "3",
            "--replay-shards",
            "2",
            "--format",
            "json",
        )
    )
    assert (graph.policy, graph.actors, graph.replay_shards) == ("sharded_replay", 3, 2)


def test_source_is_python_and_the_driver_comes_first():
    text = ran("graph", "dqn", "--dist-policy", "single_learner_coarse", "--source")
    empty, *parts = re.split("^# ==== ", text, flags=re.M)
    assert not empty and len(parts) == 3 and parts[0].startswith("driver\n")
    for part in parts:
        compile("# " + part, "generated", "exec")


def test_graph_of_an_own_file(mine):
    assert "Mine" in ran("graph", f"{mine}:Mine", "--dist-policy", "single_learner_coarse")
    assert "Mine" in ran("graph", mine.name)


def test_check_covers_config_agent_and_every_policy(mine):
    text = ran("check", mine, "--actors", "2", "--bonus", "1")
    assert "bonus=1.0" in text
    for policy in POLICIES:
        assert re.search(rf"OK +policy +{policy}", text)
    assert "sharded_replay" not in ran("check", "dqn", "--dist-policy", "local")
    assert "bonus is 'x'; expected float" in refused("check", mine, "--bonus", "x")


# ---- train


def test_train_writes_metrics_and_a_run_folder(here):
    text = ran(
        "train", "dqn", *TINY, "--env", "cartpole", "--seed", "7", "--metrics-json", "deep/m.json", "--num-envs", "2"
    )
    metrics = json.loads((here / "deep/m.json").read_text())
    expected = dict(algorithm="dqn", env="CartPole-v1", policy="local", engine="inprocess", actors=1, seed=7)
    assert {key: metrics[key] for key in expected} == expected
    assert metrics["frames"] > 0 and metrics["frames_per_second"] > 0 and len(metrics["iterations"]) == 3
    assert set(metrics["phases"]) >= {"collect", "sync", "sample", "learn"}
    assert re.fullmatch("[0-9a-f]{64}", metrics["params_sha256"])
    assert metrics["params_sha256"][:16] in text and "mean_reward" in text and "time left" in text

    (folder,) = (here / "runs").iterdir()
    assert re.fullmatch(r"CartPole-v1__dqn__local__7__\d{8}-\d{6}", folder.name)
    assert str(folder.name) in text
    config = json.loads((folder / "config.json").read_text())
    assert (config["env"], config["envs"], config["seed"]) == ("CartPole-v1", 2, 7)
    assert Graph.from_json((folder / "graph.json").read_text()).policy == "local"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [int(row["frames"]) for row in rows] == [row["frames"] for row in metrics["iterations"]]
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert list(folder.glob("events.out.tfevents*"))


def test_policies_give_the_same_parameters_and_logs(here):
    seen = set()
    for policy in POLICIES:
        ran(
            "train",
            "dqn",
            *TINY,
            "--actors",
            "2",
            "--replay-shards",
            "2",
            "--dist-policy",
            policy,
            "--metrics-json",
            "m",
        )
        metrics = json.loads((here / "m").read_text())
        timed = ("seconds", "frames_per_second")
        rows = [{key: value for key, value in row.items() if key not in timed} for row in metrics["iterations"]]
        seen.add((metrics["params_sha256"], metrics["mean_reward"], json.dumps(rows)))
    assert len(seen) == 1


def test_names_that_a_star_imports_are_known(here):
    base = "from fdg import *\nfrom fdg.algorithms.dqn import DQN\n\ndef halved(x):\n    return x / 2\n"
    (here / "starred_base.py").write_text(base + "from starred_too import *\n")
    (here / "starred_too.py").write_text("from starred_base import *\n")  # Python does not mind
    (here / "starred.py").write_text(STARS)
    policies = "local,single_learner_coarse"
    assert "equal" in ran("compare", "starred.py", "--actors", "2", "--iterations", "2", "--dist-policy", policies)
    assert "stays at the driver" not in ran("graph", "starred.py", "--actors", "2")


def test_set_takes_several(here):
    ran("train", "--set", "lr=0.01", "gamma=0.5", "dqn", *TINY, "--set", "tau=0.5", "hidden_dim=8", "--quiet")
    (file,) = here.glob("runs/*/config.json")
    config = json.loads(file.read_text())
    assert [config[name] for name in ("lr", "gamma", "tau", "hidden_dim")] == [0.01, 0.5, 0.5, 8]


def test_quiet_prints_nothing(here):
    assert ran("train", "dqn", *TINY, "--quiet", "--local", "--log-dir", "elsewhere") == ""
    assert len(list((here / "elsewhere").iterdir())) == 1


def test_train_an_own_file_with_its_own_flags(here, mine):
    ran("train", f"{mine.name}:Mine", *TINY, "--bonus", "2", "--set", "lr=0.01", "--quiet", "--dist_policy", "local")
    (file,) = here.glob("runs/*/config.json")
    config = json.loads(file.read_text())
    assert (config["bonus"], config["lr"]) == (2.0, 0.01)


def test_a_policy_of_the_users_own(here):
    (here / "own_policy.py").write_text(
        "from fdg.policies import Local\n\nclass Own(Local):\n    '''As local.'''\n    name = 'own'\n"
    )
    ran("train", "dqn", *TINY, "--quiet", "--dist-policy", "own_policy.py:Own", "--metrics-json", "m.json")
    assert json.loads((here / "m.json").read_text())["policy"] == "own"


def test_a_policy_file_without_its_class(here):
    (here / "one_policy.py").write_text(OWN_POLICY)
    (here / "two_policies.py").write_text(OWN_POLICY + "class Other(Own):\n    name = 'other'\n")
    assert "under own" in ran("graph", "dqn", "--dist-policy", "one_policy.py")
    assert "Own, Other" in refused("graph", "dqn", "--dist-policy", "two_policies.py")
    assert "under other" in ran("graph", "dqn", "--dist-policy", "two_policies.py:Other")
    assert re.search("OK +policy +other", ran("check", "dqn", "--dist-policy", "two_policies.py:Other"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("class Own: ...", ":2: Own is no policy; write: class Own(Policy), from fdg.policies import Policy"),
        ("class Own(Policy):\n    fragments = {}", ":2: policy Own has no name; write in it: name = 'own'"),
        ("class Own(Policy):\n    name = 'own'", "policy Own declares no fragments; write in it, for example"),
        (
            "class Own(Policy):\n    name = 'own'\n    fragments = {'all': ('env')}",
            "fragment 'all' is 'env'; write ('env',)",
        ),
        (
            "class Own(Policy):\n    name = 'own'\n    fragments = {'all': ('env', 'actor', 'replay', 'learner')}",
            ":2: policy 'own' places an unknown component 'replay'",
        ),
        (
            "class Own(Policy):\n    name = 'own'\n    fragments = {'all': ('env', 'actor', 'learner')}",
            ":2: policy 'own' places component 'buffer' 0 times",
        ),
        (
            "class Own(Policy):\n    name = 'local'\n    fragments = {'a': ('env', 'actor'), 'b': ('buffer', 'learner')}",
            "policy Own has the name of a bundled one, 'local'; give it another",
        ),
        ("class Owl(Policy):\n    name = 'owl'", "has no class 'Own'; did you mean 'Owl'?"),
        (
            "class Own(Policy):\n    name = own",
            ":3: the import failed: NameError: name 'own' is not defined name = own",
        ),
        ("class Own(Policy:", ":2:17: does not parse"),
    ],
)
def test_a_policy_that_cannot_be_one_is_refused(here, line, message):
    file = here / f"wrong_policy_{abs(hash(line))}.py"
    file.write_text(f"from fdg.policies import Policy\n{line}\n")
    for command in ("train", "graph", "check"):
        assert message in refused(command, "dqn", "--dist-policy", f"{file}:Own")


def test_launch_takes_a_policy_as_the_command_line_does(here):
    (here / "launched_policy.py").write_text(OWN_POLICY)
    done = launch(registry.find_algorithm("dqn").load(), iterations=1, policy="launched_policy.py:Own")
    assert done.metrics["policy"] == "own"
    with pytest.raises(UsageError, match="did you mean 'local'"):
        launch(registry.find_algorithm("dqn").load(), iterations=1, policy="locl")


def test_an_error_in_the_users_code_ends_in_the_users_line(mine):
    done = subprocess.run(
        [FDG, "train", f"{mine}:Mine", *TINY, "--bonus=-1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    *_, place, line, message = [text for text in done.stderr.splitlines() if text.strip(" ^~")]
    assert f'File "{mine}", line 16, in agent' in place
    assert 'raise ArithmeticError("negative bonus")' in line
    assert message == "ArithmeticError: negative bonus"


def test_a_traceback_shows_the_users_lines_and_fdgs_own_only_on_demand(mine):
    mine.write_text(
        TRAINER
        + "    def train(self):\n        td = self.msrl.env_reset()\n        td.nothing\n        self.msrl.log(0)\n"
    )
    command = [FDG, "train", f"{mine}:Mine", "--dist-policy", "single_learner_coarse", *TINY]
    short = subprocess.run(command, capture_output=True, text=True, timeout=120)
    files = re.findall(r'File "([^"]+)"', short.stderr)
    assert short.returncode == 1 and files[0] == str(mine) and "td.nothing" in short.stderr
    assert not any(part in file for file in files for part in ("/runtime/", "cli.py", "typer"))
    whole = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "FDG_DEBUG": "1"})
    assert whole.returncode == 1 and "/runtime/" in whole.stderr and whole.stderr.count("\n") > short.stderr.count("\n")


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_file_that_raises_when_imported_is_one_message_with_its_line(mine, command, monkeypatch):
    mine.write_text(TRAINER + "\ndef half():\n    return 1 / 0\n\nx = half()\n")
    message = f"error: {mine}:20: the import failed: ZeroDivisionError: division by zero return 1 / 0"
    assert refused(command, f"{mine}:Mine") == message
    monkeypatch.setenv("FDG_DEBUG", "1")
    result = fdg(command, f"{mine}:Mine")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "x = half()" in result.stderr


def test_a_neighbour_that_raises_when_imported_is_named(here):
    (here / "raises_at_once.py").write_text("import sys\n\nsys.exit(3)\n")
    (here / "imports_it.py").write_text(
        "import raises_at_once\nfrom fdg.algorithms.dqn import DQN\nclass A(DQN): ...\n"
    )
    seen = refused("check", "imports_it.py:A")
    assert f"{here}/raises_at_once.py:3: the import of imports_it.py failed: SystemExit: 3 sys.exit(3)" in seen
    (here / "raises_at_once.py").write_text("def (\n")
    assert f"{here}/raises_at_once.py:1: the import of imports_it.py failed: SyntaxError" in refused(
        "check", "imports_it.py:A"
    )


def test_a_run_that_fails_before_its_first_row_leaves_no_folder(mine):
    mine.write_text(TRAINER + "\n    def replay_buffer(self, spec):\n        return None\n")
    assert "this trainer has no replay buffer" in refused("train", mine, *TINY)
    assert not list(mine.parent.glob("runs/*"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def agent(self, spec): return 1, 2", "Mine.agent returned (1, 2); return Agent(actor=…, learner=…)"),
        ("def agent(self, spec): return Agent(Actor)", "Mine.agent returned the class Actor; make one: Actor(…)"),
        (
            "def replay_buffer(self, spec): return []",
            "Mine.replay_buffer returned []; return fdg.ReplayBuffer(capacity)",
        ),
        ("def __init__(self): pass", "Mine is called with config: too many positional arguments"),
        ("def train(self, steps): ...", "Mine.train is called with self: missing a required argument: 'steps'"),
        ("agent = Trainer.agent", "Mine has no method `agent`; write: def agent(self, spec), which returns Agent"),
    ],
)
def test_check_refuses_a_trainer_whose_parts_are_wrong(mine, body, message):
    mine.write_text(f"from fdg import Actor, Agent, Trainer\n{TRAINER}\n    {body}\n")
    assert message in refused("check", f"{mine}:Mine")


def test_check_tells_of_a_missing_replay_buffer(mine):
    """Refused where the trainer has no `replay_buffer`; one that returns None may also not use it with such a config."""
    mine.write_text(f"{TRAINER}\n    def replay_buffer(self, spec): return None\n")
    told = r"line \d+ uses a replay buffer, and this trainer makes none: write def replay_buffer"
    said = ran("check", mine)
    assert re.search(rf"^-- +replay +{told}", said, re.M) and len(re.findall(told, said)) == 1
    other = mine.with_name(f"other_{mine.name}")
    other.write_text(f"from fdg import Trainer\n{TRAINER}\n    replay_buffer = Trainer.replay_buffer\n")
    assert len(re.findall(told, refused("check", f"{other}:Mine"))) == 1


def test_folders_for_output_are_made_when_it_is_written_and_named(here):
    assert "discrete" in refused("train", "dqn", "--env", "pendulum", "--metrics-json", "new/m.json")
    assert not (here / "new").exists()
    result = fdg("graph", "dqn", "-o", "new/g.txt")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "made the folder new\n")
    assert fdg("graph", "dqn", "-o", "new/g.txt").stderr == ""


def test_ctrl_c_stops_with_a_checkpoint_and_code_130(here):
    command = [FDG, "train", "dqn", "--iterations", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        try:
            for line in run.stdout:
                if re.match(r" +\d", line):  # the first row: the run is under way
                    break
            run.send_signal(signal.SIGINT)
            _, error = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 130
    (folder,) = here.glob("runs/*")
    first, then = error.splitlines()
    assert first.startswith("stopping at the end of this iteration, with a checkpoint")
    assert then == f"stopped with a checkpoint; go on with: fdg train dqn --resume runs/{folder.name}"
    assert (folder / "metrics.csv").exists() and len(list((folder / "checkpoints").iterdir())) == 1


def test_ctrl_c_twice_is_one_line_and_code_130(here):
    (here / "endless.py").write_text(ENDLESS)
    with subprocess.Popen([FDG, "train", "endless.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        try:
            while not run.stdout.readline().startswith(b"begun"):
                assert run.poll() is None
            run.send_signal(signal.SIGINT)
            assert run.stderr.readline().startswith(b"stopping")
            run.send_signal(signal.SIGINT)
            _, error = run.communicate(timeout=60)
        finally:
            run.kill()
    assert (run.returncode, error) == (130, b"interrupted\n")
    assert not list(here.glob("runs/*"))


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "dqm"], "no algorithm 'dqm'; did you mean 'dqn'?"),
        (["train"], "which algorithm? one of a2c, dqn"),
        (["graph"], "which algorithm?"),
        (
            ["train", "dqn", "--dist-policy", "shared_replay"],
            "no policy 'shared_replay'; did you mean 'sharded_replay'?",
        ),
        (["graph", "dqn", "--dist-policy", "locl"], "did you mean 'local'?"),
        (["train", "dqn", "--engine", "in-proces"], "no engine 'in-proces'; did you mean 'inprocess'?"),
        (["train", "dqn", "--workers", "two"], "--workers is 'two'; expected int"),
        (["train", "dqn", "--workers", "0"], "--workers is 0; it must be at least 1"),
        (
            ["train", "dqn", "--workers", "2"],
            "--workers is 2, and under the policy 'local' everything is in one process",
        ),
        (
            ["train", "dqn", "--workers", "2", "--engine", "inprocess", "--dist-policy", "single_learner_coarse"],
            "workers is 2; the engine 'inprocess'",
        ),
        (["graph", "dqn", "--actors", "0"], "--actors is 0; it must be at least 1"),
        (["graph", "dqn", "--format", "png"], "no format 'png'"),
        (["graph", "dqn", "-o", "g.png"], "g.png: no format is known by '.png' (.txt, .mmd, .dot"),
        (["graph", "dqn", "--sorce"], "--source"),
        (["trian", "dqn"], "Did you mean 'train'?"),
        (["train", "--lr", "0.1", "dqn"], "--lr comes before the algorithm"),
        (["train", "nowhere.py:X"], "no file 'nowhere.py'"),
        (["train", "folder/dqn"], "write FILE.py:CLASS"),
        (["train", "dqn", "--env", "cartpool"], "did you mean 'cartpole'?"),
        (["train", "dqn", "--iteratoins", "3"], "did you mean '--iterations'?"),
        (["train", "dqn", "--learnig-rate", "3"], "did you mean '--learning-rate'?"),
        (["train", "dqn", "--set", "gama=1"], "did you mean 'gamma'?"),
        (["train", "dqn", "--set", "gamma"], "write --set gamma=VALUE"),
        (["train", "dqn", "--set", "gamma", "0.9"], "write --set gamma=VALUE"),
        (["train", "dqn", "--set", "gamma=0.9", "gamma=0.8"], "gamma is given twice: 0.9 and 0.8"),
        (["train", "dqn", "--seed", "one"], "seed is 'one'; expected int"),
        (["train", "dqn", "--actors", "0"], "actors is 0; it must be at least 1"),
        (["train", "dqn", "--local", "--dist-policy", "sharded_replay"], "disagree"),
        (["train", "reinforce", "--total-timesteps", "1000"], "use --iterations"),
        (["train", "dqn", "--env", "pendulum"], "discrete"),
        (["check", "dqn", "--env", "pendulum"], "discrete"),
        (["train", "dqn", "--metrics-json", "/proc/none/m.json"], "/proc/none/m.json cannot be written"),
        (["train", "dqn", "--metrics-json", "."], ". cannot be written: it is a folder"),
        (["train", "dqn", "--metrics-json", "/dev/null/m.json"], "/dev/null: that is a file"),
        (["graph", "dqn", "-o", "/proc/none/g.svg"], "/proc/none/g.svg cannot be written"),
        (["train", "dqn", "--dist-policy", ""], "no policy ''"),
        (
            ["train", "dqn", "--buffer-size", "1e13"],
            "not enough memory: this run needs 500.0 TB for a replay buffer of 10,000,000,000,000 rows",
        ),
        (["train", "dqn", "--envs", "1e9"], "surely a slip"),
        (["train", "dqn", "--gamma", "nan"], "gamma is 'nan'; expected float, and nan is no number"),
        (["train", "dqn", "--iterations", "1", "--log-dir", "/proc/none"], "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_message(here, arguments, message):
    assert message in refused(*arguments)
    assert not list(here.glob("runs/*"))


def test_bad_input_in_a_fresh_process():
    done = subprocess.run([FDG, "train", "dqm"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no algorithm 'dqm'; did you mean 'dqn'?")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("class A(:\n    pass", "A", r":1:9: does not parse: .*\n    class A\(:\n            \^"),
        (
            "import nothing_of_that_name\nfrom fdg import Trainer\nclass A(Trainer):\n  def train(self): ...",
            "A",
            ":1: the import",
        ),
        ("from fdg import Trainer\nclass A(Trainer):\n  pass", "A", ":2: A has no method `train`"),
        ("from fdg import Trainer\nclass B(Trainer): ...\nclass A(B): ...", "", "A has no method `train`"),
        ("class A:\n  def train(self): ...", "A", "A is no trainer; write: class A"),
        ("class Abc: ...", "Abd", "has no class 'Abd'; did you mean 'Abc'"),
        (
            "import fdg\nclass Net: ...\nclass A(fdg.Trainer): ...\nclass B(A): ...",
            "Other",
            r"has no class 'Other'; known: A, B$",
        ),
        (
            "import fdg\nclass A(fdg.Trainer):\n def train(self): ...\nclass B(fdg.Trainer): ...",
            "",
            "several trainers; write one of",
        ),
        ("x = 1", "", "holds no trainer"),
        ("x = '\0'", "", "py: cannot be read as Python"),
    ],
)
def test_files_that_hold_no_usable_trainer(tmp_path, source, name, message):
    file = tmp_path / f"bad_{abs(hash(source))}.py"
    file.write_text(source)
    with pytest.raises(UsageError, match=message):
        registry.find_algorithm(f"{file}:{name}" if name else str(file)).load()


# ---- names


@pytest.mark.parametrize(
    "name", ["single_learner_coarse", "single-learner-coarse", "Single_Learner_Coarse", "SingleLearnerCoarse"]
)
def test_spelling_of_policies_is_free(name):
    assert registry.find_policy(name).name == "single_learner_coarse"


def test_algorithms_are_known_without_importing_them():
    targets = {target.name: target for target in registry.algorithms()}
    assert {"dqn", "reinforce"} <= set(targets)
    assert targets["dqn"].class_name == "DQN" and targets["dqn"].doc
    assert registry.find_algorithm("DQN") == targets["dqn"]
    assert targets["dqn"].load().__name__ == "DQN"
    by_file = registry.find_algorithm(f"{targets['dqn'].file}:DQN")
    assert by_file.load() is targets["dqn"].load()


def test_a_file_named_like_a_module_does_not_replace_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # later tests are not to find this json.py
    (tmp_path / "json.py").write_text("from fdg.algorithms.dqn import DQN\nclass A(DQN): ...\n")
    assert registry.find_algorithm(str(tmp_path / "json.py")).load().__name__ == "A"
    assert sys.modules["json"] is json


def test_a_file_sees_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text(
        "from fdg import Trainer\nclass Base(Trainer):\n  def train(self): ...\n"
    )
    file = tmp_path / "trainer_with_neighbour.py"
    file.write_text("from neighbour_of_mine import Base\nclass Here(Base): ...\n")
    assert registry.find_algorithm(str(file)).class_name == "Here"


# ---- what a run shows and keeps


def row(iteration: int, **values: float) -> dict[str, Any]:
    return dict(
        iteration=iteration,
        frames=iteration * 100,
        episodes=iteration,
        seconds=0.5 * (iteration + 1),
        frames_per_second=200.0,
        episodic_return=None if iteration == 0 else 20.0,
        values=values,
    )


def shown(rows: int, terminal: bool) -> list[str]:
    out = io.StringIO()
    with RunConsole(Console(file=out, force_terminal=terminal, width=100)) as console:
        console.on_start(Config(iterations=rows), None)
        for iteration in range(rows):
            console.on_log(row(iteration, loss=0.5))
    return out.getvalue().splitlines()


def test_piped_lines_are_aligned_and_do_not_flood():
    lines = shown(5000, terminal=False)
    assert lines[0].split() == ["iteration", "frames", "frames/s", "return", "loss", "time", "left"]
    assert len({len(line) for line in lines}) == 1
    assert FIRST_LINES + 1 < len(lines) < 50
    assert lines[-1].split()[:5] == ["4,999", "499,900", "200", "20", "0.5"]


def test_a_value_that_comes_later_gets_its_column():
    out = io.StringIO()
    console = RunConsole(Console(file=out, width=100))
    console.on_start(Config(iterations=2), None)
    console.on_log(row(0, epsilon=1.0))
    console.on_log(row(1, loss=0.5, epsilon=0.9))
    header, first, wider, second = (line.split() for line in out.getvalue().splitlines())
    assert (header[4:6], first[3]) == (["epsilon", "time"], "1")
    assert (wider[4:6], second[4:6]) == (["epsilon", "loss"], ["0.9", "0.5"])


def test_the_return_a_trainer_logs_itself_is_shown_and_kept_once(tmp_path):
    out = io.StringIO()
    with RunFolder(tmp_path, "e", "a", "p", 1) as folder, RunConsole(Console(file=out, width=100)) as console:
        for observer in (folder, console):
            observer.on_start(Config(iterations=1), None)
            observer.on_log(row(1, loss=0.5, episodic_return=20.0))
    assert out.getvalue().splitlines()[0].split() == [
        "iteration",
        "frames",
        "frames/s",
        "return",
        "loss",
        "time",
        "left",
    ]
    assert not [name for name in (folder.path / "metrics.csv").read_text().split() if "values/" in name]


def test_the_live_table_ends_with_the_last_rows():
    lines = shown(40, terminal=True)
    tail = [line.split() for line in lines[-ROWS_SHOWN:]]
    assert [cells[0] for cells in tail if cells and cells[0].isdigit()][-1] == "39"


def test_time_left_is_not_guessed_when_the_trainer_counts_something_else():
    out = io.StringIO()
    console = RunConsole(Console(file=out, width=100))
    console.on_start(Config(iterations=2), None)
    console.on_log(row(500, loss=0.5))
    assert out.getvalue().splitlines()[-1].endswith("0.5")


def test_metrics_csv_grows_columns_and_keeps_rows(tmp_path):
    with RunFolder(tmp_path, "MyEnv/x-v0", "dqn", "local", 3) as folder:
        folder.on_start(
            Config(), Graph("T", "local", "t.py", 1, 1, {"all": Fragment("all", ["env"], source="x = 1\n")})
        )
        folder.on_log(row(0, loss=1.0))
        folder.on_log(row(1, loss=0.5, q=2.0, frames=7.0))
    assert folder.path.name.startswith("MyEnv-x-v0__dqn__local__3__")
    rows = list(csv.DictReader((folder.path / "metrics.csv").open()))
    assert [row["loss"] for row in rows] == ["1.0", "0.5"]
    assert [row["q"] for row in rows] == ["", "2.0"]
    assert [(row["frames"], row["values/frames"]) for row in rows] == [("0", ""), ("100", "7.0")]
    assert rows[0]["episodic_return"] == ""
    assert (folder.path / "fragments" / "all.py").read_text() == "x = 1\n"


def test_tensorboard_gets_cleanrl_names(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunFolder(tmp_path, "e", "dqn", "local", 3) as folder:
        folder.on_start(Config(), None)
        folder.on_log(row(0, loss=1.0))
        folder.on_log(row(1, loss=0.5))
        folder.on_end({"frames": 100, "mean_reward": 475.0})
    events = accumulator.EventAccumulator(str(folder.path)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "charts/SPS",
        "charts/episodic_return",
        "losses/loss",
        "eval/episodic_return",
    }
    assert [(event.step, event.value) for event in events.Scalars("losses/loss")] == [(0, 1.0), (100, 0.5)]


def test_two_runs_in_one_second_have_two_folders(tmp_path):
    folders = [RunFolder(tmp_path, "e", "a", "p", 1) for _ in range(3)]
    for folder in folders:
        with folder:
            folder.on_start(Config(), None)
    assert len({folder.path for folder in folders}) == 3


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "m.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "m.json").read_text(), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5]}


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    listing = subprocess.Popen(
        [sys.executable, "-u", "-m", "fdg", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert listing.stdout is not None and listing.stderr is not None
    assert listing.stdout.readline() == "algorithms\n"
    listing.stdout.close()
    assert listing.stderr.read() == ""
    listing.stderr.close()
    listing.wait(60)


@pytest.mark.parametrize("place", [(), ("--dist-policy", "single_learner_coarse")])
def test_a_refused_component_call_is_shown_with_its_line(mine, place):
    body = "    def train(self):\n        td = self.msrl.env_reset()\n        td = self.msrl.env_step(td)\n        self.msrl.log(0)\n"
    mine.write_text(TRAINER + body)
    result = fdg("train", f"{mine}:Mine", *place, *TINY)
    line = mine.read_text().splitlines().index("        td = self.msrl.env_step(td)") + 1
    assert result.exit_code == 2 and "error: env_step needs an action" in result.stderr
    assert result.stderr.endswith(f"\n  at {mine}:{line}: td = self.msrl.env_step(td)\n")


def test_of_a_librarys_frames_only_the_last_is_shown(mine):
    body = "    def train(self):\n        import torch\n        torch.nn.Sequential(torch.nn.Linear(3, 2))(torch.ones(1, 4))\n"
    mine.write_text(TRAINER + body + "        self.msrl.log(0)\n")
    files = re.findall(r'File "([^"]+)"', fdg("train", f"{mine}:Mine", *TINY).stderr)
    assert files[-2] == str(mine) and files[-1].endswith("linear.py")


def test_resuming_nothing_is_refused(here):
    assert "--resume: nowhere does not exist" in refused("train", "--resume", "nowhere")
    assert f"--resume: {here} does not say which algorithm ran" in refused("train", "--resume", str(here))
