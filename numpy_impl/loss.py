"""The loss of the GPT."""

from __future__ import annotations

from typing import Any

from numpy_impl import functional
from numpy_impl.layers import Layer
from numpy_impl.tensor import Tensor


class GPTLoss(Layer):
    """Mean cross-entropy of logits (B, T, V) against targets (B, T), by log-sum-exp.

    The source text computes mean(-log(clip(p, 1e-10, 1))). Where every p > 1e-10 the two agree to
    rounding; below, the clipped loss is constant while the gradient in use, (p - onehot) / n, is
    the gradient of this loss and not of the clipped one.
    """

    def forward(self, logits: Tensor, targets: Any) -> Tensor:
        return functional.cross_entropy(logits, targets)
