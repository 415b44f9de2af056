"""AdamW and the clip of both twins: by hand, against each other, and their errors."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.oracle.bounds import adamw_step, clip_grad_norm
from gpt_parity.oracle.examples import seeds, shapes
from gpt_parity.oracle.rounding import OPERATION_FACTOR, UNITS, bound
from parity_tests.comparers import assert_within
from parity_tests.registry import NUMPY, TORCH, TWINS, Twin

pytestmark = pytest.mark.reference("by hand")

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)

INF, NAN = math.inf, math.nan


# --- AdamW and clipping


def optimizer_of(twin: Twin, arrays: list[np.ndarray], **arguments: Any) -> tuple[list[Any], Any]:
    parameters = [twin.parameter(array) for array in arrays]
    return parameters, twin.optim.AdamWOptimizer(parameters, **arguments)


def set_grad(twin: Twin, parameter: Any, grad: np.ndarray | None) -> None:
    parameter.grad = torch.tensor(grad) if twin is TORCH and grad is not None else grad


@both_twins
def test_eps_stands_outside_the_root_and_after_the_correction(twin: Twin) -> None:
    (p,), optimizer = optimizer_of(twin, [np.array([1.0])], lr=0.1, weight_decay=0.0)
    set_grad(twin, p, np.array([1e-8]))
    optimizer.step()
    np.testing.assert_allclose(twin.array(p), [0.95], rtol=1e-14)


@both_twins
def test_the_first_step_has_the_length_of_the_default_rate(twin: Twin) -> None:
    (p,), optimizer = optimizer_of(twin, [np.array([1.0])])
    set_grad(twin, p, np.array([5.0]))
    optimizer.step()
    np.testing.assert_allclose(twin.array(p), [0.999], rtol=1e-11)  # eps: 1e-3 * 1e-8 / 5


@both_twins
def test_a_new_rate_is_that_of_every_parameter(twin: Twin) -> None:
    """Matrices and vectors stand in groups of their own in PyTorch."""
    parameters, optimizer = optimizer_of(
        twin, [np.ones((1, 1)), np.ones(1)], lr=1.0, weight_decay=0.0
    )
    optimizer.lr = 0.25
    for p in parameters:
        set_grad(twin, p, np.ones(tuple(p.shape)))
    optimizer.step()
    assert optimizer.lr == 0.25
    for p in parameters:
        np.testing.assert_allclose(twin.array(p).item(), 0.75, rtol=1e-7)


@both_twins
def test_decay_is_decoupled_and_for_matrices_only(twin: Twin) -> None:
    arrays = [np.array([[2.0]]), np.array([2.0]), np.array([[2.0]])]
    (matrix, vector, idle), optimizer = optimizer_of(twin, arrays, lr=0.1, weight_decay=0.1)
    set_grad(twin, matrix, np.zeros((1, 1)))
    set_grad(twin, vector, np.zeros(1))
    optimizer.step()
    np.testing.assert_allclose(twin.array(matrix), [[1.98]], rtol=1e-15)
    assert twin.array(vector) == 2.0
    assert twin.array(idle) == 2.0
    assert optimizer.state()["steps"] == [1, 1, 0]


@both_twins
def test_each_moment_decays_at_its_own_rate(twin: Twin) -> None:
    """Gradients 1 and -1, betas 1/2 and 3/4, eps 0, lr 1.

    m = 1/2, v = 1/4: both corrected 1, so w = -1. Then m = 1/4 - 1/2 = -1/4, v = 3/16 + 1/4 = 7/16:
    corrected by 1 - 1/4 = 3/4 and by 1 - 9/16 = 7/16 they are -1/3 and 1, so w = -2/3.
    """
    (p,), optimizer = optimizer_of(
        twin, [np.zeros(1)], lr=1.0, betas=(0.5, 0.75), eps=0.0, weight_decay=0.0
    )
    for grad, w, m, v in ((1.0, -1.0, 0.5, 0.25), (-1.0, -2.0 / 3.0, -0.25, 0.4375)):
        set_grad(twin, p, np.array([grad]))
        optimizer.step()
        np.testing.assert_allclose(twin.array(p), [w], rtol=1e-15)
        state = optimizer.state()
        assert (state["exp_avg"][0], state["exp_avg_sq"][0]) == ([m], [v])


@both_twins
def test_a_parameter_without_a_gradient_waits(twin: Twin) -> None:
    """Gradients of 1: both corrected moments are 1 at every step, and w = 0.99 w - 0.1.

    From 1 that is 0.89 and 0.7811. A step without a gradient in between changes nothing: the
    moments stay 0.1 and 0.001, the count 1, and the next step is the second.
    """
    (busy, idle), optimizer = optimizer_of(
        twin, [np.ones((1, 1)), np.ones((1, 1))], lr=0.1, weight_decay=0.1, eps=0.0
    )
    found = []
    for grad in (np.ones((1, 1)), None, np.ones((1, 1))):
        set_grad(twin, busy, np.ones((1, 1)))
        set_grad(twin, idle, grad)
        optimizer.step()
        state = optimizer.state()
        moments = state["exp_avg"][1].item(), state["exp_avg_sq"][1].item()
        found.append((twin.array(idle).item(), *moments, state["steps"]))
    for (w, m, v, steps), expected in zip(
        found,
        ((0.89, 0.1, 0.001, [1, 1]), (0.89, 0.1, 0.001, [2, 1]), (0.7811, 0.19, 0.001999, [3, 2])),
        strict=True,
    ):
        np.testing.assert_allclose((w, m, v), expected[:3], rtol=1e-12)
        assert steps == expected[3]


def test_optimizers_have_the_same_defaults() -> None:
    ours, theirs = (inspect.signature(twin.optim.AdamWOptimizer) for twin in TWINS)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    for signature in (ours, theirs):
        assert {name: signature.parameters[name].default for name in defaults} == defaults


CLIPS = {
    "zeros": ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
    "small": ([[0.3, 0.4]], [[0.3, 0.4]], 0.5),
    "large": ([[3.0, 4.0]], [[0.599999880000024, 0.799999840000032]], 5.0),
    "two": ([[3.0], [4.0]], [[0.599999880000024], [0.799999840000032]], 5.0),
    "at the limit": ([[1.0, 0.0]], [[0.9999990000010001, 0.0]], 1.0),
    "inf": ([[INF, 1.0]], [[NAN, 0.0]], INF),
    "nan": ([[NAN, 1.0]], [[NAN, NAN]], NAN),
    "overflow": ([[1e200, 1e200]], [[0.0, 0.0]], INF),
}


@both_twins
@pytest.mark.parametrize("case", CLIPS)
def test_clipping_by_one_global_norm(twin: Twin, case: str) -> None:
    grads, expected, norm = CLIPS[case]
    parameters, optimizer = optimizer_of(twin, [np.zeros(len(g)) for g in grads])
    for p, g in zip(parameters, grads, strict=True):
        set_grad(twin, p, np.array(g))
    if not math.isfinite(norm):
        with pytest.raises(FloatingPointError, match=r"gradient norm: got .* needed a finite"):
            optimizer.clip_grad_norm(1.0)
        for p, g in zip(parameters, grads, strict=True):
            np.testing.assert_array_equal(twin.array(p.grad), g)
    found = optimizer.clip_grad_norm(1.0, error_if_nonfinite=False)
    np.testing.assert_equal(found, norm)
    for p, g in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(twin.array(p.grad), g, rtol=1e-15)


@both_twins
def test_clipping_in_float32_overflows_to_zero_as_in_torch(twin: Twin) -> None:
    (p,), optimizer = optimizer_of(twin, [np.zeros(2, np.float32)])
    set_grad(twin, p, np.array([3e19, 4e19], np.float32))
    assert optimizer.clip_grad_norm(1.0, error_if_nonfinite=False) == INF
    np.testing.assert_array_equal(twin.array(p.grad), [0.0, 0.0])
    for max_norm in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match=r"max_norm: got .*, needed a positive number"):
            optimizer.clip_grad_norm(max_norm)


@both_twins
@pytest.mark.parametrize(
    "arguments",
    ({"lr": -1.0}, {"lr": NAN}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8},
     {"weight_decay": -0.1}),
    ids=str,
)  # fmt: skip
def test_hyperparameters_out_of_range_raise(twin: Twin, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        optimizer_of(twin, [np.zeros((1, 1))], **arguments)


@both_twins
def test_an_optimizer_needs_parameters(twin: Twin) -> None:
    with pytest.raises(ValueError, match="parameters: got none, needed at least one"):
        twin.optim.AdamWOptimizer([])


@both_twins
def test_an_optimizer_made_after_backward_keeps_the_gradients(twin: Twin) -> None:
    parameters = [twin.parameter(np.array([1.0])), twin.parameter(np.array([2.0]))]
    seed = np.array([3.0])
    (parameters[0] + parameters[1]).backward(torch.tensor(seed) if twin is TORCH else seed)
    optimizer = twin.optim.AdamWOptimizer(parameters, lr=0.1)
    np.testing.assert_allclose(optimizer.clip_grad_norm(10.0), math.sqrt(18.0), rtol=1e-15)


def test_millions_of_small_gradients_count_beside_large_ones() -> None:
    """256 of 2**12 and four million of 1: in one float32 sum, 2**24 + 1 is 2**24."""
    grad = np.ones(2**22, np.float32)
    grad[:256] = 2.0**12
    (p,), optimizer = optimizer_of(NUMPY, [np.zeros_like(grad)])
    p.grad = grad
    exact = math.sqrt(256 * 2**24 + 2**22 - 256)
    np.testing.assert_allclose(optimizer.clip_grad_norm(INF), exact, rtol=2.0**-15)


def test_replaced_memory_is_noticed() -> None:
    (p,), optimizer = optimizer_of(NUMPY, [np.zeros(2)])
    p.data = np.ones(2)
    p.grad = np.ones(2)
    with pytest.raises(RuntimeError, match="memory was replaced"):
        optimizer.step()


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@given(
    st.lists(shapes(1, 3), min_size=1, max_size=4),
    st.sampled_from((1e-3, 0.1, 1.0)),
    st.sampled_from(((0.9, 0.999), (0.0, 0.5), (0.8, 0.0))),
    st.sampled_from((1e-8, 1e-3)),
    st.sampled_from((0.0, 0.01, 0.3)),
    st.integers(-30, 10),
    seeds,
)
def test_adamw_step_by_step(
    dtype: str, sizes: list[tuple[int, ...]], lr: float, betas: tuple[float, float], eps: float,
    decay: float, exponent: int, seed: int,
) -> None:  # fmt: skip
    """Each step starts from the state of the NumPy twin; both twins against the formula."""
    random = np.random.default_rng(seed)
    unit = UNITS[dtype]
    arrays = [random.standard_normal(shape).astype(dtype) for shape in sizes]
    arguments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    made = [optimizer_of(twin, arrays, **arguments) for twin in TWINS]
    for _ in range(3):
        scale = 2.0 ** (exponent + random.integers(-3, 4))
        grads = [
            None if random.random() < 0.25
            else (scale * random.standard_normal(shape)).astype(dtype)
            for shape in sizes
        ]  # fmt: skip
        (ours, first), (theirs, second) = made
        state = first.state()
        weights = [NUMPY.array(p) for p in ours]
        for p, w in zip(theirs, weights, strict=True):
            p.data.copy_(torch.tensor(w))
        second.load_state(state)
        for twin, (parameters, optimizer) in zip(TWINS, made, strict=True):
            for p, g in zip(parameters, grads, strict=True):
                set_grad(twin, p, g)
            optimizer.step()
        after = [(twin, p, o.state()) for twin, (p, o) in zip(TWINS, made, strict=True)]
        for i, g in enumerate(grads):
            before = [x.astype(np.float64) for x in
                      (weights[i], state["exp_avg"][i], state["exp_avg_sq"][i])]  # fmt: skip
            t = state["steps"][i] + 1
            for twin, parameters, now in after:
                found = [twin.array(parameters[i]), now["exp_avg"][i], now["exp_avg_sq"][i]]
                if g is None:
                    assert now["steps"][i] == t - 1
                    for x, old in zip(found, before, strict=True):
                        np.testing.assert_array_equal(x, old)
                    continue
                assert now["steps"][i] == t
                expected, magnitudes = adamw_step(
                    before[0], g.astype(np.float64), before[1], before[2], t,
                    lr, betas, eps, decay if g.ndim >= 2 else 0.0,
                )  # fmt: skip
                for x, exact, m in zip(found, expected, magnitudes, strict=True):
                    what = f"{twin.name}, parameter {i}"
                    assert_within(x, exact, bound(m, unit), what, dtype)


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@given(
    st.lists(shapes(1, 3), min_size=1, max_size=4),
    st.sampled_from((1e-3, 1.0, 50.0)),
    st.integers(-30, 10),
    seeds,
)
def test_clipping_of_random_gradients(
    dtype: str, sizes: list[tuple[int, ...]], max_norm: float, exponent: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    unit = UNITS[dtype]
    grads = [(2.0**exponent * random.standard_normal(shape)).astype(dtype) for shape in sizes]
    (clipped, exact), (magnitudes, size) = clip_grad_norm(grads, max_norm)
    for twin in TWINS:
        parameters, optimizer = optimizer_of(twin, [np.zeros_like(g) for g in grads])
        for p, g in zip(parameters, grads, strict=True):
            set_grad(twin, p, g)
        norm = optimizer.clip_grad_norm(max_norm)
        assert abs(norm - exact) <= bound(size, unit)
        for p, expected, m in zip(parameters, clipped, magnitudes, strict=True):
            assert_within(twin.array(p.grad), expected, bound(m, unit), twin.name, dtype)


@pytest.mark.reference("other backend")
@both_twins
@pytest.mark.parametrize("exponent", (-20, -3, 0, 10))
@pytest.mark.parametrize(
    ("numbers", "norm"),
    (([[3.0, 4.0]], 5.0), ([[1.0, 2.0, 2.0]], 3.0), ([[3.0, 4.0], [12.0]], 13.0)),
)
def test_clipping_at_exactly_the_limit(
    twin: Twin, numbers: list[list[float]], norm: float, exponent: int
) -> None:
    """PyTorch's own clip scales by max_norm / (norm + 1e-6) here as well, by a hair."""
    grads = [2.0**exponent * np.array(part) for part in numbers]
    limit = 2.0**exponent * norm
    parameters, optimizer = optimizer_of(twin, [np.zeros_like(g) for g in grads])
    stock = [torch.nn.Parameter(torch.zeros(len(g), dtype=torch.float64)) for g in grads]
    for p, q, g in zip(parameters, stock, grads, strict=True):
        set_grad(twin, p, g)
        q.grad = torch.tensor(g)
    assert optimizer.clip_grad_norm(limit) == limit
    assert torch.nn.utils.clip_grad_norm_(stock, limit).item() == limit
    for p, q, g in zip(parameters, stock, grads, strict=True):
        assert (twin.array(p.grad) < g).all()
        allowed = OPERATION_FACTOR * UNITS["float64"].u
        np.testing.assert_allclose(twin.array(p.grad), q.grad.numpy(), rtol=allowed)


@pytest.mark.reference("other backend")
@both_twins
@pytest.mark.parametrize("present", ((0, 1, 2), (0, 2), (1,)))
def test_clipping_after_other_parameters_had_gradients(
    twin: Twin, present: tuple[int, ...]
) -> None:
    """PyTorch's own clip of the gradients of this step alone, those of a last one forgotten."""
    rng = np.random.default_rng(len(present))
    first, second = ([rng.standard_normal(shape) for shape in ((2, 3), (4,), (1, 2))]
                     for _ in range(2))  # fmt: skip
    parameters, optimizer = optimizer_of(twin, [np.zeros_like(g) for g in first])
    for p, g in zip(parameters, first, strict=True):
        set_grad(twin, p, g)
    optimizer.step()
    optimizer.zero_grad()
    stock = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in second]
    for i in present:
        set_grad(twin, parameters[i], second[i])
        stock[i].grad = torch.tensor(second[i])
    norm = torch.nn.utils.clip_grad_norm_(stock, 0.5).item()
    slack = OPERATION_FACTOR * math.sqrt(12) * UNITS["float64"].u
    assert math.isclose(optimizer.clip_grad_norm(0.5), norm, rel_tol=slack)
    for p, q in zip(parameters, stock, strict=True):
        if q.grad is None:
            assert p.grad is None
        else:
            np.testing.assert_allclose(twin.array(p.grad), q.grad.numpy(), rtol=2.0 * slack)


@both_twins
def test_a_gradient_of_an_earlier_step_is_not_in_the_norm(twin: Twin) -> None:
    """d(p^2 + q^2) = 2 p, 2 q = 6, 8 has norm 10; d(p^2) alone has norm 6, and 6 / 2 = 3 is kept.

    The limit 3 scales by 3 / (6 + 1e-6) = 0.5 / (1 + 1e-6 / 6).
    """
    (p, q), optimizer = optimizer_of(twin, [np.array([3.0]), np.array([4.0])])
    (p * p + q * q).sum().backward()
    assert optimizer.clip_grad_norm(100.0) == 10.0
    optimizer.zero_grad()
    (p * p).sum().backward()
    assert optimizer.clip_grad_norm(3.0) == 6.0
    np.testing.assert_allclose(twin.array(p.grad), [2.9999995000000833], rtol=1e-15)
    assert q.grad is None


@both_twins
def test_clipping_skips_parameters_without_a_gradient(twin: Twin) -> None:
    (p, idle), optimizer = optimizer_of(twin, [np.zeros(2), np.zeros(2)])
    set_grad(twin, idle, np.array([100.0, 100.0]))
    optimizer.step()
    optimizer.zero_grad()
    assert p.grad is None and idle.grad is None
    set_grad(twin, p, np.array([3.0, 4.0]))
    assert optimizer.clip_grad_norm(10.0) == 5.0
    assert idle.grad is None
    moved = twin.array(idle)
    optimizer.step()
    np.testing.assert_array_equal(twin.array(idle), moved)
    assert optimizer.state()["steps"] == [1, 1]


@both_twins
def test_states_share_nothing_with_the_optimizer(twin: Twin) -> None:
    (parameter,), optimizer = optimizer_of(twin, [np.ones((2, 2))])
    set_grad(twin, parameter, np.ones((2, 2)))
    optimizer.step()
    state = optimizer.state()
    before = {key: [np.array(item) for item in items] for key, items in state.items()}
    optimizer.step()
    for key, items in state.items():
        for item, kept in zip(items, before[key], strict=True):
            np.testing.assert_array_equal(item, kept)
    optimizer.load_state(state)
    optimizer.step()
    for key, items in state.items():
        for item, kept in zip(items, before[key], strict=True):
            np.testing.assert_array_equal(item, kept)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("block", [1, 4, 5])
def test_updates_in_blocks_are_the_same_updates(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that end within a parameter, and where decay ends; three steps, to the bit."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((3, 3), (2,), (2, 4), (5,))]
    gradients = [[rng.standard_normal(a.shape) for a in arrays] for _ in range(3)]

    def trained() -> list[np.ndarray]:
        parameters, optimizer = optimizer_of(NUMPY, arrays, lr=0.1, weight_decay=0.5)
        for step in gradients:
            for p, g in zip(parameters, step, strict=True):
                set_grad(NUMPY, p, g)
            optimizer.step()
        return [p.data.copy() for p in parameters]

    whole = trained()
    monkeypatch.setattr("numpy_impl.optim.BLOCK", block)
    for a, b in zip(trained(), whole, strict=True):
        np.testing.assert_array_equal(a, b)
