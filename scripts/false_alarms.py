"""Clean random models against the tolerances: how often does the comparison cry wolf?"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from cyclopts import App
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt_parity.cli import run_app
from gpt_parity.schedule import require_integer
from parity_tests.models import judge, random_case

CANDIDATES = (("torch", "float64"), ("torch", "float32"), ("numpy", "float32"))


def false_alarms(models: int = 300, seed: int = 0) -> int:
    """Judge clean random models (scales 0.03 to 10, rows included); exit 1 on any alarm.

    Example: python scripts/false_alarms.py --models 300

    Parameters
    ----------
    models
        Number of random models, each judged with every candidate.
    seed
        Seed of the draws.
    """
    require_integer("models", models, 1)
    rng = np.random.default_rng(require_integer("seed", seed, 0))
    alarms: dict[tuple[str, str], int] = defaultdict(int)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in track(range(models), description="models"):
        case = random_case(rng)
        for candidate in CANDIDATES:
            report = judge(case, *candidate)
            ratios[candidate].append(report.worst.ratio)
            if not report.ok:
                alarms[candidate] += 1
                print(f"alarm: {case} {' '.join(candidate)}: {report.worst}")
    for candidate in CANDIDATES:
        print(
            f"{' '.join(candidate)}: {alarms[candidate]} alarms in {models} models, "
            f"worst {max(ratios[candidate]):.2f} of tolerance, "
            f"median of the worst {np.median(ratios[candidate]):.2f}"
        )
    return 1 if alarms else 0


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(false_alarms)
    sys.exit(run_app(app))
