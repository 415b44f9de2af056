"""Where a mistake shows first, on the graph of the model: values flow down, gradients up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpt_parity.backends import build_model
from gpt_parity.html.markup import svg, text
from gpt_parity.html.tensors import Tensor
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.graph import GRAD, PROJECTED, VALUE, Graph, Node, graph
from numpy_impl.loss import GPTLoss

# Up to so many blocks all are drawn, of more the one that matters.
MOST_BLOCKS = 2
WIDTH, LANE = 390, 26
# Heights: of a name, of a line of words, of a parameter, of what stands beside an edge.
HIGH, WORDS, LOW, LABEL = 12, 14, 30, 14
# What only moves the elements of heads; the edges say which part of a projection goes where.
SHAPING = frozenset({"split", "heads", "merge", "join", *PROJECTED})
BLOCK = re.compile(r"transformers\.([0-9]+)\.")


@dataclass
class Row:
    """A line of the drawing: a result with the parameters that went into it, or blocks left out."""

    name: str
    op: str = ""
    value: str = ""
    gradient: str = ""
    parameters: list[str] = field(default_factory=list)
    y: float = 0.0


@dataclass(frozen=True)
class Edge:
    """`label` is what attention takes a result for, or that it skips a branch."""

    source: str
    target: str
    label: str


class States:
    """What is said of each key: the first that differs, what follows from it, what agrees."""

    def __init__(self, found: Sequence[Tensor], operations: Graph) -> None:
        self.tensors = {t.key: t for t in found}
        wrong = [key for key, t in self.tensors.items() if not t.ok]
        right = [key for key, t in self.tensors.items() if t.ok and t.judged]
        siblings = [key for key in right if len(self.tensors[key].shape or ()) > 1]
        self.first = wrong[0] if wrong else ""
        self.alone = operations.independent(wrong, right, siblings)

    def state(self, key: str) -> str:
        """ "first", "alone", "wrong", "right" or "none"."""
        t = self.tensors.get(key)
        if t is None or (t.ok and not t.judged):
            return "none"
        if key == self.first:
            return "first"
        return "right" if t.ok else "alone" if key in self.alone else "wrong"

    def said(self, row: Row) -> list[str]:
        """The lines under a name: value and gradient together where both are fine."""
        op = f"{row.op} · " if row.value else row.op
        if not row.value:
            return [op]
        value, gradient = self.words(row.value), self.words(row.gradient)
        if not row.gradient:
            return [f"{op}value {value}"]
        if value == gradient:
            return [f"{op}value and gradient {value.replace('agrees', 'agree')}"]
        return [f"{op}value {value}", f"gradient {gradient}"]

    def words(self, key: str) -> str:
        state = self.state(key)
        if state == "none":
            return "not judged" if key in self.tensors else "not handed in"
        ratio = self.tensors[key].worst.ratio
        return {
            "first": f"DIFFERS FIRST ({ratio:.3g})", "wrong": f"differs, follows ({ratio:.3g})",
            "alone": f"differs on its own ({ratio:.3g})", "right": "agrees",
        }[state]  # fmt: skip


def structure(blocks: int, gpt2: bool = False) -> Graph:
    """The operations of a model with so many blocks; they do not depend on sizes or weights."""
    config = GPT2Config(2, 2, 2, blocks, heads=1) if gpt2 else GPTConfig(2, 2, 2, blocks)
    model = build_model("numpy", config, dtype="float64")
    tokens = np.zeros((1, 2), np.int64)
    return graph(model, GPTLoss(), tokens, tokens)[0]


def flow(ident: str, found: Sequence[Tensor], blocks: int, gpt2: bool = False) -> str:
    """The drawing with its caption, of a GPT-2 with its norms and residuals."""
    operations = structure(blocks, gpt2)
    states = States(found, operations)
    rows, home = _rows(operations, states, blocks)
    edges = _edges(operations, home)
    lanes = _lanes(edges, list(rows))
    left = 18 + LANE * max([0, *lanes.values()])
    labelled = {edge.target for edge in edges if edge.label}
    y = 8.0
    for name, row in rows.items():
        y += LABEL if name in labelled else 0
        row.y = y + HIGH
        y = row.y + WORDS * len(states.said(row)) + LOW * len(row.parameters) + WORDS
    body = [_edge(edge, rows, lanes[edge], left) for edge in edges]
    body += [_drawn(row, states, left) for row in rows.values()]
    said = _caption(states, blocks, len(rows))
    width = max(WIDTH, left + 24 + 7.3 * max(len(name) + 3 for name in _names(rows)))
    picture = svg(
        ident, "The model as a graph, with what agrees and what differs", said, (width, y),
        "\n".join(body), style="flow", scale=1.25,
    )  # fmt: skip
    return f"<figure>\n{picture}\n<figcaption>{text(said)}</figcaption>\n</figure>"


def _names(rows: Mapping[str, Row]) -> list[str]:
    return [name for row in rows.values() for name in (row.name, *row.parameters)]


def _rows(operations: Graph, states: States, blocks: int) -> tuple[dict[str, Row], dict[str, str]]:
    """The lines from top to bottom, and in which one each key is."""
    shown = set(range(blocks)) if blocks <= MOST_BLOCKS else {_interest(states.first, blocks)}
    rows: dict[str, Row] = {}
    home: dict[str, str] = {}
    hidden: list[str] = []
    drawn: set[str] = set()
    for node in operations.nodes:
        if not node.key:
            continue
        block = BLOCK.match(node.entry)
        if block and int(block[1]) not in shown:
            hidden += [node.key, GRAD + node.entry]
            hidden += [GRAD + p for p in node.parents if isinstance(p, str)]
            number = int(block[1])
            last = max(n for n in range(blocks) if not shown & set(range(number, n + 1)))
            first = min(n for n in range(blocks) if not shown & set(range(n, number + 1)))
            name = f"transformers.{first}" + (f" to {last}" if last > first else "")
            differ = sum(states.state(key) in ("first", "alone", "wrong") for key in hidden)
            rows[name] = Row(name, f"not drawn; of these tensors {differ} differ")
            home[node.key] = name
            continue
        hidden = []
        gradient = GRAD + node.entry if node.entry else ""
        names = [p for p in node.parents if isinstance(p, str)]
        parameters = [p for p in names if p not in drawn]  # a tied weight stands where it is first
        drawn.update(names)
        role = _role(operations, node) + (f" by {names[0]}" if names and not parameters else "")
        name = node.entry or node.key
        rows[name] = Row(name, role, node.key, gradient, parameters)
        home[node.key] = name
    return rows, home


def _interest(first: str, blocks: int) -> int:
    """The block to be drawn: that of the first difference, or the one next to it."""
    found = BLOCK.search(first)
    if found:
        return min(int(found[1]), blocks - 1)
    ends = ("output", "norm.")
    late = tuple(kind + name for kind in (GRAD, VALUE) for name in ends)
    return blocks - 1 if first.startswith((*late, "loss")) else 0


def _role(operations: Graph, node: Node) -> str:
    """The operations that made a result since the last ones that have names, but for its shape."""
    roles = [node.role] if node.role not in SHAPING else []
    stack = list(node.parents)
    while stack:
        parent = stack.pop()
        if isinstance(parent, int) and not operations.nodes[parent].key:
            above = operations.nodes[parent]
            roles[:0] = [above.role] if above.role not in SHAPING else []
            stack += above.parents
    return ", ".join(dict.fromkeys(roles))


def _edges(operations: Graph, home: Mapping[str, str]) -> list[Edge]:
    """Which result is computed from which, once for every use."""
    found: list[Edge] = []

    def follow(node: Node, target: str, label: str) -> None:
        for i, parent in enumerate(node.parents):
            if not isinstance(parent, int):
                continue
            use = label
            if node.role == "scores":
                use = "query" if i == 0 else "key"
            elif node.role == "context":
                use = "weights" if i == 0 else "value"
            elif node.role == "residual":
                use = "skip" if i == 0 else ""
            above = operations.nodes[parent]
            if above.key:
                found.append(Edge(home[above.key], target, use))
            else:
                follow(above, target, use)

    for node in operations.nodes:
        if node.key:
            follow(node, home[node.key], "")
    return [edge for edge in dict.fromkeys(found) if edge.source != edge.target]


def _lanes(edges: Sequence[Edge], order: list[str]) -> dict[Edge, int]:
    """0 for the first edge between neighbours, else how far to the left it bends."""
    found: dict[Edge, int] = {}
    taken: list[tuple[int, int, int]] = []

    def span(edge: Edge) -> tuple[int, int]:
        return order.index(edge.source), order.index(edge.target)

    for edge in sorted(edges, key=lambda e: span(e)[1] - span(e)[0]):
        start, end = span(edge)
        lane = 0 if end - start == 1 else 1
        while any(n == lane and a < end and start < b for a, b, n in taken):
            lane += 1
        taken.append((start, end, lane))
        found[edge] = lane
    return found


def _edge(edge: Edge, rows: Mapping[str, Row], lane: int, left: float) -> str:
    top, bottom, x = rows[edge.source].y, rows[edge.target].y, left - LANE * lane
    bend = f"M{left} {top}C{x} {top + 6} {x} {top + 6} {x} {top + 20}V{bottom - 20}"
    path = f"{bend}C{x} {bottom - 6} {x} {bottom - 6} {left} {bottom}"
    if lane == 0:
        path = f"M{left} {top}V{bottom}"
    line = f'<path class="edge" d="{path}"/>'
    if not edge.label:
        return line
    return f'{line}<text class="soft" x="{x + 5}" y="{bottom - 18}">{text(edge.label)}</text>'


def _drawn(row: Row, states: States, left: float) -> str:
    keys = [states.state(key) for key in (row.value, row.gradient) if key]
    said = states.said(row)
    lines = [_line(row.name, said, keys, left, row.y)]
    for i, name in enumerate(row.parameters, start=1):
        y, key = row.y + WORDS * len(said) + LOW * i - 10, GRAD + name
        bend = f"M{left} {row.y}C{left} {row.y + 12} {left + 9} {row.y + 8} {left + 9} {row.y + 20}"
        lines.insert(0, f'<path class="edge" d="{bend}V{y}H{left + 16}"/>')
        words = [f"gradient {states.words(key)}"]
        lines.append(_line(name, words, [states.state(key)], left + 20, y))
    return "\n".join(lines)


def _line(name: str, said: list[str], states: list[str], x: float, y: float) -> str:
    """Marker, name and words of one tensor, or of a value and its gradient."""
    state = next((s for s in ("first", "alone", "wrong", "right") if s in states), "none")
    style = {"alone": "wrong"}.get(state, state)
    parts = [f'<g class="row {style}">']
    if state == "first":
        parts.append(
            f'<rect class="first" x="{x + 10}" y="{y - 15}" width="{WIDTH - x - 12}" '
            f'height="{18 + WORDS * len(said)}" rx="4"/>'
        )
    parts.append(_marker(state, style, x, y))
    parts.append(f'<text class="name" x="{x + 15}" y="{y - 1}">{text(name)}</text>')
    for i, words in enumerate(said, start=1):
        parts.append(
            f'<text class="soft words" x="{x + 15}" y="{y - 1 + WORDS * i}">{text(words)}</text>'
        )
    return "".join([*parts, "</g>"])


def _marker(state: str, style: str, x: float, y: float) -> str:
    """A circle where all agrees, a square for a consequence, a diamond for the first one."""
    if state == "first":
        return f'<path class="mark {style}" d="M{x} {y - 9}L{x + 9} {y}L{x} {y + 9}L{x - 9} {y}Z"/>'
    if state == "alone":
        return f'<path class="mark {style}" d="M{x} {y - 7}L{x + 7} {y + 5}H{x - 7}Z"/>'
    if state == "wrong":
        return f'<rect class="mark {style}" x="{x - 5}" y="{y - 5}" width="10" height="10"/>'
    return f'<circle class="mark {style}" cx="{x}" cy="{y}" r="5"/>'


def _caption(states: States, blocks: int, rows: int) -> str:
    """What the marks mean, and what is not in the picture."""
    said = "Values are computed from top to bottom, gradients from bottom to top."
    if states.first:
        count = sum(not t.ok for t in states.tensors.values() if not t.key.startswith("step/"))
        said += (
            f" The filled diamond is {states.first}, the first to differ; of {count} tensors that "
            f"differ {len(states.alone) or 'none'} do so on their own (triangles), the others as "
            "its consequence (squares). Figures in brackets are in units of tolerance."
        )
    else:
        said += " Circles are tensors that agree."
    said += " Dashed circles were not handed in or not judged."
    if blocks > MOST_BLOCKS:
        said += f" Of {blocks} blocks the one that matters is drawn."
    steps = [t for t in states.tensors.values() if t.key.startswith("step/")]
    if steps:
        differ = sum(not t.ok for t in steps)
        said += f" {len(steps)} tensors of optimizer steps are not in it, {differ} of them differ."
    return said
