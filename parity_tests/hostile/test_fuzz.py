"""Damaged files by the thousand: read whole, or refused in one line that names them."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

from parity_tests.hostile import fuzz
from parity_tests.hostile.fuzz import Fuzzer, Outcome
from parity_tests.hostile.seeds import DEFLATED, FOLDER, SAFETENSORS, STORED

pytestmark = pytest.mark.reference("exact property")

SEED = 0


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_damaged_files_are_read_whole_or_refused_in_one_line(tmp_path: Path) -> None:
    outcome = Fuzzer(tmp_path, SEED).run(range(2000))
    _require_breadth(outcome, 2000)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_files(tmp_path: Path) -> None:
    outcome = Fuzzer(tmp_path, SEED + 1).run(range(100_000))
    print(outcome)
    _require_breadth(outcome, 100_000)


def _require_breadth(outcome: Outcome, inputs: int) -> None:
    """Damage that is always seen at once, or never, says nothing of the readers."""
    assert outcome.inputs == inputs == outcome.accepted + outcome.refused.total()
    assert 0.05 * inputs < outcome.accepted < 0.5 * inputs, outcome
    assert len(outcome.refused) > len(fuzz.KINDS) / 2, outcome
    assert max(outcome.refused.values()) < 0.5 * inputs, outcome
    assert outcome.worst.keys() == {SAFETENSORS, STORED, DEFLATED, FOLDER}


def test_an_input_is_the_same_whenever_it_is_asked_for(tmp_path: Path) -> None:
    reasons = []
    for order in (range(300), reversed(range(300))):
        folder = tmp_path / str(len(reasons))
        folder.mkdir()
        fuzzer = Fuzzer(folder, SEED)
        found = {i: fuzzer.one(i, measure=False) for i in order}
        reasons.append(sorted(found.items()))
    assert reasons[0] == reasons[1]


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


FAULTS = {
    "another exception": (lambda path: {}["x"], KeyError),
    "no name of the file": (lambda path: _refuse("is broken"), AssertionError),
    "two lines": (lambda path: _refuse(f"{path}: is\nbroken"), AssertionError),
    "a control character": (lambda path: _refuse(f"{path}: \x1b[2J"), AssertionError),
    "a long message": (lambda path: _refuse(f"{path}: {'x' * 2000}"), AssertionError),
    "a warning": (lambda path: warnings.warn("careful", stacklevel=1), UserWarning),
    "a file": (lambda path: path.with_name("new").write_bytes(b""), AssertionError),
    "a folder": (lambda path: path.with_name("new").mkdir(), AssertionError),
    "code": (lambda path: eval("1 + 1"), AssertionError),
    "a pickle": (lambda path: _unpickled(path), AssertionError),
    "memory": (lambda path: bytes(64 * 2**20), AssertionError),
}  # fmt: skip


def _refuse(message: str) -> None:
    raise ValueError(message)


def _unpickled(path: Path) -> None:
    try:
        pickle.loads(pickle.dumps(Payload()))
    finally:
        Path("executed").rmdir()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", ("load_checkpoint", "load_bundle", "judge_file"))
def test_the_fuzzer_sees_a_reader_that_does_wrong(
    reader: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzzer(tmp_path, SEED)
    act, error = FAULTS[fault]
    real = getattr(fuzz, reader)

    def wrong(path: Path, *rest: Any) -> Any:
        act(path)
        return real(path, *rest)

    monkeypatch.setattr(fuzz, reader, wrong)
    numbers = range(len(fuzzer.order))
    with pytest.raises(error) as caught:
        fuzzer.run(numbers, memory_every=1)
    notes = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(f"of seed {SEED} (" in text for text in notes)
