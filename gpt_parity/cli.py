"""The `gpt-parity` command. Numbers are computed elsewhere; here are flags, errors, exit codes."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import cyclopts
from cyclopts import App, CoercionError, CycloptsError, Parameter, Token
from rich.console import Console

from gpt_parity.backends import MissingBackendError, thread_limit
from gpt_parity.bench.config import BenchConfig
from gpt_parity.choices import require_place
from gpt_parity.config import GenerateConfig, TrainConfig
from gpt_parity.display import discard, say
from gpt_parity.hf_commands import export_hf, import_hf
from gpt_parity.lessons.config import ExplainConfig, FillValueConfig, LockstepConfig
from gpt_parity.oracle_config import CheckConfig, ExportConfig, NamesConfig, VerifyConfig
from gpt_parity.provenance import package_version

if TYPE_CHECKING:
    from gpt_parity.oracle.report import Verification

USER_ERRORS = (
    CycloptsError, ValueError, TypeError, OSError, FloatingPointError, MemoryError,
    MissingBackendError,
)  # fmt: skip


class PipeConsole(Console):
    """A console that leaves a closed pipe to `run_app`, which knows the exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def convert(kind: Any, tokens: Sequence[Token]) -> Any:
    """What cyclopts makes of a value, but 2.5 is no integer and an empty text is no path."""
    kinds, value = {kind, *get_args(kind)}, tokens[0].value
    if int in kinds and not re.fullmatch(r"[+-]?[0-9]{1,20}", value):
        raise CoercionError(token=tokens[0], target_type=int)
    if Path in kinds and (not value or "\0" in value):
        raise ValueError(f"{value!r}, a path is needed")
    return cyclopts.convert(kind, tokens)


app = App(
    name="gpt-parity",
    console=PipeConsole(),
    help="Two GPTs that must agree, one in NumPy and one in PyTorch.",
    help_format="plaintext",
    version=lambda: f"gpt-parity {package_version()}",
    default_parameter=Parameter(negative=(), converter=convert),
)


@app.command
def train(*, config: Annotated[TrainConfig | None, Parameter(name="*")] = None) -> int:
    """Train either backend on a text; writes metrics, checkpoint and a sample into a folder.

    Example: gpt-parity train --backend numpy --data data/tinyshakespeare.txt --eval-every 2000
    """
    from gpt_parity import runs

    return runs.train(config or TrainConfig())


@app.command
def generate(*, config: Annotated[GenerateConfig, Parameter(name="*")]) -> int:
    """Continue a prompt with a trained model, on either backend.

    Example: gpt-parity generate --checkpoint runs/numpy-float32-seed42 --prompt "ROMEO:"
    """
    from gpt_parity import runs

    return runs.generate(config)


@app.command
def explain(*, config: Annotated[ExplainConfig | None, Parameter(name="*")] = None) -> int:
    """Walk through causal attention step by step, on numbers computed as you read.

    Example: gpt-parity explain --tokens "the cat sat"
    """
    from gpt_parity.lessons.explain import run

    return run(config or ExplainConfig(), PipeConsole())


@app.command
def verify(*, config: Annotated[VerifyConfig | None, Parameter(name="*")] = None) -> int:
    """Compare both models tensor by tensor, then in training: exit 0 within tolerance, else 1.

    Example: gpt-parity verify --json verify.json
    """
    config = config or VerifyConfig()
    with thread_limit(1, "numpy"):
        from gpt_parity.files import write_atomically
        from gpt_parity.verify import verify as run
        from numpy_impl.memory import keep_freed_memory

        keep_freed_memory()
        console = PipeConsole()
        waiting = PipeConsole(stderr=True).status(f"{config.steps} training steps in lockstep")

        def on_pass(result: Verification) -> None:
            result.print_pass(console)
            if config.steps and sys.stderr is not None and sys.stderr.isatty():
                waiting.start()

        try:
            verification = run(config, on_pass)
        finally:
            waiting.stop()
        verification.print_verdict(console)
        if config.json is not None:
            write_atomically(config.json, verification.json())
        if config.html is not None:
            from gpt_parity.html.verify_page import verify_page

            write_atomically(config.html, verify_page(verification))
        return 0 if verification.ok else 1


@app.command
def lockstep(*, config: Annotated[LockstepConfig | None, Parameter(name="*")] = None) -> int:
    """Train two runs from the same weights, and show how far apart they drift, and why.

    Example: gpt-parity lockstep --steps 500 --a numpy:float32 --b torch:float64
    """
    from gpt_parity.lessons.drift import run

    return run(config or LockstepConfig(), PipeConsole())


@app.command
def bench(*, config: Annotated[BenchConfig | None, Parameter(name="*")] = None) -> int:
    """Time both backends side by side: steps, forward passes, generation, memory, the oracle.

    Example: gpt-parity bench --sizes source small --parts step memory
    """
    from gpt_parity.bench.run import run

    return run(config or BenchConfig(), PipeConsole())


app.command(import_hf)
app.command(export_hf)


oracle = App(
    name="oracle",
    help="Judge any GPT backward pass, tensor by tensor, against a reference.\n\n"
    "Example: gpt-parity oracle export -o reference",
    default_parameter=Parameter(negative=(), converter=convert),
)
app.command(oracle)


experiment = App(
    name="experiment",
    help="Experiments with the model of the source text.\n\n"
    "Example: gpt-parity experiment fill-value --values -1e9 0",
    default_parameter=Parameter(negative=(), converter=convert),
)
app.command(experiment)


@experiment.command
def fill_value(*, config: Annotated[FillValueConfig | None, Parameter(name="*")] = None) -> int:
    """Train the same model with several fills of its causal mask: what a leak looks like.

    Example: gpt-parity experiment fill-value --values -1e9 -inf 0 -10
    """
    from gpt_parity.lessons.fill_value import run

    return run(config or FillValueConfig(), PipeConsole())


@oracle.command
def export(*, config: Annotated[ExportConfig, Parameter(name="*")]) -> int:
    """Write a reference: inputs, every value and gradient of one pass, and their tolerances.

    Example: gpt-parity oracle export --weights mine.npz --tokens batch.npz -o reference
    """
    with thread_limit(1, "numpy"):
        from gpt_parity.oracle.write_reference import write_reference

        said = write_reference(config)
        PipeConsole().print(said, highlight=False, markup=False, soft_wrap=True)
        return 0


@oracle.command
def names(*, config: Annotated[NamesConfig, Parameter(name="*")]) -> int:
    """Show what the parameters of a GPT-2 are called elsewhere, and how they lie in memory.

    Example: gpt-parity oracle names --style hf
    """
    from gpt_parity.oracle.names_table import names_table

    PipeConsole().print(names_table(config))
    return 0


@oracle.command
def check(mine: Path, /, *, config: Annotated[CheckConfig, Parameter(name="*")]) -> int:
    """Judge results against a reference: exit 0 if all agree, 1 if any differs.

    Example: gpt-parity oracle check mine.npz --ref reference

    Parameters
    ----------
    mine
        Your arrays by the bundle's names, any part of them: safetensors, npz, or a folder of npy.
    """
    with thread_limit(1, "numpy"):
        from gpt_parity.oracle.verdict import check_file, report_json

        require_place("html", config.html, (mine,))
        report = check_file(mine, config)
        text = report_json(report) if config.json else str(report)
        PipeConsole().print(text, highlight=False, markup=False, soft_wrap=True)
        if config.html is not None:
            from gpt_parity.files import write_atomically
            from gpt_parity.html.check_page import check_page

            write_atomically(config.html, check_page(report, mine, config))
        return 0 if report.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 a difference, 2 unusable.

    A mistake of the user is one line on stderr. 130 after SIGINT, 143 after SIGTERM; a reader
    that closed the pipe ends the command without a word (141).
    """
    return run_app(app, argv)


def run_app(app: App, argv: Sequence[str] | None = None) -> int:
    """Run an app under the conventions of `main`; scripts with flags of their own use it too."""
    try:
        with _terminated_by_sigterm(), _utf8_output():
            result = app(
                sys.argv[1:] if argv is None else list(argv),
                exit_on_error=False, print_error=False, result_action="return_value",
            )  # fmt: skip
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        discard(sys.stdout)
        _first_to_tell()
        return 128 + 13
    except USER_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if _first_to_tell():
            say(f"gpt-parity: error: {message}")
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0


def _first_to_tell() -> bool:
    if "RANK" not in os.environ:  # torchrun is not about, and the import takes time
        return True
    from gpt_parity.distributed import first_to_tell

    return first_to_tell()


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what is open is closed; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:  # nobody has set another meanwhile
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _utf8_output() -> Iterator[None]:
    """Write UTF-8 whatever the locale says: texts hold any character."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (stays open)
    stdout = sys.stdout
    encoding, errors = getattr(stdout, "encoding", None), getattr(stdout, "errors", None)
    if not hasattr(stdout, "reconfigure"):
        yield
        return
    stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError):  # a closed pipe was reported already
            stdout.reconfigure(encoding=encoding, errors=errors)
