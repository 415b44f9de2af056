"""Mistakes that people make in what GPT-2 adds: layer norm, heads, residuals, the tied weight.

They are tried, besides those of `mistakes`, where a model has heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpt_parity.oracle.graph import PROJECTED
from gpt_parity.oracle.mistakes import (
    Hypothesis,
    Mistake,
    Operation,
    Vjp,
    masked,
    mistake,
    softmax_over,
    triangle,
    with_gradient,
    without,
)
from numpy_impl.functional import LAYER_NORM_EPS

GPT2_HYPOTHESES: list[Hypothesis] = []
gpt2_mistake = functools.partial(mistake, table=GPT2_HYPOTHESES)


# --- Layer norm


def _normalised(
    op: Operation, *, axis: Any = -1, less: int = 0, eps: float = LAYER_NORM_EPS,
    eps_outside: bool = False, centred: bool = True,
) -> tuple[np.ndarray, Vjp]:  # fmt: skip
    """Layer norm of other statistics, with the vjp that belongs to them.

    z = c / s:  c = x - mean(x) or x,  s^2 = sum(c^2) / (n - less) + eps, or s = sqrt(...) + eps.
    """
    x, weight, bias = op.data

    def mean(y: np.ndarray) -> np.ndarray:
        return y.mean(axis=axis, keepdims=True)

    c = x - mean(x) if centred else x
    degrees = x.size / mean(x).size
    share = degrees / (degrees - less)
    root = np.sqrt(mean(c * c) * share + (0.0 if eps_outside else eps))
    s = root + (eps if eps_outside else 0.0)
    z = c / s

    def vjp(g: np.ndarray) -> tuple[np.ndarray, ...]:
        a = g * weight
        dx = a - c * mean(a * c) * share / (root * s)
        if centred:
            dx -= mean(dx)
        leading = tuple(range(x.ndim - 1))
        return dx / s, (g * z).sum(axis=leading), g.sum(axis=leading)

    return z * weight + bias, vjp


@gpt2_mistake("layer_norm", "layer norm: eps is added outside the root")
def _eps_outside(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, eps_outside=True)


@gpt2_mistake("layer_norm", "layer norm: eps is missing")
def _eps_missing(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, eps=0.0)


@gpt2_mistake("layer_norm", "layer norm: eps is 1e-6, not 1e-5")
def _eps_smaller(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, eps=1e-6)


@gpt2_mistake("layer_norm", "layer norm: eps is 1e-12, not 1e-5")
def _eps_smallest(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, eps=1e-12)


@gpt2_mistake("layer_norm", "layer norm: the variance is divided by E - 1, not by E (unbiased)")
def _unbiased(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, less=1)


@gpt2_mistake("layer_norm", "layer norm: the mean is not subtracted (RMSNorm)")
def _not_centred(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, centred=False)


@gpt2_mistake("layer_norm", "layer norm: normalised over the positions, not over E")
def _over_positions(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, axis=-2)


@gpt2_mistake("layer_norm", "layer norm: normalised over the batch, not over E")
def _over_batch(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, axis=0)


@gpt2_mistake("layer_norm", "layer norm: normalised over positions and E together")
def _over_both(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _normalised(op, axis=(-2, -1))


@gpt2_mistake("layer_norm", "layer norm: the weight is not applied")
def _weight_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, weight, bias = op.data
    z, vjp = _normalised(Operation((x, np.ones_like(weight), bias), *_unused(op)))
    return z, lambda g: (vjp(g)[0], np.zeros_like(weight), vjp(g)[2])


@gpt2_mistake("layer_norm", "layer norm: the bias is not added")
def _shift_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, weight, bias = op.data
    y, vjp = _normalised(Operation((x, weight, np.zeros_like(bias)), *_unused(op)))
    return y, lambda g: (*vjp(g)[:2], np.zeros_like(bias))


@gpt2_mistake("layer_norm", "layer norm: there is none, x goes on as it is")
def _norm_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, weight, bias = op.data
    return np.array(x), lambda g: (g, np.zeros_like(weight), np.zeros_like(bias))


def _unused(op: Operation) -> tuple[np.ndarray, Vjp, float]:
    return op.out, op.vjp, op.mask_value


def _input_gradient(op: Operation, weighted: bool, shift: bool, slope: bool) -> Any:
    """dx by its terms: a = g w or g, then - mean(a) and - z mean(a z), divided by s."""
    x, weight, _ = op.data
    c = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((c * c).mean(axis=-1, keepdims=True) + LAYER_NORM_EPS)
    z = c / s

    def gradient(g: np.ndarray) -> np.ndarray:
        a = g * weight if weighted else g
        dx = a - z * (a * z).mean(axis=-1, keepdims=True) if slope else a
        return (dx - a.mean(axis=-1, keepdims=True) if shift else dx) / s

    return with_gradient(op, 0, gradient)


@gpt2_mistake("layer_norm", "layer norm: dx lacks the mean of g w")
def _without_shift(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _input_gradient(op, weighted=True, shift=False, slope=True)


@gpt2_mistake("layer_norm", "layer norm: dx lacks the term with the mean of g w z")
def _without_slope(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _input_gradient(op, weighted=True, shift=True, slope=False)


@gpt2_mistake("layer_norm", "layer norm: dx lacks both means, as if mean and variance were fixed")
def _without_statistics(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _input_gradient(op, weighted=True, shift=False, slope=False)


@gpt2_mistake("layer_norm", "layer norm: dx lacks the weight")
def _without_weight(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _input_gradient(op, weighted=False, shift=True, slope=True)


@gpt2_mistake("layer_norm", "layer norm: the weight's gradient takes x, not the normalised x")
def _weight_by_input(op: Operation) -> tuple[np.ndarray, Vjp]:
    leading = tuple(range(op.out.ndim - 1))
    return with_gradient(op, 1, lambda g: (g * op.data[0]).sum(axis=leading))


# --- Heads


@gpt2_mistake("div", "attention: scores are divided by sqrt(E) in place of sqrt(D)")
def _scale_by_width(op: Operation) -> tuple[np.ndarray, Vjp]:
    scale = math.sqrt(op.out.shape[1]) * op.data[1]
    return op.data[0] / scale, lambda g: (g / scale, None)


def _scaled_by_heads(op: Operation, scale: float) -> tuple[np.ndarray, Vjp]:
    if op.out.shape[1] in (1, round(float(op.data[1]) ** 2)):
        raise ValueError("H is 1 or D, and another mistake says so")
    return op.data[0] / scale, lambda g: (g / scale, None)


@gpt2_mistake("div", "attention: scores are divided by sqrt(H) in place of sqrt(D)")
def _scale_by_root_of_heads(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _scaled_by_heads(op, math.sqrt(op.out.shape[1]))


@gpt2_mistake("div", "attention: scores are divided by H in place of sqrt(D)")
def _scale_by_heads(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _scaled_by_heads(op, float(op.out.shape[1]))


@gpt2_mistake("split", "heads: the projection is split as (D, H), not as (H, D)")
def _split_inside_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    shape = op.out.shape
    x = op.data[0].reshape(*shape[:3], shape[4], shape[3]).swapaxes(-1, -2)
    return x, lambda g: (g.swapaxes(-1, -2).reshape(op.data[0].shape),)


@gpt2_mistake("split", "heads: the projection is split as (H, 3, D), not as (3, H, D)")
def _split_heads_first(op: Operation) -> tuple[np.ndarray, Vjp]:
    batch, length, three, heads, size = op.out.shape
    x = op.data[0].reshape(batch, length, heads, three, size).swapaxes(2, 3)
    return x, lambda g: (g.swapaxes(2, 3).reshape(op.data[0].shape),)


def _reshaped(op: Operation) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    return x.reshape(op.out.shape), lambda g: (g.reshape(x.shape),)


def _reshaped_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (g.reshape(op.data[0].shape),)


gpt2_mistake("heads", "heads: split by reshaping alone, positions and heads are not transposed")(
    _reshaped
)
gpt2_mistake("merge", "heads: merged by reshaping alone, not transposed back first")(_reshaped)
gpt2_mistake("merge", "heads: the gradient of the merge is reshaped, not transposed")(
    _reshaped_backward
)


def _part(i: int) -> Mistake:
    """The part of the projection that has the number i."""

    def taken(op: Operation) -> tuple[np.ndarray, Vjp]:
        x = op.data[0]

        def vjp(g: np.ndarray) -> tuple[np.ndarray]:
            dx = np.zeros_like(x)
            dx[:, :, i] = g
            return (dx,)

        return x[:, :, i], vjp

    return taken


def _orders() -> Iterator[Hypothesis]:
    """Every wrong order of queries, keys and values in the projection."""
    for order in itertools.permutations(PROJECTED):
        if order != PROJECTED:
            yield Hypothesis(
                f"heads: the projection is read as {', '.join(order)}, not query, key, value",
                {part: _part(order.index(part)) for part in PROJECTED},
            )


GPT2_HYPOTHESES.extend(_orders())


@gpt2_mistake("tril", "mask: applied to the first head only")
def _mask_first_head(op: Operation) -> tuple[np.ndarray, Vjp]:
    keep = np.ones(op.out.shape, bool)
    keep[:, 0] = triangle(op, 0)
    return masked(op, keep, op.mask_value)


@gpt2_mistake("softmax", "softmax: taken over the heads")
def _softmax_heads(op: Operation) -> tuple[np.ndarray, Vjp]:
    return softmax_over(op, 1)


# --- Residual stream


@gpt2_mistake("residual", "residual: x is not added to the branch")
def _skip_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    return np.array(op.data[1]), lambda g: (np.zeros_like(g), g)


@gpt2_mistake("residual", "residual: the branch is not added to x")
def _branch_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    return np.array(op.data[0]), lambda g: (g, np.zeros_like(g))


@gpt2_mistake("residual", "residual: the gradient is that through the branch alone")
def _skip_without_gradient(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (np.zeros_like(g), g)


@gpt2_mistake("residual", "residual: the gradient is that past the branch alone")
def _branch_without_gradient(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (g, np.zeros_like(g))


# --- Tied weight


@gpt2_mistake("linear", "tied weight: its gradient is that of the embedding alone")
def _output_without_gradient(op: Operation) -> tuple[np.ndarray, Vjp]:
    if len(op.data) > 2:
        raise ValueError("a linear map of its own weight")
    return with_gradient(op, 1, lambda g: np.zeros_like(op.data[1]))


@gpt2_mistake("tokens", "tied weight: its gradient is that of the output alone")
def _lookup_without_gradient(op: Operation) -> tuple[np.ndarray, Vjp]:
    return without(0)(op)
