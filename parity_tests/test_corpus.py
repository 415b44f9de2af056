"""Texts, tokenizer and batches against plain Python; the download against local servers."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpt_parity import corpus
from gpt_parity.corpus import CharDataset, CharTokenizer, fetch_tinyshakespeare, read_corpus

pytestmark = pytest.mark.reference("by hand")

ROOT = Path(__file__).resolve().parents[1]
SHAKESPEARE = ROOT / "data" / "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_file(),
    reason="data/tinyshakespeare.txt is absent: run python scripts/fetch_data.py",
)

# Ten characters, seventeen bytes; in a Windows code page the quotes do not decode, in Latin-1
# it would be seventeen characters.
TYPOGRAPHIC = "na\u00efve\u2014\u201cok\u201d"

any_text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=60)  # surrogates too


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


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


# Batches


@given(
    text=st.text("abcde\n", max_size=80),
    context_size=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    train_fraction=st.floats(0.05, 0.95),
    drop_last=st.booleans(),
)
def test_batches_agree_with_a_plain_listing(
    text: str, context_size: int, batch_size: int, train_fraction: float, drop_last: bool
) -> None:
    boundary = int(train_fraction * len(text))
    expected = {}
    for split, part in (("train", text[:boundary]), ("test", text[boundary:])):
        windows = [
            (part[i : i + context_size], part[i + 1 : i + context_size + 1])
            for i in range(0, len(part), max(1, context_size // 2))
            if i + context_size + 1 <= len(part)
        ]
        batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
        expected[split] = [b for b in batches if len(b) == batch_size or not drop_last]

    def build() -> CharDataset:
        return CharDataset(
            text,
            context_size=context_size,
            batch_size=batch_size,
            train_fraction=train_fraction,
            drop_last=drop_last,
        )

    if not (expected["train"] and expected["test"]):
        with pytest.raises(ValueError, match=r"^(train|test) split has "):
            build()
        return
    dataset = build()
    vocabulary = sorted(set(text))
    for split, batches in expected.items():
        assert dataset.batch_count(split) == len(batches)
        found = [
            [
                tuple("".join(vocabulary[i] for i in row) for row in pair)
                for pair in zip(*arrays, strict=True)
            ]
            for arrays in dataset.batches(split)
        ]
        assert found == batches


@pytest.mark.reference("exact property")
@pytest.mark.parametrize(
    ("characters", "context_size", "starts"),
    [
        (9, 2, [0, 1, 2, 3, 4, 5, 6]),
        (5, 4, [0]),
        (9, 4, [0, 2, 4]),
        (12, 4, [0, 2, 4, 6]),
        (13, 4, [0, 2, 4, 6, 8]),
        (3, 1, [0, 1]),
        (7, 5, [0]),
        (8, 5, [0, 2]),
    ],
)
def test_the_last_window_that_fits_is_there(
    characters: int, context_size: int, starts: list[int]
) -> None:
    text = "".join(map(chr, range(ord("A"), ord("A") + 2 * characters)))
    dataset = CharDataset(text, context_size=context_size, batch_size=1, train_fraction=0.5)
    for split, offset in (("train", 0), ("test", characters)):
        pairs = list(dataset.batches(split))
        assert [int(tokens[0, 0]) - offset for tokens, _ in pairs] == starts
        assert int(pairs[-1][1][0, -1]) - offset == starts[-1] + context_size


def test_windows_of_nine_characters_by_hand() -> None:
    dataset = CharDataset("abcdefghi" * 2, context_size=4, batch_size=3, train_fraction=0.5)
    tokens, targets = dataset.batch("test", 0)
    assert tokens.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 7, 8]]


@pytest.mark.reference("exact property")
def test_arrays_are_the_callers_own_and_nothing_changes_between_calls() -> None:
    dataset = CharDataset("hello world " * 20, context_size=6, batch_size=4)
    first = [[array.copy() for array in pair] for pair in dataset.batches("train")]
    for tokens, targets in dataset.batches("train"):
        for array in (tokens, targets):
            assert array.dtype == np.int64 and array.shape == (4, 6)
            assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata
            array[...] = -7
    again = list(dataset.batches("train"))
    assert len(again) == len(first) == dataset.batch_count("train")
    assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))
    assert np.array_equal(dataset.batch("train", 3), first[3])


def test_the_only_batch_of_a_part_may_be_kept_where_it_has_fewer_windows() -> None:
    # 18 and 12 characters, windows of 2 at every place: 16 and 10 of them.
    sizes = {"context_size": 2, "train_fraction": 0.6, "keep_only": True}
    dataset = CharDataset("abc" * 10, batch_size=12, **sizes)
    assert [dataset.batch_count(split) for split in ("train", "test")] == [1, 1]
    assert dataset.batch("train", 0)[0].shape == (12, 2)  # its last four are left out as ever
    tokens, targets = dataset.batch("test", 0)
    assert tokens.tolist() == [list(map("abc".index, "abc"[i:] + "abc"[:i]))[:2]
                               for i in (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)]  # fmt: skip
    assert targets.tolist() == [[(i + 1) % 3 for i in row] for row in tokens.tolist()]


def test_attributes_and_a_tokenizer_of_ones_own() -> None:
    tokenizer = CharTokenizer("abcdefgh")
    dataset = CharDataset("hgfe" * 10, context_size=2, batch_size=1, tokenizer=tokenizer)
    assert dataset.tokenizer is tokenizer
    assert (dataset.context_size, dataset.batch_size, dataset.vocab_size) == (2, 1, 8)
    assert dataset.batch("train", 0)[0].tolist() == [[7, 6]]
    with pytest.raises(ValueError, match=r"^text holds 'h', only the 7 characters"):
        CharDataset("hgfe" * 10, context_size=2, batch_size=1, tokenizer=CharTokenizer("abcdefg"))


def test_the_vocabulary_is_that_of_both_parts() -> None:
    dataset = CharDataset("a" * 18 + "zb", context_size=1, batch_size=1)
    assert dataset.tokenizer.vocabulary == "abz"
    assert dataset.batch("test", 0)[0].tolist() == [[2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "^test split has 2 characters .* at least 9 are needed"),
        ({"text": ""}, "^train split has 0 characters"),
        ({"text": "a"}, "^train split has 0 characters"),
        ({"train_fraction": 0.4}, "^train split has 8 characters of the 20 .* at least 9 are"),
        ({"train_fraction": 0.0}, r"^train_fraction is 0\.0, a number between 0 and 1 is needed$"),
        ({"train_fraction": 1.0}, r"^train_fraction is 1\.0"),
        ({"train_fraction": float("nan")}, "^train_fraction is nan"),
        ({"context_size": 0}, "^context_size is 0, at least 1 is needed$"),
        ({"batch_size": -2}, "^batch_size is -2, at least 1 is needed$"),
        ({"context_size": 10**30}, "^train split has 18 characters"),
        (
            {"text": "ab" * 65, "context_size": 2, "batch_size": 64},
            "^test split has 11 windows of 2 characters, at least batch_size = 64 are needed",
        ),
        (
            {"text": "ab" * 65, "context_size": 2, "batch_size": 64, "train_fraction": 0.1},
            "^train split has 11 windows of 2 characters, at least batch_size = 64 are needed",
        ),
    ],
)
def test_refuses_what_gives_no_batch(change: dict[str, object], message: str) -> None:
    arguments = {"text": "abcdefghij" * 2, "context_size": 8, "batch_size": 1} | change
    with pytest.raises(ValueError, match=message):
        CharDataset(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"context_size": 8.0},
        {"context_size": True},
        {"batch_size": "4"},
        {"batch_size": None},
        {"train_fraction": "0.9"},
        {"text": b"ab" * 100},
    ],
)
def test_refuses_arguments_of_another_type(change: dict[str, object]) -> None:
    arguments = {"text": "ab" * 100, "context_size": 8, "batch_size": 1} | change
    with pytest.raises(TypeError, match=f"^{next(iter(change))} is "):
        CharDataset(**arguments)


def test_refuses_another_split_and_an_index_outside() -> None:
    dataset = CharDataset("ab" * 100, context_size=8, batch_size=2)
    calls: list[Callable[[str], object]] = [
        dataset.batches,
        dataset.batch_count,
        lambda split: dataset.batch(split, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^split is 'valid', 'train' or 'test' is needed$"):
            call("valid")
    count = dataset.batch_count("test")
    dataset.batch("test", count - 1)
    with pytest.raises(ValueError, match=f"^batch index is {count}, less than {count}"):
        dataset.batch("test", count)
    with pytest.raises(ValueError, match=r"^batch index is -1"):
        dataset.batch("test", -1)


@pytest.mark.reference("exact property")
@needs_shakespeare
def test_tinyshakespeare_counts() -> None:
    found = read_corpus(SHAKESPEARE)
    assert found.sha256 == SHAKESPEARE_SHA256
    assert len(found.text) == 1_115_394
    dataset = CharDataset(found.text, context_size=32, batch_size=4)
    assert dataset.vocab_size == 65
    assert (dataset.batch_count("train"), dataset.batch_count("test")) == (15_684, 1_742)
    tokens, targets = dataset.batch("train", 0)
    assert tokens.shape == targets.shape == (4, 32)
    assert dataset.tokenizer.decode(tokens[0]) == "First Citizen:\nBefore we proceed"
    assert dataset.tokenizer.decode(targets[0]) == "irst Citizen:\nBefore we proceed "


# Download


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the data set at a file: address, its hash and size being expected."""
    data = b"All the world's a stage,\nAnd all the men and women merely players;\n" * 3000
    source = tmp_path / "source.txt"
    source.write_bytes(data)
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_URL", source.as_uri())
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_BYTES", len(data))
    return source


@pytest.fixture
def broken_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server on this machine: /cut ends early, anything else is absent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/cut":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"All the world's")

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*arguments: object, **options: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_data", ROOT / "scripts" / "fetch_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pinned_download() -> None:
    address = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
    assert f"{address}input.txt" == corpus.TINYSHAKESPEARE_URL
    assert corpus.TINYSHAKESPEARE_SHA256 == SHAKESPEARE_SHA256
    assert corpus.TINYSHAKESPEARE_BYTES == 1_115_394


def test_downloads_into_a_new_folder_with_a_timeout(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = []
    urlopen = urllib.request.urlopen

    def watched(url: str, *, timeout: float) -> object:
        timeouts.append(timeout)
        return urlopen(url, timeout=timeout)

    monkeypatch.setattr(urllib.request, "urlopen", watched)
    path = fetch_tinyshakespeare(tmp_path / "new" / "data")
    assert path == tmp_path / "new" / "data" / "tinyshakespeare.txt"
    assert path.read_bytes() == served.read_bytes()
    assert list(path.parent.iterdir()) == [path]
    assert len(timeouts) == 1 and 0 < timeouts[0] <= 60


def test_a_right_file_is_kept_without_a_download(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(served.read_bytes())
    forbid_network(monkeypatch)
    assert fetch_tinyshakespeare(tmp_path) == path
    assert capsys.readouterr().err == f"{path} is already there, with the right SHA-256\n"


def test_another_file_under_the_name_is_left_alone(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(b"my own text")
    forbid_network(monkeypatch)
    with pytest.raises(ValueError) as caught:
        fetch_tinyshakespeare(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}: SHA-256 is {hashlib.sha256(b'my own text').hexdigest()}, ")
    assert "left alone" in message and len(message.splitlines()) == 1
    assert path.read_bytes() == b"my own text"


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:999], bytes])
def test_a_wrong_download_leaves_nothing(
    served: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[bytes], bytes],
) -> None:
    data = served.read_bytes()
    wrong = change(data) if change is not bytes else data * 2
    served.write_bytes(wrong)
    with pytest.raises(ValueError, match=r"SHA-256 of the first .* nothing was written$") as caught:
        fetch_tinyshakespeare(tmp_path / "data")
    # A source that does not end is not read to its end.
    assert f"first {min(len(wrong), len(data) + 1)} bytes" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_the_name_appears_only_when_the_bytes_are_on_disk(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace
    folder = tmp_path / "data"

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("fsync", os.fstat(descriptor).st_size))

    def watched_replace(source: Path, target: Path) -> None:
        assert not target.exists()
        assert source.parent == target.parent
        events.append(("replace", source.stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    fetch_tinyshakespeare(folder)
    size = served.stat().st_size
    assert events[:2] == [("fsync", size), ("replace", size)]


def test_a_failed_write_leaves_nothing(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fetch_tinyshakespeare(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("page", ["absent", "closed"])
def test_without_a_network_the_error_says_what_to_do(
    broken_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    # Port 9 of this machine refuses connections.
    url = f"{broken_server}/absent" if page == "absent" else "http://127.0.0.1:9/"
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_URL", url)
    with pytest.raises(ConnectionError) as caught:
        fetch_tinyshakespeare(tmp_path)
    message = str(caught.value)
    path = tmp_path / "tinyshakespeare.txt"
    for part in (url, f"put the file at {path}", SHAKESPEARE_SHA256, "--data", "built-in text"):
        assert part in message
    assert len(message.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_connection_cut_short_leaves_nothing(
    broken_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_URL", f"{broken_server}/cut")
    with pytest.raises((ConnectionError, ValueError)):
        fetch_tinyshakespeare(tmp_path)
    assert list(tmp_path.iterdir()) == []
    gc.collect()  # an unclosed connection warns here


def test_script_prints_the_path(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert load_script().main(tmp_path / "data") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'data' / 'tinyshakespeare.txt'}\n"


def test_script_reports_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"my own text")
    done = run_python(str(ROOT / "scripts" / "fetch_data.py"), str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpt-parity: error: ") and len(done.stderr.splitlines()) == 1


@needs_shakespeare
def test_script_accepts_the_real_file(tmp_path: Path) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(SHAKESPEARE.read_bytes())
    done = run_python(str(ROOT / "scripts" / "fetch_data.py"), str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
