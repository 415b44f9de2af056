"""The commands: what they write, one line for every mistake, signals, pipes and locales."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from gpt_parity import cli
from gpt_parity.backends import load_backend, thread_limit
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.cli import main
from gpt_parity.config import (
    BACKENDS,
    BenchConfig,
    CheckConfig,
    ExportConfig,
    GenerateConfig,
    GPTConfig,
    NamesConfig,
    TrainConfig,
    VerifyConfig,
)
from gpt_parity.corpus import CharDataset, read_corpus
from gpt_parity.display import Display, validation_table
from gpt_parity.lessons.config import ExplainConfig, FillValueConfig, LockstepConfig
from gpt_parity.provenance import command_line, provenance
from gpt_parity.run_folder import RUN_FILES
from gpt_parity.training import GPTTrainer, StepResult, new_trainer
from gpt_parity.training_run import Run
from gpt_parity.weights import get_weights

pytestmark = pytest.mark.reference("by hand")

CHECKOUT = Path(__file__).resolve().parents[1]
TEXT = "Früh übt sich, was ein Meister werden will.\n" * 12
SMALL = [
    "--context-size", "8", "--embedding-size", "8", "--blocks", "1", "--log-every", "2",
    "--sample-tokens", "5",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(TEXT.encode())


def train(*flags: str, out: str = "run") -> int:
    return main(["train", "--data", "text.txt", "--out", out, *SMALL, *flags])


def checkpoint(capsys: pytest.CaptureFixture[str], *flags: str) -> None:
    assert train("--max-steps", "4", *flags) == 0
    capsys.readouterr()


def one_error(capsys: pytest.CaptureFixture[str], code: int) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("gpt-parity: error: "), lines
    return lines[0].removeprefix("gpt-parity: error: ")


def command(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own, without PyTorch and without a locale."""
    environment = {
        **os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(CHECKOUT),
    }  # fmt: skip
    environment.pop("PYTHONUNBUFFERED", None)
    # A background shell starts its programs with SIGINT ignored; the tests send it.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.modules['torch'] = None; from gpt_parity.cli import main; sys.exit(main())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options,
    )  # fmt: skip


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
    assert lines[1] == "numpy float64, 9 steps, run in run"
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


# --- generate -------------------------------------------------------------------------------------


def test_characters_are_utf_8_without_a_locale(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(capsys)
    process = command("generate", "--checkpoint", "run", "--prompt", "hübü", "--tokens", "60",
                      "--temperature", "inf")  # fmt: skip
    out, err = process.communicate()
    assert err == b"" and process.returncode == 0
    text = out.decode("utf-8")
    assert text.startswith("hübü") and len(text) == 4 + 60 + 1
    assert "ü" in text[4:]  # an even draw from 20 characters, always the same


class Pipe(io.RawIOBase):
    """The other end of the output: every write of the system, as a reader without delay sees it."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.blocks.append(bytes(data))
        return len(self.blocks[-1])


def test_characters_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(capsys)
    pipe = Pipe()
    stdout = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="ascii")
    flags = ["--prompt", "hübü", "--tokens", "60", "--temperature", "inf"]
    with monkeypatch.context() as patch:  # undone before `capsys` puts back its own
        patch.setattr(sys, "stdout", stdout)
        assert main(["generate", "--checkpoint", "run", *flags]) == 0
    first, *others, end = [block.decode("utf-8") for block in pipe.blocks]
    assert first[:4] == "hübü" and len(first) == 5  # with the first character
    assert [len(block) for block in others] == [1] * 59 and end == "\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_generate_ends_quietly_on_a_signal(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(capsys)
    process = command("generate", "--checkpoint", "run", "--prompt", "F", "--tokens", "9999999")
    process.stdout.read(20)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (128 + number, b"")


def test_a_reader_that_goes_away_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(capsys)
    process = command("generate", "--checkpoint", "run", "--prompt", "F", "--tokens", "9999999")
    process.stdout.read(20)
    process.stdout.close()
    with process:
        assert (process.stderr.read(), process.wait(timeout=20)) == (b"", 141)


# --- mistakes -------------------------------------------------------------------------------------

BAD_TRAINING: list[tuple[list[str], str]] = [
    (["--data", "absent.txt"], "absent.txt: cannot be read, No such file or directory"),
    (["--data", "."], ".: cannot be read, Is a directory"),
    (["--data", "latin1.txt"], "latin1.txt: byte 0xfc at offset 2 is not UTF-8"),
    (["--data", "empty.txt"], "empty.txt: holds no text"),
    (
        ["--data", "short.txt", "--batch-size", "1"],
        "short.txt: test split has 2 characters of the 20 of the text, at least 9",
    ),
    (["--batch-size", "1000"], "text.txt: train split has"),
    (["--batch-size", "0"], "batch_size is 0, at least 1 is needed"),
    (["--context-size", "-3"], "context_size is -3, at least 1 is needed"),
    (["--embedding-size", "0"], "embedding_size is 0"),
    (["--blocks", "0"], "blocks is 0"),
    (["--epochs", "0"], "epochs is 0"),
    (["--max-steps", "0"], "max_steps is 0"),
    (["--eval-every", "0"], "eval_every is 0"),
    (["--log-every", "0"], "log_every is 0"),
    (["--sample-tokens", "0"], "sample_tokens is 0"),
    (["--threads", "0"], "threads is 0"),
    (["--threads", "257"], "threads is 257, at most 256 are needed"),
    (["--threads", "2.5"], 'Invalid value for --threads: unable to convert "2.5" into int'),
    (["--keep", "0"], "keep is 0"),
    (["--save-every", "0"], "save_every is 0"),
    (["--blocks", "100000000"], "blocks is 100000000, at most 10000 are needed"),
    (["--embedding-size", "10000000"], "a model of "),
    (["--resume", "absent", "--overwrite"], "resume and overwrite are both set"),
    (["--warmup", "-1"], "warmup is -1"),
    (["--seed", "-1"], "seed is -1"),
    (["--seed", "4294967296"], "seed is 4294967296, less than 2**32"),
    (["--learning-rate", "0"], "learning_rate is 0.0"),
    (["--learning-rate", "nan"], "learning_rate is nan"),
    (["--min-learning-rate", "1"], "min_learning_rate is 1.0, at most learning_rate"),
    (["--betas", "0.9", "1"], "betas are (0.9, 1.0)"),
    (["--eps", "-1"], "eps is -1.0"),
    (["--weight-decay", "inf"], "weight_decay is inf"),
    (["--max-norm", "0"], "max_norm is 0.0"),
    (["--out", "text.txt/run"], "text.txt/run: cannot be written, Not a directory"),
    (["--backend", "jax"], 'Invalid value "jax" for --backend.'),
    (["--dtype", "float16"], 'Invalid value "float16" for --dtype.'),
    (["--seed", "many"], 'Invalid value for --seed: unable to convert "many" into int.'),
    (["--lerning-rate", "1"], "Unknown option: --lerning-rate. Did you mean --learning-rate?"),
    (["stray"], "Unused"),
    (["--seed", "a\nb"], 'Invalid value for --seed: unable to convert "a'),
]


@pytest.mark.parametrize(("flags", "message"), BAD_TRAINING)
def test_a_mistake_in_training_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("latin1.txt").write_bytes("für".replace("f", "ab").encode("latin-1"))
    Path("empty.txt").write_bytes(b"")
    Path("short.txt").write_text("twenty characters!!\n")
    before = signal.getsignal(signal.SIGTERM), sys.stdout.encoding
    arguments = ["train", "--data", "text.txt", *SMALL]
    for flag in flags:  # a flag that stands twice would be a mistake of its own
        if flag in arguments:
            del arguments[arguments.index(flag) : arguments.index(flag) + 2]
    code = main([*arguments, *flags])
    found = one_error(capsys, code)
    assert found.startswith(message), found
    assert not Path("runs").exists() and not Path("run").exists()
    assert (signal.getsignal(signal.SIGTERM), sys.stdout.encoding) == before


BAD_GENERATION: list[tuple[list[str], str]] = [
    (["--prompt", ""], "prompt is empty, at least one character is needed"),
    (["--prompt", "F#Ω"], "prompt: text holds '#', 'Ω', only the 20 characters"),
    (["--tokens", "0"], "tokens is 0, at least 1 is needed"),
    (["--temperature", "-1"], "temperature is -1.0, 0 or more is needed"),
    (["--temperature", "nan"], "temperature is nan"),
    (["--top-k", "0"], "top_k is 0"),
    (["--seed", "-1"], "seed is -1"),
    (["--checkpoint", "absent"], "absent: cannot be read, No such file or directory"),
    (["--checkpoint", "."], "checkpoint.safetensors: cannot be read, No such file or directory"),
    (["--checkpoint", "text.txt"], "text.txt: is not a whole safetensors file"),
    (["--checkpoint", "half"], "half: is not a whole safetensors file"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_GENERATION)
def test_a_mistake_in_generation_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(capsys)
    whole = Path("run/checkpoint.safetensors").read_bytes()
    Path("half").write_bytes(whole[: len(whole) // 2])
    arguments = {"--checkpoint": "run", "--prompt": "Meister", flags[0]: flags[1]}
    code = main(["generate", *(part for pair in arguments.items() for part in pair)])
    found = one_error(capsys, code)
    assert found.startswith(message), found


def test_missing_arguments_and_commands_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--checkpoint requires an argument" in one_error(capsys, main(["generate"]))
    assert 'Unknown command "trian"' in one_error(capsys, main(["trian"]))


def test_missing_torch_says_how_to_install_it() -> None:
    for arguments in (
        ["train", "--data", "text.txt"],
        ["generate", "--checkpoint", "absent", "--prompt", "F"],
    ):
        process = command(*arguments, "--backend", "torch")
        out, err = process.communicate()
        assert (process.returncode, out) == (2, b"")
        lines = err.decode().splitlines()
        assert len(lines) == 1 and lines[0].startswith("gpt-parity: error: backend 'torch' needs ")
        assert 'python -m pip install -c constraints.txt -e ".[torch]" (in a checkout)' in lines[0]
    assert not Path("runs").exists()


# --- help, scripts, imports -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("train", TrainConfig),
        ("generate", GenerateConfig),
        ("verify", VerifyConfig),
        ("explain", ExplainConfig),
        ("lockstep", LockstepConfig),
        ("bench", BenchConfig),
        ("experiment fill-value", FillValueConfig),
        ("oracle export", ExportConfig),
        ("oracle check", CheckConfig),
        ("oracle names", NamesConfig),
    ],
)
def test_help_explains_every_flag(
    name: str, config: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by COLUMNS, which counts only if it stood there when the console was made.
    monkeypatch.setattr(cli.app, "console", cli.PipeConsole(width=200))
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: gpt-parity {name} " in shown
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        line = next(line for line in shown.splitlines() if re.match(rf"│ [ *]*{flag} ", line))
        assert re.search(r"[A-Z].+ [a-z]+.*\.", line.split(flag)[1]), f"{flag} is bare"
        if isinstance(field.default, int | float | str) and field.default is not None:
            assert f"[default: {field.default}]" in line


def test_version_and_help_come_without_heavy_imports() -> None:
    program = (
        "import sys, gpt_parity, numpy_impl; "
        "assert not {'torch', 'cyclopts', 'rich', 'safetensors'} & set(sys.modules); "
        "from gpt_parity.cli import main; code = main(['--version']) or main(['--help']); "
        "assert not {'torch', 'safetensors'} & set(sys.modules); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert re.match(r"gpt-parity \d+\.\d+", result.stdout) and "verify" in result.stdout


SCRIPTS = sorted(path.name for path in (CHECKOUT / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_from_anywhere_and_show_an_example(script: str) -> None:
    """And what they do not know ends in one line."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(flag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(CHECKOUT / "scripts" / script), flag],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip

    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "") and "Example: " in shown.stdout
    if script in ("train.py", "generate.py"):
        assert shown.stdout.startswith(f"Usage: gpt-parity {Path(script).stem} ")
    wrong = run("--nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("gpt-parity: error: ") and wrong.stderr.count("\n") == 1


# --- provenance and threads -----------------------------------------------------------------------


def test_provenance_names_no_place_of_this_machine(tmp_path: Path) -> None:
    here = Path.cwd()
    argv = ["/opt/bin/gpt-parity", "train", "--data", str(here / "a b.txt"), "--out=/srv/x/run"]
    assert command_line(argv) == "gpt-parity train --data 'a b.txt' --out=run"
    argv = ["/somewhere/gpt_parity/__main__.py", "train"]
    assert command_line(argv) == "python -m gpt_parity train"
    facts = provenance(argv)
    assert str(here) not in json.dumps(facts) and str(CHECKOUT) not in json.dumps(facts)
    assert facts == json.loads(json.dumps(facts)) == provenance(argv)
    assert {"gpt_parity", "python", "numpy", "torch", "blas", "threads", "machine"} <= set(facts)


def test_provenance_needs_neither_git_nor_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None
    monkeypatch.setattr("gpt_parity.provenance.CHECKOUT", tmp_path)
    assert provenance()["commit"] is None


def test_threads_are_given_back() -> None:
    import torch

    def threads() -> tuple[list[int], int]:
        blas = [b["num_threads"] for b in threadpool_info() if b["user_api"] == "blas"]
        return blas, torch.get_num_threads()

    with thread_limit(1, "torch"):
        before = threads()
        with pytest.raises(KeyError), thread_limit(2, "torch"):
            assert threads() == ([2] * len(before[0]), 2)
            raise KeyError
        assert threads() == before == ([1] * len(before[0]), 1) and before[0]


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


@pytest.mark.parametrize(("flags", "threads"), [((), 1), (("--threads", "2"), 2)])
def test_the_threads_of_a_run_stand_in_its_folder(flags: tuple[str, ...], threads: int) -> None:
    assert train("--max-steps", "2", *flags) == 0
    assert json.loads(Path("run/config.json").read_text())["train"]["threads"] == threads
