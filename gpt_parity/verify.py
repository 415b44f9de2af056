"""The main job: both models on shared weights and real text, tensor by tensor, then in training."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from gpt_parity.backends import build_model, load_backend, thread_limit
from gpt_parity.checkpoint import Checkpoint, load_checkpoint, tokenizer_of
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset, CharTokenizer, Corpus, read_corpus
from gpt_parity.interrupts import interrupts_ignored
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.arithmetic import Arithmetic, one_pass, show_slips_in
from gpt_parity.oracle.compare import Report, compare_traces
from gpt_parity.oracle.complex_step import Vote, complex_step_votes
from gpt_parity.oracle.hops import hopping_float64, steps_of
from gpt_parity.oracle.lockstep import (
    Batch,
    Outcome,
    Setting,
    common_state_float32,
    free_float64,
)
from gpt_parity.oracle.processes import STEPS, row_counts, several_processes
from gpt_parity.oracle.report import PROCESSES, Verification
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, Unit
from gpt_parity.oracle.slips import Sighting, show_slips
from gpt_parity.oracle.tolerance import Tolerances, model_tolerances
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.precision import require_machine
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.token_dataset import TokenDataset
from gpt_parity.weights import get_weights, set_weights
from numpy_impl.memory import keep_freed_memory

BATCH_SIZE = 4
DRAWN_WINDOWS = 100  # where there is no text: ten for the test part


@dataclass(frozen=True)
class Subject:
    """What is verified: sizes, float64 weights that float32 represents, and text."""

    config: GPTConfig
    weights: dict[str, np.ndarray]
    dataset: CharDataset
    corpus: Corpus
    at_initialisation: bool


def verify(
    config: VerifyConfig, on_pass: Callable[[Verification], None] = lambda result: None
) -> Verification:
    """Compare both twins on one batch in both dtypes, three ways, then in lockstep and over hops.

    `on_pass` is called with what is known before training; a difference there ends the run, since
    training on it would say nothing new. Raises ValueError for a text or checkpoint that does not
    do and for an arithmetic that this machine has not, MissingBackendError without PyTorch.
    """
    if config.arithmetic is not None:
        load_backend("torch")
        require_machine(config.arithmetic, config.device, config.compile)
    subject = subject_of(config)
    setting = lockstep_setting(config.steps, subject)

    def hop() -> list[Outcome]:
        if config.hops == 0:
            return []
        return [hopping_float64(lockstep_setting(steps_of(config.hops), subject), config.hops)]

    def spread(result: Verification) -> Verification:
        if config.processes == 1 or not result.ok:
            return result
        settings = [lockstep_setting(STEPS, subject, n) for n in row_counts(config.processes)]
        outcome, sightings = several_processes(settings, config.processes)
        return replace(
            result, lockstep=[*result.lockstep, outcome],
            slips={**result.slips, PROCESSES: sightings},
        )  # fmt: skip

    if config.steps == 0 or config.workers == 1:
        with thread_limit(1, "torch"):
            result = _verification(config, subject)
            on_pass(result)
            if not result.ok:
                return result
            runs = (free_float64, common_state_float32) if config.steps else ()
            result = replace(result, lockstep=[*(run(setting) for run in runs), *hop()])
            return spread(result)
    # A fresh process, since PyTorch's threads do not survive a fork; it starts before PyTorch is
    # imported here, so that the two imports go side by side.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with interrupts_ignored():
            float32 = pool.submit(_common_state_float32, setting)
        workers = set(multiprocessing.active_children()) - others
        try:
            with thread_limit(1, "torch"):
                result = _verification(config, subject)
                on_pass(result)
                if result.ok:
                    free, hopped = free_float64(setting), hop()
                    result = replace(result, lockstep=[free, float32.result(), *hopped])
                    result = spread(result)
            return result
        finally:
            if not float32.done():
                for process in workers:
                    process.terminate()


def _common_state_float32(setting: Setting) -> Outcome:
    keep_freed_memory()
    with thread_limit(1, "torch"):
        return common_state_float32(setting)


def subject_of(config: VerifyConfig) -> Subject:
    """The weights and the text that `config` names; ValueError for those that do not do."""
    if config.checkpoint is None:
        recipe, corpus = TrainConfig(model=config.model or "gpt"), read_corpus(config.data)
        dataset = _dataset(corpus, recipe.context_size, None)
        model_config = recipe.model_config(dataset.vocab_size)
        weights = get_weights(build_model("numpy", model_config, config.seed, "float32"))
    else:
        checkpoint = load_checkpoint(config.checkpoint)
        model_config, weights = checkpoint.config, checkpoint.weights
        own = "gpt2" if isinstance(model_config, GPT2Config) else "gpt"
        if config.model not in (None, own):
            raise ValueError(f"model is {config.model}, {config.checkpoint} is of a {own}")
        corpus, dataset = _text_of(checkpoint, config)
    # Numbers that float32 holds exactly, so that both dtypes start from the same weights.
    shared = {n: w.astype(np.float32).astype(np.float64) for n, w in weights.items()}
    return Subject(model_config, shared, dataset, corpus, config.checkpoint is None)


def _text_of(checkpoint: Checkpoint, config: VerifyConfig) -> tuple[Corpus, CharDataset]:
    """The text for a checkpoint's tokens, or ids that are drawn where its model has no text."""
    sizes = checkpoint.config
    if checkpoint.has_text:
        corpus = read_corpus(config.data)
        tokenizer = tokenizer_of(checkpoint, config.checkpoint)
        if isinstance(tokenizer, CharTokenizer):
            return corpus, _dataset(corpus, sizes.context_size, tokenizer)
        try:
            ids = tokenizer.encode(corpus.text)
            return corpus, TokenDataset(ids, sizes, BATCH_SIZE)
        except ValueError as error:
            raise ValueError(f"{corpus.name}: {error}") from error
    if config.data is not None:
        raise ValueError("data is given, but the model of the checkpoint has no text")
    count = DRAWN_WINDOWS * (sizes.context_size + 1)
    ids = np.random.RandomState(config.seed).randint(0, sizes.vocab_size, count)
    digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
    corpus = Corpus("", f"{count:,} ids drawn with seed {config.seed}", digest)
    return corpus, TokenDataset(ids, sizes, BATCH_SIZE)


def _dataset(corpus: Corpus, context_size: int, tokenizer: CharTokenizer | None) -> CharDataset:
    try:
        dataset = CharDataset(
            corpus.text, context_size=context_size, batch_size=BATCH_SIZE, tokenizer=tokenizer
        )
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from error
    if dataset.vocab_size < 2:
        raise ValueError(
            f"{corpus.name}: has one distinct character, at least 2 are needed (with one, the loss "
            "and all gradients are 0)"
        )
    return dataset


def lockstep_setting(steps: int, subject: Subject, rows: int = BATCH_SIZE) -> Setting:
    """A lockstep run of the source text's recipe; without steps it holds no batches or rates.

    rows: of each batch, the next ones of the text.
    """
    recipe, dataset = TrainConfig(), subject.dataset
    scheduler = WarmupCosineScheduler(
        recipe.learning_rate, max(steps, 1), recipe.warmup, recipe.min_learning_rate
    )
    count, needed = dataset.batch_count("train"), -(-rows // BATCH_SIZE)

    def batch(t: int) -> Batch:
        several = [dataset.batch("train", (needed * t + k) % count) for k in range(needed)]
        tokens, targets = (np.concatenate(part)[:rows] for part in zip(*several, strict=True))
        return tokens, targets

    return Setting(
        subject.config, recipe, subject.weights,
        [batch(t) for t in range(steps)],
        [scheduler(t) for t in range(steps)],
    )  # fmt: skip


def _plain_case(kind: type[GPTConfig], unit: Unit) -> tuple[Trace, Tolerances]:
    """A fixed pass at initial weights, to plant slips into: there every tensor can be judged.

    In the weights at hand a gradient may be zero or symmetric, and a slip in it no slip at all.
    """
    config = kind(vocab_size=65)
    tokens, targets = np.random.RandomState(0).randint(0, 65, (2, BATCH_SIZE, config.context_size))
    model = build_model("numpy", config, seed=0, dtype="float64")
    return model_tolerances(model, load_backend("numpy").GPTLoss(), tokens, targets, unit)


def _verification(config: VerifyConfig, subject: Subject) -> Verification:
    tokens, targets = subject.dataset.batch("train", 0)

    def build(backend: str, dtype: str):
        model = build_model(backend, subject.config, dtype=dtype)
        set_weights(model, {n: w.astype(dtype) for n, w in subject.weights.items()})
        return model, load_backend(backend).GPTLoss()

    def run(backend: str, dtype: str) -> Trace:
        return trace(*build(backend, dtype), tokens, targets)

    reports: dict[tuple[str, str], Report] = {}
    slips: dict[str, list[Sighting]] = {}
    votes: list[Vote] = []
    for unit, backends in ((FLOAT64, ("torch",)), (FLOAT32, ("numpy", "torch"))):
        dtype = unit.name
        clean, tolerances = model_tolerances(*build("numpy", "float64"), tokens, targets, unit)
        for backend in backends:
            candidate = run(backend, dtype)
            reports[backend, dtype] = compare_traces(
                candidate, clean, tolerances, dtype, keep=config.html is not None
            )
        slips[dtype] = show_slips(*_plain_case(type(subject.config), unit), dtype)
        if unit is FLOAT64:
            allowed = None if subject.at_initialisation else tolerances
            complex_model, loss_fn = build("numpy", "complex128")
            votes = complex_step_votes(
                complex_model, loss_fn, tokens, targets, clean, candidate, allowed
            )
    result = Verification(subject.config, subject.corpus, config, slips, reports, votes, [])
    if config.arithmetic is None or not result.ok:
        return result
    arithmetic = Arithmetic(config.arithmetic, config.compile, config.device)
    unit = arithmetic.unit
    slips[arithmetic.name] = show_slips_in(*_plain_case(type(subject.config), unit), unit)
    report = one_pass(arithmetic, subject.config, subject.weights, tokens, targets)
    return replace(result, arithmetic={arithmetic.name: report})
