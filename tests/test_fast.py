"""The quick policy step: what the module computes, with the weights of now; draws of the right distribution."""

from __future__ import annotations

import copy
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchrl.modules import MLP

import fdg
from fdg import policy_step
from fdg.policy_step import FEW, layers_of, plan_of
from fdg.runtime.native import native

compiled = pytest.mark.skipif(native is None, reason="FDG was installed without a C compiler")


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
    "nothing": lambda: nn.Sequential(nn.Identity()),
}


COMPILED = {"tanh", "no bias", "torchrl", "one layer"} if native else set()
"""Networks whose output for a few rows is computed by compiled code."""


def is_output(seen: torch.Tensor, module: nn.Module, x: torch.Tensor) -> bool:
    wanted = module(x)
    return seen.shape == wanted.shape and torch.allclose(seen, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*QUICK, *AS_THEY_ARE])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (7, 4), (9, 4), (0, 4), (3, 5, 4)])
def test_what_the_module_computes(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = {**QUICK, **AS_THEY_ARE}[name](), torch.randn(shape)
    before = x.clone()
    seen = fdg.fast(module, x)
    by_torch = name not in COMPILED or len(shape) != 2 or shape[0] > FEW
    assert torch.equal(seen, module(x)) if by_torch else is_output(seen, module, x)
    assert not seen.requires_grad
    assert torch.equal(x, before), "the observation is not written to"
    assert torch.is_grad_enabled()


@compiled
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("sizes", [(4, 64, 64, 2), (17, 33, 5, 6), (105, 256, 8), (1, 1)])
def test_compiled_code_computes_the_same_numbers(activation: Any, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    module, x = nn.Sequential(*layers[: None if sizes == (1, 1) else -1]), 3 * torch.randn(FEW, sizes[0])
    assert layers_of(plan_of(module) or [])
    seen = fdg.fast(module, x)
    assert is_output(seen, module, x)
    for rows in (1, 3, 8):
        assert torch.equal(fdg.fast(module, x[:rows]), seen[:rows]), "a row does not depend on those beside it"


@pytest.mark.parametrize("name", [*QUICK, *AS_THEY_ARE])
@pytest.mark.parametrize("rows", [2, 25])
@pytest.mark.parametrize("wanted", [0, 1, 2, 8, 9, 20, 25])
def test_some_rows(name: str, rows: int, wanted: int) -> None:
    torch.manual_seed(0)
    module, x = {**QUICK, **AS_THEY_ARE}[name](), torch.randn(rows, 4)
    where = torch.zeros(rows, dtype=torch.bool)
    where[torch.randperm(rows)[:wanted]] = True
    before = x.clone()
    seen = fdg.fast(module, x, where)
    if wanted:
        assert is_output(seen[where], module, x[where])
    assert seen.shape == module(x).shape and (seen[~where] == 0).all()
    assert torch.equal(x, before)


@compiled
def test_some_rows_have_the_bits_of_few_rows() -> None:
    torch.manual_seed(0)
    module, x, where = QUICK["tanh"](), torch.randn(40, 4), torch.zeros(40, dtype=torch.bool)
    where[::5] = True
    assert torch.equal(fdg.fast(module, x, where)[where], fdg.fast(module, x[where]))


@compiled
def test_tanh_of_compiled_code() -> None:
    x = torch.cat([torch.linspace(-30, 30, 20_001), torch.tensor([0.0, 1e-30, -1e-30, torch.inf, -torch.inf])])
    module = nn.Sequential(nn.Linear(1, len(x), bias=False), nn.Tanh())
    weight: Any = module[0].weight
    weight.data[:, 0] = x
    seen = fdg.fast(module, torch.ones(1, 1))[0].double()
    wanted = x.double().tanh()
    assert (seen.abs() <= 1).all() and ((seen - wanted).abs() <= 5e-7 * wanted.abs()).all()
    assert fdg.fast(module, torch.full((1, 1), torch.nan)).isnan().all()


@compiled
def test_compiled_code_leaves_to_torch_what_is_more_than_numbers() -> None:
    module, x = QUICK["tanh"](), torch.randn(3, 4)
    assert torch.equal(torch.vmap(lambda row: fdg.fast(module, row[None]))(x)[:, 0], module(x))
    strided = x.t().contiguous().t()
    assert torch.equal(fdg.fast(module, strided), module(strided))
    double = QUICK["tanh"]().double()
    assert torch.equal(fdg.fast(double, x.double()), double(x.double()))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fdg.fast(module, torch.randn(3, 5))
    with torch.utils._python_dispatch._disable_current_modes():
        traced = make_fx(lambda given: fdg.fast(module, given))(x)
    y = torch.randn(3, 4)
    assert is_output(traced(y), module, y), "it was traced, not computed"


def test_another_default_dtype_changes_nothing() -> None:
    module, x, values = QUICK["tanh"](), torch.randn(3, 4), torch.randn(5, 2)
    torch.manual_seed(2)
    wanted = fdg.fast(module, x), fdg.epsilon_greedy(values, 0.5)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(2)
        seen = fdg.fast(module, x), fdg.epsilon_greedy(values, 0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, seen, wanted)) and seen[0].dtype == torch.float32


def test_tensors_without_memory_of_their_own() -> None:
    module, none = QUICK["tanh"](), torch._efficientzerotensor(3, 4)
    assert is_output(fdg.fast(module, none), module, torch.zeros(3, 4))
    assert fdg.epsilon_greedy(none, 0.0).tolist() == [0, 0, 0]
    values = torch.rand(5, 3, 2)
    chosen = torch.vmap(lambda rows: fdg.epsilon_greedy(rows, 0.0), randomness="different")(values)
    assert torch.equal(chosen, values.argmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fdg.fast(module, torch.randn(3, 4)).dtype == module(torch.randn(3, 4)).dtype == torch.bfloat16


@compiled
def test_a_bias_that_is_no_row_of_floats() -> None:
    module, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    layer: Any = module[0]
    layer.bias.data = torch.randn(6)[::2]
    assert torch.equal(fdg.fast(module, x), module(x))
    layer.bias.data = torch.randn(1).expand(3)
    assert torch.equal(fdg.fast(module, x), module(x))


@pytest.mark.parametrize("by", [pytest.param("compiled code", marks=compiled), "torch"])
def test_epsilon_greedy(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "torch":
        monkeypatch.setattr(policy_step, "native", None)
    values = torch.tensor([[0.0, 5.0, 5.0], [1.0, torch.nan, 7.0], [torch.inf, 3.0, torch.inf], [-2.0, -3.0, -1.0]])
    assert fdg.epsilon_greedy(values, 0.0).tolist() == values.argmax(-1).tolist() == [1, 1, 0, 2]
    torch.manual_seed(5)
    many = values[3].expand(30_000, 3).contiguous()
    drawn = fdg.epsilon_greedy(many, 0.3)
    torch.testing.assert_close(drawn.bincount() / 30_000, torch.tensor([0.1, 0.1, 0.8]), atol=0.01, rtol=0)
    torch.manual_seed(5)
    chance, other = torch.rand(30_000), torch.randint(3, (30_000,))
    assert torch.equal(drawn, torch.where(chance < 0.3, other, many.argmax(-1)))
    assert fdg.epsilon_greedy(torch.zeros(2, 5, 4), 1.0).shape == (2, 5)


def test_which_networks_are_quick() -> None:
    assert all(plan_of(make()) for make in QUICK.values())
    assert [plan_of(make()) is None for make in AS_THEY_ARE.values()] == [True, True, True, False, False]


def test_it_follows_the_weights() -> None:
    """Updates in place, an optimizer made later, other memory, another layer, a copy."""
    torch.manual_seed(0)
    module, x = QUICK["tanh"](), torch.randn(3, 4)
    fdg.fast(module, x)
    optimizer = fdg.Adam(module, lr=0.1)
    module(x).sum().backward()
    optimizer.step()
    assert is_output(fdg.fast(module, x), module, x)
    module[0].weight.data = torch.randn(8, 4)
    assert is_output(fdg.fast(module, x), module, x)
    module[2] = nn.Linear(8, 8)
    assert is_output(fdg.fast(module, x), module, x)
    module[4].weight = nn.Parameter(torch.randn(2, 8))
    assert is_output(fdg.fast(module, x), module, x)
    twin = copy.deepcopy(module)
    twin[0].bias.data.add_(1)
    assert is_output(fdg.fast(twin, x), twin, x) and not is_output(twin(x), module, x)


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
    assert is_output(fdg.fast(module, x), module, x)
    layer.weight.data, layer.bias.data = layer.weight.data[:2], layer.bias.data[:2]
    assert is_output(fdg.fast(module, x), module, x)
