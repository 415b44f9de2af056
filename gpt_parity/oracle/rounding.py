"""How much each operation rounds: the one table from which every tolerance follows.

A row gives, for one operation of `numpy_impl`, its internal magnitude m: the size of the numbers
that are rounded on the way to the result, element by element. An honest implementation with unit
roundoff u and underflow unit eta is off by a small multiple of  u m + eta,  however much cancels
afterwards. m = 0 means that nothing is rounded and results are compared bitwise. A reduction of
length K counts sqrt(K) times the sum of magnitudes: the deterministic factor is K (Higham 2002,
Accuracy and Stability of Numerical Algorithms, ch. 3), the probabilistic one sqrt(K) (Higham &
Mary, SIAM J. Sci. Comput. 2019). Without it, sums over a thousand rows raise false alarms. Terms
that are equal do not average out, and count as the deterministic factor has it.

- A priori (one operation): `bound` below.
- Whole model: `noise.py` perturbs every result by a random u m + eta.

A new operation is one function in each twin, one row here and one row in the tests' registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy_impl.functional import GELU_CUBIC, LAYER_NORM_EPS, SQRT_2_OVER_PI
from numpy_impl.tape import unbroadcast

# Multiple of u m + eta that one operation may be off; the worst clean ratio measured over the
# suite's operations, structures and both backends is about a third of it.
OPERATION_FACTOR = 8.0

# Sums of more rows than this are searched for equal ones.
SHORT_SUM = 64

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Unit:
    """A floating-point format: unit roundoff u and underflow unit eta.

    eta is the smallest normal number, so that formats may flush to zero; of float16, whose normal
    numbers end early, it is half the smallest subnormal one. Formats that are only `stored` are
    computed with in float32, and rounded once at the end; tf32 is the format of the operands of
    matrix products alone.
    """

    name: str
    u: float
    eta: float
    stored: bool = False

    @property
    def digits(self) -> int:
        """Bits of the significand, the leading one counted: u = 2^-digits."""
        return -round(math.log2(self.u))


FLOAT32 = Unit("float32", 2.0**-24, 2.0**-126)
FLOAT64 = Unit("float64", 2.0**-53, 2.0**-1022)
TF32 = Unit("tf32", 2.0**-11, 2.0**-126, stored=True)
BFLOAT16 = Unit("bfloat16", 2.0**-8, 2.0**-126, stored=True)
FLOAT16 = Unit("float16", 2.0**-11, 2.0**-25, stored=True)
UNITS = {unit.name: unit for unit in (FLOAT32, FLOAT64, TF32, BFLOAT16, FLOAT16)}


def rounded(x: np.ndarray, unit: Unit) -> np.ndarray:
    """x rounded to nearest, ties to even, in the format of `unit`; float64 holds the result."""
    x = np.asarray(x, dtype=np.float64)
    if unit is FLOAT16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float64)
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, unit.digits)), exponent - unit.digits)


@dataclass(frozen=True)
class Call:
    """One use of an operation: `data` of the parents, `out`, its attributes, the unit judged.

    Backward: `i` is the parent, `upstream` the cotangent and `out` the gradient returned.
    """

    data: Arrays
    out: np.ndarray
    unit: Unit
    attributes: dict[str, Any]
    upstream: Any = None
    i: int = -1


Magnitude = Callable[[Call], "np.ndarray | None"]


@dataclass(frozen=True)
class Row:
    """Internal magnitudes of one operation's result and of its gradients; None: exact.

    `derivative` marks gradients that are the upstream one times a function of the operand, whose
    error is then the same for equal operands, whatever comes from upstream.
    """

    forward: Magnitude
    backward: Magnitude
    derivative: bool = False


def _exact(c: Call) -> None:
    return None


def _result(c: Call) -> np.ndarray:
    return np.abs(c.out)


def _root(length: int) -> float:
    return math.sqrt(length)


def _root_of_rows(*arrays: np.ndarray) -> float:
    """sqrt(sum of c^2) over groups of c equal rows: sqrt(K) if all K differ, K if all are equal.

    Equal terms round alike, one after the other, and their errors add up. In short sums the
    factor of a tolerance covers that.
    """
    length = len(arrays[0])
    if length <= SHORT_SUM:
        return _root(length)
    counts = np.unique(sum(map(_fingerprints, arrays)), return_counts=True)[1]
    return math.sqrt(float(np.square(counts).sum()))


def _root_of_weights(weight: np.ndarray, length: int) -> float:
    """sqrt(K), or K where all weights are one number, as after a constant initialisation."""
    return float(length) if (weight == weight.flat[0]).all() else _root(length)


def _fingerprints(x: np.ndarray) -> np.ndarray:
    """An integer for each row (K, ...), the same where rows agree to ten bits of their largest."""
    rows = x.reshape(len(x), -1)
    exponents = np.frexp(np.abs(rows).max(axis=1))[1]
    digits = np.rint(np.ldexp(rows, 10 - exponents[:, None])).astype(np.int64)
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, rows.shape[1])
    return (digits * keys).sum(axis=1)


def _sum_forward(c: Call) -> np.ndarray:
    m = np.abs(c.data[0]).sum(axis=c.attributes["axis"]).reshape(c.out.shape)
    return _root(c.data[0].size // c.out.size) * m


def _unbroadcast(c: Call) -> np.ndarray:
    return _root(c.upstream.size // c.out.size) * unbroadcast(np.abs(c.upstream), c.out.shape)


def _matmul_forward(c: Call) -> np.ndarray:
    a, b = c.data
    return _root(a.shape[-1]) * (np.abs(a) @ np.abs(b))


def _matmul_backward(c: Call) -> np.ndarray:
    a, b = np.abs(c.data[0]), np.abs(c.data[1])
    g = np.abs(c.upstream)
    if c.i == 0:
        return _root(b.shape[-1]) * (g @ b.swapaxes(-1, -2))
    return _root(a.shape[-2]) * (a.swapaxes(-1, -2) @ g)


def _rows(x: np.ndarray) -> np.ndarray:
    return np.abs(x).reshape(-1, x.shape[-1])


def _linear_forward(c: Call) -> np.ndarray:
    x, weight, *bias = c.data
    # An implementation may start its sum with the bias, which is then rounded K times as well.
    m = np.abs(x) @ np.abs(weight).T + sum(map(np.abs, bias))
    return _root_of_weights(weight, x.shape[-1]) * m


def _linear_backward(c: Call) -> np.ndarray:
    x, weight, *_ = c.data
    if c.i == 0:
        return _root_of_weights(weight, len(weight)) * (np.abs(c.upstream) @ np.abs(weight))
    g = c.upstream.reshape(-1, len(weight))
    if c.i == 1:
        return _root_of_rows(g, x.reshape(-1, x.shape[-1])) * (np.abs(g).T @ _rows(x))
    return _root_of_rows(g) * np.abs(g).sum(axis=0)


def _norm_parts(c: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The normalised rows z, 1/s, the magnitude of z, and how many roundings 1/s carries.

    The mean is a sum of E terms. Its error, and that of x itself, stays in full where x - mean
    cancels (some compute x/s - mean/s), and enters the mean of squares as 2 (x - mean) times it,
    and as its own square: of equal numbers it is all that there is, beside eps, and terms that
    differ by less than a partial sum is rounded by are equal.
    """
    x = c.data[0]
    width, u = x.shape[-1], FLOAT32.u if c.unit.stored else c.unit.u
    size = np.abs(x).mean(axis=-1, keepdims=True)
    d = x - x.mean(axis=-1, keepdims=True)
    square = (d * d).mean(axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(square + LAYER_NORM_EPS)
    equal = (width > SHORT_SUM) & (np.sqrt(square) <= width * u * size)
    root = np.where(equal, float(width), _root(width))
    lost = np.abs(x) + root * size
    terms = (2.0 * np.abs(d) + u * lost) * lost
    in_square = root * square + terms.mean(axis=-1, keepdims=True)
    roundings = 2.0 + 0.5 * in_square * scale * scale
    z = d * scale
    return z, scale, scale * lost + np.abs(z) * roundings, roundings


def _layer_norm_forward(c: Call) -> np.ndarray:
    weight, bias = c.data[1:]
    z, _, m, _ = _norm_parts(c)
    return np.abs(weight) * (np.abs(z) + m) + np.abs(weight * z + bias)


def _layer_norm_backward(c: Call) -> np.ndarray:
    z, scale, m, roundings = _norm_parts(c)
    g = np.abs(c.upstream)
    if c.i > 0:
        rows, upstream = _rows(z), c.upstream.reshape(-1, z.shape[-1])
        if c.i == 1:
            terms = (_rows(g) * (rows + _rows(m))).sum(axis=0)
            return _root_of_rows(upstream, z.reshape(rows.shape)) * terms
        return _root_of_rows(upstream) * _rows(g).sum(axis=0)
    root = _root(z.shape[-1])
    a, signed = g * np.abs(c.data[1]), c.upstream * c.data[1]

    def mean(x: np.ndarray) -> np.ndarray:
        return x.mean(axis=-1, keepdims=True)

    projection = np.abs(mean(signed * z))
    parts = a + mean(a) + np.abs(z) * mean(a * np.abs(z))
    sums = root * mean(a) + np.abs(z) * mean(a * (root * np.abs(z) + m)) + m * projection
    return scale * (roundings * parts + sums)


def _embedding_backward(c: Call) -> np.ndarray:
    table, ids = c.data
    g = c.upstream.reshape(-1, table.shape[-1])
    m = np.zeros(table.shape)
    np.add.at(m, ids.reshape(-1), np.abs(g))
    count = np.bincount(ids.reshape(-1), minlength=len(table))
    equal = _root_of_rows(g) / _root(len(g))
    return m * np.where(count > 1, equal * np.sqrt(count), 0.0)[:, None]  # once is a copy


def _softmax_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities p, and how many roundings each carries.

    exp turns the rounding of x_j - max into a relative error, in the term itself and, weighted by
    p, in the sum; the sum adds sqrt(V) roundings of its own. Where exp gives exactly 0, none count.
    """
    z = x - x.max(axis=-1, keepdims=True)
    e = np.exp(z)
    p = e / e.sum(axis=-1, keepdims=True)
    z = np.where(e > 0.0, np.abs(z), 0.0)
    return p, 1.0 + z + (p * z).sum(axis=-1, keepdims=True) + _root(x.shape[-1])


def _softmax_forward(c: Call) -> np.ndarray:
    p, roundings = _softmax_parts(c.data[0])
    return p * roundings


def _softmax_backward(c: Call) -> np.ndarray:
    p, roundings = _softmax_parts(c.data[0])
    g = np.abs(c.upstream)
    total = (g * p * roundings).sum(axis=-1, keepdims=True)
    return p * (g * roundings + total * (1.0 + roundings))


def _cross_entropy_forward(c: Call) -> np.ndarray:
    x = c.data[0].reshape(-1, c.data[0].shape[-1])
    p, roundings = _softmax_parts(x)
    z_target = np.abs(x[np.arange(len(x)), c.data[1].reshape(-1)] - x.max(axis=-1))
    rows = z_target + np.log(x.shape[-1]) + (p * roundings).sum(axis=-1)
    return np.asarray(_root_of_rows(rows[:, None]) * rows.mean())


def _cross_entropy_backward(c: Call) -> np.ndarray:
    x, targets = c.data
    p, roundings = _softmax_parts(x.reshape(-1, x.shape[-1]))
    m = p * roundings
    m[np.arange(len(m)), targets.reshape(-1)] += 1.0
    return (m * np.abs(c.upstream) / len(m)).reshape(x.shape)


def _gelu_parts(x: np.ndarray, u: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t = tanh(v), dv/dx, and the part of a unit roundoff by which 1 - |t| may be off.

    Where tanh is exactly +-1 in the format judged, what is lost is 1 - |t| itself.
    """
    c = np.clip(x, -20.0, 20.0)
    cubic = GELU_CUBIC * c * c
    v = SQRT_2_OVER_PI * c * (1.0 + cubic)
    e = np.exp(-2.0 * np.abs(v))
    lost = 2.0 * e / (1.0 + e)
    dv = SQRT_2_OVER_PI * (1.0 + 3.0 * cubic)
    return np.copysign(1.0 - lost, v), dv, np.minimum(1.0, 16.0 / u * lost)


def _gelu_forward(c: Call) -> np.ndarray:
    t, _, slack = _gelu_parts(c.data[0], c.unit.u)
    return np.abs(c.data[0]) * (np.maximum(1.0 + t, 0.0) + slack * np.abs(t)) / 2.0


def _gelu_backward(c: Call) -> np.ndarray:
    x = c.data[0]
    t, dv, slack = _gelu_parts(x, c.unit.u)
    inner = np.minimum(np.abs(x), 20.0) * dv * (1.0 + t * t) * slack
    return np.abs(c.upstream) * (1.0 + slack * np.abs(t) + np.maximum(t, 0.0) + inner) / 2.0


TABLE: dict[str, Row] = {
    "add": Row(_result, _exact),
    "sub": Row(_result, _exact),
    "neg": Row(_exact, _exact),
    "mul": Row(_result, _result),
    "div": Row(_result, lambda c: (1.0 + 2.0 * c.i) * np.abs(c.out)),
    "matmul": Row(_matmul_forward, _matmul_backward),
    "transpose": Row(_exact, _exact),
    "reshape": Row(_exact, _exact),
    "unbind": Row(_exact, _exact),
    "sum": Row(_sum_forward, _exact),
    "tril": Row(_exact, _exact),
    "mask": Row(_exact, _exact),
    "linear": Row(_linear_forward, _linear_backward),
    "layer_norm": Row(_layer_norm_forward, _layer_norm_backward),
    "embedding": Row(_exact, _embedding_backward),
    "softmax": Row(_softmax_forward, _softmax_backward, derivative=True),
    "gelu": Row(_gelu_forward, _gelu_backward, derivative=True),
    "cross_entropy": Row(_cross_entropy_forward, _cross_entropy_backward),
    # The tape's own arithmetic (backward only).
    "unbroadcast": Row(_exact, _unbroadcast),
    "accumulate": Row(_exact, _result),
}


def row(op: str) -> Row:
    """The table's row for `op`; ValueError where it has none."""
    if op not in TABLE:
        raise ValueError(f"rounding: no row for operation {op!r}, needed one in the table")
    return TABLE[op]


def stored(op: str, m: np.ndarray | None, c: Call) -> np.ndarray | None:
    """The magnitude, in units of c.unit, of float32 arithmetic on numbers of a coarser format.

    Operands of products are rounded, weights among them; their errors average out over the length
    K of the sum, to m / K. All but tf32 round every result as well, and tables that are looked up.
    """
    whole = c.unit is not TF32
    if m is None:
        return np.abs(c.out) if whole and op == "embedding" and c.i < 0 else None
    return m * (FLOAT32.u / c.unit.u) + (np.abs(c.out) if whole else 0.0) + _operands(op, m, c)


def _operands(op: str, m: np.ndarray, c: Call) -> np.ndarray | float:
    if op not in ("matmul", "linear") or c.i == 2:  # a bias is added in float32
        return 0.0
    if c.i == 1:
        return m / (
            c.upstream.size // c.upstream.shape[-1] if op == "linear" else c.data[0].shape[-2]
        )
    return m / (c.data[0].shape[-1] if c.i < 0 else c.upstream.shape[-1])


def bound(m: np.ndarray | None, unit: Unit) -> np.ndarray | float:
    """A priori bound of |computed - exact|, per element: 8 (u m + eta), 0 where m is 0."""
    if m is None:
        return 0.0
    return np.where(m > 0.0, OPERATION_FACTOR * (unit.u * m + unit.eta), 0.0)
