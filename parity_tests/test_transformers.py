"""The public implementation of GPT-2 as a third party, judged as anybody's results are.

Both twins and the library transformers were written independently of each other. Its logits, loss,
hidden states and gradients are held against the tolerances of the float64 NumPy model.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model
from gpt_parity.choices import DTYPES
from gpt_parity.oracle.compare import FORWARD, LOSS, PARAMETER, Report, compare
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.oracle.tolerance import Tolerances, model_tolerances
from gpt_parity.oracle.trace import Trace
from gpt_parity.weights import set_weights
from numpy_impl import GPTLoss
from parity_tests.interop.transformers_gpt2 import (
    SHAPES,
    Shape,
    hf_model,
    needs_transformers,
    ours,
    run,
)

pytestmark = [needs_transformers, pytest.mark.reference("another library")]


@functools.cache
def reference(shape: Shape, dtype: str) -> tuple[Trace, Tolerances]:
    """The float64 NumPy model with the weights that `hf_model` has, and the tolerances."""
    weights = ours(dict(hf_model(shape, "float64").named_parameters()))
    model = build_model("numpy", shape.config, dtype="float64")
    set_weights(model, weights)
    return model_tolerances(model, GPTLoss(), *shape.batch(), UNITS[dtype])


def judged(shape: Shape, dtype: str, model: Any) -> Report:
    clean, tolerances = reference(shape, dtype)
    mine = run(model, shape)
    assert set(mine.parameters) == set(clean.parameters)
    judgements = [
        compare(name, FORWARD, value, clean.values[name], tolerances.values[name], dtype)
        for name, value in mine.values.items()
    ]
    judgements.append(compare(LOSS, LOSS, mine.loss, clean.loss, tolerances.loss, dtype))
    judgements += [
        compare(n, PARAMETER, mine.parameters[n], gradient, tolerances.parameters[n], dtype)
        for n, gradient in reversed(clean.parameters.items())
    ]
    return Report(judgements, title=dtype)


@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_library_agrees_in_logits_loss_and_every_gradient(
    shape: Shape, dtype: str, attention: str
) -> None:
    report = judged(shape, dtype, hf_model(shape, dtype, attention))
    print(f"{attention} {report}")
    assert report.ok and report.complete, str(report)
    assert len(report.judgements) == shape.blocks + 3 + len(shape.config.parameter_shapes())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "difference",
    ({"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-6}, {"scale_attn_weights": False}),
    ids=("erf", "epsilon", "scores not scaled"),
)
def test_another_function_is_out_of_tolerance_from_the_first_block_on(
    dtype: str, difference: dict[str, Any]
) -> None:
    shape = SHAPES["distinct sizes"]
    report = judged(shape, dtype, hf_model(shape, dtype, **difference))
    assert not report.ok
    assert report.first is not None and report.first.name == "transformers.0.output"


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_transposed_square_weight_is_out_of_tolerance(dtype: str) -> None:
    """Its shape fits either way, so that only the numbers tell."""
    shape = SHAPES["baby"]
    model = hf_model(shape, dtype)
    with torch.no_grad():
        weight = model.transformer.h[2].attn.c_proj.weight
        weight.copy_(weight.T.clone())
    report = judged(shape, dtype, model)
    assert report.first is not None and report.first.name == "transformers.2.output"


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bias_is_out_of_tolerance(dtype: str) -> None:
    shape = SHAPES["distinct sizes"]
    model = hf_model(shape, dtype)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[3] += 1e-3
    report = judged(shape, dtype, model)
    assert report.first is not None and report.first.name == "norm.output"


def test_a_gradient_of_one_role_of_the_tied_embedding_alone_is_out_of_tolerance() -> None:
    """The library untied has a gradient for each; neither is that of the tied model."""
    shape = SHAPES["distinct sizes"]
    model = hf_model(shape, "float64", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.transformer.wte.weight)
    tied = reference(shape, "float64")[0].parameters["embedding.embedding.weight"]
    tokens, targets = map(torch.from_numpy, shape.batch())
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    roles = [p.grad.numpy() for p in (model.transformer.wte.weight, model.lm_head.weight)]
    tolerance = reference(shape, "float64")[1].parameters["embedding.embedding.weight"]
    for role in roles:
        assert not compare("role", PARAMETER, role, tied, tolerance, "float64").ok
    assert compare("sum", PARAMETER, np.add(*roles), tied, tolerance, "float64").ok
