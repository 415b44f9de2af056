"""Every stage of causal attention on random numbers, as `numpy_impl.functional` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.machine import require_memory
from numpy_impl import functional
from numpy_impl.tape import Observer, observe
from numpy_impl.tensor import Tensor

# Output positions from which all gradients are taken; of longer sequences only those shown.
MOST_GRADIENT_ROWS = 128


@dataclass(frozen=True)
class Gradients:
    """What reaches an input from the output at one position: rows (R,) of R output positions.

    norms: (R, T), the norm at input position j. zero: (R, T), where every component is 0.
    """

    rows: np.ndarray
    norms: np.ndarray
    zero: np.ndarray

    @property
    def future(self) -> np.ndarray:
        """True where the input position comes after the output position: (R, T)."""
        return np.arange(self.norms.shape[1]) > self.rows[:, None]


@dataclass(frozen=True)
class Stages:
    """All that was computed for q, k, v (T, d_k); float64.

    mask: (T, T), 1 where position i may attend to position j. products: q k^T. scores, masked:
    before and after the mask. weights, output: of causal attention. open_weights: without a mask.
    upper, upper_weights: of the triangle on the wrong side. gradients: of "v", "k" and "scores",
    for a random cotangent at one output position at a time. strays: components of the scores'
    gradients in rows of other positions that are not 0.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    products: np.ndarray
    scores: np.ndarray
    masked: np.ndarray
    weights: np.ndarray
    output: np.ndarray
    open_weights: np.ndarray
    upper: np.ndarray
    upper_weights: np.ndarray
    gradients: dict[str, Gradients]
    strays: int

    @property
    def future(self) -> np.ndarray:
        """True where position j comes after position i: (T, T)."""
        places = np.arange(len(self.mask))
        return places > places[:, None]


class _Recorder(Observer):
    """Keeps the first result of each operation, and what the softmax was taken of."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> None:
        self.first.setdefault(op, out)
        if op == "softmax":
            self.first.setdefault("masked", parents[0])


def compute(length: int, d_k: int, seed: int, shown: Sequence[int]) -> Stages:
    """Run attention on q, k, v and a cotangent, each randn(T, d_k) of one RandomState(seed).

    shown: the positions whose gradients are wanted where T is above MOST_GRADIENT_ROWS. Raises
    ValueError where the machine has not the memory.
    """
    values = 30 * length * length + 12 * length * d_k  # scores and their gradients; q, k, v
    require_memory(f"attention over {length} positions with d_k = {d_k}", 8 * values)
    rng = np.random.RandomState(seed)
    q, k, v = (Tensor(rng.randn(length, d_k)) for _ in "qkv")  # (T, d_k)
    cotangent = rng.randn(length, d_k)
    mask = functional.tril(Tensor(np.ones((length, length))), 0.0).data  # (T, T)
    with observe(_Recorder()) as recorder:
        output, weights = functional.causal_attention(q, k, v)
    first = recorder.first
    rows = np.arange(length) if length <= MOST_GRADIENT_ROWS else np.array(shown)
    gradients, strays = _gradients(
        output, {"v": v, "k": k, "scores": first["div"]}, cotangent, rows
    )
    upper = mask.T.astype(int)
    return Stages(
        q.data, k.data, v.data, mask, first["matmul"].data, first["div"].data,
        first["masked"].data, weights.data, output.data,
        functional.self_attention(q, k, v)[1].data, upper,
        functional.self_attention(q, k, v, upper)[1].data, gradients, strays,
    )  # fmt: skip


def _gradients(
    output: Tensor, inputs: dict[str, Tensor], cotangent: np.ndarray, rows: np.ndarray
) -> tuple[dict[str, Gradients], int]:
    """Go backward once for each of `rows`, with the cotangent at this position and 0 elsewhere."""
    norms = {name: np.zeros((len(rows), len(cotangent))) for name in inputs}
    zero = {name: np.ones((len(rows), len(cotangent)), bool) for name in inputs}
    strays = 0
    for tensor in inputs.values():
        tensor.retain_grad()
    for place, i in enumerate(rows):
        for tensor in inputs.values():
            tensor.grad = None
        alone = np.zeros_like(cotangent)
        alone[i] = cotangent[i]
        output.backward(alone, retain_graph=True)
        for name, tensor in inputs.items():
            grad = tensor.grad
            if name == "scores":  # (T, T), of which position i has one row
                strays += np.count_nonzero(np.delete(grad, i, axis=0))
                grad = grad[i][:, None]
            norms[name][place] = np.linalg.norm(grad, axis=-1)
            zero[name][place] = ~grad.any(axis=-1)
    return {name: Gradients(rows, norms[name], zero[name]) for name in inputs}, strays
