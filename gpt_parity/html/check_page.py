"""The page of `gpt-parity oracle check`."""

from __future__ import annotations

from pathlib import Path

from gpt_parity.html.flow import flow
from gpt_parity.html.markup import bullets, facts, page, paragraph, section
from gpt_parity.html.tensors import Tensor, error_maps, tensor_table, tensors
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.compare import Report
from gpt_parity.oracle_config import CheckConfig
from gpt_parity.provenance import portable, provenance

NAMED = ("gpt_parity", "python", "numpy", "blas", "torch", "machine", "commit", "command")


def check_page(report: Report, mine: Path, config: CheckConfig) -> bytes:
    """The report of a submission as HTML; maps and graph where it was made with `keep`."""
    found = tensors({report.title: report})
    first = next((t for t in found if not t.ok), None)
    return page(
        f"{'PASS' if report.ok else 'FAIL'}: {mine.name} · gpt-parity oracle check",
        "gpt-parity oracle check",
        paragraph(next(report.lines()), "verdict" if report.ok else '"verdict fail"'),
        section("first", "First divergence", _first(report, first)),
        section("hints", "What the mistake looks like", bullets(report.hints)),
        section("notes", "Notes", bullets(report.notes)),
        section("compared", "What was compared", facts(_compared(report, mine, config))),
        section("graph", "On the model's graph", _graph(report, found)),
        section("tensors", "All tensors", tensor_table(found, first)),
        section("maps", "Error maps", error_maps(found, first)),
        section("origin", "Where the figures come from", facts(origin(provenance()))),
    )


def _first(report: Report, first: Tensor | None) -> str:
    if first is None or report.first is None:
        return ""
    return paragraph(f"{first.name} ({first.kind}): {report.first.describe()}")


def _compared(report: Report, mine: Path, config: CheckConfig) -> dict[str, object]:
    said: dict[str, object] = {
        "results": portable(str(mine)), "reference": portable(str(config.ref)),
        "arithmetic": report.title, "tensors": len(report.judgements),
    }  # fmt: skip
    if config.style != "source":
        said["names and layouts"] = config.style
    if config.map is not None:
        said["names by"] = portable(str(config.map))
    if config.only is not None:
        said["only"] = config.only
    bundle = report.bundle
    if bundle is not None:
        sizes, (batch, length) = bundle.config, bundle.tokens.shape
        said["model"] = (
            f"vocabulary {sizes.vocab_size}, context {sizes.context_size}, embedding "
            f"{sizes.embedding_size}, {sizes.blocks} blocks"
            + (f", {sizes.heads} heads (GPT-2)" if isinstance(sizes, GPT2Config) else "")
        )
        said["batch"] = f"{batch} x {length} tokens" + (
            f", {bundle.steps} optimizer steps" if bundle.steps else ""
        )
        made = origin(bundle.provenance)
        if made:
            said["reference made by"] = ", ".join(f"{k} {v}" for k, v in made.items())
    return said


def _graph(report: Report, found: list[Tensor]) -> str:
    bundle: Bundle | None = report.bundle
    if bundle is None:
        return ""
    return flow("flow", found, bundle.config.blocks, isinstance(bundle.config, GPT2Config))


def origin(known: dict) -> dict[str, object]:
    """Versions, machine and command of what `provenance` tells."""
    return {name.replace("_", "-"): known[name] for name in NAMED if known.get(name)}
