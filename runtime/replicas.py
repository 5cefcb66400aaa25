"""A learner in several copies, each with some rows of every batch: together they do what one learner does with all rows.

    rows        what `learn` is given is split along the environments (a dimension of that name) or along dimension 0
    gradients   what each backward() adds to the gradients is summed over the replicas, weighted by their rows, when the
                backward pass ends: before the learner's own clipping and its optimizer's step
    statistics  self.mean, self.std and self.sum of the learner are over all rows
    results     numbers that `learn` returns are averaged by rows, rows that it returns or writes are put together

The parameters of all replicas stay equal to the bit, since their gradients are. That is checked. And in the first
updates replica 0 also learns from the whole batch, with a copy of the learner: gradients that differ are an error.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from fdg.errors import RunError
from fdg.runtime.group import Group, OutOfStep, PeerFailed
from fdg.runtime.values import copied
from fdg.runtime.weights import copy_component, parameters_of, take_apart
from fdg.statistics import shared

REHEARSALS = 3
"""Updates that replica 0 also makes with the whole batch."""
OFTEN, SELDOM = 10, 100
"""The replicas' parameters are compared after each of the first updates, then after every so many."""
TOLERANCE = 1e-3
"""Relative difference of gradients at which rows cannot be what they are computed from, one by one."""


# rows -----------------------------------------------------------------------------------------------------------------


def row_dimension(value: Any) -> int | None:
    """The dimension of a value's rows; None for what has no rows."""
    if isinstance(value, TensorDictBase):
        if not value.batch_dims:
            return None
        names = list(value.names)
        return names.index("env") if "env" in names else 0
    return 0 if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim else None


def share(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Where a replica's rows begin and end.

    >>> [share(8, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    base, more = divmod(rows, size)
    start = rank * base + min(rank, more)
    return start, start + base + (rank < more)


class Split:
    """The arguments of one `learn`, and this replica's rows of them."""

    def __init__(self, arguments: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.rows = self._count(arguments)
        """Rows of the whole batch; None when no argument has any."""
        start, end = share(self.rows, rank, size) if self.rows else (0, 0)
        if self.rows:
            self.weight = (end - start) / self.rows
        else:
            self.weight = float(rank == 0)
        if self.rows and start == end:  # nothing left for this replica: it goes along with a row that does not count
            start, end = self.rows - 1, self.rows
        self.start, self.end = start, end
        self.parts: dict[int, tuple[Any, Any, int]] = {}
        """Parts by identity: the part, the whole, the dimension of its rows."""
        self.arguments = self._split(arguments) if self.rows else arguments
        self._before = {key: _state(part) for key, (part, _, _) in self.parts.items()}

    @property
    def mine(self) -> int:
        return self.end - self.start

    def _count(self, arguments: Any) -> int | None:
        seen = [item for item in _leaves(arguments) if row_dimension(item) is not None]
        tds = [item for item in seen if isinstance(item, TensorDictBase)]
        sizes = list(dict.fromkeys(item.shape[row_dimension(item)] for item in tds or seen[:1]))
        if len(sizes) > 1:
            raise RunError(
                f"`learn` was given TensorDicts of {' and '.join(map(str, sizes))} rows: with several learners each takes "
                "some rows of all, so they must have the same number. Put them into one TensorDict, or join them in `train`"
            )
        return sizes[0] if sizes else None

    def _split(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._split(item) for item in value)
        if type(value) is dict:
            return {key: self._split(item) for key, item in value.items()}
        dimension = row_dimension(value)
        if dimension is None or value.shape[dimension] != self.rows:
            return value
        for part, whole, _ in self.parts.values():
            if whole is value:
                return part
        part = value[(slice(None),) * dimension + (slice(self.start, self.end),)]
        self.parts[id(part)] = (part, value, dimension)
        return part

    def written(self) -> list[dict[Any, Any]]:
        """What `learn` wrote into its rows: by part, and in it by key."""
        found = []
        for key, (part, _, _) in self.parts.items():
            before, after = self._before[key], _state(part)
            new = {name: _own(_leaf(part, name)) for name in after if after[name] != before.get(name)}
            found.append({**new, **dict.fromkeys(before.keys() - after.keys())})
        return found

    def write(self, everyones: Sequence[list[dict[Any, Any]]], counted: Sequence[int]) -> None:
        """Write what all replicas wrote into the whole."""
        for index, (_, whole, dimension) in enumerate(self.parts.values()):
            for name in everyones[0][index]:
                values: list[Any] = [everyones[rank][index].get(name) for rank in counted]
                if values[0] is None:
                    del whole[name]
                    continue
                joined = torch.cat(values, dimension)
                if isinstance(whole, TensorDictBase):
                    whole.set(name, joined)
                else:
                    with torch.no_grad():
                        whole.copy_(joined)


def _leaves(value: Any) -> list[Any]:
    if type(value) in (list, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if type(value) is dict:
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]


def _state(part: Any) -> dict[Any, Any]:
    """What shows that a part was written to: its tensors and their versions."""
    if isinstance(part, TensorDictBase):
        return {key: (id(leaf), leaf._version) for key, leaf in part.items(True, True) if hasattr(leaf, "_version")}
    return {None: (id(part), part._version)} if isinstance(part, torch.Tensor) else {}


def _leaf(part: Any, name: Any) -> torch.Tensor:
    return part if name is None else part.get(name)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


# gradients ------------------------------------------------------------------------------------------------------------


class Gradients:
    """Gives what each backward pass adds to the gradients of some parameters to `total`, which changes it, and puts it
    back. Only within `with`."""

    def __init__(self, parameters: Sequence[torch.Tensor], total: Callable[[torch.Tensor], object]) -> None:
        self.parameters, self.total = list(parameters), total
        self._open = False
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        size = sum(parameter.numel() for parameter in parameters)
        # One number more for each parameter: in how many places it got a gradient.
        self.flat = torch.zeros(size + len(self.parameters), dtype=torch.float64 if wide else torch.float32)
        *self.slots, self.touched = self.flat.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        self._arrived: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._done: set[int] = set()
        self._hooks = []
        for index, parameter in enumerate(self.parameters):
            self._hooks.append(parameter.register_hook(partial(self._arrives, index)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived_at, index)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> None:
        self._open, self._arrived = True, {}

    def __exit__(self, *_: Any) -> None:
        self._open = False

    def _arrives(self, index: int, gradient: torch.Tensor) -> None:
        if not self._open:
            return
        if not self._arrived:
            self._done.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        before = self.parameters[index].grad
        # Of gradients that add up over several passes only the new part is to be summed over replicas.
        self._arrived[index] = None if before is None else (gradient.detach(), before.detach().clone())

    def _arrived_at(self, index: int, parameter: torch.Tensor) -> None:
        self._done.add(index)

    def _end(self) -> None:
        """The backward pass is over."""
        arrived, self._arrived = self._arrived, {}
        if arrived.keys() - self._done:
            raise RunError(
                "`learn` takes gradients of its parameters by torch.autograd.grad: with several learners they would be "
                "those of some rows only. Write loss.backward() and use parameter.grad"
            )
        with torch.no_grad():
            self.flat.zero_()
            for index, known in arrived.items():
                gradient = self.parameters[index].grad if known is None else known[0]
                self.slots[index].copy_(gradient.reshape(-1))  # type: ignore[union-attr]
                self.touched[index] = 1
            self.total(self.flat)
            for index, parameter in enumerate(self.parameters):
                if not self.touched[index]:
                    continue
                new = self.slots[index].view(parameter.shape).to(parameter.dtype)
                known = arrived.get(index)
                if known is not None:
                    new = known[1] + new
                elif index not in arrived and parameter.grad is not None:
                    new = parameter.grad + new
                if parameter.grad is None:
                    parameter.grad = new.clone()
                else:
                    parameter.grad.copy_(new)


def trainable(learner: Any) -> list[torch.Tensor]:
    """The parameters that a learner has, in an order that is the same in all copies."""
    return [t for t in take_apart(learner, "the learner")[1] if t.requires_grad and t.is_leaf]


# a replica ------------------------------------------------------------------------------------------------------------


class Replica:
    """One of several copies of the learner."""

    def __init__(self, group: Group, learner: Any, weights: Sequence[torch.Tensor]) -> None:
        self.group, self.learner, self.weights = group, learner, weights
        self.updates = 0
        self.bytes = 0
        """Bytes of gradients summed since somebody asked."""
        self.split: Split = Split((), group.rank, group.size)
        self.gradients = Gradients(trainable(learner), self._sum)
        self.draws = False
        """Whether `learn` draws random numbers, so that it cannot be compared with one learner's."""
        self.seen: list[torch.Tensor] | None = None
        """Gradients of the current update, while they are to be compared."""

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `learner.learn` does, with all replicas taking part."""
        self.updates += 1
        try:
            rehearsed, mine = self._learn(args, kwargs)
        except (PeerFailed, OutOfStep):
            raise
        except BaseException:
            self.group.fail()
            raise
        whole = self._together(self.group.gather("result of learn", mine))
        if rehearsed is not None:
            compare_counts(rehearsed[1], whole)
        return whole

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Learn from this replica's rows. What the whole batch would have given, if known, and what the others must know."""
        split = self.split = Split((args, kwargs), self.group.rank, self.group.size)
        rehearsed = None
        if self.updates <= REHEARSALS and self.group.rank == 0:
            rehearsed = rehearse(self.learner, args, kwargs)
            self.draws = self.draws or rehearsed is None
        self.seen = None if rehearsed is None else []
        parts, named = split.arguments
        with shared(self), self.gradients:
            result = self.learner.learn(*parts, **named)
        if rehearsed is not None:
            compare_gradients(rehearsed[0], self.seen or [], self.updates)
        self.seen = None
        known = {key: number for number, key in enumerate(split.parts)}
        mine = (split.weight, split.mine, _portable(result, known), split.written(), self._checksums())
        return rehearsed, mine

    def across(self, total: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        """Sum and count over all replicas' rows, for statistics."""
        whole, number = _Across.apply(total, count, self)  # type: ignore[no-untyped-call]
        return whole, int(number)

    def own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This replica's part of a tensor that has an entry for each row."""
        return x[self.split.start : self.split.end]

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor with an entry for each row, from those for each replica's rows."""
        found = self.group.gather("entries for rows", _own(x) if self.split.weight else None)
        return torch.cat([part for part in found if part is not None])

    def add(self, what: str, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        """Sums over the replicas that have rows, in their order."""
        found = self.group.gather(what, (_own(tensor), count) if self.split.weight else None)
        pairs = [pair for pair in found if pair is not None]
        return torch.stack([tensor for tensor, _ in pairs]).sum(0).to(tensor.dtype), sum(count for _, count in pairs)

    def renew(self) -> None:
        """The learner has another state, and maybe other parameters."""
        self.gradients.close()
        self.gradients = Gradients(trainable(self.learner), self._sum)

    def take_bytes(self) -> int:
        found, self.bytes = self.bytes, 0
        return found

    def _sum(self, flat: torch.Tensor) -> None:
        """Gradients of all rows, in place of those of some."""
        touched = self.gradients.touched.clone()
        if self.split.weight:
            flat.mul_(self.split.weight)
        else:
            flat.zero_()
        self.gradients.touched.copy_(touched)
        self.group.sum("gradients", flat)
        self.bytes += flat.nbytes
        if self.seen is not None:
            self.seen.append(flat[: -len(touched)].clone())

    def _together(self, everyones: list[Any]) -> Any:
        """What `learn` returned and wrote, put together; are the replicas still alike?"""
        split = self.split
        weights, rows, results, written, sums = zip(*everyones, strict=True)
        for name in sums[0]:
            if any(other.get(name) != sums[0][name] for other in sums):
                raise RunError(
                    f"`{name}` of the learner is not the same in all replicas after update {self.updates}: `learn` changes it "
                    "by something else than the gradients that loss.backward() leaves. With several learners each sees some "
                    "rows of a batch: write self.mean(x), self.std(x) or self.sum(x) for what is computed from rows, and "
                    "loss.backward() with an optimizer for the rest"
                )
        counted = [rank for rank, weight in enumerate(weights) if weight]
        if split.rows:
            split.write(written, counted)
        wholes = [whole for _, whole, _ in split.parts.values()]
        return _combine(
            [results[r] for r in counted], [weights[r] for r in counted], [rows[r] for r in counted], wholes
        )

    def _checksums(self) -> dict[str, int]:
        if self.updates > OFTEN and self.updates % SELDOM:
            return {}
        named = dict(parameters_of(self.learner))
        named.update({f"weights[{index}]": tensor for index, tensor in enumerate(self.weights)})
        return {name: _checksum(tensor) for name, tensor in named.items()}


def rehearse(learner: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Any] | None:
    """Gradients and result of the whole batch, by a copy of the learner; None if it draws random numbers."""
    twin = copy_component(learner, [], "the learner")[0]
    args, kwargs = copied((args, kwargs), {})
    seen: list[torch.Tensor] = []
    gradients = Gradients(trainable(twin), lambda flat: seen.append(flat[: -len(gradients.touched)].clone()))
    before = _random_state()
    with shared(None), gradients:
        result = twin.learn(*args, **kwargs)
    drawn = pickle.dumps(before) != pickle.dumps(_random_state())
    torch.set_rng_state(torch.from_numpy(before[0]))
    np.random.set_state(before[1])
    random.setstate(before[2])
    return None if drawn else (seen, copied(result, {}))


def _random_state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()


def relative_difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    scale = float(expected.norm())
    return float((got - expected).norm()) / scale if scale else float(got.norm())


def compare_gradients(expected: list[torch.Tensor], got: list[torch.Tensor], update: int) -> None:
    """Gradients of the whole batch, by backward pass, and those put together from rows."""
    for number, (all_rows, summed) in enumerate(zip(expected, got, strict=False), 1):
        difference = relative_difference(all_rows, summed)
        if difference > TOLERANCE:
            raise RunError(
                f"gradients put together from the replicas' rows differ from those of the whole batch (update {update}, "
                f"backward {number}: relative difference {difference:.2g}). With several learners the loss has to be a mean "
                "over rows, each row on its own: write .mean() for .sum(), self.mean(x) and self.std(x) for statistics of a "
                "batch, and compute in `train` what looks at several rows"
            )


def compare_counts(expected: Any, got: Any) -> None:
    """Whole numbers that `learn` returned for the whole batch, and those of the replicas."""
    for where, number, seen in _integers("", expected, got):
        if number != seen:
            raise RunError(
                f"`learn` returned {seen}{where}, and for the whole batch it returns {number}: with several learners each "
                "counts its own rows. Write self.sum(x) for a count over all rows"
            )


class _Across(torch.autograd.Function):
    """A sum over all replicas' rows. Backward: each replica's loss depends on it, each with the weight of its rows."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: int, replica: Replica) -> Any:
        ctx.replica = replica
        whole, number = replica.add("statistic", total, count)
        known = torch.tensor(number)
        ctx.mark_non_differentiable(known)
        return whole, known

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weight = ctx.replica.split.weight
        summed, _ = ctx.replica.add("gradient of a statistic", gradients[0] * weight, 0)
        return (summed / weight if weight else torch.zeros_like(summed)), None, None


def _checksum(tensor: torch.Tensor) -> int:
    """Changes when a bit does, most likely."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).long()
    return int((data * (torch.arange(len(data)) % 8191 + 1)).sum())


# results --------------------------------------------------------------------------------------------------------------


class _Whole:
    """Stands for an argument of `learn` that it returned."""

    def __init__(self, number: int) -> None:
        self.number = number


def _portable(value: Any, known: dict[int, int]) -> Any:
    """A result as it goes to the other replicas."""
    if id(value) in known:
        return _Whole(known[id(value)])
    if type(value) in (list, tuple):
        return type(value)(_portable(item, known) for item in value)
    if type(value) is dict:
        return {key: _portable(item, known) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return _own(value)
    if isinstance(value, TensorDictBase):
        return value.apply(_own)
    return value


def _combine(values: list[Any], weights: list[float], rows: list[int], wholes: list[Any], where: str = "") -> Any:
    """One result of several: rows joined, numbers averaged by rows."""
    first = values[0]
    if isinstance(first, _Whole):
        return wholes[first.number]
    if type(first) in (list, tuple):
        inner = zip(*values, strict=True)
        return type(first)(
            _combine(list(items), weights, rows, wholes, f"{where}[{i}]") for i, items in enumerate(inner)
        )
    if type(first) is dict:
        return {k: _combine([v[k] for v in values], weights, rows, wholes, f"{where}[{k!r}]") for k in first}
    if isinstance(first, (torch.Tensor, TensorDictBase)):
        dimension = row_dimension(first)
        if dimension is not None and [value.shape[dimension] for value in values] == rows:
            return torch.cat(values, dimension)
        if isinstance(first, torch.Tensor):
            return _average_tensor(values, weights, where)
        out = first.clone()
        for key in first.keys(True, True):
            out.set(key, _average_tensor([value.get(key) for value in values], weights, f"{where}[{key!r}]"))
        return out
    if isinstance(first, float) and any(value != first for value in values):
        return sum(weight * value for weight, value in zip(weights, values, strict=True))
    if isinstance(first, int) and any(value != first for value in values):
        raise _unequal(values, where)
    return first


def _average_tensor(values: list[torch.Tensor], weights: list[float], where: str) -> torch.Tensor:
    first = values[0]
    if all(torch.equal(value, first) for value in values):
        return first
    if any(value.shape != first.shape for value in values):
        shapes = " and ".join(str(tuple(value.shape)) for value in values)
        raise RunError(
            f"`learn` returned tensors of shapes {shapes}{_at(where)}: with several learners return a number, or one entry "
            "per row"
        )
    if not first.is_floating_point():
        raise _unequal([value.tolist() for value in values], where)
    return sum(weight * value.double() for weight, value in zip(weights, values, strict=True)).to(first.dtype)  # type: ignore[union-attr]


def _unequal(values: list[Any], where: str) -> RunError:
    seen = ", ".join(map(str, values))
    return RunError(
        f"`learn` returned different whole numbers{_at(where)} in the replicas ({seen}): with several learners each counts "
        "its own rows. Write self.sum(x) for a count over all rows, or return a float to have it averaged"
    )


def _at(where: str) -> str:
    return f" in {where}" if where else ""


def _integers(where: str, expected: Any, got: Any) -> list[tuple[str, Any, Any]]:
    """Whole numbers in two results, side by side."""
    if type(expected) in (list, tuple):
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, got, strict=False))]
    elif type(expected) is dict:
        pairs = [(f"[{key!r}]", expected[key], got[key]) for key in expected]
    elif isinstance(expected, TensorDictBase) and not expected.batch_dims:
        pairs = [(f"[{key!r}]", expected.get(key), got.get(key)) for key in expected.keys(True, True)]
    elif isinstance(expected, int) or (
        isinstance(expected, torch.Tensor) and not expected.dim() and not expected.is_floating_point()
    ):
        return [(_at(where), int(expected), int(got))]
    else:
        return []
    return [found for name, a, b in pairs for found in _integers(where + name, a, b)]
