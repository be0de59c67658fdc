"""The user's disk: writes that last and are whole, and what to say when there is no room or no permission."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ddtree.errors import StorageError

__all__ = ["NO_ACCESS", "NO_SPACE", "megabytes", "new_file", "storage_error", "sync", "writing"]

NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report what the disk refuses in this block as a StorageError about `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path}: cannot be written ({error}); free some space or choose another place"
        ) from None


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path`, in a folder made if need be, when the block ends without an error."""
    partial = path.with_name(f".{path.name}.part-{os.getpid()}")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
        finally:
            if partial.exists():
                partial.unlink()


def sync(path: Path) -> None:
    """Force a file or folder to the disk, so that a rename cannot become durable before what it names."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, folder: Path, needed: str, variable: str) -> StorageError:
    """What to tell the user; `variable` is the environment variable that moves the cache elsewhere."""
    where = error.filename or folder
    if error.errno in NO_SPACE:
        free = megabytes(shutil.disk_usage(folder).free)
        return StorageError(
            f"too little room on the disk of {folder} ({needed}{free} free): make room, or point {variable} at "
            "a folder on a larger disk"
        )
    if error.errno in NO_ACCESS:
        return StorageError(f"no permission to write {where}: point {variable} at a folder of your own")
    return StorageError(f"cannot use {where}: {error.strerror or error}: point {variable} at another folder")


def megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"
