"""What the tests of `gpt-parity explain` share: its output in parts, and plain NumPy beside it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gpt_parity.cli import main


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["explain", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def section(text: str, number: int) -> str:
    return re.split(r"^\d\. ", text, flags=re.MULTILINE)[number]


def tables(text: str) -> list[list[list[str]]]:
    """Tables as rows of words, without the header: what stands under each line of dashes."""
    found = []
    for part in re.split(r"^ +─+$", text, flags=re.MULTILINE)[1:]:
        rows = re.split(r"^$", part.lstrip("\n"), flags=re.MULTILINE)[0].splitlines()
        found.append([row.split() for row in rows])
    return found


def joined(text: str) -> str:
    """Sentences without their line breaks."""
    return " ".join(text.split())


def printed(values: np.ndarray) -> list[list[str]]:
    """Rows as they should appear, with the number of the position before them."""
    rows = []
    for i, row in enumerate(values):
        cells = ["-inf" if x == -np.inf else f"{x:.4f}" if x else "0" for x in row]
        rows.append([str(i), *cells])
    return rows


class Plain:
    """The same stages, by plain NumPy and the usual fill."""

    def __init__(self, length: int = 4, d_k: int = 64, seed: int = 42) -> None:
        rng = np.random.RandomState(seed)
        self.q, self.k, self.v, self.g = (rng.randn(length, d_k) for _ in range(4))
        self.mask = np.tril(np.ones((length, length)))
        self.products = self.q @ self.k.T
        self.scores = self.products / np.sqrt(d_k)
        self.weights = self.softmax(np.where(self.mask == 0, -1e9, self.scores))
        self.open = self.softmax(self.scores)
        self.upper = self.softmax(np.where(self.mask.T == 0, -1e9, self.scores))
        self.output = self.weights @ self.v

    @staticmethod
    def softmax(scores: np.ndarray) -> np.ndarray:
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def score_gradients(self) -> np.ndarray:
        """d(g_i . output_i) / d score(i, j)."""
        slopes = self.g @ self.v.T
        return self.weights * (slopes - (self.weights * slopes).sum(axis=1, keepdims=True))
