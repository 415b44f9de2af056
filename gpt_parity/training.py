"""One loop trains, tests and samples either twin, since both are called alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gpt_parity.anomaly import AnomalyError, first_non_finite
from gpt_parity.backends import backend_of, build_model, load_backend
from gpt_parity.bpe import BytePairTokenizer
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset, CharTokenizer
from gpt_parity.model_config import GPTConfig
from gpt_parity.precision import Engine, placed, require_machine
from gpt_parity.sampling import sample
from gpt_parity.schedule import require_integer
from gpt_parity.tensors import as_array
from numpy_impl.parallel import BatchParts


class StepResult(NamedTuple):
    """One training step: the loss before it, the gradient norm before clipping, the rate used."""

    loss: float
    grad_norm: float
    lr: float


class GPTTrainer:
    """Trains and tests a model of either backend.

    max_norm: the largest norm of all gradients together, see `clip_grad_norm`. threads: a NumPy
    model splits each batch among so many, see `BatchParts`; PyTorch has a switch of its own.
    accumulate: a batch goes through the model in so many parts, one after the other, whose
    gradients are added up; by their numbers of tokens, so that parts of unequal size count as they
    do in one batch. engine: what computes the logits in training and testing, by default the model
    itself. `steps` counts the finished training steps.
    """

    def __init__(
        self, model: Any, loss_fn: Any, optimizer: Any, max_norm: float = 1.0, *, threads: int = 1,
        accumulate: int = 1, engine: Engine | None = None,
    ) -> None:  # fmt: skip
        require_integer("threads", threads, 1)
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.max_norm = max_norm
        self.accumulate = require_integer("accumulate", accumulate, 1)
        self.engine = engine or Engine(model)
        self.steps = 0
        self.parts = BatchParts(threads) if backend_of(model) == "numpy" else None

    def train_step(self, tokens: np.ndarray, targets: np.ndarray) -> StepResult:
        """One update on one batch:  tokens, targets (B, T) integers.

        A loss or gradient norm that is not finite raises FloatingPointError, which names the
        step (the first is 1) and the first tensor that is not finite, before any weight or moment
        has changed.
        """
        overflow_is_judged_later = np.errstate(over="ignore", invalid="ignore")
        with overflow_is_judged_later, self.engine.switched():
            self.optimizer.zero_grad()
            try:
                value = self._backward(tokens, targets)
                norm = self.optimizer.clip_grad_norm(self.max_norm)
            except FloatingPointError as error:
                found = ""
                if not isinstance(error, AnomalyError):  # which names it already
                    found = self._first_non_finite(tokens, targets)
                self.optimizer.zero_grad()
                raise FloatingPointError(
                    f"training step {self.steps + 1}: {error}{found}; the weights are those before "
                    "it"
                ) from error
            self.optimizer.step()
        self.steps += 1
        return StepResult(value, norm, self.optimizer.lr)

    def _backward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """The loss, whose gradient has been added to the parameters; FloatingPointError for NaN."""

        def loss_of(tokens: np.ndarray, targets: np.ndarray) -> Any:
            loss = self.loss_fn(self.engine(tokens), targets)
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss: got {loss.item()}, needed a finite number")
            return loss

        total = 0.0
        for part in parts_of(slice(0, len(tokens)), self.accumulate):
            share = (part.stop - part.start) / len(tokens)
            if share == 0.0:
                continue
            if self.parts is not None:
                total += self.parts.backward(loss_of, tokens[part], targets[part], share)
            else:
                loss = loss_of(tokens[part], targets[part])
                (loss if share == 1.0 else loss * share).backward()
                total += loss.item() * share
        return total

    def _first_non_finite(self, tokens: np.ndarray, targets: np.ndarray) -> str:
        """Where it began, to be added to a message; empty where another run of it is finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            first = first_non_finite(self.model, self.loss_fn, tokens, targets)
        return f"; first not finite: {first}" if first else ""

    def whole(self) -> GPTTrainer | None:
        """The trainer that holds the whole model: this one, where one process trains."""
        return self

    def train(
        self, dataset: CharDataset, epochs: int, scheduler: Callable[[int], float], *,
        start: int = 0, max_steps: int | None = None, windows_seed: int | None = None,
        on_step: Callable[[int, StepResult], None] | None = None,
    ) -> list[StepResult]:  # fmt: skip
        """Train on the training part and return the result of every step.

        Batches come in order, or with `windows_seed` as random windows, of which `max_steps` may
        be more than the epochs have.

        The rate of step t is scheduler(t), t from `start` at each call: the steps of these epochs
        that were finished before. `max_steps` counts them too. `on_step(t + 1, result)` is called
        after each step. Every layer is in training mode meanwhile, and afterwards in its own
        again, whatever happens. Raises ValueError for less than one epoch or step.
        """
        require_integer("start", start, 0)
        batches = dataset.batch_count("train")
        total = batches * require_integer("epochs", epochs, 1)
        if max_steps is not None:
            require_integer("max_steps", max_steps, 1)
            total = min(total, max_steps) if windows_seed is None else max_steps
        results: list[StepResult] = []
        with layer_modes(layers_of(self.model), training=True):
            for step in range(start, total):
                self.optimizer.lr = scheduler(step)
                if windows_seed is None:
                    batch = dataset.batch("train", step % batches)
                else:
                    batch = dataset.random_batch("train", windows_seed, step)
                results.append(self.train_step(*batch))
                if on_step is not None:
                    on_step(step + 1, results[-1])
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
            with inference(self.model), self.engine.switched():
                logits = self.engine(tokens)
                loss = self.loss_fn(logits, targets).item()
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"test batch {number}: loss: got {loss}, needed a finite number"
                    f"{self._first_non_finite(tokens, targets)}"
                )
            predictions.append(as_array(logits).argmax(axis=-1))  # (B, T)
            losses.append(loss * targets.size)
            count += targets.size
            if on_batch is not None:
                on_batch(number)
        return np.concatenate(predictions), math.fsum(losses) / count

    def generate(
        self, text: CharDataset | CharTokenizer, prompt: str, steps: int,
        temperature: float = 1.0, top_k: int | None = None,
        seed: int | np.random.RandomState = 0,
    ) -> str:  # fmt: skip
        """Return `prompt` and `steps` characters more; see `stream`."""
        tokenizer = text.tokenizer if isinstance(text, CharDataset) else text
        return prompt + "".join(
            stream(self.model, tokenizer, prompt, steps, temperature, top_k, seed)
        )

    def stream(
        self, text: CharDataset | CharTokenizer, prompt: str, steps: int,
        temperature: float = 1.0, top_k: int | None = None,
        seed: int | np.random.RandomState = 0,
    ) -> Iterator[str]:  # fmt: skip
        """Yield the characters that `generate` appends, one by one."""
        tokenizer = text.tokenizer if isinstance(text, CharDataset) else text
        return stream(self.model, tokenizer, prompt, steps, temperature, top_k, seed)


def parts_of(rows: slice, count: int) -> list[slice]:
    """`rows` in `count` parts that follow each other and differ by one row at most."""
    size = rows.stop - rows.start
    bounds = [rows.start + size * k // count for k in range(count + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def new_trainer(
    config: TrainConfig, model_config: GPTConfig, *, allow_leak: bool = False
) -> GPTTrainer:
    """A trainer with a new model, as `config` describes them."""
    backend = load_backend(config.backend)
    if config.backend == "torch":
        require_machine(config.precision, config.device, config.compile)
    model_config.require_memory(
        config.dtype, training=True, batch_size=config.batch_size, length=config.context_size
    )
    model = build_model(
        config.backend, model_config, config.seed, config.dtype, allow_leak=allow_leak
    )
    model = placed(model, config.device)
    optimizer = backend.AdamWOptimizer(
        model.parameters(), config.learning_rate, config.betas, config.eps, config.weight_decay
    )
    return GPTTrainer(
        model, backend.GPTLoss(), optimizer, config.max_norm, threads=config.cores,
        accumulate=config.accumulate, engine=Engine(model, config.precision, config.compile),
    )  # fmt: skip


def stream(
    model: Any, tokenizer: CharTokenizer | BytePairTokenizer, prompt: str, steps: int,
    temperature: float = 1.0, top_k: int | None = None, seed: int | np.random.RandomState = 0,
) -> Iterator[str]:  # fmt: skip
    """Yield the text of `steps` tokens that continue `prompt`, sampled from the model's logits.

    A token is a character, or with a byte-pair tokenizer a piece of text, and is yielded once its
    characters are whole; ids of the model that such a tokenizer does not have are never drawn.
    The model sees the last `context_size` tokens. Each token takes one uniform number of
    RandomState(seed), or of the generator given, so that the text depends on the logits and the
    seed alone. Arguments are judged at the call, not at the first character; weights must not
    change before the last one. Raises ValueError for an empty prompt, for characters outside the
    vocabulary, for a model of another vocabulary, and what `sample` does.
    """
    if not prompt:
        raise ValueError("prompt is empty, at least one character is needed")
    tokenizer.check_model(model.vocab_size)
    try:
        ids = tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    steps = require_integer("steps", steps, 0)
    sample(np.zeros(1), temperature, top_k, 0.0)
    uniforms = seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed)

    def tokens() -> Iterator[int]:
        layers = layers_of(model)
        window, past = ids[-model.context_size :], None  # (T,)
        for _ in range(steps):
            # No `yield` inside the block: what a suspended generator sets, its caller would see.
            with inference(model, layers):
                logits, past = model.predict_next(window[None], past)  # (1, V)
            known = logits[0, : tokenizer.vocab_size]
            token = sample(known, temperature, top_k, uniforms.random_sample())
            if len(window) == model.context_size:  # from here on, every token moves
                window, past = window[1:], None
            window = np.append(window, token)
            yield token

    return tokenizer.decode_stream(tokens())


@contextmanager
def layer_modes(layers: list[Any], training: bool) -> Iterator[None]:
    """Set the mode of the layers; each has its own again afterwards, whatever happens inside."""
    before = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = training
        yield
    finally:
        for layer, mode in zip(layers, before, strict=True):
            layer.training = mode


def layers_of(model: Any) -> list[Any]:
    """Every layer of a model of either backend."""
    return [layer for _, layer in model.named_modules()]


@contextmanager
def inference(model: Any, layers: list[Any] | None = None) -> Iterator[None]:
    """Evaluation mode without a graph, for a block of code; `layers` spares looking for them."""
    no_grad = load_backend(backend_of(model)).no_grad
    overflow_is_judged_later = np.errstate(over="ignore", invalid="ignore")
    layers = layers_of(model) if layers is None else layers
    with layer_modes(layers, training=False), no_grad(), overflow_is_judged_later:
        yield
