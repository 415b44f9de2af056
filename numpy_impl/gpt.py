"""The GPT of the source text: one attention head without projections, no residuals, no norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numpy_impl.layers import GELU, Embedding, Layer, Linear, ParameterBuffer, Softmax, Tril
from numpy_impl.tape import no_grad
from numpy_impl.tensor import Tensor


class GPTEmbedding(Layer):
    """Token embedding plus positional embedding:  tokens (B, T) -> (B, T, E).

    `start` is the position of the first token.
    """

    def __init__(
        self, vocab_size: int, context_size: int, embedding_size: int,
        rng: np.random.RandomState, dtype: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = Embedding(vocab_size, embedding_size, rng, dtype)
        self.positional_embedding = Embedding(context_size, embedding_size, rng, dtype)

    def forward(self, tokens: np.ndarray, start: int = 0) -> Tensor:
        positions = start + np.arange(tokens.shape[-1])  # (T,)
        return self.embedding(tokens) + self.positional_embedding(positions)  # (B, T, E)


class GPTAttention(Layer):
    """Causal self-attention of x with itself as query, key and value:  (B, T, E) -> (B, T, E)."""

    def __init__(
        self, embedding_size: int, mask_value: float, rng: np.random.RandomState, dtype: Any
    ) -> None:
        super().__init__()
        self.mask = Tril(mask_value)
        self.softmax = Softmax()
        self.output = Linear(embedding_size, embedding_size, rng, dtype)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(-2, -1) / math.sqrt(x.shape[-1])  # (B, T, T)
        weights = self.softmax(self.mask(scores))  # (B, T, T)
        return self.output(weights @ x)  # (B, T, E)

    def last(self, x: Tensor, query: Tensor) -> Tensor:
        """The result for the last row of x alone, `query`, which may attend to every row."""
        scores = query @ x.transpose(-2, -1) / math.sqrt(x.shape[-1])  # (B, 1, T)
        return self.output(self.softmax(scores) @ x)  # (B, 1, E)


class GPTFeedForward(Layer):
    """Two linear maps with a GELU between:  (B, T, E) -> (B, T, E)."""

    def __init__(
        self, embedding_size: int, rng: np.random.RandomState, dtype: Any,
        input_std: float | None = None, output_std: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input = Linear(embedding_size, 4 * embedding_size, rng, dtype, input_std)
        self.gelu = GELU()
        self.output = Linear(4 * embedding_size, embedding_size, rng, dtype, output_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.gelu(self.input(x)))  # (B, T, E), through (B, T, 4E)


class GPTTransformer(Layer):
    """One block, attention then feed-forward:  (B, T, E) -> (B, T, E)."""

    def __init__(
        self, embedding_size: int, mask_value: float, rng: np.random.RandomState, dtype: Any
    ) -> None:
        super().__init__()
        self.attention = GPTAttention(embedding_size, mask_value, rng, dtype)
        self.feed_forward = GPTFeedForward(embedding_size, rng, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x))

    def last(self, x: Tensor, query: Tensor) -> Tensor:
        """The result for the last row of x alone, `query`:  (B, T, E), (B, 1, E) -> (B, 1, E)."""
        return self.feed_forward(self.attention.last(x, query))


class GPTOutput(Layer):
    """Logits of the next token:  (B, T, E) -> (B, T, V)."""

    def __init__(
        self, embedding_size: int, vocab_size: int, rng: np.random.RandomState, dtype: Any
    ) -> None:
        super().__init__()
        self.output = Linear(embedding_size, vocab_size, rng, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x)


class GPT(Layer):
    """Tokens (B, T) -> logits (B, T, V), T at most `context_size`.

    All weights come from one `RandomState(seed)` in the order of construction. `dtype` is a
    floating dtype, or complex128 for the complex step. `mask_value` fills the masked scores: the
    score of a position with itself is |x|^2 / sqrt(E) >= 0, so a fill whose exponential is 0 in
    `dtype` gives the future a weight of exactly 0. Raises ValueError for sizes that are not
    positive and for a fill that leaks, unless `allow_leak`.
    """

    def __init__(
        self, vocab_size: int, context_size: int, embedding_size: int, blocks: int, *,
        seed: int = 0, dtype: Any = np.float32, mask_value: float = -1e9, allow_leak: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(vocab_size=vocab_size, context_size=context_size,
                    embedding_size=embedding_size, blocks=blocks)  # fmt: skip
        dtype = np.dtype(dtype)
        check_mask_value(mask_value, dtype, allow_leak)
        rng = np.random.RandomState(seed)
        self.vocab_size, self.context_size = vocab_size, context_size
        self.allow_leak = allow_leak
        self.embedding = GPTEmbedding(vocab_size, context_size, embedding_size, rng, dtype)
        self.transformers = [
            GPTTransformer(embedding_size, mask_value, rng, dtype) for _ in range(blocks)
        ]
        self.output = GPTOutput(embedding_size, vocab_size, rng, dtype)
        ParameterBuffer(list(self.parameters()))

    def forward(self, tokens: np.ndarray) -> Tensor:
        x = self.embedding(check_tokens(tokens, self.vocab_size, self.context_size))  # (B, T, E)
        for transformer in self.transformers:
            x = transformer(x)  # (B, T, E)
        return self.output(x)  # (B, T, V)

    def predict(self, tokens: np.ndarray) -> np.ndarray:
        """The logits as an array, without recording a graph."""
        with no_grad():
            return self(tokens).numpy()

    def predict_next(
        self, tokens: np.ndarray, past: list[np.ndarray] | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The logits (B, V) after the last of `tokens` (B, T), and the inputs of all blocks.

        Equal to `predict(tokens)[:, -1]` up to rounding, without what only the logits of other
        positions need. `past` is what the call for all tokens but the last returned: they are not
        computed again, which is right as long as no token has moved to another position and no
        weight has changed. A model that may leak computes all anew, since there the past depends
        on the last token. Raises ValueError for a past of other shapes or another dtype.
        """
        tokens = check_tokens(tokens, self.vocab_size, self.context_size)
        if past is not None:
            weight = self.embedding.embedding.weight
            needed = (tokens.shape[0], tokens.shape[1] - 1, weight.shape[1])
            check_past(past, needed, len(self.transformers), weight.data.dtype)
        inputs = []
        with no_grad():
            if past is None or self.allow_leak:
                x = self.embedding(tokens)  # (B, T, E)
                for transformer in self.transformers[:-1]:
                    inputs.append(x.data)
                    x = transformer(x)
                inputs.append(x.data)
                x = self.transformers[-1].last(x, Tensor(x.data[:, -1:]))  # (B, 1, E)
            else:
                x = self.embedding(tokens[:, -1:], tokens.shape[1] - 1)  # (B, 1, E)
                for transformer, earlier in zip(self.transformers, past, strict=True):
                    inputs.append(np.concatenate((earlier, x.data), axis=1))  # (B, T, E)
                    x = transformer.last(Tensor(inputs[-1]), x)
            return self.output(x).data[:, 0], inputs


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name}: got {size!r}, needed a positive integer")


def check_mask_value(mask_value: float, dtype: np.dtype, allow_leak: bool) -> None:
    """Raise ValueError for a fill that is NaN, or leaves the future a weight above 0."""
    # exp(x) rounds to 0 below half the smallest subnormal number.
    bound = math.floor(math.log(np.finfo(dtype).smallest_subnormal) - math.log(2.0))
    if math.isnan(mask_value) or (mask_value > bound and not allow_leak):
        raise ValueError(
            f"mask_value: got {mask_value}, needed at most {bound} in {dtype}, "
            "or later tokens leak into earlier ones (allow_leak=True permits it)"
        )


def check_tokens(tokens: np.ndarray, vocab_size: int, context_size: int) -> np.ndarray:
    """`tokens` as (B, T) integers in 0..vocab_size-1 with 1 <= T <= context_size, or an error."""
    tokens = np.asarray(tokens)
    if tokens.dtype.kind not in ("i", "u"):
        raise TypeError(f"tokens: got dtype {tokens.dtype}, needed integers")
    if tokens.ndim != 2 or tokens.size == 0:
        raise ValueError(f"tokens: got shape {tokens.shape}, needed (B, T), neither of them 0")
    if tokens.shape[1] > context_size:
        raise ValueError(f"tokens: got {tokens.shape[1]} positions, needed at most {context_size}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"tokens: got id {bad}, needed 0 to {vocab_size - 1}")
    return tokens


def check_past(
    past: list[np.ndarray], needed: tuple[int, ...], blocks: int, dtype: np.dtype
) -> None:
    """Raise ValueError unless `past` has an array of this shape and dtype for each block."""
    for x in past if isinstance(past, list | tuple) else [past]:
        if not isinstance(x, np.ndarray) or x.dtype != dtype:
            found = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
            raise ValueError(f"past: got {found}, needed a list of arrays of {dtype}")
    found = [tuple(x.shape) for x in past]
    if found != [needed] * blocks:
        raise ValueError(f"past: got shapes {found}, needed {needed} for each of {blocks} blocks")
