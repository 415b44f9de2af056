"""Arrays of other libraries as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_array(value: Any) -> np.ndarray:
    """`value` as a NumPy array, which may share its memory.

    Takes what `numpy.asarray` takes, JAX arrays among it, and tensors of either backend or of
    PyTorch, whether they require gradients and wherever they are.
    """
    for step in ("detach", "cpu", "numpy"):
        value = getattr(value, step, lambda value=value: value)()
    return np.asarray(value)
