"""The operations of a GPT, each one short function whose forward and backward stand together.

Every operation keeps the dtype (float16, float32, float64, complex128 forward) and takes any
leading axes. Complex data is for the complex step, so maxima and bounds go by the real part.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numpy_impl.tensor import Tensor

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
# tanh is exactly +-1 long before this argument in every dtype, and its cube does not overflow
# the smallest one, float16.
GELU_SATURATED = 20.0


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form (Hendrycks & Gimpel 2016, eq. 2).

    y = x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3);  any shape, dtype kept.
    The gradient is finite for every finite x (PyTorch's is NaN from |x| about 1.9e19 in float32).
    """
    c = np.clip(x.data, -GELU_SATURATED, GELU_SATURATED)  # complex numbers go by the real part
    c2 = c * c  # x ** 3 is ~190x slower than products in float32
    t = np.tanh(SQRT_2_OVER_PI * c * (1.0 + GELU_CUBIC * c2))

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
        du = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * c2)
        return (grad * (0.5 * (1.0 + t + c * (1.0 - t * t) * du)),)

    return Tensor.from_op("gelu", 0.5 * x.data * (1.0 + t), (x,), gradient_fn)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis, shifted by its maximum (Blanchard, Higham & Higham 2021).

    p_i = exp(x_i - max x) / sum_j exp(x_j - max x);  dx = p (g - sum_j g_j p_j).
    A row that is all -inf or holds NaN or +inf gives NaN, as in PyTorch.
    """
    with np.errstate(invalid="ignore"):
        e = np.exp(x.data - x.data.real.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
        return (p * (grad - (grad * p).sum(axis=-1, keepdims=True)),)

    return Tensor.from_op("softmax", p, (x,), gradient_fn)


def tril(x: Tensor, value: float) -> Tensor:
    """Keep x where j <= i on the last two axes (top-left aligned), else `value`.

    Backward selects: the gradient is g where x was kept, else 0. A finite `value` below the
    dtype's range becomes its minimum (float16: -65504). Raises ValueError for fewer than two axes.
    """
    if x.ndim < 2:
        raise ValueError(f"tril: got shape {x.shape}, needed at least two axes")
    return _select("tril", x, np.tri(*x.shape[-2:], dtype=bool), value)


def _select(op: str, x: Tensor, keep: np.ndarray, value: float) -> Tensor:
    """x where `keep`, else `value`: the forward and backward of every mask."""
    value = float(value)  # a NumPy number would decide the dtype of the result
    if math.isfinite(value):
        value = max(value, float(np.finfo(x.dtype).min))

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
        return (np.where(keep, grad, 0.0),)

    return Tensor.from_op(op, np.where(keep, x.data, value), (x,), gradient_fn)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = x W^T + b:  (..., in), (out, in), (out,) -> (..., out).

    dx = G W,  dW = G^T x and db = sum G over all leading axes.
    """
    if x.ndim < 1 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear: got input {x.shape}, needed (..., {weight.shape[-1]})")
    if not x.dtype == weight.dtype == bias.dtype:
        raise TypeError(f"linear: got {x.dtype}, {weight.dtype}, {bias.dtype}, needed one dtype")
    # Leading axes flattened: one large product is faster than many small ones.
    x2 = x.data.reshape(-1, x.shape[-1])  # (N, in)
    y = x2 @ weight.data.T + bias.data  # (N, out)

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        g2 = grad.reshape(y.shape)
        return (g2 @ weight.data).reshape(x.shape), g2.T @ x2, g2.sum(axis=0)

    return Tensor.from_op(
        "linear", y.reshape(*x.shape[:-1], bias.shape[0]), (x, weight, bias), gradient_fn
    )


def embedding(table: Tensor, ids: Any) -> Tensor:
    """Rows of `table` (V, E) by integer `ids` (...) -> (..., E).

    The gradient of a row is the sum over all its occurrences. Raises TypeError for ids that are
    not integers, ValueError for ids outside 0..V-1 (negative ones included).
    """
    ids = check_ids("ids", ids, table.shape[0])

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, None]:
        # Equal ids stand together after sorting, so each row is the sum of one segment.
        order = np.argsort(ids, axis=None, kind="stable")
        rows, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        dtable = np.zeros_like(table.data)
        dtable[rows] = np.add.reduceat(grad.reshape(-1, grad.shape[-1])[order], starts)
        return dtable, None

    return Tensor.from_op("embedding", table.data[ids], (table, Tensor(ids)), gradient_fn)


def cross_entropy(logits: Tensor, targets: Any) -> Tensor:
    """Mean over all n rows of  log(sum_j exp(x_j)) - x_target:  (..., V), (...) -> ().

    dx = (softmax(x) - onehot(target)) / n, times the cotangent. Raises TypeError for targets that
    are not integers, ValueError for targets outside 0..V-1 (-1 and -100 included), for a shape
    that does not match, and for no rows.
    """
    vocab_size = logits.shape[-1]
    targets = check_ids("targets", targets, vocab_size)
    if targets.shape != logits.shape[:-1] or targets.size == 0:
        raise ValueError(
            f"cross_entropy: got targets {targets.shape} for logits {logits.shape}, "
            "needed one target per row and at least one row"
        )
    x = logits.data.reshape(-1, vocab_size)
    rows, columns = np.arange(len(x)), targets.reshape(-1)
    with np.errstate(invalid="ignore"):
        z = x - x.real.max(axis=-1, keepdims=True)
    e = np.exp(z)
    total = e.sum(axis=-1, keepdims=True)
    loss = (np.log(total[:, 0]) - z[rows, columns]).sum() / len(x)

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, None]:
        dx = e / total
        dx[rows, columns] -= 1.0
        return (dx * (grad / len(x))).reshape(logits.shape), None

    return Tensor.from_op("cross_entropy", loss, (logits, Tensor(targets)), gradient_fn)


def self_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1); returns output and weights.

    softmax(q k^T / sqrt(d_k)) v:  q (..., T, d_k), k (..., S, d_k), v (..., S, d_v) ->
    (..., T, d_v) and (..., T, S). `mask` is boolean (or 0 and 1), broadcasts to (..., T, S), and
    is true where position i may attend to position j; elsewhere the score is -inf. Raises
    ValueError for shapes that do not fit and for a row that may attend to nothing.
    """
    _check_attention_shapes(q, k, v)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])  # (..., T, S)
    if mask is not None:
        scores = _select("mask", scores, _check_mask(mask, scores.shape), -math.inf)
    weights = softmax(scores)
    return weights @ v, weights


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Self-attention in which position i attends to positions j <= i only; see `self_attention`."""
    return self_attention(q, k, v, np.tri(q.shape[-2], k.shape[-2], dtype=bool))


def check_ids(name: str, ids: Any, size: int) -> np.ndarray:
    """`ids` as a private int64 array, after checking that all lie in 0..size-1."""
    ids = np.asarray(ids.data if isinstance(ids, Tensor) else ids)
    if ids.dtype.kind not in ("i", "u"):
        raise TypeError(f"{name}: got dtype {ids.dtype}, needed integers")
    bad = ids[(ids < 0) | (ids >= size)]
    if bad.size:
        raise ValueError(f"{name}: got {bad[0]}, needed 0 to {size - 1}")
    return ids.astype(np.int64)


def _check_attention_shapes(q: Any, k: Any, v: Any) -> None:
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"attention: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            "needed (..., T, d_k), (..., S, d_k), (..., S, d_v)"
        )


def _check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.asarray(mask)
    integers = mask.dtype.kind in ("i", "u")
    if mask.dtype != bool and not (integers and np.isin(mask, (0, 1)).all()):
        raise TypeError(f"mask: got dtype {mask.dtype}, needed booleans (true: may attend)")
    try:
        keep = np.broadcast_to(mask.astype(bool), shape)
    except ValueError:
        raise ValueError(f"mask: got {mask.shape}, needed to broadcast to {tuple(shape)}") from None
    if not keep.any(axis=-1).all():
        raise ValueError("mask: a position may attend to nothing, needed at least one")
    return keep
