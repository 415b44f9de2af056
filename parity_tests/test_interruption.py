"""Runs that are interrupted by signals, by kills and by disks, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.cli import main
from gpt_parity.training import GPTTrainer
from gpt_parity.training_run import Run
from parity_tests.reliability.kills import killed_while_saving, killed_while_training

pytestmark = [
    pytest.mark.reference("by hand"),
    pytest.mark.folder_of_its_own("Er bellte, und der Mond schien.\n" * 20),
]

CHECKOUT = Path(__file__).resolve().parents[1]
FLAGS = [
    "--data", "text.txt", "--context-size", "8", "--embedding-size", "8", "--blocks", "1",
    "--sample-tokens", "20", "--max-steps", "6", "--eval-every", "3", "--save-every", "1",
]  # fmt: skip
needs_posix = pytest.mark.skipif(os.name != "posix", reason="run on Linux or macOS")


def train(out: str, *flags: str) -> int:
    return main(["train", "--out", out, *FLAGS, *flags])


def after_step(step: int, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `call()` happen once the step is finished, before anything is written about it."""
    original = Run.after_step

    def wrapped(run: Run, number: int, result: Any) -> None:
        if number == step:
            call()
        original(run, number, result)

    monkeypatch.setattr(Run, "after_step", wrapped)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def is_finished_by(folder: str) -> bool:
    """Whether the run goes on to the end of the unbroken one."""
    assert train("unbroken") == 0
    assert main(["train", "--resume", folder]) == 0
    ends = [load_checkpoint(Path(name)) for name in ("unbroken", folder)]
    samples = {Path(name, "sample.txt").read_bytes() for name in ("unbroken", folder)}
    same = [
        array.tobytes() == ends[1].weights[name].tobytes()
        for name, array in ends[0].weights.items()
    ]
    return all(same) and len(samples) == 1 and ends[1].step == 6


# --- signals --------------------------------------------------------------------------------------


def test_a_signal_while_the_sample_is_drawn_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Run._sample

    def interrupted(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        original(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_sample", interrupted)
        assert train("run") == 143
    assert one_line(capsys) == (
        "gpt-parity: stopped by SIGTERM after step 6 of 6; go on with: gpt-parity train --resume "
        "run"
    )
    assert not Path("run/sample.txt").exists()
    assert is_finished_by("run")


def test_a_signal_in_a_validation_keeps_its_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = GPTTrainer.test

    def interrupted(trainer: GPTTrainer, *arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(trainer, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(GPTTrainer, "test", interrupted)
        assert train("run") == 130
    assert "stopped by SIGINT after step 3 of 6" in one_line(capsys)
    assert load_checkpoint(Path("run")).step == 3
    assert is_finished_by("run")


def test_a_second_signal_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        after_step(3, twice, patch)
        assert train("run") == 130
    assert one_line(capsys) == (
        "gpt-parity: stopped at once; the last checkpoint, run/checkpoint.safetensors, is of step 2"
    )
    assert is_finished_by("run")


def test_a_second_signal_while_the_first_one_saves_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:

        def first() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            patch.setattr(Run, "save", impatient)

        after_step(2, first, patch)
        assert train("run") == 143
    assert one_line(capsys) == (
        "gpt-parity: stopped at once; the last checkpoint, run/checkpoint.safetensors, is of step 1"
    )


@needs_posix
@pytest.mark.parametrize("held", [False, True], ids=["new folder", "folder of a run"])
def test_a_reader_that_left_before_the_first_line_leaves_a_run(
    held: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(run: Run) -> None:
        raise BrokenPipeError

    if held:
        assert train("run") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_announce", closed)
        assert train("run", "--overwrite") == 141
    assert load_checkpoint(Path("run")).step == 0
    assert is_finished_by("run")


@needs_posix
@pytest.mark.parametrize("arguments", ["--bad", "--resume nowhere"])
def test_the_exit_code_stands_where_nobody_reads_the_error(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "gpt_parity", "train", *arguments.split()], stderr=writer,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    os.close(writer)
    assert process.returncode == 2


@needs_posix
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_that_the_process_was_told_to_ignore_stays_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under nohup, or in the background of a script; otherwise it stops the run."""
    number = getattr(signal, name)
    before = signal.getsignal(number)
    try:
        for handler, code in ((signal.SIG_IGN, 0), (signal.default_int_handler, 128 + number)):
            signal.signal(number, handler)
            with monkeypatch.context() as patch:
                after_step(2, lambda: os.kill(os.getpid(), number), patch)
                found = train(f"run{code}")
            # The command has a handler for SIGTERM of its own.
            assert found == (143 if name == "SIGTERM" else code)
            assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_the_command_that_goes_on_names_a_text_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Printed as it can be typed: a blank in a path is quoted."""
    Path("a folder").mkdir()
    text = tmp_path / "text.txt"
    monkeypatch.chdir("a folder")
    with monkeypatch.context() as patch:
        after_step(2, lambda: os.kill(os.getpid(), signal.SIGINT), patch)
        assert main(["train", "--out", "my run", *FLAGS[2:], "--data", str(text)]) == 130
    command = one_line(capsys).partition("go on with: ")[2]
    assert command == f"gpt-parity train --resume 'my run' --data {text}"


# --- kills ----------------------------------------------------------------------------------------


@needs_posix
def test_kills_while_saving_lose_nothing() -> None:
    found = killed_while_saving(40, seed=1)
    assert found.kills == 40
    assert found.half_written > 0 and found.saves > found.kills  # they did hit the writing


@needs_posix
def test_kills_while_training_lose_nothing(tmp_path: Path) -> None:
    assert killed_while_training(2, seed=1, folder=tmp_path)["kills"] == 2


@needs_posix
@pytest.mark.slow
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    found = killed_while_saving(1000, seed=2)
    assert found.kills == 1000 and found.half_written > 100
    assert killed_while_training(20, seed=2, folder=tmp_path)["kills"] == 20


# --- disks ----------------------------------------------------------------------------------------


@needs_posix
def test_a_full_disk_is_one_line_with_the_old_checkpoint_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:  # the system refuses files larger than that
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))

    try:
        with monkeypatch.context() as patch:
            after_step(3, fill, patch)
            assert train("run") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert one_line(capsys) == (
        "gpt-parity: error: run/checkpoint.safetensors: cannot be written, File too large; the "
        "last checkpoint, run/checkpoint.safetensors, is of step 2"
    )
    assert load_checkpoint(Path("run")).step == 2
    assert not list(Path("run").glob(".*"))
    assert is_finished_by("run")


@needs_posix
def test_a_disk_that_is_full_leaves_the_run_that_was_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("gpt_parity.training_run.save_checkpoint", full)
        assert train("run", "--overwrite") == 2
    assert one_line(capsys) == "gpt-parity: error: no space"
    assert before == {path.name: path.read_bytes() for path in Path("run").iterdir()}
    assert train("run", "--overwrite", "--keep", "1") == 0
    assert {path.name for path in Path("run").iterdir()} == {
        "config.json", "metrics.jsonl", "checkpoint.safetensors", "sample.txt",
    }  # fmt: skip


def test_what_cannot_be_replaced_is_known_before_anything_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    for name in ("sample.txt", "metrics.jsonl"):
        Path("run", name).rename("kept")
        Path("run", name).mkdir()
        before = {p.name: p.read_bytes() for p in Path("run").iterdir() if p.is_file()}
        assert train("run", "--overwrite", "--seed", "7") == 2
        assert one_line(capsys) == (
            f"gpt-parity: error: run/{name}: is a folder, no file of a run; move it away"
        )
        assert before == {p.name: p.read_bytes() for p in Path("run").iterdir() if p.is_file()}
        Path("run", name).rmdir()
        Path("kept").rename(f"run/{name}")


def test_a_file_that_cannot_be_removed_leaves_one_run_and_not_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new one, with its own configuration."""
    assert train("run") == 0

    def refused(path: Path) -> None:
        raise OSError(f"{path}: not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("gpt_parity.training_run.remove", refused)
        assert train("run", "--overwrite", "--seed", "7") == 2
    assert one_line(capsys) == "gpt-parity: error: run/metrics.jsonl: not permitted"
    assert json.loads(Path("run/config.json").read_text())["train"]["seed"] == 7
    assert load_checkpoint(Path("run")).run.recipe["seed"] == 7


@needs_posix
def test_a_disk_that_is_full_from_the_start_is_one_line() -> None:
    import resource

    process = subprocess.run(
        [sys.executable, "-m", "gpt_parity", "train", "--out", "run", *FLAGS],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)),
    )  # fmt: skip
    assert process.returncode == 2
    assert process.stderr == (
        "gpt-parity: error: run/checkpoint.safetensors: cannot be written, File too large\n"
    )


@needs_posix
def test_metrics_on_a_full_disk_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch:
            after_step(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1])), patch)
            assert train("run", "--log-every", "1") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert one_line(capsys) == (
        "gpt-parity: error: run/metrics.jsonl: cannot be written, File too large; the last "
        "checkpoint, run/checkpoint.safetensors, is of step 2"
    )
    assert load_checkpoint(Path("run")).step == 2
    assert main(["train", "--resume", "run"]) == 0


@needs_posix
@pytest.mark.parametrize("held", [False, True], ids=["new folder", "folder of a run"])
def test_a_read_only_folder_is_one_line(held: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user who may not write there; root, who may everywhere, becomes one."""
    if held:
        assert train("run") == 0
        before = Path("run/checkpoint.safetensors").read_bytes()
        arguments = ["train", "--resume", "run"]
        Path("run").chmod(0o555)
    else:
        Path("place").mkdir(mode=0o555)
        arguments = ["train", "--out", "place/run", *FLAGS]
    for folder in [Path.cwd(), *Path.cwd().parents][:3]:  # which pytest keeps to its own user
        if folder.stat().st_uid == os.getuid() and folder.parent != folder:
            folder.chmod(folder.stat().st_mode | 0o055)
    program = (
        "import os, sys; from gpt_parity.cli import main; flags = sys.argv[1:]; "
        f"main(['train', '--out', 'warm', *{FLAGS}]); "  # what is imported late may be out of reach
        "os.getuid() or os.setuid(65534); sys.exit(main(flags))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert process.returncode == 2, process
    place = "run/metrics.jsonl" if held else "place/run"
    assert process.stderr == (f"gpt-parity: error: {place}: cannot be written, Permission denied\n")
    if held:
        Path("run").chmod(0o755)
        assert Path("run/checkpoint.safetensors").read_bytes() == before


def test_a_folder_that_goes_away_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        after_step(3, lambda: Path("run").rename("away"), patch)
        assert train("run") == 2
    assert one_line(capsys) == (
        "gpt-parity: error: run: cannot be written, No such file or directory"
    )
    assert load_checkpoint(Path("away")).step == 2


def test_another_folder_of_that_name_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exchange() -> None:
        Path("run").rename("away")
        Path("run").mkdir()
        Path("run/notes.txt").write_text("mine")

    with monkeypatch.context() as patch:
        after_step(3, exchange, patch)
        assert train("run") == 2
    assert one_line(capsys) == (
        "gpt-parity: error: run: is another folder than at the start of the run"
    )
    assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]
    assert load_checkpoint(Path("away")).step == 2


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("absent", "absent: cannot be read, No such file or directory"),
        ("empty", "empty/checkpoint.safetensors: cannot be read, No such file or directory"),
        ("text.txt", "text.txt: is not a whole safetensors file"),
    ],
)
def test_there_is_nothing_to_go_on_from(
    place: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert main(["train", "--resume", place]) == 2
    assert one_line(capsys).startswith(f"gpt-parity: error: {message}")


def test_a_missing_folder_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("some/where/else") == 0
    assert load_checkpoint(Path("some/where/else")).step == 6


def test_a_file_in_the_place_of_the_folder_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("text.txt") == 2
    assert one_line(capsys) == "gpt-parity: error: text.txt: cannot be written, File exists"


def test_what_comes_back_from_the_disk_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that gives back another byte than was written: the old checkpoint stays."""
    import gpt_parity.checkpoint

    original, reads = gpt_parity.checkpoint.read_safetensors, []

    def faulty(path: Path) -> Any:
        arrays, manifest = original(path)
        reads.append(path)
        if len(reads) == 3:
            name = "optimizer/exp_avg_sq/output.output.bias"
            arrays[name].view("u1")[3] ^= 1
        return arrays, manifest

    with monkeypatch.context() as patch:
        patch.setattr(gpt_parity.checkpoint, "read_safetensors", faulty)
        assert train("run") == 2
    assert one_line(capsys) == (
        "gpt-parity: error: run/checkpoint.safetensors: cannot be written, "
        "optimizer/exp_avg_sq/output.output.bias came back from the disk with other content than "
        "was written; the last checkpoint, run/checkpoint.safetensors, is of step 1"
    )
    assert load_checkpoint(Path("run")).step == 1
    assert is_finished_by("run")
