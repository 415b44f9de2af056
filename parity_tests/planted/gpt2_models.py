"""A few fixed GPT-2s with data, in which planted bugs must show, and show where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.compare import Report, compare_traces
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.oracle.tolerance import Tolerances, model_tolerances
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.weights import set_weights

SCALE = 0.5


@dataclass(frozen=True)
class GPT2Case:
    """The sizes of a GPT-2, of a batch (B, T), and the seed of all numbers."""

    name: str
    config: GPT2Config
    batch: int
    length: int
    seed: int


# Sizes that differ show axes that are exchanged by an error, equal ones only by the numbers.
CASES = (
    GPT2Case("distinct sizes", GPT2Config(11, 5, 6, 2, heads=3), 4, 5, seed=0),
    GPT2Case("square", GPT2Config(4, 4, 4, 2, heads=2), 4, 4, seed=1),
    GPT2Case("short text", GPT2Config(7, 6, 10, 2, heads=2), 3, 4, seed=2),
)


def fill(case: GPT2Case) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights (float64, representable in float32), tokens and targets (B, T) of a case."""
    rng = np.random.default_rng(case.seed)
    weights = {
        name: float(name.endswith("norm.weight")) + SCALE * rng.standard_normal(shape)
        for name, shape in case.config.parameter_shapes().items()
    }
    tokens, targets = rng.integers(0, case.config.vocab_size, (2, case.batch, case.length))
    return {n: w.astype(np.float32).astype(np.float64) for n, w in weights.items()}, tokens, targets


def build(backend: str, dtype: str, case: GPT2Case) -> tuple[Any, Any]:
    """The case's model with its weights, and the loss."""
    model = build_model(backend, case.config, dtype=dtype)
    set_weights(model, {n: w.astype(dtype) for n, w in fill(case)[0].items()})
    return model, load_backend(backend).GPTLoss()


def candidate_trace(backend: str, dtype: str, case: GPT2Case) -> Trace:
    """One pass of a backend over a case."""
    return trace(*build(backend, dtype, case), *fill(case)[1:])


def reference(case: GPT2Case, dtype: str) -> tuple[Trace, Tolerances]:
    """The clean float64 pass of the NumPy twin and the tolerances for a candidate of `dtype`."""
    return model_tolerances(*build("numpy", "float64", case), *fill(case)[1:], UNITS[dtype])


def judge(case: GPT2Case, backend: str, dtype: str) -> Report:
    """Compare a candidate with the reference."""
    return compare_traces(candidate_trace(backend, dtype, case), *reference(case, dtype), dtype)
