"""The small GPT in PyTorch, where attention and GELU have a backward pass of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import cross_entropy, linear

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


class CausalAttention(Function):
    """softmax(x x^T / sqrt(E) where j <= i) x:  (B, T, E) -> (B, T, E)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scores = x @ x.mT / math.sqrt(x.shape[-1])  # (B, T, T)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -1e9).softmax(dim=-1)  # (B, T, T)
        ctx.save_for_backward(x, weights)
        return weights @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, weights = ctx.saved_tensors
        dweights = grad @ x.mT  # (B, T, T)
        # The weights of the future are 0, so that its scores need no mask here.
        dscores = weights * (dweights - (dweights * weights).sum(dim=-1, keepdim=True))
        dscores = dscores / math.sqrt(x.shape[-1])
        # x was averaged, and was query and key of the scores.
        return weights.mT @ grad + dscores @ x + dscores.mT @ x


class GELU(Function):
    """x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3):  any shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        t = torch.tanh(SQRT_2_OVER_PI * x * (1.0 + 0.044715 * x * x))
        ctx.save_for_backward(x, t)
        return 0.5 * x * (1.0 + t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, t = ctx.saved_tensors
        du = SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
        return grad * 0.5 * (1.0 + t + x * (1.0 - t * t) * du)


def gpt(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Tokens (B, T) -> logits (B, T, V)."""

    def dense(name: str, x: Tensor) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    positions = weights["embedding.positional_embedding.weight"][: tokens.shape[1]]
    x = weights["embedding.embedding.weight"][tokens] + positions
    blocks = sum(name.endswith("attention.output.weight") for name in weights)
    for block in (f"transformers.{i}" for i in range(blocks)):
        x = dense(f"{block}.attention.output", CausalAttention.apply(x))
        x = GELU.apply(dense(f"{block}.feed_forward.input", x))
        x = dense(f"{block}.feed_forward.output", x)
    return dense("output.output", x)


def loss_and_gradients(
    weights: dict[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss () and its gradient by every parameter, in the dtype of the weights."""
    leaves = {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}
    logits = gpt(leaves, torch.tensor(tokens))
    loss = cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    arrays = {name: g.numpy() for name, g in zip(leaves, gradients, strict=True)}
    return loss.detach().numpy(), arrays
