"""What this machine has: cores and memory."""

from __future__ import annotations

import os

MOST_THREADS = 256  # far more than help; a run may come from a machine with more cores


def available_cores() -> int:
    """Cores that this process may use, at most OMP_NUM_THREADS where that is a number.

    Not in a process that torchrun started, which sets it to 1 by itself.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if "RANK" in os.environ or not (asked.isdecimal() and asked.isascii() and int(asked) > 0):
        return cores
    return min(cores, int(asked))


def physical_memory() -> int | None:
    """Bytes of memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a system of this kind
        return None


def require_memory(what: str, needed: int) -> None:
    """Raise ValueError where `what` needs more bytes than the machine has.

    Systems promise more memory than they have, and end the process once it is used.
    """
    held = physical_memory()
    if held is not None and needed > held:
        raise ValueError(
            f"{what} needs {_gigabytes(needed)} of memory or more, this machine has "
            f"{_gigabytes(held)}"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e15 else "more than a million GB"
