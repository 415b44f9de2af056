"""The walk through attention: every printed digit is computed, and follows what is computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.lessons.tables import number
from numpy_impl import functional
from numpy_impl.tensor import Tensor
from parity_tests.walks import Plain, joined, printed, section, shown, tables

pytestmark = pytest.mark.reference("by hand")

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def a_pipe_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


# --- Every digit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{}, {"length": 3, "d_k": 5, "seed": 7}, {"length": 8, "d_k": 2, "seed": 0}]
)
def test_every_digit_of_the_forward_pass_is_that_of_plain_numpy(
    sizes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"length": "--seq-len", "d_k": "--d-k", "seed": "--seed"}
    text = shown(capsys, *(part for n, x in sizes.items() for part in (flags[n], str(x))))
    plain = Plain(**sizes)
    whole = [[str(i), *(f"{x:.0f}" for x in row)] for i, row in enumerate(plain.mask)]
    assert tables(section(text, 1)) == [whole]
    before, after = tables(section(text, 3))
    assert before == printed(plain.scores)
    assert after == printed(np.where(plain.mask == 0, -np.inf, plain.scores))
    d_k = plain.q.shape[1]
    assert (
        f"score(1, 0) = {plain.products[1, 0]:.4f} / {np.sqrt(d_k):.4f} = {plain.scores[1, 0]:.4f}"
    ) in joined(section(text, 3))
    (weights,) = tables(section(text, 4))
    assert weights == [[*row, "1.0000"] for row in printed(plain.weights)]
    (output,) = tables(section(text, 5))
    assert output == printed(plain.output[:, :8])
    assert ("The first 8 of 64 columns" in joined(text)) == (d_k == 64)


def test_the_readme_shows_the_table_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    excerpt = page.partition('--tokens "the cat sat down"\n```\n\n```text\n')[2].partition("```")[0]
    table, sentence = excerpt.split("\n\n")
    text = shown(capsys, "--tokens", "the cat sat down")
    assert table in section(text, 4)
    for words in ("6 of 16 weights are exactly 0.", "which is all of it: nothing leaks."):
        assert words in joined(sentence) and words in joined(section(text, 4))


def test_every_digit_with_and_without_the_mask(capsys: pytest.CaptureFixture[str]) -> None:
    text, plain = shown(capsys), Plain()
    (rows,) = tables(section(text, 6))
    ahead = np.triu(plain.open, 1).sum(axis=1)
    assert [row[:5] for row in rows] == printed(plain.open)
    assert [[row[0], *row[6:10]] for row in rows] == printed(plain.weights)
    assert [row[10] for row in rows] == [*(f"{x:.4f}" for x in ahead[:3]), "0"]
    words = joined(section(text, 6))
    assert f"position 0 would give {ahead[0]:.4f} of its weight to the future" in words
    assert f"on average a position would give {ahead.mean():.4f}." in words
    words = joined(section(text, 7))
    for i, seen in ((0, "0, 1, 2, 3"), (1, "1, 2, 3")):
        share = np.triu(plain.upper, 1)[i].sum()
        assert f"upper sees {seen}, with {share:.4f} of the weight on what comes after" in words
    assert "position 3, which knows most, would be left with 3." in words


def test_every_digit_of_the_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """By closed form: dv_j = w_ij g_i; dk_j = ds_ij q_i / sqrt(d_k)."""
    values, keys, scores = tables(section(shown(capsys), 8))
    plain = Plain()
    ds = plain.score_gradients()
    assert ds[0, 0] == 0
    norm = np.linalg.norm
    assert values == printed(plain.weights * norm(plain.g, axis=1)[:, None])
    assert keys == printed(abs(ds) * norm(plain.q, axis=1)[:, None] / 8)
    assert scores == printed(abs(ds))


def test_what_rounds_to_zero_is_told_from_zero() -> None:
    assert [number(x) for x in (0.0, -0.0, 3e-7, -3e-7, 0.00004, 0.00006, -np.inf, np.nan)] == [
        "0", "0", "3e-07", "-3e-07", "4e-05", "0.0001", "-inf", "nan",
    ]  # fmt: skip


# --- Sentences follow the computation -------------------------------------------------------------


def test_zeros_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = joined(shown(capsys, "--seq-len", "5"))
    assert "15 of 25 entries are 1" in text
    assert "The mask replaces 10 scores of 25 by -inf, those where the mask is 0." in text
    assert "10 of 25 weights are exactly 0. The future (j > i) has 10 of them" in text
    assert "Counted, not rounded: 11 of 25 are exactly 0. The future (j > i) has 10" in text
    assert "Position 0 reads itself alone: its output is v_0, to the last bit." in text
    assert "Of the other rows of the scores 0 entries get a gradient" in text
    assert text.count("nothing leaks") == 4 and "LEAKS" not in text


def leaking(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention that may read one position too far."""
    keep = np.tri(q.shape[-2], k.shape[-2], 1, dtype=bool)
    return functional.self_attention(q, k, v, keep)


def test_a_leak_changes_numbers_and_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "causal_attention", leaking)
    text = joined(shown(capsys, "--seq-len", "5"))
    assert "The mask replaces 6 scores of 25 by -inf, NOT only those where" in text
    assert "6 of 25 weights are exactly 0. The future (j > i) has 6 of its 10" in text
    assert text.count("the rest LEAKS") == 4 and "nothing leaks" not in text
    assert "The output of position 0 differs from v_0 by up to " in text
    assert "should be the same as dropping its weight" in text
    assert "So is (0, 0)" not in text


def test_a_backward_pass_that_leaks_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward stays right; the gradient of the mask passes what was masked."""

    def select(op: str, x: Tensor, keep: np.ndarray, value: float) -> Tensor:
        data = np.where(keep, x.data, value)
        return Tensor.from_op(op, data, (x,), lambda grad: (grad + (~keep) * 1e-30,))

    monkeypatch.setattr(functional, "_select", select)
    text = joined(shown(capsys, "--seq-len", "5"))
    assert "10 of 25 weights are exactly 0. The future (j > i) has 10 of them" in text
    assert text.count("the rest LEAKS") == 2  # keys and scores
    assert (
        "Of the other rows of the scores 40 entries get a gradient that is not 0: a gradient LEAKS"
        in text
    )
    assert "1e-30" in text


def test_another_mask_changes_who_sees_whom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "tril", lambda x, value: Tensor(np.tri(*x.shape, 1) * x.data))
    text = shown(capsys, "--tokens", "the cat sat")
    assert "8 of 9 entries are 1" in joined(text)
    assert "position 0 (the) sees the, cat\n" in text
    assert "And position 2 (sat), which knows most, would be left with cat, sat." in joined(text)


# --- The script -----------------------------------------------------------------------------------


def test_the_script_needs_no_torch_and_warns_of_nothing() -> None:
    program = (
        "import runpy, sys; sys.modules['torch'] = None; "
        f"sys.argv = ['x', '--tokens', 'the cat sat']; "
        f"runpy.run_path({str(CHECKOUT / 'scripts' / 'explain_causal_attention.py')!r}, "
        "run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "position 2 (sat) sees the, cat, sat" in done.stdout
