"""Environments: what a trainer sees of episodes, and what it is told when it uses them wrongly."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, assert_close
from torchrl.envs.utils import step_mdp as torchrl_step_mdp
from typer.testing import CliRunner

import fdg
from fdg.api import Actor
from fdg.cli import app
from fdg.doctor import advice
from fdg.errors import RunError, UsageError
from fdg.runtime import evaluation
from fdg.runtime.backends import CartPoleRows, make_rows
from fdg.runtime.environments import Environment, EnvSpec, backend_for, begin_rows, make_env, resolve_env, step_mdp
from fdg.runtime.evaluation import Evaluator, evaluate
from fdg.runtime.native import native

THREE = Path(__file__).parent / "three_steps.py"


def three(function: str = "make_env", rows: int = 2) -> Environment:
    return make_env(f"{THREE}:{function}", rows, seed=1)


def with_action(td: TensorDict, *actions: int) -> TensorDict:
    return td.set("action", torch.tensor(actions))


def random_actions(env: Environment, generator: torch.Generator) -> torch.Tensor:
    rows = env.spec.num_envs
    if env.spec.discrete:
        return torch.randint(env.spec.n_actions, (rows,), generator=generator)
    return torch.randn(rows, env.spec.action_dim, generator=generator)


def same(left: TensorDict, right: TensorDict) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    assert left.batch_size == right.batch_size and left.names == right.names
    for key in left.keys(True, True):
        assert torch.equal(left[key], right[key]), key


# Names


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("cartpole", "CartPole-v1"),
        ("CartPole-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("mountaincar", "MountainCar-v0"),
        ("Half_Cheetah", "HalfCheetah-v5"),
        ("walker2d", "Walker2d-v5"),
        ("gymnasium:Pendulum-v1", "gymnasium:Pendulum-v1"),
    ],
)
def test_names(name: str, full: str) -> None:
    assert resolve_env(name) == full
    assert resolve_env(full) == full


def test_factory_is_found_from_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(THREE.parent)
    assert resolve_env("three_steps.py:make_env") == f"{THREE}:make_env"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cartpol", ["unknown environment 'cartpol'", "did you mean 'cartpole'"]),
        ("Pendulum-v7", ["did you mean 'Pendulum-v1'"]),
        ("taxi", ["did you mean 'Taxi-v"]),
        ("no_such_module:X-v0", ["no module 'no_such_module'"]),
        ("nowhere.py:make_env", ["no file 'nowhere.py'"]),
        (f"{THREE}", ["three_steps.py:make_env"]),
        (f"{THREE}:make_evn", ["no function 'make_evn'", "did you mean 'make_env'"]),
        (f"{THREE}:make_with_argument", ["called without arguments", "gravity"]),
    ],
)
def test_unknown_names(name: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        resolve_env(name)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_factory_file_that_does_not_parse(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import gymnasium\ndef make_env(:\n")
    with pytest.raises(UsageError, match=r"broken\.py:2"):
        resolve_env(f"{file}:make_env")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UsageError, match=r'pip install "gymnasium\[box2d\]"'):
        resolve_env("lunarlander")


def test_environment_that_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="HalfCheetah-v2 cannot be made"):
        make_env("HalfCheetah-v2", 1, seed=1)


def test_bad_numbers_and_backends() -> None:
    with pytest.raises(UsageError, match="envs is 0"):
        make_env("cartpole", 0, seed=1)
    with pytest.raises(UsageError, match="did you mean 'sync'"):
        make_env("cartpole", 1, seed=1, backend="synk")


def test_names_need_no_torch() -> None:
    code = "import sys; from fdg.runtime.backends import resolve_env; resolve_env('cartpole'); "
    code += "assert 'torch' not in sys.modules; import fdg.runtime.evaluation; assert 'torchrl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# Spaces


def test_spec() -> None:
    spec = make_env("cartpole", 3, seed=1).spec
    assert (spec.id, spec.backend, spec.num_envs, spec.obs_dim) == ("CartPole-v1", "cartpole-vector", 3, 4)
    assert spec.discrete and spec.n_actions == 2
    with pytest.raises(UsageError, match="discrete actions"):
        _ = spec.action_dim
    spec = make_env("pendulum", 1, seed=1).spec
    assert (spec.backend, spec.discrete, spec.action_dim) == ("sync", False, 1)
    with pytest.raises(UsageError, match="continuous actions"):
        _ = spec.n_actions


@pytest.mark.parametrize(
    ("function", "words"),
    [("make_dict", "FlattenObservation"), ("make_multi", "ActionWrapper"), ("make_number", "returned int")],
)
def test_unserved_environments(function: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        three(function)


def test_the_wrapper_goes_into_the_users_own_function() -> None:
    with pytest.raises(UsageError, match=r"return gymnasium.wrappers.FlattenObservation\(env\) from `make_dict`"):
        three("make_dict")
    with pytest.raises(UsageError, match=r"FlattenObservation\(gymnasium.make\('Blackjack-v1'\)\)"):
        make_env("Blackjack-v1", 1, seed=1)


OBSERVATION = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((OBSERVATION, 1.0, False, {}), "make_env: step returned 4 values, as Gym's did before"),
        ((OBSERVATION[:2], 1.0, False, False, {}), r"observation of shape \[2\], and observation_space says \[3\]"),
        ((OBSERVATION, OBSERVATION, False, False, {}), "return observation, reward, terminated, truncated, info"),
        (None, "return observation, reward, terminated, truncated, info"),
    ],
)
def test_steps_that_return_something_else(returned: object, words: str) -> None:
    env = three()
    td = env.reset()
    env._rows.vector.envs[1].step = lambda action: returned
    with pytest.raises(UsageError, match=words):
        env.step(with_action(td, 0, 0))


def test_resets_that_return_something_else() -> None:
    for reset in (lambda: (OBSERVATION, {}), lambda **_: OBSERVATION):
        env = three()
        env._rows.vector.envs[1].reset = reset
        with pytest.raises(UsageError, match=r"make_env: reset cannot be used .* of shape \[3\]"):
            env.reset()


@pytest.mark.parametrize("first", [True, False], ids=["first", "next"])
def test_resets_with_an_observation_of_another_shape(first: bool) -> None:
    env = three()
    td = None if first else env.reset()
    env._rows.vector.envs[1].reset = lambda **_: (OBSERVATION[:2], {})
    words = r"make_env: reset returned an observation of shape \[2\], and observation_space says \[3\]"
    with pytest.raises(UsageError, match=words):
        if td is None:
            env.reset()
        for _ in range(3):  # an episode
            td = step_mdp(env.step(with_action(td, 0, 0)))


def test_errors_of_an_environment_stay_its_own() -> None:
    def step(action: int) -> None:
        raise ValueError("the simulator is angry")

    env = three()
    td = env.reset()
    env._rows.vector.envs[1].step = step
    with pytest.raises(ValueError, match="the simulator is angry"):
        env.step(with_action(td, 0, 0))


def test_backends() -> None:
    assert backend_for("CartPole-v1") == "cartpole-vector"
    assert backend_for("Acrobot-v1") == backend_for("phys2d/CartPole-v1") == "sync"


# Episodes


def test_two_episodes_of_three_steps() -> None:
    env = three()
    td = env.reset()
    assert td.batch_size == (2,) and td.names == ["env"]
    assert td["observation"].dtype == torch.float32 and not td["done"].any()
    for episode in (1, 2):
        for step in (1, 2, 3):
            assert td["observation"][:, :2].tolist() == [[episode, step - 1]] * 2  # a step of an episode, each of them
            result = env.step(with_action(td, 0, 1))
            assert result is td
            following = td["next"]
            assert following["observation"].tolist() == [[episode, step, 0], [episode, step, 1]]
            assert following["reward"].tolist() == [[step]] * 2 and following["reward"].dtype == torch.float32
            ended = step == 3
            assert following["done"].tolist() == [[ended], [ended]]
            assert following["truncated"].tolist() == [[ended], [False]]
            assert following["terminated"].tolist() == [[False], [ended]]
            if ended:
                assert following["reset_observation"].tolist() == [[episode + 1, 0, 0]] * 2
            else:
                assert torch.equal(following["reset_observation"], following["observation"])
            td = step_mdp(td)
            assert not any(td[key].any() for key in ("done", "terminated", "truncated"))
            assert td.names == ["env"] and "reset_observation" not in td.keys()  # noqa: SIM118
    assert env.frames == 12
    assert env.drain_episodes() == [(6.0, 3)] * 4 and env.episodes == []


def test_reset_in_the_middle_of_an_episode_forgets_it() -> None:
    env = three()
    for _ in range(2):
        td = step_mdp(env.step(with_action(env.reset(), 0, 0)))
    td = step_mdp(env.step(with_action(td, 0, 0)))
    env.step(with_action(td, 0, 0))
    assert env.drain_episodes() == [(6.0, 3)] * 2


def test_tensors_are_not_overwritten() -> None:
    env = three("make_pixels")
    td = env.reset()
    assert td["observation"].dtype == torch.uint8
    history = []
    for _ in range(5):
        td = env.step(with_action(td, 0, 0))
        history.append((td, td.clone()))
        td = step_mdp(td)
    for now, then in history:
        same(now, then)


@pytest.mark.parametrize("name", ["cartpole", "acrobot", "pendulum"])
def test_seed_decides_everything(name: str) -> None:
    def run(seed: int, rows: int = 3) -> tuple[TensorDict, list[tuple[float, int]], list]:
        env, generator, steps = make_env(name, rows, seed), torch.Generator().manual_seed(0), []
        td = env.reset()
        samples = [env.spec.action_space.sample(), env.spec.observation_space.sample()]
        for _ in range(60):
            td = env.step(td.set("action", random_actions(env, generator)))
            steps.append(td)
            td = step_mdp(td)
        env.close()
        return torch.stack(steps), env.episodes, samples

    (first, episodes, samples), (again, same_episodes, same_samples), (other, *_) = run(5), run(5), run(6)
    same(first, again)
    assert episodes == same_episodes and all(map(np.array_equal, samples, same_samples))
    start, elsewhere = first["observation"][0], other["observation"][0]
    assert not torch.equal(start, elsewhere)
    assert not torch.equal(start[0], start[1]), "rows must differ"


def test_rows_are_seeded_independently() -> None:
    env = three(rows=4)
    env.reset()
    env.reset()
    seeds = [row.seeds for row in env._rows.vector.envs]
    assert len({first for first, _ in seeds}) == 4 and all(second is None for _, second in seeds)


@pytest.mark.parametrize("backend", ["cartpole-vector", "sync"])
def test_cartpole_follows_the_single_environment(backend: str) -> None:
    """Each row is, step by step, a plain CartPole put in the row's state, ended and begun anew where that one ends."""
    env, generator = make_env("cartpole", 4, seed=3, backend=backend), torch.Generator().manual_seed(1)
    td, singles, returns = env.reset(), [], []
    for _ in range(4):
        single = gymnasium.make("CartPole-v1")
        single.reset()
        singles.append(single)

    def put(row: int, observation: torch.Tensor) -> None:
        singles[row].reset()
        singles[row].unwrapped.state = observation.double().numpy()

    for row in range(4):
        put(row, td["observation"][row])
    lengths, expected = [0] * 4, []
    for step in range(1200):
        # Balance now and then, so that some episodes reach the limit of 500 steps and are truncated
        action = random_actions(env, generator)
        if step < 800:
            action[2:] = (td["observation"][2:] @ torch.tensor([0.05, 0.2, 1.0, 0.6]) > 0).long()
        td = env.step(td.set("action", action))
        following = td["next"]
        for row, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(int(action[row]))
            lengths[row] += 1
            assert torch.allclose(following["observation"][row], torch.from_numpy(observation), atol=1e-4)
            assert following["reward"][row] == reward
            flags = [bool(following[key][row]) for key in ("terminated", "truncated", "done")]
            assert flags == [terminated, truncated, terminated or truncated], (step, row)
            # Errors of float32 starts do not grow beyond the tolerance: the single one follows the row again
            single.unwrapped.state = following["observation"][row].double().numpy()
            if flags[2]:
                begin = following["reset_observation"][row]
                assert begin.abs().max() <= 0.05 and not torch.equal(begin, following["observation"][row])
                put(row, begin)
                expected.append((float(lengths[row]), lengths[row]))
                returns.append(flags)
                lengths[row] = 0
        td = step_mdp(td)
    assert env.drain_episodes() == expected
    assert any(truncated for _, truncated, _ in returns) and any(terminated for terminated, *_ in returns)


def test_native_cartpole_leaves_no_row_waiting() -> None:
    rows = CartPoleRows("CartPole-v1", 8)
    rows.reset([1])
    for step in range(300):
        final, first, _, terminated, truncated = rows.step(np.full(8, step % 3 == 0, np.int64))
        ended = terminated | truncated
        assert not rows.vector.prev_done.any()
        assert (rows.vector.steps[ended] == 0).all() and (rows.vector.steps[~ended] > 0).all()
        assert (first[~ended] == final[~ended]).all() and (np.abs(first[ended]) <= 0.05).all()
        assert (first == rows.vector.state.T.astype(np.float32)).all()


@pytest.mark.parametrize("envs", [1, 7, 64])
def test_native_cartpole_moves_as_gymnasium_does(envs: int) -> None:
    rows, theirs = CartPoleRows("CartPole-v1", envs), CartPoleRows("CartPole-v1", envs).vector
    rows.reset([3])
    theirs.reset(seed=3)
    random, ends = np.random.default_rng(0), 0
    for _ in range(200):
        actions = np.where(random.random(envs) < 0.2, random.integers(0, 2, envs), theirs.state[2] > 0).astype(np.int64)
        final, _, reward, terminated, truncated = rows.step(actions)
        expected = theirs.step(actions)[:4]
        ended = theirs.prev_done
        for seen, wanted in zip((final, reward, terminated, truncated), expected, strict=True):
            assert seen.dtype == wanted.dtype and seen.tobytes() == wanted.tobytes()
        if ended.any():
            ends += 1
            theirs.state[:, ended] = theirs.np_random.uniform(theirs.low, theirs.high, (4, np.count_nonzero(ended)))
            theirs.steps[ended], theirs.prev_done = 0, np.zeros_like(ended)
        assert rows.vector.state.tobytes() == theirs.state.tobytes()
    assert ends


@pytest.mark.parametrize("envs", [3, 8])
def test_a_copy_of_cartpoles_steps_as_they_do(envs: int) -> None:
    rows = make_rows("CartPole-v1", envs, "cartpole-vector")
    rows.reset([1] * envs)
    copy, actions = deepcopy(rows), np.ones(envs, np.int64)
    for _ in range(3):
        for seen, wanted in zip(copy.step(actions), rows.step(actions), strict=True):
            assert seen.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("env_id", ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"])
def test_mujoco_rows_step_as_gymnasium_does(env_id: str) -> None:
    assert backend_for(env_id) == "mujoco"
    ours, theirs = (make_rows(env_id, 8, backend) for backend in ("mujoco", "sync"))
    seeds = list(range(8))
    assert (ours.reset(seeds) == theirs.reset(seeds)).all()
    limits: Any = theirs.vector.envs[0], ours.vector.envs[0]  # type: ignore[attr-defined]
    for limit in limits:
        limit._max_episode_steps = 12
    random = np.random.default_rng(1)
    for _ in range(20):
        actions = random.uniform(-1, 1, (8, *(ours.action_space.shape or ()))).astype(np.float32)
        for seen, wanted in zip(ours.step(actions), theirs.step(actions), strict=True):
            assert seen.dtype == wanted.dtype and seen.tobytes() == wanted.tobytes()
    ours.close()
    theirs.close()


compiled = pytest.mark.skipif(native is None, reason="FDG was installed without a C compiler")


def random_step(env: Environment, td: TensorDictBase, turn: int) -> TensorDictBase:
    """A step with actions, some of them out of bounds, and rows by chance, the same for every environment."""
    random, rows = torch.Generator().manual_seed(turn), env.spec.num_envs
    if env.spec.discrete:
        td["action"] = torch.randint(env.spec.n_actions, (rows,), generator=random)
    else:
        td["action"] = 1.2 * torch.randn(rows, env.spec.action_dim, generator=random)
    if turn % 3:
        td["_step"] = torch.rand(rows, generator=random) < 0.6
    return env.step(td)


@compiled
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"])
@pytest.mark.parametrize(("cpus", "lent"), [(1, set()), (3, set()), (1, {0, 1, 2})])
def test_compiled_steps_are_those_of_numpy(
    env_id: str, cpus: int, lent: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fdg.runtime.mujoco_rows.cores", lambda: cpus)
    monkeypatch.setattr("fdg.runtime.mujoco_rows.lent", lambda: lent)
    monkeypatch.setattr("fdg.runtime.mujoco_rows.ENOUGH", 1e-9)  # however fast the machine is
    quick, plain = make_env(env_id, 7, seed=3), make_env(env_id, 7, seed=3)
    assert quick._rows.fills
    plain._rows.fills = False
    for env in (quick, plain):
        for limit in getattr(env._rows, "vector").envs[:2] if backend_for(env_id) == "mujoco" else ():  # noqa: B009
            limit._max_episode_steps = 15
    seen, wanted = quick.reset(), plain.reset()
    for turn in range(150):
        seen, wanted = (random_step(env, td, turn) for env, td in ((quick, seen), (plain, wanted)))
        assert list(seen["next"].keys()) == list(wanted["next"].keys()) and "_step" not in seen.keys()  # noqa: SIM118
        for key, value in seen["next"].items():
            other = wanted["next", key]
            assert value.dtype == other.dtype and value.numpy().tobytes() == other.numpy().tobytes(), (turn, key)
        assert quick.frames == plain.frames and quick.episodes == plain.episodes
        (mine, theirs), seen, wanted = (env.state() for env in (quick, plain)), step_mdp(seen), step_mdp(wanted)
        assert (mine["at"] == theirs["at"].astype(np.float32)).all()
        for name in ("returns", "lengths", "counters"):
            assert np.array_equal(mine[name], theirs[name])
    assert quick.episodes
    if backend_for(env_id) == "mujoco" and (cpus > 1 or lent):
        assert native.helpers() >= 1, "threads have helped"


@compiled
def test_compiled_and_other_steps_may_take_turns() -> None:
    mixed, plain = make_env("Hopper-v5", 3, seed=1), make_env("Hopper-v5", 3, seed=1)
    plain._rows.fills = False
    seen, wanted = mixed.reset(), plain.reset()
    for turn in range(60):
        mixed._rows.fills = turn % 4 > 1
        seen, wanted = (random_step(env, td, turn) for env, td in ((mixed, seen), (plain, wanted)))
        assert (seen["next"] == wanted["next"]).all()
        seen, wanted = step_mdp(seen), step_mdp(wanted)


@compiled
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v5"])
def test_compiled_steps_under_another_default_dtype(env_id: str) -> None:
    here, there = make_env(env_id, 3, seed=1), make_env(env_id, 3, seed=1)
    wanted = random_step(here, here.reset(), 0)
    torch.set_default_dtype(torch.float64)
    try:
        td = there.reset()
        td["action"] = wanted["action"]
        same(there.step(td)["next"], wanted["next"])
    finally:
        torch.set_default_dtype(torch.float32)


@compiled
@pytest.mark.parametrize(("env_id", "action"), [("CartPole-v1", [0, 2]), ("Hopper-v5", [[0.0] * 3, [math.nan] * 3])])
def test_an_action_that_cannot_be_taken_moves_nothing_in_compiled_steps(env_id: str, action: Any) -> None:
    env = make_env(env_id, 2, seed=1)
    assert env._rows.fills
    td = env.reset()
    td["action"] = torch.tensor(action)
    before = env.state()
    with pytest.raises(UsageError, match=r"takes 0 to 1|has the policy diverged"):
        env.step(td)
    assert repr(env.state()) == repr(before)


@pytest.mark.parametrize("fills", [False, pytest.param(True, marks=compiled)])
def test_a_copy_of_mujoco_rows_moves_its_own_simulations(fills: bool) -> None:
    env = make_env("HalfCheetah-v5", 2, seed=1)
    env._rows.fills = fills
    env.step(td := with_action_zero(env.reset()))
    copy, before = deepcopy(env), repr(env.state())
    other = copy.reset(seed=1)  # Gymnasium's copies of MuJoCo's environments begin anew
    copy.step(with_action_zero(other))
    assert torch.equal(other["next", "observation"], td["next", "observation"])
    assert repr(env.state()) == before


@compiled
def test_mujoco_rows_that_were_pickled_step_in_another_process(tmp_path: Path) -> None:
    env, file = make_env("Hopper-v5", 2, seed=1), tmp_path / "env"
    env.reset()
    file.write_bytes(pickle.dumps(env))
    text = f"""
import pickle, torch
env = pickle.load(open({str(file)!r}, "rb"))
assert env._rows.fills
td = env.reset(seed=1)
td["action"] = torch.zeros(2, 3)
print(env.step(td)["next", "observation"].double().sum().item())
"""
    seen = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert seen.returncode == 0, seen.stderr[-500:]
    td = env.reset(seed=1).set("action", torch.zeros(2, 3))
    assert float(seen.stdout) == env.step(td)["next", "observation"].double().sum().item()


@compiled
def test_rows_step_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        locomotion = native.locomotion

        def helpers(self) -> int:
            return 0

        def helper(self) -> int:
            raise OSError("no thread could be started")

    monkeypatch.setattr("fdg.runtime.mujoco_rows.native", Exhausted())
    monkeypatch.setattr("fdg.runtime.mujoco_rows.cores", lambda: 4)
    monkeypatch.setattr("fdg.runtime.mujoco_rows.ENOUGH", 1e-9)
    env = make_env("Hopper-v5", 3, seed=1)
    td = env.reset()
    for turn in range(3):
        td = step_mdp(random_step(env, td, turn))
    assert env.frames > 3


@compiled
def test_compiled_steps_take_no_time_by_mujocos_clock_and_leave_it_running() -> None:
    import mujoco

    def spent() -> float:
        return sum(timer.duration for timer in data.timer)

    env = make_env("HalfCheetah-v5", 1, seed=1)
    td, inner = env.reset(), env._rows.vector.envs[0].unwrapped
    data = inner.data
    before = spent()
    env.step(with_action_zero(td))
    assert data.time > 0 and spent() == before
    mujoco.mj_step(inner.model, data)
    assert spent() > before


def with_action_zero(td: TensorDict) -> TensorDict:
    return td.set("action", torch.zeros(len(td), 6))


@pytest.mark.parametrize("env_id", ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"])
def test_mujoco_need_not_look_for_contacts_and_finds_the_same(env_id: str) -> None:
    ours, theirs = (make_rows(env_id, 3, backend) for backend in ("mujoco", "sync"))
    model: Any = ours._model  # type: ignore[attr-defined]
    assert model.npair and not model.geom_contype.any(), "the pairs are named, and there are no others"
    assert (ours.reset([1, 2, 3]) == theirs.reset([1, 2, 3])).all()
    random, shape = np.random.default_rng(1), ours.action_space.shape or ()
    for turn in range(300):
        live = np.array([True, turn % 2 == 0, turn % 3 == 0]) if turn % 5 else None
        actions = random.uniform(-1, 1, (3, *shape)).astype(np.float32)
        for seen, wanted in zip(ours.step(actions, live), theirs.step(actions, live), strict=True):
            assert seen.dtype == wanted.dtype and seen.tobytes() == wanted.tobytes()


def test_a_model_with_other_contacts_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdg.runtime.mujoco_model._mix", lambda *_: None)
    monkeypatch.setattr("fdg.runtime.mujoco_model._models", {})
    rows: Any = make_rows("Ant-v5", 1, "mujoco")
    assert rows._model is rows.one.model


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Hopper-v5"])
def test_rows_that_do_not_move_stand_where_they_are(env_id: str) -> None:
    rows = make_rows(env_id, 3, backend_for(env_id))
    rows.reset([1, 2, 3])
    rows.action_space.seed(1)
    actions = np.stack([rows.action_space.sample() for _ in range(3)])
    _, at, *_ = rows.step(actions)
    final, first, reward, terminated, truncated = rows.step(actions, np.array([False, True, False]))
    for seen in (final, first):
        assert (seen[[0, 2]] == at[[0, 2]]).all() and (seen[1] != at[1]).any()
    assert reward[1] and not reward[[0, 2]].any() and not (terminated | truncated)[[0, 2]].any()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5", "Hopper-v5"])
def test_environments_without_a_stream_leave_the_global_generators_alone(env_id: str) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]

    before, env = states(), make_env(env_id, 4, seed=1)
    assert env.private_random and not make_env("Pendulum-v1", 1, seed=1).private_random
    td, generator = env.reset(), torch.Generator().manual_seed(1)
    while len(env.episodes) < 4:
        td["action"] = random_actions(env, generator)
        td = step_mdp(env.step(td))
    assert states() == before, "episodes ended, and new ones began"


def test_observations_are_contiguous() -> None:
    env = make_env("cartpole", 4, seed=1)
    td = env.step(with_action(env.reset(), 0, 0, 1, 1))
    assert all(td[key].is_contiguous() for key in td.keys(True, True))


# Actions


@pytest.mark.parametrize(
    "action",
    [
        torch.tensor([1, 0]),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([[1], [0]]),
        torch.tensor([[0, 1], [1, 0]]),
        torch.tensor([[False, True], [True, False]]),
        torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True),
    ],
)
def test_discrete_actions(action: torch.Tensor) -> None:
    env = three()
    td = env.step(env.reset().set("action", action))
    assert td["next", "observation"][:, 2].tolist() == [1, 0]
    assert td["action"] is action


def test_discrete_actions_that_do_not_start_at_zero() -> None:
    env = three("make_shifted")
    assert env.step(with_action(env.reset(), 2, 0))["next", "observation"][:, 2].tolist() == [12, 10]


def test_continuous_actions_are_clipped() -> None:
    env = three("make_continuous")
    action = torch.tensor([[-3.0, 0.5], [0.25, float("inf")]])
    td = env.step(env.reset().set("action", action.clone()))
    assert [row.actions[0].tolist() for row in env._rows.vector.envs] == [[-1, 0.5], [0.25, 1]]
    assert torch.equal(td["action"], action), "the trainer keeps what it chose"


@pytest.mark.parametrize(
    ("function", "action", "words"),
    [
        ("make_env", [0.0, 1.0], "float32 of shape \\[2\\]"),
        ("make_env", [[0.3, 0.1], [0.2, 0.9]], "not one-hot"),
        ("make_env", [0, 2], "actions \\[0, 2\\], .* takes 0 to 1"),
        ("make_env", [-1, 0], "actions \\[-1, 0\\]"),
        ("make_env", [[0, 0, 1], [1, 0, 0]], "one-hot rows \\[2, 2\\]"),
        ("make_continuous", [[0.0], [1.0]], "takes \\[2, 2\\]"),
        ("make_continuous", [[0.0, 0.0], [0.5, float("nan")]], "row 1 is \\[0.5, nan\\]"),
    ],
)
def test_bad_actions(function: str, action: list, words: str) -> None:
    env = three(function)
    with pytest.raises(UsageError, match=words):
        env.step(env.reset().set("action", torch.tensor(action)))
    assert env.frames == 0


def test_bad_tensordicts() -> None:
    env = three()
    with pytest.raises(UsageError, match="before env_reset"):
        env.step(TensorDict({"action": torch.zeros(2)}, [2]))
    td = env.reset()
    with pytest.raises(UsageError, match="observation, done, terminated, truncated: write td"):
        env.step(td)
    with pytest.raises(UsageError, match="got NoneType"):
        env.step(None)
    with pytest.raises(UsageError, match=r"batch size \[2\], got \[1\]"):
        env.step(with_action(td[:1], 0))
    with pytest.raises(UsageError, match="no 'next'"):
        step_mdp(td)


def test_going_on_from_a_final_observation_is_refused() -> None:
    env = three()
    td = env.reset()
    for _ in range(3):
        td = env.step(with_action(td, 0, 0))
        td = td["next"].select("observation", "done")
    with pytest.raises(UsageError, match=r"rows \[0, 1\] are done.*fdg\.step_mdp"):
        env.step(with_action(td, 0, 0))


def test_a_forgotten_step_mdp_is_told() -> None:
    env = three()
    td = env.step(with_action(env.reset(), 0, 0))
    with pytest.raises(UsageError, match=r"still with its 'next'.*td = fdg\.step_mdp\(td\)"):
        env.step(with_action(td, 0, 0))


# Partial steps


def journeys(name: str, backend: str | None, steps: int, chance: float) -> list[list[Any]]:
    """What each of 3 rows sees, if a row moves with some chance in each step; a row's actions are its own."""
    env, drawn = make_env(name, 3, seed=1, backend=backend), torch.Generator().manual_seed(1)
    actions = torch.stack([random_actions(env, drawn) for _ in range(steps)])
    seen: list[list[Any]] = [[], [], []]
    td, masks = env.reset(), torch.Generator().manual_seed(2)
    while any(len(row) < steps for row in seen):
        live = torch.rand(3, generator=masks) < chance
        live &= torch.tensor([len(row) < steps for row in seen])
        td["action"] = torch.stack([actions[min(len(row), steps - 1), i] for i, row in enumerate(seen)])
        td["_step"] = live
        before, frames = td["observation"].clone(), env.frames
        td = env.step(td)
        assert "_step" not in set(td.keys()) and env.frames - frames == live.sum()
        following = td["next"]
        for row in range(3):
            if live[row]:
                seen[row].append([following[key][row].tolist() for key in sorted(following.keys())])
        for key in ("observation", "reset_observation"):
            assert torch.equal(following[key][~live], before[~live])
        assert not following["reward"][~live].any() and not following["done"][~live].any()
        td = step_mdp(td)
    assert env.frames == 3 * steps
    return [*seen, sorted(env.drain_episodes())]


@pytest.mark.parametrize(
    ("name", "backend", "steps"),
    [
        (f"{THREE}:make_env", None, 20),
        ("cartpole", "sync", 60),
        ("cartpole", None, 8),  # until an episode ends: new ones are drawn from one generator for all rows
        ("acrobot", None, 20),
        ("hopper", None, 60),
        ("ant", None, 40),
        ("ant", "sync", 40),
    ],
)
def test_rows_that_stand_still_for_a_while_go_on_alike(name: str, backend: str | None, steps: int) -> None:
    assert journeys(name, backend, steps, 0.4) == journeys(name, backend, steps, 1.0)


@pytest.mark.parametrize(
    ("given", "seen"), [(torch.ones(2), "torch.float32 [2]"), (torch.ones(2, 3, dtype=torch.bool), "torch.bool [2, 3]")]
)
def test_a_mask_that_is_none(given: torch.Tensor, seen: str) -> None:
    env = three()
    td = env.reset().set("_step", given)
    with pytest.raises(UsageError, match=re.escape(f"td['_step'] is {seen}")):
        env.step(with_action(td, 0, 0))


# Between steps


def test_step_mdp_keeps_what_torchrl_keeps() -> None:
    env = three()
    td = env.reset()
    td["hidden"], td["next", "hidden"] = torch.zeros(2, 5), torch.ones(2, 5)
    td["mine"] = torch.arange(2)
    td["next", "theirs"] = torch.arange(2)
    td["reward"] = torch.zeros(2, 1)
    td["nest", "root"], td["nest", "both"], td["next", "nest", "both"] = torch.zeros(2), torch.zeros(2), torch.ones(2)
    td["next", "nest", "deep", "x"], td["only_next"] = torch.ones(2), TensorDict({}, [2])
    td["text"] = NonTensorData("a name", batch_size=[2])
    td = env.step(with_action(td, 0, 0))
    ours, theirs = step_mdp(td), torchrl_step_mdp(td)
    assert ours["text"] == theirs["text"] == "a name"
    del ours["text"], theirs["text"]
    same(ours, theirs.exclude("reset_observation"))
    assert torch.equal(ours["hidden"], torch.ones(2, 5)) and "action" not in ours.keys()  # noqa: SIM118
    ours["nest", "root"] = torch.full((2,), 7.0)
    ours["nest", "deep", "x"] = torch.full((2,), 7.0)
    assert td["nest", "root"].sum() == 0 and td["next", "nest", "deep", "x"].sum() == 2, "no structure is shared"


def test_stack_is_torchs() -> None:
    env = make_env("Pendulum-v1", 2, seed=3)
    td, steps = env.reset(), []
    for number in range(4):
        td["action"], td["memory"] = torch.full((2, 1), 0.1 * number), TensorDict({"h": torch.ones(2, 3)}, [2])
        steps.append(env.step(td))
        td = step_mdp(td)
    for given in (steps, tuple(steps), [step["next"] for step in steps]):
        seen, expected = fdg.stack(given), torch.stack(list(given))
        assert type(seen) is type(expected) and seen.names == expected.names and seen.device == expected.device
        assert seen.batch_size == expected.batch_size == torch.Size([4, 2])
        assert_close(seen, expected, rtol=0, atol=0)
    words = [TensorDict({"word": NonTensorData("x", batch_size=[2])}, [2]) for _ in range(2)]
    assert fdg.stack(words)["word"] == torch.stack(words)["word"]
    assert fdg.stack([words[0].lock_(), words[1]]).batch_size == torch.Size([2, 2])
    other = steps[0].exclude("memory")
    for odd in ([steps[1], other], [steps[0], steps[1][:1]], []):
        with pytest.raises(RuntimeError) as seen_error:
            fdg.stack(odd)
        with pytest.raises(RuntimeError) as expected_error:
            torch.stack(odd)
        assert str(seen_error.value) == str(expected_error.value)


@pytest.mark.parametrize("value, fine", [(float("inf"), True), (1e30, True), (-1e-40, True), (float("nan"), False)])
def test_only_nan_is_no_action(value: float, fine: bool) -> None:
    env = make_env("Pendulum-v1", 3, seed=3)
    td = env.reset()
    td["action"] = torch.tensor([[0.0], [value], [-value]])
    if fine:
        assert env.step(td)["next", "observation"].isfinite().all()
    else:
        with pytest.raises(UsageError, match=r"row 1 is \[nan\]"):
            env.step(td)


def test_step_mdp_without_an_environment_is_torchrls() -> None:
    following = TensorDict({"observation": torch.ones(3, 2, 1), "done": torch.ones(3, 2, 1).bool()}, [3, 2])
    td = TensorDict({"observation": torch.zeros(3, 2, 1), "action": torch.zeros(3, 2), "next": following}, [3, 2])
    same(step_mdp(td), torchrl_step_mdp(td))
    assert step_mdp(td.to("cpu")).device == torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, {"keep_other": False}, {"exclude_done": True}])
def test_begin_rows_after_torchrls_step_mdp(rows: int, options: dict) -> None:
    env, other = three(rows=rows), three(rows=rows)
    td, td_other = env.reset(), other.reset()
    for _ in range(8):
        td = step_mdp(env.step(td.set("action", torch.zeros(rows, dtype=torch.int64))))
        stepped = other.step(td_other.set("action", torch.zeros(rows, dtype=torch.int64)))
        before = torchrl_step_mdp(stepped, **options)
        td_other = begin_rows(before)
        assert td_other is before
        same(td.exclude("done") if "exclude_done" in options else td, td_other)


def test_begin_rows_only_touches_rows_that_ended() -> None:
    env = make_env("cartpole", 4, seed=1)
    td = env.reset()
    while not td["done"].any():
        action = (td["observation"][:, 2] > 0).long()
        action[0] = 0  # this one falls early
        td = torchrl_step_mdp(env.step(td.set("action", action)))
    done, first = td["done"].clone(), td["reset_observation"].clone()
    td["observation"] = marked = td["observation"] + 100
    td = begin_rows(td)
    assert done.any() and not done.all() and not td["done"].any()
    assert torch.equal(td["observation"], torch.where(done, first, marked))


def test_begin_rows_leaves_other_things_alone() -> None:
    td = three().reset()
    keys = set(td.keys())
    assert begin_rows(td) is td and set(td.keys()) == keys
    assert begin_rows(None) is None


# Evaluation


class Still(Actor):
    """Always action 0; counts its calls."""

    calls = 0

    def evaluate(self, td: TensorDict) -> TensorDict:
        self.calls += 1
        assert not torch.is_grad_enabled() and not td["done"].any()
        return td.set("action", torch.zeros(td.shape, dtype=torch.int64))


class Lean(Actor):
    def evaluate(self, td: TensorDict) -> TensorDict:
        return td.set("action", (td["observation"][:, 2] > 0).long())


def test_evaluation_runs_exactly_the_episodes_asked_for() -> None:
    for episodes in (1, 16, 35):
        actor = Still()
        assert evaluate(actor, f"{THREE}:make_env", episodes, seed=1) == [6.0] * episodes
        assert actor.calls == 3 * -(-episodes // 16)


def test_evaluation_is_decided_by_the_seed() -> None:
    evaluator = Evaluator(make_env("cartpole", 2, seed=1).spec)
    first = evaluator.run(Lean(), 20, seed=1)
    assert len(first) == 20 and len(set(first)) > 1
    assert evaluator.run(Lean(), 20, seed=2) != first
    evaluator.run(Lean(), 3, seed=1)
    assert evaluator.run(Lean(), 20, seed=1) == first == evaluate(Lean(), "cartpole", 20, seed=1)
    evaluator.close()


def test_evaluation_does_not_favour_short_episodes() -> None:
    """Row by row: each row's own first episodes, however long they take."""
    env = make_env("cartpole", 16, seed=4)
    td, rows = env.reset(), [[] for _ in range(16)]
    while min(map(len, rows)) < 2:
        td = env.step(Lean().evaluate(td))
        ended = td["next", "done"].flatten().nonzero().flatten().tolist()
        for row, (value, _) in zip(ended, env.drain_episodes(), strict=True):
            rows[row].append(value)
        td = step_mdp(td)
    assert evaluate(Lean(), "cartpole", 20, seed=4) == [
        value for row, values in enumerate(rows) for value in values[: 1 + (row < 4)]
    ]


def test_evaluation_gives_up_on_an_endless_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_STEPS", 50)
    with pytest.raises(RunError, match="ended in 50 steps, 2 of 2 are missing"):
        evaluate(Still(), f"{THREE}:make_endless", 2, seed=1)
    with pytest.raises(UsageError, match="episodes is 0"):
        evaluate(Still(), "cartpole", 0, seed=1)


def test_evaluation_takes_a_spec_or_a_name() -> None:
    spec = make_env("cartpole", 1, seed=1, backend="sync").spec
    assert isinstance(spec, EnvSpec)
    assert evaluate(Lean(), spec, 4, seed=1) != evaluate(Lean(), "cartpole", 4, seed=1), "the spec's backend is used"


# ---- the backend


def test_the_backend_is_recorded_and_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = "train dqn --iterations 1 --envs 2 --steps 2 --learning-starts 100 --eval-episodes 0 -q".split()
    for words, backend in (((), "cartpole-vector"), (("--backend", "sync"), "sync")):
        done = CliRunner().invoke(app, [*small, *words])
        assert done.exit_code == 0, done.output
        newest = max((tmp_path / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
        for file in ("config.json", "metrics.json"):
            assert json.loads((newest / file).read_text())["backend"] == backend
    done = CliRunner().invoke(app, [*small, "--backend", "syncc"])
    assert done.exit_code == 2 and "unknown environment backend 'syncc': did you mean 'sync'" in done.stderr


def test_doctor_measures_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdg.doctor.SECONDS", 0.01)
    said = CliRunner().invoke(app, ["doctor", "--env", "cartpole"]).stdout
    for line in (
        r"environment +CartPole-v1, stepped by cartpole-vector",
        r"cartpole-vector +frames/s: [\d,]+ with 1, ",
    ):
        assert re.search(line, said), said
    assert re.search(r"a process each +frames/s", said) and "--envs" in said
    done = CliRunner().invoke(app, ["doctor", "--env", "cartpol"])
    assert done.exit_code == 2 and "did you mean 'cartpole'" in done.stderr


def test_doctor_advises_what_it_measured() -> None:
    speeds = {("sync", 1): 100.0, ("sync", 8): 300.0, ("own", 1): 10.0, ("own", 8): 250.0}
    first, second = advice("X-v0", "own", speeds, gain=3.0)
    assert "sync is faster here than own" in first.seen and first.next_step == "--backend sync --envs 8"
    assert "processes are 3.0 times as fast" in second.seen and "--workers 2" in second.next_step
    first, second = advice("X-v0", "sync", speeds, gain=0.2)
    assert "the backend of the table is the fastest" in first.seen and first.next_step == "--envs 8"
    assert "leave --workers out" in second.next_step
