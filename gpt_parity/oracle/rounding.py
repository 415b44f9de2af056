"""How much each operation rounds: the one table from which every tolerance follows.

A row gives, for one operation of `numpy_impl`, its internal magnitude m: the size of the numbers
that are rounded on the way to the result, element by element. An honest implementation with unit
roundoff u and underflow unit eta is off by a small multiple of  u m + eta,  however much cancels
afterwards. m = 0 means that nothing is rounded and results are compared bitwise.

- A priori (one operation): `bound` below, for which Higham (Accuracy and Stability of Numerical
  Algorithms, 2nd ed., ch. 3) gives the deterministic and Higham & Mary (SIAM J. Sci. Comput. 2019)
  the probabilistic form, sqrt(K) in place of K for a reduction of length K.
- Whole model: `MonteCarloArithmetic` perturbs every result by (u m + eta) U(-1, 1) (Parker 1997).

A new operation is one function in each twin, one row here and one row in the tests' registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy_impl.functional import GELU_CUBIC, SQRT_2_OVER_PI
from numpy_impl.tape import Observer, unbroadcast

# Multiple of u m + eta that one operation may be off; the worst clean ratio measured over the
# suite's operations, structures and both backends is about a third of it.
OPERATION_FACTOR = 8.0

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Unit:
    """A floating-point format: unit roundoff u and the smallest normal number eta."""

    name: str
    u: float
    eta: float


FLOAT32 = Unit("float32", 2.0**-24, 2.0**-126)
FLOAT64 = Unit("float64", 2.0**-53, 2.0**-1022)
UNITS = {unit.name: unit for unit in (FLOAT32, FLOAT64)}


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
    """Internal magnitudes (None: exact) and lengths of the longest reduction, of one operation."""

    forward: Magnitude
    backward: Magnitude
    forward_length: Callable[[Call], int] = lambda c: 1
    backward_length: Callable[[Call], int] = lambda c: 1


def _exact(c: Call) -> None:
    return None


def _result(c: Call) -> np.ndarray:
    return np.abs(c.out)


def _matmul_backward(c: Call) -> np.ndarray:
    a, b = np.abs(c.data[0]), np.abs(c.data[1])
    g = np.abs(c.upstream)
    return g @ b.swapaxes(-1, -2) if c.i == 0 else a.swapaxes(-1, -2) @ g


def _rows(x: np.ndarray) -> np.ndarray:
    return np.abs(x).reshape(-1, x.shape[-1])


def _linear_forward(c: Call) -> np.ndarray:
    x, weight, bias = c.data
    return np.abs(x) @ np.abs(weight).T + np.abs(bias)


def _linear_backward(c: Call) -> np.ndarray:
    x, weight, _ = c.data
    if c.i == 0:
        return np.abs(c.upstream) @ np.abs(weight)
    return _rows(c.upstream).T @ _rows(x) if c.i == 1 else _rows(c.upstream).sum(axis=0)


def _linear_backward_length(c: Call) -> int:
    out_features = c.data[1].shape[0]
    return out_features if c.i == 0 else c.upstream.size // max(1, out_features)


def _embedding_backward(c: Call) -> np.ndarray:
    table, ids = c.data
    m = np.zeros(table.shape)
    np.add.at(m, ids.reshape(-1), _rows(c.upstream))
    once = np.bincount(ids.reshape(-1), minlength=len(table)) < 2  # one occurrence is a copy
    m[once] = 0.0
    return m


def _embedding_backward_length(c: Call) -> int:
    return int(np.bincount(c.data[1].reshape(-1)).max())


def _softmax_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and the |x_j - max| that matters (0 where the probability is exactly 0)."""
    z = x - x.max(axis=-1, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=-1, keepdims=True), np.where(e > 0.0, np.abs(z), 0.0)


def _softmax_forward(c: Call) -> np.ndarray:
    p, z = _softmax_parts(c.data[0])
    # exp turns the rounding of x - max into a relative error, in the term and in the sum.
    return p * (2.0 + z + (p * z).sum(axis=-1, keepdims=True))


def _softmax_backward(c: Call) -> np.ndarray:
    p, z = _softmax_parts(c.data[0])
    g = np.abs(c.upstream)
    slack = 1.0 + z + (p * z).sum(axis=-1, keepdims=True)
    return p * (g * slack + (g * p * slack).sum(axis=-1, keepdims=True))


def _cross_entropy_forward(c: Call) -> np.ndarray:
    x = c.data[0].reshape(-1, c.data[0].shape[-1])
    targets = c.data[1].reshape(-1)
    p, z = _softmax_parts(x)
    lse = np.log(np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1))
    z_target = np.abs(x[np.arange(len(x)), targets] - x.max(axis=-1))
    return np.asarray((z_target + lse + (p * z).sum(axis=-1) + 1.0).mean())


def _cross_entropy_backward(c: Call) -> np.ndarray:
    x, targets = c.data
    p, z = _softmax_parts(x.reshape(-1, x.shape[-1]))
    m = p * (1.0 + z + (p * z).sum(axis=-1, keepdims=True))
    m[np.arange(len(m)), targets.reshape(-1)] += 1.0
    return (m * np.abs(c.upstream) / len(m)).reshape(x.shape)


def _gelu_parts(x: np.ndarray, u: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t = tanh(v), dv/dx, and the part of a unit roundoff by which 1 - |t| may be off.

    Where tanh is exactly +-1 in the format judged, what is lost is 1 - |t| itself.
    """
    c = np.clip(x, -20.0, 20.0)
    v = SQRT_2_OVER_PI * c * (1.0 + GELU_CUBIC * c * c)
    lost = 2.0 / (1.0 + np.exp(np.minimum(2.0 * np.abs(v), 700.0)))
    dv = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * c * c)
    return np.tanh(v), dv, np.minimum(1.0, 16.0 * lost / u)


def _gelu_forward(c: Call) -> np.ndarray:
    t, _, slack = _gelu_parts(c.data[0], c.unit.u)
    return np.abs(c.data[0]) * (np.maximum(1.0 + t, 0.0) + slack * np.abs(t)) / 2.0


def _gelu_backward(c: Call) -> np.ndarray:
    x = c.data[0]
    t, dv, slack = _gelu_parts(x, c.unit.u)
    inner = np.minimum(np.abs(x), 20.0) * dv * (1.0 + t * t) * slack
    return np.abs(c.upstream) * (1.0 + slack * np.abs(t) + np.maximum(t, 0.0) + inner) / 2.0


def _product_length(c: Call) -> int:
    return c.data[0].shape[-1]


def _matmul_backward_length(c: Call) -> int:
    return c.data[1].shape[-1] if c.i == 0 else c.data[0].shape[-2]


def _last_axis(c: Call) -> int:
    return c.data[0].shape[-1]


TABLE: dict[str, Row] = {
    "add": Row(_result, _exact),
    "sub": Row(_result, _exact),
    "neg": Row(_exact, _exact),
    "mul": Row(_result, _result),
    "div": Row(_result, lambda c: (1.0 + 2.0 * c.i) * np.abs(c.out)),
    "matmul": Row(
        lambda c: np.abs(c.data[0]) @ np.abs(c.data[1]),
        _matmul_backward, _product_length, _matmul_backward_length,
    ),
    "transpose": Row(_exact, _exact),
    "reshape": Row(_exact, _exact),
    "sum": Row(
        lambda c: np.abs(c.data[0]).sum(axis=c.attributes["axis"]).reshape(c.out.shape),
        _exact, lambda c: c.data[0].size // c.out.size,
    ),
    "tril": Row(_exact, _exact),
    "mask": Row(_exact, _exact),
    "linear": Row(_linear_forward, _linear_backward, _product_length, _linear_backward_length),
    "embedding": Row(_exact, _embedding_backward, backward_length=_embedding_backward_length),
    "softmax": Row(_softmax_forward, _softmax_backward, _last_axis, _last_axis),
    "gelu": Row(_gelu_forward, _gelu_backward),
    "cross_entropy": Row(
        _cross_entropy_forward, _cross_entropy_backward,
        lambda c: c.data[1].size + c.data[0].shape[-1], _last_axis,
    ),
    # The tape's own arithmetic (backward only).
    "unbroadcast": Row(
        _exact, lambda c: unbroadcast(np.abs(c.upstream), c.out.shape),
        backward_length=lambda c: c.upstream.size // max(1, c.out.size),
    ),
    "accumulate": Row(_exact, _result),
}  # fmt: skip


def row(op: str) -> Row:
    """The table's row for `op`; ValueError where it has none."""
    if op not in TABLE:
        raise ValueError(f"rounding: no row for operation {op!r}, needed one in the table")
    return TABLE[op]


def bound(m: np.ndarray | None, length: int, unit: Unit) -> np.ndarray | float:
    """A priori bound of |computed - exact|, per element: 8 sqrt(K) (u m + eta), 0 where m is 0."""
    if m is None:
        return 0.0
    factor = OPERATION_FACTOR * math.sqrt(length)
    return np.where(m > 0.0, factor * (unit.u * m + unit.eta), 0.0)


class MonteCarloArithmetic(Observer):
    """Perturbs every forward and backward result by (u m + eta) U(-1, 1), in float64.

    Where m is exactly 0 nothing is rounded and nothing is perturbed, so exact zeros stay.
    """

    def __init__(self, unit: Unit, rng: np.random.Generator) -> None:
        self.unit, self.rng = unit, rng

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> np.ndarray | None:
        data = tuple(p.data for p in parents)
        m = row(op).forward(Call(data, out.data, self.unit, out.attributes))
        return self._perturbed(out.data, m)

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Any, ...]
    ) -> np.ndarray | None:
        data = tuple(p.data for p in parents)
        return self._perturbed(grad, row(op).backward(Call(data, grad, self.unit, {}, upstream, i)))

    def _perturbed(self, result: np.ndarray, m: np.ndarray | None) -> np.ndarray | None:
        if m is None:
            return None
        noise = 2.0 * self.rng.random(np.shape(result), dtype=np.float32) - 1.0
        return np.asarray(result + (self.unit.u * m + self.unit.eta * (m > 0.0)) * noise)
