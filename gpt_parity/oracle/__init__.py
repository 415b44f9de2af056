"""The instruments: how operations round, what models compute, and whether two of them agree."""

from gpt_parity.oracle.compare import Judgement, Report, compare, compare_traces
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64
from gpt_parity.oracle.tolerance import Tolerance, model_tolerances
from gpt_parity.oracle.trace import Trace, trace

__all__ = [
    "FLOAT32",
    "FLOAT64",
    "Judgement",
    "Report",
    "Tolerance",
    "Trace",
    "compare",
    "compare_traces",
    "model_tolerances",
    "trace",
]
