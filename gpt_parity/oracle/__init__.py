"""The instruments: how operations round, what models compute, and whether two of them agree.

- Numbers: `rounding` (the one table), `bounds`, `tolerance`, `compare`, `complex_step`.
- Models: `trace`, `graph`, `lockstep`, `slips`, `report` (of `gpt-parity verify`).
- Anybody's results: `subject`, `bundle`, `bundle_files` (the reference), `submission`, `verdict`,
  `functions`; `case`, `hints`, `likeness`, `mistakes`, `gpt2_mistakes`,
  `step_mistakes` (what the mistake is).
- Single operations: `ops`, `op_checks`, `ops_examples`, `examples`, `model_ops`, `judge`,
  `compare_one`.
"""

from gpt_parity.oracle import ops
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.compare import Judgement, Report, compare, compare_traces
from gpt_parity.oracle.compare_one import cmp
from gpt_parity.oracle.functions import check
from gpt_parity.oracle.model_ops import check_ops
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64
from gpt_parity.oracle.tolerance import Tolerance, model_tolerances
from gpt_parity.oracle.trace import Trace, trace

__all__ = [
    "FLOAT32",
    "FLOAT64",
    "Bundle",
    "Judgement",
    "Report",
    "Tolerance",
    "Trace",
    "check",
    "check_ops",
    "cmp",
    "compare",
    "compare_traces",
    "load_bundle",
    "make_bundle",
    "model_tolerances",
    "ops",
    "save_bundle",
    "trace",
]
