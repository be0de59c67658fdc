"""The target as verifier: texts in parts, trees in one pass, over a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.models.cache import Cache
from ddtree.models.target import TargetModel
from ddtree.ops import Rows
from ddtree.speculation.protocols import Lengths, Verification
from ddtree.tree import Accepted, DraftTree, ancestor_words, chain_words, positions

__all__ = ["Prefilled", "TargetVerifier"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a part of each text left behind. last_Rh: the hidden state of its last token, for the target's logits.

    features_RNF: of all its tokens, of which the first counts_R count.
    """

    last_Rh: Tensor
    features_RNF: Tensor
    counts_R: Tensor


class TargetVerifier:
    """A target and the cache of the sequences that it is verifying for."""

    def __init__(self, model: TargetModel, cache: Cache, feature_layers: Sequence[int]) -> None:
        self.model = model
        self._cache = cache
        self._feature_layers = tuple(feature_layers)

    def prefill(self, parts: Sequence[Sequence[int]], lengths: Lengths) -> Prefilled:
        """Run the next part of each text after its committed positions."""
        device = self.model.device
        counts = [len(part) for part in parts]
        longest = max(counts)
        counts_R = torch.tensor(counts, device=device)
        row_N = torch.arange(longest, device=device)
        rows = Rows(
            tokens_RN=torch.tensor([[*part, *[0] * (longest - len(part))] for part in parts], device=device),
            positions_RN=lengths.device_R[:, None] + row_N,
            lengths_R=lengths.device_R,
            words_RNW=chain_words(len(parts), longest, device),
            span=min(lengths.longest + longest, self._cache.capacity),
            real_RN=None if min(counts) == longest else row_N < counts_R[:, None],
        )
        hidden_RNh, features_RNF = self.model(rows, self._cache, self._feature_layers)
        last_R11 = (counts_R - 1)[:, None, None]
        last_Rh = hidden_RNh.gather(1, last_R11.expand(-1, -1, hidden_RNh.shape[-1]))[:, 0]
        return Prefilled(last_Rh, features_RNF, counts_R)

    def verify(self, tree: DraftTree, lengths: Lengths) -> Verification:
        rows = Rows(
            tokens_RN=tree.tokens_RN,
            positions_RN=positions(tree, lengths.device_R),
            lengths_R=lengths.device_R,
            words_RNW=ancestor_words(tree),
            span=lengths.longest + tree.rows,
            real_RN=tree.real_RN,
        )
        hidden_RNh, features_RNF = self.model(rows, self._cache, self._feature_layers)
        return Verification(self.model.logits(hidden_RNh), features_RNF)

    def commit(self, accepted: Accepted, lengths: Lengths) -> None:
        place_P = torch.arange(accepted.path_RP.shape[1], device=accepted.path_RP.device)
        start_R1 = lengths.device_R[:, None]
        real_RP = place_P[None, :] < accepted.lengths_R[:, None]
        self._cache.keep(start_R1 + accepted.path_RP, start_R1 + place_P, real_RP)
