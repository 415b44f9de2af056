"""The small GPT in plain JAX: loss and gradients from `jax.value_and_grad`.

    python jax_gpt.py BUNDLE_FOLDER OUT_FOLDER float32|float64

reads tokens.npy, targets.npy and weight/<parameter>.npy, writes loss.npy and grad/<parameter>.npy.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Weights = dict[str, Array]


def linear(weights: Weights, name: str, x: Array) -> Array:
    """x W^T + b:  (..., in) -> (..., out)."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def attention(x: Array) -> Array:
    """Every position averages itself and those before it:  (B, T, E) -> (B, T, E)."""
    scores = jnp.einsum("bie,bje->bij", x, x) / math.sqrt(x.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1) @ x


def gpt(weights: Weights, tokens: Array) -> Array:
    """Tokens (B, T) -> logits (B, T, V)."""
    positions = weights["embedding.positional_embedding.weight"][: tokens.shape[1]]
    x = weights["embedding.embedding.weight"][tokens] + positions
    blocks = sum(name.endswith("attention.output.weight") for name in weights)
    for block in (f"transformers.{i}" for i in range(blocks)):
        x = linear(weights, f"{block}.attention.output", attention(x))
        hidden = linear(weights, f"{block}.feed_forward.input", x)
        x = linear(weights, f"{block}.feed_forward.output", jax.nn.gelu(hidden, approximate=True))
    return linear(weights, "output.output", x)


def cross_entropy(weights: Weights, tokens: Array, targets: Array) -> Array:
    """Mean of -log softmax(logits)[target]:  (B, T), (B, T) -> ()."""
    log_probabilities = jax.nn.log_softmax(gpt(weights, tokens), axis=-1)
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1).mean()


value_and_grad = jax.jit(jax.value_and_grad(cross_entropy))


def loss_and_gradients(
    weights: dict[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss () and its gradient by every parameter, in the dtype of the weights.

    float64 needs JAX's x64 mode, without which JAX computes in float32.
    """
    loss, gradients = value_and_grad(weights, tokens, targets)
    return np.asarray(loss), {name: np.asarray(g) for name, g in gradients.items()}


def main(argv: list[str]) -> int:
    """Read a bundle, write results; see the module."""
    if len(argv) != 3 or argv[2] not in ("float32", "float64"):
        print("usage: python jax_gpt.py BUNDLE_FOLDER OUT_FOLDER float32|float64", file=sys.stderr)
        return 2
    bundle, out, dtype = Path(argv[0]), Path(argv[1]), argv[2]
    jax.config.update("jax_enable_x64", dtype == "float64")
    weights = {
        path.stem: np.load(path).astype(dtype) for path in sorted((bundle / "weight").glob("*.npy"))
    }
    tokens, targets = (np.load(bundle / f"{name}.npy") for name in ("tokens", "targets"))
    loss, gradients = loss_and_gradients(weights, tokens, targets)
    (out / "grad").mkdir(parents=True, exist_ok=True)
    np.save(out / "loss.npy", loss)
    for name, gradient in gradients.items():
        np.save(out / "grad" / f"{name}.npy", gradient)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
