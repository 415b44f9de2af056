"""Attention of trained GPT-2s: every head, and tokens that are pieces of text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from gpt_parity.backends import build_model
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.cli import main
from gpt_parity.lessons import heat_maps
from gpt_parity.model_config import GPT2Config
from gpt_parity.weights import get_weights, set_weights
from parity_tests.byte_pairs import needs_tokenizers, trained
from parity_tests.walks import joined, shown, tables

pytestmark = pytest.mark.reference("other backend")

HEADS = [f"Block {block}, head {head}" for block in range(2) for head in range(2)]


@pytest.fixture(autouse=True)
def a_pipe_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def saved(path: Path, vocab_size: int, heads: int = 2, **text: Any) -> Path:
    """A GPT-2 with two blocks and a context of 6, whose weights are far from even."""
    config = GPT2Config(vocab_size, 6, 8, 2, heads=heads)
    model = build_model("numpy", config, seed=3, dtype="float64")
    set_weights(model, {n: 3.0 * w for n, w in get_weights(model).items()})
    save_checkpoint(path, model, config=config, **{"vocabulary": None, **text})
    return path


def expected(path: Path, ids: np.ndarray) -> list[np.ndarray]:
    """The softmax results of the PyTorch twin, head by head."""
    model, found = load_checkpoint(path).build_model("torch"), []
    for block in model.transformers:
        block.attention.softmax.register_forward_hook(
            lambda layer, inputs, output: found.extend(output.detach().numpy()[0])
        )
    model(ids[None])
    return found


def check_tables(text: str, titles: list[str], labels: list[str], weights: list[Any]) -> None:
    parts = re.split(r"^(Block .*)$", text, flags=re.MULTILINE)
    assert parts[1::2] == titles and len(weights) == len(titles)
    for part, matrix in zip(parts[2::2], weights, strict=True):
        (rows,) = tables(part)
        for i, row in enumerate(rows):
            most = int(matrix[i].argmax())
            assert row[:2] == [str(i), labels[i]]
            assert row[2:] == [*(f"{x:.4f}" if x else "0" for x in matrix[i]), str(most),
                               labels[most], f"({matrix[i, most]:.2f})"]  # fmt: skip
    assert max(map(cell_len, text.split("\n"))) <= 80


@pytest.mark.parametrize("heads", (1, 2))
def test_each_head_has_a_table_with_the_weights_of_torch(
    heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "a.safetensors", 5, heads, vocabulary="\n abc")
    text = shown(capsys, "--checkpoint", str(path), "--prompt", "ab c\n")
    ids = load_checkpoint(path).tokenizer.encode("ab c\n")
    titles = [f"Block {block}, head {head}" for block in range(2) for head in range(heads)]
    check_tables(text, titles, ["a", "b", "␣", "c", "\\n"], expected(path, ids))
    assert "over 5 characters" in text and f"2 blocks of {heads} head" in joined(text)
    assert joined(text).count("Of 10 weights on later positions 10 are exactly 0") == 2 * heads


@needs_tokenizers
def test_pieces_of_text_are_labels_and_the_last_of_them_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "a.safetensors", 303, tokenizer_json=trained())
    prompt = "a the cat \u4f60<|endoftext|>"
    tokenizer = load_checkpoint(path).tokenizer
    ids = tokenizer.encode(prompt)
    assert len(prompt) != len(ids) > 6
    ends = [tokenizer.decode([i]).replace(" ", "␣") for i in ids[-6:]]
    assert ends[-1] == "<|endoftext|>" and any(len(end) > 1 for end in ends[:-1])
    text = shown(capsys, "--checkpoint", str(path), "--prompt", prompt)
    words = joined(text)
    assert "over 6 tokens" in words
    assert f"The prompt has {len(ids)} tokens and the model reads 6: these are the last" in words
    first = text.split("Block 0, head 0")[1].split("Block 0, head 1")[0]
    (rows,) = tables(first)
    weights = expected(path, ids[-6:])[0]
    for i, row in enumerate(rows):
        assert row[:2] == [str(i), ends[i]]
        assert row[2] == (f"{weights[i, 0]:.4f}" if weights[i, 0] else "0")
    assert len(rows) == 6 and max(map(cell_len, text.split("\n"))) <= 80


def test_each_head_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(heat_maps, "draw_maps", lambda *arguments: drawn.append(arguments))
    path = saved(tmp_path / "a.safetensors", 3, vocabulary="abc")
    shown(capsys, "--checkpoint", str(path), "--prompt", "abca", "--plot", str(tmp_path / "a.png"))
    ((_, maps, labels),) = drawn
    assert [title for title, _, _ in maps] == [title.lower() for title in HEADS]
    assert labels == ["0 a", "1 b", "2 c", "3 a"] and all(rows == labels for _, _, rows in maps)
    for (_, found, _), weights in zip(maps, expected(path, np.array([0, 1, 2, 0])), strict=True):
        np.testing.assert_allclose(found, weights, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("explain", "no text"), ("generate", "no text"),
        *(pytest.param(command, "broken", marks=needs_tokenizers)
          for command in ("explain", "generate", "verify")),
    ],
)  # fmt: skip
def test_a_checkpoint_without_a_sound_tokenizer_is_one_line_that_names_it(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "a.safetensors"
    if kind == "broken":
        saved(path, 303, tokenizer_json=trained())
        data = path.read_bytes()
        path.write_bytes(data.replace(b"ByteLevel", b"ByteLavel"))
    else:
        saved(path, 303)
    prompt = [] if command == "verify" else ["--prompt", "a"]
    assert main([command, "--checkpoint", str(path), *prompt]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"gpt-parity: error: {path}: "), err
