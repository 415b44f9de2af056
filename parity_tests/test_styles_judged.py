"""Results judged in other projects' names and layouts, and the commands that know them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.arrays import write_arrays
from gpt_parity.cli import main
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.styles import STYLES, names, to_style
from gpt_parity.oracle.subject import read_weights
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.oracle_config import NamesConfig
from parity_tests.comparers import assert_same_bits
from parity_tests.interop import styled_gpt2
from parity_tests.styled_weights import C_ATTN, CONFIG, OTHERS, SQUARE, Arrays, padding, weights


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


def results(bundle: Bundle, style: str, dtype: str = "float64") -> Arrays:
    """What an implementation computes that holds its parameters in this style."""
    given = {n: w.astype(dtype) for n, w in bundle.weights.items()}
    arrays = to_style(given, bundle.config, style)
    return styled_gpt2.run(
        arrays, bundle.tokens, bundle.targets, CONFIG.heads, style, CONFIG.vocab_size
    )


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
        "grad/lm_head.weight differs from grad/transformer.wte.weight, the same array is needed, "
        "as they are tied (of two tables the sum of both)"),
    "a gradient in the padding": (
        "llm.c", lambda a, b: a.update(wte=padding(0.5)(a["wte"])), "grad/wte has 0.5 in its pad"),
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
    # Not their gradient, which is 0 there.
    gradient = np.pad(bundle.arrays["grad/output"], [(0, 0), (0, 0), (0, 115)])
    assert check_arrays(mine | {"grad/logits": gradient}, bundle, style="llm.c").ok
    gradient[..., CONFIG.vocab_size :] = -np.inf
    with pytest.raises(ValueError, match="grad/logits has -inf in its padding"):
        check_arrays(mine | {"grad/logits": gradient}, bundle, style="llm.c")
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


def test_a_folder_of_the_library_is_no_folder_of_arrays(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model.safetensors", to_style(weights(), CONFIG, "hf"), "{}")
    with pytest.raises(ValueError, match="which gpt-parity import-hf makes of it"):
        read_weights(tmp_path, 3, "hf")


def test_wrong_logits_have_the_name_that_they_came_under(bundle: Bundle) -> None:
    mine = results(bundle, "hf")
    mine["logits"] = mine["logits"] + np.eye(13)[4] * mine["logits"][0, 0, 0]
    report = check_arrays(mine, bundle, style="hf")
    assert report.first is not None and report.first.name == "value/output"
    assert "in style hf: value/output is logits" in report.notes
    assert "no hint: no mistake that was tried gives these numbers" in report.notes
    assert report.hints == ()


def test_weights_in_a_style_make_a_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(5, 3, 4, 1, heads=2)
    write_arrays(tmp_path / "w.npz", to_style(weights(config), config, "hf"), "{}")
    flags = ["oracle", "export", "--weights", str(tmp_path / "w.npz"), "--heads", "2"]
    out = ["-o", str(tmp_path / "ref.npz")]
    assert main([*flags, *out]) == 2
    assert "; --style nanogpt or --style hf takes them" in capsys.readouterr().err
    assert main([*flags, "--style", "hf", *out]) == 0
    assert capsys.readouterr().out.endswith("tokens and targets: drawn with seed 0\n")
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
