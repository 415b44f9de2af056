"""The bodies of the commands `train` and `generate`."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpt_parity.backends import thread_limit
from gpt_parity.checkpoint import Checkpoint, load_checkpoint, tokenizer_of
from gpt_parity.config import CHANGEABLE, GenerateConfig, TrainConfig
from gpt_parity.corpus import CharDataset, Corpus, read_corpus
from gpt_parity.display import say
from gpt_parity.distributed import (
    DistributedTrainer,
    Follower,
    Group,
    joined,
)
from gpt_parity.run_folder import CONFIG_NAME, earlier_checkpoints, existing_folder, new_folder
from gpt_parity.training import GPTTrainer, new_trainer, stream
from gpt_parity.training_run import Run
from gpt_parity.weights import set_weights
from numpy_impl.memory import keep_freed_memory


def train(config: TrainConfig) -> int:
    """Train, test and sample one model, or go on with a run; returns the exit code.

    128 + number after a signal. Raises, before the folder of the run is touched, ValueError for a
    text, a checkpoint or a configuration that does not do; OSError for what cannot be written;
    FloatingPointError when training diverges. The last checkpoint stays, whatever happens. Several
    processes raise each for itself, see `first_to_tell`.
    """
    checkpoint = None
    if config.resume is not None:
        config, checkpoint = resumed(config)
    with joined(config) as group:
        config = replace(config, threads=config.cores)  # what is chosen here stands in config.json
        threads = max(1, config.cores // group.neighbours)
        # NumPy splits the batch instead, see GPTTrainer.
        with thread_limit(1 if config.backend == "numpy" else threads, config.backend):
            keep_freed_memory()
            return _train(config, checkpoint, group)


def _train(config: TrainConfig, checkpoint: Checkpoint | None, group: Group) -> int:
    corpus = read_corpus(config.data)
    tokenizer = None
    if checkpoint is not None:
        _check_text(corpus, checkpoint)
        tokenizer = tokenizer_of(checkpoint, config.resume)
    try:
        dataset = CharDataset(
            corpus.text, context_size=config.context_size, batch_size=config.batch_size,
            # A part that is long enough to draw windows from is long enough.
            keep_only=config.windows == "random", tokenizer=tokenizer,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from error
    total = config.total_steps(dataset.batch_count("train"))
    trainer = new_trainer(config, config.model_config(dataset.vocab_size))
    sampler = np.random.RandomState(config.seed)
    if checkpoint is not None:
        _check_position(checkpoint, total, dataset)
        set_weights(trainer.model, checkpoint.weights)
        checkpoint.load_optimizer(trainer.model, trainer.optimizer)
        trainer.steps, sampler = checkpoint.step, checkpoint.run.sample

    recipe = {k: v for k, v in config.recipe.items() if k != "threads"}  # a machine's own
    recipe["shard"] = config.shard
    job = {"text": corpus.sha256, "step": trainer.steps, "configuration": recipe}
    if not group.leads:
        group.start(job)
        run = Follower(config, dataset, distributed(config, trainer, group), total)
        with run.stop:
            return run.finish()
    folder = config.run_folder
    opened = new_folder(folder, config.overwrite) if checkpoint is None else existing_folder(folder)
    with opened as stale:
        if checkpoint is not None and load_checkpoint(config.resume).step != checkpoint.step:
            raise ValueError(f"{config.resume}: another process went on with it, start once more")
        group.start(job)
        trainer = distributed(config, trainer, group)
        run = Run(config, corpus, dataset, trainer, total, sampler, checkpoint, stale)
        try:
            # The display goes last: what it shows can be answered by a signal.
            with run.metrics, run.stop, run.display:
                return run.finish()
        finally:
            if run.farewell:
                say(run.farewell)


def distributed(config: TrainConfig, trainer: GPTTrainer, group: Group) -> GPTTrainer:
    """The trainer among those of its group; itself where it is alone."""
    if group.store is None:
        return trainer
    again = None
    if config.shard:
        sizes = config.model_config(trainer.model.vocab_size)
        again = functools.partial(new_trainer, config, sizes)
    return DistributedTrainer(trainer, group, again)


def resumed(config: TrainConfig) -> tuple[TrainConfig, Checkpoint]:
    """The configuration of the run to go on with, and the checkpoint to go on from.

    Raises ValueError for a checkpoint without a training run, and for a field that was given and
    differs from the run's, unless it is one that does not shape the run.
    """
    assert config.resume is not None
    folder = config.resume if config.resume.is_dir() else config.resume.parent
    try:
        checkpoint = load_checkpoint(config.resume)
    except ValueError as error:
        whole = _newest_whole(folder) if config.resume.is_dir() else None
        hint = f"; --resume {whole} is an earlier one" if whole is not None else ""
        raise ValueError(f"{error}{hint}") from error
    # The folder of a run is written to, that of a copied checkpoint is not.
    if not config.resume.is_dir() and not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{folder}: holds no {CONFIG_NAME}, the folder of a run is needed")
    if checkpoint.run is None:
        raise ValueError(
            f"{config.resume}: holds a model alone, a checkpoint of a training run is needed"
        )
    before = TrainConfig.from_recipe(checkpoint.run.recipe, out=folder)
    for name in sorted(config.given - CHANGEABLE - {"resume", "overwrite"}):
        mine, theirs = getattr(config, name), getattr(before, name)
        if name == "precision":  # the same may have been said by dtype
            mine, theirs = config.arithmetic, before.arithmetic
        same = mine.resolve() == theirs.resolve() if name == "out" else mine == theirs
        if not same:
            raise ValueError(
                f"{name} is {mine}, the run in {folder} has {theirs} and keeps it; only "
                f"{', '.join(flag(name) for name in sorted(CHANGEABLE))} may change on the way"
            )
    changes = {name: getattr(config, name) for name in config.given & CHANGEABLE}
    path = checkpoint.run.corpus.get("path")
    if path is not None and "data" not in changes:
        if not Path(path).exists():
            raise ValueError(
                f"{folder}: was trained on {path}, which is not here; --data FILE of that text is "
                "needed"
            )
        changes["data"] = Path(path)
    return replace(before, resume=config.resume, **changes), checkpoint


def flag(name: str) -> str:
    """The flag of the command for a field."""
    return f"--{name.replace('_', '-')}"


def _newest_whole(folder: Path) -> Path | None:
    """The newest of the earlier checkpoints that can be read, None where there is none."""
    for _, path in reversed(earlier_checkpoints(folder)):
        with suppress(ValueError):
            load_checkpoint(path)
            return path
    return None


def _check_text(corpus: Corpus, checkpoint: Checkpoint) -> None:
    needed = checkpoint.run.corpus
    if corpus.sha256 != needed["sha256"]:
        raise ValueError(
            f"{corpus.name}: has sha256 {corpus.sha256[:16]}, the run was trained on "
            f"{needed['name']} with {needed['sha256'][:16]}; --data FILE of that text is needed"
        )


def _check_position(checkpoint: Checkpoint, total: int, dataset: CharDataset) -> None:
    run, batches = checkpoint.run, dataset.batch_count("train")
    found = (run.epoch, run.batch, run.total_steps)
    needed = (*divmod(checkpoint.step, batches), total)
    if found != needed or checkpoint.step > total:
        raise ValueError(
            f"checkpoint of step {checkpoint.step}: epoch, batch and total steps are {found}, "
            f"{needed} is needed with {batches} batches an epoch"
        )


def generate(config: GenerateConfig) -> int:
    """Write the prompt and its continuation, characters as they come; returns the exit code.

    Raises ValueError for a checkpoint or prompt that does not do.
    """
    with thread_limit(config.threads, config.backend):
        keep_freed_memory()
        return _generate(config)


def _generate(config: GenerateConfig) -> int:
    checkpoint = load_checkpoint(config.checkpoint)
    prompt = config.prompt
    if any("\udc80" <= character <= "\udcff" for character in prompt):
        # Bytes of the command line that the locale could not decode: they are UTF-8 all the same.
        prompt = os.fsencode(prompt).decode("utf-8", "surrogateescape")
    tokenizer = tokenizer_of(checkpoint, config.checkpoint)
    characters = stream(
        checkpoint.build_model(config.backend), tokenizer, prompt, config.tokens,
        config.temperature, config.top_k, config.seed,
    )  # fmt: skip
    sys.stdout.write(prompt)
    for character in characters:
        sys.stdout.write(character)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
