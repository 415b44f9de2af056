"""What a wrong tensor looks like: explanations that were verified, and only those.

Every explanation predicts numbers. One is printed if the first wrong tensor is what it predicts,
up to rounding, if nine tenths of the error are explained, and if it leaves right what is right.
Of mistakes in the computation only those stay that explain most of the wrong tensors, all of them
where they cannot be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gpt_parity.oracle.bundle import STEP, Bundle, pass_arrays
from gpt_parity.oracle.graph import GRAD, LOSS_KEY, Graph, Node, graph
from gpt_parity.oracle.mistakes import HYPOTHESES, Mistake, Operation
from gpt_parity.oracle.rounding import UNITS, Unit, rounded
from gpt_parity.oracle.step_mistakes import step_predictions
from gpt_parity.oracle.tolerance import Tolerance
from gpt_parity.oracle.trace import trace
from numpy_impl.loss import GPTLoss
from numpy_impl.tape import Observer

Arrays = Mapping[str, np.ndarray]

# An explanation leaves at most this part of the error.
UNEXPLAINED = 0.1
# A prediction is computed at the reference's inputs and by other operations than the candidate:
# it may be off by this many tolerances.
SLACK = 2.0
ROUNDINGS = 64.0
# A factor that nobody would know explains nothing in a tensor of fewer elements.
FEW_ELEMENTS = 4
UNNAMED = "a constant factor of"
# The fill of a mask where float16 does not hold the model's own.
LEAST_FLOAT16 = -65504.0


@dataclass(frozen=True)
class Case:
    """A judged submission: `wrong` are keys in the order of judgement, `right` the others."""

    bundle: Bundle
    unit: Unit
    mine: Arrays
    tolerances: Mapping[str, Tolerance]
    wrong: list[str]
    right: list[str]

    @property
    def first(self) -> str:
        return self.wrong[0]

    @property
    def comparable(self) -> list[str]:
        """What can be wrong for the same reason: the pass, or the step of the first."""
        parts = self.first.split("/")
        step = "/".join([*parts[:2], ""]) if parts[0] == STEP else ""
        return [k for k in self.wrong if k.startswith(step or f"{STEP}/") == bool(step)]

    @property
    def siblings(self) -> list[str]:
        """Right gradients of matrices: they vouch for the gradient of the result as well.

        That of a bias does not, since a sum over rows can be right by accident.
        """
        return [key for key in self.right if self.bundle.arrays[key].ndim > 1]

    def reference(self, key: str) -> np.ndarray:
        return self.bundle.arrays[key].astype(np.float64)

    def scores(self, key: str, x: np.ndarray) -> np.ndarray:
        """x, of masked scores with a small fill: a norm should not be that of the fill."""
        kept = self.bundle.kept(key)
        if kept is None or x.shape != kept.shape:
            return x
        least = 2.0 * float(np.abs(self.reference(key)[kept]).max()) + 1.0
        return np.where(x <= max(self.bundle.config.mask_value, LEAST_FLOAT16), -least, x)

    def distance(self, key: str, x: np.ndarray, y: np.ndarray | None = None) -> float:
        """|x - y|, without y from the reference."""
        y = self.reference(key) if y is None else y
        return _norm(self.scores(key, x) - self.scores(key, y))

    def allowed(self, key: str, prediction: np.ndarray) -> float:
        """By how much a candidate may miss a prediction, which may be larger than the reference."""
        size, own = (
            _norm(self.scores(key, prediction)),
            _norm(self.scores(key, self.reference(key))),
        )
        tolerance = self.tolerances[key].whole
        larger = tolerance * max(1.0, size / own) if own else tolerance
        return SLACK * max(larger, ROUNDINGS * self.unit.u * size)

    def explains(self, key: str, prediction: np.ndarray) -> bool:
        """Whether a wrong tensor is what was predicted."""
        mine = self.mine[key]
        if mine.shape != prediction.shape or not np.isfinite(prediction).all():
            return False
        rest, error = self.distance(key, mine, prediction), self.distance(key, mine)
        return rest <= self.allowed(key, prediction) and rest <= UNEXPLAINED * error

    def leaves_right(self, predictions: Arrays) -> bool:
        """Whether what agrees with the reference agrees with the predictions too."""
        return all(self.leaves(key, predictions[key]) for key in self.right if key in predictions)

    def leaves(self, key: str, prediction: np.ndarray) -> bool:
        """Whether a right tensor agrees with a prediction too."""
        return self.distance(key, prediction) <= SLACK * self.tolerances[key].whole


def _norm(x: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(x))


def hints(case: Case) -> tuple[str, ...]:
    """Verified explanations of the first wrong tensor, those first that explain most others."""
    mine = case.mine[case.first]
    if not np.isfinite(mine).all() or mine.shape != case.reference(case.first).shape:
        return ()
    found = dict(_of_tensor(case))
    if case.first.startswith("step/"):
        mistakes = _of_predictions(case, step_predictions(case.bundle, case.first))
    else:
        mistakes = _of_predictions(case, _pass_predictions(case))
    most = max([*found.values(), *mistakes.values()], default=0)
    found |= {text: count for text, count in mistakes.items() if count == most}
    if len(found) > 1:
        found = {text: count for text, count in found.items() if not text.startswith(UNNAMED)}
    total = len(case.comparable)
    return tuple(
        f"{text} (explains {'all' if count == total else f'{count} of'} {total} wrong tensors)"
        if total > 1 else text
        for text, count in sorted(found.items(), key=lambda hint: -hint[1])
    )  # fmt: skip


# --- Explanations of a tensor by itself


def _of_tensor(case: Case) -> Iterator[tuple[str, int]]:
    for transformation in TENSOR_HINTS:
        for text, apply in transformation(case):
            if _explains(case, case.first, apply):
                yield text, sum(_explains(case, k, apply) for k in case.comparable)


def _explains(case: Case, key: str, apply: Callable[[np.ndarray], np.ndarray]) -> bool:
    try:
        return case.explains(key, apply(case.reference(key)))
    except ValueError:  # a tensor with other axes
        return False


Transformed = Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]


def _factor(case: Case) -> Transformed:
    """mine = c reference, with the best c in the sense of least squares."""
    mine, reference = case.mine[case.first], case.reference(case.first)
    square = float((reference * reference).sum())
    if not square:
        return
    c = float((reference * mine).sum()) / square
    slack = case.allowed(case.first, c * reference) / math.sqrt(square)
    names = [name for name, value in factors(case.bundle) if abs(c - value) <= slack]
    if abs(c) <= slack:
        yield "zero: never computed, or never written", lambda x: 0.0 * x
    elif names:
        yield f"a constant factor: {', or '.join(names)}", lambda x: c * x
    elif mine.size >= FEW_ELEMENTS:
        yield f"{UNNAMED} {c:.6g}", lambda x: c * x


def factors(bundle: Bundle) -> Iterator[tuple[str, float]]:
    """Factors that people forget, with their names at the sizes of the bundle."""
    batch, length = bundle.tokens.shape
    sizes = {
        "B*T": batch * length, "B": batch, "T": length, "V": bundle.config.vocab_size,
        "E": bundle.config.embedding_size, "sqrt(E)": math.sqrt(bundle.config.embedding_size),
    }  # fmt: skip
    for name, n in sizes.items():
        inverse = f"1/({name})" if "*" in name else f"1/{name}"
        yield f"{name} = {n:.6g}", float(n)
        yield f"{inverse} = {1.0 / n:.6g}", 1.0 / n
        if n > 1 and name != "sqrt(E)":
            yield f"n/(n-1) with n = {name} = {n:.6g}", n / (n - 1.0)
            yield f"(n-1)/n with n = {name} = {n:.6g}", (n - 1.0) / n
    yield "2 (counted twice: two backward passes, no zero_grad?)", 2.0
    yield "1/2", 0.5
    yield "-1 (the sign)", -1.0


def _transposed(case: Case) -> Transformed:
    shape = case.reference(case.first).shape
    if len(shape) < 2:
        return
    if shape[-1] == shape[-2]:
        yield "transposed", lambda x: x.swapaxes(-1, -2)
    else:
        yield (
            "reshaped where it should be transposed",
            lambda x: x.swapaxes(-1, -2).reshape(x.shape),
        )
    if len(shape) == 3 and shape[0] == shape[1] != shape[2]:
        yield "batch and time are exchanged", lambda x: x.swapaxes(0, 1)


def _shifted(case: Case) -> Transformed:
    reference = case.reference(case.first)
    positions = case.first.startswith(GRAD + "embedding.positional_embedding.weight")
    entry = case.bundle.kind(case.first) in ("forward", "gradient")
    if reference.ndim < 2 or not (positions or entry) or reference.shape[-2] < 2:
        return

    def shifted(x: np.ndarray, by: int, wrap: bool) -> np.ndarray:
        if x.ndim < 2:
            raise ValueError("no axis of positions")
        y = np.roll(x, by, axis=-2)
        if not wrap:
            y[..., 0 if by > 0 else -1, :] = 0.0
        return y

    for by, where in ((1, "late"), (-1, "early")):
        for wrap in (True, False):
            edge = "wrapped around" if wrap else "zeros at the edge"
            yield (
                f"shifted along T, one place too {where} ({edge})",
                lambda x, by=by, wrap=wrap: shifted(x, by, wrap),
            )


def _rounded(case: Case) -> Transformed:
    """Every value is one of a coarser format, and the nearest or next to it."""
    mine, reference = case.mine[case.first], case.reference(case.first)
    if mine.size < FEW_ELEMENTS:
        return
    for name in ("float16", "bfloat16", "tf32", "float32"):
        unit = UNITS[name]
        # Of formats that hold each other's values only the coarsest is a finding.
        if unit.u <= case.unit.u or not np.array_equal(rounded(mine, unit), mine):
            continue
        near = np.abs(mine - reference) <= 1.01 * unit.u * np.abs(reference) + unit.eta
        if near.all():
            yield f"values are rounded to {name}", _coarse(case, unit)


def _coarse(case: Case, unit: Unit) -> Callable[[np.ndarray], np.ndarray]:
    """The candidate's own values where they are roundings of x, since ties may go either way."""

    def apply(x: np.ndarray) -> np.ndarray:
        for key in case.wrong:
            mine = case.mine[key]
            if x.shape == mine.shape and np.array_equal(x, case.reference(key)):
                near = np.abs(mine - x) <= 1.01 * unit.u * np.abs(x) + unit.eta
                if np.array_equal(rounded(mine, unit), mine) and near.all():
                    return mine
        return rounded(x, unit)

    return apply


TENSOR_HINTS = (_factor, _transposed, _shifted, _rounded)


# --- Explanations by a mistake in the computation


Prediction = tuple[str, str, Arrays]


def _of_predictions(case: Case, predictions: Iterator[Prediction]) -> dict[str, int]:
    """By description of a mistake with the place that explains most, how much it explains."""
    best: dict[str, tuple[int, str]] = {}
    for description, place, arrays in predictions:
        if not case.leaves_right(arrays) or not case.explains(case.first, arrays[case.first]):
            continue
        count = sum(case.explains(k, arrays[k]) for k in case.comparable if k in arrays)
        if count > best.get(description, (0, ""))[0]:
            best[description] = (count, place)
    return {f"{description}, {place}": count for description, (count, place) in best.items()}


class _RefutedError(Exception):
    """The forward pass has shown already that a mistake explains nothing."""


class _Mistaken(Observer):
    """Runs mistakes in place of some operations, by number, as long as the results fit.

    `keys` are those of results that are right or the first wrong one, by number.
    """

    def __init__(self, mistakes: Mapping[int, Mistake], case: Case, keys: dict[int, str]) -> None:
        self.mistakes, self.case, self.keys, self.number = mistakes, case, keys, -1

    def forward(self, op: str, out, parents) -> np.ndarray | None:
        self.number += 1
        mistake = self.mistakes.get(self.number)
        data = None
        if mistake is not None:
            right = Operation(
                tuple(p.data for p in parents), out.data, out.gradient_fn,
                self.case.bundle.config.mask_value,
            )  # fmt: skip
            data, out.gradient_fn = mistake(right)
            data = np.asarray(data)
        key = self.keys.get(self.number)
        if key is not None:
            fits = self.case.explains if key == self.case.first else self.case.leaves
            if not fits(key, out.data if data is None else data):
                raise _RefutedError
        return data


def _pass_predictions(case: Case) -> Iterator[Prediction]:
    """One pass of the model for every mistake that could have made the first wrong tensor."""
    bundle = case.bundle
    model, loss_fn = bundle.model(), GPTLoss()
    operations, _ = graph(model, loss_fn, bundle.tokens, bundle.targets)
    suspects = [node for nodes in suspected(case, operations) for node in nodes]
    known = {*case.right, case.first}
    keys = {number: key for key, number in operations.numbers.items() if key in known}
    for hypothesis in HYPOTHESES:
        for place, mistakes in _places(hypothesis.mistakes, suspects, operations):
            try:
                with np.errstate(all="ignore"):
                    found = trace(
                        model, loss_fn, bundle.tokens, bundle.targets,
                        _Mistaken(mistakes, case, keys),
                    )  # fmt: skip
            # Refuted, or a mistake that does not fit these sizes.
            except (_RefutedError, ValueError, TypeError, IndexError):
                continue
            yield hypothesis.description, place, pass_arrays(found)


def suspected(case: Case, operations: Graph) -> tuple[list[Node], list[Node]]:
    """The operations whose result, and those whose vjp, may have made the first wrong tensor.

    A gradient needs values too, which need not have been handed in, and the loss can be right to
    rounding where they are wrong.
    """
    known = [*case.right, *case.wrong]
    _, nodes = operations.upstream(case.first, known, case.siblings)
    if not case.first.startswith(GRAD):
        return nodes, []
    _, forward = operations.upstream(LOSS_KEY, known)
    return [node for node in forward if node.key not in known], nodes


def _places(
    mistakes: Mapping[str, Mistake], suspects: list[Node], operations: Graph
) -> Iterator[tuple[str, dict[int, Mistake]]]:
    """Where a mistake may be: in one place that is suspected, or everywhere.

    A mistake in several operations is in all of them that one block has.
    """
    every = [n for n in operations.nodes if n.role in mistakes]
    if not any(n.role in mistakes for n in suspects):
        return
    groups: dict[str, list[Node]] = {}
    for node in every:
        block = ".".join(node.place.split(".")[:2])
        groups.setdefault(block if len(mistakes) > 1 else node.place, []).append(node)
    for place, nodes in groups.items():
        if any(node in suspects for node in nodes):
            yield f"at {place}", {n.number: mistakes[n.role] for n in nodes}
    if len(groups) > 1:
        yield "everywhere", {n.number: mistakes[n.role] for n in every}
