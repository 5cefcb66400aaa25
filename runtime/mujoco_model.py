"""A task's MuJoCo model, with the pairs of shapes that can touch written down.

In each of a frame's many steps MuJoCo looks for bodies that are near each other, sorts what it finds, and then drops most pairs
because their masks say that they never collide. Of a walking robot only a few pairs are left, the same in every
step: the floor and a leg. `quick_model` names them beforehand, as `<contact><pair>` in a model file would, so that there is nothing to look
for; and it does not ask which constraints are independent of each other, since a single robot is one island. Both take a
good part of the simulation's time, and change no bit of it, which is tried before such a model is used.
"""

from __future__ import annotations

import logging
import warnings
from itertools import combinations
from typing import Any

import numpy as np

TRIED = 40
"""Frames that both models take before the quick one is used: a robot that falls meets the ground in the first few."""


_models: dict[tuple[str, int], Any] = {}
"""By file and frame skip: the quick models of this process, which its environments share; None where there is none."""


def quick_model(env: Any) -> Any:
    """The model that steps simulations of a Gymnasium environment soonest: `env.model` itself if another would differ."""
    key = env.fullpath, env.frame_skip
    if key not in _models:
        _models[key] = _made(*key, env.model)
    return _models[key] or env.model


def _made(path: str, frame_skip: int, plain: Any) -> Any:
    import mujoco

    if not hasattr(mujoco, "MjSpec"):  # older than version 3.2
        return None
    why: Any = "its simulations differ"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said already when the environment was made
            quick = _with_pairs(mujoco, path)
        if _agree(mujoco, plain, quick, frame_skip):
            return quick
    except (AttributeError, TypeError, ValueError) as error:  # another version's way to change a model
        why = error
    logging.getLogger(__name__).info("%s: MuJoCo %s looks for contacts itself: %s", path, mujoco.__version__, why)
    return None


def _with_pairs(mujoco: Any, path: str) -> Any:
    spec = mujoco.MjSpec.from_file(path)
    for number, geom in enumerate(spec.geoms):
        geom.name = geom.name or f"geom {number}"
    plain = spec.compile()
    names = [mujoco.mj_id2name(plain, mujoco.mjtObj.mjOBJ_GEOM, geom) for geom in range(plain.ngeom)]
    for a, b in combinations(range(plain.ngeom), 2):
        if _may_touch(plain, a, b):
            pair = spec.add_pair()
            pair.geomname1, pair.geomname2 = names[a], names[b]
    model = spec.compile()
    for pair in range(model.npair):
        _mix(model, pair, model.pair_geom1[pair], model.pair_geom2[pair])
    for masks in (model.body_contype, model.body_conaffinity, model.geom_contype, model.geom_conaffinity):
        masks[:] = 0  # no other pairs
    model.opt.disableflags |= int(getattr(mujoco.mjtDisableBit, "mjDSBL_ISLAND", 0))
    return model


def _may_touch(model: Any, a: int, b: int) -> bool:
    """Whether MuJoCo would look at two shapes: their masks allow it, and they belong to bodies that move against each other
    and are not parent and child."""
    if not (model.geom_contype[a] & model.geom_conaffinity[b] or model.geom_contype[b] & model.geom_conaffinity[a]):
        return False
    one, other = model.body_weldid[model.geom_bodyid[[a, b]]]
    parents = model.body_weldid[model.body_parentid[[one, other]]]
    kin = one and other and (one == parents[1] or other == parents[0])
    return bool(one != other and not kin)


def _mix(model: Any, pair: int, a: int, b: int) -> None:
    """What a contact of two shapes has, from those of the same priority and weight."""
    model.pair_dim[pair] = max(model.geom_condim[a], model.geom_condim[b])
    model.pair_margin[pair] = model.geom_margin[a] + model.geom_margin[b]
    model.pair_gap[pair] = model.geom_gap[a] + model.geom_gap[b]
    model.pair_solref[pair] = 0.5 * model.geom_solref[a] + 0.5 * model.geom_solref[b]
    model.pair_solimp[pair] = 0.5 * model.geom_solimp[a] + 0.5 * model.geom_solimp[b]
    model.pair_friction[pair] = np.maximum(model.geom_friction[a], model.geom_friction[b])[[0, 0, 1, 2, 2]]


def _agree(mujoco: Any, plain: Any, quick: Any, frame_skip: int) -> bool:
    """Whether both models come to the same bits, from simulations that were made for the plain one."""
    if mujoco.MjData(plain).nbuffer != mujoco.MjData(quick).nbuffer:
        return False
    one, other = mujoco.MjData(plain), mujoco.MjData(plain)
    touched = False
    for action in np.random.default_rng(1).uniform(-1, 1, (TRIED, plain.nu)):
        for model, data in ((plain, one), (quick, other)):
            data.ctrl[:] = action
            mujoco.mj_step(model, data, frame_skip)
            mujoco.mj_rnePostConstraint(model, data)
        touched |= one.ncon > 0
        names = ("qpos", "qvel", "qacc", "xpos", "cfrc_ext")
        if not all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names):
            return False
    return touched
