"""A fuzzer of the readers: damaged checkpoints, bundles and submissions, by number.

Input `number` of seed `seed` is always the same, so that a failure can be replayed:

    Fuzzer(folder, seed).one(number)

Every input must be read whole (arrays finite and of the manifest's shapes) or be refused with one
printable line that names the file; without a warning, without any file written and any code run,
and in memory in proportion to the file.
"""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from gpt_parity.arrays import read_arrays
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import load_bundle
from gpt_parity.oracle.verdict import judge_file
from parity_tests.hostile.mutators import mutated
from parity_tests.hostile.seeds import (
    BUNDLE,
    CHECKPOINT,
    DEFLATED,
    ENDINGS,
    FOLDER,
    SAFETENSORS,
    STORED,
    SUBMISSION,
    Draft,
    Place,
    make_seeds,
    reference,
)

LONGEST_MESSAGE = 1000

# Peak memory is at most FACTOR * size + SLACK bytes. JSON costs most: the text "[]," is a list of
# 56 bytes and a pointer to it, which is 22 for each byte, and twice that for an object; the text
# itself stands there up to three times. Of deflate 1 byte becomes 1032 at most (a match of 258
# bytes takes 2 bits), held once as read and once in native byte order. The slack is for what does
# not depend on the file: regular expressions, messages, the reference that judges.
FACTOR = {SAFETENSORS: 64, STORED: 64, DEFLATED: 64 + 2 * 1032, FOLDER: 64}
SLACK = 2 * 2**20

# How often inputs are made of each form: a folder of many files takes longest.
SHARES = {SAFETENSORS: 2, STORED: 2, DEFLATED: 1, FOLDER: 1}

# One of so many rounds judges numbers too, which takes longer than reading them.
JUDGED = 4

# What marks the kind of a refusal, in the order in which it is looked for.
KINDS = (
    "not a whole safetensors", "not a whole npz", "not a whole npy", "cannot be read",
    "manifest is", "manifest:", "no manifest", "format version", "vocabulary", "unexpected",
    "missing", "lacks", "nan or inf", "has shape", "is needed", "unknown", "twice", "link",
)  # fmt: skip

# Events of the interpreter that no reader may cause.
FORBIDDEN = frozenset((
    "pickle.find_class", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork",
    "subprocess.Popen", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "shutil.rmtree", "shutil.copyfile", "shutil.unpack_archive",
    "tempfile.mkstemp", "tempfile.mkdtemp", "socket.connect", "ctypes.dlopen",
))  # fmt: skip


class _Watch:
    """Sees what the interpreter is asked for while `seen` is a list. It stays for good."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] | None = None
        self.installed = False

    def install(self) -> None:
        if not self.installed:
            sys.addaudithook(self._event)
            self.installed = True

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        writes = event == "open" and len(arguments) > 2 and isinstance(arguments[2], int) and (
            arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )  # fmt: skip
        if event in FORBIDDEN or writes:
            self.seen.append((event, arguments[0] if arguments else None))


WATCH = _Watch()


@dataclass
class Outcome:
    """How many inputs were read and refused, and for which kinds of reasons.

    worst: by form, the largest peak of memory as a part of what is allowed, and how it came.
    """

    inputs: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    measured: int = 0
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.refused.most_common())
        return (
            f"{self.inputs} inputs, {self.inputs / max(self.seconds, 1e-9):.0f} a second: "
            f"{self.accepted} accepted; refused: {kinds}; memory of {self.measured}: {self.worst}"
        )


class Fuzzer:
    """Inputs by number; `folder` is an empty one of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        WATCH.install()
        self.seed, self.bundle = seed, reference()
        (folder / "seeds").mkdir()
        self.seeds = make_seeds(folder / "seeds", self.bundle)
        shares = [SHARES[d.form] + (d.role == CHECKPOINT) for d in self.seeds]
        self.order = [i for i, share in enumerate(shares) for _ in range(share)]
        self.places = [
            Place(folder / f"{draft.role}{i}{ENDINGS[draft.form]}")
            for i, draft in enumerate(self.seeds)
        ]
        self.right = folder / "seeds" / f"{SUBMISSION} {SAFETENSORS}.safetensors"
        for draft, place in zip(self.seeds, self.places, strict=True):  # and every import is done
            place.put(draft, None if draft.form == FOLDER else draft.data())
            assert self._reason(draft, place.path, True) is None

    def run(self, numbers: Iterable[int], memory_every: int = 20) -> Outcome:
        """Try the inputs of these numbers; AssertionError that names the first that fails."""
        outcome, start = Outcome(), time.perf_counter()
        for number in numbers:
            self.one(number, outcome, number // len(self.order) % memory_every == 0)
        outcome.seconds = time.perf_counter() - start
        return outcome

    def one(self, number: int, outcome: Outcome | None = None, measure: bool = True) -> str | None:
        """Try one input; returns the reason of a refusal, None if it was read."""
        outcome = outcome or Outcome()
        rng = Random(f"{self.seed} {number}")
        index = self.order[number % len(self.order)]
        draft, data = mutated(rng, self.seeds[index], rng.choice(self.seeds))
        place = self.places[index]
        size = place.put(draft, data)
        judged = number // len(self.order) % JUDGED == 0
        name = f"input {number} of seed {self.seed} ({draft.role}, {draft.form}, {size} bytes)"
        WATCH.seen = seen = []
        if measure:
            tracemalloc.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                reason = self._reason(draft, place.path, judged)
        except Exception as error:
            error.add_note(name)
            raise
        finally:
            WATCH.seen = None
            peak = tracemalloc.get_traced_memory()[1] if measure else 0
            if measure:
                tracemalloc.stop()
        assert not seen, f"{name}: {seen!r:.300}"
        allowed = FACTOR[draft.form] * size + SLACK
        assert peak <= allowed, f"{name}: took {peak} bytes, {allowed} are allowed ({reason})"
        outcome.inputs += 1
        outcome.measured += measure
        worst = outcome.worst.get(draft.form, (0.0, ""))
        outcome.worst[draft.form] = max(worst, (peak / allowed, f"{number}: {peak} of {size}"))
        if reason is None:
            outcome.accepted += 1
        else:
            kind = next((kind for kind in KINDS if kind in reason), "other")
            outcome.refused[kind] += 1
        return reason

    def _reason(self, draft: Draft, path: Path, judged: bool) -> str | None:
        try:
            if draft.role == CHECKPOINT:
                _check_checkpoint(path)
            elif draft.role == BUNDLE:
                read = _check_bundle(path)
                if judged:
                    judge_file(self.right, read)
            elif judged:
                judge_file(path, self.bundle)
            else:
                read_arrays(path)
        except (ValueError, TypeError) as error:
            text = str(error)
            if draft.role == BUNDLE and text.startswith(f"{self.right}: "):
                return "does not fit"
            assert text.startswith(f"{path}: "), f"{text!r:.300} does not name the file"
            assert text.isprintable(), f"{text!r:.300} is not one printable line"
            assert len(text) - len(str(path)) <= LONGEST_MESSAGE, f"{len(text)}: {text!r:.300}"
            return text[len(str(path)) :]
        return None


def _check_checkpoint(path: Path) -> None:
    read = load_checkpoint(path)
    shapes = read.config.parameter_shapes()
    optimizer = read.optimizer or {}
    for arrays in (read.weights, *(optimizer[m] for m in ("exp_avg", "exp_avg_sq") if optimizer)):
        _require(arrays, shapes)
        assert {array.dtype.name for array in arrays.values()} == {read.dtype}
    assert len(read.vocabulary) == read.config.vocab_size and read.step >= 0


def _check_bundle(path: Path) -> Bundle:
    read = load_bundle(path)
    _require(read.weights, read.config.parameter_shapes())
    _require(read.arrays, {key: array.shape for key, array in read.arrays.items()})
    for tolerances in read.tolerances.values():
        assert tolerances.keys() == read.arrays.keys()
    assert read.summary(path)
    return read


def _require(arrays: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> None:
    assert {name: array.shape for name, array in arrays.items()} == shapes
    assert all(np.isfinite(array).all() for array in arrays.values())
