"""Bundles and submissions as files: their three forms, other writers, damage, links."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpt_parity.arrays import read_arrays, write_arrays
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.subject import export
from gpt_parity.oracle_config import ExportConfig
from parity_tests import bundles
from parity_tests.bundles import FORMS, SQUARE, Arrays, check
from parity_tests.comparers import assert_same_bits

bundle, reference, right = bundles.bundle, bundles.reference, bundles.right


@pytest.mark.parametrize("form", FORMS)
def test_a_bundle_comes_back_as_it_was(form: str, bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(tmp_path / form, bundle)
    again = load_bundle(tmp_path / form)
    assert_same_bits(again.arrays, bundle.arrays)
    assert_same_bits(again.weights, bundle.weights)
    assert (again.config, again.steps, again.votes) == (bundle.config, 2, bundle.votes)
    assert again.optimizer == {**bundle.optimizer, "betas": list(bundle.optimizer["betas"])}
    assert list(again.tolerances) == ["float64", "float32"]
    for dtype, tolerances in bundle.tolerances.items():
        for key, tolerance in tolerances.items():
            assert again.tolerances[dtype][key].whole == tolerance.whole
            assert np.array_equal(again.tolerances[dtype][key].rows, tolerance.rows)


@pytest.mark.parametrize("form", ("mine.safetensors", "mine.npz", "mine"))
@pytest.mark.parametrize("ref", FORMS)
def test_every_form_is_judged_by_every_form(
    form: str, ref: str, bundle: Bundle, right: Arrays, tmp_path: Path
) -> None:
    save_bundle(tmp_path / ref, bundle)
    write_arrays(tmp_path / form, right, "{}")
    assert check(tmp_path / form, tmp_path / ref) == 0
    right["grad/output.output.bias"][0] *= 1.001
    shutil.rmtree(tmp_path / form, ignore_errors=True)
    write_arrays(tmp_path / form, right, "{}")
    assert check(tmp_path / form, tmp_path / ref) == 1


def test_arrays_saved_by_their_own_libraries(
    reference: Path, right: Arrays, tmp_path: Path
) -> None:
    np.savez_compressed(tmp_path / "mine.npz", **right)
    save_file(right, tmp_path / "mine.safetensors")
    for form in ("mine.npz", "mine.safetensors"):
        assert check(tmp_path / form, reference) == 0
    for key, array in right.items():
        path = tmp_path / "mine" / f"{key}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.asarray(array, order="F"))
    assert check(tmp_path / "mine", reference) == 0


CORRUPT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "foreign": lambda data: b"GIF89a" + bytes(500),
    "the wrong length in front": lambda data: b"\xff" * 8 + data[8:],
}


@pytest.mark.parametrize("role", ("mine", "reference"))
@pytest.mark.parametrize("form", (".safetensors", ".npz", ""))
@pytest.mark.parametrize("fault", CORRUPT)
def test_damaged_files_are_one_line(
    role: str, form: str, fault: str, bundle: Bundle, right: Arrays, tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    mine, ref = tmp_path / f"mine{form}", tmp_path / f"ref{form}"
    write_arrays(mine, right, "{}")
    save_bundle(ref, bundle)
    path = mine if role == "mine" else ref
    if path.is_dir():
        path = path / f"{SQUARE}.npy"
    path.write_bytes(CORRUPT[fault](path.read_bytes()))
    assert check(mine, ref) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert (mine if role == "mine" else ref).name in err


@pytest.mark.parametrize("header", (
    "{'descr': '<f8', 'fortran_order': False, 'shape': (), ",
    "{'descr': ('<f8', '<f8'), 'fortran_order': False, 'shape': (), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,), }",
    "{'descr': '<f3', 'fortran_order': False, 'shape': (), }",
    "(" * 4000, "1" + "+1" * 3000, "", "[" * 4000,
))  # fmt: skip
def test_headers_of_npy_files_are_never_evaluated(
    header: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "mine").mkdir()
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    (tmp_path / "mine" / "loss.npy").write_bytes(content + bytes(8))
    code = check(tmp_path / "mine", reference)
    err = capsys.readouterr().err
    if header.endswith("(), "):  # a lost brace loses no number
        assert code == 1
    else:
        assert code == 2 and err.count("\n") == 1 and "is not a whole npy array" in err


def test_other_writers_headers_are_read(tmp_path: Path) -> None:
    for header in (
        b"{'descr':'<f4','fortran_order':False,'shape':(2,)}",
        b'{"shape": (2,), "fortran_order": False, "descr": "<f4"}\n',
    ):
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        path = tmp_path / "x.npy"
        path.write_bytes(content + np.array([1.5, 2.5], "<f4").tobytes())
        (array,) = read_arrays(path)[0].values()
        assert array.tolist() == [1.5, 2.5] and array.dtype == np.float32


def test_links_and_pipes_are_not_read(
    reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_arrays(tmp_path / "right", right, "{}")
    linked = tmp_path / "linked"
    linked.mkdir()
    np.save(linked / "loss.npy", right["loss"])
    (linked / "grad").symlink_to(tmp_path / "right" / "grad")
    piped = tmp_path / "piped"
    piped.mkdir()
    os.mkfifo(piped / "loss.npy")
    os.mkfifo(tmp_path / "pipe.npz")
    for mine, reason in ((linked, "symbolic link"), (piped, "no regular file"),
                         (tmp_path / "pipe.npz", "no regular file")):  # fmt: skip
        assert check(mine, reference) == 2
        assert reason in capsys.readouterr().err
    write_arrays(tmp_path / "mine.npz", right, "{}")
    assert check(tmp_path / "mine.npz", reference, "--map", str(tmp_path / "pipe.npz")) == 2


def _raw_safetensors(path: Path, dtype: str, data: bytes) -> None:
    entry = {"dtype": dtype, "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"loss": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("flags", ((), ("--dtype", "bfloat16")))
def test_dtypes_that_numpy_has_not(
    flags: tuple[str, ...], reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _raw_safetensors(tmp_path / "mine.safetensors", "F8_E5M2", bytes(4))
    assert check(tmp_path / "mine.safetensors", reference, *flags) == 2
    assert "loss is F8_E5M2" in capsys.readouterr().err


BROKEN_MANIFESTS = {
    "none": None,
    "no JSON": "{",
    "nested without end": "[" * 100_000,
    "of another kind": '{"format": "gpt-parity checkpoint", "version": 1}',
    "of a later version": '{"format": "gpt-parity bundle", "version": 2}',
    "bare": '{"format": "gpt-parity bundle", "version": 1}',
}


@pytest.mark.parametrize("name", BROKEN_MANIFESTS)
def test_a_reference_needs_its_manifest(
    name: str, bundle: Bundle, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_bundle(tmp_path / "ref", bundle)
    write_arrays(tmp_path / "mine.npz", right, "{}")
    text = BROKEN_MANIFESTS[name]
    if text is None:
        (tmp_path / "ref" / "manifest.json").unlink()
    else:
        (tmp_path / "ref" / "manifest.json").write_text(text)
    assert check(tmp_path / "mine.npz", tmp_path / "ref") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("key", ("config", "keys", "tolerances", "votes", "optimizer", "steps"))
@pytest.mark.parametrize("value", (None, [], {}, "x", 3, {"a": 1}, ["a"]))
def test_nonsense_in_a_manifest_never_passes(
    key: str, value: Any, bundle: Bundle, right: Arrays, tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    save_bundle(tmp_path / "ref", bundle)
    write_arrays(tmp_path / "mine.npz", right, "{}")
    path = tmp_path / "ref" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[key] = value
    path.write_text(json.dumps(manifest))
    harmless = (key, value) == ("votes", {})  # a point without any derivative
    assert check(tmp_path / "mine.npz", tmp_path / "ref") == (0 if harmless else 2)
    assert "Traceback" not in capsys.readouterr().err


def test_bfloat16_tensors_of_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sizes = {"preset": "tiny", "embedding_size": 32, "init": "training"}
    training = export(ExportConfig(out=Path("ref"), **sizes))
    save_bundle(tmp_path / "ref", training)
    key = "grad/output.output.bias"
    bits = (training.arrays[key].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    entry = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [0, bits.nbytes]}
    header = json.dumps({key: entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bits.tobytes()
    (tmp_path / "mine.safetensors").write_bytes(content)
    assert check(tmp_path / "mine.safetensors", tmp_path / "ref") == 2
    assert "--dtype bfloat16" in capsys.readouterr().err
    assert check(tmp_path / "mine.safetensors", tmp_path / "ref", "--dtype", "bfloat16") == 0
    assert "cannot see" in capsys.readouterr().out
