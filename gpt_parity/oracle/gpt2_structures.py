"""Mistakes in the order of a GPT-2's block: where the norm stands, and to what a branch is added.

They are none of a single operation, so a model of that order is run. Its layers, and so what they
return, have the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from numpy_impl.tensor import Tensor

Half = Callable[[Any, Any, Tensor], Tensor]


def _right(norm: Any, branch: Any, x: Tensor) -> Tensor:
    return x + branch(norm(x))


def _norm_after_sum(norm: Any, branch: Any, x: Tensor) -> Tensor:
    return norm(x + branch(x))


def _sum_with_norm(norm: Any, branch: Any, x: Tensor) -> Tensor:
    normalised = norm(x)
    return normalised + branch(normalised)


# One half of a block, by description; as `Hypothesis` for operations.
STRUCTURES: dict[str, Half] = {
    "layer norm: after the sum, norm(x + branch(x)), not before the branch (post-norm)":
        _norm_after_sum,
    "residual: the branch is added to the normalised x, not to x": _sum_with_norm,
}  # fmt: skip


def reordered(model: Any) -> Iterator[tuple[str, str]]:
    """Description and place of every mistake, which `model` makes until the next is asked for."""
    for description, half in STRUCTURES.items():
        for place, halves in (
            ("in all blocks", (half, half)),
            ("at attention of all blocks", (half, _right)),
            ("at feed_forward of all blocks", (_right, half)),
        ):
            for block in model.transformers:
                block.forward = functools.partial(_block, block, *halves)
            yield description, place


def _block(block: Any, first: Half, second: Half, x: Tensor) -> Tensor:
    x = first(block.attention_norm, block.attention, x)
    return second(block.feed_forward_norm, block.feed_forward, x)
