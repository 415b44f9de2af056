"""Attention of both twins against PyTorch's own, by Monte Carlo tolerances of the NumPy engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.oracle.compare import compare
from gpt_parity.oracle.examples import STRUCTURES, Shape, cotangent, seeds
from gpt_parity.oracle.examples import fill as filled
from gpt_parity.oracle.examples import sizes as axis_sizes
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64
from gpt_parity.oracle.tolerance import noisy_runs, spread_tolerance
from numpy_impl.tape import Observer, observe
from parity_tests.registry import NUMPY, TORCH, TWINS, Twin
from parity_tests.strategies import broadcast_shapes

pytestmark = pytest.mark.reference("other backend")

FILLS = tuple(s for s in STRUCTURES if s != "adversarial")
NAMES = ("q", "k", "v")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Attention:
    """Shapes of q, k, v and of the mask (None: none), and what fills them; `same`: q is k is v."""

    q: Shape
    k: Shape
    v: Shape
    mask: Shape | None
    structure: str
    exponent: int
    same: bool
    seed: int

    def arrays(self, dtype: str) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        made = [
            (filled(rng, shape, self.structure) * 2.0**self.exponent).astype(np.float32)
            for shape in (self.q, self.k, self.v)
        ]
        return [array.astype(dtype) for array in made[: 1 if self.same else 3]]

    def keep(self) -> np.ndarray | None:
        if self.mask is None:
            return None
        rng = np.random.default_rng([self.seed, 1])
        keep = rng.random(self.mask) < 0.6
        keep[..., rng.integers(self.mask[-1])] = True
        return keep

    def cotangents(self, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, 2])
        leading = np.broadcast_shapes(self.q[:-2], self.k[:-2])
        weights = (*leading, self.q[-2], self.k[-2])
        out = (*np.broadcast_shapes(leading, self.v[:-2]), self.q[-2], self.v[-1])
        return tuple(cotangent(rng, s, np.float32).astype(dtype) for s in (out, weights))


@st.composite
def attentions(
    draw: st.DrawFn, mask: bool = False, same: bool = False, broadcast: bool = False
) -> Attention:
    t, s, d_k, d_v = draw(axis_sizes(4))
    if same:
        s, d_v = t, d_k
    leading = draw(st.integers(1 if broadcast else 0, 2).flatmap(lambda n: axis_sizes(n, 3)))
    leads = [draw(broadcast_shapes(leading)) if broadcast else leading for _ in NAMES]
    keep = None
    if mask:
        keep = draw(st.sampled_from(((t, s), (1, s), (*leading, t, s))))
    return Attention(
        (*leads[0], t, d_k), (*leads[1], s, d_k), (*leads[2], s, d_v),
        keep, draw(st.sampled_from(FILLS)), draw(st.integers(-6, 3)), same, draw(seeds),
    )  # fmt: skip


def results(
    twin: Twin, example: Attention, attend: Callable[..., Any], dtype: str,
    observer: Observer | None = None,
) -> Arrays:  # fmt: skip
    """Output, weights (where `attend` returns them) and the gradient of every distinct input."""
    leaves = [twin.tensor(array) for array in example.arrays(dtype)]
    inputs = leaves * 3 if example.same else leaves
    with observe(observer) if observer else contextlib.nullcontext():
        out = attend(*inputs)
        out, weights = out if isinstance(out, tuple) else (out, None)
        g_out, g_weights = example.cotangents(dtype)
        loss = (out * twin.tensor(g_out)).sum()
        if weights is not None:
            loss = loss + (weights * twin.tensor(g_weights)).sum()
        loss.backward()
    found = {"output": twin.array(out)}
    if weights is not None:
        found["weights"] = twin.array(weights)
    for name, leaf in zip(NAMES, leaves, strict=False):
        found[f"gradient of {name}"] = twin.array(leaf.grad)
    return found


def judge(
    example: Attention, reference: Callable[..., Any], candidates: list[tuple[Twin, Any]]
) -> None:
    """Candidates in both dtypes against the NumPy `reference` in float64."""
    clean = results(NUMPY, example, reference, "float64")
    for unit in (FLOAT64, FLOAT32):
        noisy = noisy_runs(
            lambda observer: results(NUMPY, example, reference, "float64", observer),
            unit,
            example.seed,
        )
        for twin, attend in candidates:
            if twin is NUMPY and unit is FLOAT64:
                continue  # that is the reference
            candidate = results(twin, example, attend, unit.name)
            assert list(candidate) == list(clean)
            for name, array in candidate.items():
                tolerance = spread_tolerance(clean[name], [run[name] for run in noisy], unit)
                judged = compare(name, "attention", array, clean[name], tolerance, unit.name)
                assert judged.ok, f"{twin.name} {unit.name}: {judged}"


@given(attentions())
def test_self_attention_without_a_mask(example: Attention) -> None:
    judge(
        example,
        NUMPY.functional.self_attention,
        [(twin, twin.functional.self_attention) for twin in TWINS],
    )


@given(attentions(mask=True))
def test_self_attention_under_random_masks(example: Attention) -> None:
    keep = example.keep()

    def masked(twin: Twin) -> Callable[..., Any]:
        return lambda q, k, v: twin.functional.self_attention(q, k, v, keep)

    judge(example, masked(NUMPY), [(twin, masked(twin)) for twin in TWINS])


@given(attentions())
def test_causal_attention(example: Attention) -> None:
    judge(
        example,
        NUMPY.functional.causal_attention,
        [(twin, twin.functional.causal_attention) for twin in TWINS],
    )


@given(attentions(same=True))
def test_one_tensor_as_query_key_and_value(example: Attention) -> None:
    judge(
        example,
        NUMPY.functional.causal_attention,
        [(twin, twin.functional.causal_attention) for twin in TWINS],
    )


@given(attentions(broadcast=True))
def test_leading_axes_broadcast(example: Attention) -> None:
    judge(
        example,
        NUMPY.functional.causal_attention,
        [(twin, twin.functional.causal_attention) for twin in TWINS],
    )


def output_of(twin: Twin, keep: np.ndarray | None = None) -> Callable[..., Any]:
    """The output alone, as PyTorch's function returns it."""
    if keep is None:
        return lambda q, k, v: twin.functional.causal_attention(q, k, v)[0]
    return lambda q, k, v: twin.functional.self_attention(q, k, v, keep)[0]


@given(st.booleans().flatmap(lambda same: attentions(same=same)))
def test_causal_attention_against_scaled_dot_product_attention(example: Attention) -> None:
    def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    judge(example, output_of(NUMPY), [(TORCH, stock), (TORCH, output_of(TORCH))])


@given(attentions(mask=True))
def test_masked_attention_against_scaled_dot_product_attention(example: Attention) -> None:
    keep = example.keep()

    def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.from_numpy(keep)
        )

    judge(example, output_of(NUMPY, keep), [(TORCH, stock), (TORCH, output_of(TORCH, keep))])


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@given(attentions(same=True), st.data())
def test_the_future_has_exactly_no_influence(
    twin: Twin, example: Attention, data: st.DataObject
) -> None:
    positions = example.q[-2]
    last = data.draw(st.integers(0, positions - 1), label="last position looked at")
    (x,) = example.arrays("float64")
    changed = x.copy()
    changed[..., last + 1 :, :] = 1e3 * np.random.default_rng(example.seed).standard_normal(
        changed[..., last + 1 :, :].shape
    )
    g, _ = example.cotangents("float64")
    g[..., last + 1 :, :] = 0.0
    outputs = []
    for array in (x, changed):
        leaves = [twin.tensor(array) for _ in NAMES]
        out, weights = twin.functional.causal_attention(*leaves)
        (out * twin.tensor(g)).sum().backward()
        outputs.append(twin.array(out)[..., : last + 1, :])
        assert (twin.array(weights)[..., ~np.tri(positions, dtype=bool)] == 0.0).all()
        for leaf in leaves:
            assert not twin.array(leaf.grad)[..., last + 1 :, :].any()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@given(attentions(), st.data())
def test_later_keys_have_no_influence_whatever_their_number(
    twin: Twin, example: Attention, data: st.DataObject
) -> None:
    queries, keys = example.q[-2], example.k[-2]
    last = data.draw(st.integers(0, queries - 1), label="last query looked at")
    q, k, v = example.arrays("float64")
    outputs = []
    for scale in (1.0, 1e3):
        changed = [array.copy() for array in (k, v)]
        for array in changed:
            array[..., last + 1 :, :] = scale * (array[..., last + 1 :, :] + 1.0)
        leaves = [twin.tensor(array) for array in (q, *changed)]
        out, weights = twin.functional.causal_attention(*leaves)
        outputs.append(twin.array(out)[..., : last + 1, :])
        assert (twin.array(weights)[..., ~np.tri(queries, keys, dtype=bool)] == 0.0).all()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@given(attentions(mask=True))
def test_what_no_position_attends_to_has_no_influence(twin: Twin, example: Attention) -> None:
    q, k, v = example.arrays("float64")
    keep = np.broadcast_to(example.keep(), example.cotangents("float64")[1].shape)
    unseen = ~keep.any(axis=-2)  # (..., S)
    g, _ = example.cotangents("float64")
    outputs = []
    for scale in (1.0, 1e3):
        arrays = [q, *(np.where(unseen[..., None], scale * (a + 1.0), a) for a in (k, v))]
        leaves = [twin.tensor(a) for a in arrays]
        out, _ = twin.functional.self_attention(*leaves, keep)
        (out * twin.tensor(g)).sum().backward()
        outputs.append(twin.array(out))
        for leaf in leaves[1:]:
            assert not twin.array(leaf.grad)[unseen].any()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@given(attentions(mask=True))
def test_a_mask_of_zeros_and_ones_is_the_mask(twin: Twin, example: Attention) -> None:
    keep = example.keep()
    leaves = [twin.tensor(a) for a in example.arrays("float32")]
    found = [
        twin.array(twin.functional.self_attention(*leaves, mask)[0])
        for mask in (keep, keep.astype(np.int64), keep.astype(np.uint8))
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_attention_by_hand(twin: Twin) -> None:
    """Scores 0 and ln 3 give weights 1/4 and 3/4; d_k = 4 divides the product by 2."""
    q = twin.tensor(np.array([[0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]]))
    k = twin.tensor(np.array([[0.0, 0.0, 5.0, 9.0], [math.log(3.0), 7.0, 0.0, 0.0]]))
    v = twin.tensor(np.array([[4.0, 8.0, 0.0], [8.0, 0.0, 1.0]]))
    out, weights = twin.functional.causal_attention(q, k, v)
    np.testing.assert_allclose(twin.array(weights), [[1.0, 0.0], [0.25, 0.75]], rtol=1e-15)
    np.testing.assert_allclose(twin.array(out), [[4.0, 8.0, 0.0], [7.0, 2.0, 0.75]], rtol=1e-15)


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_causal_mask_starts_at_the_first_key_whatever_their_number(twin: Twin) -> None:
    """Query i sees keys 0 to i: keys beyond the last query are not seen by any.

    Scores are 0, ln 3, ln 4, so of two keys the weights are 1/4, 3/4, of three 1/8, 3/8, 4/8.
    """
    scores, values = np.log([[1.0], [3.0], [4.0]]), np.array([[8.0], [16.0], [64.0]])
    weights = np.array([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.125, 0.375, 0.5]])
    out = np.array([[8.0], [14.0], [39.0]])
    for queries in (1, 2, 3):
        q, k, v = (twin.tensor(a) for a in (np.ones((queries, 1)), scores, values))
        found = [twin.array(x) for x in twin.functional.causal_attention(q, k, v)]
        np.testing.assert_allclose(found[0], out[:queries], rtol=1e-14)
        np.testing.assert_allclose(found[1], weights[:queries], rtol=1e-14)
    q, k, v = (twin.tensor(a) for a in (np.ones((3, 1)), scores[:2], values[:2]))
    found = [twin.array(x) for x in twin.functional.causal_attention(q, k, v)]
    np.testing.assert_allclose(found[0], [[8.0], [14.0], [14.0]], rtol=1e-14)
    np.testing.assert_allclose(found[1], [[1.0, 0.0], [0.25, 0.75], [0.25, 0.75]], rtol=1e-14)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_masked_position_loses_to_any_finite_score(twin: Twin) -> None:
    q, k = twin.tensor(np.array([[1e6]])), twin.tensor(np.array([[-1e6], [1.0]]))
    v = twin.tensor(np.array([[2.0], [3.0]]))
    out, weights = twin.functional.self_attention(q, k, v, np.array([[True, False]]))
    np.testing.assert_array_equal(twin.array(weights), [[1.0, 0.0]])
    np.testing.assert_array_equal(twin.array(out), [[2.0]])


SHAPE_ERRORS = {
    "d_k differs": ((2, 3), (2, 4), (2, 3)),
    "S differs": ((2, 3), (4, 3), (2, 3)),
    "one axis": ((3,), (2, 3), (2, 3)),
    "one axis of v": ((2, 3), (2, 3), (3,)),
}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize("case", SHAPE_ERRORS)
def test_shapes_that_do_not_fit(twin: Twin, case: str) -> None:
    q, k, v = SHAPE_ERRORS[case]
    with pytest.raises(ValueError) as caught:
        twin.functional.self_attention(*(twin.tensor(np.ones(s)) for s in (q, k, v)))
    assert str(caught.value) == (
        f"attention: got q {q}, k {k}, v {v}, needed (..., T, d_k), (..., S, d_k), (..., S, d_v)"
    )


MASK_ERRORS = {
    "floats": (np.ones((2, 2)), TypeError, "mask: got dtype float64, needed booleans"),
    "additive": (np.array([[0, -1], [0, 0]]), TypeError, "mask: got dtype int64, needed booleans"),
    "nothing": (
        np.array([[True, False], [False, False]]), ValueError,
        "mask: a position may attend to nothing, needed at least one",
    ),
    "shape": (np.ones((3, 2), bool), ValueError, "broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize("case", MASK_ERRORS)
def test_masks_that_do_not_fit(twin: Twin, case: str) -> None:
    mask, kind, message = MASK_ERRORS[case]
    x = twin.tensor(np.ones((2, 3)))
    with pytest.raises(kind, match=message):
        twin.functional.self_attention(x, x, x, mask)
