"""Running statistics: those of all values seen, in whatever pieces."""

from __future__ import annotations

import pytest
import torch

from fdg import Normalizer, RewardScaler, UsageError


@pytest.mark.parametrize("pieces", [[60], [1, 59], [20, 7, 33], [30, 30]])
def test_statistics_are_those_of_everything_seen(pieces):
    torch.manual_seed(1)
    x = torch.randn(60, 3) * torch.tensor([1.0, 100.0, 0.01]) + torch.tensor([0.0, -500.0, 3.0])
    normalizer = Normalizer(3)
    for part in x.split(pieces):
        normalizer.update(part)
    assert normalizer.count == 60
    assert torch.allclose(normalizer.mean, x.double().mean(0))
    assert torch.allclose(normalizer.var, x.double().var(0, correction=0))
    expected = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    assert torch.allclose(normalizer(x), expected.float(), atol=1e-3)


def test_dimensions_before_the_shape_are_rows():
    x = torch.randn(4, 5, 2, 3)
    one, other = Normalizer(2, 3), Normalizer(2, 3)
    one.update(x)
    other.update(x.reshape(20, 2, 3))
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one(x).reshape(20, 2, 3), other(x.reshape(20, 2, 3)))


def test_nothing_changes_before_the_first_update_and_far_values_are_clipped():
    normalizer = Normalizer(2, clip=5.0)
    assert normalizer(torch.tensor([1.5, -70.0])).tolist() == [1.5, -5.0]
    normalizer.update(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
    assert normalizer(torch.tensor([1.0, 1.0])).tolist() == [0.0, 0.0]  # one that never changes stays finite
    assert normalizer(torch.tensor([1.0, 100.0])).tolist() == [0.0, 5.0]


def test_other_shapes_are_refused():
    with pytest.raises(UsageError, match=r"shape \[4, 2\]; the last dimensions must be \[3\]"):
        Normalizer(3).update(torch.zeros(4, 2))
    with pytest.raises(UsageError, match=r"both must be \[T, N\]"):
        RewardScaler(0.9).update(torch.zeros(4), torch.zeros(4, dtype=torch.bool))
    scaler = RewardScaler(0.9)
    scaler.update(torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.bool))
    with pytest.raises(UsageError, match="of 3 environments, and of 2 the last time"):
        scaler.update(torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bool))


@pytest.mark.parametrize("pieces", [[30], [1, 29], [10, 4, 16]])
def test_rewards_are_divided_by_the_spread_of_the_return_so_far(pieces):
    torch.manual_seed(2)
    reward, done = torch.randn(30, 2) + 3, torch.rand(30, 2) < 0.2
    returns, so_far = [], torch.zeros(2, dtype=torch.float64)
    for step in range(30):
        so_far = 0.9 * so_far + reward[step]
        returns.append(so_far)
        so_far = so_far * ~done[step]
    scaler = RewardScaler(0.9, clip=1.0)
    for part, ends in zip(reward.split(pieces), done.split(pieces), strict=True):
        scaler.update(part, ends)
    expected = reward / torch.stack(returns).std(correction=0)
    assert torch.allclose(scaler(reward), expected.clamp(-1, 1).float(), atol=1e-5)
