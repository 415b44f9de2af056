"""The bodies of the commands `train` and `generate`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from gpt_parity.backends import load_backend
from gpt_parity.config import GenerateConfig, GPTConfig, TrainConfig
from gpt_parity.corpus import CharDataset, Corpus, read_corpus
from gpt_parity.files import write_atomically
from gpt_parity.provenance import portable, provenance
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer, StepResult, new_trainer, stream
from gpt_parity.weights import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from numpy_impl.memory import keep_freed_memory

CONFIG_NAME = "config.json"
METRICS_NAME = "metrics.jsonl"
SAMPLE_NAME = "sample.txt"
RUN_FILES = (CONFIG_NAME, METRICS_NAME, CHECKPOINT_NAME, SAMPLE_NAME)

SECONDS_BETWEEN_FRAMES = 0.25
SECONDS_BETWEEN_LINES = 10.0


def train(config: TrainConfig) -> int:
    """Train, test and sample one model; returns the exit code, 128 + number after a signal.

    Raises, before the folder of the run is touched, ValueError for a text or a configuration
    that does not do; OSError for a folder that cannot be written; FloatingPointError when
    training diverges (the checkpoint of the last validation stays).
    """
    load_backend(config.backend)
    keep_freed_memory()
    config = replace(config, threads=config.cores)  # what is chosen here stands in config.json
    corpus = read_corpus(config.data)
    try:
        dataset = CharDataset(
            corpus.text, context_size=config.context_size, batch_size=config.batch_size
        )
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from error
    steps = config.epochs * dataset.batch_count("train")
    steps = min(steps, config.max_steps or steps)
    scheduler = WarmupCosineScheduler(
        config.learning_rate, steps, config.warmup, config.min_learning_rate
    )
    model_config = config.model(dataset.vocab_size)
    trainer = new_trainer(config, model_config)

    folder = config.run_folder
    open_run_folder(folder, config.overwrite)
    facts = provenance()
    write_atomically(folder / CONFIG_NAME, _config_json(config, model_config, corpus, facts))
    print(_corpus_line(corpus, model_config))
    print(f"{config.backend} {config.dtype}, {steps} steps, run in {folder}", flush=True)

    with (
        (folder / METRICS_NAME).open("w", encoding="utf-8", newline="\n") as metrics,
        Display(steps, config.batch_size * config.context_size) as display,
        StopBetweenSteps() as stop,
    ):
        run = Run(config, model_config, dataset, trainer, steps, facts, metrics, display, stop)
        try:
            trainer.train(
                dataset, config.epochs, scheduler, max_steps=steps, on_step=run.after_step
            )
            loss = run.validate()
        except BrokenPipeError:
            run.save()
            raise
        except Stop as signal_seen:
            run.save()
            print(
                f"gpt-parity: stopped by {signal_seen} after step {trainer.steps}, checkpoint in "
                f"{folder / CHECKPOINT_NAME}",
                file=sys.stderr,
            )
            return 128 + signal_seen.number
    sample_text = trainer.generate(
        dataset, _first_prompt(dataset), config.sample_tokens, seed=config.seed
    )
    write_atomically(folder / SAMPLE_NAME, sample_text.encode("utf-8"))
    if len(run.validations) > 1:
        print("\n".join(validation_table(run.validations)))
    print(f"test loss {loss:.4f} over {dataset.batch_count('test')} batches")
    return 0


def generate(config: GenerateConfig) -> int:
    """Write the prompt and its continuation, characters as they come; returns the exit code.

    Raises ValueError for a checkpoint or prompt that does not do.
    """
    load_backend(config.backend)
    keep_freed_memory()
    checkpoint = load_checkpoint(config.checkpoint)
    prompt = config.prompt
    if any("\udc80" <= character <= "\udcff" for character in prompt):
        # Bytes of the command line that the locale could not decode: they are UTF-8 all the same.
        prompt = os.fsencode(prompt).decode("utf-8", "surrogateescape")
    characters = stream(
        checkpoint.build_model(config.backend), checkpoint.tokenizer, prompt, config.tokens,
        config.temperature, config.top_k, config.seed,
    )  # fmt: skip
    sys.stdout.write(prompt)
    for character in characters:
        sys.stdout.write(character)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


@dataclass
class Run:
    """What happens after each step of a training run: metrics, display, validation, checkpoint."""

    config: TrainConfig
    model_config: GPTConfig
    dataset: CharDataset
    trainer: GPTTrainer
    total: int
    facts: dict[str, Any]
    metrics: IO[str]
    display: Display
    stop: StopBetweenSteps
    validations: list[tuple[int, float]] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0

    def after_step(self, step: int, result: StepResult) -> None:
        self.loss_sum += result.loss
        self.loss_count += 1
        mean = self.loss_sum / self.loss_count
        if step % self.config.log_every == 0 or step == self.total:
            self.record(
                event="train", step=step, loss=mean,
                grad_norm=result.grad_norm, lr=result.lr,
                tokens_per_second=round(self.display.rate(step)),
            )  # fmt: skip
            self.loss_sum, self.loss_count = 0.0, 0
        if self.display.is_due():
            self.metrics.flush()
            self.display.show(step, mean)
        every = self.config.eval_every
        if every is not None and step % every == 0 and step < self.total:
            self.validate()
        self.stop.check()

    def validate(self) -> float:
        """Save, then measure the loss on the test part."""
        self.save()
        with self.display.paused():
            loss = self.trainer.test(self.dataset, on_batch=lambda _: self.stop.check())[1]
        self.record(event="validation", step=self.trainer.steps, loss=loss)
        self.metrics.flush()
        self.validations.append((self.trainer.steps, loss))
        if self.config.eval_every is not None:
            self.display.line(f"step {self.trainer.steps}  validation loss {loss:.4f}")
        return loss

    def record(self, **values: Any) -> None:
        self.metrics.write(json.dumps(values) + "\n")

    def save(self) -> None:
        save_checkpoint(
            self.config.run_folder / CHECKPOINT_NAME, self.trainer.model,
            config=self.model_config, vocabulary=self.dataset.tokenizer.vocabulary,
            step=self.trainer.steps, optimizer=self.trainer.optimizer, provenance=self.facts,
        )  # fmt: skip


class Display:
    """Progress of the steps: a live bar on a terminal, a short line now and then elsewhere.

    It asks the clock at each step, and draws a few times a second at most.
    """

    def __init__(self, total: int, tokens_per_step: int) -> None:
        self.total, self.tokens_per_step = total, tokens_per_step
        self.live = sys.stdout.isatty()
        self.interval = SECONDS_BETWEEN_FRAMES if self.live else SECONDS_BETWEEN_LINES
        self.start = self.last = time.perf_counter()

    def __enter__(self) -> Display:
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self.bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                auto_refresh=False, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.bar.stop()

    def rate(self, step: int) -> float:
        """Tokens per second since the start, without the pauses."""
        return step * self.tokens_per_step / max(1e-9, time.perf_counter() - self.start)

    def is_due(self) -> bool:
        return time.perf_counter() - self.last >= self.interval

    def show(self, step: int, loss: float) -> None:
        rate = self.rate(step)
        seconds = (self.total - step) * self.tokens_per_step / rate
        left = f"{int(seconds // 60)}:{int(seconds % 60):02d}"
        text = f"loss {loss:.4f}  {rate:,.0f} tokens/s  {left} left"
        if self.live:
            self.bar.update(self.task, completed=step, description=text, refresh=True)
        else:
            self.line(f"step {step}/{self.total}  {text}")
        self.last = time.perf_counter()

    def line(self, text: str) -> None:
        if self.live:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the rate."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin


class Stop(Exception):
    """A signal asked the run to end, and a step has just been finished."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopBetweenSteps:
    """Turns the first SIGINT or SIGTERM into `Stop`, raised by `check`; a second acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.received is not None:
            raise Stop(self.received)


def open_run_folder(folder: Path, overwrite: bool) -> None:
    """Make the folder of a run, empty of an earlier one.

    Raises ValueError if it holds a run and `overwrite` is not set; OSError that names it if it
    cannot be written.
    """
    held = [name for name in RUN_FILES if (folder / name).exists()]
    if held and not overwrite:
        raise ValueError(
            f"{folder}: holds a run already ({', '.join(held)}), another --out or --overwrite is "
            "needed"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in held:
            (folder / name).unlink()
    except OSError as error:
        raise type(error)(f"{folder}: cannot be written, {error.strerror or error}") from error


def validation_table(validations: Sequence[tuple[int, float]], rows: int = 20) -> list[str]:
    """Lines with step, loss and a bar, evenly chosen when there are more than `rows`."""
    stride = -(-len(validations) // rows)
    chosen = list(validations[::-1][::stride])[::-1]  # the last one is always among them
    losses = [loss for _, loss in chosen]
    low, span = min(losses), max(losses) - min(losses)
    width = max(len("step"), len(str(chosen[-1][0])))
    lines = [f"{'step':>{width}}  validation loss"]
    for step, loss in chosen:
        bar = "#" * (1 + round(40 * (loss - low) / span)) if span > 0 else "#"
        lines.append(f"{step:>{width}}  {loss:.4f}  {bar}")
    return lines


def _corpus_line(corpus: Corpus, config: GPTConfig) -> str:
    absent = "data/tinyshakespeare.txt is absent, trained on " if corpus.is_fallback else ""
    return (
        f"{absent}{corpus.name}: {len(corpus.text):,} characters, vocabulary {config.vocab_size}, "
        f"{config.parameter_count():,} parameters, sha256 {corpus.sha256[:16]}"
    )


def _config_json(
    config: TrainConfig, model_config: GPTConfig, corpus: Corpus, facts: dict[str, Any]
) -> bytes:
    flags = {
        name: portable(str(value)) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }
    text = {"name": corpus.name, "characters": len(corpus.text), "sha256": corpus.sha256}
    content = {
        "train": flags, "model": asdict(model_config), "corpus": text,
        "parameters": model_config.parameter_count(), "provenance": facts,
    }  # fmt: skip
    return (json.dumps(content, indent=2) + "\n").encode("utf-8")


def _first_prompt(dataset: CharDataset) -> str:
    """A line feed, after which anything may begin, or else the first character there is."""
    vocabulary = dataset.tokenizer.vocabulary
    return "\n" if "\n" in vocabulary else vocabulary[0]
