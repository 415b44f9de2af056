"""Runs that end early and go on: from any moment, and to the bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.config import TrainConfig
from gpt_parity.training import GPTTrainer, new_trainer, stream
from gpt_parity.training_run import Run
from gpt_parity.weights import set_weights
from parity_tests.resumed_runs import (
    TEXT,
    VARIANTS,
    kill_at,
    results,
    resume,
    train,
)

pytestmark = [pytest.mark.reference("exact property"), pytest.mark.folder_of_its_own(TEXT)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_stopped_run_goes_on_to_the_bit(
    step: int, variant: tuple[str, str, str], number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In weights, moments, metrics and the sample; stopped before, at and after a validation."""
    backend, dtype, threads = variant
    flags = ["--backend", backend, "--dtype", dtype, "--threads", threads]
    assert train("unbroken", *flags) == 0
    with monkeypatch.context() as patch:
        kill_at(step, number, patch)
        capsys.readouterr()
        assert train("stopped", *flags) == 128 + number
    error = capsys.readouterr().err
    assert error == (
        f"gpt-parity: stopped by {number.name} after step {step} of 6; go on with: gpt-parity "
        "train --resume stopped\n"
    )
    assert load_checkpoint(Path("stopped")).step == step
    assert resume("stopped") == 0
    assert results("stopped") == results("unbroken")


def test_a_run_goes_on_from_any_moment_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a copy of its folder before and after each write, as if killed there."""
    copies: list[str] = []

    def copied(method: str, patch: pytest.MonkeyPatch) -> None:
        original = getattr(Run, method)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            for moment in ("before", "after"):
                result = original(self, *arguments, **options) if moment == "after" else None
                if Path("run/checkpoint.safetensors").exists():
                    copies.append(f"copy{len(copies)}")
                    shutil.copytree("run", copies[-1])
            return result

        patch.setattr(Run, method, call)

    with monkeypatch.context() as patch:
        for method in ("save", "validate", "after_step", "_sample"):
            copied(method, patch)
        assert train("run") == 0
    assert len(copies) > 20
    expected = results("run")
    steps = {load_checkpoint(Path(copy)).step for copy in copies}
    assert steps == {0, 2, 3, 4, 6}
    for copy in copies:
        assert resume(copy) == 0, capsys.readouterr()
        assert results(copy) == expected, copy


def test_what_a_killed_process_wrote_half_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    expected = results("run")
    with Path("run/metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"event": "train", "step": 7, "lo')
    Path("run/.checkpoint.safetensors.0123.part").write_bytes(b"half")
    Path("run/sample.txt").unlink()
    assert resume("run") == 0
    assert results("run") == expected
    assert not list(Path("run").glob(".*"))


def test_a_run_goes_on_from_an_earlier_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--keep", "4") == 0
    expected = results("run")
    assert resume("run/checkpoint-3.safetensors") == 0
    assert results("run") == expected


def test_a_run_that_changes_its_backend_stays_beside_the_unbroken_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, there and back, in float64: what a hop lost would be far larger."""
    assert train("unbroken", "--dtype", "float64") == 0
    for step, backend in ((2, "numpy"), (4, "torch")):
        with monkeypatch.context() as patch:
            kill_at(step, signal.SIGINT, patch)
            flags = ["--dtype", "float64"]
            assert (
                train("run", *flags) if step == 2 else resume("run", "--backend", backend)
            ) == 130
    assert resume("run", "--backend", "numpy") == 0
    ends = [load_checkpoint(Path(name)) for name in ("unbroken", "run")]
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, array in ends[0].optimizer[kind].items():
            other = ends[1].optimizer[kind][name]
            assert np.abs(array - other).max() <= 1e-11 * np.abs(array).max(), name
    for name, array in ends[0].weights.items():
        assert np.abs(array - ends[1].weights[name]).max() <= 1e-11 * np.abs(array).max(), name
    assert [h["backend"] for h in ends[1].run.history] == ["numpy", "torch", "numpy"]


def test_an_earlier_checkpoint_becomes_the_newest_before_metrics_are_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    assert train("run", "--keep", "9") == 0
    expected = results("run")
    with monkeypatch.context() as patch:
        patch.setattr(GPTTrainer, "train_step", killed)
        assert resume("run/checkpoint-3.safetensors") == 130
    assert load_checkpoint(Path("run")).step == 3
    assert resume("run") == 0
    assert results("run") == expected


def test_the_history_says_who_took_which_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        kill_at(2, signal.SIGINT, patch)
        assert train("run", "--dtype", "float64") == 130
    assert resume("run", "--backend", "torch") == 0
    run = load_checkpoint(Path("run")).run
    assert [(h["step"], h["backend"], h["threads"]) for h in run.history] == [
        (0, "numpy", 1), (2, "torch", 1),
    ]  # fmt: skip
    assert load_checkpoint(Path("run")).backend == "torch"


def test_the_random_state_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever was drawn before: the sample continues the saved generator, not the seed."""
    assert train("run") == 0
    saved = load_checkpoint(Path("run"))
    model, config = saved.build_model(), TrainConfig.from_recipe(saved.run.recipe)
    trainer = new_trainer(config, saved.config)
    saved.load_optimizer(trainer.model, trainer.optimizer)
    set_weights(trainer.model, saved.weights)
    saved.run.sample.random_sample(1000)  # past one refill of its 624 words
    save_checkpoint(
        Path("run/checkpoint.safetensors"), trainer.model, config=saved.config,
        vocabulary=saved.vocabulary, step=6, optimizer=trainer.optimizer, run=saved.run,
    )  # fmt: skip
    expected = "".join(stream(model, saved.tokenizer, "\n", 20, seed=saved.run.sample))
    before = Path("run/sample.txt").read_bytes().decode()
    assert resume("run") == 0
    assert Path("run/sample.txt").read_bytes().decode() == "\n" + expected != before


def test_a_run_without_steps_left_says_so_and_its_loss_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert resume("run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "numpy float32 on 1 thread, 6 steps, all taken, run in run"
    assert lines[-1] == last


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_checkpoint_is_there_before_the_first_step(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GPTTrainer, "train_step", killed)
        assert train("run", "--backend", backend) == 130
    assert load_checkpoint(Path("run")).step == 0
    assert train("unbroken", "--backend", backend) == 0
    assert resume("run") == 0
    assert results("run") == results("unbroken")
