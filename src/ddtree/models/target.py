"""The target model: Llama or Qwen3 over a slot cache, handing out the outputs of chosen layers.

Feature layer k means the *output* of layer k, the residual stream after it. For the last layer this is before
the final norm (Hugging Face reports that one after the norm; serving engines, like this one, before it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddtree.models.attention import attend_cached
from ddtree.models.cache import Cache, CacheShape, SlotCache
from ddtree.models.layers import Attend, DecoderLayer, RMSNorm, project
from ddtree.models.pages import PagedCache, PageTable
from ddtree.models.rope import Rope
from ddtree.models.spec import TargetSpec, check_layer_ids
from ddtree.ops import FULL_VIEW, Ops, Rows, select_ops

__all__ = ["TargetModel"]


class TargetModel(nn.Module):
    """A causal language model whose rows may form trees.

    Parameter names are Hugging Face's, but for the fused qkv_proj and gate_up_proj.
    """

    def __init__(self, spec: TargetSpec, ops: Ops | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops or select_ops(torch.device("cpu"))
        decoder = spec.decoder
        self.embed_tokens = nn.Embedding(spec.vocab_size, decoder.hidden)
        self.layers = nn.ModuleList(DecoderLayer(decoder, self.ops) for _ in range(decoder.layers))
        self.norm = RMSNorm(decoder.hidden, decoder.norm_eps, self.ops)
        self.rope = Rope(decoder)
        self.lm_head = nn.Linear(decoder.hidden, spec.vocab_size, bias=False)
        if spec.tied_head:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def new_cache(self, sequences: int, capacity: int, table_RS: Tensor | None = None) -> SlotCache:
        """An empty cache for `sequences`, each with `capacity` places (rows of a pass need places too)."""
        decoder = self.spec.decoder
        shape = CacheShape(decoder.layers, decoder.kv_heads, decoder.head_dim, sequences, capacity)
        return SlotCache(shape, self.dtype, self.device, table_RS)

    def new_paged_cache(self, table: PageTable) -> PagedCache:
        """An empty cache of the table's pages."""
        decoder = self.spec.decoder
        return PagedCache(decoder.layers, decoder.kv_heads, decoder.head_dim, self.dtype, table)

    def forward(self, rows: Rows, cache: Cache, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Run rows over the cache. Returns hidden states [R, N, h] after the final norm, for `logits`, and the
        outputs of the feature layers, concatenated [R, N, len(feature_layers) * h] in the order asked for."""
        views = [FULL_VIEW] * self.spec.decoder.layers
        attend = attend_cached(self.spec.decoder, self.ops, rows, cache, views)
        return self.run(rows.tokens_RN, rows.positions_RN, attend, feature_layers)

    def run(
        self, tokens_RN: Tensor, positions_RN: Tensor, attend: Attend, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """`forward` with any attention: training runs whole sequences without a cache."""
        check_layer_ids(tuple(feature_layers), len(self.layers), "features asked of the target")
        x_RNh = self.embed_tokens(tokens_RN)
        angles = self.rope(positions_RN, x_RNh.dtype)
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x_RNh = layer(index, x_RNh, angles, attend)
            if index in feature_layers:
                outputs[index] = x_RNh
        features = [outputs[index] for index in feature_layers]
        return self.norm(x_RNh), torch.cat(features, dim=-1) if features else x_RNh[..., :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of hidden states, in the model's dtype. [..., V]."""
        return project(hidden, self.lm_head.weight)
