"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PARTIAL = ".part"


def write_atomically(path: Path, data: bytes, verify: Callable[[Path], None] | None = None) -> None:
    """Write `data` beside `path`, flush it to the disk, then rename: old or new, never half.

    `verify` is called with the file beside, before the renaming; what it raises ends the writing.
    Raises OSError that names `path`; what stood there before is then still there.
    """
    if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
        raise OSError(f"{path}: cannot be written, is no regular file")
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if verify is not None:
                verify(partial)
            os.replace(partial, path)
            _sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(f"{path}: cannot be written, {reason}") from error


def remove_partial(folder: Path, name: str) -> None:
    """Delete what writers of `folder / name` left when they were killed; none may be at work."""
    for partial in folder.glob(f".{name}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a renaming itself survive a power cut, where the system can do that for a folder."""
    if os.name != "posix":
        return
    with suppress(OSError):  # the file has its name by now
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
