"""Run the suite against every planted bug: what catches it, how soon, and is it localised?

Pytest collects the suite once. One child process then runs it without any bug and notes which
tests execute the functions that bugs are planted into: a test that never runs a mistake cannot
see it. After that every bug is planted in a child process of its own, which runs those tests, the
most specific first: those that execute the fewest of all places.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import track

from gpt_parity.choices import MODELS
from gpt_parity.oracle.compare import Report, compare_traces
from parity_tests.models import SIZES, ModelCase, candidate_trace, judge, random_case, reference
from parity_tests.planted import PlantedBug, gpt2_models, planted, watched
from parity_tests.planted.blind import BLIND_BUGS
from parity_tests.planted.gpt2_run_bugs import GPT2_BUGS
from parity_tests.planted.table import BUGS, EXACT

TESTS = Path(__file__).resolve().parent.parent
ALL_BUGS = (*BUGS, *BLIND_BUGS, *GPT2_BUGS)
# About the bugs themselves, about names and files, about other processes, pages and programs, and
# the full recipes.
LEFT_OUT = (
    "test_planted.py", "test_package.py", "test_verify.py", "test_headline.py", "test_hints.py",
    "test_bundle_files.py", "test_bundle_verdicts.py", "test_bundle_export.py", "test_interop.py",
    "test_oracle_api.py", "test_planted_gpt2.py", "test_distributed.py", "test_distributed_jobs.py",
    "test_precision.py", "test_precision_verdicts.py", "test_devices_and_compiled.py",
    "test_styles.py", "test_styles_judged.py", "test_style_refusals.py",
    "test_llmc.py", "test_hf_folders.py", "test_hf_commands.py", "test_bpe.py",
    "test_bpe_folder.py", "test_transformers.py", "test_bench.py", "test_bench_gpt2.py",
    "test_documents.py", "test_html.py", "test_html_browser.py", "test_gpt2_oracle.py",
)  # fmt: skip
LOCALISED_SIZES = ("distinct primes", "square", "short text")
LOCALISED_SEEDS = 2
SECONDS_PER_TASK = 600
ERROR = "an exception"
LOUD = 10  # tests that end in an exception
FORK = multiprocessing.get_context("fork")


@dataclass
class Finding:
    """What the suite made of one bug.

    `caught` holds, by kind of reference, the tests that failed, with the number of examples that
    it took (1 where Hypothesis draws none). `ratio` is the largest error in units of tolerance
    over a few models (infinite where the trace notices a value that was changed), `located` how
    many of those models the comparer's first divergence names, by name; in `errors` of them the
    pass ended in an exception.
    """

    bug: PlantedBug
    caught: dict[str, dict[str, int]] = field(default_factory=dict)
    ratio: float = 0.0
    located: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    problem: str = ""
    seconds: float = 0.0

    @property
    def references(self) -> list[str]:
        return sorted(self.caught)

    @property
    def is_caught(self) -> bool:
        """By two checks whose references differ, or loudly."""
        return len(self.caught) >= 2 or self.is_loud

    @property
    def is_loud(self) -> bool:
        """Whether it ends most tests in an exception before anything can be compared."""
        return len(self.caught.get(ERROR, ())) >= LOUD

    @property
    def is_localised(self) -> bool:
        """In most of the models in which the bug shows at all."""
        right = sum(n for name, n in self.located.items() if name.endswith(self.bug.tensor))
        return right > sum(self.located.values()) / 2


@dataclass(frozen=True)
class Plan:
    """How much to run: up to `tests` failing tests of up to `kinds` kinds of reference a bug."""

    profile: str = "power-short"
    kinds: int = 2
    tests: int = 1
    processes: int = 2


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
        share = -(-len(self.items) // self.plan.processes)
        shares = [self.items[k : k + share] for k in range(0, len(self.items), share)]
        surveys = [functools.partial(self.survey, items) for items in shares]
        failed: list[str] = []
        for survey in self._in_forks(surveys, self.plan.processes):
            if isinstance(survey, str):
                raise pytest.UsageError(f"the survey of all tests {survey}")
            places, seconds, wrong = survey
            self.places |= places
            self.seconds |= seconds
            failed += wrong
        if failed:
            raise pytest.UsageError(f"without any bug planted, these tests fail: {failed}")
        tasks = [functools.partial(self.examine, bug) for bug in self.bugs]
        found = self._in_forks(tasks, self.plan.processes)
        screen = Console(file=sys.__stdout__)
        steps = track(found, total=len(tasks), description="bugs", console=screen)
        self.findings = [
            Finding(bug, problem=finding) if isinstance(finding, str) else finding
            for bug, finding in zip(self.bugs, steps, strict=True)
        ]
        return True

    def _in_forks(self, tasks: list[Callable[[], Any]], processes: int) -> Iterator[Any]:
        """The results of `tasks` in order, each from a fork of this process.

        A fork has the collected tests, which no process can be sent, and nothing that a test did.
        The result is a sentence where a process died or took too long.
        """
        running: dict[int, tuple[Any, Any, float]] = {}
        done: dict[int, Any] = {}
        started = 0
        for k in range(len(tasks)):
            while k not in done:
                while started < len(tasks) and len(running) < processes:
                    receiver, sender = FORK.Pipe(duplex=False)
                    process = FORK.Process(target=_run_and_send, args=(tasks[started], sender))
                    process.start()
                    sender.close()
                    running[started] = process, receiver, time.monotonic()
                    started += 1
                multiprocessing.connection.wait([r for _, r, _ in running.values()], timeout=1.0)
                for i, (process, receiver, since) in list(running.items()):
                    late = time.monotonic() - since > SECONDS_PER_TASK
                    if not receiver.poll() and not late:
                        continue
                    if late:
                        process.kill()
                        done[i] = f"did not end within {SECONDS_PER_TASK} s"
                    else:
                        try:
                            done[i] = receiver.recv()
                        except EOFError:
                            process.join()
                            done[i] = f"died with exit code {process.exitcode}"
                    process.join()
                    del running[i]
            yield done.pop(k)

    def survey(
        self, items: Sequence[Any]
    ) -> tuple[dict[str, set[str]], dict[str, float], list[str]]:
        """Run `items` once: places that each test executes, its seconds, and what fails."""
        reports = _Reports()
        self._register(reports)
        places, seconds = {}, {}
        with watched({bug.place for bug in ALL_BUGS}) as seen:
            for i, item in enumerate(items):
                seen.clear()
                start = time.perf_counter()
                self._run(item, items[i + 1] if i + 1 < len(items) else None)
                places[item.nodeid], seconds[item.nodeid] = set(seen), time.perf_counter() - start
        return places, seconds, sorted(reports.failed)

    def examine(self, bug: PlantedBug) -> Finding:
        """Plant a bug, judge a few models, and run the tests that execute its place.

        What a test found counts only if the test passes once the bug is gone.
        """
        reports, finding = _Reports(), Finding(bug)
        self._register(reports)
        finding.caught = reports.caught
        items = [i for i in self.items if bug.place in self.places[i.nodeid] and _kind(i)]
        items.sort(key=lambda item: (len(self.places[item.nodeid]), self.seconds[item.nodeid]))
        start = time.perf_counter()
        with planted(bug):
            if bug.tensor:
                _localise(finding)
            for item in items:
                if self._is_enough(finding):
                    break
                if len(finding.caught.get(_kind(item), ())) < self.plan.tests:
                    self._run(item, None)
        seconds = time.perf_counter() - start
        again = _Reports()
        self._register(again)
        for item in items:
            if item.nodeid in reports.failed:
                self._run(item, None)
        for tests in reports.caught.values():
            for name in again.failed & tests.keys():
                del tests[name]
        finding.caught = {kind: tests for kind, tests in reports.caught.items() if tests}
        if again.failed:
            finding.problem += f" fails without the bug as well: {sorted(again.failed)}"
        finding.seconds = seconds
        return finding

    def _is_enough(self, finding: Finding) -> bool:
        full = [kind for kind, tests in finding.caught.items() if len(tests) >= self.plan.tests]
        return len(full) >= self.plan.kinds or finding.is_loud

    def _register(self, plugin: Any) -> None:
        self.items[0].config.pluginmanager.register(plugin)

    def _run(self, item: Any, following: Any) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _run_and_send(task: Callable[[], Any], sender: Any) -> None:
    _silence()
    sender.send(task())
    sender.close()


def _silence() -> None:
    """What tests print in this process is no one's concern."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def _kind(item: Any) -> str:
    marker = item.get_closest_marker("reference")
    return "" if marker is None else marker.args[0]


class _Reports:
    """A pytest plugin that notes which tests fail, with the examples they needed.

    A comparison that fails is credited to the kind of its reference. Any other exception shows
    that something is wrong without a reference, and counts as one kind for all tests together.
    """

    def __init__(self) -> None:
        self.caught: dict[str, dict[str, int]] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        if not report.failed or item.nodeid in self.failed:
            return
        self.failed.add(item.nodeid)
        if not isinstance(call.excinfo.value, AssertionError | pytest.fail.Exception):
            kind = ERROR
        else:
            # After a test comes the guard on global state, whose reference is equality.
            kind = EXACT if report.when == "teardown" else _kind(item)
        self.caught.setdefault(kind, {})[item.nodeid] = _examples(item)


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
    for judge_one in _models(finding.bug):
        try:
            report = judge_one("torch", "float64")
        except Exception as error:  # the mistake may end the pass
            finding.problem = f"{type(error).__name__}: {error}"
            finding.errors += 1
            if not finding.problem.startswith("RuntimeError: trace: "):
                continue
            name, ratio = str(error).split()[1], float("inf")  # the trace names the tensor
        else:
            ratio = report.worst.ratio
            name = "" if report.first is None else report.first.name
        finding.ratio = max(finding.ratio, ratio)
        if name:
            finding.located[name] = finding.located.get(name, 0) + 1


def _models(bug: PlantedBug) -> list[Callable[[str, str], Report]]:
    """The judges of a few models that run the place of the bug."""
    if bug in GPT2_BUGS:
        return [functools.partial(gpt2_models.judge, case) for case in gpt2_models.CASES]
    return [
        functools.partial(judge, ModelCase(SIZES[sizes], "normal", 0.5, seed))
        for sizes in LOCALISED_SIZES
        for seed in range(LOCALISED_SEEDS)
    ]


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
    """The largest error of clean models in float64 and float32, in units of tolerance.

    Every other one is a GPT-2.
    """
    rng = np.random.default_rng(seed)
    worst = 0.0
    for case in (random_case(rng, MODELS[k % len(MODELS)]) for k in range(models)):
        for dtype, backends in (("float64", ("torch",)), ("float32", ("torch", "numpy"))):
            right = reference(case, dtype)
            with np.errstate(all="ignore"):  # float32 may overflow where nothing is judged
                candidates = [candidate_trace(backend, dtype, case) for backend in backends]
            reports = [compare_traces(candidate, *right, dtype) for candidate in candidates]
            worst = max(worst, *(report.worst.ratio for report in reports))
    return worst
