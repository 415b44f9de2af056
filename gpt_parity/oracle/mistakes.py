"""Mistakes that people make in one operation: what it then computes, and its vjp.

A mistake is one small function of the right operation. The diagnosis runs the whole model with
one of them in one place, and prints its description only if the candidate's numbers come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.oracle.rounding import UNITS, Unit, rounded
from numpy_impl.functional import GELU_CUBIC, SQRT_2_OVER_PI

Vjp = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Operation:
    """A right operation of the reference: `data` of its parents, result, vjp, the model's fill."""

    data: tuple[np.ndarray, ...]
    out: np.ndarray
    vjp: Vjp
    mask_value: float


Mistake = Callable[[Operation], tuple[np.ndarray, Vjp]]


@dataclass(frozen=True)
class Hypothesis:
    """One explanation: by role of the operation, what happens there instead.

    More than one role means that all of these operations of one block are concerned. {d} in the
    description stands for the width of the queries.
    """

    description: str
    mistakes: dict[str, Mistake]

    def text(self, heads: bool) -> str:
        """The description for a model with heads, D wide, or for one without."""
        return self.description.replace("{d}", "D" if heads else "E")


HYPOTHESES: list[Hypothesis] = []


def mistake(
    role: str, description: str, table: list[Hypothesis] = HYPOTHESES
) -> Callable[[Mistake], Mistake]:
    """Enter a mistake in operations of this role into the table."""

    def entered(function: Mistake) -> Mistake:
        table.append(Hypothesis(description, {role: function}))
        return function

    return entered


# --- Embeddings


def _by_occurrence(op: Operation, reverse: bool) -> tuple[np.ndarray, Vjp]:
    table, ids = op.data

    def vjp(g: np.ndarray) -> tuple[np.ndarray, None]:
        step = -1 if reverse else 1
        d = np.zeros_like(table)
        d[ids.reshape(-1)[::step]] = g.reshape(-1, g.shape[-1])[::step]
        return d, None

    return op.out, vjp


@mistake("tokens", "embedding: of each token only the last occurrence counts (= in place of +=)")
def _last_occurrence(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _by_occurrence(op, reverse=False)


@mistake("tokens", "embedding: of each token only the first occurrence counts")
def _first_occurrence(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _by_occurrence(op, reverse=True)


@mistake("tokens", "embedding: the mean over a token's occurrences in place of their sum")
def _mean_of_occurrences(op: Operation) -> tuple[np.ndarray, Vjp]:
    table, ids = op.data
    count = np.maximum(np.bincount(ids.reshape(-1), minlength=len(table)), 1)
    return op.out, lambda g: (op.vjp(g)[0] / count[:, None], None)


def _moved(op: Operation, by: int) -> tuple[np.ndarray, Vjp]:
    table, ids = op.data
    places = (ids + by) % len(table)

    def vjp(g: np.ndarray) -> tuple[np.ndarray, None]:
        d = np.zeros_like(table)
        np.add.at(d, places, g)
        return d, None

    return table[places], vjp


@mistake("tokens", "embedding: ids are counted from 1, so each token takes the row before")
def _rows_before(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _moved(op, -1)


@mistake("tokens", "embedding: each token takes the row after its own")
def _rows_after(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _moved(op, 1)


@mistake("positions", "positions: every position is the first")
def _positions_zero(op: Operation) -> tuple[np.ndarray, Vjp]:
    table, ids = op.data
    return table[0 * ids], lambda g: (np.where(np.arange(len(table))[:, None], 0.0, g.sum(0)), None)


@mistake("positions", "positions: counted from 1, not from 0 (shifted by one along T)")
def _positions_late(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _moved(op, 1)


@mistake("positions", "positions: shifted by one along T, the first takes the last row")
def _positions_early(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _moved(op, -1)


@mistake("add", "embedding: the gradient of positions is that of the first batch element")
def _positions_first(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (g, g[0])


@mistake("add", "embedding: the gradient of positions is the mean over the batch, not the sum")
def _positions_mean(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (g, g.mean(axis=0))


@mistake("add", "embedding: positions are not added")
def _positions_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    return np.array(op.data[0]), lambda g: (g, np.zeros_like(op.data[1]))


@mistake("add", "embedding: tokens are multiplied by sqrt(E), before positions are added")
def _tokens_scaled(op: Operation) -> tuple[np.ndarray, Vjp]:
    tokens, positions = op.data
    scale = math.sqrt(tokens.shape[-1])
    return tokens * scale + positions, lambda g: (g * scale, g)


# --- Attention: scores, scale, context


@mistake("div", "attention: scores are not divided by sqrt({d})")
def _scale_forgotten(op: Operation) -> tuple[np.ndarray, Vjp]:
    return np.array(op.data[0]), lambda g: (g, None)


@mistake("div", "attention: the vjp of the scores lacks 1/sqrt({d})")
def _scale_forgotten_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (g, None)


@mistake("div", "attention: scores are divided by {d} in place of sqrt({d})")
def _scale_squared(op: Operation) -> tuple[np.ndarray, Vjp]:
    scale = op.data[1]
    return op.out / scale, lambda g: (g / scale / scale, None)


@mistake("div", "attention: scores are divided by sqrt(T) in place of sqrt({d})")
def _scale_by_length(op: Operation) -> tuple[np.ndarray, Vjp]:
    scale = math.sqrt(op.out.shape[-1])
    return op.data[0] / scale, lambda g: (g / scale, None)


@mistake("div", "attention: scores are multiplied by sqrt({d})")
def _scale_inverted(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, scale = op.data
    return x * scale, lambda g: (g * scale, None)


@mistake("div", "attention: the vjp of the scores divides by {d} in place of sqrt({d})")
def _scale_twice_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    scale = op.data[1]
    return op.out, lambda g: (g / scale / scale, None)


@mistake("transpose", "attention: the key is reshaped, not transposed")
def _reshaped(op: Operation) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    return x.reshape(op.out.shape), lambda g: (g.reshape(x.shape),)


@mistake("transpose", "attention: the gradient of the key is reshaped, not transposed")
def _reshaped_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (g.reshape(op.data[0].shape),)


@mistake("scores", "attention: the gradient of the key uses the scores' gradient untransposed")
def _scores_untransposed(op: Operation) -> tuple[np.ndarray, Vjp]:
    q = op.data[0]
    return op.out, lambda g: (op.vjp(g)[0], q.swapaxes(-1, -2) @ g.swapaxes(-1, -2))


@mistake("context", "attention: the gradient of the value uses the weights untransposed")
def _context_untransposed(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (op.vjp(g)[0], op.data[0] @ g)


PATHS = {"query": ("scores", 0), "key": ("transpose", 0), "value": ("context", 1)}


def without(i: int) -> Mistake:
    """No gradient for the parent i."""

    def dropped(op: Operation) -> tuple[np.ndarray, Vjp]:
        return op.out, lambda g: tuple(d if k != i else None for k, d in enumerate(op.vjp(g)))

    return dropped


def _paths() -> Iterator[Hypothesis]:
    for path, (role, i) in PATHS.items():
        others = {r: without(k) for name, (r, k) in PATHS.items() if name != path}
        yield Hypothesis(
            f"attention: the path of x as {path} is missing in its gradient", {role: without(i)}
        )
        yield Hypothesis(
            f"attention: the gradient of x is that as {path} alone (overwritten, not accumulated)",
            others,
        )


HYPOTHESES.extend(_paths())


# --- Mask


def masked(op: Operation, keep: np.ndarray, fill: float) -> tuple[np.ndarray, Vjp]:
    return np.where(keep, op.data[0], fill), lambda g: (np.where(keep, g, 0.0),)


def triangle(op: Operation, diagonal: int) -> np.ndarray:
    return np.tri(*op.out.shape[-2:], diagonal, dtype=bool)


@mistake("tril", "mask: the upper triangle is kept, not the lower (triu for tril)")
def _mask_upper(op: Operation) -> tuple[np.ndarray, Vjp]:
    return masked(op, triangle(op, 0).T, op.mask_value)


@mistake("tril", "mask: off by one, each position also sees the next (diagonal=1)")
def _mask_late(op: Operation) -> tuple[np.ndarray, Vjp]:
    return masked(op, triangle(op, 1), op.mask_value)


@mistake("tril", "mask: strict, no position sees itself (diagonal=-1)")
def _mask_strict(op: Operation) -> tuple[np.ndarray, Vjp]:
    return masked(op, triangle(op, -1), op.mask_value)


@mistake("tril", "mask: filled with 0, so the future keeps a weight")
def _mask_zero(op: Operation) -> tuple[np.ndarray, Vjp]:
    return masked(op, triangle(op, 0), 0.0)


@mistake("tril", "mask: filled with -10, so the future keeps a weight")
def _mask_minus_ten(op: Operation) -> tuple[np.ndarray, Vjp]:
    return masked(op, triangle(op, 0), -10.0)


@mistake("tril", "mask: not applied")
def _mask_absent(op: Operation) -> tuple[np.ndarray, Vjp]:
    return np.array(op.data[0]), lambda g: (g,)


@mistake("tril", "mask: applied to the first batch element only")
def _mask_first(op: Operation) -> tuple[np.ndarray, Vjp]:
    keep = np.ones(op.out.shape, bool)
    keep[0] = triangle(op, 0)
    return masked(op, keep, op.mask_value)


# --- Softmax


@mistake("softmax", "softmax: the vjp lacks the sum over the row")
def _softmax_without_sum(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (op.out * g,)


@mistake("softmax", "softmax: the vjp sums over the wrong axis")
def _softmax_sum_axis(op: Operation) -> tuple[np.ndarray, Vjp]:
    p = op.out
    return p, lambda g: (p * (g - (g * p).sum(axis=-2, keepdims=True)),)


@mistake("softmax", "softmax: the vjp sums g and not g p over the row")
def _softmax_sum_unweighted(op: Operation) -> tuple[np.ndarray, Vjp]:
    p = op.out
    return p, lambda g: (p * (g - g.sum(axis=-1, keepdims=True)),)


@mistake("softmax", "softmax: the vjp has the diagonal of the Jacobian alone, p (1 - p) g")
def _softmax_diagonal(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: (op.out * (1.0 - op.out) * g,)


@mistake("softmax", "softmax: columns are normalised, not rows")
def _softmax_columns(op: Operation) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-2, keepdims=True)
    return p, lambda g: (p * (g - (g * p).sum(axis=-1, keepdims=True)),)


def softmax_over(op: Operation, axis: int) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    p = e / e.sum(axis=axis, keepdims=True)
    return p, lambda g: (p * (g - (g * p).sum(axis=axis, keepdims=True)),)


@mistake("softmax", "softmax: taken over the wrong axis")
def _softmax_axis(op: Operation) -> tuple[np.ndarray, Vjp]:
    return softmax_over(op, -2)


# --- GELU


def _gelu(op: Operation, cubic: float, cubic_backward: float) -> tuple[np.ndarray, Vjp]:
    """tanh form with its cubic term in the forward pass and in the derivative changed."""
    x = op.data[0]
    t = np.tanh(SQRT_2_OVER_PI * (x + cubic * x * x * x))
    slope = SQRT_2_OVER_PI * (1.0 + cubic_backward * x * x)
    derivative = 0.5 * (1.0 + t + x * (1.0 - t * t) * slope)
    return 0.5 * x * (1.0 + t), lambda g: (g * derivative,)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.reshape([math.erf(v) for v in x.reshape(-1)], x.shape)


def _normal(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Phi(x) and the derivative of x Phi(x)."""
    phi = 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))
    return phi, phi + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


@mistake("gelu", "gelu: the erf form in place of the tanh form")
def _gelu_erf(op: Operation) -> tuple[np.ndarray, Vjp]:
    phi, derivative = _normal(op.data[0])
    return op.data[0] * phi, lambda g: (g * derivative,)


@mistake("gelu", "gelu: the derivative is that of the erf form")
def _gelu_erf_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    derivative = _normal(op.data[0])[1]
    return op.out, lambda g: (g * derivative,)


@mistake("gelu", "gelu: the derivative lacks the cubic term")
def _gelu_without_cubic(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _gelu(op, GELU_CUBIC, 0.0)


@mistake("gelu", "gelu: the derivative of the cubic term lacks its factor 3")
def _gelu_without_three(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _gelu(op, GELU_CUBIC, GELU_CUBIC)


@mistake("gelu", "gelu: the cubic term is missing")
def _gelu_linear(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _gelu(op, 0.0, 0.0)


@mistake("gelu", "gelu: the derivative lacks the term with 1 - tanh^2")
def _gelu_first_term(op: Operation) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    t = np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
    return op.out, lambda g: (g * 0.5 * (1.0 + t),)


@mistake("gelu", "gelu: the derivative of tanh is 1 - tanh, not 1 - tanh^2")
def _gelu_tanh(op: Operation) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    t = np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
    slope = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x)
    return op.out, lambda g: (g * 0.5 * (1.0 + t + x * (1.0 - t) * slope),)


# --- Linear


def _bias(op: Operation) -> np.ndarray | float:
    """The bias, of the tied output's 0."""
    return op.data[2] if len(op.data) > 2 else 0.0


def with_gradient(op: Operation, i: int, gradient: Callable) -> tuple[np.ndarray, Vjp]:
    """The gradient of the parent i replaced by a function of the cotangent."""
    return op.out, lambda g: tuple(d if k != i else gradient(g) for k, d in enumerate(op.vjp(g)))


@mistake("linear", "linear: the bias gradient is the mean over all rows, not the sum")
def _bias_mean(op: Operation) -> tuple[np.ndarray, Vjp]:
    return with_gradient(op, 2, lambda g: g.reshape(-1, g.shape[-1]).mean(axis=0))


@mistake("linear", "linear: the bias gradient is the mean over the batch, not the sum")
def _bias_batch_mean(op: Operation) -> tuple[np.ndarray, Vjp]:
    return with_gradient(op, 2, lambda g: g.reshape(-1, g.shape[-1]).sum(axis=0) / len(g))


@mistake("linear", "linear: the bias gradient is that of the first batch element")
def _bias_first(op: Operation) -> tuple[np.ndarray, Vjp]:
    return with_gradient(op, 2, lambda g: g[0].reshape(-1, g.shape[-1]).sum(axis=0))


@mistake("linear", "linear: the bias gradient is that of the first token")
def _bias_first_row(op: Operation) -> tuple[np.ndarray, Vjp]:
    return with_gradient(op, 2, lambda g: g.reshape(-1, g.shape[-1])[0])


@mistake("linear", "linear: the weight gradient is that of the first batch element")
def _weight_first(op: Operation) -> tuple[np.ndarray, Vjp]:
    return with_gradient(op, 1, lambda g: g[0].T @ op.data[0][0])


@mistake("linear", "linear: the bias is not added")
def _bias_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out - _bias(op), op.vjp


@mistake("linear", "linear: there is none, x goes on as it is")
def _linear_left_out(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, weight = op.data[:2]
    if weight.shape[0] != weight.shape[1]:
        raise ValueError("x does not go on where another width is needed")
    return np.array(x), lambda g: (g, *(np.zeros_like(p) for p in op.data[1:]))


@mistake("linear", "linear: the memory of the weight, (out, in), is read as (in, out)")
def _weight_transposed(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, weight = op.data[:2]
    rows = x.reshape(-1, x.shape[-1])
    read = weight.reshape(weight.shape[::-1])  # of a square one the transpose

    def vjp(g: np.ndarray) -> Any:
        g2 = g.reshape(-1, g.shape[-1])
        found = (g2 @ read.T).reshape(x.shape), (rows.T @ g2).reshape(weight.shape)
        return (*found, g2.sum(axis=0))[: len(op.data)]

    return x @ read + _bias(op), vjp


@mistake("linear", "linear: the input's gradient reads the weight, (out, in), as (in, out)")
def _weight_transposed_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    weight = op.data[1]
    return with_gradient(op, 0, lambda g: g @ weight.reshape(weight.shape[::-1]).T)


# --- Cross-entropy


@mistake("cross_entropy", "loss: the sum over all tokens, not the mean")
def _loss_sum(op: Operation) -> tuple[np.ndarray, Vjp]:
    n = op.data[1].size
    return op.out * n, lambda g: op.vjp(g * n)


@mistake("cross_entropy", "loss: divided by B, not by B*T")
def _loss_by_batch(op: Operation) -> tuple[np.ndarray, Vjp]:
    length = op.data[1].size // len(op.data[1])
    return op.out * length, lambda g: op.vjp(g * length)


@mistake("cross_entropy", "loss: the gradient lacks 1/(B*T)")
def _loss_sum_backward(op: Operation) -> tuple[np.ndarray, Vjp]:
    return op.out, lambda g: op.vjp(g * op.data[1].size)


@mistake("cross_entropy", "loss: the gradient lacks the minus one at the target")
def _loss_without_one(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, targets = op.data

    def vjp(g: np.ndarray) -> tuple[np.ndarray, None]:
        onehot = np.zeros(x.shape)
        np.put_along_axis(onehot, targets[..., None], 1.0, axis=-1)
        return op.vjp(g)[0] + onehot * g / targets.size, None

    return op.out, vjp


def _loss_of(op: Operation, targets: np.ndarray) -> tuple[np.ndarray, Vjp]:
    x = op.data[0]
    z = x - x.max(axis=-1, keepdims=True)
    e = np.exp(z)
    total = e.sum(axis=-1, keepdims=True)
    onehot = np.zeros(x.shape)
    np.put_along_axis(onehot, targets[..., None], 1.0, axis=-1)
    loss = (np.log(total[..., 0]) - (z * onehot).sum(axis=-1)).mean()
    return loss, lambda g: ((e / total - onehot) * g / targets.size, None)


@mistake("cross_entropy", "loss: targets are shifted by one along T (each one place too early)")
def _targets_early(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _loss_of(op, np.roll(op.data[1], -1, axis=-1))


@mistake("cross_entropy", "loss: targets are shifted by one along T (each one place too late)")
def _targets_late(op: Operation) -> tuple[np.ndarray, Vjp]:
    return _loss_of(op, np.roll(op.data[1], 1, axis=-1))


@mistake("cross_entropy", "loss: probabilities are clipped at 1e-10 (another loss, same gradient)")
def _loss_clipped(op: Operation) -> tuple[np.ndarray, Vjp]:
    x, targets = op.data
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = np.take_along_axis(e / e.sum(axis=-1, keepdims=True), targets[..., None], axis=-1)
    return -np.log(np.clip(p, 1e-10, 1.0)).mean(), op.vjp


# --- Low precision


def _product(role: str, unit: Unit) -> Mistake:
    """A matrix product whose operands are rounded first, forward and backward."""

    def low(x: np.ndarray) -> np.ndarray:
        return rounded(x, unit)

    def linear(op: Operation) -> tuple[np.ndarray, Vjp]:
        x, weight = op.data[:2]
        rows = low(x).reshape(-1, x.shape[-1])

        def vjp(g: np.ndarray) -> Any:
            g2 = low(g).reshape(-1, g.shape[-1])
            dx = (g2 @ low(weight)).reshape(x.shape)
            return (dx, g2.T @ rows, g.reshape(g2.shape).sum(axis=0))[: len(op.data)]

        return low(x) @ low(weight).T + _bias(op), vjp

    def matmul(op: Operation) -> tuple[np.ndarray, Vjp]:
        a, b = map(low, op.data)
        return a @ b, lambda g: (low(g) @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ low(g))

    return linear if role == "linear" else matmul


HYPOTHESES.extend(
    Hypothesis(
        f"{role}: operands of the matrix product are rounded to {name}",
        {role: _product(role, UNITS[name])},
    )
    for role in ("linear", "scores", "context")
    for name in ("tf32", "bfloat16", "float16")
)
