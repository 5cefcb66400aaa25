"""The in-process engine: fragments as separate objects that share no state; every crossing value is really copied."""

from __future__ import annotations

from typing import Any

import torch

from fdg.msrl import MSRL, weights_written
from fdg.runtime.values import Store


class Instance:
    """One copy of a fragment: for one logical actor, or the only one. Its objects live in its store."""

    def __init__(self, fragment: str, body: Any, msrl: MSRL, weights: list[torch.Tensor]) -> None:
        self.fragment, self.body, self.msrl, self.weights = fragment, body, msrl, weights
        self.store = Store(fragment)
        self.version = 0
        """Version of the weights that the actor here has."""
        self.marks = [tensor._version for tensor in weights]
        body.msrl = msrl

    def call(self, region: str, inputs: dict[str, Any]) -> Any:
        """Run one region. Weights are the learner's: an actor that writes its copies would do so in vain."""
        result = getattr(self.body, region)(**inputs)
        if self.msrl._actor is not None and self.marks != [tensor._version for tensor in self.weights]:
            raise weights_written()
        return result

    def load_weights(self, weights: list[torch.Tensor], version: int) -> None:
        with torch.no_grad():
            for mine, new in zip(self.weights, weights, strict=True):
                mine.copy_(new)
        self.version = version
        self.marks = [tensor._version for tensor in self.weights]
