"""Adam on one flat tensor: parameters, gradients and moments are views of it, so that a step is a handful of kernels.

torch's own Adam handles each parameter by itself, and `clip_grad_norm_` does too. For the small networks of
reinforcement learning that is most of an update's time (`benchmarks/update_step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fdg.errors import UsageError

ALIGNMENT = 64
"""Bytes: each parameter begins where torch would allocate it. Products of matrices may differ in the last bit elsewhere."""
_fused_adam: Any = torch._fused_adam_  # type: ignore[attr-defined]


class Adam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015), with gradients clipped to a length where `max_grad_norm` is given.

        optimizer = fdg.Adam(network, lr=1e-3, max_grad_norm=10.0)
        optimizer.lr = 5e-4

    It is given a module or parameters, and moves them into one flat tensor; they stay the same objects. It takes torch's
    place: `zero_grad`, `step`, `param_groups`, `state_dict`, schedulers. Two things differ: gradients are zeroed, never
    None, and a parameter that got no gradient is updated as with a gradient of 0. Parameters that need no gradient
    when the optimizer is made are left alone.

    >>> layer = nn.Linear(4, 2)
    >>> optimizer = Adam(layer, lr=0.1, max_grad_norm=1.0)
    >>> layer(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.lr
    0.1
    """

    def __init__(
        self,
        params: nn.Module | Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> None:
        found = _parameters(params)
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("max_grad_norm", max_grad_norm)):
            if value is not None and not value >= 0:
                raise UsageError(f"fdg.Adam: {name} is {value}; write 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"fdg.Adam: betas are {betas}; write two numbers from 0 to below 1")
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self._begin(found, {**settings, "max_grad_norm": max_grad_norm})
        each = ALIGNMENT // found[0].itemsize
        size = sum(-(-parameter.numel() // each) * each for parameter in found)
        self.flat = torch.zeros(size, dtype=found[0].dtype, device=found[0].device)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.flat.device)
        self._link()

    def _begin(self, parameters: list[torch.Tensor], settings: dict[str, Any]) -> None:
        super().__init__([{"params": parameters}], settings)
        self._parameters: list[torch.Tensor] = self.param_groups[0]["params"]

    def _link(self) -> None:
        """Make parameters, their gradients and their state views of the flat tensors."""
        self.grad = torch.zeros_like(self.flat)
        """All gradients; the parameters' `.grad` are views of it."""
        self._views: list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]] = []
        self._lists: Any = [self.flat], [self.grad], [self.exp_avg], [self.exp_avg_sq], [], [self.steps]
        offset, each = 0, ALIGNMENT // self.flat.itemsize
        for parameter in self._parameters:
            end, size = offset + parameter.numel(), parameter.shape
            value, grad = self.flat[offset:end].view(size), self.grad[offset:end].view(size)
            self._views.append((parameter, value.data_ptr(), value, grad))
            moments = {
                "exp_avg": self.exp_avg[offset:end].view(size),
                "exp_avg_sq": self.exp_avg_sq[offset:end].view(size),
            }
            self.state[parameter] = {"step": self.steps, **moments}
            offset = -(-end // each) * each
        self._collect()

    def _collect(self) -> None:
        """Bring back what was put elsewhere: a gradient that was set, a parameter that was given other memory."""
        for parameter, place, value, grad in self._views:
            if parameter.grad is not grad:
                if parameter.grad is None:
                    grad.zero_()
                else:
                    grad.copy_(parameter.grad.detach())
                parameter.grad = grad
            if parameter.data_ptr() != place:
                value.copy_(parameter.detach())
                parameter.data = value

    @property
    def lr(self) -> float:
        """The step size."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float) -> None:
        self.param_groups[0]["lr"] = lr

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients longer than this are scaled down to it."""
        return self.param_groups[0]["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, length: float | None) -> None:
        self.param_groups[0]["max_grad_norm"] = length

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Forget all gradients. They become 0 whatever is asked for, since they are views of one tensor."""
        for parameter, _, _, grad in self._views:
            if parameter.grad is not grad:
                parameter.grad = grad
        self.grad.zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip the gradients, then move the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._collect()
        group = self.param_groups[0]
        longest = group["max_grad_norm"]
        if longest is not None:
            length = float(torch.linalg.vector_norm(self.grad))
            if length > longest:
                self.grad.mul_(longest / (length + 1e-6))
        self.steps.add_(1)
        beta1, beta2 = group["betas"]
        _fused_adam(
            *self._lists,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        self.stepped()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it in a profiler's record, for 10 µs

    def stepped(self) -> None:
        """Let autograd know that the parameters were written: by way of the flat tensor, it would not."""
        increment_version(self._parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise UsageError(
                "fdg.Adam has one group of parameters; make another fdg.Adam for those with other settings"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Moments and settings, as torch.optim.Adam has them: each parameter with a number of steps of its own."""
        made = super().state_dict()
        made["state"] = {index: {**entry, "step": self.steps.clone()} for index, entry in made["state"].items()}
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments and settings, of an fdg.Adam or a torch.optim.Adam of the same parameters."""
        saved, groups = state_dict["state"], state_dict["param_groups"]
        shapes = {index: tuple(entry["exp_avg"].shape) for index, entry in saved.items()}
        here = {index: tuple(parameter.shape) for index, parameter in enumerate(self._parameters)}
        count = sum(len(group["params"]) for group in groups)
        if len(groups) != 1 or count != len(here) or any(here[index] != shape for index, shape in shapes.items()):
            raise UsageError(
                f"fdg.Adam.load_state_dict: the state is of {count} parameters in {len(groups)} group(s), with moments of "
                f"shapes {list(shapes.values())}, and this optimizer has one group of {list(here.values())}"
            )
        for index, parameter in enumerate(self._parameters):
            for name in ("exp_avg", "exp_avg_sq"):
                moment = self.state[parameter][name]
                moment.copy_(saved[index][name]) if index in saved else moment.zero_()
        self.steps.fill_(max((float(entry["step"]) for entry in saved.values()), default=0.0))
        mine = self.param_groups[0]
        mine.update({name: value for name, value in groups[0].items() if name in mine and name != "params"})

    def __getstate__(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name) for name in ("flat", "exp_avg", "exp_avg_sq", "steps")}
        return {"group": self.param_groups[0], "defaults": self.defaults, **tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group, defaults = state.pop("group"), state.pop("defaults")
        self._begin(group["params"], defaults)
        self.param_groups[0].update({name: value for name, value in group.items() if name != "params"})
        self.__dict__.update(state)
        self._link()


def _parameters(given: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters to move, each once."""
    if isinstance(given, torch.Tensor):
        raise UsageError("fdg.Adam was given a tensor; write a module, or a list of parameters: fdg.Adam([tensor])")
    items = list(given.parameters() if isinstance(given, nn.Module) else given)
    if wrong := [item for item in items if not isinstance(item, torch.Tensor)]:
        raise UsageError(
            f"fdg.Adam was given {type(wrong[0]).__name__} among the parameters; write a module or parameters (for groups "
            "with settings of their own: one fdg.Adam for each)"
        )
    found = list({id(item): item for item in items if item.requires_grad}.values())
    if not found:
        raise UsageError(
            "fdg.Adam was given no parameter that needs a gradient: are they frozen, or the iterator used up?"
        )
    if not all(item.is_leaf for item in found):
        raise UsageError("fdg.Adam was given a tensor that is computed from others; give it the parameters themselves")
    kinds = list(dict.fromkeys((str(item.dtype), str(item.device)) for item in found))
    if len(kinds) > 1:
        raise UsageError(
            f"fdg.Adam was given parameters of {' and '.join(' on '.join(kind) for kind in kinds)}: they cannot lie in one "
            "tensor; make an fdg.Adam for each kind"
        )
    return found
