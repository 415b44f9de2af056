"""What the mistake looks like: explanations that were verified, and only those.

Every explanation predicts numbers. One is printed if the first wrong tensor is what it predicts,
up to rounding, if nine tenths of the error are explained, and if it leaves right what is right.
Of mistakes in the computation only those stay that explain most of the wrong tensors, all of them
where they cannot be told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import pass_arrays
from gpt_parity.oracle.case import Arrays, Case
from gpt_parity.oracle.gpt2_mistakes import GPT2_HYPOTHESES
from gpt_parity.oracle.gpt2_structures import reordered
from gpt_parity.oracle.graph import GRAD, LOSS_KEY, VALUE, Graph, Node, graph
from gpt_parity.oracle.likeness import UNNAMED, likenesses
from gpt_parity.oracle.mistakes import HYPOTHESES, Mistake, Operation
from gpt_parity.oracle.step_mistakes import step_predictions
from gpt_parity.oracle.trace import Trace, trace
from numpy_impl.loss import GPTLoss
from numpy_impl.tape import Observer


def hints(case: Case) -> tuple[str, ...]:
    """Verified explanations of the first wrong tensor, those first that explain most others."""
    mine = case.mine[case.first]
    if not np.isfinite(mine).all() or mine.shape != case.reference(case.first).shape:
        return ()
    if not np.isfinite(case.distance(case.first, mine)):  # beyond all numbers
        return ()
    found = dict(likenesses(case))
    if case.first.startswith("step/"):
        mistakes = _of_predictions(case, step_predictions(case.bundle, case.first))
    else:
        mistakes = _of_predictions(case, _pass_predictions(case))
    found = {text: count for text, count in found.items() if case.is_evidence(count)}
    most = max([*found.values(), *mistakes.values()], default=0)
    found |= _untold_fills({text: count for text, count in mistakes.items() if count == most})
    if len(found) > 1:
        found = {text: count for text, count in found.items() if not text.startswith(UNNAMED)}
    total = len(case.comparable)
    return tuple(
        f"{text} (explains {'all' if count == total else f'{count} of'} {total} wrong tensors)"
        if total > 1 else text
        for text, count in sorted(found.items(), key=lambda hint: -hint[1])
    )  # fmt: skip


def _untold_fills(found: dict[str, int]) -> dict[str, int]:
    """One text for fills that explain alike in one place: where a softmax is saturated any may."""
    by_place: dict[str, list[str]] = {}
    for text in found:
        if text.startswith(FILLED):
            by_place.setdefault(text.rpartition(", ")[2], []).append(text)
    alike = {place: texts for place, texts in by_place.items() if len(texts) > 1}
    gone = {text for texts in alike.values() for text in texts}
    return {text: count for text, count in found.items() if text not in gone} | {
        f"{FILLED} a number that leaves the future a weight, {place}": found[texts[0]]
        for place, texts in alike.items()
    }


FILLED = "mask: filled with"
BLOCK = re.compile(r"transformers\.[0-9]+(\.|$)")
# A mistake in the order of all blocks is seen in one of these of the first.
STRUCTURAL, FIRST_BLOCK = ("layer_norm", "residual"), "transformers.0"
Prediction = tuple[str, str, Arrays]


def _of_predictions(case: Case, predictions: Iterator[Prediction]) -> dict[str, int]:
    """By description of a mistake with the place that explains most, how much it explains."""
    best: dict[str, tuple[int, str]] = {}
    for description, place, arrays in predictions:
        if not case.leaves_right(arrays) or not case.explains(case.first, arrays[case.first]):
            continue
        count = sum(case.explains(k, arrays[k]) for k in case.comparable if k in arrays)
        if case.is_evidence(count, arrays) and count > best.get(description, (0, ""))[0]:
            best[description] = (count, place)
    return {f"{description}, {place}": count for description, (count, place) in best.items()}


class _RefutedError(Exception):
    """The forward pass has shown already that a mistake explains nothing."""


def _refute(case: Case, key: str, found: np.ndarray) -> None:
    """Stop where a known result, right or the first wrong one, is not what a mistake makes it."""
    fits = case.explains if key == case.first else case.leaves
    if not fits(key, found):
        raise _RefutedError


class _Mistaken(Observer):
    """Runs mistakes in place of some operations, by number, as long as the results fit.

    `keys` are those of results that are right or the first wrong one, by number; `behind` numbers
    the operations whose vjp may have made the first wrong gradient.
    """

    def __init__(
        self, mistakes: Mapping[int, Mistake], case: Case, keys: dict[int, str], behind: set[int]
    ) -> None:
        self.mistakes, self.case, self.keys, self.number = mistakes, case, keys, -1
        self.possible = not behind.isdisjoint(mistakes)

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> np.ndarray | None:
        self.number += 1
        mistake = self.mistakes.get(self.number)
        data = None
        if mistake is not None:
            right = Operation(
                tuple(p.data for p in parents), out.data, out.gradient_fn,
                self.case.bundle.config.mask_value,
            )  # fmt: skip
            data, out.gradient_fn = mistake(right)
            # It is one of the vjp alone.
            if data is right.out and not self.possible:
                raise _RefutedError
            data = np.asarray(data)
        key = self.keys.get(self.number)
        if key is not None:
            _refute(self.case, key, out.data if data is None else data)
        return data


class _Reordered(Observer):
    """Lets a model run whose operations have other numbers, as long as the results fit."""

    def __init__(self, model: Any, case: Case, known: set[str]) -> None:
        self.names = {id(layer): name for name, layer in model.named_modules()}
        self.case, self.known = case, known

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> None:
        if op == "cross_entropy" and LOSS_KEY in self.known:
            _refute(self.case, LOSS_KEY, out.data)

    def layer(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        key = f"{VALUE}{self.names.get(id(layer))}.output"
        if key in self.known:
            _refute(self.case, key, output.data)


def _pass_predictions(case: Case) -> Iterator[Prediction]:
    """One pass of the model for every mistake that could have made the first wrong tensor."""
    bundle = case.bundle
    model, loss_fn = bundle.model(), GPTLoss()
    operations, _ = graph(model, loss_fn, bundle.tokens, bundle.targets)
    before, behind = suspected(case, operations)
    known = {*case.right, case.first}
    keys = {number: key for key, number in operations.numbers.items() if key in known}
    numbers = {node.number for node in behind}
    heads = isinstance(bundle.config, GPT2Config)

    def ran(observer: Observer) -> Trace | None:
        try:
            with np.errstate(all="ignore"):
                return trace(model, loss_fn, bundle.tokens, bundle.targets, observer)
        # Refuted, or a mistake that does not fit these sizes.
        except (_RefutedError, ValueError, TypeError, IndexError):
            return None

    for hypothesis in (*HYPOTHESES, *(GPT2_HYPOTHESES if heads else ())):
        for place, mistakes in _places(hypothesis.mistakes, [*before, *behind], operations):
            found = ran(_Mistaken(mistakes, case, keys, numbers))
            if found is not None:
                yield hypothesis.text(heads), place, pass_arrays(found)
    if heads and any(n.role in STRUCTURAL and n.place.startswith(FIRST_BLOCK) for n in before):
        for description, place in reordered(model):
            found = ran(_Reordered(model, case, known))
            if found is not None:
                yield description, place, pass_arrays(found)


def suspected(case: Case, operations: Graph) -> tuple[list[Node], list[Node]]:
    """The operations whose result, and those whose vjp, may have made the first wrong tensor.

    A gradient needs values too, which need not have been handed in, and the loss can be right to
    rounding where they are wrong.
    """
    known = [*case.right, *case.wrong]
    _, nodes = operations.upstream(case.first, known, case.siblings)
    if not case.first.startswith(GRAD):
        return nodes, []
    _, forward = operations.upstream(LOSS_KEY, known)
    return [node for node in forward if node.key not in known], nodes


def _places(
    mistakes: Mapping[str, Mistake], suspects: list[Node], operations: Graph
) -> Iterator[tuple[str, dict[int, Mistake]]]:
    """Where a mistake may be: in one place that is suspected, everywhere, or in all blocks alone.

    Of the places that each block has it may be in one kind, in all blocks. A mistake in several
    operations is in all of them that one block has.
    """
    every = [n for n in operations.nodes if n.role in mistakes]
    if not any(n.role in mistakes for n in suspects):
        return
    groups: dict[str, list[Node]] = {}
    for node in every:
        block = ".".join(node.place.split(".")[:2])
        groups.setdefault(block if len(mistakes) > 1 else node.place, []).append(node)
    for place, nodes in groups.items():
        if any(node in suspects for node in nodes):
            yield f"at {place}", {n.number: mistakes[n.role] for n in nodes}
    if len(groups) > 1:
        yield "everywhere", {n.number: mistakes[n.role] for n in every}
    inside = [n for n in every if BLOCK.match(n.place)]
    if len({n.place for n in inside}) > 1 and len(inside) < len(every):
        yield "in all blocks", {n.number: mistakes[n.role] for n in inside}
    if len(mistakes) > 1:
        return
    kinds: dict[str, list[Node]] = {}
    for node in inside:
        kinds.setdefault(BLOCK.sub("", node.place), []).append(node)
    for kind, nodes in kinds.items():
        several = len(kinds) > 1 and len({n.place for n in nodes}) > 1
        if several and any(node in suspects for node in nodes):
            # A block has two sums with x, of which the first is what its second norm gets.
            which = "the first sum" if kind else "the second sum"
            where = which if nodes[0].role == "residual" else kind
            yield f"at {where} of all blocks", {n.number: mistakes[n.role] for n in nodes}
