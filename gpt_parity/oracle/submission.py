"""What is handed in: names, shapes and dtypes, before any number is looked at."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from gpt_parity.oracle.bundle import WEIGHT, Bundle
from gpt_parity.oracle.graph import GRAD
from gpt_parity.oracle.rounding import UNITS, Unit

Arrays = dict[str, np.ndarray]
# In which dtypes results of some arithmetic may be handed in.
CARRIERS = {"tf32": ("float32",), "bfloat16": ("float32",), "float16": ("float16", "float32")}


def read_map(path: Path) -> dict[str, str]:
    """A TOML file of  "mine" = "the bundle's"  as a dictionary."""
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "there is no such file")
        names = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML ({error})") from error
    wrong = [name for name, key in names.items() if not isinstance(key, str)]
    if wrong:
        raise ValueError(f'{path}: {wrong[0]} is no text, lines  "mine" = "theirs"  are needed')
    return names


def unit_named(dtype: str) -> Unit:
    if dtype not in UNITS:
        raise ValueError(f"dtype is {dtype!r}, one of {tuple(UNITS)} is needed")
    return UNITS[dtype]


def by_key(mine: Mapping[str, np.ndarray], bundle: Bundle, names: Mapping[str, str]) -> Arrays:
    """Every array under the bundle's name; ValueError for names that it has not."""
    inputs = {"tokens", "targets", *(WEIGHT + n for n in bundle.weights)}
    aliases = {p + a: p + e for a, e in bundle.aliases.items() for p in ("value/", "grad/")}
    known = {*bundle.arrays, *inputs, *aliases}
    for name, key in names.items():
        if name in known:
            raise ValueError(f"map: {name} is a name of the bundle itself, and keeps its meaning")
        if key not in known:
            raise ValueError(f"map: {name} = {key} names nothing in the bundle{near(key, known)}")
    keys = {name: names.get(name, name) for name in mine}
    unknown = [name for name, key in keys.items() if key not in known]
    if unknown:
        more = f" and {len(unknown) - 1} more are" if len(unknown) > 1 else " is"
        raise ValueError(f"{unknown[0]}{more} unknown to the bundle{near(unknown[0], known)}")
    found: Arrays = {}
    for name, array in mine.items():
        key = aliases.get(keys[name], keys[name])
        if key in found:
            raise ValueError(f"{name} is {key}, which is there under another name too")
        found[key] = np.asarray(array)
    return found


def near(name: str, known: Iterable[str]) -> str:
    """A suggestion for a name that almost exists; nothing is matched on its own."""
    known = list(known)
    ends = [k for k in known if k.endswith(f"/{name}") and k.startswith(GRAD)]
    close = ends or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; is it {close[0]}?" if close else ""


def check_inputs(named: Arrays, bundle: Bundle) -> None:
    inputs = {"tokens": bundle.tokens, "targets": bundle.targets}
    inputs |= {WEIGHT + n: w for n, w in bundle.weights.items()}
    for key in inputs.keys() & named.keys():
        mine, theirs = named[key], inputs[key]
        # Weights may come back in the dtype in which they were used.
        dtypes = ("float32", "float64") if key.startswith(WEIGHT) else ("int32", "int64", "uint8")
        same = mine.dtype.name in dtypes and np.array_equal(mine, theirs.astype(mine.dtype))
        if not same:
            raise ValueError(f"{key} differs from the bundle's, whose results are the reference")


def common_dtype(results: Arrays) -> str:
    dtypes = {array.dtype.name: key for key, array in results.items()}
    if len(dtypes) > 1:
        (one, first), (other, second) = list(dtypes.items())[:2]
        raise ValueError(f"{first} is {one} and {second} is {other}, one dtype is needed")
    return next(iter(dtypes))


def check_form(key: str, array: np.ndarray, bundle: Bundle, unit: Unit) -> None:
    carriers = CARRIERS.get(unit.name, (unit.name,))
    if array.dtype.name not in carriers:
        raise ValueError(f"{key} is {array.dtype}, needed {' or '.join(carriers)}")
    needed = bundle.arrays[key].shape
    if array.shape == needed:
        return
    transposed = array.ndim >= 2 and array.swapaxes(-1, -2).shape == needed
    advice = " (transposed? nothing is transposed for you)" if transposed else ""
    raise ValueError(f"{key} has shape {array.shape}, needed {needed}{advice}")


def with_fill(
    array: np.ndarray, kept: np.ndarray | None, reference: np.ndarray, unit: Unit
) -> np.ndarray:
    """Masked scores with the bundle's fill where the candidate's serves as well, such as -inf.

    It does where it leaves the future a weight of 0, beside the largest score of each row and at
    scores of 0: exp(fill - max(0, kept)) and exp(fill - max(kept)) are 0. Scores of a GPT-2 have no
    lower bound.
    """
    if kept is None or array.shape != kept.shape:
        return array
    dtype = array.dtype
    largest = np.where(kept, reference, -math.inf).max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        above = (array - np.minimum(largest, 0.0))[~kept]
        weight = np.exp(above.astype("float64" if unit.name == "float64" else "float32"))
    if weight.any():  # NaN too
        return array
    fill = np.maximum(reference, float(np.finfo(dtype).min)).astype(dtype)
    return np.where(kept, array, fill)
