"""The formulas of `docs/derivations.md`, run against both twins and against complex step."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_parity.oracle import ops
from gpt_parity.oracle.bounds import adamw_step, backward_bound, clip_grad_norm, forward_bound
from gpt_parity.oracle.compare import GRADIENT
from gpt_parity.oracle.examples import Example, cotangent, seeds, shapes, sizes
from gpt_parity.oracle.judge import judge
from gpt_parity.oracle.op_checks import Attention
from gpt_parity.oracle.rounding import FLOAT64, TABLE, bound
from numpy_impl import functional as F
from numpy_impl import tape
from numpy_impl.tensor import Tensor
from parity_tests import markdown
from parity_tests.comparers import assert_within
from parity_tests.registry import BY_ID, TORCH, TWINS, Row, Twin
from parity_tests.strategies import broadcast_shapes
from torch_impl import functional as tF

pytestmark = pytest.mark.reference("by hand")
other_backend = pytest.mark.reference("other backend")
complex_steps = pytest.mark.reference("complex step")

PAGE = markdown.read("docs/derivations.md")
P = markdown.run("docs/derivations.md")
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
MATH = re.compile(r"^```math\n(.*?)\n```$|\$`(.*?)`\$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(numpy_impl/\w+\.py)\)")

# The tape's own arithmetic, which has no row in the registry.
TAPE = {"unbroadcast": "unbroadcast", "accumulate": "several_uses"}
ROWS = [BY_ID[name] for name in TABLE if name not in TAPE]
ATTENTIONS: dict[str, tuple[Attention, Callable[..., Any]]] = {
    "causal_attention": (ops.causal_attention, lambda *x: tF.causal_attention(*x)[0]),
    "attention_of_itself": (
        Attention("itself", lambda x: F.causal_attention(x, x, x)[0], ("x",)),
        lambda x: tF.causal_attention(x, x, x)[0],
    ),
}

COMPLEX_STEP = 2.0**-100
PERTURBED_ELEMENTS = 20

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
# The engine itself is drawn more examples elsewhere; a formula of one line has fewer corners.
some_examples = settings(max_examples=max(1, settings.default.max_examples // 4))


def vjp(name: str, arrays: list[np.ndarray], others: list[Any], g: np.ndarray) -> list[np.ndarray]:
    found = P[f"{name}_vjp"](*arrays, *others, g=g)
    return [np.asarray(x) for x in (found if isinstance(found, tuple) else (found,))]


# --- the page


def test_every_section_has_formulas_code_and_a_function_that_exists() -> None:
    assert len(SECTIONS) >= 10
    for title, text in SECTIONS:
        links = LINK.findall(text)
        assert markdown.blocks(text, "python") and MATH.search(text) and links, title
        for name, path in links:
            assert name in defined(markdown.ROOT / path), f"{title}: {path} has no {name}"
        assert text.count("](") == len(links), f"{title}: a link of another form"


def defined(path: Path) -> set[str]:
    """Functions and classes of a file, methods as Class.name."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return names


def test_every_operation_is_derived_and_every_function_of_the_page_is_tested() -> None:
    functions = {name for name, x in P.items() if isinstance(x, FunctionType)}
    pairs = [row.name for row in ROWS] + list(ATTENTIONS) + ["several_uses"]
    tested = {*pairs, *(f"{name}_vjp" for name in pairs), *TAPE.values()}
    assert functions == tested | {"clip_grad_norm", "adamw_step"}


def test_every_formula_is_well_formed() -> None:
    mathtext = pytest.importorskip(
        "matplotlib.mathtext", reason="needs matplotlib: the extra plots"
    )
    formulas = [display or inline for display, inline in MATH.findall(PAGE)]
    assert len(formulas) >= 25
    for formula in formulas:
        mathtext.MathTextParser("path").parse(f"${formula}$")
    assert "$$" not in PAGE and not re.search(r"\$[^`]", MATH.sub("", PAGE))


# --- operations


@other_backend
@every_row
@some_examples
@given(st.data())
def test_formulas_against_both_twins(row: Row, data: st.DataObject) -> None:
    example: Example = data.draw(row.inputs, label=row.name)
    arrays, others = example.arrays(np.float64), example.others()
    leaves, twins = [Tensor(x) for x in arrays], [TORCH.tensor(x) for x in arrays]
    out = row.numpy(*leaves, *others)
    forward = np.array(P[row.name](*arrays, *others))
    assert_within(forward, out.data, 2.0 * forward_bound(out, FLOAT64), "forward")
    g = example.cotangent(out.shape, np.float64)
    allowed = [2.0 * backward_bound(out, i, g, FLOAT64) for i in range(len(leaves))]
    theirs = torch.autograd.grad(row.torch(*twins, *others), twins, torch.tensor(g.copy()))
    found = vjp(row.name, arrays, others, g)
    out.backward(g)
    for i, (mine, leaf, their) in enumerate(zip(found, leaves, theirs, strict=True)):
        assert_within(mine, leaf.grad, allowed[i], f"gradient {i} against the engine")
        assert_within(mine, their.numpy(), allowed[i], f"gradient {i} against torch")


def complex_step(
    function: Callable[..., Any], arrays: list[np.ndarray], i: int, g: np.ndarray,
    positions: list[tuple[int, ...]],
) -> np.ndarray:  # fmt: skip
    """Derivatives of <g, f> by elements of operand `i`."""
    derivatives = []
    for position in positions:
        perturbed = [x.astype(np.complex128) for x in arrays]
        perturbed[i][position] += 1j * COMPLEX_STEP
        derivatives.append((g * function(*perturbed).imag).sum() / COMPLEX_STEP)
    return np.array(derivatives)


@complex_steps
@every_row
@some_examples
@given(st.data())
def test_formulas_against_complex_step(row: Row, data: st.DataObject) -> None:
    """The page alone: its backward against its forward. The engine gives the bounds."""
    example: Example = data.draw(row.inputs, label=row.name)
    arrays, others = example.arrays(np.float64), example.others()
    out = row.numpy(*map(Tensor, arrays), *others)
    g = example.cotangent(out.shape, np.float64)
    for i, mine in enumerate(vjp(row.name, arrays, others, g)):
        positions = list(np.ndindex(mine.shape))
        order = np.random.default_rng(example.seed).permutation(len(positions))
        positions = [positions[j] for j in order[:PERTURBED_ELEMENTS]]
        numeric = complex_step(lambda *x: P[row.name](*x, *others), arrays, i, g, positions)
        allowed = np.broadcast_to(2.0 * backward_bound(out, i, g, FLOAT64), mine.shape)
        allowed = np.array([allowed[position] for position in positions])
        # Where something is rounded, the step of 2^-100 can make it underflow besides.
        underflow = 8.0 * np.finfo(np.float64).smallest_subnormal / COMPLEX_STEP * np.abs(g).sum()
        chosen = np.array([mine[position] for position in positions])
        assert_within(chosen, numeric, allowed + underflow * (allowed > 0.0), f"gradient {i}")


# --- the tape


@given(st.data(), shapes(0), seeds)
def test_a_sum_over_broadcast_axes(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """On whole numbers, of which small sums are exact."""
    smaller = data.draw(broadcast_shapes(shape))
    g = np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float64)
    mine = np.asarray(P["unbroadcast"](g, smaller))
    np.testing.assert_array_equal(mine, tape.unbroadcast(g, smaller))
    np.testing.assert_array_equal(mine, torch.tensor(g).sum_to_size(smaller).numpy())


@given(shapes(0), seeds)
def test_a_sum_over_uses(shape: tuple[int, ...], seed: int) -> None:
    """On whole numbers, of which these products and sums are exact."""
    rng = np.random.default_rng(seed)
    x, g = (np.asarray(rng.integers(-9, 10, shape), np.float64) for _ in range(2))
    leaf, twin = Tensor(x), torch.tensor(x, requires_grad=True)
    for y in (P["several_uses"](leaf), P["several_uses"](twin)):
        y.backward(torch.tensor(g) if isinstance(y, torch.Tensor) else g)
    mine = P["several_uses_vjp"](x, g=g)
    np.testing.assert_array_equal(mine, leaf.grad)
    np.testing.assert_array_equal(mine, twin.grad.numpy())


# --- attention: composed, so its tolerance is that of Monte Carlo arithmetic


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_attention_against_both_twins_and_complex_step(name: str, seed: int) -> None:
    op, in_torch = ATTENTIONS[name]
    rng = np.random.default_rng(seed)
    b, t, d, e = ((2, 5, 3, 7), (1, 4, 4, 4), (3, 1, 2, 1))[seed % 3]
    scale = (1.0, 3.0)[seed // 3]
    arrays = [scale * rng.standard_normal((b, t, n)) for n in (d, d, e)[: len(op.operands)]]
    g = cotangent(rng, (b, t, arrays[-1].shape[-1]), np.float64)
    found = [P[name](*arrays), *vjp(name, arrays, [], g)]
    twins = [torch.tensor(x, requires_grad=True) for x in arrays]
    out = in_torch(*twins)
    theirs = [out.detach(), *torch.autograd.grad(out, twins, torch.tensor(g))]
    numeric = [found[0]] + [
        complex_step(P[name], arrays, i, g, list(np.ndindex(x.shape))).reshape(x.shape)
        for i, x in enumerate(arrays)
    ]
    expected = op.expected(arrays, [], g, FLOAT64)
    for i, e in enumerate(expected):
        for who, candidates in (("page", found), ("torch", theirs), ("complex step", numeric)):
            judgement = judge(f"{who} {i}", GRADIENT, candidates[i], e, "float64")
            assert judgement.ok, (who, i, judgement)


# --- clip and optimizer


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize("limit", (0.5, 100.0))
@some_examples
@given(st.lists(shapes(1, 3), min_size=1, max_size=4), seeds)
def test_the_clip(twin: Twin, limit: float, sizes: list[tuple[int, ...]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    grads = [rng.standard_normal(shape) for shape in sizes]
    parameters = [twin.parameter(np.zeros(shape)) for shape in sizes]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = torch.tensor(g) if twin is TORCH else g.copy()
    theirs = twin.optim.AdamWOptimizer(parameters).clip_grad_norm(limit)
    mine, norm = P["clip_grad_norm"](grads, limit)
    magnitudes, size = clip_grad_norm(grads, limit)[1]
    assert_within(norm, np.asarray(float(theirs)), 2.0 * bound(size, FLOAT64), "norm")
    for g, p, m in zip(mine, parameters, magnitudes, strict=True):
        assert_within(g, twin.array(p.grad), 2.0 * bound(m, FLOAT64), "clipped")


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@some_examples
@given(
    sizes(2), st.sampled_from((1, 2, 1000)), st.sampled_from((1e-8, 1e-3)),
    st.sampled_from((0.0, 0.3)), st.integers(-30, 10), seeds,
)  # fmt: skip
def test_the_update(
    twin: Twin, shape: tuple[int, ...], step: int, eps: float, decay: float, exponent: int,
    seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    w, g, m, v = (rng.standard_normal(shape) for _ in range(4))
    g, m, v = 2.0**exponent * g, 2.0**exponent * m, 4.0**exponent * v * v
    chosen = {"lr": 0.1, "betas": (0.8, 0.95), "eps": eps, "weight_decay": decay}
    p = twin.parameter(w)
    optimizer = twin.optim.AdamWOptimizer([p], **chosen)
    optimizer.load_state({"exp_avg": [m], "exp_avg_sq": [v], "steps": [step - 1]})
    p.grad = torch.tensor(g) if twin is TORCH else g.copy()
    optimizer.step()
    state = optimizer.state()
    theirs = [twin.array(p), np.array(state["exp_avg"][0]), np.array(state["exp_avg_sq"][0])]
    mine = P["adamw_step"](w, g, m, v, step, **chosen)
    magnitudes = adamw_step(w, g, m, v, step, 0.1, (0.8, 0.95), eps, decay)[1]
    for name, a, b, size in zip(("weight", "m", "v"), mine, theirs, magnitudes, strict=True):
        assert_within(a, b, 2.0 * bound(size, FLOAT64), name)
