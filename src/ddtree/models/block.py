"""A draft block, always [anchor, MASK, ..., MASK]: its rows, its embeddings, and one pass over them."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.models.cache import SlotCache
from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.ops import Rows
from ddtree.tree import clique_words

__all__ = ["block_rows", "block_tokens", "draft_hidden", "run_block"]


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


def run_block(model: DFlashModel, vocabulary: DraftVocabulary, rows: Rows, cache: SlotCache) -> Tensor:
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
