"""A draft block, always [anchor, MASK, ..., MASK]: its rows, its embeddings, and a pass over one or many."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.models.cache import Cache
from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.models.layers import DecoderLayer
from ddtree.ops import Rows, View
from ddtree.tree import clique_words

__all__ = ["block_rows", "block_tokens", "draft_along", "draft_hidden", "run_block"]


def block_tokens(anchors_R: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """[anchor, MASK x (b - 1)] for each sequence. int64 [R, b]."""
    tokens_Rb = torch.full(
        (anchors_R.shape[0], block_size), mask_token_id, dtype=torch.int64, device=anchors_R.device
    )
    tokens_Rb[:, 0] = anchors_R
    return tokens_Rb


def block_rows(anchors_R: Tensor, lengths_R: Tensor, block_size: int, mask_token_id: int, span: int) -> Rows:
    """Rows of a block whose anchor stands at position lengths_R; they see each other and all context."""
    tokens_Rb = block_tokens(anchors_R, block_size, mask_token_id)
    offset_b = torch.arange(block_size, device=anchors_R.device)
    return Rows(
        tokens_RN=tokens_Rb,
        positions_RN=lengths_R[:, None] + offset_b,
        lengths_R=lengths_R,
        words_RNW=clique_words(anchors_R.shape[0], block_size, anchors_R.device),
        span=span,
    )


def run_block(model: DFlashModel, vocabulary: DraftVocabulary, rows: Rows, cache: Cache) -> Tensor:
    """Hidden states of a block's rows. [R, b, h]."""
    embedded_Rbh = vocabulary.embedding[rows.tokens_RN].to(model.dtype)
    return model(rows, embedded_Rbh, cache)


def draft_hidden(
    model: DFlashModel, vocabulary: DraftVocabulary, features_RLF: Tensor, anchors_R: Tensor
) -> Tensor:
    """Hidden states of one block after L context positions, from nothing: fills a cache of its own. [R, b, h]."""
    sequences, length, _ = features_RLF.shape
    block_size = model.spec.block_size
    cache = model.new_cache(sequences, length + block_size)
    place_RL = torch.arange(length, device=features_RLF.device).expand(sequences, -1)
    model.absorb(features_RLF, place_RL, cache.slots(place_RL), cache)
    lengths_R = torch.full((sequences,), length, device=features_RLF.device)
    rows = block_rows(anchors_R, lengths_R, block_size, model.spec.mask_token_id, length + block_size)
    return run_block(model, vocabulary, rows, cache)


def draft_along(
    model: DFlashModel,
    vocabulary: DraftVocabulary,
    tokens_T: Tensor,
    features_TF: Tensor,
    anchors_A: Tensor,
    sizes_A: Tensor,
) -> Tensor:
    """Hidden states of a block at each of many anchors of one sequence, as if each were served. [A, b, h].

    Block a sees the features before its anchor and its own rows, of which the first sizes_A[a] are there; the
    others are padding that no real row sees. Blocks are a batch over one context, so nothing is computed twice.
    """
    block_size, device = model.spec.block_size, tokens_T.device
    count, context = anchors_A.numel(), int(anchors_A.max())
    place_b = torch.arange(block_size, device=device)
    positions_1T = torch.arange(context, device=device)[None]
    context_1Th, context_angles = model.project(features_TF[None, :context], positions_1T)
    masks = {view: _sees(view, context, anchors_A, sizes_A, block_size) for view in set(model.spec.views)}

    def attend(layer: int, query_AbHd: Tensor, key_AbGd: Tensor, value_AbGd: Tensor) -> Tensor:
        attention = cast(DecoderLayer, model.layers[layer]).self_attn
        both = zip(attention.context(context_1Th, context_angles), (key_AbGd, value_AbGd), strict=True)
        key, value = (
            torch.cat([first.expand(count, -1, -1, -1).to(own.dtype), own], dim=1).transpose(1, 2)
            for first, own in both
        )
        query = query_AbHd.transpose(1, 2)
        mask = masks[model.spec.views[layer]][:, None]
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), attn_mask=mask, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    ids_Ab = block_tokens(tokens_T[anchors_A], block_size, model.spec.mask_token_id)
    return model.run(vocabulary.embedding[ids_Ab].to(model.dtype), anchors_A[:, None] + place_b, attend)


def _sees(view: View, context: int, anchors_A: Tensor, sizes_A: Tensor, block_size: int) -> Tensor:
    """Which context places and block rows each row of each block sees. bool [A, b, context + b]."""
    device = anchors_A.device
    place_T, place_b = torch.arange(context, device=device), torch.arange(block_size, device=device)
    before_AbT = (place_T < anchors_A[:, None])[:, None].expand(-1, block_size, -1)
    own_Abb = (place_b < sizes_A[:, None])[:, None] | torch.eye(block_size, dtype=torch.bool, device=device)
    if view.window is not None:
        distance_AbT = anchors_A[:, None, None] + place_b[:, None] - place_T
        before_AbT = before_AbT & (distance_AbT < view.window)
        own_Abb = own_Abb & ((place_b[:, None] - place_b).abs() < view.window)
    if view.causal:
        own_Abb = own_Abb & (place_b <= place_b[:, None])
    return torch.cat([before_AbT, own_Abb], dim=2)
