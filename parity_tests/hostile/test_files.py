"""Hostile files one by one: a line with file and reason, nothing loaded, run, written or filled."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.arrays import read_arrays, write_arrays
from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.cli import main
from gpt_parity.config import BACKENDS, GPTConfig
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import save_bundle
from gpt_parity.weights import get_weights, set_weights
from parity_tests.comparers import assert_same_bits
from parity_tests.hostile.fuzz import FACTOR, SLACK
from parity_tests.hostile.seeds import (
    CONFIG,
    DEFLATED,
    FOLDER,
    SAFETENSORS,
    STORED,
    VOCABULARY,
    packed,
    reference,
)

pytestmark = pytest.mark.reference("by hand")

FORMS = ("ref.safetensors", "ref.npz", "ref")
BIAS = "output.output.bias"
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return reference()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a folder of many files takes long
    Path("text.txt").write_text("abcde" * 100)


def checkpoint(path: str = "c.safetensors", config: GPTConfig = CONFIG, **options: Any) -> bytes:
    model = build_model("numpy", config)
    optimizer = load_backend("numpy").AdamWOptimizer(model.parameters())
    letters = VOCABULARY[: config.vocab_size]
    given = {"vocabulary": letters, "optimizer": optimizer, **options}
    save_checkpoint(Path(path), model, config=config, **given)
    return Path(path).read_bytes()


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def joined(header: str | dict[str, Any], payload: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + payload


def with_entry(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    """A checkpoint with one entry of its header changed."""

    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        header[name] |= changes
        return joined(header, payload)

    return changed


def with_name(new: str) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        header[new] = header.pop(f"model/{BIAS}")
        return joined(header, payload)

    return changed


def with_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        manifest = json.loads(header["__metadata__"]["manifest"])
        change(manifest)
        header["__metadata__"]["manifest"] = json.dumps(manifest)
        return joined(header, payload)

    return changed


def with_number(name: str, value: float) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        start = header[name]["data_offsets"][0]
        return joined(header, payload[:start] + np.float32(value).tobytes() + payload[start + 4 :])

    return changed


def twice(data: bytes) -> bytes:
    """The first name of the header once more, with the same entry."""
    header, payload = split(data)
    name = f"model/{BIAS}"
    return joined(json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}', payload)


WEIGHT = f"model/{BIAS}"
CHECKPOINTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "zero bytes": (lambda data: b"", "is not a whole safetensors file"),
    "cut in the length": (lambda data: data[:5], "is not a whole safetensors file"),
    "cut after the length": (lambda data: data[:8], "0 are there"),
    "cut in the header": (lambda data: data[:100], "92 are there"),
    "cut after the header": (lambda data: joined(split(data)[0], b""), "is not a whole"),
    "cut by one byte": (lambda data: data[:-1], "is not a whole safetensors file"),
    "one byte more": (lambda data: data + b"\0", "is not a whole safetensors file"),
    "wrong magic": (lambda data: b"\x89PNG\r\n\x1a\n" + data, "is not a whole safetensors file"),
    "zip magic": (lambda data: packed([("x.npy", data)], False, []), "is not a whole"),
    "header of 2**63 bytes": (
        lambda data: (2**63).to_bytes(8, "little") + data[8:], "header of 9223372036854775808"),
    "header of 2**64 - 1 bytes": (lambda data: b"\xff" * 8 + data[8:], "18446744073709551615"),
    "shape of 2**62": (with_entry(WEIGHT, shape=[2**62]), "is not a whole safetensors file"),
    "shape of 2**31 by 2**31": (with_entry(WEIGHT, shape=[2**31, 2**31]), "is not a whole"),
    "shape of 2**62 by 0": (
        with_entry(WEIGHT, shape=[2**62, 0], data_offsets=[0, 0]), "is not a whole"),
    "negative shape": (with_entry(WEIGHT, shape=[-5]), "is not a whole safetensors file"),
    "offsets beyond the file": (
        with_entry(WEIGHT, shape=[2**40], data_offsets=[0, 2**42]), "is not a whole"),
    "NaN in a weight": (with_number(WEIGHT, np.nan), "output.output.bias has 1 of 5 values"),
    "inf in a moment": (with_number(f"optimizer/exp_avg/{BIAS}", np.inf), "exp_avg: output"),
    "another vocabulary": (
        with_manifest(lambda m: m.update(vocabulary="abcdef")), "6 characters, 5 are needed"),
    "a vocabulary out of order": (with_manifest(lambda m: m.update(vocabulary="bacde")), "order"),
    "another context": (
        with_manifest(lambda m: m["config"].update(context_size=4)),
        "positional_embedding.weight has shape (3, 2), (4, 2) is needed"),
    "a width beyond all numbers": (
        with_manifest(lambda m: m["config"].update(embedding_size=2**63)), "has shape"),
    "a size that is a text": (
        with_manifest(lambda m: m["config"].update(blocks="1")), "blocks is '1', a number"),
    "an integer of 5000 digits": (
        lambda data: with_text(data, '\\"blocks\\": 1', '\\"blocks\\": ' + "9" * 5000),
        "an integer of 5000 digits"),
    "a key twice in the manifest": (
        lambda data: with_text(data, '\\"step\\": 0', '\\"step\\": 0, \\"step\\": 1'),
        "'step' stands twice"),
    "a name twice": (twice, "'model/output.output.bias' stands twice"),
    "a foreign name": (with_name("attacker"), "arrays: attacker unexpected"),
    "a name with ..": (with_name(f"model/../{BIAS}"), "is no name"),
    "a name from the root": (with_name("/etc/passwd"), "'/etc/passwd' is no name"),
    "a name of two lines": (with_name("model/a\nb"), r"'model/a\nb' is no name"),
    "a name of terminal codes": (with_name("model/\x1b[2J"), r"'model/\x1b[2J' is no name"),
    "a name of 5000 letters": (with_name("m" * 5000), "is no name"),
}  # fmt: skip


def with_text(data: bytes, old: str, new: str) -> bytes:
    header, payload = split(data)
    text = json.dumps(header)
    assert text.count(old) == 1
    return joined(text.replace(old, new), payload)


COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "--prompt", "a", "--checkpoint"],
    "verify": ["verify", "--data", "text.txt", "--steps", "0", "--checkpoint"],
    "export": ["oracle", "export", "-o", "new", "--weights"],
}


def contents(folder: Path) -> dict[str, bytes | None]:
    files = sorted(folder.rglob("*"))
    return {str(p): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in files}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that exits with 2 and leaves every file as it was."""
    before = contents(Path.cwd())
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("gpt-parity: error: ") and err.count("\n") == 1, err
    assert err[:-1].isprintable() and len(err) < 1200
    assert contents(Path.cwd()) == before
    return err


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_one_line_that_names_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = CHECKPOINTS[name]
    whole = checkpoint()
    assert load_checkpoint(Path("c.safetensors")).config == CONFIG
    Path("c.safetensors").write_bytes(change(whole))
    with pytest.raises(ValueError, match=r"\Ac\.safetensors: ") as caught:
        load_checkpoint(Path("c.safetensors"))
    assert message in str(caught.value) and str(caught.value).isprintable()
    for arguments in COMMANDS.values():
        err = refused([*arguments, "c.safetensors"], capsys)
        assert "c.safetensors: " in err and message in err


# What a process may take for a file of some kilobytes: the libraries, and little more.
LIMITED = (
    "import resource, sys; from gpt_parity.cli import main; from gpt_parity import runs; "
    "own = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
    "resource.setrlimit(resource.RLIMIT_AS, (own + 2**28, own + 2**28)); sys.exit(main())"
)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to limit memory: run on Linux")
@pytest.mark.parametrize("size", ("blocks", "vocab_size", "context_size", "embedding_size"))
@pytest.mark.parametrize("value", (10**8, 2**62))
def test_a_huge_configuration_takes_neither_time_nor_memory(size: str, value: int) -> None:
    change = with_manifest(lambda manifest: manifest["config"].update({size: value}))
    Path("c.safetensors").write_bytes(change(checkpoint()))
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, *COMMANDS["generate"], "c.safetensors"], timeout=60,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("gpt-parity: error: c.safetensors: "), result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_another_model_is_never_partly_loaded(backend: str) -> None:
    """Of two blocks into one and back, and of other sizes: neither weights nor moments change."""
    configs = (CONFIG, GPTConfig(5, 3, 2, 2), GPTConfig(5, 3, 4, 1), GPTConfig(4, 3, 2, 1))
    for i, config in enumerate(configs):
        checkpoint(f"{i}.safetensors", config)
    for i, config in enumerate(configs):
        model = build_model(backend, config, seed=7)
        optimizer = load_backend(backend).AdamWOptimizer(model.parameters())
        weights = get_weights(model)
        for j in range(len(configs)):
            if i == j:
                continue
            saved = load_checkpoint(Path(f"{j}.safetensors"))
            for moment in ("exp_avg", "exp_avg_sq"):
                for array in saved.optimizer[moment].values():
                    array[...] = 7.0
            with pytest.raises(ValueError, match="weights: "):
                set_weights(model, saved.weights)
            assert_same_bits(get_weights(model), weights)
            with pytest.raises(ValueError, match="exp_avg: "):
                saved.load_optimizer(model, optimizer)
            state = optimizer.state()
            assert not any(a.any() for m in ("exp_avg", "exp_avg_sq") for a in state[m])
            assert set(state["steps"]) == {0}


# --- Bundles and submissions


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


def check(mine: str, ref: str) -> list[str]:
    return ["oracle", "check", mine, "--ref", ref]


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


def npy(header: str, data: bytes = bytes(4), version: int = 1, length: int | None = None) -> bytes:
    text = header.encode()
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes((version, 0)) + size.to_bytes(2 * version, "little") + text + data


def described(shape: str, descr: str = "<f4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"


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
