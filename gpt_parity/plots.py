"""Drawing into a file by matplotlib, which is an extra: the same figures give the same file."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_parity.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(what: str) -> None:
    """Raise ValueError with the way to install it where matplotlib cannot be imported."""
    if not has_matplotlib():
        raise ValueError(
            f"{what} needs matplotlib; install it with: python -m pip install "
            '-c constraints.txt -e ".[plots]" (in a checkout)'
        )


def require_format(name: str, path: Path) -> str:
    """The format of a drawing by the end of its name; ValueError for any other than FORMATS."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise ValueError(f"{name} is {path}, a file that ends in .png or .svg is needed")
    return ending


def draw(path: Path, plot: Callable[[Figure], None], size: tuple[float, float]) -> None:
    """Let `plot` draw on a figure of `size` (inches), then write it: PNG or SVG, whole or not.

    Raises ValueError for another ending of the name, OSError that names the file.
    """
    write_atomically(path, image(require_format("plot", path), plot, size))


def image(form: str, plot: Callable[[Figure], None], size: tuple[float, float]) -> bytes:
    """The drawing itself, as "png" or "svg"."""
    import matplotlib
    from matplotlib.figure import Figure

    # No date and no random ids. The figure knows no window and no list of open figures.
    with matplotlib.rc_context({"svg.hashsalt": "gpt-parity", "svg.fonttype": "path"}):
        figure = Figure(figsize=size, layout="constrained")
        plot(figure)
        drawing = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(drawing, format=form, dpi=150, metadata=metadata)
    return drawing.getvalue()
