"""Bundles in files: written whole, and checked whole when they are read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.arrays import read_arrays, require_names, write_arrays
from gpt_parity.choices import DTYPES
from gpt_parity.manifest import one_line, parse_manifest, shown, some
from gpt_parity.model_config import model_config
from gpt_parity.oracle.bundle import STEP, TOLERANCE, WEIGHT, Bundle, endless
from gpt_parity.oracle.graph import GRAD, LOSS_KEY, VALUE
from gpt_parity.oracle.tolerance import Tolerance, by_thirds
from gpt_parity.oracle_config import HYPERPARAMETERS
from gpt_parity.schedule import require_integer
from gpt_parity.weights import check_arrays
from numpy_impl.functional import check_ids
from numpy_impl.gpt import check_tokens

FORMAT = "gpt-parity bundle"
FORMAT_VERSION = 1
KINDS = {
    "config": dict, "steps": int, "optimizer": dict, "keys": list, "tolerances": dict,
    "votes": dict, "aliases": dict, "provenance": dict,
}  # fmt: skip


def require_free(path: Path, overwrite: bool) -> None:
    """Raise OSError or ValueError unless a bundle may be written to `path`.

    With `overwrite` it may replace a bundle, and nothing else: no folder with other files in it.
    """
    require_names(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: its folder does not exist")
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise FileExistsError(f"{path}: exists already; --overwrite replaces a bundle")
    text = read_arrays(path)[1]
    foreign = [p for p in path.rglob("*") if p.is_file() and p.suffix not in (".npy", ".json")]
    try:
        _manifest(text)
    except ValueError as error:
        raise FileExistsError(f"{path}: is no bundle, which alone is overwritten") from error
    if foreign:
        raise FileExistsError(f"{path}: holds {foreign[0].name} too, which is no part of a bundle")


def save_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle in the form that the ending of `path` says; see `gpt_parity.arrays`.

    The same bundle gives the same bytes. What is there is replaced. Raises OSError that names
    `path`.
    """
    arrays = {"tokens": bundle.tokens, "targets": bundle.targets}
    arrays |= {WEIGHT + n: w for n, w in bundle.weights.items()}
    arrays |= bundle.arrays
    whole: dict[str, dict[str, float | None]] = {}
    for dtype, tolerances in bundle.tolerances.items():
        judged = {k: t for k, t in tolerances.items() if math.isfinite(t.whole)}
        whole[dtype] = {k: t.whole if k in judged else None for k, t in tolerances.items()}
        arrays |= {f"{TOLERANCE}{dtype}/{k}": t.rows for k, t in judged.items() if t.rows.ndim}
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "config": asdict(bundle.config),
        "steps": bundle.steps,
        "optimizer": {k: str(v) if v == math.inf else v for k, v in bundle.optimizer.items()},
        "keys": list(bundle.arrays),
        "tolerances": whole,
        "votes": bundle.votes,
        "aliases": bundle.aliases,
        "provenance": bundle.provenance,
    }
    text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    write_arrays(Path(path), arrays, text)


def as_bundle(reference: Any) -> Bundle:
    """A bundle, or that of a file or folder."""
    return reference if isinstance(reference, Bundle) else load_bundle(Path(reference))


def load_bundle(path: Path) -> Bundle:
    """Read a bundle in any of its forms; ValueError of one line for anything else."""
    arrays, text = read_arrays(Path(path))
    try:
        return _from_arrays(_manifest(text), arrays)
    except (ValueError, TypeError, KeyError) as error:
        missing = isinstance(error, KeyError)
        reason = f"lacks {error.args[0]}, a whole bundle is needed" if missing else error
        raise ValueError(f"{path}: {one_line(reason)}") from error


def _manifest(text: str | None) -> dict[str, Any]:
    """The manifest, in which every value is of its kind; what fits together is seen later."""
    origin = "a bundle of `gpt-parity oracle export`"
    manifest = parse_manifest(text, FORMAT, FORMAT_VERSION, KINDS, origin)
    for key in manifest["keys"]:
        if not isinstance(key, str):
            raise ValueError(f"manifest: keys hold {shown(key)}, names are needed")
    for dtype, whole in manifest["tolerances"].items():
        if not isinstance(whole, dict) or not all(
            v is None or _is_ratio(v) for v in whole.values()
        ):
            raise ValueError(f"manifest: tolerances of {dtype} are {shown(whole)}, numbers by key "
                             "are needed")  # fmt: skip
    for key, vote in manifest["votes"].items():
        known = isinstance(vote, dict) and set(vote) == {"closure", "torch"}
        if not known or not _is_ratio(vote["closure"]) or not (
            vote["torch"] is None or _is_ratio(vote["torch"])
        ):  # fmt: skip
            raise ValueError(f"manifest: the vote on {key} is {shown(vote)}")
    if len({vote["torch"] is None for vote in manifest["votes"].values()}) > 1:
        raise ValueError("manifest: torch has some of the votes, all or none are needed")
    return manifest


def _is_ratio(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0.0 <= value < math.inf


def _from_arrays(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Bundle:
    config = model_config(manifest["config"])
    if config.blocks > len(arrays):
        raise ValueError(f"config has {config.blocks} blocks, more than there are arrays")
    shapes = config.parameter_shapes()
    weights = check_arrays("bundle", {n: arrays[WEIGHT + n] for n in shapes}, shapes)
    tokens = check_tokens(arrays["tokens"], config.vocab_size, config.context_size)
    targets = check_targets(arrays["targets"], tokens.shape, config.vocab_size)
    found = {key: arrays[key] for key in manifest["keys"]}
    if len(found) != len(manifest["keys"]):
        raise ValueError("manifest: keys are not all different")
    _check_keys(found, weights, require_integer("steps", manifest["steps"], 0))
    for key, array in (weights | found).items():
        if array.dtype.name not in DTYPES:
            raise ValueError(f"{key} is {array.dtype}, one of {DTYPES} is needed")
    tolerances = {
        dtype: {k: _tolerance(found[k], w, arrays, f"{TOLERANCE}{dtype}/{k}")
                for k, w in whole.items()}
        for dtype, whole in manifest["tolerances"].items()
    }  # fmt: skip
    if not tolerances:
        raise ValueError("tolerances are missing, those of one dtype at least are needed")
    for dtype, known in tolerances.items():
        if dtype not in DTYPES or set(known) != set(found):
            raise ValueError(f"tolerances of {dtype} are not those of the bundle's tensors")
    _check_no_strangers(arrays, found, weights, tolerances)
    for key in manifest["votes"]:
        if key not in found:
            raise ValueError(f"manifest: a vote is on {key}, a gradient is needed")
    for alias, entry in manifest["aliases"].items():
        if not isinstance(entry, str) or VALUE + entry not in found:
            raise ValueError(f"manifest: alias {alias} is of {shown(entry)}, an entry is needed")
    bundle = Bundle(
        config, tokens, targets, weights, found, tolerances, manifest["votes"],
        _optimizer(manifest["optimizer"]), manifest["aliases"], manifest["steps"],
        manifest["provenance"],
    )  # fmt: skip
    bundle.setting(0)  # the hyperparameters are in range
    return bundle


def _optimizer(given: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters as numbers; an infinite one stands as text in the manifest."""
    if set(given) != set(HYPERPARAMETERS):
        raise ValueError(
            f"manifest: optimizer has {shown(sorted(given))}, {sorted(HYPERPARAMETERS)} is needed"
        )
    betas = given["betas"]
    if not isinstance(betas, list) or len(betas) != 2 or not all(map(_is_ratio, betas)):
        raise ValueError(f"manifest: betas are {shown(betas)}, two numbers are needed")
    for key, value in given.items():
        if key != "betas" and value != "inf" and not _is_ratio(value):
            raise ValueError(f"manifest: {key} is {shown(value)}, a number is needed")
    return {k: float(v) if k != "betas" else v for k, v in given.items()}


def _check_no_strangers(
    arrays: dict[str, np.ndarray], found: dict[str, np.ndarray], weights: dict[str, np.ndarray],
    tolerances: dict[str, dict[str, Tolerance]],
) -> None:  # fmt: skip
    known = {"tokens", "targets", *found, *(WEIGHT + name for name in weights)}
    for dtype, by_key in tolerances.items():
        known |= {f"{TOLERANCE}{dtype}/{k}" for k, t in by_key.items() if math.isfinite(t.whole)}
    strangers = [name for name in arrays if name not in known]
    if strangers:
        raise ValueError(f"{some(strangers)} unexpected, the bundle's own alone are needed")


def _check_keys(arrays: dict[str, np.ndarray], weights: dict[str, np.ndarray], steps: int) -> None:
    """Raise ValueError unless the reference is complete, and holds finite real numbers."""
    entries = [key.removeprefix(VALUE) for key in arrays if key.startswith(VALUE)]
    step = ["loss", "grad_norm"]
    step += [f"{q}/{n}" for q in ("exp_avg", "exp_avg_sq", "weight") for n in weights]
    if steps * len(step) > len(arrays):  # before as many names are made
        raise ValueError(f"keys are not those of a whole pass and {steps} steps")
    needed = {VALUE + n for n in entries} | {GRAD + n for n in (*entries, *weights)} | {LOSS_KEY}
    needed |= {f"{STEP}/{k}/{q}" for k in range(1, steps + 1) for q in step}
    if set(arrays) != needed:
        raise ValueError(f"keys are not those of a whole pass and {steps} steps")
    check_arrays("bundle", arrays, {key: array.shape for key, array in arrays.items()})
    for key, array in arrays.items():
        name = key.removeprefix(GRAD)
        model = weights[name] if name in weights else arrays.get(VALUE + name, array)
        if array.shape != model.shape:
            raise ValueError(f"{key} has shape {array.shape}, {model.shape} is needed")


def check_targets(targets: np.ndarray, shape: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """`targets`, or ValueError or TypeError unless they fit to tokens of `shape`."""
    if targets.shape != shape:
        raise ValueError(f"targets: got shape {targets.shape}, needed {shape} as the tokens have")
    return check_ids("targets", targets, vocab_size)


def _tolerance(
    array: np.ndarray, whole: float | None, arrays: dict[str, np.ndarray], key: str
) -> Tolerance:
    if whole is None:
        return endless(array)
    # Older bundles have no tolerances by thirds.
    shape = by_thirds(key, array).shape[:-1] if key in arrays else array.shape[:-1]
    rows = arrays[key] if shape else np.array(float(whole))
    positive = (rows >= 0.0) & (rows < math.inf)
    if rows.dtype.kind != "f" or rows.shape != shape or not positive.all():
        raise ValueError(f"{key} is no tolerance for shape {array.shape}")
    return Tolerance(float(whole), rows)
