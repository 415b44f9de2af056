"""What a run says: progress, its validation losses as a table, a last line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

SECONDS_BETWEEN_FRAMES = 0.25
SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Progress of the steps: a live bar on a terminal, a short line now and then elsewhere.

    It asks the clock at each step, and draws a few times a second at most. first: the steps that
    were finished before.
    """

    def __init__(self, total: int, tokens_per_step: int, first: int = 0) -> None:
        self.total, self.tokens_per_step, self.first = total, tokens_per_step, first
        self.live = sys.stdout.isatty()
        self.interval = SECONDS_BETWEEN_FRAMES if self.live else SECONDS_BETWEEN_LINES
        self.start = self.last = time.perf_counter()

    def __enter__(self) -> Display:
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self.bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                auto_refresh=False, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("", total=self.total, completed=self.first)
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.bar.stop()

    def rate(self, step: int) -> float:
        """Tokens per second since the start, without the pauses."""
        tokens = (step - self.first) * self.tokens_per_step
        return tokens / max(1e-9, time.perf_counter() - self.start)

    def is_due(self) -> bool:
        return time.perf_counter() - self.last >= self.interval

    def show(self, step: int, loss: float) -> None:
        rate = self.rate(step)
        seconds = (self.total - step) * self.tokens_per_step / rate
        left = f"{int(seconds // 60)}:{int(seconds % 60):02d}"
        text = f"loss {loss:.4f}  {rate:,.0f} tokens/s  {left} left"
        if self.live:
            self.bar.update(self.task, completed=step, description=text, refresh=True)
        else:
            self.line(f"step {step}/{self.total}  {text}")
        self.last = time.perf_counter()

    def line(self, text: str) -> None:
        if self.live:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the rate."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin


def validation_table(validations: Sequence[tuple[int, float]], rows: int = 20) -> list[str]:
    """Lines with step, loss and a bar, evenly chosen when there are more than `rows`."""
    stride = -(-len(validations) // rows)
    chosen = list(validations[::-1][::stride])[::-1]  # the last one is always among them
    losses = [loss for _, loss in chosen]
    low, span = min(losses), max(losses) - min(losses)
    width = max(len("step"), len(str(chosen[-1][0])))
    lines = [f"{'step':>{width}}  validation loss"]
    for step, loss in chosen:
        bar = "#" * (1 + round(40 * (loss - low) / span)) if span > 0 else "#"
        lines.append(f"{step:>{width}}  {loss:.4f}  {bar}")
    return lines


def say(line: str) -> None:
    """Write a line to stderr, if somebody is there to read it: the exit code counts more."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Keep the interpreter from writing to a closed pipe once more when it ends."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
