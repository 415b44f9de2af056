"""The folder of a training run: one writer at a time, its metrics, its last checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpt_parity.checkpoint import CHECKPOINT_NAME
from gpt_parity.files import remove_partial, write_atomically

CONFIG_NAME = "config.json"
METRICS_NAME = "metrics.jsonl"
SAMPLE_NAME = "sample.txt"
PLOT_NAME = "loss.png"
RUN_FILES = (CONFIG_NAME, METRICS_NAME, CHECKPOINT_NAME, SAMPLE_NAME, PLOT_NAME)
EARLIER_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)\.safetensors")


@contextmanager
def new_folder(folder: Path, overwrite: bool) -> Iterator[list[Path]]:
    """Make the folder of a run, for this process alone.

    Gives the files of an earlier run, which stay until the new one has its first checkpoint.
    Raises ValueError if there are any and `overwrite` is not set, or if another process writes
    there; OSError that names the folder if it cannot be written.
    """
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _sole_writer(folder):
        # A link to nowhere is held too: opened for writing, it would make a file elsewhere.
        held = [name for name in RUN_FILES if os.path.lexists(folder / name)]
        held += [path.name for _, path in earlier_checkpoints(folder)]
        if held and not overwrite:
            goes_on = f", --resume {folder}" if CHECKPOINT_NAME in held else ""
            raise ValueError(
                f"{folder}: holds a run already ({', '.join(held)}), another --out{goes_on} or "
                "--overwrite is needed"
            )
        for name in held:
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                raise ValueError(f"{folder / name}: is a folder, no file of a run; move it away")
        with _named(folder):
            _clear(folder)
        yield [folder / name for name in held]


@contextmanager
def existing_folder(folder: Path) -> Iterator[list[Path]]:
    """The folder of a run that goes on, for this process alone; raises as `new_folder`."""
    with _sole_writer(folder):
        with _named(folder):
            _clear(folder)
        yield []


def _clear(folder: Path) -> None:
    for name in RUN_FILES:
        remove_partial(folder, name)


def remove(path: Path) -> None:
    """Delete a file, if it is there; raises OSError that names it."""
    with _named(path):
        path.unlink(missing_ok=True)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise type(error)(f"{folder}: cannot be written, {error.strerror or error}") from error


@contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where there are locks; the system lets go of it with the process."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with _named(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{folder}: another process trains into it, one at a time is needed"
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


class Metrics:
    """metrics.jsonl: a line for each record, in the order of the steps.

    size: of a run that goes on, the bytes that were written at its checkpoint. What came later is
    cut off, since it comes again, and so is half a line. `missing` counts the bytes that should
    be there and are not. Raises OSError that names the file, also where it is a link or a pipe.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise OSError(f"{path}: cannot be written, is no regular file")
        with _named(path):
            self.file = path.open("ab")
            whole = path.read_bytes()[:size].rfind(b"\n") + 1
            self.missing = size - whole
            self.file.truncate(whole)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, exception: object, *_: object) -> None:
        # What ends the run is not replaced by its consequence.
        with _named(self.path) if exception is None else suppress(OSError):
            self.file.close()

    def record(self, **values: Any) -> None:
        with _named(self.path):
            self.file.write((json.dumps(values) + "\n").encode())

    def flush(self, *, to_disk: bool = False) -> int:
        """Let others see what was recorded; returns the size of the file."""
        with _named(self.path):
            self.file.flush()
            if to_disk:
                os.fsync(self.file.fileno())
            return self.file.tell()

    def validations(self) -> list[tuple[int, float]]:
        """Steps and losses of the validations recorded so far."""
        return self.losses("validation")

    def losses(self, event: str) -> list[tuple[int, float]]:
        """Steps and losses of the records of one kind so far."""
        self.flush()
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:  # somebody removed it
            return []
        records = map(_record, lines)
        return [(r["step"], r["loss"]) for r in records if r.get("event") == event]


def _record(line: bytes) -> dict[str, Any]:
    """A line that this program wrote; {} for any other, since other programs may write there."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return {}
    loss = record.get("loss")
    return record if isinstance(loss, float) and math.isfinite(loss) else {}


class Checkpoints:
    """The last `keep` checkpoints of a folder, the newest as checkpoint.safetensors.

    An older one has its step in its name, checkpoint-STEP.safetensors. step: that of the newest,
    None where there is none.
    """

    def __init__(self, folder: Path, keep: int, step: int | None = None) -> None:
        self.folder, self.keep, self.step = folder, keep, step
        self.identity = self._identity()

    def _identity(self) -> tuple[int, int]:
        """Of the folder itself: its name may come to stand for another one."""
        with _named(self.folder):
            status = self.folder.stat()
        return status.st_dev, status.st_ino

    @property
    def path(self) -> Path:
        return self.folder / CHECKPOINT_NAME

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Let `write(path)` make the newest checkpoint; at any moment there is a whole one.

        Raises OSError that names the file or the folder.
        """
        if self._identity() != self.identity:
            raise OSError(f"{self.folder}: is another folder than at the start of the run")
        if self.step is not None and self.keep > 1:
            self._set_aside(self.folder / f"checkpoint-{self.step}.safetensors")
        write(self.path)
        self.step = step
        paths = earlier_checkpoints(self.folder)
        kept = [path for earlier, path in paths if earlier < step][-(self.keep - 1) :]
        for _, path in paths:
            # A later one is of a run that went on from an earlier step once more.
            if self.keep == 1 or path not in kept:
                remove(path)

    def _set_aside(self, path: Path) -> None:
        """Give the newest checkpoint a second name, under which it stays."""
        with _named(path):
            if not self.path.exists():
                return  # somebody moved it away; that is no reason not to save
            newest = self.path.resolve()  # a link gives its place to a file
            if path.exists() and path.samefile(newest):
                return
            path.unlink(missing_ok=True)
            try:
                os.link(newest, path)
            except OSError:  # a file system without hard links
                write_atomically(path, newest.read_bytes())


def earlier_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of the checkpoints but the newest, by step."""
    found = ((EARLIER_CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)
