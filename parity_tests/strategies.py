"""What the suite draws beside the examples of `gpt_parity/oracle/examples.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from gpt_parity.oracle.examples import Shape


@st.composite
def broadcast_shapes(draw: st.DrawFn, shape: Shape) -> Shape:
    """A shape that broadcasts to `shape`: leading axes left out, others of size 1."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(draw(st.sampled_from((n, n, 1))) for n in kept)


@dataclass(frozen=True)
class Keep:
    """A boolean mask, true where a value is kept; in each row of the last axis at least once."""

    shape: Shape

    def array(self, rng: np.random.Generator) -> np.ndarray:
        keep = rng.random(self.shape) < 0.5
        always = rng.integers(self.shape[-1], size=(*self.shape[:-1], 1))
        return keep | (np.arange(self.shape[-1]) == always)
