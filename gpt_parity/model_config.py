"""The sizes of a model: names and shapes of its weights, and what it costs, without building it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt_parity.machine import require_memory
from gpt_parity.schedule import require_integer, require_real

Shapes = dict[str, tuple[int, ...]]

# Of a parameter with its layer, beside its numbers.
BYTES_PER_PARAMETER_OBJECT = 2000

# A tape and a module list of Python objects are made for each.
MOST_BLOCKS = 10_000


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of the source text's model, which determine the names and shapes of its weights.

    Raises ValueError for sizes below 1 and a NaN as the fill, TypeError for values that are no
    numbers.
    """

    vocab_size: int
    """V, the number of token ids."""
    context_size: int = 32
    """C, the longest input in tokens."""
    embedding_size: int = 64
    """E, the width of the model."""
    blocks: int = 2
    """Number of transformer blocks."""
    mask_value: float = -1e9
    """Fill of the masked attention scores."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_size", "embedding_size", "blocks"):
            object.__setattr__(self, name, require_integer(name, getattr(self, name), 1))
        if self.blocks > MOST_BLOCKS:
            raise ValueError(f"blocks is {self.blocks}, at most {MOST_BLOCKS} are needed")
        object.__setattr__(self, "mask_value", require_real("mask_value", self.mask_value))
        if math.isnan(self.mask_value):
            raise ValueError("mask_value is nan, a number is needed")

    def parameter_shapes(self) -> Shapes:
        """Return names and shapes of the weights in the order of construction, without a model."""
        width = self.embedding_size
        shapes = self._embedding_shapes()
        for block in range(self.blocks):
            shapes |= _linear(f"transformers.{block}.attention.output", width, width)
            shapes |= _feed_forward(block, width)
        return shapes | _linear("output.output", width, self.vocab_size)

    def _embedding_shapes(self) -> Shapes:
        return {
            "embedding.embedding.weight": (self.vocab_size, self.embedding_size),
            "embedding.positional_embedding.weight": (self.context_size, self.embedding_size),
        }

    def parameter_count(self) -> int:
        """Return the number of weights."""
        vocab, width = self.vocab_size, self.embedding_size
        ends = (2 * vocab + self.context_size) * width + vocab
        return ends + self.blocks * (9 * width * width + 6 * width)

    def _kept_per_row(self, length: int) -> int:
        """Numbers that a block keeps of each token for the backward pass, or more."""
        return length + 8 * self.embedding_size

    def _weights_per_block(self) -> int:
        """Elements of the weights in the matrix products of a block."""
        return 9 * self.embedding_size**2

    def require_memory(
        self, dtype: str, *, training: bool = False, batch_size: int = 0, length: int = 0
    ) -> None:
        """Raise ValueError where a model of these sizes cannot fit into this machine.

        training: with gradients and moments. batch_size, length: of a batch whose scores and
        feed-forward values are kept for the backward pass.
        """
        rows = batch_size * length
        values = self.parameter_count() * (4 if training else 1)
        values += self.blocks * rows * self._kept_per_row(length)
        objects = (4 + 6 * self.blocks) * BYTES_PER_PARAMETER_OBJECT
        require_memory(
            f"a model of {self.parameter_count():,} parameters in {self.blocks:,} blocks",
            values * (8 if dtype == "float64" else 4) + objects,
        )

    def operations(self, batch_size: int, length: int) -> int:
        """Additions and multiplications in the matrix products of one training step.

        A product of n rows with a weight of p elements takes 2 n p forward, and twice that for its
        two gradients; so do the two products in attention, T columns wide.
        """
        width = self.embedding_size
        linear = self.blocks * self._weights_per_block() + width * self.vocab_size
        return 6 * batch_size * length * (linear + self.blocks * 2 * length * width)


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    """The sizes of a GPT-2; raises ValueError also where the heads do not divide its width."""

    heads: int = 4
    """H, the number of attention heads, each E / H wide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", require_integer("heads", self.heads, 1))
        if self.embedding_size % self.heads:
            raise ValueError(
                f"embedding_size is {self.embedding_size}, a multiple of heads = {self.heads} is "
                "needed"
            )

    def parameter_shapes(self) -> Shapes:
        """Return names and shapes of the weights in the order of construction, without a model.

        The token embedding serves as the output's weight too, and stands here once.
        """
        width = self.embedding_size
        shapes = self._embedding_shapes()
        for block in range(self.blocks):
            name = f"transformers.{block}"
            shapes |= _norm(f"{name}.attention_norm", width)
            shapes |= _linear(f"{name}.attention.input", width, 3 * width)
            shapes |= _linear(f"{name}.attention.output", width, width)
            shapes |= _norm(f"{name}.feed_forward_norm", width)
            shapes |= _feed_forward(block, width)
        return shapes | _norm("norm", width)

    def parameter_count(self) -> int:
        """Return the number of weights."""
        width = self.embedding_size
        ends = (self.vocab_size + self.context_size + 2) * width
        return ends + self.blocks * (12 * width * width + 13 * width)

    def _kept_per_row(self, length: int) -> int:
        return self.heads * length + 14 * self.embedding_size

    def _weights_per_block(self) -> int:
        return 12 * self.embedding_size**2


@dataclass(frozen=True)
class Preset:
    """Sizes of a reference model and of its one batch."""

    model: GPTConfig
    batch_size: int
    length: int


def model_config(content: Mapping[str, Any]) -> GPTConfig:
    """The configuration with these fields, of a GPT-2 if it has heads; raises what both raise."""
    return (GPT2Config if "heads" in content else GPTConfig)(**content)


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _feed_forward(block: int, width: int) -> Shapes:
    name = f"transformers.{block}.feed_forward"
    return _linear(f"{name}.input", width, 4 * width) | _linear(f"{name}.output", 4 * width, width)
