"""Several learners, each with some rows of every batch, do what one learner does with all of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_recovery import Killer
from torch import nn

from fdg.algorithms.dqn import DQN, DQNConfig, QLearner
from fdg.algorithms.reinforce import REINFORCE, PolicyLearner, REINFORCEConfig
from fdg.api import Actor, Agent, Learner, Trainer
from fdg.compiler import project
from fdg.compiler.rowwise import check_learner
from fdg.config import Config
from fdg.errors import CompileError, GraphError, LearnerError, PolicyError, RunError
from fdg.policies import MultiLearner, Policy
from fdg.runtime.forkserver import forkserver
from fdg.runtime.replicas import Split, relative_difference, share
from fdg.runtime.run import launch
from fdg.runtime.weights import copy_component
from fdg.statistics import shared

SINGLE, MULTI = "single_learner_coarse", "multi_learner"
UPDATES = 50


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """One forkserver for all tests here: they start in milliseconds."""
    with forkserver():
        yield


def many(trainer: type[Trainer], workers: int = 2, **options: Any) -> Any:
    return launch(trainer, policy=MULTI, engine="process", workers=workers, **options)


def transitions(number: int, rows: int) -> TensorDict:
    """A batch of made-up transitions of CartPole."""
    draw = torch.Generator().manual_seed(number)
    done = torch.rand(rows, 1, generator=draw) < 0.2
    then = TensorDict(
        {
            "observation": torch.randn(rows, 4, generator=draw),
            "reward": torch.randn(rows, 1, generator=draw),
            "done": done,
            "terminated": done,
        },
        [rows],
    )
    return TensorDict(
        {
            "observation": torch.randn(rows, 4, generator=draw),
            "action": torch.randint(0, 2, (rows,), generator=draw),
            "return": 5 * torch.rand(rows, generator=draw),
            "next": then,
        },
        [rows],
    )


class Whole:
    """A batch that is passed on whole: what has no rows is not split."""

    def __init__(self, batch: TensorDict) -> None:
        self.batch = batch


def flat_gradient(learner: Any) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for group in learner.optimizer.param_groups for p in group["params"]])


class Compared:
    """Learns, and says how far its gradients are from those of the whole batch with the same parameters."""

    def learn(self, batch: TensorDict, whole: Whole) -> dict[str, Any]:
        twin = copy_component(self, [], "the learner")[0]
        with shared(None):
            super(Compared, twin).learn(whole.batch)  # type: ignore[misc]
        super().learn(batch)  # type: ignore[misc]
        expected, got = flat_gradient(twin), flat_gradient(self)
        close = torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()) * 1e-2)
        return {
            "difference": relative_difference(expected, got),
            "close": float(close),
            "rows": float(len(batch)),
            "norm": expected.norm(),
        }


class ComparedQLearner(Compared, QLearner):
    pass


class ComparedPolicyLearner(Compared, PolicyLearner):
    pass


class Fed:
    """Learns from made-up batches, the same under every policy."""

    def train(self) -> None:
        for i in range(self.config.iterations):  # type: ignore[attr-defined]
            batch = transitions(i, 13)
            metrics = self.msrl.agent_learn(batch, Whole(batch))  # type: ignore[attr-defined]
            self.msrl.log(i, metrics)  # type: ignore[attr-defined]


class FedDQN(Fed, DQN):
    config: DQNConfig

    def agent(self, spec: Any) -> Agent:
        agent = super().agent(spec)
        return Agent(agent.actor, ComparedQLearner(agent.learner.network, self.config))

    def replay_buffer(self, spec: Any) -> None:
        return None


class FedREINFORCE(Fed, REINFORCE):
    config: REINFORCEConfig

    def agent(self, spec: Any) -> Agent:
        agent = super().agent(spec)
        return Agent(agent.actor, ComparedPolicyLearner(agent.learner.policy, self.config))


SMALL = {"iterations": UPDATES, "hidden_dim": 16, "envs": 2, "seed": 3}


@pytest.mark.parametrize(
    "trainer, workers, more", [(FedDQN, 2, {"max_grad_norm": 0.5}), (FedREINFORCE, 3, {"episodes_per_iter": 2})]
)
def test_gradients_are_those_of_one_learner(trainer: Any, workers: int, more: dict[str, Any]) -> None:
    """Thirteen rows in uneven parts: gradients from equal parameters at each of 50 updates, parameters after them."""
    seen = many(trainer, workers, **SMALL, **more)
    values = [row["values"] for row in seen.history]
    assert len(values) == UPDATES
    assert all(value["rows"] < 13 and value["norm"] > 0 for value in values), "each has some rows, and learns"
    assert max(value["difference"] for value in values) < 1e-4
    assert all(value["close"] == 1 for value in values), "entry by entry"
    expected = launch(trainer, policy=SINGLE, **SMALL, **more)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(seen.parameters[name], parameter, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "trainer, options",
    [
        (DQN, {"learning_starts": 8, "steps": 4, "updates": 2, "batch_size": 9, "epsilon_end": 1.0}),
        (REINFORCE, {"episodes_per_iter": 4}),
    ],
)
def test_the_algorithms_as_they_are(trainer: Any, options: dict[str, Any]) -> None:
    options = {"iterations": 2, "actors": 2, "envs": 2, "seed": 3, "hidden_dim": 16, **options}
    expected = launch(trainer, policy=SINGLE, **options)
    assert launch(trainer, policy=MULTI, **options).params_sha256 == expected.params_sha256, (
        "one replica is one learner"
    )
    seen = many(trainer, **options)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(seen.parameters[name], parameter, rtol=1e-3, atol=1e-5)
    assert seen.metrics["frames"] == expected.metrics["frames"]
    assert seen.metrics["bytes"]["workers->workers:gradients"] > 0
    for row, other in zip(seen.history, expected.history, strict=True):
        assert row["values"] == pytest.approx(other["values"], rel=1e-4)


# What a learner may do -------------------------------------------------------------------------------------------------


@dataclass
class FeedConfig(Config):
    """Made-up batches."""

    envs: int = 1
    """Environments of each actor."""
    iterations: int = 4
    """Batches."""
    rows: int = 7
    """Rows of each."""
    kind: str = ""
    """What the learner does."""


class Still(Actor):
    """Not asked to act here."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network


class Regression(Learner):
    """A mean squared error, taken in one of many ways."""

    def __init__(self, network: nn.Module, kind: str) -> None:
        self.network, self.kind, self.updates = network, kind, 0
        self.unused = nn.Parameter(torch.ones(2))
        self.moments = torch.zeros(3)
        self.optimizer = torch.optim.Adam([*network.parameters(), self.unused], lr=0.05)

    def learn(self, batch: TensorDict) -> Any:
        self.updates += 1
        error = self.network(batch["observation"]).squeeze(-1) - batch["return"]
        return getattr(self, self.kind)(batch, error)

    def step(self, loss: torch.Tensor) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 0.3)
        self.optimizer.step()
        return {"loss": loss.detach(), "updates": self.updates}

    def accumulate(self, batch: TensorDict, error: torch.Tensor) -> dict[str, Any]:
        """Two losses in three backward passes, of which one graph is used twice; gradients are zeroed, not dropped."""
        self.optimizer.zero_grad(set_to_none=self.updates == 2)
        loss = (error**2).mean()
        loss.backward(retain_graph=True)
        first = self.network[0].weight.grad.clone()
        (0.1 * loss).backward()
        (error.detach().mean() + self.network[2].bias.abs().mean()).backward()
        self.optimizer.step()
        return {"loss": loss, "first": first.norm()}

    def statistics(self, batch: TensorDict, error: torch.Tensor) -> dict[str, Any]:
        """Statistics, also with gradients through them, and a running one that the learner keeps."""
        x = batch["return"]
        mean, std = self.mean(x), self.std(x)
        self.moments += torch.stack([mean, std, self.sum(x > mean).float()])
        spread = self.std(error) + self.mean(error) ** 2
        seen = self.step((((error - self.mean(error)) / self.std(error)) * (x - mean) / std).mean() + spread)
        return {**seen, "mean": mean, "std": std, "above": self.sum(x > mean), "spread": spread.detach()}

    def rows(self, batch: TensorDict, error: torch.Tensor) -> Any:
        """One entry per row: written, returned, and the batch itself returned."""
        batch["error"] = error.detach()
        metrics = self.step((error**2).mean())
        batch["observation"].mul_(2)
        return metrics, error.detach().abs(), batch

    # what several learners cannot do

    def summed(self, batch: TensorDict, error: torch.Tensor) -> Any:
        return self.step((error**2).sum())

    def spread(self, batch: TensorDict, error: torch.Tensor) -> Any:
        middle = error.mean()
        return self.step(((error - middle) ** 2).mean())

    def by_hand(self, batch: TensorDict, error: torch.Tensor) -> Any:
        with torch.no_grad():
            self.network[0].bias += 0.1 * error.mean()
        return {}

    def keeps(self, batch: TensorDict, error: torch.Tensor) -> Any:
        self.moments[0] += error.detach().mean()
        return self.step((error**2).mean())

    def grad(self, batch: TensorDict, error: torch.Tensor) -> Any:
        found = torch.autograd.grad((error**2).mean(), list(self.network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.network.parameters(), found, strict=True):
                parameter -= 0.1 * gradient
        return {}

    def counts(self, batch: TensorDict, error: torch.Tensor) -> Any:
        return {**self.step((error**2).mean()), "rows": len(batch)}

    def even_counts(self, batch: TensorDict, error: torch.Tensor) -> Any:
        return {**self.step((error**2).mean()), "rows": len(batch) // 2 * 2}

    def sometimes(self, batch: TensorDict, error: torch.Tensor) -> Any:
        return self.step((error**2).mean()) if batch["number"][0] == 0 else {}

    def fails(self, batch: TensorDict, error: torch.Tensor) -> Any:
        if self.updates == 3 and batch["number"][-1] == 6:
            raise KeyError("the last row")
        return self.step((error**2).mean())

    def draws(self, batch: TensorDict, error: torch.Tensor) -> Any:
        return self.step(((error + torch.randn_like(error)) ** 2).mean())


class Feed(Trainer):
    config: FeedConfig

    def agent(self, spec: Any) -> Agent:
        network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        return Agent(Still(network), Regression(network, self.config.kind))

    def train(self) -> Any:
        results = []
        for i in range(self.config.iterations):
            batch = transitions(i, self.config.rows)
            batch["number"] = torch.arange(self.config.rows)
            result = self.msrl.agent_learn(batch)
            results.append((result, batch))
            self.msrl.log(i)
        return results


def assert_alike(seen: Any, expected: Any) -> None:
    assert seen.parameters.keys() == expected.parameters.keys()
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(seen.parameters[name], parameter, rtol=1e-3, atol=1e-5)
    for (result, batch), (other, its_batch) in zip(seen.returned, expected.returned, strict=True):
        compare(result, other)
        compare(batch, its_batch)


def compare(seen: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for item, other in zip(seen, expected, strict=True):
            compare(item, other)
    elif isinstance(expected, (dict, TensorDict)):
        assert set(seen.keys()) == set(expected.keys())
        for key in expected.keys():  # noqa: SIM118
            compare(seen[key], expected[key])
    else:
        torch.testing.assert_close(torch.as_tensor(seen), torch.as_tensor(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["accumulate", "statistics", "rows"])
@pytest.mark.parametrize("rows", [7, 2])
def test_what_a_learner_may_do(kind: str, rows: int) -> None:
    """With fewer rows than learners some only go along."""
    options = {"kind": kind, "rows": rows}
    assert_alike(many(Feed, 3, **options), launch(Feed, policy=SINGLE, **options))


def test_random_numbers_in_learn_are_not_compared() -> None:
    assert many(Feed, kind="draws").returned


@pytest.mark.parametrize(
    "kind, error, says",
    [
        (
            "summed",
            RunError,
            r"differ from those of the whole batch \(update 1, backward 1.*write \.mean\(\) for \.sum",
        ),
        ("spread", RunError, r"differ from those of the whole batch.*self\.mean\(x\)"),
        ("by_hand", RunError, r"`network\.0\.bias` of the learner is not the same in all replicas after update 1"),
        ("keeps", RunError, r"`moments` of the learner is not the same.*write self\.mean\(x\)"),
        ("grad", RunError, r"torch\.autograd\.grad.*Write loss\.backward\(\)"),
        ("counts", RunError, r"different whole numbers in \['rows'\] in the replicas \(4, 3\).*self\.sum\(x\)"),
        ("sometimes", RunError, r"replica 0: gradients; replica 1: result of learn.*same calls of backward"),
        ("fails", KeyError, "the last row"),
    ],
)
def test_what_cannot_be_split_is_an_error(kind: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        many(Feed, kind=kind)


def test_a_count_that_is_equal_by_chance_is_an_error() -> None:
    with pytest.raises(RunError, match=r"returned 4 in \['rows'\], and for the whole batch it returns 8"):
        many(Feed, kind="even_counts", rows=8)


def test_a_lost_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"iterations": 4, "actors": 2, "envs": 2, "seed": 3, "hidden_dim": 8, "episodes_per_iter": 2}
    expected = many(REINFORCE, **options)
    said: list[str] = []
    killer = Killer(monkeypatch, "workers[1]", 2, 0, signal.SIGKILL)
    seen = many(REINFORCE, observers=[killer], notice=said.append, checkpoint_every=1, **options)
    assert "workers[1]" in said[0] and seen.params_sha256 == expected.params_sha256


# Rows ------------------------------------------------------------------------------------------------------------------


def test_rows_are_split_along_the_environments() -> None:
    steps = TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4], names=[None, "env"])
    arguments = (([steps, steps[0]], torch.arange(4), torch.ones(3), 0.5, torch.tensor(1.0)), {"first": steps[0]})
    parts = [Split(arguments, rank, 3) for rank in range(3)]
    assert [part.weight for part in parts] == [0.5, 0.25, 0.25]
    for part, (start, end) in zip(parts, [(0, 2), (2, 3), (3, 4)], strict=True):
        ([whole, first], numbers, other, factor, scalar), named = part.arguments
        assert whole["x"].tolist() == steps["x"][:, start:end].tolist()
        assert first["x"].tolist() == named["first"]["x"].tolist() == steps["x"][0, start:end].tolist()
        assert numbers.tolist() == list(range(start, end))
        assert len(other) == 3 and factor == 0.5 and scalar == 1
    assert [share(2, rank, 4) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_tensordicts_of_different_rows_are_an_error() -> None:
    with pytest.raises(RunError, match="of 4 and 3 rows"):
        Split((TensorDict({}, [4]), TensorDict({}, [3])), 0, 2)


# Refused before it runs ------------------------------------------------------------------------------------------------


def scale(x: torch.Tensor) -> torch.Tensor:
    return x / x.var(0)  # ▶ scale


class Normalised(Learner):
    def learn(self, batch: Any) -> Any:
        advantage = batch["return"]
        advantage = (advantage - advantage.mean()) / 2  # ▶ mean
        return advantage


class Deviating(Learner):
    def learn(self, batch: Any) -> Any:
        return self.advantage(batch)

    def advantage(self, batch: Any) -> Any:
        return batch["return"] / torch.std(batch["return"])  # ▶ std


class Inherited(Deviating):
    def learn(self, batch: Any) -> Any:
        return super().learn(batch)


class ByFunction(Learner):
    def learn(self, batch: Any) -> Any:
        return scale(batch["return"])


class ByRow(Learner):
    def __init__(self, *modules: nn.Module) -> None:
        self.modules = nn.ModuleList(modules)

    def learn(self, batch: Any) -> Any:
        x = batch["observation"]
        return (x - x.mean(-1, keepdim=True)) / x.std(dim=-1) - self.mean(x) / self.std(x) - x.mean()


@pytest.mark.parametrize(
    "learner, mark, hint",
    [
        (Normalised, "▶ mean", "self.mean(advantage)"),
        (Deviating, "▶ std", "self.std(batch['return'])"),
        (Inherited, "▶ std", "self.std(batch['return'])"),
        (ByFunction, "▶ scale", "self.std(x) ** 2"),
    ],
)
def test_statistics_of_a_batch_are_refused(learner: type[Learner], mark: str, hint: str) -> None:
    with pytest.raises(LearnerError) as caught:
        check_learner(learner(), MULTI)
    error = caught.value
    assert isinstance(error, (CompileError, PolicyError))
    assert error.hint == hint and mark in error.source and f"{error.file}:{error.line}:" in str(error)
    lines = Path(error.file).read_text().splitlines()
    assert lines[error.line - 1] == error.source
    assert error.source[error.column :].startswith(("advantage.mean()", "torch.std(", "x.var(0)"))


def test_statistics_of_a_row_are_not() -> None:
    check_learner(ByRow(nn.LayerNorm(3)), MULTI)


def test_modules_with_statistics_are_refused() -> None:
    with pytest.raises(LearnerError, match=r"BatchNorm1d.*\nwrite instead: torch\.nn\.LayerNorm"):
        check_learner(ByRow(nn.Sequential(nn.BatchNorm1d(3))), MULTI)
    loss = nn.Identity()
    loss.normalize_advantage = True
    with pytest.raises(LearnerError, match=r"normalize_advantage=True.*\nwrite instead: normalize_advantage=False"):
        check_learner(ByRow(loss), MULTI)


class Deviant(Feed):
    def agent(self, spec: Any) -> Agent:
        return Agent(super().agent(spec).actor, Deviating())


def test_a_run_is_refused_on_any_engine() -> None:
    with pytest.raises(LearnerError, match="multi_learner"):
        launch(Deviant, policy=MULTI)
    launch(Feed, policy=MULTI, kind="draws")


def test_what_a_policy_may_replicate() -> None:
    class Actors(Policy):
        name = "mine"
        fragments = {"workers": ("env", "actor"), "rest": ("buffer", "learner")}
        replicated = ("actor",)

    class Both(Policy):
        name = "mine"
        fragments = {"workers": ("env", "actor"), "rest": ("buffer", "learner")}
        replicated = ("learner",)

    with pytest.raises(PolicyError, match="only the learner"):
        Actors.check()
    with pytest.raises(PolicyError, match="a fragment of its own"):
        Both.check()


class Apart(Policy):
    """Learners in workers of their own."""

    name = "learners_apart"
    fragments = {"actors": ("env", "actor"), "learners": ("learner",), "replay": ("buffer",)}
    replicated = ("learner",)


def test_an_own_policy_with_several_learners() -> None:
    options = {"iterations": 2, "actors": 2, "envs": 2, "seed": 3, "hidden_dim": 8, "episodes_per_iter": 2}
    expected = launch(REINFORCE, policy=SINGLE, **options)
    seen = launch(REINFORCE, policy=Apart, engine="process", workers=2, **options)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(seen.parameters[name], parameter, rtol=1e-3, atol=1e-5)


# The graph -------------------------------------------------------------------------------------------------------------


def test_the_graph_shows_the_learners_and_needs_their_edge() -> None:
    graph = project(Feed, policy=MultiLearner, actors=1, workers=2)
    assert (graph.fragments["workers"].per, graph.fragments["workers"].replicas) == ("worker", 2)
    edge = graph.edge("workers", "workers", "gradients")
    assert edge is not None and edge.operator == "allreduce"
    graph.edges.remove(edge)
    with pytest.raises(GraphError, match="workers → workers for `gradients`"):
        many(Feed, graph=graph, kind="rows")
