"""What `oracle check` makes of results: names, shapes, dtypes and values of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.arrays import write_arrays
from gpt_parity.cli import main
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.subject import export
from gpt_parity.oracle_config import ExportConfig
from parity_tests import bundles
from parity_tests.bundles import SQUARE, Arrays, check
from parity_tests.candidates import submission

bundle, reference, right = bundles.bundle, bundles.reference, bundles.right


def _with(key: str, change: Callable[[np.ndarray], Any]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, key: np.asarray(change(arrays[key]))}


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
    assert "inf tolerances" in out and "nan" not in out and "\nhint:" not in out


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


def test_half_results_need_an_asked_dtype(
    reference: Path, right: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A point where rounding decides is unusable, not a pass."""
    change, message = UNUSABLE["half"]
    write_arrays(tmp_path / "mine.npz", change(right), "{}")
    assert check(tmp_path / "mine.npz", reference, "--dtype", "float64") == 2
    assert message in capsys.readouterr().err
