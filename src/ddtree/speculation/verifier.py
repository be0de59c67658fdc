"""The target as verifier: prompts in chunks, trees in one pass, over a slot cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddtree.models.cache import SlotCache
from ddtree.models.target import TargetModel
from ddtree.ops import Rows
from ddtree.speculation.protocols import Lengths, Verification
from ddtree.tree import Accepted, DraftTree, ancestor_words, chain_words, positions

__all__ = ["TargetVerifier"]


class TargetVerifier:
    """A target and the cache of the sequences that it is verifying for."""

    def __init__(self, model: TargetModel, cache: SlotCache, feature_layers: Sequence[int]) -> None:
        self.model = model
        self._cache = cache
        self._feature_layers = tuple(feature_layers)

    def prefill(self, tokens: Sequence[int], chunk: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run a prompt of sequence 0 in chunks. Yields for each the place of its first token, the hidden state of
        its last [1, 1, h], and its features [1, n, F]."""
        device = self.model.device
        prompt_1N = torch.tensor([list(tokens)], device=device)
        for first in range(0, len(tokens), chunk):
            part_1N = prompt_1N[:, first : first + chunk]
            count = part_1N.shape[1]
            rows = Rows(
                tokens_RN=part_1N,
                positions_RN=torch.arange(first, first + count, device=device)[None],
                lengths_R=torch.tensor([first], device=device),
                words_RNW=chain_words(1, count, device),
                span=first + count,
            )
            hidden_1Nh, features_1NF = self.model(rows, self._cache, self._feature_layers)
            yield first, hidden_1Nh[:, -1:], features_1NF

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
