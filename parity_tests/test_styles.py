"""Other projects' names and layouts: every map, and every refusal."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.styles import STYLES, from_style, names, padded, to_style
from parity_tests.comparers import assert_same_bits
from parity_tests.styled_weights import C_ATTN, CONFIG, OTHERS, SQUARE, Arrays, padding, weights

# Written by hand: what the parameters of block 1 are called, (in, out) in hf where marked.
BLOCK = {
    "attention_norm.weight": ("ln_1.weight", "ln1w", False),
    "attention_norm.bias": ("ln_1.bias", "ln1b", False),
    "attention.input.weight": ("attn.c_attn.weight", "qkvw", True),
    "attention.input.bias": ("attn.c_attn.bias", "qkvb", False),
    "attention.output.weight": ("attn.c_proj.weight", "attprojw", True),
    "attention.output.bias": ("attn.c_proj.bias", "attprojb", False),
    "feed_forward_norm.weight": ("ln_2.weight", "ln2w", False),
    "feed_forward_norm.bias": ("ln_2.bias", "ln2b", False),
    "feed_forward.input.weight": ("mlp.c_fc.weight", "fcw", True),
    "feed_forward.input.bias": ("mlp.c_fc.bias", "fcb", False),
    "feed_forward.output.weight": ("mlp.c_proj.weight", "fcprojw", True),
    "feed_forward.output.bias": ("mlp.c_proj.bias", "fcprojb", False),
}
ENDS = {
    "embedding.embedding.weight": ("wte.weight", "wte"),
    "embedding.positional_embedding.weight": ("wpe.weight", "wpe"),
    "norm.weight": ("ln_f.weight", "lnfw"),
    "norm.bias": ("ln_f.bias", "lnfb"),
}


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    assert_same_bits({"": one}, {"": other})


@pytest.mark.parametrize("style", OTHERS)
def test_names_and_layouts_are_those_of_a_table_by_hand(style: str) -> None:
    mine, theirs = weights(), to_style(weights(), CONFIG, style)
    for ours, (dotted, stacked) in ENDS.items():
        if style != "llm.c":
            assert_same(theirs[f"transformer.{dotted}"], mine[ours])
        else:
            assert_same(theirs[stacked][: len(mine[ours])], mine[ours])
    for layer, (dotted, stacked, turned) in BLOCK.items():
        ours = mine[f"transformers.1.{layer}"]
        if style == "llm.c":
            assert_same(theirs[stacked][1], ours)
        else:
            expected = ours.T if turned and style == "hf" else ours
            assert_same(theirs[f"transformer.h.1.{dotted}"], np.ascontiguousarray(expected))
    assert len(theirs) == (16 if style == "llm.c" else 2 * len(BLOCK) + len(ENDS) + 1)


def test_a_square_weight_is_transposed_by_its_name() -> None:
    """Its shape could not tell."""
    ours = weights()[SQUARE]
    assert ours.shape == (12, 12) and not np.array_equal(ours, ours.T)
    name = "transformer.h.1.attn.c_proj.weight"
    assert_same(to_style(weights(), CONFIG, "nanogpt")[name], ours)
    assert_same(to_style(weights(), CONFIG, "hf")[name], np.ascontiguousarray(ours.T))
    # Here even the embeddings are square, and they are never turned.
    square = GPT2Config(4, 4, 4, 1, heads=2)
    theirs = to_style(weights(square), square, "hf")
    for ours_name, (dotted, _) in ENDS.items():
        assert_same(theirs[f"transformer.{dotted}"], weights(square)[ours_name])


def test_the_tied_output_is_the_same_array() -> None:
    for style in ("nanogpt", "hf"):
        theirs = to_style(weights(), CONFIG, style)
        assert theirs["lm_head.weight"] is theirs["transformer.wte.weight"]


def test_padding_is_zeros_up_to_a_multiple_of_128() -> None:
    for vocab_size, rows in ((1, 128), (127, 128), (128, 128), (129, 256), (50257, 50304)):
        assert padded(vocab_size) == rows
    for vocab_size, rows in ((5, 128), (128, 128), (130, 256)):
        config = GPT2Config(vocab_size, 3, 4, 1, heads=2)
        wte = to_style(weights(config), config, "llm.c")["wte"]
        assert wte.shape == (rows, 4) and not wte[vocab_size:].any()
        assert wte[:vocab_size].all()


@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 3, st.integers(1, 12), st.integers(1, 3)),
    style=st.sampled_from(STYLES), dtype=st.sampled_from(("float32", "float64")),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_there_and_back_is_exact(sizes: tuple[int, ...], style: str, dtype: str, seed: int) -> None:
    heads, width, context, vocab_size, blocks = sizes
    config = GPT2Config(vocab_size, context, heads * width, blocks, heads=heads)
    rng = np.random.default_rng(seed)
    mine = {
        n: rng.standard_normal(shape).astype(dtype)
        for n, shape in config.parameter_shapes().items()
    }
    theirs = to_style(mine, config, style)
    again = from_style(theirs, config, style)
    assert list(again) == list(mine)
    assert_same_bits(again, mine)
    if style != "source":  # sizes from the shapes alone, V where it is padded
        assert_same_bits(from_style(theirs, vocab_size, style), mine)
    for array in [*theirs.values(), *again.values()]:
        assert array.flags.c_contiguous and array.dtype == dtype
    for array in theirs.values():
        array[...] = 0
    assert_same_bits(again, mine)  # nothing is shared


def test_every_parameter_has_one_place() -> None:
    for style in STYLES:
        entries = names(CONFIG, style)
        places = [(e.theirs, e.row) for e in entries]
        assert len(places) == len(set(places))
        ours = [e.ours for e in entries if e.layout != "tied"]
        assert ours == list(CONFIG.parameter_shapes())
        theirs = to_style(weights(), CONFIG, style)
        assert {e.theirs: e.shape for e in entries} == {n: a.shape for n, a in theirs.items()}


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_and_saved_masks_do_not_matter(wrapper: str) -> None:
    theirs = to_style(weights(), CONFIG, "hf")
    short = {wrapper + n.removeprefix("transformer."): a for n, a in theirs.items()}
    masks = {f"{wrapper}h.0.attn.{n}": np.ones((1, 1, 7, 7), bool) for n in ("bias", "masked_bias")}
    assert_same_bits(from_style(short | masks, CONFIG, "hf"), weights())
    for name in ("lm_head.weight", "wte.weight"):  # either stands for both
        one = {n: a for n, a in short.items() if n != wrapper + name}
        assert_same_bits(from_style(one, None, "hf"), weights())


def test_values_that_are_not_finite_are_copied_too() -> None:
    mine = weights()
    mine[SQUARE][0, 0], mine["norm.bias"][1] = np.nan, np.inf
    for style in STYLES:
        assert_same_bits(from_style(to_style(mine, CONFIG, style), CONFIG, style), mine)


def _without(name: str) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        del arrays[name]

    return apply


def _set(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        arrays[name] = change(arrays[name])

    return apply


FAULTS: dict[str, tuple[str, Callable[[Arrays], None], str]] = {
    "missing": ("hf", _without(C_ATTN), f"{C_ATTN} missing"),
    "a missing stack": ("llm.c", _without("fcb"), "fcb missing"),
    "unexpected": (
        "nanogpt", lambda a: a.update(x=np.ones(1)), "x unexpected; the 29 of style nanogpt"),
    "(out, in) in hf": (
        "hf", _set(C_ATTN, lambda a: a.T),
        f"{C_ATTN} has shape (36, 12), (12, 36), (in, out), is needed in style hf"),
    "(in, out) in nanogpt": (
        "nanogpt", _set(C_ATTN, lambda a: a.T),
        f"{C_ATTN} has shape (12, 36), (36, 12) is needed in style nanogpt"),
    "another stack": (
        "llm.c", _set("qkvw", lambda a: a[:1]), "qkvw has shape (1, 36, 12), (2, 36, 12) is"),
    "too few rows": ("llm.c", _set("wte", lambda a: a[:12]), "wte has shape (12, 12), (128, 12)"),
    "untied": (
        "nanogpt", _set("lm_head.weight", lambda a: a + 1e-3),
        "lm_head.weight differs from transformer.wte.weight, the same array is needed"),
    "padding": (
        "llm.c", _set("wte", padding(1e-30)),
        "wte has 1e-30 in its padding beyond V = 13, 0 is needed"),
    "NaN in the padding": ("llm.c", _set("wte", padding(np.nan)), "wte has nan in its padding"),
    "two prefixes": (
        "hf", lambda a: a.update({"wte.weight": a["transformer.wte.weight"]}),
        "wte.weight is there under another name too"),
    "a scalar": ("hf", _set("transformer.ln_f.bias", lambda a: a[0]), "has shape (), (12,) is"),
    "a short name in nanogpt": (
        "nanogpt", lambda a: a.update({"ln_f.bias": a.pop("transformer.ln_f.bias")}),
        "transformer.ln_f.bias missing, ln_f.bias unexpected"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_in_the_style_is_one_line(fault: str) -> None:
    style, change, message = FAULTS[fault]
    arrays = dict(to_style(weights(), CONFIG, style))
    change(arrays)
    with pytest.raises(ValueError) as caught:
        from_style(arrays, CONFIG, style)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_styles_and_models_without_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"style is 'tf', one of .*'hf'"):
        names(CONFIG, "tf")
    source = GPTConfig(5, 3, 2, 1)
    assert [e.theirs for e in names(source, "source")] == list(source.parameter_shapes())
    for style in OTHERS:
        with pytest.raises(ValueError, match="only a GPT-2"):
            names(source, style)
    with pytest.raises(ValueError, match=r"holds x; wte \(V, E\) and wpe \(C, E\) are needed"):
        from_style({"x": np.ones(2)}, 5, "llm.c")
    with pytest.raises(ValueError, match="wte"):
        to_style({**weights(), "wte": np.ones(2)}, CONFIG, "llm.c")
