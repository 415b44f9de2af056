"""Byte-pair text: ids and texts as two other libraries have them, and no half characters."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.backends import MissingTokenizersError
from gpt_parity.bpe import BytePairTokenizer
from parity_tests.byte_pairs import TEXT, changed, needs_tokenizers, trained
from parity_tests.interop.transformers_gpt2 import library, needs_transformers

pytestmark = [needs_tokenizers, pytest.mark.reference("another library")]

UTF8 = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer(trained())


def pair(folder: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt of the same tokenizer."""
    model = json.loads(trained())["model"]
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    files[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


@needs_transformers
def test_ids_and_texts_are_those_of_gpt2_tokenizer_fast(tmp_path: Path) -> None:
    vocab, merges = pair(tmp_path)
    theirs = library().GPT2TokenizerFast(vocab=str(vocab), merges=str(merges))
    theirs.save_pretrained(tmp_path / "saved")
    saved = BytePairTokenizer.from_folder(tmp_path / "saved")
    for mine in (tokenizer(), BytePairTokenizer.from_vocabulary(vocab, merges), saved):
        assert mine.vocab_size == len(theirs) == 300
        for text in (TEXT, "x", " x", "\n\n", "a<|endoftext|>b", "zürich \U0001f600", "cats'  "):
            ids = mine.encode(text)
            assert ids.dtype == np.int64 and ids.tolist() == theirs.encode(text)
            assert mine.decode(ids) == text == theirs.decode(ids)


def test_ids_and_texts_are_those_of_tiktoken() -> None:
    tiktoken = pytest.importorskip(
        "tiktoken", reason='tiktoken is not installed: pip install -e ".[test]"'
    )
    content = json.loads(trained())["model"]
    from tiktoken_ext.openai_public import r50k_pat_str

    mine = tokenizer()
    special = content["vocab"].pop("<|endoftext|>")
    # Ranks go by the order of merges; ids of the trainer are in that order after the bytes.
    ranks = {mine._tokens[i]: i for i in content["vocab"].values()}
    theirs = tiktoken.Encoding(
        "own", pat_str=r50k_pat_str, mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": special},
    )  # fmt: skip

    @given(UTF8 | st.text("the catsüß\n 1'\U0001f600", max_size=40))
    def agree(text: str) -> None:
        ids = mine.encode(text).tolist()
        assert ids == theirs.encode(text, allowed_special="all")
        assert mine.decode(ids) == text

    agree()
    assert len(mine.encode(TEXT)) < len(TEXT), "nothing was merged"


@given(st.lists(st.integers(0, 299), max_size=30))
def test_any_ids_decode_as_the_library_does_with_a_mark_for_what_is_no_utf8(ids: list[int]) -> None:
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(trained())
    mine = tokenizer()
    assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert "".join(mine.decode_stream(ids)) == mine.decode(np.array(ids, np.int64))


def test_a_stream_yields_a_character_once_all_of_its_bytes_are_there() -> None:
    mine = BytePairTokenizer(trained(257))  # bytes alone
    text = "aü\u4f60\U0001f600b"
    ids = mine.encode(text)
    assert len(ids) == len(text.encode()) == 11
    pieces = []
    seen = 0

    def watched():
        nonlocal seen
        for i in ids.tolist():
            seen += 1
            yield i

    for piece in mine.decode_stream(watched()):
        pieces.append((seen, piece))
    assert pieces == [(1, "a"), (3, "ü"), (6, "\u4f60"), (10, "\U0001f600"), (11, "b")]


def test_a_stream_that_ends_inside_a_character_ends_with_a_mark() -> None:
    mine = BytePairTokenizer(trained(257))
    ids = mine.encode("a\u4f60")[:3]
    assert list(mine.decode_stream(ids.tolist())) == ["a", "\ufffd"]
    assert mine.decode(ids) == "a\ufffd"


@pytest.mark.parametrize("bad", (300, -1, 10**30))
def test_an_id_outside_of_the_tokenizer_is_refused(bad: int) -> None:
    for decode in (tokenizer().decode, lambda ids: list(tokenizer().decode_stream(ids))):
        with pytest.raises(ValueError, match=rf"ids hold {bad}, 0 to 299 are needed"):
            decode([0, bad])


def test_ids_that_are_no_integers_and_other_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match="integers are needed"):
        tokenizer().decode([0.5])
    with pytest.raises(TypeError, match="integers are needed"):
        tokenizer().decode([True])
    with pytest.raises(ValueError, match="shape"):
        tokenizer().decode([[1, 2]])
    with pytest.raises(TypeError, match="str is needed"):
        tokenizer().encode(b"x")  # type: ignore[arg-type]


def test_a_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"text holds '\\udc80', characters of UTF-8 are needed"):
        tokenizer().encode("a\udc80")


def test_a_text_with_a_byte_outside_of_the_vocabulary_is_refused() -> None:
    """The library itself leaves such bytes out without a word."""
    mine = BytePairTokenizer(
        changed(model_vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, model_merges=[], added_tokens=[])
    )
    assert mine.encode("ab").tolist() == [0, 1]
    with pytest.raises(ValueError, match="from byte 1 on"):
        mine.encode("acb")


def test_truncation_and_padding_of_the_file_do_not_count() -> None:
    mine = BytePairTokenizer(
        changed(
            truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                        "stride": 0},
            padding={"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
        )
    )  # fmt: skip
    assert mine.encode(TEXT).tolist() == tokenizer().encode(TEXT).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ("", "tokenizer is no JSON"),
        ("[]", r"tokenizer is \[\], an object is needed"),
        (trained()[:-200] if importlib.util.find_spec("tokenizers") else "", "is no JSON"),
        ('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
         "tokenizer has the model 'WordLevel', BPE is needed"),
    ),
    ids=("empty", "object", "cut", "words"),
)  # fmt: skip
def test_what_is_no_byte_pair_tokenizer_is_refused(content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        BytePairTokenizer(content)
    assert "\n" not in str(caught.value)


def of_three(**parts: object) -> str:
    """A tokenizer of three tokens and no merge."""
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    return changed(**{"model_vocab": vocabulary, "model_merges": [], "added_tokens": [], **parts})


@pytest.mark.parametrize(
    ("parts", "message"),
    (
        ({"model_continuing_subword_prefix": "\0"}, "continuing_subword_prefix"),
        ({"model_end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>', null is needed"),
        ({"model_dropout": 0.1}, "dropout 0.1, null is needed"),
        ({"model_byte_fallback": True}, "byte_fallback True, false is needed"),
        ({"normalizer": {"type": "Lowercase"}}, "has a normalizer, which changes the text"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "the pre_tokenizer 'Whitespace', ByteLevel"),
        ({"decoder": None}, "the decoder None, ByteLevel"),
        ({"model_vocab": {"a": 0, "b": 1.5}}, "'b' with id 1.5"),
        ({"model_vocab": {"a": 0, "": 1}}, "'' with id 1"),
        ({"model_vocab": [1]}, "no vocab"),
        ({"model_vocab": {}}, "0 ids without 0"),
        ({"model_merges": {}}, "no merges"),
        ({"model_merges": [["a", "c"]]}, r"merge \['a', 'c'\], two tokens that make a third"),
        ({"model_merges": ["b a"]}, r"merge \['b', 'a'\], two tokens"),
        ({"model_merges": [["a", 1]]}, r"merge \['a', 1\], two tokens"),
        ({"added_tokens": [{"id": 5, "content": "x"}]}, "4 ids without 3, all from 0 on"),
        ({"added_tokens": [{"id": 1, "content": "a"}]}, "'a' with the ids 0 and 1"),
        ({"added_tokens": [{"id": 3, "content": ""}]}, "the added token"),
        ({"added_tokens": [7]}, "the added token 7"),
        ({"added_tokens": [{"id": 3, "content": "x", "lstrip": True}]}, "'x' with lstrip"),
        ({"added_tokens": [{"id": 3, "content": "x", "rstrip": True}]}, "'x' with rstrip"),
        ({"added_tokens": [{"id": 3, "content": "\u00fc"}]}, "which its decoder takes for bytes"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "has add_prefix_space"),  # its default
    ),
)  # fmt: skip
def test_a_part_that_is_none_of_a_byte_pair_tokenizer_is_refused(
    parts: dict[str, object], message: str
) -> None:
    """Before the library sees it, which over some of these ends the whole process."""
    assert BytePairTokenizer(of_three(model_merges=["a b"])).encode("ab").tolist() == [2]
    with pytest.raises(ValueError, match=message) as caught:
        BytePairTokenizer(of_three(**parts))
    assert "\n" not in str(caught.value)


def test_an_added_token_is_one_token_and_its_text_stands_for_itself() -> None:
    added = [{"id": 4, "content": "\u4f60 ", "special": True}, {"id": 3, "content": "b<x>"}]
    mine = BytePairTokenizer(of_three(added_tokens=added))
    assert mine.encode("ab<x>\u4f60 b").tolist() == [0, 3, 4, 1]
    assert mine.decode([4, 3]) == "\u4f60 b<x>"


def test_ids_with_a_hole_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ids without 1, all from 0 on are needed"):
        BytePairTokenizer(changed(model_vocab={"a": 0, "b": 2}, model_merges=[], added_tokens=[]))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read, No such file"):
        BytePairTokenizer.from_file(tmp_path / "absent.json")
    vocab, merges = pair(tmp_path)
    merges.unlink()
    with pytest.raises(ValueError, match=r"merges\.txt: cannot be read"):
        BytePairTokenizer.from_folder(tmp_path)
    merges.write_text("no such pair\n")
    with pytest.raises(ValueError, match=r"vocab\.json, merges\.txt: tokenizer has the merge"):
        BytePairTokenizer.from_folder(tmp_path)
    merges.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"merges\.txt: cannot be read, it is not UTF-8"):
        BytePairTokenizer.from_vocabulary(vocab, merges)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json: tokenizer is \[\], an"):
        BytePairTokenizer.from_folder(tmp_path)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    with pytest.raises(ValueError, match="is no regular file"):
        BytePairTokenizer.from_folder(tmp_path / "pipe")


def test_a_folder_without_such_files_has_no_tokenizer(tmp_path: Path) -> None:
    assert BytePairTokenizer.from_folder(tmp_path) is None


def test_without_the_library_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingTokenizersError, match=r"pip install.*\[bpe\]") as caught:
        BytePairTokenizer("{}")
    assert "\n" not in str(caught.value)
