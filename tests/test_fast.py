"""The quick policy step: the module's own bits, with the weights of now; draws of the right distribution."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.modules import MLP

import fdg
from fdg import policy_step
from fdg.policy_step import plan_of


class Doubled(nn.Module):
    """A user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(2 * x)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 2))
    module[0].register_forward_hook(lambda layer, given, out: out + 1)
    return module


QUICK: dict[str, Any] = {
    "tanh": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)),
    "no bias": lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2)),
    "activation first": lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2), nn.Identity(), nn.Sigmoid()),
    "other layers": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ELU(), nn.Dropout(0.0), nn.Linear(8, 2)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.SiLU()), nn.Linear(8, 2)),
    "torchrl": lambda: MLP(4, 2, num_cells=[8, 8], activation_class=nn.ReLU),
    "other dimensions": lambda: nn.Sequential(nn.Linear(4, 8), nn.Unflatten(-1, (2, 4)), nn.Linear(4, 2)),
}
AS_THEY_ARE: dict[str, Any] = {
    "own module": Doubled,
    "own module inside": lambda: nn.Sequential(Doubled(), nn.Tanh()),
    "hooks": hooked,
    "one layer": lambda: nn.Linear(4, 2),
}


@pytest.mark.parametrize("name", [*QUICK, *AS_THEY_ARE])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (7, 4), (3, 5, 4)])
def test_the_modules_own_bits(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = {**QUICK, **AS_THEY_ARE}[name](), torch.randn(shape)
    before = x.clone()
    seen = fdg.fast(module, x)
    assert torch.equal(seen, module(x)) and not seen.requires_grad
    assert torch.equal(x, before), "the observation is not written to"
    assert torch.is_grad_enabled()


def test_which_networks_are_quick() -> None:
    assert all(plan_of(make()) for make in QUICK.values())
    assert [plan_of(make()) is None for make in AS_THEY_ARE.values()] == [True, True, True, False]


def test_it_follows_the_weights() -> None:
    """Updates in place, an optimizer made later, other memory, another layer, a copy."""
    torch.manual_seed(0)
    module, x = QUICK["tanh"](), torch.randn(3, 4)
    fdg.fast(module, x)
    optimizer = fdg.Adam(module, lr=0.1)
    module(x).sum().backward()
    optimizer.step()
    assert torch.equal(fdg.fast(module, x), module(x))
    module[0].weight.data = torch.randn(8, 4)
    assert torch.equal(fdg.fast(module, x), module(x))
    module[2] = nn.Linear(8, 8)
    assert torch.equal(fdg.fast(module, x), module(x))
    module[4].weight = nn.Parameter(torch.randn(2, 8))
    assert torch.equal(fdg.fast(module, x), module(x))
    twin = copy.deepcopy(module)
    twin[0].bias.data.add_(1)
    assert torch.equal(fdg.fast(twin, x), twin(x)) and not torch.equal(twin(x), module(x))


def test_draws_have_the_right_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.3, -1.0, 2.0]) + 5
    drawn = fdg.sample_categorical(logits.expand(20_000, 3))
    assert drawn.shape == (20_000,) and drawn.dtype == torch.int64
    torch.testing.assert_close(drawn.bincount(minlength=3) / 20_000, logits.softmax(-1), atol=0.012, rtol=0)
    mean, std = torch.tensor([1.0, -3.0]), torch.tensor([0.5, 2.0])
    drawn = fdg.sample_normal(mean.expand(20_000, 2), std)
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), std, atol=0.05, rtol=0)
    torch.manual_seed(3)
    first = fdg.sample_categorical(logits.expand(9, 3)), fdg.sample_normal(mean, std)
    torch.manual_seed(3)
    again = fdg.sample_categorical(logits.expand(9, 3)), fdg.sample_normal(mean, std)
    assert all(map(torch.equal, first, again)), "from the global generator, which is the actor's stream"


def test_plans_go_with_their_networks() -> None:
    module = QUICK["tanh"]()
    fdg.fast(module, torch.ones(3, 4))
    key = id(module)
    assert policy_step._plans[key][0]() is module
    del module
    gc.collect()
    assert key not in policy_step._plans


def test_weights_that_are_turned_or_cut_where_they_lie() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    fdg.fast(module, x)
    layer: Any = module[0]
    layer.weight.data = layer.weight.data.t()
    assert torch.equal(fdg.fast(module, x), module(x))
    layer.weight.data, layer.bias.data = layer.weight.data[:2], layer.bias.data[:2]
    assert torch.equal(fdg.fast(module, x), module(x))
