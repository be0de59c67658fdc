"""Where a figure or a file came from: commit, command, versions, device, hashes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["provenance", "source_hash", "text_hash"]

PACKAGES = ("ddtree", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def provenance(argv: Iterable[str] | None = None) -> dict[str, Any]:
    """Facts to store beside a result.

    `commit` is null outside a checkout, where `source` still tells which code ran; `dirty`: work uncommitted.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain")) if commit else None,
        "source": source_hash(),
        "argv": _plain(sys.argv if argv is None else list(argv)),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "device": device_facts(),
    }


def source_hash() -> str:
    """SHA-256 of the package's own Python files, the same in every copy of one commit."""
    package = Path(__file__).resolve().parent
    return text_hash(
        part
        for path in sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix())
        for part in (path.relative_to(package).as_posix(), path.read_text(encoding="utf-8"))
    )


def device_facts() -> dict[str, Any]:
    """The processor and, when torch sees one, the GPU."""
    import torch

    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(_cores()),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def text_hash(texts: Iterable[str]) -> str:
    """SHA-256 of texts in order: with figures it says which rendered prompts they were measured on."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8") + b"\0")
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(argv: list[str]) -> list[str]:
    """Arguments without the folders of this machine: a result file names no home directory."""
    return ["=".join(map(_without_folder, argument.split("="))) for argument in argv]


def _without_folder(value: str) -> str:
    bare = value.strip("\"'")
    return Path(bare).name if Path(bare).is_absolute() else value


def _cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
