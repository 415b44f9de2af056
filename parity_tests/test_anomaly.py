"""Where numbers stop being finite: the step, the first tensor, the operation, in both backends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.anomaly import AnomalyError, first_non_finite, watch
from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.model_config import GPTConfig
from gpt_parity.training_run import Run
from gpt_parity.weights import get_weights, set_weights

pytestmark = pytest.mark.reference("by hand")

CONFIG = GPTConfig(vocab_size=5, context_size=4, embedding_size=6, blocks=2)
TOKENS = np.random.RandomState(0).randint(0, 5, (3, 4))


def build(backend: str, **scales: float) -> tuple[Any, Any]:
    """A model whose weights of the given (last part of the) names are scaled, and the loss."""
    model = build_model(backend, CONFIG)
    weights = get_weights(model)
    for name, scale in scales.items():
        weights[name.replace("__", ".")] *= np.float32(scale)
    set_weights(model, weights)
    return model, load_backend(backend).GPTLoss()


def found(model: Any, loss_fn: Any) -> str | None:
    with np.errstate(over="ignore", invalid="ignore"):
        return first_non_finite(model, loss_fn, TOKENS, TOKENS)


def anomaly(model: Any, loss_fn: Any, factor: float = 1.0) -> str:
    with (
        np.errstate(over="ignore", invalid="ignore"),
        pytest.raises(AnomalyError) as caught,
        watch(model),
    ):
        (loss_fn(model(TOKENS), TOKENS) * factor).backward()
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_finite_pass_has_no_first_tensor_and_no_anomaly(backend: str) -> None:
    model, loss_fn = build(backend)
    assert found(model, loss_fn) is None
    with watch(model):
        loss_fn(model(TOKENS), TOKENS).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("scales", "first", "operations"),
    [
        # x x^T overflows: x is about 1e21.
        ({"embedding__embedding__weight": 1e23}, r"transformers\.0\.attention\.mask\.input \(\d+",
         {"numpy": r"(matmul|mul|div)\(", "torch": r"aten\.(bmm|mul|div) in transformers\.0\."}),
        # Linear overflows in the second block: products of about 1e38.
        ({"transformers__1__feed_forward__input__weight": 1e38,
          "transformers__0__feed_forward__output__weight": 1e4},
         r"transformers\.1\.feed_forward\.input\.output \(\d+ of 288 values\)",
         {"numpy": r"linear\(transformers\.1\.attention\.output\.output, "
                   r"transformers\.1\.feed_forward\.input\.weight, "
                   r"transformers\.1\.feed_forward\.input\.bias\) gives \d+ of 288 values that",
          "torch": r"aten\.addmm in transformers\.1\.feed_forward\.input gives \d+ of 288 values"}),
    ],
)  # fmt: skip
def test_the_first_tensor_and_the_operation_that_made_it(
    backend: str, scales: dict[str, float], first: str, operations: dict[str, str]
) -> None:
    model, loss_fn = build(backend, **scales)
    assert re.match(first, found(model, loss_fn) or ""), found(model, loss_fn)
    message = anomaly(model, loss_fn)
    assert re.match(operations[backend], message), message


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_overflow_have_a_name_too(backend: str) -> None:
    """The loss is finite; the gradient of what is scaled by 1e30 twice is not."""
    model, loss_fn = build(
        backend, output__output__weight=1e30, transformers__1__feed_forward__output__weight=1e-25
    )

    class Scaled:
        def __call__(self, logits: Any, targets: np.ndarray) -> Any:
            return loss_fn(logits, targets) * 1e20

    with np.errstate(over="ignore", invalid="ignore"):
        name = first_non_finite(model, Scaled(), TOKENS, TOKENS)
    assert name is not None
    assert re.fullmatch(
        r"gradient of transformers\.1\.feed_forward\.output\.output \(\d+ of 72 values\)", name
    ), name
    message = anomaly(model, loss_fn, 1e20)
    expected = {
        "numpy": r"the gradient of linear\(transformers\.1\.feed_forward\.output\.output, "
        r"output\.output\.weight, output\.output\.bias\) by operand 0 has \d+ of 72 values that",
        "torch": r"aten\.mm outside of the layers \(loss, backward pass or update\) gives \d+ of ",
    }
    assert re.match(expected[backend], message), message


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_is_not_finite_comes_first(backend: str) -> None:
    model, loss_fn = build(backend)
    name = "transformers.1.attention.output.bias"
    parameter = dict(model.named_parameters())[name]
    with torch.no_grad():
        parameter.data[2] = np.inf
    assert found(model, loss_fn) == f"weight {name} (1 of 6 values)"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_alone_is_named(backend: str) -> None:
    model, loss_fn = build(backend)

    def infinite(logits: Any, targets: np.ndarray) -> Any:
        return loss_fn(logits, targets) * 1e39  # beyond float32

    with np.errstate(over="ignore", invalid="ignore"):
        assert first_non_finite(model, infinite, TOKENS, TOKENS) == "loss"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_a_parameter_alone_is_named(backend: str) -> None:
    """Gradients of the logits can be held, but not their products with large activations."""
    model, loss_fn = build(
        backend, output__output__weight=1e-6, transformers__1__feed_forward__output__weight=1e6
    )

    def scaled(logits: Any, targets: np.ndarray) -> Any:
        return loss_fn(logits, targets) * 1e36

    with np.errstate(over="ignore", invalid="ignore"):
        name = first_non_finite(model, scaled, TOKENS, TOKENS)
    assert re.fullmatch(r"gradient of output\.output\.weight \(\d+ of 30 values\)", name or ""), (
        name
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fill_of_minus_infinity_is_no_anomaly(backend: str) -> None:
    config = GPTConfig(5, 4, 6, 1, mask_value=float("-inf"))
    model, loss_fn = build_model(backend, config), load_backend(backend).GPTLoss()
    assert found(model, loss_fn) is None
    with watch(model):
        loss_fn(model(TOKENS), TOKENS).backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_watching_leaves_nothing_behind(backend: str) -> None:
    model, loss_fn = build(backend, embedding__embedding__weight=1e23)
    anomaly(model, loss_fn)
    with np.errstate(over="ignore", invalid="ignore"):
        model(TOKENS)  # raises nothing
    if backend == "torch":
        hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
        assert not any(hooks)


# --- in a run -------------------------------------------------------------------------------------


def broken_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight becomes far too large after the step, as if a bit of it had flipped."""
    original = Run.after_step

    def wrapped(run: Run, number: int, result: Any) -> None:
        original(run, number, result)
        if number == step:
            name = "transformers.0.attention.output.bias"
            with torch.no_grad():
                dict(run.trainer.model.named_parameters())[name].data[:] = 3e38

    monkeypatch.setattr(Run, "after_step", wrapped)


def train(backend: str, *flags: str) -> int:
    Path("text.txt").write_text("Wer reitet so spät durch Nacht und Wind?\n" * 20, "utf-8")
    return main([
        "train", "--data", "text.txt", "--out", "run", "--backend", backend, "--context-size", "8",
        "--embedding-size", "8", "--blocks", "1", "--max-steps", "9", "--save-every", "2", *flags,
    ])  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_stops_at_the_step_with_the_tensor_and_the_checkpoint(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    broken_at(5, monkeypatch)
    assert train(backend) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.fullmatch(
        r"gpt-parity: error: training step 6: (loss|gradient norm): got (nan|inf), needed a finite "
        r"number; first not finite: transformers\.0\.feed_forward\.input\.output \(\d+ of 1024 "
        r"values\); the weights are those before it; the last checkpoint, "
        r"run/checkpoint\.safetensors, is of step 4",
        lines[0],
    ), lines[0]
    assert load_checkpoint(Path("run")).step == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_anomaly_names_the_operation(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    broken_at(5, monkeypatch)
    assert train(backend, "--anomaly") == 2
    line = capsys.readouterr().err
    operation = {"numpy": r"(the gradient of )?\w+\([\w., ]+\)", "torch": r"aten\.\w+ "}[backend]
    assert re.match(rf"gpt-parity: error: training step 6: {operation}", line), line
    assert line.endswith("is of step 4\n") and "first not finite" not in line


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_watching_changes_no_bit(
    backend: str, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert train(backend, "--threads", threads) == 0
    plain = load_checkpoint(Path("run"))
    assert train(backend, "--threads", threads, "--anomaly", "--overwrite") == 0
    watched = load_checkpoint(Path("run"))
    assert all((a == watched.weights[n]).all() for n, a in plain.weights.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unbounded_norm_is_no_anomaly(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(backend, "--anomaly", "--max-norm", "inf") == 0


def test_weights_that_overflow_in_the_update_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--learning-rate", "1e39", "--warmup", "0", "--eval-every", "1")
    assert train("numpy", *flags) == 2
    line = capsys.readouterr().err
    assert re.match(r"gpt-parity: error: after training step 1: checkpoint: [\w.]+ has \d+", line)
    assert line.endswith("run/checkpoint.safetensors, is of step 0\n"), line
    assert train("numpy", *flags, "--anomaly", "--overwrite") == 2
    line = capsys.readouterr().err
    assert re.match(r"gpt-parity: error: the update of training step 1 gives [\w.]+ not", line), (
        line
    )
