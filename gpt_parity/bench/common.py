"""What every measurement needs: batches, functions that take them in turns, resident memory."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from gpt_parity.model_config import GPT2Config, Preset

Batch = tuple[np.ndarray, np.ndarray]
BATCHES = 8


def is_gpt2(size: Preset) -> bool:
    """Whether a size is that of a GPT-2."""
    return isinstance(size.model, GPT2Config)


def random_batches(size: Preset, count: int = BATCHES) -> list[Batch]:
    """Batches of token ids and targets, (B, T) each."""
    shape = (count, 2, size.batch_size, size.length)
    ids = np.random.default_rng(0).integers(0, size.model.vocab_size, shape)
    return [(tokens, targets) for tokens, targets in ids]


def in_turns(batches: list[Batch], function: Callable[..., object]) -> Callable[[], object]:
    """The function on one batch after the other, again and again."""
    endless = itertools.cycle(batches)
    return lambda: function(*next(endless))


def give_back() -> None:
    """Return what the C library holds free, where it is glibc, so that it is not used unseen."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    """A size of this process in bytes, VmRSS now or VmHWM at its largest; 0 where unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
