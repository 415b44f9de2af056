"""Named weights: copied between the backends, and kept in checkpoints that both can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from gpt_parity.arrays import read_safetensors
from gpt_parity.backends import backend_of, build_model
from gpt_parity.config import BACKENDS, DTYPES, GPTConfig
from gpt_parity.corpus import CharTokenizer
from gpt_parity.files import write_atomically
from gpt_parity.manifest import parse_manifest
from gpt_parity.schedule import require_integer
from gpt_parity.tensors import as_array

CHECKPOINT_NAME = "checkpoint.safetensors"
FORMAT = "gpt-parity checkpoint"
FORMAT_VERSION = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = {"config": dict, "vocabulary": str, "backend": str, "dtype": str, "provenance": dict}


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
        found = [f"{_some(missing)} missing"] if missing else []
        found += [f"{_some(extra)} unexpected"] if extra else []
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


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds; arrays by name, the caller's own.

    optimizer: {"exp_avg": {name: array}, "exp_avg_sq": {name: array}, "steps": {name: int}}, or
    None where no optimizer was saved. step: training steps finished.
    """

    config: GPTConfig
    vocabulary: str
    backend: str
    dtype: str
    step: int
    weights: dict[str, np.ndarray] = field(repr=False)
    optimizer: dict[str, dict[str, Any]] | None = field(default=None, repr=False)
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def tokenizer(self) -> CharTokenizer:
        return CharTokenizer(self.vocabulary)

    def build_model(self, backend: str | None = None, dtype: str | None = None) -> Any:
        """Return a model with these weights, by default of the backend and dtype of the file."""
        model = build_model(backend or self.backend, self.config, dtype=dtype or self.dtype)
        set_weights(model, self.weights)
        return model

    def load_optimizer(self, model: Any, optimizer: Any) -> None:
        """Copy moments and step counts into the AdamWOptimizer of `model`, of either backend.

        Raises ValueError if the file holds none, or the optimizer is not that of the whole model.
        """
        if self.optimizer is None:
            raise ValueError("checkpoint holds no optimizer state, one saved with it is needed")
        names = _optimizer_names(model, optimizer)
        optimizer.load_state({k: [v[name] for name in names] for k, v in self.optimizer.items()})


def _optimizer_names(model: Any, optimizer: Any) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    if {id(parameter) for parameter in optimizer.parameters} != set(names):
        raise ValueError("optimizer has other parameters than the model, the same are needed")
    return [names[id(parameter)] for parameter in optimizer.parameters]


def save_checkpoint(
    path: Path, model: Any, *, config: GPTConfig, vocabulary: str, step: int = 0,
    optimizer: Any = None, provenance: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write weights, and the optimizer's moments and step counts if given, as a safetensors file.

    The same content gives the same bytes, and a file that stood there stays whole until the new
    one is complete. Raises ValueError for a model of another configuration, a vocabulary of
    another size and values that are not finite; OSError when the file cannot be written.
    """
    shapes = config.parameter_shapes()
    _check_vocabulary(vocabulary, config)
    weights = check_arrays("checkpoint", get_weights(model), shapes)
    tensors = {f"model/{name}": array for name, array in weights.items()}
    if optimizer is not None:
        state, names = optimizer.state(), _optimizer_names(model, optimizer)
        for moment in MOMENTS:
            arrays = check_arrays(moment, dict(zip(names, state[moment], strict=True)), shapes)
            tensors |= {f"optimizer/{moment}/{name}": array for name, array in arrays.items()}
        for name, steps in zip(names, state["steps"], strict=True):
            tensors[f"state/steps/{name}"] = np.array(steps, np.int64)
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "config": asdict(config),
        "vocabulary": vocabulary,
        "backend": backend_of(model),
        "dtype": next(iter(weights.values())).dtype.name,
        "step": require_integer("step", step, 0),
        "provenance": dict(provenance or {}),
    }
    text = json.dumps(manifest, sort_keys=True)
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    write_atomically(Path(path), save(contiguous, metadata={"manifest": text}))


def load_checkpoint(
    path: Path, *, config: GPTConfig | None = None, vocabulary: str | None = None
) -> Checkpoint:
    """Return the content of a checkpoint, or of the one in the folder of a run.

    config, vocabulary: what the checkpoint has to have, where that is known. Raises ValueError
    of one line that names the file and the reason, for anything else than a whole checkpoint of
    this format with finite arrays.
    """
    path = Path(path)
    path = path / CHECKPOINT_NAME if path.is_dir() else path
    arrays, text = read_safetensors(path)
    try:
        manifest = parse_manifest(text, FORMAT, FORMAT_VERSION, KINDS, "a checkpoint of gpt-parity")
        checkpoint = _from_arrays(manifest, arrays)
        if config is not None and config != checkpoint.config:
            raise ValueError(f"is of {checkpoint.config}, {config} is needed")
        if vocabulary is not None and vocabulary != checkpoint.vocabulary:
            differing = sorted(set(vocabulary) ^ set(checkpoint.vocabulary))
            raise ValueError(
                f"has another vocabulary ({len(checkpoint.vocabulary)} characters, "
                f"{len(vocabulary)} are needed; in one of them only: {differing[:10]})"
            )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return checkpoint


def _from_arrays(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Checkpoint:
    if set(manifest["config"]) != set(GPTConfig.__dataclass_fields__):
        raise ValueError(
            f"manifest: config has {sorted(manifest['config'])}, "
            f"{sorted(GPTConfig.__dataclass_fields__)} is needed"
        )
    config, dtype, backend = (
        GPTConfig(**manifest["config"]), manifest["dtype"], manifest["backend"],
    )  # fmt: skip
    _check_vocabulary(manifest["vocabulary"], config)
    if backend not in BACKENDS or dtype not in DTYPES:
        raise ValueError(
            f"manifest: is of {backend} in {dtype}, one of {BACKENDS} in one of {DTYPES} is needed"
        )
    kinds = ("model/", *(f"optimizer/{moment}/" for moment in MOMENTS), "state/steps/")
    strangers = [name for name in arrays if not name.startswith(kinds)]
    if strangers:
        raise ValueError(f"arrays: {_some(strangers)} unexpected, only {kinds} are needed")
    weights, *moments, steps = (
        {n.removeprefix(kind): a for n, a in arrays.items() if n.startswith(kind)} for kind in kinds
    )
    shapes = config.parameter_shapes()
    weights = check_arrays("model", weights, shapes, dtype)
    optimizer: dict[str, dict[str, Any]] | None = None
    if steps or any(moments):
        optimizer = {
            moment: check_arrays(moment, part, shapes, dtype)
            for moment, part in zip(MOMENTS, moments, strict=True)
        }
        counts = check_arrays("steps", steps, dict.fromkeys(shapes, ()), "int64")
        optimizer["steps"] = {
            name: require_integer(f"steps: {name}", int(count), 0) for name, count in counts.items()
        }
    step = require_integer("step", manifest.get("step"), 0)
    return Checkpoint(
        config, manifest["vocabulary"], backend, dtype, step, weights, optimizer,
        manifest["provenance"],
    )  # fmt: skip


def _check_vocabulary(vocabulary: str, config: GPTConfig) -> None:
    if CharTokenizer(vocabulary).vocab_size != config.vocab_size:
        raise ValueError(
            f"vocabulary has {len(vocabulary)} characters, {config.vocab_size} are needed"
        )
