"""The page of `gpt-parity verify`."""

from __future__ import annotations

from dataclasses import replace

from gpt_parity.html.check_page import origin
from gpt_parity.html.curves import curves
from gpt_parity.html.flow import flow
from gpt_parity.html.markup import bullets, facts, page, paragraph, section, table
from gpt_parity.html.tensors import error_maps, tensor_table, tensors
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.compare import GRADIENT, PARAMETER
from gpt_parity.oracle.graph import GRAD
from gpt_parity.oracle.hops import steps_of
from gpt_parity.oracle.report import Verification
from gpt_parity.oracle.slips import VISIBLE
from gpt_parity.provenance import provenance


def verify_page(verification: Verification) -> bytes:
    """All that `verify` measured as HTML; maps where the reports hold their arrays."""
    v = verification
    found = tensors({f"{backend} {dtype}": r for (backend, dtype), r in v.reports.items()})
    first = next((t for t in found if not t.ok), None)
    votes = {
        GRAD + vote.name: max(vote.closure, vote.autograd)
        for vote in v.votes if vote.kind in (GRADIENT, PARAMETER)
    }  # fmt: skip
    return page(
        f"{'PASS' if v.ok else 'FAIL'} · gpt-parity verify", "gpt-parity verify",
        paragraph(v.verdict(), "verdict" if v.ok else '"verdict fail"'),
        section(
            "compared", "What was compared", facts(_compared(v)), _slips(v), *_arithmetic(v)
        ),
        section("lockstep", "Training in lockstep", _worst(v), *(
            curves(f"curve-{i}", outcome) for i, outcome in enumerate(v.lockstep)
        )),
        section("graph", "On the model's graph",
                flow("flow", found, v.model.blocks, isinstance(v.model, GPT2Config))),
        section("tensors", "All tensors", tensor_table(found, first, votes)),
        section("maps", "Error maps", error_maps(found, first)),
        section("origin", "Where the figures come from", facts(origin(provenance()))),
    )  # fmt: skip


def _compared(v: Verification) -> dict[str, object]:
    model, corpus, config = v.model, v.corpus, v.config
    pairs = ", ".join(f"{backend} {dtype}" for backend, dtype in v.reports)
    training = f"{config.steps} steps" if config.steps else "none"
    if config.hops:
        training += f", and {steps_of(config.hops)} with {config.hops} changes of the backend"
    return {
        "judged": f"{pairs}; each against numpy float64, and gradients by complex step",
        "model": (
            f"vocabulary {model.vocab_size}, context {model.context_size}, embedding "
            f"{model.embedding_size}, {model.blocks} blocks, "
            + (f"{model.heads} heads (GPT-2), " if isinstance(model, GPT2Config) else "")
            + f"{model.parameter_count():,} parameters"
        ),
        "weights": "of a checkpoint" if config.checkpoint else f"initial, seed {config.seed}",
        "text": f"{corpus.name}, {corpus.size}, sha256 {corpus.sha256[:16]}",
        "training": training,
    }


def _arithmetic(v: Verification) -> list[str]:
    """What was found of the pass in another arithmetic."""
    return [
        bullets(list(replace(report, title=name).lines())) for name, report in v.arithmetic.items()
    ]


def _slips(v: Verification) -> str:
    """Mistakes that were planted first, to see whether they are noticed."""
    return bullets([
        f"{dtype} slip {'seen' if s.ok else 'MISSED'}: {s.description}, {s.ratio:.3g} tolerances "
        f"(needed {VISIBLE:g})"
        for dtype, sightings in v.slips.items() for s in sightings
    ])  # fmt: skip


def _worst(v: Verification) -> str:
    if not v.lockstep:
        return ""
    rows = [
        (f"{who} {outcome.dtype}", quantity, "✓ agrees" if j.ok else "✗ differs",
         f"{j.ratio:.3g}", step, j.name if j.name != quantity else "")
        for outcome in v.lockstep for who, quantities in outcome.worst.items()
        for quantity, (j, step) in quantities.items()
    ]  # fmt: skip
    explained = (
        "In float64 the candidate trains freely beside numpy; in float32 each step starts from a "
        "common state."
    )
    return paragraph(explained, "soft") + table(
        "The worst step of each quantity",
        ["candidate", "quantity", "status", "error / tolerance", "step", "tensor"], rows,
        numbers=(3, 4), names=False,
        styles=["bad" if "differs" in row[2] else "" for row in rows],
    )  # fmt: skip
