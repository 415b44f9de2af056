"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to the disk, then rename: old or new, never half.

    Raises OSError that names `path`; what stood there before is then still there.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(f"{path}: cannot be written, {reason}") from error


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself survive a power cut, where folders can be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
