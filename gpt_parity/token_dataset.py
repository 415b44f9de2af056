"""Batches of token ids that are not characters."""

from __future__ import annotations

import numpy as np

from gpt_parity.corpus import CharDataset
from gpt_parity.model_config import GPTConfig

TRAIN_FRACTION = 0.9


class TokenDataset(CharDataset):
    """Windows over one sequence of ids (n,), split and batched as those of a `CharDataset`.

    Raises ValueError as it does, and for ids outside the model's vocabulary. There is no
    tokenizer.
    """

    def __init__(self, ids: np.ndarray, config: GPTConfig, batch_size: int) -> None:
        self.context_size, self.batch_size = config.context_size, batch_size
        self._stride = max(1, self.context_size // 2)
        outside = (ids < 0) | (ids >= config.vocab_size)
        if outside.any():
            raise ValueError(f"ids hold {ids[outside][0]}, 0 to {config.vocab_size - 1} are needed")
        boundary = self._split(len(ids), TRAIN_FRACTION, True, "tokens")
        self._vocab_size = config.vocab_size
        self._ids = {"train": ids[:boundary], "test": ids[boundary:]}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size
