"""Reference bundles: everything that one pass of the reference computed, and what may differ.

A bundle holds arrays by key, in the order in which they are judged:

- `tokens`, `targets`, `weight/<parameter>`: what goes in;
- `value/<entry>` in topological order, `loss`, `grad/<entry>` in reverse, `grad/<parameter>`;
- `step/<k>/loss`, `/grad_norm`, `/exp_avg/<parameter>`, `/exp_avg_sq/<parameter>` and
  `/weight/<parameter>` after the k-th optimizer step on the same batch;
- `tolerance/<dtype>/<key>`: the allowed 2-norm of the error of each row of the last axis.

The manifest holds the allowed error of each whole tensor (null: not judged), how closely
closure, autograd and complex step agree, the configuration, and where all of it came from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.backends import MissingBackendError, build_model, load_backend, thread_limit
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import FORWARD, GRADIENT, LOSS, PARAMETER
from gpt_parity.oracle.complex_step import complex_step_votes
from gpt_parity.oracle.graph import GRAD, LOSS_KEY, VALUE
from gpt_parity.oracle.lockstep import Runner, Setting, State, noisy_step, step_tolerances
from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, Unit
from gpt_parity.oracle.tolerance import (
    UNDECIDED,
    Tolerance,
    Tolerances,
    model_tolerances,
    noisy_runs,
)
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.oracle_config import HYPERPARAMETERS
from gpt_parity.schedule import require_integer
from gpt_parity.weights import check_arrays, set_weights

STEP = "step"
WEIGHT, TOLERANCE = "weight/", "tolerance/"
# The names of a step's quantities in lockstep training, and in bundles.
STEP_KEYS = {"loss": "loss", "gradient norm": "grad_norm", "weights": "weight"}


@dataclass(frozen=True)
class Bundle:
    """A reference: `arrays` by key in the order in which they are judged, float64 or float32.

    `tolerances` are by dtype and key; `votes` by key of a gradient, the disagreement of closure
    and autograd (None without PyTorch) with complex step in units of what is allowed; `aliases`
    are other names of entries.
    """

    config: GPTConfig
    tokens: np.ndarray
    targets: np.ndarray
    weights: dict[str, np.ndarray] = field(repr=False)
    arrays: dict[str, np.ndarray] = field(repr=False)
    tolerances: dict[str, dict[str, Tolerance]] = field(repr=False)
    votes: dict[str, dict[str, float | None]] = field(default_factory=dict, repr=False)
    optimizer: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict, repr=False)
    steps: int = 0
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Trace entries by name."""
        return {k.removeprefix(VALUE): a for k, a in self.arrays.items() if k.startswith(VALUE)}

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the trace entries by name."""
        return {n: self.arrays[GRAD + n] for n in self.values}

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Gradients of the parameters by name."""
        return {n: self.arrays[GRAD + n] for n in self.weights}

    def kind(self, key: str) -> str:
        """Which part of the pass a key belongs to."""
        if key.startswith(VALUE):
            return FORWARD
        if key.startswith(GRAD):
            return PARAMETER if key.removeprefix(GRAD) in self.weights else GRADIENT
        return LOSS if key == LOSS_KEY else STEP

    def kept(self, key: str) -> np.ndarray | None:
        """Where a masked tensor holds scores; None for others."""
        if not (key.startswith(VALUE) and key.endswith("mask.output")):
            return None
        shape = self.arrays[key].shape
        return np.broadcast_to(np.tri(*shape[-2:], dtype=bool), shape)

    def reference(self, key: str, dtype: str = "float64") -> tuple[np.ndarray, Tolerance]:
        """The array of a key and its tolerance; ValueError for a key or dtype it has not."""
        tolerances = self.tolerances.get(dtype)
        if tolerances is None:
            raise ValueError(f"bundle: holds {list(self.tolerances)}, not tolerances for {dtype}")
        if key not in self.arrays:
            own = next((k for k in (GRAD + key, VALUE + key) if k in self.arrays), None)
            raise ValueError(f"bundle: holds no {key}" + (f"; is it {own}?" if own else ""))
        return self.arrays[key].astype(np.float64), tolerances[key]

    def summary(self, path: Path | str) -> str:
        """What was written where, what cannot be judged, and whether the references agree."""
        sizes, (batch, length) = self.config, self.tokens.shape
        steps = f" and {self.steps} steps" if self.steps else ""
        lines = [
            f"{path}: {len(self.arrays)} tensors of one pass{steps}, V={sizes.vocab_size} "
            f"C={sizes.context_size} E={sizes.embedding_size} blocks={sizes.blocks} B={batch} "
            f"T={length}, judges {' and '.join(self.tolerances)}"
        ]
        for dtype, tolerances in self.tolerances.items():
            endless = [key for key, t in tolerances.items() if math.isinf(t.whole)]
            if endless:
                lines.append(
                    f"not judged in {dtype}: {len(endless)} tensors, {endless[0]} and on; "
                    f"{UNDECIDED}"
                )
        return "\n".join([*lines, self._vote_line()])

    def _vote_line(self) -> str:
        if not self.votes:
            return "vote: none, no derivative is well defined at this point"
        legs = {
            leg for vote in self.votes.values() for leg, ratio in vote.items() if ratio is not None
        }
        names = ", ".join(leg for leg in ("closure", "torch") if leg in legs)
        worst = {key: max(vote[leg] for leg in legs) for key, vote in self.votes.items()}
        split = [key for key, ratio in worst.items() if ratio > 1.0]
        if split:
            return (
                f"vote: {names} and complex step SPLIT in {len(split)} gradients, {split[0]} first"
            )
        absent = "" if "torch" in legs else "; PyTorch is not installed and has no vote"
        return (
            f"vote: {names} and complex step agree in {len(worst)} gradients, worst "
            f"{max(worst.values()):.3f} of what is allowed{absent}"
        )

    def model(self, dtype: str = "float64") -> Any:
        """The NumPy twin with the weights of the bundle."""
        model = build_model("numpy", self.config, dtype=dtype)
        set_weights(model, {n: w.astype(dtype) for n, w in self.weights.items()})
        return model

    def setting(self, steps: int) -> Setting:
        """Training on the one batch of the bundle, from its weights."""
        recipe = TrainConfig(**self.optimizer, min_learning_rate=self.optimizer["learning_rate"])
        batch = (self.tokens, self.targets)
        weights = {n: w.astype(np.float64) for n, w in self.weights.items()}
        rates = [recipe.learning_rate] * steps
        return Setting(self.config, recipe, weights, [batch] * steps, rates)


def make_bundle(
    config: GPTConfig, weights: Mapping[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray,
    *, dtype: str = "float64", steps: int = 0, optimizer: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None, votes: bool = True,
) -> Bundle:  # fmt: skip
    """Run the reference and measure what its results may be off by.

    Computed in float64 always; `dtype` is that of the arrays, weights included. Weights that
    float32 does not hold can only be judged in float64. `votes`: ask complex step, and PyTorch
    where it is installed, for every gradient. Raises ValueError for arrays that do not fit.
    """
    checked = check_arrays("weights", weights, config.parameter_shapes())
    with np.errstate(over="ignore"):
        weights = {n: w.astype(dtype).astype(np.float64) for n, w in checked.items()}
    check_arrays(f"weights in {dtype}", weights, config.parameter_shapes())
    with np.errstate(over="ignore"):
        single = all((w == w.astype(np.float32)).all() for w in weights.values())
    units = [FLOAT32] if dtype == "float32" else [FLOAT64, FLOAT32] if single else [FLOAT64]
    hyperparameters = {**_default_optimizer(), **(optimizer or {})}
    bundle = Bundle(
        config, np.asarray(tokens, np.int64), np.asarray(targets, np.int64), weights, {}, {},
        optimizer=hyperparameters, steps=require_integer("steps", steps, 0),
        provenance=dict(provenance or {}),
    )  # fmt: skip
    loss_fn = load_backend("numpy").GPTLoss()
    with np.errstate(over="ignore", invalid="ignore"):
        clean = trace(bundle.model(), loss_fn, bundle.tokens, bundle.targets)
    for key, array in pass_arrays(clean).items():
        if not np.isfinite(array).all():
            raise ValueError(
                f"reference: {key} is not finite in float64, smaller weights are needed"
            )
    _require_no_leak(clean, config.mask_value)
    bundle.aliases.update(clean.aliases)
    bundle.arrays.update(pass_arrays(clean))
    bundle.arrays.update(_step_arrays(_training(bundle)))
    for unit in units:
        bundle.tolerances[unit.name] = measured(bundle, unit)
    if votes:
        bundle.votes.update(_votes(bundle, clean))
    if dtype != "float64":
        for arrays in (bundle.arrays, bundle.weights):
            arrays.update({key: a.astype(dtype) for key, a in arrays.items()})
    return bundle


def _require_no_leak(clean: Trace, fill: float) -> None:
    """Raise ValueError where a score is so far below zero that the mask's fill is beside it."""
    for name, kept in clean.kept.items():
        weights = clean.values[name.replace("mask", "softmax")]
        if weights[~kept].any():
            lowest = clean.values[name.replace("output", "input")][kept].min()
            raise ValueError(
                f"reference: scores down to {lowest:.3g} in {name.rpartition('.')[0]} leave later "
                f"tokens a weight, beside a fill of {fill:g}; smaller weights are needed"
            )


def _default_optimizer() -> dict[str, Any]:
    return {name: getattr(TrainConfig(), name) for name in HYPERPARAMETERS}


def measured(bundle: Bundle, unit: Unit) -> dict[str, Tolerance]:
    """The tolerance of every key for a candidate that rounds as `unit` does."""
    found = _tolerances(bundle, unit)
    tolerances = _pass_tolerances(found)
    if not bundle.steps:
        return tolerances
    if found.undecided:  # then where training goes is not decided either
        steps = [key for key in bundle.arrays if key.startswith(f"{STEP}/")]
        return tolerances | {key: endless(bundle.arrays[key]) for key in steps}
    return tolerances | _step_tolerances(bundle, unit)


def endless(array: np.ndarray) -> Tolerance:
    """The tolerance of what is not judged."""
    return Tolerance(math.inf, np.full(array.shape[:-1], math.inf))


def _tolerances(bundle: Bundle, unit: Unit) -> Tolerances:
    loss_fn = load_backend("numpy").GPTLoss()
    return model_tolerances(bundle.model(), loss_fn, bundle.tokens, bundle.targets, unit)[1]


def pass_arrays(clean: Trace) -> dict[str, np.ndarray]:
    return {
        **{VALUE + n: a for n, a in clean.values.items()},
        LOSS_KEY: clean.loss,
        **{GRAD + n: clean.gradients[n] for n in reversed(clean.gradients)},
        **{GRAD + n: clean.parameters[n] for n in reversed(clean.parameters)},
    }


def _pass_tolerances(found: Tolerances) -> dict[str, Tolerance]:
    return {
        **{VALUE + n: t for n, t in found.values.items()},
        LOSS_KEY: found.loss,
        **{GRAD + n: t for n, t in (found.gradients | found.parameters).items()},
    }


def _training(bundle: Bundle) -> list[State]:
    """The state after each step of the NumPy twin in float64."""
    setting = bundle.setting(bundle.steps)
    runner = Runner("numpy", "float64", setting)
    return [
        runner.state(runner.step(batch, rate))
        for batch, rate in zip(setting.batches, setting.rates, strict=True)
    ]


def _step_arrays(states: list[State]) -> dict[str, np.ndarray]:
    return {
        f"{STEP}/{k}/{step_key(name)}": array
        for k, state in enumerate(states, start=1)
        for name, array in state.items() if name != "learning rate"
    }  # fmt: skip


def step_key(name: str) -> str:
    """The bundle's name, without "step/<k>/", of a quantity of lockstep training."""
    quantity, _, parameter = (name, "", "") if name in STEP_KEYS else name.partition(" ")
    quantity = STEP_KEYS.get(quantity, quantity)
    return f"{quantity}/{parameter}" if parameter else quantity


def _step_tolerances(bundle: Bundle, unit: Unit) -> dict[str, Tolerance]:
    """Training freely with every result perturbed, as a candidate trains freely."""
    setting = bundle.setting(bundle.steps)

    def training(noise: MonteCarloArithmetic) -> list[State]:
        runner = Runner("numpy", "float64", setting)
        return [
            noisy_step(runner, batch, rate, noise)
            for batch, rate in zip(setting.batches, setting.rates, strict=True)
        ]

    noisy = noisy_runs(training, unit, 1)
    tolerances = {}
    for k, clean in enumerate(_training(bundle)):
        found = step_tolerances(clean, [states[k] for states in noisy], unit)
        tolerances |= {
            f"{STEP}/{k + 1}/{step_key(name)}": t
            for name, t in found.items() if name != "learning rate"
        }  # fmt: skip
    return tolerances


def _votes(bundle: Bundle, clean: Trace) -> dict[str, dict[str, float | None]]:
    """Closure and autograd, each against complex step, by key of the gradient."""
    tolerances = _tolerances(bundle, FLOAT64)
    if tolerances.undecided:
        return {}
    try:
        torch_impl = load_backend("torch")
    except MissingBackendError:
        autograd = None
    else:
        with thread_limit(1, "torch"):
            model = build_model("torch", bundle.config, dtype="float64")
            set_weights(model, bundle.weights)
            autograd = trace(model, torch_impl.GPTLoss(), bundle.tokens, bundle.targets)
    votes = complex_step_votes(
        bundle.model("complex128"), load_backend("numpy").GPTLoss(), bundle.tokens,
        bundle.targets, clean, autograd or clean, tolerances,
    )  # fmt: skip

    def finite(ratio: float) -> float:
        return min(ratio, sys.float_info.max)  # as JSON can hold it

    return {
        GRAD + v.name: {"closure": finite(v.closure),
                        "torch": finite(v.autograd) if autograd else None}
        for v in votes
    }  # fmt: skip
