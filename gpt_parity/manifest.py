"""The manifest of a file: JSON that says of what format and version the file is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpt_parity.schedule import require_integer


def parse_manifest(
    text: str | None, format_name: str, version: int, kinds: Mapping[str, type], origin: str
) -> dict[str, Any]:
    """Return a manifest of this format, of `version` at most, with values of `kinds` by key.

    origin: what writes such files, for the message where there is no manifest. Raises ValueError
    of one line for anything else.
    """
    if text is None:
        raise ValueError(f"has no manifest, {origin} is needed")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"manifest is not JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != format_name:
        raise ValueError(f"manifest is of another kind of file, {format_name!r} is needed")
    found = require_integer("format version", manifest.get("version"), 1)
    if found > version:
        raise ValueError(
            f"format version is {found}, at most {version} can be read; "
            "a newer gpt-parity is needed"
        )
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise ValueError(f"manifest: {key} is {manifest.get(key)!r}, {kind.__name__} is needed")
    return manifest
