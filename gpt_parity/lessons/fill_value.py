"""The same model trained with several fills of its causal mask, and what each of them lets through.

A fill whose exponential is 0 hides the future. Any other fill gives later characters some weight,
and a training loss or a careless test loss cannot tell that from skill.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gpt_parity.backends import thread_limit
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset, Corpus, read_corpus
from gpt_parity.files import write_atomically
from gpt_parity.lessons.config import FillValueConfig
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.trace import trace
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer, as_array, inference, new_trainer
from gpt_parity.weights import get_weights, set_weights
from numpy_impl.memory import keep_freed_memory

# The fill that hides the future: in every position's softmax its own score, at least 0, is among
# the rest, so that exp(-1e9 - max) is 0 in any dtype. The fill of the source text, equal to -inf.
HIDING = GPTConfig.mask_value
# Steps at the end whose mean is the training loss: one batch of 128 characters alone says little.
LAST_STEPS = 500
SAMPLE_TOKENS = 200
# Batches of the test part, evenly over it, in which the characters after a position are changed.
PROBED_BATCHES = 8


@dataclass(frozen=True)
class Measurement:
    """What one fill led to; losses in nats per character.

    `moved` holds, for each trial of the probe, the share of probability that moved at a position
    when what follows it was changed; `unmoved` counts the trials whose logits stayed equal, all
    of them and without a tolerance.
    """

    fill: float
    losses: tuple[float, ...]
    """Training loss of every step."""
    own_loss: float
    """Test loss with this fill, which lets the model see what it was trained to see."""
    hidden_loss: float
    """Test loss of the same weights with the future hidden."""
    next_loss: float
    """Loss at the last position of the test windows with this fill, where nothing follows."""
    future_weight: tuple[float, ...]
    """Mean attention given to later positions, by block."""
    moved: tuple[float, ...]
    unmoved: int
    sample: str
    weights_sha256: str

    @property
    def train_loss(self) -> float:
        """Mean over the last steps."""
        last = self.losses[-LAST_STEPS:]
        return math.fsum(last) / len(last)

    @property
    def future_mean(self) -> float:
        """Mean attention given to later positions, over the blocks."""
        return math.fsum(self.future_weight) / len(self.future_weight)

    @property
    def moved_mean(self) -> float:
        return math.fsum(self.moved) / len(self.moved)

    @property
    def is_causal(self) -> bool:
        """Whether no trial moved a logit."""
        return self.unmoved == len(self.moved)


def run(config: FillValueConfig, console: Console) -> int:
    """Train with each fill, print what came of it, write what was asked for; returns 0.

    Raises ValueError for a text that does not do, MissingBackendError, FloatingPointError that
    names the fill where training diverges, OSError for what cannot be written.
    """
    from gpt_parity.lessons.fill_value_report import FillValueReport, plot_losses

    corpus = read_corpus(config.data)
    recipe = TrainConfig(
        backend=config.backend, seed=config.seed, max_steps=config.steps, threads=1
    )
    dataset = dataset_of(corpus, recipe)
    recipe = replace(recipe, epochs=-(-config.steps // dataset.batch_count("train")))
    waiting = Console(stderr=True)
    progress = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        console=waiting, transient=True, disable=not waiting.is_terminal,
    )  # fmt: skip
    found = []
    with thread_limit(1, config.backend):
        keep_freed_memory()
        with progress:
            task = progress.add_task("", total=config.steps * len(config.values))
            for fill in config.values:
                progress.update(task, description=f"steps, fill {label(fill)}")
                found.append(measure(recipe, dataset, fill, lambda: progress.advance(task)))
        report = FillValueReport(config, recipe, corpus, dataset.vocab_size, tuple(found))
        try:
            report.print(console)
        finally:  # a reader that closed the pipe asked for the files all the same
            if config.json is not None:
                write_atomically(config.json, report.json())
            if config.plot is not None:
                plot_losses(report.measurements, config.plot)
    return 0


def dataset_of(corpus: Corpus, recipe: TrainConfig) -> CharDataset:
    """The windows to train and test on; ValueError that names the text where it does not do."""
    try:
        dataset = CharDataset(
            corpus.text, context_size=recipe.context_size, batch_size=recipe.batch_size
        )
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from error
    if dataset.vocab_size < 2:
        raise ValueError(
            f"{corpus.name}: has one distinct character, at least 2 are needed (with one there is "
            "no other future)"
        )
    return dataset


def measure(
    recipe: TrainConfig, dataset: CharDataset, fill: float,
    on_step: Callable[[], object] = lambda: None,
) -> Measurement:  # fmt: skip
    """Train by the recipe with this fill, then look at what the model relies on."""
    model_config = replace(recipe.model_config(dataset.vocab_size), mask_value=fill)
    trainer = new_trainer(recipe, model_config, allow_leak=True)
    try:
        losses = _train(trainer, recipe, dataset, on_step)
        own_loss = trainer.test(dataset)[1]
        weights = get_weights(trainer.model)
        honest = new_trainer(recipe, replace(model_config, mask_value=HIDING))
        set_weights(honest.model, weights)
        hidden_loss = honest.test(dataset)[1]
    except FloatingPointError as error:
        raise FloatingPointError(f"fill {label(fill)}: {error}") from error
    tokens, targets = _probed_windows(dataset)
    moved, unmoved = probe(trainer.model, tokens, recipe.seed)
    return Measurement(
        fill=fill,
        losses=tuple(losses),
        own_loss=own_loss,
        hidden_loss=hidden_loss,
        next_loss=next_loss(trainer.model, dataset),
        future_weight=future_weight(trainer, tokens, targets),
        moved=tuple(moved),
        unmoved=unmoved,
        sample=_sample(trainer, dataset, recipe.seed),
        weights_sha256=hashlib.sha256(b"".join(w.tobytes() for w in weights.values())).hexdigest(),
    )


def label(fill: float) -> str:
    """A fill as it would be typed, such as -1e9; never two fills alike."""
    short = f"{fill:g}".replace("e+0", "e").replace("e+", "e")
    return short if float(short) == fill else repr(fill)


def _train(
    trainer: GPTTrainer, recipe: TrainConfig, dataset: CharDataset, on_step: Callable[[], object]
) -> list[float]:
    """Losses of the steps that the command `train` would take."""
    total = recipe.epochs * dataset.batch_count("train")
    total = min(total, recipe.max_steps or total)
    scheduler = WarmupCosineScheduler(
        recipe.learning_rate, total, recipe.warmup, recipe.min_learning_rate
    )
    results = trainer.train(
        dataset, recipe.epochs, scheduler, max_steps=total,
        on_step=lambda step, result: on_step(),
    )  # fmt: skip
    return [result.loss for result in results]


def next_loss(model: Any, dataset: CharDataset) -> float:
    """Mean loss at the last position of all test windows: what generation asks of a model.

    The window holds what was given so far and nothing else, so no fill can show the answer.
    """
    terms: list[float] = []
    for tokens, targets in dataset.batches("test"):
        with inference(model):
            logits, _ = model.predict_next(tokens)  # (B, V)
        terms.extend(-_log_softmax(logits)[np.arange(len(logits)), targets[:, -1]])
    return math.fsum(terms) / len(terms)


def probe(model: Any, tokens: np.ndarray, seed: int) -> tuple[list[float], int]:
    """Change every token after a position t, and see whether the logits at t move.

    Returns, for up to five t < T - 1 in each of the windows (B, T), the total variation
    sum |p - p'| / 2 between the two predictions, from 0 to 1, and how many pairs of logits are
    equal, each single one and exactly. Raises ValueError for windows of one token.
    """
    length = tokens.shape[-1]
    if length < 2:
        raise ValueError(f"tokens have shape {tokens.shape}, (B, T) with T >= 2 is needed")
    rng = np.random.RandomState(seed)
    before = _logits(model, tokens)  # (B, T, V)
    moved, unmoved = [], 0
    places = {0, length // 4, length // 2, 3 * length // 4, length - 2}
    for t in sorted(places - {length - 1}):  # after the last one there is nothing to change
        changed = tokens.copy()
        other = rng.randint(1, model.vocab_size, (len(tokens), length - 1 - t))
        # Plus 1 to V - 1, modulo V: never the same token.
        changed[:, t + 1 :] = (changed[:, t + 1 :] + other) % model.vocab_size
        a, b = before[:, t], _logits(model, changed)[:, t]  # (B, V)
        unmoved += int((a == b).all(axis=-1).sum())
        difference = np.exp(_log_softmax(a)) - np.exp(_log_softmax(b))
        moved.extend(np.abs(difference).sum(axis=-1) / 2.0)
    return [float(share) for share in moved], unmoved


def future_weight(
    trainer: GPTTrainer, tokens: np.ndarray, targets: np.ndarray
) -> tuple[float, ...]:
    """Mean attention given to all later positions together, in each block.

    The last position has none and is left out.
    """
    values = trace(trainer.model, trainer.loss_fn, tokens, targets).values
    weights = [w for name, w in values.items() if name.endswith("attention.softmax.output")]
    return tuple(
        float(np.triu(w.astype(np.float64), k=1).sum(axis=-1)[:, :-1].mean()) for w in weights
    )


def _probed_windows(dataset: CharDataset) -> tuple[np.ndarray, np.ndarray]:
    count = dataset.batch_count("test")
    chosen = np.unique(np.linspace(0, count - 1, PROBED_BATCHES).astype(int))
    batches = [dataset.batch("test", int(index)) for index in chosen]
    tokens, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return tokens, targets  # (B, T) each


def _sample(trainer: GPTTrainer, dataset: CharDataset, seed: int) -> str:
    """What continues the first test window, by the model as it was trained."""
    prompt = dataset.tokenizer.decode(dataset.batch("test", 0)[0][0])
    return "".join(trainer.stream(dataset, prompt, SAMPLE_TOKENS, seed=seed))


def _logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with inference(model):
        return as_array(model(tokens))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
