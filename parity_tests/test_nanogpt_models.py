"""Models of nanoGPT as the page of the oracle hands them in, with biases and without."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt_parity.arrays import write_arrays
from gpt_parity.cli import main
from gpt_parity.oracle.styles import to_style
from gpt_parity.oracle.subject import read_weights
from parity_tests.comparers import assert_same_bits
from parity_tests.interop.nano_gpt2 import GPT2
from parity_tests.markdown import blocks, read
from parity_tests.styled_weights import CONFIG, weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_of_nanogpt_is_judged_as_the_page_says(
    bias: bool, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = read("docs/oracle.md")
    (code,) = (c for c in blocks(text, "python") if "model(tokens, targets)" in c)
    (shell,) = (c for c in blocks(text, "sh") if "--style nanogpt" in c)
    commands = [shlex.split(line) for line in shell.splitlines()]
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 13, (2, 3, 7), generator=generator)
    with torch.random.fork_rng():  # it draws its weights
        model = GPT2(13, 7, 12, 6, bias)
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = 0.3 * torch.randn(p.shape, generator=generator)
            p.copy_(draw + 1.0 if "ln_" in name and name.endswith("weight") else draw)
    if wrong:
        model.transformer["h"][1].attn.causal = False
    exec(code, {"model": model, "tokens": tokens, "targets": targets})
    assert [main(command[1:]) for command in commands] == [0, int(wrong)]
    said = capsys.readouterr().out
    if wrong:
        assert (
            "first: value/output, " in said and "in style nanogpt: value/output is logits" in said
        )
        assert "hint: mask: not applied, at transformers.1.attention" in said
    else:
        assert "float32: PASS" in said


@pytest.mark.parametrize("kept", [(), ("transformer.ln_f.bias",)])
def test_weights_of_nanogpt_without_biases_have_zeros(
    kept: tuple[str, ...], tmp_path: Path
) -> None:
    """Its models may have none at all; where one is there, the others are missing."""
    theirs = to_style(weights(), CONFIG, "nanogpt")
    some = {n: a for n, a in theirs.items() if not n.endswith(".bias") or n in kept}
    write_arrays(tmp_path / "w.npz", some, "{}")
    if kept:
        with pytest.raises(ValueError, match=r"ln_1\.bias, .* missing"):
            read_weights(tmp_path / "w.npz", 3, "nanogpt")
        return
    config, mine = read_weights(tmp_path / "w.npz", 3, "nanogpt")
    assert config == CONFIG
    expected = {n: np.zeros_like(a) if n.endswith(".bias") else a for n, a in weights().items()}
    assert_same_bits(mine, expected)
    with pytest.raises(ValueError, match="missing"):
        read_weights(tmp_path / "w.npz", 3, "hf")
