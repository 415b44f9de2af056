"""The operations of one pass, and which tensor is computed from which.

Read from the tape, not from a list: whatever the NumPy twin computes is the graph. Keys name the
tensors as bundles do: `value/<entry>`, `grad/<entry>` or `grad/<parameter>`, `loss`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.oracle.trace import Trace, trace
from numpy_impl.tape import Observer

VALUE, GRAD, LOSS_KEY = "value/", "grad/", "loss"
# The order in which one projection holds them.
PROJECTED = ("query", "key", "value")
# Transpositions with heads, by the operation before.
HEADS = {"unbind": "heads", "matmul": "merge"}

Found = tuple[str, tuple[int | str | None, ...]]


@dataclass(frozen=True)
class Node:
    """One operation. `parents` are numbers of earlier ones, or names of parameters, or None.

    `entry` is the trace's name of the result, "" where it has none; `place` is that of the next
    operation that has one: where in the model this one stands. `role` is what it is for, where
    an operation serves for several things.
    """

    number: int
    op: str
    role: str
    parents: tuple[int | str | None, ...]
    entry: str
    place: str

    @property
    def key(self) -> str:
        if self.op == "cross_entropy":
            return LOSS_KEY
        return VALUE + self.entry if self.entry else ""


class _Recorder(Observer):
    """Notes every operation and the numbers or names of its parents."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names: dict[int, int | str] = dict(names)
        self.found: list[Found] = []
        self.held: list[Any] = []  # so that no id is used twice

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> None:
        self.found.append((op, tuple(self.names.get(id(p)) for p in parents)))
        self.names[id(out)] = len(self.found) - 1
        self.held.append((out, parents))


class Graph:
    """The operations in topological order, and how tensors depend on each other."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.numbers = {node.key: node.number for node in nodes if node.key}
        self.consumers: dict[int | str | None, list[int]] = {}
        for node in nodes:
            for parent in dict.fromkeys(node.parents):
                self.consumers.setdefault(parent, []).append(node.number)

    def upstream(
        self, key: str, known: Collection[str], siblings: Collection[str] = ()
    ) -> tuple[list[str], list[Node]]:
        """The nearest `known` keys that `key` is computed from, and the operations on the way.

        Gradients come from the gradients of later results. That they need values too is left
        out: a wrong value is found before any gradient. A parameter's gradient in `siblings`
        stands for the gradient of the result that the parameter went into.
        """
        backward = key.startswith(GRAD)
        name = key.removeprefix(GRAD)
        start = self.numbers.get(VALUE + name, name) if backward else self.numbers[key]
        keys: list[str] = []
        operations: set[int] = set()
        seen: set[int | str] = {start}
        stack: list[int | str] = [start]
        while stack:
            at = stack.pop()
            following = self._later(at) if backward else self._earlier(int(at))
            operations.update(following if backward else [int(at)])
            for number in following:
                if number in seen:
                    continue
                seen.add(number)
                found = self._stops(number, backward, key, known, siblings)
                keys += found
                if not found:
                    stack.append(number)
        return keys, [self.nodes[n] for n in sorted(operations)]

    def independent(
        self, wrong: Sequence[str], right: Collection[str], siblings: Collection[str]
    ) -> list[str]:
        """Those of `wrong` but the first that nothing else wrong explains.

        `wrong` is in the order of judgement; `siblings` as for `upstream`. Where a value or the
        loss is wrong, all gradients follow from it; steps are no part of the graph.
        """
        forward = any(key in self.numbers for key in wrong)
        alone: list[str] = []
        for i, key in enumerate(wrong[1:], start=1):
            explained = forward and key.startswith(GRAD)
            if explained or not (key in self.numbers or key.startswith(GRAD)):
                continue
            above, _ = self.upstream(key, [*right, *wrong], [*siblings, *wrong[:i]])
            if not set(wrong).intersection(above):
                alone.append(key)
        return alone

    def _later(self, at: int | str) -> list[int]:
        return self.consumers.get(at, [])

    def _earlier(self, at: int) -> list[int]:
        return [p for p in self.nodes[at].parents if isinstance(p, int)]

    def _stops(
        self, number: int, backward: bool, key: str, known: Collection[str],
        siblings: Collection[str],
    ) -> list[str]:  # fmt: skip
        """What is known of a result: its own key, or the gradients of its parameters."""
        node = self.nodes[number]
        own = (GRAD if backward else VALUE) + node.entry
        if node.entry and own in known:
            return [own]
        parameters = [GRAD + p for p in node.parents if backward and isinstance(p, str)]
        return [p for p in parameters if p in siblings and p != key]


def graph(model: Any, loss_fn: Any, tokens: np.ndarray, targets: np.ndarray) -> tuple[Graph, Trace]:
    """The operations of a NumPy model, and the trace of the pass they were read from."""
    recorder = _Recorder({id(p): name for name, p in model.named_parameters()})
    found = trace(model, loss_fn, tokens, targets, recorder)
    entries = {number: entry for entry, number in found.ordinals.items()}
    nodes: list[Node] = []
    place = LOSS_KEY
    for number in reversed(range(len(recorder.found))):
        op, parents = recorder.found[number]
        entry = entries.get(number, "")
        place = entry.rpartition(".")[0] or entry or place
        nodes.append(Node(number, op, _role(number, recorder.found), parents, entry, place))
    return Graph(nodes[::-1]), found


def _role(number: int, found: list[Found]) -> str:
    """What an operation is for, where one serves for several things.

    The two matrix products of attention, the two embeddings, the sum of both and those of the
    residual stream; with heads the parts of the projection, and how axes are split and merged.
    """
    op, parents = found[number]
    above = [found[p][0] if isinstance(p, int) else "" for p in parents]
    if op == "matmul":
        return "context" if above[0] == "softmax" else "scores"
    if op == "embedding":
        return "positions" if "positional" in str(parents[0]) else "tokens"
    if op == "add" and above != ["embedding", "embedding"]:
        return "residual"
    if op == "unbind":
        earlier = sum(other == op and of == parents for other, of in found[:number])
        return PROJECTED[earlier % len(PROJECTED)]
    if op == "reshape":
        return "join" if above[0] == "transpose" else "split"
    if op == "transpose" and above[0] in HEADS:
        return HEADS[above[0]]
    return op
