"""What `oracle.ops` tries an operation on, and the search for the smallest example that fails.

Simplest first, since failures shrink to what is drawn first: small sizes, plain normal numbers of
scale 1, seed 0. Everything is laid out contiguously. This file needs Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from gpt_parity.oracle.examples import (
    STRUCTURES,
    Example,
    Operand,
    Plan,
    examples,
    exponents,
    ids,
    seeds,
    shapes,
    sizes,
)

CONTIGUOUS = ("contiguous",)
FILLS = (0.0, 1.5, -1e9, -float("inf"))
BETAS = ((0.9, 0.999), (0.5, 0.75), (0.8, 0.0), (0.0, 0.5))
BY_SCALE = tuple(s for s in STRUCTURES if s != "adversarial")


def leading(smallest: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes of `smallest` to 2 leading axes."""
    return st.integers(smallest, 2).flatmap(lambda count: sizes(count, 3))


@st.composite
def matrix_pairs(draw: st.DrawFn) -> Plan:
    m, k, n = draw(sizes(3))
    batch = draw(leading())
    return ((*batch, m, k), (*batch, k, n)), ()


@st.composite
def linear_maps(draw: st.DrawFn) -> Plan:
    inputs, outputs = draw(sizes(2))
    return ((*draw(leading(1)), inputs), (outputs, inputs), (outputs,)), ()


@st.composite
def normalised(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(1))
    return (shape, shape[-1:], shape[-1:]), ()


@st.composite
def lookups(draw: st.DrawFn) -> Plan:
    table = draw(sizes(2))
    return (table,), (draw(ids(draw(leading(1)), table[0], CONTIGUOUS)),)


@st.composite
def classified(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(2))
    return (shape,), (draw(ids(shape[:-1], shape[-1], CONTIGUOUS)),)


@st.composite
def attended(draw: st.DrawFn) -> Plan:
    t, d_k, d_v = draw(sizes(3))
    batch = draw(leading())
    return ((*batch, t, d_k), (*batch, t, d_k), (*batch, t, d_v)), ()


@st.composite
def adamw_steps(draw: st.DrawFn) -> Example:
    """Weight, gradient and both moments of one array: zeros before the first step."""
    shape = draw(shapes(1))
    step = draw(st.sampled_from((1, 2, 3, 10, 1000)))
    weight, grad = (
        Operand(shape, draw(st.sampled_from(BY_SCALE)), draw(exponents(10))) for _ in range(2)
    )
    exp_avg = replace(grad, structure="zeros" if step == 1 else "normal")
    exp_avg_sq = replace(
        grad, structure="zeros" if step == 1 else "squares", exponent=2 * grad.exponent
    )
    rest = (
        step, draw(st.sampled_from((1.0, 0.1, 1e-3))), draw(st.sampled_from(BETAS)),
        draw(st.sampled_from((1e-3, 1e-8))), draw(st.sampled_from((0.0, 0.3, 0.01))),
    )  # fmt: skip
    return Example((weight, grad, exp_avg, exp_avg_sq), rest, draw(seeds))


@st.composite
def gradient_lists(draw: st.DrawFn) -> Example:
    """One to four gradients and the largest norm allowed."""
    scale = draw(exponents(20))
    structure = draw(st.sampled_from(BY_SCALE))
    grads = draw(st.lists(shapes(1).map(lambda s: Operand(s, structure, scale)), min_size=1,
                          max_size=4))  # fmt: skip
    return Example(tuple(grads), (draw(st.sampled_from((0.1, 1.0, 50.0))),), draw(seeds))


def drawn(
    plan: st.SearchStrategy[Plan], limit: int = 20, structures: tuple[str, ...] = STRUCTURES
) -> st.SearchStrategy[Example]:
    return examples(plan, limit, structures, layouts=CONTIGUOUS)


# Scales end where an honest float32 implementation could overflow, or where rounding alone could
# choose the winner of a softmax.
INPUTS: dict[str, st.SearchStrategy[Example]] = {
    "matmul": drawn(matrix_pairs()),
    "linear": drawn(linear_maps()),
    "layer_norm": drawn(normalised()),
    "embedding": drawn(lookups()),
    "softmax": drawn(shapes(1).map(lambda s: ((s,), ())), 14, (*STRUCTURES, "masked")),
    "tril": drawn(st.tuples(shapes(2, 4).map(lambda s: (s,)), st.tuples(st.sampled_from(FILLS)))),
    "gelu": drawn(shapes(1).map(lambda s: ((s,), ()))),
    "cross_entropy": drawn(classified(), 14),
    "causal_attention": drawn(attended(), 3, BY_SCALE),
    "adamw_step": adamw_steps(),
    "clip_grad_norm": gradient_lists(),
}


class _Failed(Exception):
    """An example failed: always raised from one place, so that all failures are one to shrink."""


def smallest_failure(
    inputs: st.SearchStrategy[Example], fails: Callable[[Example], bool], count: int
) -> bool:
    """Try `fails` on up to `count` examples, always the same ones.

    Returns whether one failed; the last call was then of the smallest one that was found. What
    `fails` raises goes through, from the smallest example too. Raises Hypothesis's Flaky where an
    example does not fail again.
    """

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, print_blob=False,
        report_multiple_bugs=False, verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(inputs)
    def attempt(example: Example) -> None:
        if fails(example):
            raise _Failed

    try:
        attempt()
    except _Failed:
        return True
    return False


__all__ = ["INPUTS", "Flaky", "smallest_failure"]
