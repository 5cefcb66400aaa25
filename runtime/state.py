"""The state of components, for a checkpoint: the same whatever the policy and the engine.

    {"env": {actor: …}, "actor": {actor: …}, "learner": …, "version": n, "buffer": …, "streams": {"component/index": …}}

Each place of a run gives the state of the components that it has; together they are the run's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fdg.errors import CheckpointError
from fdg.msrl import MSRL
from fdg.runtime.snapshot import restore, state_of

State = dict[str, Any]


def component_state(msrl: MSRL) -> State:
    """The state of the components in one place, and of their random streams."""
    state: State = {"env": {}, "actor": {}, "streams": {}}
    streams = []
    if msrl._env is not None:
        env: Any = msrl._env
        state["env"][msrl.index] = env.state() if hasattr(env, "state") else state_of(env)
        streams.append(("env", msrl.index))
    if msrl._actor is not None:
        state["actor"][msrl.index] = state_of(msrl._actor)
        streams.append(("actor", msrl.index))
    if msrl._buffer is not None:
        state["buffer"] = msrl._buffer.state()
        streams.append(("buffer", 0))
    if msrl._learner is not None:
        state["learner"], state["version"] = state_of(msrl._learner), msrl.version
        streams += [("learner", 0), ("evaluate", 0)]
    state["streams"] = {f"{name}/{index}": msrl.streams.of(name, index).state() for name, index in streams}
    return state


def load_component_state(msrl: MSRL, state: State) -> list[str]:
    """Give the components of one place their state; returns what could not be restored, in words."""
    lost = []
    streams = []
    if msrl._env is not None:
        env: Any = msrl._env
        saved = state["env"].get(msrl.index)
        here = env.spec.num_envs
        then = here if saved is None else saved.get("envs", here)
        if saved is None or then != here:
            raise CheckpointError(
                f"actor {msrl.index} has {here} environments here and {'none of its own' if saved is None else then} in the "
                "checkpoint: resume with the --envs, --fuse and --workers of the run that wrote it"
            )
        reason = None
        if hasattr(env, "load_state"):
            reason = env.load_state(saved)
        else:
            restore(env, saved)
        if reason is not None:
            lost.append(f"the environments of actor {msrl.index} begin new episodes: {reason}")
        streams.append(("env", msrl.index))
    if msrl._actor is not None:
        restore(msrl._actor, state["actor"][msrl.index])
        streams.append(("actor", msrl.index))
    if msrl._buffer is not None:
        msrl._buffer.load_state(state["buffer"])
        streams.append(("buffer", 0))
    if msrl._learner is not None:  # after the actor: where both have the same weights, the learner's are the newer
        restore(msrl._learner, state["learner"])
        msrl.version = state["version"]
        streams += [("learner", 0), ("evaluate", 0)]
    msrl._marks = [tensor._version for tensor in msrl._weights]
    for name, index in streams:
        msrl.streams.of(name, index).load_state(state["streams"][f"{name}/{index}"])
    return lost


def merged(states: Iterable[State]) -> State:
    """The states of several places as one."""
    whole: State = {"env": {}, "actor": {}, "streams": {}}
    for state in states:
        for name, value in state.items():
            if name in ("env", "actor", "streams"):
                whole[name].update(value)
            else:
                whole[name] = value
    return whole
