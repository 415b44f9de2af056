"""The tensors of one or several reports: the table of all of them, and their error maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpt_parity.html.heat import heat_map, legend
from gpt_parity.html.markup import details, paragraph, table
from gpt_parity.oracle.compare import FORWARD, GRADIENT, PARAMETER, Judgement, Pair, Report
from gpt_parity.oracle.graph import GRAD, VALUE

MOST_ROWS = 1500
# Bytes of all maps together.
MOST_BYTES = 4_000_000
# Where all is wrong, the first few maps tell enough at a glance.
OPENED = 3
FIRST, DIFFERS, AGREES, ZERO, UNJUDGED = (
    "✗ first to differ", "✗ differs", "✓ agrees", "✓ zero, exactly", "? not judged",
)  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor: its judgement by the label of each report, and its arrays where they are held."""

    name: str
    kind: str
    judgements: Mapping[str, Judgement]
    pairs: Mapping[str, Pair]

    @property
    def worst(self) -> Judgement:
        return max(self.judgements.values(), key=lambda j: j.ratio)

    @property
    def ok(self) -> bool:
        return self.worst.ok

    @property
    def judged(self) -> bool:
        return all(j.judged for j in self.judgements.values())

    @property
    def shape(self) -> tuple[int, ...] | None:
        """That of the reference."""
        return next((pair.reference.shape for pair in self.pairs.values()), None)

    @property
    def key(self) -> str:
        """Its name in the graph of operations."""
        if self.name.startswith((VALUE, GRAD)):
            return self.name
        prefix = {FORWARD: VALUE, GRADIENT: GRAD, PARAMETER: GRAD}.get(self.kind, "")
        return prefix + self.name


def tensors(reports: Mapping[str, Report]) -> list[Tensor]:
    """The tensors of reports on the same reference, in the order of judgement."""
    found: dict[tuple[str, str], tuple[dict[str, Judgement], dict[str, Pair]]] = {}
    for label, report in reports.items():
        for j in report.judgements:
            judgements, pairs = found.setdefault((j.kind, j.name), ({}, {}))
            judgements[label] = j
            if (j.kind, j.name) in report.pairs:
                pairs[label] = report.pairs[j.kind, j.name]
    return [Tensor(name, kind, *parts) for (kind, name), parts in found.items()]


def status(tensor: Tensor, first: Tensor | None) -> str:
    if tensor is first:
        return FIRST
    if not tensor.ok:
        return DIFFERS
    if not tensor.judged:
        return UNJUDGED
    return ZERO if all(j.exact_zero for j in tensor.judgements.values()) else AGREES


def tensor_table(
    found: Sequence[Tensor], first: Tensor | None, votes: Mapping[str, float] | None = None
) -> str:
    """All tensors in words and figures; `votes` are ratios of complex step by key."""
    shown = list(found)
    if len(shown) > MOST_ROWS:  # those that differ come before those that agree
        kept = sorted(range(len(shown)), key=lambda i: shown[i].ok)[:MOST_ROWS]
        shown = [shown[i] for i in sorted(kept)]
    labels = list(dict.fromkeys(label for t in shown for label in t.judgements))
    columns = ["tensor", "status"]
    columns += labels if len(labels) > 1 else ["error / tolerance"]
    columns += ["complex step"] if votes is not None else []
    numbers = range(2, len(columns))
    columns += ["how far", "kind", "shape"]
    rows = []
    for t in shown:
        row: list[object] = [t.name, status(t, first)]
        row += [_ratio(t.judgements.get(label)) for label in labels]
        if votes is not None:
            row.append(f"{votes[t.key]:.3g}" if t.key in votes else "")
        row += [t.worst.describe() if t.judged or not t.ok else ""]
        rows.append([*row, t.kind, t.shape if t.shape is not None else ""])
    content = table(
        "Tensors in the order in which a mistake would show first", columns, rows,
        numbers=numbers, styles=["" if t.ok else "bad" for t in shown],
    )  # fmt: skip
    left = len(found) - len(shown)
    return content + (paragraph(f"{left} more tensors are left out of this table.") if left else "")


def _ratio(judgement: Judgement | None) -> str:
    if judgement is None:
        return ""
    return f"{judgement.ratio:.3g}" if judgement.judged else "not judged"


def error_maps(found: Sequence[Tensor], first: Tensor | None) -> str:
    """A map of each tensor whose arrays are held; open where it differs.

    Those that differ are drawn first while there is room, the others are counted.
    """
    drawn: dict[int, str] = {}
    size, left, opened = 0, 0, 0
    for i in sorted(range(len(found)), key=lambda i: found[i].ok):
        t = found[i]
        if not t.pairs:
            continue
        if size > MOST_BYTES:
            left += 1
            continue
        several = len(t.judgements) > 1
        maps = [
            heat_map(f"map-{i}-{n}", t.judgements[label], pair, label if several else "")
            for n, (label, pair) in enumerate(t.pairs.items())
        ]
        opened += not t.ok
        drawn[i] = details(
            f"({t.kind}): {status(t, first)}",
            *maps,
            name=t.name,
            opened=not t.ok and opened <= OPENED,
        )
        size += len(drawn[i])
    if not drawn:
        return ""
    content = [legend(), *(drawn[i] for i in sorted(drawn) if not found[i].ok)]
    agreeing = [drawn[i] for i in sorted(drawn) if found[i].ok]
    if agreeing:
        content.append(details(f"Maps of the tensors that agree ({len(agreeing)})", *agreeing))
    if left:
        content.append(paragraph(f"Maps of {left} more tensors are left out: the page would be "
                                 "too large."))  # fmt: skip
    return "\n".join(content)
