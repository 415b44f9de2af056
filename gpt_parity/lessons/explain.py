"""The body of the command `explain`: causal attention, step by step or of a trained model."""

from __future__ import annotations

import math

import numpy as np
from rich.console import Console

from gpt_parity.backends import thread_limit
from gpt_parity.lessons import heat_maps
from gpt_parity.lessons.attention import Gradients, Stages, compute
from gpt_parity.lessons.config import ExplainConfig
from gpt_parity.lessons.labels import (
    capital,
    count,
    listing,
    names,
    positions,
    titles,
    visible,
)
from gpt_parity.lessons.tables import (
    Matrix,
    Places,
    Words,
    fitting,
    heading,
    kept,
    number,
    pick,
    print_table,
    say,
)
from gpt_parity.lessons.trained import explain_model

MOST, MOST_BESIDE = 8, 4  # positions in a table, and in one of two side by side
ROUNDING = 2.0**-40  # far above the rounding of a weight


def run(config: ExplainConfig, console: Console) -> int:
    """Explain on random numbers, or a model's attention; returns 0.

    Raises ValueError for a checkpoint or prompt that does not do, OSError for a drawing that
    cannot be written.
    """
    with thread_limit(1, "numpy"):
        if config.checkpoint is not None:
            explain_model(config, console)
            return 0
        words = [""] * config.length
        if config.tokens is not None:
            words = [visible(word) for word in config.tokens.split()]
        shown = pick(config.length, fitting(MOST, console))
        stages = compute(config.length, config.d_k, config.seed, kept(shown))
        Walk(console, words, stages, shown).tell(config)
        if config.plot is not None:
            heat_maps.draw_stages(config.plot, words, stages)
            say(console, f"The stages as heat maps: {config.plot}")
    return 0


class Walk:
    """The steps in order; every number and every sentence with one comes from the stages."""

    def __init__(self, console: Console, words: list[str], stages: Stages, shown: Places) -> None:
        self.console, self.stages, self.shown = console, stages, shown
        self.labels, self.names, self.titles = positions(words), names(words), titles(words)
        self.length, self.d_k = stages.q.shape
        self.first = capital(self.titles[0])
        self.places_beside = pick(self.length, fitting(MOST_BESIDE, console))
        self.replaced = stages.masked != stages.scores
        self.fills = np.unique(stages.masked[self.replaced])

    def say(self, *sentences: str) -> None:
        say(self.console, " ".join(sentences))

    def table(self, *blocks: Matrix | Words, last: bool = False) -> None:
        """A table in the middle of a step, or the last thing in it."""
        print_table(self.console, self.shown, self.labels, *blocks)
        if not last:
            self.console.print()

    def matrix(self, values: np.ndarray, low: float = 0.0, high: float = 0.0) -> Matrix:
        return Matrix(values, self.labels, self.shown, low=low, high=high)

    def beside(self, values: np.ndarray, group: str, **options: float) -> Matrix:
        return Matrix(values, self.labels, self.places_beside, group, **options)

    def tell(self, config: ExplainConfig) -> None:
        """Print all of it."""
        say(self.console, f"Causal attention over {count(self.length, 'position')}", "bold")
        self.say(
            "Each position reads itself and what came before it, never what comes after.",
            f"Queries q, keys k and values v are random here: randn({self.length}, {self.d_k}) "
            f"three times, seed {config.seed}.",
            "In every table a row is position i, which reads, and a column is position j, which "
            "is read. A bare 0 is exactly 0, not rounded.",
        )
        if None in self.shown:
            places = kept(self.shown)
            gap = self.shown.index(None)
            self.say(
                f"Of {self.length} positions the tables show {places[0]} to {places[gap - 1]} and "
                f"{places[gap]} to {places[-1]}; … stands for the others. What is counted or "
                "summed is so over all of them."
            )
        steps = {
            "The mask: the lower triangle": self.the_mask,
            "What each position may attend to": self.who_sees_whom,
            "The scores, before and after the mask": self.the_scores,
            "The weights: softmax of each row": self.the_weights,
            "The output: a weighted sum of the values": self.the_output,
            "With and without the mask, side by side": self.without_the_mask,
            "Lower or upper triangle": self.the_wrong_triangle,
            "Where the gradient flows, and where it is exactly 0": self.the_gradient,
        }
        for place, (title, step) in enumerate(steps.items(), 1):
            heading(self.console, f"{place}. {title}")
            step()

    def the_mask(self) -> None:
        mask = self.stages.mask
        self.say(
            "The mask is a square of ones whose upper triangle is set to 0: entry (i, j) stays 1 "
            f"where j <= i. {np.count_nonzero(mask)} of {mask.size} entries are 1: position i may "
            "read position j. The others are 0: it may not."
        )
        self.table(Matrix(mask, self.labels, self.shown, whole=True), last=True)

    def who_sees_whom(self) -> None:
        for i in self.shown:
            if i is None:
                self.say("…")
            else:
                seen = [self.names[j] for j in np.flatnonzero(self.stages.mask[i])]
                self.say(f"{self.titles[i]} sees {listing(seen)}")

    def the_scores(self) -> None:
        s, i = self.stages, min(1, self.length - 1)
        root = math.sqrt(self.d_k)
        self.say(
            "A score says how well a query fits a key: score(i, j) = q_i . k_j / sqrt(d_k), with "
            f"sqrt({self.d_k}) = {root:.4f}. So score({i}, 0) = {number(s.products[i, 0])} / "
            f"{root:.4f} = {number(s.scores[i, 0])}. Before the mask:"
        )
        low, high = float(s.scores.min()), float(s.scores.max())
        self.table(self.matrix(s.scores, low, high))
        if not self.fills.size:
            self.say("The mask replaces no score here. After the mask:")
        else:
            self.say(
                f"The mask replaces {count(int(self.replaced.sum()), 'score')} of "
                f"{self.replaced.size} by {listing([str(fill) for fill in self.fills])}, "
                + ("those" if np.array_equal(self.replaced, s.mask == 0) else "NOT only those")
                + " where the mask is 0. After it:"
            )
        self.table(self.matrix(s.masked, low, high), last=True)

    def the_weights(self) -> None:
        s = self.stages
        sums = s.weights.sum(axis=1)
        totals = Words("sum", [f"{total:.4f}" for total in sums], justify="right")
        self.say(
            "weight(i, j) = exp(score(i, j)) / sum over j of exp(score(i, j)).",
            *(f"exp({fill}) = {number(np.exp(fill))}." for fill in self.fills[:1]),
            "So the weight of a row is shared by what was not masked.",
        )
        self.table(self.matrix(s.weights, 0.0, 1.0), totals)
        off = float(abs(sums - 1.0).max())
        self.say(
            "Every row sums to 1"
            + (" exactly." if off == 0 else f" up to rounding, at most {off:.1e} away."),
            f"{np.count_nonzero(s.weights == 0)} of {s.weights.size} weights are exactly 0. "
            f"{self.leaks(s.weights[s.future])}",
        )

    def leaks(self, future: np.ndarray) -> str:
        """Whether what belongs to pairs (i, j) with j > i is 0, by counting."""
        if not future.size:
            return "Nothing lies in the future."
        zeros = int(np.count_nonzero(future == 0))
        if zeros == future.size:
            return f"The future (j > i) has {zeros} of them, which is all of it: nothing leaks."
        return f"The future (j > i) has {zeros} of its {future.size}: the rest LEAKS."

    def the_output(self) -> None:
        s = self.stages
        columns = min(fitting(MOST, self.console), self.d_k)
        first = "" if columns == self.d_k else f" The first {columns} of {self.d_k} columns:"
        self.say(f"output_i = sum over j of weight(i, j) v_j, of d_k = {self.d_k} columns.{first}")
        headers = [f"col {c}" for c in range(columns)]
        spread = float(abs(s.output).max())
        self.table(Matrix(s.output, headers, list(range(columns)), low=-spread, high=spread))
        if np.array_equal(s.output[0], s.v[0]):
            self.say(f"{self.first} reads itself alone: its output is v_0, to the last bit.")
        else:
            self.say(
                f"The output of {self.titles[0]} differs from v_0 by up to "
                f"{abs(s.output[0] - s.v[0]).max():.4f}: it reads other positions too."
            )

    def without_the_mask(self) -> None:
        s = self.stages
        ahead = np.where(s.future, s.open_weights, 0.0).sum(axis=1)
        self.say(
            "open: weights of self-attention without a mask. causal: with it. future: how much of "
            "the open weights in the row goes to positions after i."
        )
        self.table(
            self.beside(s.open_weights, "open", high=1.0),
            self.beside(s.weights, "causal", high=1.0),
            Words("\nfuture", [number(x) for x in ahead], justify="right"),
        )
        self.say(
            f"Without the mask {self.titles[0]} would give {number(ahead[0])} of its weight to the "
            f"future; on average a position would give {number(ahead.mean())}."
        )
        rest = np.where(s.future, 0.0, s.open_weights)
        rest /= rest.sum(axis=1, keepdims=True)
        off = float(abs(rest - s.weights).max())
        verdict = "should be" if off > ROUNDING else "is"
        self.say(
            f"Masking a score before the softmax {verdict} the same as dropping its weight after "
            "it and dividing the row by what is left: the two "
            + (f"differ by {off:.1e} at most." if off else "are equal to the last bit.")
        )

    def the_wrong_triangle(self) -> None:
        s = self.stages
        self.say(
            "The upper triangle (j >= i) is the mask turned over. With it a position reads itself "
            "and what comes after, so it would read the very words it has to guess."
        )
        self.table(
            self.beside(s.mask, "lower", whole=True), self.beside(s.upper, "upper", whole=True)
        )
        for i in range(min(2, self.length)):
            lower, upper = (
                listing([self.names[j] for j in np.flatnonzero(mask[i])])
                for mask in (s.mask, s.upper)
            )
            ahead = s.upper_weights[i, i + 1 :].sum()
            self.say(
                f"{capital(self.titles[i])}: lower sees {lower}; upper sees {upper}, "
                f"with {number(ahead)} of the weight on what comes after it."
            )
        if self.length == 1:
            self.say("With one position the two triangles are the same.")
        else:
            last = self.length - 1
            seen = [self.names[j] for j in np.flatnonzero(s.upper[last])]
            self.say(
                f"And {self.titles[last]}, which knows most, would be left with {listing(seen)}."
            )

    def the_gradient(self) -> None:
        s = self.stages
        rows = len(s.gradients["v"].rows)
        which = "each position" if rows == self.length else f"the {rows} positions shown"
        self.say(
            "Now backward: a random cotangent enters at the output of one position i, for "
            f"{which} in turn. A row is that output, a column is input position j, an entry is "
            "the norm of the gradient that arrives there."
        )
        self.norms("v", "At the values: v_j gets weight(i, j) times the cotangent.")
        self.norms("k", "At the keys:")
        self.norms("scores", "At the scores of row i, before the mask:")
        if self.length > 1:
            reads = "what position i reads depends on the scores of row i alone."
            self.say(
                f"Of the other rows of the scores {s.strays} entries get a gradient that is not 0: "
                + ("a gradient LEAKS there." if s.strays else reads)
            )

    def norms(self, name: str, sentence: str) -> None:
        g: Gradients = self.stages.gradients[name]
        self.say(sentence)
        values = np.zeros((self.length, self.length))
        values[g.rows] = g.norms
        self.table(self.matrix(values, 0.0, float(g.norms.max())))
        zero = int(g.zero.sum())
        ahead = int((g.zero & g.future).sum())
        self.say(
            f"Counted, not rounded: {zero} of {g.zero.size} are exactly 0.",
            self.leaks(np.where(g.zero, 0.0, 1.0)[g.future]),
        )
        first = g.zero[0, 0] and g.rows[0] == 0
        if name == "k" and first and zero > ahead:
            self.say(
                f"So is (0, 0): the one weight of {self.titles[0]} is "
                f"{number(self.stages.weights[0, 0])} whatever its score, so that neither the "
                "score nor the key gets a gradient."
            )
