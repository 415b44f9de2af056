"""Trying a function on examples: call it, judge what it returns, keep the smallest failure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.oracle import bounds
from gpt_parity.oracle.bounds import backward_bound, forward_bound
from gpt_parity.oracle.compare import FORWARD, GRADIENT, Judgement, Report
from gpt_parity.oracle.judge import Expected, judge, unit_of
from gpt_parity.oracle.rounding import FLOAT64, Unit, bound
from gpt_parity.oracle.tolerance import noisy_runs, spread_tolerance
from gpt_parity.schedule import require_integer
from gpt_parity.tensors import as_array
from numpy_impl.tape import Observer, observe
from numpy_impl.tensor import Tensor

# What a function may make of its cotangent, in which all of its gradients are linear.
COTANGENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the cotangent is ignored, as if it were 1": np.ones_like,
    "the gradient has the wrong sign": np.negative,
    "the gradient is twice too large": lambda g: 2.0 * g,
    "the gradient is half as large as it should be": lambda g: 0.5 * g,
    "the gradient is zero: never computed, or never written": np.zeros_like,
}

NOT_REPEATABLE = "not repeatable: called again on the same example, the function did not fail"


class Checked(ABC):
    """Something that can be tried on examples; `name` is that of its row of examples."""

    name: str

    def check(
        self, forward_and_vjp: Callable[..., Any], dtype: str = "float64", examples: int = 100
    ) -> Report:
        """Judge a function of the convention of `oracle.ops` on up to `examples` examples.

        The report is that of the smallest example that fails, which a note describes, or else of
        the worst error of every result. What the function raises goes through, with a note.
        Raises ValueError for another dtype and where nothing is judged, TypeError or ValueError
        for results that do not follow the convention, ImportError without Hypothesis.
        """
        unit = unit_of(dtype)
        require_integer("examples", examples, 1)
        try:
            from gpt_parity.oracle.ops_examples import INPUTS, Flaky, smallest_failure
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "hypothesis":
                raise
            raise ImportError(
                "oracle.ops needs Hypothesis; install it with: python -m pip install hypothesis"
            ) from error
        worst: dict[str, Judgement] = {}
        failure: tuple[Any, list[Judgement]] | None = None

        def fails(example: Any) -> bool:
            nonlocal failure
            try:
                judgements = self.judgements(forward_and_vjp, example, unit)
            except Exception as error:
                error.add_note(f"{self.name} in {dtype}, {self.describe(example)}")
                raise
            if not all(j.ok for j in judgements):
                failure = example, judgements
                return True
            for j in judgements:
                worst[j.name] = max(j, worst.get(j.name, j), key=_weight)
            return False

        notes: tuple[str, ...] = ()
        try:
            found = smallest_failure(INPUTS[self.name], fails, examples)
        except Flaky:
            if failure is None:
                raise
            found, notes = True, (NOT_REPEATABLE,)
        title = f"{self.name} in {dtype}"
        if not found or failure is None:
            return Report(list(worst.values()), title=title)
        example, judgements = failure
        notes = (self.describe(example), *notes)
        hints = self.hints(forward_and_vjp, example, unit)
        return Report(judgements, hints, notes, title)

    @abstractmethod
    def judgements(self, function: Callable[..., Any], example: Any, unit: Unit) -> list[Judgement]:
        """Call `function` on one example and judge what it returns."""

    def hints(self, function: Callable[..., Any], example: Any, unit: Unit) -> tuple[str, ...]:
        """Verified explanations of a failure."""
        return ()

    @abstractmethod
    def arguments(self, example: Any) -> tuple[str, ...]:
        """Names of the example's operands and of its other arguments."""

    def describe(self, example: Any) -> str:
        """The example in one line: sizes, structure and seed."""
        described = zip(self.arguments(example), (*example.operands, *example.rest), strict=True)
        parts = [f"{name} {x}" for name, x in described]
        return f"smallest example found: {', '.join(parts)}; seed {example.seed}"


def _weight(j: Judgement) -> tuple[bool, bool, float]:
    """What a summary prefers: a judgement, of something other than zero, of the largest error."""
    return j.judged, not j.exact_zero, j.ratio


@dataclass(frozen=True)
class Op(Checked):
    """A differentiable operation: operands, each of which has a gradient, then other arguments."""

    name: str
    function: Callable[..., Tensor]
    operands: tuple[str, ...]
    others: tuple[str, ...] = ()

    def arguments(self, example: Any) -> tuple[str, ...]:
        return self.operands + self.others

    def judgements(self, function: Callable[..., Any], example: Any, unit: Unit) -> list[Judgement]:
        operands = [x.astype(np.float64) for x in example.arrays(np.float32)]
        rest = example.others()
        shape = self.function(*map(Tensor, operands), *rest).shape
        g = example.cotangent(shape, np.float32).astype(np.float64)
        return self.judge(function, operands, rest, g, unit, self.name)

    def hints(self, function: Callable[..., Any], example: Any, unit: Unit) -> tuple[str, ...]:
        """What the wrong gradients are right for: another cotangent than the one given."""
        operands = [x.astype(np.float64) for x in example.arrays(np.float32)]
        rest = example.others()
        shape = self.function(*map(Tensor, operands), *rest).shape
        g = example.cotangent(shape, np.float32).astype(np.float64)
        wrong = [j.name for j in self.judge(function, operands, rest, g, unit, "") if not j.ok]
        found = []
        for text, other in COTANGENTS.items():
            judged = {
                j.name: j
                for j in self.judge(function, operands, rest, g, unit, "", cotangent=other(g))
            }
            if all(judged[name].ok and judged[name].kind == GRADIENT for name in wrong):
                found.append(text)
        return tuple(found)

    def judge(
        self, function: Callable[..., Any], operands: Sequence[np.ndarray], rest: Sequence[Any],
        g: np.ndarray, unit: Unit, label: str, *, cotangent: np.ndarray | None = None,
    ) -> list[Judgement]:  # fmt: skip
        """Call `function` once and judge it; the numbers are float64, and such that `unit` holds.

        `label` begins the names of the judgements. `cotangent` is what the gradients are judged
        for in place of `g`, which the function gets.
        """
        given = [*(x.astype(unit.name) for x in operands), *map(_copy, rest), g.astype(unit.name)]
        returned, written = call(
            function, given, label, (*self.operands, *self.others, "cotangent")
        )
        candidates = self._unpacked(returned, label)
        if all(c is None for c in candidates):
            raise ValueError(f"{label}: got None for every result, needed one to judge")
        names = ("output", *(f"d{name}" for name in self.operands))
        expected = self.expected(operands, rest, g if cotangent is None else cotangent, unit)
        return written + [
            judge(f"{label} {name}", GRADIENT if i else FORWARD, candidate, e, unit.name)
            for i, (name, candidate, e) in enumerate(zip(names, candidates, expected, strict=True))
        ]

    def _unpacked(self, returned: Any, label: str) -> list[Any]:
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise TypeError(f"{label}: got {_kind(returned)}, needed (output, gradients)")
        output, gradients = returned
        needed = len(self.operands)
        if gradients is None:
            gradients = [None] * needed
        elif needed == 1 and not isinstance(gradients, tuple | list):
            gradients = [gradients]
        if not isinstance(gradients, tuple | list) or len(gradients) != needed:
            raise TypeError(
                f"{label}: got {_kind(gradients)} of gradients, needed a tuple of {needed} "
                f"({', '.join(f'd{name}' for name in self.operands)})"
            )
        return [output, *gradients]

    def expected(
        self, operands: Sequence[np.ndarray], rest: Sequence[Any], g: np.ndarray, unit: Unit
    ) -> list[Expected]:
        """Output and gradients of the reference, with the bounds of both computed results."""
        out = self.function(*map(Tensor, operands), *rest)
        gradients = out.gradient_fn(g)[: len(operands)]
        allowed = forward_bound(out, unit) + forward_bound(out, FLOAT64)
        return [Expected(out.data, allowed)] + [
            Expected(d, backward_bound(out, i, g, unit) + backward_bound(out, i, g, FLOAT64))
            for i, d in enumerate(gradients)
        ]


class Attention(Op):
    """Composed of several operations, so that its tolerance is measured by random rounding."""

    def expected(
        self, operands: Sequence[np.ndarray], rest: Sequence[Any], g: np.ndarray, unit: Unit
    ) -> list[Expected]:
        def run(observer: Observer) -> list[np.ndarray]:
            leaves = [Tensor(x) for x in operands]
            with observe(observer):
                out = self.function(*leaves)
                out.backward(g)
            return [out.data, *(leaf.grad for leaf in leaves)]

        clean, noisy = run(Observer()), noisy_runs(run, unit, seed=0)
        return [
            Expected(x, spread_tolerance(x, [arrays[i] for arrays in noisy], unit))
            for i, x in enumerate(clean)
        ]


class AdamWStep(Checked):
    """One step of AdamW for one array; the moments are judged first, the weight needs them."""

    name = "adamw_step"
    names = ("weight", "grad", "exp_avg", "exp_avg_sq", "step", "lr", "betas", "eps",
             "weight_decay")  # fmt: skip

    def arguments(self, example: Any) -> tuple[str, ...]:
        return self.names

    def judgements(self, function: Callable[..., Any], example: Any, unit: Unit) -> list[Judgement]:
        arrays = [x.astype(np.float64) for x in example.arrays(np.float32)]
        given = [*(x.astype(unit.name) for x in arrays), *example.rest]
        returned, judgements = call(function, given, self.name, self.names)
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            raise TypeError(
                f"{self.name}: got {_kind(returned)}, needed (weight, exp_avg, exp_avg_sq)"
            )
        references, magnitudes = bounds.adamw_step(*arrays, *example.rest)
        for name, i in (("exp_avg", 1), ("exp_avg_sq", 2), ("weight", 0)):
            e = Expected(references[i], bound(magnitudes[i], unit) + bound(magnitudes[i], FLOAT64))
            judgements.append(judge(f"{self.name} {name}", FORWARD, returned[i], e, unit.name))
        return judgements


class ClipGradNorm(Checked):
    """The clip of several gradients by their one global norm, which is judged first."""

    name = "clip_grad_norm"

    def arguments(self, example: Any) -> tuple[str, ...]:
        return (*(f"grads[{i}]" for i in range(len(example.operands))), "max_norm")

    def judgements(self, function: Callable[..., Any], example: Any, unit: Unit) -> list[Judgement]:
        grads = [x.astype(np.float64) for x in example.arrays(np.float32)]
        given = [x.astype(unit.name) for x in grads]
        returned, judgements = call(
            lambda *arrays: function(list(arrays), *example.rest), given, self.name,
            self.arguments(example),
        )  # fmt: skip
        clipped, norm = returned if isinstance(returned, tuple) and len(returned) == 2 else (0, 0)
        if not isinstance(clipped, tuple | list) or len(clipped) != len(grads):
            raise TypeError(
                f"{self.name}: got {_kind(returned)}, needed (list of {len(grads)} arrays, norm)"
            )
        (references, exact), (magnitudes, size) = bounds.clip_grad_norm(grads, *example.rest)
        names = ["norm", *(f"clipped[{i}]" for i in range(len(grads)))]
        if norm is not None and as_array(norm).ndim == 0:
            norm = as_array(norm).astype(unit.name)  # a Python number has no dtype to be judged
        for name, candidate, reference, m in zip(
            names, [norm, *clipped], [exact, *references], [size, *magnitudes], strict=True
        ):
            e = Expected(reference, bound(m, unit) + bound(m, FLOAT64))
            judgements.append(judge(f"{self.name} {name}", FORWARD, candidate, e, unit.name))
        return judgements


def call(
    function: Callable[..., Any], given: Sequence[Any], label: str, names: Sequence[str]
) -> tuple[Any, list[Judgement]]:
    """What `function` returns, and one failed judgement where it wrote into its inputs."""
    kept = [x.tobytes() if isinstance(x, np.ndarray) else None for x in given]
    returned = function(*given)
    for i, (x, before) in enumerate(zip(given, kept, strict=True)):
        if before is not None and x.tobytes() != before:
            reason = f"writes into input {i} ({names[i]})"
            failed = Judgement(label, FORWARD, float("inf"), float("inf"), reason=reason)
            return returned, [failed]
    return returned, []


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x


def _kind(x: Any) -> str:
    return f"{type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__
