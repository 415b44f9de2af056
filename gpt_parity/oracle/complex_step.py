"""The third vote: directional derivatives by complex step, without any backward pass.

f(x + i h d) = f(x) + i h <g, d> + O(h^2), so <g, d> = Im f / h to full precision with h = 1e-30
(Squire & Trapp, SIAM Review 1998): nothing is subtracted, so nothing cancels.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.oracle.compare import GRADIENT, PARAMETER
from gpt_parity.oracle.tolerance import Tolerances
from gpt_parity.oracle.trace import Trace
from numpy_impl.tape import Observer, no_grad, observe

STEP = 1e-30
DIRECTIONS = 3
# Relative error of <g, d> that float64 reaches at the training initialisation.
AT_INITIALISATION = 1e-13


@dataclass(frozen=True)
class Vote:
    """Worst disagreement of one gradient with complex step, in units of what is allowed."""

    name: str
    kind: str
    closure: float
    autograd: float


class _Inject(Observer):
    """Adds i h d to the result of one operation, counted from the start of the pass."""

    def __init__(self, ordinal: int, direction: np.ndarray) -> None:
        self.left, self.direction = ordinal, direction

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> np.ndarray | None:
        self.left -= 1
        return out.data + 1j * STEP * self.direction if self.left == -1 else None


def complex_step_votes(
    model: Any, loss_fn: Any, tokens: np.ndarray, targets: np.ndarray, closure: Trace,
    autograd: Trace, tolerances: Tolerances | None = None, seed: int = 0,
) -> list[Vote]:  # fmt: skip
    """Compare both float64 traces with complex step, in three random directions per tensor.

    `model` is the complex128 NumPy model with the weights of `closure`. Allowed is
    1e-13 ||g|| ||d|| / sqrt(n), which holds at the training initialisation; elsewhere pass
    Monte Carlo `tolerances`, and it is tol ||d|| / sqrt(n). Raises ValueError for a gradient of
    another shape.
    """
    rng = np.random.default_rng(seed)
    parameters = dict(model.named_parameters())

    def loss(observer: Observer) -> float:
        with no_grad(), observe(observer), warnings.catch_warnings():
            warnings.simplefilter("error", np.exceptions.ComplexWarning)
            return float(loss_fn(model(tokens), targets).data.imag) / STEP

    def derivative(kind: str, name: str, direction: np.ndarray) -> float:
        if kind == GRADIENT:
            return loss(_Inject(closure.ordinals[name], direction))
        data = parameters[name].data
        before = data.copy()
        try:
            data += 1j * STEP * direction
            return loss(Observer())
        finally:
            data[...] = before

    votes = []
    for kind, part in ((GRADIENT, "gradients"), (PARAMETER, "parameters")):
        for name, g in getattr(closure, part).items():
            worst = {"closure": 0.0, "autograd": 0.0}
            for _ in range(DIRECTIONS):
                d = rng.standard_normal(g.shape)
                numeric = derivative(kind, name, d)
                size = float(np.linalg.norm(d)) / math.sqrt(g.size)
                if tolerances is None:
                    allowed = AT_INITIALISATION * float(np.linalg.norm(g)) * size
                else:
                    allowed = getattr(tolerances, part)[name].whole * size
                for who, trace in (("closure", closure), ("autograd", autograd)):
                    gradient = getattr(trace, part)[name]
                    if gradient.shape != d.shape:
                        raise ValueError(f"{name}: got shape {gradient.shape}, needed {d.shape}")
                    error = abs(numeric - float((gradient * d).sum()))
                    ratio = error / allowed if allowed else math.inf if error else 0.0
                    worst[who] = max(worst[who], math.inf if math.isnan(ratio) else ratio)
            votes.append(Vote(name, kind, **worst))
    return votes
