"""The graph is what runs: what happens when it, its code or its edges change; what crosses, and what does not."""

from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import mismatches, run_reference
from toy import ToyActor, ToyConfig, ToyLearner, ToyNet, ToyTrainer, advance, digest, row

from fdg.algorithms.dqn import DQN
from fdg.algorithms.ppo import PPO
from fdg.api import Agent, Trainer, pure
from fdg.compiler import project
from fdg.errors import FdgError, GraphError
from fdg.graph import Graph
from fdg.msrl import MSRL
from fdg.policies import ShardedReplay, SingleLearnerCoarse, SingleLearnerFine
from fdg.runtime.load import cache_folder
from fdg.runtime.run import Result, launch
from fdg.testing import assert_policies_equal, assert_results_equal

COARSE, SHARDED, FINE = SingleLearnerCoarse.name, ShardedReplay.name, SingleLearnerFine.name
POLICIES = (COARSE, SHARDED, FINE)


@dataclass
class Sizes(ToyConfig):
    """A toy experiment with the two numbers that every algorithm has."""

    steps: int = 3
    """Steps of each environment in an iteration."""
    updates: int = 2
    """Updates in an iteration."""


class QLike(ToyTrainer):
    """Shaped as DQN."""

    config: Sizes

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            eps = 10 - i
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td, eps)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = advance(td)
            for _ in range(self.config.updates):
                loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(4))
            self.msrl.log(i, loss)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Generated code of each test in a folder of its own."""
    monkeypatch.setenv("FDG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def graph_of(trainer: type[Trainer], policy: Any = SingleLearnerCoarse, actors: int = 1) -> Graph:
    return project(trainer, policy=policy, actors=actors)


def run_graph(trainer: type[Trainer], graph: Graph, **options: Any) -> Result:
    return launch(trainer, policy=graph.policy, graph=graph, actors=graph.actors, **options)


# The code that runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place, old, new", [("learner", "sample(4)", "sample(5)"), ("driver", "10 - i", "9 - i")])
def test_an_edited_file_is_what_runs(place: str, old: str, new: str, own_cache: Path) -> None:
    before = launch(QLike, policy=COARSE)
    (file,) = own_cache.rglob(f"{place}.py")
    text = file.read_text()
    assert old in text, text
    file.write_text(text.replace(old, new))
    edited = launch(QLike, policy=COARSE)
    assert edited.params_sha256 != before.params_sha256, "the edit has an effect"
    file.unlink()
    assert launch(QLike, policy=COARSE).params_sha256 == before.params_sha256, "and without it, none"


def test_the_files_are_the_graphs_sources(own_cache: Path) -> None:
    """What `fdg graph --source` prints, the file and the graph are one text."""
    graph = graph_of(QLike)
    run_graph(QLike, graph)
    folder = cache_folder(graph)
    assert folder.is_relative_to(own_cache)
    assert (folder / "driver.py").read_text() == graph.driver
    for name, fragment in graph.fragments.items():
        assert (folder / f"{name}.py").read_text() == fragment.source
        compile(fragment.source, name, "exec")


def test_the_source_in_the_graph_is_what_runs() -> None:
    graph = graph_of(QLike)
    before = run_graph(QLike, graph)
    changed = Graph.from_json(graph.to_json().replace("sample(4)", "sample(5)"))
    assert run_graph(QLike, changed).params_sha256 != before.params_sha256


def test_the_worked_example() -> None:
    """The act/step/insert loop is one region of the actor, insertion and the update loop one of the learner."""
    graph = graph_of(QLike)
    regions = {region.name: region for region in graph.regions()}
    found = [(region.fragment, sorted(region.calls)) for region in regions.values()]
    assert ("actors", ["agent_act", "env_step"]) in [
        (name, [c for c in calls if "insert" not in c]) for name, calls in found
    ]
    (update,) = [region for region in regions.values() if "agent_learn" in region.calls]
    assert any("insert" in call for call in update.calls) and "replay_buffer_sample" in update.calls
    assert len(regions) == 3, "reset, collect, update"


# Edges and regions ---------------------------------------------------------------------------------------------------


def used_edges(trainer: type[Trainer], policy: Any, actors: int = 1) -> list[tuple[str, str, str]]:
    result = launch(trainer, policy=policy, actors=actors)
    assert result.graph is not None
    return [(edge.source, edge.target, edge.value) for edge in result.graph.edges if edge.bytes]


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize(
    "policy", [SingleLearnerCoarse, ShardedReplay, SingleLearnerFine], ids=lambda policy: policy.name
)
def test_without_an_edge_the_run_fails_and_names_it(policy: Any, actors: int) -> None:
    edges = used_edges(QLike, policy, actors)
    assert len(edges) >= 3 and any(value == "weights" for _, _, value in edges) == (policy is not SingleLearnerFine)
    for source, target, value in edges:
        graph = graph_of(QLike, policy, actors)
        graph.edges = [
            edge for edge in graph.edges if (edge.source, edge.target, edge.value) != (source, target, value)
        ]
        with pytest.raises(GraphError) as caught:
            run_graph(QLike, graph)
        for word in (source, target, f"`{value}`"):
            assert word in str(caught.value)


def test_every_edge_of_the_graph_is_used() -> None:
    """No decoration in the other sense: what is drawn does cross."""
    for policy in (SingleLearnerCoarse, ShardedReplay, SingleLearnerFine):
        drawn = {(edge.source, edge.target, edge.value) for edge in graph_of(QLike, policy).edges}
        assert drawn == set(used_edges(QLike, policy)), policy.name


def test_without_a_region_the_run_fails_and_names_it() -> None:
    for region in list(graph_of(QLike).regions()):
        graph = graph_of(QLike)
        graph.fragments[region.fragment].regions = [
            other for other in graph.fragments[region.fragment].regions if other.name != region.name
        ]
        with pytest.raises(GraphError, match=rf"{region.fragment}\.{region.name}\b"):
            run_graph(QLike, graph)


@pytest.mark.parametrize(
    "policy", [SingleLearnerCoarse, ShardedReplay, SingleLearnerFine], ids=lambda policy: policy.name
)
def test_a_graph_from_json_runs_the_same(policy: Any) -> None:
    for actors in (1, 2):
        graph = graph_of(QLike, policy, actors)
        again = Graph.from_json(graph.to_json())
        assert again == graph and again.hash() == graph.hash()
        expected = launch(QLike, policy=policy, actors=actors)
        assert_results_equal(expected, run_graph(QLike, again), f"{policy.name} from json")


@pytest.mark.parametrize("policy", [COARSE, SHARDED])
def test_calls_per_iteration_follow_the_graph_and_not_the_steps(policy: str) -> None:
    counts = []
    for steps, iterations in ((1, 4), (3, 4), (8, 4), (3, 9)):
        result = launch(QLike, policy=policy, steps=steps, updates=2, iterations=iterations)
        assert result.graph is not None
        for region in result.graph.regions():
            times = {"once": 1, "1": iterations}
            if region.per_iteration in times:
                assert result.calls[f"{region.fragment}.{region.name}"] == times[region.per_iteration], region
        counts.append({name: n if n == 1 else n / iterations for name, n in result.calls.items()})
        collect = [region for region in result.graph.regions() if "agent_act" in region.calls]
        assert [region.per_iteration for region in collect] == ["1"]
    assert counts[0] == counts[1] == counts[2] == counts[3]


class FineGrained(ToyTrainer):
    """Learns inside the step loop: not shaped for a coarse policy."""

    config: Sizes

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                loss = self.msrl.agent_learn(td)
                td = advance(td)
            self.msrl.log(i, loss)


def test_a_fine_program_is_told_so() -> None:
    assert_policies_equal(FineGrained)
    graph = graph_of(FineGrained)
    (learn,) = [region for region in graph.regions() if "agent_learn" in region.calls]
    assert "steps" in learn.per_iteration
    line = inspect.getsourcelines(FineGrained.train)[1] + 5
    assert any(f"{line}" in advice and "agent_learn" in advice for advice in graph.advice), graph.advice
    result = launch(FineGrained, policy=COARSE, steps=5, iterations=2)
    assert result.calls[f"learner.{learn.name}"] == 10
    assert not graph_of(QLike).advice


def test_the_advice_names_what_forces_the_calls() -> None:
    """Acting and stepping in different fragments take turns, wherever the inserts are."""
    start = inspect.getsourcelines(QLike.train)[1]
    (told,) = graph_of(QLike, SingleLearnerFine).advice
    assert "`learner` and `environments` are called" in told and "take turns" in told and "out of the loop" not in told
    assert f"line {start + 5} (agent_act) and line {start + 6} (env_step)" in told, told


class Chatty(ToyTrainer):
    """Logs, prints and learns at every step: none of them alone makes the calls many."""

    config: Sizes

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                print(i)
                self.msrl.log(i, 0.0)
                loss = self.msrl.agent_learn(td)
                td = advance(td)
            self.msrl.log(i, loss)


class UntilOver(ToyTrainer):
    """Asks at every step whether to go on."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            over = False
            while not over:
                td = self.msrl.env_step(self.msrl.agent_act(td))
                loss = self.msrl.agent_learn(td)
                over = self.msrl.any(td["next", "done"])
                td = advance(td)
            self.msrl.log(i, loss)


class InHelper(ToyTrainer):
    """Acts and steps in a method of its own."""

    config: Sizes

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.step(td)
                loss = self.msrl.agent_learn(td)
                td = advance(td)
            self.msrl.log(i, loss)

    def step(self, td):
        td = self.msrl.agent_act(td)
        return self.msrl.env_step(td)


def test_advice_that_would_not_help_is_not_given() -> None:
    (told,) = graph_of(Chatty).advice
    assert all(word in told for word in ("`print`", "(log)", "agent_learn", "move them out of the loop")), told
    assert not graph_of(UntilOver).advice
    assert all("take turns" in told for told in graph_of(InHelper, SingleLearnerFine).advice)
    (told,) = graph_of(InHelper).advice
    assert "(agent_learn, on `learner`) is in the same loop: move it out of the loop" in told


class LooksBack(ToyTrainer):
    """Looks at the step before, in the list of all steps."""

    config: Sizes

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = [td]
            for _ in range(self.config.steps):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                td["x_a"] = steps[-1]["observation"]
                steps.append(td)
                td = advance(td)
            loss = self.msrl.agent_learn(steps)
            self.msrl.log(i, loss)


def test_a_list_that_goes_along_is_told_of() -> None:
    fine = graph_of(LooksBack, SingleLearnerFine, actors=2).advice
    line = inspect.getsourcelines(LooksBack.train)[1] + 6
    told = f"line {line}: `steps` goes to `environments` and back config.steps times"
    assert any(told in advice for advice in fine), fine
    assert not graph_of(LooksBack, actors=2).advice
    assert_policies_equal(LooksBack, [FINE], actors=2)
    assert not any("goes to" in advice for advice in graph_of(PPO, SingleLearnerFine, actors=2).advice)


# What crosses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("policy", [COARSE, SHARDED])
def test_the_environments_state_never_leaves_the_actor(policy: str, actors: int) -> None:
    crossed = launch(QLike, policy=policy, actors=actors).metrics["bytes"]
    assert crossed and not [edge for edge in crossed if edge.endswith(":td")]


def test_bytes_grow_with_the_rows_and_only_there() -> None:
    few, many = (launch(QLike, policy=COARSE, steps=steps, iterations=2).metrics["bytes"] for steps in (2, 8))
    grown = {edge for edge in few if many[edge] > few[edge]}
    assert len(grown) == 1 and next(iter(grown)).startswith("actors->learner:")


class NobodyReads(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            unused = self.msrl.env_step(self.msrl.agent_act(td))
            extra = unused["observation"].repeat(200, 1)
            total = extra.sum()
            loss = self.msrl.agent_learn(i, total)
        self.msrl.log(0, loss)


def test_a_value_nobody_reads_is_not_sent() -> None:
    crossed = launch(NobodyReads, policy=COARSE).metrics["bytes"]
    assert not [edge for edge, size in crossed.items() if "unused" in edge or "extra" in edge or size > 1000]


class LearnsOnce(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(6):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td)))
            if i == 2:
                self.msrl.agent_learn(td)
            self.msrl.log(i, digest(td))


def test_weights_travel_only_when_they_changed() -> None:
    once = launch(LearnsOnce, policy=COARSE).metrics["bytes"]["learner->actors:weights"]
    each = launch(FineGrained, policy=COARSE, iterations=6, steps=1).metrics["bytes"]["learner->actors:weights"]
    assert each == 5 * once, "after each update but the last, which nobody acts on"


class Careless(ToyTrainer):
    """Changes one list in several places; all its names mean one object."""

    def train(self):
        self.seen, mine = [], [0]
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.msrl.env_step(self.msrl.agent_act(td, mine, self.seen))
            mine.append(int(td["observation"][0, 0]))
            self.seen.append(mine)
            td = advance(td)
            loss = self.msrl.agent_learn(td, mine, [self.seen, mine])
            mine = [*mine, i]
            self.msrl.log(i, loss, size=len(self.seen), first=len(self.seen[0]))
        return mine, self.seen


def test_fragments_share_no_state_and_the_program_sees_one() -> None:
    assert_policies_equal(Careless)


class GreedyActor(ToyActor):
    """Keeps what it is given and changes it later: what a neighbour in the same process could see."""

    kept: Any = None

    def act(self, td: Any, bag: list[int]) -> Any:
        if self.kept is not None:
            self.kept.append(99)
        self.kept = list(bag)
        return super().act(td, len(bag))


class Shares(ToyTrainer):
    def agent(self, spec):
        net, shift = ToyNet(), torch.zeros(4, dtype=torch.float64)
        return Agent(actor=GreedyActor(net, shift), learner=ToyLearner(net, shift))

    def train(self):
        bag = [1]
        td = self.msrl.env_reset()
        for i in range(3):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td, bag)))
            bag.append(i)
            self.msrl.log(i, self.msrl.agent_learn(td, bag), size=len(bag))
        return bag


def test_components_are_copies_of_the_users_objects() -> None:
    """Neither agent nor trainer of the user's is touched by a run in fragments."""
    made: list[Any] = []

    class Watched(Shares):
        def agent(self, spec):
            agent = super().agent(spec)
            made.append((agent, agent.actor.net.values.clone(), self))
            return agent

    expected = launch(Watched)
    for policy in POLICIES:
        made.clear()
        assert_results_equal(expected, launch(Watched, policy=policy), policy)
        agent, before, trainer = made[0]
        assert torch.equal(agent.actor.net.values, before) and agent.actor.calls == agent.learner.updates == 0
        assert not hasattr(trainer, "msrl") or set(vars(trainer)) <= {"config", "msrl"}


class ActsOnWeights(ToyActor):
    """Writes weights, which an actor must not."""

    def act(self, td: Any, *args: Any, **kwargs: Any) -> Any:
        self.net.values.add_(1)
        return super().act(td, *args, **kwargs)


class ActsOnData(ToyActor):
    """Writes them so that torch does not notice."""

    def act(self, td: Any, *args: Any, **kwargs: Any) -> Any:
        self.net.values.data.add_(1)
        return super().act(td, *args, **kwargs)


class WritesWeights(QLike):
    actor: type[ToyActor] = ActsOnWeights

    def agent(self, spec):
        net, shift = ToyNet(), torch.zeros(4, dtype=torch.float64)
        return Agent(actor=self.actor(net, shift), learner=ToyLearner(net, shift))


class WritesData(WritesWeights):
    actor = ActsOnData


@pytest.mark.parametrize("policy", ["local", *POLICIES])
@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("trainer", [WritesWeights, WritesData])
def test_weights_written_by_an_actor_are_found(trainer: type, policy: str, actors: int) -> None:
    with pytest.raises(FdgError, match="weights were written outside `learn`"):
        launch(trainer, policy=policy, actors=actors)


class Snapshots(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(4):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            self.msrl.replay_buffer_insert(td)
            td["observation"].fill_(50 + i)
            td["next"]["observation"].zero_()
            td = advance(td)
        batch = self.msrl.replay_buffer_sample(32)
        self.msrl.log(0, high=batch["observation"].max(), zeros=(batch["next", "observation"] == 0).all())
        batch["observation"].fill_(-1)
        self.msrl.log(1, low=self.msrl.replay_buffer_sample(32)["observation"].min())


@pytest.mark.parametrize("policy", ["local", *POLICIES])
@pytest.mark.parametrize("actors", [1, 2])
def test_an_insert_is_a_snapshot(policy: str, actors: int) -> None:
    first, second = (record["values"] for record in launch(Snapshots, policy=policy, actors=actors).history)
    assert first["high"] < 50 and not first["zeros"], "what happens to the tensor later is not in the buffer"
    assert second["low"] >= 0, "nor what happens to a sample"


# Exceptions ----------------------------------------------------------------------------------------------------------


class Mistake(Exception):
    """The user's own."""


class BreakingActor(ToyActor):
    def act(self, td: Any, *args: Any, **kwargs: Any) -> Any:
        if self.calls == 3:
            raise Mistake("in act")  # here: act
        return super().act(td, *args, **kwargs)


class BreakingLearner(ToyLearner):
    def learn(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.updates == 3:
            raise Mistake("in learn")  # here: learn
        return super().learn(batch, *args, **kwargs)


class LearnsThenBreaks(ToyLearner):
    def learn(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().learn(batch, *args, **kwargs)
        if self.updates % 2:
            raise Mistake("after the weights were written")
        return result


class GoesOn(ToyTrainer):
    """Catches an error of `learn`, and acts on what was learned before it."""

    def agent(self, spec):
        net, shift = ToyNet(), torch.zeros(4, dtype=torch.float64)
        return Agent(actor=ToyActor(net, shift), learner=LearnsThenBreaks(net, shift))

    def train(self):
        td = self.msrl.env_reset()
        for i in range(4):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            failed = 0.0
            try:
                self.msrl.agent_learn(td)
            except Mistake:
                failed = 1.0
            td = advance(td)
            self.msrl.log(i, failed=failed, sum=self.msrl.sum(td["observation"]))


@pytest.mark.parametrize("engine", ["inprocess", "process"])
@pytest.mark.parametrize("actors", [1, 2])
def test_what_was_learned_before_an_error_counts(engine: str, actors: int) -> None:
    expected = launch(GoesOn, policy="local", actors=actors)
    assert [row["values"]["failed"] for row in expected.history] == [1, 0, 1, 0]
    for policy in POLICIES:
        seen = launch(GoesOn, policy=policy, actors=actors, engine=engine)
        assert [row["values"] for row in seen.history] == [row["values"] for row in expected.history]
        assert seen.params_sha256 == expected.params_sha256


class Breaks(ToyTrainer):
    config: Sizes

    def agent(self, spec):
        net, shift = ToyNet(), torch.zeros(4, dtype=torch.float64)
        return Agent(actor=self.actor(net, shift), learner=self.learner(net, shift))

    actor, learner = ToyActor, ToyLearner

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)  # here: the call of act
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = advance(td)
            for _ in range(self.config.updates):
                batch = self.msrl.replay_buffer_sample(4)
                loss = self.msrl.agent_learn(  # here: the call of learn
                    batch,
                    i,
                )
            self.msrl.log(i, loss)


class BreaksInAct(Breaks):
    actor = BreakingActor


class BreaksInLearn(Breaks):
    learner = BreakingLearner


@pure
def checked(td: Any, limit: int) -> Any:
    """Pure, so it may move into a fragment."""
    if int(td["ticks"].max()) >= limit:
        raise Mistake("in a function")  # here: function
    return td


class BreaksInAFunction(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            for _ in range(4):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                td = checked(advance(td), 2)  # here: the call of the function
            self.msrl.log(i, self.msrl.agent_learn(td))


class BreaksInAStatement(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            for k in range(4):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                share = 12 // (2 - k)  # here: statement
                td["observation"] += share
                td = advance(td)
            self.msrl.log(i, self.msrl.agent_learn(td))


class BreaksInAHelper(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.roll(td, i)  # here: the call of the helper
            self.msrl.log(i, self.msrl.agent_learn(td))

    def roll(self, td, i):
        for k in range(3):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            td["observation"] += 12 // (2 - k)  # here: helper
            td = advance(td)
        return td


class BreaksAtTheDriver(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td)))
            loss = self.msrl.agent_learn(td)
            share = eval("12 // (1 - i)")  # here: driver
            self.msrl.log(i, loss, share=share)


class BreaksInTheBuffer(ToyTrainer):
    def train(self):
        self.msrl.env_reset()
        loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(3))  # here: buffer
        self.msrl.log(0, loss)


def here(mark: str) -> int:
    """The line of this file that ends with `# here: mark`."""
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# here: {mark}")]
    return line


BROKEN: list[tuple[type[Trainer], type[Exception], list[str]]] = [
    (BreaksInAct, Mistake, ["the call of act", "act"]),
    (BreaksInLearn, Mistake, ["the call of learn", "learn"]),
    (BreaksInAFunction, Mistake, ["the call of the function", "function"]),
    (BreaksInAStatement, ZeroDivisionError, ["statement"]),
    (BreaksInAHelper, ZeroDivisionError, ["the call of the helper", "helper"]),
    (BreaksAtTheDriver, ZeroDivisionError, ["driver"]),
]


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("policy", ["local", *POLICIES])
@pytest.mark.parametrize("trainer, kind, marks", BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_traceback_ends_in_the_users_lines(
    trainer: type[Trainer], kind: type[Exception], marks: list[str], policy: str, actors: int
) -> None:
    with pytest.raises(kind) as caught:
        launch(trainer, policy=policy, actors=actors)
    frames = traceback.extract_tb(caught.value.__traceback__)
    mine = [
        frame.lineno for frame in frames if frame.filename == __file__ and frame.name != inspect.stack()[0].function
    ]
    assert mine[-1] == here(marks[-1]), traceback.format_list(frames)
    assert [here(mark) for mark in marks] == [line for line in mine if line in set(map(here, marks))][-len(marks) :]
    shown = "".join(traceback.format_list(frames))
    assert f"# here: {marks[-1]}" in shown, "the traceback shows the user's line"


@pytest.mark.parametrize("policy", ["local", *POLICIES])
def test_a_failing_component_names_the_users_call(policy: str) -> None:
    with pytest.raises(Exception, match="empty") as caught:
        launch(BreaksInTheBuffer, policy=policy)
    frames = traceback.extract_tb(caught.value.__traceback__)
    mine = [
        frame.lineno for frame in frames if frame.filename == __file__ and frame.name != inspect.stack()[0].function
    ]
    assert mine[-1] == here("buffer")


# More actors than one ------------------------------------------------------------------------------------------------


class ReinforceLike(ToyTrainer):
    """Shaped as REINFORCE: each actor ends its own episodes, rows join, then one update."""

    def train(self):
        for i in range(self.config.iterations):
            td, steps, done = self.msrl.env_reset(), [], False
            while not done:
                td = self.msrl.env_step(self.msrl.agent_act(td, i))
                steps.append(row(td))
                done = bool(td["next", "done"].all())
                td = advance(td)
            batch = torch.stack(steps, 1)
            rewards = batch["next", "reward"].sum(1)
            loss = self.msrl.agent_learn(batch)  # varying: agent_learn.0
            self.msrl.log(i, loss, reward=self.msrl.mean(rewards))


class Lockstep(ToyTrainer):
    """All actors step until all have ended an episode: a condition made global."""

    def train(self):
        for i in range(self.config.iterations):
            td = self.msrl.env_reset()
            over = torch.zeros_like(td["done"])
            while not self.msrl.all(over):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                self.msrl.replay_buffer_insert(td)
                over = over | td["next", "done"]
                td = advance(td)
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(6))
            self.msrl.log(i, loss, size=self.msrl.replay_buffer_size())


class ListOfSteps(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                steps.append(row(td))
                td = advance(td)
            loss = self.msrl.agent_learn(torch.stack(steps))  # varying: agent_learn.0
            total = self.msrl.sum(torch.stack([step["next", "reward"].sum() for step in steps]).sum())
            self.msrl.log(i, loss, total=total)


class Helping(QLike):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td, reward = self.collect(td)
            self.msrl.log(i, self.update(), reward=self.msrl.mean(reward))

    def collect(self, td):
        total = torch.zeros(self.config.envs, 1, dtype=torch.float64)
        for _ in range(self.config.steps):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            total = total + td["next", "reward"]
            self.msrl.replay_buffer_insert(td)
            td = advance(td)
        return td, total

    def update(self):
        losses = [self.msrl.agent_learn(self.msrl.replay_buffer_sample(4), want="float") for _ in range(2)]
        return sum(losses)


class PerActorState(ToyTrainer):
    """A best value for each actor, kept across iterations and joined in the end."""

    def train(self):
        td = self.msrl.env_reset()
        best = td["observation"].sum(-1)
        for i in range(self.config.iterations):
            for _ in range(2):
                td = advance(self.msrl.env_step(self.msrl.agent_act(td)))
                if td["observation"].sum() > best.sum():
                    best = td["observation"].sum(-1)
            loss = self.msrl.agent_learn(td)  # varying: agent_learn.0
            self.msrl.log(i, loss, best=self.msrl.gather(best).max())


SEVERAL = [QLike, FineGrained, ReinforceLike, Lockstep, ListOfSteps, Helping, PerActorState]


def run_alike(trainer: type[Trainer], policies: Iterable[str], **settings: Any) -> None:
    config = trainer.config_class()(**settings)
    outcome = run_reference(trainer, config)
    assert outcome.logs
    for policy in policies:
        assert not mismatches(outcome, launch(trainer, config, policy=policy), trainer), policy


@pytest.mark.parametrize("actors", [2, 3])
@pytest.mark.parametrize("trainer", SEVERAL, ids=lambda trainer: trainer.__name__)
def test_several_actors_are_as_the_reference_says(trainer: type[Trainer], actors: int) -> None:
    run_alike(trainer, ["local", *POLICIES], actors=actors, seed=actors)


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_do_not_change_what_is_drawn(shards: int) -> None:
    """The buffer evicts here: 24 rows for 3 actors, 8 in each lane."""
    run_alike(QLike, ["local", *POLICIES], actors=3, replay_shards=shards, iterations=5)


def test_a_varying_number_of_turns_for_each_actor() -> None:
    for seed in (4, 5, 6):
        run_alike(ReinforceLike, [COARSE, FINE], actors=3, seed=seed, envs=1)


def test_actors_are_part_of_the_experiment() -> None:
    """Each logical actor has its own environments and streams: more actors, other numbers, the same everywhere."""
    seen = {launch(QLike, policy=COARSE, actors=actors).params_sha256 for actors in (1, 2, 3)}
    assert len(seen) == 3


def call(function, *arguments):
    return function(*arguments)


class PassesItselfOn(ToyTrainer):
    def train(self):
        call(PassesItselfOn.begin, self)

    def begin(self):
        return self.msrl.env_reset()


def test_a_component_call_that_nobody_could_see_is_named():
    launch(PassesItselfOn)
    with pytest.raises(GraphError, match=r"self\.msrl\.env_reset was called at the driver"):
        launch(PassesItselfOn, policy="single_learner_coarse")


def test_a_misspelt_call_is_told_under_local_too() -> None:
    with pytest.raises(AttributeError, match=r"self\.msrl has no 'env_stpe': did you mean 'env_step'"):
        MSRL.__new__(MSRL).env_stpe  # noqa: B018


def test_garbage_collections_are_settled_only_within_a_run() -> None:
    class Count:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_start(self, config: Any, graph: Any) -> None:
            pass

        def on_log(self, row: dict[str, Any]) -> None:
            self.seen.append(gc.get_freeze_count())

        def on_end(self, metrics: dict[str, Any]) -> None:
            pass

    count = Count()
    launch(DQN, iterations=2, envs=2, steps=2, learning_starts=4, batch_size=2, updates=1, observers=[count])
    assert len(count.seen) == 2 and all(count.seen) and gc.get_freeze_count() == 0
