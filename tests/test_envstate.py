"""The state of environments: those brought back go on as if nothing had happened, to the bit, or say why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fdg.errors import CheckpointError
from fdg.runtime import envstate
from fdg.runtime.checkpoint import decode, encode, load, save
from fdg.runtime.environments import Environment, make_env, step_mdp

HERE = Path(__file__).parent
THREE, STATEFUL = f"{HERE / 'three_steps.py'}:", f"{HERE / 'stateful_envs.py'}:"


def act(env: Environment, td: TensorDict, draw: torch.Generator) -> TensorDict:
    rows, spec = env.spec.num_envs, env.spec
    if spec.discrete:
        action = torch.randint(spec.n_actions, (rows,), generator=draw)
    else:
        action = torch.randn(rows, spec.action_dim, generator=draw)
    return env.step(td.set("action", action))


def run(env: Environment, td: TensorDict, steps: int, seed: int) -> tuple[TensorDict, list[Any]]:
    """Steps with random actions in most rows, and now and then a reset of all; everything that a trainer could see."""
    draw, seen = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        td["_step"] = torch.rand(env.spec.num_envs, generator=draw) < 0.9
        stepped = act(env, td, draw)
        seen.append({key: value.clone() for key, value in stepped["next"].items()})
        td = step_mdp(stepped)
        if step == 2 * steps // 3:
            td = env.reset()
            seen.append({"observation": td["observation"].clone()})
    seen.append(counters(env))
    return td, seen


def counters(env: Environment) -> dict[str, Any]:
    spaces = [
        space.np_random.bit_generator.state["state"] for space in (env.spec.action_space, env.spec.observation_space)
    ]
    return {"frames": env.frames, "episodes": list(env.episodes), "lengths": env._lengths.tolist(), "spaces": spaces}


def near_the_limit(env: Environment) -> None:
    """Let long episodes end soon, each row at another step."""
    for row, one in enumerate(getattr(env._rows.vector, "envs", ())):
        if isinstance(one, gymnasium.wrappers.TimeLimit) and one._max_episode_steps >= 100:
            one._elapsed_steps = one._max_episode_steps - 6 - row


def same(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "how", "before", "after"),
    [
        ("cartpole", "attributes", 45, 60),
        ("acrobot", "attributes", 70, 60),
        ("mountaincar", "attributes", 30, 30),
        ("mountaincarcontinuous", "attributes", 20, 20),
        ("pendulum", "attributes", 30, 30),
        ("halfcheetah", "attributes", 30, 25),
        ("hopper", "attributes", 60, 60),
        ("walker2d", "attributes", 60, 60),
        ("ant", "attributes", 40, 25),
        ("humanoid", "attributes", 30, 40),
        (THREE + "make_env", "attributes", 7, 20),
        (THREE + "make_pixels", "attributes", 7, 20),
        (THREE + "make_continuous", "attributes", 7, 20),
        (STATEFUL + "make_plain", "attributes", 7, 20),
        (STATEFUL + "make_own", "own", 7, 20),
        (STATEFUL + "make_limited", "own", 7, 20),
        (STATEFUL + "make_hidden", "actions", 7, 20),
        (STATEFUL + "make_hidden", "actions", 3, 20),
        (STATEFUL + "make_hidden", "actions", 600, 20),
        (STATEFUL + "make_limited_hidden", "actions", 8, 20),
    ],
)
def test_a_restored_environment_goes_on_alike(name, how, before, after, tmp_path):
    env = make_env(name, 3, seed=5)
    td, _ = run(env, env.reset(), before, 1)
    near_the_limit(env)
    state = env.state()
    assert state["rows"]["how"] == how
    save(tmp_path / "x.fdg", {"env": state, "td": td})
    _, expected = run(env, td, after, 2)
    assert any(entry["done"].any() for entry in expected if "done" in entry)
    saved = load(tmp_path / "x.fdg")
    resumed = make_env(name, 3, seed=6)
    assert resumed.load_state(saved["env"]) is None
    td, seen = run(resumed, saved["td"], after, 2)
    assert same(seen, expected)
    # and once more, from the one resumed
    state, (_, expected) = decode(encode(resumed.state())), run(resumed, td.clone(), 10, 3)
    again = make_env(name, 3, seed=7)
    assert again.load_state(state) is None
    assert same(run(again, td, 10, 3)[1], expected)


def test_before_the_first_reset():
    env, resumed = (make_env("cartpole", 2, seed=3) for _ in range(2))
    assert resumed.load_state(env.state()) is None
    assert torch.equal(resumed.reset()["observation"], env.reset()["observation"])


def test_a_state_does_not_change_later():
    env = make_env(STATEFUL + "make_hidden", 2, seed=3)
    td, _ = run(env, env.reset(), 7, 1)
    state = env.state()
    before = encode(state)
    run(env, td, 9, 2)
    assert envstate.equal(before, encode(state))


def test_asking_for_the_state_changes_nothing():
    for name in ("cartpole", "hopper", STATEFUL + "make_own", STATEFUL + "make_hidden"):
        seen = []
        for asked in (False, True):
            env = make_env(name, 2, seed=3)
            td, _ = run(env, env.reset(), 7, 1)
            if asked:
                env.state()
            seen.append(run(env, td, 12, 2)[1])
        assert same(*seen)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("make_lost", r"row 0: taking the \d actions of its episode again led to the observation \[.*\], saved was \["),
        ("make_wrong", r"`env\[0\]"),
        ("make_broken", "RuntimeError: the motor is worn"),
        ("make_randomized", r"model` cannot be restored"),
    ],
)
def test_where_nothing_works_episodes_restart(name, why):
    env = make_env(STATEFUL + name, 2, seed=5)
    td, draw = env.reset(), torch.Generator().manual_seed(0)
    for _ in range(3):
        td = step_mdp(act(env, td, draw))
    state = decode(encode(env.state()))
    firsts = []
    for _ in range(2):
        resumed = make_env(STATEFUL + name, 2, seed=5)
        reason = resumed.load_state(state)
        assert reason is not None and re.search(why, reason), reason
        assert resumed.frames == env.frames == 6
        second = make_env(STATEFUL + name, 2, seed=5)
        assert second.load_state(decode(encode(resumed.state())))  # a checkpoint before the first step
        for one in (resumed, second):
            stepped = act(one, td.clone(), torch.Generator().manual_seed(1))
            then = stepped["next"]
            assert then["truncated"].all() and then["done"].all() and not then["terminated"].any()
            assert torch.equal(then["observation"], td["observation"]) and not then["reward"].any()
            assert not one.episodes and one._lengths.tolist() == [0, 0]
            firsts.append(then["reset_observation"])
        assert not torch.equal(firsts[-1], td["observation"])
        type(env._rows.vector.envs[0].unwrapped).worn = 0
        following = step_mdp(stepped)
        assert not act(second, following, torch.Generator().manual_seed(1))["next", "done"].any()
    if name in ("make_wrong", "make_randomized"):
        assert torch.equal(firsts[0], firsts[2]) and torch.equal(firsts[1], firsts[3])


def test_a_reset_forgets_the_restart():
    env = make_env(STATEFUL + "make_lost", 2, seed=5)
    td = env.reset()
    resumed = make_env(STATEFUL + "make_lost", 2, seed=5)
    assert resumed.load_state(env.state())
    td = resumed.reset()
    assert not act(resumed, td, torch.Generator().manual_seed(1))["next", "done"].any()


def test_endless_episodes_are_not_recorded_forever(monkeypatch):
    monkeypatch.setattr(envstate, "LIMIT", 256 * 2 * 8)
    env = make_env(STATEFUL + "make_hidden", 2, seed=5)
    td = env.reset()
    for row in env._rows.vector.envs:
        row.unwrapped.step = lambda action: (np.zeros(2), 0.0, False, False, {})
    for _ in range(300):
        td = step_mdp(env.step(td.set("action", torch.zeros(2, dtype=torch.long))))
    resumed = make_env(STATEFUL + "make_hidden", 2, seed=5)
    assert "longer than" in str(resumed.load_state(env.state()))


def test_the_record_holds_only_what_is_needed():
    env = make_env(STATEFUL + "make_hidden", 2, seed=5)
    run(env, env.reset(), 2000, 1)
    assert len(env._rows._recorder.actions) == 256


def test_no_record_where_the_state_can_be_read():
    for name in ("acrobot", "hopper", THREE + "make_env", STATEFUL + "make_own"):
        env = make_env(name, 2, seed=5)
        env.reset()
        assert env._rows._recorder is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: make_env("pendulum", 2, 1), "id is 'CartPole-v1' in the checkpoint and 'Pendulum-v1' here"),
        (lambda: make_env("cartpole", 3, 1), "envs is 2 in the checkpoint and 3 here"),
        (
            lambda: make_env("cartpole", 2, 1, backend="sync"),
            "backend is 'cartpole-vector' in the checkpoint and 'sync'",
        ),
    ],
)
def test_the_state_of_other_environments_is_refused(other, words):
    env = make_env("cartpole", 2, seed=1)
    env.reset()
    with pytest.raises(CheckpointError, match=words):
        other().load_state(env.state())
