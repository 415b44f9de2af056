"""One array against its reference in one printed line, as one tries a backward pass by steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.oracle.bounds import largest, ratios
from gpt_parity.oracle.bundle_files import as_bundle
from gpt_parity.oracle.compare import FORWARD, Judgement, Report, compare
from gpt_parity.oracle.judge import unit_of
from gpt_parity.oracle.rounding import Unit
from gpt_parity.oracle.submission import with_fill
from gpt_parity.oracle.tolerance import RESULT_FACTOR, Tolerance, norms
from gpt_parity.tensors import as_array


def result_tolerance(reference: np.ndarray, unit: Unit) -> Tolerance:
    """The tolerance of rounding the result alone: 12 u ||reference||, whole and by rows."""
    whole, rows = norms(reference)
    return Tolerance(RESULT_FACTOR * unit.u * whole, RESULT_FACTOR * unit.u * rows)


def cmp(name: str, mine: Any, reference: Any, dtype: str | None = None) -> Report:
    """Print in one line whether `mine` is the reference, exactly or within tolerance.

    `mine` is an array of any library; `dtype` is the one it must have, by default its own. The
    reference is a bundle or its path, of which `name` is a key and which has the tolerance, or an
    array of the same shape: then only the rounding of the result itself is allowed,
    12 u ||reference||, which is less than a long computation in float32 may need. Exact means equal
    to the reference rounded to `dtype`. Raises ValueError for a dtype that is not float32 or
    float64, for a reference that is not finite or that is `mine`, and for zeros against zeros,
    where nothing is compared.
    """
    mine = as_array(mine)
    unit = unit_of(dtype or mine.dtype.name, f"{name}: dtype")
    if isinstance(reference, str | Path):
        reference = as_bundle(reference)
    if hasattr(reference, "reference"):
        array, tolerance = reference.reference(name, unit.name)
        kind, kept = reference.kind(name), reference.kept(name)
        mine = with_fill(mine, kept, array, unit)
        allowed = "tolerance of the bundle"
    else:
        array = as_array(reference).astype(np.float64, copy=False)
        tolerance = result_tolerance(array, unit)
        kind, kept = FORWARD, None
        allowed = "tolerance of rounding the result alone"
    judgement = compare(name, kind, mine, array, tolerance, unit.name, kept)
    report = Report([judgement], title=unit.name)
    print(f"{name}: {_line(judgement, mine, array, unit)} ({allowed}, {unit.name})")
    return report


def _line(judgement: Judgement, mine: np.ndarray, reference: np.ndarray, unit: Unit) -> str:
    if mine.shape != reference.shape or mine.dtype != unit.name:
        return f"not exact, {judgement.reason}"
    if np.array_equal(mine, reference.astype(unit.name)):
        return "exact"
    if not judgement.judged:
        return "not exact, not judged"
    errors, _ = ratios(mine, reference, 0.0)
    at = largest(errors)
    verdict = "agrees" if judgement.ok else "differs"
    size = judgement.reason or f"{judgement.ratio:.3g} of tolerance"
    return f"not exact, {verdict}, {size}, worst at {at}: off by {errors[at]:.2g}"
