"""What can be chosen in the commands that teach: walk-through, experiment, microscope."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpt_parity.choices import (
    BACKENDS,
    DTYPES,
    Backend,
    require_choices,
    require_place,
    require_seed,
    require_threads,
)
from gpt_parity.oracle_config import MOST_LOCKSTEPS
from gpt_parity.plots import require_format, require_matplotlib
from gpt_parity.schedule import require_integer

# Of a walk through attention, whose tables show the first and last few.
MOST_POSITIONS = 2000


def require_plot(path: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raise ValueError unless a drawing can be written there; None is no drawing."""
    if path is not None:
        require_format("plot", path)
        require_place("plot", path, inputs)
        require_matplotlib("--plot")


def decoded(text: str) -> str:
    """Text of the command line as UTF-8, also where the locale could not decode its bytes."""
    if any("\udc80" <= character <= "\udcff" for character in text):
        return os.fsencode(text).decode("utf-8", "surrogateescape")
    return text


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """Which numbers to walk through causal attention with: random ones, or a trained model's.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    tokens: str | None = None
    """Words that label the positions, such as "the cat sat"; they set the length too."""
    seq_len: int | None = None
    """Number of positions; by default that of the words, else 4."""
    d_k: int = 64
    """Width of queries, keys and values."""
    seed: int = 42
    """Seed of the random queries, keys and values."""
    checkpoint: Path | None = None
    """Folder of a run, or a checkpoint file: show the attention of this model instead."""
    prompt: str | None = None
    """Text that the model of --checkpoint reads, its end if it is long."""
    plot: Path | None = None
    """Also draw each stage as a heat map into this file (.png or .svg)."""

    def __post_init__(self) -> None:
        for name in ("tokens", "prompt"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, decoded(getattr(self, name)))
        require_seed(self.seed)
        require_integer("d_k", self.d_k, 1)
        words = None if self.tokens is None else len(self.tokens.split())
        if words == 0:
            raise ValueError("tokens is empty, at least one word is needed")
        if self.seq_len is not None:
            require_integer("seq_len", self.seq_len, 1)
            if words not in (None, self.seq_len):
                raise ValueError(f"seq_len is {self.seq_len}, {words} is needed for these tokens")
        if self.length > MOST_POSITIONS:
            raise ValueError(f"length is {self.length}, at most {MOST_POSITIONS} are needed")
        if (self.checkpoint is None) != (self.prompt is None):
            given, missing = ("prompt", "checkpoint")[:: 1 if self.checkpoint is None else -1]
            raise ValueError(f"{given} is given without {missing}, both are needed")
        for name in ("tokens", "seq_len"):
            if self.checkpoint is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is given with checkpoint, one of them is needed")
        if self.prompt == "":
            raise ValueError("prompt is empty, at least one character is needed")
        require_plot(self.plot, (self.checkpoint,))

    @property
    def length(self) -> int:
        """Number of positions, T."""
        if self.tokens is not None:
            return len(self.tokens.split())
        return 4 if self.seq_len is None else self.seq_len


@dataclass(frozen=True, kw_only=True)
class FillValueConfig:
    """Which fills of the causal mask to train with, and for how long.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    values: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (
        -1e9, -math.inf, 0.0, -10.0,
    )  # fmt: skip
    """Fills to compare, each with a model of its own."""
    data: Path | None = None
    """UTF-8 text; without it data/tinyshakespeare.txt, or else a text that comes with Python."""
    steps: int = 3000
    """Training steps of each model."""
    backend: Backend = "numpy"
    """Which implementation trains."""
    seed: int = 42
    """Seed of the initial weights, the same for all."""
    plot: Path | None = None
    """Also draw the losses into this file (.png or .svg)."""
    json: Path | None = None
    """Also write every figure to this file."""

    def __post_init__(self) -> None:
        require_choices(self)
        if not self.values:
            raise ValueError("values is empty, at least one number is needed, such as -1e9")
        for value in self.values:
            if math.isnan(value) or value == math.inf:
                raise ValueError(f"values has {value}, numbers below infinity are needed")
        if len(set(self.values)) < len(self.values):
            raise ValueError(f"values has {list(self.values)}, each fill once is needed")
        require_integer("steps", self.steps, 1)
        require_seed(self.seed)
        if self.json is not None and self.json == self.plot:
            raise ValueError(f"json and plot are both {self.json}, two files are needed")
        require_plot(self.plot, (self.data,))
        require_place("json", self.json, (self.data,))


@dataclass(frozen=True)
class Side:
    """One of two runs: its backend, its dtype, and the threads that it may use."""

    backend: str
    dtype: str
    threads: int = 1

    @classmethod
    def parse(cls, flag: str, text: str) -> Side:
        """The run that BACKEND:DTYPE or BACKEND:DTYPE:THREADS names; ValueError names the flag."""
        form = "BACKEND:DTYPE or BACKEND:DTYPE:THREADS"
        if not isinstance(text, str):
            raise TypeError(f"{flag} is a {type(text).__name__}, {form} is needed")
        backend, _, rest = text.partition(":")
        dtype, colon, threads = rest.partition(":")
        if backend not in BACKENDS or dtype not in DTYPES:
            raise ValueError(f"{flag} is {text!r}, {form} is needed, of {BACKENDS} and {DTYPES}")
        if not colon:
            return cls(backend, dtype)
        if not (threads.isascii() and threads.isdigit() and len(threads) <= 9):
            raise ValueError(f"{flag} is {text!r}, a whole number of threads is needed")
        try:
            require_threads(int(threads))
        except ValueError as error:
            raise ValueError(f"{flag} is {text!r}: {error}") from error
        return cls(backend, dtype, int(threads))


@dataclass(frozen=True, kw_only=True)
class LockstepConfig:
    """Which two runs to train side by side, and for how long.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    steps: int = 1000
    """Training steps of each run; the learning rate's schedule ends with them."""
    a: str = "numpy:float32"
    """One run, BACKEND:DTYPE or BACKEND:DTYPE:THREADS."""
    b: str = "torch:float64"
    """The other run, from the same weights and on the same batches."""
    data: Path | None = None
    """UTF-8 text; without it data/tinyshakespeare.txt, or else a text that comes with Python."""
    seed: int = 42
    """Seed of the initial weights."""
    envelope_steps: int = 300
    """Follow the rounding envelope for so many steps; it takes most of the time."""
    plot: Path | None = None
    """Also draw the distances and the envelope into this file (.png or .svg)."""
    json: Path | None = None
    """Also write every figure to this file."""

    def __post_init__(self) -> None:
        if require_integer("steps", self.steps, 1) > MOST_LOCKSTEPS:
            raise ValueError(f"steps is {self.steps}, at most {MOST_LOCKSTEPS} are needed")
        require_integer("envelope_steps", self.envelope_steps, 0)
        Side.parse("a", self.a)
        Side.parse("b", self.b)
        require_seed(self.seed)
        require_plot(self.plot, (self.data,))
        require_place("json", self.json, (self.data,))
        if self.json is not None and self.json == self.plot:
            raise ValueError(f"json and plot are both {self.json}, two files are needed")

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both runs, a and b."""
        return Side.parse("a", self.a), Side.parse("b", self.b)
