"""A priori bounds of single results: how far off an honest implementation may be, per element.

The bounds of operations follow from the table in `rounding.py`. AdamW and the clip are no
operations of the tape: their reference is the formula, with the magnitudes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpt_parity.oracle.rounding import Call, Unit, bound, row
from numpy_impl.tape import unbroadcast
from numpy_impl.tensor import Tensor


def forward_bound(out: Tensor, unit: Unit) -> np.ndarray | float:
    """Bound of the result `out` of one operation of the NumPy twin, for a candidate with `unit`."""
    call = Call(tuple(p.data for p in out.parents), out.data, unit, out.attributes)
    return bound(row(out.op).forward(call), unit)


def backward_bound(out: Tensor, i: int, g: np.ndarray, unit: Unit) -> np.ndarray | float:
    """Bound of the gradient of parent `i`, with the sum on top that undoes broadcasting."""
    data = tuple(p.data for p in out.parents)
    raw = out.gradient_fn(g)[i]

    def of(op: str, grad: np.ndarray, upstream: np.ndarray) -> np.ndarray | float:
        call = Call(data, grad, unit, {}, upstream, i)
        return bound(row(op).backward(call), unit)

    allowed = of(out.op, raw, g)
    if raw.shape == data[i].shape:
        return allowed
    summed = unbroadcast(raw, data[i].shape)
    return unbroadcast(np.broadcast_to(allowed, raw.shape), data[i].shape) + of(
        "unbroadcast", summed, raw
    )


Arrays = list[np.ndarray]


def adamw_step(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, t: int, lr: float,
    betas: tuple[float, float], eps: float, decay: float,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """Step `t` (1, 2, ...) of AdamW in float64: weight and both moments, and their magnitudes.

    Loshchilov & Hutter 2019, algorithm 2, as `numpy_impl.optim.AdamWOptimizer` writes it. The
    weight inherits the magnitude of the first moment, which may cancel.
    """
    b1, b2 = betas
    new_m, new_v = b1 * m + (1.0 - b1) * g, b2 * v + (1.0 - b2) * g * g
    m_size = np.abs(m) + (1.0 - b1) * np.abs(g)
    denominator = np.sqrt(new_v / (1.0 - b2**t)) + eps
    step = lr / (1.0 - b1**t) / denominator
    new_w = w - lr * decay * w - step * new_m
    return [new_w, new_m, new_v], [np.abs(w) + step * m_size, m_size, new_v]


def clip_grad_norm(
    grads: Sequence[np.ndarray], max_norm: float
) -> tuple[tuple[Arrays, np.ndarray], tuple[Arrays, np.ndarray]]:
    """Gradients times min(1, max_norm / (norm + 1e-6)) and the norm before, and magnitudes.

    The norm is that of all gradients together, as `torch.nn.utils.clip_grad_norm_` has it; its
    sum of squares has as many terms as there are elements, which counts as their square root.
    """
    terms = [float(x) ** 2 for g in grads for x in np.asarray(g).flat]
    norm = np.asarray(math.sqrt(math.fsum(terms)))
    scale = min(1.0, max_norm / (float(norm) + 1e-6))
    clipped = [np.asarray(g, np.float64) * scale for g in grads]
    root = math.sqrt(len(terms))
    return (clipped, norm), ([root * np.abs(c) for c in clipped], np.asarray(root * norm))


def ratios(
    candidate: np.ndarray, reference: np.ndarray, allowed: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Error of every element, and error / bound, where 0 / 0 is 0 and x / 0 is infinite.

    Equal infinities are no error; whatever else is not finite has an infinite one.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(np.asarray(candidate, np.float64) - reference)
    error = np.where(candidate == reference, 0.0, np.where(np.isnan(error), math.inf, error))
    allowed = np.broadcast_to(allowed, error.shape)
    unbounded = np.where(error > 0.0, math.inf, 0.0)
    return error, np.divide(error, allowed, out=unbounded, where=allowed > 0.0)


def largest(x: np.ndarray) -> tuple[int, ...]:
    """Index of the largest element."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(x)), x.shape))
