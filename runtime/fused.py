"""Actors that run together: one call of a region over the rows of all (the pass is fdg/compiler/fuse.py).

    Team    the logical actors of one place, in order; the first one's instance has their environments and their actor
    Whole   a value of a fused region: the rows of all
    Part    one actor's share of it, in that actor's store

To the driver nothing changes: every actor has a task and a reply of its own, with its own rows. A part is cut out only
when somebody looks; if all parts of a whole come back, the whole goes on as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from tensordict import TensorDictBase

from fdg.errors import GraphError, RunError
from fdg.graph import Fragment
from fdg.runtime import trace
from fdg.runtime.rows import Rows
from fdg.runtime.values import ATOMS, UNBOUND, Return, Unbound

if TYPE_CHECKING:
    from fdg.runtime.instance import Host, InstanceKey, Reply, Task


Memo = dict[tuple[int, ...], tuple[list[Any], Any]]
"""What was joined already: ids of each actor's objects to (these, the whole)."""


class Whole:
    """The rows of all actors of a team."""

    def __init__(self, value: Any, envs: int) -> None:
        self.value, self.envs = value, envs
        self._parts: WeakValueDictionary[int, Part] = WeakValueDictionary()

    def part(self, index: int) -> Part:
        part = self._parts.get(index)
        if part is None:
            part = self._parts[index] = Part(self, index)
        return part


class Part:
    """One actor's rows of a whole."""

    def __init__(self, whole: Whole, index: int) -> None:
        self.whole, self.index = whole, index

    def own(self) -> Any:
        """These rows as a value of their own."""
        return cut(self.whole.value, self.index, self.whole.envs)


def own(value: Any) -> Any:
    """What an actor's store has: of a part, its rows."""
    return value.own() if isinstance(value, Part) else value


class Team:
    """Logical actors that run the regions of a fragment together."""

    def __init__(self, fragment: Fragment, members: Sequence[InstanceKey], envs: int) -> None:
        self.members, self.envs = list(members), envs
        regions = {region.name: region for region in fragment.regions}
        self.inputs = {
            name: {port.name.replace(".", "_") for port in region.inputs if port.varying}  # as parameters are called
            for name, region in regions.items()
        }
        self.outputs = {name: [port.varying for port in region.outputs] for name, region in regions.items()}
        self._wholes: WeakValueDictionary[int, Whole] = WeakValueDictionary()

    def join(self, values: list[Any], memo: Memo) -> Any:
        """One value with the rows of all actors, in their order."""
        first = values[0]
        if isinstance(first, Part) and all(
            isinstance(value, Part) and value.whole is first.whole and value.index == index
            for index, value in enumerate(values)
        ):
            return first.whole.value
        value = joined([own(value) for value in values], self.envs, memo)
        return value if isinstance(value, (*ATOMS, Unbound)) else self.whole(value).value

    def whole(self, value: Any) -> Whole:
        """The whole of a value: one, however many names it has."""
        found = self._wholes.get(id(value))
        if found is None:
            found = self._wholes[id(value)] = Whole(value, self.envs)
        return found

    def part(self, value: Any, index: int) -> Any:
        """What one actor gets of a value."""
        return value if isinstance(value, (*ATOMS, Unbound)) else self.whole(value).part(index)


def perform_together(
    host: Host, tasks: list[Task], bring: Callable[[InstanceKey, tuple[int, ...]], tuple[Any, ...]]
) -> list[Reply]:
    """Run a region once, for all actors of a team."""
    from fdg.runtime.instance import Kept, Reply, entered

    first, task = host.instances[tasks[0].instance], tasks[0]
    team = first.team
    assert team is not None
    if [task.instance for task in tasks] != team.members:
        raise GraphError(f"{task.region} runs fused, and was called for {len(tasks)} of {len(team.members)} actors")
    replies, inputs = [Reply() for _ in tasks], []
    host.bring_weights(first, task)
    with trace.span(trace.row_of(first.key), "transfer", "transfer"):
        for one, reply in zip(tasks, replies, strict=True):
            instance = host.instances[one.instance]
            instance.store.release(one.release)
            brought: dict[Any, tuple[Any, ...]] = {}
            inputs.append(
                {
                    name: host.resolve(instance, name, value, bring, brought, reply, whole=True)
                    for name, value in one.inputs.items()
                }
            )
        varying = team.inputs[task.region]
        memo: Memo = {}
        together = {
            name: team.join([values[name] for values in inputs], memo) if name in varying else own(inputs[0][name])
            for name in task.inputs
        }
    with entered(task.modes):
        try:
            result = first.call(task.region, together)
        except Exception as error:
            error.add_note(f"(fused: {len(tasks)} actors ran this together, with {len(tasks)} × {team.envs} rows)")
            raise
    results = (result,) if len(task.outputs) == 1 else result or ()
    entered_as = {id(together[name]): name for name in varying}
    for index, (one, reply) in enumerate(zip(tasks, replies, strict=True)):
        instance = host.instances[one.instance]
        lent = {id(value) for value in one.lent} if one.lend else set()

        def share(value: Any, differs: bool, index: int = index, lent: set[int] = lent) -> Any:
            """What an actor has of a value. The driver's own object stays that object, and changes as its rows did."""
            part = team.part(value, index) if differs else value
            mine = inputs[index].get(entered_as.get(id(value), ""))
            if not differs or id(mine) not in lent:
                return part
            return Return(()).restore(mine, own(part))

        for name, wanted in one.restores:
            value = share(together[name], name in varying)
            if wanted:
                reply.restored[name] = own(value)
            else:
                reply.moved[name] = instance.store.keep(value)
        for out, value, differs in zip(one.outputs, results, team.outputs[task.region], strict=True):
            left = host.leave(instance, out, share(value, differs), lent)
            reply.outputs.append(Kept(left.key, own(left.copy)) if isinstance(left, Kept) else own(left))
        if lent:
            reply.lent = one.lent
        reply.report = instance.report()
    return replies


# rows of several actors as one value, and back -----------------------------------------------------------------------


def joined(values: list[Any], envs: int, memo: Memo) -> Any:
    """One value from one per actor: rows follow each other along the environments, all else must be the same.

    What is one object for each actor is one object again.
    """
    first = values[0]
    if isinstance(first, (*ATOMS, Unbound)) and all(value == first for value in values):
        return first
    ids = tuple(map(id, values))
    if ids in memo:
        return memo[ids][1]
    whole: Any
    if isinstance(first, TensorDictBase):
        whole = torch.cat(list(values), env_axis(first))
        whole.names = first.names
    elif isinstance(first, torch.Tensor) and first.dim() and all(value.shape[:1] == (envs,) for value in values):
        whole = torch.cat(values, 0)
    elif isinstance(first, (list, tuple, deque)) and len({len(value) for value in values}) == 1:
        whole = type(first)([joined(list(items), envs, memo) for items in zip(*values, strict=True)])
    elif isinstance(first, dict):
        whole = {key: joined([value[key] for value in values], envs, memo) for key in first}
    else:
        raise RunError(f"a {type(first).__name__} of each actor cannot be joined to rows of all: run without --fuse")
    memo[ids] = (values, whole)
    return whole


def cut(value: Any, index: int, envs: int) -> Any:
    """The rows of one actor, in memory of their own."""
    if isinstance(value, TensorDictBase):
        axis = env_axis(value)
        rows = (slice(None),) * axis + (slice(index * envs, (index + 1) * envs),)
        return value[rows].clone()
    if isinstance(value, torch.Tensor):
        return value[index * envs : (index + 1) * envs].clone()
    if isinstance(value, Rows):
        return value.cut(index * envs, (index + 1) * envs)
    if isinstance(value, (list, tuple, deque)):
        return type(value)([cut(item, index, envs) for item in value])
    if isinstance(value, dict):
        return {key: cut(item, index, envs) for key, item in value.items()}
    if isinstance(value, ATOMS) or value is UNBOUND:
        return value
    raise RunError(f"a {type(value).__name__} cannot be cut into the rows of each actor: run without --fuse")


def env_axis(td: TensorDictBase) -> int:
    """The dimension of the environments."""
    if td._has_names() and "env" in td.names:
        return list(td.names).index("env")
    if td.batch_dims == 1:
        return 0
    raise RunError(
        f"which of the dimensions {tuple(td.batch_size)} is the environments? Give it its name back, "
        "td.names = [None, 'env'], or run without --fuse"
    )
