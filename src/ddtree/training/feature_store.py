"""Where captured features are kept between steps: on the device, or in a file that is mapped into memory.

A store holds one row for each token of all examples, end to end, and which examples have theirs. A file outlives
the run: it is used again when it was made from the same target, layers and examples.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddtree.errors import ConfigError, StorageError
from ddtree.models.fingerprint import fingerprint
from ddtree.models.storage import megabytes, writing
from ddtree.models.target import TargetModel
from ddtree.training.examples import Examples

__all__ = ["FeatureStore", "feature_key", "on_device", "on_disk"]


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """rows_TF: features of every token, on the device or mapped. captured_E: bool or uint8, whose are there."""

    rows_TF: Tensor
    captured_E: Tensor


def on_device(
    tokens: int, examples: int, width: int, dtype: torch.dtype, device: torch.device, limit_gib: float
) -> FeatureStore:
    """An empty store on a device. ConfigError when it would take more than the limit."""
    gib = tokens * width * dtype.itemsize / 2**30
    if gib > limit_gib:
        raise ConfigError(
            f"the features of {tokens:,} tokens take {gib:.1f} GiB, but feature_cache_gib is {limit_gib:g}; raise "
            "it, use less data, keep them on disk with feature_cache_dir, or set it to 0 to capture anew"
        )
    rows_TF = torch.empty(tokens, width, dtype=dtype, device=device)
    return FeatureStore(rows_TF, torch.zeros(examples, dtype=torch.bool))


def on_disk(folder: Path, key: str, tokens: int, examples: int, width: int, dtype: torch.dtype) -> FeatureStore:
    """The store of a folder, made if it is not there. key: what the features depend on.

    StorageError when the disk has no room for all of it: it is asked before the first is captured.
    """
    path, flags, card = (folder / f"features-{key}.{ending}" for ending in ("bin", "captured", "json"))
    size = tokens * width * dtype.itemsize
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != size:
            flags.unlink(missing_ok=True)  # what they speak of is not there any more
        # A file of full length takes no room on the disk where nothing was written yet.
        have = path.stat().st_blocks * 512 if path.exists() else 0
        free = shutil.disk_usage(folder).free
        if free < size - have:
            raise StorageError(
                f"{folder}: the features of {tokens:,} tokens take {megabytes(size)} and {megabytes(free)} are "
                "free; free some space, choose another folder, or use less data"
            )
        content = {"tokens": tokens, "examples": examples, "width": width, "dtype": str(dtype)}
        card.write_text(json.dumps(content) + "\n", encoding="utf-8")
        rows = torch.from_file(str(path), shared=True, size=tokens * width, dtype=dtype)
        captured_E = torch.from_file(str(flags), shared=True, size=examples, dtype=torch.uint8)
    return FeatureStore(rows.view(tokens, width), captured_E)


def feature_key(target: TargetModel, layer_ids: tuple[int, ...], with_hidden: bool, examples: Examples) -> str:
    """A key of all that features depend on: target, its dtype, layers, and every token of the examples."""
    what = (fingerprint(target), str(target.dtype), layer_ids, with_hidden)
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8)
    for tensor in (examples.tokens_T, examples.starts_E, examples.ends_E):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
