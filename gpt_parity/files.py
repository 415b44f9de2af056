"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Callable, Mapping
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


def read_text(path: Path) -> str:
    """The text of a regular UTF-8 file; ValueError of one line that names it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path}: is no regular file")
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"{path}: cannot be read, {reason}") from error


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


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of these files beside `path`, then rename: old or new, never half.

    What is there is replaced, a folder too. Raises OSError that names `path`.
    """
    path = path.absolute()
    beside, old = (path.with_name(f".{path.name}.{uuid.uuid4().hex}.{k}") for k in ("part", "old"))
    try:
        try:
            beside.mkdir()
            for name, data in files.items():
                write_atomically(beside / name, data)
            if os.path.lexists(path):
                os.replace(path, old)
            try:
                os.replace(beside, path)
            except OSError:
                if os.path.lexists(old):
                    os.replace(old, path)
                raise
            _sync_folder(path.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(f"{path}: cannot be written, {reason}") from error
