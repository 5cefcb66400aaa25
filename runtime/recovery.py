"""Checkpoints of a run: taken between two turns of `train`'s outermost loop, and gone on from, to the same result.

A checkpoint is of the program, not of its fragments: variables by the names they have in `train`, components by what they
are, replay rows by lane. So a run can go on under another policy, on another engine or with other workers.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import random
import textwrap
from pathlib import Path
from typing import Any

import libcst as cst
import numpy as np
import torch

from fdg.api import Trainer
from fdg.config import Config
from fdg.errors import CheckpointError
from fdg.msrl import MSRL
from fdg.runtime import checkpoint
from fdg.runtime.boundary import Point
from fdg.runtime.coordinator import Coordinator
from fdg.runtime.snapshot import encode, restore, state_of
from fdg.runtime.state import State, component_state, load_component_state

SELF = "self."
"""In front of the names of the trainer's attributes."""


def take(
    point: Point,
    trainer_class: type[Trainer],
    trainer: Trainer,
    skipped: frozenset[str],
    msrl: MSRL,
    coordinator: Coordinator | None,
    progress: Any,
) -> State:
    """The state of a run at a boundary. `skipped` attributes are part of the agent."""
    values = dict(point.values)
    names = [name for name in vars(trainer) if name not in ("config", "msrl") and name not in skipped]
    values.update({SELF + name: vars(trainer)[name] for name in names})
    if coordinator is not None:
        values = coordinator.fetched(values)
    objects = {}
    for name in [name for name in values if name.startswith(SELF)]:
        try:
            encode({name: values[name]}, copy=False)
        except CheckpointError:  # an object of the user's own class: its state, for one that `__init__` makes
            objects[name] = state_of(values.pop(name), name)
    progress.drain()
    return {
        "trainer": trainer_class.__name__,
        "program": program_hash(trainer_class),
        "config": plain_config(trainer.config),
        "point": [point.label, point.turns, point.ended],
        "values": encode(values),
        "objects": objects,
        "components": component_state(msrl) if coordinator is None else coordinator.engine.state(),
        "random": random_state(),
        "progress": progress.state(),
        "phases": dict(msrl.record.phases if coordinator is None else coordinator.phases),
    }


def go_on(
    state: State, trainer: Trainer, msrl: MSRL, coordinator: Coordinator | None, progress: Any
) -> tuple[Point, list[str]]:
    """Give a run that was just built the state of a checkpoint; the point to resume at, and what was lost."""
    from fdg.runtime.snapshot import decode

    if coordinator is None:
        lost = load_component_state(msrl, state["components"])
    else:
        lost = coordinator.engine.load_state(state["components"])
        coordinator.version = state["components"].get("version", 0)
    for name, data in state["objects"].items():
        restore(getattr(trainer, name.removeprefix(SELF)), data)
    values = decode(state["values"])
    if coordinator is not None:
        values = coordinator.settled(values)
    for name in [name for name in values if name.startswith(SELF)]:
        setattr(trainer, name.removeprefix(SELF), values.pop(name))
    progress.load_state(state["progress"])
    (msrl.record.phases if coordinator is None else coordinator.phases).update(state.get("phases", {}))
    label, turns, ended = state["point"]
    return Point(label, turns, ended, values), lost


def read(path: str | Path, trainer_class: type[Trainer]) -> State:
    """The state of a checkpoint, or of the newest one in a run folder.

    Raises:
        CheckpointError: there is none, it is damaged, or of another program.
    """
    file = checkpoint.latest(path)
    state = checkpoint.load(file)
    check(state, trainer_class, str(file))
    state.setdefault("done", state["number"])  # older checkpoints do not have it
    return state


FIXED = ("env", "seed", "actors", "envs", "backend")
"""Fields that make a run another one: environments and random streams go on where they were."""


def check_config(state: State, config: Config) -> None:
    """Refuse to go on with a config that the checkpoint does not fit."""
    for name in FIXED:
        was, given = state["config"].get(name), getattr(config, name)
        if name in state["config"] and was != given:
            raise CheckpointError(
                f"{name} is {given}, and the checkpoint was taken with {name} = {was}, which cannot change while a run goes "
                f"on: leave --{name} out, or start anew without --resume"
            )
    was, done = state["config"].get("iterations", 0), len(state["progress"]["history"])
    if config.iterations < was and config.iterations <= done:
        raise CheckpointError(
            f"iterations is {config.iterations}, and {done} are done in the checkpoint: there would be nothing to train; write "
            f"--iterations with more than {done}, or leave it out for the {was} of before"
        )


def agent_hash(agent: Any) -> str:
    """Names the code of the classes of actor and learner, as far as it can be read."""
    digest = hashlib.sha256()
    for part in (agent.actor, agent.learner):
        for owner in type(part).__mro__ if part is not None else ():
            if owner.__module__.split(".")[0] in ("builtins", "torch", "abc") or owner.__module__ == "fdg.api":
                continue
            with contextlib.suppress(OSError, TypeError, SyntaxError):  # no source: a class of a notebook, of `exec`
                digest.update(ast.dump(ast.parse(textwrap.dedent(inspect.getsource(owner)))).encode())
    return digest.hexdigest()


def check_agent(state: State, agent: Any) -> None:
    """Refuse to go on with another actor or learner."""
    if state["agent"] != agent_hash(agent):
        raise CheckpointError(
            f"the checkpoint was taken with other code of {type(agent.actor).__name__} or {type(agent.learner).__name__}: "
            "going on with the code of today would be neither the one run nor the other; resume with the code of then, or "
            "start anew"
        )


def check(state: State, trainer_class: type[Trainer], where: str) -> None:
    """Refuse a checkpoint of another program."""
    if state.get("trainer") != trainer_class.__name__:
        raise CheckpointError(f"{where} is a checkpoint of {state.get('trainer')}, not of {trainer_class.__name__}")
    if state["program"] != program_hash(trainer_class):
        raise CheckpointError(
            f"{where} was taken with other code of {trainer_class.__name__}: going on with the code of today would be "
            "neither the one run nor the other; resume with the code of then, or start anew"
        )


def program_hash(trainer_class: type[Trainer]) -> str:
    """Names the code of a trainer and its bases, without comments and layout."""
    from fdg.compiler.source import from_class

    digest = hashlib.sha256()
    for owner in from_class(trainer_class).bases:
        for name, node in owner.methods.items():
            text = textwrap.dedent(cst.Module([]).code_for_node(node))
            digest.update(f"{name} {ast.dump(ast.parse(text))}".encode())
    return digest.hexdigest()


def plain_config(config: Config) -> dict[str, Any]:
    """A config's fields that are plain values: an environment given as a function is not."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if not callable(value)}


def random_state() -> dict[str, Any]:
    """The global generators: the driver's own, while `train` runs."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(kind), np.array(keys), int(position), int(has_gauss), float(gauss)],  # type: ignore[arg-type]
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
