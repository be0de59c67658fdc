"""From the name of a model to its folder on this machine: a local folder, a catalogue name, or a hub id.

Invariant: what is fetched is returned whole. Catalogue models are built under a temporary name and renamed when
everything is on the disk, so a process killed at any moment leaves either the whole model or none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from platformdirs import user_cache_dir

from ddtree.config import read_json
from ddtree.errors import CheckpointError, ConfigError, DownloadError, StorageError, UnsupportedError
from ddtree.models.catalog import CATALOG, CatalogModel
from ddtree.models.gguf import convert
from ddtree.models.wheel import Resolve, fetch_member, sha256

__all__ = ["LocalModel", "Progress", "find", "locate", "prepare"]

Progress = Callable[[str, int, int], None]  # stage ("wait", "download" or "convert"), bytes done, bytes in all

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # no pickles: loading one runs its code
_CONVERSION = 1  # raise it when `convert` changes what it writes: folders of older versions are then made anew
_SLACK_BYTES = 32 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class LocalModel:
    """A Hugging Face folder on this machine; `drafter` names the shipped drafter that fits it, if any."""

    folder: Path
    name: str
    source: str
    drafter: str | None


def locate(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    revision: str | None = None,
) -> LocalModel:
    """Find a model by local folder, catalogue name or hub id, in this order, and fetch it if it is not here yet.

    `cache_dir` holds catalogue models (default: the user's cache folder); hub models stay in Hugging Face's own
    cache, which other tools share, and huggingface_hub shows their progress. `revision` is for hub ids alone.
    Raises ConfigError, CheckpointError, DownloadError, StorageError or UnsupportedError.
    """
    path = os.path.expanduser(name)  # noqa: PTH111 - Path.expanduser raises where there is no such user
    is_here = bool(name) and os.path.exists(path)  # noqa: PTH110 - Path.exists raises without permission
    if not is_here and name not in CATALOG:
        if _HUB_ID.fullmatch(name):
            return _snapshot(name, revision)
        raise ConfigError(
            f"unknown model {name!r}: it is no folder here and not one of the known names "
            f"({', '.join(sorted(CATALOG))}): pass a known name, the folder of a Hugging Face model, "
            "or a hub id such as owner/name"
        )
    if revision is not None:
        raise ConfigError(f"revision {revision!r}: {name!r} is no hub id and has no revisions: leave it out")
    if is_here:
        return _local(Path(path), name)
    entry = CATALOG[name]
    return _catalogued(entry, prepare(entry, cache_dir or Path(user_cache_dir("ddtree")), progress=progress))


def find(name: str, *, cache_dir: Path | None = None) -> LocalModel | None:
    """What `locate` would return without fetching anything; None for a model that is not here yet."""
    if name in CATALOG and not Path(name).exists():
        entry = CATALOG[name]
        folder, *_ = _places(entry, (cache_dir or Path(user_cache_dir("ddtree"))) / "models")
        return _catalogued(entry, folder) if _is_ready(folder, entry) else None
    if _HUB_ID.fullmatch(name) and not Path(name).exists():
        try:
            path = snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        return LocalModel(Path(path), name, f"hub {name} at {Path(path).name}", None)
    return locate(name, cache_dir=cache_dir)


def _catalogued(entry: CatalogModel, folder: Path) -> LocalModel:
    source = f"{entry.origin}, {Path(entry.wheel.member).name} from PyPI {entry.wheel.requirement}"
    return LocalModel(folder, entry.name, source, entry.drafter)


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
    models = cache_dir.expanduser().absolute() / "models"
    folder = models / entry.name
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
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or of an older conversion
        unfinished.rename(folder)
        _sync(models)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # gone already unless something failed
    shutil.rmtree(downloads, ignore_errors=True)


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


def _sync(path: Path) -> None:
    """Force a file or folder to the disk, so that a rename cannot become durable before what it names."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(entry: CatalogModel, models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        needed = f"{_mb(_missing_bytes(entry, models))} needed, " if error.errno in _NO_SPACE else ""
        raise _storage_error(error, models, needed, "DDTREE_CACHE") from error


def _storage_error(error: OSError, folder: Path, needed: str, variable: str) -> StorageError:
    """What to tell the user; `variable` is the environment variable that moves the cache elsewhere."""
    where = error.filename or folder
    if error.errno in _NO_SPACE:
        free = _mb(shutil.disk_usage(folder).free)
        return StorageError(
            f"too little room on the disk of {folder} ({needed}{free} free): make room, or point {variable} at "
            "a folder on a larger disk"
        )
    if error.errno in _NO_ACCESS:
        return StorageError(f"no permission to write {where}: point {variable} at a folder of your own")
    return StorageError(f"cannot use {where}: {error.strerror or error}: point {variable} at another folder")


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"


def _local(folder: Path, name: str) -> LocalModel:
    hint = f" (rename it to use the known model {name})" if name in CATALOG else ""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file{hint}: pass the folder that holds config.json and the weights")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}: mend its permissions") from error
    if "config.json" not in names:
        found = f"holds {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "is empty"
        raise CheckpointError(
            f"{folder} {found}, but no config.json{hint}: pass the folder of a Hugging Face model"
        )
    return LocalModel(folder.resolve(), folder.resolve().name, "local folder", None)


def _snapshot(name: str, revision: str | None) -> LocalModel:
    """Fetch a hub model into Hugging Face's cache, or take it from there when the hub is out of reach."""
    at = f"{name} at {revision}" if revision else name
    try:
        # Transformers reads the top level alone; repositories keep copies in other formats below it.
        path = snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is not a hub id: {error}") from error
    except GatedRepoError as error:
        mend = f"accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
        raise DownloadError(f"{name} is gated on the Hugging Face Hub: {mend}") from error
    except RepositoryNotFoundError as error:
        mend = "check the spelling, or log in with `hf auth login` if it is private"
        raise DownloadError(f"{name} is no folder here and no model on the Hugging Face Hub: {mend}") from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{name} has no revision {revision!r} on the Hugging Face Hub: check it") from error
    except LocalEntryNotFoundError as error:
        mend = "connect (and unset HF_HUB_OFFLINE), or pass a local folder with --model"
        raise DownloadError(f"the hub is out of reach and {at} is not whole in its cache: {mend}") from error
    except Exception as error:  # the hub's HTTP library changes with its version, and so do its errors
        if isinstance(error, OSError) and error.errno in _NO_SPACE | _NO_ACCESS:
            raise _storage_error(error, Path(HF_HUB_CACHE), "", "HF_HOME") from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DownloadError(f"cannot fetch {at}: {reason}: connect and run the command again to go on") from error
    folder = Path(path)
    _check_snapshot(folder, name)
    return LocalModel(folder, name, f"hub {name} at {folder.name}", None)


def _check_snapshot(folder: Path, name: str) -> None:
    """Out of the hub's reach an interrupted snapshot may look like a whole one."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"hub model {name} has no config.json: pass a model in the format of transformers")
    index = folder / "model.safetensors.index.json"
    shards = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise DownloadError(f"{folder} lacks {missing[0]}: connect and run the command again to go on")
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(f"hub model {name} has no *.safetensors: pickled weights are not loaded")
