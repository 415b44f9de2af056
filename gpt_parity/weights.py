"""Named weights, copied between the backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpt_parity.backends import backend_of
from gpt_parity.manifest import some
from gpt_parity.tensors import as_array
from numpy_impl.tape import count_write


def named_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of a model of either backend by their plain dotted names.

    `torch.compile` and data-parallel wrappers put "_orig_mod" and "module" into the names; both
    are taken out.
    """
    backend_of(model)
    named: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        plain = _plain(name)
        if plain in named:
            raise ValueError(f"weights: two parameters are called {plain}, one name each is needed")
        named[plain] = parameter
    return named


def _plain(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def get_weights(model: Any) -> dict[str, np.ndarray]:
    """Return a copy of every weight by name, in the order of construction and the model's dtype."""
    return {
        name: np.array(as_array(parameter), order="C")
        for name, parameter in named_parameters(model).items()
    }


def set_weights(model: Any, arrays: Mapping[str, Any]) -> None:
    """Copy `arrays` into the weights of a model of either backend, in place and by name.

    The model never shares memory with the arrays, whose strides and flags do not matter. Names
    may carry the prefixes of torch's wrappers. A dtype that fits into the model's is widened;
    nothing is rounded and nothing is transposed. Raises ValueError, before anything has changed,
    that names missing, unexpected, misshapen (with both shapes), wrongly typed and not finite
    arrays.
    """
    own = named_parameters(model)
    given = {_plain(name): value for name, value in arrays.items()}
    if len(given) != len(arrays):
        raise ValueError("weights: names collide without wrapper prefixes, one each is needed")
    checked = check_arrays("weights", given, {n: tuple(p.shape) for n, p in own.items()})
    copies = {}
    for name, array in checked.items():
        dtype = as_array(own[name]).dtype
        if not np.can_cast(array.dtype, dtype, "safe"):
            raise ValueError(
                f"weights: {name} is {array.dtype}, {dtype} is needed or what fits into it"
            )
        copies[name] = np.array(array, dtype=dtype, order="C")
    if backend_of(model) == "numpy":
        for name, array in copies.items():
            own[name].data[...] = array
            own[name].written = count_write()
    else:
        import torch

        with torch.no_grad():
            for name, array in copies.items():
                own[name].copy_(torch.from_numpy(array))


def copy_weights(source: Any, target: Any) -> None:
    """Copy every weight of one model into another, of the same or the other backend."""
    set_weights(target, get_weights(source))


def check_arrays(
    title: str, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
    dtype: str | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return `arrays` in the order of `shapes`, or raise the ValueError that `set_weights` names.

    dtype: the only one allowed, by default any floating one. Every message begins with `title`.
    """
    missing = [name for name in shapes if name not in arrays]
    extra = [name for name in arrays if name not in shapes]
    if missing or extra:
        found = [f"{some(missing)} missing"] if missing else []
        found += [f"{some(extra)} unexpected"] if extra else []
        raise ValueError(f"{title}: {', '.join(found)}; the {len(shapes)} of the model are needed")
    checked = {name: as_array(arrays[name]) for name in shapes}
    for name, array in checked.items():
        if array.dtype.kind not in "fc" if dtype is None else array.dtype.name != dtype:
            needed = dtype or "a floating dtype"
            raise ValueError(f"{title}: {name} is {array.dtype}, {needed} is needed")
        if array.shape != shapes[name]:
            raise ValueError(f"{title}: {name} has shape {array.shape}, {shapes[name]} is needed")
        if not np.isfinite(array).all():
            count = array.size - int(np.isfinite(array).sum())
            raise ValueError(
                f"{title}: {name} has {count} of {array.size} values that are nan or inf, "
                "finite ones are needed"
            )
    return checked
