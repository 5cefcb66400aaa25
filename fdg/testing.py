"""Test your own trainer as we test ours: the same result under every policy, to the bit.

from fdg.testing import assert_policies_equal

def test_my_trainer():
    assert_policies_equal(MyTrainer, policies=["single_learner_coarse", "sharded_replay"], actors=2, iterations=3)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fdg.api import Trainer
from fdg.runtime.run import Result, launch

PASS_SETS: tuple[tuple[str, ...], ...] = ((), ("hoist",), ("merge",), ("dead", "resident"))
"""Choices of compiler passes worth trying: a program means the same under each."""


def assert_policies_equal(
    trainer: type[Trainer],
    policies: Sequence[Any] = ("single_learner_coarse", "sharded_replay", "single_learner_fine"),
    engines: Sequence[str] = ("inprocess",),
    *,
    reference: Any = "local",
    passes: Iterable[Iterable[str]] | None = None,
    config: Any = None,
    **overrides: Any,
) -> Result:
    """Train under each policy and engine; parameters, logs, counts and the returned value must equal `local`'s.

    Keyword arguments override fields of the trainer's config. Returns the reference run's result.

    Raises:
        AssertionError: names the first difference: policy, engine, iteration, value.
    """
    expected = launch(trainer, config, policy=reference, **overrides)
    for policy in policies:
        for engine in engines:
            for chosen in passes if passes is not None else [None]:
                seen = launch(trainer, config, policy=policy, engine=engine, passes=chosen, **overrides)
                name = policy if isinstance(policy, str) else policy.name
                where = f"{trainer.__name__} under {name!r} on {engine!r}"
                if chosen is not None:
                    where += f" with passes {sorted(chosen)}"
                assert_results_equal(expected, seen, where)
    return expected


def assert_results_equal(expected: Result, seen: Result, where: str) -> None:
    """Compare two runs: logs first (they name the iteration), then counts, parameters and the returned value."""
    for index, (left, right) in enumerate(zip(expected.history, seen.history, strict=False)):
        for name in ("iteration", "frames", "episodes", "episodic_return", "values"):
            if not _same(left[name], right[name]):
                raise AssertionError(
                    f"{where}: log {index} differs in {name}: expected {left[name]!r}, got {right[name]!r}"
                )
    if len(expected.history) != len(seen.history):
        raise AssertionError(f"{where}: {len(seen.history)} logs, expected {len(expected.history)}")
    for name in ("frames", "episodes"):
        if expected.metrics[name] != seen.metrics[name]:
            raise AssertionError(f"{where}: {name} is {seen.metrics[name]}, expected {expected.metrics[name]}")
    for name, value in expected.parameters.items():
        other = seen.parameters.get(name)
        if other is None or value.dtype != other.dtype or not _same(value, other):
            raise AssertionError(f"{where}: parameter {name!r} differs: expected {value}, got {other}")
    if expected.params_sha256 != seen.params_sha256:
        raise AssertionError(f"{where}: params_sha256 differs: {seen.params_sha256} != {expected.params_sha256}")
    if not _same(expected.returned, seen.returned):
        raise AssertionError(f"{where}: train returned {seen.returned!r}, expected {expected.returned!r}")


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if hasattr(left, "keys") and hasattr(left, "batch_size"):
        return set(left.keys(True, True)) == set(right.keys(True, True)) and all(
            _same(left[key], right[key]) for key in left.keys(True, True)
        )
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    try:
        return bool(left == right)
    except (RuntimeError, ValueError):
        return str(left) == str(right)
