"""The attention weights of a trained model over a prompt, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console

from gpt_parity.backends import build_model
from gpt_parity.bpe import BytePairTokenizer
from gpt_parity.checkpoint import Checkpoint, load_checkpoint, tokenizer_of
from gpt_parity.lessons import heat_maps
from gpt_parity.lessons.config import ExplainConfig
from gpt_parity.lessons.labels import SPACE, count, positions, visible
from gpt_parity.lessons.tables import (
    Matrix,
    Words,
    fitting,
    heading,
    number,
    pick,
    print_table,
    say,
)
from gpt_parity.training import inference
from gpt_parity.weights import set_weights
from numpy_impl.layers import Softmax
from numpy_impl.tape import Observer, observe

MOST_ROWS, MOST_COLUMNS = 40, 8


class _Weights(Observer):
    """The result of every softmax layer, in the order of the blocks."""

    def __init__(self) -> None:
        self.found: list[np.ndarray] = []

    def layer(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(layer, Softmax):
            self.found.append(output.numpy()[0])  # of a batch of one


def attention_weights(checkpoint: Checkpoint, ids: np.ndarray) -> list[np.ndarray]:
    """The weights of each block for token ids (T,), by the NumPy model in its own dtype.

    (T, T), or of a GPT-2 (H, T, T), one for each of its heads. Raises FloatingPointError where they
    are not finite.
    """
    # A model that was trained with a leaking mask shows its leak.
    model = build_model("numpy", checkpoint.config, dtype=checkpoint.dtype, allow_leak=True)
    set_weights(model, checkpoint.weights)
    with inference(model), observe(_Weights()) as recorder:
        model(ids[None])
    for block, weights in enumerate(recorder.found):
        if not np.isfinite(weights).all():
            raise FloatingPointError(f"attention weights of block {block} are not finite")
    return recorder.found


def explain_model(config: ExplainConfig, console: Console) -> None:
    """Print a table for each block, or each of its heads: who looks where, and where most.

    Raises ValueError for a checkpoint that cannot be read or has no text, and for a prompt that
    the model cannot read.
    """
    checkpoint = load_checkpoint(config.checkpoint)
    tokenizer, prompt = tokenizer_of(checkpoint, config.checkpoint), config.prompt
    unit = "token" if isinstance(tokenizer, BytePairTokenizer) else "character"
    try:
        ids = tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    read = ids[-checkpoint.config.context_size :]
    found = attention_weights(checkpoint, read)
    maps = _titled(found)
    # A token of byte pairs may begin with its space, or be a part of a character.
    labels = positions([visible(tokenizer.decode([i])).replace(" ", SPACE) for i in read])

    heads = f" of {count(found[0].shape[0], 'head')}" if found[0].ndim == 3 else ""
    say(console, f"Attention of a trained model over {count(len(read), unit)}", "bold")
    say(
        console,
        f"{count(len(found), 'block')}{heads}, width {checkpoint.config.embedding_size}, "
        f"{count(checkpoint.step, 'training step')} on {checkpoint.backend} in {checkpoint.dtype}. "
        "A row is position i, which reads, a column is position j, which is read. A bare 0 is "
        "exactly 0, not rounded.",
    )
    if len(ids) > len(read):
        say(
            console,
            f"The prompt has {count(len(ids), unit)} and the model reads {len(read)}: these are "
            "the last of them.",
        )
    columns = pick(len(read), fitting(MOST_COLUMNS, console))
    if None in columns:
        say(console, "… stands for positions that do not fit into the table.")
    for title, weights in maps:
        heading(console, title)
        most = weights.argmax(axis=1)
        favourites = [f"{labels[j]} ({number(weights[i, j], 2)})" for i, j in enumerate(most)]
        print_table(
            console, pick(len(read), MOST_ROWS), labels,
            Matrix(weights, labels, columns, low=0.0, high=1.0),
            Words("looks most at", favourites),
        )  # fmt: skip
        say(console, "")
        future = weights[np.triu_indices(len(read), 1)]
        zeros = np.count_nonzero(future == 0)
        leak = "nothing leaks" if zeros == len(future) else f"at most {number(future.max())} LEAKS"
        say(
            console,
            f"Of {count(len(future), 'weight')} on later positions {zeros} are exactly 0: {leak}. "
            f"On average a position puts {number(np.diagonal(weights).mean())} on itself.",
        )
    if config.plot is not None:
        drawn = [(title.lower(), weights, labels) for title, weights in maps]
        heat_maps.draw_maps(config.plot, drawn, labels)
        say(console, f"The weights as heat maps: {config.plot}")


def _titled(found: list[np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """Each (T, T) of them with its block, and with its head where blocks have several."""
    maps = []
    for block, weights in enumerate(found):
        if weights.ndim == 2:
            maps.append((f"Block {block}", weights))
        else:
            maps += [(f"Block {block}, head {head}", w) for head, w in enumerate(weights)]
    return maps
