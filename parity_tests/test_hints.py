"""What the oracle says of planted mistakes: the first wrong tensor, and verified explanations."""

from __future__ import annotations

import ast
import inspect
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_parity.oracle import likeness
from gpt_parity.oracle.gpt2_mistakes import GPT2_HYPOTHESES
from gpt_parity.oracle.gpt2_structures import STRUCTURES
from gpt_parity.oracle.mistakes import HYPOTHESES
from gpt_parity.oracle.rounding import UNITS, rounded
from gpt_parity.oracle.step_mistakes import STEP_MISTAKES
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.record import record
from parity_tests.candidates import random_bundle, submission
from parity_tests.planted import PlantedBug, planted
from parity_tests.planted.gpt2_hint_rows import GPT2_ROWS, HINT_ROWS
from parity_tests.planted.hint_rows import GPT_ROWS, HintRow, Models, diagnose, low, model
from parity_tests.planted.table import TORCH, TORCH_GPT, TORCH_LAYERS

MOST_OTHERS = 2  # explanations that cannot be told apart, in small models
MODELS = 4  # drawn once for all rows that need the same kind of model


@pytest.mark.parametrize("row", HINT_ROWS, ids=lambda row: row.name)
def test_a_planted_mistake_is_named(row: HintRow) -> None:
    seed = zlib.crc32(row.name.encode())
    parts = list(row.first)
    asked = [(parts[0], seed % MODELS), (parts[-1], (seed + 1) % MODELS)]
    # Most rows of a GPT-2 are mistakes that a row of the first model has too.
    for part, k in asked[: 1 if row in GPT2_ROWS else 2]:
        said = diagnose(row, part, k, "float64")
        assert said.first_right, f"{part} of model {k}: {said.first}"
        assert said.hint_right, f"{part} of model {k}: {said.others}"
        assert len(said.others) <= MOST_OTHERS, f"{part} of model {k}: {said.others}"


@pytest.mark.parametrize("name", ["gelu-erf", "mask-fill-weak", "hint-scale-forgotten"])
def test_gradients_alone_betray_a_mistake_in_a_value(name: str) -> None:
    row = next(row for row in HINT_ROWS if row.name == name)
    bundle = model(row.models, 1)
    with planted(row.bug):
        mine = submission(row.backend, bundle, "float64", "parameters")
    report = check_arrays({k: a for k, a in mine.items() if k != "loss"}, bundle)
    assert any(row.is_given(hint) for hint in report.hints), str(report)
    (operation,) = (note for note in report.notes if note.startswith("operation: "))
    # All of the forward pass and some of the backward pass stand between what was handed in.
    assert re.match(r"operation: one of \d+, tokens at embedding\.embedding to vjp of ", operation)


def test_names_of_rows_are_unique() -> None:
    names = [row.name for row in HINT_ROWS]
    assert len(set(names)) == len(names)


def test_every_mistake_has_a_row_for_every_model_that_may_have_it() -> None:
    steps = {description for description, _ in STEP_MISTAKES}
    assert {h.text(False) for h in HYPOTHESES} | steps <= {row.mistake for row in GPT_ROWS}
    of_gpt2 = {h.text(True) for h in (*HYPOTHESES, *GPT2_HYPOTHESES)} | steps
    rows = {re.sub(", (at .*|in all blocks)$", "", row.mistake) for row in GPT2_ROWS}
    assert of_gpt2 | {*STRUCTURES} <= rows


def test_every_look_of_a_tensor_has_a_row() -> None:
    looks = list(_looks())
    assert len(looks) >= len(likeness.TENSOR_HINTS)
    for start in looks:
        assert any(row.hint.startswith(re.escape(start)) for row in HINT_ROWS), start


def _looks() -> Iterator[str]:
    """How the texts begin that explanations of a tensor by itself can have."""
    for function in likeness.TENSOR_HINTS:
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                text = node.value.elts[0]
                first = text.values[0] if isinstance(text, ast.JoinedStr) else text
                if isinstance(first, ast.FormattedValue):
                    yield str(getattr(likeness, ast.unparse(first.value)))
                else:
                    yield ast.literal_eval(first)


def test_every_factor_has_a_row() -> None:
    of_gpt2 = [name for name, _ in likeness.factors(model(Models(None, 0, False, (), True), 0))]
    assert {"H", "D", "sqrt(D)"} <= {name.partition(" = ")[0] for name in of_gpt2}
    of_gpt = [name for name, _ in likeness.factors(model(Models(None, 0, False, ()), 0))]
    for name in (*of_gpt, *of_gpt2):
        assert any(row.is_given(f"a constant factor: {name}") for row in HINT_ROWS), name


@pytest.mark.parametrize("name", ["tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_both_ways_of_rounding_agree(name: str, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    assert low(x, name).dtype == dtype
    assert not np.array_equal(low(x, name), x)
    np.testing.assert_array_equal(low(x, name), rounded(x, UNITS[name]))


@settings(max_examples=12)  # each draws a reference, and judges eight correct candidates by it
@given(st.booleans(), st.integers(0, 2**31), st.integers(0, 2))
def test_a_correct_candidate_passes_without_a_hint(gpt2: bool, seed: int, steps: int) -> None:
    bundle = random_bundle(np.random.default_rng(seed), steps, gpt2=gpt2)
    for backend in ("numpy", "torch"):
        for dtype in ("float64", "float32"):
            for part in ("all", "parameters"):
                report = check_arrays(submission(backend, bundle, dtype, part), bundle)
                assert report.ok, f"{backend} {dtype} {part}: {report}"
                assert report.hints == ()


@pytest.mark.parametrize("part", ["all", "parameters"])
@pytest.mark.parametrize("seed", range(MODELS))
@pytest.mark.parametrize("gpt2", [False, True])
def test_an_unknown_mistake_gets_no_hint(part: str, seed: int, gpt2: bool) -> None:
    bundle = model(Models(None, 0, False, (), gpt2), seed)
    end = "grad/norm.weight" if gpt2 else "grad/output.output.weight"
    for key in (end, "grad/transformers.0.feed_forward.input.weight"):
        mine = submission("torch", bundle, "float64", part)
        noise = np.random.default_rng(seed).standard_normal(mine[key].shape)
        mine[key] = mine[key] + 0.3 * np.linalg.norm(mine[key]) * noise / np.linalg.norm(noise)
        report = check_arrays(mine, bundle)
        assert report.first is not None
        assert report.first.name == key
        assert report.hints == ()


def test_the_long_run_is_recorded_in_its_own_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "oracle.md"
    record("One", ["one"], page)
    page.write_text(f"# Oracle\n\nProse.\n\n{page.read_text()}", encoding="utf-8")
    record("Two", ["two"], page)
    record("One", ["other"], page)
    text = page.read_text(encoding="utf-8")
    assert re.findall("^#+ .*", text, re.MULTILINE) == ["# Oracle", "## One", "## Two"]
    assert "Prose." in text and "two" in text and "\nother\n" in text and "\none\n" not in text


FORWARD = 'approximate="tanh")\n    self.forward = '
UNKNOWN = {
    name: (f"{TORCH_LAYERS}:GELU.__init__", 'approximate="tanh")', FORWARD + function)
    for name, function in (
        ("relu", "nn.functional.relu"), ("silu", "nn.functional.silu"),
        ("sigmoid", "lambda x: x * (1.702 * x).sigmoid()"),
    )
} | {
    "scores": (f"{TORCH_GPT}:GPTAttention.forward", "math.sqrt(", "1.1 * math.sqrt("),
    "gpt2-scores": ("torch_impl.gpt2:GPT2Attention.forward", "math.sqrt(", "1.1 * math.sqrt("),
    "gpt2-sigmoid": (f"{TORCH_LAYERS}:GELU.__init__", 'approximate="tanh")',
                     FORWARD + "lambda x: x * (1.702 * x).sigmoid()"),
    # The norm of what the branch gives, before the sum.
    "gpt2-norm-of-branch": ("torch_impl.gpt2:GPT2Transformer.forward",
                            "self.attention(self.attention_norm(x))",
                            "self.attention_norm(self.attention(x))"),
    "smoothing": (f"{TORCH}:cross_entropy", "targets.reshape(-1))",
                  "targets.reshape(-1), label_smoothing=0.1)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, id=f"{name}-{dtype}",
            marks=[pytest.mark.slow] if name.startswith("gpt2") and dtype != "float64" else [],
        )
        for name in UNKNOWN for dtype in ("float64", "float32", "tf32", "float16")
    ],
)  # fmt: skip
def test_a_mistake_that_is_not_in_the_table_gets_no_hint(name: str, dtype: str) -> None:
    """The loss is wrong first, and one number is met by one of many explanations by chance."""
    bug = PlantedBug(name, *UNKNOWN[name], name, frozenset())
    carrier = "float64" if dtype == "float64" else "float32"
    seen = 0
    for seed in range(6):
        bundle = model(Models(None, 0, False, (), name.startswith("gpt2")), seed)
        with planted(bug):
            mine = submission("torch", bundle, carrier, "parameters")
        try:
            report = check_arrays(mine, bundle, dtype)
        except ValueError as error:
            assert "no gradient can be judged" in str(error)
            continue
        seen += not report.ok
        assert report.hints == (), f"model {seed}: {report}"
    assert seen or dtype in ("tf32", "float16")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_loss_alone_is_explained_only_where_many_digits_agree(dtype: str) -> None:
    """In float32, a loss a little off is near what one of many roundings would make of it."""
    for seed in range(4):
        bundle = model(Models(None, 0, False, (), False), seed)
        (doubled, *off) = (
            check_arrays({"loss": (bundle.arrays["loss"] * factor).astype(dtype)}, bundle, dtype)
            for factor in (2.0, 1.001, 1.0001)
        )
        if seed < 2:  # others allow it too much in float32
            assert any("a constant factor" in hint for hint in doubled.hints), str(doubled)
        assert [report.hints for report in off] == [(), ()]
        assert not any(report.ok for report in off)
