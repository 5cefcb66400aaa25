"""Each construct a trainer may use, as a small program: the user's own loop and its fragments give the same numbers.

`local` with one actor runs the source as it stands; that is the oracle. Parameters, logs, counts, the returned value,
the trainer's attributes and this module's globals have to be equal under every policy.
"""

from __future__ import annotations

import contextlib
import io
import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from reference import Namespace, copied, differences, mismatches, run_reference
from toy import ToyConfig, ToyTrainer, advance, digest, make, row

from fdg.api import Trainer, pure
from fdg.compiler import PASSES
from fdg.registry import import_file
from fdg.runtime.run import Result, launch
from fdg.testing import assert_results_equal

POLICIES = ("single_learner_coarse", "sharded_replay", "single_learner_fine")
PROGRAMS: list[type[Trainer]] = []
T = TypeVar("T", bound=type[Trainer])


TURNS = 0


def turn() -> int:
    global TURNS
    TURNS += 1
    return TURNS


def program(trainer: T) -> T:
    """Adds a trainer to the list that the tests run."""
    PROGRAMS.append(trainer)
    return trainer


def run(trainer: type[Trainer], policy: str, **options: Any) -> tuple[Result, dict[str, Any]]:
    """One run, and the module data it left; the data is put back to what it was."""
    namespace = Namespace(trainer)
    namespace_before = namespace.read()
    namespace.write(copied(namespace_before))
    try:
        result = launch(trainer, policy=policy, **options)
        return result, namespace.flat()
    finally:
        namespace.write(namespace_before)


def own(result: Result) -> dict[str, Any]:
    return {name: value for name, value in vars(result.trainer).items() if name not in ("msrl", "config")}


def check(
    trainer: type[Trainer], passes: tuple[str, ...] | None = None, policies: Iterable[str] = POLICIES, **options: Any
) -> Result:
    """The same under every policy as in the user's own loop; returns the run of that loop."""
    expected, data = run(trainer, "local", **options)
    assert expected.history or expected.returned is not None, "a program that shows nothing tests nothing"
    for policy in policies:
        seen, seen_data = run(trainer, policy, passes=passes, **options)
        where = f"{trainer.__name__} under {policy}"
        assert_results_equal(expected, seen, where)
        assert not differences(own(expected), own(seen), f"{where}: self")
        assert not differences(data, seen_data, f"{where}: globals")
        assert sum(seen.calls.values()), "fragments were called"
    return expected


# Loops ---------------------------------------------------------------------------------------------------------------


@program
class ForLoops(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(4):
                td = self.msrl.agent_act(td, i)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = advance(td)
            for _ in range(2):
                loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(5))
            self.msrl.log(i, loss)


@program
class TwoNamesBesideAChange(ToyTrainer):
    """An argument's helper changes an attribute, while another name of the argument is still to be read."""

    def __init__(self, config):
        super().__init__(config)
        self.asked = {"times": 0}

    def bonus(self, i):
        self.asked["times"] += 1
        return i + self.asked["times"]

    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            before = td
            td = self.msrl.agent_act(td, self.bonus(i))
            td = self.msrl.env_step(td)
            self.msrl.log(i, row(before)["next", "reward"].squeeze(-1))
            td = advance(td)


@program
class ModuleStateBesideACall(ToyTrainer):
    """An argument that names module state is read before a later argument changes it."""

    def train(self):
        td = self.msrl.env_reset()
        for _ in range(3):
            self.msrl.log(TURNS, self.msrl.agent_learn(td, bonus=turn(), want="tensor"))
        self.msrl.log(TURNS)


@program
class WhileLoops(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        i = 0
        while i < self.config.iterations:
            steps = 3
            while steps:
                td = self.msrl.env_step(self.msrl.agent_act(td))
                self.msrl.replay_buffer_insert(td)
                td = advance(td)
                steps -= 1
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(4))
            self.msrl.log(i, loss, steps=steps)
            i += 1


@program
class DataDependentLoop(ToyTrainer):
    """`while not done`: theirs ran a fixed count on one side."""

    def train(self):
        lengths = []
        for i in range(self.config.iterations):
            td, steps, done = self.msrl.env_reset(), 0, False
            while not done:
                td = self.msrl.env_step(self.msrl.agent_act(td))
                done = bool(td["next", "done"].any())
                self.msrl.replay_buffer_insert(td)
                td = advance(td)
                steps += 1
            lengths.append(steps)
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(4))
            self.msrl.log(i, loss, steps=steps)
        return lengths


@program
class LoopUntilTheLearnerIsContent(ToyTrainer):
    def train(self):
        self.msrl.replay_buffer_insert(row(self.msrl.env_reset()))
        loss, turns = 100.0, 0
        while loss > 20 and turns < 12:
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(3), want="float")
            turns += 1
        self.msrl.log(0, loss, turns=turns)
        return turns


@program
class BreakAndContinue(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(5):
            if i == 1:
                continue
            for k in range(6):
                td = self.msrl.env_step(self.msrl.agent_act(td, k))
                if k % 2:
                    td = advance(td)
                    continue
                self.msrl.replay_buffer_insert(row(td))
                if td["next", "done"].any():
                    break
                td = advance(td)
            td = advance(td)
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(4), want="float")
            self.msrl.log(i, loss, k=k)
            if loss > 60 and i > 2:
                break
        return i


@program
class LoopElse(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        found = []
        for i in range(self.config.iterations):
            for k in range(3 + i):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                if td["next", "terminated"].any():
                    found.append(k)
                    break
                td = advance(td)
            else:
                found.append(-1)
                self.msrl.agent_learn(row(td), 7)
            td = advance(td)
            tries = 0
            while self.msrl.replay_buffer_size() < 4 * (i + 1):
                self.msrl.replay_buffer_insert(row(td))
                tries += 1
                if tries > 3:
                    break
            else:
                self.msrl.agent_learn(self.msrl.replay_buffer_sample(2))
            self.msrl.log(i, tries=tries)
        return found


@program
class LearnInsideTheStepLoop(ToyTrainer):
    """Not shaped for a coarse policy, and right all the same."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for k in range(4):
                td = self.msrl.agent_act(td, k)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(3))
                td = advance(td)
            self.msrl.log(i, loss, k=k)


@program
class LearnInsideWhile(ToyTrainer):
    """`agent_learn` inside a `while`: theirs lost the actor's loop."""

    def train(self):
        td = self.msrl.env_reset()
        i = 0
        loss = None
        while i < 4:
            td = self.msrl.env_step(self.msrl.agent_act(td))
            loss = self.msrl.agent_learn(td)
            td = advance(td)
            i += 1
            self.msrl.log(i, loss)
        return i


@program
class LoopOverValuesAndEnumerate(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i, steps in enumerate(self.config.plan):
            rows = []
            for _ in range(steps):
                td = self.msrl.env_step(self.msrl.agent_act(td, steps))
                rows.append(row(td))
                td = advance(td)
            for weight, part in zip(range(len(rows)), rows, strict=True):
                loss = self.msrl.agent_learn(part, weight)
            self.msrl.log(i, loss, rows=len(rows))


# Branches ------------------------------------------------------------------------------------------------------------


@program
class IfElifElse(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(4):
            if i == 0:
                td = self.msrl.env_step(td)
                kind = "step"
            elif i == 1:
                td = self.msrl.env_step(self.msrl.agent_act(advance(td)))
                kind = "act"
            elif self.msrl.replay_buffer_size() < 2:
                self.msrl.replay_buffer_insert(row(td))
                kind = "insert"
            else:
                self.msrl.agent_learn(self.msrl.replay_buffer_sample(2))
                kind = "learn"
            self.msrl.log(i, digest(td), kind=len(kind))


@program
class LearnInAConditional(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        loss = None
        for i in range(5):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            self.msrl.replay_buffer_insert(td)
            td = advance(td)
            if self.msrl.replay_buffer_size() >= 6 and i % 2 == 0:
                loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(4))
            self.msrl.log(i, loss)


@program
class ConditionalExpressions(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        self.msrl.replay_buffer_insert(row(td))
        for i in range(4):
            td = self.msrl.env_step(self.msrl.agent_act(td) if i % 2 else td)
            ready = i > 0 and self.msrl.replay_buffer_size() > 1
            full = self.msrl.replay_buffer_size() > 5 or bool(self.msrl.agent_learn(td, want="float") > 50)
            between = 0 < self.msrl.replay_buffer_size() < 4 < self.msrl.agent_learn(i, want="float")
            self.msrl.replay_buffer_insert(row(td))
            td = advance(td)
            self.msrl.log(i, ready=ready, full=full, between=between)


@program
class Match(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(4):
            match (i, self.config.envs):
                case (0, envs):
                    td = self.msrl.env_step(self.msrl.agent_act(td, envs))
                case (1 | 2 as k, _):
                    self.msrl.agent_learn(row(td), k)
                    td = self.msrl.env_step(advance(td))
                case _:
                    self.msrl.replay_buffer_insert(row(td))
            self.msrl.log(i, digest(td), size=self.msrl.replay_buffer_size())


@program
class DefinedOnSomePaths(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(4):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            if i == 1:
                first = td.clone()
                label = i * 10
            td = advance(td)
            if i >= 1:
                loss = self.msrl.agent_learn(first, label)
                self.msrl.log(i, loss)
        try:
            return never
        except NameError as error:
            return type(error).__name__
        never = 3  # noqa: F841


@program
class UnboundNameIsStillAnError(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        if self.config.seed > 10_000:
            loss = self.msrl.agent_learn(td)
        try:
            self.msrl.log(0, loss)
        except UnboundLocalError as error:
            self.msrl.log(0, len(str(error)))
            return error.name


# Blocks --------------------------------------------------------------------------------------------------------------


@program
class NoGrad(ToyTrainer):
    """The toy components' numbers depend on the grad mode: it is entered again in each fragment."""

    def train(self):
        td = self.msrl.env_reset()
        with torch.no_grad():
            for i in range(self.config.iterations):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                loss = self.msrl.agent_learn(td)
                with torch.enable_grad():
                    td = self.msrl.env_step(advance(td))
                    other = self.msrl.agent_learn(td)
                td = advance(td)
                self.msrl.log(i, loss, other=other["loss"], grad=torch.is_grad_enabled())
        self.msrl.log(9, self.msrl.agent_learn(td))


class Opened:
    """A context of the user's: it counts, and what it counts is the driver's."""

    def __init__(self) -> None:
        self.entered, self.depth = 0, 0

    def __enter__(self) -> Opened:
        self.entered, self.depth = self.entered + 1, self.depth + 1
        return self

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


@program
class OwnContext(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        context = Opened()
        for i in range(self.config.iterations):
            with context as inside, torch.no_grad():
                td = self.msrl.env_step(self.msrl.agent_act(td, inside.depth))
                loss = self.msrl.agent_learn(td)
                depth = context.depth
            td = advance(td)
            self.msrl.log(i, loss, depth=depth, after=context.depth, entered=context.entered)


@program
class SuppressedException(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        reached = 0
        for i in range(3):
            with contextlib.suppress(ZeroDivisionError):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                reached += 10 // i
                self.msrl.agent_learn(td)
            td = advance(td)
            self.msrl.log(i, digest(td), reached=reached)


@program
class TryFinally(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        closed = []
        for i in range(4):
            try:
                td = self.msrl.env_step(self.msrl.agent_act(td))
                if i == 1:
                    continue
                if i == 3:
                    break
                self.msrl.agent_learn(td)
            finally:
                closed.append(i)
                td = advance(td)
                self.msrl.replay_buffer_insert(row(td))
            self.msrl.log(i, digest(td))
        try:
            return closed, self.msrl.replay_buffer_size()
        finally:
            self.msrl.log(9, self.msrl.agent_learn(td, closed))


class NotYet(Exception):
    """Raised by a program that waits."""


@program
class TryExcept(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(4):
            try:
                td = self.msrl.env_step(self.msrl.agent_act(td))
                if i % 2 == 0:
                    raise NotYet(i)
                loss = self.msrl.agent_learn(td)
            except NotYet as error:
                loss = None
                self.msrl.log(i, waited=error.args[0])
            except (ValueError, KeyError):
                self.msrl.log(i, -1)
            else:
                self.msrl.log(i, loss)
            td = advance(td)
        try:
            self.msrl.agent_learn({1, 2})
        except TypeError as error:
            return str(error)


@program
class ExceptionOfAComponent(ToyTrainer):
    """An empty buffer cannot be drawn from: caught where the user catches it."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            try:
                loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(2), want="float")
            except Exception:
                loss = -1.0
            self.msrl.replay_buffer_insert(row(td))
            self.msrl.log(i, loss)


@program
class EarlyReturn(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(9):
            for _ in range(2):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                self.msrl.replay_buffer_insert(td)
                td = advance(td)
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(3), want="float")
            self.msrl.log(i, loss)
            if i >= 2 and loss > 5:
                return {"stopped": i, "loss": loss}
        return None


@program
class AssertRaiseDelPass(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            assert self.msrl.replay_buffer_size() == 0, "nothing was inserted"
            batch = td.clone()
            loss = self.msrl.agent_learn(batch)
            if i == 5:
                pass
            del batch
            self.msrl.log(i, loss)
            td = advance(td)
        try:
            raise RuntimeError(f"size {self.msrl.replay_buffer_size()}")
        except RuntimeError as error:
            said = str(error)
        try:
            return said, batch  # noqa: F821
        except UnboundLocalError as error:
            return said, error.name


# Expressions ---------------------------------------------------------------------------------------------------------


@program
class TupleUnpacking(ToyTrainer):
    def train(self):
        td, best = self.msrl.env_reset(), 0
        for i in range(self.config.iterations):
            td, score = self.msrl.agent_act(td, pair=True)
            (td, (a, *rest)) = (self.msrl.env_step(td), score.tolist())
            low, high = min(a, *rest), max(a, *rest)
            best, last = max(best, high), best
            first, second = self.msrl.agent_learn(td, score), self.msrl.agent_learn(td, low)
            td = advance(td)
            self.msrl.log(i, first["loss"], second=second["loss"], best=best, last=last, rest=len(rest))
        return [best, last]


@program
class AugmentedAssignment(ToyTrainer):
    """`loss += agent_learn(…)`: theirs made it `=`."""

    def train(self):
        self.total, stats, history = 0.0, {"loss": 0.0}, [0.0]
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            loss = 1.0
            for _ in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                loss += self.msrl.agent_learn(td, want="float")
                self.total += self.msrl.agent_learn(i, want="float")
                stats["loss"] -= self.msrl.agent_learn(td, want="float")
                history[0] *= 1 + self.msrl.replay_buffer_size()
                history += [self.msrl.agent_learn(len(history), want="float")]
                td = advance(td)
            self.msrl.log(i, loss, total=self.total, stats=stats)
        return history, stats


@program
class Walrus(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        while (size := self.msrl.replay_buffer_size()) < 8:
            td = self.msrl.env_step(acted := self.msrl.agent_act(td))
            self.msrl.replay_buffer_insert(row(acted))
            td = advance(td)
            if (loss := self.msrl.agent_learn(td, want="float")) > 40:
                self.msrl.log(size, loss)
            else:
                self.msrl.log(size, -loss)
        return size, loss


@program
class Comprehensions(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = [self.msrl.env_step(self.msrl.agent_act(advance(td))) for _ in range(3)]
            losses = {k: self.msrl.agent_learn(step, want="float") for k, step in enumerate(steps) if k != 1}
            kinds = {int(self.msrl.agent_learn(step, want="float")) % 3 for step in steps}
            nested = [a * b for a in range(2) for b in [self.msrl.replay_buffer_size(), i]]
            td = advance(steps[-1])
            self.msrl.log(i, losses=sum(losses.values()), kinds=sum(kinds), nested=sum(nested))
        return [sorted(losses), sorted(kinds), nested]


@program
class ComprehensionKeepsItsVariable(ToyTrainer):
    def train(self):
        i = 41
        losses = [self.msrl.agent_learn(i, want="float") for i in range(3)]
        self.msrl.log(i, losses)
        return i, losses


@program
class NestedCalls(ToyTrainer):
    """`agent_learn(replay_buffer_sample(n))`: theirs crashed."""

    def train(self):
        td = self.msrl.env_step(self.msrl.agent_act(self.msrl.env_reset()))
        for i in range(self.config.iterations):
            self.msrl.replay_buffer_insert(row(td := self.msrl.env_step(self.msrl.agent_act(advance(td), len("abc")))))
            self.msrl.log(
                self.msrl.replay_buffer_size(),
                self.msrl.agent_learn(self.msrl.replay_buffer_sample(max(1, self.msrl.replay_buffer_size() - i))),
                other=abs(-self.msrl.agent_learn(digest(td), want="float")),
            )


@program
class ArgumentsInOrder(ToyTrainer):
    """Arguments are evaluated from left to right, whatever is called in them."""

    def train(self):
        td = self.msrl.env_step(self.msrl.env_reset())
        for i in range(self.config.iterations):
            before = [i]
            loss = self.msrl.agent_learn(
                [len(before), before.append(7), self.msrl.agent_learn(before, want="float"), len(before)],
                self.msrl.agent_learn(td, want="float"),
                want="float",
                mark=before.pop() if self.msrl.replay_buffer_size() == 0 else 3,
            )
            self.msrl.log(i, loss, before=len(before))
        return before


@program
class KeywordAndStarArguments(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        numbers, options = (1, 2), {"want": "float"}
        for i in range(self.config.iterations):
            td = self.msrl.agent_act(td, *numbers, i, key=i, **{"other": 5})
            td = self.msrl.env_step(td=td)
            more = [*numbers, self.msrl.replay_buffer_size()]
            loss = self.msrl.agent_learn(td, *more, *[i], **options, **self.marks(i))
            batch = self.collect(td, *numbers, scale=2)
            self.msrl.replay_buffer_insert(batch)
            td = advance(td)
            self.msrl.log(i, loss, **{"size": self.msrl.replay_buffer_size()})

    def marks(self, i):
        return {"mark": i}

    def collect(self, td, first, *rest, scale=1, **others):
        self.msrl.agent_learn([first, *rest], scale, **others)
        return row(td)


@program
class ManyCallSites(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        td = self.msrl.agent_act(td, 1)
        td = self.msrl.agent_act(td, 2)
        td = self.msrl.env_step(td)
        first = self.msrl.agent_learn(td)
        td = self.msrl.agent_act(advance(td), 3)
        td = self.msrl.env_step(td)
        second = self.msrl.agent_learn(td, first)
        third = self.msrl.agent_learn(td, second)
        self.msrl.log(0, first)
        self.msrl.log(1, second)
        self.msrl.log(2, third)


@program
class AnyOtherCall(ToyTrainer):
    """`x = len(y)`: theirs crashed."""

    def train(self):
        words = ["one", "three"]
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            x = len(words)
            y = math.floor(max(map(len, words)) / 2)
            td = self.msrl.env_step(self.msrl.agent_act(td, x))
            z = sorted(td["observation"][:, 0].tolist())[-1]
            words.append("x" * int(z))
            loss = self.msrl.agent_learn(td, y, round(z, 1))
            td = advance(td)
            self.msrl.log(i, loss, x=x, y=y, z=z)


@program
class Strings(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        said = []
        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            said.append(f"{i}: {self.msrl.agent_learn(td, want='float'):.3f} {self.msrl.replay_buffer_size()!r}")
            td = advance(td)
        self.msrl.log(0, len(said))
        return said


# Values --------------------------------------------------------------------------------------------------------------


@program
class LiveAcrossSeveralCuts(ToyTrainer):
    """A live variable crossing the cut: theirs left it undefined."""

    def train(self):
        first = td = self.msrl.env_reset()
        kept = first.clone()
        total = torch.zeros(2, dtype=torch.float64)
        for i in range(self.config.iterations):
            scale = 2.0**i
            td = self.msrl.env_step(self.msrl.agent_act(td, scale))
            reward = td["next", "reward"]
            total = total + reward[:, 0] * scale
            self.msrl.replay_buffer_insert(td)
            loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(3), reward, scale)
            td = advance(td)
            other = self.msrl.agent_learn(kept, total, reward.mean())
            self.msrl.log(i, loss["loss"] + other["loss"], reward=reward.sum(), total=total)
        return total, digest(kept), first is kept


@program
class ChangedInPlace(ToyTrainer):
    """The learner marks its batch; the actor fills `td`: both are seen under every name of the object."""

    def train(self):
        td = self.msrl.env_reset()
        other = td
        for i in range(self.config.iterations):
            self.msrl.agent_act(td, i)
            action = td["action"].sum()
            same = self.msrl.env_step(td) is td
            self.msrl.agent_learn(td, scale=True)
            seen = other["seen"]
            td["observation"].mul_(3).remainder_(17)
            loss = self.msrl.agent_learn(other)
            self.msrl.log(i, loss, action=action, seen=seen, same=same, there=digest(other))
        return other is td


@program
class InsertIsASnapshot(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                self.msrl.replay_buffer_insert(td)
                td["observation"].fill_(99)
                td["next", "reward"].zero_()
                td = advance(td)
            self.msrl.log(i, self.msrl.agent_learn(self.msrl.replay_buffer_sample(6)))


@program
class ListsOfData(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps, returns = [], {"seen": 0}
            for k in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td))
                steps.append(td)
                returns[f"step {k}"] = float(td["next", "reward"].sum())
                td = advance(td)
            stacked = torch.stack([step["next", "reward"] for step in steps])
            loss = self.msrl.agent_learn(steps, returns, stacked)
            self.msrl.agent_learn(returns)
            marked = [int(step["seen"].sum()) for step in steps]
            self.msrl.log(i, loss, marked=marked, returns=sum(returns.values()), seen=returns["seen"])


# State ---------------------------------------------------------------------------------------------------------------


@program
class AttributesOfTheTrainer(ToyTrainer):
    def __init__(self, config):
        super().__init__(config)
        self.best, self.returns, self.stats = -math.inf, [], {"n": 0}

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(3):
                td = self.msrl.env_step(self.msrl.agent_act(td, len(self.returns)))
                self.returns.append(float(td["next", "reward"].sum()))
                self.stats["n"] += 1
                td = advance(td)
            loss = self.msrl.agent_learn(td, self.stats["n"], want="float")
            if loss > self.best:
                self.best = loss
            self.msrl.log(i, loss, best=self.best, n=self.stats["n"], mean=sum(self.returns) / len(self.returns))


@program
class Aliases(ToyTrainer):
    def train(self):
        self.rewards = []
        rewards, stats = self.rewards, {"n": 0, "inner": []}
        inner = stats["inner"]
        same = stats
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(td, len(rewards)))
            rewards.append(float(td["next", "reward"][0]))
            stats["n"] += 1
            inner.append(same["n"])
            td = advance(td)
            loss = self.msrl.agent_learn(same, self.rewards)
            self.msrl.log(i, loss, n=len(self.rewards), inner=sum(stats["inner"]), seen=stats["seen"])
        return rewards is self.rewards, same is stats, inner is same["inner"], same


@program
class AliasOfAnInnerList(ToyTrainer):
    def train(self):
        stats = {"inner": []}
        inner = stats["inner"]
        self.msrl.log(0, self.msrl.agent_learn(stats))
        inner.append(1)
        self.msrl.log(1, self.msrl.agent_learn(stats))
        stats["inner"].append(2)
        return stats, inner, inner is stats["inner"]


@pure
def same(x):
    """Pure: it writes nothing. What it returns is its argument all the same."""
    return x


@program
class AliasThroughAPureFunction(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        for i in range(2):
            other = self.msrl.env_step(self.msrl.agent_act(same(td)))
            self.msrl.log(i, self.msrl.agent_learn(same(other)), there=digest(td))
        steps = [self.msrl.env_step(self.msrl.agent_act(same(td))) for _ in range(2)]
        self.msrl.log(2, self.msrl.agent_learn(steps), there=digest(td))
        return digest(td), digest(steps)


counters = {"steps": 0}
record: list[float] = []
seen_losses = 0


def count(by: int = 1) -> int:
    counters["steps"] += by
    return counters["steps"]


@program
class ModuleGlobals(ToyTrainer):
    def train(self):
        global seen_losses
        counters["steps"], seen_losses = 0, 0
        record.clear()
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(td, counters["steps"]))
            count(2)
            record.append(self.msrl.agent_learn(td, counters["steps"], want="float"))
            seen_losses += 1
            td = advance(td)
            self.msrl.log(i, record[-1], steps=counters["steps"], losses=seen_losses, count=count())
        return list(record)


@program
class NestedGenerators(ToyTrainer):
    """`train` is no generator where a function inside it is one."""

    def train(self):
        counts = {}

        @contextlib.contextmanager
        def counted(name):
            counts[name] = counts.get(name, 0) + 1
            yield counts
            counts[name] += 0.5

        def halves(x):
            while x > 0.1:
                yield x
                x /= 2

        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            with counted("steps"):
                td = self.msrl.env_step(self.msrl.agent_act(td))
            td = advance(td)
            with counted("updates") as seen:
                loss = self.msrl.agent_learn(td, sum(halves(1.0)))
            self.msrl.log(i, loss, steps=counts["steps"], updates=seen["updates"])
        return counts


@program
class NestedFunctionWithoutComponentCalls(ToyTrainer):
    def train(self):
        total = 0.0

        def add(x):
            nonlocal_free.append(x)
            return sum(nonlocal_free)

        nonlocal_free = []
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            total = add(float(td["next", "reward"].sum()))
            double = (lambda x: x * 2 + total)(i)
            td = advance(td)
            self.msrl.log(i, self.msrl.agent_learn(td, total, double), total=total, double=double)
        return nonlocal_free


@program
class NestedFunctionThatRebinds(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset()
        total = 0

        def add(x):
            nonlocal total
            total += x
            return total

        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(td, total))
            add(i + 1)
            loss = self.msrl.agent_learn(td, total)
            td = advance(td)
            self.msrl.log(i, loss, total=total)
        total *= 2
        return add(5), total


@program
class UnknownCallsAndDraws(ToyTrainer):
    """What the compiler cannot see into stays at the driver, and draws from the driver's stream."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            noise = torch.rand(2)
            td = self.msrl.env_step(self.msrl.agent_act(td, noise))
            kept = eval("td.clone()", {"td": td})
            loss = self.msrl.agent_learn(kept, torch.randint(5, (1,)))
            td = advance(td)
            self.msrl.log(i, loss, noise=noise, kept=digest(kept))


# Names and methods ---------------------------------------------------------------------------------------------------


@program
class AliasOfMsrl(ToyTrainer):
    def train(self):
        msrl = self.msrl
        act = self.msrl.agent_act
        learn = msrl.agent_learn
        td = msrl.env_reset()
        for i in range(self.config.iterations):
            td = msrl.env_step(act(td, i))
            loss = learn(td)
            td = advance(td)
            msrl.log(i, loss)


class Decoy:
    """Another object with the same method names."""

    def __init__(self, inner: Decoy | None = None) -> None:
        self.calls, self.msrl = 0, inner

    def agent_act(self, td: Any) -> Any:
        self.calls += 1
        return td

    def agent_learn(self, *_: Any) -> int:
        self.calls += 10
        return self.calls


@program
class AnotherObjectsAgentAct(ToyTrainer):
    def train(self):
        other = Decoy(Decoy())
        self.decoy = Decoy(other)
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(other.agent_act(td)))
            loss = self.msrl.agent_learn(td, other.msrl.agent_learn(td), self.decoy.msrl.agent_learn())
            td = advance(td)
            self.msrl.log(i, loss, calls=other.calls, decoy=self.decoy.calls)


@program
class AnotherNameForSelf(ToyTrainer):
    def train(trainer):
        td = trainer.msrl.env_reset()
        for i in range(trainer.config.iterations):
            td = trainer.msrl.env_step(trainer.msrl.agent_act(td))
            loss = trainer.msrl.agent_learn(td)
            td = advance(td)
            trainer.msrl.log(i, loss)


@program
class Helpers(ToyTrainer):
    """Methods of the trainer: some in one fragment, some in several, one that returns early, one recursive."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.collect(td, steps=3)
            losses = self.update(4)
            td, last = self.step_and_learn(td)
            self.msrl.log(i, sum(losses), last=last, part=self.fraction(i), depth=self.dig(2))

    def collect(self, td, steps):
        for _ in range(steps):
            td = self.act_and_step(td)
            self.msrl.replay_buffer_insert(td)
            td = advance(td)
        return td

    def act_and_step(self, td):
        return self.msrl.env_step(self.msrl.agent_act(td))

    def update(self, times):
        losses = []
        for k in range(times):
            losses.append(self.msrl.agent_learn(self.msrl.replay_buffer_sample(2), k, want="float"))
            if losses[-1] > 90:
                return losses
        return losses

    def step_and_learn(self, td):
        td = self.act_and_step(td)
        if td["next", "terminated"].any():
            return advance(td), -1.0
        loss = self.msrl.agent_learn(td, want="float")
        return advance(td), loss

    def fraction(self, i):
        return i / self.config.iterations

    def dig(self, depth):
        return 0 if depth == 0 else depth + self.dig(depth - 1)


class Base(ToyTrainer):
    """A bundled-like algorithm: `train` is whole, its parts are methods."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.rollout(td, self.exploration(i))
            loss = self.improve()
            self.report(i, loss)

    def exploration(self, i):
        return 10 - i

    def rollout(self, td, eps):
        for _ in range(self.config.plan[0]):
            td = self.msrl.env_step(self.msrl.agent_act(td, eps))
            self.msrl.replay_buffer_insert(td)
            td = advance(td)
        return td

    def improve(self):
        return self.msrl.agent_learn(self.msrl.replay_buffer_sample(3))

    def report(self, i, loss):
        self.msrl.log(i, loss)


@program
class OverridesOneMethod(Base):
    def improve(self):
        first = self.msrl.agent_learn(self.msrl.replay_buffer_sample(2), want="tensor")
        return first + self.msrl.agent_learn(self.msrl.replay_buffer_sample(4), want="tensor")


@program
class CallsSuper(Base):
    def rollout(self, td, eps):
        td = super().rollout(td, eps + 1)
        return super().rollout(td, eps=eps)

    def improve(self):
        self.improved = getattr(self, "improved", 0) + 1
        loss = super().improve()
        return super(CallsSuper, self).improve() if self.improved % 2 else loss  # noqa: UP008

    def exploration(self, i):
        return super().exploration(i) * 2


@program
class NestedSuper(Base):
    def rollout(self, td, eps):
        return super().rollout(super().rollout(td, eps), eps)

    def improve(self):
        first = self.twice(super().improve())
        return first

    def twice(self, x):
        return self.msrl.agent_learn(self.msrl.agent_learn(x))


@program
class SuperTrain(Base):
    def train(self):
        self.begun = True
        super().train()
        self.msrl.log(99, self.msrl.agent_learn(7))
        return self.begun


class Mixin:
    """A second base, which is no trainer by itself."""

    def report(self, i, loss):
        self.reported = i
        super().report(i, loss)
        self.msrl.log(i + 100, self.msrl.agent_learn(i))


@program
class TwoBases(Mixin, Base):
    pass


@program
class Properties(ToyTrainer):
    @property
    def scale(self) -> int:
        return self.config.envs * 3

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def square(cls, x):
        return cls.double(x) * x

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.env_step(self.msrl.agent_act(td, self.scale, self.double(i)))
            loss = self.msrl.agent_learn(td, self.square(i))
            td = advance(td)
            self.msrl.log(i, loss, scale=self.scale)


@program
class ItsOwnName(ToyTrainer):
    """A trainer that says what it is."""

    @classmethod
    def name(cls):
        return cls.__name__

    def train(self):
        td = self.msrl.env_reset()
        self.msrl.log(0, self.msrl.agent_learn(td, type(self).__name__))
        return self.name(), type(self).__name__, self.__class__.__qualname__, isinstance(self, ItsOwnName)


# Surface -------------------------------------------------------------------------------------------------------------


@program
class NoDocstring(ToyTrainer):
    """No docstring: theirs lost the first statement."""

    def train(self):
        first = self.msrl.env_reset()
        self.msrl.log(0, self.msrl.agent_learn(first))


@program
class Docstring(ToyTrainer):
    def train(self):
        """What it does.

        With a second paragraph, a `backtick` and a \\ backslash.
        """
        first = self.msrl.env_reset()
        "a string that nobody reads"
        self.msrl.log(0, self.msrl.agent_learn(first))


@program
class CommentsAndHints(ToyTrainer):
    def train(self) -> dict[str, float]:  # a comment here
        # Why it begins so.
        td: Any = self.msrl.env_reset()  # and here
        losses: list[float]
        losses = []
        best: float = -1.0

        for i in range(
            self.config.iterations,  # turns
        ):
            # the step
            td = self.msrl.env_step(
                self.msrl.agent_act(
                    td,
                    i,  # told
                )
            )
            y = i + 3
            best = max(best, y)
            losses.append(self.msrl.agent_learn(td, y, want="float"))
            td = advance(td)
            self.msrl.log(i, losses[-1], best=best)
            # the end of the loop
        return {"best": best}
        # the end of it all


# fmt: off
@program
class OneLineMethods(ToyTrainer):
    def train(self): self.msrl.log(0, self.update(self.msrl.env_reset()))

    def update(self, td): return self.msrl.agent_learn(td)


@program
class SeveralStatementsOnALine(ToyTrainer):
    def train(self):
        td = self.msrl.env_reset(); total = 0  # noqa: E702
        for i in range(3): td = advance(self.msrl.env_step(self.msrl.agent_act(td))); total += i  # noqa: E701, E702
        if total > 2: loss = self.msrl.agent_learn(td); self.msrl.log(0, loss)  # noqa: E701, E702
        else: self.msrl.log(1, total)  # noqa: E701
        while total > 0: total -= 1; self.msrl.agent_learn(total)  # noqa: E701, E702
        return total
# fmt: on


@program
class NamesThatCouldClash(ToyTrainer):
    def train(self):
        _fdg = driver = learner = actors = region = fragment = 1
        _returned, returned, result, msrl_ = 2, 3, 4, 5
        td = self.msrl.env_reset()
        for _ in range(3):
            td = self.msrl.env_step(self.msrl.agent_act(td, _fdg, driver))
            for _ in range(2):
                learner += self.msrl.agent_learn(td, actors, region, fragment, want="float")
            td = advance(td)
            self.msrl.log(_, learner, a=_returned, b=returned, c=result, d=msrl_)
        return learner


# The tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", PROGRAMS, ids=lambda trainer: trainer.__name__)
def test_construct(trainer: type[Trainer]) -> None:
    check(trainer)


FEW = [ForLoops, LearnInsideTheStepLoop, TryFinally, Comprehensions, ChangedInPlace, Aliases, Helpers, CallsSuper]
FEW += [NoGrad, DataDependentLoop]


@pytest.mark.parametrize("off", [*PASSES, "all"])
@pytest.mark.parametrize("trainer", FEW, ids=lambda trainer: trainer.__name__)
def test_a_program_means_the_same_without_a_pass(trainer: type[Trainer], off: str) -> None:
    check(trainer, tuple(name for name in PASSES if off not in (name, "all")), [POLICIES[0], POLICIES[2]])


@pytest.mark.parametrize("seed", [2, 3])
def test_other_seeds_and_sizes(seed: int) -> None:
    for trainer in (DataDependentLoop, BreakAndContinue, LoopElse, Helpers):
        check(trainer, seed=seed, envs=seed)


def test_a_trainer_inside_a_function_uses_what_encloses_it() -> None:
    scale, bag = 3, []

    def weigh(x):
        return x * scale

    class Inner(ToyTrainer):
        def train(self):
            td = self.msrl.env_reset()
            for i in range(self.config.iterations):
                td = self.msrl.env_step(self.msrl.agent_act(td, weigh(i)))
                bag.append(i)
                loss = self.msrl.agent_learn(td, scale, len(bag))
                td = advance(td)
                self.msrl.log(i, loss, weight=weigh(i), bag=len(bag))
            return len(bag)

    expected = launch(Inner)
    assert bag == [0, 1, 2]
    for policy in POLICIES:
        bag.clear()
        assert_results_equal(expected, launch(Inner, policy=policy), policy)
        assert bag == [0, 1, 2], "the list that encloses the class is the one that was appended to"


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    """Writes a file into a folder that is no package; returns its module."""

    def write_file(name: str, text: str) -> Any:
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(text))
        return import_file(str(file))

    yield write_file


def test_a_trainer_outside_any_package(write: Any) -> None:
    module = write(
        "lonely_trainer",
        """
        from toy import ToyTrainer, advance

        SCALE = 4

        def scaled(x):
            return x * SCALE

        class Lonely(ToyTrainer):
            def train(self):
                td = self.msrl.env_reset()
                for i in range(self.config.iterations):
                    td = self.msrl.env_step(self.msrl.agent_act(td, scaled(i)))
                    loss = self.msrl.agent_learn(td)
                    td = advance(td)
                    self.msrl.log(i, loss)
        """,
    )
    check(module.Lonely)


def test_bases_in_other_files_see_their_own_names(write: Any) -> None:
    """Both files have a `NAME` and a `note`; each method means its own file's."""
    write(
        "far_base",
        """
        from toy import ToyTrainer, advance as forward

        NAME, seen = "base", []

        def note(x):
            seen.append(x)
            return len(seen)

        class FarBase(ToyTrainer):
            def train(self):
                seen.clear()
                td = self.msrl.env_reset()
                for i in range(self.config.iterations):
                    td = self.rollout(td)
                    self.msrl.log(i, self.learn(td), noted=note(i), name=len(NAME))
                return list(seen)

            def rollout(self, td):
                for _ in range(2):
                    td = forward(self.msrl.env_step(self.msrl.agent_act(td, NAME)))
                return td

            def learn(self, td):
                return self.msrl.agent_learn(td, NAME)
        """,
    )
    module = write(
        "near_child",
        """
        import far_base
        from far_base import FarBase

        NAME = "child!"

        def note(x):
            return -x

        class Near(FarBase):
            def learn(self, td):
                loss = super().learn(td)["loss"]
                return loss + self.msrl.agent_learn(td, NAME, note(3), want="tensor")

            def rollout(self, td):
                return super().rollout(super().rollout(td))
        """,
    )
    check(module.Near)


def test_a_subclass_of_a_bundled_trainer_overrides_one_method(write: Any) -> None:
    module = write(
        "my_dqn",
        """
        from fdg.algorithms.dqn import DQN
        from toy import ToyTrainer

        class Mine(DQN):
            agent, replay_buffer = ToyTrainer.agent, ToyTrainer.replay_buffer

            def epsilon(self, i):
                return super().epsilon(i) / 2 if i else 1.0
        """,
    )
    small = {"iterations": 3, "steps": 4, "updates": 2, "learning_starts": 6, "batch_size": 4, "envs": 2}
    config = module.Mine.config_class()(env=make, **small)
    assert len(check(module.Mine, config=config).history) == 3


def test_no_program_is_changed_by_being_projected() -> None:
    """`local` runs the user's own class, before and after fragments were made of it."""
    before = launch(ForLoops)
    assert type(before.trainer) is ForLoops
    launch(ForLoops, policy="single_learner_coarse")
    assert_results_equal(before, launch(ForLoops), "after")


# Several actors: one object under several names ---------------------------------------------------------------------
# The oracle is the naive reference, which runs `train` once per actor on copies of everything.

SEVERAL: list[type[Trainer]] = []


def several(trainer: T) -> T:
    """Adds a trainer to the list that runs with two actors."""
    SEVERAL.append(trainer)
    return trainer


@contextlib.contextmanager
def scope(value: Any) -> Iterator[Any]:
    yield value


@several
class GlobalListInAnActorLoop(ToyTrainer):
    """A list of the trainer's own grows beside per-actor statements."""

    def train(self):
        td = self.msrl.env_reset()
        x = []
        v = td["observation"][:, 0]
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            x.append(i)
            v = v + td["next", "reward"].squeeze(-1) * len(x)
            td = advance(td)
            self.msrl.log(i, v=v, n=len(x))  # varying: log.v


@several
class GlobalAttributeWithTwoNames(ToyTrainer):
    """The same, as an attribute that `__init__` gave two names."""

    def __init__(self, config):
        super().__init__(config)
        self.x = self.y = []

    def train(self):
        td = self.msrl.env_reset()
        v = td["observation"][:, 0]
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.x.append(i)
            v = v + td["next", "reward"].squeeze(-1) * len(self.x)
            td = advance(td)
            self.msrl.log(i, v=v, n=len(self.y))  # varying: log.v


@several
class CallersNameForAnAttribute(ToyTrainer):
    """A helper changes an attribute for which the caller has a name."""

    def __init__(self, config):
        super().__init__(config)
        self.x = []

    def helper(self, td):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        self.x.append(3)
        self.msrl.replay_buffer_insert(td)
        n = self.msrl.replay_buffer_size()
        return advance(td), n

    def train(self):
        td = self.msrl.env_reset()
        y = self.x
        for i in range(3):
            td, n = self.helper(td)
            self.msrl.log(i, n=len(y), m=n)  # varying:


@several
class CallersNameForAVaryingAttribute(ToyTrainer):
    """The same, with a value per actor."""

    def __init__(self, config):
        super().__init__(config)
        self.x = []

    def helper(self, td):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        self.x.append(td["next", "reward"].squeeze(-1))
        self.msrl.replay_buffer_insert(td)
        n = self.msrl.replay_buffer_size()
        return advance(td), n

    def train(self):
        td = self.msrl.env_reset()
        y = self.x
        for i in range(3):
            td, n = self.helper(td)
            self.msrl.log(i, y=torch.stack(y).sum(0), m=n)  # varying: log.y


@several
class CallersNameMadeWithTheAttribute(CallersNameForAVaryingAttribute):
    """Both names from one assignment in `train`."""

    def train(self):
        td = self.msrl.env_reset()
        y = self.x = []
        for i in range(3):
            td, n = self.helper(td)
            self.msrl.log(i, y=torch.stack(y).sum(0), m=n)  # varying: log.y


@several
class CallersNameMadeBefore(CallersNameForAVaryingAttribute):
    """The attribute is given an object that has a name."""

    def train(self):
        td = self.msrl.env_reset()
        y = []
        self.x = y
        td, n = self.helper(td)
        self.msrl.log(0, y=torch.stack(self.x).sum(0), m=n)  # varying: log.y
        self.msrl.log(1, y=torch.stack(y).sum(0), m=n)  # varying: log.y


@several
class FilledByAHelper(ToyTrainer):
    """A helper fills a list that has two names."""

    def helper(self, td, out):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        out.append(td["next", "reward"].squeeze(-1))
        return advance(td)

    def train(self):
        td = self.msrl.env_reset()
        y = []
        z = y
        td = self.helper(td, y)
        self.msrl.log(0, y=torch.stack(z).sum(0))  # varying: log.y


@several
class TwoAttributesOfOneList(ToyTrainer):
    """`__init__` makes two attributes one list, which becomes varying."""

    def __init__(self, config):
        super().__init__(config)
        self.x = self.y = []

    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.x.append(td["next", "reward"].squeeze(-1))
            td = advance(td)
            self.msrl.log(i, y=torch.stack(self.y).sum(0))  # varying: log.y


@several
class AnAttributeInAnother(ToyTrainer):
    """A list and a dict that holds it."""

    def __init__(self, config):
        super().__init__(config)
        self.x = []
        self.d = {"x": self.x}

    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.x.append(td["next", "reward"].squeeze(-1))
            td = advance(td)
            self.msrl.log(i, y=torch.stack(self.d["x"]).sum(0))  # varying: log.y


@several
class TwoAttributesMadeByAHelper(ToyTrainer):
    """A helper makes two attributes one list."""

    def setup(self):
        self.x = []
        self.y = self.x

    def more(self, td):
        self.x.append(td["next", "reward"].squeeze(-1))

    def show(self):
        return torch.stack(self.y).sum(0)

    def train(self):
        self.setup()
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.more(td)
            td = advance(td)
            self.msrl.log(i, y=self.show())  # varying: log.y


@several
class TwoAttributesChangedAtTheDriver(ToyTrainer):
    """A per-actor statement that stays at the driver."""

    def __init__(self, config):
        super().__init__(config)
        self.x = self.y = []

    def train(self):
        td = self.msrl.env_reset()
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.x.append(print(td["next", "reward"].sum()))
            td = advance(td)
            self.msrl.log(i, y=torch.tensor(float(len(self.y))))  # varying: log.y


@several
class HoldsAGlobalTensor(ToyTrainer):
    """A varying list holds a global tensor that changes."""

    def train(self):
        td = self.msrl.env_reset()
        g = torch.ones(2)
        x = [td["observation"][:, 0]]
        x.append(g)
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            v = td["next", "reward"].squeeze(-1) + x[1]
            td = advance(td)
            self.msrl.log(i, v=v)  # varying: log.v
            g.add_(1)
            self.msrl.log(i, v=x[1])  # varying: log.v


@several
class ContextFromAVaryingValue(ToyTrainer):
    """A context that is entered once per actor."""

    def train(self):
        td = self.msrl.env_reset()
        x = []
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            with scope(td["next", "reward"].sum()):
                x.append(i)
                v = td["next", "reward"].squeeze(-1)
            td = advance(td)
            self.msrl.log(i, v=v, n=len(x))  # varying: log.v


@several
class AttributeFromAHelpersResult(ToyTrainer):
    """A varying attribute begins as what a helper returned."""

    def __init__(self, config):
        super().__init__(config)
        self.x = []

    def fresh(self, n):
        self.msrl.agent_learn(torch.ones(2) * n)  # varying:
        return [n]

    def more(self, td):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        self.x.append(td["next", "reward"].squeeze(-1))
        self.msrl.replay_buffer_insert(td)
        n = self.msrl.replay_buffer_size()
        return advance(td), n

    def train(self):
        td = self.msrl.env_reset()
        y = self.x = self.fresh(2)
        for i in range(3):
            td, _n = self.more(td)
            self.msrl.log(i, v=y[-1], n=len(y))  # varying: log.v


@several
class FilledTwoCallsDown(ToyTrainer):
    """A helper's helper fills a list that a dict of the caller's holds."""

    def inner(self, td, out):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        out.append(td["next", "reward"].squeeze(-1))
        self.msrl.replay_buffer_insert(td)
        n = self.msrl.replay_buffer_size()
        return advance(td), n

    def outer(self, td, out):
        td, n = self.inner(td, out)
        self.msrl.log(0, n=n)  # varying:
        return td

    def train(self):
        td = self.msrl.env_reset()
        y = []
        d = {"y": y}
        for i in range(3):
            td = self.outer(td, y)
            self.msrl.log(i, v=d["y"][-1])  # varying: log.v


@several
class OneListTwoParameters(ToyTrainer):
    """Two parameters are one list."""

    def both(self, a, b, td):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        a.append(td["next", "reward"].squeeze(-1))
        self.msrl.replay_buffer_insert(td)
        n = self.msrl.replay_buffer_size()
        self.msrl.log(n, v=b[-1])  # varying: log.v
        return advance(td)

    def train(self):
        td = self.msrl.env_reset()
        y = []
        for _ in range(3):
            td = self.both(y, y, td)


@several
class ParameterIsAnAttribute(ToyTrainer):
    """A parameter and an attribute are one list."""

    def __init__(self, config):
        super().__init__(config)
        self.x = []

    def both(self, a, td):
        td = self.msrl.agent_act(td)
        td = self.msrl.env_step(td)
        a.append(td["next", "reward"].squeeze(-1))
        self.msrl.replay_buffer_insert(td)
        n = self.msrl.replay_buffer_size()
        self.msrl.log(n, v=self.x[-1])  # varying: log.v
        return advance(td)

    def train(self):
        td = self.msrl.env_reset()
        for _ in range(3):
            td = self.both(self.x, td)


@several
class ChangedAtTheDriverPerActor(ToyTrainer):
    """A per-actor statement at the driver changes a list with two names."""

    def train(self):
        td = self.msrl.env_reset()
        a = [td["observation"][:, 0]]
        b = a
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            a.append(print(td["next", "reward"]) or td["next", "reward"].squeeze(-1))
            td = advance(td)
            self.msrl.log(i, v=b[-1], n=torch.tensor(float(len(b))))  # varying: log.v log.n


@several
class ChangedAtTheDriverInAHelper(ToyTrainer):
    """The same, in a helper."""

    def note(self, a, td):
        a.append(print(td["next", "reward"]) or td["next", "reward"].squeeze(-1))
        self.msrl.log(1)  # varying:

    def train(self):
        td = self.msrl.env_reset()
        a = [td["observation"][:, 0]]
        b = a
        for i in range(3):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.note(a, td)
            td = advance(td)
            self.msrl.log(i, v=b[-1], n=torch.tensor(float(len(b))))  # varying: log.v log.n


@several
class LoopVariableInAPerActorBranch(ToyTrainer):
    """A variable that a loop may leave unbound is read where each actor takes its own way."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.agent_act(td, i)
            td = self.msrl.env_step(td)
            self.msrl.agent_learn(td)
            td = advance(td)
        if bool(td["ticks"].sum() % 2 == 0):
            v = td["observation"][:, 0] + i
            td = self.msrl.agent_act(td, fresh=True)
        else:
            v = td["observation"][:, 0] * 3 + i
        self.msrl.log(0, v=v)  # varying: log.v


@several
class ReturnsWhatVaries(ToyTrainer):
    """What `train` returns is joined where it varies: one entry per actor of a number, all rows of a tensor."""

    def train(self):
        td = self.msrl.env_reset()
        for _ in range(3):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td)))
        self.msrl.log(0, 1.0)  # varying:
        return 5, int(td["observation"][:, 0].sum()), td["observation"][:, 0]


class StateInADefault(ToyTrainer):
    """A default that is changed is one object for all calls: it stays at the driver, whoever needs the result."""

    def count(self, by, seen={"n": 0}):  # noqa: B006
        seen["n"] += by
        return seen["n"]

    def train(self):
        first = self.count(0)
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td, self.count(1) - first)))
            self.msrl.log(i, self.msrl.agent_learn(td), n=self.count(2) - first)


def test_state_in_a_default_is_the_drivers() -> None:
    check(StateInADefault)
    config = ToyConfig(actors=2, envs=2)
    expected = launch(StateInADefault, config, policy="local")
    for workers in (1, 2):
        seen = launch(
            StateInADefault, config, policy="single_learner_fine", engine="process", workers=workers, notice=str
        )
        assert_results_equal(expected, seen, f"{workers} workers")


@several
class SchedulesOfNumbers(ToyTrainer):
    """A schedule made of numbers is the same for all actors, however it is made."""

    def train(self):
        td = self.msrl.env_reset()
        n = self.config.iterations
        repeated, spread = [1] * n, [0, *[1] * 2]
        array, tensor = np.linspace(0, 3, 4), torch.arange(3)
        for i, shift in enumerate(repeated):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td, shift)))
            self.msrl.log(i, self.msrl.agent_learn(td))
        for shift in spread + [2] * 2:
            td = advance(self.msrl.env_step(self.msrl.agent_act(td, shift)))
            self.msrl.log(shift, self.msrl.agent_learn(td))
        for i, shift in enumerate(array):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td, shift)))
            self.msrl.log(i, self.msrl.agent_learn(td))
        for i, shift in zip(array.tolist(), tensor.tolist(), strict=False):
            td = advance(self.msrl.env_step(self.msrl.agent_act(td, shift)))
            self.msrl.log(int(i), self.msrl.agent_learn(td))


@pytest.mark.parametrize("policy", ("local", *POLICIES))
def test_a_returned_number_per_actor(policy: str) -> None:
    returned = launch(ReturnsWhatVaries, ToyConfig(actors=3, envs=2), policy=policy).returned
    assert returned[0] == 5 and returned[1].tolist() == returned[2].view(3, 2).sum(1).tolist()


@pytest.mark.parametrize("policy", ("local", *POLICIES))
@pytest.mark.parametrize("trainer", SEVERAL, ids=lambda trainer: trainer.__name__)
def test_several_actors(trainer: type[Trainer], policy: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = run_reference(trainer, ToyConfig(actors=2, envs=2))
        result = launch(trainer, ToyConfig(actors=2, envs=2), policy=policy)
    assert outcome.logs
    assert not mismatches(outcome, result, trainer)
