"""Training both backends side by side, judged step by step.

In float64 the backends train freely from one start, and the allowed distance is that between the
NumPy twin and its own copies under Monte Carlo arithmetic. In float32 a free run would measure how
fast rounding grows and little else, so every step starts from one common state (weights and
moments), is judged as one step, and the NumPy twin's result is the next common state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import Checkpoint
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import Judgement, compare
from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, Unit
from gpt_parity.oracle.tolerance import Tolerance, noisy_runs, spread_tolerance
from gpt_parity.training import GPTTrainer, StepResult
from gpt_parity.weights import get_weights, set_weights
from numpy_impl.tape import observe

Batch = tuple[np.ndarray, np.ndarray]
State = dict[str, np.ndarray]
# Fewer noisy runs than for one pass: they are the cost of a lockstep run, and a clean step stays
# below a tenth of its tolerance.
NOISY_TRAININGS = 3
QUANTITIES = ("loss", "gradient norm", "learning rate", "exp_avg", "exp_avg_sq", "weights")


@dataclass(frozen=True)
class Setting:
    """What a lockstep run starts from: float64 weights that float32 represents, data, rates."""

    config: GPTConfig
    recipe: TrainConfig
    weights: dict[str, np.ndarray]
    batches: list[Batch]
    rates: list[float]


@dataclass
class Outcome:
    """The worst judgement of each quantity over all steps, with its step, by candidate.

    `series` holds the worst ratio of each quantity in every step that was added.
    """

    dtype: str
    steps: int
    worst: dict[str, dict[str, tuple[Judgement, int]]] = field(default_factory=dict)
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, candidate: str, step: int, judgements: Iterable[Judgement]) -> None:
        quantities = self.worst.setdefault(candidate, {})
        ratios: dict[str, float] = {}
        for j in judgements:
            ratios[j.kind] = max(j.ratio, ratios.get(j.kind, 0.0))
            if j.kind not in quantities or j.ratio > quantities[j.kind][0].ratio:
                quantities[j.kind] = (j, step)
        series = self.series.setdefault(candidate, {})
        for kind, ratio in ratios.items():
            series.setdefault(kind, []).append(ratio)

    @property
    def ok(self) -> bool:
        return all(j.ok for quantities in self.worst.values() for j, _ in quantities.values())


class Runner:
    """One backend in training: a step, and all of its state as named arrays."""

    def __init__(self, backend: str, dtype: str, setting: Setting) -> None:
        recipe, package = setting.recipe, load_backend(backend)
        self.dtype = dtype
        self.model = build_model(backend, setting.config, dtype=dtype)
        self.optimizer = package.AdamWOptimizer(
            self.model.parameters(), recipe.learning_rate, recipe.betas, recipe.eps,
            recipe.weight_decay,
        )  # fmt: skip
        self.trainer = GPTTrainer(self.model, package.GPTLoss(), self.optimizer, recipe.max_norm)
        self.names = [name for name, _ in self.model.named_parameters()]
        set_weights(self.model, {n: w.astype(dtype) for n, w in setting.weights.items()})

    @classmethod
    def from_checkpoint(cls, backend: str, checkpoint: Checkpoint, setting: Setting) -> Runner:
        """A runner that goes on from a checkpoint; `setting` gives sizes and recipe alone."""
        blank = {name: np.zeros_like(array) for name, array in setting.weights.items()}
        runner = cls(backend, checkpoint.dtype, replace(setting, weights=blank))
        set_weights(runner.model, checkpoint.weights)
        checkpoint.load_optimizer(runner.model, runner.optimizer)
        return runner

    def step(self, batch: Batch, rate: float) -> StepResult:
        """One training step."""
        self.optimizer.lr = rate
        return self.trainer.train_step(*batch)

    def state(self, result: StepResult) -> State:
        """What the last step computed and left behind, as copies."""
        state: State = {
            "loss": np.array(result.loss, self.dtype),
            "gradient norm": np.array(result.grad_norm, self.dtype),
            "learning rate": np.array(result.lr),
        }
        moments = self.optimizer.state()
        weights = get_weights(self.model)
        for i, name in enumerate(self.names):
            state[f"exp_avg {name}"] = moments["exp_avg"][i]
            state[f"exp_avg_sq {name}"] = moments["exp_avg_sq"][i]
            state[f"weights {name}"] = weights[name]
        return state

    def load(self, state: State, steps: int) -> None:
        """Continue from the weights and moments that another runner had after `steps` steps."""

        def arrays(kind: str) -> list[np.ndarray]:
            return [state[f"{kind} {name}"].astype(self.dtype) for name in self.names]

        set_weights(self.model, dict(zip(self.names, arrays("weights"), strict=True)))
        counts = [steps] * len(self.names)
        self.optimizer.load_state(
            {"exp_avg": arrays("exp_avg"), "exp_avg_sq": arrays("exp_avg_sq"), "steps": counts}
        )


def noisy_step(runner: Runner, batch: Batch, rate: float, noise: MonteCarloArithmetic) -> State:
    """A step of a NumPy runner with every operation, the norm and the update perturbed."""
    optimizer = runner.optimizer
    weights, exp_avg, exp_avg_sq = optimizer.buffer.data, optimizer.exp_avg, optimizer.exp_avg_sq
    before, decayed = weights.copy(), optimizer.betas[0] * exp_avg
    with observe(noise):
        result = runner.step(batch, rate)
    for array, m in (
        (weights, np.abs(weights) + 4.0 * np.abs(weights - before)),
        (exp_avg, np.abs(decayed) + 2.0 * np.abs(exp_avg - decayed)),
        (exp_avg_sq, 3.0 * exp_avg_sq),
    ):
        array[...] = noise.perturbed(array, m)
    np.abs(exp_avg_sq, out=exp_avg_sq)  # underflow noise must not make a mean of squares negative
    norm = np.array(result.grad_norm)
    norm = noise.perturbed(norm, math.sqrt(weights.size) * norm)
    return runner.state(result._replace(grad_norm=float(norm)))


Spread = dict[str, Tolerance]


def step_tolerances(clean: State, noisy: list[State], unit: Unit) -> Spread:
    """The tolerance of every array of a state; learning rates must be equal."""
    tolerances = {
        key: spread_tolerance(x, [s[key] for s in noisy], unit, key) for key, x in clean.items()
    }
    return {**tolerances, "learning rate": Tolerance(0.0, np.array(0.0))}


def judge_step(candidate: State, clean: State, tolerances: Spread, unit: Unit) -> list[Judgement]:
    """Judge every array of a state.

    Raises ValueError where the candidate lacks an array or has one too many.
    """
    if list(candidate) != list(clean):
        raise ValueError(f"state: got {list(candidate)}, needed {list(clean)}")
    judgements = []
    for key, reference in clean.items():
        kind, _, name = (key, "", key) if key in QUANTITIES else key.partition(" ")
        dtype = "float64" if key == "learning rate" else unit.name
        judgements.append(compare(name, kind, candidate[key], reference, tolerances[key], dtype))
    return judgements


def free_float64(setting: Setting) -> Outcome:
    """Train both backends freely in float64 and judge their distance after every step."""
    clean, torch = Runner("numpy", "float64", setting), Runner("torch", "float64", setting)
    streams = noisy_runs(
        lambda noise: (Runner("numpy", "float64", setting), noise), FLOAT64, 1, NOISY_TRAININGS
    )
    outcome = Outcome("float64", len(setting.batches))
    for t, (batch, rate) in enumerate(zip(setting.batches, setting.rates, strict=True)):
        reference = clean.state(clean.step(batch, rate))
        noisy = [noisy_step(runner, batch, rate, noise) for runner, noise in streams]
        tolerances = step_tolerances(reference, noisy, FLOAT64)
        candidate = torch.state(torch.step(batch, rate))
        outcome.add("torch", t, judge_step(candidate, reference, tolerances, FLOAT64))
    return outcome


def common_state_float32(setting: Setting) -> Outcome:
    """Judge each float32 step of both backends from one common state."""
    candidates = {name: Runner(name, "float32", setting) for name in ("numpy", "torch")}
    engine = Runner("numpy", "float64", setting)
    outcome = Outcome("float32", len(setting.batches))
    start = engine.state(StepResult(0.0, 0.0, 0.0))
    for t, (batch, rate) in enumerate(zip(setting.batches, setting.rates, strict=True)):
        engine.load(start, t)
        reference = engine.state(engine.step(batch, rate))

        def noisy(
            noise: MonteCarloArithmetic, start: State = start, t: int = t,
            batch: Batch = batch, rate: float = rate,
        ) -> State:  # fmt: skip
            engine.load(start, t)
            return noisy_step(engine, batch, rate, noise)

        tolerances = step_tolerances(
            reference, noisy_runs(noisy, FLOAT32, t, NOISY_TRAININGS), FLOAT32
        )
        for name, runner in candidates.items():
            runner.load(start, t)
            state = runner.state(runner.step(batch, rate))
            outcome.add(name, t, judge_step(state, reference, tolerances, FLOAT32))
            if name == "numpy":
                following = state
        start = following
    return outcome
