"""Checkpoints: one safetensors file from which either backend can go on.

`model/<name>`, `optimizer/exp_avg/<name>`, `optimizer/exp_avg_sq/<name>`, `state/steps/<name>` and
`state/random/sample` are arrays; everything else stands in the manifest, which is JSON and the
only entry of the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from gpt_parity.arrays import read_safetensors
from gpt_parity.backends import backend_of, build_model
from gpt_parity.bpe import BytePairTokenizer
from gpt_parity.choices import BACKENDS, DTYPES
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharTokenizer
from gpt_parity.files import write_atomically
from gpt_parity.manifest import one_line, parse_manifest, shown, some
from gpt_parity.model_config import GPTConfig, model_config
from gpt_parity.schedule import require_integer
from gpt_parity.weights import check_arrays, get_weights, named_parameters, set_weights

CHECKPOINT_NAME = "checkpoint.safetensors"
FORMAT = "gpt-parity checkpoint"
FORMAT_VERSION = 3  # 1 had no training run, 2 characters alone
FORMAT_VERSION_OF_CHARACTERS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = {
    "config": dict, "vocabulary": str, "backend": str, "dtype": str, "step": int,
    "provenance": dict,
}  # fmt: skip
BYTE_PAIR, NO_TEXT = "byte-pair", "none"
WEIGHTS, STEPS, RANDOM = "model/", "state/steps/", "state/random/"
LONGEST_PATH = 4096
GENERATOR_SHAPE = (625,)  # the 624 words of a Mersenne Twister, and the place in them


@dataclass(frozen=True)
class TrainingRun:
    """Where a training run stands, beside weights and moments: what the next step depends on.

    recipe: the fields of TrainConfig by name, as JSON holds them. corpus: name, path, characters
    and sha256 of the text. history: for each process that took steps the first of them (from 0),
    its backend, threads and versions. total_steps: where the learning rate's schedule ends. epoch,
    batch: the next batch. loss_sum, loss_count: of the steps since the last line of metrics.
    metrics_size: bytes of metrics.jsonl. sample: the generator that the sample at the end is drawn
    with.
    """

    recipe: dict[str, Any]
    corpus: dict[str, Any]
    history: list[dict[str, Any]]
    total_steps: int
    epoch: int
    batch: int
    loss_sum: float
    loss_count: int
    metrics_size: int
    sample: np.random.RandomState = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (
            ("recipe", dict), ("corpus", dict), ("history", list), ("loss_sum", float),
        ):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}, {kind.__name__} is needed")
        if not math.isfinite(self.loss_sum):
            raise ValueError(f"loss_sum is {self.loss_sum}, a finite number is needed")
        for name in ("total_steps", "epoch", "batch", "loss_count", "metrics_size"):
            require_integer(name, getattr(self, name), 0)
        TrainConfig.from_recipe(self.recipe)
        for name, kind in (
            ("name", str), ("path", str | None), ("characters", int), ("sha256", str),
        ):  # fmt: skip
            if not isinstance(self.corpus.get(name), kind):
                raise ValueError(f"corpus: {name} is {self.corpus.get(name)!r}, {kind} is needed")
        path = self.corpus["path"]
        if path is not None and not 0 < len(path) <= LONGEST_PATH:
            raise ValueError(
                f"corpus: path has {len(path)} characters, 1 to {LONGEST_PATH} are needed"
            )
        for entry in self.history:
            if not isinstance(entry, dict) or not all(
                isinstance(value, int | str | None) for value in entry.values()
            ):
                raise ValueError(
                    f"history has {shown(entry)}, integers and texts by name are needed"
                )

    @property
    def manifest(self) -> dict[str, Any]:
        """All but the generator, as JSON holds it."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sample"}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds; arrays by name, the caller's own.

    optimizer: {"exp_avg": {name: array}, "exp_avg_sq": {name: array}, "steps": {name: int}}, or
    None where no optimizer was saved. step: training steps finished. run: None where the model was
    saved by itself. vocabulary: the characters, "" where there are none. tokenizer_json: of a model
    of byte-pair text. One without either has no text.
    """

    config: GPTConfig
    vocabulary: str
    backend: str
    dtype: str
    step: int
    weights: dict[str, np.ndarray] = field(repr=False)
    optimizer: dict[str, dict[str, Any]] | None = field(default=None, repr=False)
    run: TrainingRun | None = None
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)
    tokenizer_json: str | None = field(default=None, repr=False)

    @property
    def has_text(self) -> bool:
        return bool(self.vocabulary) or self.tokenizer_json is not None

    @property
    def tokenizer(self) -> CharTokenizer | BytePairTokenizer:
        """Made anew. ValueError for a model without text, and what a BytePairTokenizer raises."""
        if not self.has_text:
            raise ValueError("checkpoint is of a model without text, one with text is needed")
        if self.tokenizer_json is None:
            return CharTokenizer(self.vocabulary)
        tokenizer = BytePairTokenizer(self.tokenizer_json)
        tokenizer.check_model(self.config.vocab_size)
        return tokenizer

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
        shapes = {n: tuple(p.shape) for n, p in named_parameters(model).items()}
        for moment in MOMENTS:
            check_arrays(moment, self.optimizer[moment], shapes)
        optimizer.load_state({k: [v[name] for name in names] for k, v in self.optimizer.items()})


def _optimizer_names(model: Any, optimizer: Any) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    if {id(parameter) for parameter in optimizer.parameters} != set(names):
        raise ValueError("optimizer has other parameters than the model, the same are needed")
    return [names[id(parameter)] for parameter in optimizer.parameters]


def save_checkpoint(
    path: Path, model: Any, *, config: GPTConfig, vocabulary: str | None, step: int = 0,
    optimizer: Any = None, run: TrainingRun | None = None,
    provenance: Mapping[str, Any] | None = None, tokenizer_json: str | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint: weights, and where given the optimizer's state and the run's.

    vocabulary: the characters, or None for a model of byte-pair text (`tokenizer_json`) or without
    any text.

    The same content gives the same bytes. The file is written beside `path`, read back and
    compared with the model; only then does it take the name, so that what stood there stays whole
    until the new one is complete. Raises ValueError for a model of another configuration, a
    vocabulary of another size and values that are not finite; OSError when the file cannot be
    written.
    """
    shapes = config.parameter_shapes()
    if vocabulary is None:
        vocabulary = ""
        tokenizer: dict[str, Any] | None = {"kind": NO_TEXT}
        if tokenizer_json is not None:
            BytePairTokenizer(tokenizer_json).check_model(config.vocab_size)
            tokenizer = {"kind": BYTE_PAIR, "json": tokenizer_json}
    else:
        tokenizer = None
        _check_vocabulary(vocabulary, config)
    weights = check_arrays("checkpoint", get_weights(model), shapes)
    tensors = {f"{WEIGHTS}{name}": array for name, array in weights.items()}
    if optimizer is not None:
        state, names = optimizer.state(), _optimizer_names(model, optimizer)
        for moment in MOMENTS:
            arrays = check_arrays(moment, dict(zip(names, state[moment], strict=True)), shapes)
            tensors |= {f"optimizer/{moment}/{name}": array for name, array in arrays.items()}
        for name, steps in zip(names, state["steps"], strict=True):
            tensors[f"{STEPS}{name}"] = np.array(steps, np.int64)
    if run is not None:
        if optimizer is None:
            raise ValueError("checkpoint of a training run needs its optimizer, found None")
        tensors[f"{RANDOM}sample"] = _generator_state(run.sample)
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION_OF_CHARACTERS if tokenizer is None else FORMAT_VERSION,
        "config": asdict(config),
        "vocabulary": vocabulary,
        "backend": backend_of(model),
        "dtype": next(iter(weights.values())).dtype.name,
        "step": require_integer("step", step, 0),
        "run": run.manifest if run is not None else None,
        "provenance": dict(provenance or {}),
    }
    if tokenizer is not None:
        manifest["tokenizer"] = tokenizer
    text = json.dumps(manifest, sort_keys=True, allow_nan=False)
    if json.loads(text)["vocabulary"] != vocabulary:
        raise ValueError(
            "vocabulary holds two surrogates that JSON takes for one character; characters that "
            "UTF-8 can hold are needed"
        )
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}

    def verify(written: Path) -> None:
        arrays, found = read_safetensors(written)
        wrong = [name for name in tensors if not _same(arrays.get(name), tensors[name])]
        if wrong or found != text or len(arrays) != len(tensors):
            what = some(wrong) if wrong else "the manifest"
            raise OSError(f"{what} came back from the disk with other content than was written")

    write_atomically(Path(path), save(contiguous, metadata={"manifest": text}), verify)


def _same(a: np.ndarray | None, b: np.ndarray) -> bool:
    return a is not None and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


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
        raise ValueError(f"{path}: {one_line(error)}") from error
    return checkpoint


def tokenizer_of(checkpoint: Checkpoint, path: Path) -> CharTokenizer | BytePairTokenizer:
    """The checkpoint's tokenizer; ValueError that names the path where there is no sound one."""
    try:
        return checkpoint.tokenizer
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_arrays(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Checkpoint:
    config, dtype, backend = (
        model_config(manifest["config"]), manifest["dtype"], manifest["backend"],
    )  # fmt: skip
    # Before any work that grows with what the manifest claims.
    if config.blocks > len(arrays):
        raise ValueError(f"config has {config.blocks} blocks, more than there are arrays")
    tokenizer_json = _tokenizer_json(manifest)
    if "tokenizer" not in manifest:
        _check_vocabulary(manifest["vocabulary"], config)
    if backend not in BACKENDS or dtype not in DTYPES:
        raise ValueError(
            f"manifest: is of {backend} in {dtype}, one of {BACKENDS} in one of {DTYPES} is needed"
        )
    kinds = (WEIGHTS, *(f"optimizer/{moment}/" for moment in MOMENTS), STEPS, RANDOM)
    strangers = [name for name in arrays if not name.startswith(kinds)]
    if strangers:
        raise ValueError(f"arrays: {some(strangers)} unexpected, only {kinds} are needed")
    weights, *moments, steps, random = (
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
    run = _training_run(manifest.get("run"), random, optimizer)
    if run is not None:
        recipe = TrainConfig.from_recipe(run.recipe)
        found = (recipe.model_config(config.vocab_size), recipe.backend, recipe.dtype)
        if found != (config, backend, dtype):
            raise ValueError(
                f"manifest: run is of {found}, {(config, backend, dtype)} of the model is needed"
            )
    return Checkpoint(
        config, manifest["vocabulary"], backend, dtype,
        require_integer("step", manifest.get("step"), 0), weights, optimizer, run,
        manifest["provenance"], tokenizer_json,
    )  # fmt: skip


def _tokenizer_json(manifest: dict[str, Any]) -> str | None:
    """The text of the byte-pair tokenizer, which is judged where it is used; None without one."""
    content = manifest.get("tokenizer", {"kind": NO_TEXT})
    kind = content.get("kind") if isinstance(content, dict) else None
    text = content.get("json") if kind == BYTE_PAIR else None
    keys = {NO_TEXT: {"kind"}, BYTE_PAIR: {"kind", "json"}}.get(str(kind))
    if keys is None or set(content) != keys or (kind == BYTE_PAIR and not isinstance(text, str)):
        raise ValueError(
            f"manifest: tokenizer is {shown(content)}, one of kind {NO_TEXT} or {BYTE_PAIR} with "
            "its json is needed"
        )
    if "tokenizer" in manifest and manifest["vocabulary"]:
        raise ValueError("manifest: has a vocabulary and a tokenizer, one of them is needed")
    return text


def _training_run(
    content: Any, random: dict[str, np.ndarray], optimizer: dict[str, dict[str, Any]] | None
) -> TrainingRun | None:
    """The state of the run, if the file holds one, as `TrainingRun.manifest` and arrays gave it."""
    if content is None:
        check_arrays("random", random, {}, "uint32")
        return None
    if not isinstance(content, dict) or optimizer is None:
        found = type(content).__name__ if optimizer is not None else "one without an optimizer"
        raise ValueError(f"manifest: run is {found}, the state of a training run is needed")
    needed = {f.name for f in fields(TrainingRun)} - {"sample"}
    if set(content) != needed:
        raise ValueError(f"manifest: run has {sorted(content)}, {sorted(needed)} is needed")
    state = check_arrays("random", random, {"sample": GENERATOR_SHAPE}, "uint32")
    return TrainingRun(**content, sample=_generator(state["sample"]))


def _generator_state(generator: np.random.RandomState) -> np.ndarray:
    """The state of a generator that has drawn uniform numbers alone: GENERATOR_SHAPE, uint32."""
    _, key, place, *_ = generator.get_state()
    return np.append(key, np.uint32(place)).astype(np.uint32)


def _generator(state: np.ndarray) -> np.random.RandomState:
    if state[-1] > 624:
        raise ValueError(f"random: sample is at place {state[-1]}, at most 624 is needed")
    generator = np.random.RandomState(0)
    generator.set_state(("MT19937", state[:-1], int(state[-1])))
    return generator


def _check_vocabulary(vocabulary: str, config: GPTConfig) -> None:
    if CharTokenizer(vocabulary).vocab_size != config.vocab_size:
        raise ValueError(
            f"vocabulary has {len(vocabulary)} characters, {config.vocab_size} are needed"
        )
