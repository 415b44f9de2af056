"""Hand-written operations at every place where a GPT-2 uses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model, load_backend
from gpt_parity.oracle import Bundle, check_ops
from gpt_parity.oracle.model_ops import IN_MODELS
from gpt_parity.oracle.subject import export
from gpt_parity.oracle.trace import trace
from gpt_parity.oracle_config import ExportConfig
from gpt_parity.weights import set_weights
from parity_tests.ops_by_hand import NUMPY, TORCH, altered
from parity_tests.wrong_ops import statistics_fixed

both_dtypes = pytest.mark.parametrize("dtype", ("float64", "float32"))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="gpt2-tiny"))


def block(i: int) -> list[str]:
    """The uses of one block in the order of computation."""
    attention, feed_forward = f"transformers.{i}.attention", f"transformers.{i}.feed_forward"
    return [
        f"{attention}_norm", f"{attention}.input", f"{attention} scores", f"{attention}.mask",
        f"{attention}.softmax", f"{attention} context", f"{attention}.output",
        f"{feed_forward}_norm", f"{feed_forward}.input", f"{feed_forward}.gelu",
        f"{feed_forward}.output",
    ]  # fmt: skip


USES = [
    "embedding.embedding", "embedding.positional_embedding", *block(0), *block(1), "norm",
    "output", "loss",
]  # fmt: skip


@both_dtypes
@pytest.mark.parametrize("functions", (NUMPY, TORCH), ids=("numpy", "torch"))
def test_all_uses_in_a_gpt2(bundle: Bundle, functions: dict[str, Any], dtype: str) -> None:
    report = check_ops({name: functions[name] for name in IN_MODELS}, bundle, dtype)
    assert report.ok and report.complete and not report.notes, report
    outputs = [j.name for j in report.judgements if j.kind == "forward"]
    assert outputs == [f"{use} output" for use in USES]
    gradients = [j.name for j in report.judgements if j.kind == "gradient"]
    assert list(dict.fromkeys(name.rsplit(" ", 1)[0] for name in gradients)) == USES
    assert not any(j.exact_zero for j in report.judgements)


def test_a_broken_layer_norm_is_listed_wherever_it_is_used(bundle: Bundle) -> None:
    report = check_ops({"layer_norm": statistics_fixed, "gelu": NUMPY["gelu"]}, bundle)
    norms = [f"transformers.{i}.{name}_norm" for i in range(2)
             for name in ("attention", "feed_forward")]  # fmt: skip
    assert [j.name for j in report.judgements if not j.ok] == [f"{n} dx" for n in (*norms, "norm")]


def test_the_logits_are_a_linear_map_whose_bias_is_zero(bundle: Bundle) -> None:
    seen = []

    def noting(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, g: np.ndarray) -> Any:
        seen.append((x, weight, bias))
        return NUMPY["linear"](x, weight, bias, g)

    report = check_ops({"linear": noting}, bundle)
    assert report.ok
    x, weight, bias = seen[-1]
    assert weight.shape == bundle.weights["embedding.embedding.weight"].shape
    np.testing.assert_array_equal(x, bundle.values["norm.output"])
    np.testing.assert_array_equal(bias, np.zeros(len(weight)))
    report = check_ops({"linear": altered("linear", 2, lambda d: d * 1.001)}, bundle)
    assert not report.ok and "output dweight" in [j.name for j in report.judgements if not j.ok]


@pytest.mark.reference("other backend")
def test_uses_in_a_gpt2_are_fed_what_the_trace_holds(bundle: Bundle) -> None:
    """Operands and cotangents against values and total derivatives of PyTorch's own pass."""
    config = bundle.config
    model = build_model("torch", config, dtype="float64")
    set_weights(model, {n: w.astype(np.float64) for n, w in bundle.weights.items()})
    found = trace(model, load_backend("torch").GPTLoss(), bundle.tokens, bundle.targets)
    seen: dict[str, list[tuple[Any, ...]]] = {name: [] for name in IN_MODELS}

    def noting(name: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            seen[name].append(arguments)
            return NUMPY[name](*arguments)

        return function

    assert check_ops({name: noting(name) for name in IN_MODELS}, bundle).ok

    def near(mine: np.ndarray, name: str, part: dict[str, np.ndarray]) -> None:
        np.testing.assert_allclose(mine, part[name], rtol=1e-9)

    for i in range(config.blocks):
        place = f"transformers.{i}"
        weights, values, _ = seen["matmul"][2 * i + 1]
        near(weights, f"{place}.attention.softmax.output", found.values)
        queries, keys, g = seen["matmul"][2 * i]
        size = config.embedding_size // config.heads
        projected = found.values[f"{place}.attention.input.output"]
        parts = projected.reshape(*projected.shape[:2], 3, config.heads, size)
        for mine, part in zip((queries, keys.swapaxes(-1, -2), values), range(3), strict=True):
            np.testing.assert_allclose(mine, parts[:, :, part].swapaxes(1, 2), rtol=1e-9)
        scores = found.gradients[f"{place}.attention.mask.input"]
        np.testing.assert_allclose(g * math.sqrt(size), scores, rtol=1e-9)
        for k, name in enumerate(("attention_norm", "feed_forward_norm")):
            _, weight, bias, g = seen["layer_norm"][2 * i + k]
            near(g, f"{place}.{name}.output", found.gradients)
            np.testing.assert_array_equal(weight, bundle.weights[f"{place}.{name}.weight"])
            np.testing.assert_array_equal(bias, bundle.weights[f"{place}.{name}.bias"])
    near(seen["layer_norm"][-1][0], f"transformers.{config.blocks - 1}.output", found.values)
    near(seen["cross_entropy"][0][0], "output", found.values)
