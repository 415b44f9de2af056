"""GPT-2 written once more, from the equations of its papers, in loops over batch and heads.

Radford et al. 2019 (sections 2 and 2.3), with the attention of Vaswani et al. 2017 (eq. 1), the
layer norm of Ba, Kiros & Hinton 2016 (eq. 4) and the GELU of Hendrycks & Gimpel 2016. It keeps
complex numbers, for the complex step. Nothing here is imported from the code under test but the
names and shapes of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gpt_parity.model_config import GPT2Config

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """V, C, E, blocks, H, B and T of a test."""

    vocab_size: int
    context_size: int
    embedding_size: int
    blocks: int
    heads: int
    batch: int
    length: int

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(self.vocab_size, self.context_size, self.embedding_size, self.blocks,
                          heads=self.heads)  # fmt: skip


SIZES = (
    Sizes(13, 7, 12, 2, 3, 5, 6),  # all differ
    Sizes(5, 4, 6, 1, 1, 2, 4),  # one head
    Sizes(5, 6, 4, 3, 4, 3, 6),  # heads of one number each
    Sizes(3, 1, 2, 1, 2, 1, 1),  # one position
)


def draw(sizes: Sizes, scale: float, seed: int = 0) -> tuple[Weights, np.ndarray, np.ndarray]:
    """Weights in float64, norms about 1 and the rest of `scale`, with tokens and targets (B, T)."""
    rng = np.random.default_rng(seed)
    weights = {
        name: ("norm.weight" in name) + scale * rng.standard_normal(shape)
        for name, shape in sizes.config.parameter_shapes().items()
    }
    shape = (sizes.batch, sizes.length)
    return weights, *(rng.integers(0, sizes.vocab_size, shape) for _ in range(2))


def norm(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    mean = sum(x) / len(x)
    variance = sum((x - mean) ** 2) / len(x)
    return (
        weights[f"{name}.weight"] * (x - mean) / np.sqrt(variance + 1e-5) + weights[f"{name}.bias"]
    )


def projected(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(rows: list[np.ndarray], weights: Weights, name: str, heads: int) -> list[np.ndarray]:
    """Each row attends to itself and those before it: no mask is needed."""
    width = len(rows[0])
    size = width // heads
    qkv = [projected(x, weights, f"{name}.input") for x in rows]
    out = []
    for t in range(len(rows)):
        context = []
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            q = qkv[t][:width][own]
            e = [np.exp(q @ qkv[s][width : 2 * width][own] / math.sqrt(size)) for s in range(t + 1)]
            values = [qkv[s][2 * width :][own] for s in range(t + 1)]
            context.append(sum(a * v for a, v in zip(e, values, strict=True)) / sum(e))
        out.append(projected(np.concatenate(context), weights, f"{name}.output"))
    return out


def logits(
    weights: Weights, sizes: Sizes, tokens: np.ndarray, output_table: np.ndarray | None = None
) -> np.ndarray:
    """(B, T, V); `output_table` takes the place of the token embedding at the output."""
    table = weights["embedding.embedding.weight"]
    positions = weights["embedding.positional_embedding.weight"]
    output_table = table if output_table is None else output_table
    found = []
    for sequence in tokens:
        rows = [table[token] + positions[t] for t, token in enumerate(sequence)]
        for i in range(sizes.blocks):
            name = f"transformers.{i}"
            normed = [norm(x, weights, f"{name}.attention_norm") for x in rows]
            attended = attention(normed, weights, f"{name}.attention", sizes.heads)
            rows = [x + a for x, a in zip(rows, attended, strict=True)]
            for t, x in enumerate(rows):
                hidden = norm(x, weights, f"{name}.feed_forward_norm")
                hidden = gelu(projected(hidden, weights, f"{name}.feed_forward.input"))
                rows[t] = x + projected(hidden, weights, f"{name}.feed_forward.output")
        found.append([output_table @ norm(x, weights, "norm") for x in rows])
    return np.array(found)


def loss(logits: np.ndarray, targets: np.ndarray) -> np.generic:
    """Mean of  log sum exp(x) - x_target  over all positions."""
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (np.log(np.exp(logits).sum(axis=-1)) - picked).mean()
