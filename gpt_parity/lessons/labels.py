"""Words and characters as labels of positions: whatever they are, a reader can see them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from gpt_parity.lessons.tables import GAP, clip, kept, pick

MOST_WORD, MOST_WORDS = 12, 8
SPACE = "␣"


def visible(text: str) -> str:
    """A word or character as a label: what has no picture or width is a code such as \\n."""
    if text == " ":
        return SPACE
    shown = "".join(c if c.isprintable() else _code(c) for c in text)
    return shown if cell_len(shown) else "".join(map(_code, text))


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def positions(words: Sequence[str]) -> list[str]:
    """A label for each position: its number and its word, or the number alone."""
    return [f"{i} {word}".rstrip() for i, word in enumerate(words)]


def listing(items: Sequence[str]) -> str:
    """Items in one sentence: those in the middle are left out where there are many."""
    places = pick(len(items), MOST_WORDS)
    shown = ", ".join(GAP if i is None else items[i] for i in places)
    return shown if len(kept(places)) == len(items) else f"{shown} ({len(items)} in all)"


def names(words: Sequence[str]) -> list[str]:
    """What a sentence calls each position: its word, or its number."""
    return [clip(word, MOST_WORD) or str(i) for i, word in enumerate(words)]


def titles(words: Sequence[str]) -> list[str]:
    """What a sentence calls each position the first time: "position 2 (sat)"."""
    return [
        f"position {i} ({clip(word, MOST_WORD)})" if word else f"position {i}"
        for i, word in enumerate(words)
    ]


def count(number: int, what: str) -> str:
    """A number with its noun: "1 weight", "3 weights"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def capital(text: str) -> str:
    """`text` as the beginning of a sentence."""
    return text[:1].upper() + text[1:]
