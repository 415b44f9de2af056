"""The picture of the README shows what is computed now: a right twin, and a wrong one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gpt_parity.oracle.compare import FORWARD, LOSS

pytestmark = pytest.mark.reference("other backend")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "picture.py"


def test_the_picture_has_a_right_twin_and_one_that_is_wrong_in_its_gradients(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    spec = importlib.util.spec_from_file_location("picture", SCRIPT)
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    right, wrong = picture.measured()
    assert right.ok and not wrong.ok
    assert all(j.ok for j in wrong.judgements if j.kind in (FORWARD, LOSS))
    assert wrong.first.name == "transformers.0.feed_forward.output.output"  # the layer before
    assert picture.main(tmp_path / "picture.svg") == 0
    text = (tmp_path / "picture.svg").read_text()
    assert text.startswith("<?xml") and text.rstrip().endswith("</svg>")
