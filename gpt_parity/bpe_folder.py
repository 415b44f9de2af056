"""What the files beside vocab.json and merges.txt, or beside tokenizer.json, add to a tokenizer.

The library transformers takes them into account; so it is done here, or refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_parity.files import read_text
from gpt_parity.manifest import one_line, shown

END_OF_TEXT = "<|endoftext|>"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
SETTINGS, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
DECODER = "added_tokens_decoder"
CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
# Without another of these, <|endoftext|> is each of them, and marked.
ENDS = ("bos_token", "eos_token", "unk_token")


@dataclass(frozen=True)
class TokensBeside:
    """Added tokens as a tokenizer.json has them, and the names of the files they stand in."""

    tokens: list[dict[str, Any]]
    files: list[str]


def refuse_added_space(folder: Path) -> None:
    """Raise ValueError where tokenizer_config.json puts a space before each text."""
    if _content(folder / SETTINGS).get("add_prefix_space") not in (None, False):
        raise ValueError(
            f"{folder / SETTINGS}: has add_prefix_space, which puts a space before the text; false "
            "is needed"
        )


def tokens_beside(folder: Path) -> TokensBeside:
    """The added tokens of a folder without tokenizer.json.

    Of added_tokens_decoder in tokenizer_config.json, else of added_tokens.json. Raises ValueError
    that names the file for another class of tokenizer, for files that contradict each other, and
    for a special token that is neither among them nor <|endoftext|>.
    """
    settings, plain = _content(folder / SETTINGS), _content(folder / ADDED)
    kind = settings.get("tokenizer_class")
    if kind not in (None, *CLASSES):
        raise ValueError(
            f"{folder / SETTINGS}: tokenizer_class is {shown(kind)}, one of {CLASSES} is needed"
        )
    decoder = settings.get(DECODER)
    if decoder is None:
        tokens = [{"content": t, "id": i, "normalized": True} for t, i in plain.items()]
    else:
        tokens = _decoded(folder / SETTINGS, decoder)
        listed = {token["content"]: token["id"] for token in tokens}
        other = next((t for t, i in plain.items() if listed.get(t) != i), None)
        if other is not None:
            raise ValueError(
                f"{folder / ADDED}: has {shown(other)} with id {shown(plain[other])}, the id in "
                f"{DECODER} of {SETTINGS} is needed"
            )
    known = {token["content"] for token in tokens}
    for path in (folder / SETTINGS, folder / SPECIAL):
        special = _check_special(path, known)
        marked = {"special": True, "normalized": False}
        tokens = [t | marked if t["content"] in special else t for t in tokens]
    sources = [ADDED] if decoder is None else [SETTINGS]
    return TokensBeside(tokens, sources if tokens else [])


def _decoded(path: Path, decoder: Any) -> list[dict[str, Any]]:
    tokens = []
    for key, entry in decoder.items() if isinstance(decoder, dict) else [(None, None)]:
        sound = isinstance(entry, dict) and isinstance(entry.get("content"), str)
        if not sound or not key.isdecimal() or not key.isascii() or len(key) > 9:
            raise ValueError(f"{path}: {DECODER} is {shown(decoder)}, tokens by id are needed")
        tokens.append({**entry, "id": int(key)})
    return tokens


def _check_special(path: Path, known: set[str]) -> set[str]:
    """The special tokens that a file names; ValueError for one that would be added, or changed."""
    named: set[str] = set()
    content = _content(path)
    for key, value in content.items():
        if key.endswith("_token"):
            entries = [] if value is None and key not in ENDS else [value]
        elif key in ("additional_special_tokens", "extra_special_tokens"):
            entries = list(value.values()) if isinstance(value, dict) else value or []
        else:
            continue
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, bool):  # add_bos_token says whether, not which
                continue
            flagged = isinstance(entry, dict) and any(entry.get(f) is True for f in FLAGS[:3])
            token = entry.get("content") if isinstance(entry, dict) else entry
            needed = {END_OF_TEXT} if key in ENDS else known | {END_OF_TEXT}
            if flagged or not isinstance(token, str) or token not in needed:
                what = END_OF_TEXT if key in ENDS else f"{END_OF_TEXT} or an added token"
                raise ValueError(f"{path}: {key} is {shown(entry)}, plain {what} is needed")
            named.add(token)
    return named


def _content(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is none; ValueError that names the file."""
    if not path.exists():
        return {}
    text = read_text(path)
    try:
        content = json.loads(text)  # the library writes 10**30 for "no greatest length"
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is {shown(content)}, an object is needed")
    return content
