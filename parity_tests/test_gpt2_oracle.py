"""The oracle's ways in and out with a GPT-2: its page, its functions, its fixture, its commands."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity import cli
from gpt_parity.backends import build_model, load_backend
from gpt_parity.html.flow import flow
from gpt_parity.html.tensors import tensors
from gpt_parity.oracle import Bundle, Judgement, Report, check, load_bundle, save_bundle
from gpt_parity.oracle.compare import FORWARD, PARAMETER
from gpt_parity.oracle.graph import graph
from gpt_parity.oracle.subject import export
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.oracle_config import PRESETS, ExportConfig
from gpt_parity.weights import set_weights
from parity_tests.candidates import submission
from parity_tests.html_pages import read_page
from parity_tests.planted import planted
from parity_tests.planted.gpt2_hint_rows import GPT2_ROWS

ROOT = Path(__file__).resolve().parent.parent
CONFIG = PRESETS["gpt2-tiny"].model
ROWS = {row.name: row for row in GPT2_ROWS}
SKIP = ROWS["gpt2-skip-detached"]
DRAWN = re.compile(r'class="name"[^>]*>([^<]*)<')


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="gpt2-tiny"))


@pytest.fixture(scope="module")
def wrong(bundle: Bundle) -> dict[str, np.ndarray]:
    """A backward pass that forgets what goes past the feed-forward branch."""
    with planted(SKIP.bug):
        return submission(SKIP.backend, bundle, "float64")


def loss_and_gradients(weights: Any, tokens: np.ndarray, targets: np.ndarray) -> Any:
    """The tiny GPT-2 in PyTorch with its own gradients."""
    model = build_model("torch", CONFIG, dtype=weights["norm.weight"].dtype.name)
    set_weights(model, weights)
    loss = load_backend("torch").GPTLoss()(model(tokens), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


# --- The graph and its picture


def test_every_operation_of_a_gpt2_has_a_role(bundle: Bundle) -> None:
    operations, _ = graph(
        bundle.model(), load_backend("numpy").GPTLoss(), bundle.tokens, bundle.targets
    )
    block = [n for n in operations.nodes if n.place.startswith("transformers.1")]
    assert [n.role for n in block] == [
        "layer_norm", "linear", "split", "query", "key", "value", "heads", "heads", "heads",
        "transpose", "scores", "div", "tril", "softmax", "context", "merge", "join", "linear",
        "residual", "layer_norm", "linear", "gelu", "linear", "residual",
    ]  # fmt: skip
    ends = [(n.role, n.place) for n in operations.nodes if "transformers" not in n.place]
    assert ends == [
        ("tokens", "embedding.embedding"), ("positions", "embedding.positional_embedding"),
        ("add", "embedding"), ("layer_norm", "norm"), ("linear", "output"),
        ("cross_entropy", "loss"),
    ]  # fmt: skip


def test_the_picture_of_a_gpt2_has_its_norms_and_its_skips(bundle: Bundle) -> None:
    report = check_arrays(submission("torch", bundle, "float64"), bundle, keep=True)
    drawing = flow("f", tensors({"": report}), bundle.config.blocks, gpt2=True)
    names = DRAWN.findall(drawing)
    entries = {*bundle.values, *bundle.weights, "loss"}
    assert sorted(names) == sorted(entries)  # the tied weight once
    labels = re.findall(r'class="soft" x="[^"]*" y="[^"]*">([a-z]+)<', drawing)
    attention = ["key", "query", "skip", "skip", "value", "weights"]
    assert sorted(labels) == sorted(2 * attention)
    assert "linear by embedding.embedding.weight" in drawing
    assert "gradient not handed in" not in drawing


def test_the_first_wrong_tensor_of_a_gpt2_is_marked(
    bundle: Bundle, wrong: dict[str, np.ndarray], tmp_path: Path
) -> None:
    save_bundle(tmp_path / "ref", bundle)
    np.savez(tmp_path / "mine.npz", **wrong)
    page = tmp_path / "page.html"
    arguments = [str(tmp_path / "mine.npz"), "--ref", str(tmp_path / "ref"), "--html", str(page)]
    assert cli.main(["oracle", "check", *arguments]) == 1
    read = read_page(page.read_bytes())
    drawing = next(s for s in read.all("svg") if s.is_in("flow"))
    marked = [g.all("text")[0].text for g in drawing.all("g") if g.is_in("first")]
    last = bundle.config.blocks - 1
    assert marked == [f"transformers.{last}.feed_forward_norm.input"]
    assert SKIP.mistake in read.text and f"{bundle.config.heads} heads (GPT-2)" in read.text


def test_of_many_blocks_of_a_gpt2_the_last_is_drawn_for_its_end() -> None:
    for name, kind in (("norm.weight", PARAMETER), ("output", FORWARD)):
        found = tensors({"": Report([Judgement(name, kind, 5.0, 1.0)])})
        names = set(DRAWN.findall(flow("f", found, 5, gpt2=True)))
        assert {"transformers.4.output", "transformers.0 to 3", "norm.output", "output"} <= names


def test_verify_draws_a_gpt2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, " * 40, encoding="utf-8")
    page = tmp_path / "page.html"
    code = cli.main([
        "verify", "--model", "gpt2", "--data", str(text), "--steps", "0", "--processes", "1",
        "--html", str(page),
    ])  # fmt: skip
    assert code == 0, capsys.readouterr()
    read = read_page(page.read_bytes())
    drawing = next(s for s in read.all("svg") if s.is_in("flow"))
    names = {g.all("text")[0].text for g in drawing.all("g")}
    assert {"norm.output", "output", "embedding.output"} <= names
    assert "heads (GPT-2)" in read.text


# --- Functions, the fixture, the commands


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_function_is_judged_by_a_gpt2(dtype: str) -> None:
    report = check(loss_and_gradients, "gpt2-tiny", dtype)
    assert report.ok and report.complete and report.hints == ()


def test_a_wrong_function_of_a_gpt2_is_told_its_mistake() -> None:
    def forgetful(weights: Any, tokens: np.ndarray, targets: np.ndarray) -> Any:
        with planted(ROWS["gpt2-norm-eps-outside"].bug):
            return loss_and_gradients(weights, tokens, targets)

    report = check(forgetful, "gpt2-tiny")
    assert not report.ok
    assert any("layer norm: eps is added outside the root" in hint for hint in report.hints)
    vote = next(note for note in report.notes if note.startswith("vote: your"))
    assert vote.endswith("you compute another function, and its backward pass is right")


def test_what_a_report_of_a_gpt2_says(bundle: Bundle, wrong: dict[str, np.ndarray]) -> None:
    lines = str(check_arrays(wrong, bundle)).splitlines()
    last = f"transformers.{bundle.config.blocks - 1}"
    assert lines[1].startswith(f"first: grad/{last}.feed_forward_norm.input, ")
    assert f"hint: {SKIP.mistake}, " in lines[2]
    assert lines[3] == (
        f"operation: vjp of layer_norm at {last}.feed_forward_norm, vjp of residual at {last}; "
        f"grad/{last}.feed_forward_norm.output, grad/{last}.output agree"
    )


def test_a_gpt2_is_checked_by_the_command(
    wrong: dict[str, np.ndarray], bundle: Bundle, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ref = tmp_path / "ref"
    assert cli.main(["oracle", "export", "--preset", "gpt2-tiny", "-o", str(ref)]) == 0
    loaded = load_bundle(ref)
    assert loaded.config == bundle.config
    for name, arrays in (("right", submission("numpy", loaded, "float32")), ("wrong", wrong)):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        capsys.readouterr()
        code = cli.main(["oracle", "check", str(tmp_path / f"{name}.npz"), "--ref", str(ref)])
        out = capsys.readouterr().out
        assert code == (name == "wrong"), out
        assert ("hint: " in out) is (name == "wrong")


FIXTURE = """
from parity_tests.test_gpt2_oracle import loss_and_gradients

def forgetful(weights, tokens, targets):
    loss, gradients = loss_and_gradients(weights, tokens, targets)
    gradients["norm.bias"] = 2.0 * gradients["norm.bias"]
    return loss, gradients

def test_right(gradient_oracle):
    assert gradient_oracle(loss_and_gradients, "gpt2-tiny", dtype="float32").ok

def test_wrong(gradient_oracle):
    gradient_oracle(forgetful, "gpt2-tiny")
"""


def test_the_fixture_takes_a_gpt2(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(FIXTURE, encoding="utf-8")
    installed = "gpt_parity" in importlib.metadata.entry_points(group="pytest11").names
    plugin = [] if installed else ["-p", "gpt_parity.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "first: grad/norm.bias" in done.stdout
    assert "hint: a constant factor: " in done.stdout and "2 (counted twice" in done.stdout
