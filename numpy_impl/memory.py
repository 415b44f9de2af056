"""Freed memory kept for the next step: fresh pages cost more than the arithmetic on them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Parameters of glibc's mallopt(3), with their defaults.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
DEFAULTS = {M_TRIM_THRESHOLD: 128 * 1024, M_MMAP_MAX: 65536, M_ARENA_MAX: 0}
KEEPING = {
    M_TRIM_THRESHOLD: 2**31 - 1,
    M_MMAP_MAX: 0,  # what is mapped by itself is unmapped as soon as it is freed
    M_ARENA_MAX: 1,  # new threads share what is kept
}

_lock = threading.Lock()
_blocks = 0


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Let the C allocator keep what is freed in the block, in place of returning it to the system.

    A training step allocates and frees the same arrays as the step before. If they go back to the
    system in between, each page of them is faulted in and zeroed again, which can double the time
    of a step. The settings are the process's own: they hold until the last block of any thread
    ends, and then what is kept goes back. Does nothing where the allocator is not glibc's.
    """
    global _blocks
    mallopt, malloc_trim = _glibc()
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for parameter, value in KEEPING.items():
                mallopt(parameter, value)
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                for parameter, value in DEFAULTS.items():
                    mallopt(parameter, value)
                malloc_trim(0)


def _glibc() -> tuple[Callable[..., int], Callable[..., int]]:
    """mallopt and malloc_trim, or functions that do nothing."""
    try:
        library = ctypes.CDLL(None)
        return library.mallopt, library.malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none to ask
        return (lambda *arguments: 0), (lambda *arguments: 0)
