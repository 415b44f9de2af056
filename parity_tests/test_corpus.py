"""The tokenizer against plain Python, and texts read from files."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpt_parity import corpus
from gpt_parity.corpus import CharDataset, CharTokenizer, read_corpus
from parity_tests.python_process import run_python

pytestmark = pytest.mark.reference("by hand")

# Ten characters, seventeen bytes; in a Windows code page the quotes do not decode, in Latin-1
# it would be seventeen characters.
TYPOGRAPHIC = "na\u00efve\u2014\u201cok\u201d"

any_text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=60)  # surrogates too


# Tokenizer


@pytest.mark.reference("exact property")
@given(any_text)
@example("a\ud800b\udfff")
def test_encode_and_decode_agree_with_plain_look_ups(text: str) -> None:
    vocabulary = sorted(set(text))
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert tokenizer.vocabulary == "".join(vocabulary)
    assert tokenizer.vocab_size == len(vocabulary)
    assert ids.dtype == np.int64 and ids.flags.writeable
    assert ids.tolist() == [vocabulary.index(character) for character in text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@given(any_text, any_text)
@example("a", "bcdefghijklm")
def test_encode_refuses_exactly_the_texts_with_unknown_characters(known: str, text: str) -> None:
    tokenizer = CharTokenizer.from_text(known)
    unknown = sorted(set(text) - set(known))
    if not unknown:
        assert tokenizer.encode(text).tolist() == [sorted(set(known)).index(c) for c in text]
        return
    with pytest.raises(ValueError) as caught:
        tokenizer.encode(text)
    more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
    named = ", ".join(map(repr, unknown[:10])) + more
    message = str(caught.value)
    assert message.startswith(f"text holds {named}, only the {tokenizer.vocab_size} characters")
    assert len(message.splitlines()) == 1


@pytest.mark.reference("exact property")
@given(any_text, any_text)
def test_what_is_encoded_comes_back_or_is_refused(known: str, text: str) -> None:
    tokenizer = CharTokenizer.from_text(known)
    for mixed in (text, known + text, text + known):
        try:
            ids = tokenizer.encode(mixed)
        except ValueError:
            assert not set(mixed) <= set(tokenizer.vocabulary)
        else:
            assert tokenizer.decode(ids) == mixed


@pytest.mark.parametrize(
    ("prompt", "named"), [("dab", "'d'"), ("a\U0001f600", "'\U0001f600'"), ("A", "'A'")]
)
def test_unknown_prompt_characters_are_named(prompt: str, named: str) -> None:
    tokenizer = CharTokenizer.from_text("abc\n")
    with pytest.raises(ValueError, match=f"^text holds {named}, only the 4 characters"):
        tokenizer.encode(prompt)


@pytest.mark.parametrize("bad", [99, -1, 4, 2**63, 2**70, -(2**70)])
def test_ids_out_of_range_are_named(bad: int) -> None:
    tokenizer = CharTokenizer("\nabc")
    with pytest.raises(ValueError, match=f"^ids hold {bad}, 0 to 3 are needed"):
        tokenizer.decode([0, bad])


def test_decode_takes_any_integers_and_nothing_else() -> None:
    tokenizer = CharTokenizer("\nabc")
    assert tokenizer.decode(np.array([3, 0], np.uint8)) == "c\n"
    assert tokenizer.decode([]) == ""
    for ids in ([0.0, 1.0], [True], ["a"], [None]):
        with pytest.raises(TypeError, match=r"^ids have dtype .* integers are needed$"):
            tokenizer.decode(ids)
    for ids in (2, [[1, 2]]):
        with pytest.raises(ValueError, match=r"^ids have shape"):
            tokenizer.decode(ids)


def test_seventy_thousand_distinct_characters() -> None:
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    tokenizer = CharTokenizer.from_text(text[::-1])
    assert tokenizer.vocab_size == 70_000
    assert np.array_equal(tokenizer.encode(text), np.arange(70_000))
    assert tokenizer.decode(range(69_998, 70_000)) == text[-2:]


def test_empty_text_has_no_ids() -> None:
    assert CharTokenizer("ab").encode("").shape == (0,)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("seed", ["0", "1"])
def test_ids_do_not_depend_on_hashing(seed: str) -> None:
    code = (
        "from gpt_parity.corpus import CharTokenizer\n"
        "tokenizer = CharTokenizer.from_text('hello world')\n"
        "print(repr(tokenizer.vocabulary), tokenizer.encode('hello').tolist())"
    )
    done = run_python("-c", code, PYTHONHASHSEED=seed)
    assert done.stdout == "' dehlorw' [3, 2, 4, 4, 5]\n", done.stderr


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ("", "^vocabulary is empty"),
        ([], "^vocabulary is empty"),
        ("ba", r"^vocabulary\[1\] is 'a' after 'b', distinct characters in code point order"),
        ("abb", r"^vocabulary\[2\] is 'b' after 'b'"),
        (["a", "bc"], r"^vocabulary\[1\] is 'bc', one character is needed$"),
        (["", "a"], r"^vocabulary\[0\] is '', one character is needed$"),
    ],
)
def test_refuses_a_vocabulary_out_of_order(vocabulary: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CharTokenizer(vocabulary)


def test_refuses_what_is_no_text() -> None:
    for vocabulary in (b"ab", 3, None, {"a", "b"}, ["a", 1]):
        with pytest.raises(TypeError, match=r"^vocabulary is a "):
            CharTokenizer(vocabulary)
    with pytest.raises(TypeError, match=r"^text is a bytes, a str is needed$"):
        CharTokenizer("ab").encode(b"ab")
    with pytest.raises(ValueError, match=r"^vocabulary is empty"):
        CharTokenizer.from_text("")


def test_tokenizers_are_equal_when_their_vocabularies_are() -> None:
    assert CharTokenizer(["a", "b"]) == CharTokenizer("ab")
    assert hash(CharTokenizer(("a", "b"))) == hash(CharTokenizer("ab"))
    assert CharTokenizer("ab") != CharTokenizer("ac")
    assert CharTokenizer("ab") != "ab"
    with pytest.raises(AttributeError):
        CharTokenizer("ab").vocabulary = "xyz"


# Reading


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\rc\n", "a\r\nb\rc\n"),
        (b"\xef\xbb\xbfab", "ab"),
        (b"\xef\xbb\xbf\xef\xbb\xbfab", "\ufeffab"),
        (b"a\xef\xbb\xbfb", "a\ufeffb"),
        (b"a\x00b\x1a", "a\x00b\x1a"),
        ("\U0001f600".encode(), "\U0001f600"),
        (TYPOGRAPHIC.encode(), TYPOGRAPHIC),
    ],
)
def test_the_bytes_of_the_file_are_the_text(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "some text.txt"
    path.write_bytes(data)
    found = read_corpus(path)
    assert (found.text, found.name, found.is_fallback) == (text, "some text.txt", False)
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert text not in repr(found)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("marks", range(4))
@pytest.mark.parametrize("text", ["a", "\r\n\x00", "b\ufeff", "\ufffe\U0010ffff", TYPOGRAPHIC])
def test_text_is_the_bytes_without_one_leading_mark(tmp_path: Path, text: str, marks: int) -> None:
    data = (marks * "\ufeff" + text).encode()
    path = tmp_path / "marks.txt"
    path.write_bytes(data)
    assert read_corpus(path).text.encode() == data.removeprefix(b"\xef\xbb\xbf")


def test_reading_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "typographic.txt"
    path.write_bytes(TYPOGRAPHIC.encode())
    assert path.stat().st_size == 17
    code = (
        "import sys, pathlib\n"
        "from gpt_parity.corpus import read_corpus\n"
        "text = read_corpus(pathlib.Path(sys.argv[1])).text\n"
        "print(ascii(text), len(text), len(set(text)), sys.stdout.encoding)"
    )
    # Any file opened with the locale's encoding, whichever it is, ends in an EncodingWarning.
    options = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = run_python(*options, "-c", code, str(path), **locale)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{TYPOGRAPHIC!a} 10 10 ")
    if sys.platform == "linux":
        assert "utf" not in done.stdout.lower()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ab\xff", "byte 0xff at offset 2 is not UTF-8"),
        (b"\xef\xbb\xbfa\x80", "byte 0x80 at offset 4 is not UTF-8"),
        (b"ab\xe2\x80", "byte 0xe2 at offset 2 is not UTF-8"),
        (b"a\xed\xa0\x80", "byte 0xed at offset 1 is not UTF-8"),
        (b"", "holds no text"),
        (b"\xef\xbb\xbf", "holds no text"),
    ],
)
def test_refuses_bytes_that_are_no_text(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["absent.txt", "", "nul\0.txt"])
def test_refuses_a_path_that_is_no_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ValueError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}: cannot be read, ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("places", ["cwd checkout", "cwd", "checkout"])
def test_default_text_is_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: str
) -> None:
    for place in ("cwd", "checkout"):
        (tmp_path / place / "data").mkdir(parents=True)
        if place in places.split():
            text = f"text below {place}"
            (tmp_path / place / "data" / "tinyshakespeare.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(corpus, "CHECKOUT", tmp_path / "checkout")
    found = read_corpus(None)
    assert found.text == f"text below {places.split()[0]}"
    assert (found.name, found.is_fallback) == ("tinyshakespeare.txt", False)


def test_default_text_without_the_data_set_comes_with_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydoc_data.topics import topics

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "CHECKOUT", tmp_path)
    found = read_corpus(None)
    assert found.is_fallback
    assert found.name == f"pydoc topics of Python {platform.python_version().rstrip('+')}"
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    rest = found.text + "\n"
    for key in sorted(topics):
        assert rest.startswith(topics[key] + "\n"), key
        rest = rest[len(topics[key]) + 1 :]
    assert rest == ""
    # Long enough for the published sizes.
    assert CharDataset(found.text, context_size=32, batch_size=4).batch_count("test") > 100

    monkeypatch.setattr("pydoc_data.topics.topics", {"b": "second", "a": "first"})
    assert read_corpus(None).text == "first\nsecond"
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"^no text: .* a text file of your own is needed"):
        read_corpus(None)
