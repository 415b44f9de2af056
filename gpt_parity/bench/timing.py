"""Times of several functions, taken in turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MINIMUM_ROUNDS = 7
SECONDS_PER_TURN = 0.2
SECONDS_OF_REST = 0.02


@dataclass(frozen=True)
class Times:
    """Seconds of one function: the median of all calls, and the middle half of them."""

    median: float
    lower: float
    upper: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper, len(seconds))


def interleaved(functions: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Call the functions in turns for about `seconds`, each round beginning with another one.

    Before a turn there is a rest, in which threads of the one before stop waiting for more work.
    A turn is one call that is not timed, since the caches hold other data, and then timed calls for
    0.2 s, one at least; calls longer than that are all timed.
    """
    names = list(functions)
    found: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < MINIMUM_ROUNDS or time.perf_counter() < end:
        for k in range(len(names)):
            name = names[(rounds + k) % len(names)]
            time.sleep(SECONDS_OF_REST)
            spent = _seconds(functions[name])
            if spent > SECONDS_PER_TURN:
                found[name].append(spent)
                continue
            turn = 0.0
            while turn < SECONDS_PER_TURN:
                found[name].append(_seconds(functions[name]))
                turn += found[name][-1]
        rounds += 1
    return {name: Times.of(times) for name, times in found.items()}


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
