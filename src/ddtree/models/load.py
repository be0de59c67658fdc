"""From a folder to a model ready to run: the target, and the drafter that fits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddtree.errors import CheckpointError
from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.models.drafter_spec import DrafterSpec, read_drafter
from ddtree.models.edges import EdgeTables, load_edges
from ddtree.models.parity import check_parity
from ddtree.models.spec import read_target
from ddtree.models.target import TargetModel
from ddtree.models.weights import assign, read_tensors
from ddtree.ops import Ops, select_ops

__all__ = ["LoadedDrafter", "load_drafter", "load_target"]


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter's layers with the tables it embeds and predicts with, and its edge correction where it has one."""

    model: DFlashModel
    vocabulary: DraftVocabulary
    edges: EdgeTables | None = None


def load_target(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", ops: Ops | None = None
) -> TargetModel:
    """The target in a Hugging Face folder. CheckpointError or UnsupportedError say what does not fit."""
    device = torch.device(device)
    spec = read_target(folder)
    ops = ops or select_ops(device)
    with torch.device("meta"):
        model = TargetModel(spec, ops)
    tensors = read_tensors(folder)
    if spec.tied_head:
        _drop_tied_head(tensors, folder)
        if "embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    assign(model, tensors, dtype, str(folder))
    if spec.tied_head:
        model.lm_head.weight = model.embed_tokens.weight
    return model.to(device).eval()


def load_drafter(
    folder: Path, target: TargetModel, dtype: torch.dtype | None = None, ops: Ops | None = None
) -> LoadedDrafter:
    """The drafter in a folder, on the target's device and in its dtype unless another is given."""
    spec = read_drafter(folder, target.spec)
    with torch.device("meta"):
        model = DFlashModel(spec, ops or target.ops)
    tensors = read_tensors(folder)
    dtype = dtype or target.dtype
    vocabulary = _vocabulary(spec, tensors, target, dtype, folder)
    assign(model, tensors, dtype, str(folder))
    net = load_edges(folder, spec.decoder.hidden, dtype, target.device)
    edges = EdgeTables(net, [vocabulary.embedding[: target.spec.vocab_size]]) if net is not None else None
    drafter = LoadedDrafter(model.to(target.device).eval(), vocabulary, edges)
    check_parity(folder, drafter.model, drafter.vocabulary)
    return drafter


def _drop_tied_head(tensors: dict[str, Tensor], folder: Path) -> None:
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from it"
        )


def _vocabulary(
    spec: DrafterSpec, tensors: dict[str, Tensor], target: TargetModel, dtype: torch.dtype, folder: Path
) -> DraftVocabulary:
    """Own tables are taken out of `tensors`; what the checkpoint lacks is the target's.

    A reduced vocabulary comes with `d2t`: column c predicts token c + d2t[c]. A padded one has more columns
    than the target has tokens; those are never drafted.
    """
    device, tokens = target.device, target.spec.vocab_size
    embedding = tensors.pop("embed_tokens.weight", None)
    head = tensors.pop("lm_head.weight", None)
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # the inverse, as a mask; d2t says it all
    for name, table in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
        if table is not None and table.shape[1:] != (spec.decoder.hidden,):
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(table.shape)}, but hidden_size is {spec.decoder.hidden}"
            )
    pickled = sorted(p.name for p in folder.iterdir() if "mask" in p.name and p.suffix in (".pt", ".pth", ".bin"))
    if pickled:
        raise CheckpointError(
            f"{folder}: {pickled[0]} holds the mask token as a pickle, and pickles are never loaded; "
            "store it as a row of embed_tokens.weight"
        )
    own = tuple(name for name, table in (("embedding", embedding), ("head", head)) if table is not None)
    if head is None and offsets is None and embedding is not None and spec.tied_head:
        head = embedding
    embedding = target.embed_tokens.weight.to(dtype) if embedding is None else embedding.to(device, dtype)
    if embedding.shape[0] <= spec.mask_token_id:
        raise CheckpointError(
            f"{folder}: mask_token_id {spec.mask_token_id} has no row in the embedding of {embedding.shape[0]} "
            "rows; the drafter was trained with a resized embedding that the checkpoint lacks"
        )
    if embedding.shape[0] < tokens:
        raise CheckpointError(
            f"{folder}: embed_tokens has {embedding.shape[0]} rows for the target's {tokens} tokens"
        )
    if head is None:
        if offsets is not None:
            raise CheckpointError(f"{folder}: d2t maps a reduced vocabulary, but there is no lm_head of its own")
        if spec.vocab_size < tokens:
            raise CheckpointError(
                f"{folder}: vocab_size {spec.vocab_size} differs from the target's {tokens}; "
                "this drafter was made for another target"
            )
        return DraftVocabulary(embedding, target.lm_head.weight.to(dtype), tokens, own=own)
    head = head.to(device, dtype)
    if offsets is None and head.shape[0] < tokens:
        raise CheckpointError(
            f"{folder}: lm_head has {head.shape[0]} rows for the target's {tokens} tokens and no d2t map"
        )
    if offsets is None:
        return DraftVocabulary(embedding, head, tokens, own=own)
    target_ids = _target_ids(offsets, head.shape[0], tokens, folder)
    return DraftVocabulary(embedding, head, head.shape[0], target_ids.to(device), own)


def _target_ids(offsets: Tensor, columns: int, tokens: int, folder: Path) -> Tensor:
    if offsets.shape != (columns,):
        raise CheckpointError(f"{folder}: d2t has shape {tuple(offsets.shape)} for a head of {columns} rows")
    target_ids = torch.arange(columns) + offsets.long()
    if target_ids.unique().numel() != columns or int(target_ids.min()) < 0 or int(target_ids.max()) >= tokens:
        raise CheckpointError(f"{folder}: d2t does not map to distinct tokens of the target's {tokens}")
    return target_ids
