"""A training run in its folder: what happens after each step, and how it ends."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt_parity.anomaly import AnomalyError, watch
from gpt_parity.checkpoint import CHECKPOINT_NAME, Checkpoint, TrainingRun, save_checkpoint
from gpt_parity.config import CHECKPOINT, VALIDATION, TrainConfig
from gpt_parity.corpus import CharDataset, Corpus
from gpt_parity.display import Display, validation_table
from gpt_parity.distributed import ALONE, LostProcessError, agreed, first_to_tell
from gpt_parity.files import write_atomically
from gpt_parity.interrupts import Stop, StopBetweenSteps
from gpt_parity.model_config import GPTConfig
from gpt_parity.plots import draw, has_matplotlib
from gpt_parity.provenance import portable, provenance
from gpt_parity.run_folder import (
    CONFIG_NAME,
    METRICS_NAME,
    PLOT_NAME,
    SAMPLE_NAME,
    Checkpoints,
    Metrics,
    remove,
)
from gpt_parity.training import GPTTrainer, StepResult
from gpt_parity.weights import get_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """Metrics, display, validations and checkpoints of the steps of one run.

    checkpoint: what it goes on from, None for a new one. stale: files of an earlier run, which
    give way once the new one has its first checkpoint.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, dataset: CharDataset, trainer: GPTTrainer,
        total: int, sampler: np.random.RandomState, checkpoint: Checkpoint | None,
        stale: Iterable[Path] = (),
    ) -> None:  # fmt: skip
        self.config, self.corpus, self.dataset, self.trainer = config, corpus, dataset, trainer
        self.total, self.sampler = total, sampler
        self.group = getattr(trainer, "group", ALONE)
        self.folder = config.run_folder
        self.model_config = config.model_config(dataset.vocab_size)
        self.facts = provenance()
        self.stop = StopBetweenSteps()
        self.display = Display(total, config.batch_size * config.context_size, trainer.steps)
        self.loss_sum, self.loss_count = 0.0, 0
        self.farewell = ""  # for stderr, once the display has closed
        versions = {k: self.facts.get(k) for k in ("gpt_parity", "numpy", "torch", "commit")}
        self.history = [
            {"step": trainer.steps, "backend": config.backend, "threads": config.threads}
            | ({"processes": self.group.size} if self.group.size > 1 else {})
            | ({"compile": True} if config.compile else {})
            | ({"device": config.device} if config.device != "cpu" else {})
            | versions
        ]
        self.metrics: Metrics | None = None
        self.checkpoints = Checkpoints(self.folder, config.keep)
        size = 0
        if checkpoint is None:
            self.save()
        else:
            path = self.folder / CHECKPOINT_NAME
            self.checkpoints.step, size = checkpoint.step, checkpoint.run.metrics_size
            if config.resume.is_file() and config.resume.resolve() != path.resolve():
                # An earlier one becomes the newest before what came after it is cut off.
                write_atomically(path, config.resume.read_bytes())
            self.loss_sum, self.loss_count = checkpoint.run.loss_sum, checkpoint.run.loss_count
            self.history = checkpoint.run.history + self.history
        if checkpoint is None or not (self.folder / CONFIG_NAME).exists():
            content = _config_json(config, self.model_config, corpus, self.facts)
            write_atomically(self.folder / CONFIG_NAME, content)
        for path in stale:
            if path.name not in (CONFIG_NAME, CHECKPOINT_NAME):  # which are replaced by now
                remove(path)
        self.metrics = Metrics(self.folder / METRICS_NAME, size)

    def finish(self) -> int:
        """Take the steps that are left, test and sample; returns the exit code."""
        try:
            return self._finish()
        except BrokenPipeError:
            raise
        except LostProcessError as error:
            first = first_to_tell()  # before a save, for which the others do not wait
            if not self.config.shard:  # then the weights of the last step are all here
                self.save()
            ended = f"{error}{self._left()}; go on with: {self._resume_command()}"
            if first:
                raise LostProcessError(ended) from error
            self.farewell = f"gpt-parity: {ended}"
            return 2
        except (FloatingPointError, OSError) as error:
            raise type(error)(f"{error}{self._left()}") from error
        except (KeyboardInterrupt, SystemExit):  # a second signal
            first_to_tell()
            self.farewell = f"gpt-parity: stopped at once{self._left()}"
            raise

    def _finish(self) -> int:
        config, trainer = self.config, self.trainer
        try:
            self._announce()
            if config.resume is not None and config.point(trainer.steps, self.total) == VALIDATION:
                # Saved before its validation, whose line was cut off.
                self.validate()
            with watch(trainer.model) if config.anomaly else nullcontext():
                trainer.train(
                    self.dataset, config.epochs, config.scheduler(self.total),
                    start=trainer.steps, max_steps=self.total, on_step=self.after_step,
                    windows_seed=config.windows_seed,
                )  # fmt: skip
            loss = self.validate()
            self._sample()
            self._draw()
        except BrokenPipeError:
            if not self.config.shard:  # for shards the others would have to save too
                self.save()
            raise
        except Stop as signal_seen:
            self.save()
            self.farewell = (
                f"gpt-parity: stopped by {signal_seen} after step {trainer.steps} of "
                f"{self.total}; go on with: {self._resume_command()}"
            )
            with suppress(LostProcessError):  # at the sample the others are gone
                self.group.meet()
            return 128 + signal_seen.number
        validations = self.metrics.validations()
        if len(validations) > 1:
            print("\n".join(validation_table(validations)))
        print(f"test loss {loss:.4f} over {self.dataset.batch_count('test')} batches")
        return 0

    def _left(self) -> str:
        """Which checkpoint there is to go on from, to be added to why the run ended."""
        step = self.checkpoints.step
        if step is None or not self.checkpoints.path.is_file():
            return ""
        return f"; the last checkpoint, {self.checkpoints.path}, is of step {step}"

    def _announce(self) -> None:
        print(_corpus_line(self.corpus, self.model_config))
        goes_on = ""
        if self.config.resume is not None:
            finished = self.trainer.steps == self.total
            goes_on = ", all taken" if finished else f" from step {self.trainer.steps}"
        if self.metrics.missing:
            print(
                f"{self.metrics.path}: {self.metrics.missing} bytes of earlier steps are missing, "
                "it goes on without them"
            )
        print(
            f"{self._engine_line()} on {self._threads()}, {self.total} steps{goes_on}, run in "
            f"{self.folder}", flush=True,
        )  # fmt: skip

    def _engine_line(self) -> str:
        config = self.config
        compiled = " compiled" if config.compile else ""
        place = f", {config.device}" if config.device != "cpu" else ""
        return f"{config.backend} {config.arithmetic}{compiled}{place}"

    def _threads(self) -> str:
        threads = self.config.threads
        return f"{threads} thread{'' if threads == 1 else 's'}"

    def after_step(self, step: int, result: StepResult) -> None:
        if self.config.anomaly:
            for name, array in get_weights(self.trainer.model).items():
                if not np.isfinite(array).all():
                    raise AnomalyError(
                        f"the update of training step {step} gives {name} not finite"
                    )
        self.loss_sum += result.loss
        self.loss_count += 1
        mean = self.loss_sum / self.loss_count
        if step % self.config.log_every == 0 or step == self.total:
            self.metrics.record(
                event="train", step=step, loss=mean,
                grad_norm=result.grad_norm, lr=result.lr,
                tokens_per_second=round(self.display.rate(step)),
            )  # fmt: skip
            self.loss_sum, self.loss_count = 0.0, 0
        if self.display.is_due():
            self.metrics.flush()
            self.display.show(step, mean)
        point = self.config.point(step, self.total)
        if point == VALIDATION:
            self.validate()
        elif point == CHECKPOINT:
            with self.display.paused():
                self.save()
        agreed(self.stop, self.group)

    def validate(self) -> float:
        """Save, then measure the loss on the test part."""
        with self.display.paused():
            self.save()
            loss = self.trainer.test(self.dataset, on_batch=self._between_batches)[1]
        self.metrics.record(event="validation", step=self.trainer.steps, loss=loss)
        self.metrics.flush()
        if self.config.eval_every is not None:
            self.display.line(f"step {self.trainer.steps}  validation loss {loss:.4f}")
        return loss

    def _between_batches(self, _: int) -> None:
        if self.group.size == 1:  # others would go on
            self.stop.check()

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless it is there already."""
        step = self.trainer.steps
        if self.checkpoints.step == step:
            return
        whole = self.trainer.whole()
        assert whole is not None
        epoch, batch = divmod(step, self.dataset.batch_count("train"))
        run = TrainingRun(
            self.config.recipe, _corpus_facts(self.corpus, self.config), self.history, self.total,
            epoch, batch, self.loss_sum, self.loss_count,
            self.metrics.flush(to_disk=True) if self.metrics is not None else 0, self.sampler,
        )  # fmt: skip
        try:
            self.checkpoints.save(step, lambda path: save_checkpoint(
                path, whole.model, config=self.model_config,
                vocabulary=self.dataset.tokenizer.vocabulary, step=step,
                optimizer=whole.optimizer, run=run, provenance=self.facts,
            ))  # fmt: skip
        except ValueError as error:  # weights or moments that are not finite
            raise FloatingPointError(f"after training step {step}: {error}") from error

    def _sample(self) -> None:
        prompt = _first_prompt(self.dataset)
        text = [prompt]
        whole = self.trainer.whole()
        assert whole is not None
        for character in whole.stream(
            self.dataset, prompt, self.config.sample_tokens, seed=self.sampler
        ):
            self.stop.check()
            text.append(character)
        write_atomically(self.folder / SAMPLE_NAME, "".join(text).encode("utf-8"))

    def _draw(self) -> None:
        """The losses of the whole run as a picture, where matplotlib is installed."""
        if not has_matplotlib():
            return
        try:
            draw(self.folder / PLOT_NAME, self._plot, (6.0, 3.5))
        except ImportError:  # an installation that is broken
            pass
        except OSError as error:  # a run is more than its picture
            self.farewell = f"gpt-parity: {error}; the run itself is whole"

    def _plot(self, figure: Figure) -> None:
        axes = figure.add_subplot()
        for event, label, style in (
            ("train", f"training, mean of {self.config.log_every} steps", "-"),
            ("validation", "test part", "o--"),
        ):
            losses = self.metrics.losses(event)
            if losses:
                axes.plot(*zip(*losses, strict=True), style, markersize=4, label=label)
        axes.set(xlabel="step", ylabel="loss", title=self._engine_line())
        axes.grid(alpha=0.3)
        if axes.lines:  # somebody may have removed the metrics
            axes.legend()

    def _resume_command(self) -> str:
        program = ["gpt-parity", "train"]
        # As it was called, since it may not be installed.
        called = Path(sys.argv[0])
        if called.name == "train.py":
            program = ["python", sys.argv[0]]
        elif called.parts[-2:] == ("gpt_parity", "__main__.py"):
            program = ["python", "-m", "gpt_parity", "train"]
        if self.group.store is not None:
            program = ["torchrun", "--nproc-per-node", str(self.group.neighbours), sys.argv[0]]
        folder = str(self.folder)
        command = [*program, "--resume", f"./{folder}" if folder.startswith("-") else folder]
        command += [f"--{name}" for name in ("anomaly", "shard") if getattr(self.config, name)]
        data = self.config.data
        if data is not None and portable(str(data)) != str(data):
            command += ["--data", str(data)]
        return shlex.join(command)


def _corpus_line(corpus: Corpus, config: GPTConfig) -> str:
    absent = "data/tinyshakespeare.txt is absent, trained on " if corpus.is_fallback else ""
    return (
        f"{absent}{corpus.name}: {len(corpus.text):,} characters, vocabulary {config.vocab_size}, "
        f"{config.parameter_count():,} parameters, sha256 {corpus.sha256[:16]}"
    )


def _corpus_facts(corpus: Corpus, config: TrainConfig) -> dict[str, Any]:
    path = None if config.data is None else portable(str(config.data))
    return {
        "name": corpus.name, "path": path, "characters": len(corpus.text), "sha256": corpus.sha256,
    }  # fmt: skip


def _config_json(
    config: TrainConfig, model_config: GPTConfig, corpus: Corpus, facts: dict[str, Any]
) -> bytes:
    content = {
        "train": config.recipe, "model": asdict(model_config),
        "corpus": _corpus_facts(corpus, config),
        "parameters": model_config.parameter_count(), "provenance": facts,
    }  # fmt: skip
    return (json.dumps(content, indent=2) + "\n").encode("utf-8")


def _first_prompt(dataset: CharDataset) -> str:
    """A line feed, after which anything may begin, or else the first character there is."""
    vocabulary = dataset.tokenizer.vocabulary
    return "\n" if "\n" in vocabulary else vocabulary[0]
