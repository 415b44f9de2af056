"""Runs that go on, and never into something else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.config import TrainConfig
from gpt_parity.run_folder import existing_folder
from gpt_parity.training import new_trainer
from parity_tests.resumed_runs import (
    TEXT,
    nothing,
    refused,
    results,
    resume,
    rewrite,
    train,
)

pytestmark = [pytest.mark.reference("exact property"), pytest.mark.folder_of_its_own(TEXT)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--seed", "42"],
            "seed is 42, the run in run has 7 and keeps it; only --accumulate, --anomaly, "
            "--backend, --compile, --data, --device, --keep, --save-every, --shard, --threads may "
            "change on the way",
        ),
        (["--max-steps", "9"], "max_steps is 9, the run in run has 6"),
        (["--log-every", "9"], "log_every is 9, the run in run has 4"),
        (["--eval-every", "2"], "eval_every is 2, the run in run has 3"),
        (["--max-norm", "inf"], "max_norm is inf, the run in run has 1.0"),
        (["--dtype", "float64"], "dtype is float64"),
        (["--betas", "0.9", "0.99"], r"betas is (0.9, 0.99), the run in run has (0.9, 0.999)"),
        (["--out", "other"], "out is other, the run in run has run"),
        (["--overwrite"], "resume and overwrite are both set"),
        (["--data", "other.txt"], "other.txt: has sha256"),
        (["--data", "absent.txt"], "absent.txt: cannot be read"),
    ],
)
def test_what_shapes_a_run_stays(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the flag has its own default for value."""
    assert train("run", "--seed", "7") == 0
    Path("other.txt").write_bytes(TEXT.encode() + b"!")
    assert refused(capsys, "run", *flags).startswith(message)


def test_flags_that_agree_with_the_run_are_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--seed", "7") == 0
    expected = results("run")
    assert resume("run", "--seed", "7", "--out", "./run", "--data", "text.txt", "--keep", "2") == 0
    assert results("run") == expected


def test_the_text_of_the_run_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    Path("text.txt").rename("moved.txt")
    assert refused(capsys, "run") == (
        "run: was trained on text.txt, which is not here; --data FILE of that text is needed"
    )
    assert resume("run", "--data", "moved.txt") == 0


def test_a_model_alone_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    saved = load_checkpoint(Path("run"))
    save_checkpoint(
        Path("run/checkpoint.safetensors"), saved.build_model(), config=saved.config,
        vocabulary=saved.vocabulary, step=saved.step,
    )  # fmt: skip
    assert refused(capsys, "run").startswith("run: holds a model alone")


@pytest.mark.parametrize(
    ("step", "changes"),
    [(6, {"epoch": 1}), (6, {"batch": 0}), (6, {"total_steps": 7}), (7, {"batch": 7})],
)
def test_positions_that_contradict_each_other_are_refused(
    step: int, changes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    saved = load_checkpoint(Path("run"))
    assert (saved.run.epoch, saved.run.batch) == (0, 6)
    config = TrainConfig.from_recipe(saved.run.recipe)
    trainer = new_trainer(config, saved.config)
    save_checkpoint(
        Path("run/checkpoint.safetensors"), trainer.model, config=saved.config,
        vocabulary=saved.vocabulary, step=step, optimizer=trainer.optimizer,
        run=replace(saved.run, **changes),
    )  # fmt: skip
    assert refused(capsys, "run").startswith(
        f"checkpoint of step {step}: epoch, batch and total steps"
    )


@pytest.mark.parametrize(
    ("arrays", "run", "message"),
    [
        (nothing, lambda r: r["recipe"].update(embedding_size=4),
         "manifest: run is of (GPTConfig(vocab_size="),
        (nothing, lambda r: r["recipe"].update(backend="torch"), "manifest: run is of (GPTConfig("),
        (nothing, lambda r: r["recipe"].pop("seed"), "recipe has ["),
        (nothing, lambda r: r["recipe"].update(dropout=0), "recipe has ["),
        (nothing, lambda r: r["recipe"].update(heads=2), "heads is 2, which only --model gpt2 has"),
        (nothing, lambda r: r["recipe"].update(model="gpt2"), "manifest: run is of (GPT2Config("),
        (nothing, lambda r: r["recipe"].update(preset=[]), "preset is [], one of ('baby',"),
        (nothing, lambda r: r["recipe"].update(keep=0), "keep is 0, at least 1 is needed"),
        (nothing, lambda r: r.pop("loss_sum"), "manifest: run has ["),
        (nothing, lambda r: r.update(corpus={}), "corpus: name is None"),
        (nothing, lambda r: r["corpus"].update(path=""), "corpus: path has 0 characters"),
        (nothing, lambda r: r["corpus"].update(path="x" * 5000), "corpus: path has 5000"),
        (nothing, lambda r: r["recipe"].update(betas=5), "betas is 5, two numbers are needed"),
        (nothing, lambda r: r.update(history=[math.nan]), "history has nan"),
        (nothing, lambda r: r.update(history=[{"step": math.inf}]), "history has {'step': inf}"),
        (nothing, lambda r: r.update(history=[{"step": [[]]}]), "history has {'step': [[]]}"),
        (lambda a: a.pop("state/random/sample"), nothing, "random: sample missing"),
        (lambda a: a.update({"state/random/sample": a["state/random/sample"][1:]}), nothing,
         "random: sample has shape (624,), (625,) is needed"),
        (lambda a: a["state/random/sample"].__setitem__(624, 625), nothing,
         "random: sample is at place 625, at most 624 is needed"),
        (lambda a: [a.pop(name) for name in list(a) if name.startswith(("optimizer/", "state/s"))],
         nothing, "manifest: run is one without an optimizer"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_that_of_the_run_is_refused(
    arrays: Callable[[dict[str, Any]], Any], run: Callable[[dict[str, Any]], Any], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert train("run", "--keep", "1") == 0
    rewrite(nothing, nothing)
    assert load_checkpoint(Path("run")).step == 6  # it is the change that is refused
    rewrite(arrays, run)
    assert refused(capsys, "run").startswith(f"run/checkpoint.safetensors: {message}")


def test_an_unbounded_norm_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--max-norm", "inf") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    recipe = json.loads(Path("run/config.json").read_text(), parse_constant=refuse)["train"]
    assert recipe["max_norm"] is None
    assert TrainConfig.from_recipe(load_checkpoint(Path("run")).run.recipe).max_norm == math.inf
    expected = results("run")
    assert resume("run/checkpoint-4.safetensors", "--max-norm", "inf") == 0
    assert results("run") == expected


@pytest.mark.skipif(os.name != "posix", reason="needs file locks: run on Linux or macOS")
def test_one_process_at_a_time_trains_into_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    with existing_folder(Path("run")):
        assert refused(capsys, "run").startswith("run: another process trains into it")
        assert train("run", "--overwrite") == 2
    assert resume("run") == 0
