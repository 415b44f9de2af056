"""Batches of a text against a plain listing of its windows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.corpus import CharDataset, CharTokenizer

pytestmark = pytest.mark.reference("by hand")


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
