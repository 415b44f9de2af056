"""The oracle of single operations: right ones pass, wrong ones are named with a small example."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.oracle import ops
from gpt_parity.oracle.ops_examples import INPUTS
from parity_tests.ops_by_hand import (
    FEW,
    NUMPY,
    RESULTS,
    TORCH,
    Array,
    altered,
    both_dtypes,
    causal_attention,
    gelu,
    linear,
    softmax,
    softmax_that,
    tril,
)
from parity_tests.wrong_ops import WRONG

every_op = pytest.mark.parametrize("name", ops.OPS)


@pytest.mark.reference("by hand")
@every_op
@both_dtypes
def test_right_in_numpy(name: str, dtype: str) -> None:
    report = ops.OPS[name].check(NUMPY[name], dtype, FEW)
    assert report.ok and report.complete, report


@pytest.mark.reference("other backend")
@every_op
@both_dtypes
def test_right_in_torch(name: str, dtype: str) -> None:
    report = ops.OPS[name].check(TORCH[name], dtype, FEW)
    assert report.ok and report.complete, report


def test_every_operation_is_tried_here() -> None:
    assert set(ops.OPS) == set(INPUTS) == set(NUMPY) == set(TORCH) == set(RESULTS)
    assert all(getattr(ops, name) is op for name, op in ops.OPS.items())
    assert {name for name, *_ in WRONG} == set(ops.OPS)
    assert all(sum(name == wrong for wrong, *_ in WRONG) >= 2 for name in ops.OPS)


@pytest.mark.parametrize(
    ("name", "i"), [(name, i) for name, names in RESULTS.items() for i in range(len(names))]
)
def test_every_result_is_judged_by_itself(name: str, i: int) -> None:
    report = ops.OPS[name].check(altered(name, i, lambda x: x * (1.0 + 1e-12)), examples=FEW)
    assert [j.name for j in report.judgements if not j.ok] == [f"{name} {RESULTS[name][i]}"]


@pytest.mark.parametrize(("name", "function", "result", "example"), WRONG)
def test_wrong_is_named_with_a_small_example(
    name: str, function: Callable[..., Any], result: str, example: str
) -> None:
    report = ops.OPS[name].check(function, examples=100)
    assert not report.ok and report.first is not None
    assert report.first.name == f"{name} {result}"
    (note,) = report.notes
    assert note.startswith(f"smallest example found: {example}"), note
    assert f"first: {name} {result}" in str(report) and note in str(report)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda g: 0.0 * g + 1.0, "the cotangent is ignored, as if it were 1"),
        (lambda g: -g, "the gradient has the wrong sign"),
        (lambda g: g + g, "the gradient is twice too large"),
        (lambda g: g / 2.0, "the gradient is half as large as it should be"),
        (lambda g: g - g, "the gradient is zero: never computed, or never written"),
        (lambda g: 1.1 * g, None),
    ],
)
@pytest.mark.parametrize("name", ("matmul", "cross_entropy", "causal_attention"))
def test_a_wrong_cotangent_is_told(
    name: str, change: Callable[[Array], Array], hint: str | None
) -> None:
    def function(*inputs: Any) -> Any:
        *rest, g = inputs
        return NUMPY[name](*rest, np.asarray(change(g)))

    report = ops.OPS[name].check(function, examples=25)
    assert not report.ok
    assert report.hints == ((hint,) if hint else ())


def writes(x: Array, g: Array) -> Any:
    result = softmax(x, g)
    x -= x.max(axis=-1, keepdims=True)
    return result


def writes_cotangent(x: Array, g: Array) -> Any:
    result = softmax(x, g)
    g *= 2
    return result


# Function, dtype, the judgement that fails first, its reason.
MISFITS = {
    "input": (writes, "float64", "softmax", r"writes into input 0 \(x\)"),
    "cotangent": (writes_cotangent, "float64", "softmax", r"writes into input 1 \(cotangent\)"),
    "double": (
        softmax_that(lambda x, g, p, d: (p.astype(np.float64), d)), "float32", "softmax output",
        "dtype float64, needed float32",
    ),
    "single": (
        softmax_that(lambda x, g, p, d: (p, d.astype(np.float32))), "float64", "softmax dx",
        "dtype float32, needed float64",
    ),
    "axis": (
        softmax_that(lambda x, g, p, d: (p, d[None])), "float64", "softmax dx",
        r"shape \(1, 1\), needed \(1,\)",
    ),
    "sum": (
        softmax_that(lambda x, g, p, d: (p.sum(), d)), "float64", "softmax output",
        r"shape \(\), needed \(1,\)",
    ),
    "nan": (
        softmax_that(lambda x, g, p, d: (p, d * math.nan)), "float32", "softmax dx",
        r"nan at \(0,\), needed 0",
    ),
    "inf": (
        softmax_that(lambda x, g, p, d: (p - math.inf, d)), "float64", "softmax output",
        r"-inf at \(0,\), needed 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_results_that_are_no_results(case: str) -> None:
    function, dtype, name, reason = MISFITS[case]
    report = ops.softmax.check(function, dtype, FEW)
    first = report.first
    assert first is not None and first.name == name and re.fullmatch(reason, first.reason)
    assert f"first: {name}, {first.reason}" in str(report)
    assert report.notes == ("smallest example found: x (1,) normal; seed 0",)
    assert math.isinf(first.ratio) and sum(not j.ok for j in report.judgements) == 1


@pytest.mark.parametrize("name", ("adamw_step", "clip_grad_norm"))
def test_optimizers_that_write_into_their_inputs(name: str) -> None:
    def in_place(first: Any, *rest: Any) -> Any:
        returned = NUMPY[name](first, *rest)
        (first[0] if name == "clip_grad_norm" else first)[...] = 7.0
        return returned

    report = ops.OPS[name].check(in_place, examples=FEW)
    assert report.first is not None and report.first.name == name
    assert report.first.reason.startswith("writes into input 0 (")


@pytest.mark.parametrize("name", [name for name in RESULTS if len(RESULTS[name]) > 1])
def test_none_is_not_judged(name: str) -> None:
    report = ops.OPS[name].check(altered(name, 1, lambda x: None), examples=FEW)
    assert report.ok and not report.complete
    unjudged = [j.name for j in report.judgements if not j.judged]
    assert unjudged == [f"{name} {RESULTS[name][1]}"]


def test_gradients_that_are_left_out_altogether() -> None:
    report = ops.linear.check(lambda x, w, b, g: (x @ w.T + b, None), examples=FEW)
    assert [j.judged for j in report.judgements] == [True, False, False, False] and report.ok
    report = ops.linear.check(
        lambda *inputs: (None, (linear(*inputs)[1][0] * 2, None, None)), examples=FEW
    )
    assert report.first is not None and report.first.name == "linear dx"


RAISES = {
    "nothing": (lambda x, g: (None, None), ValueError,
                "softmax: got None for every result, needed one to judge"),
    "array": (lambda x, g: x, TypeError, "softmax: got ndarray, needed (output, gradients)"),
    "three": (lambda x, g: (x, g, g), TypeError,
              "softmax: got tuple of 3, needed (output, gradients)"),
    "two gradients": (lambda x, g: (x, (g, g)), TypeError,
                      "softmax: got tuple of 2 of gradients, needed a tuple of 1 (dx)"),
    "own": (lambda x, g: {}["key"], KeyError, "'key'"),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISES)
def test_what_is_raised_says_for_which_example(case: str) -> None:
    function, kind, message = RAISES[case]
    with pytest.raises(kind) as caught:
        ops.softmax.check(function, "float32")
    assert str(caught.value) == message
    assert caught.value.__notes__ == [
        "softmax in float32, smallest example found: x (1,) normal; seed 0"
    ]


def test_other_operations_say_what_they_need() -> None:
    with pytest.raises(TypeError, match=r"linear: got ndarray of gradients, needed a tuple of 3"):
        ops.linear.check(lambda x, w, b, g: (x, g))
    with pytest.raises(TypeError, match=r"got tuple of 2, needed \(weight, exp_avg, exp_avg_sq\)"):
        ops.adamw_step.check(lambda *arguments: arguments[:2])
    for returned in (1.0, ([], 1.0), (None, None)):
        with pytest.raises(TypeError, match=r"clip_grad_norm: got .*, needed \(list of 1 arrays"):
            ops.clip_grad_norm.check(lambda *arguments, returned=returned: returned)
    with pytest.raises(ValueError, match="dtype: got float16, needed one of float32, float64"):
        ops.softmax.check(softmax, "float16")


def test_a_function_that_does_not_repeat_itself() -> None:
    calls = []

    def fails_once(x: Array, g: Array) -> Any:
        calls.append(x)
        p, d = softmax(x, g)
        return p, d + 1.0 if len(calls) == 5 else d

    report = ops.softmax.check(fails_once)
    assert report.first is not None and report.first.name == "softmax dx"
    assert report.notes[1] == (
        "not repeatable: called again on the same example, the function did not fail"
    )


def test_examples_are_the_same_every_time_and_held_by_float32() -> None:
    def seen(dtype: str) -> list[list[Array]]:
        calls: list[list[Array]] = []

        def function(q: Array, k: Array, v: Array, g: Array) -> Any:
            assert {x.dtype.name for x in (q, k, v, g)} == {dtype}
            calls.append([x.astype(np.float64) for x in (q, k, v, g)])
            return causal_attention(q, k, v, g)

        assert ops.causal_attention.check(function, dtype, FEW).ok
        return calls

    first, again, single = seen("float64"), seen("float64"), seen("float32")
    assert len(first) >= FEW
    for a, b, c in zip(first, again, single, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(x, z)


def test_examples_reach_large_scales_and_every_structure() -> None:
    largest, masked, shapes = [], [], set()

    def function(x: Array, g: Array) -> Any:
        largest.append(np.abs(x[np.isfinite(x)]).max(initial=0.0))
        masked.append(np.isinf(x).any())
        shapes.add(x.ndim)
        return softmax(x, g)

    ops.softmax.check(function)
    assert max(largest) > 1e4 and min(largest) < 1e-2
    assert sum(masked) > 5 and shapes == {1, 2, 3}


def test_a_summary_prefers_what_was_judged_and_then_the_largest_error() -> None:
    calls = []

    def once(x: Array, value: float, g: Array) -> Any:
        calls.append(x)
        output, dx = tril(x, value, g)
        return output, dx if len(calls) == 2 else None

    report = ops.tril.check(once, examples=FEW)
    assert len(calls) > 2 and report.ok and report.complete
    assert not any(j.exact_zero for j in report.judgements)

    def once_off(x: Array, g: Array) -> Any:
        calls.append(x)
        return x * 0.0 + gelu(x, g)[0] * (1.0 + (len(calls) == 5) * 2.0**-51), None

    calls.clear()
    alone = ops.gelu.check(lambda x, g: (gelu(x, g)[0], None), examples=FEW).worst.ratio
    assert ops.gelu.check(once_off, examples=FEW).worst.ratio > alone


ROOT = Path(__file__).resolve().parent.parent


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gpt_parity.oracle.ops_examples", "gpt_parity.oracle.examples"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    needed = "oracle.ops needs Hypothesis; install it with: python -m pip install hypothesis"
    with pytest.raises(ImportError, match=f"^{re.escape(needed)}$"):
        ops.softmax.check(softmax)


def test_importing_the_oracle_imports_neither_hypothesis_nor_torch() -> None:
    code = """
import sys
from gpt_parity.oracle import compare_one, model_ops, ops
assert not {"torch", "hypothesis"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
