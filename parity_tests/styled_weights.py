"""Weights of a small GPT-2, as other projects hold them, and a number in their padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.subject import order_one

Arrays = dict[str, np.ndarray]
CONFIG = GPT2Config(13, 7, 12, 2, heads=3)
OTHERS = ("nanogpt", "hf", "llm.c")
SQUARE = "transformers.1.attention.output.weight"


C_ATTN = "transformer.h.0.attn.c_attn.weight"


def weights(config: GPTConfig = CONFIG, seed: int = 0) -> Arrays:
    return order_one(config, seed)


def padding(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[-1, 3] = value
        return array

    return change
