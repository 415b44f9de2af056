"""Submissions and weights in the names and layouts of other projects."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gpt_parity.arrays import read_arrays
from gpt_parity.choices import STYLES
from gpt_parity.manifest import some
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import STEP, TOLERANCE, WEIGHT, Bundle
from gpt_parity.oracle.compare import Report
from gpt_parity.oracle.graph import GRAD, VALUE
from gpt_parity.oracle.llmc import read_state
from gpt_parity.oracle.styles import (
    FIRST_ROWS,
    TRANSPOSED,
    Entry,
    from_style,
    names,
    plain_name,
    without_padding,
)
from gpt_parity.oracle.submission import by_key, near
from gpt_parity.tensors import as_array

Arrays = dict[str, np.ndarray]
LOGITS = "logits"
# What stands before a parameter's name: that of its gradient, of itself, or of a step's result.
PREFIX = re.compile(rf"{GRAD}|{WEIGHT}|{STEP}/[0-9]{{1,9}}/(?:exp_avg|exp_avg_sq|weight)/")
# Lines about names.
LISTED = 3


def in_our_names(
    mine: Mapping[str, Any], bundle: Bundle, style: str, renamed: Mapping[str, str]
) -> Arrays:
    """A submission in a style by the bundle's keys, in the layouts of the bundle.

    In all styles but "source" a parameter's name alone, or after `grad/`, is its gradient; after
    `weight/` the weight itself; after `step/<k>/exp_avg/` and so on a step's. `logits` are the
    model's output. All other keys are the bundle's. renamed: from names of somebody's own to such
    names. Raises ValueError for a key that can mean two things or nothing, for the names of another
    style, and what `from_style` raises.
    """
    if any(name.startswith(TOLERANCE) for name in mine):
        raise ValueError("is a bundle or a copy of one, your own results alone are needed")
    require_style(mine, bundle, style, renamed)
    if style == "source":
        return by_key(mine, bundle, renamed)
    entries = names(bundle.config, style)
    theirs = {entry.theirs for entry in entries}
    for name, key in renamed.items():
        if _parameter(name, theirs, style) or name in bundle.arrays:
            raise ValueError(f"map: {name} has a meaning in style {style} already, and keeps it")
        _place(key, bundle, entries, style, "map: ")
    groups: dict[str, Arrays] = {}
    found: Arrays = {}
    origin: dict[str, str] = {}
    for name, value in mine.items():
        array = as_array(value)
        place = _place(renamed.get(name, name), bundle, entries, style)
        if place is None:
            continue
        prefix, key = place
        if prefix + key in origin:
            raise ValueError(
                f"{name} and {origin[prefix + key]} are both {prefix}{key}, one of them is needed"
            )
        origin[prefix + key] = name
        if prefix:
            groups.setdefault(prefix, {})[key] = array
            if prefix == GRAD and renamed.get(name, name) != GRAD + key:
                _refuse_weights(name, key, array, bundle, style)
        else:
            found[key] = _unpadded(key, name, array, bundle, style)
    for prefix, group in groups.items():
        ours = from_style(group, bundle.config, style, label=prefix, partial=True)
        found |= {prefix + name: array for name, array in ours.items()}
    return by_key(found, bundle, {})


def _parameter(key: str, theirs: set[str], style: str) -> tuple[str, str] | None:
    """Prefix and plain name of what is a parameter's in a style; None for other keys."""
    match = PREFIX.match(key)
    prefix = match.group() if match else ""
    plain = plain_name(key.removeprefix(prefix), style)
    if plain is None:
        return prefix or GRAD, ""
    return (prefix or GRAD, plain) if plain in theirs else None


def _place(
    key: str, bundle: Bundle, entries: list[Entry], style: str, label: str = ""
) -> tuple[str, str] | None:
    """(prefix, name) of a parameter's array, ("", key) of another one, None for a mask."""
    theirs = {entry.theirs for entry in entries}
    parameter = _parameter(key, theirs, style)
    if parameter is not None:
        return parameter if parameter[1] else None
    if key in (LOGITS, VALUE + LOGITS, GRAD + LOGITS):
        return "", (GRAD if key.startswith(GRAD) else VALUE) + "output"
    match = PREFIX.match(key)
    prefix = match.group() if match else ""
    own = [e.theirs for e in entries if e.ours == key.removeprefix(prefix)]
    if own and (prefix or key not in bundle.arrays):
        raise ValueError(f"{label}{key} is a name of style source, {prefix}{own[0]} is needed")
    aliases = {p + alias for alias in bundle.aliases for p in (VALUE, GRAD)}
    if key not in {*bundle.arrays, *aliases, "tokens", "targets"}:
        known = [p + name for name in theirs for p in ("", GRAD, WEIGHT)]
        ours = {entry.ours for entry in entries}
        known += [k for k in bundle.arrays if PREFIX.sub("", k, count=1) not in ours] + [LOGITS]
        raise ValueError(f"{label}{key} is unknown in style {style}{near(key, known)}")
    return "", key


def require_style(
    mine: Mapping[str, Any], bundle: Bundle, style: str, renamed: Mapping[str, str]
) -> None:
    """Raise ValueError that names another style where most names are of it and not of this one."""
    if not isinstance(bundle.config, GPT2Config):
        return
    keys = {renamed.get(name, name): as_array(array).shape for name, array in mine.items()}
    known = set(_known(dict.fromkeys(keys), bundle, style))
    strangers = [key for key in keys if key not in known]
    fitting = {
        other: len(_known(keys, bundle, other))
        for other in STYLES if other != style and strangers
    }  # fmt: skip
    most = max(fitting.values(), default=0)
    if 2 * most > len(keys) and most > len(known):
        others = " or ".join(f"--style {other}" for other, n in fitting.items() if n == most)
        raise ValueError(f"{some(strangers)} unknown in style {style}; {others} takes them")


def _known(
    keys: Mapping[str, tuple[int, ...] | None], bundle: Bundle, style: str
) -> list[str]:  # fmt: skip
    """The keys that a style has, for arrays of these shapes where they are given."""
    entries = {entry.theirs: entry for entry in names(bundle.config, style)}
    own = {*bundle.arrays, "tokens", "targets", *(WEIGHT + name for name in bundle.weights)}
    own |= {p + alias for alias in bundle.aliases for p in (VALUE, GRAD)}
    if style == "source":
        return [key for key in keys if key in own]
    own = {key for key in own if PREFIX.sub("", key, count=1) not in bundle.weights}
    own |= {LOGITS, VALUE + LOGITS, GRAD + LOGITS}

    def fits(key: str, shape: tuple[int, ...] | None) -> bool:
        place = _parameter(key, set(entries), style)
        if place is None:
            return key in own
        if not place[1] or shape is None:
            return True
        entry = entries[place[1]]
        return shape == entry.shape or (entry.layout == FIRST_ROWS and shape[1:] == entry.shape[1:])

    return [key for key, shape in keys.items() if fits(key, shape)]


def _refuse_weights(name: str, plain: str, array: np.ndarray, bundle: Bundle, style: str) -> None:
    """A state dictionary has the names of gradients that have no prefix."""
    try:
        ours = from_style({plain: array}, bundle.config, style, partial=True)
    except ValueError:
        return  # said later, of all of them together
    weights = bundle.weights
    same = {n: np.array_equal(a, weights[n].astype(a.dtype)) for n, a in ours.items()}
    if any(same[n] and a.size > 1 and a.any() for n, a in ours.items()):
        raise ValueError(
            f"{name} is the weight itself; its gradient is needed under that name, and weight/"
            f"{plain} for the weight"
        )


def _unpadded(key: str, name: str, array: np.ndarray, bundle: Bundle, style: str) -> np.ndarray:
    """Logits of llm.c without the columns of its padding, which are 0, or minus infinity."""
    if style != "llm.c" or key not in (VALUE + "output", GRAD + "output"):
        return array
    vocab_size = bundle.config.vocab_size
    if array.ndim != 3 or array.shape[-1] <= vocab_size:
        return array
    others = (-math.inf,) if key.startswith(VALUE) else ()
    return without_padding(array, vocab_size, 2, name, others)


def read_results(path: Path, bundle: Bundle, style: str, *, bfloat16: bool = False) -> Arrays:
    """The arrays of a file, or those of a debug state of llm.c; ValueError for anything else."""
    names(bundle.config, style)  # or it ends here, whatever the file holds
    if style == "llm.c" and path.suffix == ".bin":
        return read_state(path, bundle.config)
    return read_arrays(path, bfloat16=bfloat16)[0]


def matching(
    keys: Iterable[str], pattern: str, bundle: Bundle, style: str,
    handed_in: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> list[str]:  # fmt: skip
    """Those of the bundle's keys that match under their own name or one that the style has.

    Or under the one under which they were handed in, of which there may be several.
    """
    others = their_keys(bundle, style) if style != "source" else {}
    return [
        key for key in keys
        if any(
            fnmatch.fnmatchcase(name, pattern)
            for name in (key, *others.get(key, ()), *handed_in.get(key, ()))
        )
    ]  # fmt: skip


def names_handed_in(
    mine: Iterable[str], bundle: Bundle, style: str, renamed: Mapping[str, str]
) -> dict[str, list[str]]:
    """The names of a submission, which must be sound, by the bundle's key of what they hold."""
    entries = names(bundle.config, style)
    aliases = {p + a: p + e for a, e in bundle.aliases.items() for p in (VALUE, GRAD)}
    found: dict[str, list[str]] = {}
    for name in mine:
        key = renamed.get(name, name)
        place = ("", key) if style == "source" else _place(key, bundle, entries, style)
        prefix, plain = place or ("", "")
        ours = [prefix + entry.ours for entry in entries if prefix and entry.theirs == plain]
        for key in ours or [aliases.get(plain, plain)]:
            found.setdefault(key, []).append(name)
    return found


def their_keys(bundle: Bundle, style: str) -> dict[str, list[str]]:
    """Every key of the bundle that a style names otherwise -> its keys in the style."""
    found: dict[str, list[str]] = {VALUE + "output": [LOGITS], GRAD + "output": [GRAD + LOGITS]}
    entries: dict[str, list[str]] = {}
    for entry in names(bundle.config, style):
        entries.setdefault(entry.ours, []).append(entry.theirs)
    for key in [*bundle.arrays, *(WEIGHT + name for name in bundle.weights)]:
        match = PREFIX.match(key)
        prefix = match.group() if match else ""
        theirs = entries.get(key.removeprefix(prefix), [])
        if prefix and theirs:
            bare = theirs if prefix == GRAD else []
            found[key] = [*(prefix + name for name in theirs), *bare]
    return found


def translated(report: Report, bundle: Bundle, style: str) -> tuple[str, ...]:
    """Lines that say what the first wrong tensors are called in a style, and how they lie there."""
    entries: dict[str, Entry] = {}
    for entry in names(bundle.config, style):
        entries.setdefault(entry.ours, entry)
    lines = []
    own = {VALUE + "output": LOGITS, GRAD + "output": GRAD + LOGITS}
    for judgement in report.judgements:
        if not judgement.ok and judgement.name in own:
            lines.append(f"in style {style}: {judgement.name} is {own[judgement.name]}")
        match = PREFIX.match(judgement.name)
        entry = entries.get(judgement.name.removeprefix(match.group())) if match else None
        if judgement.ok or match is None or entry is None:
            continue
        lines.append(
            f"in style {style}: {judgement.name} is {match.group()}{entry.theirs}, {_needed(entry)}"
        )
    more = len(lines) - LISTED
    return (*lines[:LISTED], *([f"in style {style}: and {more} more"] if more > 0 else []))


def _needed(entry: Entry) -> str:
    """The layout in words that do not read as what is wrong."""
    if entry.layout == TRANSPOSED:
        return "which the style holds as (in, out)"
    return entry.describe()
