"""What `oracle export` writes, refuses and never overwrites, and in which processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpt_parity.arrays import read_arrays, write_arrays
from gpt_parity.cli import main
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from parity_tests import bundles
from parity_tests.bundles import FORMS, SQUARE, Arrays, check, files
from parity_tests.candidates import submission
from parity_tests.comparers import assert_same_bits

bundle, reference, right = bundles.bundle, bundles.reference, bundles.right


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
