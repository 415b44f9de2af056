"""The walk through attention on the page: words, widths and colours."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from gpt_parity.lessons import explain
from gpt_parity.lessons.attention import compute
from gpt_parity.lessons.config import ExplainConfig
from gpt_parity.lessons.labels import visible
from gpt_parity.lessons.tables import clip, pick
from parity_tests.walks import Plain, joined, printed, section, shown, tables

pytestmark = pytest.mark.reference("by hand")

LONG = "Donaudampfschifffahrtsgesellschaft"


@pytest.fixture(autouse=True)
def a_pipe_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


# --- Words ----------------------------------------------------------------------------------------


def test_words_label_rows_columns_and_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--tokens", "the cat sat")
    assert section(text, 2).splitlines()[1:4] == [
        "position 0 (the) sees the",
        "position 1 (cat) sees the, cat",
        "position 2 (sat) sees the, cat, sat",
    ]
    assert len(re.findall(r"^ +0 the +1 cat +2 sat( +sum)?$", text, re.MULTILINE)) == 7
    assert len(re.findall(r"^ +2 sat +-?\d", text, re.MULTILINE)) == 10
    assert "Position 0 (the): lower sees the; upper sees the, cat, sat," in joined(text)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("a", "a"), (" ", "␣"), ("\n", "\\n"), ("\x1b", "\\x1b"), ("\u200b", "\\u200b"),
        ("\u0301", "\\u0301"), ("e\u0301", "e\u0301"), ("\udc80", "\\udc80"), ("世", "世"),
        ("\u3000", "\\u3000"), ("a\x07b", "a\\x07b"),
    ],
)  # fmt: skip
def test_every_character_has_a_visible_label(text: str, label: str) -> None:
    assert visible(text) == label


def test_words_that_the_locale_could_not_decode_are_utf8() -> None:
    """The bytes of a wide letter, of a wide space between words, and one that is no UTF-8."""
    undecoded = b"\xe4\xb8\x96\xe3\x80\x80\xff".decode("ascii", "surrogateescape")
    config = ExplainConfig(tokens=undecoded)
    assert config.length == 2
    stream = io.StringIO()
    explain.run(config, Console(file=stream, width=80))
    assert "position 1 (\\udcff) sees 世, \\udcff\n" in stream.getvalue()


def test_wide_letters_count_two_cells() -> None:
    assert [clip("世界世界", width) for width in (8, 7, 6, 5)] == [
        "世界世界", "世界世…", "世界…", "世界…",
    ]  # fmt: skip
    assert clip("abc", 3) == "abc" and clip("abcd", 3) == "ab…"


# --- 80 columns -----------------------------------------------------------------------------------

SETTINGS: dict[str, list[str]] = {
    "one": ["--seq-len", "1"],
    "two, narrow": ["--seq-len", "2", "--d-k", "1"],
    "eight": ["--seq-len", "8", "--d-k", "1", "--seed", "3"],
    "thirty": ["--seq-len", "30"],
    "hundreds": ["--seq-len", "300", "--d-k", "16"],
    "long words": ["--tokens", " ".join([LONG] * 12)],
    "wide words": ["--tokens", " ".join(["世界你好世界你好"] * 9)],
    "markup": ["--tokens", "[red]x[/red] :smile: [/] \\[a] $x$ %s"],
    "controls": ["--tokens", "a\x1b[31mb\x07 \u202ec"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_lines_fit_into_80_columns_without_colours(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *SETTINGS[name])
    assert max(map(cell_len, text.split("\n"))) <= 80
    assert all(c == "\n" or c.isprintable() for c in text)
    assert "8. Where the gradient flows" in text
    if name == "markup":
        assert "position 0 ([red]x[/red]) sees [red]x[/red]\n" in text
        assert "position 1 (:smile:) sees [red]x[/red], :smile:\n" in text


@pytest.mark.parametrize("width", [30, 40, 60])
@pytest.mark.parametrize("name", ["thirty", "long words"])
def test_narrow_terminals_keep_whole_numbers(name: str, width: int) -> None:
    stream = io.StringIO()
    flags = {"tokens": SETTINGS[name][1]} if name == "long words" else {"seq_len": 30}
    explain.run(ExplainConfig(**flags), Console(file=stream, width=width))
    text = stream.getvalue()
    assert max(map(cell_len, text.split("\n"))) <= width
    if width >= 40:
        for table in tables(section(text, 4)):
            rows = [row for row in table if row[0] != "…"]
            assert rows and all(row[-1] == "1.0000" for row in rows)
            assert not re.search(r"\d…", " ".join(rows[-1][2:]))


def test_long_sequences_show_both_ends_and_count_all(capsys: pytest.CaptureFixture[str]) -> None:
    text, plain = shown(capsys, "--seq-len", "30"), Plain(30)
    assert "Of 30 positions the tables show 0 to 4 and 27 to 29" in joined(text)
    (rows,) = tables(section(text, 4))
    places = [0, 1, 2, 3, 4, 27, 28, 29]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "…", "27", "28", "29"]
    expected = [row[1:] for row in printed(plain.weights[np.ix_(places, places)])]
    found = [row[1:6] + row[7:10] for row in rows if row[0] != "…"]
    assert found == expected
    assert "435 of 900 weights are exactly 0" in joined(text)
    assert "Counted, not rounded: 435 of 900 are exactly 0" in joined(text)


def test_of_hundreds_the_gradients_of_the_rows_shown_are_taken() -> None:
    places = [i for i in pick(200, 8) if i is not None]
    assert places == [0, 1, 2, 3, 4, 197, 198, 199]
    stages, plain = compute(200, 4, 1, places), Plain(200, 4, 1)
    found = stages.gradients["v"]
    assert found.rows.tolist() == places and found.norms.shape == (8, 200)
    expected = (plain.weights * np.linalg.norm(plain.g, axis=1)[:, None])[places]
    assert np.allclose(found.norms, expected, rtol=1e-12, atol=0.0)
    assert np.array_equal(found.zero, expected == 0)


def test_a_terminal_gets_colours_and_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, color_system="truecolor", width=80, legacy_windows=False
    )
    assert explain.run(ExplainConfig(tokens="the cat sat"), console) == 0
    coloured, plain = stream.getvalue(), shown(capsys, "--tokens", "the cat sat")
    assert "\x1b[" not in plain
    assert re.search(r"\x1b\[[0-9;]*48;2;8;69;148m1\.0000\x1b", coloured)  # hottest
    assert re.search(r"\x1b\[2m *-inf", coloured)  # dim
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
