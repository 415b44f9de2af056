"""What a wrong tensor is of the right one: a multiple, transposed, shifted, rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import STEP, WEIGHT, Bundle
from gpt_parity.oracle.case import FEW_ELEMENTS, Case
from gpt_parity.oracle.graph import GRAD
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, UNITS, Unit, rounded

UNNAMED = "a constant factor of"
# So many units of rounding are zero.
ZERO = 1e4


def likenesses(case: Case) -> Iterator[tuple[str, int]]:
    """What the first wrong tensor is of the right one, and of how many wrong tensors it holds."""
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
    size = math.sqrt(square)
    # A gradient that was never computed is 0, one whose parts cancel is rounding.
    if (
        float(np.linalg.norm(mine))
        <= ZERO * (FLOAT64 if case.unit is FLOAT64 else FLOAT32).u * size
    ):
        yield "zero: never computed, or never written", lambda x: 0.0 * x
        return
    slack = case.allowed(case.first, c * reference) / size
    near = [(name, value) for name, value in factors(case.bundle) if abs(c - value) <= slack]
    names = [name for name, value in near if case.explains(case.first, value * reference)]
    if names:
        yield f"a constant factor: {', or '.join(names)}", lambda x: c * x
    elif mine.size >= FEW_ELEMENTS and not _always_a_multiple(case):
        yield f"{UNNAMED} {c:.6g}", lambda x: c * x


def _always_a_multiple(case: Case) -> bool:
    """Of two tokens the gradients by both logits are opposite, and so is all that sums them."""
    ends = (GRAD + "norm.bias", GRAD + "output.output.bias")
    return case.bundle.config.vocab_size == 2 and case.first in ends


def factors(bundle: Bundle) -> Iterator[tuple[str, float]]:
    """Factors that people forget, with their names at the sizes of the bundle."""
    batch, length = bundle.tokens.shape
    sizes = {
        "B*T": batch * length, "B": batch, "T": length, "V": bundle.config.vocab_size,
        "E": bundle.config.embedding_size, "sqrt(E)": math.sqrt(bundle.config.embedding_size),
    }  # fmt: skip
    heads: dict[str, float] = {}
    if isinstance(bundle.config, GPT2Config):
        width = bundle.config.embedding_size // bundle.config.heads
        heads = {"H": bundle.config.heads, "D": width, "sqrt(D)": math.sqrt(width)}
    for name, n in (sizes | heads).items():
        inverse = f"1/({name})" if "*" in name else f"1/{name}"
        yield f"{name} = {n:.6g}", float(n)
        yield f"{inverse} = {1.0 / n:.6g}", 1.0 / n
        if n > 1 and name in sizes and name != "sqrt(E)":
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
            if _is_reference(case, key, x):
                near = np.abs(mine - x) <= 1.01 * unit.u * np.abs(x) + unit.eta
                if np.array_equal(rounded(mine, unit), mine) and near.all():
                    return mine
        return rounded(x, unit)

    return apply


def _updated(case: Case) -> Transformed:
    """A weight after a step: its update is a multiple of the right one."""
    before = _before(case, case.first)
    if before is None:
        return
    own, right = case.mine[case.first] - before, case.reference(case.first) - before
    square = float((right * right).sum())
    c = float((own * right).sum()) / square if square else 0.0

    def apply(x: np.ndarray) -> np.ndarray:
        start = next((_before(case, k) for k in case.wrong if _is_reference(case, k, x)), None)
        if start is None:
            raise ValueError("no weight after a step")
        return start + c * (x - start)

    if not own.any():
        yield "no update: the weight is that before the step", apply
    else:
        yield f"the update is {c:.4g} times that of the reference (another rate?)", apply


def _is_reference(case: Case, key: str, x: np.ndarray) -> bool:
    return np.array_equal(x, case.reference(key))


def _before(case: Case, key: str) -> np.ndarray | None:
    """The weight before the step that `key` is a weight after."""
    step, _, rest = key.removeprefix(f"{STEP}/").partition("/")
    if not key.startswith(f"{STEP}/") or not rest.startswith(WEIGHT):
        return None
    earlier = case.bundle.arrays.get(f"{STEP}/{int(step) - 1}/{rest}")
    start = case.bundle.weights[rest.removeprefix(WEIGHT)] if earlier is None else earlier
    return start.astype(np.float64)


TENSOR_HINTS = (_factor, _transposed, _shifted, _rounded, _updated)
