"""Random GPTs with data: drawn by Hypothesis in the tests, by a generator in long runs."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import hypothesis.strategies as st
import numpy as np

import numpy_impl
import torch_impl
from gpt_parity.backends import build_model
from gpt_parity.config import GPTConfig
from gpt_parity.oracle.compare import Report, compare_traces
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.oracle.tolerance import Tolerances, model_tolerances
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.weights import set_weights

BACKENDS: dict[str, ModuleType] = {"numpy": numpy_impl, "torch": torch_impl}

# Vocabulary, context, embedding, blocks, batch, and positions in use.
SIZES = {
    "general": (5, 4, 6, 2, 3, 4),
    "square": (4, 4, 4, 2, 4, 4),
    "distinct primes": (11, 5, 7, 2, 3, 5),
    "short text": (7, 6, 5, 2, 3, 4),
    "one position": (5, 1, 4, 2, 3, 1),
    "one dimension": (3, 4, 1, 1, 2, 4),
    "batch of one": (5, 4, 3, 1, 1, 4),
    "two tokens": (2, 3, 4, 1, 2, 3),
    "wide": (65, 16, 32, 2, 2, 16),
    "long": (65, 64, 32, 1, 16, 64),
    "long sums": (3, 64, 1, 1, 16, 64),
}
STRUCTURES = (
    "normal", "one token", "equal rows", "repeated tokens", "one-hot", "ties", "equal weights",
    "confident and wrong",
)  # fmt: skip
SCALES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
MOST_ROWS = 1024  # positions of all sequences together


@dataclass(frozen=True)
class ModelCase:
    """Sizes (V, C, E, blocks, B, T) first and the seed last, so that failures shrink well."""

    sizes: tuple[int, int, int, int, int, int]
    structure: str
    scale: float
    seed: int

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(*self.sizes[:4])


def model_cases() -> st.SearchStrategy[ModelCase]:
    """Cases for Hypothesis, simplest first."""
    return st.builds(
        ModelCase, st.sampled_from(sorted(SIZES.values(), key=np.prod)),
        st.sampled_from(STRUCTURES), st.sampled_from(SCALES), st.integers(0, 2**32 - 1),
    )  # fmt: skip


def random_case(rng: np.random.Generator) -> ModelCase:
    """A case for long runs: sizes up to MOST_ROWS rows, scales 0.03 to 10."""
    context_size = int(rng.integers(1, 65))
    length = int(rng.integers(1, context_size + 1))
    sizes = (
        int(rng.integers(2, 70)), context_size, int(rng.integers(1, 49)), int(rng.integers(1, 4)),
        int(rng.integers(1, min(16, MOST_ROWS // length) + 1)), length,
    )  # fmt: skip
    scale = 10.0 ** rng.uniform(np.log10(SCALES[0]), np.log10(SCALES[-1]))
    return ModelCase(sizes, str(rng.choice(STRUCTURES)), float(scale), int(rng.integers(2**32)))


def fill(case: ModelCase) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights (float64, representable in float32), tokens and targets (B, T) of a case."""
    rng = np.random.default_rng(case.seed)
    vocab_size, _, embedding_size, _, batch, length = case.sizes
    shapes = {n: p.shape for n, p in build_model("numpy", case.config).named_parameters()}
    weights = {n: case.scale * rng.standard_normal(shape) for n, shape in shapes.items()}
    tokens = rng.integers(0, vocab_size, (batch, length))
    targets = rng.integers(0, vocab_size, (batch, length))
    table = weights["embedding.embedding.weight"]
    if case.structure in ("one token", "equal rows"):
        tokens[...] = targets[...] = tokens[0, 0]
        if case.structure == "equal rows":
            weights["embedding.positional_embedding.weight"][...] = 0.0
    elif case.structure == "repeated tokens":
        tokens %= 2
    elif case.structure == "one-hot":
        table[...] = case.scale * np.eye(vocab_size, embedding_size)
    elif case.structure == "ties":
        table[...] = table[0]
        weights["embedding.positional_embedding.weight"][...] = 0.0
    elif case.structure == "equal weights":
        for weight in weights.values():
            weight[...] = weight.flat[0]
    elif case.structure == "confident and wrong":
        weights["output.output.bias"][...] = -40.0
        weights["output.output.bias"][0] = 40.0
        targets[...] = vocab_size - 1
    return {n: w.astype(np.float32).astype(np.float64) for n, w in weights.items()}, tokens, targets


def build(backend: str, dtype: str, case: ModelCase, weights: dict[str, np.ndarray]):
    """The case's model with its weights, and the loss."""
    model = build_model(backend, case.config, dtype=dtype)
    set_weights(model, {n: w.astype(dtype) for n, w in weights.items()})
    return model, BACKENDS[backend].GPTLoss()


def candidate_trace(backend: str, dtype: str, case: ModelCase) -> Trace:
    """One pass of a backend over a case."""
    weights, tokens, targets = fill(case)
    return trace(*build(backend, dtype, case, weights), tokens, targets)


def reference(case: ModelCase, dtype: str) -> tuple[Trace, Tolerances]:
    """The clean float64 pass of the NumPy twin and the tolerances for a candidate of `dtype`."""
    weights, tokens, targets = fill(case)
    return model_tolerances(
        *build("numpy", "float64", case, weights), tokens, targets, UNITS[dtype]
    )


def judge(case: ModelCase, backend: str, dtype: str) -> Report:
    """Compare a clean candidate with the reference."""
    return compare_traces(candidate_trace(backend, dtype, case), *reference(case, dtype), dtype)
