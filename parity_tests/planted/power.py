"""Run the suite against every planted bug: what catches it, how soon, and is it localised?"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.models import SIZES, ModelCase, judge, random_case
from parity_tests.planted import PlantedBug, planted
from parity_tests.planted.blind import BLIND_BUGS
from parity_tests.planted.table import BUGS

TESTS = Path(__file__).resolve().parent.parent
ALL_BUGS = (*BUGS, *BLIND_BUGS)

# Where a mistake in a module shows: its own tests first.
MODEL_TESTS = ("operations", "functional", "model", "engine", "layers", "attention", "oracle")
TESTS_OF = {
    "optim": ("optim", "lockstep", "training"),
    "corpus": ("corpus", "training"),
    "schedule": ("schedule", "training", "chapter_program"),
    "sampling": ("sampling", "training", "chapter_program"),
    "weights": ("weights", "training"),
    "training": ("training", "chapter_program", "commands"),
    "runs": ("commands",),
    "layers": ("layers", "operations", "model", "engine", "lockstep"),
    "gpt": ("model", "layers", "attention"),
}
# In tests that are parametrized by operation, only those of the operation at hand.
OPERATION_OF = {
    "__add__": "add", "__sub__": "sub", "__neg__": "neg", "__mul__": "mul", "__truediv__": "div",
    "__matmul__": "matmul", "transpose": "transpose", "reshape": "reshape", "sum": "sum",
    "gelu": "gelu", "softmax": "softmax", "tril": "tril", "linear": "linear",
    "embedding": "embedding", "cross_entropy": "cross_entropy",
}  # fmt: skip
LOCALISED_CASES = 6
SECONDS_PER_BUG = 240


@dataclass
class Finding:
    """What the suite made of one bug.

    `caught` holds, by kind of reference, the tests that failed, with the number of examples that
    it took (1 where Hypothesis draws none). `ratio` is the largest error in units of tolerance
    over a few models, `located` how many of those models the comparer's first divergence names,
    by name.
    """

    bug: PlantedBug
    caught: dict[str, dict[str, int]] = field(default_factory=dict)
    ratio: float = 0.0
    located: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def references(self) -> list[str]:
        return sorted(self.caught)

    @property
    def is_caught(self) -> bool:
        """By two checks whose references differ."""
        return len(self.caught) >= 2

    @property
    def is_localised(self) -> bool:
        """In most of the models in which the bug shows at all."""
        right = sum(n for name, n in self.located.items() if name.endswith(self.bug.tensor))
        return right > sum(self.located.values()) / 2


class _Collector:
    """Notes which tests fail, with their kind of reference and the examples they needed."""

    def __init__(self, enough: int | None) -> None:
        self.enough = enough
        self.caught: dict[str, dict[str, int]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        marker = item.get_closest_marker("reference")
        if report.failed and marker is not None:
            tests = self.caught.setdefault(marker.args[0], {})
            tests[item.nodeid.split("/")[-1]] = _examples(item)
            if self.enough is not None and len(self.caught) >= self.enough:
                item.session.shouldstop = "caught by enough references"


def _examples(item: Any) -> int:
    """Test cases of the generate phase up to the failure, from Hypothesis's statistics."""
    counts = [
        int(word)
        for line in getattr(item, "hypothesis_statistics", "").splitlines()
        if "passing" in line
        for word in line.replace("-", " ").split()
        if word.isdigit()
    ]
    return sum(counts[:2]) or 1


def examine(bug: PlantedBug, profile: str, enough: int | None) -> Finding:
    """Plant one bug in this process, compare a few models, and run the tests it concerns.

    The tests end once `enough` kinds of reference have caught it (None: they all run).
    """
    finding = Finding(bug)
    collector = _Collector(enough)
    module = bug.place.partition(":")[0].rpartition(".")[2]
    files = [str(TESTS / f"test_{name}.py") for name in TESTS_OF.get(module, MODEL_TESTS)]
    operation = OPERATION_OF.get(bug.place.partition(":")[2].rpartition(".")[2])
    options = []
    if operation is not None:
        others = " or ".join(f"test_{name}" for name in MODEL_TESTS[1:])
        options = ["-k", f"{operation} or {others}"]
    options += ["-q", "--assert=plain", "-p", "no:cacheprovider", f"--hypothesis-profile={profile}"]
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        try:
            with _time_limit(SECONDS_PER_BUG), planted(bug):
                if bug.tensor:
                    _localise(finding)
                pytest.main([*options, *files], plugins=[collector])
        except TimeoutError:
            finding.problem = f"not finished after {SECONDS_PER_BUG} s"
    finding.caught = collector.caught
    return finding


def _localise(finding: Finding) -> None:
    """Judge a few clean-weight models whose one twin has the mistake."""
    for seed in range(LOCALISED_CASES):
        case = ModelCase(SIZES["distinct primes"], "normal", 0.5, seed)
        try:
            report = judge(case, "torch", "float64")
        except Exception as error:  # the mistake may break the pass itself
            finding.problem = f"{type(error).__name__}: {error}"
            return
        finding.ratio = max(finding.ratio, report.worst.ratio)
        if report.first is not None:
            name = report.first.name
            finding.located[name] = finding.located.get(name, 0) + 1


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine_all(
    bugs: Sequence[PlantedBug], profile: str, enough: int | None, processes: int
) -> Iterator[Finding]:
    """Examine every bug in a process of its own, in the order of the table.

    The processes are forks of this one, which has imported everything and computed nothing yet, so
    that PyTorch starts no threads before them.
    """
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap(functools.partial(_examine, profile, enough), bugs, chunksize=1)


def _examine(profile: str, enough: int | None, bug: PlantedBug) -> Finding:
    return examine(bug, profile, enough)


def clean_ratio(models: int, seed: int) -> float:
    """The largest error of clean float64 models, in units of tolerance."""
    rng = np.random.default_rng(seed)
    return max(judge(random_case(rng), "torch", "float64").worst.ratio for _ in range(models))
