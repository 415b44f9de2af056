"""Tokens and settings in the files beside a tokenizer's: as the library has them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.bpe import BytePairTokenizer
from parity_tests.byte_pairs import needs_tokenizers, trained
from parity_tests.interop.transformers_gpt2 import library, needs_transformers

pytestmark = [needs_tokenizers, pytest.mark.reference("another library")]

END = "<|endoftext|>"
TEXTS = ("the cat", "a <pad> b", "a<pad>b MARK", f"a{END}b <pad>", "aMARKb", "Früh \u4f60 <pad>")


def folder_of(path: Path, **files: Any) -> Path:
    """vocab.json, merges.txt, what AutoTokenizer needs beside them, and FILE.json of each."""
    model = json.loads(trained())["model"]
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    contents = {
        "vocab": model["vocab"],
        "config": {"model_type": "gpt2", "vocab_size": 310, **ends},
    }
    for name, content in {**contents, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text)
    return path


def added(content: str, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


DECODER = {"0": added(END, special=True, normalized=True), "300": added("<pad>", special=True),
           "301": added("MARK", single_word=True)}  # fmt: skip


@needs_transformers
@pytest.mark.parametrize(
    "files",
    (
        {"tokenizer_config": {"add_prefix_space": False, "model_max_length": 10**30}},
        {"added_tokens": {"<pad>": 300, "MARK": 301}},
        {"added_tokens": {"MARK": 300, "<pad>": 301}, "special_tokens_map": {"pad_token": "<pad>"}},
        {"tokenizer_config": {"added_tokens_decoder": DECODER, "tokenizer_class": "GPT2Tokenizer"}},
        {"tokenizer_config": {"added_tokens_decoder": DECODER, "pad_token": "<pad>",
                              "unk_token": {"__type": "AddedToken", **added(END)},
                              "add_bos_token": False},
         "added_tokens": {"<pad>": 300, "MARK": 301}},
        {"special_tokens_map": {"bos_token": END, "pad_token": END}},
    ),
    ids=("settings", "added", "special", "decoder", "both", "end"),
)  # fmt: skip
def test_ids_are_those_of_the_library(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, **files)
    mine = BytePairTokenizer.from_folder(folder)
    theirs = library().AutoTokenizer.from_pretrained(folder)
    assert mine is not None and mine.vocab_size == len(theirs)
    for text in TEXTS:
        ids = mine.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert mine.decode(ids) == text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    (
        ("tokenizer_config", {"add_prefix_space": True}, "has add_prefix_space, which puts a"),
        ("tokenizer_config", {"tokenizer_class": "CodeGenTokenizer"}, "tokenizer_class is 'CodeG"),
        ("tokenizer_config", {"pad_token": "<pad>"}, "pad_token is '<pad>', plain <|endoftext|>"),
        ("tokenizer_config", {"eos_token": "a"}, "eos_token is 'a', plain <|endoftext|> is needed"),
        ("tokenizer_config", {"unk_token": None}, "unk_token is None, plain <|endoftext|> is"),
        ("tokenizer_config", {"additional_special_tokens": ["x"]}, "tokens is 'x', plain"),
        ("tokenizer_config", {"added_tokens_decoder": {"300": "x"}}, "added_tokens_decoder is"),
        ("tokenizer_config", {"added_tokens_decoder": {"-1": added("x")}}, "added_tokens_decoder"),
        ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder is []"),
        ("tokenizer_config", {"added_tokens_decoder": {"300": added("x", lstrip=True)}},
         "the added token 'x' with lstrip"),
        ("tokenizer_config", {"added_tokens_decoder": {"302": added("xy")}}, "301 ids without 300"),
        ("tokenizer_config", "{", "is no JSON"),
        ("tokenizer_config", "[]", "is [], an object is needed"),
        ("special_tokens_map", {"pad_token": "<pad>"}, "pad_token is '<pad>'"),
        ("special_tokens_map", {"pad_token": added(END, lstrip=True)}, "pad_token is {'content'"),
        ("special_tokens_map", {"cls_token": 3}, "cls_token is 3"),
        ("added_tokens", {"xy": 305}, "301 ids without 300, all from 0"),
        ("added_tokens", {"x": 5}, "'x' with the ids 88 and 5"),
        ("added_tokens", {"x": "300"}, "the added token"),
        ("added_tokens", {"\u00fc": 300}, "which its decoder takes for bytes of another text"),
    ),
)  # fmt: skip
def test_what_is_not_done_as_the_library_does_it_is_refused_by_file(
    tmp_path: Path, file: str, content: Any, message: str
) -> None:
    assert BytePairTokenizer.from_folder(folder_of(tmp_path)) is not None
    with pytest.raises(ValueError) as caught:
        BytePairTokenizer.from_folder(folder_of(tmp_path, **{file: content}))
    text = str(caught.value)
    assert message in text and f"{file}.json: " in text and "\n" not in text, text


def test_two_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": {"300": added("<pad>")}}
    folder_of(tmp_path, tokenizer_config=settings, added_tokens={"MARK": 300})
    with pytest.raises(ValueError, match=r"added_tokens\.json: has 'MARK' with id 300, the id in "):
        BytePairTokenizer.from_folder(tmp_path)


def test_a_space_before_the_text_is_refused_beside_a_whole_tokenizer_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained())
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: has add_prefix_space"):
        BytePairTokenizer.from_folder(tmp_path)
