"""Attention of many draft blocks at once: who sees what in a training step.

Queries are the rows of A blocks, b rows each. Keys are the T packed context tokens, then the block rows. A row
sees the context of its own example strictly before its anchor, within the layer's window, and the rows of its own
block (earlier ones only, in causal layers). It never sees another block: those hold what comes after the anchor.

Fused, this is FlexAttention over the tiles that matter; else one dense mask made by the same predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from ddtree.models.dflash import DFlashModel
from ddtree.models.layers import DecoderLayer
from ddtree.ops import View

__all__ = ["TILE", "BlockLayout", "block_masks", "draft_blocks"]

# Rows and keys of one tile of FlexAttention: a tile of rows holds whole blocks.
TILE = 128
# (batch, head, query row, key place) -> whether the row sees the place.
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What the predicate needs. positions_T, example_T: of context tokens (example -1 is padding). anchors_A:
    ascending places of the anchors in the context. block_size: rows of a block."""

    positions_T: Tensor
    example_T: Tensor
    anchors_A: Tensor
    block_size: int

    def predicate(self, view: View) -> Predicate:
        """The rule of the module's docstring for one kind of layer."""
        context, block_size = self.positions_T.numel(), self.block_size
        anchor_position_A, anchor_example_A = self.positions_T[self.anchors_A], self.example_T[self.anchors_A]

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            block = row // block_size
            anchor, offset = anchor_position_A[block], row % block_size
            place = key.clamp(max=context - 1)
            before = (self.example_T[place] == anchor_example_A[block]) & (self.positions_T[place] < anchor)
            in_context = (key < context) & before
            other = (key - context).clamp(min=0)
            in_block = (key >= context) & (other // block_size == block)
            if view.window is not None:
                in_context = in_context & (anchor + offset - self.positions_T[place] < view.window)
                in_block = in_block & ((offset - other % block_size).abs() < view.window)
            if view.causal:
                in_block = in_block & (other % block_size <= offset)
            return in_context | in_block

        return sees

    def dense(self, view: View) -> Tensor:
        """The predicate as a mask. bool [1, 1, A * b, T + A * b]."""
        rows = self.anchors_A.numel() * self.block_size
        keys = self.positions_T.numel() + rows
        return create_mask(self.predicate(view), 1, 1, rows, keys, device=str(self.positions_T.device))

    def tiles(self, view: View) -> BlockMask:
        """The tiles of keys that each tile of rows can see: its own block's, and a run of context tiles."""
        context, device = self.positions_T.numel(), self.positions_T.device
        per_tile = TILE // self.block_size
        anchor_QP = self.anchors_A.view(-1, per_tile)
        first_QP = anchor_QP - self.positions_T[anchor_QP]  # where the anchor's example begins
        if view.window is not None:
            first_QP = torch.maximum(first_QP, anchor_QP - view.window)
        low_Q = first_QP.amin(1) // TILE
        high_Q = (anchor_QP.amax(1) - 1).clamp(min=0) // TILE
        context_tiles = context // TILE
        row_tile_Q = torch.arange(anchor_QP.shape[0], device=device)
        # One column for every tile of keys; those past `count_Q` are never read.
        step = torch.arange(context_tiles + row_tile_Q.numel() - 1, device=device)
        run_QK = (low_Q[:, None] + step).clamp(max=context_tiles - 1)
        indices_QK = torch.cat([context_tiles + row_tile_Q[:, None], run_QK], dim=1)
        count_Q = 1 + (high_Q - low_Q + 1).clamp(min=0)
        return BlockMask.from_kv_blocks(
            count_Q[None, None].int(),
            indices_QK[None, None].int(),
            BLOCK_SIZE=TILE,
            mask_mod=self.predicate(view),
            seq_lengths=(anchor_QP.numel() * self.block_size, context + anchor_QP.numel() * self.block_size),
        )


def block_masks(layout: BlockLayout, views: Sequence[View], fused: bool) -> tuple[Any, ...]:
    """One mask a layer, for `draft_blocks`; layers with the same view share theirs.

    fused: as tiles for FlexAttention, which wants context and rows in multiples of a tile; else dense.
    """
    masks = {view: layout.tiles(view) if fused else layout.dense(view) for view in set(views)}
    return tuple(masks[view] for view in views)


def draft_blocks(
    model: DFlashModel,
    features_TF: Tensor,
    context_positions_T: Tensor,
    embedded_Mh: Tensor,
    block_positions_M: Tensor,
    masks: Sequence[Any],
) -> Tensor:
    """Hidden states of the M = A * b rows of a step's blocks, through the drafter's own layers. [M, h]."""
    context_1Th, context_angles = model.project(features_TF[None], context_positions_T[None])
    embedded_1Mh, positions_1M = embedded_Mh[None], block_positions_M[None]
    fused = isinstance(masks[0], BlockMask)

    def attend(layer: int, query_1MHd: Tensor, key_1MGd: Tensor, value_1MGd: Tensor) -> Tensor:
        attention = cast(DecoderLayer, model.layers[layer]).self_attn
        context_key, context_value = attention.context(context_1Th, context_angles)
        query = query_1MHd.transpose(1, 2)
        key = torch.cat([context_key, key_1MGd], dim=1).transpose(1, 2)
        value = torch.cat([context_value, value_1MGd], dim=1).transpose(1, 2)
        key, value = key.to(query.dtype), value.to(query.dtype)
        grouped = query.shape[1] != key.shape[1]
        if fused:
            flex = flex_attention if torch.compiler.is_compiling() else _flex()
            out = flex(query, key, value, block_mask=masks[layer], enable_gqa=grouped)
        else:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=masks[layer], enable_gqa=grouped)
        return out.transpose(1, 2)

    return model.run(embedded_1Mh, positions_1M, attend)[0]


@lru_cache(maxsize=1)
def _flex() -> Any:
    """FlexAttention compiled once a process; shapes of a run are fixed, so it compiles for one shape."""
    return torch.compile(flex_attention, dynamic=False)
