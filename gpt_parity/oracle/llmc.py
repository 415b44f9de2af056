"""The two files with which the C project llm.c tests itself, for GPT-2s of any size.

A checkpoint is a header of 256 int32 (magic, version, C, V, blocks, heads, E, rows of the token
embedding), then the sixteen arrays of `stacked_shapes` as float32. A debug state is a header
(magic, version, B, T), then tokens and targets (int32), logits (B, T, V), the loss, and the
gradients of the sixteen arrays (float32). Everything is little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpt_parity.files import write_atomically
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.graph import LOSS_KEY
from gpt_parity.oracle.styles import from_style, padded, stacked_shapes, to_style
from gpt_parity.weights import check_arrays

HEADER = 256
CHECKPOINT, CHECKPOINT_VERSION = 20240326, 3
STATE, STATE_VERSION = 20240327, 2
INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")
Arrays = dict[str, np.ndarray]


def pair(folder: Path, prefix: str) -> tuple[Path, Path]:
    """Where the checkpoint and the debug state are."""
    return folder / f"{prefix}.bin", folder / f"{prefix}_debug_state.bin"


def require_free_pair(folder: Path, prefix: str, overwrite: bool) -> None:
    """Raise OSError unless a pair may be written; `overwrite` replaces such a file alone."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder}: its folder does not exist")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise FileExistsError(f"{folder}: is no folder, as the two files of llm.c need")
    for path, magic in zip(pair(folder, prefix), (CHECKPOINT, STATE), strict=True):
        if not path.exists() and not path.is_symlink():
            continue
        if not overwrite:
            raise FileExistsError(f"{path}: exists already; --overwrite replaces it")
        try:
            _Reader(path).header(magic, "")
        except ValueError as error:
            raise FileExistsError(f"{path}: is none of llm.c, so it stays") from error


def write_pair(folder: Path, bundle: Bundle, prefix: str) -> tuple[Path, Path]:
    """Write both files of a GPT-2's bundle; the debug state appears last, and never without its
    checkpoint.

    Raises ValueError where the model is no GPT-2 or float32 does not hold a value, OSError that
    names the file.
    """
    config = bundle.config
    if not isinstance(config, GPT2Config):
        raise ValueError("format is 'llm.c', but only a GPT-2 can be written so")
    checkpoint, state = pair(folder, prefix)
    (batch, length), rows = bundle.tokens.shape, padded(config.vocab_size)
    sizes = (config.context_size, config.vocab_size, config.blocks, config.heads,
             config.embedding_size, rows)  # fmt: skip
    weights = _header(CHECKPOINT, CHECKPOINT_VERSION, *sizes) + _stacked(bundle.weights, config)
    results = b"".join(
        [
            _header(STATE, STATE_VERSION, batch, length),
            bundle.tokens.astype(INT).tobytes(), bundle.targets.astype(INT).tobytes(),
            _floats("logits", bundle.values["output"]),
            _floats("loss", bundle.arrays[LOSS_KEY]),
            _stacked(bundle.parameters, config),
        ]
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    state.unlink(missing_ok=True)
    write_atomically(checkpoint, weights)
    write_atomically(state, results)
    return checkpoint, state


def _header(*values: int) -> bytes:
    header = np.zeros(HEADER, INT)
    header[: len(values)] = values
    return header.tobytes()


def _stacked(arrays: Mapping[str, np.ndarray], config: GPT2Config) -> bytes:
    found = to_style(arrays, config, "llm.c")
    return b"".join(_floats(name, found[name]) for name in stacked_shapes(config))


def _floats(name: str, array: np.ndarray) -> bytes:
    with np.errstate(over="ignore"):
        rounded = array.astype(FLOAT)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{name} has values that float32 does not hold, smaller ones are needed")
    return rounded.tobytes()


def read_llmc(path: Path) -> tuple[GPT2Config, Arrays]:
    """Sizes and weights of a checkpoint, by our names, float32; ValueError for anything else."""
    reader = _Reader(path)
    sizes = reader.header(CHECKPOINT, "checkpoint", CHECKPOINT_VERSION)
    context, vocab_size, blocks, heads, width, rows = sizes[:6]
    try:
        config = GPT2Config(vocab_size, context, width, blocks, heads=heads)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if rows < vocab_size:
        raise ValueError(f"{path}: has {rows} rows of tokens, at least V = {vocab_size} are needed")
    return config, _parameters(reader, config, rows, "")


def read_ids(path: Path) -> Arrays:
    """`tokens` and `targets` (B, T) of a debug state; ValueError for anything else."""
    reader = _Reader(path)
    batch, length = reader.header(STATE, "debug state", STATE_VERSION)[:2]
    if batch < 1 or length < 1:
        raise ValueError(f"{path}: is of {batch} x {length} tokens, 1 x 1 or more are needed")
    shape = (batch, length)
    return {name: reader.take(INT, shape).astype(np.int64) for name in ("tokens", "targets")}


def read_state(path: Path, config: GPTConfig) -> Arrays:
    """A debug state of a model, by the names of style llm.c; ValueError for anything else."""
    if not isinstance(config, GPT2Config):
        raise ValueError(f"{path}: is of a GPT-2, and so must be the reference")
    reader = _Reader(path)
    batch, length = reader.header(STATE, "debug state", STATE_VERSION)[:2]
    if batch < 1 or not 1 <= length <= config.context_size:
        raise ValueError(
            f"{path}: is of {batch} x {length} tokens, up to C = {config.context_size} are needed"
        )
    found = {name: reader.take(INT, (batch, length)) for name in ("tokens", "targets")}
    found["logits"] = reader.take(FLOAT, (batch, length, config.vocab_size))
    found[LOSS_KEY] = reader.take(FLOAT, ())
    shapes = stacked_shapes(config)
    others = sum(math.prod(shape) for name, shape in shapes.items() if name != "wte")
    # The header does not say how many rows of tokens there are.
    rows, rest = divmod(reader.left // FLOAT.itemsize - others, config.embedding_size)
    if rest or rows < config.vocab_size:
        rows = shapes["wte"][0]
    found |= reader.stacks(config, rows)
    return found


def _parameters(reader: _Reader, config: GPT2Config, rows: int, label: str) -> Arrays:
    stacks = reader.stacks(config, rows)
    check_arrays(str(reader.path), stacks, {name: array.shape for name, array in stacks.items()})
    try:
        return from_style(stacks, config, "llm.c", label=label)
    except ValueError as error:
        raise ValueError(f"{reader.path}: {error}") from error


class _Reader:
    """A file from its beginning; ValueError of one line where it is not what was asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0
        try:
            if path.is_dir() or not path.exists():
                raise FileNotFoundError(2, "there is no such file")
            if not path.is_file():
                raise ValueError(f"{path}: is no regular file")
            self.content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: cannot be read, {error.strerror or error}") from error

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return len(self.content) - self.place

    def header(self, magic: int, kind: str, version: int | None = None) -> list[int]:
        """What stands after magic and version."""
        if len(self.content) < HEADER * INT.itemsize:
            raise ValueError(f"{self.path}: is no {kind} of llm.c ({len(self.content)} bytes)")
        found = self.take(INT, (HEADER,)).tolist()
        if found[0] != magic:
            raise ValueError(
                f"{self.path}: is no {kind} of llm.c (begins with {found[0]}, {magic} is needed)"
            )
        if version is not None and found[1] != version:
            raise ValueError(
                f"{self.path}: is a {kind} of llm.c of version {found[1]}, {version} (float32) is "
                "needed"
            )
        return found[2:]

    def take(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The next array, in the machine's own byte order."""
        size = math.prod(shape) * dtype.itemsize
        if size > self.left:
            raise ValueError(
                f"{self.path}: is not whole ({len(self.content)} bytes, "
                f"{self.place + size} or more are needed)"
            )
        array = np.frombuffer(self.content, dtype, math.prod(shape), self.place).reshape(shape)
        self.place += size
        return array.astype(dtype.newbyteorder("="))

    def stacks(self, config: GPT2Config, rows: int) -> Arrays:
        """The sixteen arrays, which must be all that is left."""
        shapes = stacked_shapes(config) | {"wte": (rows, config.embedding_size)}
        needed = sum(map(math.prod, shapes.values())) * FLOAT.itemsize
        if needed != self.left:
            raise ValueError(
                f"{self.path}: is not whole ({len(self.content)} bytes, "
                f"{self.place + needed} are needed)"
            )
        return {name: self.take(FLOAT, shape) for name, shape in shapes.items()}
