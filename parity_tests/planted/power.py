"""Run the suite against every planted bug: what catches it, how soon, and is it localised?

Pytest collects the suite once. One child process then runs it without any bug and notes which
tests execute the functions that bugs are planted into: a test that never runs a mistake cannot
see it. After that every bug is planted in a child process of its own, which runs those tests, the
most specific first: those that execute the fewest of all places.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import track

from parity_tests.models import SIZES, ModelCase, judge, random_case
from parity_tests.planted import PlantedBug, planted, watched
from parity_tests.planted.blind import BLIND_BUGS
from parity_tests.planted.table import BUGS, EXACT

TESTS = Path(__file__).resolve().parent.parent
ALL_BUGS = (*BUGS, *BLIND_BUGS)
# About the bugs themselves, about names and files, about other processes, and the full recipes.
LEFT_OUT = ("test_planted.py", "test_package.py", "test_verify.py", "test_headline.py")
LOCALISED_SIZES = ("distinct primes", "square", "short text")
LOCALISED_SEEDS = 3
SECONDS_PER_BUG = 300


@dataclass
class Finding:
    """What the suite made of one bug.

    `caught` holds, by kind of reference, the tests that failed, with the number of examples that
    it took (1 where Hypothesis draws none). `ratio` is the largest error in units of tolerance
    over a few models (infinite where a pass ends in an error), `located` how many of those models
    the comparer's first divergence names, by name.
    """

    bug: PlantedBug
    caught: dict[str, dict[str, int]] = field(default_factory=dict)
    ratio: float = 0.0
    located: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

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


@dataclass(frozen=True)
class Plan:
    """How much to run: up to `tests` failing tests of up to `kinds` kinds of reference a bug."""

    profile: str
    kinds: int
    tests: int
    processes: int = 2


SHORT = Plan("power-short", kinds=2, tests=1)
FULL = Plan("power", kinds=5, tests=3)


class Examination:
    """A pytest plugin that examines bugs in place of running the collected tests once."""

    def __init__(self, bugs: Sequence[PlantedBug], plan: Plan) -> None:
        self.bugs, self.plan = bugs, plan
        self.items: list[Any] = []
        self.places: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.findings: list[Finding] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        context = multiprocessing.get_context("fork")
        # Forks of this process, which has computed nothing yet: PyTorch has no threads to lose.
        with _only(self), context.Pool(1, maxtasksperchild=1) as pool:
            self.places, self.seconds, failed = pool.apply(_survey)
        if failed:
            raise pytest.UsageError(f"without any bug planted, these tests fail: {failed}")
        with _only(self), context.Pool(self.plan.processes, maxtasksperchild=1) as pool:
            found = pool.imap(_examine, range(len(self.bugs)), chunksize=1)
            screen = Console(file=sys.__stdout__)
            steps = track(found, total=len(self.bugs), description="bugs", console=screen)
            self.findings = list(steps)
        return True

    def survey(self) -> tuple[dict[str, set[str]], dict[str, float], list[str]]:
        """Run everything once: places that each test executes, its seconds, and what fails."""
        reports = _Reports()
        self._register(reports)
        places, seconds = {}, {}
        with watched({bug.place for bug in ALL_BUGS}) as seen:
            for i, item in enumerate(self.items):
                seen.clear()
                start = time.perf_counter()
                self._run(item, self.items[i + 1] if i + 1 < len(self.items) else None)
                places[item.nodeid], seconds[item.nodeid] = set(seen), time.perf_counter() - start
        return places, seconds, reports.failed

    def examine(self, bug: PlantedBug) -> Finding:
        """Plant a bug, judge a few models, and run the tests that execute its place."""
        reports, finding = _Reports(), Finding(bug)
        self._register(reports)
        finding.caught = reports.caught
        items = [i for i in self.items if bug.place in self.places[i.nodeid] and _kind(i)]
        items.sort(key=lambda item: (len(self.places[item.nodeid]), self.seconds[item.nodeid]))
        start = time.perf_counter()
        try:
            with _time_limit(SECONDS_PER_BUG), planted(bug):
                if bug.tensor:
                    _localise(finding)
                for item in items:
                    if self._is_enough(finding):
                        break
                    if len(finding.caught.get(_kind(item), ())) < self.plan.tests:
                        self._run(item, None)
        except pytest.exit.Exception as limit:
            finding.problem = str(limit)
        finding.seconds = time.perf_counter() - start
        return finding

    def _is_enough(self, finding: Finding) -> bool:
        full = [kind for kind, tests in finding.caught.items() if len(tests) >= self.plan.tests]
        return len(full) >= self.plan.kinds

    def _register(self, plugin: Any) -> None:
        self.items[0].config.pluginmanager.register(plugin)

    def _run(self, item: Any, following: Any) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


_examination: Examination | None = None


@contextlib.contextmanager
def _only(examination: Examination) -> Iterator[None]:
    """Hands the examination to forked processes, which cannot be sent collected tests."""
    global _examination
    _examination = examination
    try:
        yield
    finally:
        _examination = None


def _survey() -> tuple[dict[str, set[str]], dict[str, float], list[str]]:
    assert _examination is not None
    _silence()
    return _examination.survey()


def _examine(index: int) -> Finding:
    assert _examination is not None
    _silence()
    return _examination.examine(_examination.bugs[index])


def _silence() -> None:
    """What tests print in this process is no one's concern."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def _kind(item: Any) -> str:
    marker = item.get_closest_marker("reference")
    return "" if marker is None else marker.args[0]


class _Reports:
    """A pytest plugin that notes which tests fail, with the examples they needed."""

    def __init__(self) -> None:
        self.caught: dict[str, dict[str, int]] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        if not report.failed:
            return
        # After a test comes the guard on global state, whose reference is equality.
        kind = EXACT if report.when == "teardown" else _kind(item)
        name = item.nodeid.split("/")[-1]
        self.caught.setdefault(kind, {})[name] = _examples(item)
        self.failed.append(name)


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


def _localise(finding: Finding) -> None:
    """Judge a few models with right weights whose one twin has the mistake."""
    for sizes in LOCALISED_SIZES:
        for seed in range(LOCALISED_SEEDS):
            case = ModelCase(SIZES[sizes], "normal", 0.5, seed)
            try:
                report = judge(case, "torch", "float64")
            except Exception as error:  # the mistake may end the pass
                finding.problem = f"{type(error).__name__}: {error}"
                if not finding.problem.startswith("RuntimeError: trace: "):
                    continue
                name, ratio = str(error).split()[1], float("inf")  # the trace names the tensor
            else:
                ratio = report.worst.ratio
                name = "" if report.first is None else report.first.name
            finding.ratio = max(finding.ratio, ratio)
            if name:
                finding.located[name] = finding.located.get(name, 0) + 1


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        pytest.exit(f"not finished after {seconds} s")  # the one exception no test report swallows

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine_all(bugs: Sequence[PlantedBug], plan: Plan) -> list[Finding]:
    """Examine every bug with the collected suite, in the order given.

    Raises RuntimeError where pytest ends early, as with a suite that fails without any bug.
    """
    examination = Examination(bugs, plan)
    options = ["-s", "--assert=plain", "-p", "no:cacheprovider"]
    options += [f"--deselect={TESTS.name}/{name}" for name in LEFT_OUT]
    options.append(f"--hypothesis-profile={plan.profile}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pytest.main([*options, str(TESTS)], plugins=[examination])
    if len(examination.findings) < len(bugs):
        raise RuntimeError(f"pytest ended early: {said.getvalue()[-2000:]}")
    return examination.findings


def clean_ratio(models: int, seed: int) -> float:
    """The largest error of clean float64 models, in units of tolerance."""
    rng = np.random.default_rng(seed)
    return max(judge(random_case(rng), "torch", "float64").worst.ratio for _ in range(models))
