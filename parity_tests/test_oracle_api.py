"""The oracle from Python: functions of loss and gradients, the fixture, what a report says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_impl
from gpt_parity.oracle import Bundle, Report, check, save_bundle
from gpt_parity.oracle.compare import LONGEST
from gpt_parity.oracle.subject import export
from gpt_parity.oracle_config import PRESETS, ExportConfig
from gpt_parity.weights import set_weights
from parity_tests.interop import styled_gpt2
from parity_tests.interop.torch_function_gpt import CausalAttention, loss_and_gradients

ROOT = Path(__file__).resolve().parents[1]
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="tiny"))


def forgetful(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
    """Right forward, and a backward pass in which the key gets no gradient."""

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, p = ctx.saved_tensors
        dp = grad @ x.mT
        ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True)) / x.shape[-1] ** 0.5
        return p.mT @ grad + ds @ x

    right = CausalAttention.backward
    CausalAttention.backward = staticmethod(backward)
    try:
        return loss_and_gradients(weights, tokens, targets)
    finally:
        CausalAttention.backward = staticmethod(right)


def unscaled(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
    """Another function with its own right gradient: the loss is twice as large."""
    loss, gradients = loss_and_gradients(weights, tokens, targets)
    return 2.0 * loss, {name: 2.0 * g for name, g in gradients.items()}


def drifting(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
    """A gradient that belongs to no loss at all."""
    loss, gradients = loss_and_gradients(weights, tokens, targets)
    noise = np.random.default_rng(0)
    return 2.0 * loss, {n: g + noise.standard_normal(g.shape) for n, g in gradients.items()}


def gpt2_function(preset: str, style: str, **factors: float) -> Any:
    """Loss, logits and gradients of a GPT-2 that does not know the project, in a style.

    factors: of what ends so, with _ for dots.
    """
    config = PRESETS[preset].model
    vocab_size = config.vocab_size if style == "llm.c" else None

    def function(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
        found = styled_gpt2.run(weights, tokens, targets, config.heads, style, vocab_size)
        loss = found.pop("loss")
        for end, factor in factors.items():
            found |= {n: factor * g for n, g in found.items() if n.replace(".", "_").endswith(end)}
        return loss, found

    return function


@pytest.mark.parametrize(
    "preset",
    [pytest.param(p, marks=[pytest.mark.slow] if p == "gpt2-baby" else []) for p in PRESETS],
)
def test_presets_by_name(preset: str) -> None:
    style = "nanogpt" if preset.startswith("gpt2") else "source"
    function = loss_and_gradients if style == "source" else gpt2_function(preset, style)
    report = check(function, preset, "float32", seed=1, style=style)
    assert report.ok, str(report)
    assert report.complete and report.hints == () and report.first is None
    assert "floor: a relative error of" in str(report)


@pytest.mark.parametrize(
    ("style", "array"),
    [("nanogpt", "1_attn_c_proj_weight"), ("hf", "1_attn_c_proj_weight"), ("llm.c", "attprojw")],
)
def test_a_function_may_have_names_and_layouts_of_its_own(style: str, array: str) -> None:
    report = check(gpt2_function("gpt2-tiny", style), "gpt2-tiny", style=style)
    assert report.ok, str(report)
    names = {j.name for j in report.judgements}
    assert {"loss", "value/output", "grad/embedding.embedding.weight"} <= names
    report = check(gpt2_function("gpt2-tiny", style, **{array: 1.5}), "gpt2-tiny", style=style)
    ours = "grad/transformers.1.attention.output.weight"
    assert report.first is not None and report.first.name == ours
    assert any(note.startswith(f"in style {style}: {ours} is grad/") for note in report.notes)
    # Its own loss is asked with weights in the style too.
    votes = [note for note in report.notes if note.startswith("vote: ")]
    assert any(vote.endswith("your backward pass is wrong") for vote in votes)


def test_a_gradient_that_is_missing_in_a_style_is_named() -> None:
    right = gpt2_function("gpt2-tiny", "hf")

    def forgets(*arguments: Any) -> Any:
        loss, found = right(*arguments)
        del found["transformer.ln_f.bias"]
        return loss, found

    with pytest.raises(ValueError, match=r"gradients: norm\.bias missing"):
        check(forgets, "gpt2-tiny", style="hf")
    assert check(forgets, "gpt2-tiny", style="hf", partial=True).ok
    with pytest.raises(ValueError, match=r"unknown in style llm\.c; --style nanogpt or --style hf"):
        check(lambda *_: (1.0, {"transformer.ln_f.bias": np.ones(12)}), "gpt2-tiny", style="llm.c")
    with pytest.raises(ValueError, match=r"style is 'gpt', one of"):
        check(right, "gpt2-tiny", style="gpt")


def test_a_bundle_and_its_file_are_one_reference(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(tmp_path / "ref.npz", bundle)
    reports = [check(forgetful, reference) for reference in (bundle, tmp_path / "ref.npz")]
    assert [j.ratio for j in reports[0].judgements] == [j.ratio for j in reports[1].judgements]
    assert str(reports[0]) == str(reports[1])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (forgetful, "the derivative of your own loss by"),
        (unscaled, "is the derivative of your own loss; you compute another function"),
        (drifting, "is neither yours nor the reference's"),
    ],
)
def test_a_function_is_asked_for_its_own_derivative(
    bundle: Bundle, function: Any, words: str
) -> None:
    report = check(function, bundle)
    assert not report.ok
    assert sum(note.startswith("vote: ") and words in note for note in report.notes) == 1


def test_what_a_report_says(bundle: Bundle) -> None:
    report = check(forgetful, bundle)
    lines = str(report).splitlines()
    assert len(lines) <= LONGEST == 25
    assert lines[0].startswith("float64: FAIL: ")
    assert lines[1].startswith(f"first: {report.first.name}, ")
    assert any("the path of x as key is missing" in hint for hint in report.hints)
    html = report._repr_html_()
    assert html.count("<tr>") == 1 + len(report.judgements)
    assert "FAIL" in html


def test_html_shows_names_as_text() -> None:
    from gpt_parity.oracle.compare import PARAMETER, Judgement

    html = Report([Judgement("<b>", PARAMETER, 2.0, 1.0)])._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;" in html


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, grads: (loss, {}), "embedding.embedding.weight and 15 more missing"),
        (lambda loss, grads: (loss, {**grads, "nonsense": loss}), "grad/nonsense is unknown"),
        (lambda loss, grads: (loss, {**grads, "loss": loss}), "under another name too"),
        (
            lambda loss, grads: (loss, grads | {f"grad/{n}": g for n, g in grads.items()}),
            "under another name too",
        ),
        (lambda loss, grads: (np.float32(loss), grads), "loss is float32, needed float64"),
        (lambda loss, grads: (float(loss), grads), None),
        (lambda loss, grads: (torch.tensor(loss, requires_grad=True), grads), None),
    ],
)
def test_what_a_function_may_return(bundle: Bundle, change: Any, message: str | None) -> None:
    def function(*arguments: Any) -> Any:
        return change(*loss_and_gradients(*arguments))

    if message is None:
        assert check(function, bundle).ok
    else:
        with pytest.raises(ValueError, match=message):
            check(function, bundle)


def test_some_gradients_alone(bundle: Bundle) -> None:
    name = "output.output.bias"

    def one(*arguments: Any) -> Any:
        loss, gradients = loss_and_gradients(*arguments)
        return loss, {name: gradients[name]}

    report = check(one, bundle, partial=True)
    assert report.ok and [j.name for j in report.judgements] == ["loss", f"grad/{name}"]


def test_bfloat16_of_torch(tmp_path: Path) -> None:
    """Results in bfloat16 are judged by what it can hold; where nothing can be, no pass."""

    def rounding(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
        loss, gradients = loss_and_gradients(weights, tokens, targets)
        low = {name: torch.tensor(g).bfloat16() for name, g in gradients.items()}
        return torch.tensor(loss).bfloat16(), low

    training = export(ExportConfig(out=Path("ref"), preset="source", init="training"))
    report = check(rounding, training, "bfloat16")
    assert report.ok
    assert sum(note.startswith("cannot see: in bfloat16") for note in report.notes) == 1
    with pytest.raises(ValueError, match="no gradient can be judged in bfloat16"):
        check(rounding, "source", "bfloat16")


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("preset", ("source", "wide"))
def test_torch_in_half_types_is_not_accused(preset: str, dtype: str) -> None:
    """A whole model in the format itself: weights, arithmetic and results."""
    bundle = export(ExportConfig(out=Path("ref"), preset=preset, init="training", seed=1))
    sizes = bundle.config

    def half(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
        model = torch_impl.GPT(
            sizes.vocab_size, sizes.context_size, sizes.embedding_size, sizes.blocks
        )
        set_weights(model, weights)
        model = model.to(getattr(torch, dtype))
        loss = torch_impl.GPTLoss()(model(tokens), targets)
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters()}

    report = check(half, bundle, dtype)
    assert report.ok and report.complete, str(report)


def test_a_function_gets_copies(bundle: Bundle) -> None:
    def greedy(weights: Arrays, tokens: np.ndarray, targets: np.ndarray) -> Any:
        result = loss_and_gradients(weights, tokens, targets)
        for array in (*weights.values(), tokens, targets):
            array[...] = 0
        return result

    assert check(greedy, bundle).ok
    assert check(loss_and_gradients, bundle).ok


def test_references_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reference is 'huge', one of"):
        check(loss_and_gradients, "huge")
    with pytest.raises(ValueError, match="cannot be read"):
        check(loss_and_gradients, tmp_path / "absent")
    with pytest.raises(TypeError, match=r"must return \(loss, gradients by name\)"):
        check(lambda *arguments: loss_and_gradients(*arguments)[1], "tiny")
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        check(loss_and_gradients, "tiny", "float8")


def test_the_fixture_comes_with_the_package(tmp_path: Path) -> None:
    """A project that has gpt-parity installed needs no conftest of its own."""
    (tmp_path / "test_it.py").write_text(
        "from parity_tests.test_oracle_api import forgetful, loss_and_gradients\n"
        "def test_right(gradient_oracle):\n"
        "    assert gradient_oracle(loss_and_gradients, 'tiny', dtype='float32').ok\n"
        "def test_wrong(gradient_oracle):\n"
        "    gradient_oracle(forgetful, 'tiny')\n"
    )
    installed = "gpt_parity" in importlib.metadata.entry_points(group="pytest11").names
    plugin = [] if installed else ["-p", "gpt_parity.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "hint: attention: the path of x as key is missing" in done.stdout
    assert "Traceback" not in done.stdout
