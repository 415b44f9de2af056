"""Operations that differ from the right ones in one place, and what is said of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parity_tests.ops_by_hand import (
    Array,
    C,
    adamw_step,
    altered,
    causal_attention,
    clip_grad_norm,
    cross_entropy,
    gelu,
    layer_norm,
    linear,
    softmax,
    tril,
)


def no_row_sum(x: Array, g: Array) -> Any:
    return np.exp(x - x.max(axis=-1, keepdims=True)), softmax(x, g)[1]


@np.errstate(all="ignore")
def no_shift(x: Array, g: Array) -> Any:
    e = np.exp(x)
    return e / e.sum(axis=-1, keepdims=True), None


def first_row_only(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    y, (dx, _, dbias) = linear(x, weight, bias, g)
    return y, (dx, np.outer(g.reshape(-1, len(bias))[0], x.reshape(-1, x.shape[-1])[0]), dbias)


def eps_outside(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    c = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((c * c).mean(axis=-1, keepdims=True)) + x.dtype.type(1e-5)
    return c / s * weight + bias, None


def statistics_fixed(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    y, (_, dweight, dbias) = layer_norm(x, weight, bias, g)
    s = np.sqrt(x.var(axis=-1, keepdims=True) + x.dtype.type(1e-5))
    return y, (g * weight / s, dweight, dbias)


def unbiased(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    n = x.shape[-1]
    c = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((c * c).sum(axis=-1, keepdims=True) / max(n - 1, 1) + x.dtype.type(1e-5))
    return c / s * weight + bias, None


def no_repeats(table: Array, ids: Array, g: Array) -> Any:
    dtable = np.zeros_like(table)
    dtable[ids] += g
    return table[ids], dtable


def erf_gelu(x: Array, g: Array) -> Any:
    erf = np.array([math.erf(v / math.sqrt(2)) for v in x.flat]).reshape(x.shape)
    return 0.5 * x * (1 + erf), gelu(x, g)[1]


def no_three(x: Array, g: Array) -> Any:
    t = np.tanh(C * (x + 0.044715 * x**3))
    du = C * (1 + 0.044715 * x * x)
    return gelu(x, g)[0], g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du)


def no_one_hot(logits: Array, targets: Array, g: Array) -> Any:
    rows = logits.size // logits.shape[-1]
    return cross_entropy(logits, targets, g)[0], g * softmax(logits, logits)[0] / rows


def no_mask(q: Array, k: Array, v: Array, g: Array) -> Any:
    p = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), 0 * q @ k.swapaxes(-1, -2))[0]
    return p @ v, causal_attention(q, k, v, g)[1]


def untransposed_key(q: Array, k: Array, v: Array, g: Array) -> Any:
    output, (dq, _, dv) = causal_attention(q, k, v, g)
    p = causal_attention(q, k, np.broadcast_to(np.eye(q.shape[-2]), (*q.shape[:-1], q.shape[-2])),
                         np.zeros((*q.shape[:-1], q.shape[-2])))[0]  # fmt: skip
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return output, (dq, ds @ q, dv)


def uncorrected(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    _, m, v = adamw_step(w, g, m, v, t, lr, betas, eps, decay)
    return w - lr * decay * w - lr * m / (np.sqrt(v) + eps), m, v


def eps_inside(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    _, m, v = adamw_step(w, g, m, v, t, lr, betas, eps, decay)
    denominator = np.sqrt(v / (1 - betas[1] ** t) + eps)
    return w - lr * decay * w - lr * m / (1 - betas[0] ** t) / denominator, m, v


def coupled(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    return adamw_step(w, g + decay * w, m, v, t, lr, betas, eps, 0.0)


def stale(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    """The first moment replaced, not averaged: the same at the first step."""
    return adamw_step(w, g, 0.0 * m, v, t, lr, betas, eps, decay)


def each_by_its_own(grads: list[Array], max_norm: float) -> Any:
    norm = clip_grad_norm(grads, max_norm)[1]
    return [clip_grad_norm([g], max_norm)[0][0] for g in grads], norm


def no_min(grads: list[Array], max_norm: float) -> Any:
    norm = clip_grad_norm(grads, max_norm)[1]
    return [g * (max_norm / (norm + 1e-6)) for g in grads], norm


# Operation, wrong function, the result that is named, and how the smallest example begins.
WRONG = (
    ("matmul", lambda a, b, g: (a @ b, (g @ b[..., ::-1, :].swapaxes(-1, -2), None)), "da",
     "a (1, 2) normal, b (2, 1) normal;"),
    ("matmul", lambda a, b, g: (a @ np.abs(b), None), "output", "a (1, 1) normal, b (1, 1) "),
    ("linear", lambda x, w, b, g: (x @ w.T, None), "output", "x (1, 1) normal, weight (1, 1) "),
    ("linear", first_row_only, "dweight", "x (2, 1) normal, weight (1, 1) normal, bias (1,) "),
    ("layer_norm", eps_outside, "output", "x (2,) normal, weight (2,) normal, bias (2,) normal;"),
    ("layer_norm", unbiased, "output", "x (2,) normal, weight (2,) normal, bias (2,) normal;"),
    ("layer_norm", statistics_fixed, "dx", "x (1,) normal, weight (1,) normal, bias (1,) normal;"),
    ("embedding", no_repeats, "dtable", "table (1, 1) normal, ids (2,) random below 1;"),
    ("embedding", lambda table, ids, g: (table[ids - 1], None), "output", "table (2, 1) normal, "),
    ("softmax", no_row_sum, "output", "x (2,) normal;"),
    ("softmax", no_shift, "output", "x (1,) normal * 2^"),
    ("tril", lambda x, value, g: (tril(x, value, g)[0], g), "dx", "x (1, 2) normal, value 0.0;"),
    ("tril", lambda x, value, g: (np.where(np.tri(*x.shape[-2:], -1), x, value), None), "output",
     "x (1, 1) normal, value 0.0;"),
    ("gelu", erf_gelu, "output", "x (1,) normal;"),
    ("gelu", no_three, "dx", "x (1,) normal;"),
    ("cross_entropy", altered("cross_entropy", 1, lambda d: d * (d.size // d.shape[-1])),
     "dlogits", "logits (2, 2) normal, targets (2,) "),
    ("cross_entropy", no_one_hot, "dlogits", "logits (1, 1) normal, targets (1,) "),
    ("causal_attention", no_mask, "output", "q (2, 1) normal, k (2, 1) normal, v (2, 1) normal;"),
    ("causal_attention", untransposed_key, "dk", "q (2, 1) normal, k (2, 1) normal, v (2, 1) "),
    ("adamw_step", uncorrected, "weight", "weight (1,) normal, grad (1,) normal, exp_avg (1,) z"),
    ("adamw_step", eps_inside, "weight", "weight (1,) normal, grad (1,) normal, exp_avg (1,) z"),
    ("adamw_step", coupled, "exp_avg", "weight (1,) normal, grad (1,) normal, exp_avg (1,) z"),
    ("adamw_step", stale, "exp_avg", "weight (1,) normal, grad (1,) normal, exp_avg (1,) normal, "
     "exp_avg_sq (1,) squares, step 2, "),
    ("clip_grad_norm", each_by_its_own, "clipped[0]", "grads[0] (1,) normal, grads[1] (1,) "),
    ("clip_grad_norm", no_min, "clipped[0]", "grads[0] (1,) normal, max_norm 1.0;"),
)  # fmt: skip
