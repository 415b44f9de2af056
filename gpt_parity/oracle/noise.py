"""Monte Carlo arithmetic: every result of a run perturbed as rounding may perturb it (Parker 1997).

The sizes of the perturbations are those of the table in `rounding.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from gpt_parity.oracle.rounding import Call, Unit, row, stored
from numpy_impl.tape import Observer

# Values of one result that agree to this many units share half of their noise (a power of two).
EQUAL_UNITS = 1024

# Results below this part of m have cancelled: what noise in the operands leaves of their equality
# is relative to m. Magnitudes that agree to the second part are equal, in coarse formats also
# results.
CANCELLED, SAME_MAGNITUDE = 2.0**-6, 2.0**-10


class MonteCarloArithmetic(Observer):
    """Perturbs every forward and backward result by (u m + eta) (U + V), in float64.

    U and V are uniform in [-1, 1). U is drawn for each element. V is a function of the element's
    value, so within one result values that agree to about 1000 units share it: rounding is a
    function of the operands, the rows of repeated tokens err alike in a real run, and their errors
    add up instead of averaging out. Two random halves of the rows, and of the columns, have a
    function each, since matrix products sum their last rows and columns in an order of their own.
    Where results have cancelled, V is a function of m and of the result in units of it: the mean of
    a constant row is wrong by one number in all columns, with a bias behind it too, and a sum over
    tied logits by the same in all rows.
    Where m is exactly 0 nothing is rounded and nothing is perturbed, so exact zeros stay.
    """

    def __init__(self, unit: Unit, rng: np.random.Generator) -> None:
        self.unit = unit
        self.rng = rng
        # Bits of a float64 number that do not count where values agree to EQUAL_UNITS.
        self.drop = np.uint64(52 + round(math.log2(EQUAL_UNITS * 2.0 * unit.u)))

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> np.ndarray | None:
        data = tuple(p.data for p in parents)
        call = Call(data, out.data, self.unit, out.attributes)
        return self.perturbed(out.data, self._magnitude(op, row(op).forward(call), call))

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Any, ...]
    ) -> np.ndarray | None:
        data, found = tuple(p.data for p in parents), row(op)
        call = Call(data, grad, self.unit, {}, upstream, i)
        m = self._magnitude(op, found.backward(call), call)
        return self.perturbed(grad, m, data[i] if found.derivative else None)

    def _magnitude(self, op: str, m: np.ndarray | None, call: Call) -> np.ndarray | None:
        return stored(op, m, call) if self.unit.stored else m

    def perturbed(
        self, result: np.ndarray, m: np.ndarray | None, operand: np.ndarray | None = None
    ) -> np.ndarray | None:
        """`result` with the noise of one rounding of magnitude m, or None where it is exact.

        Shared noise follows the values of the result or, relative to it, those of the operand.
        """
        if m is None:
            return None
        amplitude = np.asarray(self.unit.u * m)
        np.add(amplitude, self.unit.eta, out=amplitude, where=m > 0.0)  # u m may underflow
        if operand is None:
            cancelled = np.abs(result) < CANCELLED * m
            key = result
            if cancelled.any():
                key = np.where(cancelled, self._relative_to(m, result), result)
            noise = self._shared_uniform(key)
        else:
            noise = np.copysign(1.0, result)
            noise *= self._shared_uniform(operand)
        noise += self._uniform(noise.shape)
        noise *= amplitude
        noise += result
        return noise

    def _relative_to(self, m: np.ndarray, result: np.ndarray) -> np.ndarray:
        """One number for all results that agree, and whose magnitudes m do, to so many units of m.

        Of m = 0 any; noise has no part in it there.
        """
        leading = _leading_digits(m)
        step = min(EQUAL_UNITS * self.unit.u, SAME_MAGNITUDE) * leading
        places = np.rint(result / np.where(step > 0.0, step, 1.0))
        return leading * (1.0 + 2.0 * places)  # never 0

    def _shared_uniform(self, x: np.ndarray) -> np.ndarray:
        """Numbers in [-1, 1) that depend on the leading bits of x and on a random odd key.

        Multiplicative hashing (Dietzfelbinger et al., Journal of Algorithms 1997).
        """
        columns = x.shape[-1] if x.ndim else 1
        bits = np.ascontiguousarray(x, dtype=np.float64).reshape(-1, columns).view(np.uint64)
        bits = bits >> self.drop
        bits *= self._halves(len(bits), 0)[:, None] + self._halves(columns, 1)
        return (bits.view(np.int64) * 2.0**-63).reshape(x.shape)

    def _halves(self, count: int, parity: int) -> np.ndarray:
        """One of two random keys, even or odd, for each of `count` rows or columns."""
        keys = self.rng.integers(2**63, size=2, dtype=np.uint64) * np.uint64(2) + np.uint64(parity)
        return keys[self.rng.integers(2, size=count)]

    def _uniform(self, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers in [-1, 1): a random stretch of one long sample, since drawing is slow."""
        size, sample = math.prod(shape), _sample()
        if 2 * size > sample.size:
            return self.rng.uniform(-1.0, 1.0, shape)
        start = self.rng.bit_generator.random_raw() % (sample.size - size)
        return sample[start : start + size].reshape(shape)


def _leading_digits(m: np.ndarray) -> np.ndarray:
    """m cut off where SAME_MAGNITUDE parts end."""
    significand, exponent = np.frexp(m)
    return np.ldexp(np.floor(significand * (2.0 / SAME_MAGNITUDE)), exponent)


@functools.cache
def _sample() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1.0, 1.0, 2**18)
