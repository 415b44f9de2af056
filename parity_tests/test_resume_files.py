"""Runs that go on: the checkpoints kept, and files that are missing, damaged, foreign or links."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.training_run import Run
from parity_tests.resumed_runs import (
    TEXT,
    kill_at,
    nothing,
    results,
    resume,
    rewrite,
    train,
)

pytestmark = [pytest.mark.reference("exact property"), pytest.mark.folder_of_its_own(TEXT)]


# --- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_alone_are_not_deleted_by_a_new_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    Path("backup").mkdir()
    shutil.copy("run/checkpoint-4.safetensors", "backup")
    capsys.readouterr()
    assert train("backup") == 2
    assert "backup: holds a run already (checkpoint-4.safetensors)" in capsys.readouterr().err
    assert Path("backup/checkpoint-4.safetensors").exists()
    assert resume("backup/checkpoint-4.safetensors") == 2
    assert "backup: holds no config.json" in capsys.readouterr().err


def test_a_checkpoint_that_was_moved_away_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Run.after_step

    def moved(run: Run, step: int, result: Any) -> None:
        if step == 3:
            Path("run/checkpoint.safetensors").rename("mine")
        original(run, step, result)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "after_step", moved)
        assert train("run") == 0
    assert load_checkpoint(Path("mine")).step == 2 and load_checkpoint(Path("run")).step == 6


def test_file_systems_without_links_and_locks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr("fcntl.flock", refused)
    assert train("run", "--keep", "9") == 0
    steps = [load_checkpoint(path).step for path in sorted(Path("run").glob("checkpoint-*"))]
    assert steps == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("keep", "steps"), [("1", []), ("2", [4]), ("3", [3, 4]), ("9", [0, 2, 3, 4])]
)
def test_the_last_checkpoints_are_kept(
    keep: str, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--keep", keep) == 0
    earlier = sorted(Path("run").glob("checkpoint-*"))
    assert [load_checkpoint(path).step for path in earlier] == steps
    assert [path.name for path in earlier] == [f"checkpoint-{step}.safetensors" for step in steps]
    assert load_checkpoint(Path("run")).step == 6


@pytest.mark.parametrize(("damaged", "whole"), [([], 4), ([4], 3), ([2, 3, 4, 0], None)])
def test_a_damaged_checkpoint_points_to_an_earlier_one(
    damaged: list[int], whole: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--keep", "9") == 0
    expected = results("run")
    for path in ["checkpoint", *(f"checkpoint-{step}" for step in damaged)]:
        path = Path(f"run/{path}.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert resume("run") == 2
    error = capsys.readouterr().err
    if whole is None:
        assert "--resume" not in error
        return
    assert error.endswith(f"--resume run/checkpoint-{whole}.safetensors is an earlier one\n"), error
    assert resume(f"run/checkpoint-{whole}.safetensors") == 0
    assert results("run") == expected


def test_checkpoints_before_and_after_a_resume_are_one_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the step it went on from stays, those of steps it takes once more go."""

    def steps() -> list[int]:
        return [load_checkpoint(path).step for path in sorted(Path("run").glob("checkpoint-*"))]

    with monkeypatch.context() as patch:
        kill_at(5, signal.SIGINT, patch)
        assert train("run", "--keep", "9") == 130
    assert steps() == [0, 2, 3, 4]
    assert resume("run") == 0
    assert steps() == [0, 2, 3, 4, 5]
    with monkeypatch.context() as patch:
        kill_at(4, signal.SIGINT, patch)
        assert resume("run/checkpoint-2.safetensors") == 130
    assert steps() == [0, 2, 3] and load_checkpoint(Path("run")).step == 4


def test_a_link_to_an_earlier_checkpoint_goes_on_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it shows stays whole, also where nothing can be written."""
    assert train("run", "--keep", "9") == 0
    expected = results("run")
    Path("run/checkpoint.safetensors").unlink()
    Path("run/checkpoint.safetensors").symlink_to("checkpoint-3.safetensors")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("gpt_parity.training_run.save_checkpoint", full)
        assert resume("run") == 2
    assert load_checkpoint(Path("run/checkpoint-3.safetensors")).step == 3
    assert resume("run") == 0
    assert results("run") == expected
    assert not Path("run/checkpoint.safetensors").is_symlink()
    assert load_checkpoint(Path("run/checkpoint-3.safetensors")).step == 3


# --- metrics and the rest of the folder -----------------------------------------------------------


def test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the new name of the checkpoint before the run goes on."""
    events: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        paths = [
            path
            for path in (Path("run"), *Path("run").iterdir())
            if (path.stat().st_dev, path.stat().st_ino) == (status.st_dev, status.st_ino)
        ]
        events.append("partial" if paths[0].name.endswith(".part") else paths[0].name)

    def replaced(source: Path, target: Path) -> None:
        replace_file(source, target)
        events.append(f"to {Path(target).name}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    assert train("run", "--keep", "1") == 0
    checkpoint = ["partial", "to checkpoint.safetensors", "run"]
    checkpoints = 4 * ["metrics.jsonl", *checkpoint]  # of the steps 2, 3, 4 and 6
    config, sample = (["partial", f"to {name}", "run"] for name in ("config.json", "sample.txt"))
    assert events == [*checkpoint, *config, *checkpoints, *sample]


def test_lost_metrics_are_said_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    size = Path("run/metrics.jsonl").stat().st_size
    Path("run/metrics.jsonl").write_bytes(b"")
    expected = results("run")["arrays"]
    capsys.readouterr()
    assert resume("run/checkpoint-4.safetensors") == 0
    lines = capsys.readouterr().out.splitlines()
    missing = load_checkpoint(Path("run/checkpoint-4.safetensors")).run.metrics_size
    assert 0 < missing < size
    assert (
        f"run/metrics.jsonl: {missing} bytes of earlier steps are missing, it goes on without them"
        in lines
    )
    assert results("run")["arrays"] == expected


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 3000, b'{"event": "validation", "step": 1, "loss": 1' + b"0" * 400 + b"}",
        b'{"event": "validation", "step": 1, "loss": "x"}',
        b'{"event": "validation", "step": 1, "loss": null}',
        b'{"event": "validation", "step": 1, "loss": 1e400}',
        b'{"event": "validation", "step": 1, "loss": NaN}',
        b'{"event": "validation", "step": "1", "loss": 1.0}', b"\xff", b'"text"',
    ],
)  # fmt: skip
def test_lines_of_others_in_the_metrics_are_passed_over(
    line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    table = capsys.readouterr().out.splitlines()[-4:]
    path = Path("run/metrics.jsonl")
    kept = path.read_bytes()
    size = load_checkpoint(Path("run")).run.metrics_size
    # In the place of as many blanks, which nobody reads either.
    lines = [line, b" " * (size - len(line) - 1)] if len(line) < size else [line]
    path.write_bytes(b"\n".join(lines) + b"\n" + kept)
    rewrite(nothing, lambda r: r.update(metrics_size=path.stat().st_size - len(kept) + size))
    assert resume("run") == 0
    assert capsys.readouterr().out.splitlines()[-4:] == table


def test_half_a_line_of_metrics_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that follow it would be lost to every reader."""
    assert train("run") == 0
    path = Path("run/metrics.jsonl")
    path.write_bytes(path.read_bytes()[:100])  # within the second line
    assert resume("run/checkpoint-4.safetensors") == 0
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [3, 6, 6]


def test_metrics_that_are_a_link_are_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    Path("mine.txt").write_bytes(b"mine\n" * 1000)
    for target in ("mine.txt", "nowhere"):
        Path("run/metrics.jsonl").unlink()
        Path("run/metrics.jsonl").symlink_to(Path(target).resolve())
        assert resume("run") == 2
        assert "run/metrics.jsonl: cannot be written, is no regular file" in capsys.readouterr().err
    assert Path("mine.txt").read_bytes() == b"mine\n" * 1000 and not Path("nowhere").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes: run on Linux or macOS")
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.safetensors"])
def test_pipes_in_the_folder_are_not_waited_for(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    Path("run", name).unlink()
    os.mkfifo(f"run/{name}")
    assert resume("run") == 2
    assert "is no regular file" in capsys.readouterr().err


def test_a_run_that_lost_its_configuration_gets_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    before = json.loads(Path("run/config.json").read_text())
    Path("run/config.json").unlink()
    assert resume("run") == 0
    after = json.loads(Path("run/config.json").read_text())
    assert after | {"provenance": 0} == before | {"provenance": 0}
