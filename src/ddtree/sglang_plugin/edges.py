"""The drafter's edge correction on SGLang: where its file lies, and its tables over the target's vocabulary.

Invariant: a drafter without the file drafts as if this module did not exist. Under tensor parallelism every rank
holds whole tables: the embedding's rows come from SGLang's own module, which sums what the ranks hold of them, so
all ranks must make their tables at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor

from ddtree.models.edges import EdgeNet, EdgeTables, load_edges

__all__ = ["draft_edges", "edge_tables", "weights_folder"]

PART = 1 << 14  # tokens whose embeddings stand in memory at once while tables are made


def weights_folder(server_args: Any) -> Path | None:
    """Where the drafter's weights lie on this machine; None while they are elsewhere. Nothing is fetched here,
    SGLang does that, the edge correction included."""
    path = Path(server_args.speculative_draft_model_path)
    if not path.is_dir():
        try:
            config = try_to_load_from_cache(
                server_args.speculative_draft_model_path,
                "config.json",
                cache_dir=server_args.download_dir,
                revision=server_args.speculative_draft_model_revision,
            )
        except HFValidationError:  # SGLang also loads from buckets and instances, which have no folder here
            return None
        if not isinstance(config, str):
            return None
        path = Path(config).parent
    return path if any(path.glob("*.safetensors")) else None


def draft_edges(server_args: Any, hidden: int, dtype: torch.dtype, device: torch.device) -> EdgeNet | None:
    """The net beside the drafter's weights, None where there is none. CheckpointError when it does not fit
    `hidden`."""
    folder = weights_folder(server_args)
    return None if folder is None else load_edges(folder, hidden, dtype, device)


def edge_tables(net: EdgeNet, embedding: Callable[[Tensor], Tensor], vocab_size: int) -> EdgeTables:
    """Tables over the embedding of draft blocks. embedding: SGLang's module, token ids to rows."""
    net.requires_grad_(False)
    tokens_V = torch.arange(vocab_size, device=net.mix.weight.device)

    def parts() -> Iterator[Tensor]:
        for tokens_T in tokens_V.split(PART):
            yield embedding(tokens_T)

    return EdgeTables(net, parts())
