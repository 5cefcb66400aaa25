"""Settings that are good for an algorithm on an environment, where the defaults of its config are not.

They stand below what the user gives and above the defaults of the class: `fdg train dqn --env acrobot --lr 1e-3` has the
settings below, but for the step size. A run says which it took and records them with the rest of its config;
`--no-tuned`, and `launch(…, tuned=False)`, leave them out.

`benchmarks/learning` shows what they reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdg.config import Config

_SAC = dict(iterations=1563, learning_starts=10_000, lr=3e-4)
_ONE: dict[str, Any] = dict(envs=1, steps=16, iterations=6250, learning_starts=5000)
"""As Stable-Baselines3 collects; on the seed tried, 8 environments side by side learned less from as many frames."""
_NORMAL = dict(norm_obs=True, layer_norm=True, batch_size=128, target_frequency=1, eval_tau=1 / 4000)
"""Observations and critics are normalised, and bear several gradient steps per frame. A policy that hops in one moment falls
in the next: evaluation takes an average over some 4,000 updates of the policy, of which there is one per frame. Chosen on
seeds 11 and 12."""
TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("sac", "HalfCheetah-v5"): dict(_SAC, learning_starts=5000),
    # Ten gradient steps of small, normalised critics for each frame (after Hiraoka et al., 2022). Chosen on seed 11.
    ("sac", "Hopper-v5"): dict(
        _ONE, learning_starts=2000, lr=3e-4, hidden_dim=128, batch_size=128, layer_norm=True, utd_ratio=10,
        policy_frequency=10,
    ),
    ("td3", "HalfCheetah-v5"): dict(_ONE, **_NORMAL, utd_ratio=3, policy_frequency=3),
    ("td3", "Hopper-v5"): dict(
        _ONE, **_NORMAL, learning_starts=2000, hidden_dim=128, utd_ratio=4, policy_frequency=4, tanh_penalty=0.1
    ),
    ("a2c", "CartPole-v1"): dict(
        iterations=1000, envs=32, steps=16, lr=1e-3, ent_coef=0.01, norm_obs=True, norm_reward=True
    ),
    ("ppo", "CartPole-v1"): dict(
        iterations=100, envs=8, steps=128, num_minibatches=4, update_epochs=10, lr=1e-3, gamma=0.98, gae_lambda=0.8
    ),
    ("ppo", "Acrobot-v1"): dict(
        iterations=100, envs=16, steps=128, num_minibatches=4, update_epochs=8, lr=1e-3, gae_lambda=0.94, norm_obs=True,
        norm_reward=True,
    ),
    # As Stable-Baselines3's zoo has it, but with more noise and larger steps, which fall. Chosen on seeds 11 and 12.
    ("ppo", "HalfCheetah-v5"): dict(
        iterations=1954, envs=8, steps=64, num_minibatches=8, update_epochs=20, lr=7e-5, anneal_lr=True, gamma=0.98,
        gae_lambda=0.92, clip_coef=0.1, ent_coef=0.0004, vf_coef=0.58, max_grad_norm=0.8, norm_obs=True, norm_reward=True,
        hidden_dim=256, activation="relu", ortho_init=False, log_std_init=-1.0,
    ),
    ("ppo", "Hopper-v5"): dict(
        iterations=489, envs=8, steps=256, num_minibatches=32, update_epochs=10, lr=3e-4, norm_obs=True, norm_reward=True
    ),
}  # fmt: skip
"""(algorithm, full environment id) → {field: value}."""


def tuned(algorithm: str, env: str) -> dict[str, Any]:
    """The settings for a bundled algorithm on an environment, given by its full id; empty where there are none.

    >>> tuned("dqn", "NoSuchEnvironment-v0")
    {}
    """
    return dict(TUNED.get((algorithm, env), {}))


def bundled(module: str) -> str:
    """The name by which the algorithm in a bundled module stands in the table; empty for a module of the user's.

    >>> bundled("fdg.algorithms.dqn"), bundled("mine")
    ('dqn', '')
    """
    package, _, name = module.rpartition(".")
    return name if package == "fdg.algorithms" else ""


def said(algorithm: str, config: Config) -> str:
    """One line for the start of a run: the tuned settings that its config has; empty if there are none."""
    values = [
        f"{name} {value}" for name, value in tuned(algorithm, config.env).items() if getattr(config, name) == value
    ]
    return f"settings tuned for {config.env}: {', '.join(values)}; --no-tuned for the defaults" if values else ""
