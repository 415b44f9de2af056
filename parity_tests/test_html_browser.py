"""Pages in a real browser without a window: on phone and desktop, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity import cli
from gpt_parity.html.verify_page import verify_page
from gpt_parity.oracle import save_bundle
from gpt_parity.oracle.subject import export
from gpt_parity.oracle_config import ExportConfig
from numpy_impl import functional
from parity_tests.candidates import submission
from parity_tests.test_html import verification, wrong_gelu  # noqa: F401 (a fixture)

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = [
    pytest.mark.reference("by hand"),
    pytest.mark.skipif(
        BROWSER is None, reason="needs a browser: install chromium (Debian: apt-get install "
        "chromium)",
    ),
]  # fmt: skip
DARK, LIGHT = 0, 1  # Blink's numbers for what a page may prefer
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
# Written into a copy of the page: how wide it is, and what reaches over its edge.
PROBE = """<script>
document.querySelectorAll("details").forEach(d => { d.open = true; });
const wide = document.documentElement.clientWidth, out = [];
for (const e of document.querySelectorAll("main *")) {
  if (e.closest("svg") && e.tagName !== "svg") continue;
  const inside = e.closest(".scroll");
  if (e.getBoundingClientRect().right > wide + 1 && (!inside || inside === e)) out.push(e.tagName);
}
const cut = [];
for (const s of document.querySelectorAll("svg")) {
  const frame = s.getBoundingClientRect();
  for (const t of s.querySelectorAll("text")) {
    const r = t.getBoundingClientRect();
    if (r.left < frame.left - 1 || r.right > frame.right + 1) cut.push(t.textContent);
  }
}
parent.postMessage(JSON.stringify([document.documentElement.scrollWidth, wide, out, cut]), "*");
</script>"""
# Windows have a least width, frames have none.
FRAME = """<!DOCTYPE html><title>nothing</title>
<script>addEventListener("message", m => { document.title = m.data; });</script>
<iframe src="copy.html" width="%d" height="%d" style="border: 0"></iframe>"""


def browser(page: Path, folder: Path, size: tuple[int, int], scheme: int, *flags: str) -> str:
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
         f"--blink-settings=preferredColorScheme={scheme}",
         f"--window-size={size[0]},{size[1]}", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def pixels(page: Path, folder: Path, size: tuple[int, int], scheme: int) -> np.ndarray:
    """(height, width) brightness from 0 to 1."""
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib: the extra plots")
    shot = folder / f"{page.stem}-{size[0]}-{scheme}.png"
    browser(page, folder, size, scheme, f"--screenshot={shot}")
    return image.imread(shot)[..., :3].mean(axis=-1)


@pytest.fixture(scope="module")
def pages(verification, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A folder of two pages: a check that fails and a verification that does not."""
    folder = tmp_path_factory.mktemp("browser")
    bundle = export(ExportConfig(out=Path("ref"), preset="tiny"))
    save_bundle(folder / "ref.npz", bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "gelu", wrong_gelu)
        np.savez(folder / "mine.npz", **submission("numpy", bundle, "float32"))
    arguments = [str(folder / "mine.npz"), "--ref", str(folder / "ref.npz")]
    assert cli.main(["oracle", "check", *arguments, "--html", str(folder / "check.html")]) == 1
    (folder / "verify.html").write_bytes(verify_page(verification))
    return folder


@pytest.mark.parametrize("name", ["check", "verify"])
def test_a_page_is_seen_in_light_and_dark(name: str, pages: Path, tmp_path: Path) -> None:
    for width, height in SIZES.values():
        page = pages / f"{name}.html"
        light, dark = (pixels(page, tmp_path, (width, height), s) for s in (LIGHT, DARK))
        assert light.shape == dark.shape == (height, width)
        assert np.median(light) > 0.95 and np.median(dark) < 0.15
        assert (light < 0.5).mean() > 0.01 and (dark > 0.5).mean() > 0.01  # there is text


def probe(content: str, folder: Path, size: tuple[int, int]) -> list[Any]:
    """Width of the content and of the screen, elements over the edge, texts cut off."""
    (folder / "copy.html").write_text(content.replace("</body>", f"{PROBE}</body>"), "utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME % size, "utf-8")
    window = (size[0] + 200, size[1] + 200)
    dump = browser(frame, folder, window, LIGHT, "--virtual-time-budget=3000", "--dump-dom")
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", dump)[1]))


@pytest.mark.parametrize("name", ["check", "verify"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_screen(
    name: str, size: str, pages: Path, tmp_path: Path
) -> None:
    """All parts unfolded, at most the inside of a scroll container reaches over the edge."""
    content = (pages / f"{name}.html").read_text("utf-8")
    width = SIZES[size][0]
    assert probe(content, tmp_path, SIZES[size]) == [width, width, [], []]


def test_the_probe_notices_what_is_too_wide(pages: Path, tmp_path: Path) -> None:
    content = (pages / "check.html").read_text("utf-8")
    for old, new in (
        ("overflow-x: auto", ""), ("svg text { fill", "svg .name { letter-spacing: 3px; fill"),
        ("main { max-width: 76rem", "main { width: 500px"),
    ):  # fmt: skip
        assert old in content
        content = content.replace(old, new)
    whole, wide, out, cut = probe(content, tmp_path, SIZES["phone"])
    assert whole > wide == 390 and "P" in out and "transformers.0.attention.output.weight" in cut
