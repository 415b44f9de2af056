"""Checkpoints of GPT-2 and of before it, and what the command `train` refuses of GPT-2."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.cli import main
from gpt_parity.config import LATER, TrainConfig
from gpt_parity.model_config import GPT2Config, GPTConfig
from parity_tests.resumed_runs import (
    TEXT,
    kill_at,
    nothing,
    results,
    resume,
    rewrite,
)
from parity_tests.resumed_runs import train as train_text_model
from parity_tests.test_gpt2_training import one_error, train

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]


# --- files


def test_a_checkpoint_from_before_gpt2_is_loaded_and_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_text_model("unbroken") == 0
    with monkeypatch.context() as patch:
        kill_at(3, signal.SIGINT, patch)
        assert train_text_model("run") == 130
    rewrite(nothing, lambda run: [run["recipe"].pop(name) for name in LATER])
    loaded = load_checkpoint(Path("run"))
    assert not LATER & set(loaded.run.recipe) and isinstance(loaded.config, GPTConfig)
    assert TrainConfig.from_recipe(loaded.run.recipe).model == "gpt"
    assert resume("run") == 0
    assert results("run") == results("unbroken")


def test_a_checkpoint_is_of_the_configuration_it_should_be_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    config = load_checkpoint(Path("run")).config
    assert load_checkpoint(Path("run"), config=config).config == config
    sizes = (config.vocab_size, 8, 8, 2)
    for other in (GPT2Config(*sizes, heads=4), GPTConfig(*sizes)):
        with pytest.raises(ValueError, match=r"is of GPT2Config\(.*heads=2\), GPT.* is needed"):
            load_checkpoint(Path("run"), config=other)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (3, "embedding_size is 8, a multiple of heads = 3 is needed"),
        (0, "heads is 0, at least 1 is needed"), (True, "heads is True, a number is needed"),
        (2.0, "heads is 2.0, an integer is needed"), ("2", "heads is '2', a number is needed"),
        (4, "manifest: run is of (GPT2Config("), (None, "heads is None, a number is needed"),
    ],
)  # fmt: skip
def test_a_manifest_whose_heads_cannot_be_is_refused(
    heads: Any, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("run") == 0
    path = Path("run/checkpoint.safetensors")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    manifest = json.loads(header["__metadata__"]["manifest"])
    manifest["config"]["heads"] = heads
    header["__metadata__"]["manifest"] = json.dumps(manifest)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ValueError) as caught:
        load_checkpoint(Path("run"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- mistakes


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        # 10 % of 640 is 64, one too few for a window of 64 with its target.
        (640, "text.txt: test split has 64 characters of the 640 of the text, at least 65 are"),
        (10, "text.txt: train split has 9 characters of the 10 of the text, at least 65 are"),
    ],
)  # fmt: skip
def test_a_text_too_short_for_the_preset_is_one_line(
    characters: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written."""
    Path("text.txt").write_text(("abcde" * 200)[:characters])
    flags = ["--data", "text.txt", "--out", "run", "--model", "gpt2", "--preset", "baby"]
    assert one_error(capsys, main(["train", *flags])).startswith(message)
    assert not Path("run").exists()


def test_windows_are_drawn_from_a_text_that_has_less_than_a_batch_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The test part of 65 characters is one window, which is the whole test."""
    Path("text.txt").write_text(("abcde" * 200)[:650])
    sizes = ["--context-size", "64", "--embedding-size", "8", "--batch-size", "12"]
    flags = ["train", "--data", "text.txt", *sizes, "--max-steps", "2", "--sample-tokens", "1"]
    message = one_error(capsys, main([*flags, "--out", "ordered"]))
    assert message.startswith("text.txt: test split has 1 windows of 64 characters, at least batch")
    assert message.rstrip().endswith("batch_size = 12 are needed")  # no name that has no flag
    assert main([*flags, "--out", "drawn", "--windows", "random"]) == 0
    assert "over 1 batches" in capsys.readouterr().out
    assert load_checkpoint(Path("drawn")).step == 2
    Path("text.txt").write_text(("abcde" * 200)[:640])
    assert "at least 65 are needed" in one_error(
        capsys, main([*flags, "--out", "short", "--windows", "random"])
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "4"], "heads is 4, which only --model gpt2 has"),  # also the default
        (["--preset", "baby"], "preset is baby, which only --model gpt2 has"),
        (["--heads", "2"], "heads is 2, which only --model gpt2 has"),
        (["--model", "gpt2", "--heads", "5"], "embedding_size is 64, a multiple of heads = 5 is"),
        (["--model", "gpt2", "--heads", "0"], "heads is 0, at least 1 is needed"),
        (["--model", "gpt2", "--preset", "huge"], 'Invalid value "huge" for'),
        (["--model", "gpt3"], 'Invalid value "gpt3" for'),
        (["--windows", "all"], 'Invalid value "all" for'),
    ],
)  # fmt: skip
def test_a_mistake_in_the_flags_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["train", "--data", "text.txt", "--out", "run", *flags])
    assert message in one_error(capsys, code)
    assert not Path("run").exists()
