"""Every long loop that tries to lose a run, to fool a reader, or to make the suite fail."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App, Parameter
from rich.progress import track

from gpt_parity.backends import thread_limit
from gpt_parity.cli import run_app
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.record import DOCS, record
from gpt_parity.schedule import require_integer
from gpt_parity.verify import verify
from parity_tests.hostile.fuzz import Fuzzer
from parity_tests.reliability.jobs import killed_among_others
from parity_tests.reliability.kills import killed_while_saving, killed_while_training
from parity_tests.reliability.suite import HEADER, Circumstances, run_suite

PAGE = DOCS / "reliability.md"
Part = Literal["kills", "processes", "files", "hops", "suite"]
Lines = tuple[bool, str, list[str]]


def main(
    parts: Annotated[tuple[Part, ...], Parameter(consume_multiple=True)] = get_args(Part), *,
    kills: int | None = None, resumes: int = 30, inputs: int = 100_000, hops: int = 20,
    runs: int = 4, seed: int = 1, write: bool = False,
) -> int:  # fmt: skip
    """Kill, damage files, change the backend, and repeat the suite; exit 1 if anything is lost.

    Example: python scripts/reliability.py --write

    Parameters
    ----------
    parts
        What to do.
    kills
        Processes killed while they save, by default 1000, or among others in training, by default
        20.
    resumes
        Times that one training run is killed and resumed.
    inputs
        Damaged files given to the readers.
    hops
        Changes of the backend in one run.
    runs
        Runs of the suite.
    seed
        Seed of the first of all these.
    write
        Record the results in docs/reliability.md.
    """
    saving, training = (1000, 20) if kills is None else (kills, kills)
    counts = {"kills": saving, "resumes": resumes, "inputs": inputs, "hops": hops, "runs": runs}
    for name, value in counts.items():
        require_integer(name, value, 1)
    require_integer("seed", seed, 0)
    bodies: dict[str, Callable[[], Lines]] = {
        "kills": lambda: kill(saving, resumes, seed),
        "processes": lambda: kill_one_of_two(training, seed),
        "files": lambda: damage(inputs, seed),
        "hops": lambda: hop(hops),
        "suite": lambda: repeat(runs, seed),
    }
    ok = True
    for part in parts:
        fine, heading, lines = bodies[part]()
        ok &= fine
        print("\n".join([heading, *lines, ""]), flush=True)
        if write:
            record(heading, lines, PAGE)
    return 0 if ok else 1


def kill(kills: int, resumes: int, seed: int) -> Lines:
    """SIGKILL at random moments; the loops raise where anything is lost."""
    saving = killed_while_saving(kills, seed)
    with tempfile.TemporaryDirectory() as folder:
        training = killed_while_training(resumes, seed, Path(folder))
    return saving.kills == kills, "Kills", [
        f"- {saving.kills} processes killed by SIGKILL while they saved {saving.saves:,} "
        f"checkpoints, {saving.half_written} of them in the middle of a write: no checkpoint lost "
        "or damaged.",
        f"- One training run of {training['steps']:,} steps killed {training['kills']} times and "
        "resumed each time: weights, moments, metrics and sample are those of the unbroken run, to "
        "the bit.",
    ]  # fmt: skip


def kill_one_of_two(kills: int, seed: int) -> Lines:
    """SIGKILL to one of two processes that train together; the loop raises at the first fault."""
    with tempfile.TemporaryDirectory() as folder:
        ends = killed_among_others(kills, seed, Path(folder))
    return len(ends.seconds) == kills, "One process of several killed", [
        f"A run of {ends.steps:,} steps under `torchrun` in two processes, data parallel and "
        f"sharded in turns, of which one, the first or the other, was killed by SIGKILL {kills} "
        f"times: each time the job ended, after {max(ends.seconds):.1f} seconds at most, with one "
        "line of error; the checkpoint was whole, and the next job went on beyond it, the last on "
        "NumPy by itself.",
    ]  # fmt: skip


def damage(inputs: int, seed: int) -> Lines:
    """Mutated checkpoints, bundles and submissions; the fuzzer raises at the first fault."""
    with tempfile.TemporaryDirectory() as folder:
        found = Fuzzer(Path(folder), seed).run(range(inputs))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.refused.most_common())
    worst = max(share for share, _ in found.worst.values())
    return found.inputs == inputs, "Hostile files", [
        f"{found.inputs:,} checkpoints, bundles and submissions with stacked mutations (seed "
        f"{seed}): {found.accepted:,} read whole, the others refused in one line that names the "
        f"file. No other exception, no warning, no file made, and of {found.measured:,} measured "
        f"ones at most {worst:.3f} of the memory that their size allows.", "",
        f"Refused: {kinds}.",
    ]  # fmt: skip


def hop(hops: int) -> Lines:
    """`gpt-parity verify --hops`, without the steps in lockstep."""
    with thread_limit(1, "numpy"):
        result = verify(VerifyConfig(steps=0, hops=hops, processes=1))
    (outcome,) = result.lockstep
    (quantities,) = outcome.worst.values()
    worst = max((j for j, _ in quantities.values()), key=lambda j: j.ratio)
    return result.ok, "Changes of the backend", [
        f"A float64 run of {outcome.steps} steps that changes its backend {hops} times, each time "
        f"through a checkpoint file, against the unbroken run: worst {worst.ratio:.3f} of "
        f"tolerance ({worst.kind} {worst.name}).",
    ]  # fmt: skip


def repeat(runs: int, seed: int) -> Lines:
    """The suite again and again: does it ever fail?"""
    ok, lines = True, list(HEADER)
    for k in track(range(runs), description="runs of the suite"):
        circumstances = Circumstances(seed + k)
        passed, last, output = run_suite(circumstances)
        lines.append(circumstances.row(last))
        if not passed:
            ok = False
            print(output)
    return ok, "The suite under other circumstances", lines


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(main)
    sys.exit(run_app(app))
