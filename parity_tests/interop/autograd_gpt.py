"""The small GPT in NumPy, differentiated by HIPS autograd.

float32 stays float32 on the whole way back. autograd's derivatives of `where`, `max` and `mean`
come out as float64 whatever they are given, so none of the three is differentiated here.
"""

from __future__ import annotations

import math

import autograd.numpy as anp
import numpy as np
from autograd import value_and_grad
from autograd.tracer import getval

Weights = dict[str, np.ndarray]


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """x W^T + b:  (..., in) -> (..., out)."""
    return anp.dot(x, weights[f"{name}.weight"].T) + weights[f"{name}.bias"]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """x - log(sum(exp(x))) over the last axis."""
    # The shift changes nothing, so it may be a constant.
    x = x - np.max(getval(x), axis=-1, keepdims=True)
    return x - anp.log(anp.sum(anp.exp(x), axis=-1, keepdims=True))


def gelu(x: np.ndarray) -> np.ndarray:
    """x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3)."""
    u = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    # autograd differentiates tanh by cosh(u)^2, which overflows long after tanh is exactly 1.
    return 0.5 * x * (1.0 + anp.tanh(anp.clip(u, -20.0, 20.0)))


def attention(x: np.ndarray) -> np.ndarray:
    """Every position averages itself and those before it:  (B, T, E) -> (B, T, E)."""
    scores = anp.matmul(x, anp.swapaxes(x, -2, -1)) / math.sqrt(x.shape[-1])  # (B, T, T)
    future = -1e9 * np.triu(np.ones(scores.shape[-2:], dtype=x.dtype), 1)
    return anp.matmul(anp.exp(log_softmax(scores + future)), x)


def gpt(weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Tokens (B, T) -> logits (B, T, V)."""
    positions = weights["embedding.positional_embedding.weight"][: tokens.shape[1]]
    x = weights["embedding.embedding.weight"][tokens] + positions
    blocks = sum(name.endswith("attention.output.weight") for name in weights)
    for block in (f"transformers.{i}" for i in range(blocks)):
        x = linear(weights, f"{block}.attention.output", attention(x))
        x = gelu(linear(weights, f"{block}.feed_forward.input", x))
        x = linear(weights, f"{block}.feed_forward.output", x)
    return linear(weights, "output.output", x)


def cross_entropy(weights: Weights, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Mean of -log softmax(logits)[target]:  (B, T), (B, T) -> ()."""
    batch, time = np.indices(targets.shape)
    return -anp.sum(log_softmax(gpt(weights, tokens))[batch, time, targets]) / targets.size


def loss_and_gradients(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss () and its gradient by every parameter, in the dtype of the weights."""
    return value_and_grad(cross_entropy)(weights, tokens, targets)
