"""Mistakes in training in several processes; apart, since processes of their own import them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from gpt_parity.distributed import DistributedTrainer
from gpt_parity.training import GPTTrainer


class NoExchange(DistributedTrainer):
    """Gradients stay in their process."""

    def _exchange(self, last: bool) -> Any:
        return self.exchanged.no_sync()


class FirstPartExchanged(DistributedTrainer):
    """Gradients are exchanged before the last part of the batch has come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.part = 0

    def _backward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        self.part = 0
        return super()._backward(tokens, targets)

    def _exchange(self, last: bool) -> Any:
        self.part += 1
        return nullcontext() if self.part == 1 else self.exchanged.no_sync()


class RowsLeftOut(DistributedTrainer):
    """Rows that do not divide are left out."""

    def rows(self, batch: int) -> slice:
        size = batch // self.group.size
        return slice(self.group.rank * size, (self.group.rank + 1) * size)


class LossOfOne(DistributedTrainer):
    """The loss is that of the first process."""

    def _backward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        super()._backward(tokens, targets)
        rows = self.rows(len(tokens))
        return self.loss_fn(self.model(tokens[rows]), targets[rows]).item()


class ClippedShards(DistributedTrainer):
    """Each process takes the norm of its own shards."""

    def train_step(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
        def clip(max_norm: float) -> float:
            parts = [p.grad.to_local() for p in self.optimizer.parameters]
            norm = float(sum((part**2).sum() for part in parts) ** 0.5)
            for part in parts:
                part *= min(1.0, max_norm / (norm + 1e-6))
            return norm

        self.optimizer.clip_grad_norm = clip
        return super().train_step(tokens, targets)


class MomentsOfOne(DistributedTrainer):
    """The second moments of the shards are forgotten in the file."""

    def whole(self) -> GPTTrainer | None:
        found = super().whole()
        if found is not None:
            state = found.optimizer.state()
            state["exp_avg_sq"] = [np.zeros_like(x) for x in state["exp_avg_sq"]]
            found.optimizer.load_state(state)
        return found


# With the parts of a batch, and whether sharded.
BUGS: dict[type[DistributedTrainer], tuple[int, bool]] = {
    NoExchange: (1, False),
    FirstPartExchanged: (3, False),
    RowsLeftOut: (1, False),
    LossOfOne: (1, False),
    ClippedShards: (1, True),
    MomentsOfOne: (1, True),
}
