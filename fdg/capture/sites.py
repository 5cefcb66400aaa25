"""Where updates are made: each loss function with its optimizer, and the steps captured of it."""

from __future__ import annotations

import gc
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from fdg.adam import Adam
from fdg.capture.arguments import NotCaptured, made, matches, names, rebuilt, template_of, tensors
from fdg.capture.artifacts import compiled
from fdg.capture.trace import Trace, adam_step
from fdg.capture.watch import Guard, same_scalar, undone
from fdg.update import in_python

SEVERAL = 4
"""Captures of one loss function: as many shapes of arguments."""
SITES = 16
"""Loss functions of one learner that are compiled."""
CHECKED, SELDOM = (1, 2, 10, 100), 1000
"""Updates that Python makes as well, and then every so many."""
TOLERANCE = 1e-3
"""Relative difference of gradients, and of results, that is still rounding."""
KINK, DOUBTS = 0.1, 5
"""Relative difference that a loss may show now and then where rounding decides on which side of a kink (of relu, say) a row lies; and when this is
more than now and then: an update that differs counts 2, one that does not takes 1 away."""
CANCELLED = 1e-5
"""Difference of results that is rounding where they are nearly 0: sums of ordinary numbers, such as advantages of mean 0."""
ELSEWHERE = object()
"""In place of a result: a branch went another way than in the trace."""


class Doubtful(NotCaptured):
    """A difference that may be a kink's."""


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
        if captured.doubts or captured.updates in CHECKED or captured.updates % SELDOM == 0:
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
        if gc.get_freeze_count():  # in a run: what the compiler has brought along stays, see `runtime.run.settled`
            gc.freeze()
        return captured, leaves


class Captured:
    """One captured step: a list of inputs, and the code."""

    def __init__(self, optimizer: Any, loss_function: Any, args: tuple[Any, ...], say: Callable[[str], None]) -> None:
        if not isinstance(optimizer, Adam):
            raise NotCaptured(f"its optimizer is {type(optimizer).__name__}; write self.optimizer = fdg.Adam(…)")
        self.optimizer, self.loss_function = optimizer, loss_function
        self.template = template_of(args)
        self.updates = 0
        self.doubts = 0
        """How many of the last updates were not quite Python's, see `DOUBTS`; while there are any, each update is compared."""
        self.settings = settings_of(optimizer)
        self.sizes = torch.empty(2, dtype=torch.promote_types(optimizer.flat.dtype, torch.float32))
        """What depends on the step size and on how many steps there have been."""
        self.size_up()
        state = [optimizer.flat, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps]
        leaves: list[torch.Tensor] = []
        matches(args, self.template, leaves)
        self.guard = Guard(loss_function)
        trace = Trace(self, leaves)
        self.results, self.writes, self.branches = trace.results, trace.writes, bool(trace.branches)
        self.slots: list[int] = trace.used
        self.draws = trace.draws
        self.fixed = [*state, self.sizes, *trace.constants]
        before = torch.get_rng_state()
        inputs = [*[leaves[slot] for slot in self.slots], *self.draws(), *self.fixed]
        torch.set_rng_state(before)
        self.code = compiled(trace.module, inputs, say)

    def still_holds(self) -> bool:
        return self.settings == settings_of(self.optimizer) and self.guard.holds()

    def __call__(self, leaves: list[torch.Tensor], args: tuple[Any, ...]) -> Any:
        optimizer = self.optimizer
        optimizer._collect()
        self.size_up()
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

    def size_up(self) -> None:
        """Here and not in the compiled code, which would raise to these powers for every parameter."""
        optimizer = self.optimizer
        beta1, beta2 = self.settings[0]
        count = float(optimizer.steps) + 1
        sizes = self.sizes.numpy()
        sizes[0], sizes[1] = optimizer.lr / (1 - beta1**count), math.sqrt(1 - beta2**count)

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
        noise = 1e-6 * float(torch.linalg.vector_norm(old))
        pairs: list[Any] = [
            ("gradients", state[1], moments[0], 1e-7),
            ("squared gradients", state[2], moments[1], 1e-7),
        ]
        pairs += [("parameters", optimizer.flat - old, adam_step(optimizer, old, lr) - old, noise)]
        for name, here, there in zip(names(expected), tensors(result), tensors(expected), strict=True):
            pairs.append((f"results{name}", here, there, CANCELLED))
        doubt: Doubtful | None = None
        try:
            for pair in pairs:
                try:
                    self.agree(*pair)
                except Doubtful as reason:
                    doubt = doubt or reason
            self.doubts = max(0, self.doubts - 1) if doubt is None else self.doubts + 2
            if doubt is not None and self.doubts >= DOUBTS:
                raise doubt
        except NotCaptured:
            before_it.__exit__()  # Python makes this update
            raise
        return result

    def agree(self, what: str, seen: Any, expected: Any, noise: float) -> None:
        kind = NotCaptured
        if isinstance(seen, torch.Tensor) and isinstance(expected, torch.Tensor) and seen.shape == expected.shape:
            a, b = seen.detach().double(), expected.detach().double()
            difference = float(torch.linalg.vector_norm(a - b))
            scale = float(torch.linalg.vector_norm(b))
            if difference <= TOLERANCE * scale + noise or torch.equal(a.nan_to_num(), b.nan_to_num()):
                return
            kind = Doubtful if difference <= KINK * scale else NotCaptured
            seen, expected = f"{difference:.3g} of {scale:.3g}", "rounding"
        elif type(seen) is type(expected) and seen == expected:
            return
        raise kind(
            f"at update {self.updates} its {what} differ from what Python computes ({seen}, not {expected}): does the loss "
            "depend on a number that changes from one update to the next? Pass it as a tensor"
        )


def settings_of(optimizer: Adam) -> tuple[Any, ...]:
    group = optimizer.param_groups[0]
    return group["betas"], group["eps"], group["weight_decay"], group["max_grad_norm"]
