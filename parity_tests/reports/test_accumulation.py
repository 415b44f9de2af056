"""Reported faults of reverse-mode autograds: sums of gradients, aliasing, changes in place.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.choices import BACKENDS
from gpt_parity.tensors import as_array
from gpt_parity.weights import get_weights, set_weights
from numpy_impl.functional import gelu
from numpy_impl.tensor import Tensor
from parity_tests.registry import NUMPY, TORCH, Twin
from parity_tests.reports.common import (
    backward,
    both_twins,
    f32,
    f64,
    gradients,
    optimizer_of,
    set_grad,
    trainer_of,
)

pytestmark = pytest.mark.reference("by hand")


@both_twins
def test_B02_backward_twice_counts_inner_gradients_once(twin: Twin) -> None:
    w = twin.tensor(f64(3.0))
    h = 2.0 * w
    h.retain_grad()
    y = h * h
    y.backward(retain_graph=True)
    assert twin.array(w.grad) == 24.0
    w.grad = None
    y.backward(retain_graph=True)
    assert twin.array(w.grad) == 24.0
    assert twin.array(h.grad) == 12.0 + 12.0  # kept for whoever asked, and never passed on
    y.backward()
    assert twin.array(w.grad) == 48.0
    with pytest.raises(RuntimeError, match=r"freed|second time"):
        y.backward()
    assert twin.array(w.grad) == 48.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_B02_two_passes_without_zeroing_add_up(backend: str) -> None:
    trainer, dataset = trainer_of(backend)
    sums = []
    for _ in range(2):
        loss = trainer.loss_fn(trainer.model(dataset.batch("train", 0)[0]),
                               dataset.batch("train", 0)[1])  # fmt: skip
        loss.backward()
        sums.append([as_array(p.grad).copy() for p in trainer.model.parameters()])
    for once, twice in zip(*sums, strict=True):
        np.testing.assert_array_equal(twice, 2.0 * once)
    assert any(g.any() for g in sums[0])


@both_twins
def test_B10_two_branches_accumulate(twin: Twin) -> None:
    x = twin.tensor(f64([0.5]))
    branch = twin.layers.GELU()
    y = branch(x) + branch(x)
    y.backward()
    np.testing.assert_allclose(twin.array(y), [0.6914280196502879], rtol=4e-16)
    np.testing.assert_allclose(twin.array(x.grad), [1.734739807069], rtol=1e-12)


# Functions of two leaves whose gradients could be one array, or a view of the cotangent.
SHARING = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "transposed": lambda x, y: x.transpose(0, 1) + y.transpose(0, 1),
    "summed": lambda x, y: x.sum() + y.sum(),
}


@both_twins
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("leaf", ["tensor", "parameter"])
def test_B10_gradients_of_two_leaves_share_no_memory(twin: Twin, leaf: str, name: str) -> None:
    x, y = (getattr(twin, leaf)(np.ones((2, 2))) for _ in range(2))
    z = SHARING[name](x, y)
    g = np.ones(tuple(z.shape))
    backward(twin, z, g)
    assert not np.shares_memory(np.asarray(x.grad), np.asarray(y.grad))
    assert not np.shares_memory(np.asarray(x.grad), g)
    sign = -1.0 if name == "sub" else 1.0
    x.grad += 1
    np.testing.assert_array_equal(np.asarray(y.grad), np.full((2, 2), sign))
    np.testing.assert_array_equal(g, np.ones(tuple(z.shape)))
    if leaf == "tensor":
        return
    # 4 * 2^2 + 4 * 1 = 20: each gradient is scaled once.
    optimizer = twin.optim.AdamWOptimizer([x, y])
    assert math.isclose(optimizer.clip_grad_norm(1.0), math.sqrt(20.0), rel_tol=1e-15)
    scale = 1.0 / (math.sqrt(20.0) + 1e-6)
    np.testing.assert_allclose(np.asarray(x.grad), np.full((2, 2), 2.0 * scale), rtol=1e-15)
    np.testing.assert_allclose(np.asarray(y.grad), np.full((2, 2), sign * scale), rtol=1e-15)


def test_B10_views_of_one_gradient_are_two_arrays_here_and_one_in_torch() -> None:
    """PyTorch lets two leaves keep views of one gradient; nothing in this GPT is reshaped so."""
    for twin, shared in ((NUMPY, False), (TORCH, True)):
        (x, y), _ = optimizer_of(twin, np.ones((2, 2)), np.ones((2, 2)))
        backward(twin, x.reshape(4) + y.reshape(4), np.ones(4))
        assert np.shares_memory(np.asarray(x.grad), np.asarray(y.grad)) is shared


@pytest.mark.parametrize("backend", BACKENDS)
def test_B10_no_two_gradients_of_a_model_share_memory(backend: str) -> None:
    trainer, dataset = trainer_of(backend)
    trainer.train_step(*dataset.batch("train", 0))
    grads = [as_array(p.grad) for p in trainer.model.parameters()]
    for i, one in enumerate(grads):
        assert not any(np.shares_memory(one, other) for other in grads[:i])


def test_B10_a_gradient_kept_from_before_is_overwritten_as_documented() -> None:
    """Gradients of parameters are views into one array; the next pass fills it anew."""
    (w,), optimizer = optimizer_of(NUMPY, f64([[1, 2]]))
    (w * w).sum().backward()
    kept, copied = w.grad, w.grad.copy()
    optimizer.zero_grad()
    (w * 3.0).sum().backward()
    np.testing.assert_array_equal(kept, [[3, 3]])
    np.testing.assert_array_equal(copied, [[2, 4]])
    assert "overwrites the flat gradient" in NUMPY.optim.AdamWOptimizer.zero_grad.__doc__


def test_B11_writing_into_data_is_silent_as_in_torch() -> None:
    """The report asks for [2, 4, 6] or an error; PyTorch's `.data` gives neither, nor does ours."""
    for twin in (NUMPY, TORCH):
        x = twin.tensor(f64([1, 2, 3]))
        y = (x * x).sum()
        x.data += 1
        y.backward()
        np.testing.assert_array_equal(twin.array(x.grad), [4, 6, 8])
    assert "writes into `x.data` between forward and backward" in " ".join(Tensor.__doc__.split())


def test_B11_augmented_assignment_makes_a_new_tensor() -> None:
    for change in (lambda t, x: t + gelu(x), lambda t, x: t * x, lambda t, x: t - x):
        x = Tensor(f64([1, 2]))
        t = change(x, x)
        u = x
        u += gelu(x)
        u *= x
        u -= x
        u /= x
        assert t is not x and u is not x
        np.testing.assert_array_equal(x.data, [1, 2])
    with pytest.raises(RuntimeError, match="in-place"):  # what PyTorch says of the same lines
        t = torch.ones(2, requires_grad=True)
        t += t


@both_twins
@pytest.mark.parametrize("use", ["product", "linear"])
def test_B11_a_step_before_backward_raises(twin: Twin, use: str) -> None:
    (w, b), optimizer = optimizer_of(twin, f64([[1, 2, 3]]), f64([1]), lr=1.0, weight_decay=0.0)

    def loss() -> Any:
        if use == "product":
            return (w * w).sum()
        return twin.functional.linear(w * 1.0, w, b).sum()

    loss().backward()
    late = loss()
    optimizer.step()
    before = np.asarray(w.grad).copy()
    with pytest.raises(RuntimeError, match=r"changed in place since|modified by an inplace"):
        late.backward()
    np.testing.assert_array_equal(np.asarray(w.grad), before)
    loss().backward()  # and a new graph is fine


@both_twins
def test_B11_a_step_that_changes_nothing_is_no_error(twin: Twin) -> None:
    """Without a gradient a parameter is left alone, and a graph over it stays valid."""
    (w, v), optimizer = optimizer_of(twin, f64([[1, 2, 3]]), f64([[1]]))
    loss = (w * w).sum()
    set_grad(twin, v, f64([[1]]))
    optimizer.step()
    loss.backward()
    np.testing.assert_array_equal(np.asarray(w.grad), [[2, 4, 6]])


@pytest.mark.parametrize("way", ["load_state_dict", "set_weights"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_B11_loading_a_state_before_backward_raises(backend: str, way: str) -> None:
    trainer, dataset = trainer_of(backend)
    tokens, targets = dataset.batch("train", 0)
    loss = trainer.loss_fn(trainer.model(tokens), targets)
    if way == "set_weights":
        set_weights(trainer.model, get_weights(trainer.model))
    else:
        trainer.model.load_state_dict(trainer.model.state_dict())
    with pytest.raises(RuntimeError, match=r"changed in place since|modified by an inplace"):
        loss.backward()


@both_twins
@pytest.mark.parametrize("make", [f64, f32])
def test_B13_scaling_the_loss_scales_the_gradient(twin: Twin, make: Any) -> None:
    for scaled, expected in (
        (lambda loss: loss * 3.0, [[-1.5, 1.5]]),
        (lambda loss: loss * 0.25, [[-0.125, 0.125]]),
        (lambda loss: loss + loss, [[-1.0, 1.0]]),
        (lambda loss: loss / 2.0 - loss, [[0.25, -0.25]]),
    ):
        loss_of = twin.loss.GPTLoss()
        (found,) = gradients(twin, lambda x, of=loss_of, by=scaled: by(of(x, np.array([0]))),
                             make([[0, 0]]))  # fmt: skip
        np.testing.assert_array_equal(found, expected)


@both_twins
def test_B13_a_vector_needs_an_upstream_gradient(twin: Twin) -> None:
    for shape in ((2,), (1, 2), (2, 1, 3)):
        x = twin.tensor(np.ones(shape))
        with pytest.raises((ValueError, RuntimeError), match=r"scalar"):
            (x * 2.0).backward()
        assert x.grad is None
