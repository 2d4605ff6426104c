"""Downloads from a server on this machine: the right file, a wrong one, a broken connection, a hostile archive."""

import gzip
import hashlib
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from curvcert.data import DownloadFailed, cifar10, load_cifar10, load_mnist, mnist
from curvcert.data.download import TAR_OVERHEAD, download_file, extract_members
from curvcert.data.official import OfficialFile
from curvcert.errors import InvalidInput
from tests.data.official_sets import idx, published, random_bytes, records

CONTENT = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class _Server(HTTPServer):
    """Serves `files`; those in `broken` break off half-way."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.requests.append(name)
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if name in self.server.broken else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    pytest.importorskip("pooch", reason="pooch is not installed (extra 'data')")
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_brings_the_file_once_and_shows_a_bar(
    server: _Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.files["set.bin"] = CONTENT
    for _ in range(2):
        path = download_file(server.url + "set.bin", DIGEST, tmp_path / "new" / "set.bin")
        assert path.read_bytes() == CONTENT
    assert server.requests == ["set.bin"]
    assert _everything(tmp_path) == ["new/set.bin"]
    assert "256.0/256.0 kB" in capfd.readouterr().err


def test_a_wrong_digest_leaves_nothing(server: _Server, tmp_path: Path) -> None:
    server.files["set.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(
        DownloadFailed, match=rf"(?s)set\.bin with SHA-256 {DIGEST}.*does not match.*Check the connection"
    ):
        download_file(server.url + "set.bin", DIGEST, tmp_path / "set.bin")
    assert _everything(tmp_path) == []


def test_a_connection_that_breaks_off_leaves_nothing(server: _Server, tmp_path: Path) -> None:
    server.files["set.bin"] = CONTENT
    server.broken.add("set.bin")
    with pytest.raises(DownloadFailed, match=r"set\.bin"):
        download_file(server.url + "set.bin", DIGEST, tmp_path / "set.bin")
    assert _everything(tmp_path) == []


def test_an_interrupt_leaves_nothing(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["set.bin"] = CONTENT

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("curvcert.data.download._PoochBar.update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download_file(server.url + "set.bin", DIGEST, tmp_path / "set.bin")
    assert _everything(tmp_path) == []


def test_a_file_that_the_server_lacks_is_named(server: _Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"(?s)gone\.bin.*404"):
        download_file(server.url + "gone.bin", DIGEST, tmp_path / "gone.bin")


def test_without_pooch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DownloadFailed, match=r"pip install 'curvcert\[data\]'"):
        download_file("http://127.0.0.1:9/set.bin", DIGEST, tmp_path / "set.bin")


def test_mnist_brings_only_what_is_missing(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"images": idx(random_bytes(5, 28, 28)), "labels": idx(random_bytes(5) % 10)}
    packed = {name: gzip.compress(content) for name, content in contents.items()}
    server.files = {f"{name}.gz": content for name, content in packed.items()}
    monkeypatch.setattr(mnist, "SOURCE", server.url)
    monkeypatch.setitem(mnist.FILES, "test", tuple(published(*item) for item in contents.items()))
    for name, content in packed.items():
        monkeypatch.setitem(mnist.COMPRESSED_SHA256, name, hashlib.sha256(content).hexdigest())
    (tmp_path / "labels").write_bytes(contents["labels"])
    for _ in range(2):
        assert len(load_mnist("test", tmp_path)) == 5
    assert server.requests == ["images.gz"]
    assert _everything(tmp_path) == ["MNIST/raw/images.gz", "labels"]


def test_cifar10_brings_the_archive_and_keeps_the_batches(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"{k}.bin": records(random_bytes(2, 3, 32, 32, seed=k), random_bytes(2) % 10) for k in range(3)}
    files = tuple(published(*item) for item in contents.items())
    archive = _tar({f"{cifar10.FOLDER}/{name}": content for name, content in contents.items()})
    server.files["archive"] = archive
    monkeypatch.setattr(cifar10, "FILES", {"train": files[:2], "test": files[2:]})
    monkeypatch.setattr(cifar10, "SOURCE", server.url + "archive")
    monkeypatch.setattr(cifar10, "SOURCE_SHA256", hashlib.sha256(archive).hexdigest())
    assert len(load_cifar10("train", tmp_path)) == 4
    assert len(load_cifar10("test", tmp_path)) == 2
    assert server.requests == ["archive"]
    assert _everything(tmp_path) == [f"{cifar10.FOLDER}/{k}.bin" for k in range(3)]

    # An altered batch is not replaced behind the user's back.
    (tmp_path / cifar10.FOLDER / "2.bin").write_bytes(b"altered")
    with pytest.raises(InvalidInput, match=r"2\.bin is truncated or altered"):
        load_cifar10("test", tmp_path)


def _tar(contents: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


MEMBER = published("member.bin", CONTENT)


def _extract(archive: bytes, folder: Path, file: OfficialFile = MEMBER) -> None:
    path = folder.parents[1] / "set.tar.gz"
    path.write_bytes(archive)
    extract_members(path, "set", [file], folder)


def test_only_the_named_members_are_unpacked(unpacked: Path) -> None:
    hostile = ("../escaped", "set/../../escaped", "/escaped", "set/readme", "member.bin", "other/member.bin")
    _extract(_tar({name: b"hostile" for name in hostile} | {"set/member.bin": CONTENT}), unpacked)
    assert _everything(unpacked.parents[1]) == ["deep/out/member.bin", "set.tar.gz"]
    assert (unpacked / "member.bin").read_bytes() == CONTENT


def test_a_link_is_not_followed(unpacked: Path) -> None:
    with pytest.raises(InvalidInput, match=r"lacks set/member\.bin"):
        _extract(_tar({}, links={"set/member.bin": "/etc/passwd"}), unpacked)
    assert not unpacked.exists()


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (_tar({"set/other.bin": CONTENT}), r"lacks set/member\.bin"),
        (_tar({"set/member.bin": CONTENT[:-1]}), r"member\.bin is truncated or altered"),
        (_tar({"set/member.bin": CONTENT + b"."}), r"member\.bin is truncated or altered.*more bytes"),
        (_tar({"set/member.bin": CONTENT})[:-200], r"set\.tar\.gz is truncated or altered"),
        (CONTENT, r"set\.tar\.gz is truncated or altered"),
        (gzip.compress(CONTENT), r"set\.tar\.gz is truncated or altered"),
        (_tar({"bomb": bytes(len(CONTENT) + 2 * TAR_OVERHEAD), "set/member.bin": CONTENT}), "unpacks to more than"),
    ],
    ids=["missing", "short", "long", "cut", "not gzip", "not tar", "bomb"],
)
def test_a_damaged_or_hostile_archive_is_refused_and_leaves_nothing(
    unpacked: Path, archive: bytes, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        _extract(archive, unpacked)
    assert _everything(unpacked.parents[1]) == ["set.tar.gz"]


def test_an_interrupted_write_leaves_nothing_under_the_final_name(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        _extract(_tar({"set/member.bin": CONTENT}), unpacked)
    assert _everything(unpacked) == []
