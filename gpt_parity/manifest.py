"""The manifest of a file: JSON that says of what format and version the file is."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.schedule import require_integer

# Characters of a name, of a value in a message, and of a whole message; digits of an integer.
LONGEST_NAME = 200
LONGEST_VALUE = 100
LONGEST_MESSAGE = 800
LONGEST_INTEGER = 20


def parse_manifest(
    text: str | None, format_name: str, version: int, kinds: Mapping[str, type], origin: str
) -> dict[str, Any]:
    """Return a manifest of this format, of `version` at most, with values of `kinds` by key.

    Where `kinds` has a "config", it is one of numbers by the names of GPTConfig, or of GPT2Config
    if it has heads. origin: what writes such files, for the message where there is no manifest.
    Raises ValueError of one line for anything else, TypeError for a version that is no integer.
    """
    if text is None:
        raise ValueError(f"has no manifest, {origin} is needed")
    try:
        manifest = strict_json(text)
    except ValueError as error:
        raise ValueError(f"manifest is not JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != format_name:
        raise ValueError(f"manifest is of another kind of file, {format_name!r} is needed")
    found = manifest.get("version")
    if isinstance(found, list | dict | str):
        raise TypeError(f"format version is {shown(found)}, an integer is needed")
    found = require_integer("format version", found, 1)
    if found > version:
        raise ValueError(
            f"format version is {found}, at most {version} can be read; "
            "a newer gpt-parity is needed"
        )
    for key, kind in kinds.items():
        value = manifest.get(key)
        if not isinstance(value, kind):
            raise ValueError(f"manifest: {key} is {shown(value)}, {kind.__name__} is needed")
    if "config" in kinds:
        _check_config(manifest["config"])
    return manifest


def _check_config(config: Mapping[str, Any]) -> None:
    kind = GPT2Config if "heads" in config else GPTConfig
    needed = sorted(field.name for field in fields(kind))
    if sorted(config) != needed:
        raise ValueError(f"manifest: config has {shown(sorted(config))}, {needed} is needed")
    for name, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"manifest: {name} is {shown(value)}, a number is needed")


def strict_json(text: str) -> Any:
    """The content of a JSON text; ValueError of one line for what is none.

    No key stands twice or is longer than a name, no integer has more than 20 digits, and nothing
    is nested deeper than Python can follow.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in set(keys[:i]))
        raise ValueError(f"{shown(twice)} stands twice, each name is needed once")
    for key in content:
        if len(key) > LONGEST_NAME or not key.isprintable():
            raise ValueError(
                f"{shown(key)} is no name, up to {LONGEST_NAME} printable characters are needed"
            )
    return content


def _integer(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits, {LONGEST_INTEGER} are possible")
    return int(text)


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 2, LONGEST_VALUE, LONGEST_VALUE


def shown(value: Any) -> str:
    """`value` as it may stand in a message: printable, and cut where it is long."""
    text = _BRIEF.repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def some(names: Iterable[str]) -> str:
    """The first of `names` as they may stand in a message, and how many more there are."""
    names = list(names)
    first = ", ".join(n if n.isprintable() and len(n) < 100 else shown(n) for n in names[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def one_line(error: Exception | str) -> str:
    """A message on one printable line, cut where it is long."""
    text = " ".join(str(error).split())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."
