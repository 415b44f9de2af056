"""Reported faults of dtypes, and of what may be compared to the bit.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model, thread_limit
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.rounding import FLOAT32, TABLE, TF32, UNITS, Call, bound, rounded
from gpt_parity.provenance import provenance
from gpt_parity.tensors import as_array
from numpy_impl.functional import gelu, softmax, tril
from numpy_impl.tape import Observer, observe
from numpy_impl.tensor import Tensor
from parity_tests.comparers import assert_within
from parity_tests.registry import Twin
from parity_tests.reports.common import (
    both_twins,
    optimizer_of,
    set_grad,
    trainer_of,
    values,
)

pytestmark = pytest.mark.reference("by hand")

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "float64")

STRONG: dict[str, Callable[[Any], Any]] = {
    "NumPy scalar": lambda x: x * np.float64(2), "Python float": lambda x: x * 2.0,
    "array without axes": lambda x: x * np.array(2.0), "root": lambda x: x * np.sqrt(2 / np.pi),
    "from the left": lambda x: np.float64(2) * x, "sum": lambda x: np.float64(2) + x,
    "difference": lambda x: np.float64(2) - x, "quotient": lambda x: x / np.float64(2),
    "reciprocal": lambda x: np.float64(2) / (x + 1.0), "mean": lambda x: x.mean(),
    "mask": lambda x: tril(x.reshape(1, 3), np.float64(-1e9)), "gelu": gelu, "softmax": softmax,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", STRONG)
def test_B51_numbers_never_decide_the_dtype(case: str, dtype: str) -> None:
    x = Tensor(np.zeros(3, dtype))
    y = STRONG[case](x)
    y.backward(np.ones(y.shape, dtype))
    assert y.dtype == x.grad.dtype == dtype
    if case in ("NumPy scalar", "array without axes", "root"):  # what plain NumPy does
        assert STRONG[case](np.zeros(3, np.float32)).dtype == np.float64


class Dtypes(Observer):
    """Notes the dtype of every result and of every gradient."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def forward(self, op: str, out: Any, parents: Any) -> None:
        self.seen.add((op, out.data.dtype.name))

    def backward(self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: Any) -> None:
        self.seen.add((op, grad.dtype.name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_B51_every_array_of_two_steps_keeps_the_dtype(dtype: str) -> None:
    trainer, dataset = trainer_of("numpy", dtype=dtype)
    trainer.optimizer.lr = np.float64(1e-2)  # as a schedule written with NumPy would have it
    observer = Dtypes()
    with observe(observer):
        for batch in list(dataset.batches("train"))[:2]:
            trainer.train_step(*batch)
    assert len(observer.seen) > 8 and {found for _, found in observer.seen} == {dtype}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_B51_parameters_gradients_and_moments_keep_the_dtype(backend: str, dtype: str) -> None:
    trainer, dataset = trainer_of(backend, dtype=dtype)
    for batch in list(dataset.batches("train"))[:2]:
        trainer.train_step(*batch)
    state = trainer.optimizer.state()
    arrays = [*state["exp_avg"], *state["exp_avg_sq"]]
    for p in trainer.model.parameters():
        arrays += [as_array(p), as_array(p.grad)]
    assert {array.dtype.name for array in arrays} == {dtype}
    assert trainer.model.predict(dataset.batch("test", 0)[0]).dtype == dtype


@both_twins
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_B51_a_rate_that_is_a_numpy_number_gives_the_same_bits(twin: Twin, kind: type) -> None:
    """Each number is one that its kind holds, so that the kind alone can make a difference."""
    found = []
    for number in (lambda x: float(kind(x)), kind):
        start = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
        (p,), optimizer = optimizer_of(
            twin, start, lr=number(0.1), betas=(number(0.9), number(0.95)),
            eps=number(1e-6), weight_decay=number(0.3),
        )  # fmt: skip
        for k in range(3):
            g = np.random.default_rng(k).standard_normal((50, 20)).astype(np.float32)
            set_grad(twin, p, g)
            optimizer.clip_grad_norm(number(0.7))
            optimizer.lr = number(0.2)
            optimizer.step()
        found += [twin.array(p), as_array(p.grad)]
    assert found[0].tobytes() == found[2].tobytes() and found[1].tobytes() == found[3].tobytes()


def large_product(twin: Twin, dtype: str, rows: slice = slice(None)) -> np.ndarray:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 256)), rng.standard_normal((256, 256))
    return values(twin, lambda a, b: a @ b, x.astype(dtype)[rows], w.astype(dtype))


@both_twins
@pytest.mark.parametrize("dtype", DTYPES)
def test_B53_other_shapes_and_threads_round_otherwise_within_the_bound(
    twin: Twin, dtype: str
) -> None:
    """Rows alone against rows together, the backends, one thread and two: never bitwise."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((64, 256)), rng.standard_normal((256, 256))
    operands = tuple(array.astype(dtype).astype(np.float64) for array in drawn)
    exact = operands[0] @ operands[1]
    m = TABLE["matmul"].forward(Call(operands, exact, UNITS[dtype], {}))
    allowed = bound(m, UNITS[dtype])
    together = large_product(twin, dtype)
    alone = np.concatenate([large_product(twin, dtype, slice(i, i + 1)) for i in range(64)])
    with thread_limit(2, twin.name):
        threaded = large_product(twin, dtype)
    for what, found in (("together", together), ("alone", alone), ("two threads", threaded)):
        # In float64 the reference rounds as much as what is judged.
        assert_within(found, exact, 2.0 * allowed, what, dtype)
    # Operands of fewer bits, as TF32 has, show.
    fewer = TF32 if dtype == "float32" else FLOAT32
    reduced = (rounded(operands[0], fewer) @ rounded(operands[1], fewer)).astype(dtype)
    with pytest.raises(AssertionError, match="reduced: first at"):
        assert_within(reduced, exact, 2.0 * allowed, "reduced", dtype)


@both_twins
@pytest.mark.parametrize("dtype", DTYPES)
def test_B53_the_same_call_repeats_to_the_bit(twin: Twin, dtype: str) -> None:
    assert large_product(twin, dtype).tobytes() == large_product(twin, dtype).tobytes()
    runs = []
    for _ in range(2):
        trainer, dataset = trainer_of(twin.name, dtype=dtype)
        trainer.train(dataset, 1, lambda step: 1e-2, max_steps=3)
        runs.append(b"".join(as_array(p).tobytes() for p in trainer.model.parameters()))
    assert runs[0] == runs[1]


def test_B53_torch_computes_on_the_cpu_in_full_precision() -> None:
    model = build_model("torch", GPTConfig(5, 4, 4, 1))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.get_float32_matmul_precision() == "highest"
    assert provenance()["float32_matmul_precision"] == "highest"
    assert not torch.is_autocast_enabled("cpu")
