"""Whole files in every form, taken apart so that they can be damaged and put together again."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpt_parity.arrays import write_arrays
from gpt_parity.checkpoint import CHECKPOINT_NAME, TrainingRun, save_checkpoint
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import save_bundle
from gpt_parity.oracle.compare import LOSS, PARAMETER
from gpt_parity.oracle.subject import order_one
from gpt_parity.training import new_trainer

CONFIG = GPTConfig(vocab_size=5, context_size=3, embedding_size=2, blocks=1)
VOCABULARY = "abcde"
SAFETENSORS, STORED, DEFLATED, FOLDER = "safetensors", "stored npz", "deflated npz", "folder"
ENDINGS = {SAFETENSORS: ".safetensors", STORED: ".npz", DEFLATED: ".npz", FOLDER: ""}
CHECKPOINT, BUNDLE, SUBMISSION = "checkpoint", "bundle", "submission"


@dataclass(frozen=True)
class Link:
    """In place of a file's content: a symbolic link to `target`."""

    target: str


@dataclass(frozen=True)
class Pipe:
    """In place of a file's content: a named pipe, which nobody writes to."""


Content = bytes | Link | Pipe


@dataclass
class Draft:
    """A file in parts: the header and payload of safetensors, or the members of npz and folder.

    `patches` are fields of a zip to overwrite once it is put together: (record, place of the
    member, offset in the record, width, value).
    """

    role: str
    form: str
    header: bytes = b""
    payload: bytes = b""
    length: int | None = None
    members: list[tuple[str, Content]] = field(default_factory=list)
    patches: list[tuple[str, int, int, int, int]] = field(default_factory=list)

    def copy(self) -> Draft:
        return Draft(self.role, self.form, self.header, self.payload, self.length,
                     list(self.members), list(self.patches))  # fmt: skip

    def data(self) -> bytes:
        """The bytes of the one file."""
        if self.form == SAFETENSORS:
            length = len(self.header) if self.length is None else self.length
            return (length % 2**64).to_bytes(8, "little") + self.header + self.payload
        return packed(self.members, self.form == DEFLATED, self.patches)


def reference() -> Bundle:
    """One pass of the smallest model in which every part is there."""
    tokens, targets = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 1, 2))
    return make_bundle(CONFIG, order_one(CONFIG, 0), tokens, targets, dtype="float32", votes=False)


def make_seeds(folder: Path, bundle: Bundle) -> list[Draft]:
    """A checkpoint of a training run, a bundle and a submission in every form, as the project
    writes them into `folder`.
    """
    recipe = TrainConfig(
        context_size=CONFIG.context_size, embedding_size=CONFIG.embedding_size, blocks=CONFIG.blocks
    )
    trainer = new_trainer(recipe, CONFIG)
    corpus = {"name": "text.txt", "path": "text.txt", "characters": 40, "sha256": "0" * 64}
    run = TrainingRun(
        recipe.recipe, corpus, [{"step": 0}], 6, 0, 3, 1.5, 3, 0, np.random.RandomState(0)
    )
    save_checkpoint(
        folder / CHECKPOINT_NAME, trainer.model, config=CONFIG, vocabulary=VOCABULARY, step=3,
        optimizer=trainer.optimizer, run=run,
    )  # fmt: skip
    seeds = [_taken_apart(folder / CHECKPOINT_NAME, CHECKPOINT, SAFETENSORS)]
    mine = {k: a for k, a in bundle.arrays.items() if bundle.kind(k) in (PARAMETER, LOSS)}
    mine |= {k: a for k, a in bundle.arrays.items() if k.endswith("mask.output")}
    bias = "output.output.bias"
    mine |= {"tokens": bundle.tokens, f"weight/{bias}": bundle.weights[bias]}
    for form, ending in ENDINGS.items():
        paths = {role: folder / f"{role} {form}{ending}" for role in (BUNDLE, SUBMISSION)}
        save_bundle(paths[BUNDLE], bundle)
        write_arrays(paths[SUBMISSION], mine, "{}")
        seeds += [_taken_apart(path, role, form) for role, path in paths.items()]
    return seeds


def _taken_apart(path: Path, role: str, form: str) -> Draft:
    if form == FOLDER:
        files = sorted(p for p in path.rglob("*") if p.is_file())
        members = [(p.relative_to(path).as_posix(), p.read_bytes()) for p in files]
        return Draft(role, form, members=members)
    if form == SAFETENSORS:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        return Draft(role, form, header=data[8:end], payload=data[end:])
    with zipfile.ZipFile(path) as file:
        return Draft(role, form, members=[(n, file.read(n)) for n in file.namelist()])


@lru_cache(4096)
def _compressed(data: bytes, deflated: bool) -> tuple[int, bytes]:
    if not deflated:
        return zlib.crc32(data), data
    engine = zlib.compressobj(wbits=-15)
    return zlib.crc32(data), engine.compress(data) + engine.flush()


LOCAL, CENTRAL = "<4s5H3L2H", "<4s6H3L5H2L"


def packed(
    members: list[tuple[str, bytes]], deflated: bool, patches: list[tuple[str, int, int, int, int]]
) -> bytes:
    """A zip of any names, twice the same among them, with `patches` to its records."""
    data, central, starts, places = bytearray(), bytearray(), [], []
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    for name, content in members:
        raw = name.encode("utf-8", "surrogatepass")[:65535]
        flags = 0 if raw.isascii() else 0x800
        crc, body = _compressed(content, deflated)
        starts.append(len(data))
        sizes = (crc, len(body), len(content), len(raw))
        places.append(len(central))
        central += struct.pack(CENTRAL, b"PK\1\2", 20, 20, flags, method, 0, 33, *sizes, 0, 0, 0,
                               0, 0, starts[-1]) + raw  # fmt: skip
        data += struct.pack(LOCAL, b"PK\3\4", 20, flags, method, 0, 33, *sizes, 0) + raw + body
    end, start = (
        struct.pack(
            "<4s4H2LH",
            b"PK\5\6",
            0,
            0,
            len(members) & 0xFFFF,
            len(members) & 0xFFFF,
            len(central),
            len(data),
            0,
        ),
        len(data),
    )
    data += central + end
    for record, index, offset, width, value in patches:
        base = {
            "local": starts[index % len(starts)] if starts else 0,
            "central": start + places[index % len(places)] if places else 0,
            "end": len(data) - len(end),
        }[record]
        data[base + offset : base + offset + width] = (value % 256**width).to_bytes(width, "little")
    return bytes(data)


class Place:
    """A path whose content is replaced by one input after the other, with little writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, Content] = {}

    def put(self, draft: Draft, data: bytes | None) -> int:
        """Write an input and return its size in bytes; `data` is that of the one file."""
        if draft.form != FOLDER:
            self.path.write_bytes(data or b"")
            return len(data or b"")
        wanted = dict(draft.members)
        self.path.mkdir(exist_ok=True)
        for name in [n for n, c in self._held.items() if wanted.get(n) is not c]:
            self._remove(name)
        for name, content in wanted.items():
            if name not in self._held:
                _write(self.path / name, content)
                self._held[name] = content
        return sum(len(c) for c in wanted.values() if isinstance(c, bytes))

    def _remove(self, name: str) -> None:
        del self._held[name]
        file = self.path / name
        file.unlink()
        for parent in file.relative_to(self.path).parents[:-1]:
            try:
                (self.path / parent).rmdir()
            except OSError:
                break


def _write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Link):
        path.symlink_to(content.target)
    elif isinstance(content, Pipe):
        os.mkfifo(path)
    else:
        path.write_bytes(content)
