"""Replay rows in Flame's object cache: the same as in memory, within Flame's limits, and never lost in silence."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from fdg.errors import RunError
from fdg.runtime import flame_storage
from fdg.runtime.flame_cache import elsewhere, objects
from fdg.runtime.flame_cluster import Loopback, loopback
from fdg.runtime.flame_storage import FlameStorage

pytestmark = pytest.mark.flame


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    with loopback() as cluster:
        elsewhere()
        yield cluster


def rows(count: int, start: int = 0) -> TensorDict:
    value = torch.arange(start, start + count)
    return TensorDict({"x": value.float(), "next": {"y": torch.stack([value, -value], 1)}}, [count])


def equal(a: TensorDict, b: TensorDict) -> bool:
    return bool((a == b).all())


def test_a_torchrl_buffer_gives_the_same_batches(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped around several times, in pieces of any size, with blocks that are not all here."""
    monkeypatch.setattr(flame_storage, "MERGE", 5)
    monkeypatch.setattr(flame_storage, "PATCH_ROWS", 3)
    storage = FlameStorage(100, block_rows=16, here_bytes=700)
    mine, other = (
        ReplayBuffer(storage=storage, collate_fn=lambda rows: rows, batch_size=32),
        ReplayBuffer(storage=LazyTensorStorage(100), batch_size=32),
    )
    chance, at = random.Random(3), 0
    for turn in range(40):
        count = chance.choice([1, 3, 16, 40])
        for buffer in (mine, other):
            buffer.extend(rows(count, at))
        at += count
        if turn % 4 == 3:
            for buffer in (mine, other):
                torch.manual_seed(turn)
                buffer.seen = buffer.sample()
            assert equal(mine.seen.exclude("index"), other.seen.exclude("index")) and len(mine) == len(other)
    mine.add(rows(1, 7)[0])
    other.add(rows(1, 7)[0])
    assert equal(mine[:], other[:]) and storage.contains(99) and not storage.contains(100)
    storage.close()


def test_blocks_are_merged_long_before_flames_limit(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """More patches of one block than Flame takes."""
    monkeypatch.setattr(flame_storage, "PATCH_ROWS", 1)
    storage = FlameStorage(8, block_rows=8)
    most = 0
    for number in range(1100):
        storage.set(number % 8, rows(1, number)[0])
        most = max(most, max(storage.blocks._patches.values()))
    assert most == flame_storage.MERGE < 500
    storage.blocks._here.clear()
    assert storage.get(slice(None))["x"].tolist() == list(range(1096, 1100)) + list(range(1092, 1096))
    storage.close()


def test_a_state_goes_on_elsewhere(cluster: Loopback) -> None:
    first, second = FlameStorage(50, block_rows=8), FlameStorage(50, block_rows=16)
    first.set(range(30), rows(30))
    second.load_state_dict(first.state_dict())
    assert equal(first.get(range(30)), second.get(range(30))) and len(second) == 30
    first.close()
    assert len(first) == 0 and equal(second.get([29, 3, 3]), rows(30)[torch.tensor([29, 3, 3])])
    second.close()


def test_lost_rows_are_an_error(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the cache has evicted, patches that it has lost, a cache that is gone."""
    monkeypatch.setattr(flame_storage, "PATCH_ROWS", 1)
    storage = FlameStorage(64, block_rows=16, here_bytes=1)
    storage.set(range(64), rows(64))
    storage.set([0, 1], rows(2, 500))
    storage.get([63])
    refs = storage.blocks._refs
    objects().update_object(refs[0], b"another")
    with pytest.raises(RunError, match=r"block 0.*has 0 of 1 patches"):
        storage.get([0])
    objects().delete_objects(refs[1].key)
    with pytest.raises(RunError, match=r"lost an object.*block 1.*max_memory"):
        storage.get([20])
    with pytest.raises(RunError, match="block 1"):
        storage.set([20], rows(1))
    with pytest.raises(IndexError, match="of 64"):
        storage.get([64])
    os.kill(cluster.alive()["cache"], signal.SIGKILL)
    with pytest.raises(RunError, match="does not answer"):
        storage.get([40])
