"""Context features of whole examples: one causal pass of the frozen target, kept when there is room.

Features are stored by the place of their token among all tokens, so any pack can gather them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.models.target import TargetModel
from ddtree.training.examples import Examples, Pack

__all__ = ["Features", "causal_attend"]

# Padded tokens in one pass of the target.
PASS_TOKENS = 32768


def causal_attend(layer: int, query_RNHd: Tensor, key_RNGd: Tensor, value_RNGd: Tensor) -> Tensor:
    """Causal attention of whole sequences among themselves, without a cache."""
    grouped = query_RNHd.shape[2] != key_RNGd.shape[2]
    query, key, value = (a.transpose(1, 2) for a in (query_RNHd, key_RNGd, value_RNGd))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(1, 2)


class Features:
    """Captured features of the examples. With a cache each example is captured once, else at every use."""

    def __init__(
        self, target: TargetModel, examples: Examples, layer_ids: Sequence[int], cache_gib: float
    ) -> None:
        self._target = target
        self._examples = examples
        self._layer_ids = tuple(layer_ids)
        self.width = len(layer_ids) * target.spec.decoder.hidden
        self._flat_TF: Tensor | None = None
        self._captured = torch.zeros(len(examples), dtype=torch.bool)
        if cache_gib > 0:
            self._flat_TF = self._allocate(cache_gib)

    @property
    def gib(self) -> float:
        """What all features take, in GiB."""
        return self._examples.tokens_T.numel() * self.width * self._target.dtype.itemsize / 2**30

    def of_pack(self, pack: Pack) -> Tensor:
        """Features of every packed token; padding has those of token 0. [T, F]."""
        device = self._target.device
        if self._flat_TF is None:
            flat_TF, offset = self._capture_alone(pack)
            return flat_TF[offset.to(device)]
        missing = [index for index in pack.examples if not self._captured[index]]
        if missing:
            self._capture(missing, self._flat_TF)
            self._captured[missing] = True
        return self._flat_TF[pack.source_T.to(device)]

    def _capture_alone(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Capture a pack's examples into a tensor of their own; also where each packed token stands in it."""
        chosen = self._examples.take(torch.tensor(pack.examples))
        length_E = chosen.ends_E - chosen.starts_E
        first_E = length_E.cumsum(0) - length_E
        flat_TF = torch.empty(
            int(length_E.sum()), self.width, dtype=self._target.dtype, device=self._target.device
        )
        alone = Examples(chosen.tokens_T, chosen.starts_E, chosen.ends_E, chosen.prompts_E, 0)
        self._run(alone, list(range(len(alone))), flat_TF, first_E)
        member = pack.example_T.clamp(min=0)
        return flat_TF, torch.where(pack.example_T >= 0, first_E[member] + pack.positions_T, 0)

    def _capture(self, indices: list[int], flat_TF: Tensor) -> None:
        self._run(self._examples, indices, flat_TF, self._examples.starts_E)

    @torch.no_grad()
    def _run(self, examples: Examples, indices: list[int], into_TF: Tensor, places_E: Tensor) -> None:
        """Pass examples of similar length through the target and store each one's features at its place."""
        device = self._target.device
        lengths = {i: int(examples.ends_E[i] - examples.starts_E[i]) for i in indices}
        waiting = sorted(indices, key=lengths.__getitem__, reverse=True)
        while waiting:
            longest = lengths[waiting[0]]
            batch, waiting = _split(waiting, max(PASS_TOKENS // longest, 1))
            tokens_EL = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, i in enumerate(batch):
                start = int(examples.starts_E[i])
                tokens_EL[row, : lengths[i]] = examples.tokens_T[start : start + lengths[i]]
            positions_EL = torch.arange(longest, device=device).expand(len(batch), -1)
            _, features_ELF = self._target.run(tokens_EL.to(device), positions_EL, causal_attend, self._layer_ids)
            column_L = torch.arange(longest)
            real_EL = column_L < torch.tensor([lengths[i] for i in batch])[:, None]
            place_EL = places_E[torch.tensor(batch)][:, None] + column_L
            # Indices are made on the host: a boolean mask on the device would stall it.
            kept = real_EL.flatten().nonzero()[:, 0].to(device)
            into_TF[place_EL[real_EL].to(device)] = features_ELF.flatten(0, 1)[kept]

    def _allocate(self, limit_gib: float) -> Tensor:
        if self.gib > limit_gib:
            raise ConfigError(
                f"the features of {self._examples.tokens_T.numel():,} tokens take {self.gib:.1f} GiB, but "
                f"feature_cache_gib is {limit_gib:g}; raise it, use less data, or set it to 0 to capture anew"
            )
        shape = (self._examples.tokens_T.numel(), self.width)
        return torch.empty(shape, dtype=self._target.dtype, device=self._target.device)


def _split(values: list[int], count: int) -> tuple[list[int], list[int]]:
    return values[:count], values[count:]
