"""FDG: write a reinforcement-learning algorithm once, choose at launch how it is distributed.

Names are imported when first used, so that `import fdg` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdg.adam import Adam
    from fdg.api import Actor, Agent, Learner, Trainer, pure
    from fdg.config import Config
    from fdg.errors import CompileError, FdgError, GraphError, PolicyError, RunError, UsageError
    from fdg.graph import Graph
    from fdg.msrl import MSRL
    from fdg.normalize import Normalizer, RewardScaler
    from fdg.policy_step import epsilon_greedy, fast, sample_categorical, sample_normal
    from fdg.runtime.callbacks import Callback, StopTraining
    from fdg.runtime.environments import EnvSpec, stack, step_mdp
    from fdg.runtime.replay import ReplayBuffer
    from fdg.runtime.run import Result, launch

__version__ = "0.1.0"

_HOME = {
    "fdg.adam": ("Adam",),
    "fdg.api": ("Actor", "Agent", "Learner", "Trainer", "pure"),
    "fdg.config": ("Config",),
    "fdg.errors": ("CompileError", "FdgError", "GraphError", "PolicyError", "RunError", "UsageError"),
    "fdg.policy_step": ("epsilon_greedy", "fast", "sample_categorical", "sample_normal"),
    "fdg.graph": ("Graph",),
    "fdg.msrl": ("MSRL",),
    "fdg.normalize": ("Normalizer", "RewardScaler"),
    "fdg.runtime.callbacks": ("Callback", "StopTraining"),
    "fdg.runtime.environments": ("EnvSpec", "stack", "step_mdp"),
    "fdg.runtime.replay": ("ReplayBuffer",),
    "fdg.runtime.run": ("Result", "launch"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = [
    "MSRL",
    "Actor",
    "Adam",
    "Agent",
    "Callback",
    "CompileError",
    "Config",
    "EnvSpec",
    "FdgError",
    "Graph",
    "GraphError",
    "Learner",
    "Normalizer",
    "PolicyError",
    "ReplayBuffer",
    "Result",
    "RewardScaler",
    "RunError",
    "StopTraining",
    "Trainer",
    "UsageError",
    "epsilon_greedy",
    "fast",
    "launch",
    "pure",
    "sample_categorical",
    "sample_normal",
    "stack",
    "step_mdp",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fdg' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
