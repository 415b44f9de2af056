"""Files of any kind: code in them is never run, and memory is bounded by their size."""

from __future__ import annotations

import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.arrays import read_arrays
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import save_bundle
from parity_tests.hostile import refusals
from parity_tests.hostile.fuzz import FACTOR, SLACK
from parity_tests.hostile.refusals import (
    COMMANDS,
    TEXT,
    check,
    checkpoint,
    described,
    joined,
    npy,
    refused,
)
from parity_tests.hostile.seeds import DEFLATED, FOLDER, SAFETENSORS, STORED, packed

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]

bundle = refusals.bundle


# --- Code


class Payload:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_pickles_are_never_loaded(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    pickle.loads(pickle.dumps(Payload()))
    assert Path("executed").is_dir()  # so it does, where it is loaded
    Path("executed").rmdir()
    save_bundle(Path("ref"), bundle)
    checkpoint()
    np.save("x.npy", np.array([Payload()]), allow_pickle=True)
    np.savez("x.npz", loss=np.array([Payload()]), allow_pickle=True)
    Path("folder").mkdir()
    shutil.copy("x.npy", "folder/loss.npy")
    for name in ("model.pt", "pt.safetensors", "pt.npz", "pt.npy"):
        torch.save({"model": Payload()}, name)
    for name in ("model.pkl", "pickle.safetensors", "pickle.npz", "pickle.npy"):
        Path(name).write_bytes(pickle.dumps(Payload()))
    files = [p.name for p in Path().iterdir() if p.name not in ("ref", "text.txt", "c.safetensors")]
    assert len(files) == 11
    for name in sorted(files):
        for arguments in COMMANDS.values():
            assert name in refused([*arguments, name], capsys)
        assert name in refused(check(name, "ref"), capsys)
        assert name in refused(check("ref", name), capsys)
        assert name in refused(["oracle", "export", "-o", "new", "--weights", "c.safetensors",
                                "--tokens", name], capsys)  # fmt: skip
    assert not Path("executed").exists()


# --- Memory


def peak_of(path: Path) -> int:
    tracemalloc.start()
    try:
        read_arrays(path)
    except ValueError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def zeros(count: int, descr: str = "<f4") -> bytes:
    return npy(described(f"({count},)", descr), bytes(4 * count))


LISTS = '{"a":[' + "[]," * 300_000 + "[]]}"
OBJECTS = '{"a":[' + '{"b":0},' * 100_000 + "0]}"
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "zeros": (DEFLATED, lambda: packed([("a.npy", zeros(5_000_000))], True, [])),
    "zeros from the other end": (
        DEFLATED, lambda: packed([("a.npy", zeros(5_000_000, ">f4"))], True, [])),
    "many zeros": (
        DEFLATED, lambda: packed([(f"{i}.npy", zeros(250_000)) for i in range(20)], True, [])),
    "a stored array": (STORED, lambda: packed([("a.npy", zeros(2_000_000))], False, [])),
    "a manifest of lists": (STORED, lambda: packed([("manifest.json", LISTS.encode())], False, [])),
    "a header of lists": (SAFETENSORS, lambda: joined(LISTS, b"")),
    "a header of objects": (SAFETENSORS, lambda: joined(OBJECTS, b"")),
    "a header of one long number": (SAFETENSORS, lambda: joined("9" * 2_000_000, b"")),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded_by_the_size_of_the_file(name: str) -> None:
    form, make = BOMBS[name]
    path = Path("x.safetensors" if form == SAFETENSORS else "x.npz")
    path.write_bytes(make())
    peak, allowed = peak_of(path), FACTOR[form] * path.stat().st_size + SLACK
    assert path.stat().st_size / 2 < peak <= allowed


def test_memory_of_a_folder_is_bounded_by_its_size() -> None:
    Path("x").mkdir()
    Path("x/a.npy").write_bytes(zeros(2_000_000))
    assert 8_000_000 < peak_of(Path("x")) <= FACTOR[FOLDER] * 8_000_000 + SLACK
