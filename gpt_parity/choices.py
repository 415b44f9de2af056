"""What is chosen by name, and the checks of values that several commands share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from gpt_parity.machine import MOST_THREADS
from gpt_parity.schedule import require_integer

Backend = Literal["numpy", "torch"]
ModelName = Literal["gpt", "gpt2"]
Windows = Literal["ordered", "random"]
Dtype = Literal["float32", "float64"]
Style = Literal["source", "nanogpt", "hf", "llm.c"]
Precision = Literal["float64", "float32", "bf16", "tf32"]
Device = Literal["cpu", "cuda"]

BACKENDS: tuple[Backend, ...] = ("numpy", "torch")
MODELS: tuple[ModelName, ...] = ("gpt", "gpt2")
WINDOWS: tuple[Windows, ...] = ("ordered", "random")
DTYPES: tuple[Dtype, ...] = ("float32", "float64")
STYLES: tuple[Style, ...] = get_args(Style)
PRECISIONS: tuple[Precision, ...] = ("float64", "float32", "bf16", "tf32")
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


class KnowsWhatWasGiven:
    """A configuration whose `given` holds the fields that were set, not left to their defaults."""

    given: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: Any) -> Self:
        config = super().__new__(cls)
        object.__setattr__(config, "given", frozenset(given))
        return config


def require_threads(count: int) -> None:
    """Raise ValueError unless that many threads can be asked for."""
    if require_integer("threads", count, 1) > MOST_THREADS:
        raise ValueError(f"threads is {count}, at most {MOST_THREADS} are needed")


def require_seed(seed: int) -> None:
    """Raise ValueError unless a random generator can start from `seed`."""
    if require_integer("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed is {seed}, less than 2**32 is needed")


def require_place(name: str, path: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raise ValueError unless a file can be made at `path`, or replaced; None is no place.

    A file that is one of the `inputs`, or in one of their folders, is not to be replaced.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{name} is {path}, a file in a folder that exists is needed")
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is {path}, which is no regular file; a file is needed")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name} is {path}, in a folder that cannot be written")
    for source in inputs:
        if source is None or not source.exists() or not path.exists():
            continue
        inside = source.is_dir() and path.resolve().is_relative_to(source.resolve())
        if inside or source.samefile(path):
            raise ValueError(f"{name} is {path}, which belongs to the input {source}")


def require_precision(precision: Precision | None, device: Device) -> None:
    """Raise ValueError for an arithmetic that no such device has."""
    if precision == "tf32" and device != "cuda":
        raise ValueError("precision is tf32, which --device cuda alone has")


def require_choices(config: object) -> None:
    """Raise ValueError unless what `config` has of these choices is known, or None by default."""
    for name, known in (
        ("backend", BACKENDS), ("dtype", DTYPES), ("model", MODELS), ("windows", WINDOWS),
        ("style", STYLES), ("precision", PRECISIONS), ("device", DEVICES),
    ):  # fmt: skip
        default = getattr(type(config), name, known[0])
        value = getattr(config, name, default)
        if value not in known and not (value is None and default is None):
            raise ValueError(f"{name} is {value!r}, one of {known} is needed")
