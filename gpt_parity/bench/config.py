"""What can be timed, and the models that are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from gpt_parity.choices import require_place
from gpt_parity.model_config import GPT2Config, GPTConfig, Preset
from gpt_parity.schedule import require_integer, require_real

BenchPart = Literal[
    "step", "forward", "generation", "cache", "oracle", "memory", "start", "profile", "recipe",
    "growth", "large", "suite",
]  # fmt: skip
BenchSize = Literal["source", "small", "medium", "baby", "gpt2"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to time, and for how long.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    parts: Annotated[tuple[BenchPart, ...], Parameter(consume_multiple=True)] = (
        "step", "forward", "generation", "cache", "oracle", "memory", "start",
    )  # fmt: skip
    """What to measure; recipe, growth, large and suite take minutes more."""
    sizes: Annotated[tuple[BenchSize, ...], Parameter(consume_multiple=True)] = (
        "source", "small", "medium", "baby",
    )  # fmt: skip
    """Models of step, forward, generation, memory and profile: the text's, larger ones, GPT-2."""
    profile: bool = False
    """Also say where the NumPy step spends its time, operation by operation."""
    seconds: float = 20.0
    """Time for each comparison of steps, forward passes and generation (at least 7 rounds)."""
    data: Path | None = None
    """Text of the part "recipe"; by default as in training."""
    recipe_steps: int | None = None
    """End the part "recipe" after so many steps."""
    json: Path | None = None
    """Also write every figure to this file."""
    report: Path | None = None
    """Also write the tables into this Markdown file, each in place of its last version."""

    def __post_init__(self) -> None:
        if not 0 < require_real("seconds", self.seconds) < math.inf:
            raise ValueError(f"seconds is {self.seconds}, a finite number above 0 is needed")
        if self.recipe_steps is not None:
            require_integer("recipe_steps", self.recipe_steps, 1)
        for name, known in (("parts", get_args(BenchPart)), ("sizes", get_args(BenchSize))):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name} has {value!r}, of {known} is needed")
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, at least one of {known} is needed")
        if self.json is not None and self.json == self.report:
            raise ValueError(f"json and report are both {self.json}, two files are needed")
        for name in ("json", "report"):
            require_place(name, getattr(self, name), (self.data,))


# Sizes of the benchmark's models: that of the text and larger ones, then those of GPT-2.
BENCHMARKS: dict[str, Preset] = {
    "source": Preset(GPTConfig(65, 32, 64, 2), batch_size=4, length=32),
    "small": Preset(GPTConfig(65, 64, 128, 4), batch_size=12, length=64),
    "medium": Preset(GPTConfig(65, 256, 384, 6), batch_size=8, length=256),
    "baby": Preset(GPT2Config(65, 64, 128, 4, heads=4), batch_size=12, length=64),
    "gpt2": Preset(GPT2Config(50257, 1024, 768, 12, heads=12), batch_size=1, length=64),
}
