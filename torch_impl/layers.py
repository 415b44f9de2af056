"""Layers: PyTorch's own modules, started from the same random numbers as the NumPy twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_impl import functional


class Linear(nn.Linear):
    """y = x W^T + b:  (..., in) -> (..., out), weight (out, in), bias (out,).

    Weights are drawn as randn * `std`, by default sqrt(2 / in) (He et al. 2015), biases are 0.
    """

    def __init__(
        self, in_features: int, out_features: int, rng: np.random.RandomState, dtype: torch.dtype,
        std: float | None = None,
    ) -> None:  # fmt: skip
        std = math.sqrt(2.0 / in_features) if std is None else std
        weight = rng.randn(out_features, in_features) * std
        super().__init__(in_features, out_features, dtype=dtype)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(weight))
            self.bias.zero_()

    def reset_parameters(self) -> None:
        """Nothing: the constructor draws from `rng`, never from PyTorch's global state."""


class LayerNorm(nn.LayerNorm):
    """Normalise the last axis, biased variance, eps inside the root; weight 1 and bias 0 (E,)."""

    def __init__(self, features: int, dtype: torch.dtype) -> None:
        super().__init__(features, functional.LAYER_NORM_EPS, dtype=dtype)


class Embedding(nn.Embedding):
    """Rows of a table by integer ids:  (...) -> (..., E), weight (V, E) drawn as randn * 0.02."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, rng: np.random.RandomState,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        weight = rng.randn(num_embeddings, embedding_dim) * 0.02
        super().__init__(num_embeddings, embedding_dim, dtype=dtype)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(weight))

    def reset_parameters(self) -> None:
        """Nothing: the constructor draws from `rng`, never from PyTorch's global state."""

    def forward(self, ids: Any) -> Tensor:
        return functional.embedding(self.weight, ids)


class Softmax(nn.Softmax):
    """Softmax over the last axis."""

    def __init__(self) -> None:
        super().__init__(dim=-1)


class Tril(nn.Module):
    """Keep the lower triangle of the last two axes, fill the rest with `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return functional.tril(x, self.value)


class GELU(nn.GELU):
    """Gaussian error linear unit, tanh form."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")
