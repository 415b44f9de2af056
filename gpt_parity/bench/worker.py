"""One measurement in a process of its own: arguments come as JSON, the result leaves as JSON.

A process of its own has its own threads, its own memory, and nothing imported that it does not
measure.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.backends import build_model, load_backend, thread_limit
from gpt_parity.bench.common import (
    BATCHES,
    Batch,
    give_back,
    in_turns,
    is_gpt2,
    random_batches,
    resident,
)
from gpt_parity.bench.config import BENCHMARKS
from gpt_parity.bench.contenders import Contender, contenders, trainer_of
from gpt_parity.bench.gpt2_worker import measure_cache, measure_large
from gpt_parity.bench.growth import preset
from gpt_parity.bench.timing import interleaved
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset, CharTokenizer, read_corpus
from gpt_parity.model_config import GPT2Config, GPTConfig, Preset
from gpt_parity.oracle.bundle import pass_arrays
from gpt_parity.oracle.bundle_files import load_bundle
from gpt_parity.oracle.trace import trace
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import new_trainer, stream
from gpt_parity.weights import set_weights
from numpy_impl import Tensor
from numpy_impl.memory import keep_freed_memory
from numpy_impl.tape import Observer, observe

# Of float32 numbers after three steps at learning rate 1e-3. AdamW divides gradients by their own
# size, so that where they are rounding alone, its steps are too.
SAME_NUMBER = 1e-3
SAME_WAY = 0.05
STEPS_PER_TURN = 100
SMALLEST = Preset(GPTConfig(2, 1, 1, 1), batch_size=1, length=1)
SMALLEST_GPT2 = Preset(GPT2Config(2, 1, 2, 1, heads=1), batch_size=1, length=1)


def require_same_work(found: list[Contender], batches: list[Batch]) -> None:
    """Raise RuntimeError unless three steps of all contenders agree.

    In their losses, in their gradient norms, and in the weights they end at, by the way they went.
    """
    first, *others = found
    start = first.weights()
    results = {c.name: [c.step(*batch) for batch in batches[:3]] for c in found}
    ends = {c.name: c.weights() for c in found}
    for other in others:
        for what, index in (("losses", 0), ("gradient norms", 1)):
            mine, theirs = ([s[index] for s in results[c.name]] for c in (first, other))
            if not np.allclose(mine, theirs, rtol=SAME_NUMBER, atol=0.0):
                raise RuntimeError(f"{what} differ: {first.name} {mine}, {other.name} {theirs}")
        for name, weight in ends[first.name].items():
            kept = has_gradient(name, weight)
            moved = np.linalg.norm((weight - start[name])[kept])
            apart = np.linalg.norm((weight - ends[other.name][name])[kept])
            if not apart <= SAME_WAY * moved:
                raise RuntimeError(
                    f"weights differ: {name} of {first.name} moved by {moved:.3g} and is "
                    f"{apart:.3g} from that of {other.name}"
                )


def has_gradient(name: str, weight: np.ndarray) -> np.ndarray:
    """Where a weight's gradient is more than rounding: not at the bias of GPT-2's keys.

    It adds the same number to all scores of a row, which softmax takes away again.
    """
    kept = np.ones(weight.shape, bool)
    if name.endswith("attention.input.bias"):
        kept[len(weight) // 3 : 2 * len(weight) // 3] = False
    return kept


def measure_passes(
    size: str, names: list[str], threads: int | None, seconds: float, which: str
) -> Any:
    """Seconds of a training step, or of a forward pass with its loss."""
    sizes = BENCHMARKS[size]
    batches = random_batches(sizes)
    found = contenders(names, sizes, threads)
    require_same_work(found, batches)
    functions = {c.name: in_turns(batches, getattr(c, which)) for c in found}
    return {name: asdict(times) for name, times in interleaved(functions, seconds).items()}


def measure_generation(size: str, names: list[str], seconds: float, tokens: int) -> Any:
    """Seconds of `tokens` generated characters."""
    sizes = BENCHMARKS[size]
    tokenizer = CharTokenizer("".join(map(chr, range(33, 33 + sizes.model.vocab_size))))
    models = {name: build_model(name, sizes.model) for name in names}
    functions = {
        name: lambda model=model: list(stream(model, tokenizer, "!", tokens))
        for name, model in models.items()
    }
    return {name: asdict(times) for name, times in interleaved(functions, seconds).items()}


def write_submission(reference: str, out: str, mistake: bool) -> Any:
    """Write what PyTorch computes in float32 for a bundle, by GELU's erf form if `mistake`."""
    bundle = load_bundle(Path(reference))
    model = build_model("torch", bundle.config)
    set_weights(model, {n: w.astype(np.float32) for n, w in bundle.weights.items()})
    if mistake:
        for block in model.transformers:
            block.feed_forward.gelu.approximate = "none"
    found = trace(model, load_backend("torch").GPTLoss(), bundle.tokens, bundle.targets)
    np.savez(out, **pass_arrays(found))
    return {}


def measure_memory(size: str, name: str) -> Any:
    """Resident bytes at the peak of training steps, above those before the model was built."""
    sizes = BENCHMARKS[size]
    batches = random_batches(sizes)
    smallest = SMALLEST_GPT2 if is_gpt2(sizes) else SMALLEST
    (first,) = contenders([name], smallest, 1)  # so that the libraries have all they need
    for batch in random_batches(smallest):
        first.step(*batch)
    give_back()
    before = resident("VmRSS")
    (contender,) = contenders([name], sizes, 1)
    for batch in batches:
        contender.step(*batch)
    return {"peak": resident("VmHWM") - before}


def measure_leaks(steps: list[int]) -> Any:
    """Live Tensors and resident bytes after so many training steps of the source size."""
    sizes = BENCHMARKS["source"]
    batches = random_batches(sizes)
    (contender,) = contenders(["numpy"], sizes, 1)
    found = []
    for step in range(1, max(steps) + 1):
        contender.step(*batches[step % BATCHES])
        if step in steps:
            gc.collect()
            tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
            found.append({"step": step, "tensors": tensors, "resident": resident("VmRSS")})
    return found


def measure_recipe(names: list[str], data: str, steps: int | None) -> Any:
    """Seconds of the whole source recipe, the backends in turns of 100 steps."""
    config = TrainConfig(threads=1)
    corpus = read_corpus(Path(data) if data else None)
    dataset = CharDataset(
        corpus.text, context_size=config.context_size, batch_size=config.batch_size
    )
    count = dataset.batch_count("train")
    total = min(config.epochs * count, steps or sys.maxsize)
    scheduler = WarmupCosineScheduler(
        config.learning_rate, total, config.warmup, config.min_learning_rate
    )
    model_config = config.model_config(dataset.vocab_size)
    trainers = {n: new_trainer(replace(config, backend=n), model_config) for n in names}
    seconds = dict.fromkeys(names, 0.0)
    for start in range(0, total, STEPS_PER_TURN):
        for name, trainer in trainers.items():
            begin = time.perf_counter()
            for t in range(start, min(start + STEPS_PER_TURN, total)):
                trainer.optimizer.lr = scheduler(t)
                trainer.train_step(*dataset.batch("train", t % count))
            seconds[name] += time.perf_counter() - begin
    losses = {name: trainer.test(dataset)[1] for name, trainer in trainers.items()}
    return {"corpus": corpus.name, "steps": total, "seconds": seconds, "test_loss": losses}


def measure_growth(axis: str, values: list[int], seconds: float) -> Any:
    """Seconds and allocated bytes of one NumPy step, for each value of T, E, B or blocks."""
    found = []
    for value in values:
        size = preset(axis, value)
        batches = random_batches(size)
        trainer = trainer_of("numpy", size)
        step = in_turns(batches, trainer.train_step)
        step()
        times = interleaved({"numpy": step}, seconds)["numpy"]
        tracemalloc.start()
        step()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        step()
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        found.append({"value": value, "seconds": times.median, "bytes": peak})
    return found


class Stopwatch(Observer):
    """Adds up the seconds between events by operation, the forward and the backward pass apart.

    What the tape and the layers do on the way to an operation counts as its own.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.calls[name] = self.calls.get(name, 0) + 1
        self.last = time.perf_counter()

    def forward(self, op: str, out: Any, parents: Any) -> None:
        self.lap(f"forward {op}")

    def backward(self, op: str, i: int, grad: Any, upstream: Any, parents: Any) -> None:
        self.lap(f"backward {op}")


def measure_operations(size: str, steps: int) -> Any:
    """Seconds and calls of each operation of the NumPy engine in one training step."""
    sizes = BENCHMARKS[size]
    batches = random_batches(sizes)
    trainer = trainer_of("numpy", sizes)
    step = in_turns(batches, trainer.train_step)
    for _ in range(3):
        step()
    watch = Stopwatch()
    with observe(watch):
        for _ in range(steps):
            watch.last = time.perf_counter()
            step()
            watch.lap("clipping and AdamW")
    return {
        name: {"seconds": seconds / steps, "calls": watch.calls[name] / steps}
        for name, seconds in watch.seconds.items()
    }


MEASURES: dict[str, Callable[..., Any]] = {
    "passes": measure_passes,
    "generation": measure_generation,
    "cache": measure_cache,
    "submission": write_submission,
    "memory": measure_memory,
    "leaks": measure_leaks,
    "recipe": measure_recipe,
    "growth": measure_growth,
    "large": measure_large,
    "operations": measure_operations,
}


def main() -> None:
    """Measure what the first argument names, as the second one says.

    PyTorch takes its number of threads from OMP_NUM_THREADS; NumPy's matrix products take one.
    """
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    keep_freed_memory()
    with thread_limit(1, "numpy"):
        print(json.dumps(MEASURES[name](**arguments)))


if __name__ == "__main__":
    main()
