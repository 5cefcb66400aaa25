"""Compiled updates: what is captured does what Python does; what cannot be captured is told, and Python does it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_update import Small, network
from torch import nn
from torch.distributions import Normal
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import fdg
from fdg import Learner, launch
from fdg.algorithms.ppo import PPO
from fdg.capture import Captures, artifacts, sites
from fdg.update import captured

ROWS = 8


def batch(turn: int, rows: int = ROWS) -> TensorDict:
    generator = torch.Generator().manual_seed(turn)
    then = {
        "observation": torch.randn(rows, 4, generator=generator),
        "reward": torch.randn(rows, 1, generator=generator),
        "done": torch.rand(rows, 1, generator=generator) < 0.2,
        "terminated": torch.rand(rows, 1, generator=generator) < 0.2,
    }
    now = {
        "observation": torch.randn(rows, 4, generator=generator),
        "action": torch.randint(2, (rows,), generator=generator),
    }
    return TensorDict({**now, "next": then}, [rows])


class Q(Learner):
    """A learner with what may go wrong: a target network, numbers that change, a branch, something to write."""

    def __init__(self) -> None:
        self.network, self.bonus, self.count = network(4, 6, 2), 0.5, 0
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.scale = torch.tensor(1.0)
        self.seen = torch.zeros(4)
        self.config = SimpleNamespace(power=2.0)
        self.optimizer = fdg.Adam(self.network, lr=0.01, max_grad_norm=0.5)

    def loss(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        value = self.network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
        with torch.no_grad():
            goal = batch["next", "reward"] + self.target(batch["next", "observation"]).amax(-1, keepdim=True)
        error = self.scale * (value - goal).abs() ** self.config.power
        batch["td_error"] = error.detach()
        return {"loss": error.mean(), "value": value.mean()}

    def learn(self, turn: int, rows: int = ROWS) -> Any:
        rows_ = batch(turn, rows)
        return self.update(self.loss, rows_), rows_

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer
        count = torch.tensor(self.count)
        return [state.exp_avg, state.exp_avg_sq, state.steps, self.seen, count, *self.network.parameters()]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The trace runs as it is, not compiled, which takes half a minute. Yields what the user is told."""

    def run(module: Any, inputs: Any, say: Any) -> Any:
        return lambda values: list(module(*values))

    monkeypatch.setattr(sites, "compiled", run)
    yield []


class Both:
    """A learner twice: by Python, and captured."""

    def __init__(self, make: Any, said: list[str]) -> None:
        torch.manual_seed(1)
        self.python = make()
        torch.manual_seed(1)
        self.captured = make()
        self.captures, self.said = Captures(said.append), said

    def turn(self, turn: int, *more: Any) -> None:
        random, numpy = torch.get_rng_state(), np.random.get_state()
        expected, rows = self.python.learn(turn, *more)
        after = torch.get_rng_state()
        torch.set_rng_state(random), np.random.set_state(numpy)
        with captured(self.captures):
            seen, other = self.captured.learn(turn, *more)
        assert torch.equal(torch.get_rng_state(), after), "the same random numbers are drawn"
        self.close(seen, expected)
        self.close(other, rows)
        self.close(self.captured.tensors(), self.python.tensors())

    def close(self, seen: Any, expected: Any) -> None:
        if isinstance(expected, TensorDict):
            assert set(seen.keys(True, True)) == set(expected.keys(True, True))
            seen, expected = (dict(value.items(True, True)) for value in (seen, expected))
        torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-5)

    def change(self, function: Any) -> None:
        for learner in (self.python, self.captured):
            function(learner)


def test_the_captured_step_does_what_python_does(traced: list[str]) -> None:
    """Results, what is put into the batch, targets changed in place, a step size that changes."""
    both = Both(Q, traced)
    for turn in range(12):
        both.turn(turn)
        both.change(
            lambda learner: torch._foreach_lerp_(
                list(learner.target.parameters()), list(learner.network.parameters()), 0.3
            )
        )
        both.change(lambda learner: learner.scale.mul_(1.1))
        both.change(lambda learner: setattr(learner.optimizer, "lr", learner.optimizer.lr * 0.9))
    assert both.captures.updates == 12 and not traced


class WithTorchRL(Q):
    def __init__(self) -> None:
        super().__init__()
        values = QValueActor(self.network, in_keys=["observation"], action_space="categorical")
        self.torchrl = DQNLoss(values, delay_value=True, action_space="categorical")
        self.torchrl.make_value_estimator(gamma=0.9)
        self.soft = SoftUpdate(self.torchrl, tau=0.3)

    def learn(self, turn: int, rows: int = ROWS) -> Any:
        rows_ = batch(turn, rows)
        result = self.update(self.torchrl, rows_)
        self.soft.step()
        return result, rows_


def test_losses_of_torchrl(traced: list[str]) -> None:
    both = Both(WithTorchRL, traced)
    for turn in range(6):
        both.turn(turn)
    assert both.captures.updates == 6 and not traced


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("loss", ["fdg", "torchrl"])
def test_ppo(traced: list[str], env: str, loss: str) -> None:
    """TorchRL's loss looks whether the entropy is finite, and goes another way if not."""
    settings: dict[str, Any] = {"env": env, "iterations": 2, "envs": 2, "steps": 16, "hidden_dim": 8, "seed": 2}
    if loss == "torchrl":
        settings["loss"] = loss
    expected = launch(PPO, tuned=False, **settings)
    seen = launch(PPO, tuned=False, compile_update=True, notice=traced.append, **settings)
    assert seen.metrics["compiled_updates"] > 2 and not traced
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(seen.parameters[name], parameter, rtol=1e-3, atol=1e-4)


def test_another_target_network_is_captured_anew(traced: list[str]) -> None:
    both = Both(Q, traced)
    both.turn(0)
    both.change(lambda learner: setattr(learner, "target", network(4, 6, 2, seed=5)))
    both.turn(1)
    both.change(lambda learner: setattr(learner.optimizer, "max_grad_norm", 0.01))
    both.turn(2)
    assert both.captures.updates == 3 and not traced


def test_several_shapes(traced: list[str]) -> None:
    both = Both(Q, traced)
    for turn in range(8):
        both.turn(turn, 5 + turn % 4)
    assert both.captures.updates == 8
    both.turn(9, 10)
    assert both.captures.updates == 8 and "were of 4 kinds" in traced[0]


class ReadsNumber(Q):
    def loss(self, batch: TensorDict) -> Any:
        return super().loss(batch)["loss"] + self.bonus * self.network(batch["observation"]).square().mean()


class ReadsConfig(Q):
    def loss(self, batch: TensorDict) -> Any:
        return super().loss(batch)


class Draws(Q):
    """Draws in several ways, as SAC and TD3 do in their losses."""

    def loss(self, batch: TensorDict) -> Any:
        x = batch["observation"]
        noise = torch.randn(ROWS, 4) + (torch.randn_like(x) * 0.1).clamp(-0.2, 0.2) + torch.rand(4)
        noise = noise + torch.empty_like(x).exponential_().log() + Normal(x, x.exp()).rsample()
        return super().loss(batch)["loss"] + (self.network(x + noise)).square().mean()


class DrawsByData(Q):
    def loss(self, batch: TensorDict) -> Any:
        kept = torch.bernoulli(batch["observation"].sigmoid())
        return self.network(kept).square().mean()


class DrawsByNumpy(Q):
    def loss(self, batch: TensorDict) -> Any:
        return self.network(batch["observation"]).square().mean() * float(np.random.rand())


class Sets(Q):
    def loss(self, batch: TensorDict) -> Any:
        self.count += 1
        return super().loss(batch)


class Lambda(Q):
    def learn(self, turn: int, rows: int = ROWS) -> Any:
        rows_ = batch(turn, rows)
        return self.update(lambda: Q.loss(self, rows_)), rows_


class Item(Q):
    def loss(self, batch: TensorDict) -> Any:
        loss = super().loss(batch)["loss"]
        return loss * min(1.0, 3.0 / loss.item())


class OtherOptimizer(Q):
    def __init__(self) -> None:
        super().__init__()
        self.other = torch.optim.Adam(self.network.parameters(), fused=True)

    def loss(self, batch: TensorDict) -> Any:
        return super().loss(batch)

    def learn(self, turn: int, rows: int = ROWS) -> Any:
        rows_ = batch(turn, rows)
        return self.update(self.loss, rows_, optimizer=self.other), rows_


@pytest.mark.parametrize(
    "learner, message",
    [
        (
            ReadsNumber,
            r"reads self\.bonus, a number that changes",
        ),
        (
            ReadsConfig,
            "at update 2 its .* differ from what Python computes",
        ),
        (DrawsByData, "draws random numbers that depend on data .*pass them"),
        (DrawsByNumpy, "draws from numpy or random"),
        (Sets, r"sets self\.count"),
        (Lambda, "made anew for each update"),
        (Item, "cannot be traced"),
        (OtherOptimizer, r"its optimizer is Adam; write self\.optimizer = fdg\.Adam"),
    ],
)
def test_what_cannot_be_captured_is_told(traced: list[str], learner: Any, message: str) -> None:
    both = Both(learner, traced)
    both.turn(0)
    for turn in range(1, 3):
        if learner is ReadsNumber:
            both.change(lambda one: setattr(one, "bonus", one.bonus * 0.9))
        both.change(lambda one: setattr(one.config, "power", 1.5))
        both.turn(turn)
    (said,) = traced
    assert re.fullmatch(
        f"the update step of {learner.__name__}.* is not compiled: .*{message}.*Python makes the updates", said
    )


def test_random_numbers_are_those_that_python_draws(traced: list[str]) -> None:
    both = Both(Draws, traced)
    for turn in range(6):
        both.turn(turn)
    assert both.captures.updates == 6 and not traced


class Branching(Q):
    def loss(self, batch: TensorDict) -> Any:
        loss = super().loss(batch)["loss"]
        return loss if loss < 3.0 else 0.1 * loss


def test_a_branch_that_goes_another_way(traced: list[str]) -> None:
    both = Both(Branching, traced)
    for turn in range(12):
        both.change(lambda learner, turn=turn: learner.scale.fill_(10.0 if turn in (5, 9) else 0.1))
        both.turn(turn)
    assert both.captures.updates == 10 and not traced


class Running(Q):
    """Keeps a running mean in its loss: a tensor that is written in place."""

    def loss(self, batch: TensorDict) -> Any:
        self.seen.lerp_(batch["observation"].mean(0), 0.1)
        return super().loss(batch)["loss"] + (self.network(batch["observation"] - self.seen)).square().mean()


def test_tensors_written_in_the_loss(traced: list[str]) -> None:
    both = Both(Running, traced)
    for turn in range(11):
        both.turn(turn)
    assert both.captures.updates == 11 and not traced


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(artifacts, "FORMAT", "of this test")
    both = Both(Q, said)
    both.turn(0)
    assert "there is no C++ compiler; install g++" in said[0] and not both.captures.updates


def test_the_cache_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "KEPT_FILES", 3)
    monkeypatch.setattr(artifacts, "KEPT_BYTES", 25)
    for number in range(5):
        (tmp_path / f"{number}.pt2").write_bytes(bytes(10))
        os.utime(tmp_path / f"{number}.pt2", (number, number))
    artifacts.tidy(tmp_path)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["3", "4"]


def test_compiled_to_one_result_under_all_policies(tmp_path: Path) -> None:
    """One artifact serves every process: the same bits. A run that goes on has them too."""
    said: list[str] = []
    expected = launch(Small, compile_update=True, notice=said.append)
    assert expected.metrics["compiled_updates"] == 6
    assert said[0].startswith("compiling the update step") and said[1].startswith("compiled the update step in")
    again = launch(Small, compile_update=True, policy="single_learner_coarse", engine="process", notice=said.append)
    assert again.params_sha256 == expected.params_sha256 and again.metrics["compiled_updates"] == 6
    launch(Small, iterations=3, checkpoint_every=3, folder=tmp_path, compile_update=True, notice=said.append)
    resumed = launch(Small, resume=tmp_path, iterations=6, notice=said.append)
    assert resumed.metrics["compiled_updates"] == 3 and resumed.params_sha256 == expected.params_sha256
    assert len(said) == 2, "found in the cache"
    plain = launch(Small)
    assert plain.metrics["compiled_updates"] == 0
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(expected.parameters[name], parameter, rtol=1e-4, atol=1e-6)


def test_several_learners_are_not_compiled() -> None:
    said: list[str] = []
    result = launch(
        Small,
        policy="multi_learner",
        engine="process",
        workers=2,
        actors=2,
        iterations=1,
        compile_update=True,
        notice=said.append,
    )
    assert "several learners" in said[0] and result.metrics["compiled_updates"] == 0


def test_parameters_of_a_module_used_twice() -> None:
    shared = nn.Linear(3, 3)
    assert (
        len(fdg.Adam([*shared.parameters(), *nn.Sequential(shared, nn.Tanh()).parameters()]).param_groups[0]["params"])
        == 2
    )


def test_results_that_cancel_out_may_differ_by_rounding() -> None:
    step: Any = SimpleNamespace(updates=1)
    sites.Captured.agree(step, "results", torch.tensor(1.5e-7), torch.tensor(2.5e-8), sites.CANCELLED)
    with pytest.raises(sites.NotCaptured, match="at update 1 its results differ"):
        sites.Captured.agree(step, "results", torch.tensor(1.001e-2), torch.tensor(1e-2 - 1e-4), sites.CANCELLED)


@pytest.mark.parametrize(
    "off, by, told",
    [
        ({2}, 1.01, ""),
        ({2, 3, 100}, 1.01, ""),
        ({2, 3, 4}, 1.01, "at update 4 its grad"),
        ({2, 4, 6, 8}, 1.01, "at update 8 its grad"),
        ({10}, 2.0, "at update 10 its grad"),
    ],
)
def test_a_row_on_the_other_side_of_a_kink_is_no_reason_to_give_up(
    traced: list[str], monkeypatch: pytest.MonkeyPatch, off: set[int], by: float, told: str
) -> None:
    call = sites.Captured.__call__

    def changed(self: Any, *args: Any) -> Any:
        result = call(self, *args)
        if self.updates in off:
            self.optimizer.exp_avg *= by
        return result

    monkeypatch.setattr(sites.Captured, "__call__", changed)
    learner, captures = Q(), Captures(traced.append)
    with captured(captures):
        for turn in range(101):
            learner.learn(turn)
    assert len(traced) == bool(told) and all(told in said for said in traced)
    assert captures.updates == (max(off) - 1 if told else 101)
