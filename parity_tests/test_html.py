"""Reports as pages: their form, their figures, the first wrong tensor, and how they are written."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpt_parity import cli
from gpt_parity.backends import build_model
from gpt_parity.checkpoint import save_checkpoint
from gpt_parity.html.check_page import check_page
from gpt_parity.html.curves import thinned
from gpt_parity.html.flow import flow
from gpt_parity.html.heat import NOT_FINITE, WITHIN, errors, heat_map, levels
from gpt_parity.html.tensors import MOST_BYTES, Tensor, error_maps, tensor_table, tensors
from gpt_parity.html.verify_page import verify_page
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle import Bundle, Judgement, Report, Tolerance, compare, save_bundle
from gpt_parity.oracle.compare import FORWARD, PARAMETER, Pair
from gpt_parity.oracle.lockstep import Outcome
from gpt_parity.oracle.report import Verification
from gpt_parity.oracle.subject import export
from gpt_parity.oracle.verdict import check_arrays, check_file
from gpt_parity.oracle_config import CheckConfig, ExportConfig, VerifyConfig
from gpt_parity.verify import verify
from numpy_impl import functional
from numpy_impl.tensor import Tensor as Variable
from parity_tests.candidates import submission
from parity_tests.html_pages import Element, read_page, rows_of

pytestmark = pytest.mark.reference("by hand")

HOSTILE = "</title></svg><script>alert('&quot;')</script><b onclick=\"x\">\x00\x1b\u202e\udc80"
RIGHT_GELU = functional.gelu
SECOND = "grad/transformers.1.feed_forward.input.output"


def wrong_gelu(x: Variable) -> Variable:
    """GELU whose derivative is half of what it should be."""
    out = RIGHT_GELU(x)
    c = x.data
    t = np.tanh(functional.SQRT_2_OVER_PI * c * (1.0 + 0.044715 * c * c))
    du = functional.SQRT_2_OVER_PI * (1.0 + 0.044715 * c * c)
    return Variable.from_op(
        "gelu", out.data, (x,), lambda grad: (grad * 0.5 * (1.0 + t + c * (1.0 - t * t) * du),)
    )


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="tiny"))


@pytest.fixture(scope="module")
def folder(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, what agrees with it, and what has one mistake."""
    folder = tmp_path_factory.mktemp("pages")
    save_bundle(folder / "ref.npz", bundle)
    np.savez(folder / "right.npz", **submission("numpy", bundle, "float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "gelu", wrong_gelu)
        np.savez(folder / "wrong.npz", **submission("numpy", bundle, "float32"))
    return folder


@pytest.fixture(scope="module")
def verification(tmp_path_factory: pytest.TempPathFactory) -> Verification:
    """A small model, compared in all ways."""
    folder = tmp_path_factory.mktemp("verify")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat, " * 20, encoding="utf-8")
    vocabulary = "".join(sorted(set(text.read_text())))
    config = GPTConfig(len(vocabulary), context_size=6, embedding_size=5, blocks=1)
    model = build_model("numpy", config, seed=1)
    save_checkpoint(folder / "c", model, config=config, vocabulary=vocabulary)
    return verify(VerifyConfig(
        data=text, checkpoint=folder / "c", steps=4, workers=1, html=folder / "page.html",
    ))  # fmt: skip


def checked(folder: Path, name: str) -> tuple[Report, bytes]:
    """The report on a file, and the page that the command wrote of it."""
    page = folder / f"{name}.html"
    arguments = [str(folder / f"{name}.npz"), "--ref", str(folder / "ref.npz")]
    code = cli.main(["oracle", "check", *arguments, "--html", str(page)])
    config = CheckConfig(ref=folder / "ref.npz", html=page)
    report = check_file(folder / f"{name}.npz", config)
    assert code == (0 if report.ok else 1)
    return report, page.read_bytes()


def table_of(page: Element, caption: str) -> list[dict[str, str]]:
    return rows_of(next(t for t in page.all("table") if caption in t.all("caption")[0].text))


# --- oracle check ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ok"), [("right", True), ("wrong", False)])
def test_a_page_says_what_the_report_says(folder: Path, name: str, ok: bool) -> None:
    report, content = checked(folder, name)
    page = read_page(content)
    assert report.ok is ok and len(content) < 1_000_000
    assert page.all("html")[0].attributes["lang"] == "en"
    assert page.all("p")[0].text == str(report).splitlines()[0]  # the verdict comes first
    for line in (*report.hints, *report.notes):
        assert line in page.text
    rows = table_of(page, "Tensors in the order")
    assert [row["tensor"] for row in rows] == [j.name for j in report.judgements]
    for row, j in zip(rows, report.judgements, strict=True):
        assert row["error / tolerance"] == f"{j.ratio:.3g}" and row["how far"] == j.describe()
        assert ("differ" in row["status"]) is not j.ok and row["kind"] == j.kind
        assert row["shape"] == str(report.bundle.arrays[j.name].shape)
    assert f"gpt-parity {report.bundle.provenance['gpt_parity']}" in page.text


def test_the_first_wrong_tensor_is_marked(folder: Path) -> None:
    report, content = checked(folder, "wrong")
    page = read_page(content)
    assert report.first.name == SECOND
    rows = table_of(page, "Tensors in the order")
    assert [r["tensor"] for r in rows if "first" in r["status"]] == [SECOND]
    drawing = next(s for s in page.all("svg") if s.is_in("flow"))
    marked = [g for g in drawing.all("g") if g.is_in("first")]
    assert [g.all("text")[0].text for g in marked] == [SECOND.removeprefix("grad/")]
    assert "gradient DIFFERS FIRST" in marked[0].text and "value agrees" in marked[0].text
    follow = [g.all("text")[0].text for g in drawing.all("g") if g.is_in("wrong")]
    wrong = {j.name.removeprefix("grad/") for j in report.judgements if not j.ok}
    assert set(follow) == wrong - {SECOND.removeprefix("grad/")} and len(follow) > 20
    opened = [d for d in page.all("details") if "open" in d.attributes]
    assert SECOND in opened[0].all("summary")[0].text
    for d in page.all("details"):
        if "agrees" in d.all("summary")[0].text:
            assert "open" not in d.attributes


def test_a_mistake_on_its_own_is_told_from_a_consequence(bundle: Bundle) -> None:
    """A wrong bias gradient has nothing to do with a wrong gradient of the logits' weight."""
    mine = submission("numpy", bundle, "float64")
    for key in ("grad/output.output.weight", "grad/embedding.embedding.weight"):
        mine[key] = 2.0 * mine[key]
    found = tensors({"": check_arrays(mine, bundle, keep=True)})
    drawing = read_page(b"<h1>x</h1><style></style>" + flow("f", found, 2).encode())
    words = {g.all("text")[0].text: g.text for g in drawing.all("g")}
    assert "DIFFERS FIRST" in words["output.output.weight"]
    assert "differs on its own" in words["embedding.embedding.weight"]
    assert "gradient agrees" in words["output.output.bias"]


def test_of_many_blocks_the_one_that_matters_is_drawn() -> None:
    first = Judgement("transformers.3.attention.softmax.output", FORWARD, 5.0, 1.0)
    found = tensors({"": Report([first])})
    drawing = flow("f", found, 6)
    names = set(re.findall(r'class="name"[^>]*>([^<]*)<', drawing))
    assert "transformers.3.attention.softmax.output" in names
    assert {"transformers.0 to 2", "transformers.4 to 5", "embedding.output", "loss"} <= names
    assert not any(name.startswith("transformers.2.") for name in names)
    assert "Of 6 blocks the one that matters is drawn" in drawing


@pytest.mark.parametrize("place", ["mine.npz", "ref/manifest.json"])
def test_a_page_does_not_replace_what_it_is_about(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["oracle", "export", "-o", "ref", "--preset", "tiny"]) == 0
    np.savez("mine.npz", loss=np.zeros(()))
    before = Path(place).read_bytes()
    capsys.readouterr()
    assert cli.main(["oracle", "check", "mine.npz", "--ref", "ref", "--html", place]) == 2
    assert f"html is {place}, which belongs to the input " in capsys.readouterr().err
    assert Path(place).read_bytes() == before


def test_attention_uses_its_input_three_times() -> None:
    drawing = flow("f", [], 1)
    labels = re.findall(r'class="soft" x="[^"]*" y="[^"]*">([a-z]+)<', drawing)
    assert sorted(labels) == ["key", "query", "value", "weights"]


@pytest.mark.parametrize("keep", [True, False])
def test_hostile_names_are_shown_as_text(keep: bool) -> None:
    pair = Pair(np.ones((2, 2)), np.zeros((2, 2)), Tolerance(1.0, np.ones(2)))
    judgement = Judgement(HOSTILE, PARAMETER, 2.0, 1.0, reason=HOSTILE)
    pairs = {(PARAMETER, HOSTILE): pair} if keep else {}
    report = Report([judgement], (HOSTILE,), (HOSTILE,), HOSTILE, pairs)
    config = CheckConfig(ref=Path(HOSTILE.replace("\0", "")), only=HOSTILE)
    content = check_page(report, Path(HOSTILE), config)
    page = read_page(content)  # no script, no attribute of theirs
    shown = HOSTILE[:-4] + r"\u0000\u001b\u202e\udc80"
    assert page.text.count(shown) >= 5 and b"\x1b" not in content and b"\0" not in content
    assert len(page.all("svg")) == keep


# --- error maps -----------------------------------------------------------------------------------


def test_errors_are_those_that_were_judged() -> None:
    """The squares of a row add up to its ratio, whose largest is that of the judgement."""
    rng = np.random.default_rng(1)
    reference = rng.standard_normal((3, 4, 5))
    candidate = reference + 1e-3 * rng.standard_normal(reference.shape)
    tolerance = Tolerance(1.0, rng.uniform(1e-3, 1e-2, (3, 4)))
    judgement = compare("x", FORWARD, candidate, reference, tolerance, "float64")
    found = errors(Pair(candidate, reference, tolerance))
    rows = np.sqrt((found.elements**2).sum(axis=1))
    assert judgement.row == np.unravel_index(int(rows.argmax()), (3, 4))
    assert np.abs(found.rows - rows).max() <= 1e-13 * rows.max()
    assert abs(rows.max() - judgement.ratio) <= 1e-13 * judgement.ratio


def test_levels_part_at_the_tolerance() -> None:
    found = levels(np.array([0.0, 5e-324, 1.0, np.nextafter(1.0, 2.0), 1e300, np.inf, np.nan]))
    assert found.tolist() == [0, 1, WITHIN, WITHIN + 1, NOT_FINITE - 1, NOT_FINITE, NOT_FINITE]


def test_a_large_map_shows_the_largest_of_each_block() -> None:
    """One wrong element among 90,000 is one struck-out cell of at most 64 x 64, and its row."""
    reference = np.zeros((300, 300))
    candidate = reference.copy()
    candidate[299, 0] = 50.0
    tolerance = Tolerance(1.0, np.ones(300))
    judgement = compare("x", FORWARD, candidate, reference, tolerance, "float64")
    drawn = heat_map("m", judgement, Pair(candidate, reference, tolerance))
    assert re.findall('class="over" d="([^"]*)"', drawn) == ["M0 59h1M2 59h1"]
    assert "maximum over up to 5 x 5 elements" in drawn and "element 50 at (299, 0)" in drawn
    assert 'viewBox="0 0 62 60"' in drawn


def test_masked_positions_are_blank_and_nan_is_not_finite() -> None:
    reference = np.array([[1.0, -1e9], [1.0, 1.0]])
    candidate = np.array([[1.0, 7.0], [np.nan, 1.0]])
    kept = np.tri(2, dtype=bool)
    found = errors(Pair(candidate, reference, Tolerance(1.0, np.ones(2)), kept))
    assert found.elements.tolist() == [[0.0, 0.0], [np.inf, 0.0]]
    assert found.rows.tolist() == [0.0, np.inf]
    drawn = heat_map(
        "m", Judgement("x", FORWARD, np.inf, np.inf, reason="not finite"),
        Pair(candidate, reference, Tolerance(1.0, np.ones(2)), kept),
    )  # fmt: skip
    assert "M3 0" not in drawn and f'class="l{NOT_FINITE}"' in drawn and "left blank" in drawn


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (2, 0)])
def test_any_shape_has_a_map_or_a_sentence(shape: tuple[int, ...]) -> None:
    x, rows = np.zeros(shape), np.ones(shape[:-1])
    drawn = heat_map(
        "m", Judgement("x", FORWARD, 0.0, 0.0), Pair(x, x.copy(), Tolerance(1.0, rows))
    )
    assert ("<svg" in drawn) is (x.size > 0) and "nan" not in drawn


def test_what_cannot_be_mapped_says_why() -> None:
    x, endless = np.zeros((2, 2)), Tolerance(np.inf, np.full(2, np.inf))
    unjudged = heat_map(
        "m", Judgement("x", FORWARD, 0.0, np.nan, judged=False), Pair(x, x, endless)
    )
    assert "no map, not judged" in unjudged
    judgement = compare("x", FORWARD, x[0].copy(), x, Tolerance(1.0, np.ones(2)), "float64")
    other = heat_map("m", judgement, Pair(x[0], x, Tolerance(1.0, np.ones(2))))
    assert "no map, shape (2,), needed (2, 2)" in other


def test_a_page_of_a_large_model_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 tensors the last differs: it has its map, some of the others are counted."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 64, 64))
    pair = Pair(x, y, Tolerance(1.0, 10.0 ** rng.uniform(-3, 3, 64)))
    found = [
        Tensor(f"t{i}", FORWARD, {"": Judgement(f"t{i}", FORWARD, 0.5, 0.1)}, {"": pair})
        for i in range(199)
    ]
    last = Tensor("last", FORWARD, {"": Judgement("last", FORWARD, 9.0, 0.1)}, {"": pair})
    assert MOST_BYTES <= 4_000_000
    monkeypatch.setattr("gpt_parity.html.tensors.MOST_BYTES", 300_000)
    content = error_maps([*found, last], last)
    assert 300_000 < len(content) < 350_000
    left = int(re.search(r"Maps of (\d+) more tensors are left out", content)[1])
    assert content.count("<figure>") == 200 - left and "errors of last in units" in content
    table = tensor_table([*(8 * found), last], last)
    assert "93 more tensors are left out of this table" in table
    assert table.count("<tr") == 1 + 1500 and table.count("first to differ") == 1


# --- verify ---------------------------------------------------------------------------------------


def test_the_page_of_a_verification(verification: Verification) -> None:
    v = verification
    content = verify_page(v)
    page = read_page(content)
    assert v.ok and page.all("p")[0].text == v.verdict()
    rows = table_of(page, "Tensors in the order")
    reports = {" ".join(key): report for key, report in v.reports.items()}
    votes = {(vote.kind, vote.name): max(vote.closure, vote.autograd) for vote in v.votes}
    for label, report in reports.items():
        for row, j in zip(rows, report.judgements, strict=True):
            assert (row["tensor"], row["kind"], row[label]) == (j.name, j.kind, f"{j.ratio:.3g}")
            vote = votes.get((j.kind, j.name))
            assert row["complex step"] == ("" if vote is None else f"{vote:.3g}")
    maps = [s for s in page.all("svg") if s.is_in("heat")]
    assert len(maps) == 3 * len(rows)  # each tensor of each report
    worst = table_of(page, "The worst step")
    expected = [
        (f"{who} {o.dtype}", quantity, f"{j.ratio:.3g}", str(step))
        for o in v.lockstep for who, q in o.worst.items() for quantity, (j, step) in q.items()
    ]  # fmt: skip
    found = [(r["candidate"], r["quantity"], r["error / tolerance"], r["step"]) for r in worst]
    assert found == expected and len(found) == 18


def test_curves_show_the_series(verification: Verification) -> None:
    page = read_page(verify_page(verification))
    drawings = [s for s in page.all("svg") if s.is_in("curve")]
    assert len(drawings) == 3
    for o in verification.lockstep:
        for who, series in o.series.items():
            rows = table_of(page, f"{who} {o.dtype}: worst error")
            for quantity, ratios in series.items():
                assert [row[quantity] for row in rows] == [f"{r:.3g}" for r in ratios]
                j, step = o.worst[who][quantity]
                assert len(ratios) == o.steps == 4 and ratios[step] == max(ratios) == j.ratio
            assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    named = {t.text for t in drawings[0].all("text")}
    assert {"exp_avg", "exp_avg_sq", "weights"} <= named and "learning rate" not in named


def test_series_are_thinned_by_their_worst() -> None:
    outcome = Outcome("float64", 4)
    for step, ratio in enumerate((0.5, 0.1, 3.0, 0.2)):
        rest = Judgement("b", "weights", ratio / 2, 0.0)
        outcome.add("torch", step, [rest, Judgement("a", "weights", ratio, 0.0), rest])
    assert outcome.series == {"torch": {"weights": [0.5, 0.1, 3.0, 0.2]}}
    assert thinned([0.1, 0.5, 3.0, 0.2, 0.7], 3) == [(0, 1, 0.5), (2, 3, 3.0), (4, 4, 0.7)]
    assert [last for _, last, _ in thinned(list(range(10001)), 20)][-1] == 10000
    assert len(thinned(list(range(10001)), 20)) <= 20


def test_a_failing_verification_has_a_page_too(verification: Verification) -> None:
    (key, report), *_ = verification.reports.items()
    out = replace(report.judgements[3], ratio=np.inf, reason="not finite")
    judgements = [*report.judgements[:3], out, *report.judgements[4:]]
    wrong = Report(judgements, pairs=report.pairs)
    outcome = Outcome("float64", 3)
    for step, ratio in enumerate((0.0, 1e-9, np.inf)):
        outcome.add("torch", step, [Judgement("w", "weights", ratio, ratio)])
    v = replace(verification, reports={**verification.reports, key: wrong}, lockstep=[outcome])
    page = read_page(verify_page(v))
    assert not v.ok and page.all("p")[0].text == v.verdict() and "FAIL" in v.verdict()
    rows = table_of(page, "Tensors in the order")
    assert [r["tensor"] for r in rows if "first" in r["status"]] == [out.name]
    assert "What is not finite lies on the upper edge" in page.text


# --- how pages are written ------------------------------------------------------------------------


def test_without_a_page_no_arrays_are_kept(folder: Path) -> None:
    report = check_file(folder / "right.npz", CheckConfig(ref=folder / "ref.npz"))
    kept, _ = checked(folder, "right")
    assert report == kept and not report.pairs and report.bundle is None and kept.pairs


def test_the_command_writes_the_page_and_the_same_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["oracle", "check", str(folder / "wrong.npz"), "--ref", str(folder / "ref.npz")]
    assert cli.main(arguments) == 1
    plain = capsys.readouterr().out
    assert cli.main([*arguments, "--html", str(folder / "p.html")]) == 1
    assert capsys.readouterr().out == plain
    assert str(folder) not in (folder / "p.html").read_text("utf-8")


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of file sizes: run on Linux or macOS")
def test_on_a_full_disk_the_old_page_stays_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import resource

    page = folder / "full.html"
    page.write_text("old")
    arguments = ["oracle", "check", str(folder / "right.npz"), "--ref", str(folder / "ref.npz")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        assert cli.main([*arguments, "--html", str(page)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert error == f"gpt-parity: error: {page}: cannot be written, File too large\n"
    assert page.read_text() == "old" and not list(folder.glob(".*"))


@pytest.mark.parametrize("command", ["verify", "oracle check x.npz --ref ref"])
def test_a_page_without_a_folder_is_refused_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), "--html", str(tmp_path / "no" / "page.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "html is " in captured.err
