"""Attention over a slot cache: store the rows' keys and values, read the sequence, attend under the mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.models.cache import Cache
from ddtree.models.layers import Attend
from ddtree.models.spec import DecoderSpec
from ddtree.ops import Ops, Rows, View

__all__ = ["attend_cached"]


def attend_cached(spec: DecoderSpec, ops: Ops, rows: Rows, cache: Cache, views: Sequence[View]) -> Attend:
    """The `attend` of one pass of `rows` over `cache`. views[i] is what layer i takes away.

    Masks are made here, once a pass and kind of layer; layers only use them.
    """
    assert rows.span <= cache.capacity, "rows would be written past the end of their sequence"
    row_N = torch.arange(rows.count, device=rows.tokens_RN.device)
    slots_RN = cache.slots(rows.lengths_R[:, None] + row_N, rows.real_RN)
    masks = {view: ops.mask(rows, spec.heads // spec.kv_heads, cache.dtype, view) for view in set(views)}

    def attend(layer: int, query_RNHd: Tensor, key_RNGd: Tensor, value_RNGd: Tensor) -> Tensor:
        cache.write(layer, slots_RN, key_RNGd, value_RNGd)
        key_RSGd, value_RSGd = cache.read(layer, rows.span)
        return ops.attend(query_RNHd, key_RSGd, value_RSGd, masks[views[layer]])

    return attend
