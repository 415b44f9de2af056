"""Reported faults of texts: windows, vocabularies, encodings.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import builtins
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_parity.backends import build_model
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.corpus import CharDataset, CharTokenizer, read_corpus
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import layers_of
from numpy_impl import tape
from parity_tests.reports.common import trainer_of

pytestmark = pytest.mark.reference("by hand")

ROOT = Path(__file__).resolve().parents[2]
# Ten characters, seventeen bytes of UTF-8.
TYPOGRAPHIC = "na\u00efve\u2014\u201cok\u201d"


def letters(count: int) -> str:
    return "".join(chr(ord("a") + i % 26) for i in range(count))


def windows(length: int, context: int) -> int:
    """Windows of a training part of `length` characters; the stride is half the context."""
    text = letters(length) + "z" * (length + 200)
    dataset = CharDataset(text, context_size=context, batch_size=1, drop_last=False,
                          train_fraction=length / len(text))  # fmt: skip
    return dataset.batch_count("train")


@pytest.mark.parametrize(
    ("length", "context", "expected"),
    [(5, 4, 1), (12, 4, 4), (9, 4, 3), (3, 2, 1), (9, 2, 7), (9, 3, 6), (2, 1, 1), (9, 8, 1)],
)
def test_B37_the_last_window_that_fits_is_there(length: int, context: int, expected: int) -> None:
    """Starts i with i + context + 1 <= n, at stride 2 for a context of 4 and 1 up to 3."""
    assert windows(length, context) == expected
    by_listing = range(0, length - context, max(1, context // 2))
    assert len(by_listing) == expected


def test_B37_the_last_window_ends_with_the_text() -> None:
    text = letters(9) + "z" * 200
    dataset = CharDataset(text, context_size=4, batch_size=1, train_fraction=9 / len(text))
    tokens, targets = dataset.batch("train", dataset.batch_count("train") - 1)
    assert dataset.tokenizer.decode(tokens[0]) == text[4:8]
    assert dataset.tokenizer.decode(targets[0]) == text[5:9]
    with pytest.raises(ValueError, match="train split has 4 characters"):
        windows(4, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"test split has 2 characters of the 20 .* at least 9 are needed"),
        ({"text": ""}, "train split has 0 characters .* at least 9"),
        ({"text": "a"}, "train split has 0 characters .* at least 9"),
        ({"train_fraction": 1.0}, "train_fraction is 1.0, a number between 0 and 1"),
        ({"train_fraction": 0.0}, "train_fraction is 0.0, a number between 0 and 1"),
        ({"train_fraction": 0.3}, "train split has 6 characters"),
        ({"text": letters(130), "context_size": 2, "batch_size": 64}, "test split has 11 windows"),
    ],
)
def test_B38_a_text_without_a_batch_is_named_at_construction(
    change: dict[str, Any], message: str
) -> None:
    arguments = {"text": letters(20), "context_size": 8, "batch_size": 1} | change
    with pytest.raises(ValueError, match=message):
        CharDataset(**arguments)


@pytest.mark.parametrize("content", [b"", b"a", letters(20).encode(), letters(80).encode()])
def test_B38_the_command_says_so_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(content)
    out = str(tmp_path / "run")
    code = main(["train", "--data", str(path), "--out", out, "--context-size", "8"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and "own.txt" in lines[0]
    assert "needed" in lines[0] and not Path(out).exists()


@pytest.mark.parametrize(
    ("prompt", "named"),
    [("dab", "'d'"), ("a\U0001f600", "'\U0001f600'"), ("A", "'A'"), ("a\ud800", r"'\\ud800'"),
     ("b\u0301", "'\u0301'")],
)  # fmt: skip
def test_B39_unknown_characters_are_named_with_the_size(prompt: str, named: str) -> None:
    tokenizer = CharTokenizer.from_text("abc\n")
    with pytest.raises(ValueError, match=f"{named}, only the 4 characters of the vocabulary"):
        tokenizer.encode(prompt)
    for bad in (99, 4, -1):
        with pytest.raises(ValueError, match=rf"ids hold {bad}, 0 to 3 are needed"):
            tokenizer.decode([0, bad])


@pytest.mark.parametrize("backend", BACKENDS)
def test_B39_the_command_fails_in_one_line_and_modes_stay(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(backend, GPTConfig(4, 4, 4, 1))
    config = GPTConfig(4, 4, 4, 1)
    save_checkpoint(tmp_path / "c", model, config=config, vocabulary="\nabc")
    code = main(["generate", "--checkpoint", str(tmp_path / "c"), "--backend", backend,
                 "--prompt", "dab"])  # fmt: skip
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err == (
        "gpt-parity: error: prompt: text holds 'd', only the 4 characters of the vocabulary can "
        "be encoded\n"
    )
    trainer, dataset = trainer_of(backend)
    for mode in (True, False):
        trainer.model.train(mode)
        with pytest.raises(ValueError, match="only the"):
            trainer.generate(dataset, "\u00e9", 3)
        assert {layer.training for layer in layers_of(trainer.model)} == {mode}
        assert tape.is_grad_enabled() and torch.is_grad_enabled()


def run_python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True, encoding="utf-8", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", ["0", "1"])
def test_B40_ids_do_not_depend_on_hashing(seed: str, tmp_path: Path) -> None:
    """In a process of its own, which also trains and saves: 'hello' has the same ids there."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"hello world" * 20)
    program = (
        "import sys; from gpt_parity.cli import main; from gpt_parity.corpus import CharTokenizer\n"
        "code = main(['train', '--data', sys.argv[1], '--out', sys.argv[2], '--max-steps', '1',"
        " '--context-size', '4', '--embedding-size', '4', '--blocks', '1', '--sample-tokens', '1'])"
        "\nprint(code, CharTokenizer.from_text('hello world').encode('hello').tolist())"
    )
    out = run_python("-c", program, str(path), str(tmp_path / "run"), PYTHONHASHSEED=seed)
    assert out.splitlines()[-1] == "0 [3, 2, 4, 4, 5]"
    saved = load_checkpoint(tmp_path / "run")
    assert saved.vocabulary == " dehlorw"
    assert saved.tokenizer.encode("hello").tolist() == [3, 2, 4, 4, 5]
    # Another text of as many characters would give other ids: it is refused.
    other = CharTokenizer.from_text("jello worlb").vocabulary
    assert len(other) == 8
    with pytest.raises(ValueError, match="has another vocabulary"):
        load_checkpoint(tmp_path / "run", vocabulary=other)


def test_B40_a_vocabulary_in_another_order_is_refused() -> None:
    for vocabulary in ("ba", "aab", ["b", "a"]):
        with pytest.raises(ValueError, match="code point order"):
            CharTokenizer(vocabulary)
    assert CharTokenizer.from_text("ab") == CharTokenizer.from_text("bbaab")


@pytest.fixture
def windows_code_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file opened as text without an encoding is read and written as cp1252."""
    plain = builtins.open

    def with_code_page(file: Any, mode: str = "r", buffering: int = -1,
                       encoding: str | None = None, *rest: Any, **options: Any) -> Any:  # fmt: skip
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "cp1252"
        return plain(file, mode, buffering, encoding, *rest, **options)

    monkeypatch.setattr(builtins, "open", with_code_page)
    monkeypatch.setattr(io, "open", with_code_page)


@pytest.mark.usefixtures("windows_code_page")
def test_B41_texts_are_utf_8_under_another_code_page(tmp_path: Path) -> None:
    path = tmp_path / "typographic.txt"
    path.write_bytes(TYPOGRAPHIC.encode())
    assert path.stat().st_size == 17
    text = read_corpus(path).text
    assert (text, len(text), len(set(text))) == (TYPOGRAPHIC, 10, 10)
    with pytest.raises(UnicodeDecodeError, match="0x9d"):  # what the fixture is there for
        path.read_text()
    assert len(path.read_bytes().decode("latin-1")) == 17
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"bad\.txt: byte 0xff at offset 2 is not UTF-8"):
        read_corpus(tmp_path / "bad.txt")


@pytest.mark.usefixtures("windows_code_page")
def test_B41_a_run_and_its_sample_are_utf_8_under_another_code_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = tmp_path / "text.txt", tmp_path / "run"
    path.write_bytes((TYPOGRAPHIC * 30).encode())
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding="ascii"))
    assert main(["train", "--data", str(path), "--out", str(run), "--max-steps", "1",
                 "--context-size", "4", "--embedding-size", "4", "--blocks", "1"]) == 0  # fmt: skip
    assert set((run / "sample.txt").read_bytes().decode("utf-8")) <= set(TYPOGRAPHIC)
    stream.seek(0)
    stream.truncate()
    assert main(["generate", "--checkpoint", str(run), "--prompt", TYPOGRAPHIC,
                 "--tokens", "40", "--temperature", "inf"]) == 0  # fmt: skip
    assert stream.getvalue().decode("utf-8").startswith(TYPOGRAPHIC)
    assert sys.stdout.encoding == "ascii"
