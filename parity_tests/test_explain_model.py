"""Attention of trained models, heat maps, and mistakes in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from gpt_parity.backends import build_model
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.lessons import heat_maps
from gpt_parity.lessons.attention import compute
from gpt_parity.lessons.config import MOST_POSITIONS
from gpt_parity.model_config import GPTConfig
from parity_tests.walks import Plain, joined, shown, tables

pytestmark = pytest.mark.reference("by hand")

TEXT = "a tape walks\nbackwards. " * 20
A_TAPE = ["--prompt", "a\ntape"]


@pytest.fixture(autouse=True)
def a_pipe_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


# --- A trained model ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same few steps by both backends, in float64."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    for backend in BACKENDS:
        assert main([
            "train", "--backend", backend, "--data", str(folder / "text.txt"), "--out",
            str(folder / backend), "--dtype", "float64", "--context-size", "12",
            "--embedding-size", "8", "--learning-rate", "0.03", "--max-steps", "9",
        ]) == 0  # fmt: skip
    return folder


def hooked_weights(path: Path, prompt: str) -> list[np.ndarray]:
    """The softmax results of the PyTorch twin."""
    checkpoint = load_checkpoint(path)
    model, found = checkpoint.build_model("torch"), []
    for block in model.transformers:
        block.attention.softmax.register_forward_hook(
            lambda layer, inputs, output: found.append(output.detach().numpy()[0])
        )
    model(checkpoint.tokenizer.encode(prompt)[None])
    return found


@pytest.mark.reference("other backend")
def test_checkpoints_of_both_backends_give_the_weights_of_torch(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {}
    for backend in BACKENDS:
        text = shown(capsys, "--checkpoint", str(runs / backend), "--prompt", "tape\na w")
        assert f"9 training steps on {backend} in float64" in joined(text)
        texts[backend] = text.split("\n\n", 1)[1]
        blocks = re.split(r"^Block \d$", text, flags=re.MULTILINE)[1:]
        labels = ["t", "a", "p", "e", "\\n", "a", "␣", "w"]
        expected = hooked_weights(runs / backend, "tape\na w")
        assert len(blocks) == len(expected) == 2
        for block, weights in zip(blocks, expected, strict=True):
            (rows,) = tables(block)
            for i, row in enumerate(rows):
                most = int(weights[i].argmax())
                assert row[:2] == [str(i), labels[i]]
                assert row[2:10] == [f"{x:.4f}" if x else "0" for x in weights[i]]
                assert row[10:] == [str(most), labels[most], f"({weights[i, most]:.2f})"]
            own = np.diagonal(weights).mean()
            assert (
                "Of 28 weights on later positions 28 are exactly 0: nothing leaks. On average a "
                f"position puts {own:.4f} on itself."
            ) in joined(block)
    assert texts["numpy"] == texts["torch"]


def test_a_prompt_longer_than_the_context_loses_its_beginning(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = "s backwards."
    text = shown(capsys, "--checkpoint", str(runs / "numpy"), "--prompt", "a tape walks. " + end)
    words = joined(text)
    assert "The prompt has 26 characters and the model reads 12: these are the last" in words
    assert max(map(cell_len, text.split("\n"))) <= 80
    found = shown(capsys, "--checkpoint", str(runs / "numpy"), "--prompt", end)
    assert text.split("Block 0")[1] == found.split("Block 0")[1]
    rows = tables(found)[0]
    assert [row[0] for row in rows] == [str(i) for i in range(12)]
    expected = hooked_weights(runs / "numpy", end)[0]
    assert rows[11][2:7] == [f"{x:.4f}" for x in expected[11, :5]]
    assert rows[11][7] == "…" and rows[11][8:11] == [f"{x:.4f}" for x in expected[11, 9:]]


def test_a_model_with_a_leaking_mask_shows_its_leak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPTConfig(3, 4, 5, 1, mask_value=-1.0)
    model = build_model("numpy", config, allow_leak=True)
    path = tmp_path / "leak.safetensors"
    save_checkpoint(path, model, config=config, vocabulary="abc")
    text = joined(shown(capsys, "--checkpoint", str(path), "--prompt", "abca"))
    share = np.exp(-1) / (1 + 3 * np.exp(-1))  # all scores are nearly 0
    found = re.search(r"Of 6 weights on later positions 0 are exactly 0: at most (\S+) LEAKS", text)
    assert found and np.isclose(float(found[1]), share, rtol=1e-2, atol=0.0)


# --- Drawings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_drawings_are_written_and_the_same_each_time(
    ending: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    random, trained = (
        ["--tokens", r"the $\frac$ 世界"],
        ["--checkpoint", str(runs / "torch"), *A_TAPE],
    )
    for place, flags in (("a", random), ("b", random), ("c", trained)):
        text = shown(capsys, *flags, "--plot", str(tmp_path / f"{place}.{ending}"))
        assert f"{place}.{ending}" in text.splitlines()[-1]
    first, second, third = ((tmp_path / f"{n}.{ending}").read_bytes() for n in "abc")
    assert first == second != third
    for picture in (first, third):
        assert picture.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_each_stage_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(heat_maps, "draw_maps", lambda *arguments: drawn.append(arguments))
    heat_maps.draw_stages(tmp_path / "a.png", ["x", "y", "z"], compute(3, 6, 2, []))
    ((_, maps, labels),) = drawn
    plain = Plain(3, 6, 2)
    assert labels == ["0 x", "1 y", "2 z"] and all(rows == labels for _, _, rows in maps)
    scores, masked, weights, without, values, keys = (array for _, array, _ in maps)
    for found, expected in (
        (scores, plain.scores), (weights, plain.weights), (without, plain.open),
        (masked, np.where(plain.mask == 0, -np.inf, plain.scores)),
        (values, plain.weights * np.linalg.norm(plain.g, axis=1)[:, None]),
        (keys, abs(plain.score_gradients()) * np.linalg.norm(plain.q, axis=1)[:, None] / 6**0.5),
    ):  # fmt: skip
        assert np.allclose(found, expected, rtol=1e-9, atol=0.0)


# --- Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", " "], "tokens is empty, at least one word is needed"),
        (["--seq-len", "0"], "seq_len is 0, at least 1 is needed"),
        (["--seq-len", str(MOST_POSITIONS + 1)], f"length is {MOST_POSITIONS + 1}, at most"),
        (["--tokens", "a b", "--seq-len", "3"], "seq_len is 3, 2 is needed for these tokens"),
        (["--d-k", "0"], "d_k is 0, at least 1 is needed"),
        (["--d-k", str(10**12)], f"attention over 4 positions with d_k = {10**12} needs 384,0"),
        (["--seed", "-1"], "seed is -1, at least 0 is needed"),
        (["--plot", "a.pdf"], "plot is a.pdf, a file that ends in .png or .svg is needed"),
        (["--prompt", "a"], "prompt is given without checkpoint, both are needed"),
        (["--checkpoint", "RUN"], "checkpoint is given without prompt, both are needed"),
        (["--checkpoint", "RUN", "--prompt", ""], "prompt is empty, at least one character"),
        (["--checkpoint", "RUN", "--prompt", "a", "--tokens", "a"], "tokens is given with checkp"),
        (["--checkpoint", "RUN", "--prompt", "a", "--seq-len", "1"], "seq_len is given with ch"),
        (["--checkpoint", "RUN", "--prompt", "aZ\n"], "prompt: text holds 'Z', only the "),
        (["--checkpoint", "absent", "--prompt", "a"], "absent: "),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *(str(runs / "numpy") if f == "RUN" else f for f in flags)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"gpt-parity: error: {message}")


def test_overflowing_weights_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPTConfig(2, 3, 2, 1)
    model = build_model("numpy", config)
    next(model.parameters()).data[...] = 1e30
    path = tmp_path / "huge.safetensors"
    save_checkpoint(path, model, config=config, vocabulary="ab")
    assert main(["explain", "--checkpoint", str(path), "--prompt", "ab"]) == 2
    assert capsys.readouterr().err == (
        "gpt-parity: error: attention weights of block 0 are not finite\n"
    )
