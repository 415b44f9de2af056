"""Freed memory kept for the next step: fresh pages cost more than the arithmetic on them."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEEPING = {
    M_TRIM_THRESHOLD: 2**31 - 1,
    M_MMAP_MAX: 0,  # what is mapped by itself is unmapped as soon as it is freed
    M_ARENA_MAX: 1,  # threads that start later share what is kept
}


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; for the start of a program that trains.

    A training step allocates and frees the same arrays as the step before. If they go back to the
    system in between, each page of them is faulted in and zeroed again, which can double the time
    of a step. There is no way back: with the first of these settings glibc stops adapting its own.
    Returns whether the C library took them; others than glibc are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none to ask
        return False
    taken = [mallopt(parameter, value) for parameter, value in KEEPING.items()]
    return all(result == 1 for result in taken)
