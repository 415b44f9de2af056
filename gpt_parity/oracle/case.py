"""A judged submission, and when a prediction explains what is wrong in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpt_parity.oracle.bundle import STEP, Bundle
from gpt_parity.oracle.rounding import Unit
from gpt_parity.oracle.tolerance import Tolerance

Arrays = Mapping[str, np.ndarray]

# An explanation leaves at most this part of the error.
UNEXPLAINED = 0.1
# A prediction is computed at the reference's inputs and by other operations than the candidate:
# it may be off by this many tolerances.
SLACK = 2.0
ROUNDINGS = 64.0
# So many elements are a few, and by so little may one alone miss, relative to the error.
FEW_ELEMENTS = 4
CHANCE = 1e-4
# What is out by more than the inverse of this many tolerances is out by far.
FAR = 0.1
# In coarse formats much is explained by much, unless it is out by more than the inverse of this.
COARSE = 0.01
# The fill of a mask where float16 does not hold the model's own.
LEAST_FLOAT16 = -65504.0


@dataclass(frozen=True)
class Case:
    """A judged submission: `wrong` are keys in the order of judgement, `right` the others."""

    bundle: Bundle
    unit: Unit
    mine: Arrays
    tolerances: Mapping[str, Tolerance]
    wrong: list[str]
    right: list[str]

    @property
    def first(self) -> str:
        return self.wrong[0]

    @property
    def comparable(self) -> list[str]:
        """What can be wrong for the same reason: the pass, or the step of the first."""
        parts = self.first.split("/")
        step = "/".join([*parts[:2], ""]) if parts[0] == STEP else ""
        return [k for k in self.wrong if k.startswith(step or f"{STEP}/") == bool(step)]

    @property
    def siblings(self) -> list[str]:
        """Right gradients of matrices: they vouch for the gradient of the result as well.

        That of a bias does not, since a sum over rows can be right by accident.
        """
        return [key for key in self.right if self.bundle.arrays[key].ndim > 1]

    def reference(self, key: str) -> np.ndarray:
        return self.bundle.arrays[key].astype(np.float64)

    def scores(self, key: str, x: np.ndarray) -> np.ndarray:
        """x, of masked scores with a small fill: a norm should not be that of the fill."""
        kept = self.bundle.kept(key)
        if kept is None or x.shape != kept.shape:
            return x
        least = 2.0 * float(np.abs(self.reference(key)[kept]).max()) + 1.0
        return np.where(x <= max(self.bundle.config.mask_value, LEAST_FLOAT16), -least, x)

    def distance(self, key: str, x: np.ndarray, y: np.ndarray | None = None) -> float:
        """|x - y|, without y from the reference; infinite where it overflows."""
        y = self.reference(key) if y is None else y
        return _norm(self.scores(key, x) - self.scores(key, y))

    def allowed(self, key: str, prediction: np.ndarray) -> float:
        """By how much a candidate may miss a prediction, which may be larger than the reference."""
        size, own = (
            _norm(self.scores(key, prediction)),
            _norm(self.scores(key, self.reference(key))),
        )
        tolerance = self.tolerances[key].whole
        larger = tolerance * max(1.0, size / own) if own else tolerance
        return SLACK * max(larger, ROUNDINGS * self.unit.u * size)

    def explains(self, key: str, prediction: np.ndarray) -> bool:
        """Whether a wrong tensor is what was predicted."""
        mine = self.mine[key]
        if mine.shape != prediction.shape or not np.isfinite(prediction).all():
            return False
        rest, error = self.distance(key, mine, prediction), self.distance(key, mine)
        return self.holds(key, prediction) and rest <= UNEXPLAINED * error

    def is_evidence(self, count: int, predictions: Arrays | None = None) -> bool:
        """Whether an explanation of `count` of the wrong tensors, the first among them, tells much.

        A few numbers are matched by one of many explanations by chance. Then it must hold for half
        of what else is wrong, or, where it predicts nothing else, match four digits more than
        needed.
        """
        if self.unit.stored and self.share(self.first) > COARSE:
            return False
        if self.mine[self.first].size >= FEW_ELEMENTS:
            return True
        if predictions is None:
            far = sum(key == self.first or self.share(key) < FAR for key in self.comparable)
            return 2 * count >= far if far > 1 else self.share(self.first) <= CHANCE
        wrong = [k for k in self.comparable if k in predictions and k != self.first]
        if len(wrong) + sum(k in predictions for k in self.right) < FEW_ELEMENTS:
            return self.share(self.first) <= CHANCE
        return 2 * sum(self.holds(k, predictions[k]) for k in wrong) >= len(wrong)

    def holds(self, key: str, prediction: np.ndarray) -> bool:
        """Whether a tensor is what was predicted, be it little or far out."""
        return self.distance(key, self.mine[key], prediction) <= self.allowed(key, prediction)

    def share(self, key: str) -> float:
        """What is allowed, as a part of the error."""
        return self.allowed(key, self.reference(key)) / self.distance(key, self.mine[key])

    def leaves_right(self, predictions: Arrays) -> bool:
        """Whether what agrees with the reference agrees with the predictions too."""
        return all(self.leaves(key, predictions[key]) for key in self.right if key in predictions)

    def leaves(self, key: str, prediction: np.ndarray) -> bool:
        """Whether a right tensor agrees with a prediction too."""
        return self.distance(key, prediction) <= SLACK * self.tolerances[key].whole


def _norm(x: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(x))
