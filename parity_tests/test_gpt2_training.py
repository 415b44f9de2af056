"""GPT-2 by the commands: trained on drawn windows, stopped, gone on with, continued as text."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.corpus import CharDataset
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.rounding import FLOAT64
from gpt_parity.training import GPTTrainer
from parity_tests.comparers import assert_agree
from parity_tests.resumed_runs import (
    TEXT,
    VARIANTS,
    kill_at,
    results,
    resume,
)
from parity_tests.resumed_runs import train as train_text_model

pytestmark = [pytest.mark.reference("exact property"), pytest.mark.folder_of_its_own(TEXT)]

FLAGS = {
    "--model": "gpt2", "--preset": "baby", "--context-size": "8", "--embedding-size": "8",
    "--blocks": "2", "--heads": "2", "--batch-size": "4", "--sample-tokens": "20",
    "--max-steps": "6", "--warmup": "2", "--log-every": "4", "--eval-every": "3",
    "--save-every": "2",
}  # fmt: skip

both_backends = pytest.mark.parametrize("backend", BACKENDS)


def train(out: str, *flags: str) -> int:
    """Train with FLAGS, in place of which `flags` may have other values."""
    rest = [word for item in FLAGS.items() if item[0] not in flags for word in item]
    return main(["train", "--data", "text.txt", "--out", out, *rest, *flags])


def one_error(capsys: pytest.CaptureFixture[str], code: int) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, (code, lines)
    return lines[0].removeprefix("gpt-parity: error: ")


def assert_runs_agree(one: str, other: str, steps: int) -> None:
    """Weights and moments of two float64 runs, up to accumulated rounding.

    A bias of the keys adds the same to all scores of a row: its gradient is 0 but for rounding, of
    which AdamW makes steps of up to lr g / eps. It starts at 0 and is judged by that, with
    g <= 50 u, the bound of `assert_agree` for a gradient of norm 1, to which all are clipped.
    """
    a, b = (load_checkpoint(Path(name)) for name in (one, other))
    assert a.step == b.step == steps
    for name, array in a.weights.items():
        parts = [(array, b.weights[name])]
        if name.endswith("attention.input.bias"):
            query, key, value = zip(*(np.split(x, 3) for x in parts[0]), strict=True)
            parts = [query, value]
            assert np.abs(key).max() <= steps * 1e-3 * 50 * FLOAT64.u / 1e-8, name
        for x, y in parts:
            assert_agree(name, steps, y, x)
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_agree(f"{kind} {name}", steps, b.optimizer[kind][name],
                         a.optimizer[kind][name])  # fmt: skip


# --- what a run does


@both_backends
def test_a_run_takes_its_preset_but_for_what_is_given(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its recipe, its model, and the windows that it sees."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = GPTTrainer.train_step

    def watched(trainer: GPTTrainer, tokens: np.ndarray, targets: np.ndarray) -> Any:
        seen.append((tokens, targets))
        return original(trainer, tokens, targets)

    monkeypatch.setattr(GPTTrainer, "train_step", watched)
    assert train("run", "--backend", backend, "--seed", "7") == 0
    recipe = json.loads(Path("run/config.json").read_text())["train"]
    expected = {"model": "gpt2", "preset": "baby", "heads": 2, "windows": "random", "blocks": 2,
                "max_steps": 6, "weight_decay": 0.1, "betas": [0.9, 0.99]}  # fmt: skip
    assert {name: recipe[name] for name in expected} == expected
    config = load_checkpoint(Path("run")).config
    assert config == GPT2Config(len(set(TEXT)), 8, 8, 2, heads=2)
    dataset = CharDataset(TEXT, context_size=8, batch_size=4)
    assert len(seen) == 6
    for step, batch in enumerate(seen):
        np.testing.assert_array_equal(batch, dataset.random_batch("train", 7, step))


def test_a_run_may_be_longer_than_an_epoch_of_drawn_windows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = CharDataset(TEXT, context_size=8, batch_size=12).batch_count("train")
    flags = ["--batch-size", "12", "--epochs", "1", "--max-steps", str(batches + 2)]
    assert train("run", *flags) == 0
    checkpoint = load_checkpoint(Path("run"))
    assert checkpoint.step == checkpoint.run.total_steps == batches + 2
    assert (checkpoint.run.epoch, checkpoint.run.batch) == (1, 2)


@pytest.mark.reference("other backend")
def test_both_backends_train_and_continue_alike(capsys: pytest.CaptureFixture[str]) -> None:
    outputs, losses = {}, {}
    for backend in BACKENDS:
        assert train(backend, "--backend", backend, "--dtype", "float64", "--log-every", "1") == 0
        lines = capsys.readouterr().out.splitlines()
        outputs[backend] = lines[:1] + lines[2:], Path(backend, "sample.txt").read_text()
        metrics = map(json.loads, Path(backend, "metrics.jsonl").read_text().splitlines())
        losses[backend] = [m["loss"] for m in metrics]
    assert outputs["numpy"] == outputs["torch"] and len(losses["numpy"]) == 8
    for step, (a, b) in enumerate(zip(losses["torch"], losses["numpy"], strict=True), start=1):
        assert_agree("loss", step, np.float64(a), np.float64(b))
    assert_runs_agree("numpy", "torch", 6)


def test_both_backends_continue_a_prompt_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--dtype", "float64") == 0
    capsys.readouterr()
    texts = []
    for backend in BACKENDS:
        flags = ["--prompt", "Früh ", "--tokens", "40", "--backend", backend, "--seed", "3"]
        assert main(["generate", "--checkpoint", "run", *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("Früh ")
    assert len(texts[0].removesuffix("\n")) == 45


@pytest.mark.reference("other backend")
def test_two_threads_stay_beside_one(capsys: pytest.CaptureFixture[str]) -> None:
    for threads in ("1", "2"):
        assert train(threads, "--dtype", "float64", "--threads", threads) == 0
    one, two = (results(threads)["arrays"] for threads in ("1", "2"))
    assert one != two, "one path twice"
    assert_runs_agree("1", "2", 6)


@pytest.mark.parametrize(("backend", "threads"), [("numpy", "1"), ("numpy", "2"), ("torch", "1")])
def test_looking_for_anomalies_changes_nothing(
    backend: str, threads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("plain", "--backend", backend, "--threads", threads) == 0
    assert train("watched", "--backend", backend, "--threads", threads, "--anomaly") == 0
    assert results("plain") == results("watched")


@pytest.mark.parametrize(
    ("backend", "operation"),
    [
        ("numpy", "linear(transformers.0.attention_norm.output, transformers.0.attention.input."),
        # Its layer norm does not survive squares that overflow.
        ("torch", "aten.native_layer_norm in transformers.0.attention_norm gives 256 of 256"),
    ],
)  # fmt: skip
def test_an_anomaly_has_a_name(
    backend: str, operation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of about 1e37 after the first step."""
    flags = ["--backend", backend, "--learning-rate", "1e37", "--warmup", "0", "--anomaly"]
    message = one_error(capsys, train("run", *flags))
    assert message.startswith(f"training step 2: {operation}"), message
    assert "that are not finite" in message and message.endswith("is of step 0"), message


# --- stopped and gone on with


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_a_stopped_run_goes_on_to_the_bit(
    variant: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Three steps and three more: the same windows, and so the same weights, as in six."""
    backend, dtype, threads = variant
    flags = ["--backend", backend, "--dtype", dtype, "--threads", threads]
    assert train("unbroken", *flags) == 0
    with monkeypatch.context() as patch:
        kill_at(3, signal.SIGTERM, patch)
        assert train("stopped", *flags) == 143
    assert load_checkpoint(Path("stopped")).step == 3
    assert resume("stopped") == 0
    assert results("stopped") == results("unbroken")


@pytest.mark.parametrize("order", [("numpy", "torch"), ("torch", "numpy")], ids="-".join)
def test_a_run_that_changes_its_backend_stays_beside_the_unbroken_one(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = order
    assert train("unbroken", "--dtype", "float64", "--backend", first) == 0
    with monkeypatch.context() as patch:
        kill_at(3, signal.SIGINT, patch)
        assert train("run", "--dtype", "float64", "--backend", first) == 130
    assert resume("run", "--backend", second) == 0
    assert [h["backend"] for h in load_checkpoint(Path("run")).run.history] == [first, second]
    assert_runs_agree("unbroken", "run", 6)


def test_flags_that_agree_with_the_run_are_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without the model, which the run has."""
    assert train("run") == 0
    expected = results("run")
    for flags in (["--heads", "2"], ["--preset", "baby"], ["--windows", "random"]):
        assert resume("run", *flags) == 0, flags
        assert results("run") == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "4"], "heads is 4, the run in run has 2 and keeps it"),
        (["--model", "gpt"], "model is gpt, the run in run has gpt2"),
        (["--preset", "gpt2"], "preset is gpt2, the run in run has baby"),
        (["--windows", "ordered"], "windows is ordered, the run in run has random"),
    ],
)  # fmt: skip
def test_what_shapes_a_run_stays(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    expected = results("run")
    capsys.readouterr()
    assert one_error(capsys, resume("run", *flags)).startswith(message)
    assert results("run") == expected


def test_flags_of_gpt2_are_compared_with_a_run_of_the_text_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_text_model("run") == 0
    capsys.readouterr()
    message = one_error(capsys, resume("run", "--heads", "2"))
    assert message.startswith("heads is 2, the run in run has 4")
    assert resume("run", "--model", "gpt", "--windows", "ordered") == 0
