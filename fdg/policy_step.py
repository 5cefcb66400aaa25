"""A quick policy step for small networks, and quick draws: for `Actor.act`, or wherever no gradients are needed.

    values = fdg.fast(self.network, td["observation"])            # self.network(td["observation"])
    values = fdg.fast(self.network, td["observation"], rows)      # the same for some rows, 0 for the others
    action = fdg.epsilon_greedy(values, 0.1)                      # values.argmax(-1), or now and then a random one
    action = fdg.sample_categorical(logits)                       # Categorical(logits=logits).sample()
    action = fdg.sample_normal(mean, std)                         # Normal(mean, std).sample()

With a few rows, calling modules takes longer than what they compute: `benchmarks/policy_step.py` shows how much.
"""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import ref

import torch
from torch import nn

from fdg.runtime.native import native
from fdg.runtime.values import plain

linear: Any = torch._C._nn.linear  # type: ignore[attr-defined]
_IN_PLACE: dict[type, Any] = {
    nn.Tanh: torch.Tensor.tanh_,
    nn.ReLU: torch.Tensor.relu_,
    nn.Sigmoid: torch.Tensor.sigmoid_,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FEW = 8
"""Rows up to which compiled code is quicker than torch."""
_FOLLOWS = {nn.Tanh: 1, nn.ReLU: 2}
"""What compiled code knows to follow a linear layer, by its numbers for it; 0 is nothing."""
_WEIGHTS = (nn.Parameter, torch.Tensor)
Step = tuple[Any, Any]
"""Parameters of a linear layer and None; or None and a function."""
Layer = tuple[Any, int]
"""Parameters of a linear layer and what follows it, see `_FOLLOWS`."""
_plans: dict[int, tuple[Any, list[Any], list[Step] | None, list[Layer] | None]] = {}
"""By identity: a reference to the network, its parts, the steps, and the layers, if there is nothing else in it. A
WeakKeyDictionary takes 2 µs longer."""


def fast(module: nn.Module, x: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
    """What `module(x)` is, without autograd: for a Sequential (or an MLP, TorchRL's or ours) by fewer steps.

    `where` says which rows are wanted (bool, one for each); the others are 0.

    For a few rows of a network of linear layers, tanh and relu it is computed by compiled code, where there is such code: within rounding
    of `module(x)`, with the same bits on every CPU, each row's whatever rows are beside it. Otherwise it has the bits of
    `module(x)`. Weights are read where they are, so that an update, or weights that came from the learner, are seen.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> torch.allclose(fast(network, torch.ones(3, 4)), network(torch.ones(3, 4)), atol=1e-6)
    True
    >>> fast(network, torch.ones(2, 4), torch.tensor([True, False]))[1]
    tensor([0., 0.])
    """
    known = _plans.get(id(module))
    if known is None or known[0]() is not module or known[1] != list(module._modules.values()):
        known = _plan(module)
    _, _, steps, layers = known
    if layers is not None and x.dim() == 2 and (where is not None or len(x) <= FEW):
        small = _small(layers, x, where)
        if small is not None:
            return small
    gradients = torch.is_grad_enabled()
    if gradients:
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes 3 µs more
    try:
        return _by_torch(module, steps, x) if where is None else _for_some(module, steps, x, where)
    finally:
        if gradients:
            torch._C._set_grad_enabled(True)


def _by_torch(module: nn.Module, steps: list[Step] | None, x: torch.Tensor) -> torch.Tensor:
    if steps is None:
        return module(x)
    for parameters, function in steps:
        x = linear(x, parameters["weight"], parameters["bias"]) if function is None else function(x)
    return x


def _for_some(module: nn.Module, steps: list[Step] | None, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """For all rows, unless most of them are not wanted."""
    if 2 * int(where.sum()) >= len(x):
        y = _by_torch(module, steps, x)
        return y.masked_fill(~where.view(-1, *[1] * (y.dim() - 1)), 0)
    wanted = _by_torch(module, steps, x[where])
    y = wanted.new_zeros(len(x), *wanted.shape[1:])
    y[where] = wanted
    return y


def _small(layers: list[Layer], x: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor | None:
    """The output for a few rows, by compiled code; None if they are not few, or there is more to it than numbers in memory."""
    if not plain(x, torch.float32) or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    rows, width = x.shape
    if torch.is_autocast_enabled("cpu") or not (where is None or plain(where, torch.bool, (rows,))):
        return None
    try:
        arguments: list[int] = []
        for parameters, follows in layers:
            weight, bias = parameters["weight"], parameters["bias"]
            if type(weight) not in _WEIGHTS or weight.dtype is not torch.float32 or not weight.is_contiguous():
                return None
            outputs, inputs = weight.shape
            if inputs != width or not weight.is_cpu or weight.is_neg():
                return None
            if bias is not None and not (type(bias) in _WEIGHTS and bias.dtype is torch.float32 and bias.is_cpu):
                return None
            if bias is not None and (bias.shape != (outputs,) or bias.stride() != (1,) or bias.is_neg()):
                return None
            arguments += weight.data_ptr(), 0 if bias is None else bias.data_ptr(), inputs, outputs, follows
            width = outputs
        y = torch.empty(rows, width, dtype=torch.float32)
        live = 0 if where is None else where.data_ptr()
        few = native.network(x.data_ptr(), rows, live, FEW, y.data_ptr(), *arguments)
    except RuntimeError:  # of data_ptr: inside torch.vmap tensors have no memory of their own
        return None
    return y if few else None


def _plan(module: nn.Module) -> tuple[Any, list[Any], list[Step] | None, list[Layer] | None]:
    """Make a plan and keep it as long as the network lives."""
    key = id(module)

    def forget(_: Any, plans: dict[int, Any] = _plans) -> None:
        plans.pop(key, None)

    steps = plan_of(module)
    layers = None if native is None or steps is None else layers_of(steps)
    known = _plans[key] = ref(module, forget), list(module._modules.values()), steps, layers
    return known


def layers_of(steps: list[Step]) -> list[Layer] | None:
    """Steps as linear layers with what follows each; None if there are others."""
    codes = {_IN_PLACE[kind]: code for kind, code in _FOLLOWS.items()}
    layers: list[Layer] = []
    for parameters, function in steps:
        if function is None:
            layers.append((parameters, 0))
        elif function in codes and layers and layers[-1][1] == 0:
            layers[-1] = layers[-1][0], codes[function]
        else:
            return None
    return layers or None


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


def epsilon_greedy(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The index of each row's highest value; with a chance of epsilon, any index instead.

    >>> epsilon_greedy(torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 0.0]]), epsilon=0.0)
    tensor([1, 0])
    """
    rows, choices = values.shape[:-1], values.shape[-1]
    chance, other = torch.rand(rows, dtype=torch.float32), torch.randint(choices, rows)
    if native is not None and plain(values, torch.float32) and plain(other, torch.int64) and type(epsilon) is float:
        with contextlib.suppress(RuntimeError):  # of data_ptr, as in `_small`
            places = values.data_ptr(), chance.data_ptr(), other.data_ptr()
            native.epsilon_greedy(*places, other.numel(), choices, epsilon)
            return other
    return torch.where(chance < epsilon, other, values.argmax(-1))


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
