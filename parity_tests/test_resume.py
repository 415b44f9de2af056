"""Runs that end early and go on: from any moment, to the bit, and never into something else."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from gpt_parity.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from gpt_parity.cli import main
from gpt_parity.config import BACKENDS, TrainConfig
from gpt_parity.run_folder import existing_folder
from gpt_parity.training import GPTTrainer, new_trainer, stream
from gpt_parity.training_run import Run
from gpt_parity.weights import set_weights

pytestmark = pytest.mark.reference("exact property")

TEXT = "Früh übt sich, was ein Meister werden will.\r\n" * 12
FLAGS = [
    "--context-size", "8", "--embedding-size", "8", "--blocks", "1", "--sample-tokens", "20",
    "--max-steps", "6", "--warmup", "2", "--log-every", "4", "--eval-every", "3",
    "--save-every", "2",
]  # fmt: skip
VARIANTS = [
    ("numpy", "float32", "1"), ("numpy", "float64", "2"), ("torch", "float32", "1"),
    ("torch", "float64", "1"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(TEXT.encode())


def train(out: str, *flags: str) -> int:
    return main(["train", "--data", "text.txt", "--out", out, *FLAGS, *flags])


def resume(folder: str, *flags: str) -> int:
    return main(["train", "--resume", folder, *flags])


def kill_at(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process the signal while training takes its `step`-th step."""
    original = GPTTrainer.train_step

    def train_step(trainer: GPTTrainer, tokens: np.ndarray, targets: np.ndarray) -> Any:
        if trainer.steps + 1 == step:
            os.kill(os.getpid(), number)
        return original(trainer, tokens, targets)

    monkeypatch.setattr(GPTTrainer, "train_step", train_step)


def results(folder: str) -> dict[str, Any]:
    """All that a run leaves behind and that the clock does not touch."""
    checkpoint = load_checkpoint(Path(folder))
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return {
        "arrays": arrays(checkpoint),
        "step": checkpoint.step,
        "run": replace(checkpoint.run, history=[], metrics_size=0),
        "metrics": [{k: v for k, v in m.items() if k != "tokens_per_second"} for m in lines],
        "sample": Path(folder, "sample.txt").read_bytes(),
    }


def arrays(checkpoint: Checkpoint) -> dict[str, bytes]:
    found = {f"weights {name}": array.tobytes() for name, array in checkpoint.weights.items()}
    for kind, values in checkpoint.optimizer.items():
        found |= {f"{kind} {name}": np.asarray(value).tobytes() for name, value in values.items()}
    return found | {"sample": str(checkpoint.run.sample.get_state()).encode()}


# --- the same to the bit --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_stopped_run_goes_on_to_the_bit(
    step: int, variant: tuple[str, str, str], number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In weights, moments, metrics and the sample; stopped before, at and after a validation."""
    backend, dtype, threads = variant
    flags = ["--backend", backend, "--dtype", dtype, "--threads", threads]
    assert train("unbroken", *flags) == 0
    with monkeypatch.context() as patch:
        kill_at(step, number, patch)
        capsys.readouterr()
        assert train("stopped", *flags) == 128 + number
    error = capsys.readouterr().err
    assert error == (
        f"gpt-parity: stopped by {number.name} after step {step} of 6; go on with: gpt-parity "
        "train --resume stopped\n"
    )
    assert load_checkpoint(Path("stopped")).step == step
    assert resume("stopped") == 0
    assert results("stopped") == results("unbroken")


def test_a_run_goes_on_from_any_moment_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a copy of its folder before and after each write, as if killed there."""
    copies: list[str] = []

    def copied(method: str, patch: pytest.MonkeyPatch) -> None:
        original = getattr(Run, method)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            for moment in ("before", "after"):
                result = original(self, *arguments, **options) if moment == "after" else None
                if Path("run/checkpoint.safetensors").exists():
                    copies.append(f"copy{len(copies)}")
                    shutil.copytree("run", copies[-1])
            return result

        patch.setattr(Run, method, call)

    with monkeypatch.context() as patch:
        for method in ("save", "validate", "after_step", "_sample"):
            copied(method, patch)
        assert train("run") == 0
    assert len(copies) > 20
    expected = results("run")
    steps = {load_checkpoint(Path(copy)).step for copy in copies}
    assert steps == {0, 2, 3, 4, 6}
    for copy in copies:
        assert resume(copy) == 0, capsys.readouterr()
        assert results(copy) == expected, copy


def test_what_a_killed_process_wrote_half_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    expected = results("run")
    with Path("run/metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"event": "train", "step": 7, "lo')
    Path("run/.checkpoint.safetensors.0123.part").write_bytes(b"half")
    Path("run/sample.txt").unlink()
    assert resume("run") == 0
    assert results("run") == expected
    assert not list(Path("run").glob(".*"))


def test_a_run_goes_on_from_an_earlier_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--keep", "4") == 0
    expected = results("run")
    assert resume("run/checkpoint-3.safetensors") == 0
    assert results("run") == expected


def test_a_run_that_changes_its_backend_stays_beside_the_unbroken_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, there and back, in float64: what a hop lost would be far larger."""
    assert train("unbroken", "--dtype", "float64") == 0
    for step, backend in ((2, "numpy"), (4, "torch")):
        with monkeypatch.context() as patch:
            kill_at(step, signal.SIGINT, patch)
            flags = ["--dtype", "float64"]
            assert (
                train("run", *flags) if step == 2 else resume("run", "--backend", backend)
            ) == 130
    assert resume("run", "--backend", "numpy") == 0
    ends = [load_checkpoint(Path(name)) for name in ("unbroken", "run")]
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, array in ends[0].optimizer[kind].items():
            other = ends[1].optimizer[kind][name]
            assert np.abs(array - other).max() <= 1e-11 * np.abs(array).max(), name
    for name, array in ends[0].weights.items():
        assert np.abs(array - ends[1].weights[name]).max() <= 1e-11 * np.abs(array).max(), name
    assert [h["backend"] for h in ends[1].run.history] == ["numpy", "torch", "numpy"]


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


def test_an_earlier_checkpoint_becomes_the_newest_before_metrics_are_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    assert train("run", "--keep", "9") == 0
    expected = results("run")
    with monkeypatch.context() as patch:
        patch.setattr(GPTTrainer, "train_step", killed)
        assert resume("run/checkpoint-3.safetensors") == 130
    assert load_checkpoint(Path("run")).step == 3
    assert resume("run") == 0
    assert results("run") == expected


def test_the_history_says_who_took_which_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        kill_at(2, signal.SIGINT, patch)
        assert train("run", "--dtype", "float64") == 130
    assert resume("run", "--backend", "torch") == 0
    run = load_checkpoint(Path("run")).run
    assert [(h["step"], h["backend"], h["threads"]) for h in run.history] == [
        (0, "numpy", 1), (2, "torch", 1),
    ]  # fmt: skip
    assert load_checkpoint(Path("run")).backend == "torch"


def test_the_random_state_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever was drawn before: the sample continues the saved generator, not the seed."""
    assert train("run") == 0
    saved = load_checkpoint(Path("run"))
    model, config = saved.build_model(), TrainConfig.from_recipe(saved.run.recipe)
    trainer = new_trainer(config, saved.config)
    saved.load_optimizer(trainer.model, trainer.optimizer)
    set_weights(trainer.model, saved.weights)
    saved.run.sample.random_sample(1000)  # past one refill of its 624 words
    save_checkpoint(
        Path("run/checkpoint.safetensors"), trainer.model, config=saved.config,
        vocabulary=saved.vocabulary, step=6, optimizer=trainer.optimizer, run=saved.run,
    )  # fmt: skip
    expected = "".join(stream(model, saved.tokenizer, "\n", 20, seed=saved.run.sample))
    before = Path("run/sample.txt").read_bytes().decode()
    assert resume("run") == 0
    assert Path("run/sample.txt").read_bytes().decode() == "\n" + expected != before


# --- the last checkpoints -------------------------------------------------------------------------


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


# --- refusals -------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], folder: str, *flags: str) -> str:
    """The one line of a refusal that leaves the run's folder as it is."""
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    capsys.readouterr()
    assert resume(folder, *flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and before == {p: p.read_bytes() for p in Path("run").iterdir()}
    return lines[0].removeprefix("gpt-parity: error: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--seed", "42"],
            "seed is 42, the run in run has 7 and keeps it; only --accumulate, --anomaly, "
            "--backend, --compile, --data, --device, --keep, --save-every, --shard, --threads may "
            "change on the way",
        ),
        (["--max-steps", "9"], "max_steps is 9, the run in run has 6"),
        (["--log-every", "9"], "log_every is 9, the run in run has 4"),
        (["--eval-every", "2"], "eval_every is 2, the run in run has 3"),
        (["--max-norm", "inf"], "max_norm is inf, the run in run has 1.0"),
        (["--dtype", "float64"], "dtype is float64"),
        (["--betas", "0.9", "0.99"], r"betas is (0.9, 0.99), the run in run has (0.9, 0.999)"),
        (["--out", "other"], "out is other, the run in run has run"),
        (["--overwrite"], "resume and overwrite are both set"),
        (["--data", "other.txt"], "other.txt: has sha256"),
        (["--data", "absent.txt"], "absent.txt: cannot be read"),
    ],
)
def test_what_shapes_a_run_stays(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the flag has its own default for value."""
    assert train("run", "--seed", "7") == 0
    Path("other.txt").write_bytes(TEXT.encode() + b"!")
    assert refused(capsys, "run", *flags).startswith(message)


def test_flags_that_agree_with_the_run_are_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--seed", "7") == 0
    expected = results("run")
    assert resume("run", "--seed", "7", "--out", "./run", "--data", "text.txt", "--keep", "2") == 0
    assert results("run") == expected


def test_the_text_of_the_run_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    Path("text.txt").rename("moved.txt")
    assert refused(capsys, "run") == (
        "run: was trained on text.txt, which is not here; --data FILE of that text is needed"
    )
    assert resume("run", "--data", "moved.txt") == 0


def test_a_model_alone_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    saved = load_checkpoint(Path("run"))
    save_checkpoint(
        Path("run/checkpoint.safetensors"), saved.build_model(), config=saved.config,
        vocabulary=saved.vocabulary, step=saved.step,
    )  # fmt: skip
    assert refused(capsys, "run").startswith("run: holds a model alone")


@pytest.mark.parametrize(
    ("step", "changes"),
    [(6, {"epoch": 1}), (6, {"batch": 0}), (6, {"total_steps": 7}), (7, {"batch": 7})],
)
def test_positions_that_contradict_each_other_are_refused(
    step: int, changes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    saved = load_checkpoint(Path("run"))
    assert (saved.run.epoch, saved.run.batch) == (0, 6)
    config = TrainConfig.from_recipe(saved.run.recipe)
    trainer = new_trainer(config, saved.config)
    save_checkpoint(
        Path("run/checkpoint.safetensors"), trainer.model, config=saved.config,
        vocabulary=saved.vocabulary, step=step, optimizer=trainer.optimizer,
        run=replace(saved.run, **changes),
    )  # fmt: skip
    assert refused(capsys, "run").startswith(
        f"checkpoint of step {step}: epoch, batch and total steps"
    )


def rewrite(arrays: Callable[[dict[str, Any]], Any], run: Callable[[dict[str, Any]], Any]) -> None:
    """Change the checkpoint of the folder "run" by hand."""
    path = Path("run/checkpoint.safetensors")
    data = path.read_bytes()
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    manifest = json.loads(header["__metadata__"]["manifest"])
    arrays(tensors)
    run(manifest["run"])
    path.write_bytes(save(tensors, metadata={"manifest": json.dumps(manifest)}))


def nothing(_: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("arrays", "run", "message"),
    [
        (nothing, lambda r: r["recipe"].update(embedding_size=4),
         "manifest: run is of (GPTConfig(vocab_size="),
        (nothing, lambda r: r["recipe"].update(backend="torch"), "manifest: run is of (GPTConfig("),
        (nothing, lambda r: r["recipe"].pop("seed"), "recipe has ["),
        (nothing, lambda r: r["recipe"].update(dropout=0), "recipe has ["),
        (nothing, lambda r: r["recipe"].update(heads=2), "heads is 2, which only --model gpt2 has"),
        (nothing, lambda r: r["recipe"].update(model="gpt2"), "manifest: run is of (GPT2Config("),
        (nothing, lambda r: r["recipe"].update(preset=[]), "preset is [], one of ('baby',"),
        (nothing, lambda r: r["recipe"].update(keep=0), "keep is 0, at least 1 is needed"),
        (nothing, lambda r: r.pop("loss_sum"), "manifest: run has ["),
        (nothing, lambda r: r.update(corpus={}), "corpus: name is None"),
        (nothing, lambda r: r["corpus"].update(path=""), "corpus: path has 0 characters"),
        (nothing, lambda r: r["corpus"].update(path="x" * 5000), "corpus: path has 5000"),
        (nothing, lambda r: r["recipe"].update(betas=5), "betas is 5, two numbers are needed"),
        (nothing, lambda r: r.update(history=[math.nan]), "history has nan"),
        (nothing, lambda r: r.update(history=[{"step": math.inf}]), "history has {'step': inf}"),
        (nothing, lambda r: r.update(history=[{"step": [[]]}]), "history has {'step': [[]]}"),
        (lambda a: a.pop("state/random/sample"), nothing, "random: sample missing"),
        (lambda a: a.update({"state/random/sample": a["state/random/sample"][1:]}), nothing,
         "random: sample has shape (624,), (625,) is needed"),
        (lambda a: a["state/random/sample"].__setitem__(624, 625), nothing,
         "random: sample is at place 625, at most 624 is needed"),
        (lambda a: [a.pop(name) for name in list(a) if name.startswith(("optimizer/", "state/s"))],
         nothing, "manifest: run is one without an optimizer"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_that_of_the_run_is_refused(
    arrays: Callable[[dict[str, Any]], Any], run: Callable[[dict[str, Any]], Any], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert train("run", "--keep", "1") == 0
    rewrite(nothing, nothing)
    assert load_checkpoint(Path("run")).step == 6  # it is the change that is refused
    rewrite(arrays, run)
    assert refused(capsys, "run").startswith(f"run/checkpoint.safetensors: {message}")


def test_an_unbounded_norm_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--max-norm", "inf") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    recipe = json.loads(Path("run/config.json").read_text(), parse_constant=refuse)["train"]
    assert recipe["max_norm"] is None
    assert TrainConfig.from_recipe(load_checkpoint(Path("run")).run.recipe).max_norm == math.inf
    expected = results("run")
    assert resume("run/checkpoint-4.safetensors", "--max-norm", "inf") == 0
    assert results("run") == expected


@pytest.mark.skipif(os.name != "posix", reason="needs file locks: run on Linux or macOS")
def test_one_process_at_a_time_trains_into_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    with existing_folder(Path("run")):
        assert refused(capsys, "run").startswith("run: another process trains into it")
        assert train("run", "--overwrite") == 2
    assert resume("run") == 0


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


def test_a_run_without_steps_left_says_so_and_its_loss_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert resume("run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "numpy float32, 6 steps, all taken, run in run" and lines[-1] == last


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


def test_a_run_that_lost_its_configuration_gets_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    before = json.loads(Path("run/config.json").read_text())
    Path("run/config.json").unlink()
    assert resume("run") == 0
    after = json.loads(Path("run/config.json").read_text())
    assert after | {"provenance": 0} == before | {"provenance": 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_checkpoint_is_there_before_the_first_step(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GPTTrainer, "train_step", killed)
        assert train("run", "--backend", backend) == 130
    assert load_checkpoint(Path("run")).step == 0
    assert train("unbroken", "--backend", backend) == 0
    assert resume("run") == 0
    assert results("run") == results("unbroken")
