"""What a number came from: versions, BLAS, threads, machine, commit, and the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


def provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the circumstances of this process, as JSON can hold them, without any time of day.

    argv: the command line, by default that of the process. PyTorch is described only where it
    is imported already.
    """
    import numpy as np

    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    facts: dict[str, Any] = {
        "gpt_parity": package_version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": " ".join(str(blas[key]) for key in ("name", "version") if key in blas),
        "threads": {
            "cpus": os.cpu_count(),
            **{key: os.environ[key] for key in sorted(os.environ) if key.endswith("_NUM_THREADS")},
        },
        "machine": f"{platform.system()} {platform.machine()}, {cpu_model()}",
        "commit": commit(),
        "command": command_line(sys.argv if argv is None else argv),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = str(torch.__version__)
        facts["threads"]["torch"] = torch.get_num_threads()
        facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return facts


def package_version() -> str:
    """The version of gpt-parity, also where a checkout runs without being installed."""
    try:
        return importlib.metadata.version("gpt-parity")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    return found[1] if found else "unknown"


def cpu_model() -> str:
    """The processor's name, or what Python knows about it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or "unknown processor"


def commit() -> str | None:
    """The commit of the checkout this file lies in, "+changes" if files differ; None outside."""
    if not (CHECKOUT / ".git").exists():
        return None
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changes else head


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments],
            capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def command_line(argv: Sequence[str]) -> str:
    """Return `argv` quoted for a shell, without the absolute paths of this machine."""
    program, *arguments = argv or [""]
    path = Path(program)
    names = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    return shlex.join([*names, *map(portable, arguments)])


def portable(argument: str) -> str:
    """`argument` with an absolute path made relative to the current folder, or cut to its name."""
    flag, equals, value = argument.partition("=")
    if not (equals and flag.startswith("--")):
        flag, equals, value = "", "", argument
    path = Path(value)
    if not path.is_absolute() or "\n" in value:
        return argument
    here = Path.cwd()
    short = path.relative_to(here) if path.is_relative_to(here) else Path(path.name)
    return f"{flag}{equals}{short}"
