"""The verification as a table, as one sentence, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gpt_parity.corpus import Corpus
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import FORWARD, GRADIENT, LOSS, PARAMETER, Judgement, Report
from gpt_parity.oracle.complex_step import Vote
from gpt_parity.oracle.hops import steps_of
from gpt_parity.oracle.lockstep import QUANTITIES, Outcome
from gpt_parity.oracle.slips import VISIBLE, Sighting
from gpt_parity.oracle.tolerance import UNDECIDED
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.provenance import provenance

SCHEMA = "gpt-parity/verification"
SCHEMA_VERSION = 1
# What the slips of training in several processes stand under, among those of the dtypes.
PROCESSES = "processes"


@dataclass(frozen=True)
class Verification:
    """All that `verify` measured. `reports` are by (backend, dtype), `slips` by dtype.

    `arithmetic` holds the judgement of a pass in another arithmetic by what computed it.
    """

    model: GPTConfig
    corpus: Corpus
    config: VerifyConfig
    slips: dict[str, list[Sighting]]
    reports: dict[tuple[str, str], Report]
    votes: list[Vote]
    lockstep: list[Outcome]
    arithmetic: Mapping[str, Report] = field(default_factory=dict)

    @property
    def sees_slips(self) -> bool:
        return all(s.ok for sightings in self.slips.values() for s in sightings)

    @property
    def ok(self) -> bool:
        return (
            self.sees_slips
            and all(report.ok and report.complete for report in self.reports.values())
            and all(vote.closure <= 1.0 and vote.autograd <= 1.0 for vote in self.votes)
            and all(outcome.ok for outcome in self.lockstep)
            and all(report.ok for report in self.arithmetic.values())
        )

    def meaning(self) -> str:
        """Who stands alone, by the third vote, where the float64 gradients differ."""
        failed = {(j.kind, j.name) for j in self.reports["torch", "float64"].judgements if not j.ok}
        votes = [v for v in self.votes if max(v.closure, v.autograd) > 1.0]
        votes += [v for v in self.votes if (v.kind, v.name) in failed and v not in votes]
        if not votes:
            return ""
        v = max(votes, key=lambda vote: max(vote.closure, vote.autograd))
        if v.closure <= 1.0 < v.autograd:
            return f"{v.name}: complex step agrees with the closure; autograd stands alone"
        if v.autograd <= 1.0 < v.closure:
            return f"{v.name}: complex step agrees with autograd; the closure stands alone"
        if v.closure > 1.0 and v.autograd > 1.0:
            return f"{v.name}: complex step agrees with neither"
        return f"{v.name}: complex step cannot tell closure and autograd apart"

    def verdict(self) -> str:
        """One sentence."""
        judgements = [j for report in self.reports.values() for j in report.judgements]
        judgements += [j for o in self.lockstep for q in o.worst.values() for j, _ in q.values()]
        worst = max(judgements, key=lambda j: j.ratio)
        if not self.sees_slips:
            return "FAIL: the comparer missed a planted slip, so its judgement counts for nothing."
        if self.ok:
            tensors = len(self.reports["torch", "float64"].judgements)
            training = ""
            if self.config.steps:
                training = f", in {self.config.steps} training steps in float64 and float32"
            if self.config.hops:
                training += (
                    f", and in {steps_of(self.config.hops)} float64 steps with "
                    f"{self.config.hops} changes of the backend"
                )
            if self.config.processes > 1:
                training += f", and in training in {self.config.processes} processes"
            training += "".join(f", and one pass in {name}" for name in self.arithmetic)
            return (
                f"PASS: numpy_impl and torch_impl agree in {tensors} tensors of one pass in "
                f"float64 and float32{training}; worst {worst.ratio:.3f} of tolerance "
                f"({worst.kind} {worst.name})."
            )
        for (backend, dtype), report in self.reports.items():
            if report.first is not None:
                return (
                    f"FAIL: {backend} {dtype} first leaves the tolerance at {report.first.kind} "
                    f"{report.first.name}, {report.first.describe()}. {self.meaning()}"
                ).rstrip()
        for (backend, dtype), report in self.reports.items():
            if not report.complete:
                unjudged = next(j for j in report.judgements if not j.judged)
                return (
                    f"FAIL: {backend} {dtype} cannot be judged in {unjudged.kind} {unjudged.name} "
                    f"and others: with these weights {UNDECIDED}."
                )
        for name, report in self.arithmetic.items():
            if report.first is not None:
                return (
                    f"FAIL: {name} first leaves the tolerance at {report.first.name}, "
                    f"{report.first.describe()}."
                )
        if worst.ok:
            return f"FAIL: {self.meaning()}."
        return (
            f"FAIL: training leaves the tolerance in {worst.kind} {worst.name}, {worst.describe()}."
        )

    def print_pass(self, console: Console) -> None:
        """The text, the slips, and the table of tensors."""
        absent = (
            "data/tinyshakespeare.txt is absent, verified on " if self.corpus.is_fallback else ""
        )
        _line(
            console,
            f"{absent}{self.corpus.name}: {self.corpus.size}, vocabulary "
            f"{self.model.vocab_size}, {self.model.parameter_count():,} parameters, "
            f"sha256 {self.corpus.sha256[:16]}",
        )
        for dtype, sightings in self.slips.items():
            _print_slips(console, dtype, sightings)
        console.print(self._tensor_table())
        for name, report in self.arithmetic.items():
            for line in replace(report, title=name).lines():
                _line(console, line)

    def print_verdict(self, console: Console) -> None:
        """The table of training, the verdict, and what it was measured with."""
        _print_slips(console, PROCESSES, self.slips.get(PROCESSES, []))
        if self.lockstep:
            console.print(self._training_table())
        _line(console, self.verdict(), style="green" if self.ok else "red")
        facts = provenance()
        _line(
            console,
            f"{facts['command']}: numpy {facts['numpy']} ({facts['blas']}), torch "
            f"{facts.get('torch')}, Python {facts['python']}, {facts['machine']}, "
            f"commit {(facts['commit'] or 'unknown')[:12]}",
        )

    def _tensor_table(self) -> Table:
        """A line per tensor; narrow enough for 80 columns."""
        table = Table(
            title="Error in units of tolerance, the worse of both backends (vote: complex step)",
            title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        )  # fmt: skip
        table.add_column("tensor", no_wrap=True, overflow="ellipsis")
        for column in ("value\nf64", "value\nf32", "grad\nf64", "grad\nf32", "vote"):
            table.add_column(column, justify="right", no_wrap=True, min_width=5)
        votes = {(v.kind, v.name): max(v.closure, v.autograd) for v in self.votes}

        def ratio(dtype: str, kind: str, name: str) -> str:
            return _cell(
                max(
                    j.ratio
                    for (_, d), report in self.reports.items()
                    for j in report.judgements
                    if (d, j.kind, j.name) == (dtype, kind, name)
                )
            )

        dtypes = ("float64", "float32")
        judgements = self.reports["torch", "float64"].judgements
        for kind in (LOSS, GRADIENT, PARAMETER):  # a trace entry's value and gradient share a line
            for j in reversed([j for j in judgements if j.kind == kind]):
                forward = FORWARD if kind == GRADIENT else kind
                values = [ratio(d, forward, j.name) if kind != PARAMETER else "" for d in dtypes]
                gradients = [ratio(d, kind, j.name) if kind != LOSS else "" for d in dtypes]
                vote = _cell(votes[kind, j.name]) if kind != LOSS else ""
                table.add_row(j.name, *values, *gradients, vote)
        return table

    def _training_table(self) -> Table:
        """A line per quantity and candidate."""
        table = Table(
            title="Training in lockstep, the worst step (float32: each from a common state)",
            title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column in ("candidate", "quantity", "error", "step", "tensor"):
            table.add_column(column, justify="right" if column in ("error", "step") else "left")
        for outcome in self.lockstep:
            for who, quantities in outcome.worst.items():
                for quantity, (judgement, step) in quantities.items():
                    name = judgement.name if judgement.name != quantity else ""
                    label = f"{who} {outcome.dtype}" if quantity == QUANTITIES[0] else ""
                    table.add_row(label, quantity, _cell(judgement.ratio), str(step), name)
        return table

    def json(self) -> bytes:
        """Everything, under a versioned schema; ratios that are not finite are strings."""
        content = {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "ok": self.ok,
            "verdict": self.verdict(),
            "model": asdict(self.model),
            "text": {"name": self.corpus.name, "characters": len(self.corpus.text),
                     "sha256": self.corpus.sha256},
            "seed": self.config.seed,
            "slips": {dtype: [asdict(s) for s in found] for dtype, found in self.slips.items()},
            "tensors": [
                {"backend": backend, "dtype": dtype, **_judgement(j)}
                for (backend, dtype), report in self.reports.items() for j in report.judgements
            ],
            "complex_step": [asdict(vote) for vote in self.votes],
            "lockstep": [
                {"backend": who, "dtype": o.dtype, "steps": o.steps, "step": step, **_judgement(j)}
                for o in self.lockstep for who, q in o.worst.items() for j, step in q.values()
            ],
            "arithmetic": [
                {"engine": name, "dtype": report.title, "notes": list(report.notes),
                 "tensors": [_judgement(j) for j in report.judgements]}
                for name, report in self.arithmetic.items()
            ],
            "provenance": provenance(),
        }  # fmt: skip
        return (json.dumps(_finite(content), indent=1, allow_nan=False) + "\n").encode()


def _print_slips(console: Console, where: str, sightings: list[Sighting]) -> None:
    for s in sightings:
        _line(
            console,
            f"{where} slip {'seen' if s.ok else 'MISSED'}: {s.description}, "
            f"{s.ratio:.3g} tolerances (needed {VISIBLE:g})",
        )


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _judgement(j: Judgement) -> dict[str, Any]:
    return {**asdict(j), "row": list(j.row) if j.row is not None else None, "ok": j.ok}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(ratio: float) -> str:
    text = f"{ratio:.3f}" if ratio < 10.0 else f"{ratio:.2g}"
    return text if ratio <= 1.0 else f"[red]{text}[/red]"
