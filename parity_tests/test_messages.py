"""Wrong input, word for word: what a message names, what it found, and what it needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import numpy_impl
from numpy_impl.layers import Parameter, ParameterBuffer
from numpy_impl.tensor import Tensor
from parity_tests.models import BACKENDS

pytestmark = pytest.mark.reference("by hand")


def tensor(backend: str, *shape: int, dtype: Any = np.float64) -> Any:
    array = np.zeros(shape, dtype)
    return Tensor(array) if backend == "numpy" else torch.tensor(array)


def parameter(backend: str, *shape: int) -> Any:
    array = np.zeros(shape)
    return Parameter(array) if backend == "numpy" else torch.nn.Parameter(torch.tensor(array))


def functional(backend: str) -> Any:
    return BACKENDS[backend].functional


def linear(b: str, x: Any, bias: Any = np.float64) -> Any:
    weight = tensor(b, 3, 4)
    return functional(b).linear(x, weight, tensor(b, 3, dtype=bias))


def attention(b: str, q: int, k: int, v: int, mask: Any = None) -> Any:
    """Self-attention of zeros with the given numbers of axes, each of length 2."""
    operands = [tensor(b, *[2] * axes) for axes in (q, k, v)]
    return functional(b).self_attention(*operands, mask)


def loaded(b: str, **changes: Any) -> None:
    optimizer = BACKENDS[b].AdamWOptimizer([parameter(b, 2, 3), parameter(b, 3)])
    optimizer.load_state({**optimizer.state(), **changes})


def freed() -> None:
    x = Tensor(np.ones(2), requires_grad=True)
    y = (x * x).sum()
    y.backward()
    y.backward()


def replaced() -> None:
    p = Parameter(np.ones(2))
    optimizer = numpy_impl.AdamWOptimizer([p])
    p.data = np.ones(2)
    optimizer.step()


MOMENTS = [np.zeros((2, 3)), np.zeros(3)]
AXES = "needed (..., T, d_k), (..., S, d_k), (..., S, d_v)"
BOTH: dict[str, tuple[Callable[[str], Any], type[Exception], str]] = {
    "linear, width": (
        lambda b: linear(b, tensor(b, 2, 5)), ValueError,
        "linear: got input (2, 5), needed (..., 4)",
    ),
    "cross entropy": (
        lambda b: functional(b).cross_entropy(tensor(b, 2, 3), np.zeros(3, int)), ValueError,
        "cross_entropy: got targets (3,) for logits (2, 3), needed one target per row and at least "
        "one row",
    ),
    "ids, dtype": (
        lambda b: functional(b).embedding(tensor(b, 2, 3), np.zeros(3)), TypeError,
        "ids: got dtype float64, needed integers",
    ),
    "ids, a duration": (
        lambda b: functional(b).embedding(tensor(b, 2, 3), np.zeros(3, "m8[s]")), TypeError,
        "ids: got dtype timedelta64[s], needed integers",
    ),
    **{
        f"attention, {name} of one axis": (
            lambda b, axes=axes: attention(b, *axes), ValueError,
            f"attention: got q {(2,) * axes[0]}, k {(2,) * axes[1]}, v {(2,) * axes[2]}, {AXES}",
        )
        for name, axes in {"q": (1, 2, 2), "k": (2, 1, 2), "v": (2, 2, 1)}.items()
    },
    "mask, a row of nothing": (
        lambda b: attention(b, 2, 2, 2, np.array([[1, 0], [0, 0]])), ValueError,
        "mask: a position may attend to nothing, needed at least one",
    ),
    "mask, dtype": (
        lambda b: attention(b, 2, 2, 2, np.ones((2, 2))), TypeError,
        "mask: got dtype float64, needed booleans (true: may attend)",
    ),
    "mask, integers": (
        lambda b: attention(b, 2, 2, 2, np.array([[1, 2], [1, 1]])), TypeError,
        "mask: got dtype int64, needed booleans (true: may attend)",
    ),
    "mask, shape": (
        lambda b: attention(b, 2, 2, 2, np.ones((3, 2), bool)), ValueError,
        "mask: got (3, 2), needed to broadcast to (2, 2)",
    ),
    "a leaking fill": (
        lambda b: BACKENDS[b].GPT(5, 4, 6, 1, mask_value=-10.0), ValueError,
        "mask_value: got -10.0, needed at most -104 in float32, or later tokens leak into earlier "
        "ones (allow_leak=True permits it)",
    ),
    "tokens, a duration": (
        lambda b: BACKENDS[b].GPT(5, 4, 6, 1)(np.zeros((1, 2), "m8[s]")), TypeError,
        "tokens: got dtype timedelta64[s], needed integers",
    ),
    "optimizer of nothing": (
        lambda b: BACKENDS[b].AdamWOptimizer([]), ValueError,
        "parameters: got none, needed at least one",
    ),
    "clipping to nothing": (
        lambda b: BACKENDS[b].AdamWOptimizer([parameter(b, 2)]).clip_grad_norm(0.0), ValueError,
        "max_norm: got 0.0, needed a positive number",
    ),
    "a moment too few": (
        lambda b: loaded(b, exp_avg=MOMENTS[:1]), ValueError, "exp_avg: got 1, needed 2",
    ),
    "a moment transposed": (
        lambda b: loaded(b, exp_avg_sq=[MOMENTS[0].T, MOMENTS[1]]), ValueError,
        "exp_avg_sq 0: got shape (3, 2), needed (2, 3)",
    ),
    "a step count too many": (
        lambda b: loaded(b, steps=[1, 1, 1]), ValueError, "steps: got 3, needed 2",
    ),
    "a negative step count": (
        lambda b: loaded(b, steps=[1, -1]), ValueError,
        "steps 1: got -1, needed an integer of at least 0",
    ),
    "half a step": (
        lambda b: loaded(b, steps=[0.5, 1]), ValueError,
        "steps 0: got 0.5, needed an integer of at least 0",
    ),
}  # fmt: skip


def adamw(**arguments: Any) -> numpy_impl.AdamWOptimizer:
    return numpy_impl.AdamWOptimizer([Parameter(np.zeros(2))], **arguments)


NUMPY: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "linear, dtypes": (
        lambda: linear("numpy", tensor("numpy", 2, 4), np.float32), TypeError,
        "linear: got float64, float64, float32, needed one dtype",
    ),
    "freed graph": (
        freed, RuntimeError,
        "backward: this graph was freed by an earlier backward (use retain_graph)",
    ),
    "no history": (
        lambda: Tensor(np.ones(1), requires_grad=False).backward(), RuntimeError,
        "backward: this tensor has no history that needs a gradient",
    ),
    "memory replaced": (
        replaced, RuntimeError,
        "optimizer: a parameter's memory was replaced since (assign with data[...] =)",
    ),
    "a parameter twice": (
        lambda: ParameterBuffer([Parameter(np.zeros(2))] * 2), ValueError,
        "parameters: one of them stands twice, needed each once",
    ),
    "no parameters": (
        lambda: ParameterBuffer([]), TypeError,
        "parameters: got none or mixed dtypes, needed one dtype",
    ),
    "learning rate": (
        lambda: adamw(lr=-1.0), ValueError, "lr: got -1.0, needed a finite number of at least 0",
    ),
    "betas": (
        lambda: adamw(betas=(0.9, 1.0)), ValueError,
        "betas: got (0.9, 1.0), needed numbers in [0, 1)",
    ),
    "eps": (
        lambda: adamw(eps=np.nan), ValueError,
        "eps: got nan, needed a finite number of at least 0",
    ),
    "weight decay": (
        lambda: adamw(weight_decay=np.inf), ValueError,
        "weight_decay: got inf, needed a finite number of at least 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BOTH)
def test_messages_of_both_twins(case: str, backend: str) -> None:
    call, error, message = BOTH[case]
    with pytest.raises(error) as raised:
        call(backend)
    assert str(raised.value) == message


@pytest.mark.parametrize("case", NUMPY)
def test_messages_of_the_numpy_twin(case: str) -> None:
    call, error, message = NUMPY[case]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_is_a_rate_and_an_eps(backend: str) -> None:
    optimizer = BACKENDS[backend].AdamWOptimizer([parameter(backend, 2)], lr=0.0, eps=0.0)
    assert optimizer.lr == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_does_not_fit_changes_nothing(backend: str) -> None:
    parameters = [parameter(backend, 2, 3), parameter(backend, 3)]
    optimizer = BACKENDS[backend].AdamWOptimizer(parameters)
    ones = [np.ones((2, 3)), np.ones(3)]
    optimizer.load_state({"exp_avg": ones, "exp_avg_sq": ones, "steps": [4, 5]})
    with pytest.raises(ValueError):
        optimizer.load_state({"exp_avg": MOMENTS, "exp_avg_sq": MOMENTS, "steps": [1, -1]})
    state = optimizer.state()
    assert state["steps"] == [4, 5]
    assert all(m.all() for name in ("exp_avg", "exp_avg_sq") for m in state[name])
