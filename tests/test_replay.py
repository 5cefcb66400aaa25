"""Replay: the same rows whatever the number of shards, snapshots, eviction by lane, priorities by identity."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from fdg.errors import FdgError
from fdg.runtime.replay import ReplayBuffer, Shard
from fdg.runtime.rows import Rows
from fdg.runtime.sumtree import SumTree

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def steps(values: torch.Tensor) -> TensorDict:
    """Transitions that can be told apart: batch as `values`, every entry computed from them."""
    batch = list(values.shape)
    value = values.unsqueeze(-1).float()
    done = value.long() % 3 == 0
    after = {"observation": value + torch.arange(1, 4), "reward": -value, "done": done, "terminated": done}
    following = TensorDict({**after, "reset_observation": value.expand(*batch, 3) * 0}, batch_size=batch)
    return TensorDict(
        {"observation": value + torch.arange(3), "action": values.clone(), "done": done & False, "next": following},
        batch_size=batch,
    )


def opened(capacity: int, actors: int = 1, shards: int = 1, **options) -> ReplayBuffer:
    return ReplayBuffer(capacity, **options).open(actors, shards)


def same(a: TensorDict, b: TensorDict) -> bool:
    """Equal to the bit, keys included."""
    ours, theirs = (dict(td.items(include_nested=True, leaves_only=True)) for td in (a, b))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def actions(batch: TensorDict) -> list[int]:
    return batch["action"].tolist()


# --- uniform ----------------------------------------------------------------------------------------------------------

inserts = st.tuples(st.just("insert"), st.integers(0, 4), st.integers(1, 4), st.integers(1, 5))
samples = st.tuples(st.just("sample"), st.integers(1, 20), st.integers(0, 2**31), st.just(0))
clears = st.tuples(st.just("clear"), st.just(0), st.just(0), st.just(0))
operations = st.lists(st.one_of(inserts, inserts, samples, samples, clears), min_size=4, max_size=25)


@SETTINGS
@given(operations, st.integers(1, 5), st.integers(5, 23))
def test_uniform_draws_match_a_list_and_do_not_depend_on_the_shards(program, actors, capacity):
    buffers = [opened(capacity, actors, shards) for shards in (1, 2, 4)]
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(actors)]  # (sequence, action), oldest first
    written = [0] * actors
    count = 0
    for name, a, b, c in program:
        if name == "insert":
            lane, values = a % actors, torch.arange(count, count + b * c).reshape(b, c)
            count += b * c
            for value in values.flatten().tolist():
                lanes[lane] = [*lanes[lane], (written[lane], value)][-(capacity // actors) :]
                written[lane] += 1
            for buffer in buffers:
                assert buffer.insert(lane, steps(values)) == b * c
        elif name == "clear":
            lanes = [[] for _ in range(actors)]
            for buffer in buffers:
                buffer.clear()
        order = [(lane, *row) for lane, rows in enumerate(lanes) for row in rows]
        assert [len(buffer) for buffer in buffers] == [len(order)] * 3
        if name == "sample" and order:
            torch.manual_seed(b)
            expected = [order[i] for i in torch.randint(len(order), (a,)).tolist()]
            for buffer in buffers:
                torch.manual_seed(b)
                batch = buffer.sample(a)
                assert batch["index"].tolist() == [[lane, sequence] for lane, sequence, _ in expected]
                whole = steps(torch.tensor([value for _, _, value in expected])).exclude(("next", "reset_observation"))
                assert same(batch.exclude("index"), whole)


def test_a_lane_evicts_only_its_own_rows():
    buffer = opened(8, actors=2)
    buffer.insert(1, steps(torch.arange(100, 102)))
    for start in range(0, 20, 4):
        buffer.insert(0, steps(torch.arange(start, start + 4)))
    assert len(buffer) == 6
    assert set(actions(buffer.sample(300))) == {16, 17, 18, 19, 100, 101}


def test_more_rows_at_once_than_a_lane_keeps():
    buffer = opened(4)
    buffer.insert(0, steps(torch.arange(3)))
    assert buffer.insert(0, steps(torch.arange(10, 21))) == 11
    batch = buffer.sample(200)
    assert {(row[1], action) for row, action in zip(batch["index"].tolist(), actions(batch), strict=True)} == {
        (10, 17),
        (11, 18),
        (12, 19),
        (13, 20),
    }


def test_time_major_blocks_equal_step_by_step_inserts():
    whole, single, packed = opened(64), opened(64), opened(64)
    values = torch.arange(12).reshape(4, 3)
    rows = Rows()
    whole.insert(0, steps(values))
    for step in values:
        single.insert(0, steps(step))
        rows.append(steps(step))
    packed.insert(0, rows)
    batches = []
    for buffer in (whole, single, packed):
        torch.manual_seed(3)
        batches.append(buffer.sample(50))
    assert same(batches[0], batches[1]) and same(batches[0], batches[2])


def test_an_insert_is_a_snapshot_and_a_batch_is_fresh_memory():
    buffer = opened(10)
    td = steps(torch.arange(5))
    buffer.insert(0, td)
    td["observation"].fill_(-7)
    td["next", "reward"].fill_(-7)
    batch = buffer.sample(100)
    assert batch["observation"].min() >= 0
    batch["observation"].fill_(-9)
    batch["index"].fill_(-9)
    assert buffer.sample(100)["observation"].min() >= 0


def test_every_column_is_contiguous_because_torch_adds_strided_memory_in_another_order():
    for shards in (1, 2):
        buffer = opened(20, 2, shards)
        for lane in (0, 1):
            buffer.insert(lane, steps(torch.arange(10)))
        assert all(value.is_contiguous() for value in buffer.sample(16).values(True, True))


def test_entries_of_every_kind_come_back_as_they_were():
    n = 6
    td = TensorDict(
        {
            "pixels": torch.randint(256, (n, 4, 4, 3), dtype=torch.uint8),
            "half": torch.randn(n, 2).half(),
            "brain": torch.randn(n, 2).bfloat16(),
            "eighth": torch.randn(n, 2).to(torch.float8_e4m3fn),
            "double": torch.randn(n).double(),
            "complex": torch.randn(n, 2, dtype=torch.complex64),
            "flag": torch.rand(n) > 0.5,
            "deep": {"er": {"value": torch.randn(n, 1, requires_grad=True)}},
            "strided": torch.randn(3, n).t(),
        },
        batch_size=[n],
    )
    buffer = opened(n)
    buffer.insert(0, td)
    batch = buffer.sample(40)
    rows = batch["index"][:, 1]
    for key, value in td.items(True, True):
        assert batch[key].dtype == value.dtype
        assert torch.equal(batch[key].to(torch.complex128), value.detach().to(torch.complex128)[rows])


def test_size_is_predicted():
    td = steps(torch.arange(4))
    for options in ({}, {"prioritized": True}):
        buffer = opened(1000, actors=3, **options)
        predicted = buffer.nbytes(td)
        for lane in range(3):
            buffer.insert(lane, td)
        (shard,) = buffer._shards
        actual = sum(column.array.nbytes for column in shard.table.columns)
        if shard._tree is not None:
            actual += sum(level.nbytes for level in shard._tree._levels)
        assert actual == pytest.approx(predicted, rel=0.1)


def test_size_is_predicted_from_an_environment():
    environments = pytest.importorskip("fdg.runtime.environments")
    env = environments.make_env("CartPole-v1", 2, seed=1)
    td = env.reset()
    td["action"] = torch.zeros(2, dtype=torch.int64)
    assert ReplayBuffer(500).nbytes(env.spec) == ReplayBuffer(500).nbytes(env.step(td))


# --- prioritized ------------------------------------------------------------------------------------------------------

updates = st.tuples(st.just("update"), st.integers(0, 2**31), st.integers(1, 12), st.just(0))
weighted = st.lists(st.one_of(inserts, inserts, samples, samples, updates, updates, clears), min_size=6, max_size=30)


@SETTINGS
@given(weighted, st.integers(1, 5), st.integers(5, 40))
def test_prioritized_draws_match_a_dictionary_and_do_not_depend_on_the_shards(program, actors, capacity):
    buffers = [opened(capacity, actors, shards, prioritized=True) for shards in (1, 2, 4)]
    size = capacity // actors
    masses: dict[tuple[int, int], float] = {}  # of the rows that are there
    seen: list[tuple[int, int]] = []  # every identity there ever was
    written, highest, dropped = [0] * actors, None, 0
    for name, a, b, c in program:
        if name == "insert":
            lane = a % actors
            fresh = ((1.0 if highest is None else highest) + 1e-6) ** 0.6
            for _ in range(b * c):
                masses[lane, written[lane]] = fresh
                masses.pop((lane, written[lane] - size), None)
                seen.append((lane, written[lane]))
                written[lane] += 1
            for buffer in buffers:
                buffer.insert(lane, steps(torch.arange(b * c).reshape(b, c) + 1000 * lane))
        elif name == "clear":
            masses, highest = {}, None
            for buffer in buffers:
                buffer.clear()
        elif name == "update" and seen:
            random = np.random.default_rng(a)
            rows = [seen[i] for i in random.integers(0, len(seen), b)]
            priorities = random.exponential(size=b) * (random.random(b) > 0.2)
            for row, priority in zip(rows, priorities.tolist(), strict=True):
                if row in masses:
                    masses[row] = (priority + 1e-6) ** 0.6
                else:
                    dropped += 1
            highest = max(priorities.max(), highest or 0.0)
            for buffer in buffers:
                buffer.update_priority(torch.tensor(rows), torch.from_numpy(priorities))
        elif name == "sample" and masses:
            batches = []
            for buffer in buffers:
                torch.manual_seed(b)
                batches.append(buffer.sample(a))
            assert same(batches[0], batches[1]) and same(batches[0], batches[2])
            drawn = [tuple(row) for row in batches[0]["index"].tolist()]
            torch.manual_seed(b)
            order = sorted(masses, key=lambda row: (row[0], row[1] % size))
            ends = np.cumsum([masses[row] for row in order])
            offsets = torch.rand(a, dtype=torch.float64).numpy() * ends[-1]
            for row, offset in zip(drawn, offsets, strict=True):
                place = order.index(row)
                assert ends[place] - masses[row] - 1e-9 <= offset <= ends[place] + 1e-9
            total, count = ends[-1], len(masses)
            weights = np.array([(count * masses[row] / total) ** -0.4 for row in drawn])
            for key in ("_weight", "priority_weight"):
                np.testing.assert_allclose(batches[0][key].numpy(), weights / weights.max(), rtol=1e-5)
        assert {len(buffer) for buffer in buffers} == {len(masses)}
        assert {buffer.dropped for buffer in buffers} == {dropped}


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_come_in_proportion_to_their_masses(shards):
    buffer = opened(40, actors=2, shards=shards, prioritized=True, alpha=0.7)
    index = torch.cat([buffer.extend(steps(torch.arange(20))), torch.tensor([[1, row] for row in range(20)])])
    buffer.insert(1, steps(torch.arange(20, 40)))
    priorities = torch.linspace(0.1, 4.0, 40)
    buffer.update_priority(index, priorities)
    torch.manual_seed(0)
    batch = buffer.sample(100_000)
    seen = np.bincount(batch["action"], minlength=40)
    expected = priorities.double().numpy() ** 0.7
    expected *= 100_000 / expected.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 72  # chi-square, 39 degrees of freedom: 0.1 % are above
    corrected = opened(40, actors=2, prioritized=True, alpha=0.7, beta=1.0)
    for lane in (0, 1):
        corrected.insert(lane, steps(torch.arange(20) + 20 * lane))
    corrected.update_priority(index, priorities)
    batch = corrected.sample(100_000)
    weight = batch["priority_weight"].double()
    mean = (weight * batch["action"]).sum() / weight.sum()
    assert mean == pytest.approx(19.5, abs=0.2)  # with beta = 1 the weights undo the priorities


def test_new_rows_get_the_highest_priority_so_far():
    buffer = opened(100, actors=2, shards=2, prioritized=True, alpha=1.0, beta=1.0)
    buffer.insert(0, steps(torch.arange(10)))
    buffer.update_priority(torch.tensor([[0, row] for row in range(10)]), torch.tensor([8.0] + [1.0] * 9))
    buffer.insert(1, steps(torch.tensor([77])))
    for index, shard in enumerate(buffer._shards):
        buffer._router.weigh(index, shard.masses())
    np.testing.assert_allclose(buffer._router.lane_masses, [17, 8], rtol=1e-5)


def test_of_two_priorities_for_one_row_the_last_counts():
    buffer = opened(4, prioritized=True, alpha=1.0)
    buffer.insert(0, steps(torch.arange(2)))
    buffer.update_priority(torch.tensor([[0, 0], [0, 1], [0, 0]]), torch.tensor([5.0, 1.0, 3.0]))
    assert buffer._shards[0].masses()[0] == pytest.approx(4.0, rel=1e-5)


def test_updates_for_evicted_rows_are_dropped_and_counted():
    buffer = opened(4, prioritized=True)
    buffer.insert(0, steps(torch.arange(4)))
    batch = buffer.sample(1000)
    batch["td_error"] = torch.full((1000, 1), 9.0)
    buffer.insert(0, steps(torch.arange(4, 6)))
    buffer.update_tensordict_priority(batch)
    assert buffer.dropped == int((batch["index"][:, 1] < 2).sum()) > 0
    buffer.clear()
    buffer.insert(0, steps(torch.arange(4)))
    before = buffer.dropped
    buffer.update_priority(batch)  # rows from before the clear, in slots that hold rows from after it
    assert buffer.dropped == before + 1000
    assert buffer._shards[0].masses()[0] == pytest.approx(4.0, rel=1e-3)


def test_parts_may_live_apart():
    """Router and shards that only ever exchange pickled messages give the same bits as one object."""

    def crossing(value):
        return pickle.loads(pickle.dumps(value))

    spec = ReplayBuffer(60, prioritized=True)
    whole = opened(60, actors=3, prioritized=True)
    router = crossing(spec).router(3, 2)
    shards = [crossing(spec).shard(k, 3, 2) for k in range(2)]
    for turn in range(12):
        for lane in range(3):
            rows = Rows()
            for t in range(4):
                rows.append(steps(torch.arange(2) + 100 * turn + 10 * t + 1000 * lane))
            whole.insert(lane, rows)
            router.wrote(lane, shards[lane % 2].insert(lane, crossing(rows)))
        if turn % 3 == 1:
            shards = crossing(shards)
        torch.manual_seed(turn)
        expected = whole.sample(32)
        torch.manual_seed(turn)
        for k, shard in enumerate(shards):
            router.weigh(k, crossing(shard.masses()))
        parts, order = router.split(router.draw(32))
        batch = router.join([crossing(shards[k].answer(crossing(part))) for k, part in parts], order)
        assert same(batch, expected)
        for td in (batch, expected):
            td["td_error"] = td["next", "reward"].abs().sqrt()
        whole.update_priority(expected)
        for shard, update in zip(shards, router.updates(batch), strict=True):
            shard.update(crossing(update))
    assert len(router) == len(whole) == 60


def test_a_shard_gathers_by_identity():
    shard = ReplayBuffer(30).shard(1, actors=3, shards=2)
    shard.insert(1, steps(torch.arange(14)))
    assert actions(shard.gather([(1, 13), (1, 4), (1, 13)])) == [13, 4, 13]
    with pytest.raises(FdgError, match=r"lane 1, sequence 3\) is not in the buffer: that lane holds the sequences 4"):
        shard.gather([(1, 4), (1, 3)])
    with pytest.raises(FdgError, match="lane 2 is not one of this replay shard: 1"):
        shard.gather(torch.tensor([[2, 0]]))


# --- rows on their way ------------------------------------------------------------------------------------------------


def test_rows_are_snapshots_without_what_is_no_data():
    rows = Rows()
    td = steps(torch.arange(3))
    for t in range(40):
        td["action"].copy_(torch.arange(3) + 3 * t)
        rows.append(td)
    td["action"].zero_()
    packed = rows.pack()
    assert len(rows) == 120 and packed.batch_size == torch.Size([40, 3])
    assert packed["action"].flatten().tolist() == list(range(120))
    assert "reset_observation" not in packed["next"].keys()  # noqa: SIM118
    packed["action"].zero_()
    rows.append(td)
    assert rows.pack()["action"].flatten().tolist() == [*range(120), 0, 0, 0]


@pytest.mark.parametrize("how", ["compiled", "numpy"])
def test_rows_however_they_lie_in_memory(how, monkeypatch):
    if how == "numpy":
        monkeypatch.setattr("fdg.runtime.rows.native", None)
    rows, shard, expected = Rows(), Shard(range(1), 100), []
    wave = torch.randn(1, 4, dtype=torch.complex64)

    def insert(**entries):
        td = TensorDict({"x": torch.randn(1, 4), "z": wave, "n": torch.ones(1), **entries}, batch_size=[1])
        expected.append({key: value.clone().resolve_conj().resolve_neg() for key, value in td.detach().items()})
        rows.append(td)
        shard.insert(0, td)

    for _ in range(2):
        insert()
    insert(x=torch.randn(4, 2).t()[:1])
    insert(x=torch.randn(1, 4, requires_grad=True))
    insert(x=torch.randn(1).expand(1, 4))
    insert(z=wave.conj())
    insert(n=torch.tensor([1 + 2j]).conj().imag)
    insert(x=torch.randn(8)[3:7].reshape(1, 4))
    stored, packed = shard.gather([(0, row) for row in range(len(expected))]), rows.pack()
    for at, wanted in enumerate(expected):
        for key, value in wanted.items():
            assert torch.equal(packed[key][at], value), (at, key)
            assert torch.equal(stored[key][at : at + 1], value), (at, key)


def test_rows_of_different_lengths_are_flat_and_none_are_nothing():
    rows = Rows()
    for n in (3, 1, 2):
        rows.append(steps(torch.arange(n)))
    assert rows.pack().batch_size == torch.Size([6])
    assert actions(rows.pack()) == [0, 1, 2, 0, 0, 1]
    buffer = opened(10)
    assert buffer.insert(0, Rows()) == 0 and len(Rows().pack()) == 0
    assert buffer.insert(0, rows) == 6


def test_rows_pickle_small():
    rows = Rows()
    for _ in range(17):
        rows.append(steps(torch.arange(16)))
    data = pickle.dumps(rows)
    again = pickle.loads(data)
    again.append(steps(torch.arange(16)))
    assert len(data) < 272 * 47 + 2000 and len(again) == 288
    assert same(again.pack()[:17], rows.pack())


# --- TorchRL ----------------------------------------------------------------------------------------------------------


def test_torchrl_losses_take_the_batch_and_its_weights():
    objectives = pytest.importorskip("torchrl.objectives")
    from torchrl.modules import QValueActor

    network = QValueActor(torch.nn.Linear(3, 4), in_keys=["observation"], action_space="categorical")
    loss = objectives.DQNLoss(network, action_space="categorical")
    loss.make_value_estimator(gamma=0.9)
    buffer = opened(20, prioritized=True)
    buffer.insert(0, steps(torch.arange(10) % 4))
    buffer.update_priority(torch.tensor([[0, 0]]), 30.0)
    batch = buffer.sample(32)
    weighted = loss(batch)["loss"]
    assert weighted != loss(batch.exclude("priority_weight"))["loss"]
    before = buffer._shards[0].masses()
    buffer.update_priority(batch)
    assert buffer._shards[0].masses() != before and buffer.dropped == 0


def test_replay_needs_no_torchrl():
    code = "import sys, fdg.runtime.replay; sys.exit('torchrl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# --- errors -----------------------------------------------------------------------------------------------------------


def changed(**entries: torch.Tensor) -> TensorDict:
    return steps(torch.arange(2)).update(entries)


def filled(**options) -> ReplayBuffer:
    buffer = opened(10, **options)
    buffer.insert(0, steps(torch.arange(2)))
    return buffer


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: opened(10).sample(4), r"cannot sample 4 rows: the replay buffer is empty; .*replay_buffer_size"),
        (lambda: filled().sample(0), "at least one row, got n = 0"),
        (lambda: filled().sample(2.5), "at least one row, got n = 2.5"),
        (lambda: opened(3, actors=4), r"3 rows cannot be split over 4 actors; write ReplayBuffer\(4\)"),
        (lambda: opened(3, shards=0), "at least 1 shard, got actors=1, shards=0"),
        (lambda: ReplayBuffer(0), "rows >= 1, got 0"),
        (lambda: ReplayBuffer(9, alpha=-1.0), "alpha=-1.0"),
        (lambda: filled().insert(1, steps(torch.arange(2))), "lane 1 does not exist: .* 1 actors"),
        (lambda: filled().update_priority(torch.tensor([[0, 0]]), 1.0), r"ReplayBuffer\(capacity, prioritized=True\)"),
        (lambda: filled().insert(0, changed(more=torch.zeros(2))), "'more' was not in the first insert"),
        (lambda: filled().insert(0, steps(torch.arange(2)).exclude("action")), "'action' was in the first insert and"),
        (
            lambda: filled().insert(0, changed(observation=torch.zeros(2, 5))),
            r"'observation' of a row was \[3\] torch.float32 in the first insert and is \[5\] torch.float32 here",
        ),
        (lambda: filled().insert(0, changed(action=torch.zeros(2))), r"was \[\] torch.int64 .* is \[\] torch.float32"),
        (lambda: opened(10).insert(0, changed(index=torch.zeros(2))), "'index' is one that sample"),
        (lambda: opened(10).insert(0, TensorDict({"name": "x"}, batch_size=[2])), "'name' is a NonTensor"),
        (lambda: opened(10).insert(0, TensorDict({}, batch_size=[2])), "empty TensorDict"),
    ],
)
def test_errors_say_what_to_write(action, message):
    with pytest.raises(FdgError, match=message):
        action()


@pytest.mark.parametrize(
    ("rows", "priority", "message"),
    [
        (steps(torch.arange(2)), 1.0, "without 'index'"),
        (TensorDict({"index": torch.tensor([[0, 0]])}, batch_size=[1]), None, "no 'td_error'"),
        (torch.tensor([0, 1]), 1.0, r"shape \[n, 2\] .* got \[2\]"),
        (torch.tensor([[0, 0], [0, 1]]), torch.ones(3), "3 priorities for 2 rows"),
        (torch.tensor([[0, 0], [0, 1]]), torch.tensor([1.0, -2.0]), r"finite number >= 0, got -2.0; write .*abs"),
        (torch.tensor([[0, 0]]), float("nan"), "got nan"),
        (torch.tensor([[3, 0]]), 1.0, "lane 3, but the lanes are 0 to 0"),
        (torch.tensor([[0, 2]]), 1.0, r"sequence 2\) is not in the buffer"),
    ],
)
def test_bad_priorities_are_refused(rows, priority, message):
    with pytest.raises(FdgError, match=message):
        filled(prioritized=True).update_priority(rows, priority)


def test_a_refused_insert_changes_nothing():
    buffer = filled()
    with pytest.raises(FdgError):
        buffer.insert(0, changed(observation=torch.zeros(2, 5)))
    assert len(buffer) == 2
    buffer.insert(0, steps(torch.tensor([5])))
    assert set(actions(buffer.sample(100))) == {0, 1, 5}


@pytest.mark.parametrize("kind", ["lazy", "deep"])
def test_rows_of_uncommon_tensordicts(kind):
    """Whatever holds the entries, every insert sees all of them."""
    buffer = opened(10)
    for number in range(3):
        each = [TensorDict({"x": torch.full((), 10.0 * number + row)}, []) for row in range(2)]
        inner = LazyStackedTensorDict(*each) if kind == "lazy" else TensorDict({"more": torch.stack(each)}, [2])
        buffer.insert(0, TensorDict({"action": torch.arange(2), "next": inner}, [2]))
    batch = buffer.sample(100)
    seen = batch["next", "x"] if kind == "lazy" else batch["next", "more", "x"]
    assert set(seen.tolist()) == {0.0, 1.0, 10.0, 11.0, 20.0, 21.0}
    if kind == "deep":
        with pytest.raises(FdgError, match="was not in the first insert"):
            more = TensorDict({"x": torch.zeros(2), "y": torch.zeros(2)}, [2])
            buffer.insert(0, TensorDict({"action": torch.arange(2), "next": TensorDict({"more": more}, [2])}, [2]))


# --- the sum tree -----------------------------------------------------------------------------------------------------


@SETTINGS
@given(st.integers(1, 4), st.integers(1, 3000), st.integers(0, 2**31), st.booleans())
def test_sum_tree_matches_plain_sums(trees, leaves, seed, whole):
    random = np.random.default_rng(seed)
    tree, plain = SumTree(trees, leaves), np.zeros((trees, leaves))
    for _ in range(4):
        n = trees * leaves if whole else random.integers(1, 50)
        rows, columns = random.integers(0, trees, n), random.integers(0, leaves, n)
        if whole:  # integers add without rounding, so that finds must agree exactly
            values = random.integers(0, 5, n).astype(float)
        else:
            values = random.exponential(size=n) * (random.random(n) > 0.3)
        tree.set(rows, columns, values)
        for row, column, value in zip(rows, columns, values, strict=True):
            plain[row, column] = value
        np.testing.assert_array_equal(tree.get(rows, columns), plain[rows, columns])
        np.testing.assert_allclose(tree.mass(), plain.sum(1), rtol=1e-12)
        filled = np.flatnonzero(plain.sum(1) > 0)
        if not len(filled):
            continue
        wanted = random.choice(filled, 64)
        offsets = random.random(64) * plain.sum(1)[wanted]
        offsets[:2] = 0.0, plain.sum(1)[wanted[1]]  # both ends
        found = tree.find(wanted, offsets)
        ends = np.cumsum(plain, axis=1)
        assert (plain[wanted, found] > 0).all()
        before = ends[wanted, found] - plain[wanted, found]
        slack = 0 if whole else 1e-9
        assert (before <= offsets + slack).all() and (offsets <= ends[wanted, found] + slack).all()
        if whole:
            assert (offsets < ends[wanted, found])[2:].all()


def test_a_leaf_of_zero_is_not_found_even_when_an_offset_rounds_up_to_its_start():
    ulp = 2.0**-52
    tree = SumTree(1, 32)
    leaves, values = np.array([0, 4, 6]), np.array([1.5 * ulp, 0.5, 0.5 + 2 * ulp])
    tree.set(leaves * 0, leaves, values)
    last = np.nextafter(tree.mass(), 0.0)
    assert last - values[0] == values[1] + values[2]  # the premise: within the last two, the offset is their whole sum
    assert tree.find(np.array([0]), last) == 6


def test_a_sum_tree_depends_on_its_leaves_alone():
    """Not on the order or the number of updates, nor on the trees beside it: no error builds up."""
    random = np.random.default_rng(1)
    values = random.exponential(size=5000)
    once, often, beside = SumTree(1, 5000), SumTree(1, 5000), SumTree(3, 5000)
    everything = np.arange(5000)
    once.set(everything * 0, everything, values)
    beside.set(everything * 0 + 1, everything, values)
    for _ in range(50):
        some = random.integers(0, 5000, 100)
        often.set(some * 0, some, random.exponential(size=100) * 1e9)
    for some in np.array_split(random.permutation(5000), 70):
        often.set(some * 0, some, values[some])
    assert once.mass()[0] == often.mass()[0] == beside.mass()[1]
    offsets = random.random(500) * once.mass()[0]
    zeros = np.zeros(500, np.int64)
    np.testing.assert_array_equal(once.find(zeros, offsets), often.find(zeros, offsets))
    np.testing.assert_array_equal(once.find(zeros, offsets), beside.find(zeros + 1, offsets))


def test_steps_that_wait_are_rows_like_others() -> None:
    """Short steps are copied at once and written later: around the ring, between longer ones, whatever happens to them."""
    buffer, by_hand = ReplayBuffer(50), []
    for i in range(200):
        rows = TensorDict({"x": torch.full((3, 2), i), "y": torch.rand(3, 1), "z": torch.rand(3, 1)}, batch_size=[3])
        if i % 70 == 69:
            rows = torch.cat([rows, rows])
        if i % 30 == 29:
            rows["y"].requires_grad_()
        by_hand += rows.detach().clone().unbind(0)
        buffer.insert(0, rows)
        with torch.no_grad():
            rows["x"].numpy()[:] = -1
            rows["y"].zero_()
        if i % 40 == 39:
            last = range(len(by_hand) - min(len(by_hand), 50), len(by_hand))
            seen = buffer._shards[0].gather([(0, sequence) for sequence in last]).exclude("index")
            assert (seen == torch.stack(by_hand[-50:])).all()
    rows = TensorDict({"x": torch.ones(3, 2).long(), "y": torch.rand(3, 1), "z": torch.rand(3, 1)}, batch_size=[3])
    rows["z"].squeeze_(1)
    with pytest.raises(FdgError, match="'z' of a row was"):
        buffer.insert(0, rows)
