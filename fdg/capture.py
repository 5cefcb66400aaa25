"""The update step, captured and compiled: loss, backward, clip and Adam as one piece of machine code (`--compile-update`).

    first update    the step is traced (torch.fx), every tensor that the trace holds becomes an input, so that it is read
                    anew at each update; AOTInductor compiles it, or an earlier run has: artifacts are kept by a hash of
                    the trace, its shapes and types, torch and the CPU. Then it runs, and the same update is made
                    by Python: gradients and results have to agree.
    later updates   the arguments are looked at (structure, shapes, strides), put into a list, and the code runs. Updates
                    2, 10, 100 and every thousandth are made by Python as well, and compared.

What Python would do differently next time is not in the trace. Attributes of the loss function's object that it reads are
therefore watched. Where a branch depends on tensors (`if x.isfinite().all()`), the code computes the condition: if it is not
what it was in the trace, nothing is written, and Python makes this update. Whatever cannot be captured, or no longer agrees, is told, and Python goes on by itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import shutil
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fdg.adam import ALIGNMENT, Adam
from fdg.errors import UsageError
from fdg.update import detached, in_python, to_minimise

SEVERAL = 4
"""Captures of one loss function: as many shapes of arguments."""
SITES = 16
"""Loss functions of one learner that are compiled."""
CHECKED, SELDOM = (1, 2, 10, 100), 1000
"""Updates that Python makes as well, and then every so many."""
TOLERANCE = 1e-3
"""Relative difference of gradients, and of results, that is still rounding."""
KEPT_FILES, KEPT_BYTES = 64, 512 * 2**20
"""Artifacts that stay in the cache: the ones used last."""
FORMAT = "1"
"""Part of every artifact's name: what is compiled from a trace."""

assert_size_stride: Any = torch._C._dynamo.guards.assert_size_stride
SCALARS = (bool, int, float, str, type(None))


class NotCaptured(Exception):
    """Why an update cannot be compiled."""


ELSEWHERE = object()
"""In place of a result: a branch went another way than in the trace."""


class Captures:
    """The captured updates of one learner."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.sites: dict[tuple[int, ...], Site] = {}
        self.updates = 0
        """Updates that compiled code made."""

    def update(self, optimizer: Any, loss_function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What `update` does, compiled where it can be."""
        kind: Any = type(loss_function)
        key: tuple[int, ...]
        if isinstance(loss_function, types.MethodType):
            key = (id(loss_function.__func__), id(loss_function.__self__), id(optimizer))
        elif kind is types.FunctionType:
            key = (id(loss_function.__code__), id(optimizer))
        else:
            key = (id(loss_function), id(optimizer))
        site = self.sites.get(key)
        if site is None:
            if len(self.sites) >= SITES:
                return in_python(optimizer, loss_function, args)
            site = self.sites[key] = Site(self, optimizer, loss_function)
        elif kind is types.FunctionType and site.loss_function is not loss_function:
            site.give_up("it is made anew for each update (a lambda, or a function inside another); make it a method")
            return in_python(optimizer, loss_function, args)
        return site.update(args)


class Site:
    """One loss function with one optimizer, and what was captured of it."""

    def __init__(self, captures: Captures, optimizer: Any, loss_function: Callable[..., Any]) -> None:
        self.captures, self.optimizer, self.loss_function = captures, optimizer, loss_function
        self.captured: list[Captured] = []
        self.off = False

    def update(self, args: tuple[Any, ...]) -> Any:
        if not self.off:
            try:
                for captured in self.captured:
                    leaves: list[torch.Tensor] = []
                    if matches(args, captured.template, leaves) and captured.still_holds():
                        return self.run(captured, leaves, args)
                return self.run(*self.capture(args), args)
            except NotCaptured as reason:
                self.give_up(str(reason))
        return in_python(self.optimizer, self.loss_function, args)

    def give_up(self, reason: str) -> None:
        if not self.off:
            name = getattr(self.loss_function, "__qualname__", type(self.loss_function).__name__)
            self.captures.say(f"the update step of {name} is not compiled: {reason}. Python makes the updates")
        self.off = True

    def run(self, captured: Captured, leaves: list[torch.Tensor], args: tuple[Any, ...]) -> Any:
        captured.updates += 1
        if captured.updates in CHECKED or captured.updates % SELDOM == 0:
            result = captured.compared(leaves, args)
        else:
            result = captured(leaves, args)
        if result is ELSEWHERE:
            return in_python(self.optimizer, self.loss_function, args)
        self.captures.updates += 1
        return result

    def capture(self, args: tuple[Any, ...]) -> tuple[Captured, list[torch.Tensor]]:
        if len(self.captured) == SEVERAL:
            raise NotCaptured(
                f"its arguments, or attributes that it reads, were of {SEVERAL} kinds (shapes, strides, keys, numbers) and "
                "are now of another one; pass numbers as tensors, and batches of one size"
            )
        captured = Captured(self.optimizer, self.loss_function, args, self.captures.say)
        leaves: list[torch.Tensor] = []
        matches(args, captured.template, leaves)
        self.captured.append(captured)
        return captured, leaves


class Captured:
    """One captured step: a list of inputs, and the code."""

    def __init__(self, optimizer: Any, loss_function: Any, args: tuple[Any, ...], say: Callable[[str], None]) -> None:
        if not isinstance(optimizer, Adam):
            raise NotCaptured(f"its optimizer is {type(optimizer).__name__}; write self.optimizer = fdg.Adam(…)")
        self.optimizer, self.loss_function = optimizer, loss_function
        self.template = template_of(args)
        self.updates = 0
        self.settings = settings_of(optimizer)
        self.lr = optimizer.lr
        self.rate = torch.tensor(self.lr, dtype=torch.float32)
        state = [optimizer.flat, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps]
        leaves: list[torch.Tensor] = []
        matches(args, self.template, leaves)
        self.guard = Guard(loss_function)
        trace = Trace(self, leaves)
        self.results, self.writes, self.branches = trace.results, trace.writes, bool(trace.branches)
        self.slots: list[int] = trace.used
        self.draws = trace.draws
        self.fixed = [*state, self.rate, *trace.constants]
        before = torch.get_rng_state()
        inputs = [*[leaves[slot] for slot in self.slots], *self.draws(), *self.fixed]
        torch.set_rng_state(before)
        self.code = compiled(trace.module, inputs, say)

    def still_holds(self) -> bool:
        return self.settings == settings_of(self.optimizer) and self.guard.holds()

    def __call__(self, leaves: list[torch.Tensor], args: tuple[Any, ...]) -> Any:
        optimizer = self.optimizer
        optimizer._collect()
        lr = optimizer.lr
        if lr != self.lr:
            self.rate.fill_(lr)
            self.lr = lr
        outputs = self.code([*[leaves[slot] for slot in self.slots], *self.draws(), *self.fixed])
        if self.branches and not outputs[-1]:
            return ELSEWHERE
        optimizer.stepped()
        for path, key, position in self.writes:
            target = args
            for name in path:
                target = target[name]
            target[key] = outputs[position]  # type: ignore[index]
        return made(self.results, outputs)

    def compared(self, leaves: list[torch.Tensor], args: tuple[Any, ...]) -> Any:
        """Make the update, and compare it with Python's. What Python does is undone."""
        optimizer, guard = self.optimizer, self.guard
        state = [optimizer.flat, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps]
        with undone(state, self.loss_function):
            before = dict(guard.attributes)
            copies = rebuilt(self.template, iter([leaf.clone() for leaf in leaves]))
            expected = in_python(optimizer, self.loss_function, copies)
            moments = [tensor.clone() for tensor in state[1:3]]
            for name, value in guard.attributes.items():
                if name not in before or (value is not before[name] and not same_scalar(value, before[name])):
                    raise NotCaptured(f"it sets self.{name}, which compiled code would not do; return it instead")
        old, lr = optimizer.flat.clone(), optimizer.lr
        before_it = undone(state, self.loss_function)
        before_it.__enter__()
        result = self(leaves, args)
        if result is ELSEWHERE:
            return result
        try:
            for name, here, there in zip(("gradients", "squared gradients"), state[1:3], moments, strict=True):
                self.agree(name, here, there)
            noise = 1e-6 * float(torch.linalg.vector_norm(old))
            self.agree("parameters", optimizer.flat - old, adam_step(optimizer, old, lr) - old, noise)
            for name, here, there in zip(names(expected), tensors(result), tensors(expected), strict=True):
                self.agree(f"results{name}", here, there)
        except NotCaptured:
            before_it.__exit__()  # Python makes this update
            raise
        return result

    def agree(self, what: str, seen: Any, expected: Any, noise: float = 1e-7) -> None:
        if isinstance(seen, torch.Tensor) and isinstance(expected, torch.Tensor) and seen.shape == expected.shape:
            a, b = seen.detach().double(), expected.detach().double()
            difference = float(torch.linalg.vector_norm(a - b))
            scale = float(torch.linalg.vector_norm(b))
            if difference <= TOLERANCE * scale + noise or torch.equal(a.nan_to_num(), b.nan_to_num()):
                return
            seen, expected = f"{difference:.3g} of {scale:.3g}", "rounding"
        elif type(seen) is type(expected) and seen == expected:
            return
        raise NotCaptured(
            f"at update {self.updates} its {what} differ from what Python computes ({seen}, not {expected}): does the loss "
            "depend on a number that changes from one update to the next? Pass it as a tensor"
        )


def settings_of(optimizer: Adam) -> tuple[Any, ...]:
    group = optimizer.param_groups[0]
    return group["betas"], group["eps"], group["weight_decay"], group["max_grad_norm"]


# arguments and results ------------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A tensor: what the code takes for granted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Branch(NamedTuple):
    """A TensorDict, a dict, a list or a tuple, and what is in it."""

    kind: type
    entries: dict[Any, Any]
    batch_size: Any = None
    names: Any = None


class Same(NamedTuple):
    """A number or a word; anything else by identity."""

    value: Any


def template_of(value: Any) -> Any:
    """What arguments look like: all that a trace may depend on but the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise NotCaptured("an argument of the loss function needs gradients; give it x.detach()")
        if value.device.type != "cpu" or value.layout is not torch.strided or type(value) not in PLAIN_TENSORS:
            raise NotCaptured(
                f"an argument is a {type(value).__name__} on {value.device}; plain tensors on the CPU are compiled"
            )
        return Leaf(tuple(value.shape), value.stride(), value.dtype)
    if type(value) is TensorDict:
        entries = {key: template_of(item) for key, item in value._tensordict.items()}
        return Branch(TensorDict, entries, value.batch_size, list(value.names) if value._has_names() else None)
    if type(value) is dict:
        return Branch(dict, {key: template_of(item) for key, item in value.items()})
    if type(value) in (tuple, list):
        return Branch(type(value), {index: template_of(item) for index, item in enumerate(value)})
    return Same(value)


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def matches(value: Any, template: Any, leaves: list[torch.Tensor]) -> bool:
    """Whether a value looks like the template; its tensors are put into `leaves`."""
    kind = type(template)
    if kind is Leaf:
        shape, stride, dtype = template
        if type(value) not in PLAIN_TENSORS or value.dtype is not dtype or value.requires_grad:
            return False
        try:
            assert_size_stride(value, shape, stride)
        except AssertionError:
            return False
        leaves.append(value)
        return True
    if kind is Branch:
        if type(value) is not template.kind:
            return False
        if template.kind is TensorDict:
            value = value._tensordict
        entries = template.entries
        if type(value) is dict:
            if value.keys() != entries.keys():
                return False
        elif len(value) != len(entries):
            return False
        for key, inner in entries.items():  # noqa: SIM110  (a generator takes longer)
            if not matches(value[key], inner, leaves):
                return False
        return True
    known = template.value
    return value is known or (type(value) is type(known) and type(value) in SCALARS and value == known)


def rebuilt(template: Any, leaves: Iterator[torch.Tensor]) -> Any:
    """Arguments that look like the template, of other tensors."""
    if isinstance(template, Leaf):
        return next(leaves)
    if isinstance(template, Same):
        return template.value
    entries = {key: rebuilt(inner, leaves) for key, inner in template.entries.items()}
    if template.kind is TensorDict:
        return TensorDict(entries, template.batch_size, names=template.names)
    return entries if template.kind is dict else template.kind(entries.values())


def written(args: Any, template: Any, leaves: Iterator[torch.Tensor], path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """What a loss function put into its arguments: (path to the container, key, tensor)."""
    if isinstance(template, Leaf):
        next(leaves)
        return
    if isinstance(template, Same):
        return
    items = dict(args.items()) if template.kind in (TensorDict, dict) else dict(enumerate(args))
    for key, inner in template.entries.items():
        if key not in items:
            raise NotCaptured(f"it removes {key!r} from its argument")
        if isinstance(inner, Leaf):
            if items[key] is not next(leaves):
                yield path, key, items[key]
        elif isinstance(inner, Branch):
            yield from written(items[key], inner, leaves, (*path, key))
    for key in items.keys() - template.entries.keys():
        if not isinstance(items[key], torch.Tensor):
            raise NotCaptured(
                f"it puts {type(items[key]).__name__} {key!r} into its argument; only tensors can be put there"
            )
        yield path, key, items[key]


def outline(result: Any, outputs: list[torch.Tensor]) -> Any:
    """How to make a result again: tensors are numbers of outputs."""
    if isinstance(result, torch.Tensor):
        outputs.append(result)
        return len(outputs) - 1
    if type(result) is TensorDict:
        return TensorDict, {key: outline(item, outputs) for key, item in result.items()}, result.batch_size
    if type(result) is dict:
        return dict, {key: outline(item, outputs) for key, item in result.items()}, None
    if isinstance(result, SCALARS):
        return Same(result)
    raise NotCaptured(f"its result holds a {type(result).__name__}; return tensors, or a dict or TensorDict of tensors")


def made(results: Any, outputs: list[torch.Tensor]) -> Any:
    if type(results) is int:
        return outputs[results]
    if type(results) is Same:
        return results.value
    kind, entries, batch_size = results
    items = {key: made(item, outputs) for key, item in entries.items()}
    return items if kind is dict else TensorDict._new_unsafe(items, batch_size)


def names(result: Any) -> list[str]:
    """Where each tensor or number of a result is, for messages."""
    if isinstance(result, (TensorDict, dict)):
        return [f"[{key!r}]{inner}" for key, item in result.items() for inner in names(item)]
    return [""]


def tensors(result: Any) -> list[Any]:
    if isinstance(result, (TensorDict, dict)):
        return [leaf for item in result.values() for leaf in tensors(item)]
    return [result]


# what Python would do differently -------------------------------------------------------------------------------------


def same_scalar(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, SCALARS) and a == b


def attributes_of(loss_function: Any) -> dict[str, Any]:
    """The attributes of a loss function's object, if it is the user's; those of libraries make some when first asked."""
    owner = getattr(loss_function, "__self__", loss_function)
    library = type(owner).__module__.partition(".")[0] in ("torch", "torchrl", "tensordict")
    return {} if library else getattr(owner, "__dict__", {})


class Guard:
    """Watches the attributes that a loss function reads of its object."""

    def __init__(self, loss_function: Any) -> None:
        self.owner = getattr(loss_function, "__self__", loss_function)
        self.attributes = attributes_of(loss_function)
        self.read: set[str] = set()
        self.watched: list[tuple[str, Any, bool]] = []

    def __enter__(self) -> None:
        """Within, note what is read."""
        self.kind = kind = type(self.owner)
        if kind is types.FunctionType:
            return
        read = self.read.add

        def noting(this: Any, name: str) -> Any:
            read(name)
            return super(noted, this).__getattribute__(name)

        try:
            noted: Any = type(kind.__name__, (kind,), {"__getattribute__": noting, "__module__": kind.__module__})
            self.owner.__class__ = noted
        except TypeError:  # a class of C, or with slots: the comparison with Python has to do
            return

    def __exit__(self, *_: Any) -> None:
        if type(self.owner) is not self.kind:
            self.owner.__class__ = self.kind
        found = [(name, self.attributes[name]) for name in sorted(self.read & self.attributes.keys())]
        self.watched = [(name, value, isinstance(value, SCALARS)) for name, value in found]

    def holds(self) -> bool:
        """Whether they are as they were."""
        now = self.attributes
        for name, value, scalar in self.watched:
            seen = now.get(name)
            if seen is not value and not (scalar and same_scalar(seen, value)):
                if isinstance(seen, (int, float)) and not isinstance(seen, bool):
                    raise NotCaptured(
                        f"it reads self.{name}, a number that changes between updates ({value}, then {seen}) and would be part "
                        f"of the code; make it a tensor, changed in place: self.{name} = torch.tensor(…), "
                        f"self.{name}.fill_(…), or pass it as an argument that is one"
                    )
                return False
        return True


class undone:
    """Within, what is done to tensors, random generators and numbers of the loss function's object is undone at the end."""

    def __init__(self, state: list[torch.Tensor], loss_function: Any) -> None:
        self.state = state  # written by the fused Adam, which does not count it as a version
        self.others = reachable(loss_function)
        self.attributes = attributes_of(loss_function)

    def __enter__(self) -> None:
        self.before = [(tensor, -1, tensor.clone()) for tensor in self.state]
        self.before += [(tensor, tensor._version, tensor.detach().clone()) for tensor in self.others]
        self.numbers = {name: value for name, value in self.attributes.items() if isinstance(value, SCALARS)}
        self.random = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def __exit__(self, *_: Any) -> None:
        for tensor, version, copy in self.before:
            if tensor._version != version:
                tensor.detach().copy_(copy)
        self.attributes.update(self.numbers)
        torch.set_rng_state(self.random[0])
        np.random.set_state(self.random[1])
        random.setstate(self.random[2])


def reachable(loss_function: Any) -> list[torch.Tensor]:
    """The tensors of a loss function and its object."""
    from fdg.errors import RunError
    from fdg.runtime.weights import take_apart

    try:
        found = take_apart(getattr(loss_function, "__self__", loss_function), "it")[1]
    except RunError as error:
        raise NotCaptured(str(error)) from None
    return [tensor for tensor in found if tensor.layout is torch.strided and tensor.numel()]


class Branches(TorchFunctionMode):
    """Within, conditions that depend on tensors are noted, with what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, bool]] = []

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__bool__:
            with _disable_current_modes():  # the tensor itself: tracing would refuse to look
                value = bool(args[0])
            self.found.append((args[0], value))
            return value
        return function(*args, **(kwargs or {}))

    def __bool__(self) -> bool:
        return bool(self.found)

    def same(self) -> torch.Tensor:
        """Whether all of them are what they were."""
        each = [tensor.detach().reshape(()).bool() == value for tensor, value in self.found]
        return torch.stack(each).all()


# the trace ------------------------------------------------------------------------------------------------------------


class Trace:
    """A step as a graph whose inputs are: arguments that it reads, random draws, the optimizer's state, other tensors."""

    def __init__(self, step: Captured, leaves: list[torch.Tensor]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        optimizer = self.optimizer = step.optimizer
        self.step = step
        state = [optimizer.flat, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps]
        optimizer._collect()
        with undone(state, step.loss_function):
            # Twice: what a loss function makes when first called (caches, lazy modules) is there in the second one.
            copies = rebuilt(step.template, iter([leaf.clone() for leaf in leaves]))
            in_python(optimizer, step.loss_function, copies)
            with torch.no_grad(), step.guard:
                try:
                    copies = [leaf.clone() for leaf in leaves], *[tensor.clone() for tensor in state], step.rate
                    before = str(np.random.get_state()), random.getstate()
                    module = make_fx(lambda *inputs: self.whole(*inputs))(*copies)
                    if before != (str(np.random.get_state()), random.getstate()):
                        raise NotCaptured(
                            "it draws from numpy or random; draw from torch, or pass what is drawn as a tensor"
                        )
                except (NotCaptured, UsageError):
                    raise
                except Exception as error:
                    words = str(error).strip().splitlines()
                    raise NotCaptured(
                        f"it cannot be traced ({type(error).__name__}: {words[0] if words else ''})"
                    ) from None
        self.lift(module, len(leaves))

    def whole(
        self,
        leaves: list[torch.Tensor],
        flat: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        steps: torch.Tensor,
        rate: torch.Tensor,
    ) -> list[torch.Tensor]:
        """The step as it is traced."""
        step, optimizer = self.step, self.optimizer
        args = rebuilt(step.template, iter(leaves))
        branches = self.branches = Branches()
        with torch.enable_grad():
            with branches:
                result = step.loss_function(*args)
            loss = to_minimise(result, step.loss_function)
            found = torch.autograd.grad(loss, optimizer._parameters, allow_unused=True)
        parts = []
        for parameter, grad in zip(optimizer._parameters, found, strict=True):
            parts.append(torch.zeros_like(parameter).reshape(-1) if grad is None else grad.reshape(-1))
            if rest := -parameter.numel() % (ALIGNMENT // parameter.itemsize):
                parts.append(parameter.new_zeros(rest))
        grad = torch.cat(parts)
        group = optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        if group["max_grad_norm"] is not None:
            length = torch.linalg.vector_norm(grad)
            grad = grad * torch.clamp(group["max_grad_norm"] / (length + 1e-6), max=1.0)
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * flat
        count = steps + 1
        first = exp_avg + (grad - exp_avg) * (1 - beta1)
        second = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
        wide = count.double()  # 1 - 0.999 has few digits in single precision
        size = (rate / (1 - beta1**wide)).to(flat.dtype)
        root = (1 - beta2**wide).sqrt().to(flat.dtype)
        new = flat - size * (first / (second.sqrt() / root + group["eps"]))
        outputs: list[torch.Tensor] = []
        if branches:
            same = branches.same()
            new, first = torch.where(same, new, flat), torch.where(same, first, exp_avg)
            second, count = torch.where(same, second, exp_avg_sq), torch.where(same, count, steps)
        flat.copy_(new), exp_avg.copy_(first), exp_avg_sq.copy_(second), steps.copy_(count)
        self.results = outline(detached(result), outputs)
        self.writes = []
        for path, key, tensor in written(args, step.template, iter(leaves)):
            self.writes.append((path, key, len(outputs)))
            outputs.append(tensor.detach())
        return [*outputs, same] if branches else outputs

    def lift(self, module: Any, count: int) -> None:
        """Make an input of every tensor that the trace holds: one that lies in the flat tensor, a part of that input."""
        graph = module.graph
        places = [node for node in graph.nodes if node.op == "placeholder"]
        given, flat = places[:count], places[count]
        memory = self.optimizer.flat.untyped_storage().data_ptr()
        self.constants: list[torch.Tensor] = []
        lifted: dict[int, Any] = {}
        last = places[-1]
        views = []
        for node in [node for node in graph.nodes if node.op == "get_attr"]:
            tensor = getattr(module, node.target)
            if id(tensor) not in lifted:
                if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                    raise NotCaptured(f"it uses a tensor on {tensor.device} of layout {tensor.layout}")
                if tensor.numel() and tensor.untyped_storage().data_ptr() == memory:
                    place = list(tensor.size()), list(tensor.stride()), tensor.storage_offset()
                    with graph.inserting_after(last):
                        lifted[id(tensor)] = graph.call_function(torch.ops.aten.as_strided.default, (flat, *place))
                    views.append(lifted[id(tensor)])
                else:
                    with graph.inserting_after(last):
                        last = lifted[id(tensor)] = graph.placeholder(f"constant_{len(self.constants)}")
                    self.constants.append(tensor.detach())
            node.replace_all_uses_with(lifted[id(tensor)])
            graph.erase_node(node)
        for view in views:
            last.append(view)
        graph.set_codegen(torch.fx.graph.CodeGen())
        graph.eliminate_dead_code()
        self.draws = draws_of(graph, flat)
        self.used = [index for index, node in enumerate(given) if node.users]
        for node in given:
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        self.module = torch.fx.GraphModule(torch.nn.Module(), graph)


def draws_of(graph: torch.fx.Graph, before: torch.fx.Node) -> Callable[[], Any]:
    """Take the draws of random numbers out of a graph: they become inputs, drawn as Python would, in the same order."""
    found = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    if not found:
        return tuple
    apart, root = torch.fx.Graph(), torch.nn.Module()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            if node.op != "call_function":
                raise NotCaptured(
                    f"it draws random numbers that depend on data ({drawn.target}), which compiled code would do in another way: "
                    "draw standard ones (torch.randn, torch.rand) and compute from them, or draw in `learn` and pass them"
                )
            args = list(node.args)
            if str(node.target).removeprefix("aten.").startswith(LIKE) and isinstance(args[0], torch.fx.Node):
                like, name = args[0].meta["val"], f"like_{len(copies)}"  # only its shape counts
                root.register_buffer(name, torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
                args[0] = apart.get_attr(name)
                copies[node] = apart.call_function(node.target, tuple(args), dict(node.kwargs))
            else:
                copies[node] = apart.node_copy(node, copied)
        return copies[node]

    for drawn in found:
        copied(drawn)
        with graph.inserting_before(before):
            drawn.replace_all_uses_with(graph.placeholder(f"draw_{len(copies)}"))
    for drawn in reversed(found):
        graph.erase_node(drawn)
    graph.eliminate_dead_code()
    apart.output([copies[drawn] for drawn in found])
    return torch.fx.GraphModule(root, apart).forward


LIKE = ("randn_like", "rand_like", "randint_like", "empty_like", "zeros_like", "ones_like", "full_like", "new_")
"""Operations that only look at the shape of what they are given."""


def adam_step(optimizer: Adam, flat: torch.Tensor, lr: float) -> torch.Tensor:
    """Where parameters go from `flat` with the moments that the optimizer has."""
    group, count = optimizer.param_groups[0], float(optimizer.steps)
    beta1, beta2 = group["betas"]
    root = (optimizer.exp_avg_sq.double() / (1 - beta2**count)).sqrt() + group["eps"]
    return flat - (lr / (1 - beta1**count)) * optimizer.exp_avg.double() / root


# artifacts ------------------------------------------------------------------------------------------------------------


def compiled(module: torch.fx.GraphModule, inputs: list[torch.Tensor], say: Callable[[str], None]) -> Any:
    """The code of a graph: from the cache, or compiled now."""
    path = cache() / f"{artifact(module, inputs)}.pt2"
    if path.exists():
        os.utime(path)
    else:
        make_artifact(module, inputs, path, say)
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)  # type: ignore[attr-defined]
    return loader.run


def artifact(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> str:
    """The name of what is compiled: equal names, equal code."""
    kinds = [(str(tensor.dtype), tuple(tensor.shape), tensor.stride()) for tensor in inputs]
    about = [FORMAT, torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), cpu(), kinds]
    return hashlib.sha256(f"{about}\n{module.code}".encode()).hexdigest()[:32]


def cpu() -> str:
    """What code for this machine depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
        return "\n".join(found.get(name, "") for name in ("model name", "flags", "Features"))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def cache() -> Path:
    folder = Path(os.environ.get("FDG_CACHE") or Path.home() / ".cache" / "fdg") / "updates"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_artifact(module: Any, inputs: list[torch.Tensor], path: Path, say: Callable[[str], None]) -> None:
    compiler = os.environ.get("CXX") or "g++"
    if not any(map(shutil.which, (compiler, "g++", "clang++"))):
        raise NotCaptured("there is no C++ compiler; install g++ or clang++, or name one in CXX")
    say("compiling the update step (about half a minute; the next run finds it in the cache)")
    start = time.perf_counter()
    part = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    try:
        import torch._inductor.config as config
        from torch._inductor import aoti_compile_and_package
        from torch._inductor.utils import fresh_cache

        with (
            torch.no_grad(),
            fresh_cache(),
            config.patch({"compile_threads": 1, "cpp_cache_precompile_headers": False}),
        ):
            exported = torch.export.export(module, tuple(inputs), strict=False)
            aoti_compile_and_package(exported, package_path=str(part))
        part.replace(path)
    except Exception as error:
        part.unlink(missing_ok=True)
        words = str(error).strip().splitlines()
        raise NotCaptured(f"compiling failed ({type(error).__name__}: {words[0][:300] if words else ''})") from None
    say(f"compiled the update step in {time.perf_counter() - start:.0f} s; it is kept in {path.parent}")
    tidy(path.parent)


def tidy(folder: Path) -> None:
    """Keep the cache small."""
    size = 0
    files = sorted(folder.glob("*.pt2"), key=lambda file: file.stat().st_mtime, reverse=True)
    for number, file in enumerate(files):
        size += file.stat().st_size
        if number >= KEPT_FILES or (number and size > KEPT_BYTES):
            file.unlink(missing_ok=True)
