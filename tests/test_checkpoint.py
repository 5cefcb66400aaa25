"""Checkpoints: what comes back is what was saved, in place and to the bit, or the run is told why not."""

from __future__ import annotations

import enum
import errno
import os
import random
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch import nn

from fdg import Actor, Agent, Config, Learner, Trainer
from fdg.algorithms.dqn import DQN, DQNConfig
from fdg.algorithms.reinforce import REINFORCE, REINFORCEConfig
from fdg.errors import CheckpointError, UsageError
from fdg.runtime import checkpoint
from fdg.runtime.checkpoint import decode, encode, latest, load, restore, save, state_of, write
from fdg.runtime.environments import make_env, step_mdp
from fdg.runtime.replay import ReplayBuffer
from fdg.runtime.rows import Rows
from fdg.runtime.streams import Streams
from fdg.runtime.values import UNBOUND, Varying
from fdg.runtime.weights import parameters_of, sha256, shared_places

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def through_file(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    save(folder / "x.fdg", values)
    return load(folder / "x.fdg")


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and a.requires_grad == b.requires_grad and torch.equal(bits(a), bits(b))
    if isinstance(a, TensorDict):
        return a.batch_size == b.batch_size and a.names == b.names and same(dict(a.items()), dict(b.items()))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and all(map(same, a, b))
    if isinstance(a, dict):
        factories = [getattr(value, "default_factory", None) for value in (a, b)]
        return factories[0] is factories[1] and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return a.hex() == b.hex()
    return a == b


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# --- values -----------------------------------------------------------------------------------------------------------

atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)
hashables = st.one_of(st.booleans(), st.integers(), st.text(), st.tuples(st.integers(), st.text()))
tensors = st.builds(
    lambda dtype, shape: torch.arange(float(np.prod(shape))).reshape(shape).to(dtype),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8]),
    st.lists(st.integers(0, 3), max_size=3),
)
arrays = st.builds(
    lambda dtype, shape, order: np.asarray(np.arange(int(np.prod(shape))).reshape(shape), dtype=dtype, order=order),
    st.sampled_from(["f4", "f8", "i8", "u1", "?", "U3", "M8[s]", "c16"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from("CF"),
)
scalars = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), np.str_("x")])
fixed = st.sampled_from(
    [
        torch.Size([2, 3]),
        torch.float16,
        np.dtype("f4"),
        torch.device("cpu"),
        range(2, 9, 3),
        slice(1, None, 2),
        UNBOUND,
        bytearray(b"a"),
    ]
)
values = st.recursive(
    st.one_of(atoms, tensors, arrays, scalars, fixed),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(Varying),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=5)),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4).map(OrderedDict),
        st.dictionaries(hashables, inner, max_size=4).map(lambda items: defaultdict(list, items)),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.dictionaries(st.text(), st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@SETTINGS
@given(st.dictionaries(st.text(), values, max_size=4))
def test_values_come_back_as_they_were(tmp_path_factory, program):
    assert same(decode(encode(program)), program)
    assert same(through_file(program, tmp_path_factory.getbasetemp()), program)


def test_tensordicts_come_back(tmp_path):
    td = TensorDict(
        {"a": torch.randn(3, 2, 4), "b": {"c": torch.arange(6).reshape(3, 2)}, "n": NonTensorData("word", [3, 2])},
        batch_size=[3, 2],
        names=["time", "env"],
    )
    ragged = LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"x": torch.zeros(2)}, [2]))
    back = through_file({"td": td, "ragged": ragged, "empty": TensorDict({}, [0])}, tmp_path)
    assert back["td"].names == ["time", "env"] and back["td"].batch_size == torch.Size([3, 2])
    assert same(back["td"]["a"], td["a"]) and same(back["td"]["b"], td["b"]) and back["td"]["n"] == "word"
    assert isinstance(back["ragged"], LazyStackedTensorDict) and torch.equal(back["ragged"]["x"], ragged["x"])
    assert back["empty"].batch_size == torch.Size([0])
    back["td"]["d"] = torch.zeros(3, 2)  # of full use


def test_rows_come_back(tmp_path):
    rows = Rows()
    for step in range(3):
        rows.append(TensorDict({"x": torch.full((2, 4), step), "y": torch.ones(2, dtype=torch.bfloat16)}, [2]))
    back = through_file({"rows": rows, "none": Rows()}, tmp_path)
    assert same(back["rows"].pack(), rows.pack()) and len(back["none"]) == 0
    back["rows"].append(TensorDict({"x": torch.full((2, 4), 9), "y": torch.ones(2, dtype=torch.bfloat16)}, [2]))
    assert back["rows"].pack()["x"][-1, 0, 0] == 9


def test_identity_and_shared_memory_are_kept(tmp_path):
    steps: list[Any] = [1]
    steps.append(steps)
    loop = ([],)
    loop[0].append(loop)
    base = torch.zeros(4, 5)
    program = {
        "a": steps,
        "b": [steps],
        "loop": loop,
        "row": base[1],
        "base": base,
        "column": base.t()[2],
        "bytes": base.view(torch.uint8),
    }
    for back in (decode(encode(program)), through_file(program, tmp_path)):
        assert back["a"] is back["b"][0] and back["a"][1] is back["a"]
        assert back["loop"][0][0] is back["loop"]
        back["row"].fill_(1)
        assert torch.equal(back["base"][1], torch.ones(5)) and back["column"].tolist() == [0, 1, 0, 0]
        assert back["bytes"].any()
        assert base.sum() == 0


def test_arrays_that_share_memory_still_do(tmp_path):
    base = np.zeros((4, 5), np.float32)
    program = {
        "row": base[1],
        "back": base[::-1, ::2],
        "base": base,
        "tensor": torch.from_numpy(base)[2],
        "wide": np.broadcast_to(base[0], (3, 5)),
    }
    for back in (decode(encode(program)), through_file(program, tmp_path)):
        assert all(back[name].tolist() == program[name].tolist() for name in program)
        back["row"][:] = 1
        back["tensor"].fill_(2)
        assert back["base"].sum(1).tolist() == [0, 5, 10, 0]
        assert back["back"].sum(1).tolist() == [0, 6, 3, 0]
        assert not base.any()


def test_snapshots_do_not_change_later():
    tensor, array = torch.zeros(3), np.zeros(3)
    data = encode({"t": tensor, "a": array})
    tensor += 1
    array += 1
    first, second = decode(data), decode(data)
    first["t"] += 5
    first["a"] += 5
    assert second["t"].sum() == 0 and second["a"].sum() == 0


def test_a_view_of_much_memory_is_saved_small(tmp_path):
    save(tmp_path / "x", {"row": torch.zeros(1000, 1000)[3]})
    assert os.path.getsize(tmp_path / "x") < 20_000


def test_deep_values_need_no_deep_stack(tmp_path):
    chain: list[Any] = []
    for _ in range(3_000):
        chain = [chain]
    back, depth = through_file({"chain": chain}, tmp_path)["chain"], 0
    while back:
        back, depth = back[0], depth + 1
    assert depth == 3_000


def test_generators_go_on(tmp_path):
    program = {
        "numpy": np.random.default_rng(3),
        "old": np.random.RandomState(4),
        "python": random.Random(5),
        "torch": torch.Generator().manual_seed(6),
    }

    def draw(all_: dict[str, Any]) -> list[Any]:
        numbers = [all_["numpy"].random(), all_["old"].normal(), all_["python"].gauss(0, 1)]
        return [*numbers, torch.rand(2, generator=all_["torch"]).tolist()]

    draw(program)
    back = through_file(program, tmp_path)
    assert draw(back) == draw(program) and draw(back) == draw(program)


class Tracker:
    def __init__(self) -> None:
        self.best = 0.0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Tracker(), ["`self.tracker`", "a Tracker", "__init__", "state_dict"]),
        ([1, {"x": Tracker()}], ["`self.tracker[1]['x']`", "Tracker"]),
        (open, ["`self.tracker`", "builtin"]),
        (nn.Linear(1, 1), ["a Linear"]),
        ((i for i in range(3)), ["a generator"]),
        (np.array([object()]), ["object"]),
        (torch.eye(2).to_sparse(), ["sparse", "to_dense()"]),
        (defaultdict(lambda: 3), ["defaultdict", "setdefault"]),
    ],
)
def test_what_cannot_be_saved_is_named(value, words):
    with pytest.raises(CheckpointError) as error:
        encode({"self.tracker": value})
    for word in words:
        assert word in str(error.value)


# --- components -------------------------------------------------------------------------------------------------------


def batch(seed: int) -> TensorDict:
    draw = torch.Generator().manual_seed(seed)
    done = torch.zeros(8, 1, dtype=torch.bool)
    following = {
        "observation": torch.randn(8, 4, generator=draw),
        "reward": torch.ones(8, 1),
        "done": done,
        "terminated": done,
    }
    action = torch.randint(2, (8,), generator=draw)
    root = {
        "observation": torch.randn(8, 4, generator=draw),
        "action": action,
        "return": torch.randn(8, generator=draw),
    }
    return TensorDict({**root, "next": TensorDict(following, [8])}, [8])


def built(trainer: Trainer, seed: int) -> Agent:
    torch.manual_seed(seed)
    return trainer.agent(make_env("cartpole", 2, seed=1).spec)


@pytest.mark.parametrize("trainer", [DQN(DQNConfig(hidden_dim=16)), REINFORCE(REINFORCEConfig(hidden_dim=16))])
def test_a_learner_goes_on_as_if_nothing_had_happened(trainer, tmp_path):
    run, resumed = built(trainer, 0), built(trainer, 1)
    for step in range(3):
        run.learner.learn(batch(step))
    restore(resumed.learner, through_file({"learner": state_of(run.learner)}, tmp_path)["learner"])
    for step in range(3, 6):
        one, two = run.learner.learn(batch(step)), resumed.learner.learn(batch(step))
        assert torch.equal(*(loss["loss"] if isinstance(loss, dict) else loss for loss in (one, two)))
    assert sha256(parameters_of(run.learner)) == sha256(parameters_of(resumed.learner))
    # the actor shares the learner's memory, and still does
    weights = shared_places(resumed.actor, resumed.learner)
    assert len(weights) == len(shared_places(run.actor, run.learner)) > 0
    td = TensorDict({"observation": torch.randn(2, 4)}, [2])
    assert torch.equal(*(agent.actor.evaluate(td.clone())["action"] for agent in (run, resumed)))


def test_weights_can_be_left_to_the_learner():
    run, resumed = (built(DQN(DQNConfig(hidden_dim=16)), seed) for seed in (0, 1))
    weights = [list(agent.actor.network.parameters()) for agent in (run, resumed)]
    before = weights[1][0].clone()
    data = state_of(run.actor, shared=weights[0])
    assert not data["storages"]
    restore(resumed.actor, data, shared=weights[1])
    assert torch.equal(weights[1][0], before)
    with pytest.raises(CheckpointError, match="actor and learner do not share it"):
        restore(resumed.actor, data, shared=[tensor.clone() for tensor in weights[1]])


class Mode(enum.Enum):
    COLD = 0
    WARM = 1


class Point(NamedTuple):
    x: float
    history: list


@dataclass
class Statistics:
    count: int = 0
    mean: torch.Tensor | None = None


class Slotted:
    __slots__ = ("total", "unset")

    def __init__(self) -> None:
        self.total = 0


class Names(list):
    pass


class Own:
    """Saves itself."""

    def __init__(self) -> None:
        self.secret = (i for i in range(100))
        self.position = 0

    def next(self) -> int:
        self.position += 1
        return next(self.secret)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.__init__()
        for _ in range(state["position"]):
            self.next()


def counter() -> Any:
    count = 0

    def increase() -> int:
        nonlocal count
        count += 1
        return count

    return increase


class Everything(Learner):
    """State of every kind."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.config = Config()
        self.network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
        self.network.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.network[0].calls = 0
        self.tied = self.network[0].weight
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.1, amsgrad=True)
        self.group = self.optimizer.param_groups[0]
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 3),
                torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1)),
            ],
            [3],
        )
        self.table = TensorDict({"value": torch.zeros(3), "inner": {"count": torch.zeros(3, dtype=torch.long)}}, [3])
        self.base = torch.zeros(4, 2)
        self.row = self.base[1]
        self.array = np.zeros(3)
        self.recent: deque[float] = deque(maxlen=3)
        self.seen = self.also_seen = set()
        self.statistics, self.slotted, self.names, self.own = Statistics(), Slotted(), Names(), Own()
        self.mode, self.point, self.increase = Mode.COLD, Point(0.0, []), counter()
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.lock = threading.Lock()
        self.activation = torch.relu
        self.method = self.bump
        self.itself = self
        self.log: dict[Any, Any] = {}

    def bump(self) -> None:
        self.network[0].calls += 1

    def learn(self, x: torch.Tensor) -> list[float]:
        self.method()
        loss = self.network(self.activation(x)).square().mean()
        if self.network[0].calls % 2:
            self.optimizer.zero_grad()  # in every other call: gradients add up over two
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.group["weight_decay"] += 0.001
        self.table["value"] += loss.detach()
        self.table["inner", "count"] += 1
        self.row += 1
        self.network.scratch += loss.detach()
        self.array += self.rng.random(3)
        self.recent.append(loss.item())
        self.seen.add(len(self.recent))
        self.statistics.count += 1
        mean = self.statistics.mean
        self.statistics.mean = loss.detach() if mean is None else mean * 0.9 + loss.detach()
        self.slotted.total += 1
        self.names.append(str(len(self.names)))
        self.mode = Mode.WARM
        self.point = Point(self.point.x + 1, [*self.point.history, self.point.x])
        self.log[self.statistics.count, "loss"] = self.statistics.mean
        self.lazy = getattr(self, "lazy", 0) + 1  # not there at first
        self.tail = self.base[2:]
        self.tail += 2
        noise = torch.rand(1, generator=self.generator)
        assert self.seen is self.also_seen and self.itself is self
        assert self.group is self.optimizer.param_groups[0] and self.tied is self.network[0].weight
        return [
            loss.item(), float(noise), self.own.next(), self.increase(), float(self.table["value"].sum()), float(self.base.sum()),
            float(self.array.sum()), self.group["lr"], *self.recent, self.point.x, len(self.names), self.lazy,
        ]  # fmt: skip


def test_state_of_every_kind_is_restored_in_place(tmp_path):
    run, resumed = Everything(0), Everything(1)
    kept = {
        name: id(getattr(resumed, name))
        for name in ("network", "table", "base", "array", "recent", "seen", "log", "rng")
    }
    inputs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in range(9)]
    torch.manual_seed(9)
    for x in inputs[:4]:
        run.learn(x)
    restore(resumed, through_file({"x": state_of(run)}, tmp_path)["x"])
    assert {name: id(getattr(resumed, name)) for name in kept} == kept
    stream = torch.get_rng_state()
    expected = [run.learn(x) for x in inputs[4:]]
    torch.set_rng_state(stream)
    assert [resumed.learn(x) for x in inputs[4:]] == expected
    assert sha256(parameters_of(run)) == sha256(parameters_of(resumed))


def test_settings_of_the_resumed_run_stay(tmp_path):
    run, resumed = Everything(), Everything()
    resumed.config.iterations = 12345
    restore(resumed, state_of(run))
    assert resumed.config.iterations == 12345


class Slow(Everything):
    pass


def changed(**attributes: Any) -> Everything:
    learner = Everything()
    vars(learner).update(attributes)
    return learner


def without(name: str) -> Everything:
    learner = Everything()
    delattr(learner, name)
    return learner


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (Everything(), Slow(), ["`learner`", "an Everything", "a Slow"]),
        (Everything(), without("own"), ["`learner.own`", "an Own", "missing", "__init__"]),
        (without("log"), Everything(), ["`learner.log`", "missing", "a dict"]),
        (Everything(), changed(statistics=None), ["`learner.statistics`", "a Statistics", "None", "__init__"]),
        (Everything(), changed(activation=torch.tanh), ["`learner.activation`", "relu", "tanh"]),
        (
            Everything(),
            changed(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
            ["optimizer", "AdamW", "a SGD"],
        ),
        (Everything(), changed(mode=3), ["`learner.mode`", "Mode.COLD", "an int"]),
    ],
)
def test_a_component_built_otherwise_is_refused(saved, here, words):
    with pytest.raises(CheckpointError) as error:
        restore(here, state_of(saved))
    for word in words:
        assert word in str(error.value)


def test_a_network_of_another_shape_is_refused():
    saved, here = (built(DQN(DQNConfig(hidden_dim=width)), 0).learner for width in (16, 32))
    with pytest.raises(CheckpointError, match=r"`learner.\S+` was float32 \[16, 4\].* is float32 \[32, 4\]"):
        restore(here, state_of(saved))


@pytest.mark.parametrize("value", [(i for i in range(3)), open(os.devnull), iter([1])])  # noqa: SIM115
def test_a_state_that_cannot_be_read_is_named(value):
    with pytest.raises(
        CheckpointError, match=r"`learner\.statistics\.mean` is an? \w+ with a state that cannot be read"
    ):
        state_of(changed(statistics=Statistics(mean=value)))


def test_the_order_of_a_set_is_no_state():
    run, resumed = Everything(), Everything()
    run.seen |= set(range(1000))
    run.seen -= {*range(1000)} - {1, 8}  # iterates as 1, 8; made anew as 8, 1
    assert list(run.seen) != list({8, 1})
    restore(resumed, state_of(run))
    assert resumed.seen == {1, 8}


def test_an_array_that_became_a_view_is_refused_rather_than_torn_off():
    run, resumed = Everything(), Everything()
    run.head = run.array[:2]
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore(resumed, state_of(run))


def test_aliases_that_arose_or_ended_since_the_build():
    run, resumed = Everything(), Everything()
    run.array, run.also_seen, run.extra = np.ones(3), set(), run.base[0]
    run.row = torch.full((2,), 7.0)  # no longer a part of base
    restore(resumed, state_of(run))
    resumed.seen.add(1)
    resumed.extra += 1
    resumed.row += 1
    assert resumed.also_seen == set()
    assert torch.equal(resumed.base, torch.tensor([[1.0, 1], [0, 0], [0, 0], [0, 0]]))
    assert resumed.row.tolist() == [8, 8]


def test_actors_and_trainers():
    class Walker(Actor):
        def __init__(self) -> None:
            self.hidden = torch.zeros(2)

    class Program(Trainer):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.tracker = Tracker()

    class Program_driver(Program):
        """As the compiler makes one."""

    actor, other = Walker(), Walker()
    actor.hidden += 1
    restore(other, state_of(actor))
    assert other.hidden.tolist() == [1, 1]
    program, driver = Program(Config()), Program_driver(Config(iterations=7))
    program.tracker.best, program.msrl = 3.0, object()  # type: ignore[assignment]
    restore(driver, state_of(program))
    assert driver.tracker.best == 3.0 and driver.config.iterations == 7 and not hasattr(driver, "msrl")


# --- replay -----------------------------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 4), st.integers(1, 6)),
        st.tuples(st.just("insert"), st.integers(0, 4), st.integers(1, 6)),
        st.tuples(st.just("learn"), st.integers(1, 9), st.integers(0, 2**31)),
        st.tuples(st.just("stale"), st.integers(1, 9), st.integers(0, 2**31)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=14,
)


class Replayer:
    """Runs operations on a buffer; what it returns is all that can be seen of the buffer."""

    def __init__(self, buffer: ReplayBuffer, count: int = 0, old: TensorDict | None = None) -> None:
        self.buffer, self.count, self.old = buffer, count, old

    def run(self, program: list[Any], actors: int) -> list[Any]:
        seen: list[Any] = []
        for name, a, b in program:
            if name == "insert":
                values = torch.arange(self.count, self.count + b)
                self.count += b
                self.buffer.insert(a % actors, TensorDict({"x": values, "inner": {"y": values.bfloat16()}}, [b]))
            elif name == "clear":
                self.buffer.clear()
            elif len(self.buffer):
                torch.manual_seed(b)
                batch = self.buffer.sample(a)
                seen += [batch[key].tolist() for key in ("index", "x", ("inner", "y"))]
                if self.buffer.prioritized:
                    seen.append(batch["priority_weight"].tolist())
                    target = self.old if name == "stale" and self.old is not None else batch
                    self.buffer.update_priority(target, torch.rand(len(target)))
                    seen += [shard.masses().tolist() for shard in self.buffer._shards] if self.shards == 1 else []
                self.old = batch
            seen += [len(self.buffer), self.buffer.dropped]
        return seen

    @property
    def shards(self) -> int:
        return len(self.buffer._shards)


@SETTINGS
@given(operations, operations, st.integers(1, 4), st.integers(4, 17), st.booleans(), st.sampled_from([1, 2, 3, 5]))
def test_a_loaded_buffer_draws_and_evicts_alike(before, after, actors, capacity, prioritized, shards):
    def opened(shards: int) -> ReplayBuffer:
        return ReplayBuffer(capacity, prioritized=prioritized).open(actors, shards)

    run = Replayer(opened(shards))
    run.run(before, actors)
    state = decode(encode({"replay": run.buffer.state()}))["replay"]
    for other in (1, 2, 4):
        resumed = Replayer(opened(other), run.count, run.old)
        resumed.run([("insert", 0, 3), ("learn", 3, 0)], actors)  # what was there before is gone
        resumed.count, resumed.old = run.count, run.old
        resumed.buffer.load_state(state)
        oracle = Replayer(opened(other))
        oracle.run(before, actors)
        assert resumed.run(after, actors) == oracle.run(after, actors)
    oracle = Replayer(opened(shards))
    oracle.run(before, actors)
    assert run.run(after, actors) == oracle.run(after, actors)  # asking for the state changed nothing


def test_sums_of_a_loaded_buffer_are_the_same_bits():
    buffer = ReplayBuffer(1000, prioritized=True).open(1)
    other = ReplayBuffer(1000, prioritized=True).open(1)
    torch.manual_seed(0)
    for _ in range(40):
        buffer.insert(0, TensorDict({"x": torch.zeros(37)}, [37]))
        batch = buffer.sample(64)
        buffer.update_priority(batch, torch.rand(64))
    other.load_state(buffer.state())
    for one, two in zip(buffer._shards[0]._tree._levels, other._shards[0]._tree._levels, strict=True):
        assert one.tobytes() == two.tobytes()
    assert buffer._shards[0].masses().tobytes() == other._shards[0].masses().tobytes()


def test_state_without_copy_is_the_memory_itself():
    buffer = ReplayBuffer(6).open(1)
    buffer.insert(0, TensorDict({"x": torch.arange(4)}, [4]))
    copies, views = buffer.state(), buffer.state(copy=False)
    buffer._shards[0].table.columns[0].array[:] = -1
    values = [state["shards"][0]["lanes"][0]["rows"][0][0].tolist() for state in (copies, views)]
    assert values == [[0, 1, 2, 3], [-1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("here", "actors", "words"),
    [
        (ReplayBuffer(12), 2, ["rows per actor is 5 in the checkpoint and 6 here"]),
        (ReplayBuffer(10, prioritized=True), 2, ["prioritized is False", "True here"]),
        (ReplayBuffer(5), 1, ["2 lanes", "--actors 2"]),
    ],
)
def test_the_state_of_another_buffer_is_refused(here, actors, words):
    state = ReplayBuffer(10).open(2).state()
    with pytest.raises(CheckpointError) as error:
        here.open(actors).load_state(state)
    for word in words:
        assert word in str(error.value)


# --- all of it --------------------------------------------------------------------------------------------------------


class Loop:
    """DQN by hand: all the parts of a run that have a state."""

    def __init__(self, env: str, seed: int, shards: int) -> None:
        torch.manual_seed(seed)
        self.streams = Streams(7)
        self.env = make_env(env, 4, seed=3)
        self.agent = DQN(DQNConfig(hidden_dim=16)).agent(self.env.spec)
        self.buffer = ReplayBuffer(200, prioritized=True).open(1, shards)
        self.td = self.env.reset()

    def turn(self) -> float:
        for _ in range(5):
            with self.streams.of("actor"):
                self.td = self.agent.actor.act(self.td, 0.3)
            self.td = self.env.step(self.td)
            self.buffer.insert(0, self.td)
            self.td = step_mdp(self.td)
        with self.streams.of("buffer"):
            batch = self.buffer.sample(16)
        loss = self.agent.learner.learn(batch)
        self.buffer.update_priority(batch)
        return loss.item()

    def state(self) -> dict[str, Any]:
        parts = {"agent": state_of(self.agent), "values": encode({"td": self.td})}
        return {
            **parts,
            "env": self.env.state(),
            "replay": self.buffer.state(copy=False),
            "streams": self.streams.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        restore(self.agent, state["agent"])
        assert self.env.load_state(state["env"]) is None
        self.buffer.load_state(state["replay"])
        self.streams.load_state(state["streams"])
        self.td = decode(state["values"])["td"]


@pytest.mark.parametrize("env", ["cartpole", "acrobot"])
def test_a_whole_run_goes_on_to_the_bit(env, tmp_path):
    run, resumed = Loop(env, 0, 1), Loop(env, 1, 3)
    for _ in range(12):
        run.turn()
    write(tmp_path, 12, run.state())
    expected = [run.turn() for _ in range(12)]
    resumed.load_state(load(latest(tmp_path)))
    assert [resumed.turn() for _ in range(12)] == expected
    assert sha256(parameters_of(run.agent.learner)) == sha256(parameters_of(resumed.agent.learner))
    assert run.env.episodes == resumed.env.episodes


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_newest_two_are_kept(tmp_path):
    for number in (5, 10, 100, 20):
        write(tmp_path, number, {"number": number})
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["00000020.fdg", "00000100.fdg"]
    assert load(latest(tmp_path)) == {"number": 100}
    assert latest(tmp_path / "checkpoints" / left[0]).name == left[0]


def test_no_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no checkpoints.*--checkpoint-every"):
        latest(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        latest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path / "nowhere.fdg")
    assert issubclass(CheckpointError, UsageError)


@SETTINGS
@given(st.data())
def test_damage_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "damage"
    path = write(folder, 2, {"weights": torch.arange(50.0), "words": ["a", 1]})
    whole = path.read_bytes()
    if data.draw(st.booleans(), "cut"):
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        broken = bytearray(whole)
        broken[at] ^= 1 << bit
    path.write_bytes(broken)
    with pytest.raises(CheckpointError, match=r"damaged|no checkpoint|format"):
        load(path)
    path.write_bytes(whole)
    assert load(path)["words"] == ["a", 1]


def test_damage_names_the_checkpoint_before(tmp_path):
    before, path = write(tmp_path, 1, {}), write(tmp_path, 2, {"x": 1})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert f"--resume {before}" in str(error.value) and "bytes of" in str(error.value)


def test_foreign_and_newer_files_are_refused(tmp_path):
    path = tmp_path / "x.fdg"
    torch.save({"x": 1}, path)
    with pytest.raises(CheckpointError, match=r"no checkpoint of FDG: it begins with b'PK"):
        load(path)
    save(path, {"x": 1})
    data = bytearray(path.read_bytes())
    data[16:20] = struct.pack("<I", checkpoint.FORMAT + 1)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"format {checkpoint.FORMAT + 1}.*reads up to {checkpoint.FORMAT}"):
        load(path)


def test_no_code_of_the_file_is_run(tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    monkeypatch.setattr(checkpoint, "encode", lambda state, copy: {"root": Evil(), "objects": [], "storages": []})
    save(tmp_path / "x.fdg", {})
    with pytest.raises(CheckpointError, match="more than plain data"):
        load(tmp_path / "x.fdg")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("room", [0, 100, 5000, 50_000])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, room):
    path = write(tmp_path, 1, {"x": torch.ones(3)})
    whole, left = path.read_bytes(), [room]

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

    monkeypatch.setattr(checkpoint, "open", lambda *arguments: Full(open(*arguments)), raising=False)  # noqa: SIM115
    for again in (path, path.with_name("00000002.fdg")):
        with pytest.raises(CheckpointError, match=r"No space left on device.*--log-dir"):
            save(again, {"x": torch.ones(100_000)})
        left[0] = room
    monkeypatch.undo()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == whole and latest(tmp_path) == path


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = write(tmp_path, 1, {"x": 1})
    monkeypatch.setattr(os, "replace", lambda *paths: os._exit(9))
    child = os.fork()
    if not child:
        write(tmp_path, 2, {"x": 2})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    assert len(list(path.parent.iterdir())) == 2 and load(latest(tmp_path)) == {"x": 1}
    write(tmp_path, 3, {"x": 3})
    assert sorted(file.name for file in path.parent.iterdir()) == ["00000001.fdg", "00000003.fdg"]
