"""Bundles in their three forms, and what `oracle check` makes of files of every kind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpt_parity.arrays import read_arrays, write_arrays
from gpt_parity.cli import main
from gpt_parity.config import ExportConfig
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.subject import export
from parity_tests.candidates import submission
from parity_tests.comparers import assert_same_bits

FORMS = ("ref.safetensors", "ref.npz", "ref")
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="tiny", steps=2))


@pytest.fixture(scope="module")
def reference(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "ref.npz"
    save_bundle(path, bundle)
    return path


@pytest.fixture
def right(bundle: Bundle) -> Arrays:
    return submission("torch", bundle, "float64")


def check(mine: Path, reference: Path, *flags: str) -> int:
    return main(["oracle", "check", str(mine), "--ref", str(reference), *flags])


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_the_same_export_gives_the_same_bytes(tmp_path: Path) -> None:
    """In processes of their own, into other places."""
    code = (
        "import sys; from gpt_parity.cli import main; "
        "flags = ['oracle', 'export', '--preset', 'tiny', '--steps', '1', '--seed', '3', '-o']; "
        f"sys.exit(max(main([*flags, form]) for form in {FORMS}))"
    )
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=_environment(),
                       stdout=subprocess.DEVNULL)  # fmt: skip
    one, two = (files(tmp_path / name) for name in ("one", "two"))
    assert len(one) > len(FORMS) and one == two


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


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


def _with(key: str, change: Callable[[np.ndarray], Any]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, key: np.asarray(change(arrays[key]))}


SQUARE = "grad/transformers.0.attention.output.weight"
TALL = "grad/transformers.0.feed_forward.input.weight"

# What is handed in, and what the one line says.
UNUSABLE: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "nothing": (lambda arrays: {}, "at least one tensor is needed"),
    "inputs only": (lambda arrays: {"tokens": np.zeros((3, 5), int)}, "tokens differs"),
    "an unknown name": (lambda arrays: {"grad/zzz": arrays["loss"]}, "grad/zzz is unknown"),
    "a name that is almost right": (
        lambda arrays: {"grad/output.output.wieght": arrays["grad/output.output.weight"]},
        "is it grad/output.output.weight?",
    ),
    "a parameter's bare name": (
        lambda arrays: {"output.output.bias": arrays["grad/output.output.bias"]},
        "is it grad/output.output.bias?",
    ),
    "another shape": (_with(SQUARE, lambda x: x[:-1]), f"{SQUARE} has shape (6, 7), needed (7, 7)"),
    "a transposed matrix": (_with(TALL, lambda x: x.T), "transposed?"),
    "a scalar with an axis": (_with("loss", lambda x: x[None]), "loss has shape (1,), needed ()"),
    "integers": (lambda arrays: {"loss": np.array(3)}, "dtype is 'int64'"),
    "two dtypes": (_with(SQUARE, lambda x: x.astype(np.float32)), "one dtype is needed"),
    "half": (lambda arrays: {SQUARE: arrays[SQUARE].astype(np.float16)}, "float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in UNUSABLE if name != "half"])
def test_what_cannot_be_judged_is_one_line(
    name: str, reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    change, message = UNUSABLE[name]
    write_arrays(tmp_path / "mine.npz", change(right), "{}")
    assert check(tmp_path / "mine.npz", reference) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpt-parity: error: ") and err.count("\n") == 1
    assert message in err


def test_an_asked_dtype_is_the_only_one(
    reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_arrays(tmp_path / "mine.npz", right, "{}")
    assert check(tmp_path / "mine.npz", reference, "--dtype", "float64") == 0
    assert check(tmp_path / "mine.npz", reference, "--dtype", "float32") == 2
    assert "is float64, needed float32" in capsys.readouterr().err


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


@pytest.mark.parametrize("key", ("weight/output.output.bias", "tokens"))
@pytest.mark.parametrize("dtype", ("int8", "float16", "bool"))
def test_inputs_are_not_bent_to_fit(
    key: str, dtype: str, reference: Path, bundle: Bundle, right: Arrays, tmp_path: Path
) -> None:
    own = bundle.tokens if key == "tokens" else bundle.weights["output.output.bias"]
    write_arrays(tmp_path / "right.npz", {**right, key: own}, "{}")
    assert check(tmp_path / "right.npz", reference) == 0
    write_arrays(tmp_path / "mine.npz", {**right, key: own.astype(dtype)}, "{}")
    assert check(tmp_path / "mine.npz", reference) == 2


def test_largest_numbers_are_out_by_infinity(
    reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_arrays(
        tmp_path / "mine.npz", {k: np.full_like(a, 1.7e308) for k, a in right.items()}, "{}"
    )
    assert check(tmp_path / "mine.npz", reference) == 1
    out = capsys.readouterr().out
    assert "inf tolerances" in out and "nan" not in out and "hint" not in out


def test_what_nothing_can_judge_never_passes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Gradients of zero in bfloat16, at weights where rounding decides."""
    ref = export(ExportConfig(out=Path("ref"), preset="deep"))
    save_bundle(tmp_path / "ref.npz", ref)
    mine = {k: a.astype(np.float32) * (not k.startswith("grad/")) for k, a in ref.arrays.items()}
    for arrays in (mine, {k: a for k, a in mine.items() if k.startswith("grad/")}):
        write_arrays(tmp_path / "mine.npz", arrays, "{}")
        assert check(tmp_path / "mine.npz", tmp_path / "ref.npz", "--dtype", "bfloat16") == 2
        assert "no gradient can be judged in bfloat16" in capsys.readouterr().err


def test_steps_have_a_floor_of_their_own(
    bundle: Bundle, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Weights that never change fail in float32; in a coarser format they pass as not seen."""
    key = "step/1/weight/output.output.weight"
    still = {key: bundle.weights["output.output.weight"].astype(np.float32)}
    write_arrays(tmp_path / "still.npz", still, "{}")
    assert check(tmp_path / "still.npz", reference) == 1
    write_arrays(tmp_path / "right.npz", submission("torch", bundle, "float32"), "{}")
    assert check(tmp_path / "right.npz", reference) == 0
    out = capsys.readouterr().out
    assert "floor of steps: an update off by" in out and "cannot see" not in out
    assert check(tmp_path / "still.npz", reference, "--dtype", "float16") == 0
    assert f"cannot see: whether there was any update in {key}" in capsys.readouterr().out


def test_max_norm_may_be_infinite(tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--steps", "1", "--max-norm", "inf"]
    assert main(["oracle", "export", *flags, "-o", str(tmp_path / "ref.npz")]) == 0
    ref = load_bundle(tmp_path / "ref.npz")
    assert ref.optimizer["max_norm"] == np.inf
    write_arrays(tmp_path / "mine.npz", submission("torch", ref, "float64"), "{}")
    assert check(tmp_path / "mine.npz", tmp_path / "ref.npz") == 0


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


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_values_that_are_not_finite_never_pass(
    value: float, reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for key in (SQUARE, "grad/output.output.bias"):
        right[key].reshape(-1)[1] = value
    write_arrays(tmp_path / "mine.npz", right, "{}")
    assert check(tmp_path / "mine.npz", reference) == 1
    out = capsys.readouterr().out
    assert "first: grad/output.output.bias, not finite" in out
    assert "hint" not in out


def test_masked_scores_may_have_any_fill_that_leaves_no_weight(
    reference: Path, bundle: Bundle, right: Arrays, tmp_path: Path
) -> None:
    key = "value/transformers.0.attention.mask.output"
    future = ~np.tri(*right[key].shape[-2:], dtype=bool)
    for fill, code in ((-np.inf, 0), (-1e4, 0), (-10.0, 1), (0.0, 1), (np.nan, 1)):
        right[key] = np.where(future, fill, right[key])
        write_arrays(tmp_path / "mine.npz", right, "{}")
        assert check(tmp_path / "mine.npz", reference) == code, fill


def test_names_by_a_map(reference: Path, right: Arrays, tmp_path: Path) -> None:
    mine = {"attn.w": right[SQUARE], "loss": right["loss"]}
    write_arrays(tmp_path / "mine.npz", mine, "{}")
    names = tmp_path / "names.toml"
    assert check(tmp_path / "mine.npz", reference) == 2
    names.write_text(f'"attn.w" = "{SQUARE}"\n')
    assert check(tmp_path / "mine.npz", reference, "--map", str(names)) == 0
    for text in (f'"attn.w" = "{SQUARE}x"', '"attn.w" = 3', '"attn.w', '"attn.w" = "loss"'):
        names.write_text(text)
        assert check(tmp_path / "mine.npz", reference, "--map", str(names)) == 2, text
    assert check(tmp_path / "mine.npz", reference, "--map", str(tmp_path / "absent")) == 2


def test_only_a_pattern(reference: Path, right: Arrays, tmp_path: Path) -> None:
    right[SQUARE] *= 2.0
    write_arrays(tmp_path / "mine.npz", right, "{}")
    assert check(tmp_path / "mine.npz", reference, "--only", "grad/*.bias") == 0
    assert check(tmp_path / "mine.npz", reference, "--only", "grad/*") == 1
    assert check(tmp_path / "mine.npz", reference, "--only", "grad/none*") == 2


def test_aliases_are_names_too(
    bundle: Bundle, reference: Path, right: Arrays, tmp_path: Path
) -> None:
    entry = "transformers.0.feed_forward.output.output"
    alias = "transformers.0.output"
    assert bundle.aliases[alias] == entry
    write_arrays(tmp_path / "mine.npz", {f"value/{alias}": right[f"value/{entry}"]}, "{}")
    assert check(tmp_path / "mine.npz", reference) == 0
    twice = {f"value/{alias}": right[f"value/{entry}"], f"value/{entry}": right[f"value/{entry}"]}
    write_arrays(tmp_path / "mine.npz", twice, "{}")
    assert check(tmp_path / "mine.npz", reference) == 2


def test_a_bundle_is_no_submission(reference: Path, capsys: pytest.CaptureFixture) -> None:
    assert check(reference, reference) == 2
    assert "is a bundle" in capsys.readouterr().err


def test_a_report_as_json(
    reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    right[SQUARE] = right[SQUARE].T.copy()
    write_arrays(tmp_path / "mine.npz", right, "{}")
    assert check(tmp_path / "mine.npz", reference, "--json") == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["ok"], content["first"], content["dtype"]) == (False, SQUARE, "float64")
    assert any("transposed" in hint for hint in content["hints"])
    assert len(content["tensors"]) == len(right)


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


def test_half_results_need_an_asked_dtype(
    reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A point where rounding decides is unusable, not a pass."""
    change, message = UNUSABLE["half"]
    write_arrays(tmp_path / "mine.npz", change(right), "{}")
    assert check(tmp_path / "mine.npz", reference, "--dtype", "float64") == 2
    assert message in capsys.readouterr().err


# --- Export


def test_own_weights_and_batch(bundle: Bundle, tmp_path: Path) -> None:
    """Weights in every form, ids beside each other or apart, give one and the same reference."""
    weights = bundle.weights
    np.savez(tmp_path / "plain.npz", **weights)
    write_arrays(tmp_path / "folder", {f"weight/{n}": w for n, w in weights.items()}, "{}")
    save_file({n: w.astype(np.float32) for n, w in weights.items()}, tmp_path / "w.safetensors")
    np.savez(tmp_path / "batch.npz", tokens=bundle.tokens, targets=bundle.targets)
    np.save(tmp_path / "tokens.npy", bundle.tokens)
    np.save(tmp_path / "targets.npy", bundle.targets)
    apart = ["--tokens", tmp_path / "tokens.npy", "--targets", tmp_path / "targets.npy"]
    for name, ids in (
        ("plain.npz", ["--tokens", tmp_path / "batch.npz"]), ("folder", apart),
        ("w.safetensors", apart),
    ):  # fmt: skip
        out = tmp_path / f"{name}.ref"
        flags = ["--weights", tmp_path / name, *ids, "--steps", "2", "-o", out]
        assert main(["oracle", "export", *map(str, flags)]) == 0
        assert_same_bits(load_bundle(out).arrays, bundle.arrays)


def test_weights_that_float32_does_not_hold(
    bundle: Bundle, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    np.savez(tmp_path / "w.npz", **{n: w * (1.0 + 1e-12) for n, w in bundle.weights.items()})
    command = ["oracle", "export", "--weights", str(tmp_path / "w.npz")]
    assert main([*command, "-o", str(tmp_path / "double")]) == 0
    assert list(load_bundle(tmp_path / "double").tolerances) == ["float64"]
    assert main([*command, "--dtype", "float32", "-o", str(tmp_path / "single")]) == 0
    single = load_bundle(tmp_path / "single")
    assert list(single.tolerances) == ["float32"]
    assert {a.dtype.name for a in (*single.arrays.values(), *single.weights.values())} == {
        "float32"
    }
    for dtype, ref, code in (("float32", "single", 0), ("float32", "double", 2)):
        mine = submission("torch", load_bundle(tmp_path / ref), dtype)
        np.savez(tmp_path / "mine.npz", **mine)
        assert check(tmp_path / "mine.npz", tmp_path / ref) == code
    assert "--dtype float32" in capsys.readouterr().err


EXPORT_FAULTS: dict[str, tuple[list[str], str]] = {
    "no such weights": (["--weights", "absent.npz"], "absent.npz: cannot be read"),
    "weights of another kind": (["--weights", "ids.npz"], "embedding.embedding.weight"),
    "one weight missing": (["--weights", "missing.npz"], "output.output.bias missing"),
    "one weight too many": (["--weights", "extra.npz"], "extra unexpected"),
    "a weight of another shape": (["--weights", "shape.npz"], "is needed"),
    "NaN in a weight": (["--weights", "nan.npz"], "nan or inf"),
    "sizes and weights": (["--weights", "w.npz", "--blocks", "3"], "sizes come from the weights"),
    "ids out of range": (["--weights", "w.npz", "--tokens", "large.npz"], "needed 0 to 10"),
    "targets out of range": (["--weights", "w.npz", "--tokens", "targets.npz"], "targets: got -1"),
    "ids that are no integers": (["--weights", "w.npz", "--tokens", "real.npz"], "needed integers"),
    "too many positions": (["--weights", "w.npz", "--tokens", "long.npz"], "at most 6"),
    "no targets": (["--weights", "w.npz", "--tokens", "tokens.npy"], "--targets FILE is needed"),
    "targets of another shape": (["--weights", "w.npz", "--tokens", "uneven.npz"], "needed (2, 3)"),
    "targets alone": (["--targets", "tokens.npy"], "without tokens"),
    "no such folder": (["--seed", "1", "-o", "absent/ref"], "folder does not exist"),
    "a folder that is there": (["--preset", "tiny", "-o", "there"], "exists already"),
    "a folder that is no bundle": (
        ["--preset", "tiny", "-o", "there", "--overwrite"], "is no bundle"),
    "an npy file": (["--preset", "tiny", "-o", "ref.npy"], "an npy file holds no names"),
    "weights beyond all numbers": (["--weights", "huge.npz"], "is not finite"),
    "weights beyond float32": (["--weights", "huge.npz", "--dtype", "float32"], "nan or inf"),
    "a block of a strange number": (["--weights", "block.npz"], "missing"),
    "a length beyond C": (["--preset", "tiny", "--length", "7"], "at most C = 6"),
    "no steps": (["--steps", "-1"], "steps is -1"),
    "no rate": (["--learning-rate", "0"], "learning_rate is 0"),
    "an unknown preset": (["--preset", "huge"], "huge"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORT_FAULTS)
def test_what_cannot_be_exported_is_one_line(
    name: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    weights = bundle.weights
    last = "output.output.bias"
    ids = np.zeros((2, 3), int)
    np.savez("w.npz", **weights)
    np.savez("missing.npz", **{n: w for n, w in weights.items() if n != last})
    np.savez("extra.npz", **weights, extra=weights[last])
    np.savez("shape.npz", **{**weights, last: weights[last][1:]})
    np.savez("nan.npz", **{**weights, last: weights[last] * np.nan})
    np.savez("huge.npz", **{n: w * 1e200 for n, w in weights.items()})
    np.savez("block.npz", **weights, **{"transformers.99999999.x": weights[last]})
    np.savez("ids.npz", tokens=ids, targets=ids)
    np.savez("large.npz", tokens=ids + 11, targets=ids)
    np.savez("targets.npz", tokens=ids, targets=ids - 1)
    np.savez("real.npz", tokens=ids * 1.0, targets=ids)
    np.savez("long.npz", tokens=np.zeros((2, 7), int), targets=np.zeros((2, 7), int))
    np.savez("uneven.npz", tokens=ids, targets=ids[:1])
    np.save("tokens.npy", ids)
    Path("there").mkdir()
    before = sorted(tmp_path.iterdir())
    flags, message = EXPORT_FAULTS[name]
    out = [] if "-o" in flags else ["-o", "ref"]
    assert main(["oracle", "export", *flags, *out]) == 2
    stdout, err = capsys.readouterr()
    assert stdout == "" and err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_bundle_is_replaced_only_when_asked(form: str, tmp_path: Path) -> None:
    command = ["oracle", "export", "--preset", "tiny", "-o", str(tmp_path / form)]
    assert main(command) == 0
    before = files(tmp_path)
    assert main([*command, "--seed", "1"]) == 2
    assert files(tmp_path) == before
    assert main([*command, "--seed", "1", "--overwrite"]) == 0
    assert files(tmp_path).keys() == before.keys() and files(tmp_path) != before


def test_nothing_but_a_bundle_is_overwritten(bundle: Bundle, tmp_path: Path) -> None:
    """Weights that were read, a folder with a manifest of its own, a bundle with notes beside."""
    np.savez(tmp_path / "w.npz", **bundle.weights)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "manifest.json").write_text("{}")
    (tmp_path / "project" / "thesis.tex").write_text("precious")
    save_bundle(tmp_path / "ref", bundle)
    (tmp_path / "ref" / "notes.txt").write_text("precious")
    before = files(tmp_path)
    for name in ("w.npz", "project", "ref"):
        out = ["-o", str(tmp_path / name), "--overwrite"]
        assert main(["oracle", "export", "--weights", str(tmp_path / "w.npz"), *out]) == 2
        assert files(tmp_path) == before


def test_a_checkpoint_of_a_run_is_a_reference_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ["train", "--max-steps", "2", "--context-size", "4", "--embedding-size", "6",
             "--blocks", "1", "--sample-tokens", "1", "--out", str(run)]  # fmt: skip
    assert main(train) == 0
    assert main(["oracle", "export", "--weights", str(run), "-o", str(tmp_path / "ref.npz")]) == 0
    bundle = load_bundle(tmp_path / "ref.npz")
    arrays, _ = read_arrays(run / "checkpoint.safetensors")
    for name, weight in bundle.weights.items():
        assert np.array_equal(weight, arrays[f"model/{name}"])


def test_checking_never_imports_torch(reference: Path, right: Arrays, tmp_path: Path) -> None:
    right[SQUARE] *= 2.0
    np.savez(tmp_path / "mine.npz", **right)
    code = (
        "import sys; from gpt_parity.cli import main; "
        f"code = main(['oracle', 'check', {str(tmp_path / 'mine.npz')!r}, '--ref', "
        f"{str(reference)!r}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True)
    assert result.returncode == 1, result.stderr
