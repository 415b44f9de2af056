"""Signals that end a run between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop(Exception):
    """A signal asked the run to end, and a step has just been finished."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopBetweenSteps:
    """Turns the first SIGINT, SIGTERM or SIGHUP into `Stop`, raised by `check`.

    A second one acts at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # not every system has the last one
                # A job in the background, or under nohup, is not to hear some of them.
                if number is None or signal.getsignal(number) in (signal.SIG_IGN, None):
                    continue
                self.before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            if signal.getsignal(number) == self._receive:  # nobody has set another meanwhile
                signal.signal(number, handler)

    def check(self) -> None:
        if self.received is not None:
            raise Stop(self.received)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A process started in the block leaves Ctrl-C to this one, which ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
