"""The learning rate as a pure function of the step, the same for every backend."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import SupportsIndex


def require_integer(name: str, value: SupportsIndex, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`.

    Raises TypeError for anything that is not an integer (bool included), ValueError below
    `minimum`; both name the value.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}, an integer is needed")
    try:
        number = operator.index(value)
    except TypeError:  # NumPy arrays have the method, and refuse when they are not one integer
        raise TypeError(f"{name} is a {type(value).__name__}, an integer is needed") from None
    if number < minimum:
        raise ValueError(f"{name} is {number}, at least {minimum} is needed")
    return number


def require_real(name: str, value: Real) -> float:
    """Return `value` as a float, infinities and NaN included; TypeError if it is no real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, a real number is needed")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@dataclass(frozen=True)
class WarmupCosineScheduler:
    """Linear warm-up, then half a cosine down to `min_lr`, which it keeps (SGDR, arXiv:1608.03983).

    lr(t) = max_lr (t + 1) / warmup_steps                         for t < warmup_steps
    lr(t) = min_lr + (max_lr - min_lr) (1 + cos(pi p)) / 2        after it,
            p = min(1, (t - warmup_steps) / max(1, total_steps - warmup_steps))

    Steps count from 0, so the first step already moves the weights, and every value lies in
    (0, max_lr]. Any non-negative pair of step counts is meaningful: without warm-up the cosine
    begins at once; when total_steps <= warmup_steps the rate falls to `min_lr` one step after
    its peak.

    Raises ValueError for rates that are not finite and positive, for min_lr > max_lr and for
    negative step counts; TypeError for values that are no numbers.
    """

    max_lr: float
    total_steps: int
    warmup_steps: int
    min_lr: float

    def __post_init__(self) -> None:
        for name in ("max_lr", "min_lr"):
            rate = require_real(name, getattr(self, name))
            if not 0 < rate < math.inf:
                raise ValueError(f"{name} is {rate}, a finite rate above 0 is needed")
            object.__setattr__(self, name, rate)
        for name in ("total_steps", "warmup_steps"):
            object.__setattr__(self, name, require_integer(name, getattr(self, name), 0))
        if self.min_lr > self.max_lr:
            raise ValueError(f"min_lr is {self.min_lr}, at most max_lr = {self.max_lr} is needed")

    def __call__(self, step: SupportsIndex) -> float:
        """Return the learning rate of `step` (from 0); ValueError if it is negative."""
        step = require_integer("step", step, 0)
        if step < self.warmup_steps:
            # The quotient first: the last warm-up step is then exactly max_lr, never an ulp above.
            return self.max_lr * ((step + 1) / self.warmup_steps)
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(span, step - self.warmup_steps) / span
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        # min + (max - min) may round to just above max.
        return min(self.max_lr, self.min_lr + (self.max_lr - self.min_lr) * cosine)
