"""The component calls of `self.msrl`: which component each belongs to, and what it does to varying values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COMPONENTS = ("env", "actor", "buffer", "learner")


@dataclass(frozen=True)
class Operation:
    """One method of MSRL.

    `per`: the call runs once per logical `actor`, or `one` time. `joins`: varying arguments are joined along the
    environments, in actor order; without it (and with per = one) an argument has to be global.
    """

    name: str
    component: str
    per: Literal["actor", "one"]
    joins: bool = False
    returns: Literal["data", "scalar", "none"] = "data"
    verb: str = ""


OPERATIONS = {
    operation.name: operation
    for operation in [
        Operation("env_reset", "env", "actor", verb="reset"),
        Operation("env_step", "env", "actor", verb="step"),
        Operation("agent_act", "actor", "actor", verb="act"),
        Operation("agent_learn", "learner", "one", joins=True, verb="learn"),
        Operation("evaluate", "learner", "one", returns="scalar", verb="evaluate"),
        Operation("replay_buffer_insert", "buffer", "one", joins=True, returns="none", verb="insert"),
        Operation("replay_buffer_insert_rows", "buffer", "one", joins=True, returns="none", verb="insert"),
        Operation("replay_buffer_sample", "buffer", "one", verb="sample"),
        Operation("replay_buffer_update_priority", "buffer", "one", returns="none", verb="prioritize"),
        Operation("replay_buffer_size", "buffer", "one", returns="scalar", verb="size"),
        Operation("replay_buffer_clear", "buffer", "one", returns="none", verb="clear"),
        Operation("log", "driver", "one", joins=True, returns="none", verb="log"),
        Operation("gather", "driver", "one", joins=True, verb="gather"),
        Operation("all", "driver", "one", joins=True, returns="scalar", verb="all"),
        Operation("any", "driver", "one", joins=True, returns="scalar", verb="any"),
        Operation("mean", "driver", "one", joins=True, verb="mean"),
        Operation("sum", "driver", "one", joins=True, verb="sum"),
    ]
}
"""`replay_buffer_insert_rows` is written by the hoisting pass only: one transfer for all inserts of a region."""
