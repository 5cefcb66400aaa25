"""The update step: fdg.Adam is torch's Adam on one flat tensor, wherever it goes; Learner.update is one step of it."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import fdg
from fdg import Actor, Agent, Config, Learner, ReplayBuffer, Trainer, UsageError, launch, step_mdp
from fdg.runtime.snapshot import restore, state_of
from fdg.runtime.weights import copy_component, place_of, shared_places
from fdg.runtime.wire import pack, unpack
from fdg.testing import assert_policies_equal


def network(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def data(turn: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(16, 4, generator=generator), 3 * torch.randn(16, 2, generator=generator)


def squared(module: nn.Module, turn: int = 0) -> torch.Tensor:
    x, y = data(turn)
    return (module(x) - y).pow(2).mean()


class Pair:
    """A network and its optimizer, as a learner has them."""

    def __init__(self, **settings: Any) -> None:
        self.network = network(4, 7, 2)
        self.optimizer = fdg.Adam(self.network, **{"lr": 0.01, "max_grad_norm": 0.5, **settings})

    def turn(self, turn: int = 0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = squared(self.network, turn)
        loss.backward()
        self.optimizer.step()
        return loss

    def values(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.network.parameters()])


# the optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-3}])
@pytest.mark.parametrize("longest", [None, 0.5, 1e6])
def test_adam_does_what_torchs_does(settings: dict[str, Any], longest: float | None) -> None:
    mine, other = Pair(max_grad_norm=longest, **settings), network(4, 7, 2)
    torchs = torch.optim.Adam(other.parameters(), lr=0.01, fused=True, **settings)
    for turn in range(20):
        mine.optimizer.lr = torchs.param_groups[0]["lr"] = 0.01 / (1 + turn)
        mine.turn(turn)
        torchs.zero_grad()
        squared(other, turn).backward()
        if longest is not None:
            nn.utils.clip_grad_norm_(other.parameters(), longest)
        torchs.step()
    for seen, expected in zip(mine.network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-7)


def is_flat(pair: Any) -> bool:
    """Whether the network's parameters are what the optimizer moves."""
    start, size = pair.optimizer.flat.data_ptr(), pair.optimizer.flat.nbytes
    return all(start <= parameter.data_ptr() < start + size for parameter in pair.network.parameters())


def by_message(pair: Pair) -> Pair:
    message = pack(pair)
    return unpack(message.head, [bytes(buffer) for buffer in message.buffers])


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "cloudpickle": lambda pair: pickle.loads(cloudpickle.dumps(pair)),
    "message": by_message,
    "component": lambda pair: copy_component(pair, [], "the learner")[0],
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_are_flat_and_go_on_alike(way: str) -> None:
    pair = Pair()
    for turn in range(3):
        pair.turn(turn)
    twin = COPIES[way](pair)
    assert is_flat(twin) and torch.equal(twin.values(), pair.values())
    before = pair.values()
    for turn in range(3, 6):
        twin.turn(turn)
    assert torch.equal(pair.values(), before), "the copy shares nothing with the original"
    for turn in range(3, 6):
        pair.turn(turn)
    assert torch.equal(twin.values(), pair.values())


def test_a_large_network_keeps_its_alignment_in_a_message() -> None:
    """A view of much memory travels alone; it comes back to the place where products have the same bits."""
    pair = Pair()
    pair.network = network(4, 600, 600, 2)
    pair.optimizer = fdg.Adam(pair.network)
    twin = by_message(pair)
    assert is_flat(twin)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in twin.network.parameters())


def test_a_checkpoint_holds_moments_and_gradients() -> None:
    first, second = Pair(), Pair()
    first.turn()
    squared(first.network, 7).backward()  # gradients that add up over a checkpoint
    second.optimizer.lr = 0.5
    restore(second, state_of(first))
    for pair in (first, second):
        pair.optimizer.step()
        pair.turn(2)
    assert is_flat(second) and torch.equal(first.values(), second.values())
    assert second.optimizer.lr == 0.01


def test_state_of_torchs_adam_and_back() -> None:
    mine, other = Pair(max_grad_norm=None), network(4, 7, 2)
    torchs = torch.optim.Adam(other.parameters(), lr=0.02, fused=True)
    squared(other).backward()
    torchs.step()
    mine.network.load_state_dict(other.state_dict())
    mine.optimizer.load_state_dict(torchs.state_dict())
    third = network(4, 7, 2)
    back = torch.optim.Adam(third.parameters(), lr=0.5, fused=True)
    third.load_state_dict(mine.network.state_dict())
    back.load_state_dict({**torchs.state_dict(), "state": copy.deepcopy(mine.optimizer.state_dict()["state"])})
    mine.turn(1)
    for module, optimizer in ((other, torchs), (third, back)):
        optimizer.zero_grad()
        squared(module, 1).backward()
        optimizer.step()
        torch.testing.assert_close(list(mine.network.parameters()), list(module.parameters()), rtol=1e-6, atol=1e-7)
    with pytest.raises(UsageError, match="this optimizer has one group of"):
        fdg.Adam(network(3, 2)).load_state_dict(torchs.state_dict())


def test_what_is_moved_elsewhere_is_brought_back() -> None:
    """Other memory for a parameter, gradients set by hand or to None: as with torch's optimizer."""
    first, second = Pair(), Pair()
    second.network[0].weight.data = second.network[0].weight.data.clone()
    second.network.zero_grad(set_to_none=True)
    for pair in (first, second):
        squared(pair.network).backward()
    second.network[0].weight.grad = second.network[0].weight.grad.clone()
    for pair in (first, second):
        pair.optimizer.step()
    assert is_flat(second) and torch.equal(first.values(), second.values())


def test_two_optimizers_of_one_parameter() -> None:
    pair = Pair()
    other = fdg.Adam(pair.network[0], lr=0.01)
    pair.turn()
    weight = pair.network[0].weight.detach().clone()
    squared(pair.network).backward()
    other.step()
    assert not torch.equal(pair.network[0].weight, weight)
    weight = pair.network[0].weight.detach().clone()
    pair.optimizer.zero_grad()
    pair.optimizer.exp_avg.zero_()
    pair.optimizer.step()
    assert torch.equal(pair.network[0].weight, weight), "the first one goes on from what the second made"


def test_weights_are_what_actor_and_learner_share() -> None:
    policy, value = network(4, 5, 2), network(4, 5, 1)
    optimizer = fdg.Adam([*policy.parameters(), *value.parameters(), *policy.parameters()])
    actor, learner = {"policy": policy}, {"policy": policy, "value": value, "optimizer": optimizer}
    assert shared_places(actor, learner) == [place_of(parameter) for parameter in policy.parameters()]
    assert len(optimizer.param_groups[0]["params"]) == 8, "each once"


def test_a_scheduler_of_torch_sets_the_step_size() -> None:
    pair = Pair(lr=0.3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pair.optimizer, 0.1)
    pair.turn()
    scheduler.step()
    assert pair.optimizer.lr == pytest.approx(0.03)


@pytest.mark.parametrize(
    "given, message",
    [
        (lambda: torch.zeros(3, requires_grad=True), "write a module, or a list of parameters"),
        (lambda: [{"params": [torch.zeros(3, requires_grad=True)], "lr": 0.1}], "one fdg.Adam for each"),
        (lambda: [], "no parameter that needs a gradient"),
        (lambda: [torch.zeros(2, requires_grad=True) * 2], "computed from others"),
        (
            lambda: [torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.float64, requires_grad=True)],
            "torch.float32 on cpu and torch.float64 on cpu",
        ),
    ],
)
def test_what_it_cannot_move_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fdg.Adam(given())


def test_settings_are_checked() -> None:
    for settings, message in (
        ({"lr": -1}, "lr is -1"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
        ({"betas": (1, 2)}, "betas"),
    ):
        with pytest.raises(UsageError, match=message):
            Pair(**settings)


# Learner.update -------------------------------------------------------------------------------------------------------


class Regression(Learner):
    def __init__(self, returned: Any = lambda loss: loss) -> None:
        self.network, self.returned = network(4, 7, 2), returned
        self.optimizer = fdg.Adam(self.network, lr=0.01, max_grad_norm=0.5)

    def loss(self, turn: int) -> Any:
        return self.returned(squared(self.network, turn))

    def learn(self, turn: int) -> Any:
        return self.update(self.loss, turn)


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss: loss,
        lambda loss: {"loss": loss, "loss_other": loss * 7, "words": "free"},
        lambda loss: {"loss_policy": loss / 4, "loss_value": loss * 0.75, "entropy": loss.detach()},
        lambda loss: TensorDict({"loss": loss}),
        lambda loss: TensorDict({"loss_policy": loss / 4, "loss_value": loss * 0.75, "entropy": loss * 2}),
    ],
)
def test_update_is_one_step(returned: Any) -> None:
    learner, pair = Regression(returned), Pair()
    for turn in range(3):
        result, expected = learner.learn(turn), pair.turn(turn)
        first = result if isinstance(result, torch.Tensor) else result["loss"] if "loss" in result.keys() else None  # noqa: SIM118
        assert first is None or torch.equal(first, expected)
        leaves = [result] if isinstance(result, torch.Tensor) else [v for v in result.values() if v != "free"]
        assert not any(leaf.requires_grad for leaf in leaves)
    assert torch.equal(Pair.values(learner), pair.values())  # type: ignore[arg-type]


def test_update_takes_any_optimizer() -> None:
    learner, other = Regression(), network(4, 7, 2)
    learner.optimizer = torch.optim.SGD(learner.network.parameters(), lr=0.1)
    learner.learn(0)
    another = fdg.Adam(other)
    Learner().update(lambda: squared(other), optimizer=another)
    assert another.steps == 1


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda loss: None, r"Regression\.loss returned None; return the loss, or a dict"),
        (lambda loss: {"value": loss}, "entries for 'value'"),
        (lambda loss: loss.detach(), "depends on no parameter"),
        (lambda loss: loss.expand(3), r"shape \(3,\)"),
        (lambda loss: {"loss": 3.0}, "is a float"),
    ],
)
def test_a_loss_that_is_none_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Regression(returned).learn(0)


def test_update_without_an_optimizer() -> None:
    with pytest.raises(UsageError, match=r"self\.optimizer = fdg\.Adam"):
        Learner().update(lambda: torch.zeros(()))


# under policies -------------------------------------------------------------------------------------------------------


@dataclass
class SmallConfig(Config):
    envs: int = 2
    iterations: int = 6
    torchrl: bool = True


class Gaussian(Actor):
    """Acts on every bit of the weights."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def act(self, td: TensorDict) -> TensorDict:
        td["score"] = self.network(td["observation"])
        td["action"] = (td["score"] + torch.randn_like(td["score"])).argmax(-1)
        return td


class WithTorchRL(Learner):
    """TorchRL's loss, its target network, our optimizer."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        values = QValueActor(network, in_keys=["observation"], action_space="categorical")
        self.loss = DQNLoss(values, delay_value=True, action_space="categorical")
        self.loss.make_value_estimator(gamma=0.9)
        self.target = SoftUpdate(self.loss, tau=0.1)
        self.optimizer = fdg.Adam(network, lr=0.01, max_grad_norm=0.5)

    def learn(self, batch: TensorDict) -> Any:
        self.optimizer.lr = 0.9 * self.optimizer.lr
        result = self.update(self.loss, batch)
        self.target.step()
        return result["loss"]


class Small(Trainer):
    config: SmallConfig

    def agent(self, spec: Any) -> Agent:
        network = MLP(spec.obs_dim, spec.n_actions, num_cells=[8], activation_class=nn.Tanh)
        return Agent(Gaussian(network), WithTorchRL(network))

    def replay_buffer(self, spec: Any) -> ReplayBuffer:
        return ReplayBuffer(500)

    def train(self) -> None:
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(4):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = step_mdp(td)
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(9))
            self.msrl.log(i, loss=loss)


def test_one_result_under_all_policies() -> None:
    result = assert_policies_equal(Small)
    assert len({row["values"]["loss"] for row in result.history}) == 6
    assert_policies_equal(Small, ["single_learner_coarse"], ["process"], actors=3, iterations=3)


def test_several_learners() -> None:
    expected = launch(Small, policy="local", actors=2)
    seen = launch(Small, policy="multi_learner", engine="process", workers=2, actors=2)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(seen.parameters[name], parameter, rtol=1e-3, atol=1e-5)


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = launch(Small)
    launch(Small, iterations=3, checkpoint_every=3, folder=tmp_path)
    seen = launch(Small, resume=tmp_path, iterations=6, policy="single_learner_coarse", engine="process")
    assert seen.params_sha256 == expected.params_sha256
