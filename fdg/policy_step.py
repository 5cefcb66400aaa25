"""A quick policy step for small networks, and quick draws: for `Actor.act`, or wherever no gradients are needed.

    values = fdg.fast(self.network, td["observation"])            # self.network(td["observation"]), to the bit
    action = fdg.sample_categorical(logits)                       # Categorical(logits=logits).sample()
    action = fdg.sample_normal(mean, std)                         # Normal(mean, std).sample()

With a few rows, calling modules takes longer than what they compute: `benchmarks/policy_step.py` shows how much.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import nn

linear: Any = torch._C._nn.linear  # type: ignore[attr-defined]
_IN_PLACE: dict[type, Any] = {
    nn.Tanh: torch.Tensor.tanh_,
    nn.ReLU: torch.Tensor.relu_,
    nn.Sigmoid: torch.Tensor.sigmoid_,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Step = tuple[Any, Any]
"""Parameters of a linear layer and None; or None and a function."""
_plans: dict[int, tuple[Any, list[Any], list[Step] | None]] = {}
"""By identity: a reference to the network, its parts, and the steps. A WeakKeyDictionary takes 2 µs longer."""


def fast(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What `module(x)` is, without autograd: for a Sequential (or an MLP, TorchRL's or ours) by fewer steps, to the same bits.

    Weights are read where they are, so that an update, or weights that came from the learner, are seen. Other modules
    are called as they are.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> bool((fast(network, torch.ones(3, 4)) == network(torch.ones(3, 4))).all())
    True
    """
    known = _plans.get(id(module))
    if known is None or known[0]() is not module or known[1] != list(module._modules.values()):
        known = _plan(module)
    steps = known[2]
    gradients = torch.is_grad_enabled()
    if gradients:
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes 3 µs more
    try:
        if steps is None:
            return module(x)
        for parameters, function in steps:
            x = linear(x, parameters["weight"], parameters["bias"]) if function is None else function(x)
        return x
    finally:
        if gradients:
            torch._C._set_grad_enabled(True)


def _plan(module: nn.Module) -> tuple[Any, list[Any], list[Step] | None]:
    """Make a plan and keep it as long as the network lives."""
    key = id(module)

    def forget(_: Any, plans: dict[int, Any] = _plans) -> None:
        plans.pop(key, None)

    known = _plans[key] = ref(module, forget), list(module._modules.values()), plan_of(module)
    return known


def plan_of(module: nn.Module) -> list[Step] | None:
    """A network as a list of steps; None if it is none that does one thing after the other."""
    layers = list(flattened(module))
    if not layers or any(layer is None or any(getattr(layer, hooks, None) for hooks in _HOOKS) for layer in layers):
        return None
    steps: list[Step] = []
    fresh = False
    """Whether what comes in was made here, and may be changed in place."""
    for layer in layers:
        if type(layer) is nn.Linear:
            steps.append((layer._parameters, None))
            fresh = True
        elif fresh and type(layer) in _IN_PLACE:
            steps.append((None, _IN_PLACE[type(layer)]))
        elif type(layer) is not nn.Identity:
            steps.append((None, layer.forward))
            fresh = False
    return steps


def flattened(module: nn.Module) -> Any:
    """The layers of a network, one after the other; None among them for what is not known to work like that."""
    kind = type(module)
    in_order = kind is nn.Sequential or (kind.__name__ == "MLP" and kind.__module__.startswith(("torchrl.", "fdg.")))
    if in_order and not any(getattr(module, hooks, None) for hooks in _HOOKS):
        for layer in module._modules.values():
            yield from flattened(layer)  # type: ignore[arg-type]
    elif kind.__module__.startswith("torch.nn.modules.") and not module._modules:
        yield module
    else:
        yield None


def sample_categorical(logits: torch.Tensor) -> torch.Tensor:
    """Draw from categorical distributions, one for each row of unnormalised log-probabilities (the Gumbel trick).

    >>> sample_categorical(torch.tensor([[0.0, 90.0], [90.0, 0.0]]))
    tensor([1, 0])
    """
    return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)


def sample_normal(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Draw from normal distributions.

    >>> sample_normal(torch.tensor([1.0, 2.0]), torch.zeros(2))
    tensor([1., 2.])
    """
    return torch.addcmul(mean, torch.randn_like(mean), std)
