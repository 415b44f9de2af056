"""Judge a function of loss and gradients, in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import as_bundle
from gpt_parity.oracle.compare import PARAMETER, Report
from gpt_parity.oracle.graph import GRAD, LOSS_KEY
from gpt_parity.oracle.styled import in_our_names
from gpt_parity.oracle.styles import to_style
from gpt_parity.oracle.subject import export
from gpt_parity.oracle.submission import unit_named
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.oracle_config import PRESETS, ExportConfig
from gpt_parity.tensors import as_array

Arrays = dict[str, np.ndarray]
# Step of a central difference, relative to the weights: its error is near 1e-10 of the derivative.
DIFFERENCE = 1e-5


def check(
    fn: Callable[[Arrays, np.ndarray, np.ndarray], tuple[Any, Mapping[str, Any]]],
    reference: Bundle | Path | str = "source", dtype: str = "float64", *, seed: int = 0,
    partial: bool = False, style: str = "source",
) -> Report:  # fmt: skip
    """Judge a function that computes loss and gradients:  fn(weights, tokens, targets).

    weights: NumPy arrays by parameter name, in `dtype` (float32 for the half types); tokens and
    targets (B, T) int64. All are private copies. fn returns (loss, gradients), gradients by
    parameter name, on NumPy, PyTorch or JAX; values and gradients of trace entries may be among
    them, as `value/<entry>` and `grad/<entry>`. reference: a preset (tiny, source, wide, deep,
    gpt2-tiny, gpt2-baby) drawn from `seed`, a bundle, or its file. partial: the gradients of some
    parameters will do. style: whose names and layouts weights and gradients have (`oracle.styles`);
    a tied output among the weights is the table, and its gradient may be left out.
    Raises ValueError for results that cannot be judged, and for gradients that are missing.
    """
    bundle = _reference(reference, seed)
    unit = unit_named(dtype)
    carrier = dtype if dtype in ("float64", "float32") else "float32"

    def run(weights: Arrays) -> Any:
        own = to_style(weights, bundle.config, style)
        return fn(own, bundle.tokens.copy(), bundle.targets.copy())

    returned = run({name: w.astype(carrier) for name, w in bundle.weights.items()})
    if (
        not isinstance(returned, tuple)
        or len(returned) != 2
        or not isinstance(returned[1], Mapping)
    ):
        raise TypeError("the function must return (loss, gradients by name)")
    loss, gradients = returned
    mine = {LOSS_KEY: as_array(loss)}
    if isinstance(loss, float):  # which has no dtype of its own
        mine[LOSS_KEY] = mine[LOSS_KEY].astype(carrier)
    for name, gradient in gradients.items():
        # Other styles read a parameter's name as its gradient's.
        key = name if style != "source" or name in bundle.arrays else GRAD + name
        if key in mine:
            raise ValueError(f"{name} is {key}, which is there under another name too")
        mine[key] = as_array(gradient)
    named = in_our_names(mine, bundle, style, {})
    missing = [name for name in bundle.weights if GRAD + name not in named]
    if missing and not partial:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"gradients: {missing[0]}{more} missing (partial=True permits it)")
    report = check_arrays(mine, bundle, unit.name, style=style)
    if dtype != "float64":  # differences of a float32 loss tell little
        return report
    notes = (*report.notes, *_own_derivative(run, bundle, report, named))
    return replace(report, notes=notes)


def _own_derivative(
    run: Callable[[Arrays], Any], bundle: Bundle, report: Report, mine: Arrays
) -> Iterable[str]:
    """Whether a wrong gradient is the derivative of the candidate's own loss.

    It is where the two compute different functions; it is not where the backward pass is wrong.
    The derivative along one random direction comes from a central difference.
    """
    wrong = [j.name for j in report.judgements if not j.ok and j.kind == PARAMETER]
    finite = all(np.isfinite(mine[key]).all() for key in (LOSS_KEY, *wrong[:1]))
    if not wrong or not finite:
        return
    name = wrong[0].removeprefix(GRAD)
    weight = bundle.weights[name].astype(np.float64)
    direction = np.random.default_rng(0).standard_normal(weight.shape)
    step = DIFFERENCE * max(float(np.linalg.norm(weight)), 1e-3) / float(np.linalg.norm(direction))

    def loss(sign: int) -> float:
        moved = {n: w.astype(np.float64) for n, w in bundle.weights.items()}
        moved[name] = weight + sign * step * direction
        return float(as_array(run(moved)[0]))

    numeric = (loss(1) - loss(-1)) / (2.0 * step)
    own, theirs = (float((g * direction).sum()) for g in (mine[wrong[0]], bundle.arrays[wrong[0]]))
    apart = 0.01 * abs(own - theirs)
    if abs(numeric - own) <= apart:
        yield (
            f"vote: your gradient of {name} is the derivative of your own loss; you compute "
            "another function, and its backward pass is right"
        )
    elif abs(numeric - theirs) <= apart:
        yield (
            f"vote: the derivative of your own loss by {name} is the reference's; your backward "
            "pass is wrong"
        )
    elif abs(numeric) < math.inf and apart > 1e-8 * abs(numeric):
        yield f"vote: your gradient of {name} is neither yours nor the reference's derivative"


def _reference(reference: Bundle | Path | str, seed: int) -> Bundle:
    if isinstance(reference, str) and reference in PRESETS:
        return export(ExportConfig(out=Path(), preset=reference, seed=seed))
    if isinstance(reference, str) and not Path(reference).exists():
        raise ValueError(
            f"reference is {reference!r}, one of {tuple(PRESETS)} or the path of a bundle is needed"
        )
    return as_bundle(reference)
