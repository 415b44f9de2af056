"""The subject of a reference: somebody's weights and batch, or drawn ones."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.arrays import read_arrays
from gpt_parity.backends import build_model
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.manifest import one_line
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import check_targets
from gpt_parity.oracle.llmc import read_ids, read_llmc
from gpt_parity.oracle.styles import (
    TABLE,
    WTE,
    from_style,
    names,
    plain_names,
    sizes_of,
    styles_with_table,
)
from gpt_parity.oracle_config import PRESETS, ExportConfig
from gpt_parity.provenance import portable, provenance
from gpt_parity.weights import get_weights
from numpy_impl.gpt import check_tokens

Arrays = dict[str, np.ndarray]
PREFIXES = ("model/", "weight/")
# Mean of |x|^2 / sqrt(E), the score of a position with itself, for weights of order one: large
# enough that positions differ, small enough that no softmax is saturated.
OWN_SCORE = 2.0
# Deviation of a GPT-2's logits, whose inputs are normalised.
LOGIT = 2.0
PLACES = ("out", "overwrite", "format", "prefix")
SIZES = ("vocab_size", "context_size", "embedding_size", "blocks", "heads")


def export(config: ExportConfig) -> Bundle:
    """The bundle that `config` describes; ValueError for files that do not fit together."""
    if config.weights is None:
        model, weights = _drawn_weights(config)
    else:
        untold = {"heads", "vocab_size"} if config.style == "llm.c" else {"heads"}
        given = [n for n in SIZES if n not in untold and getattr(config, n) is not None]
        if given:
            raise ValueError(f"{given[0]} is given, but sizes come from the weights")
        model, weights = read_weights(config.weights, config.heads, config.style, config.vocab_size)
    tokens, targets = _batch(config, model)
    bundle = make_bundle(
        model, weights, tokens, targets, steps=config.steps, optimizer=config.optimizer,
        dtype="float32" if config.format == "llm.c" else config.dtype,
    )  # fmt: skip
    return replace(bundle, provenance=_provenance(config))


def _provenance(config: ExportConfig) -> dict[str, Any]:
    """Versions, threads, and what was asked for, which does not depend on where it is written."""
    facts = {key: value for key, value in provenance().items() if key != "command"}
    asked = {key: value for key, value in asdict(config).items() if key not in PLACES}
    for key, value in asked.items():
        if isinstance(value, Path):
            asked[key] = portable(str(value))
        elif value == math.inf:
            asked[key] = "inf"  # as JSON can hold it
    return {**facts, "export": asked}


def _drawn_weights(config: ExportConfig) -> tuple[GPTConfig, Arrays]:
    preset = PRESETS[config.preset]
    sizes = preset.model
    chosen = {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    if "heads" in chosen and not isinstance(sizes, GPT2Config):
        raise ValueError(f"heads is given, which preset {config.preset} has none of")
    model = replace(sizes, **chosen)
    model.require_memory(
        "float64", training=True, batch_size=config.batch_size or preset.batch_size,
        length=config.length or preset.length,
    )  # fmt: skip
    if config.init == "training":
        return model, get_weights(build_model("numpy", model, config.seed, "float32"))
    return model, order_one(model, config.seed)


def order_one(model: GPTConfig, seed: int) -> Arrays:
    """Weights with which every part of the model matters, biases too; float32 holds them."""
    rng = np.random.RandomState(seed)
    if isinstance(model, GPT2Config):
        embedding_scale = LOGIT / math.sqrt(model.embedding_size)
    else:
        embedding_scale = math.sqrt(OWN_SCORE / 2.0) * model.embedding_size**-0.25
    weights = {}
    for name, shape in model.parameter_shapes().items():
        if "embedding" in name:
            scale = embedding_scale
        else:
            scale = math.sqrt(1.5 / shape[-1]) if len(shape) == 2 else 0.2
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        weights[name] = (mean + rng.randn(*shape) * scale).astype(np.float32)
    return weights


def read_weights(
    path: Path, heads: int | None = None, style: str = "source", vocab_size: int | None = None
) -> tuple[GPTConfig, Arrays]:
    """Weights by name from a checkpoint or any file of arrays, and the sizes that they imply.

    Those of a GPT-2 do not say how many heads it has; a checkpoint does, of llm.c too. style: of
    a file that is none; one of nanoGPT without any bias has biases of zeros. vocab_size: V where
    the style pads it.
    """
    if (path / "checkpoint.safetensors").is_file():
        path = path / "checkpoint.safetensors"
    elif (path / "model.safetensors").is_file():
        raise ValueError(
            f"{path}: is a folder of the library transformers, a checkpoint is needed, which "
            "gpt-parity import-hf makes of it"
        )
    if path.suffix == ".bin":
        model, weights = read_llmc(path)
        return _of_checkpoint(path, model, heads, style), weights
    arrays, _ = read_arrays(path)
    if any(name.startswith("model/") for name in arrays):
        checkpoint = load_checkpoint(path)
        return _of_checkpoint(path, checkpoint.config, heads, style), checkpoint.weights
    for prefix in PREFIXES:
        own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        arrays = own or arrays
    if style != "source":
        return _styled_weights(path, arrays, heads, style, vocab_size)
    try:
        vocab_size, embedding_size = arrays["embedding.embedding.weight"].shape
        context_size = len(arrays["embedding.positional_embedding.weight"])
    except (KeyError, TypeError, ValueError):
        others = " or ".join(f"--style {other}" for other in styles_with_table(arrays))
        held = ", ".join(list(arrays)[:3]) or "nothing"
        needed = f"{WTE} (V, E) and the others of the model are needed"
        raise ValueError(
            f"{path}: holds {held}; {f'{others} takes them' if others else needed}"
        ) from None
    numbers = {n.split(".")[1] for n in arrays if n.startswith("transformers.")}
    sizes = (vocab_size, context_size, embedding_size, max(1, len(numbers)))
    if "norm.weight" in arrays:
        if heads is None:
            raise ValueError(f"{path}: is of a GPT-2, whose weights do not tell: heads is needed")
        return GPT2Config(*sizes, heads=heads), arrays
    if heads is not None:
        raise ValueError(f"heads is given, but {path} has no norm.weight as a GPT-2 has")
    return GPTConfig(*sizes), arrays


def _of_checkpoint(path: Path, model: GPTConfig, heads: int | None, style: str) -> GPTConfig:
    """The sizes of a checkpoint, which nothing that was given may contradict."""
    own_heads = getattr(model, "heads", None)
    if heads is not None and heads != own_heads:
        raise ValueError(f"heads is {heads}, {path} has {own_heads or 'none'}")
    own_style = "llm.c" if path.suffix == ".bin" else "source"
    if style not in ("source", own_style):
        raise ValueError(f"style is {style!r}, but {path} is a checkpoint with names of its own")
    return model


def _styled_weights(
    path: Path, arrays: Arrays, heads: int | None, style: str, vocab_size: int | None
) -> tuple[GPTConfig, Arrays]:
    if heads is None:
        raise ValueError(f"{path}: is of a GPT-2, whose weights do not tell: heads is needed")
    try:
        given = plain_names(arrays, style)
        model = sizes_of(given, style, heads, vocab_size)
        if style == "nanogpt" and not any(name.endswith(".bias") for name in given):
            given |= {e.theirs: np.zeros(e.shape, given[TABLE].dtype)
                      for e in names(model, style) if e.theirs.endswith(".bias")}  # fmt: skip
        return model, from_style(given, model, style)
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def _batch(config: ExportConfig, model: GPTConfig) -> tuple[np.ndarray, np.ndarray]:
    if config.tokens is None:
        if config.targets is not None:
            raise ValueError("targets are given without tokens, both are needed")
        preset = PRESETS[config.preset]
        own = config.weights is None
        length = config.length or min(preset.length if own else 32, model.context_size)
        if length > model.context_size:
            raise ValueError(f"length is {length}, at most C = {model.context_size} is needed")
        rng = np.random.RandomState(config.seed)
        shape = (2, config.batch_size or (preset.batch_size if own else 4), length)
        tokens, targets = rng.randint(0, model.vocab_size, shape)
        return tokens, targets
    arrays = _ids(config.tokens, "tokens")
    if config.targets is not None:
        arrays["targets"] = _ids(config.targets, "targets")["targets"]
    if "targets" not in arrays:
        raise ValueError(f"{config.tokens}: holds no targets, --targets FILE is needed")
    return (
        check_tokens(arrays["tokens"], model.vocab_size, model.context_size),
        check_targets(arrays["targets"], arrays["tokens"].shape, model.vocab_size),
    )


def _ids(path: Path, name: str) -> Arrays:
    """The arrays of a file; one npy file holds what was asked for."""
    arrays = read_ids(path) if path.suffix == ".bin" else read_arrays(path)[0]
    if "" in arrays:
        arrays = {name: arrays[""]}
    if name not in arrays:
        raise ValueError(f"{path}: holds {', '.join(list(arrays)[:3])}, {name} is needed")
    return arrays
