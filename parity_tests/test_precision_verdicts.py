"""Verdicts on the arithmetics of the torch twin, and what they can show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model
from gpt_parity.cli import main
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle import slips
from gpt_parity.oracle.arithmetic import Arithmetic, one_pass, show_slips_in
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.precision import Engine
from gpt_parity.verify import verify
from gpt_parity.weights import get_weights
from parity_tests.tiny_twins import (
    MODELS,
    SIZES,
    TEXT,
    batch,
    tiny,
)
from torch_impl import functional

# Importing torch's compiler warns about torch's own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.folder_of_its_own(TEXT),
]


def judged(model: str, arithmetic: Arithmetic) -> Any:
    size = SIZES[model]
    weights = get_weights(build_model("numpy", size.model, seed=1, dtype="float32"))
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    return one_pass(arithmetic, size.model, weights, *batch(model))


@pytest.mark.parametrize("name", ["float64", "float32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_pass_is_judged_in_its_own_arithmetic(model: str, name: str) -> None:
    report = judged(model, Arithmetic(name))
    assert report.ok and report.complete
    names = [j.name for j in report.judgements]
    assert len(names) == 2 + len(list(tiny(model).parameters()))
    unit = {"bf16": "bfloat16"}.get(name, name)
    assert any(f"would have been noticed in {unit}" in note for note in report.notes)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_does_not_pass_for_float32(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16, judged as float32: what the tolerances are there for."""
    right = Engine.__call__
    monkeypatch.setattr(
        Engine, "__call__", lambda e, tokens: right(Engine(e.model, "bf16"), tokens)
    )
    assert not judged(model, Arithmetic("float32")).ok


MISTAKES = {
    "gelu left out": ("GELU", lambda self, x: x),
    "the gradient of gelu has the wrong sign": (
        "GELU", lambda self, x: 2 * functional.gelu(x).detach() - functional.gelu(x)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ["gelu left out", "the gradient of gelu has the wrong sign"])
@pytest.mark.parametrize("model", MODELS)
def test_a_mistake_above_the_floor_is_found_in_bf16(
    model: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, forward = MISTAKES[mistake]
    monkeypatch.setattr(getattr(torch.nn, layer), "forward", forward)
    report = judged(model, Arithmetic("bf16"))
    assert not report.ok


def test_verify_says_what_bf16_can_show(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["verify", "--data", "text.txt", "--steps", "0", "--workers", "1"]
    flags += ["--precision", "bf16"]
    assert main([*flags, "--json", "v.json", "--html", "v.html"]) == 0
    out = capsys.readouterr().out
    assert "torch bfloat16 on cpu: PASS: 18 tensors agree" in out
    assert "floor: a relative error of " in out and "would have been noticed in bfloat16" in out
    assert out.count("torch bfloat16 on cpu slip seen: ") == 2
    assert "of its size on), " in out and ", and one pass in torch bfloat16 on cpu; worst" in out
    (part,) = json.loads(Path("v.json").read_text())["arithmetic"]
    assert part["engine"] == "torch bfloat16 on cpu" and len(part["tensors"]) == 18
    assert "torch bfloat16 on cpu: PASS" in Path("v.html").read_text()

    class Doubled(Engine):
        """The loss of everything twice: a slip that is only in the engine."""

        def __call__(self, tokens: np.ndarray) -> Any:
            return -super().__call__(tokens)

    monkeypatch.setattr("gpt_parity.oracle.arithmetic.Engine", Doubled)
    assert main(flags) == 1
    out = capsys.readouterr().out
    assert "torch bfloat16 on cpu: FAIL: " in out
    assert "FAIL: torch bfloat16 on cpu first leaves the tolerance at value/output" in out


def test_a_comparer_that_misses_the_slip_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = _plain("bfloat16", GPTConfig)
    assert all(s.ok for s in show_slips_in(*clean, UNITS["bfloat16"]))
    monkeypatch.setattr(slips, "VISIBLE", 1e30)
    assert not any(s.ok for s in show_slips_in(*clean, UNITS["bfloat16"]))
    monkeypatch.undo()
    # Tolerances of a coarser format than the one at hand hide what they would show.
    assert not any(s.ok for s in show_slips_in(*clean, UNITS["float32"]))


def _plain(unit: str, kind: type[GPTConfig]) -> Any:
    from gpt_parity.verify import _plain_case

    return _plain_case(kind, UNITS[unit])


@pytest.mark.parametrize("kind", [GPTConfig, GPT2Config])
@pytest.mark.parametrize("unit", ["float64", "float32", "tf32", "bfloat16"])
def test_a_slip_says_how_large_it_has_to_be(kind: type[GPTConfig], unit: str) -> None:
    """By that size itself: a little more is seen, half of it is not."""
    clean, tolerances = _plain(unit, kind)
    for sighting in show_slips_in(clean, tolerances, UNITS[unit]):
        assert sighting.ok
        size = float(sighting.description.split("seen from ")[1].split()[0])
        gradient = clean.parameters[sighting.name]
        allowed = tolerances.parameters[sighting.name].whole
        ratio = size * np.linalg.norm(gradient) / allowed
        assert 0.9 * slips.VISIBLE < ratio < 1.1 * slips.VISIBLE


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_float32_is_judged_as_float32(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(model, Arithmetic("float32", compile=True)).ok
    layer, forward = MISTAKES["gelu left out"]
    monkeypatch.setattr(getattr(torch.nn, layer), "forward", forward)
    torch.compiler.reset()
    assert not judged(model, Arithmetic("float32", compile=True)).ok


def test_an_arithmetic_is_asked_for_by_any_of_its_flags() -> None:
    assert VerifyConfig().arithmetic is None
    assert VerifyConfig(compile=True).arithmetic == "float32"
    assert VerifyConfig(device="cuda").arithmetic == "float32"
    assert VerifyConfig(precision="float64").arithmetic == "float64"
    assert verify(VerifyConfig(data=Path("text.txt"), steps=0, workers=1)).arithmetic == {}
