"""Arrays of other libraries as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_array(value: Any) -> np.ndarray:
    """`value` as a NumPy array, which may share its memory.

    Takes what `numpy.asarray` takes, JAX arrays among it, and tensors of either backend or of
    PyTorch, whether they require gradients and wherever they are. bfloat16, which NumPy does not
    have, becomes float32.
    """
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()
    for step in ("detach", "cpu", "numpy"):
        value = getattr(value, step, lambda value=value: value)()
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
