"""Arguments of operations: sizes and structure are drawn first, a seed last, values follow.

An example holds the description of its arrays and not the arrays, so that a failure prints shapes,
structure and seed. Only the structure "adversarial" draws its values one by one. This file needs
Hypothesis, which is an optional dependency.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import neg
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

Shape = tuple[int, ...]

PRIMES = (2, 3, 5, 7)
STRUCTURES = ("normal", "one-hot", "ties", "all equal", "half zeros", "adversarial")
LAYOUTS = ("contiguous", "transposed", "strided", "reversed")
LARGEST_DRAWN_BY_ELEMENT = 256
FEW = 8  # values that a description shows
INIT_EXPONENT = -6  # 2^-6 is about 0.02, the scale of freshly drawn weights

seeds = st.integers(0, 2**32 - 1)


@st.composite
def sizes(draw: st.DrawFn, count: int, largest: int = 7) -> Shape:
    """`count` axis sizes: any, many of size 1, all equal, or distinct primes.

    A failure of one structure should be one of the same sizes without it: from there it shrinks.
    """
    drawn = draw(st.tuples(*[st.integers(1, largest)] * count))
    structure = draw(st.sampled_from(("any", "many ones", "square", "primes")))
    if structure == "many ones":
        return tuple(3 if 3 * n > 2 * largest else 1 for n in drawn)
    if structure == "square":
        return drawn and (min(drawn),) * count
    if structure == "primes" and min(drawn, default=1) > 1:
        by_size = sorted(range(count), key=drawn.__getitem__)
        return tuple(PRIMES[by_size.index(i)] for i in range(count))
    return drawn


def shapes(smallest: int, largest: int = 3) -> st.SearchStrategy[Shape]:
    """Shapes of `smallest` to `largest` axes (at most 4)."""
    return st.integers(smallest, largest).flatmap(sizes)


def exponents(limit: int) -> st.SearchStrategy[int]:
    """Powers of two for the scale: 1, that of fresh weights, 2^limit, or any up to 2^+-limit."""
    often = st.sampled_from((0, INIT_EXPONENT, limit))
    return st.one_of(often, st.integers(-limit, limit))


def fill(rng: np.random.Generator, shape: Shape, structure: str) -> np.ndarray:
    """Values of order one with the given structure, float64."""
    x = np.asarray(rng.standard_normal(shape))
    if structure == "one-hot" and x.ndim:
        hot = rng.integers(shape[-1], size=(*shape[:-1], 1))
        return np.where(np.arange(shape[-1]) == hot, x, 0.0)
    if structure == "ties":
        return np.asarray(rng.integers(-1, 2, shape), dtype=np.float64)
    if structure == "all equal":
        return np.full(shape, rng.standard_normal())
    if structure == "half zeros":
        return np.asarray(np.where(rng.random(shape) < 0.5, x, 0.0))
    if structure == "squares":
        return x * x
    if structure == "zeros":
        return np.zeros(shape)
    if structure == "masked":
        last = np.arange(x.shape[-1])
        return np.where((rng.random(shape) < 0.5) & (last > 0), -np.inf, x)
    return x


def with_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """The same values in other memory: column-major, every second element, or backwards."""
    if array.ndim == 0 or layout == "contiguous":
        return array
    if layout == "transposed":
        return array.T.copy().T
    if layout == "reversed":
        return array[..., ::-1].copy()[..., ::-1]
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def cotangent(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """A random upstream gradient: all ones would hide every error that cancels in a sum."""
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


@dataclass(frozen=True)
class Operand:
    """A floating argument; `nonzero` replaces zeros by one, as denominators need."""

    shape: Shape
    structure: str = "normal"
    exponent: int = 0
    layout: str = "contiguous"
    nonzero: bool = False
    values: np.ndarray | None = None

    def __str__(self) -> str:
        scale = f" * 2^{self.exponent}" if self.exponent else ""
        few = self.values is not None and self.values.size <= FEW
        return f"{self.shape} {self.values.tolist() if few else self.structure}{scale}"

    def array(self, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        x = fill(rng, self.shape, self.structure) if self.values is None else self.values
        if self.nonzero:
            x = np.where(x == 0.0, 1.0, x)
        x = np.asarray(x * 2.0**self.exponent).astype(dtype)
        return with_layout(x, self.layout)


@dataclass(frozen=True)
class Ids:
    """Integers in 0..size-1: random, few (much repeated), or one id everywhere."""

    shape: Shape
    size: int
    structure: str = "random"
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{self.shape} {self.structure} below {self.size}"

    def array(self, rng: np.random.Generator) -> np.ndarray:
        distinct = {"random": self.size, "repeated": 2, "all the same": 1}[self.structure]
        first = rng.integers(self.size)
        ids = (first + rng.integers(distinct, size=self.shape)) % self.size
        return with_layout(np.asarray(ids), self.layout)


@dataclass(frozen=True)
class Example:
    """Floating operands, then `rest`: plain values, or descriptions of integer arrays."""

    operands: tuple[Operand, ...]
    rest: tuple[Any, ...]
    seed: int

    def arrays(self, dtype: Any) -> list[np.ndarray]:
        """The floating operands; both dtypes start from the same numbers."""
        rng = np.random.default_rng([self.seed, 0])
        return [operand.array(rng, dtype) for operand in self.operands]

    def others(self) -> list[Any]:
        """`rest` with the arrays made that are described in it."""
        rng = np.random.default_rng([self.seed, 1])
        return [x.array(rng) if hasattr(x, "array") else x for x in self.rest]

    def cotangent(self, shape: Shape, dtype: Any, factor: float = 1.0) -> np.ndarray:
        """`factor` times a random cotangent, in the memory layout of the first operand.

        The layout decides how a matrix product sums, so it must not differ between factors.
        """
        rng = np.random.default_rng([self.seed, 2])
        g = np.asarray(factor * cotangent(rng, shape, dtype))
        return with_layout(g, self.operands[0].layout)


@st.composite
def operands(
    draw: st.DrawFn, shape: Shape, limit: int = 20, structures: tuple[str, ...] = STRUCTURES,
    nonzero: bool = False, layouts: tuple[str, ...] = LAYOUTS,
) -> Operand:  # fmt: skip
    """One floating argument of up to about 2^limit."""
    structure = draw(st.sampled_from(structures))
    layout = draw(st.sampled_from(layouts))
    if structure == "adversarial":
        if np.prod(shape, dtype=int) > LARGEST_DRAWN_BY_ELEMENT:
            structure = "normal"
        else:
            magnitudes = st.floats(2.0**-limit, 2.0**limit, width=32, allow_subnormal=False)
            elements = st.one_of(st.sampled_from((0.0, 1.0)), magnitudes, magnitudes.map(neg))
            values = draw(hnp.arrays(np.float32, shape, elements=elements)).astype(np.float64)
            return Operand(shape, structure, 0, layout, nonzero, values)
    return Operand(shape, structure, draw(exponents(limit)), layout, nonzero)


Plan = tuple[tuple[Shape, ...], tuple[Any, ...]]


@st.composite
def examples(
    draw: st.DrawFn, plan: st.SearchStrategy[Plan], limit: int = 20,
    structures: tuple[str, ...] = STRUCTURES, nonzero: tuple[int, ...] = (),
    layouts: tuple[str, ...] = LAYOUTS,
) -> Example:  # fmt: skip
    """An example whose shapes and other arguments `plan` draws; the seed comes last."""
    operand_shapes, rest = draw(plan)
    drawn = tuple(
        draw(operands(shape, limit, structures, i in nonzero, layouts))
        for i, shape in enumerate(operand_shapes)
    )
    return Example(drawn, rest, draw(seeds))


@st.composite
def ids(draw: st.DrawFn, shape: Shape, size: int, layouts: tuple[str, ...] = LAYOUTS) -> Ids:
    """Ids of one structure and one memory layout."""
    structure = draw(st.sampled_from(("random", "repeated", "all the same")))
    return Ids(shape, size, structure, draw(st.sampled_from(layouts)))
