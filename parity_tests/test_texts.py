"""Odd texts through the commands: what is trained on, what is refused, what comes back."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.backends import build_model
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.corpus import CharDataset, CharTokenizer, read_corpus
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import set_weights
from numpy_impl import AdamWOptimizer, GPTLoss

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own()]

SMALL = ["--context-size", "4", "--embedding-size", "4", "--blocks", "1", "--max-steps", "2"]
MARK = b"\xef\xbb\xbf"
COMBINING = "e\u0301"  # two characters that look like the one below
COMPOSED = "\u00e9"


def train(data: bytes, *flags: str) -> int:
    Path("text.txt").write_bytes(data)
    return main(["train", "--data", "text.txt", "--out", "run", *SMALL, *flags])


def generated(capsys: pytest.CaptureFixture[str], prompt: str, *flags: str) -> str:
    capsys.readouterr()
    code = main(["generate", "--checkpoint", "run", "--prompt", prompt, "--tokens", "30", *flags])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert captured.out.startswith(prompt) and captured.out.endswith("\n")
    return captured.out[:-1]


def error_of(capsys: pytest.CaptureFixture[str], code: int) -> str:
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    lines = captured.err.split("\n")
    assert len(lines) == 2 and lines[1] == "" and len(lines[0].splitlines()) == 1
    return lines[0].removeprefix("gpt-parity: error: ")


# --- texts that are kept as they are --------------------------------------------------------------

KEPT = {
    "CRLF": ("ab\r\ncd\r\n" * 60, ""),
    "CR alone": ("ab\rcd\r" * 60, ""),
    "CR and LF apart": ("a\rb\nc\r\n\n\r" * 60, ""),
    "NUL": ("ab\0c\0" * 60, ""),
    "control characters": ("ab\x1a\x04\x1b[0m\x7f\x85" * 60, ""),
    "one mark at the start": ("\ufeff" + "abc" * 60, "\ufeff"),
    "two marks at the start": ("\ufeff\ufeff" + "abc" * 60, "\ufeff"),
    "a mark in the middle": ("abc\ufeff" * 60, ""),
    "line separators": ("ab\u2028c\u2029d\x0b\x0c" * 60, ""),
    "combining characters": (f"{COMBINING}{COMPOSED}x" * 60, ""),
    "beyond the first plane": ("\U0001f600a\U0010ffff\ue000" * 60, ""),
    "noncharacters": ("\ufffe\uffffa" * 60, ""),
    "spaces": (" \t\u00a0\u200b\u3000" * 60, ""),
    "one distinct character": ("a" * 200, ""),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", KEPT)
def test_a_text_is_kept_through_training_and_generation(
    case: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, dropped = KEPT[case]
    data, text = content.encode(), content.removeprefix(dropped)
    assert train(data, "--sample-tokens", "40", "--backend", backend) == 0
    # No line of the output has been torn apart by a character of the text.
    assert f"text.txt: {len(text)} characters" in capsys.readouterr().out.split("\n")[0]
    saved = load_checkpoint(Path("run"))
    assert saved.vocabulary == "".join(sorted(set(text)))
    described = json.loads(Path("run/config.json").read_bytes())
    assert described["corpus"]["sha256"] == hashlib.sha256(data).hexdigest()
    for line in Path("run/metrics.jsonl").read_bytes().decode().split("\n")[:-1]:
        json.loads(line)
    sample = Path("run/sample.txt").read_bytes().decode()
    assert len(sample) == 41 and set(sample) <= set(text)

    prompt = text[:7]
    flags = ("--temperature", "inf", "--seed", "3", "--backend", backend)
    found = generated(capsys, prompt, *flags)
    assert len(found) == 7 + 30 and set(found) <= set(text)
    # Thirty even draws miss one of n characters with a chance of (1 - 1/n)^30; these seeds do not.
    assert set(found[7:]) == set(text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_line_separator_is_generated_after_a_round_trip(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output bias alone, which prefers the separator: greedy text is nothing else."""
    config = GPTConfig(2, 4, 4, 1)
    weights = {name: np.zeros(shape) for name, shape in config.parameter_shapes().items()}
    weights["output.output.bias"][1] = 1.0
    model = build_model("numpy", config, dtype="float64")
    set_weights(model, weights)
    save_checkpoint(Path("run"), model, config=config, vocabulary="a\u2028")
    found = generated(capsys, "a\u2028a", "--temperature", "0", "--backend", backend)
    assert found == "a\u2028a" + "\u2028" * 30


def test_characters_that_look_alike_are_not_exchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(f"{COMBINING}x".encode() * 60) == 0
    assert load_checkpoint(Path("run")).vocabulary == "ex\u0301"
    capsys.readouterr()
    code = main(["generate", "--checkpoint", "run", "--prompt", COMPOSED])
    assert error_of(capsys, code).startswith(f"prompt: text holds '{COMPOSED}', only the 3")
    tokenizer = CharTokenizer.from_text(COMBINING + COMPOSED)
    assert tokenizer.encode(COMBINING + COMPOSED).tolist() == [0, 2, 1]


# --- bytes that are no text -----------------------------------------------------------------------

REFUSED = {
    "UTF-16 little endian": ("ab\n".encode("utf-16"), "byte 0xff at offset 0 is not UTF-8"),
    "UTF-16 big endian": (b"\xfe\xff\x00a", "byte 0xfe at offset 0 is not UTF-8"),
    "UTF-16 without a mark": ("aü".encode("utf-16-le"), "byte 0xfc at offset 2 is not UTF-8"),
    "UTF-32": ("ab".encode("utf-32"), "byte 0xff at offset 0 is not UTF-8"),
    "Latin-1": ("abü".encode("latin-1") + b"x" * 99, "byte 0xfc at offset 2 is not UTF-8"),
    "cut in the last character": (
        ("ab" * 60 + "ü").encode()[:-1], "byte 0xc3 at offset 120 is not UTF-8",
    ),
    "a lone surrogate": (b"a\xed\xa0\x80b" * 30, "byte 0xed at offset 1 is not UTF-8"),
    "a pair of surrogates": (b"\xed\xa0\xbd\xed\xb8\x80" * 30, "byte 0xed at offset 0 is not"),
    "overlong": (b"a\xc0\x80" * 30, "byte 0xc0 at offset 1 is not UTF-8"),
    "past the last plane": (b"\xf4\x90\x80\x80" * 30, "byte 0xf4 at offset 0 is not UTF-8"),
    "empty": (b"", "holds no text, at least one character is needed"),
    "a mark alone": (MARK, "holds no text, at least one character is needed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bytes_that_are_no_text_are_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, message = REFUSED[case]
    found = error_of(capsys, train(data))
    assert found.startswith(f"text.txt: {message}"), found
    assert not Path("run").exists()


def test_utf_16_of_ascii_without_a_mark_is_text_with_nul(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its bytes are UTF-8 all the same, and NUL is a character: nothing is guessed."""
    assert train(("ab" * 40).encode("utf-16-le")) == 0
    assert load_checkpoint(Path("run")).vocabulary == "\0ab"
    assert capsys.readouterr().out.startswith("text.txt: 160 characters, vocabulary 3,")


@pytest.mark.parametrize(
    ("length", "flags", "message"),
    [
        (1, (), "train split has 0 characters of the 1 of the text, at least 5 are needed"),
        (5, (), "train split has 4 characters of the 5 of the text, at least 5 are needed"),
        (40, (), "test split has 4 characters of the 40 of the text, at least 5 are needed"),
        (60, (), "test split has 1 windows of 4 characters, at least batch_size = 4 are needed"),
        (400, ("--batch-size", "30"), "test split has 18 windows of 4 characters, at least batch"),
    ],
)
def test_a_text_too_short_for_either_part_is_one_line(
    length: int, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = error_of(capsys, train(b"abcdefghij"[:10] * 40 if length == 400 else b"x" * length,
                                   *flags))  # fmt: skip
    assert found.startswith(f"text.txt: {message}"), found
    assert not Path("run").exists()


def test_the_shortest_text_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """A test part of 5 characters holds one window of 4 and its target; 45 are left to train on."""
    assert train(b"abcde" * 10, "--batch-size", "1") == 0
    assert capsys.readouterr().out.rstrip().endswith("over 1 batches")


# --- sizes ----------------------------------------------------------------------------------------


def test_one_line_of_a_million_characters(capsys: pytest.CaptureFixture[str]) -> None:
    data = b"abcdefgh" * 125_000
    flags = ["--context-size", "64", "--embedding-size", "4", "--blocks", "1", "--max-steps", "2",
             "--batch-size", "256"]  # fmt: skip
    Path("text.txt").write_bytes(data)
    assert main(["train", "--data", "text.txt", "--out", "run", *flags]) == 0
    assert capsys.readouterr().out.startswith("text.txt: 1,000,000 characters, vocabulary 8,")
    dataset = CharDataset(read_corpus(Path("text.txt")).text, context_size=64, batch_size=256)
    assert dataset.batch_count("train") == ((900_000 - 65) // 32 + 1) // 256


def test_seventy_thousand_distinct_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """A step on them and the way through a checkpoint; the loss of a test part would take long."""
    characters = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    Path("text.txt").write_bytes((characters * 2).encode())
    text = read_corpus(Path("text.txt")).text
    dataset = CharDataset(text, context_size=4, batch_size=4)
    config = GPTConfig(dataset.vocab_size, 4, 2, 1)
    assert dataset.vocab_size == 70_000
    model = build_model("numpy", config, seed=1)
    trainer = GPTTrainer(model, GPTLoss(), AdamWOptimizer(model.parameters()))
    loss = trainer.train_step(*dataset.batch("train", 0)).loss
    assert abs(loss - np.log(70_000)) < 0.1  # weights near 0 leave an even distribution
    vocabulary = dataset.tokenizer.vocabulary
    save_checkpoint(Path("run"), model, config=config, vocabulary=vocabulary)
    assert load_checkpoint(Path("run")).vocabulary == characters
    found = generated(capsys, characters[-3:])
    assert len(found) == 3 + 30 and set(found) <= set(characters)
    code = main(["generate", "--checkpoint", "run", "--prompt", "a"])
    assert "only the 70000 characters of the vocabulary" in error_of(capsys, code)


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "named"),
    [("a\ud800", r"'\ud800'"), ("\udfff", r"'\udfff'"), ("a\u2028", r"'\u2028'"), ("\0", r"'\x00'"),
     ("a\r", r"'\r'"), ("\ufeffa", r"'\ufeff'"), ("a\n\nb", r"'\n'")],
    ids=ascii,
)  # fmt: skip
def test_a_prompt_of_unknown_characters_is_one_line(
    prompt: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(b"ab" * 100) == 0
    capsys.readouterr()
    found = error_of(capsys, main(["generate", "--checkpoint", "run", "--prompt", prompt]))
    assert found.startswith(f"prompt: text holds {named}, only the 2 characters"), found


def test_lone_surrogates_are_characters_of_a_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No file holds them, but a vocabulary may; what the output cannot encode is escaped."""
    vocabulary = "ab\ud800"
    config = GPTConfig(3, 4, 4, 1)
    save_checkpoint(Path("run"), build_model("numpy", config), config=config, vocabulary=vocabulary)
    assert load_checkpoint(Path("run")).vocabulary == vocabulary
    tokenizer = CharTokenizer.from_text("\ud800ba")
    assert tokenizer.decode(tokenizer.encode("a\ud800")) == "a\ud800"
    assert sys.stdout.errors != "surrogatepass"
    code = main(["generate", "--checkpoint", "run", "--prompt", "ab", "--tokens", "30",
                 "--temperature", "inf"])  # fmt: skip
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "") and r"\ud800" in captured.out
