"""Random models of both kinds with data: drawn by Hypothesis, by a generator in long runs."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import hypothesis.strategies as st
import numpy as np

import numpy_impl
import torch_impl
from gpt_parity.backends import build_model
from gpt_parity.choices import MODELS, ModelName
from gpt_parity.model_config import GPT2Config, GPTConfig
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
# The same of a GPT-2, and its heads.
GPT2_SIZES = {
    "general": ((5, 4, 6, 2, 3, 4), 2),
    "square": ((4, 4, 4, 2, 4, 4), 2),
    "square heads": ((4, 4, 4, 1, 4, 4), 4),
    "distinct primes": ((17, 11, 6, 2, 7, 5), 3),
    "one head": ((7, 6, 5, 2, 3, 4), 1),
    "heads of one": ((11, 5, 7, 2, 3, 5), 7),
    "one position": ((5, 1, 4, 2, 3, 1), 2),
    "one dimension": ((3, 4, 1, 1, 2, 4), 1),
    "batch of one": ((5, 4, 6, 1, 1, 4), 3),
    "two tokens": ((2, 3, 4, 1, 2, 3), 2),
    "wide": ((65, 16, 32, 2, 2, 16), 4),
    "long": ((65, 64, 32, 1, 16, 64), 2),
    "long sums": ((3, 64, 2, 1, 16, 64), 1),
}
STRUCTURES = (
    "normal", "one token", "equal rows", "repeated tokens", "one-hot", "ties", "equal weights",
    "confident and wrong",
)  # fmt: skip
# A layer norm loses the most where its rows are almost one number.
GPT2_STRUCTURES = (*STRUCTURES, "almost constant")
SCALES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
MOST_ROWS = 1024  # positions of all sequences together


@dataclass(frozen=True)
class ModelCase:
    """Sizes (V, C, E, blocks, B, T) first and the seed after them, so that failures shrink well.

    Heads make it a GPT-2; with 0 it is the model of the source text.
    """

    sizes: tuple[int, int, int, int, int, int]
    structure: str
    scale: float
    seed: int
    heads: int = 0

    @property
    def config(self) -> GPTConfig:
        sizes = self.sizes[:4]
        return GPT2Config(*sizes, heads=self.heads) if self.heads else GPTConfig(*sizes)


def named_case(model: ModelName, sizes: str, structure: str, scale: float, seed: int) -> ModelCase:
    """The case of a model with the sizes of that name."""
    if model == "gpt":
        return ModelCase(SIZES[sizes], structure, scale, seed)
    return ModelCase(GPT2_SIZES[sizes][0], structure, scale, seed, GPT2_SIZES[sizes][1])


def model_cases(*models: ModelName) -> st.SearchStrategy[ModelCase]:
    """Cases of these models, or of all, for Hypothesis, simplest first."""
    return st.one_of(*map(_cases, models or MODELS))


def _cases(model: ModelName) -> st.SearchStrategy[ModelCase]:
    named = [(sizes, 0) for sizes in SIZES.values()] if model == "gpt" else GPT2_SIZES.values()
    return st.builds(
        lambda sizes, *rest: ModelCase(sizes[0], *rest, heads=sizes[1]),
        st.sampled_from(sorted(named, key=lambda sizes: np.prod(sizes[0]))),
        st.sampled_from(STRUCTURES if model == "gpt" else GPT2_STRUCTURES),
        st.sampled_from(SCALES), st.integers(0, 2**32 - 1),
    )  # fmt: skip


def random_case(rng: np.random.Generator, model: ModelName = "gpt") -> ModelCase:
    """A case for long runs: sizes up to MOST_ROWS rows, scales 0.03 to 10."""
    context_size = int(rng.integers(1, 65))
    length = int(rng.integers(1, context_size + 1))
    heads = 0 if model == "gpt" else int(rng.integers(1, 9))
    width = heads * int(rng.integers(1, 49 // heads)) if heads else int(rng.integers(1, 49))
    sizes = (
        int(rng.integers(2, 70)), context_size, width, int(rng.integers(1, 4)),
        int(rng.integers(1, min(16, MOST_ROWS // length) + 1)), length,
    )  # fmt: skip
    scale = 10.0 ** rng.uniform(np.log10(SCALES[0]), np.log10(SCALES[-1]))
    structure = str(rng.choice(GPT2_STRUCTURES if heads else STRUCTURES))
    return ModelCase(sizes, structure, float(scale), int(rng.integers(2**32)), heads)


def fill(case: ModelCase) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights (float64, representable in float32), tokens and targets (B, T) of a case."""
    rng = np.random.default_rng(case.seed)
    vocab_size, _, embedding_size, _, batch, length = case.sizes
    shapes = {n: p.shape for n, p in build_model("numpy", case.config).named_parameters()}
    weights = {n: case.scale * rng.standard_normal(shape) for n, shape in shapes.items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.3 / case.scale * weights[name]
    tokens = rng.integers(0, vocab_size, (batch, length))
    targets = rng.integers(0, vocab_size, (batch, length))
    table = weights["embedding.embedding.weight"]
    positions = weights["embedding.positional_embedding.weight"]
    if case.structure in ("one token", "equal rows"):
        tokens[...] = targets[...] = tokens[0, 0]
        if case.structure == "equal rows":
            positions[...] = 0.0
    elif case.structure == "repeated tokens":
        tokens %= 2
    elif case.structure == "one-hot":
        table[...] = case.scale * np.eye(vocab_size, embedding_size)
    elif case.structure == "ties":
        table[...] = table[0]
        positions[...] = 0.0
    elif case.structure == "equal weights":
        for weight in weights.values():
            weight[...] = weight.flat[0]
    elif case.structure == "confident and wrong":
        if case.heads:  # the first column of the table decides, in both of its roles
            bias = weights["norm.bias"]
            table[:, 0], table[0, 0] = -1.0, 1.0
        else:
            bias = weights["output.output.bias"]
            bias[...] = -40.0
        bias[0] = 40.0
        targets[...] = vocab_size - 1
    elif case.structure == "almost constant":
        table[...] = case.scale + table / 1024.0
        positions[...] = case.scale + positions / 1024.0
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
