"""The command that trains: what it writes and shows, and how it ends on signals and pipes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.backends import load_backend
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset, read_corpus
from gpt_parity.display import Display, validation_table
from gpt_parity.model_config import GPTConfig
from gpt_parity.run_folder import RUN_FILES
from gpt_parity.training import GPTTrainer, StepResult, new_trainer
from gpt_parity.training_run import Run
from gpt_parity.weights import get_weights
from parity_tests.command_line import (
    CHECKOUT,
    SMALL,
    TEXT,
    command,
    one_error,
    train,
)

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]


# --- train ----------------------------------------------------------------------------------------


def test_train_writes_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--max-steps", "9", "--eval-every", "3", "--dtype", "float64") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    vocabulary = "".join(sorted(set(TEXT)))
    config = GPTConfig(len(vocabulary), 8, 8, 1)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert lines[0] == (
        f"text.txt: {len(TEXT)} characters, vocabulary {len(vocabulary)}, "
        f"{config.parameter_count():,} parameters, sha256 {digest[:16]}"
    )
    assert lines[1] == "numpy float64 on 1 thread, 9 steps, run in run"
    assert re.fullmatch(r"test loss \d\.\d{4} over 3 batches", lines[-1])

    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if m["event"] == "train"] == [2, 4, 6, 8, 9]
    validations = [(m["step"], m["loss"]) for m in metrics if m["event"] == "validation"]
    assert [step for step, _ in validations] == [3, 6, 9]
    assert lines[-1] == f"test loss {validations[-1][1]:.4f} over 3 batches"
    assert lines[-4:-1] == validation_table(validations)[1:]

    saved = load_checkpoint(Path("run"), config=config, vocabulary=vocabulary)
    assert (saved.backend, saved.dtype, saved.step) == ("numpy", "float64", 9)
    assert set(saved.optimizer["steps"].values()) == {9}
    described = json.loads(Path("run/config.json").read_text())
    assert described["corpus"]["sha256"] == digest
    assert described["train"]["max_steps"] == 9 and described["provenance"]["numpy"]
    sample = Path("run/sample.txt").read_bytes().decode()
    assert sample[0] == "\n" and len(sample) == 1 + 5 and set(sample) <= set(vocabulary)
    assert sorted(f.name for f in Path("run").iterdir()) == sorted(
        [*(set(RUN_FILES) - {"loss.png"}), "checkpoint-6.safetensors"]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_train_does_what_the_trainer_does(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags reach the recipe: the command's weights are those of the same steps by hand."""
    flags = ["--backend", backend, "--max-steps", "5", "--seed", "9", "--batch-size", "3",
             "--learning-rate", "0.02", "--warmup", "2", "--min-learning-rate", "0.01",
             "--betas", "0.8", "0.9", "--eps", "1e-5", "--weight-decay", "0.1",
             "--max-norm", "0.5"]  # fmt: skip
    assert train(*flags) == 0
    implementation = load_backend(backend)
    dataset = CharDataset(TEXT, context_size=8, batch_size=3)
    model = implementation.GPT(dataset.vocab_size, 8, 8, 1, seed=9)
    optimizer = implementation.AdamWOptimizer(model.parameters(), 0.0, (0.8, 0.9), 1e-5, 0.1)
    trainer = GPTTrainer(model, implementation.GPTLoss(), optimizer, 0.5)
    rates = [0.01, 0.02, 0.02, 0.0175, 0.0125]  # 1/2, 1, then cos 0, cos(pi/3), cos(2 pi/3)
    results = trainer.train(dataset, 1, rates.__getitem__, max_steps=5)
    ours, theirs = get_weights(model), load_checkpoint(Path("run")).weights
    for name, array in ours.items():  # the command's cosine is rounded, these rates are not
        distance = abs(array.astype(float) - theirs[name]).max()
        assert distance <= 2.0**-20 * abs(array).max(), name
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["loss"] == (results[0].loss + results[1].loss) / 2
    assert metrics[0]["grad_norm"] == results[1].grad_norm and metrics[0]["lr"] == 0.02


@pytest.mark.reference("by hand")
def test_the_last_line_of_metrics_is_the_mean_of_its_own_steps() -> None:
    """Losses 5, 1 and 2, 4 and 9, every 2 of 5 steps: means 3, 3 and 9."""
    config = TrainConfig(log_every=2, out=Path("run"), context_size=8, embedding_size=4, blocks=1)
    Path("run").mkdir()
    corpus = read_corpus(Path("text.txt"))
    dataset = CharDataset(corpus.text, context_size=8, batch_size=4)
    trainer = new_trainer(config, config.model_config(dataset.vocab_size))
    run = Run(config, corpus, dataset, trainer, 5, np.random.RandomState(0), None)
    with run.metrics:
        for step, loss in enumerate((5.0, 1.0, 2.0, 4.0, 9.0), start=1):
            run.after_step(step, StepResult(loss, 0.5, 0.25))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["loss"]) for m in lines] == [(2, 3.0), (4, 3.0), (5, 9.0)]


@pytest.mark.reference("exact property")
def test_every_line_of_metrics_is_the_mean_of_the_steps_since_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever the interval: 7 steps in lines of 1, 3 and 5."""
    losses: dict[int, dict[int, float]] = {}
    for every in (1, 3, 5):
        flags = ["--context-size", "4", "--embedding-size", "4", "--blocks", "1", "--out",
                 f"run{every}", "--max-steps", "7", "--log-every", str(every)]  # fmt: skip
        assert main(["train", "--data", "text.txt", *flags]) == 0
        lines = Path(f"run{every}/metrics.jsonl").read_text().splitlines()
        metrics = [m for m in map(json.loads, lines) if m["event"] == "train"]
        losses[every] = {m["step"]: m["loss"] for m in metrics}
    for every, found in losses.items():
        ends = [*range(every, 7, every), 7]
        starts = [0, *ends[:-1]]
        assert list(found) == ends
        for start, end in zip(starts, ends, strict=True):
            steps = [losses[1][step] for step in range(start + 1, end + 1)]
            assert found[end] == sum(steps) / len(steps)


def test_both_backends_train_and_continue_alike(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {}
    for backend in BACKENDS:
        assert train("--backend", backend, "--dtype", "float64", "--epochs", "2", out=backend) == 0
        lines = capsys.readouterr().out.splitlines()
        outputs[backend] = lines[:1] + lines[2:]
    assert outputs["numpy"] == outputs["torch"]
    assert Path("numpy/sample.txt").read_text("utf-8") == Path("torch/sample.txt").read_text(
        "utf-8"
    )
    texts = set()
    for backend in BACKENDS:
        for place in ("numpy", "numpy/checkpoint.safetensors"):
            flags = ["--backend", backend, "--checkpoint", place, "--prompt", "Früh ",
                     "--tokens", "40", "--temperature", "0.9", "--top-k", "9"]  # fmt: skip
            assert main(["generate", *flags]) == 0
            texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith("Früh ") and len(text) == len("Früh ") + 40 + 1 and text[-1] == "\n"


def test_without_a_text_the_built_in_one_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gpt_parity.corpus.CHECKOUT", tmp_path)
    assert main(["train", *SMALL, "--max-steps", "1", "--batch-size", "5000"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    pattern = (
        r"data/tinyshakespeare.txt is absent, trained on pydoc topics of Python 3\.\S+: [\d,]+ "
        r"characters, vocabulary \d+, [\d,]+ parameters, sha256 [0-9a-f]{16}"
    )
    assert re.fullmatch(pattern, first)
    assert Path("runs/numpy-float32-seed42/checkpoint.safetensors").exists()


def test_a_run_is_replaced_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--max-steps", "2") == 0
    before = {file: file.read_bytes() for file in Path("run").iterdir()}
    capsys.readouterr()
    message = one_error(capsys, train("--max-steps", "3"))
    assert message.startswith("run: holds a run already") and "--overwrite" in message
    assert before == {file: file.read_bytes() for file in Path("run").iterdir()}
    Path("run/notes.txt").write_text("mine")
    assert train("--max-steps", "3", "--overwrite") == 0
    assert load_checkpoint(Path("run")).step == 3
    assert Path("run/notes.txt").read_text() == "mine"
    capsys.readouterr()
    one_error(capsys, train("--learning-rate", "1e30", "--warmup", "0", "--overwrite"))
    assert load_checkpoint(Path("run")).step == 0  # a later one would be that of another run
    assert not list(Path("run").glob("checkpoint-*"))


def test_diverging_training_is_one_line_and_keeps_the_last_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--learning-rate", "1e30", "--warmup", "0", "--eval-every", "1"]
    message = one_error(capsys, train(*flags))
    assert re.match(
        r"(training step 2|test batch 1): loss: got (nan|inf), needed a finite number; first not "
        r"finite: transformers.0.attention.\w+.\w+put \(\d+ of \d+ values\)",
        message,
    ), message
    assert message.endswith("the last checkpoint, run/checkpoint.safetensors, is of step 1")
    assert load_checkpoint(Path("run")).step == 1


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal: run on Linux or macOS")
def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    import pty

    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt_parity", "train", "--data", "text.txt", "--out", "run",
         *SMALL, "--max-steps", "4000", "--epochs", "1000", "--eval-every", "2000"],
        stdout=follower, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    os.close(follower)
    seen = bytearray()
    try:
        while block := os.read(leader, 4096):
            seen += block
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    os.close(leader)
    assert (process.wait(), process.communicate()[1]) == (0, b"")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())  # without colours
    assert re.search(r"/4000 loss \d\.\d{4}  [\d,]+ tokens/s  \d+:\d\d left", text)
    assert "step 2000  validation loss " in text and "over 3 batches" in text


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal: run on Linux or macOS")
def test_a_signal_under_a_live_bar_leaves_the_command_that_goes_on() -> None:
    """Bar and last line on one terminal: the line stands alone, whatever the bar drew."""
    import pty

    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt_parity", "train", "--data", "text.txt", "--out", "run",
         *SMALL, "--epochs", "100000"],
        stdout=follower, stderr=follower, env=environment,
    )  # fmt: skip
    os.close(follower)
    seen = bytearray()
    stopped = False
    try:
        while block := os.read(leader, 4096):
            seen += block
            if b"tokens/s" in seen and not stopped:
                process.send_signal(signal.SIGINT)
                stopped = True
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    os.close(leader)
    assert process.wait() == 130
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r\n", "\n")
    last = text.rstrip("\n").splitlines()[-1]
    step = load_checkpoint(Path("run")).step
    assert re.fullmatch(
        rf"gpt-parity: stopped by SIGINT after step {step} of \d+; go on with: python -m "
        r"gpt_parity train --resume run", last.rpartition("\r")[2],
    ), last  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_last_finished_step(number: signal.Signals) -> None:
    flags = ["--data", "text.txt", "--out", "run", *SMALL, "--epochs", "100000"]
    process = command("train", *flags, "--eval-every", "1000")
    line = b""
    while b"step 1000 " not in line:
        line = process.stdout.readline()
        assert line, process.communicate()
    time.sleep(0.1)  # some steps further, so that the checkpoint found is a later one
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    found = re.fullmatch(
        rf"gpt-parity: stopped by {number.name} after step (\d+) of \d+; go on with: gpt-parity "
        r"train --resume run\n",
        err.decode(),
    )
    assert found, err
    saved = load_checkpoint(Path("run"))
    assert saved.step == int(found[1]) and 1000 < saved.step < 2000  # not at the next validation
    assert set(saved.optimizer["steps"].values()) == {saved.step}
    metrics = Path("run/metrics.jsonl").read_text()
    assert metrics.endswith("\n") and [json.loads(line) for line in metrics.splitlines()]


def test_training_into_a_closed_pipe_saves_the_last_finished_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(display: Display, text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("gpt_parity.display.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(Display, "line", closed)
    assert train("--max-steps", "3") == 141
    assert capsys.readouterr().err == ""
    assert load_checkpoint(Path("run")).step == 1


# --- display --------------------------------------------------------------------------------------


def test_the_table_shows_the_curve() -> None:
    points = [(10, 3.0), (20, 2.0), (30, 2.5)]
    assert validation_table(points) == [
        "step  validation loss",
        f"  10  3.0000  {'#' * 41}",
        "  20  2.0000  #",
        f"  30  2.5000  {'#' * 21}",
    ]
    assert validation_table([(1, 2.0), (2, 2.0)])[1:] == ["   1  2.0000  #", "   2  2.0000  #"]
    many = validation_table([(step, 1.0 / step) for step in range(1, 1001)])
    assert len(many) == 21 and many[-1].startswith("1000  0.0010")


def test_the_display_draws_by_the_clock_and_not_by_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with Display(total=1000, tokens_per_step=10) as display:
        now[0] += 9.9
        assert not display.is_due()
        now[0] += 0.1
        assert display.is_due()
        display.show(200, 1.5)
        assert not display.is_due()
        with display.paused():
            now[0] += 1000.0
        assert display.rate(200) == 200.0
    assert capsys.readouterr().out == "step 200/1000  loss 1.5000  200 tokens/s  0:40 left\n"


def test_the_display_of_a_run_that_goes_on_counts_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with Display(total=1000, tokens_per_step=10, first=500) as display:
        now[0] += 10.0
        assert display.rate(700) == 200.0
        display.show(700, 1.5)
    assert capsys.readouterr().out == "step 700/1000  loss 1.5000  200 tokens/s  0:15 left\n"
