"""Context features of whole examples: one causal pass of the frozen target, kept when there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.models.target import TargetModel
from ddtree.training.examples import Examples, Pack, send
from ddtree.training.feature_store import FeatureStore

__all__ = ["Captured", "Features", "causal_attend", "feature_widths"]

# Padded tokens in one pass of the target.
PASS_TOKENS = 32768


def causal_attend(layer: int, query_RNHd: Tensor, key_RNGd: Tensor, value_RNGd: Tensor) -> Tensor:
    """Causal attention of whole sequences among themselves, without a cache."""
    grouped = query_RNHd.shape[2] != key_RNGd.shape[2]
    query, key, value = (a.transpose(1, 2) for a in (query_RNHd, key_RNGd, value_RNGd))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def feature_widths(target: TargetModel, layer_ids: Sequence[int], with_hidden: bool) -> list[int]:
    """How wide the chosen layers' outputs are together, and the final hidden state where it is kept."""
    hidden = target.spec.decoder.hidden
    return [len(layer_ids) * hidden, with_hidden * hidden]


@dataclass(frozen=True, slots=True)
class Captured:
    """What the target thought at every packed token. features_TF: outputs of the chosen layers. hidden_Th: what
    its head turns into the distribution of the next token; h = 0 where that was not asked for."""

    features_TF: Tensor
    hidden_Th: Tensor


class Features:
    """Captured features of the examples. With a store each example is captured once, else at every use.

    A store holds the examples end to end: example e begins at places_E[e].
    """

    def __init__(
        self,
        target: TargetModel,
        examples: Examples,
        layer_ids: Sequence[int],
        store: FeatureStore | None = None,
        with_hidden: bool = False,
    ) -> None:
        """with_hidden: keep the final hidden states too, for soft labels."""
        self._widths = feature_widths(target, layer_ids, with_hidden)
        self._target = target
        self._examples = examples
        self._layer_ids = tuple(layer_ids)
        self._lengths_E = examples.ends_E - examples.starts_E
        self._places_E = self._lengths_E.cumsum(0) - self._lengths_E
        self._store = store

    def of_pack(self, pack: Pack) -> Captured:
        """What was captured at every packed token, on the target's device; padding has that of some token."""
        device = self._target.device
        indices_E = torch.tensor(pack.examples)
        if self._store is None:
            lengths_E = self._lengths_E[indices_E]
            places_E = lengths_E.cumsum(0) - lengths_E
            rows_TF = torch.empty(int(lengths_E.sum()), sum(self._widths), dtype=self._target.dtype, device=device)
            self._capture(indices_E, rows_TF, places_E)
        else:
            rows_TF, places_E = self._store.rows_TF, self._places_E[indices_E]
            missing = indices_E[self._store.captured_E[indices_E] == 0]
            if missing.numel():
                self._capture(missing, rows_TF, self._places_E[missing])
                self._store.captured_E[missing] = 1
        place_T = places_E[pack.example_T.clamp(min=0)] + pack.positions_T
        place_T = torch.where(pack.example_T >= 0, place_T, 0)
        packed_TF = send(rows_TF[send(place_T, rows_TF.device)], device)
        return Captured(*packed_TF.split(self._widths, dim=1))

    @torch.no_grad()
    def _capture(self, indices_E: Tensor, into_TF: Tensor, places_E: Tensor) -> None:
        """Pass examples of similar length through the target and store each one's features at its place."""
        device = self._target.device
        order_E = self._lengths_E[indices_E].argsort(descending=True)
        while order_E.numel():
            longest = int(self._lengths_E[indices_E[order_E[0]]])
            count = max(PASS_TOKENS // longest, 1)
            batch_E, order_E = order_E[:count], order_E[count:]
            members_E = indices_E[batch_E]
            column_L = torch.arange(longest)
            real_EL = column_L < self._lengths_E[members_E][:, None]
            source_EL = torch.where(real_EL, self._examples.starts_E[members_E][:, None] + column_L, 0)
            place_EL = places_E[batch_E][:, None] + column_L
            tokens_EL = send(self._examples.tokens_T[source_EL], device)
            positions_EL = torch.arange(longest, device=device).expand(members_E.numel(), -1)
            hidden_ELh, features_ELF = self._target.run(tokens_EL, positions_EL, causal_attend, self._layer_ids)
            if self._widths[1]:
                features_ELF = torch.cat([features_ELF, hidden_ELh], dim=-1)
            # Indices are made on the host: a boolean mask on the device would stall it.
            kept = send(real_EL.flatten().nonzero()[:, 0], device)
            found_TF = features_ELF.flatten(0, 1)[kept].to(into_TF.device)
            into_TF[send(place_EL[real_EL], into_TF.device)] = found_TF
