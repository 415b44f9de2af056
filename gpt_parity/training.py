"""One loop trains, tests and samples either twin, since both are called alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from gpt_parity.backends import backend_of, load_backend
from gpt_parity.corpus import CharDataset, CharTokenizer
from gpt_parity.sampling import sample
from gpt_parity.schedule import require_integer


class StepResult(NamedTuple):
    """One training step: the loss before it, the gradient norm before clipping, the rate used."""

    loss: float
    grad_norm: float
    lr: float


class GPTTrainer:
    """Trains and tests a model of either backend.

    max_norm: the largest norm of all gradients together, see `clip_grad_norm`. `steps` counts
    the finished training steps.
    """

    def __init__(self, model: Any, loss_fn: Any, optimizer: Any, max_norm: float = 1.0) -> None:
        backend_of(model)
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.max_norm = max_norm
        self.steps = 0

    def train_step(self, tokens: np.ndarray, targets: np.ndarray) -> StepResult:
        """One update on one batch:  tokens, targets (B, T) integers.

        A loss or gradient norm that is not finite raises FloatingPointError, which names the
        step (the first is 1), before any weight or moment has changed.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # judged at the loss and the norm
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(tokens), targets)
            value = loss.item()
            try:
                if not math.isfinite(value):
                    raise FloatingPointError(f"loss: got {value}, needed a finite number")
                loss.backward()
                norm = self.optimizer.clip_grad_norm(self.max_norm)
            except FloatingPointError as error:
                self.optimizer.zero_grad()
                raise FloatingPointError(
                    f"training step {self.steps + 1}: {error}; the weights are those before it"
                ) from error
            self.optimizer.step()
        self.steps += 1
        return StepResult(value, norm, self.optimizer.lr)

    def train(
        self, dataset: CharDataset, epochs: int, scheduler: Callable[[int], float], *,
        max_steps: int | None = None, on_step: Callable[[int, StepResult], None] | None = None,
    ) -> list[StepResult]:  # fmt: skip
        """Train on the training part, batches in order, and return the result of every step.

        The rate of step t is scheduler(t), t from 0 at each call. `on_step(t + 1, result)` is
        called after each step. Every layer is in training mode meanwhile, and afterwards in its
        own again, whatever happens. Raises ValueError for less than one epoch or step.
        """
        require_integer("epochs", epochs, 1)
        if max_steps is not None:
            require_integer("max_steps", max_steps, 1)
        results: list[StepResult] = []
        with layer_modes(self.model, training=True):
            for _ in range(epochs):
                for tokens, targets in dataset.batches("train"):
                    if len(results) == max_steps:
                        return results
                    self.optimizer.lr = scheduler(len(results))
                    results.append(self.train_step(tokens, targets))
                    if on_step is not None:
                        on_step(len(results), results[-1])
        return results

    def test(
        self, dataset: CharDataset, *, on_batch: Callable[[int], None] | None = None
    ) -> tuple[np.ndarray, float]:
        """Return (predictions, loss) of the test part.

        predictions: (windows, T) int64, the likeliest next token at each place, the lowest id
        among equals. loss: the mean over all tokens, so that a shorter last batch counts less.
        `on_batch(number)` is called after each batch. Records no graph; modes are restored as in
        `train`. Raises FloatingPointError for a loss that is not finite.
        """
        predictions, losses, count = [], [], 0
        for number, (tokens, targets) in enumerate(dataset.batches("test"), start=1):
            with inference(self.model):
                logits = self.model(tokens)
                loss = self.loss_fn(logits, targets).item()
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"test batch {number}: loss: got {loss}, needed a finite number"
                )
            predictions.append(as_array(logits).argmax(axis=-1))  # (B, T)
            losses.append(loss * targets.size)
            count += targets.size
            if on_batch is not None:
                on_batch(number)
        return np.concatenate(predictions), math.fsum(losses) / count

    def generate(
        self, text: CharDataset | CharTokenizer, prompt: str, steps: int,
        temperature: float = 1.0, top_k: int | None = None, seed: int = 0,
    ) -> str:  # fmt: skip
        """Return `prompt` and `steps` characters more; see `stream`."""
        tokenizer = text.tokenizer if isinstance(text, CharDataset) else text
        return prompt + "".join(
            stream(self.model, tokenizer, prompt, steps, temperature, top_k, seed)
        )

    def stream(
        self, text: CharDataset | CharTokenizer, prompt: str, steps: int,
        temperature: float = 1.0, top_k: int | None = None, seed: int = 0,
    ) -> Iterator[str]:  # fmt: skip
        """Yield the characters that `generate` appends, one by one."""
        tokenizer = text.tokenizer if isinstance(text, CharDataset) else text
        return stream(self.model, tokenizer, prompt, steps, temperature, top_k, seed)


def stream(
    model: Any, tokenizer: CharTokenizer, prompt: str, steps: int,
    temperature: float = 1.0, top_k: int | None = None, seed: int = 0,
) -> Iterator[str]:  # fmt: skip
    """Yield `steps` characters that continue `prompt`, each sampled from the model's logits.

    The model sees the last `context_size` tokens. Each character takes one uniform number of
    RandomState(seed), so that the text depends on the logits and the seed alone. Arguments are
    judged at the call, not at the first character. Raises ValueError for an empty prompt, for
    characters outside the vocabulary, for a model of another vocabulary, and what `sample` does.
    """
    if not prompt:
        raise ValueError("prompt is empty, at least one character is needed")
    if tokenizer.vocab_size != model.vocab_size:
        raise ValueError(
            f"vocabulary has {tokenizer.vocab_size} characters, {model.vocab_size} are needed by "
            "the model"
        )
    try:
        ids = tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    steps = require_integer("steps", steps, 0)
    sample(np.zeros(1), temperature, top_k, 0.0)
    uniforms = np.random.RandomState(seed)

    def characters() -> Iterator[str]:
        window = ids[-model.context_size :]  # (T,)
        for _ in range(steps):
            # No `yield` inside the block: what a suspended generator sets, its caller would see.
            with inference(model):
                logits = as_array(model(window[None]))[0, -1]  # (V,)
            token = sample(logits, temperature, top_k, uniforms.random_sample())
            window = np.append(window, token)[-model.context_size :]
            yield tokenizer.decode([token])

    return characters()


def as_array(tensor: Any) -> np.ndarray:
    """The values of a tensor of either backend."""
    return np.asarray(tensor.detach().numpy())


@contextmanager
def layer_modes(model: Any, training: bool) -> Iterator[None]:
    """Set the mode of every layer; each has its own again afterwards, whatever happens inside."""
    before = [(layer, layer.training) for _, layer in model.named_modules()]
    model.train(training)
    try:
        yield
    finally:
        for layer, mode in before:
            layer.training = mode


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Evaluation mode without a graph, for a block of code."""
    no_grad = load_backend(backend_of(model)).no_grad
    overflow_is_judged_later = np.errstate(over="ignore", invalid="ignore")
    with layer_modes(model, training=False), no_grad(), overflow_is_judged_later:
        yield
