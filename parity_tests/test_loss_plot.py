"""loss.png in the folder of a run: drawn at the end, whole, and only where it can be."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpt_parity import plots, training_run
from gpt_parity.cli import main
from gpt_parity.run_folder import PLOT_NAME

pytestmark = [
    pytest.mark.reference("by hand"),
    pytest.mark.draws,
    pytest.mark.folder_of_its_own("the cat sat on the mat, " * 30),
]

needs_matplotlib = pytest.mark.skipif(
    not plots.has_matplotlib(), reason="needs matplotlib: the extra plots"
)
FLAGS = [
    "--context-size", "8", "--embedding-size", "8", "--blocks", "1", "--sample-tokens", "3",
    "--log-every", "2", "--eval-every", "3", "--data", "text.txt",
]  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"
PLOT = Path("run") / PLOT_NAME


def train(*flags: str) -> int:
    return main(["train", "--out", "run", *FLAGS, *flags])


def drawn_lines(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[list[tuple[float, float]]]:
    """The points of each line of the drawing that a run makes."""
    from matplotlib.figure import Figure

    found: list[list[tuple[float, float]]] = []

    def draw(path: Path, plot: Any, size: tuple[float, float]) -> None:
        figure = Figure()
        plot(figure)
        found.extend(
            [tuple(map(float, p)) for p in line.get_xydata()] for line in figure.axes[0].lines
        )

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "draw", draw)
        assert train(*flags) == 0
    return found


def recorded(event: str) -> list[tuple[float, float]]:
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [(float(r["step"]), r["loss"]) for r in records if r["event"] == event]


@needs_matplotlib
def test_a_run_draws_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("--max-steps", "9") == 0
    assert PLOT.read_bytes().startswith(PNG)
    lines = drawn_lines(monkeypatch, "--max-steps", "9", "--overwrite")
    assert not PLOT.exists()  # --overwrite removed it, and nothing was drawn in its place
    assert lines == [recorded("train"), recorded("validation")]
    assert [x for x, _ in lines[0]] == [2, 4, 6, 8, 9] and [x for x, _ in lines[1]] == [3, 6, 9]


@needs_matplotlib
def test_a_run_that_goes_on_draws_the_whole_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_run.Run, "_sample", stop)
        assert train("--max-steps", "9") == 130
    assert not PLOT.exists()
    with (Path("run") / "metrics.jsonl").open("a") as file:  # another program's lines
        file.write('{"event": "train", "step": "x", "loss": null}\nno json\n')
    from gpt_parity.checkpoint import load_checkpoint

    size = load_checkpoint(Path("run")).run.metrics_size
    assert 0 < size < (Path("run") / "metrics.jsonl").stat().st_size
    (Path("run") / f".{PLOT_NAME}.0.part").write_bytes(b"half")
    with monkeypatch.context() as patch:
        lines = []
        right = training_run.draw

        def draw(path: Path, plot: Any, size: tuple[float, float]) -> None:
            def noted(figure: Any) -> None:
                plot(figure)
                lines.extend(line.get_xdata().tolist() for line in figure.axes[0].lines)

            right(path, noted, size)

        patch.setattr(training_run, "draw", draw)
        assert main(["train", "--resume", "run"]) == 0
    assert lines == [[2, 4, 6, 8, 9], [3, 6, 9]]
    assert PLOT.read_bytes().startswith(PNG) and not list(Path("run").glob(".*"))


@needs_matplotlib
def test_lines_of_other_programs_are_no_points(monkeypatch: pytest.MonkeyPatch) -> None:
    right = training_run.Run._sample

    def sample(run: training_run.Run) -> None:
        run.metrics.record(event="train", step="x", loss=None)
        run.metrics.record(event="validation", step=True, loss=1.0)
        right(run)

    monkeypatch.setattr(training_run.Run, "_sample", sample)
    lines = drawn_lines(monkeypatch, "--max-steps", "4")
    assert [x for x, _ in lines[0]] == [2, 4] and [x for x, _ in lines[1]] == [3, 4]


@needs_matplotlib
def test_drawing_is_cheap() -> None:
    """1,000 points, the import of matplotlib aside; the bound is loose, machines are busy."""

    def plot(figure: Any) -> None:
        figure.add_subplot().plot([math.sin(i) for i in range(1000)])

    plots.image("png", plot, (6.0, 3.5))
    start = time.process_time()
    plots.image("png", plot, (6.0, 3.5))
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("damage", ["absent", "broken"])
def test_without_matplotlib_nothing_is_drawn_and_nothing_fails(damage: str, tmp_path: Path) -> None:
    hidden = {
        "absent": "import importlib.util as u; f = u.find_spec; "
        "u.find_spec = lambda n, *a: None if n == 'matplotlib' else f(n, *a); ",
        "broken": f"sys.path.insert(0, {str(tmp_path)!r}); ",
    }[damage]
    if damage == "broken":
        (tmp_path / "matplotlib.py").write_text("raise ImportError('a library is missing')\n")
    code = f"import sys; {hidden}from gpt_parity.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "train", "--out", "run", *FLAGS,
         "--max-steps", "3"], capture_output=True, text=True,
        env={"PYTHONPATH": str(Path(plots.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "test loss" in done.stdout and not PLOT.exists()


@needs_matplotlib
def test_a_run_is_more_than_a_picture_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = training_run.Run._sample

    def sample(run: training_run.Run) -> None:
        right(run)
        PLOT.mkdir()

    monkeypatch.setattr(training_run.Run, "_sample", sample)
    assert train("--max-steps", "3") == 0
    out, err = capsys.readouterr()
    assert "test loss" in out
    assert err == (
        f"gpt-parity: {PLOT}: cannot be written, is no regular file; the run itself is whole\n"
    )


@needs_matplotlib
def test_metrics_that_somebody_removed_leave_an_empty_picture_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = training_run.Run._sample

    def sample(run: training_run.Run) -> None:
        right(run)
        Path("run/metrics.jsonl").unlink()

    monkeypatch.setattr(training_run.Run, "_sample", sample)
    assert train("--max-steps", "3") == 0
    assert PLOT.read_bytes().startswith(PNG) and capsys.readouterr().err == ""
