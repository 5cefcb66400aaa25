"""Settings tuned for an algorithm on an environment: below what the user gives, above the defaults of the class."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import pytest
from typer.testing import CliRunner

from fdg import registry
from fdg.algorithms.dqn import DQN
from fdg.cli import app
from fdg.config import make_config
from fdg.runtime.run import launch
from fdg.tuned import TUNED

SMALL = dict(iterations=2, learning_starts=8, batch_size=8, updates=1, hidden_dim=8)


class Own(DQN):
    """A variant of a bundled algorithm, which is the user's own."""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(TUNED, ("dqn", "Acrobot-v1"), {"envs": 3, "steps": 5})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def frames_of(trainer: type[DQN] = DQN, **options: object) -> int:
    return launch(trainer, **{**SMALL, **options}).metrics["frames"]


def test_python_takes_them_below_what_is_given(table: Path) -> None:
    assert frames_of(env="acrobot") == 2 * 3 * 5
    assert frames_of(env="acrobot", envs=4) == 2 * 4 * 5
    assert frames_of(env="acrobot", tuned=False) == frames_of(env="cartpole") == 2 * 64 * 8
    assert frames_of(Own, env="acrobot") == 2 * 64 * 8
    assert frames_of(config=make_config(DQN.config_class(), {"env": "Acrobot-v1", **SMALL})) == 2 * 64 * 8


def run(*words: str) -> tuple[str, dict[str, object]]:
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = CliRunner().invoke(app, ["train", *words, *small, "--eval-episodes", "0"])
    assert done.exit_code == 0, done.output
    newest = max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    return done.output, json.loads((newest / "config.json").read_text())


def test_the_command_line_takes_and_tells_them(table: Path) -> None:
    said, config = run("dqn", "--env", "acrobot")
    assert said.startswith("settings tuned for Acrobot-v1: envs 3, steps 5; --no-tuned for the defaults\n")
    assert (config["envs"], config["steps"]) == (3, 5)
    said, config = run("dqn", "--env", "acrobot", "--num-envs", "4")
    assert said.startswith("settings tuned for Acrobot-v1: steps 5; ") and (config["envs"], config["steps"]) == (4, 5)
    for words in (("--no-tuned", "--env", "acrobot"), ("--env", "cartpole")):
        said, config = run("dqn", *words)
        assert "tuned" not in said and (config["envs"], config["steps"]) == (64, 8)


def test_timesteps_count_tuned_frames(table: Path) -> None:
    words = ["train", "dqn", "--env", "acrobot", "--total-timesteps", "60", "-q", "--eval-episodes", "0"]
    done = CliRunner().invoke(app, [*words, "--learning-starts", "1000", "--metrics-json", "m.json"])
    assert done.exit_code == 0, done.output
    assert json.loads(Path("m.json").read_text())["frames"] == 60


@pytest.mark.parametrize("algorithm, env", TUNED, ids=lambda word: word)
def test_the_table_fits_its_algorithms(algorithm: str, env: str) -> None:
    target = registry.find_algorithm(algorithm)
    assert target.module == f"fdg.algorithms.{algorithm}" and env in gymnasium.registry
    config = target.load().config_class()
    settings = TUNED[algorithm, env]
    made = make_config(config, {**settings, "env": env})
    assert {name: getattr(made, name) for name in settings} == settings
