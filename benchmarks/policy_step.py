"""A policy step by modules and by `fdg.fast`, and draws by torch.distributions and by FDG's helpers.

    python benchmarks/policy_step.py

All variants take turns; a figure is the best turn, in CPU time of the one thread that works.
The exit code is 1 if `fdg.fast` is not at least 1.3 times as quick with up to 8 rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal

import fdg

TURNS, CALLS, LIMIT = 31, 200, 1.3


def timed(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """µs of each variant."""
    seen: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(TURNS):
        for name, function in variants.items():
            start = thread_time()
            for _ in range(CALLS):
                function()
            seen[name].append((thread_time() - start) / CALLS * 1e6)
    return {name: min(times) for name, times in seen.items()}


def main() -> int:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    worst = 99.0
    print(
        "rows   network   fdg.fast          Categorical   sample_categorical          Normal   sample_normal      (µs)"
    )
    for rows in (1, 8, 64, 256):
        x, logits, std = torch.randn(rows, 4), torch.randn(rows, 2), torch.ones(2)
        at = timed(
            {
                "network": lambda x=x: network(x),
                "fast": lambda x=x: fdg.fast(network, x),
                "Categorical": lambda logits=logits: Categorical(logits=logits).sample(),
                "categorical": lambda logits=logits: fdg.sample_categorical(logits),
                "Normal": lambda logits=logits, std=std: Normal(logits, std).sample(),
                "normal": lambda logits=logits, std=std: fdg.sample_normal(logits, std),
            }
        )
        pairs = [("network", "fast"), ("Categorical", "categorical"), ("Normal", "normal")]
        print(f"{rows:4}   " + "      ".join(f"{at[a]:9.1f} {at[b]:9.1f} ({at[a] / at[b]:.1f}x)" for a, b in pairs))
        if rows <= 8:
            worst = min(worst, at["network"] / at["fast"])
    return int(worst < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
