"""Random trainers mean the same under every policy: the oracle is the naive reference, which uses no compiler.

Programs come from `strategies.py`, by seed, so a failure can be looked at: `python tests/strategies.py SEED --actors A`.
With several actors a program may be refused, because the compiler cannot prove that a value is global; a program that
runs must be right.
"""

from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import given
from reference import mismatches, run_reference
from strategies import examples, program_of, programs

from fdg.compiler import PASSES
from fdg.errors import CompileError
from fdg.runtime.run import launch

POLICIES = ("single_learner_coarse", "sharded_replay", "single_learner_fine")
CHUNK = 20
# Seeds of programs that once meant something else in fragments.
ONE_ACTOR = (258,)
TWO_ACTORS = (89, 100, 129, 148, 277)


def check(program, policies, passes=None) -> int:
    """Compare a program's fragments with the reference; returns how many policies refused it."""
    trainer = program.load()
    outcome = run_reference(trainer, program.config())
    refused = 0
    for policy in policies:
        fresh = program.load()
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                result = launch(fresh, program.config(), policy=policy, passes=passes)
        except CompileError as error:
            assert program.actors > 1, f"refused with one actor: {error}\n{program}"
            refused += 1
            continue
        found = mismatches(outcome, result, fresh)
        assert not found, f"under {policy}, passes {passes}: {found[0]}\n{program}"
        if program.actors == 1:
            assert printed.getvalue() == outcome.stdout, f"printed under {policy}\n{program}"
    return refused


@pytest.mark.parametrize("start", range(0, 60, CHUNK))
def test_one_actor(start):
    for seed in range(start, start + CHUNK):
        check(program_of(seed, 1), POLICIES)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(60, 300, CHUNK))
def test_one_actor_many(start):
    for seed in range(start, start + CHUNK):
        check(program_of(seed, 1), POLICIES)


@pytest.mark.parametrize("dropped", PASSES)
def test_one_actor_without_a_pass(dropped):
    for seed in range(300, 305):
        check(program_of(seed, 1), ["single_learner_coarse"], [name for name in PASSES if name != dropped])


@pytest.mark.parametrize("start", range(0, 40, CHUNK))
def test_several_actors(start):
    policies = ("local", "single_learner_coarse", "sharded_replay")
    refused = sum(check(program_of(seed, 2), policies) for seed in range(start, start + CHUNK))
    assert refused <= CHUNK * len(policies) // 4, f"{refused} of {CHUNK * len(policies)} runs were refused"


@pytest.mark.parametrize("seed", ONE_ACTOR)
def test_one_actor_again(seed):
    check(program_of(seed, 1), POLICIES)


@pytest.mark.parametrize("seed", TWO_ACTORS)
def test_two_actors_again(seed):
    check(program_of(seed, 2), ("local", "single_learner_fine"))


@examples(20)
@given(programs(actors=1))
def test_programs_that_hypothesis_finds(program):
    check(program, ["single_learner_coarse"])
