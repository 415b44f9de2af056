"""Styles and flags that are forgotten, contradicted or too few, each answered in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.arrays import write_arrays
from gpt_parity.cli import main
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.llmc import pair, write_pair
from gpt_parity.oracle.styles import from_style, names, to_style
from gpt_parity.oracle.subject import order_one
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.oracle_config import ExportConfig

Arrays = dict[str, np.ndarray]
# Few tokens, whose table llm.c pads to 128 rows.
CONFIG = GPT2Config(5, 3, 4, 1, heads=2)
PROJECTION = "transformer.h.0.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    tokens, targets = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 2, 3))
    return make_bundle(CONFIG, order_one(CONFIG, 0), tokens, targets, votes=False)


@pytest.fixture
def folder(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reference, and the pair of llm.c, in the folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    save_bundle(Path("ref.npz"), bundle)
    write_pair(Path("pair"), bundle, "small")
    write_arrays(Path("source.npz"), bundle.weights, "{}")
    write_arrays(Path("llmc.npz"), to_style(bundle.weights, CONFIG, "llm.c"), "{}")
    return tmp_path


def gradients(bundle: Bundle, style: str) -> Arrays:
    return to_style(bundle.parameters, CONFIG, style) | {"loss": bundle.arrays["loss"].copy()}


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The one line of a command that is refused."""
    assert main(["oracle", *command]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


# --- Weights of llm.c


def test_padded_rows_are_no_tokens_unless_somebody_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["export", "--weights", "llmc.npz", "--style", "llm.c", "--heads", "2", "-o", "x.npz"]
    said = refusal(capsys, *flags)
    assert "llmc.npz: wte has 128 rows" in said and "vocab_size is needed" in said
    assert main(["oracle", *flags, "--vocab-size", "5"]) == 0
    assert load_bundle(Path("x.npz")).config == CONFIG
    # A header says it.
    assert main(["oracle", "export", "--weights", "pair/small.bin", "-o", "y.npz"]) == 0
    assert load_bundle(Path("y.npz")).config == CONFIG


def test_padded_rows_are_no_tokens_in_python_either(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="vocab_size is needed"):
        from_style(to_style(bundle.weights, CONFIG, "llm.c"), None, "llm.c")


def test_nan_in_a_checkpoint_of_llmc_has_its_file_and_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = pair(Path("pair"), "small")[0]
    content = bytearray(checkpoint.read_bytes())
    struct.pack_into("<f", content, len(content) - 4, np.nan)  # lnfb ends the file
    checkpoint.write_bytes(content)
    said = refusal(capsys, "export", "--weights", str(checkpoint), "-o", "x.npz")
    assert said.startswith(f"gpt-parity: error: {checkpoint}: lnfb has 1 of 4 values that are nan")


# --- Flags that contradict each other


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights", "source.npz", "--heads", "2", "--preset", "source"], "preset is given"),
        (["--weights", "source.npz", "--heads", "2", "--init", "order-one"], "init is given"),
        (["--preset", "tiny", "--prefix", "gpt2_124M"], "prefix is given"),
    ],
)
def test_what_would_be_ignored_is_refused(
    flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The defaults too, where they are given."""
    assert message in refusal(capsys, "export", *flags, "-o", "x.npz")
    assert not Path("x.npz").exists()


def test_what_was_left_to_its_default_contradicts_nothing() -> None:
    assert ExportConfig(out=Path("x"), weights=Path("w.npz")).given == {"out", "weights"}
    assert ExportConfig(out=Path("x"), format="llm.c", prefix="mine").prefix == "mine"


# --- A style that was forgotten


@pytest.mark.parametrize("style", ["nanogpt", "hf", "llm.c"])
def test_a_forgotten_style_is_named(style: str, bundle: Bundle) -> None:
    mine = gradients(bundle, style)
    for given in ("source", "llm.c" if style != "llm.c" else "nanogpt"):
        with pytest.raises(ValueError, match=f"unknown in style {given}; --style {style} takes"):
            check_arrays(mine, bundle, style=given)
    assert check_arrays(mine, bundle, style=style).ok


def test_names_alone_do_not_tell_which_of_two_styles_was_forgotten(bundle: Bundle) -> None:
    name = "transformer.ln_f.bias"
    with pytest.raises(ValueError, match="--style nanogpt or --style hf takes"):
        check_arrays({name: gradients(bundle, "hf")[name]}, bundle)


def test_names_of_this_project_need_no_style(bundle: Bundle) -> None:
    mine = {f"grad/{name}": array.copy() for name, array in bundle.parameters.items()}
    with pytest.raises(ValueError, match="unknown in style hf; --style source takes"):
        check_arrays(mine, bundle, style="hf")


def test_a_few_names_of_another_style_do_not_speak_for_all(bundle: Bundle) -> None:
    mine = {f"grad/{name}": array.copy() for name, array in bundle.parameters.items()}
    with pytest.raises(ValueError, match="unknown to the bundle"):
        check_arrays({**mine, "transformer.ln_f.bias": mine["grad/norm.bias"]}, bundle)


@pytest.mark.parametrize("style", ["nanogpt", "hf", "llm.c"])
def test_no_name_of_another_style_is_suggested(style: str, bundle: Bundle) -> None:
    ours = {entry.ours for entry in names(CONFIG, style)}
    mine = gradients(bundle, style)
    for name in ("grad/transformers.0.attention.input.wieght", "grad/norm.bais"):
        with pytest.raises(ValueError, match=f"unknown in style {style}") as refused:
            check_arrays({**mine, name: np.ones(4)}, bundle, style=style)
        assert not any(our in str(refused.value) for our in ours)


# --- Patterns, and layouts in words


def test_a_pattern_may_match_a_name_of_the_file(
    folder: Path, bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = {f"grad/{name}": array.copy() for name, array in bundle.parameters.items()}
    mine["my_norm"] = mine.pop("grad/norm.bias")
    report = check_arrays(mine, bundle, names={"my_norm": "grad/norm.bias"}, only="my_*")
    assert [j.name for j in report.judgements] == ["grad/norm.bias"]
    short = {n.removeprefix("transformer."): a for n, a in gradients(bundle, "hf").items()}
    write_arrays(Path("mine.npz"), {f"module.{n}": a for n, a in short.items() if n != "loss"}, "")
    flags = ["--ref", "ref.npz", "--style", "hf", "--only", "module.h.0.attn.*"]
    assert main(["oracle", "check", "mine.npz", *flags]) == 0
    assert "PASS: 4 tensors agree" in capsys.readouterr().out


def test_the_layout_of_a_style_is_no_accusation(bundle: Bundle) -> None:
    mine = gradients(bundle, "hf")
    mine[PROJECTION] = 3.0 * mine[PROJECTION]
    (line,) = (n for n in check_arrays(mine, bundle, style="hf").notes if n.startswith("in style"))
    assert line == (
        "in style hf: grad/transformers.0.feed_forward.input.weight is grad/"
        f"{PROJECTION}, which the style holds as (in, out)"
    )
