"""Generic mutants that no test kills, and why: equal results for every input that can occur."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Survivor:
    """Mutants of `function` whose change matches `change` (both regular expressions)."""

    function: str
    change: str
    reason: str


EQUAL_LENGTHS = "the lengths are equal by construction; `strict` asserts it"
ANY_NEGATIVE = "NumPy infers the length for any negative number"
TWO_AXES = "the array has two axes, of which 1 is the last"

SURVIVORS = (
    Survivor(r".*", r"strict=True.* => (?!.*strict=True).*", EQUAL_LENGTHS),
    Survivor(r".*", r".*reshape\(-1\b.* => .*reshape\(-2\b.*", ANY_NEGATIVE),
    Survivor(r".*functional\.cross_entropy", r".*axis=-1.* => .*axis=\+1.*", TWO_AXES),
    Survivor(r".*functional\.linear", r".*shape\[-1\].* => .*shape\[\+1\].*", TWO_AXES),
    Survivor(r".*GPTEmbedding\.forward", r".*shape\[-1\].* => .*shape\[\+1\].*", TWO_AXES),
    Survivor(
        r".*functional\.embedding", r".*kind=\"stable\".* => .*",
        "another sort may sum equal ids in another order, which is within the bound of a sum",
    ),
    Survivor(
        r".*functional\.tril", r".*dtype=bool.* => .*",
        "1.0 and 0.0 choose like true and false",
    ),
    Survivor(
        r".*_check_mask", r".*astype\(bool\).* => .*astype\(None\).*",
        "1.0 and 0.0 choose like true and false",
    ),
    Survivor(
        r".*clip_grad_norm", r".*scale > 1\.0.* => .*scale >= 1\.0.*",
        "a scale of exactly 1 and the number 1 multiply alike",
    ),
    Survivor(
        r".*AdamWOptimizer\._runs", r"order = sorted.* => .*",
        "without the order there are more runs, each with the same arithmetic",
    ),
)  # fmt: skip


def reason_for(function: str, change: str) -> str:
    """Why the mutant of `function` with `change`, "old => new", survives; "" if unknown."""
    for survivor in SURVIVORS:
        if re.fullmatch(survivor.function, function) and re.fullmatch(survivor.change, change):
            return survivor.reason
    return ""
