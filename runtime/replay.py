"""Replay: rows in lanes, drawn alike whether one object or many processes hold them.

    word        meaning
    lane        the rows of one logical actor, in the order inserted: a ring of capacity // actors slots
    row         one transition; its identity is (lane, sequence), its slot in the ring is sequence mod lane capacity
    shard       the owner of some lanes: lane l lives in shard l mod K
    router      knows how many rows (and, prioritized, how much mass) each lane has, and draws; holds no row
    mass        (priority + eps) ** alpha: what a row weighs in a prioritized draw
    draw        what to fetch: lanes, and in each a sequence (uniform) or an offset into the lane's mass (prioritized)

To sample: shards report their masses (prioritized only), then `Router.draw`, `Router.split`, `Shard.answer` at each
shard, `Router.join`. To update priorities: `Router.updates`, `Shard.update` at each shard. `ReplayBuffer` does just
that, with the router and all shards in one place.

What is drawn never depends on K. Uniform draws go over the rows in the order (lane, sequence), oldest to newest.
Prioritized ones go over (lane, slot), with a sum tree per lane and the lanes' masses added up in lane order. Whatever
is computed from rows of several lanes (powers, weights, the highest priority so far) is computed at the router. Draws
take their numbers from torch's default generator: the caller makes it the buffer's stream.

Each column of a batch is contiguous memory of its own. Views into packed rows would be as quick, but torch adds up
strided and contiguous tensors in different orders: a batch copied on its way would no longer give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from fdg.errors import CheckpointError, RunError, UsageError
from fdg.runtime.rows import INDEX, MASS, WEIGHTS, Key, Rows, Table, build, leaves
from fdg.runtime.sumtree import SumTree

PRIORITY = "td_error"
"""The key under which TorchRL's losses leave the priorities of a batch."""
STEPS = "steps_to_next_obs"
"""The key of how many steps lie between a row and its `next`; TorchRL's losses discount by it."""


# --- the parts that distribute ----------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """Rows to fetch: their lanes, and in each lane a sequence (int64) or an offset into the lane's mass (float64)."""

    lanes: np.ndarray
    where: np.ndarray


class Update(NamedTuple):
    """New masses of some rows, and what rows inserted from now on weigh."""

    lanes: np.ndarray
    sequences: np.ndarray
    masses: np.ndarray
    fresh: float


class Shard:
    """The owner of some lanes: stores their rows and, prioritized, their masses.

    `lanes` is `range(k, actors, K)` for shard k of K, `capacity` the rows that each lane keeps. `fresh` is the mass of
    rows inserted before any update. `n_step` and `gamma` as in `ReplayBuffer`. `table` makes the memory for so many rows:
    this process's, or another.
    """

    def __init__(
        self,
        lanes: range,
        capacity: int,
        *,
        prioritized: bool = False,
        fresh: float = 1.0,
        n_step: int = 1,
        gamma: float = 1.0,
        table: Callable[[int], Table] = Table,
    ) -> None:
        self.lanes, self.capacity, self.fresh = lanes, capacity, fresh
        self.n_step, self.gamma = n_step, gamma
        self.width = 0  # environments of an actor: so many rows on, the same environment's next step is found
        self.table = table(len(lanes) * capacity)
        self.written = np.zeros(len(lanes), np.int64)  # rows ever inserted: the next sequence
        self.cleared = np.zeros(len(lanes), np.int64)  # the first sequence after the last clear()
        self.dropped = 0
        self._tree = SumTree(len(lanes), capacity) if prioritized else None
        self._weighed = np.zeros(len(lanes), np.int64)  # rows from this sequence on are not in the tree yet

    def insert(self, lane: int, td: TensorDictBase | Rows) -> int:
        """Copy rows to the end of a lane, over its oldest when full; returns how many came."""
        home = self._home(lane)
        if isinstance(td, Rows):
            td = td.pack()
        count = td.batch_size.numel()
        if not count:
            return 0
        written, capacity = int(self.written[home]), self.capacity
        slot = written % capacity
        regular = slot + count <= capacity and (self.n_step == 1 or td.batch_size[-1] == self.width)
        if regular and self.table.put(home * capacity + slot, td):
            self.written[home] = written + count
            return count
        values = self.table.values(td)
        if self.n_step > 1:
            self._expect_step(td.batch_size[-1])
        skip = max(count - capacity, 0)  # more rows than the lane keeps: the first ones would be overwritten at once
        slot = (written + skip) % capacity
        turn = min(count, skip + capacity - slot)  # the row at which the ring begins anew
        self.table.write(home * capacity + slot, values, skip, turn)
        if turn < count:
            self.table.write(home * capacity, values, turn, count)
        self.written[home] = written + count
        return count

    def gather(self, rows: np.ndarray | Tensor | Sequence[tuple[int, int]]) -> TensorDict:
        """The rows of the given identities [n, 2], in that order, in fresh memory."""
        identities = np.asarray(rows, np.int64).reshape(-1, 2)
        return self.answer(Draw(identities[:, 0], identities[:, 1]))

    def answer(self, draw: Draw, *, sure: bool = False) -> TensorDict:
        """The rows of this shard's part of a draw, each with its identity and, prioritized, its mass.

        `sure` if the router has just heard of all that was inserted here: then no row can be missing."""
        home = draw.lanes if sure and self.lanes.step == 1 else self._homes(draw.lanes)
        columns: list[tuple[Key, Tensor]] = []
        if draw.where.dtype == np.float64:
            sequences, masses = self._find(home, draw.where)
            columns.append(((MASS,), torch.from_numpy(masses)))
        else:
            sequences = draw.where
            if not sure:
                self._expect(home, draw.lanes, sequences)
        index = np.empty((len(home), 2), np.int64)
        index[:, 0], index[:, 1] = draw.lanes, sequences
        columns.append(((INDEX,), torch.from_numpy(index)))
        if self.n_step > 1:
            columns += self._ahead(home, sequences)
        else:
            columns += self.table.take(home * self.capacity + sequences % self.capacity)
        return build(columns, (len(home),))

    def _ahead(self, home: np.ndarray, sequences: np.ndarray) -> list[tuple[Key, Tensor]]:
        """Rows whose `next` is n steps on, with the discounted sum of the rewards up to there.

        Fewer steps where the episode ends before (by whatever flag), or where no later step is there yet. That a row
        goes on from another is seen by its observation: after an `env_reset` in the middle of an episode it does not.
        """
        count, written = len(home), self.written[home]
        later = [sequences + ahead * self.width for ahead in range(self.n_step)]
        there = [sequences, *(np.where(which < written, which, sequences) for which in later[1:])]
        rows = dict(self.table.take(np.concatenate([home * self.capacity + which % self.capacity for which in there])))
        done, rewards = (rows["next", key].numpy().reshape(self.n_step, count) for key in ("done", "reward"))
        starts, ends = (
            rows[key].numpy().reshape(self.n_step, count, -1) for key in (("observation",), ("next", "observation"))
        )
        goes_on, steps, reward = np.ones(count, np.bool_), np.ones(count, np.int64), rewards[0]
        for ahead in range(1, self.n_step):
            goes_on &= ~done[ahead - 1] & (later[ahead] < written) & (starts[ahead] == ends[ahead - 1]).all(1)
            reward = np.where(goes_on, reward + rewards.dtype.type(self.gamma**ahead) * rewards[ahead], reward)
            steps += goes_on
        first = torch.arange(count)
        last = first + count * torch.from_numpy(steps - 1)
        found = {key: value.index_select(0, last if key[0] == "next" else first) for key, value in rows.items()}
        found["next", "reward"] = torch.from_numpy(reward[:, None])
        found[STEPS,] = torch.from_numpy(steps[:, None])
        return list(found.items())

    def masses(self) -> np.ndarray:
        """The sum of the masses of each lane's rows, in the order of `lanes`."""
        return self._weigh().mass()

    def find(self, lanes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The identities [n, 2] of the rows at offsets into their lanes' masses."""
        return np.stack([lanes, self._find(self._homes(lanes), offsets)[0]], axis=1)

    def update(self, update: Update) -> int:
        """Give rows their new masses; rows evicted meanwhile are dropped, and their number is returned."""
        tree, home = self._weigh(), self._homes(update.lanes)
        if (update.sequences >= self.written[home]).any():
            self._expect(home, update.lanes, update.sequences)
        alive = update.sequences >= self._first()[home]
        dropped = len(alive) - int(np.count_nonzero(alive))
        rows = slice(None) if not dropped else alive
        tree.set(home[rows], update.sequences[rows] % self.capacity, update.masses[rows])
        self.fresh = update.fresh
        self.dropped += dropped
        return dropped

    def clear(self, fresh: float = 1.0) -> None:
        """Forget all rows. Sequences go on, so an identity from before never names a row from after."""
        self.cleared[:] = self._weighed[:] = self.written
        self.fresh = fresh
        if self._tree is not None:
            self._tree.clear()

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """Its rows lane by lane, oldest first, for a checkpoint. Without `copy` they are this shard's own memory, to be
        written out before the next insert."""
        tree = None if self._tree is None else self._weigh()
        lanes = {}
        for home, lane in enumerate(self.lanes):
            first, written = int(self._first()[home]), int(self.written[home])
            parts = []
            for start, stop in _turns(first, written, self.capacity):
                at = home * self.capacity + start % self.capacity
                arrays = self.table.part(at, stop - start)
                parts.append([array.copy() for array in arrays] if copy else arrays)
            slots = np.arange(first, written) % self.capacity
            masses = None if tree is None else tree.get(np.full(len(slots), home), slots)
            lanes[lane] = {"written": written, "cleared": int(self.cleared[home]), "rows": parts, "masses": masses}
        columns = [column[:-1] for column in self.table.columns]
        own = {"capacity": self.capacity, "prioritized": tree is not None, "fresh": self.fresh, "dropped": self.dropped}
        own["width"] = self.width
        return {**own, "columns": columns, "lanes": lanes}

    def load_state(self, state: dict[str, Any]) -> None:
        """Hold exactly the rows of a state, which has this shard's lanes: see `for_shard`.

        Raises:
            CheckpointError: it is of a buffer of another kind.
        """
        _agree(state, {"capacity": self.capacity, "prioritized": self._tree is not None})
        if set(self.lanes) - set(state["lanes"]):
            raise CheckpointError(
                f"the checkpoint has the replay lanes {_lanes(state['lanes'])}, not {_lanes(self.lanes)}"
            )
        self.fresh, self.dropped, self.width = state["fresh"], state["dropped"], state["width"]
        self.table.restart((key, shape, dtype) for key, shape, dtype, _ in state["columns"])
        for home, lane in enumerate(self.lanes):
            saved = state["lanes"][lane]
            self.written[home], self.cleared[home] = saved["written"], saved["cleared"]
            turns = _turns(int(self._first()[home]), saved["written"], self.capacity)
            for (start, stop), values in zip(turns, saved["rows"], strict=True):
                self.table.write(home * self.capacity + start % self.capacity, values, 0, stop - start)
        self._weighed[:] = self.written
        if self._tree is not None:
            self._tree.clear()
            for home, lane in enumerate(self.lanes):
                slots = np.arange(self._first()[home], self.written[home]) % self.capacity
                self._tree.set(np.full(len(slots), home), slots, state["lanes"][lane]["masses"])

    def _first(self) -> np.ndarray:
        """The sequence of the oldest row of each lane."""
        return np.maximum(self.cleared, self.written - self.capacity)

    def _home(self, lane: int) -> int:
        if lane not in self.lanes:
            raise UsageError(f"lane {lane} is not one of this replay shard: {_lanes(self.lanes)}")
        return (lane - self.lanes.start) // self.lanes.step

    def _homes(self, lanes: np.ndarray) -> np.ndarray:
        """Where the lanes stand among this shard's."""
        home = lanes if self.lanes.step == 1 else (lanes - self.lanes.start) // self.lanes.step
        # as unsigned numbers negative ones are huge, so that one comparison finds both ends
        wrong = home.view(np.uint64) >= len(self.lanes)
        if self.lanes.step > 1:
            wrong |= home * self.lanes.step + self.lanes.start != lanes
        if wrong.any():
            raise UsageError(f"lane {lanes[wrong][0]} is not one of this replay shard: {_lanes(self.lanes)}")
        return home

    def _expect(self, home: np.ndarray, lanes: np.ndarray, sequences: np.ndarray) -> None:
        """Refuse identities of rows that are not here: silently other rows would be the worst answer."""
        first = self._first()
        wrong = (sequences - first[home]).view(np.uint64) >= (self.written - first).view(np.uint64)[home]
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            low, high = int(first[home[at]]), int(self.written[home[at]])
            held = f"holds the sequences {low} to {high - 1}" if high > low else "is empty"
            raise RunError(
                f"replay row (lane {lanes[at]}, sequence {sequences[at]}) is not in the buffer: that lane {held}"
            )

    def _expect_step(self, width: int) -> None:
        """n-step returns: refuse rows in which the next step of an environment is not found by counting."""
        keys = {column.key for column in self.table.columns}
        for key in (("observation",), ("next", "observation"), ("next", "reward"), ("next", "done")):
            if key not in keys:
                raise UsageError(f"n_step = {self.n_step} needs {key!r} in every row; insert what env_step returned")
        self.width = self.width or width
        if width != self.width:
            raise UsageError(
                f"n_step = {self.n_step} needs the rows of all environments in every insert, {self.width} a step as in the "
                f"first one; got {width}"
            )

    def _find(self, home: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sequences and masses of the rows at offsets."""
        tree = self._weigh()
        slots = tree.find(home, offsets)
        first = self._first()[home]
        return first + (slots - first) % self.capacity, tree.get(home, slots)

    def _weigh(self) -> SumTree:
        """The tree, with all rows inserted since the last call in it: one batch is cheaper than one call an insert."""
        if self._tree is None:
            raise UsageError(_UNPRIORITIZED)
        if (self._weighed != self.written).any():
            start = np.maximum(self._weighed, self._first())
            counts = self.written - start
            home = np.repeat(np.arange(len(start)), counts)
            within = np.arange(len(home)) - np.repeat(np.cumsum(counts) - counts, counts)
            self._tree.set(home, (start[home] + within) % self.capacity, self.fresh)
            self._weighed[:] = self.written
        return self._tree


class Router:
    """What decides a draw: the number of rows and the mass of every lane, and never a row itself.

    It must hear of all inserts (`wrote`) and, prioritized, of the shards' masses before each draw (`weigh`).
    """

    def __init__(
        self,
        actors: int,
        shards: int,
        capacity: int,
        *,
        prioritized: bool = False,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
    ) -> None:
        self.actors, self.shards, self.capacity = actors, shards, capacity
        self.prioritized, self.alpha, self.beta, self.eps = prioritized, alpha, beta, eps
        self.written = np.zeros(actors, np.int64)
        self.cleared = np.zeros(actors, np.int64)
        self.lane_masses = np.zeros(actors)
        self.highest: float | None = None  # of all priorities ever given; rows not yet learned from get it
        self._order: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._counts().sum())

    @property
    def fresh(self) -> float:
        """The mass of a new row: that of the highest priority so far, as in TorchRL (of 1 before any)."""
        return float(self._mass(np.array([1.0 if self.highest is None else self.highest]))[0])

    def wrote(self, lane: int, count: int) -> None:
        """Hear that a lane got rows."""
        self.written[lane] += count
        self._order = None

    def weigh(self, shard: int, masses: np.ndarray) -> None:
        """Hear the masses of a shard's lanes."""
        self.lane_masses[shard :: self.shards] = masses

    def draw(self, n: int) -> Draw:
        """Draw n rows, with replacement, from the stream: uniformly, or each in proportion to its mass.

        Prioritized draws are n independent values over the whole mass, not one from each n-th part of it: so each row
        of a batch, the first as the last, has the distribution for which the importance weights are right.
        """
        if not isinstance(n, int | np.integer) or n <= 0:
            raise UsageError(f"a sample has at least one row, got n = {n!r}; write replay_buffer_sample(64), say")
        if self._order is None:
            counts = self._counts()
            ends = np.cumsum(counts)
            self._order = ends, self.written - ends  # a row's place in the order, and what makes it a sequence
        ends, shift = self._order
        total = int(ends[-1])
        if not total:
            raise UsageError(
                f"cannot sample {n} rows: the replay buffer is empty; insert first, "
                "or write: if self.msrl.replay_buffer_size() >= batch_size: …"
            )
        if self.prioritized:
            return self._draw_by_mass(n)
        where = torch.randint(total, (int(n),)).numpy()
        lanes = ends.searchsorted(where, side="right")
        return Draw(lanes, where + shift.take(lanes))

    def split(self, draw: Draw) -> tuple[list[tuple[int, Draw]], np.ndarray | None]:
        """The parts of a draw, each with the shard to ask (none without a row), and the order for `join`."""
        if self.shards == 1:
            return [(0, draw)], None
        owner = draw.lanes % self.shards
        order = np.argsort(owner, kind="stable")
        parts = []
        for shard, rows in enumerate(np.split(order, np.cumsum(np.bincount(owner, minlength=self.shards))[:-1])):
            if len(rows):
                parts.append((shard, Draw(draw.lanes[rows], draw.where[rows])))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return parts, back

    def join(self, parts: Sequence[TensorDictBase], order: np.ndarray | None) -> TensorDict:
        """The shards' answers, in the order of the parts, as one batch in the order drawn.

        Prioritized, with the importance weights (N · mass / sum) ** -beta, divided by the highest of the batch. N and
        sum cancel out; what remains is (lowest mass of the batch / mass) ** beta.
        """
        if order is None:
            (batch,) = parts
        else:
            columns = [dict(leaves(part)) for part in parts]
            back = torch.from_numpy(order)
            batch = build(
                ((key, torch.cat([part[key] for part in columns]).index_select(0, back)) for key in columns[0]),
                (len(order),),
            )
        if self.prioritized:
            masses = batch.pop(MASS).numpy()
            weight = torch.from_numpy(((masses.min() / masses) ** self.beta).astype(np.float32))
            for name in WEIGHTS:
                batch.set(name, weight)
        return batch

    def updates(self, rows: TensorDictBase | Tensor | np.ndarray, priority: Any = None) -> list[Update]:
        """New priorities as one update for each shard (each must hear of it, to know what new rows weigh).

        `rows` are a sampled batch or identities [n, 2]; `priority` a number or n of them, by default batch["td_error"].
        """
        if not self.prioritized:
            raise UsageError(_UNPRIORITIZED)
        lanes, sequences, priorities = self._priorities(rows, priority)
        if len(priorities):
            self.highest = max(float(priorities.max()), 0.0 if self.highest is None else self.highest)
        masses, fresh, owner = self._mass(priorities), self.fresh, lanes % self.shards
        parts = (slice(None) if self.shards == 1 else owner == shard for shard in range(self.shards))
        return [Update(lanes[part], sequences[part], masses[part], fresh) for part in parts]

    def clear(self) -> None:
        """Forget all rows and priorities."""
        self.cleared[:] = self.written
        self.highest = self._order = None

    def state(self) -> dict[str, Any]:
        """What it knows, for a checkpoint: the same for every number of shards."""
        known = {"written": self.written.copy(), "cleared": self.cleared.copy(), "masses": self.lane_masses.copy()}
        return {"capacity": self.capacity, "prioritized": self.prioritized, "highest": self.highest, **known}

    def load_state(self, state: dict[str, Any]) -> None:
        """Know what a state says.

        Raises:
            CheckpointError: it is of a buffer of another kind.
        """
        _agree(state, {"capacity": self.capacity, "prioritized": self.prioritized})
        if len(state["written"]) != self.actors:
            raise CheckpointError(
                f"the checkpoint's replay buffer has {len(state['written'])} lanes, and there are {self.actors} actors here: "
                f"resume with --actors {len(state['written'])}"
            )
        self.written[:], self.cleared[:], self.lane_masses[:] = state["written"], state["cleared"], state["masses"]
        self.highest, self._order = state["highest"], None

    def _counts(self) -> np.ndarray:
        return np.minimum(self.written - self.cleared, self.capacity)

    def _mass(self, priorities: np.ndarray) -> np.ndarray:
        return (priorities + self.eps) ** self.alpha

    def _draw_by_mass(self, n: int) -> Draw:
        bounds = np.zeros(self.actors + 1)
        np.cumsum(self.lane_masses, out=bounds[1:])
        offsets = torch.rand(int(n), dtype=torch.float64).numpy() * bounds[-1]
        offsets = np.minimum(offsets, np.nextafter(bounds[-1], 0.0))  # rounding may reach the end, where no lane is
        lanes = bounds[1:].searchsorted(offsets, side="right")
        return Draw(lanes, offsets - bounds.take(lanes))

    def _priorities(self, rows: Any, priority: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if isinstance(rows, TensorDictBase):
            if priority is None:
                priority = rows.get(PRIORITY, None)
            rows = rows.get(INDEX, None)
            if rows is None:
                raise UsageError(f"a batch without {INDEX!r} names no rows; pass what replay_buffer_sample returned")
        if priority is None:
            raise UsageError(
                f"no priorities: the batch has no {PRIORITY!r} (TorchRL's losses put it there); "
                "write replay_buffer_update_priority(batch, priority)"
            )
        identities = _array(rows, np.int64)
        if identities.ndim != 2 or identities.shape[1] != 2:
            raise UsageError(f"row identities have shape [n, 2] (lane, sequence), got {list(identities.shape)}")
        lanes, sequences = np.ascontiguousarray(identities.T)
        values = _array(priority, np.float64).reshape(-1)
        if values.size == 1:
            values = np.repeat(values, len(lanes))
        if len(values) != len(lanes):
            raise UsageError(f"{len(values)} priorities for {len(lanes)} rows; pass one for each, or a single number")
        if len(values):
            if not (values.min() >= 0 and values.max() < np.inf):
                wrong = next(value for value in values.tolist() if not 0 <= value < np.inf)
                raise UsageError(f"a priority is a finite number >= 0, got {wrong}; write td_error.abs(), say")
            if lanes.view(np.uint64).max() >= self.actors:
                wrong = next(lane for lane in lanes.tolist() if not 0 <= lane < self.actors)
                raise UsageError(f"row identity with lane {wrong}, but the lanes are 0 to {self.actors - 1}")
        return lanes, sequences, values


_UNPRIORITIZED = (
    "this replay buffer draws uniformly and keeps no priorities; write ReplayBuffer(capacity, prioritized=True)"
)


def _array(value: Any, dtype: type) -> np.ndarray:
    return np.asarray(value.numpy(force=True) if isinstance(value, Tensor) else value, dtype)


def for_shard(states: Sequence[dict[str, Any]], index: int, shards: int) -> dict[str, Any]:
    """The state of shard `index` of so many, from the states of all shards of a buffer, however many those are."""
    lanes = {lane: rows for state in states for lane, rows in state["lanes"].items()}
    return {
        **states[0],
        "columns": next((state["columns"] for state in states if state["columns"]), []),
        "dropped": sum(state["dropped"] for state in states) if index == 0 else 0,
        "lanes": {lane: rows for lane, rows in lanes.items() if lane % shards == index},
    }


def _turns(first: int, last: int, capacity: int) -> list[tuple[int, int]]:
    """The sequences first … last, cut where the ring begins anew."""
    turn = -(-first // capacity) * capacity
    return [(start, stop) for start, stop in ((first, min(turn, last)), (max(first, turn), last)) if start < stop]


def _agree(state: dict[str, Any], here: dict[str, Any]) -> None:
    for name, value in here.items():
        if state[name] != value:
            what = "rows per actor" if name == "capacity" else name
            raise CheckpointError(
                f"the replay buffer's {what} is {state[name]} in the checkpoint and {value} here: resume with the settings "
                "of the run that wrote it"
            )


def _lanes(lanes: Iterable[int]) -> str:
    return ", ".join(map(str, lanes)) or "it has none"


# --- what a user builds -----------------------------------------------------------------------------------------------


class ReplayBuffer:
    """A replay buffer: what a trainer's `replay_buffer` returns, and what holds the rows when they are in one place.

    `capacity` is in rows, split evenly over the logical actors. With `prioritized=True` rows are drawn in proportion to
    (priority + eps) ** alpha; beta is the exponent of the importance weights, which a batch has as "priority_weight",
    where TorchRL's losses look for them (and as "_weight", TorchRL's older name).

    With `n_step` > 1 a drawn row's `next` is so many steps on, its reward the sum of those steps' rewards, discounted by
    `gamma`; "steps_to_next_obs" says how many steps they are: fewer where the episode ends before, or where no later step
    is there yet. Discount what follows by gamma ** steps_to_next_obs, as TorchRL's losses do. Every insert must hold the
    rows of all environments, as `env_step` returns them.

    >>> buffer = ReplayBuffer(1000)
    >>> buffer.insert(0, TensorDict({"observation": torch.zeros(16, 4)}, batch_size=[16]))
    16
    >>> batch = buffer.sample(64)
    >>> batch["observation"].shape, batch["index"].shape, len(buffer)
    (torch.Size([64, 4]), torch.Size([64, 2]), 16)
    """

    def __init__(
        self,
        capacity: int,
        *,
        prioritized: bool = False,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        n_step: int = 1,
        gamma: float | None = None,
    ) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise UsageError(f"a replay buffer's capacity is a number of rows >= 1, got {capacity!r}")
        if not (alpha >= 0 and beta >= 0 and eps > 0):
            raise UsageError(f"prioritized replay needs alpha >= 0, beta >= 0, eps > 0; got {alpha=}, {beta=}, {eps=}")
        if not isinstance(n_step, int) or n_step < 1 or (n_step > 1 and gamma is None):
            raise UsageError(
                f"n_step is a number >= 1 and needs a discount; got {n_step=}, {gamma=}: write gamma=0.99, say"
            )
        self.capacity = capacity
        self.prioritized, self.alpha, self.beta, self.eps = prioritized, alpha, beta, eps
        self.n_step, self.gamma = n_step, gamma
        self.dropped = 0
        """Priority updates for rows that were evicted before they came."""
        self.table: Callable[[int], Table] = Table
        """Makes the memory of a shard, for so many rows; the runtime may want them elsewhere."""
        self._router: Router | None = None
        self._shards: list[Shard] = []

    # the parts, for engines that place them apart

    def router(self, actors: int, shards: int = 1) -> Router:
        """The router of this buffer for so many actors and shards."""
        if actors < 1 or shards < 1:
            raise UsageError(f"a replay buffer serves at least 1 actor from at least 1 shard, got {actors=}, {shards=}")
        if self.capacity < actors:
            raise UsageError(
                f"a replay buffer of {self.capacity} rows cannot be split over {actors} actors; "
                f"write ReplayBuffer({actors}) or more"
            )
        return Router(
            actors,
            shards,
            self.capacity // actors,
            prioritized=self.prioritized,
            alpha=self.alpha,
            beta=self.beta,
            eps=self.eps,
        )

    def shard(self, index: int, actors: int, shards: int = 1) -> Shard:
        """Shard `index` of so many, with the lanes index, index + shards, …"""
        router = self.router(actors, shards)
        lanes = range(index, actors, shards)
        return Shard(
            lanes,
            router.capacity,
            prioritized=self.prioritized,
            fresh=router.fresh,
            n_step=self.n_step,
            gamma=1.0 if self.gamma is None else self.gamma,
            table=self.table,
        )

    # everything in one place

    def open(self, actors: int, shards: int = 1) -> ReplayBuffer:
        """Make lanes for so many actors (the runtime calls this). Which rows are drawn does not depend on `shards`."""
        self._router = self.router(actors, shards)
        self._shards = [self.shard(index, actors, shards) for index in range(shards)]
        self.dropped = 0
        return self

    def insert(self, lane: int, td: TensorDictBase | Rows) -> int:
        """Copy rows to a lane, batch [E], [T, E] (time-major) or [N]; returns how many. Later changes do not matter."""
        router = self._opened()
        if not 0 <= lane < router.actors:
            raise UsageError(f"lane {lane} does not exist: this buffer was opened for {router.actors} actors")
        count = self._shards[lane % router.shards].insert(lane, td)
        router.wrote(lane, count)
        return count

    def sample(self, n: int) -> TensorDict:
        """Draw n rows, with replacement, into fresh memory: a batch [n] of the rows' keys and "index", who they are."""
        router = self._opened()
        if router.prioritized:
            for index, shard in enumerate(self._shards):
                router.weigh(index, shard.masses())
        parts, order = router.split(router.draw(n))
        return router.join([self._shards[index].answer(part, sure=True) for index, part in parts], order)

    def update_priority(self, batch_or_index: TensorDictBase | Tensor, priority: Any = None) -> None:
        """Give rows new priorities: those of a sampled batch (by default its "td_error"), or of identities [n, 2].

        Of two entries for one row the last counts. Rows evicted meanwhile are dropped and counted in `dropped`.
        """
        updates = self._opened().updates(batch_or_index, priority)
        self.dropped += sum(shard.update(part) for shard, part in zip(self._shards, updates, strict=True))

    def clear(self) -> None:
        """Forget all rows."""
        router = self._opened()
        router.clear()
        for shard in self._shards:
            shard.clear(router.fresh)

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything it holds, for a checkpoint; of use to a buffer with any number of shards. See `Shard.state`."""
        router = self._opened()
        shards = [shard.state(copy=copy) for shard in self._shards]
        return {"router": router.state(), "shards": shards, "dropped": self.dropped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Hold exactly what the buffer did that a state is of: the same draws, the same evictions follow.

        Raises:
            CheckpointError: it is of a buffer of another capacity, for other actors, or drawn from otherwise.
        """
        router = self._opened()
        router.load_state(state["router"])
        for index, shard in enumerate(self._shards):
            shard.load_state(for_shard(state["shards"], index, router.shards))
        self.dropped = state["dropped"]

    def __len__(self) -> int:
        return 0 if self._router is None else len(self._router)

    def nbytes(self, example: Any, actors: int | None = None) -> int:
        """Bytes that the full buffer takes, predicted from example rows (a TensorDict) or from an EnvSpec."""
        actors = actors or (1 if self._router is None else self._router.actors)
        lane = self.capacity // actors
        total = actors * lane * _row_nbytes(example)
        return total + SumTree.nbytes(actors, lane) if self.prioritized else total

    # as TorchRL calls it

    def extend(self, td: TensorDictBase) -> Tensor:
        """Insert into lane 0; returns the new rows' identities [n, 2]."""
        count = self.insert(0, td)
        last = int(self._opened().written[0])
        sequences = torch.arange(last - count, last)
        return torch.stack([torch.zeros_like(sequences), sequences], dim=1)

    def update_tensordict_priority(self, batch: TensorDictBase) -> None:
        """Give the rows of a sampled batch the priorities in its "td_error"."""
        self.update_priority(batch)

    def _opened(self) -> Router:
        if self._router is None:
            self.open(1)
        assert self._router is not None
        return self._router


def _row_nbytes(example: Any) -> int:
    """Bytes of one row like those of a TensorDict, or of a transition in an environment."""
    if isinstance(example, TensorDictBase):
        return sum(value.nbytes for _, value in leaves(example)) // max(example.batch_size.numel(), 1)
    action = 8 if example.discrete else 4 * example.action_dim  # int64 or float32
    return 2 * 4 * example.obs_dim + action + 4 + 6  # both observations, action, reward, twice three flags
