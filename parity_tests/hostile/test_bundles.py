"""Hostile bundles and submissions one by one: a line with file and reason, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.arrays import read_arrays, write_arrays
from gpt_parity.cli import main
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import save_bundle
from parity_tests.hostile import refusals
from parity_tests.hostile.refusals import (
    BIAS,
    TEXT,
    check,
    described,
    joined,
    npy,
    refused,
)
from parity_tests.hostile.seeds import packed

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]

bundle = refusals.bundle

FORMS = ("ref.safetensors", "ref.npz", "ref")


def rewritten(
    path: str, bundle: Bundle, change: Callable[[dict[str, np.ndarray], dict[str, Any]], Any]
) -> None:
    """A bundle in the form of `path` with its arrays or its manifest changed."""
    save_bundle(Path("whole.npz"), bundle)
    arrays, text = read_arrays(Path("whole.npz"))
    Path("whole.npz").unlink()
    arrays, manifest = {k: a.copy() for k, a in arrays.items()}, json.loads(text or "")
    change(arrays, manifest)
    write_arrays(Path(path), arrays, json.dumps(manifest))


def _number(key: str, value: float) -> Callable[[dict[str, np.ndarray], dict[str, Any]], None]:
    def change(arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
        arrays[key].reshape(-1)[:1] = value

    return change


def _without_block(arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
    manifest["config"]["blocks"] = 2


Change = Callable[[dict[str, np.ndarray], dict[str, Any]], Any]
BUNDLES: dict[str, tuple[Change, str]] = {
    "NaN in a weight": (_number(f"weight/{BIAS}", np.nan), f"{BIAS} has 1 of 5 values"),
    "inf in a value": (_number("value/embedding.output", np.inf), "value/embedding.output has 1"),
    "NaN in a tolerance": (
        _number("tolerance/float32/value/embedding.output", np.nan), "is no tolerance"),
    "an id outside the vocabulary": (_number("tokens", 5), "tokens: got id 5, needed 0 to 4"),
    "another vocabulary": (
        lambda a, m: m["config"].update(vocab_size=4), "has shape (5, 2), (4, 2) is needed"),
    "another context": (
        lambda a, m: m["config"].update(context_size=7), "has shape (3, 2), (7, 2) is needed"),
    "another number of blocks": (_without_block, "lacks weight/transformers.1"),
    "9000 blocks": (lambda a, m: m["config"].update(blocks=9000), "more than there are arrays"),
    "10**8 steps": (lambda a, m: m.update(steps=10**8), "a whole pass and 100000000 steps"),
    "steps that are one less than none": (lambda a, m: m.update(steps=-1), "steps is -1"),
    "a foreign array": (lambda a, m: a.update(attacker=np.zeros(3)), "attacker unexpected"),
    "a foreign tolerance": (
        lambda a, m: a.update({"tolerance/float64/loss": np.zeros(())}), "unexpected"),
    "a key twice": (lambda a, m: m["keys"].append("loss"), "keys are not all different"),
    "a key that is a list": (lambda a, m: m["keys"].append(["loss"]), "keys hold ['loss']"),
    "a key without an array": (lambda a, m: m["keys"].append("grad/x"), "lacks grad/x"),
    "a missing array": (lambda a, m: a.pop("loss"), "lacks loss"),
    "an array of integers": (
        lambda a, m: a.update(loss=np.zeros((), np.int64)), "loss is int64"),
    "an array of half precision": (
        lambda a, m: a.update(loss=a["loss"].astype(np.float16)), "loss is float16"),
    "an array of another shape": (
        lambda a, m: a.update({f"grad/{BIAS}": np.zeros(4, np.float32)}), "has shape (4,), (5,)"),
    "tolerances that are a list": (
        lambda a, m: m["tolerances"].update(float32=[1]), "tolerances of float32 are [1]"),
    "a tolerance of 10**400": (
        lambda a, m: m["tolerances"]["float32"].update(loss=10**400), "an integer of 401 digits"),
    "a tolerance of nothing below": (
        lambda a, m: m["tolerances"]["float32"].update(loss=-1.0), "tolerances of float32"),
    "a hyperparameter of 10**400": (
        lambda a, m: m["optimizer"].update(eps=10**400), "an integer of 401 digits"),
    "a hyperparameter that is a text": (
        lambda a, m: m["optimizer"].update(eps="1" * 5000), "eps is '1111"),
    "betas that are a number": (lambda a, m: m["optimizer"].update(betas=1), "betas are 1"),
    "a hyperparameter too many": (lambda a, m: m["optimizer"].update(x=1), "optimizer has"),
    "a hyperparameter too few": (lambda a, m: m["optimizer"].pop("eps"), "optimizer has"),
    "an alias of nothing": (lambda a, m: m["aliases"].update(x="y"), "alias x is of 'y'"),
    "an alias of a number": (lambda a, m: m["aliases"].update(x=1), "alias x is of 1"),
    "a vote on nothing": (
        lambda a, m: m["votes"].update(x={"closure": 0.1, "torch": None}), "a vote is on x"),
    "half of torch's votes": (
        lambda a, m: m["votes"].update({f"grad/{BIAS}": {"closure": 0.1, "torch": 0.1},
                                        "loss": {"closure": 0.1, "torch": None}}),
        "torch has some of the votes"),
    "a version of 500 names": (lambda a, m: m.update(version=["x" * 50] * 500), "version is ["),
    "a format of 500 names": (lambda a, m: m.update(config=["x" * 50] * 500), "config is ["),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BUNDLES)
def test_a_hostile_bundle_is_one_line_that_names_it(
    name: str, form: str, bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BUNDLES[name]
    write_arrays(Path("mine.npz"), {"loss": bundle.arrays["loss"]}, "{}")
    rewritten("good.npz", bundle, lambda arrays, manifest: None)
    assert main(check("mine.npz", "good.npz")) == 0
    rewritten(form, bundle, change)
    err = refused(check("mine.npz", form), capsys)
    assert err.startswith(f"gpt-parity: error: {form}: ") and message in err


LOSS = npy(described("()"))
NPY: dict[str, tuple[bytes, str]] = {
    "zero bytes": (b"", "no npy file of version"),
    "the magic alone": (b"\x93NUMPY", "no npy file of version"),
    "wrong magic": (b"\x93NUMPX" + LOSS[6:], "no npy file of version"),
    "a version to come": (LOSS[:6] + b"\x09" + LOSS[7:], "no npy file of version"),
    "a header of 65535 bytes": (npy(described("()"), length=65535), "header of 65535 bytes"),
    "a header of 2**32 - 1 bytes": (
        npy(described("()"), version=2, length=2**32 - 1), "header of 4294967295 bytes"),
    "a header of no bytes": (npy("", length=0), "no descr"),
    "a shape of 2**62": (npy(described(f"({2**62},)")), "4 bytes for (4611686018427387904,)"),
    "a shape of 2**32 by 2**32": (npy(described(f"({2**32}, {2**32})")), "4 bytes for"),
    "a shape of 4000 digits": (npy(described("(" + "9" * 4000 + ",)")), "shape (9999"),
    "a shape of 40 axes": (npy(described("(" + "1," * 40 + ")")), "shape (1,1,1"),
    "a shape of ones and an L": (npy(described("(L,)")), "shape (L,)"),
    "a dtype of 100 digits": (npy(described("()", "<f" + "9" * 100)), "no descr"),
    "objects": (npy(described("()", "|O"), pickle.dumps(1)), "no descr of numbers"),
    "a record": (npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}"), "no descr"),
    "one byte short": (LOSS[:-1], "3 bytes for ()"),
    "one byte more": (LOSS + b"\0", "5 bytes for ()"),
}  # fmt: skip


@pytest.mark.parametrize("form", ("mine.npz", "deflated.npz", "mine"))
@pytest.mark.parametrize("name", NPY)
def test_a_hostile_npy_is_named_in_the_line_of_its_file(
    name: str, form: str, bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    save_bundle(Path("ref"), bundle)
    content, message = NPY[name]
    for data in (content, LOSS):
        if form == "mine":
            Path("mine").mkdir(exist_ok=True)
            Path("mine/loss.npy").write_bytes(data)
        else:
            Path(form).write_bytes(packed([("loss.npy", data)], form != "mine.npz", []))
        if data is not LOSS:
            err = refused(check(form, "ref"), capsys)
            assert err.startswith(f"gpt-parity: error: {form}: loss: ") and message in err
    assert main(check(form, "ref")) == 1  # a loss of 0, which is whole


BAD_NAMES = ("../loss", "a/../loss", "..", "/loss", "a//loss", "a\\loss", "./loss", "", "a\nb",
             "\x1b[2J", "\u202eloss", "x" * 300)  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_paths_below_are_refused(
    name: str, bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    save_bundle(Path("ref"), bundle)
    Path("mine.npz").write_bytes(packed([(f"{name}.npy", LOSS)], False, []))
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    Path("mine.safetensors").write_bytes(joined({name: entry}, bytes(4)))
    for form in ("mine.npz", "mine.safetensors"):
        err = refused(check(form, "ref"), capsys)
        assert err.startswith(f"gpt-parity: error: {form}: ") and "' is no name" in err


# Patches of a zip's records: (record, member, offset, width, value).
ENCRYPTED = [("central", 0, 8, 2, 1), ("local", 0, 6, 2, 1)]
LINKED = [("central", 0, 38, 4, (stat.S_IFLNK | 0o777) << 16)]
HUGE = [(r, 0, o, 4, 2**31) for r, o in (("central", 24), ("local", 22))]
LARGE = [(r, 0, o, 4, v) for v, (r, o) in zip((2**20,) * 4, (
    ("central", 20), ("central", 24), ("local", 18), ("local", 22)), strict=True)]  # fmt: skip
ZIPS: dict[str, tuple[bytes, str]] = {
    "a name twice": (packed([("loss.npy", LOSS)] * 2, False, []), "loss.npy stands twice"),
    "a manifest twice": (packed([("manifest.json", b"{}")] * 2, False, []), "stands twice"),
    "a foreign member": (packed([("evil.py", b"x")], False, []), "evil.py is no npy file"),
    "no name at all": (packed([("", b"x")], False, []), "'' is no name"),
    "a symbolic link": (packed([("loss.npy", b"/etc/passwd")], False, LINKED), "a symbolic link"),
    "an encrypted member": (packed([("loss.npy", LOSS)], False, ENCRYPTED), "is encrypted"),
    "a stored member of 2**31 bytes": (
        packed([("loss.npy", LOSS)], False, HUGE), "has 2147483648 bytes, "),
    "a deflated member of 2**31 bytes": (
        packed([("loss.npy", LOSS)], True, HUGE), "has 2147483648 bytes, "),
    "members larger than the file": (
        packed([("loss.npy", LOSS)], False, LARGE), "members of 1048576 bytes in "),
    "a manifest larger than the file": (
        packed([("manifest.json", b" " * 10**6)], True, []), "manifest.json has 1000000 bytes"),
    "a manifest that is not UTF-8": (packed([("manifest.json", b"\xff")], False, []), "utf-8"),
    "nothing but the end": (packed([], False, []), "holds nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", ZIPS)
def test_a_hostile_zip_is_one_line(
    name: str, bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    save_bundle(Path("ref"), bundle)
    content, message = ZIPS[name]
    Path("mine.npz").write_bytes(content)
    err = refused(check("mine.npz", "ref"), capsys)
    assert err.startswith("gpt-parity: error: mine.npz: ") and message in err


@pytest.mark.parametrize(
    ("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")]
)
def test_what_expands_without_bound_is_refused_by_name(
    method: int, name: str, bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    save_bundle(Path("ref"), bundle)
    with zipfile.ZipFile("mine.npz", "w", method) as file:
        file.writestr("loss.npy", LOSS)
    assert f"loss.npy is compressed by {name}" in refused(check("mine.npz", "ref"), capsys)


def test_links_in_a_folder_are_refused_whatever_they_show(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    save_bundle(Path("ref"), bundle)
    write_arrays(Path("mine"), {"loss": bundle.arrays["loss"]}, "{}")
    assert main(check("mine", "ref")) == 0
    for target in ("../ref/loss.npy", "loss.npy", "absent", "/dev/zero"):
        shutil.rmtree("mine")
        Path("mine").mkdir()
        Path("mine/loss.npy").symlink_to(target)
        assert "mine: loss.npy is a symbolic link" in refused(check("mine", "ref"), capsys)
    write_arrays(Path("mine"), {"loss": bundle.arrays["loss"]}, "{}")
    manifest = Path("ref/manifest.json")
    manifest.rename("elsewhere.json")
    for target in ("../elsewhere.json", "absent"):
        manifest.unlink(missing_ok=True)
        manifest.symlink_to(target)
        err = refused(check("mine", "ref"), capsys)
        assert "ref: manifest.json is a symbolic link" in err
    manifest.unlink()
    os.mkfifo(manifest)
    assert "manifest.json is no regular file" in refused(check("mine", "ref"), capsys)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_bundle(Path("ref"), bundle)
    write_arrays(Path("mine"), {k: bundle.arrays[k] for k in ("loss", f"grad/{BIAS}")}, "{}")
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if Path(path) == Path("mine/grad"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", denied)
    code = main(check("mine", "ref"))
    assert (code, "mine: cannot be read, Permission denied" in capsys.readouterr().err) == (2, True)


def test_a_signalling_nan_is_a_value_that_is_not_finite(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its conversion to float64 raises the flag of invalid operations."""
    save_bundle(Path("ref"), bundle)
    write_arrays(Path("mine.npz"), {"loss": np.array(0x7F800001, "<u4").view("<f4")}, "{}")
    assert main(check("mine.npz", "ref")) == 1
    assert "first: loss, not finite" in capsys.readouterr().out
