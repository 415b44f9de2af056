"""Other projects' names and layouts: every map, every refusal, and results judged in them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gpt_parity.arrays import write_arrays
from gpt_parity.cli import main
from gpt_parity.config import NamesConfig
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.styles import STYLES, from_style, names, padded, to_style
from gpt_parity.oracle.subject import order_one, read_weights
from gpt_parity.oracle.verdict import check_arrays
from parity_tests.comparers import assert_same_bits
from parity_tests.interop import styled_gpt2

Arrays = dict[str, np.ndarray]
CONFIG = GPT2Config(13, 7, 12, 2, heads=3)
OTHERS = ("nanogpt", "hf", "llm.c")
SQUARE = "transformers.1.attention.output.weight"

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


def weights(config: GPTConfig = CONFIG, seed: int = 0) -> Arrays:
    return order_one(config, seed)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    rng = np.random.default_rng(5)
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, 5, 6))
    return make_bundle(CONFIG, weights(), tokens, targets, votes=False)


@pytest.fixture(scope="module")
def reference(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "ref.npz"
    save_bundle(path, bundle)
    return path


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    assert_same_bits({"": one}, {"": other})


def results(bundle: Bundle, style: str, dtype: str = "float64") -> Arrays:
    """What an implementation computes that holds its parameters in this style."""
    given = {n: w.astype(dtype) for n, w in bundle.weights.items()}
    arrays = to_style(given, bundle.config, style)
    return styled_gpt2.run(
        arrays, bundle.tokens, bundle.targets, CONFIG.heads, style, CONFIG.vocab_size
    )


# --- maps -----------------------------------------------------------------------------------------


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


def _padding(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[-1, 3] = value
        return array

    return change


C_ATTN = "transformer.h.0.attn.c_attn.weight"
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
        "llm.c", _set("wte", _padding(1e-30)),
        "wte has 1e-30 in its padding beyond V = 13, 0 is needed"),
    "NaN in the padding": ("llm.c", _set("wte", _padding(np.nan)), "wte has nan in its padding"),
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


# --- judging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("style", OTHERS)
def test_an_independent_implementation_agrees_in_its_own_style(
    bundle: Bundle, style: str, dtype: str
) -> None:
    """Parameters and gradients as it holds them; llm.c's logits have the padding too."""
    mine = results(bundle, style, dtype)
    if style == "llm.c":
        assert mine["logits"].shape == (5, 6, 128) and mine["wte"].shape == (128, 12)
    report = check_arrays(mine, bundle, style=style)
    assert report.ok and report.title == dtype, str(report)
    judged = {j.name for j in report.judgements}
    assert judged == {"value/output", "loss", *(f"grad/{n}" for n in bundle.weights)}
    assert 0.0 < report.worst.ratio <= 0.6


# Style, the array that is wrong, how, our name of what is wrong first.
PLANTED: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = {
    "a square gradient as (out, in)": (
        "hf", "transformer.h.1.attn.c_proj.weight", lambda a: a.T, SQUARE),
    "a square gradient as (in, out)": (
        "nanogpt", "transformer.h.1.attn.c_proj.weight", lambda a: a.T, SQUARE),
    "one row of a stack": (
        "llm.c", "fcw", lambda a: a * np.array([2.0, 1.0])[:, None, None],
        "transformers.0.feed_forward.input.weight"),
    "rows of a stack exchanged": (
        "llm.c", "ln2b", lambda a: a[::-1], "transformers.1.feed_forward_norm.bias"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found_under_both_names(bundle: Bundle, mistake: str) -> None:
    style, theirs, change, ours = PLANTED[mistake]
    mine = results(bundle, style)
    mine[theirs] = np.ascontiguousarray(change(mine[theirs]))
    report = check_arrays(mine, bundle, style=style)
    assert report.first is not None and report.first.name == f"grad/{ours}"
    wrong = [j.name for j in report.judgements if not j.ok]
    assert len(wrong) == (2 if "rows" in mistake else 1)
    note = f"in style {style}: grad/{ours} is grad/{theirs}, "
    assert any(line.startswith(note) for line in report.notes)
    if style == "hf":
        assert any(line.startswith("transposed") for line in report.hints)


def save(path: Path, arrays: Arrays) -> str:
    write_arrays(path, arrays, "{}")
    return str(path)


def check(
    mine: str, reference: Path, *flags: str, capsys: pytest.CaptureFixture[str] | None = None
) -> tuple[int, str]:
    code = main(["oracle", "check", mine, "--ref", str(reference), *flags])
    if capsys is None:
        return code, ""
    out, err = capsys.readouterr()
    assert code != 2 or (out == "" and err.count("\n") == 1)
    return code, out + err


def test_keys_may_say_what_they_are(bundle: Bundle, reference: Path, tmp_path: Path) -> None:
    """Gradients with or without grad/, weights, tokens, steps, and our entries as they are."""
    mine = results(bundle, "hf")
    plain = ("loss", "logits")
    keys = {k if k in plain else f"grad/{k}": a for k, a in mine.items()}
    keys |= {f"weight/{n}": w for n, w in to_style(bundle.weights, CONFIG, "hf").items()}
    keys |= {"tokens": bundle.tokens, "value/norm.output": bundle.arrays["value/norm.output"] + 0}
    path = save(tmp_path / "mine.npz", keys)
    assert check(path, reference, "--style", "hf")[0] == 0
    assert check(path, reference)[0] == 2
    keys["weight/transformer.ln_f.bias"] = keys["weight/transformer.ln_f.bias"] * 2.0
    assert check(save(tmp_path / "other.npz", keys), reference, "--style", "hf")[0] == 2


def test_moments_and_weights_of_steps_have_a_style_too() -> None:
    tokens, targets = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 5, 6))
    bundle = make_bundle(CONFIG, weights(), tokens, targets, steps=1, votes=False)
    prefixes = ("step/1/exp_avg/", "step/1/exp_avg_sq/", "step/1/weight/")
    mine: Arrays = {}
    for prefix in prefixes:
        part = {n: bundle.arrays[prefix + n] for n in bundle.weights}
        mine |= {prefix + n: a for n, a in to_style(part, CONFIG, "hf").items()}
    report = check_arrays(mine, bundle, style="hf")
    assert report.ok and len(report.judgements) == 3 * len(bundle.weights)
    name = "transformer.h.1.attn.c_proj.weight"
    mine[prefixes[1] + name] = np.ascontiguousarray(mine[prefixes[1] + name].T)
    report = check_arrays(mine, bundle, style="hf")
    assert report.first is not None and report.first.name == prefixes[1] + SQUARE


REFUSED: dict[str, tuple[str, Callable[[Arrays, Bundle], None], str]] = {
    "both names": (
        "hf", lambda a, b: a.update({f"grad/{C_ATTN}": a[C_ATTN]}),
        f"grad/{C_ATTN} and {C_ATTN} are both grad/{C_ATTN}, one of them is needed"),
    "short and long": (
        "hf", lambda a, b: a.update({"ln_f.bias": a["transformer.ln_f.bias"]}),
        "ln_f.bias and transformer.ln_f.bias are both grad/transformer.ln_f.bias"),
    "our name": (
        "hf", lambda a, b: a.update({f"grad/{SQUARE}": a["loss"]}),
        f"grad/{SQUARE} is a name of style source, grad/transformer.h.1.attn.c_proj.weight is"),
    "our name alone": (
        "llm.c", lambda a, b: a.update({"norm.bias": a["lnfb"]}), "style source, lnfb is needed"),
    "a typing mistake": (
        "hf", lambda a, b: a.update({"grad/transformer.h.1.attn.c_prj.weight": a["loss"]}),
        "unknown in style hf; is it grad/transformer.h.1.attn.c_proj.weight?"),
    "weights under names of gradients": (
        "nanogpt", lambda a, b: a.update(to_style(b.weights, CONFIG, "nanogpt")),
        "transformer.wte.weight is the weight itself"),
    "a shape": (
        "hf", lambda a, b: a.update({C_ATTN: np.ascontiguousarray(a[C_ATTN].T)}),
        f"grad/{C_ATTN} has shape (36, 12), (12, 36), (in, out), is needed"),
    "a head of its own": (
        "nanogpt", lambda a, b: a.update({"lm_head.weight": a["transformer.wte.weight"] / 2}),
        "grad/lm_head.weight differs from grad/transformer.wte.weight"),
    "a gradient in the padding": (
        "llm.c", lambda a, b: a.update(wte=_padding(0.5)(a["wte"])), "grad/wte has 0.5 in its pad"),
    "a logit in the padding": (
        "llm.c", lambda a, b: a.update(logits=a["logits"] + 1.0), "logits has 1 in its padding"),
    "a bundle": (
        "hf", lambda a, b: a.update({"tolerance/float64/loss": a["loss"]}), "is a bundle"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_mean_two_things_or_none_is_refused(
    name: str, bundle: Bundle, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    style, change, message = REFUSED[name]
    mine = results(bundle, style)
    change(mine, bundle)
    path = save(tmp_path / "mine.npz", mine)
    code, said = check(path, reference, "--style", style, capsys=capsys)
    assert code == 2 and message in said


def test_padded_logits_may_be_masked(bundle: Bundle) -> None:
    mine = results(bundle, "llm.c")
    mine["logits"][..., CONFIG.vocab_size :] = -np.inf
    assert check_arrays(mine, bundle, style="llm.c").ok
    mine["logits"] = mine["logits"][..., : CONFIG.vocab_size]
    assert check_arrays(mine, bundle, style="llm.c").ok


def test_a_zero_gradient_of_a_zero_weight_is_judged() -> None:
    """It is a gradient that was never computed, not the weight."""
    zero = {n: np.zeros_like(w) if n.endswith("bias") else w for n, w in weights().items()}
    tokens, targets = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 5, 6))
    bundle = make_bundle(CONFIG, zero, tokens, targets, votes=False)
    mine = results(bundle, "nanogpt")
    mine["transformer.ln_f.bias"] *= 0.0
    report = check_arrays(mine, bundle, style="nanogpt")
    assert report.first is not None and report.first.name == "grad/norm.bias"


def test_a_map_leads_to_the_names_of_the_style(
    bundle: Bundle, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = results(bundle, "hf")
    mine["proj"] = mine.pop("transformer.h.1.attn.c_proj.weight")
    path, names_file = save(tmp_path / "mine.npz", mine), tmp_path / "names.toml"
    flags = ("--style", "hf", "--map", str(names_file))
    names_file.write_text('"proj" = "grad/transformer.h.1.attn.c_proj.weight"\n')
    assert tomllib.loads(names_file.read_text())
    assert check(path, reference, *flags)[0] == 0
    capsys.readouterr()
    for text, message in (
        (f'"proj" = "grad/{SQUARE}"', "is a name of style source"),
        ('"proj" = "transformer.h.9.attn.c_proj.weight"', "unknown in style hf"),
        ('"transformer.ln_f.bias" = "loss"', "has a meaning in style hf already"),
    ):
        names_file.write_text(text)
        code, said = check(path, reference, *flags, capsys=capsys)
        assert code == 2 and message in said, text


def test_a_pattern_may_match_either_name(
    bundle: Bundle, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = results(bundle, "hf")
    mine["transformer.h.0.mlp.c_fc.bias"] *= 2.0
    path = save(tmp_path / "mine.npz", mine)
    for pattern, code, judged in (
        ("grad/transformer.h.1.*", 0, 12),
        ("transformer.h.1.*", 0, 12),
        ("grad/transformers.1.*", 0, 12),
        ("*mlp.c_fc.bias", 1, 2),
        ("logits", 0, None),
    ):
        found, said = check(path, reference, "--style", "hf", "--only", pattern, capsys=capsys)
        if judged is None:  # no gradient, which cannot pass
            assert found == 0 and "1 tensor" in said
        else:
            assert found == code and f"{judged} tensors" in said, pattern
    assert check(path, reference, "--style", "hf", "--only", "h.7*")[0] == 2


def test_the_source_model_has_no_other_style(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPTConfig(5, 3, 2, 1)
    tokens, targets = np.random.default_rng(0).integers(0, 5, (2, 2, 3))
    save_bundle(tmp_path / "r.npz", make_bundle(config, weights(config), tokens, targets,
                                                votes=False))  # fmt: skip
    path = save(tmp_path / "mine.npz", {"loss": load_bundle(tmp_path / "r.npz").arrays["loss"]})
    assert check(path, tmp_path / "r.npz", "--style", "source")[0] == 0
    capsys.readouterr()
    for style in OTHERS:
        code, said = check(path, tmp_path / "r.npz", "--style", style, capsys=capsys)
        assert code == 2 and "only a GPT-2 has another one" in said
        assert main(["oracle", "names", "--style", style, "--preset", "wide"]) == 2
        assert "only a GPT-2 has another one" in capsys.readouterr().err


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", OTHERS)
def test_weights_are_read_in_a_style(style: str, tmp_path: Path) -> None:
    theirs = to_style(weights(), CONFIG, style)
    write_arrays(tmp_path / "w.safetensors", {f"model/{n}": a for n, a in theirs.items()}, "{}")
    write_arrays(tmp_path / "w.npz", theirs, "{}")
    vocab_size = CONFIG.vocab_size if style == "llm.c" else None
    config, mine = read_weights(tmp_path / "w.npz", CONFIG.heads, style, vocab_size)
    assert config == CONFIG
    assert_same_bits(mine, weights())
    with pytest.raises(ValueError, match="heads is needed"):
        read_weights(tmp_path / "w.npz", None, style, vocab_size)
    with pytest.raises(ValueError, match=r"w\.npz: holds"):
        read_weights(tmp_path / "w.npz", 3, "llm.c" if style != "llm.c" else "hf")


def test_weights_in_a_style_make_a_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(5, 3, 4, 1, heads=2)
    write_arrays(tmp_path / "w.npz", to_style(weights(config), config, "hf"), "{}")
    flags = ["oracle", "export", "--weights", str(tmp_path / "w.npz"), "--heads", "2"]
    out = ["-o", str(tmp_path / "ref.npz")]
    assert main([*flags, *out]) == 2
    assert "embedding.embedding.weight" in capsys.readouterr().err
    assert main([*flags, "--style", "hf", *out]) == 0
    found = load_bundle(tmp_path / "ref.npz")
    assert found.config == config
    assert_same_bits(found.weights, {n: w.astype(float) for n, w in weights(config).items()})
    assert main(["oracle", "export", "--style", "hf", "-o", str(tmp_path / "no")]) == 2
    assert "no weights that it is of" in capsys.readouterr().err


@pytest.mark.parametrize("style", STYLES)
def test_names_are_a_table_that_fits_80_columns(
    style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["oracle", "names", "--style", style, "--preset", "gpt2-baby"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "\x1b" not in shown and "…" not in shown
    words = shown.split()
    config = GPT2Config(65, 64, 128, 4, heads=4)
    for entry in names(config, style):
        assert entry.ours in words and entry.theirs in words
        assert str(entry.shape) in shown and entry.describe() in shown
    if style == "hf":
        lines = shown.splitlines()
        place = next(i for i, line in enumerate(lines) if "h.3.mlp.c_fc.weight" in line)
        assert lines[place].split() == ["transformer.h.3.mlp.c_fc.weight", "(128,", "512)",
                                        "transposed"]  # fmt: skip
        assert lines[place - 1].split() == ["transformers.3.feed_forward.input.weight", "(512,",
                                            "128)"]  # fmt: skip


def test_names_of_a_bundle_or_of_a_preset(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["oracle", "names", "--style", "llm.c", "--ref", str(reference)]) == 0
    assert "(2, 36, 12)" in capsys.readouterr().out
    assert main(["oracle", "names", "--style", "llm.c"]) == 0
    assert "(2, 36, 12)" in capsys.readouterr().out
    for flags in (["--style", "tf"], ["--style", "hf", "--ref", "absent"], [],
                  ["--style", "hf", "--ref", str(reference), "--preset", "gpt2-tiny"]):  # fmt: skip
        assert main(["oracle", "names", *flags]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ValueError, match="style is"):
        NamesConfig(style="tf")  # type: ignore[arg-type]
