"""download=True, against a server on the loopback address."""

import errno
import gzip
import hashlib
import http.server
import io
import os
import socket
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import lieattn_datasets as ld
from lieattn_datasets import _download, _md17, _mnist, _modelnet, _photos, _qm9
from lieattn_datasets._download import fetch
from lieattn_datasets._files import Release, Source
from tests.fuzz._data_sets import CASES
from tests.test_datasets import LABELS, idx, write_pcam

pytest.importorskip("pooch")

CONTENT = bytes(range(256)) * 1000


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


class Server(http.server.ThreadingHTTPServer):
    """Serves a dictionary of files.

    The first response of ``cut`` ends in the middle, that of ``stuck`` waits there; ``both`` waits for two requests.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked, self.both, self.go = {"data": CONTENT}, [], threading.Barrier(2), threading.Event()

    def address(self, name, folder="whole"):
        return f"http://127.0.0.1:{self.server_address[1]}/{folder}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        folder, name = self.path.split("/")[1:]
        self.server.asked.append(self.path)
        content = self.server.files.get(name)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        if folder == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(content), 10_000):
                chunk = content[start : start + 10_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if folder == "both":
            self.server.both.wait(20)
        first = self.server.asked.count(self.path) == 1
        cut = folder == "always" or (folder in ("cut", "stuck") and first)
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if folder == "stuck" and first:
            self.server.go.wait(20)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def shared_server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(shared_server, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    shared_server.asked.clear()
    return shared_server


@pytest.fixture
def nobody():
    """Return an address at which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/data"


DIGEST = md5(CONTENT)


def release(*addresses, digest=DIGEST):
    return Release("A set", "Where it is from.", sources=(Source("data", addresses, digest),))


def files(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


class TestFetch:
    def test_the_right_file_once(self, server, tmp_path):
        known = release(server.address("data"))
        fetch(known, tmp_path / "new", "data")
        path = tmp_path / "new" / "data"
        assert path.read_bytes() == CONTENT
        assert os.listdir(path.parent) == ["data"]
        (tmp_path / "mine").write_bytes(b"")
        assert path.stat().st_mode == (tmp_path / "mine").stat().st_mode
        fetch(known, tmp_path / "new", "data")
        assert len(server.asked) == 1

    def test_what_is_there_is_not_touched(self, server, tmp_path):
        (tmp_path / "data").write_bytes(b"mine")
        fetch(release(server.address("data")), tmp_path, "data")
        fetch(release(server.address("data")), tmp_path / "other", "something else")
        assert (tmp_path / "data").read_bytes() == b"mine"
        assert not server.asked

    def test_wrong_digest(self, server, tmp_path):
        with pytest.raises(OSError, match="A set: data could not be downloaded") as caught:
            fetch(release(server.address("data"), digest=md5(b"")), tmp_path, "data")
        for part in (server.address("data"), md5(b""), DIGEST[4:], str(tmp_path), "Where it is from."):
            assert part in str(caught.value)
        assert files(tmp_path) == []

    @pytest.mark.parametrize("folder", ["cut", "stuck", "chunked"])
    def test_interrupted_connections(self, server, tmp_path, monkeypatch, folder):
        monkeypatch.setattr("lieattn_datasets._download._SECONDS", 0.5)
        try:
            fetch(release(server.address("data", folder)), tmp_path, "data")
        finally:
            server.go.set()
        assert (tmp_path / "data").read_bytes() == CONTENT
        assert len(server.asked) == (1 if folder == "chunked" else 2)

    def test_connections_that_are_always_interrupted(self, server, tmp_path):
        with pytest.raises(OSError, match=r"always/data: .*IncompleteRead.*\. Try again later"):
            fetch(release(server.address("data", "always")), tmp_path / "new" / "raw", "data")
        assert files(tmp_path) == []

    def test_no_server(self, nobody, tmp_path, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "*")
        with pytest.raises(OSError, match=r"/data: .*refused.*\. Try again later, or put the"):
            fetch(release(nobody), tmp_path, "data")

    def test_the_next_address(self, server, nobody, tmp_path):
        known = release(nobody, server.address("absent"), server.address("data"), server.address("data", "unused"))
        fetch(known, tmp_path, "data")
        assert (tmp_path / "data").read_bytes() == CONTENT
        assert [path.split("/")[1] for path in server.asked] == ["whole", "whole"]

    @pytest.mark.parametrize("packed", [False, True])
    def test_two_at_once(self, server, tmp_path, packed):
        known = release(server.address("data", "both"))
        if packed:
            content = server.files["two.tar.gz"] = tar({"x/data": CONTENT}, "gz")
            source = Source("two.tar.gz", (server.address("two.tar.gz", "both"),), md5(content), ("data",))
            known = replace(known, sources=(source,))
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(fetch, known, tmp_path, "data") for _ in range(2)]:
                done.result()
        assert (tmp_path / "data").read_bytes() == CONTENT
        assert [path.name for path in tmp_path.iterdir()] == ["data"]
        assert len(server.asked) == 2

    def test_what_cannot_be_written(self, server, tmp_path, monkeypatch):
        def refuse(*arguments, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("pooch.utils.tempfile.NamedTemporaryFile", refuse)
        with pytest.raises(
            OSError, match=r"A set: data cannot be written into .*No space left.*another root"
        ) as caught:
            fetch(release(server.address("data")), tmp_path, "data")
        assert caught.value.errno == errno.ENOSPC

    def test_without_pooch(self, tmp_path, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "pooch", None)
        with pytest.raises(
            ImportError, match=r'A set: download=True needs the package pooch: pip install "lieattn\[data\]"'
        ):
            fetch(release("http://127.0.0.1/data"), tmp_path, "data")


def tar(members, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{mode}") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["gz", "bz2"])
def test_only_what_was_asked_for_is_unpacked(tmp_path, mode):
    path = tmp_path / f"data.tar.{mode}"
    for members, expected in (
        ({"x/a": b"1", "../../b": b"2", "c": b"3"}, {"a": b"1", "b": b"2"}),
        ({"a": None, "x/b": b"2"}, {"b": b"2"}),
    ):
        path.write_bytes(tar(members, mode))
        assert {name: stream.read() for name, stream in _download.unpack(path, ("a", "b"))} == expected


def serve(server, monkeypatch, holder, key, contents):
    """Change a release in a dictionary so that files with these contents are downloaded from the server."""
    known = holder[key]
    sources = []
    for source in known.sources:
        if source.name in contents:
            server.files[source.name] = contents[source.name]
            addresses = (server.address(source.name),)
            source = replace(source, addresses=addresses, digest=source.digest and md5(contents[source.name]))
        sources.append(source)
    changed = replace(known, sources=tuple(sources), digests={})
    monkeypatch.setitem(holder, key, changed)
    return changed


class TestDataSets:
    def test_mnist(self, server, tmp_path, monkeypatch):
        images = np.zeros((12, 28, 28), dtype=np.uint8)
        contents = {
            f"t10k-{name}-ubyte.gz": gzip.compress(idx(array))
            for name, array in (("images-idx3", images), ("labels-idx1", LABELS))
        }
        monkeypatch.setattr(ld.MNIST, "_release", serve(server, monkeypatch, vars(_mnist), "_MNIST", contents))
        with pytest.raises(FileNotFoundError, match="Nothing is downloaded unless you pass download=True: put"):
            ld.MNIST(tmp_path, "test")
        assert not server.asked
        assert len(ld.MNIST(tmp_path, "test", download=True, verify=False)) == 12
        assert files(tmp_path) == [f"MNIST/raw/{name}" for name in sorted(contents)]
        assert len(ld.MNIST(tmp_path, "test", download=True, verify=False)) == len(server.asked) + 10

    def test_patch_camelyon_is_unpacked(self, server, tmp_path, monkeypatch):
        (tmp_path / "there").mkdir()
        images, _ = write_pcam(tmp_path / "there")
        contents = {f"{path.name}.gz": gzip.compress(path.read_bytes(), 1) for path in (tmp_path / "there").iterdir()}
        serve(server, monkeypatch, vars(_photos), "_PCAM", contents)
        assert len(ld.PatchCamelyon(tmp_path / "here", "test", download=True, verify=False)) == len(images)
        assert files(tmp_path / "here") == [f"pcam/{name[:-3]}" for name in sorted(contents)]

    def test_revised_md17_of_its_archive(self, server, tmp_path, monkeypatch):
        rng, frames = np.random.default_rng(0), io.BytesIO()
        vectors = {"coords": rng.normal(size=(8, 3, 3)), "forces": rng.normal(size=(8, 3, 3))}
        np.savez(frames, nuclear_charges=np.array([8, 1, 1], dtype=np.uint8), energies=rng.normal(size=8), **vectors)
        members = {"rmd17/npz_data/rmd17_uracil.npz": frames.getvalue(), "rmd17/readme.txt": b"Read me."}
        members |= {
            f"rmd17/splits/index_{half}_01.csv": rows for half, rows in (("train", b"0\n1\n"), ("test", b"2\n"))
        }
        serve(server, monkeypatch, vars(_md17), "_OFFICIAL", {"rmd17.tar.bz2": tar(members, "bz2")})
        data = ld.RMD17(tmp_path, "uracil", download=True, validation=0, verify=False)
        assert len(data) == 2
        assert files(tmp_path) == sorted(f"npz_data/{name.split('/')[-1]}" for name in members if "readme" not in name)

    @pytest.mark.parametrize(
        ("name", "holder", "key", "split"),
        [
            ("RotatedMNIST", vars(_mnist), "_ROTATED", "train"),
            ("CIFAR100", vars(_photos), "_CIFAR100", "test"),
            ("QM9", vars(_qm9), "OFFICIAL", "all"),
            ("ModelNet", _modelnet._RELEASES, 10, "test"),
        ],
    )
    def test_the_others(self, server, tmp_path, monkeypatch, name, holder, key, split):
        contents = {path.name: path.read_bytes() for path in CASES[name].folder.rglob("*") if path.is_file()}
        for source in holder[key].sources:
            if source.members:
                members = {f"somewhere/{member}": contents[member] for member in source.members if member in contents}
                contents[source.name] = tar(members, "gz")
        changed = serve(server, monkeypatch, holder, key, contents)
        kind = getattr(ld, name)
        monkeypatch.setattr(kind, "_release", changed, raising=False)
        data = kind(tmp_path, split, download=True, verify=False)
        expected = kind(CASES[name].folder, split, verify=False)
        assert len(data) == len(expected) > 0
        assert np.array_equal(data[0].pos, expected[0].pos)
        assert not list(tmp_path.rglob(".download-*"))

    def test_a_page_in_place_of_an_archive_without_a_digest(self, server, tmp_path, monkeypatch):
        serve(server, monkeypatch, _modelnet._RELEASES, 40, {"ModelNet40.zip": b"<html>We have moved.</html>"})
        with pytest.raises(ValueError, match=r"ModelNet40\.zip is not a complete zip archive"):
            ld.ModelNet(tmp_path, version=40, download=True)
        assert files(tmp_path) == []

    def test_what_is_stated_of_every_source(self):
        for name, sources in _download.SOURCES.items():
            for source in sources:
                assert source.addresses, name
                assert all(address.startswith("http") for address in source.addresses)
                if source.digest is None:  # then only the connection identifies the source of the file
                    assert all(address.startswith("https://") for address in source.addresses)
