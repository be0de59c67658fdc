"""Writing drafters: z-lab's bfloat16 layout for every engine, or ddtree's packed rows for small files.

A folder gets its name only when it is whole: it is written beside and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.models.drafter_spec import INT8_METHOD
from ddtree.models.edges import EdgeNet, save_edges
from ddtree.models.parity import write_parity
from ddtree.models.storage import writing
from ddtree.models.weights import SCALE_SUFFIX, assign, named_apart, read_tensors

__all__ = ["new_folder", "pack_rows", "save_drafter"]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that becomes `folder`, replacing it, when the block ends without an error."""
    partial = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with writing(folder):
            partial.mkdir(parents=True)
            yield partial
            old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
            if folder.exists():
                folder.rename(old)
            try:
                partial.rename(folder)
            except OSError:
                if old.exists():
                    old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_drafter(
    folder: Path,
    config: dict[str, Any],
    model: DFlashModel,
    vocabulary: DraftVocabulary,
    *,
    edges: EdgeNet | None = None,
    packed: bool = False,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write config.json, model.safetensors and parity.safetensors. packed: int8 rows with scales, half the size.

    config: the drafter's config.json. edges: its edge correction, written beside. extra: JSON files to write
    beside, by name. StorageError when the disk says no; `folder` is then as it was.
    """
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    tensors = {name: t.detach().cpu() for name, t in named_apart(model.state_dict(), model.spec.decoder)}
    tables = {
        "embedding": ("embed_tokens.weight", vocabulary.embedding),
        "head": ("lm_head.weight", vocabulary.head),
    }
    tensors |= {name: table.detach().cpu() for key, (name, table) in tables.items() if key in vocabulary.own}
    if packed:
        config["quantization_config"] = {"quant_method": INT8_METHOD}
        tensors = dict(item for name, tensor in tensors.items() for item in pack_rows(name, tensor))
    else:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if vocabulary.target_ids is not None:
        columns = torch.arange(vocabulary.target_ids.numel())
        tensors["d2t"] = vocabulary.target_ids.cpu() - columns
    with new_folder(folder) as partial:
        save_file({n: t.contiguous() for n, t in tensors.items()}, partial / "model.safetensors", {"format": "pt"})
        write_parity(partial, _as_written(partial, model), vocabulary)
        if edges is not None:
            save_edges(partial, edges)
        for name, content in {"config.json": config, **(extra or {})}.items():
            (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_written(folder: Path, model: DFlashModel) -> DFlashModel:
    """The model with the weights that a folder holds, rounded as they are there."""
    tensors = read_tensors(folder)
    for name in ("embed_tokens.weight", "lm_head.weight", "d2t"):  # the vocabulary's, which is handed on as it is
        tensors.pop(name, None)
    with torch.device("meta"):
        written = DFlashModel(model.spec, model.ops)
    assign(written, tensors, model.dtype, str(folder))
    return written.to(model.fc.weight.device).eval()


def pack_rows(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A matrix as int8 rows and their float32 scales; vectors stay as they are, in bfloat16."""
    if tensor.ndim != 2:
        return [(name, tensor.to(torch.bfloat16))]
    wide = tensor.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-12) / 127
    rows = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return [(name, rows), (name + SCALE_SUFFIX, scale)]
