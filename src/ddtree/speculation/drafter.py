"""DFlash as drafter: its context holds exactly the features of positions before the anchor."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.models.block import block_rows, run_block
from ddtree.models.cache import Cache
from ddtree.models.load import LoadedDrafter
from ddtree.speculation.protocols import Lengths, Proposal

__all__ = ["DFlashDrafter"]


class DFlashDrafter:
    """A loaded drafter and the context cache of the sequences that it drafts for."""

    def __init__(self, drafter: LoadedDrafter, cache: Cache, vocab_size: int) -> None:
        self._model = drafter.model
        self._vocabulary = drafter.vocabulary
        self._edges = drafter.edges
        self._cache = cache
        self._vocab_size = vocab_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._model.spec.layer_ids

    def propose(self, anchors_R: Tensor, lengths: Lengths, block_size: int) -> Proposal:
        rows = block_rows(
            anchors_R,
            lengths.device_R,
            block_size,
            self._model.spec.mask_token_id,
            lengths.longest + block_size,
        )
        hidden_RDh = run_block(self._model, self._vocabulary, rows, self._cache)[:, 1:]
        logits_RDV = self._vocabulary.target_logits(hidden_RDh, self._vocab_size)
        tables = self._edges
        if tables is None:
            return Proposal(logits_RDV)
        return Proposal(logits_RDV, lambda tokens_RDK: tables(anchors_R, tokens_RDK, hidden_RDh))

    def absorb(self, features_RPF: Tensor, lengths: Lengths, counts_R: Tensor) -> None:
        place_P = torch.arange(features_RPF.shape[1], device=features_RPF.device)
        positions_RP = lengths.device_R[:, None] + place_P
        slots_RP = self._cache.slots(positions_RP, place_P[None, :] < counts_R[:, None])
        self._model.absorb(features_RPF, positions_RP, slots_RP, self._cache)
