"""The oracle: somebody's results, judged tensor by tensor against a reference bundle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.manifest import one_line
from gpt_parity.oracle.bundle import STEP, WEIGHT, Bundle, measured
from gpt_parity.oracle.bundle_files import load_bundle
from gpt_parity.oracle.case import Case
from gpt_parity.oracle.compare import GRADIENT, PARAMETER, Judgement, Pair, Report, compare
from gpt_parity.oracle.graph import GRAD, graph
from gpt_parity.oracle.hints import hints, suspected
from gpt_parity.oracle.rounding import Unit
from gpt_parity.oracle.styled import (
    in_our_names,
    matching,
    names_handed_in,
    read_results,
    translated,
)
from gpt_parity.oracle.submission import (
    check_form,
    check_inputs,
    common_dtype,
    read_map,
    unit_named,
    with_fill,
)
from gpt_parity.oracle.tolerance import UNDECIDED, Tolerance, in_rows, norms
from gpt_parity.oracle_config import CheckConfig
from numpy_impl.loss import GPTLoss

Arrays = dict[str, np.ndarray]
# Names in a line of the report.
LISTED = 3
# From so many operations on, one of them is not located.
MANY = 8


def check_file(mine: Path, config: CheckConfig) -> Report:
    """Judge the arrays of a file; ValueError of one line for what cannot be judged."""
    bundle = load_bundle(config.ref)
    names = read_map(config.map) if config.map is not None else {}
    keep = config.html is not None
    return judge_file(
        mine, bundle, config.dtype, names=names, only=config.only, keep=keep, style=config.style
    )


def judge_file(
    mine: Path, bundle: Bundle, dtype: str | None = None, *,
    names: Mapping[str, str] | None = None, only: str | None = None, keep: bool = False,
    style: str = "source",
) -> Report:  # fmt: skip
    """`check_arrays` of the arrays of a file, in messages that name it.

    In style llm.c it may be a debug state of that project.
    """
    arrays = read_results(mine, bundle, style, bfloat16=dtype == "bfloat16")
    if "" in arrays:
        raise ValueError(f"{mine}: is one array without a name, a folder of npy files is needed")
    try:
        return check_arrays(arrays, bundle, dtype, names=names, only=only, keep=keep, style=style)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{mine}: {one_line(error)}") from error


def check_arrays(
    mine: Mapping[str, np.ndarray], bundle: Bundle, dtype: str | None = None, *,
    names: Mapping[str, str] | None = None, only: str | None = None, keep: bool = False,
    style: str = "source",
) -> Report:  # fmt: skip
    """Judge arrays by key; any subset of the bundle's. See `check_file` for the arguments.

    `keep`: the report holds the arrays and the bundle too. `style`: whose names and layouts
    they have, which `names` lead to and `only` may match.
    """
    renamed = names or {}
    named = in_our_names(mine, bundle, style, renamed)
    check_inputs(named, bundle)
    results = {k: named[k] for k in bundle.arrays if k in named}
    if only is not None:
        theirs = names_handed_in(mine, bundle, style, renamed)
        results = {k: results[k] for k in matching(results, only, bundle, style, theirs)}
    if not results:
        what = f"that matches {only!r}" if only is not None else "of the bundle's results"
        raise ValueError(f"holds nothing {what}, at least one tensor is needed")
    unit = unit_named(dtype or common_dtype(results))
    for key, array in results.items():
        check_form(key, array, bundle, unit)
    tolerances = bundle.tolerances.get(unit.name)
    if tolerances is None:
        if unit.name in ("float64", "float32"):
            raise ValueError(_missing_dtype(bundle, unit))
        tolerances = measured(bundle, unit)
    judgements, pairs = [], {}
    for key, array in results.items():
        pair = _pair(key, array, bundle, tolerances[key], unit)
        kind, dtype = bundle.kind(key), array.dtype.name
        judgements.append(
            compare(key, kind, pair.candidate, pair.reference, pair.tolerance, dtype, pair.kept)
        )
        if keep:
            pairs[kind, key] = pair
    report = _report(judgements, results, bundle, tolerances, unit)
    if style != "source":
        report = replace(report, notes=(*report.notes, *translated(report, bundle, style)))
    return replace(report, pairs=pairs, bundle=bundle) if keep else report


def _missing_dtype(bundle: Bundle, unit: Unit) -> str:
    held = ", ".join(bundle.tolerances)
    if unit.name == "float32":
        return (
            f"the bundle judges {held} only, since float32 does not hold its weights; export it "
            "with --dtype float32"
        )
    return f"the bundle judges {held} only; export it with --dtype float64"


def _pair(key: str, array: np.ndarray, bundle: Bundle, tolerance: Tolerance, unit: Unit) -> Pair:
    kept = bundle.kept(key)
    reference = bundle.arrays[key].astype(np.float64)
    return Pair(with_fill(array, kept, reference, unit), reference, tolerance, kept)


def _report(
    judgements: list[Judgement], results: Arrays, bundle: Bundle,
    tolerances: Mapping[str, Tolerance], unit: Unit,
) -> Report:  # fmt: skip
    wrong = [j.name for j in judgements if not j.ok]
    right = [j.name for j in judgements if j.ok and j.judged]
    notes: list[str] = []
    explained: tuple[str, ...] = ()
    if wrong:
        mine = {k: _comparable(k, a, bundle) for k, a in results.items()}
        case = Case(bundle, unit, mine, tolerances, wrong, right)
        explained = hints(case)
        notes += _unexplained(case, explained)
        notes += _whereabouts(case)
        notes += _recipe(case)
        notes += _not_finite(results)
        notes += _vote(wrong[0], bundle)
    else:
        notes += floor(results, bundle, tolerances, unit)
        notes += step_floor(results, bundle, tolerances)
    unjudged = [j.name for j in judgements if not j.judged]
    gradients = [j for j in judgements if j.kind in (GRADIENT, PARAMETER)]
    if not wrong and not any(j.judged for j in gradients or judgements):
        raise ValueError(
            f"no gradient can be judged in {unit.name} with these weights, since {UNDECIDED}: "
            "smaller weights, such as those that training starts from, or a finer dtype is needed"
        )
    if (
        not wrong
        and gradients
        and all(tolerances[j.name].hides(bundle.arrays[j.name]) for j in gradients)
    ):
        raise ValueError(
            f"no gradient that was handed in tells anything in {unit.name} with these weights, "
            "since each is zero, or rounding is as large: other weights are needed, such as those "
            "that training starts from"
        )
    if unjudged:
        notes.append(f"not judged: {_some(unjudged)}; {UNDECIDED}")
    absent = [k for k in bundle.arrays if k not in results]
    if absent:
        notes.append(f"not handed in: {len(absent)} of {len(bundle.arrays)} tensors")
    return Report(judgements, explained, tuple(notes), unit.name)


def _comparable(key: str, array: np.ndarray, bundle: Bundle) -> np.ndarray:
    """float64, with a finite fill."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is one more value that is not finite
        array = array.astype(np.float64)
    kept = bundle.kept(key)
    if kept is not None:
        array = np.where(~kept & np.isneginf(array), bundle.config.mask_value, array)
    return array


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _unexplained(case: Case, explained: tuple[str, ...]) -> Iterable[str]:
    """Say so where no hint was found, which is not the same as not having looked."""
    if not explained and np.isfinite(case.mine[case.first]).all():
        yield "no hint: no mistake that was tried gives these numbers"


def _whereabouts(case: Case) -> Iterable[str]:
    """The operation that made the first wrong tensor, and what the others follow from."""
    if case.first.startswith("step/"):
        return
    bundle = case.bundle
    operations, _ = graph(bundle.model(), GPTLoss(), bundle.tokens, bundle.targets)
    known = [*case.right, *case.wrong]
    inputs, _ = operations.upstream(case.first, known, case.siblings)
    forward_suspects, backward_suspects = suspected(case, operations)
    names = [f"{node.role} at {node.place}" for node in forward_suspects]
    names += [f"vjp of {node.role} at {node.place}" for node in backward_suspects]
    found = names[0] if len(names) == 1 else f"one of {len(names)}, {names[0]} to {names[-1]}"
    if len(names) <= LISTED:
        found = ", ".join(names)
    elif len(names) > MANY:
        found += " (hand in entries, value/ and grad/, to narrow it down)"
    agree = f"; {_some(inputs)} agree{'s' if len(inputs) == 1 else ''}" if inputs else ""
    yield f"operation: {found}{agree}"
    roots = operations.independent(case.wrong, case.right, case.siblings)
    follow = [k for k in case.wrong[1:] if k not in roots]
    if follow:
        yield f"wrong as its consequence: {_some(follow)}"
    if roots:
        yield f"wrong on their own: {_some(roots)}"


def _recipe(case: Case) -> Iterable[str]:
    """The hyperparameters of the steps, where a step is what differs."""
    if case.first.startswith(f"{STEP}/"):
        recipe = ", ".join(f"{name} {value}" for name, value in case.bundle.optimizer.items())
        yield f"the reference's steps: AdamW, {recipe}; parameters of one axis do not decay"


def _not_finite(results: Arrays) -> Iterable[str]:
    names = [k for k, a in results.items() if not np.isfinite(a).all() and "mask.output" not in k]
    if names:
        yield f"NaN or infinite: first in {names[0]}" + (
            f", in {len(names)} tensors" if len(names) > 1 else ""
        )


def _vote(key: str, bundle: Bundle) -> Iterable[str]:
    """Whether the references agree among themselves about a gradient."""
    vote = bundle.votes.get(key)
    if vote is None:
        return
    legs = {leg: ratio for leg, ratio in vote.items() if ratio is not None}
    split = [leg for leg, ratio in legs.items() if ratio > 1.0]
    if split:
        yield f"vote: the references split, {' and '.join(split)} against complex step"
    else:
        yield f"vote: {', '.join(legs)} and complex step agree, the candidate stands alone"


def floor(
    results: Mapping[str, Any], bundle: Bundle, tolerances: Mapping[str, Tolerance], unit: Unit
) -> Iterable[str]:
    """The smallest relative error of a gradient that would have been noticed."""
    seen, blind = {}, []
    for key in results:
        if not key.startswith(GRAD) or not 0.0 < tolerances[key].whole < math.inf:
            continue
        if tolerances[key].hides(bundle.arrays[key]):
            blind.append(key)
        else:
            size = float(np.linalg.norm(bundle.arrays[key].astype(np.float64)))
            seen[key] = tolerances[key].whole / size
    if not seen:
        yield "floor: no gradient was judged"
        return
    ordered = sorted(seen.values())
    worst = max(seen, key=lambda key: seen[key])
    others = " other" if blind else ""
    half = f"{ordered[len(ordered) // 2]:.1e} in half of the{others} gradients, of "
    every = "every one"
    if len(seen) == 1:
        half, every = "", f"the one{others} gradient"
    if blind:
        yield f"cannot see: anything at all in {_some(blind)}, where rounding is as large"
    yield (
        f"floor: a relative error of {half}{seen[worst]:.1e} in {every} ({worst}) would have been "
        f"noticed in {unit.name}"
    )
    if unit.name not in ("float64", "float32"):
        yield (
            f"cannot see: in {unit.name} mistakes below the floor, such as gelu's two forms; run "
            "the same code once in float32"
        )


def step_floor(
    results: Mapping[str, Any], bundle: Bundle, tolerances: Mapping[str, Tolerance]
) -> Iterable[str]:
    """The smallest relative error of an update that would have been noticed."""
    seen = {}
    for key in results:
        _, _, quantity = key.partition("/")
        number, _, rest = quantity.partition("/")
        if not (key.startswith(f"{STEP}/") and rest.startswith(WEIGHT)):
            continue
        name = rest.removeprefix(WEIGHT)
        before = f"{STEP}/{int(number) - 1}/{rest}"
        start = bundle.arrays.get(before, bundle.weights[name])
        update, tolerance = bundle.arrays[key].astype(np.float64) - start, tolerances[key]
        whole, parts = norms(in_rows(update, tolerance))
        seen[key] = tolerance.whole / whole if whole else math.inf
        if whole and update.ndim == parts.ndim:  # judged by thirds too
            moved = parts > 0.0
            seen[key] = min(seen[key], float((tolerance.rows[moved] / parts[moved]).min()))
    if not seen:
        return
    worst = max(seen, key=lambda key: seen[key])
    yield f"floor of steps: an update off by {seen[worst]:.1e} of its size ({worst})"
    blind = [key for key, ratio in seen.items() if ratio >= 1.0]
    if blind:
        yield f"cannot see: whether there was any update in {_some(blind)}"


def report_json(report: Report) -> str:
    """The report as JSON; ratios that are not finite are strings."""

    def finite(value: float) -> float | str:
        return value if math.isfinite(value) else str(value)

    return json.dumps(
        {
            "schema": "gpt-parity/check",
            "version": 1,
            "ok": report.ok,
            "dtype": report.title,
            "verdict": report.verdict(),
            "first": report.first.name if report.first else None,
            "hints": list(report.hints),
            "notes": list(report.notes),
            "tensors": [
                {"name": j.name, "kind": j.kind, "ok": j.ok, "judged": j.judged,
                 "ratio": finite(j.ratio), "error": finite(j.error),
                 "row": list(j.row) if j.row is not None else None, "reason": j.reason}
                for j in report.judgements
            ],
        },
        indent=1, allow_nan=False,
    )  # fmt: skip
