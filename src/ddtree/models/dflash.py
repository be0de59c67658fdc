"""DFlash, the block-diffusion drafter (arXiv 2602.06036; checkpoints in z-lab's layout).

A block is the anchor token followed by masks. Its rows see each other (or, in causal layers, earlier rows) and
the context: features of positions before the anchor, projected once by `fc` and turned into keys and values by
each layer. One pass gives a distribution for each masked position, at that position: no shift by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ddtree.models.attention import attend_cached
from ddtree.models.cache import Cache, CacheShape, SlotCache
from ddtree.models.drafter_spec import DrafterSpec
from ddtree.models.layers import Angles, Attend, DecoderLayer, RMSNorm, project
from ddtree.models.pages import PagedCache, PageTable
from ddtree.models.rope import Rope
from ddtree.ops import Ops, Rows, select_ops

__all__ = ["DFlashModel", "DraftVocabulary"]


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Where a drafter takes embeddings from and what its logits mean.

    embedding [rows, h] and head [columns, h]: the target's own tables or the checkpoint's. target_ids: int64,
    the target token of each column, None when column c is token c. Columns past `used` are padding. own: names
    of the tables that are the checkpoint's.
    """

    embedding: Tensor
    head: Tensor
    used: int
    target_ids: Tensor | None = None
    own: tuple[str, ...] = ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the used columns. [..., used]."""
        return project(hidden, self.head[: self.used])

    def target_logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits over the target's vocabulary; what a reduced vocabulary cannot name has none (-inf). [..., V]."""
        logits_C = self.logits(hidden)
        if self.target_ids is None:
            return logits_C
        logits_V = logits_C.new_full((*logits_C.shape[:-1], vocab_size), -torch.inf)
        return logits_V.index_copy_(-1, self.target_ids, logits_C)

    def tokens(self, columns: Tensor) -> Tensor:
        """Target token ids of columns."""
        return columns if self.target_ids is None else self.target_ids[columns]


class DFlashModel(nn.Module):
    """The drafter's own layers. Embedding and head are handed in as a `DraftVocabulary`."""

    def __init__(self, spec: DrafterSpec, ops: Ops | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops or select_ops(torch.device("cpu"))
        decoder = spec.decoder
        self.fc = nn.Linear(len(spec.layer_ids) * decoder.hidden, decoder.hidden, bias=False)
        self.hidden_norm = RMSNorm(decoder.hidden, decoder.norm_eps, self.ops)
        self.layers = nn.ModuleList(DecoderLayer(decoder, self.ops) for _ in range(decoder.layers))
        self.norm = RMSNorm(decoder.hidden, decoder.norm_eps, self.ops)
        self.rope = Rope(decoder)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def new_cache(self, sequences: int, capacity: int, table_RS: Tensor | None = None) -> SlotCache:
        """An empty context for `sequences`, each with `capacity` places (the block needs places too)."""
        decoder = self.spec.decoder
        shape = CacheShape(decoder.layers, decoder.kv_heads, decoder.head_dim, sequences, capacity)
        return SlotCache(shape, self.dtype, self.fc.weight.device, table_RS)

    def new_paged_cache(self, table: PageTable) -> PagedCache:
        """An empty context of the table's pages."""
        decoder = self.spec.decoder
        return PagedCache(decoder.layers, decoder.kv_heads, decoder.head_dim, self.dtype, table)

    def absorb(self, features_RNF: Tensor, positions_RN: Tensor, slots_RN: Tensor, cache: Cache) -> None:
        """Add features of committed positions to the context."""
        projected_RNh, angles = self.project(features_RNF, positions_RN)
        for index, layer in enumerate(self.layers):
            key_RNGd, value_RNGd = cast(DecoderLayer, layer).self_attn.context(projected_RNh, angles)
            cache.write(index, slots_RN, key_RNGd, value_RNGd)

    def project(self, features_RNF: Tensor, positions_RN: Tensor) -> tuple[Tensor, Angles]:
        """Context features as the layers read them, and the angles of their positions."""
        projected_RNh = self.hidden_norm(self.fc(features_RNF.to(self.dtype)))
        return projected_RNh, self.rope(positions_RN, self.dtype)

    def forward(self, rows: Rows, embedded_RNh: Tensor, cache: Cache) -> Tensor:
        """Hidden states of a block's rows over the context in the cache. [R, b, h]."""
        attend = attend_cached(self.spec.decoder, self.ops, rows, cache, self.spec.views)
        return self.run(embedded_RNh, rows.positions_RN, attend)

    def run(self, embedded_RNh: Tensor, positions_RN: Tensor, attend: Attend) -> Tensor:
        """`forward` with any attention: training runs many blocks of a sequence at once."""
        angles = self.rope(positions_RN, embedded_RNh.dtype)
        x_RNh = embedded_RNh
        for index, layer in enumerate(self.layers):
            x_RNh = layer(index, x_RNh, angles, attend)
        return self.norm(x_RNh)
