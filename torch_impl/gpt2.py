"""GPT-2 (Radford et al. 2019): several heads, residuals, layer normalisation, tied embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_impl.functional import _on_host, linear
from torch_impl.gpt import (
    GPTEmbedding,
    GPTFeedForward,
    check_past,
    check_sizes,
    check_tokens,
)
from torch_impl.layers import LayerNorm, Linear, Softmax, Tril

STD = 0.02
HIDING = -1e9  # a fill far below every score of a usable model


class GPT2Attention(nn.Module):
    """Causal self-attention in `heads` heads of D = E / heads:  (B, T, E) -> (B, T, E).

    One projection gives the queries, keys and values of all heads, in this order.
    """

    def __init__(
        self, embedding_size: int, heads: int, mask_value: float, output_std: float,
        rng: np.random.RandomState, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.input = Linear(embedding_size, 3 * embedding_size, rng, dtype, STD)
        self.mask = Tril(mask_value)
        self.softmax = Softmax()
        self.output = Linear(embedding_size, embedding_size, rng, dtype, output_std)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        weights = self.softmax(self.mask(scores))  # (B, H, T, T)
        return self.merge(weights @ v)  # (B, T, E)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (B, H, T, D)."""
        batch, length, width = x.shape
        qkv = self.input(x).reshape(batch, length, 3, self.heads, width // self.heads)
        return tuple(part.transpose(1, 2) for part in qkv.unbind(2))

    def merge(self, context: Tensor) -> Tensor:
        """The heads side by side, projected:  (B, H, T, D) -> (B, T, E)."""
        batch, heads, length, width = context.shape
        return self.output(context.transpose(1, 2).reshape(batch, length, heads * width))

    def following(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result for the rows of x, and keys and values of all rows, (2, B, H, T, D).

        `past` holds those of the rows before x, which is then the last row alone.
        """
        q, k, v = self.split(x)
        present = torch.stack((k, v))
        if past is not None:
            present = torch.cat((past, present), dim=-2)
        k, v = present
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T or 1, T)
        weights = self.softmax(scores if past is not None else self.mask(scores))
        return self.merge(weights @ v), present


class GPT2Transformer(nn.Module):
    """One block:  x + attention(norm(x)),  then  x + feed_forward(norm(x));  (B, T, E)."""

    def __init__(
        self, embedding_size: int, heads: int, mask_value: float, output_std: float,
        rng: np.random.RandomState, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_norm = LayerNorm(embedding_size, dtype)
        self.attention = GPT2Attention(embedding_size, heads, mask_value, output_std, rng, dtype)
        self.feed_forward_norm = LayerNorm(embedding_size, dtype)
        self.feed_forward = GPTFeedForward(embedding_size, rng, dtype, STD, output_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

    def following(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `GPT2Attention.following`."""
        attended, present = self.attention.following(self.attention_norm(x), past)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), present


class GPT2(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), T at most `context_size`.

    The logits are products with the token embedding, whose gradient is the sum of both roles.
    Weights are drawn from one `RandomState(seed)` in the order of construction, with deviation
    0.02, and 0.02 / sqrt(2 blocks) where a block adds to the residual stream; biases are 0. No
    dropout. Scores have no lower bound here: the future has a weight of exactly 0 while the
    largest score of each row is 746 (float32: 104) above `mask_value`. Raises ValueError for sizes
    that are not positive, an `embedding_size` that `heads` does not divide, and a fill above -1e9
    or NaN; with `allow_leak` for NaN alone.
    """

    def __init__(
        self, vocab_size: int, context_size: int, embedding_size: int, blocks: int, heads: int, *,
        seed: int = 0, dtype: Any = torch.float32, mask_value: float = -1e9,
        allow_leak: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(vocab_size=vocab_size, context_size=context_size,
                    embedding_size=embedding_size, blocks=blocks, heads=heads)  # fmt: skip
        if embedding_size % heads:
            raise ValueError(f"embedding_size: got {embedding_size}, needed a multiple of {heads}")
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
        if math.isnan(mask_value) or (mask_value > HIDING and not allow_leak):
            raise ValueError(
                f"mask_value: got {mask_value}, needed at most {HIDING}, or later tokens may leak "
                "into earlier ones: scores have no lower bound (allow_leak=True permits it)"
            )
        rng = np.random.RandomState(seed)
        self.vocab_size, self.context_size = vocab_size, context_size
        self.allow_leak = allow_leak
        self.embedding = GPTEmbedding(vocab_size, context_size, embedding_size, rng, dtype)
        self.transformers = nn.ModuleList(
            GPT2Transformer(
                embedding_size, heads, mask_value, STD / math.sqrt(2 * blocks), rng, dtype
            )
            for _ in range(blocks)
        )
        self.norm = LayerNorm(embedding_size, dtype)

    def forward(self, tokens: np.ndarray) -> Tensor:
        x = self.embedding(check_tokens(tokens, self.vocab_size, self.context_size))  # (B, T, E)
        for transformer in self.transformers:
            x = transformer(x)  # (B, T, E)
        return self.logits(x)  # (B, T, V)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the next token:  (B, T, E) -> (B, T, V)."""
        return linear(self.norm(x), self.embedding.embedding.weight)

    def predict(self, tokens: np.ndarray) -> np.ndarray:
        """The logits as an array, without recording a graph."""
        with torch.no_grad():
            return _on_host(self(tokens))

    def predict_next(
        self, tokens: np.ndarray, past: list[Tensor] | None = None
    ) -> tuple[np.ndarray, list[Tensor]]:
        """The logits (B, V) after the last of `tokens` (B, T), and keys and values of all blocks.

        Equal to `predict(tokens)[:, -1]` up to rounding, with a `past` as long as the largest score
        of each row is 746 (float32: 104) above the mask's fill, so that no token reads a later one.
        `past` is what the call for all tokens
        but the last returned, (2, B, H, T - 1, D) for each block: they are not computed again,
        which is right as long as no token has moved to another position and no weight has changed.
        A model that may leak computes all anew, since there the past depends on the last token.
        Raises ValueError for a past of other shapes or another dtype.
        """
        tokens = check_tokens(tokens, self.vocab_size, self.context_size)
        (batch, length), heads = tokens.shape, self.transformers[0].attention.heads
        weight = self.embedding.embedding.weight
        start = 0
        if past is not None:
            needed = (2, batch, heads, length - 1, weight.shape[1] // heads)
            check_past(past, needed, len(self.transformers), weight.dtype)
            start = 0 if self.allow_leak else length - 1
        earlier = past if start else [None] * len(self.transformers)
        present = []
        with torch.no_grad():
            x = self.embedding(tokens[:, start:], start)  # (B, T or 1, E)
            for transformer, before in zip(self.transformers, earlier, strict=True):
                x, found = transformer.following(x, before)
                present.append(found)
            return _on_host(self.logits(x[:, -1:])[:, 0]), present
