"""The data set: its counts, and its download against local servers."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from gpt_parity import corpus
from gpt_parity.corpus import CharDataset, fetch_tinyshakespeare, read_corpus
from parity_tests.python_process import ROOT, run_python

pytestmark = pytest.mark.reference("by hand")

SHAKESPEARE = ROOT / "data" / "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_file(),
    reason="data/tinyshakespeare.txt is absent: run python scripts/fetch_data.py",
)


@pytest.mark.reference("exact property")
@needs_shakespeare
def test_tinyshakespeare_counts() -> None:
    found = read_corpus(SHAKESPEARE)
    assert found.sha256 == SHAKESPEARE_SHA256
    assert len(found.text) == 1_115_394
    dataset = CharDataset(found.text, context_size=32, batch_size=4)
    assert dataset.vocab_size == 65
    assert (dataset.batch_count("train"), dataset.batch_count("test")) == (15_684, 1_742)
    tokens, targets = dataset.batch("train", 0)
    assert tokens.shape == targets.shape == (4, 32)
    assert dataset.tokenizer.decode(tokens[0]) == "First Citizen:\nBefore we proceed"
    assert dataset.tokenizer.decode(targets[0]) == "irst Citizen:\nBefore we proceed "


# Download


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the data set at a file: address, its hash and size being expected."""
    data = b"All the world's a stage,\nAnd all the men and women merely players;\n" * 3000
    source = tmp_path / "source.txt"
    source.write_bytes(data)
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_URL", source.as_uri())
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_BYTES", len(data))
    return source


@pytest.fixture
def broken_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server on this machine: /cut ends early, anything else is absent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/cut":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"All the world's")

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*arguments: object, **options: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_data", ROOT / "scripts" / "fetch_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pinned_download() -> None:
    address = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
    assert f"{address}input.txt" == corpus.TINYSHAKESPEARE_URL
    assert corpus.TINYSHAKESPEARE_SHA256 == SHAKESPEARE_SHA256
    assert corpus.TINYSHAKESPEARE_BYTES == 1_115_394


def test_downloads_into_a_new_folder_with_a_timeout(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = []
    urlopen = urllib.request.urlopen

    def watched(url: str, *, timeout: float) -> object:
        timeouts.append(timeout)
        return urlopen(url, timeout=timeout)

    monkeypatch.setattr(urllib.request, "urlopen", watched)
    path = fetch_tinyshakespeare(tmp_path / "new" / "data")
    assert path == tmp_path / "new" / "data" / "tinyshakespeare.txt"
    assert path.read_bytes() == served.read_bytes()
    assert list(path.parent.iterdir()) == [path]
    assert len(timeouts) == 1 and 0 < timeouts[0] <= 60


def test_a_right_file_is_kept_without_a_download(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(served.read_bytes())
    forbid_network(monkeypatch)
    assert fetch_tinyshakespeare(tmp_path) == path
    assert capsys.readouterr().err == f"{path} is already there, with the right SHA-256\n"


def test_another_file_under_the_name_is_left_alone(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(b"my own text")
    forbid_network(monkeypatch)
    with pytest.raises(ValueError) as caught:
        fetch_tinyshakespeare(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}: SHA-256 is {hashlib.sha256(b'my own text').hexdigest()}, ")
    assert "left alone" in message and len(message.splitlines()) == 1
    assert path.read_bytes() == b"my own text"


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:999], bytes])
def test_a_wrong_download_leaves_nothing(
    served: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[bytes], bytes],
) -> None:
    data = served.read_bytes()
    wrong = change(data) if change is not bytes else data * 2
    served.write_bytes(wrong)
    with pytest.raises(ValueError, match=r"SHA-256 of the first .* nothing was written$") as caught:
        fetch_tinyshakespeare(tmp_path / "data")
    # A source that does not end is not read to its end.
    assert f"first {min(len(wrong), len(data) + 1)} bytes" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_the_name_appears_only_when_the_bytes_are_on_disk(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace
    folder = tmp_path / "data"

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("fsync", os.fstat(descriptor).st_size))

    def watched_replace(source: Path, target: Path) -> None:
        assert not target.exists()
        assert source.parent == target.parent
        events.append(("replace", source.stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    fetch_tinyshakespeare(folder)
    size = served.stat().st_size
    assert events[:2] == [("fsync", size), ("replace", size)]


def test_a_failed_write_leaves_nothing(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fetch_tinyshakespeare(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("page", ["absent", "closed"])
def test_without_a_network_the_error_says_what_to_do(
    broken_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    # Port 9 of this machine refuses connections.
    url = f"{broken_server}/absent" if page == "absent" else "http://127.0.0.1:9/"
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_URL", url)
    with pytest.raises(ConnectionError) as caught:
        fetch_tinyshakespeare(tmp_path)
    message = str(caught.value)
    path = tmp_path / "tinyshakespeare.txt"
    for part in (url, f"put the file at {path}", SHAKESPEARE_SHA256, "--data", "built-in text"):
        assert part in message
    assert len(message.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_connection_cut_short_leaves_nothing(
    broken_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "TINYSHAKESPEARE_URL", f"{broken_server}/cut")
    with pytest.raises((ConnectionError, ValueError)):
        fetch_tinyshakespeare(tmp_path)
    assert list(tmp_path.iterdir()) == []
    gc.collect()  # an unclosed connection warns here


def test_script_prints_the_path(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert load_script().main(tmp_path / "data") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'data' / 'tinyshakespeare.txt'}\n"


def test_script_reports_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"my own text")
    done = run_python(str(ROOT / "scripts" / "fetch_data.py"), str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpt-parity: error: ") and len(done.stderr.splitlines()) == 1


@needs_shakespeare
def test_script_accepts_the_real_file(tmp_path: Path) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(SHAKESPEARE.read_bytes())
    done = run_python(str(ROOT / "scripts" / "fetch_data.py"), str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
