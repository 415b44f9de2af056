"""The operations of a GPT, each one short function whose forward and backward stand together.

Every operation keeps the dtype (float16, float32, float64, complex128 forward) and takes any
leading axes. Complex data is for the complex step, so maxima and bounds go by the real part.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from numpy_impl import tape
from numpy_impl.tensor import Tensor, product

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
LAYER_NORM_EPS = 1e-5  # as GPT-2 has it
# tanh is exactly +-1 long before this argument in every dtype, and its cube does not overflow
# the smallest one, float16.
GELU_SATURATED = 20.0
# Rows of a table times ids, up to which a product with one-hot rows is faster than sorting.
SMALL_LOOKUP = 2**14
# Elements at a time of a long elementwise chain, whose arrays then stay in a processor's cache.
BLOCK = 2**15


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form (Hendrycks & Gimpel 2016, eq. 2).

    y = x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3);  any shape, dtype kept.
    The gradient is finite for every finite x (PyTorch's is NaN from |x| about 1.9e19 in float32).
    """
    z = x.data.reshape(-1)
    y = np.empty_like(z)
    # The derivative is all that the backward pass needs, and cheapest while everything is at hand.
    dy = np.empty_like(z) if tape.records(x) else None
    with np.errstate(invalid="ignore"):  # 0 * -inf is NaN, as in PyTorch
        for start in range(0, z.size, BLOCK):
            part = slice(start, start + BLOCK)
            _gelu(z[part], y[part], None if dy is None else dy[part])

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
        return (grad * dy.reshape(x.shape),)

    return Tensor.from_op("gelu", y.reshape(x.shape), (x,), gradient_fn)


def _gelu(z: np.ndarray, y: np.ndarray, dy: np.ndarray | None) -> None:
    """Fill y = z phi and dy = phi + 2 z phi (1 - phi) u', where phi = (1 + tanh(u)) / 2."""
    c = np.clip(z, -GELU_SATURATED, GELU_SATURATED)  # complex numbers go by the real part
    c2 = c * c  # x ** 3 is ~190x slower than products in float32
    c2 *= SQRT_2_OVER_PI * GELU_CUBIC
    phi = np.add(c2, SQRT_2_OVER_PI, out=y)
    phi *= c
    np.tanh(phi, out=phi)
    phi += 1.0
    phi *= 0.5
    if dy is not None:
        c2 *= 6.0
        c2 += 2.0 * SQRT_2_OVER_PI
        np.multiply(c, c2, out=dy)  # 2 c u'
        dy *= phi
        dy *= np.subtract(1.0, phi, out=c)
        dy += phi
    phi *= z


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis, shifted by its maximum (Blanchard, Higham & Higham 2021).

    p_i = exp(x_i - max x) / sum_j exp(x_j - max x);  dx = p (g - sum_j g_j p_j).
    A row that is all -inf or holds NaN or +inf gives NaN, as in PyTorch.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a difference of -inf has weight 0
        p = x.data - x.data.real.max(axis=-1, keepdims=True)
        np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
        dx = grad * p
        np.subtract(grad, dx.sum(axis=-1, keepdims=True), out=dx)
        dx *= p
        return (dx,)

    return Tensor.from_op("softmax", p, (x,), gradient_fn)


def tril(x: Tensor, value: float) -> Tensor:
    """Keep x where j <= i on the last two axes (top-left aligned), else `value`.

    Backward selects: the gradient is g where x was kept, else 0. A finite `value` outside the
    dtype's range becomes its nearest end (float16: -65504). Raises ValueError for fewer than two
    axes.
    """
    if x.ndim < 2:
        raise ValueError(f"tril: got shape {x.shape}, needed at least two axes")
    return _select("tril", x, _triangle(*x.shape[-2:]), value)


@functools.lru_cache(maxsize=8)
def _triangle(rows: int, columns: int) -> np.ndarray:
    keep = np.tri(rows, columns, dtype=bool)
    keep.flags.writeable = False
    return keep


def _select(op: str, x: Tensor, keep: np.ndarray, value: float) -> Tensor:
    """x where `keep`, else `value`: the forward and backward of every mask."""
    value = float(value)  # a NumPy number would decide the dtype of the result
    if math.isfinite(value):
        value = max(value, float(np.finfo(x.dtype).min))
        value = min(value, float(np.finfo(x.dtype).max))

    drop = ~keep

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
        dx = grad.copy()
        np.copyto(dx, 0.0, where=drop)
        return (dx,)

    y = x.data.copy()
    np.copyto(y, value, where=drop)
    return Tensor.from_op(op, y, (x,), gradient_fn)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b:  (..., in), (out, in), (out,) -> (..., out); without a bias b = 0.

    dx = G W,  dW = G^T x and db = sum G over all leading axes.
    """
    shape, w = x.data.shape, weight.data
    parents = (x, weight) if bias is None else (x, weight, bias)
    if not shape or shape[-1] != w.shape[-1]:
        raise ValueError(f"linear: got input {shape}, needed (..., {w.shape[-1]})")
    if len({parent.dtype for parent in parents}) > 1:
        found = ", ".join(str(parent.dtype) for parent in parents)
        raise TypeError(f"linear: got {found}, needed one dtype")
    # Leading axes flattened: one large product is faster than many small ones.
    x2 = x.data.reshape(-1, shape[-1])  # (N, in)
    y = product(x2, w.T)  # (N, out)
    if bias is not None:
        y += bias.data

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, ...]:
        g2 = grad.reshape(-1, grad.shape[-1])
        dx, dw = product(g2, w).reshape(shape), product(g2.T, x2)
        return (dx, dw) if bias is None else (dx, dw, g2.sum(axis=0))

    return Tensor.from_op("linear", y.reshape(*shape[:-1], len(w)), parents, gradient_fn)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise each row of the last axis, then scale and shift (Ba, Kiros & Hinton 2016).

    y = w z + b,  z = (x - m) / s,  m = mean(x),  s = sqrt(mean((x - m)^2) + 1e-5):
    (..., E), (E,), (E,) -> (..., E).  With a = g w:
    dx = (a - mean(a) - z mean(a z)) / s,  dw = sum g z  and  db = sum g  over all leading axes.
    Right also where squares overflow (PyTorch gives z = 0 or NaN from |x - m| about 1.8e19 in
    float32); a row in which x - m itself does is NaN. Raises ValueError for other shapes, TypeError
    for mixed dtypes.
    """
    shape = x.shape
    if not shape or weight.shape != shape[-1:] or bias.shape != shape[-1:]:
        raise ValueError(
            f"layer_norm: got input {shape}, weight {weight.shape}, bias {bias.shape}, "
            "needed (..., E), (E,), (E,)"
        )
    if not x.dtype == weight.dtype == bias.dtype:
        raise TypeError(
            f"layer_norm: got {x.dtype}, {weight.dtype}, {bias.dtype}, needed one dtype"
        )
    w = weight.data
    with np.errstate(over="ignore", invalid="ignore"):
        z = x.data - x.data.mean(axis=-1, keepdims=True)
        s = _deviation(z)
        z /= s
    y = z * w
    y += bias.data

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gz = grad * z
        rows = gz.reshape(-1, shape[-1])
        db = grad.reshape(-1, shape[-1]).sum(axis=0)
        dw = rows.sum(axis=0)
        gz *= w
        dx = grad * w
        dx -= dx.mean(axis=-1, keepdims=True)
        dx -= z * gz.mean(axis=-1, keepdims=True)
        dx /= s
        return dx, dw, db

    return Tensor.from_op("layer_norm", y, (x, weight, bias), gradient_fn)


def _deviation(z: np.ndarray) -> np.ndarray:
    """sqrt(mean(z^2) + 1e-5) of each row of the last axis, (..., 1)."""
    # Squares by hand: np.var takes absolute values of complex numbers.
    s = np.sqrt((z * z).mean(axis=-1, keepdims=True) + LAYER_NORM_EPS)
    if np.isfinite(s).all():
        return s
    largest = np.abs(z.real).max(axis=-1, keepdims=True)
    rest = z / largest
    scaled = largest * np.sqrt((rest * rest).mean(axis=-1, keepdims=True))  # eps is far below
    return np.where(np.isfinite(s), s, scaled)


def embedding(table: Tensor, ids: Any) -> Tensor:
    """Rows of `table` (V, E) by integer `ids` (...) -> (..., E).

    The gradient of a row is the sum over all its occurrences. Raises TypeError for ids that are
    not integers, ValueError for ids outside 0..V-1 (negative ones included).
    """
    ids = check_ids("ids", ids, table.shape[0])

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, None]:
        # Equal ids stand together after sorting, so each row is the sum of one segment.
        dtable = np.zeros_like(table.data)
        if dtable.shape[0] * ids.size <= SMALL_LOOKUP and np.isfinite(grad).all():
            # The same sums as one product, which would spread NaN and inf over all rows.
            onehot = np.zeros((len(dtable), ids.size), dtable.dtype)
            onehot[ids.reshape(-1), np.arange(ids.size)] = 1.0
            return product(onehot, grad.reshape(ids.size, grad.shape[-1]), out=dtable), None
        counts = np.bincount(ids.reshape(-1), minlength=len(dtable))
        if counts.max(initial=0) <= 1:
            dtable[ids] = grad
            return dtable, None
        rows = np.flatnonzero(counts)
        starts = (counts.cumsum() - counts)[rows]
        order = ids.argsort(axis=None, kind="stable")
        sorted_rows = grad.reshape(-1, grad.shape[-1]).take(order, axis=0)
        dtable[rows] = np.add.reduceat(sorted_rows, starts)
        return dtable, None

    return Tensor.from_op(
        "embedding", table.data.take(ids, axis=0), (table, Tensor(ids)), gradient_fn
    )


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
    with np.errstate(over="ignore", invalid="ignore"):
        z = x - x.real.max(axis=-1, keepdims=True)
    picked = z[rows, columns]
    e = np.exp(z, out=z)
    total = e.sum(axis=-1, keepdims=True)
    loss = (np.log(total[:, 0]) - picked).sum() / len(x)

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, None]:
        dx = e / total
        dx[rows, columns] -= 1.0
        dx *= grad / len(x)
        return dx.reshape(logits.shape), None

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
    if ids.size and (ids.min() < 0 or ids.max() >= size):
        bad = ids[(ids < 0) | (ids >= size)]
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
