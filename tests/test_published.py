"""The command lines of Flame's examples/rl/basic and examples/rl/torchrl_dqn: each runs, and each flag takes effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fdg.algorithms.dqn import DQNConfig
from fdg.algorithms.reinforce import REINFORCEConfig
from fdg.cli import app
from fdg.errors import UsageError
from fdg.flags import read_config
from fdg.runtime.forkserver import forkserver

BASIC = [
    "",
    "--env ant",
    "--env halfcheetah",
    "--env hopper",
    "--env walker2d",
    "--local",
    "--env ant --local",
    "--env ant --iterations 50 --episodes-per-iter 50",
    "--env ant --iterations 20",
    "--env ant --iterations 20 --local",
    "--plot",
    "--env ant --iterations 5 --episodes-per-iter 20 --plot",
]
SHAPE = "--env acrobot --iterations 20 --collections 8 --frames-per-collection 500"
TORCHRL_DQN = [
    "",
    "--local --env acrobot --iterations 5",
    f"--local {SHAPE} --metrics-json local.json",
    f"{SHAPE} --metrics-json flame.json",
    f"{SHAPE} --sample-parallelism 1 --metrics-json flame-simple.json",
    f"{SHAPE} --replay sharded --replay-shards 4 --sample-parallelism 4 --sample-work 4096 --metrics-json flame-sharded.json",
]
FEWER = {"--iterations": "2", "--episodes-per-iter": "4", "--sample-work": "3"}
"""What a test has no time for."""
NAMES = {"ant": "Ant-v5", "halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5", "walker2d": "Walker2d-v5"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


def run(algorithm: str, line: str, **more: str) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Run a line, shortened; its flags, the config and the metrics."""
    words = [FEWER.get(before, word) for before, word in zip(["", *line.split()], line.split(), strict=False)]
    small = {"--eval-episodes": "1", "--iterations": "2", **more}
    words += [word for name, value in small.items() if name not in words for word in (name, value)]
    done = CliRunner().invoke(app, ["train", algorithm, *words])
    assert done.exit_code == 0, f"{' '.join(words)}\n{done.output}"
    (folder,) = Path("runs").iterdir()
    config, metrics = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "metrics"))
    flags = {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("-")}
    assert (folder / "plot.png").is_file() == ("--plot" in flags)
    assert ("--metrics-json" not in flags) or json.loads(Path(flags["--metrics-json"]).read_text()) == metrics
    return flags, config, metrics


@pytest.mark.parametrize("line", BASIC)
def test_reinforce(line: str) -> None:
    flags, config, metrics = run("reinforce", line, **{"--episodes-per-iter": "2", "--envs": "2", "--hidden-dim": "8"})
    assert config["env"] == metrics["env"] == NAMES.get(flags.get("--env", ""), "CartPole-v1")
    assert config["iterations"] == len(metrics["iterations"]) == 2
    assert config["episodes_per_iter"] == int(flags["--episodes-per-iter"])
    assert [row["values"]["episodes"] for row in metrics["iterations"]] == [config["episodes_per_iter"]] * 2
    assert metrics["policy"] == "local"


@pytest.mark.parametrize("line", TORCHRL_DQN)
def test_dqn(line: str) -> None:
    small = {"--batch-size": "8", "--optim-steps": "2", "--warmup-frames": "8", "--hidden-dim": "8"}
    flags, config, metrics = run("dqn", line, **small)
    assert config["env"] == ("Acrobot-v1" if "acrobot" in line else "CartPole-v1")
    if "--collections" in flags:
        assert config["actors"] == metrics["actors"] == 8
        assert metrics["frames"] == 2 * 8 * 500
    sharded = "sharded" in line
    assert metrics["policy"] == ("sharded_replay" if sharded else "local")
    assert metrics["engine"] == ("process" if sharded else "inprocess")
    assert metrics["replay_shards"] == config["replay_shards"] == (4 if sharded else 1)


def test_the_flags_are_fields() -> None:
    flags = (
        "--collections 5 --frames-per-collection 1000 --batch-size 32 --buffer-size 5000 --hidden-dim 64 --optim-steps 7 "
        "--warmup-frames 300 --lr 0.01 --gamma 0.9 --target-update-tau 0.1 --epsilon-start 0.8 --epsilon-end 0.2"
    ).split()
    settings: Any = dict(
        batch_size=32, buffer_size=5000, hidden_dim=64, updates=7,
        learning_starts=300, lr=0.01, gamma=0.9, tau=0.1, epsilon_start=0.8, epsilon_end=0.2,
    )  # fmt: skip
    assert read_config(DQNConfig, {}, flags, []) == DQNConfig(actors=5, envs=50, steps=20, **settings)
    shared = read_config(DQNConfig, dict(actors="2"), [*flags, "--num-envs", "10"], [])
    assert shared == DQNConfig(actors=2, envs=10, steps=250, **settings)  # 5000 frames, as two actors with 10 each make
    with pytest.raises(UsageError, match="give one of them"):
        read_config(DQNConfig, {}, ["--steps", "3", "--frames-per-collection", "10"], [])
    for flag in ("--frames-per-collection", "--collections"):
        with pytest.raises(UsageError, match=f"no flag {flag}"):
            read_config(REINFORCEConfig, {}, [flag, "10"], [])
    assert read_config(REINFORCEConfig, {}, ["--episodes-per-iter", "20"], []).episodes_per_iter == 20


def test_flags_of_cleanrl() -> None:
    words = "--total-timesteps 5000 --num-envs 10 --learning-rate 0.01 --start-e 0.5".split()
    config = read_config(DQNConfig, {}, words, [])
    assert config == DQNConfig(iterations=63, envs=10, lr=0.01, epsilon_start=0.5)


def test_seed_minus_one_is_any_seed() -> None:
    seeds = {read_config(DQNConfig, dict(seed="-1"), [], []).seed for _ in range(5)}
    assert len(seeds) == 5 and min(seeds) >= 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("--replay shardd", "did you mean 'sharded'"),
        ("--replay simple --replay-shards 4", "--replay simple has one shard, and --replay-shards is 4"),
        ("--local --replay sharded", "the policy 'local' has the replay buffer in one place"),
        (
            "--dist-policy single_learner_coarse --replay sharded",
            "'single_learner_coarse' has the replay buffer in one",
        ),
        ("--local --dist-policy sharded_replay", "disagree"),
        ("--actors 2 --workers 2", "under the policy 'local' everything is in one process; write --dist-policy"),
        ("--collections none", "collections is 'none'; expected int"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, message: str, here: Path) -> None:
    done = CliRunner().invoke(app, ["train", "dqn", *words.split()])
    assert done.exit_code == 2 and message in done.stderr
    assert not Path("runs").exists()


def test_replay_is_for_algorithms_that_have_a_buffer(here: Path) -> None:
    done = CliRunner().invoke(app, ["train", "reinforce", "--replay", "sharded"])
    assert done.exit_code == 2 and not Path("runs").exists()
    assert done.stderr == "error: --replay is 'sharded', and REINFORCE has no replay buffer; leave --replay out\n"
