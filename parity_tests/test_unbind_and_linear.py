"""Unbind, and linear maps without a bias, of both twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from numpy_impl import functional as F
from numpy_impl.tensor import Tensor
from parity_tests.registry import NUMPY, TWINS, Twin
from parity_tests.test_layer_norm import run
from torch_impl import functional as tF

pytestmark = pytest.mark.reference("by hand")

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
exact_property = pytest.mark.reference("exact property")


@both_twins
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_unbind_takes_the_axis_apart_and_its_gradient_puts_it_together(
    twin: Twin, axis: int
) -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    leaf = twin.tensor(x)
    parts = leaf.unbind(axis)
    assert isinstance(parts, tuple) and len(parts) == x.shape[axis]
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(twin.array(part), x.take(i, axis), strict=True)
    # The first part once, the last one three times: two uses of one leaf, where parts differ.
    (parts[0].sum() + parts[-1].sum() * 3.0).backward()
    expected = np.zeros_like(x)
    np.moveaxis(expected, axis, 0)[0] = 1.0
    np.moveaxis(expected, axis, 0)[-1] += 3.0
    np.testing.assert_array_equal(twin.array(leaf.grad), expected, strict=True)


@both_twins
def test_unbind_refuses_an_axis_that_is_not_there(twin: Twin) -> None:
    for shape, axis in (((2, 3), 2), ((2, 3), -3), ((), 0)):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            twin.tensor(np.zeros(shape)).unbind(axis)


@both_twins
def test_a_linear_map_without_a_bias_by_hand(twin: Twin) -> None:
    x, w, g = (
        [[1.0, 2.0], [-3.0, 0.5]],
        [[1.0, 0.0], [2.0, -1.0], [0.5, 4.0]],
        [[1, 0, 2], [3, 1, 0]],
    )
    y, dx, dw = run(twin, x, w, g=g, op="linear")
    np.testing.assert_array_equal(y, [[1.0, 0.0, 8.5], [-3.0, -6.5, 0.5]])
    np.testing.assert_array_equal(dx, [[2.0, 8.0], [5.0, -1.0]])
    np.testing.assert_array_equal(dw, [[-8.0, 3.5], [-3.0, 0.5], [2.0, 4.0]])


@both_twins
def test_a_linear_map_without_a_bias_refuses_other_shapes_and_dtypes(twin: Twin) -> None:
    weight = twin.tensor(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"linear: got input \(2, 4\), needed \(\.\.\., 3\)"):
        twin.functional.linear(twin.tensor(np.ones((2, 4))), weight)
    with pytest.raises(TypeError if twin is NUMPY else RuntimeError):
        twin.functional.linear(twin.tensor(np.ones((2, 3), np.float32)), weight)


@exact_property
def test_no_bias_is_a_bias_of_zero() -> None:
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((3, 2, 5)), rng.standard_normal((4, 5))
    for functional, tensor in ((F, Tensor), (tF, torch.tensor)):
        y = functional.linear(tensor(x), tensor(w))
        zero = functional.linear(tensor(x), tensor(w), tensor(np.zeros(4)))
        assert len(y.shape) == 3
        np.testing.assert_allclose(y.detach().numpy(), zero.detach().numpy(), rtol=1e-14)
