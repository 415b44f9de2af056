"""GPT-2 of both twins as it is built: initial weights, names, sizes, errors, one text."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.config import GPT2_PRESETS
from gpt_parity.model_config import GPT2Config
from gpt_parity.weights import get_weights
from numpy_impl.gpt2 import GPT2
from torch_impl.gpt2 import GPT2 as TorchGPT2

pytestmark = pytest.mark.reference("by hand")

ROOT = Path(__file__).resolve().parents[1]
TABLE = "embedding.embedding.weight"

both_backends = pytest.mark.parametrize("backend", BACKENDS)


# --- sizes and initial weights


@both_backends
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_start_as_drawn_in_the_order_of_construction(backend: str, dtype: str) -> None:
    """Deviation 0.02, and 0.02 / sqrt(2 * 3) before a residual sum; biases 0, norms 1 and 0."""
    config = GPT2Config(7, 5, 8, 3, heads=2)
    rng = np.random.RandomState(42)
    expected = {
        name: rng.randn(*shape)
        * (0.02 / math.sqrt(6.0) if name.endswith("output.weight") else 0.02)
        if len(shape) == 2
        else np.full(shape, float("norm.weight" in name))
        for name, shape in config.parameter_shapes().items()
    }
    found = get_weights(build_model(backend, config, 42, dtype))
    assert list(found) == list(expected) and len(found) == 2 + 3 * 12 + 2
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name].astype(dtype), name, strict=True)


NAMES = [
    "attention_norm.weight", "attention_norm.bias", "attention.input.weight",
    "attention.input.bias", "attention.output.weight", "attention.output.bias",
    "feed_forward_norm.weight", "feed_forward_norm.bias", "feed_forward.input.weight",
    "feed_forward.input.bias", "feed_forward.output.weight", "feed_forward.output.bias",
]  # fmt: skip


@both_backends
def test_names_and_shapes_in_both_twins_and_in_the_configuration(backend: str) -> None:
    config = GPT2Config(7, 5, 8, 2, heads=4)
    shapes = [(8,), (8,), (24, 8), (24,), (8, 8), (8,), (8,), (8,), (32, 8), (32,), (8, 32), (8,)]
    expected = {TABLE: (7, 8), "embedding.positional_embedding.weight": (5, 8)}
    for i in range(2):
        expected |= {f"transformers.{i}.{n}": s for n, s in zip(NAMES, shapes, strict=True)}
    expected |= {"norm.weight": (8,), "norm.bias": (8,)}
    model = build_model(backend, config)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stored = {name: tuple(a.shape) for name, a in model.state_dict().items()}
    assert list(found.items()) == list(expected.items()) == list(stored.items())
    assert list(config.parameter_shapes().items()) == list(expected.items())
    count = sum(math.prod(shape) for shape in expected.values())
    assert config.parameter_count() == count


@pytest.mark.parametrize(("preset", "vocab_size", "count"),
                         [("baby", 65, 809_856), ("gpt2", 50257, 124_439_808)])  # fmt: skip
def test_published_sizes(preset: str, vocab_size: int, count: int) -> None:
    sizes = {n: GPT2_PRESETS[preset][n] for n in ("context_size", "embedding_size", "blocks")}
    config = GPT2Config(vocab_size, **sizes, heads=GPT2_PRESETS[preset]["heads"])
    assert config.parameter_count() == count
    assert sum(map(math.prod, config.parameter_shapes().values())) == count


def test_the_baby_itself_has_as_many_weights() -> None:
    models = [build_model(name, GPT2Config(65, 64, 128, 4, heads=4)) for name in BACKENDS]
    for model in models:
        assert sum(math.prod(p.shape) for p in model.parameters()) == 809_856


# --- errors


@pytest.mark.parametrize("model", [GPT2, TorchGPT2])
def test_sizes_heads_and_fills_that_do_not_do(model: Any) -> None:
    for place, name in enumerate(
        ("vocab_size", "context_size", "embedding_size", "blocks", "heads")
    ):
        for bad in (0, -1, 2.0, True, "2"):
            sizes: list[Any] = [5, 4, 6, 1, 2]
            sizes[place] = bad
            with pytest.raises(ValueError, match=f"{name}: got .*, needed a positive integer"):
                model(*sizes)
    with pytest.raises(ValueError, match="embedding_size: got 6, needed a multiple of 4"):
        model(5, 4, 6, 1, 4)
    for dtype in ("float32", "float64"):
        model(5, 4, 6, 1, 2, dtype=dtype, mask_value=-1e9)
        for fill in (-9.9e8, -1e4, -746, 0.0, math.nan):
            with pytest.raises(ValueError, match=r"mask_value: got .*, needed at most -1000000000"):
                model(5, 4, 6, 1, 2, dtype=dtype, mask_value=fill)
        model(5, 4, 6, 1, 2, dtype=dtype, mask_value=-746, allow_leak=True)
        with pytest.raises(ValueError, match="mask_value: got nan"):
            model(5, 4, 6, 1, 2, dtype=dtype, mask_value=math.nan, allow_leak=True)
    with pytest.raises(TypeError):
        model(5, 4, 6, 1)  # without heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4}, "^embedding_size is 6, a multiple of heads = 4 is needed$"),
        ({"heads": 0}, "^heads is 0, at least 1 is needed$"),
        ({"blocks": 0}, "^blocks is 0"), ({"embedding_size": 0}, "^embedding_size is 0"),
        ({"mask_value": math.nan}, "^mask_value is nan"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT2Config(**{"vocab_size": 5, "embedding_size": 6, "heads": 2} | changes)
    with pytest.raises(TypeError, match=r"heads is 2\.0, an integer is needed"):
        GPT2Config(5, 4, 6, 1, heads=2.0)


@both_backends
def test_the_model_judges_its_tokens(backend: str) -> None:
    model = build_model(backend, GPT2Config(5, 4, 6, 1, heads=2))
    for tokens, error, message in (
        ([[0, 5]], ValueError, "id 5, needed 0 to 4"),
        ([[-1, 0]], ValueError, "id -1, needed 0 to 4"),
        ([[0, 1, 2, 3, 4]], ValueError, "5 positions, needed at most 4"),
        ([0, 1], ValueError, r"shape \(2,\), needed \(B, T\)"),
        ([[0.0]], TypeError, "float64, needed integers"),
    ):
        with pytest.raises(error, match=message):
            model(np.array(tokens))


def test_the_twins_differ_in_a_sixth_of_their_lines_and_in_no_formula() -> None:
    """What `diff numpy_impl/gpt2.py torch_impl/gpt2.py` shows: imports, types, the cache."""
    ours, theirs = (
        (ROOT / f"{name}_impl/gpt2.py").read_text(encoding="utf-8").splitlines()
        for name in BACKENDS
    )
    only_ours = [d[2:] for d in difflib.ndiff(ours, theirs) if d.startswith("- ")]
    assert 0 < len(only_ours) <= len(ours) / 6
    for formula in (
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])",
        "x = x + self.attention(self.attention_norm(x))",
        "return x + self.feed_forward(self.feed_forward_norm(x))",
        "return linear(self.norm(x), self.embedding.embedding.weight)",
    ):
        assert any(formula in line for line in ours)
        assert not any(formula in line for line in only_ours)
