"""Mistakes that people make in a training step: clipping, AdamW, gradients of another step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.oracle.bundle import STEP, WEIGHT, Bundle
from gpt_parity.oracle.trace import trace
from gpt_parity.weights import set_weights
from numpy_impl.loss import GPTLoss

Arrays = dict[str, np.ndarray]
Update = Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Step:
    """One step of AdamW: the state before it, its gradients, and those of the steps before.

    `settings` are the hyperparameters of the bundle; `number` counts from 1.
    """

    number: int
    weights: Arrays
    exp_avg: Arrays
    exp_avg_sq: Arrays
    gradients: list[Arrays]
    settings: Mapping[str, Any]

    @property
    def gradient(self) -> Arrays:
        return self.gradients[-1]

    def key(self, quantity: str) -> str:
        return f"{STEP}/{self.number}/{quantity}"

    def after(
        self, gradient: Arrays | None = None, scale: Callable[[float], float] | None = None,
        update: Update | None = None,
    ) -> Arrays:  # fmt: skip
        """What the step leaves behind, by the bundle's keys, with one part of it changed.

        `scale` makes a factor of a norm; a right one is min(1, max_norm / (norm + 1e-6)).
        """
        gradient, update = gradient or self.gradient, update or adamw
        norm = _norm(gradient)
        factor = (scale or self.clip)(norm)
        return {self.key("grad_norm"): np.array(norm)} | self.updated(
            {name: factor * g for name, g in gradient.items()}, update
        )

    def clip(self, norm: float) -> float:
        return min(1.0, self.settings["max_norm"] / (norm + 1e-6))

    def updated(self, clipped: Arrays, update: Update) -> Arrays:
        """Moments and weights after the update with clipped gradients."""
        found: Arrays = {}
        for name, g in clipped.items():
            state = update(self, self.weights[name], g, self.exp_avg[name], self.exp_avg_sq[name])
            for quantity, x in zip(("weight", "exp_avg", "exp_avg_sq"), state, strict=True):
                found[self.key(f"{quantity}/{name}")] = x
        return found


def _norm(gradients: Arrays) -> float:
    return math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))


def adamw(
    step: Step, w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, *,
    l2: float = 0.0, decay: float | None = None, correct: bool = True, eps_inside: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """One parameter's update (Loshchilov & Hutter 2019), as it should be or changed."""
    rate, (beta1, beta2) = step.settings["learning_rate"], step.settings["betas"]
    eps, weight_decay = step.settings["eps"], step.settings["weight_decay"]
    if decay is None:
        decay = rate * weight_decay if w.ndim >= 2 else 0.0
    g = g + l2 * w
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    m_hat = m / (1.0 - beta1**step.number) if correct else m
    v_hat = v / (1.0 - beta2**step.number) if correct else v
    denominator = np.sqrt(v_hat + eps) if eps_inside else np.sqrt(v_hat) + eps
    return (1.0 - decay) * w - rate * m_hat / denominator, m, v


StepMistake = Callable[[Step], "Arrays | None"]
STEP_MISTAKES: list[tuple[str, StepMistake]] = []


def step_mistake(description: str) -> Callable[[StepMistake], StepMistake]:
    """Enter a mistake into the table; it returns None where the step has no use for it."""

    def entered(function: StepMistake) -> StepMistake:
        STEP_MISTAKES.append((description, function))
        return function

    return entered


@step_mistake("AdamW: decay is added to the gradient (L2), not taken from the weight")
def _l2(step: Step) -> Arrays:
    def update(s: Step, w: np.ndarray, *rest: np.ndarray) -> Any:
        return adamw(s, w, *rest, l2=s.settings["weight_decay"] * (w.ndim >= 2), decay=0.0)

    return step.after(update=update)


@step_mistake("AdamW: decay is added to the gradient (L2), of biases too")
def _l2_on_biases(step: Step) -> Arrays:
    return step.after(
        update=lambda s, *arrays: adamw(s, *arrays, l2=s.settings["weight_decay"], decay=0.0)
    )


@step_mistake("AdamW: biases decay too")
def _decay_on_biases(step: Step) -> Arrays:
    decay = step.settings["learning_rate"] * step.settings["weight_decay"]
    return step.after(update=lambda s, *arrays: adamw(s, *arrays, decay=decay))


@step_mistake("AdamW: nothing decays")
def _no_decay(step: Step) -> Arrays:
    return step.after(update=lambda s, *arrays: adamw(s, *arrays, decay=0.0))


@step_mistake("AdamW: decay is not multiplied by the learning rate")
def _decay_without_rate(step: Step) -> Arrays:
    def update(s: Step, w: np.ndarray, *rest: np.ndarray) -> Any:
        return adamw(s, w, *rest, decay=s.settings["weight_decay"] * (w.ndim >= 2))

    return step.after(update=update)


@step_mistake("AdamW: eps is added inside the root")
def _eps_inside(step: Step) -> Arrays:
    return step.after(update=lambda s, *arrays: adamw(s, *arrays, eps_inside=True))


@step_mistake("AdamW: the moments are not corrected for their start at 0")
def _no_correction(step: Step) -> Arrays:
    return step.after(update=lambda s, *arrays: adamw(s, *arrays, correct=False))


@step_mistake("clip: each tensor is clipped by its own norm")
def _clip_per_tensor(step: Step) -> Arrays:
    clipped = {name: step.clip(_norm({name: g})) * g for name, g in step.gradient.items()}
    return {step.key("grad_norm"): np.array(_norm(step.gradient))} | step.updated(clipped, adamw)


@step_mistake("clip: gradients are not clipped")
def _clip_never(step: Step) -> Arrays:
    return step.after(scale=lambda norm: 1.0)


@step_mistake("clip: short gradients are stretched to max_norm too")
def _clip_always(step: Step) -> Arrays:
    return step.after(scale=lambda norm: step.settings["max_norm"] / (norm + 1e-6))


@step_mistake("stale: the gradient is that of the previous step")
def _stale(step: Step) -> Arrays | None:
    return step.after(step.gradients[-2]) if len(step.gradients) > 1 else None


@step_mistake("accumulated: the gradients of earlier steps are still there (no zero_grad)")
def _accumulated(step: Step) -> Arrays | None:
    if len(step.gradients) < 2:
        return None
    total = {name: np.zeros(w.shape) for name, w in step.weights.items()}
    for gradient in step.gradients:
        # What an earlier step left was clipped in place.
        factor = step.clip(_norm(total))
        total = {name: factor * t + gradient[name] for name, t in total.items()}
    return step.after(total)


@step_mistake("doubled: every gradient counts twice")
def _doubled(step: Step) -> Arrays:
    return step.after({name: 2.0 * g for name, g in step.gradient.items()})


def step_predictions(bundle: Bundle, key: str) -> Iterator[tuple[str, str, Arrays]]:
    """What each mistake makes of the step that `key` belongs to, from the reference's state."""
    number = int(key.split("/")[1])
    step = _step(bundle, number)
    for description, function in STEP_MISTAKES:
        with np.errstate(all="ignore"):
            found = function(step)
        if found is not None and key in found:
            yield description, f"in step {number}", found


def _step(bundle: Bundle, number: int) -> Step:
    names = list(bundle.weights)

    def state(quantity: str, k: int) -> Arrays:
        if k:
            found = {n: bundle.arrays[f"{STEP}/{k}/{quantity}{n}"] for n in names}
        elif quantity == WEIGHT:
            found = bundle.weights
        else:
            found = {n: np.zeros(w.shape) for n, w in bundle.weights.items()}
        return {n: found[n].astype(np.float64) for n in names}

    model, loss_fn = bundle.model(), GPTLoss()
    gradients = []
    for k in range(number):
        set_weights(model, state(WEIGHT, k))
        gradients.append(trace(model, loss_fn, bundle.tokens, bundle.targets).parameters)
    before = number - 1
    return Step(
        number, state(WEIGHT, before), state("exp_avg/", before), state("exp_avg_sq/", before),
        gradients, bundle.optimizer,
    )  # fmt: skip
