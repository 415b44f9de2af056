"""One array judged against one: the line of `cmp`, and the numbers of a judgement."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gpt_parity.oracle.compare_one import cmp
from gpt_parity.oracle.judge import Expected, judge
from gpt_parity.oracle.tolerance import Tolerance
from parity_tests.ops_by_hand import Array

# --- one line


class StubBundle:
    """What `cmp` needs of a bundle: one matrix, of which one element may be off by 1e-3."""

    array = np.array([[3.0, 4.0], [-1e9, 12.0]])

    def reference(self, key: str, dtype: str = "float64") -> tuple[Array, Tolerance]:
        assert key == "value/x"
        return self.array, Tolerance(1e-3 if dtype == "float64" else 1e-2, np.full(2, 1e-1))

    def kind(self, key: str) -> str:
        return "forward"

    def kept(self, key: str) -> Array:
        return np.array([[True, True], [False, True]])


LINES = {
    "same": (lambda x: x.copy(), "x: exact (tolerance of rounding the result alone, float64)"),
    "single": (lambda x: x.astype(np.float32),
               "x: exact (tolerance of rounding the result alone, float32)"),
    "torch": (lambda x: torch.tensor(x, requires_grad=True),
              "x: exact (tolerance of rounding the result alone, float64)"),
    # 12 u ||x|| = 12 * 2^-53 * 5 = 6.66e-15, of the row: 4 ulp of 4 are 3.55e-15.
    "near": (lambda x: x + np.array([[0.0, 2.0**-48], [0.0, 0.0]]),
             "x: not exact, agrees, 0.533 of tolerance, worst at (0, 1): off by 3.6e-15 "
             "(tolerance of rounding the result alone, float64)"),
    "far": (lambda x: x + np.array([[0.0, 0.0], [0.0, 0.5]]),
            "x: not exact, differs, 2.89e+13 of tolerance, worst at (1, 1): off by 0.5 "
            "(tolerance of rounding the result alone, float64)"),
    "shape": (lambda x: x[0].copy(),
              "x: not exact, shape (2,), needed (2, 2) "
              "(tolerance of rounding the result alone, float64)"),
    "nan": (lambda x: np.where(x == 4.0, math.nan, x),
            "x: not exact, differs, not finite, worst at (0, 1): off by inf "
            "(tolerance of rounding the result alone, float64)"),
}  # fmt: skip


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("case", LINES)
def test_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, line = LINES[case]
    x = np.array([[3.0, 4.0], [5.0, 12.0]])
    (judgement,) = cmp("x", change(x), x).judgements
    assert capsys.readouterr().out == line + "\n"
    assert judgement.name == "x" and judgement.ok == ("differs" not in line and "shape" not in line)


@pytest.mark.reference("by hand")
def test_one_line_with_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = StubBundle()
    mine = bundle.array.copy()
    mine[0, 1] += 2.0**-9
    for x, dtype, line in (
        (mine, None, "not exact, differs, 1.95 of tolerance, worst at (0, 1): off by 0.002 "
         "(tolerance of the bundle, float64)"),
        (mine.astype(np.float32), None, "not exact, agrees, 0.195 of tolerance, worst at (0, 1): "
         "off by 0.002 (tolerance of the bundle, float32)"),
        (mine.astype(np.float32), "float64", "not exact, dtype float32, needed float64 "
         "(tolerance of the bundle, float64)"),
        (np.zeros((2, 2)), None, "not exact, differs, masked positions differ, worst at (1, 0): "
         "off by 1e+09 (tolerance of the bundle, float64)"),
    ):  # fmt: skip
        report = cmp("value/x", x, bundle, dtype)
        assert capsys.readouterr().out == f"value/x: {line}\n"
        assert report.ok == ("agrees" in line)


def test_one_line_needs_two_arrays_of_a_known_dtype() -> None:
    x = np.ones(3)
    with pytest.raises(ValueError, match="x: candidate and reference are one array, needed two"):
        cmp("x", x, x)
    with pytest.raises(ValueError, match="x: dtype: got int64, needed one of float32, float64"):
        cmp("x", np.arange(3), x)
    with pytest.raises(ValueError, match="needed one that is not"):
        cmp("x", np.zeros(3), np.zeros(3))


def test_one_line_is_exact_where_rounding_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([0.1, 0.2])
    cmp("x", x.astype(np.float32), x)
    assert capsys.readouterr().out.startswith("x: exact (")


# --- judgements


@pytest.mark.reference("by hand")
def test_a_judgement_is_of_the_element_furthest_out_in_units_of_its_bound() -> None:
    expected = Expected(
        np.array([[1.0, 1000.0], [0.0, -math.inf]]), np.array([[0.125, 8.0], [0, 0]])
    )
    mine = np.array([[1.5, 1004.0], [0.0, -math.inf]])
    found = judge("x", "forward", mine, expected, "float64")
    assert (found.ratio, found.row, found.exact_zero, found.ok) == (4.0, (0, 0), False, False)
    np.testing.assert_allclose(
        found.error, math.sqrt(0.25 + 16.0) / math.sqrt(1.0 + 1e6), rtol=1e-14
    )
    mine[0] = 1.0625, 1000.0
    assert judge("x", "forward", mine, expected, "float64").ratio == 0.5
    mine[1, 0] = 1e-300
    assert judge("x", "forward", mine, expected, "float64").ratio == math.inf
    for wrong in (math.inf, 0.0, math.nan):
        mine[1] = 0.0, wrong
        found = judge("x", "forward", mine, expected, "float64")
        assert found.row == (1, 1) and found.reason == f"{wrong} at (1, 1), needed -inf"


@pytest.mark.reference("by hand")
def test_zeros_that_are_exact() -> None:
    for bound, allowed in ((0.0, True), (1e-3, False)):
        found = judge("x", "gradient", np.zeros(2), Expected(np.zeros(2), bound), "float64")
        assert found.ok and found.exact_zero is allowed
