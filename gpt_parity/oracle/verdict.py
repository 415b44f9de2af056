"""The oracle: somebody's results, judged tensor by tensor against a reference bundle."""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.arrays import read_arrays
from gpt_parity.config import PRESETS, CheckConfig, ExportConfig
from gpt_parity.oracle.bundle import TOLERANCE, WEIGHT, Bundle, load_bundle, measured
from gpt_parity.oracle.case import Case
from gpt_parity.oracle.compare import FORWARD, PARAMETER, Judgement, Report, compare
from gpt_parity.oracle.graph import GRAD, LOSS_KEY, graph
from gpt_parity.oracle.hints import hints, suspected
from gpt_parity.oracle.rounding import UNITS, Unit
from gpt_parity.oracle.subject import export
from gpt_parity.oracle.tolerance import Tolerance
from gpt_parity.tensors import as_array
from numpy_impl.gpt import check_mask_value
from numpy_impl.loss import GPTLoss

Arrays = dict[str, np.ndarray]
# In which dtypes results of some arithmetic may be handed in.
CARRIERS = {"tf32": ("float32",), "bfloat16": ("float32",), "float16": ("float16", "float32")}
# Names in a line of the report.
LISTED = 3
# Step of a central difference, relative to the weights: its error is near 1e-10 of the derivative.
DIFFERENCE = 1e-5


def check_file(mine: Path, config: CheckConfig) -> Report:
    """Judge the arrays of a file; ValueError of one line for what cannot be judged."""
    bundle = load_bundle(config.ref)
    arrays, _ = read_arrays(mine, bfloat16=config.dtype == "bfloat16")
    if "" in arrays:
        raise ValueError(f"{mine}: is one array without a name, a folder of npy files is needed")
    try:
        names = read_map(config.map) if config.map is not None else {}
        return check_arrays(arrays, bundle, config.dtype, names=names, only=config.only)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{mine}: {error}") from error


def read_map(path: Path) -> dict[str, str]:
    """A TOML file of  "mine" = "the bundle's"  as a dictionary."""
    try:
        names = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: is not TOML ({error})") from error
    wrong = [name for name, key in names.items() if not isinstance(key, str)]
    if wrong:
        raise ValueError(f'{path}: {wrong[0]} is no text, lines  "mine" = "theirs"  are needed')
    return names


def check(
    fn: Callable[[Arrays, np.ndarray, np.ndarray], tuple[Any, Mapping[str, Any]]],
    reference: Bundle | Path | str = "source", dtype: str = "float64", seed: int = 0,
) -> Report:  # fmt: skip
    """Judge a function that computes loss and gradients:  fn(weights, tokens, targets).

    weights: NumPy arrays by parameter name, in `dtype` (float32 for the half types); tokens and
    targets (B, T) int64. All are private copies. fn returns (loss, gradients), gradients by
    parameter name, on NumPy, PyTorch or JAX; values and gradients of trace entries may be among
    them, as `value/<entry>` and `grad/<entry>`. reference: a preset (tiny, source, wide, deep),
    a bundle, or its file. Raises ValueError for results that cannot be judged.
    """
    bundle = _reference(reference, seed)
    unit = _unit(dtype)
    carrier = dtype if dtype in ("float64", "float32") else "float32"
    weights = {name: w.astype(carrier) for name, w in bundle.weights.items()}
    loss, gradients = fn(weights, bundle.tokens.copy(), bundle.targets.copy())
    mine = {"loss": as_array(loss)}
    for name, gradient in gradients.items():
        key = name if name in bundle.arrays else GRAD + name
        mine[key] = as_array(gradient)
    if isinstance(loss, float):
        mine["loss"] = mine["loss"].astype(carrier)
    report = check_arrays(mine, bundle, unit.name)
    if dtype != "float64":  # differences of a float32 loss tell little
        return report
    notes = (*report.notes, *_own_derivative(fn, bundle, report, mine))
    return replace(report, notes=notes)


def _own_derivative(
    fn: Callable[..., Any], bundle: Bundle, report: Report, mine: Arrays
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
        return float(as_array(fn(moved, bundle.tokens.copy(), bundle.targets.copy())[0]))

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
    if isinstance(reference, Bundle):
        return reference
    if isinstance(reference, str) and reference in PRESETS:
        return export(ExportConfig(out=Path(), preset=reference, seed=seed))
    return load_bundle(Path(reference))


def _unit(dtype: str) -> Unit:
    if dtype not in UNITS:
        raise ValueError(f"dtype is {dtype!r}, one of {tuple(UNITS)} is needed")
    return UNITS[dtype]


def check_arrays(
    mine: Mapping[str, np.ndarray], bundle: Bundle, dtype: str | None = None, *,
    names: Mapping[str, str] | None = None, only: str | None = None,
) -> Report:  # fmt: skip
    """Judge arrays by key; any subset of the bundle's. See `check_file` for the arguments."""
    named = _by_key(mine, bundle, names or {})
    _check_inputs(named, bundle)
    results = {k: named[k] for k in bundle.arrays if k in named}
    if only is not None:
        results = {k: a for k, a in results.items() if fnmatch.fnmatchcase(k, only)}
    if not results:
        what = f"that matches {only!r}" if only is not None else "of the bundle's results"
        raise ValueError(f"holds nothing {what}, at least one tensor is needed")
    unit = _unit(dtype or _common_dtype(results))
    for key, array in results.items():
        _check_form(key, array, bundle, unit)
    tolerances = bundle.tolerances.get(unit.name)
    if tolerances is None:
        if unit.name in ("float64", "float32"):
            raise ValueError(_missing_dtype(bundle, unit))
        tolerances = measured(bundle, unit)
    judgements = [
        _judge(key, array, bundle, tolerances[key], unit) for key, array in results.items()
    ]
    return _report(judgements, results, bundle, tolerances, unit)


def _missing_dtype(bundle: Bundle, unit: Unit) -> str:
    held = ", ".join(bundle.tolerances)
    if unit.name == "float32":
        return (
            f"the bundle judges {held} only, since float32 does not hold its weights; export it "
            "with --dtype float32"
        )
    return f"the bundle judges {held} only; export it with --dtype float64"


def _by_key(mine: Mapping[str, np.ndarray], bundle: Bundle, names: Mapping[str, str]) -> Arrays:
    """Every array under the bundle's name; ValueError for names that it has not."""
    inputs = {"tokens", "targets", *(WEIGHT + n for n in bundle.weights)}
    aliases = {p + a: p + e for a, e in bundle.aliases.items() for p in ("value/", "grad/")}
    known = {*bundle.arrays, *inputs, *aliases}
    for name, key in names.items():
        if key not in known:
            raise ValueError(f"map: {name} = {key} names nothing in the bundle{_near(key, known)}")
    if any(name.startswith(TOLERANCE) for name in mine):
        raise ValueError("is a bundle or a copy of one, your own results alone are needed")
    found: Arrays = {}
    for name, array in mine.items():
        key = name if name in known else names.get(name, name)
        if key not in known:
            raise ValueError(f"{name} is unknown to the bundle{_near(name, known)}")
        key = aliases.get(key, key)
        if key in found:
            raise ValueError(f"{name} is {key}, which is there under another name too")
        found[key] = np.asarray(array)
    return found


def _near(name: str, known: Iterable[str]) -> str:
    """A suggestion for a name that almost exists; nothing is matched on its own."""
    known = list(known)
    ends = [k for k in known if k.endswith(f"/{name}") and k.startswith(GRAD)]
    close = ends or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; is it {close[0]}?" if close else ""


def _check_inputs(named: Arrays, bundle: Bundle) -> None:
    inputs = {"tokens": bundle.tokens, "targets": bundle.targets}
    inputs |= {WEIGHT + n: w for n, w in bundle.weights.items()}
    for key in inputs.keys() & named.keys():
        mine, theirs = named[key], inputs[key]
        if mine.shape != theirs.shape or not np.array_equal(mine, theirs.astype(mine.dtype)):
            raise ValueError(f"{key} differs from the bundle's, whose results are the reference")


def _common_dtype(results: Arrays) -> str:
    dtypes = {array.dtype.name: key for key, array in results.items()}
    if len(dtypes) > 1:
        (one, first), (other, second) = list(dtypes.items())[:2]
        raise ValueError(f"{first} is {one} and {second} is {other}, one dtype is needed")
    return next(iter(dtypes))


def _check_form(key: str, array: np.ndarray, bundle: Bundle, unit: Unit) -> None:
    carriers = CARRIERS.get(unit.name, (unit.name,))
    if array.dtype.name not in carriers:
        raise ValueError(f"{key} is {array.dtype}, needed {' or '.join(carriers)}")
    needed = bundle.arrays[key].shape
    if array.shape == needed:
        return
    transposed = array.ndim >= 2 and array.swapaxes(-1, -2).shape == needed
    advice = " (transposed? nothing is transposed for you)" if transposed else ""
    raise ValueError(f"{key} has shape {array.shape}, needed {needed}{advice}")


def _judge(
    key: str, array: np.ndarray, bundle: Bundle, tolerance: Tolerance, unit: Unit
) -> Judgement:
    kept = bundle.kept(key)
    reference = bundle.arrays[key].astype(np.float64)
    if kept is not None:
        array = _with_fill(array, kept, reference, unit)
    return compare(key, bundle.kind(key), array, reference, tolerance, array.dtype.name, kept)


def _with_fill(
    array: np.ndarray, kept: np.ndarray, reference: np.ndarray, unit: Unit
) -> np.ndarray:
    """The bundle's fill where the candidate's serves as well, -inf for example."""
    dtype = array.dtype
    least = float(np.max(array[~kept], initial=-math.inf))
    try:
        check_mask_value(least, np.dtype("float64" if unit.name == "float64" else "float32"), False)
    except ValueError:
        return array
    fill = np.maximum(reference, float(np.finfo(dtype).min)).astype(dtype)
    return np.where(kept, array, fill)


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
        notes += _whereabouts(case)
        notes += _not_finite(results)
        notes += _vote(wrong[0], bundle)
    else:
        notes += floor(results, bundle, tolerances, unit)
    unjudged = [j.name for j in judgements if not j.judged]
    if unjudged:
        notes.append(
            f"not judged: {_some(unjudged)}; rounding alone may choose the winner of a softmax"
        )
    absent = [k for k in bundle.arrays if k not in results]
    if absent:
        notes.append(f"not handed in: {_some(absent)}")
    return Report(judgements, explained, tuple(notes), unit.name)


def _comparable(key: str, array: np.ndarray, bundle: Bundle) -> np.ndarray:
    """float64, with a finite fill."""
    array = array.astype(np.float64)
    kept = bundle.kept(key)
    if kept is not None:
        array = np.where(~kept & np.isneginf(array), bundle.config.mask_value, array)
    return array


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


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
    agree = f"; {_some(inputs)} agree{'s' if len(inputs) == 1 else ''}" if inputs else ""
    yield f"operation: {found}{agree}"
    forward = any(bundle.kind(k) in (FORWARD, "loss") for k in case.wrong)
    roots, wrong = [], set(case.wrong)
    for i, key in enumerate(case.wrong[1:], start=1):
        if key.startswith("step/") or (forward and key.startswith(GRAD)):
            continue
        above, _ = operations.upstream(key, known, [*case.siblings, *case.wrong[:i]])
        if not wrong.intersection(above):
            roots.append(key)
    follow = [k for k in case.wrong[1:] if k not in roots]
    if follow:
        yield f"wrong as its consequence: {_some(follow)}"
    if roots:
        yield f"wrong on their own: {_some(roots)}"


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
    seen = {}
    for key in results:
        size = float(np.linalg.norm(bundle.arrays[key].astype(np.float64)))
        if key.startswith(GRAD) and size and math.isfinite(tolerances[key].whole):
            seen[key] = tolerances[key].whole / size
    if not seen:
        yield "floor: no gradient was judged"
        return
    ordered = sorted(seen.values())
    worst = max(seen, key=lambda key: seen[key])
    yield (
        f"floor: a relative error of {ordered[len(ordered) // 2]:.1e} in half of the gradients, of "
        f"{seen[worst]:.1e} in every one ({worst}) would have been noticed in {unit.name}"
    )
    blind = [k for k, ratio in seen.items() if ratio >= 1.0]
    if blind:
        yield f"cannot see: anything at all in {_some(blind)}, where rounding is as large"
    if unit.name not in ("float64", "float32"):
        yield (
            f"cannot see: in {unit.name} mistakes below the floor, such as gelu's two forms; run "
            "the same code once in float32"
        )


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
