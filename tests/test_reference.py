"""The oracle and the generator of programs: each is checked against something simpler still."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from reference import Namespace, Outcome, Replica, differences, join, mismatches, run_reference, snapshot, tensors_of
from strategies import Program, constructs, examples, frequencies, program_of, programs
from tensordict import TensorDict
from toy import ToyConfig, ToyTrainer, make

from fdg.api import Actor, Agent, Learner, Trainer
from fdg.errors import RunError
from fdg.runtime.run import launch
from fdg.runtime.streams import Streams

# Against a direct run, A = 1 -----------------------------------------------------------------------------------------


class Direct:
    """The component calls, carried out at once."""

    def __init__(self, trainer_class: type[Trainer], config: Any) -> None:
        self.streams, self.rows, self.logs = Streams(config.seed), [], []
        self.env = make(config.envs)
        with self.streams.of("build"):
            self.trainer = trainer_class(config)
            self.agent = self.trainer.agent(self.env.spec)
        self.trainer.msrl, self.room = self, config.capacity

    def run(self) -> Outcome:
        with self.streams.of("driver"), contextlib.redirect_stdout(io.StringIO()) as printed:
            returned = self.trainer.train()
        seen = {name: value for name, value in vars(self.trainer).items() if name not in ("msrl", "config")}
        data = Namespace(type(self.trainer)).flat()
        return Outcome(tensors_of(self.agent.learner), self.logs, returned, seen, data, printed.getvalue())

    def env_reset(self):
        with self.streams.of("env"):
            return self.env.reset()

    def env_step(self, td):
        with self.streams.of("env"):
            return self.env.step(td)

    def agent_act(self, *args, **kwargs):
        with self.streams.of("actor"), torch.no_grad():
            return self.agent.actor.act(*args, **kwargs)

    def agent_learn(self, *args, **kwargs):
        with self.streams.of("learner"):
            return self.agent.learner.learn(*args, **kwargs)

    def replay_buffer_insert(self, td):
        self.rows = (self.rows + list(td.clone().unbind(0)))[-self.room :]

    def replay_buffer_sample(self, n):
        with self.streams.of("buffer"):
            return torch.stack([self.rows[at] for at in torch.randint(len(self.rows), (n,)).tolist()])

    def replay_buffer_size(self):
        return len(self.rows)

    def replay_buffer_clear(self):
        self.rows = []

    def log(self, step, value=None, **metrics):
        record = {"step": step, **({} if value is None else {"value": value}), **metrics}
        self.logs.append({key: item.clone() if hasattr(item, "clone") else item for key, item in record.items()})

    def all(self, x):
        return bool(x.all())

    def any(self, x):
        return bool(x.any())


def assert_same(left: Outcome, right: Outcome) -> None:
    for what in ("logs", "params", "returned", "attributes", "globals", "stdout"):
        assert not differences(getattr(left, what), getattr(right, what), what)


@examples(60)
@given(programs(actors=1))
def test_one_actor_is_the_users_own_loop(program: Program) -> None:
    assert_same(run_reference(program.load(), program.config()), Direct(program.load(), program.config()).run())


@examples(40)
@given(programs(actors=1))
def test_one_actor_is_a_local_run(program: Program) -> None:
    trainer = program.load()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = launch(trainer, program.config(), policy="local")
    outcome = run_reference(program.load(), program.config())
    assert not mismatches(outcome, result, trainer)
    assert outcome.stdout == printed.getvalue()


def test_an_algorithm_of_ours() -> None:
    from fdg.algorithms.dqn import DQN

    config = DQN.config_class()
    small = {"iterations": 4, "steps": 8, "updates": 2, "learning_starts": 16, "batch_size": 8, "envs": 2, "seed": 7}
    assert not mismatches(run_reference(DQN, config(**small)), launch(DQN, config(**small)), DQN)
    outcome = run_reference(DQN, config(**small, actors=2))  # replicas are compared inside
    assert [record["loss"] is not None for record in outcome.logs] == [True] * 4
    assert outcome.progress[-1][0] == 4 * 8 * 2 * 2


# Generated programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actors", [1, 2, 3])
def test_generated_programs_run_and_are_deterministic(actors: int) -> None:
    @examples(100 // actors)
    @given(programs(actors=actors))
    def check(program: Program) -> None:
        compile(program.source, "program.py", "exec")
        outcome = run_reference(program.load(), program.config(), limit=400, deadline=20)
        assert outcome.logs
        assert_same(outcome, run_reference(program.load(), program.config()))

    check()


@pytest.mark.parametrize("seed", range(6))
def test_the_rarer_constructs_run_as_well(seed: int) -> None:
    single = program_of(seed, extras=frozenset({"except", "evaluate"}))
    assert run_reference(single.load(), single.config()).logs
    double = program_of(seed, actors=2, extras=frozenset({"except", "evaluate", "unknown"}))
    assert run_reference(double.load(), double.config()).logs


def test_a_program_is_of_its_seed() -> None:
    program = program_of(11)
    assert program.source == program_of(11).source != program_of(12).source
    assert program.source in repr(program)


def test_no_run_sees_what_another_left_in_a_module() -> None:
    def changes(program: Program) -> bool:
        first, second = program.load(), program.load()
        fresh = copy.deepcopy(Namespace(second).flat())
        run_reference(first, program.config())
        assert not differences(Namespace(second).flat(), fresh)
        return bool(differences(Namespace(first).flat(), fresh))

    assert any([changes(program_of(seed)) for seed in range(8)])


ONE = {
    "ast.For": 60, "ast.While": 30, "ast.If": 60, "ast.Break": 25, "ast.Continue": 15, "ast.With": 25, "ast.Try": 20,
    "ast.NamedExpr": 25, "ast.ListComp": 20, "ast.Starred": 40, "ast.AugAssign": 50, "ast.IfExp": 20, "loop else": 10,
    "elif": 12, "early return": 20, "nested calls": 60, "tuple unpacking": 50, "learn in a nested block": 60,
    "learn in the step loop": 10, "in place: nums": 30, "in place: stats": 30, "in place: tensor": 10, "alias": 25,
    "in place: batch": 4, "td[key] = …": 10, "self attribute changed": 40, "module global": 25, "super()": 12,
    "helper: collect": 20, "helper: mixed": 20, "helper: update": 12, "helper: descend": 8, "helper: schedule": 12,
    "helper: record": 8, "helper: train": 4, "maybe defined": 25, "msrl alias": 30, "bound method alias": 10,
    "keyword arguments": 25, "star arguments": 40, "neutral draw": 30, "unknown function changes its argument": 20,
    "component call in a comprehension": 8, "component call in finally": 8, "with no_grad": 15, "with own context": 10,
    "base in another file": 12, "print": 8, "decoy": 10, "learn on td itself": 10, "append of varying": 8, "closure": 3,
}  # fmt: skip
MANY = {
    "varying if": 30, "varying while": 20, "msrl.all": 15, "msrl.any": 15, "msrl.gather": 12, "msrl.sum": 5,
    "msrl.mean": 5, "learn on varying": 30, "log of varying": 90, "varying attribute": 25, "helper: collect": 20,
    "nested calls": 60, "ast.For": 60, "ast.While": 40, "ast.Break": 25, "ast.Try": 15, "learn on td itself": 8,
}  # fmt: skip


@pytest.mark.parametrize(("actors", "wanted"), [(1, ONE), (2, MANY)])
def test_constructs_occur_often_enough(actors: int, wanted: dict[str, int]) -> None:
    found = frequencies(300, actors)
    rare = {name: found[name] / 3 for name, percent in wanted.items() if found[name] / 3 < percent}
    assert not rare, f"in percent of the programs: {rare}"


def test_hypothesis_draws_the_same_variety() -> None:
    seen: Counter[str] = Counter()

    @examples(150)
    @given(programs(actors=2))
    def count(program: Program) -> None:
        seen.update(set(program.features) | constructs(program))

    count()
    wanted = ("varying if", "varying while", "While", "Try", "learn", "maybe defined", "helper: mixed", "alias")
    assert min(seen[name] for name in wanted) >= 12, seen


FAULTS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {}
"""Mistakes that a compiler could make: the share of programs, in percent, that must notice, and the wrong methods."""


def fault(percent: int) -> Callable[[Callable[[], dict[str, Any]]], None]:
    def add(make: Callable[[], dict[str, Any]]) -> None:
        FAULTS[make.__name__] = percent, make

    return add


@fault(15)
def changes_of_a_batch_do_not_come_back() -> dict[str, Any]:
    learn = Replica.agent_learn
    return {"agent_learn": lambda self, *args, **kwargs: learn(self, *snapshot(args), **snapshot(kwargs))}


@fault(8)
def rows_are_no_snapshots() -> dict[str, Any]:
    def insert(self, td):
        self.lanes.lanes[0] += td.unbind(0)  # views
        del self.lanes.lanes[0][: -self.lanes.room]

    return {"replay_buffer_insert": insert}


@fault(35)
def actors_act_on_the_weights_before_the_last_update() -> dict[str, Any]:
    learn, act = Replica.agent_learn, Replica.agent_act

    def late(self, *args, **kwargs):
        self.stale = copy.deepcopy(self.agent.actor.net)
        return learn(self, *args, **kwargs)

    def stale(self, *args, **kwargs):
        actor = self.agent.actor
        fresh, actor.net = actor.net, getattr(self, "stale", actor.net)
        try:
            return act(self, *args, **kwargs)
        finally:
            actor.net = fresh

    return {"agent_learn": late, "agent_act": stale}


@fault(60)
def actor_and_environment_share_a_stream() -> dict[str, Any]:
    def act(self, *args, **kwargs):
        with self.streams.of("env", self.index), torch.no_grad():
            return self.agent.actor.act(*args, **kwargs)

    return {"agent_act": act}


@fault(10)
def the_grad_mode_is_lost() -> dict[str, Any]:
    learn, step = Replica.agent_learn, Replica.env_step

    def enabled(method):
        def inner(self, *args, **kwargs):
            with torch.enable_grad():
                return method(self, *args, **kwargs)

        return inner

    return {"agent_learn": enabled(learn), "env_step": enabled(step)}


@fault(6)
def a_step_returns_another_object() -> dict[str, Any]:
    step = Replica.env_step
    return {"env_step": lambda self, td: step(self, td.clone())}


@functools.cache
def known_outcomes(actors: int, count: int) -> list[tuple[Program, Outcome]]:
    made = [program_of(seed, actors) for seed in range(count)]
    return [(program, run_reference(program.load(), program.config())) for program in made]


def noticed(actors: int, count: int) -> float:
    """The share of programs, in percent, whose outcome is another one than it was."""
    found = 0
    for program, expected in known_outcomes(actors, count):
        try:
            outcome = run_reference(program.load(), program.config())
            found += bool(differences(expected.logs, outcome.logs) or differences(expected.params, outcome.params))
        except (RuntimeError, RunError, KeyError):
            found += 1
    return 100 * found / count


@pytest.mark.parametrize("name", FAULTS)
def test_programs_notice_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator is worth what its programs find."""
    known_outcomes(1, 50)
    percent, make = FAULTS[name]
    for method, wrong in make().items():
        monkeypatch.setattr(Replica, method, wrong)
    assert noticed(1, 50) >= percent


def test_programs_notice_the_order_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    known_outcomes(2, 25)
    monkeypatch.setattr(reference, "join", lambda values, envs, where: join(values[::-1], envs, where))
    assert noticed(2, 25) >= 30


# By hand, A > 1 ------------------------------------------------------------------------------------------------------


class KnownEnvironment:
    """Actor a's environments stand at 10a and 10a + 1, and move on by what the action says."""

    def __init__(self, actor: int, envs: int) -> None:
        self.at = torch.tensor([10.0 * actor + env for env in range(envs)])
        self.spec = None

    def reset(self) -> TensorDict:
        return TensorDict({"x": self.at.clone()}, [len(self.at)], names=["env"])

    def step(self, td: TensorDict) -> TensorDict:
        self.at = self.at + td["action"]
        return self.reset()


class KnownActor(Actor):
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.calls = weight, 0

    def act(self, td, more=0):
        self.calls += 1
        td["action"] = self.weight.expand(len(td["x"])) + more
        return td


class KnownLearner(Learner):
    """Adds the first number to the weight; returns all numbers it was given."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def learn(self, data, **_):
        values = data["x"] if isinstance(data, TensorDict) else torch.as_tensor(data)
        self.weight += values.reshape(-1)[0]
        if isinstance(data, TensorDict):
            data["seen"] = torch.ones(data.batch_size)
        return values.reshape(-1).tolist()


class KnownTrainer(Trainer):
    capacity = 100

    def agent(self, spec):
        weight = torch.ones(1)
        return Agent(KnownActor(weight), KnownLearner(weight))

    def replay_buffer(self, spec):
        return type("Buffer", (), {"capacity": self.capacity})()


def run(trainer: type[Trainer], actors: int = 2, envs: int = 2, **options: Any) -> Outcome:
    order = iter(range(actors))
    config = ToyConfig(actors=actors, envs=envs, seed=3)
    return run_reference(
        trainer, config, make_environment=lambda config, seed: KnownEnvironment(next(order), envs), **options
    )


TALLY = 0


class Joins(KnownTrainer):
    def train(self):
        global TALLY
        td = self.msrl.env_reset()
        self.msrl.log(0, td["x"])
        self.msrl.log(1, self.msrl.agent_learn(td))
        td = self.msrl.env_step(self.msrl.agent_act(td))
        self.msrl.log(2, td["x"], both=self.msrl.gather([td["x"], td["x"] * 2]))
        TALLY += 1
        learned = self.msrl.agent_learn(td["x"] * 0 + 5)  # varying: agent_learn.0
        self.msrl.log(3, learned, drawn=random.random(), tally=TALLY)
        total = float(td["x"].sum())
        self.msrl.log(4, total, all=self.msrl.all(td["x"] > 1), any=self.msrl.any(td["x"] > 12))
        self.msrl.log(5, mean=self.msrl.mean(td["x"]), sum=self.msrl.sum(td["x"]), numbers=self.msrl.sum(total))
        print("once")
        self.total = total
        return total


@pytest.mark.parametrize("actors", [2, 3])
def test_values_join_in_actor_order(actors: int) -> None:
    outcome = run(Joins, actors)
    logs = {record["step"]: record for record in outcome.logs}
    start = [10.0 * actor + env for actor in range(actors) for env in range(2)]
    assert logs[0]["value"].tolist() == start
    assert logs[1]["value"] == start  # the learner saw all rows; the weight is now 1 + 0
    assert logs[2]["value"].tolist() == [x + 1 for x in start]
    assert [part.tolist() for part in logs[2]["both"]] == [[x + 1 for x in start], [2 * x + 2 for x in start]]
    assert logs[3]["value"] == [5.0] * len(start) and logs[3]["tally"] == 1
    totals = [20.0 * actor + 3 for actor in range(actors)]
    assert logs[4]["value"].tolist() == totals
    assert (logs[4]["all"], logs[4]["any"]) == (False, actors > 2)
    assert float(logs[5]["sum"]) == sum(totals) == float(logs[5]["numbers"])
    assert float(logs[5]["mean"]) == sum(totals) / len(start)
    assert outcome.params["weight"].tolist() == [1.0 + 0 + 5]
    assert outcome.stdout == "once\n" and outcome.globals["module of Joins.TALLY"] == 1 and TALLY == 0
    assert [returned for returned, _ in outcome.actors] == totals
    assert [attributes["total"] for _, attributes in outcome.actors] == totals
    with Streams(3).of("driver"):
        assert logs[3]["drawn"] == random.random()


def test_actors_see_each_update_and_keep_their_own_state() -> None:
    class Updates(KnownTrainer):
        def train(self):
            td = self.msrl.env_reset()
            for i in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td, more=i))
                self.msrl.agent_learn([2.0])
            self.msrl.log(0, td["x"])

    # steps of 1 + 0, then 3 + 1, then 5 + 2
    assert run(Updates).logs[0]["value"].tolist() == [12.0, 13.0, 22.0, 23.0]


def test_lanes_evict_for_themselves_and_are_drawn_in_order() -> None:
    class Lanes(KnownTrainer):
        capacity = 6

        def train(self):
            td = self.msrl.env_reset()
            for _ in range(2):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                self.msrl.replay_buffer_insert(td)
                td["x"].add_(100)  # the row is a snapshot
                td["x"].sub_(100)
            batch = self.msrl.replay_buffer_sample(8)
            drawn = batch["x"].clone()
            self.msrl.agent_learn(batch)
            self.msrl.log(0, drawn, size=self.msrl.replay_buffer_size(), seen=batch["seen"])
            self.msrl.replay_buffer_clear()
            return self.msrl.replay_buffer_size()

    outcome = run(Lanes)
    order = torch.tensor([2.0, 2.0, 3.0, 12.0, 12.0, 13.0])  # three rows a lane, of (1, 2, 2, 3) and (11, 12, 12, 13)
    with Streams(3).of("buffer"):
        expected = order[torch.randint(6, (8,))]
    assert outcome.logs[0]["value"].tolist() == expected.tolist()
    assert (outcome.logs[0]["size"], outcome.returned) == (6, 0)
    assert outcome.logs[0]["seen"].tolist() == [1.0] * 8  # what the learner did to its batch is seen by the trainer


def test_each_actor_loops_its_own_number_of_times() -> None:
    class Ragged(KnownTrainer):
        def train(self):
            td, steps, turns = self.msrl.env_reset(), [], 0
            while float(td["x"][0]) < 12:
                td = self.msrl.env_step(self.msrl.agent_act(td, more=2))
                steps.append(td.clone())
                turns += 1
            self.msrl.log(0, turns=turns, rows=torch.stack(steps))

    record = run(Ragged).logs[0]  # from 0 to 12 by threes, and from 10 to 13
    assert record["turns"].tolist() == [4, 1]
    assert record["rows"]["x"].tolist() == [3, 4, 6, 7, 9, 10, 12, 13, 13, 14]
    assert record["rows"]["actor"].tolist() == [0] * 8 + [1] * 2
    assert record["rows"]["episode"].tolist() == [0] * 10


def test_episodes_of_ragged_rows_are_counted_by_environment() -> None:
    def steps(done: list[list[int]]) -> TensorDict:
        flags = torch.tensor(done, dtype=torch.bool)
        following = TensorDict({"done": flags[..., None]}, flags.shape, names=[None, "env"])
        return TensorDict({"next": following}, flags.shape, names=[None, "env"])

    rows = join([steps([[0, 1], [1, 0], [0, 0]]), steps([[1, 1]])], 2, "here")
    assert rows["episode"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert rows["actor"].tolist() == [0] * 6 + [1] * 2


# What is wrong -------------------------------------------------------------------------------------------------------


class GlobalCallUnderVaryingCondition(KnownTrainer):
    def train(self):
        td = self.msrl.env_reset()
        if float(td["x"].sum()) > 5:
            self.msrl.agent_learn([1.0])


class OtherCallUnderVaryingCondition(KnownTrainer):
    def train(self):
        td = self.msrl.env_reset()
        if float(td["x"].sum()) > 5:
            self.msrl.log(1)
        else:
            self.msrl.log(2)


class VaryingWhereGlobalIsNeeded(KnownTrainer):
    def train(self):
        td = self.msrl.env_reset()
        self.msrl.replay_buffer_insert(td)
        self.msrl.replay_buffer_sample(int(td["x"].sum()) + 1)


class CouldBeEither(KnownTrainer):
    def train(self):
        self.msrl.agent_learn(torch.ones(2))


class NoEnvironmentAxis(KnownTrainer):
    def train(self):
        self.msrl.gather(self.msrl.env_reset()["x"][:1])


class SaidToBeGlobal(KnownTrainer):
    def train(self):
        self.msrl.log(0, self.msrl.env_reset()["x"])  # varying:


class Endless(KnownTrainer):
    def train(self):
        while True:
            self.msrl.env_reset()


class Silent(KnownTrainer):
    def train(self):
        while not self.stop:
            pass

    stop = False


class Fails(KnownTrainer):
    def train(self):
        td = self.msrl.env_reset()
        try:
            if float(td["x"].sum()) > 5:
                raise ZeroDivisionError("mine")
            self.msrl.log(0)
        finally:
            self.msrl.env_reset()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            GlobalCallUnderVaryingCondition,
            "global call under a varying condition: actor 0 has returned.*actor 1 is at agent_le",
        ),
        (
            OtherCallUnderVaryingCondition,
            r"global call under a varying condition: actor 0 is at log, .*test_reference.py:\d+; ",
        ),
        (VaryingWhereGlobalIsNeeded, "replay_buffer_sample: a varying value where a global one is needed"),
        (CouldBeEither, "could be varying or global: write a comment"),
        (NoEnvironmentAxis, r"actor 0 has shape \[1\]; dimension 0 must be its 2 environments"),
        (SaidToBeGlobal, "a varying value where a global one is needed: argument 1 of log"),
        (Endless, "more than 50 component calls"),
        (Silent, "actor 0 is silent for 0.5 s"),
    ],
)
def test_wrong_programs_are_refused(trainer: type[Trainer], message: str) -> None:
    with pytest.raises(RunError, match=message):
        run(trainer, limit=50, deadline=0.5)
    trainer.stop = True  # type: ignore[attr-defined]


def test_the_users_exception_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(Fails)


def test_replicas_that_disagree_are_found() -> None:
    class Sneaky(KnownTrainer):
        def train(self):
            td = self.msrl.env_reset()
            self.msrl.agent.learner.weight += td["x"][0]  # past every check

    with pytest.raises(RunError, match=r"actors 0 and 1 disagree.*params\['weight'\]"):
        run(Sneaky)


def test_evaluation_does_not_disturb() -> None:
    class Evaluates(ToyTrainer):
        looks = False

        def train(self):
            td = self.msrl.env_reset()
            for i in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                self.msrl.agent_learn(td)
                if self.looks:
                    self.msrl.log(i, score=self.msrl.evaluate(3))

    class Looks(Evaluates):
        looks = True

    for actors in (1, 2):
        blind, seeing = (run_reference(trainer, ToyConfig(actors=actors)) for trainer in (Evaluates, Looks))
        assert not differences(blind.params, seeing.params)
        assert len(seeing.logs) == 3 and all(isinstance(record["score"], float) for record in seeing.logs)
