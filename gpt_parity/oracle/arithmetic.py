"""One pass of the torch twin in a coarser or compiled arithmetic, judged as anybody's results are.

The reference is the NumPy twin in float64, and what may differ follows from the unit roundoff of
the arithmetic. In bfloat16 that is much: half of a gradient may be rounding. So the report says
what would have been noticed, and the comparer is shown mistakes that are large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.choices import Device, Precision
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.bundle import make_bundle
from gpt_parity.oracle.compare import PARAMETER, Report, compare
from gpt_parity.oracle.graph import GRAD, LOSS_KEY, VALUE
from gpt_parity.oracle.rounding import UNITS, Unit, rounded
from gpt_parity.oracle.slips import VISIBLE, Sighting
from gpt_parity.oracle.tolerance import Tolerance, Tolerances
from gpt_parity.oracle.trace import Trace
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.precision import Engine, placed
from gpt_parity.tensors import as_array
from gpt_parity.weights import set_weights

Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Arithmetic:
    """What computes the pass, and with which unit roundoff it is judged."""

    precision: Precision
    compile: bool = False
    device: Device = "cpu"

    @property
    def unit(self) -> Unit:
        return UNITS["bfloat16" if self.precision == "bf16" else self.precision]

    @property
    def name(self) -> str:
        compiled = " compiled" if self.compile else ""
        return f"torch {self.unit.name}{compiled} on {self.device}"


def one_pass(
    arithmetic: Arithmetic, config: GPTConfig, weights: Mapping[str, np.ndarray],
    tokens: np.ndarray, targets: np.ndarray,
) -> Report:  # fmt: skip
    """Loss, logits and the gradients of all parameters, judged.

    weights: float64, numbers that float32 holds. Raises ValueError for a point at which none of
    the gradients can be judged in this arithmetic.
    """
    bundle = make_bundle(config, weights, tokens, targets, votes=False)
    dtype = "float64" if arithmetic.precision == "float64" else "float32"
    model = build_model("torch", config, dtype=dtype)
    set_weights(model, {n: w.astype(dtype) for n, w in weights.items()})
    model = placed(model, arithmetic.device)
    engine = Engine(model, arithmetic.precision, arithmetic.compile)
    with engine.switched():
        logits = engine(tokens)
        loss = load_backend("torch").GPTLoss()(logits, targets)
        loss.backward()
    results = {VALUE + list(bundle.values)[-1]: logits, LOSS_KEY: loss}
    results |= {GRAD + n: p.grad for n, p in model.named_parameters()}
    arrays = {key: as_array(results[key]) for key in bundle.arrays if key in results}
    return check_arrays(arrays, bundle, arithmetic.unit.name)


@dataclass(frozen=True)
class _Slip:
    description: str
    name: str
    change: Change


def _slips(clean: Trace, unit: Unit) -> Iterator[_Slip]:
    """Mistakes in gradients from both ends of the model; coarse formats show coarse ones alone."""
    names = list(clean.parameters)
    first, last = "transformers.0.feed_forward.input.weight", names[-2]
    if not unit.stored:
        yield _Slip("a gradient 1 % too long", first, lambda g: g * 1.01)
        yield _Slip("the last weight's gradient 1 % too short", last, lambda g: g * 0.99)
    else:
        yield _Slip("a gradient ten times too long", first, lambda g: g * 10.0)
        yield _Slip("the last weight's gradient with the wrong sign", last, np.negative)


def show_slips_in(clean: Trace, tolerances: Tolerances, unit: Unit) -> list[Sighting]:
    """Judge parameter gradients, as exact as the format has them, with each slip planted."""
    dtype = "float64" if unit.name == "float64" else "float32"

    def ratio(name: str, change: Change | None) -> float:
        reference, tolerance = clean.parameters[name], tolerances.parameters[name]
        mine = reference if change is None else change(reference)
        candidate = rounded(mine, unit).astype(dtype)
        return compare(name, PARAMETER, candidate, reference, tolerance, dtype).ratio

    sightings = []
    for slip in _slips(clean, unit):
        others = [name for name in clean.parameters if name != slip.name]
        alone = all(ratio(name, None) <= 1.0 for name in others)
        needed = VISIBLE * _floor(clean.parameters[slip.name], tolerances.parameters[slip.name])
        description = f"{slip.description} (seen from {needed:.2g} of its size on)"
        sightings.append(Sighting(description, slip.name, ratio(slip.name, slip.change), alone))
    return sightings


def _floor(reference: np.ndarray, tolerance: Tolerance) -> float:
    """The relative error of a tensor that is as large as its tolerance."""
    return tolerance.whole / float(np.linalg.norm(reference))
