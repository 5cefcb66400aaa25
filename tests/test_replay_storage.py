"""`--replay-storage flame`: replay rows in Flame's object cache, and the same results as in memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_execution import QLike
from test_recovery import same
from typer.testing import CliRunner

from fdg.algorithms.dqn import DQN
from fdg.capacity import Needs
from fdg.cli import app
from fdg.errors import RunError, UsageError
from fdg.runtime import flame_storage
from fdg.runtime.flame import services
from fdg.runtime.flame_cache import objects
from fdg.runtime.flame_cluster import LIMIT, Loopback, loopback
from fdg.runtime.flame_storage import Blocks
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import Result, launch

SMALL: dict[str, Any] = dict(
    iterations=6, actors=2, replay_shards=2, envs=4, steps=20, updates=2, batch_size=16, learning_starts=8, seed=3
)
RING: dict[str, Any] = {**SMALL, "buffer_size": 300}
"""More rows than the buffer keeps."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    with loopback() as cluster, services(), forkserver():
        yield cluster


@pytest.fixture(scope="module", params=[False, True], ids=["uniform", "prioritized"])
def expected(request: Any) -> tuple[bool, Result]:
    return request.param, launch(DQN, policy="local", prioritized=request.param, **RING)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 rows, in patches of 8, of which only some are here: in this process."""
    for name, value in (("BLOCK_ROWS", 32), ("PATCH_ROWS", 8), ("MERGE", 3)):
        monkeypatch.setattr(flame_storage, name, value)
    start = Blocks.__init__
    monkeypatch.setattr(Blocks, "__init__", lambda self, prefix: start(self, prefix, here_bytes=4000))


def files(cluster: Loopback) -> int:
    """Objects of replay buffers in the cache."""
    return sum(1 for file in (cluster.folder / "cache").rglob("*") if file.is_file() and "fdg-replay-" in str(file))


@pytest.mark.flame
@pytest.mark.parametrize("policy", ["local", "single_learner_coarse", "sharded_replay"])
def test_blocks_do_not_change_the_result(
    policy: str, cluster: Loopback, small_blocks: None, expected: tuple[bool, Result]
) -> None:
    """With blocks that come and go, merged several times, and rows that are overwritten."""
    seen = launch(DQN, policy=policy, replay_storage="flame", prioritized=expected[0], **RING)
    same(expected[1], seen)
    assert seen.metrics["replay_storage"] == "flame" and not files(cluster)


@pytest.mark.flame
@pytest.mark.parametrize(
    ("engine", "policy"),
    [("process", "sharded_replay"), ("flame", "sharded_replay"), ("flame", "single_learner_coarse")],
)
def test_engines(engine: str, policy: str, cluster: Loopback, expected: tuple[bool, Result]) -> None:
    seen = launch(DQN, policy=policy, engine=engine, replay_storage="flame", prioritized=expected[0], **RING)
    same(expected[1], seen)
    assert not files(cluster)


@pytest.mark.flame
def test_one_actor(cluster: Loopback) -> None:
    """The user's own loop: one insert per step."""
    one = {**RING, "actors": 1, "replay_shards": 1}
    same(launch(DQN, policy="local", **one), launch(DQN, policy="local", replay_storage="flame", **one))


@pytest.mark.flame
def test_a_checkpoint_goes_on_with_the_other_storage(
    cluster: Loopback, expected: tuple[bool, Result], tmp_path: Path, small_blocks: None
) -> None:
    whole = expected[1]
    for first, second in (("flame", "memory"), ("memory", "flame")):
        folder = tmp_path / first
        run = dict(policy="sharded_replay", prioritized=expected[0], checkpoint_every=4, folder=folder)
        launch(DQN, replay_storage=first, **run, **RING)
        at = min(folder.glob("checkpoints/*.fdg"))
        same(whole, launch(DQN, policy="single_learner_coarse", replay_storage=second, resume=at))


@pytest.mark.flame
def test_a_lost_block_is_an_error_that_names_it(
    cluster: Loopback, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evicted block ends the run; it does not go on without the rows."""
    sent = Blocks._send

    def losing(self: Blocks, block: int) -> None:
        sent(self, block)
        if block == 2 and block in self._refs:
            objects().delete_objects(self._refs[block].key)

    monkeypatch.setattr(Blocks, "_send", losing)
    with pytest.raises(RunError, match=r"lost an object.*block 2 of a replay buffer.*max_memory"):
        launch(DQN, policy="single_learner_coarse", replay_storage="flame", **RING)
    assert not files(cluster)


@pytest.mark.flame
def test_a_killed_shard_is_replaced(cluster: Loopback) -> None:
    """Its rows come from the checkpoint; those of the first attempt are deleted."""
    toy: dict[str, Any] = dict(actors=2, replay_shards=2, iterations=8, seed=4)
    said: list[str] = []

    class Killing:
        def on_start(self, *_: Any) -> None: ...

        def on_log(self, row: dict[str, Any]) -> None:
            if row["iteration"] == 4 and not said:
                os.kill(self.engine.shards[1].pid, signal.SIGKILL)

        def on_end(self, *_: Any) -> None: ...

        engine: Any = None

    from fdg.runtime import process

    killing, start = Killing(), process.Processes._open_replay

    def opened(self: Any, keys: Any) -> None:
        killing.engine = self
        start(self, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.Processes, "_open_replay", opened)
        run = dict(policy="sharded_replay", engine="flame", replay_storage="flame", checkpoint_every=2)
        seen = launch(QLike, observers=[killing], notice=said.append, **run, **toy)
    same(launch(QLike, policy="local", **toy), seen)
    assert "replay[1]" in said[0] and not files(cluster)


# Without a server -----------------------------------------------------------------------------------------------------


def test_without_a_cluster_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FDG_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE", LIMIT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLAME_CACHE_ENDPOINT", "grpc://127.0.0.1:9")
    with pytest.raises(RunError, match=r"needs a Flame cluster.*fdg flame up.*FLAME_ENDPOINT"):
        launch(DQN, replay_storage="flame", **SMALL)


def test_the_flag_is_checked_and_what_is_needed_is_told() -> None:
    with pytest.raises(UsageError, match="memory"):
        launch(DQN, replay_storage="memories", **SMALL)
    seen = CliRunner().invoke(app, ["train", "dqn", "--replay-storage", "disk"])
    assert seen.exit_code == 2 and "no replay storage 'disk'" in seen.output
    needs = Needs(10**12, 10**15, storage="flame")
    needs.check()
    assert "in Flame's object cache" in next(needs.lines()) and "free" not in next(needs.lines())
    with pytest.raises(UsageError, match="not enough memory"):
        Needs(10**12, 10**15).check()
