"""Both backends under one random sequence of calls, equal after every one of them.

Beside the clean NumPy twin run its noisy copies, which obey the same rules under Monte Carlo
arithmetic: PyTorch may be as far from the clean twin as their spread allows. A checkpoint loaded
into both backends gives the copies the common state too.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpt_parity.checkpoint import MOMENTS, load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import compare
from gpt_parity.oracle.lockstep import (
    NOISY_TRAININGS,
    Batch,
    Runner,
    Setting,
    State,
    judge_step,
    noisy_step,
    step_tolerances,
)  # fmt: skip
from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import FLOAT64
from gpt_parity.oracle.tolerance import noisy_runs, spread_tolerance
from gpt_parity.training import StepResult, as_array
from gpt_parity.weights import get_weights, set_weights
from numpy_impl.tape import observe
from parity_tests.comparers import assert_same_bits
from parity_tests.models import BACKENDS as PACKAGES

pytestmark = pytest.mark.reference("other backend")

CONFIG = GPTConfig(vocab_size=5, context_size=4, embedding_size=6, blocks=2)
RECIPE = TrainConfig(learning_rate=1e-2, min_learning_rate=1e-3, weight_decay=0.1)
VOCABULARY = "abcde"
NAMES = list(CONFIG.parameter_shapes())
WEIGHT_SCALE = 0.5
RATES = (1e-2, 1e-3, 0.0)
MAX_NORMS = (1.0, 0.1, 10.0)

Arrays = dict[str, np.ndarray]


def random_ids(seed: int, batch: int, length: int) -> Batch:
    """Tokens and targets (B, T)."""
    rng = np.random.default_rng(seed)
    shape = (batch, length)
    return rng.integers(0, CONFIG.vocab_size, shape), rng.integers(0, CONFIG.vocab_size, shape)


seeds = st.integers(0, 2**32 - 1)
batches = st.builds(random_ids, seeds, st.integers(1, 3), st.integers(1, CONFIG.context_size))
targets = st.sampled_from(("both", *BACKENDS))
few_names = st.sets(st.sampled_from(NAMES), max_size=4)


class Side(Runner):
    """One model with its optimizer, driven call by call; `noise` perturbs all that it computes."""

    def __init__(
        self, backend: str, setting: Setting, noise: MonteCarloArithmetic | None = None
    ) -> None:
        super().__init__(backend, "float64", setting)
        self.package = PACKAGES[backend]
        self.parameters = dict(self.model.named_parameters())
        self.noise = noise
        self.losses: list[Any] = []
        self.loss = self.norm = 0.0

    def arithmetic(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.noise is None else observe(self.noise)

    def forward(self, batch: Batch) -> None:
        """Two losses of the same logits: to predict the targets, and to repeat the tokens."""
        tokens, targets = batch
        with self.arithmetic():
            logits = self.model(tokens)
            self.losses = [self.trainer.loss_fn(logits, ids) for ids in (targets, tokens)]
        assert all(loss.requires_grad for loss in self.losses)
        self.loss = self.losses[0].item()

    def backward(self, which: int, retain_graph: bool) -> None:
        with self.arithmetic():
            self.losses[which].backward(retain_graph=retain_graph)

    def clip(self, max_norm: float) -> None:
        """The norm is a rounded sum; what it scales is rounded once more."""
        if self.noise is None:
            self.norm = self.optimizer.clip_grad_norm(max_norm)
            return
        gradients = self.optimizer.buffer.grad
        before = gradients.copy()
        error = float(self.noise.perturbed(np.array(1.0), np.array(math.sqrt(gradients.size))))
        self.norm = error * self.optimizer.clip_grad_norm(max_norm / error)
        m = np.where(gradients != before, np.abs(gradients), 0.0)
        gradients[...] = self.noise.perturbed(gradients, m)

    def step(self, batch: Batch | None, rate: float) -> StepResult:
        """The update alone, in the place where `noisy_step` expects a whole training step."""
        self.optimizer.lr = rate
        self.optimizer.step()
        return StepResult(self.loss, self.norm, rate)

    def update(self, rate: float) -> None:
        if self.noise is None or not self.gradients():
            self.step(None, rate)
        else:
            noisy_step(self, (np.empty(0), np.empty(0)), rate, self.noise)

    def gradients(self) -> Arrays:
        """Copies of the gradients that are there."""
        present = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        return {f"gradients {name}": np.asarray(grad).copy() for name, grad in present.items()}

    def drop(self, names: set[str]) -> None:
        for name in names:
            self.parameters[name].grad = None

    def lasting(self) -> Arrays:
        """Copies of what a checkpoint holds: weights, moments and step counts."""
        moments = self.optimizer.state()
        kept = {f"weights {n}": np.array(as_array(p)) for n, p in self.parameters.items()}
        for moment in MOMENTS:
            kept |= {f"{moment} {n}": x for n, x in zip(NAMES, moments[moment], strict=True)}
        return {**kept, "steps": np.array(moments["steps"])}

    def everything(self) -> State:
        """All that is judged, as copies."""
        result = StepResult(self.loss, self.norm, self.optimizer.lr)
        return {**self.state(result), **self.gradients()}


class BothBackends(RuleBasedStateMachine):
    """The calls of a training program in any order, made on all sides."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "checkpoint.safetensors"
        self.source = ""
        self.saved: Arrays = {}
        self.saved_is_present = False
        self.handed_out: dict[str, tuple[list[np.ndarray], list[bytes]]] = {}
        self.judged: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(seed=seeds, batch=st.none() | batches)
    def build(self, seed: int, batch: Batch | None) -> None:
        """From random weights, and from moments that are not 0 where `batch` is there."""
        rng = np.random.default_rng(seed)
        shapes = CONFIG.parameter_shapes()
        weights = {n: WEIGHT_SCALE * rng.standard_normal(shape) for n, shape in shapes.items()}
        setting = Setting(CONFIG, RECIPE, weights, [], [])
        self.clean, self.torch = Side("numpy", setting), Side("torch", setting)
        self.noisy: list[Side] = noisy_runs(
            lambda noise: Side("numpy", setting, noise), FLOAT64, 1, NOISY_TRAININGS
        )
        self.sides = [self.clean, self.torch, *self.noisy]
        self.both = dict(zip(BACKENDS, (self.clean, self.torch), strict=True))
        for side in self.both.values():
            assert_same_bits(get_weights(side.model), weights)
        if batch is not None:
            self.train(batch, set(), MAX_NORMS[0], RATES[0])

    def forget_graph(self) -> None:
        """Once spent, or after new weights, which NumPy's graph would read and PyTorch's refuse."""
        for side in self.sides:
            side.losses = []

    @rule(batch=batches)
    def forward(self, batch: Batch) -> None:
        for side in self.sides:
            side.forward(batch)

    @precondition(lambda self: self.clean.losses)
    @rule(which=st.sampled_from((0, 1)), retain_graph=st.booleans())
    def backward(self, which: int, retain_graph: bool) -> None:
        for side in self.sides:
            side.backward(which, retain_graph)
        for side in self.both.values():
            assert len(side.gradients()) == len(NAMES)
        if not retain_graph:
            self.graph_is_spent()

    def graph_is_spent(self) -> None:
        """Neither loss can go back through the shared logits again, and trying changes nothing."""
        for side in self.both.values():
            before = {**side.lasting(), **side.gradients()}
            for which in range(len(side.losses)):
                with pytest.raises(RuntimeError):
                    side.backward(which, retain_graph=False)
            assert_same_bits({**side.lasting(), **side.gradients()}, before)
        self.forget_graph()

    @rule(names=st.none() | few_names)
    def zero_grad(self, names: set[str] | None) -> None:
        """Of all parameters, or of a few, as after a loss that does not reach them."""
        for side in self.sides:
            if names is None:
                side.optimizer.zero_grad()
                assert not side.gradients()
            else:
                side.drop(names)

    @rule(max_norm=st.sampled_from(MAX_NORMS))
    def clip(self, max_norm: float) -> None:
        for side in self.sides:
            side.clip(max_norm)

    @rule(rate=st.sampled_from(RATES))
    def step(self, rate: float) -> None:
        idle = {n for n, p in self.clean.parameters.items() if p.grad is None}
        for side in self.noisy:
            side.update(rate)
        for side in self.both.values():
            before = side.lasting()
            side.update(rate)
            after = side.lasting()
            rest = [key for key in before if key.partition(" ")[2] in idle]
            if rest:
                assert_same_bits({k: after[k] for k in rest}, {k: before[k] for k in rest})
            counted = after["steps"] - before["steps"]
            assert list(counted) == [name not in idle for name in NAMES]
        if len(idle) < len(NAMES):
            self.saved_is_present = False
            self.forget_graph()

    @rule(
        batch=batches, without=few_names, max_norm=st.sampled_from(MAX_NORMS),
        rate=st.sampled_from(RATES),
    )  # fmt: skip
    def train(self, batch: Batch, without: set[str], max_norm: float, rate: float) -> None:
        """The usual order at once, so that short sequences reach far."""
        self.zero_grad(None)
        self.forward(batch)
        self.backward(0, False)
        self.zero_grad(without)
        self.clip(max_norm)
        self.step(rate)

    @rule(batch=batches)
    def no_grad(self, batch: Batch) -> None:
        logits = []
        for side in self.both.values():
            before = {**side.lasting(), **side.gradients()}
            # A context of its own, so that what leaks is seen here and not in the next example.
            logits.append(copy_context().run(self.without_recording, side, batch))
            assert_same_bits({**side.lasting(), **side.gradients()}, before)
        noisy = []
        for side in self.noisy:
            with side.arithmetic():
                noisy.append(side.model.predict(batch[0]))
        clean, torch = logits
        tolerance = spread_tolerance(clean, noisy, FLOAT64)
        judgement = compare("logits", "forward", torch, clean, tolerance, "float64")
        assert judgement.ok, judgement

    @staticmethod
    def without_recording(side: Side, batch: Batch) -> np.ndarray:
        """The logits, predicted in an inner block that must not turn recording on."""

        def records() -> bool:
            weight = side.parameters[NAMES[0]]
            return (weight + weight).requires_grad

        tokens, targets = batch
        with side.package.no_grad():
            predicted = side.model.predict(tokens)
            logits = side.model(tokens)
            loss = side.trainer.loss_fn(logits, targets)
            assert not (records() or logits.requires_grad or loss.requires_grad)
            with pytest.raises(RuntimeError):
                loss.backward()
        assert records()
        with pytest.raises(ValueError), side.package.no_grad():
            side.model(np.full_like(tokens, CONFIG.vocab_size))
        assert records()
        assert_same_bits({"logits": as_array(logits)}, {"logits": predicted})
        return predicted

    @rule(source=st.sampled_from(BACKENDS), into=st.none() | targets)
    def save(self, source: str, into: str | None) -> None:
        """Write a checkpoint, and load it at once unless `into` is None."""
        side = self.both[source]
        save_checkpoint(
            self.path, side.model, config=CONFIG, vocabulary=VOCABULARY, optimizer=side.optimizer
        )
        self.source, self.saved, self.saved_is_present = source, side.lasting(), True
        if into is not None:
            self.load(into)

    def load_into(self, sides: list[Side]) -> None:
        checkpoint = load_checkpoint(self.path, config=CONFIG, vocabulary=VOCABULARY)
        for side in sides:
            set_weights(side.model, checkpoint.weights)
            checkpoint.load_optimizer(side.model, side.optimizer)
            assert_same_bits(side.lasting(), self.saved)
        assert checkpoint.optimizer is not None
        kinds = (checkpoint.weights, *(checkpoint.optimizer[moment] for moment in MOMENTS))
        self.hand_out("loaded", [array for kind in kinds for array in kind.values()])
        self.saved_is_present = True
        self.forget_graph()

    @precondition(lambda self: self.source)
    @rule(into=targets)
    def load(self, into: str) -> None:
        """Into one side alone only while the file holds the state that both sides mean."""
        if into == "both" or not self.saved_is_present:
            self.load_into(self.sides)
        elif into == self.source:
            self.load_into([self.both[into]])
        else:
            self.load_into([self.both[into], *self.noisy])

    def hand_out(self, name: str, arrays: list[np.ndarray]) -> None:
        """Note arrays that no later call may change."""
        self.handed_out[name] = arrays, [x.tobytes() for x in arrays]

    @invariant()
    def agree(self) -> None:
        for name, (arrays, numbers) in self.handed_out.items():
            assert [x.tobytes() for x in arrays] == numbers, f"{name}: what it gave has changed"
        clean, torch = self.clean.everything(), self.torch.everything()
        assert list(torch) == list(clean)
        counts = [side.optimizer.state()["steps"] for side in self.both.values()]
        assert counts[0] == counts[1]
        # A pair of the same numbers as before was judged then.
        pairs = {key: clean[key].tobytes() + torch[key].tobytes() for key in clean}
        for name, state in (("numpy", clean), ("torch", torch)):
            self.hand_out(name, list(state.values()))
        new = [key for key in clean if self.judged.get(key) != pairs[key]]
        self.judged = pairs
        if not new:
            return
        noisy = [side.everything() for side in self.noisy]
        reference = {key: clean[key] for key in new}
        tolerances = step_tolerances(reference, noisy, FLOAT64)
        judgements = judge_step({k: torch[k] for k in new}, reference, tolerances, FLOAT64)
        wrong = [j for j in judgements if not j.ok]
        assert not wrong, f"{len(wrong)} out of tolerance, first {wrong[0]}"


TestBothBackends = BothBackends.TestCase
TestBothBackends.settings = settings(stateful_step_count=5)
