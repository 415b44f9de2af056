"""The oracle of single operations: every use in one pass of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import torch_impl
from gpt_parity.backends import build_model
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.model_ops import IN_MODELS, check_ops
from gpt_parity.oracle.trace import trace
from gpt_parity.weights import set_weights
from parity_tests.ops_by_hand import (
    NUMPY,
    TORCH,
    Array,
    altered,
    both_dtypes,
    layer_norm,
    softmax,
    softmax_that,
)
from parity_tests.wrong_ops import erf_gelu


@pytest.fixture(scope="module")
def bundle() -> SimpleNamespace:
    config, rng = GPTConfig(11, 5, 7, 2), np.random.default_rng(0)
    weights = build_model("numpy", config, dtype="float64").state_dict()
    return SimpleNamespace(
        config=config,
        weights={name: 3.0 * weight for name, weight in weights.items()},
        tokens=rng.integers(0, 11, (3, 5)),
        targets=rng.integers(0, 11, (3, 5)),
    )


def block(i: int) -> list[str]:
    attention, feed_forward = f"transformers.{i}.attention", f"transformers.{i}.feed_forward"
    return [
        f"{attention} scores", f"{attention}.mask", f"{attention}.softmax", f"{attention} context",
        f"{attention}.output", f"{feed_forward}.input", f"{feed_forward}.gelu",
        f"{feed_forward}.output",
    ]  # fmt: skip


USES = [
    "embedding.embedding", "embedding.positional_embedding", *block(0), *block(1),
    "output.output", "loss",
]  # fmt: skip


@both_dtypes
@pytest.mark.parametrize("functions", (NUMPY, TORCH), ids=("numpy", "torch"))
def test_all_uses_in_a_model(
    bundle: SimpleNamespace, functions: dict[str, Any], dtype: str
) -> None:
    report = check_ops({name: functions[name] for name in IN_MODELS}, bundle, dtype)
    assert report.ok and report.complete and not report.notes, report
    assert [j.name for j in report.judgements if j.kind == "forward"] == [
        f"{use} output" for use in USES
    ]
    gradients = [j.name.rsplit(" ", 1) for j in report.judgements if j.kind == "gradient"]
    assert list(dict.fromkeys(use for use, _ in gradients)) == USES
    assert all(j.ratio < 1.0 for j in report.judgements)
    exact_zeros = {j.name.rsplit(" ", 1)[0] for j in report.judgements if j.exact_zero}
    assert not exact_zeros


@both_dtypes
def test_two_broken_operations_are_listed_wherever_they_are_used(
    bundle: SimpleNamespace, dtype: str
) -> None:
    functions = {name: NUMPY[name] for name in IN_MODELS}
    functions["softmax"] = softmax_that(lambda x, g, p, d: (p, p * g))
    functions["gelu"] = erf_gelu
    functions["matmul"] = altered("matmul", 2, lambda d: d * 1.001)
    report = check_ops(functions, bundle, dtype)
    expected = [f"transformers.{i}.feed_forward.gelu output" for i in range(2)]
    for i in range(2):
        attention = f"transformers.{i}.attention"
        expected += [f"{attention} scores db", f"{attention}.softmax dx", f"{attention} context db"]
    assert [j.name for j in report.judgements if not j.ok] == expected
    assert report.notes == tuple(f"out of tolerance: {name}" for name in expected)
    assert report.first is not None and report.first.name == expected[0]


def test_one_operation_of_a_model_alone(bundle: SimpleNamespace) -> None:
    report = check_ops({"tril": NUMPY["tril"]}, bundle, "float32")
    names = [f"transformers.{i}.attention.mask {result}" for result in ("output", "dx")
             for i in range(2)]  # fmt: skip
    assert [j.name for j in report.judgements] == names


def test_what_an_operation_of_a_model_raises(bundle: SimpleNamespace) -> None:
    with pytest.raises(KeyError) as caught:
        check_ops({"gelu": lambda x, g: {}["key"]}, bundle)
    assert caught.value.__notes__ == [
        "gelu in float64 as transformers.0.feed_forward.gelu, with the reference's operands"
    ]
    needed = f"needed some of {', '.join(IN_MODELS)}"
    with pytest.raises(ValueError, match=f"^check_ops: got 'causal_attention', {needed}$"):
        check_ops({"softmax": softmax, "causal_attention": softmax}, bundle)
    with pytest.raises(ValueError, match=f"^check_ops: got no function, {needed}$"):
        check_ops({}, bundle)
    with pytest.raises(ValueError, match=r"^check_ops: the model uses no layer_norm$"):
        check_ops({"layer_norm": layer_norm}, bundle)


@pytest.mark.reference("other backend")
def test_uses_in_a_model_are_fed_what_the_trace_holds(bundle: SimpleNamespace) -> None:
    """Operands and cotangents against values and total derivatives of PyTorch's own pass."""
    config = bundle.config
    model = build_model("torch", config, dtype="float64")
    set_weights(model, bundle.weights)
    found = trace(model, torch_impl.GPTLoss(), bundle.tokens, bundle.targets)
    seen: dict[str, list[tuple[Any, ...]]] = {name: [] for name in IN_MODELS}

    def noting(name: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            seen[name].append(arguments)
            return NUMPY[name](*arguments)

        return function

    assert check_ops({name: noting(name) for name in IN_MODELS}, bundle).ok

    def near(mine: Array, name: str, part: dict[str, Array]) -> None:
        np.testing.assert_allclose(mine, part[name], rtol=1e-9)

    for i in range(config.blocks):
        attention = f"transformers.{i}.attention"
        x, g = seen["softmax"][i]
        near(x, f"{attention}.mask.output", found.values)
        near(g, f"{attention}.softmax.output", found.gradients)
        x, value, g = seen["tril"][i]
        assert value == config.mask_value
        near(x, f"{attention}.mask.input", found.values)
        near(g, f"{attention}.mask.output", found.gradients)
        weights, x, g = seen["matmul"][2 * i + 1]
        near(weights, f"{attention}.softmax.output", found.values)
        near(g, f"{attention}.output.input", found.gradients)
        a, b, g = seen["matmul"][2 * i]
        np.testing.assert_array_equal(a, x)
        np.testing.assert_array_equal(b, x.swapaxes(-1, -2))
        scale = math.sqrt(config.embedding_size)
        np.testing.assert_allclose(g * scale, found.gradients[f"{attention}.mask.input"], rtol=1e-9)
    logits, targets, g = seen["cross_entropy"][0]
    near(logits, "output.output.output", found.values)
    np.testing.assert_array_equal(targets, bundle.targets)
    assert g == 1.0 and g.shape == ()
    assert all(x.flags.c_contiguous for calls in seen.values() for inputs in calls
               for x in inputs if isinstance(x, np.ndarray))  # fmt: skip
