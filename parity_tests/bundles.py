"""A small bundle, right results for it, and the command that judges results by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpt_parity.cli import main
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import save_bundle
from gpt_parity.oracle.subject import export
from gpt_parity.oracle_config import ExportConfig
from parity_tests.candidates import submission

FORMS = ("ref.safetensors", "ref.npz", "ref")


SQUARE = "grad/transformers.0.attention.output.weight"

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="tiny", steps=2))


@pytest.fixture(scope="module")
def reference(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "ref.npz"
    save_bundle(path, bundle)
    return path


@pytest.fixture
def right(bundle: Bundle) -> Arrays:
    return submission("torch", bundle, "float64")


def check(mine: Path, reference: Path, *flags: str) -> int:
    return main(["oracle", "check", str(mine), "--ref", str(reference), *flags])


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
