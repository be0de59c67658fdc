"""Keys and values of committed positions, behind a slot table.

A sequence's position p stands in slot table_RS[r, p] of a pool that all sequences share; a contiguous cache is
the identity table. Readers ask for the first `span` places of every sequence and never learn which it was.
Rows of a pass are written at places lengths_R[r] + n; `keep` then moves the accepted ones to canonical places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cache", "CacheShape", "SlotCache"]


class Cache(Protocol):
    """What models and verifiers need of a cache, whoever owns its memory."""

    @property
    def capacity(self) -> int:
        """Places that each sequence may use."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def slots(self, places_RN: Tensor, real_RN: Tensor | None = None) -> Tensor:
        """Slots of some places of each sequence, to write to; a bin for those that are not real. int64 [R, N]."""
        ...

    def write(self, layer: int, slots_RN: Tensor, keys_RNGd: Tensor, values_RNGd: Tensor) -> None:
        """Store one layer's keys and values."""
        ...

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """The first `span` places of every sequence: keys and values, each [R, span, G, d]."""
        ...

    def keep(self, from_places_RP: Tensor, to_places_RP: Tensor, real_RP: Tensor) -> None:
        """Move places of all layers; gathers everything before it scatters, so ranges may overlap."""
        ...


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How large a cache is: `capacity` places for each of `sequences`."""

    layers: int
    kv_heads: int
    head_dim: int
    sequences: int
    capacity: int


class SlotCache:
    """Keys and values [layers, slots, kv_heads, head_dim], and the slot of each place of each sequence.

    Without a table it is the identity: sequence r owns slots r * capacity to (r + 1) * capacity, and reads are
    views. One last slot is a bin: what padding writes lands there and nobody reads it.
    """

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, table_RS: Tensor | None = None
    ) -> None:
        slots = shape.sequences * shape.capacity
        if table_RS is not None:
            assert table_RS.shape == (shape.sequences, shape.capacity), "the table holds a slot for each place"
        cells = (shape.layers, slots + 1, shape.kv_heads, shape.head_dim)
        self.shape = shape
        self.keys = torch.zeros(cells, dtype=dtype, device=device)
        self.values = torch.zeros(cells, dtype=dtype, device=device)
        self._bin = slots
        self._table_RS = table_RS
        self._first_R1 = torch.arange(shape.sequences, device=device)[:, None] * shape.capacity

    @property
    def capacity(self) -> int:
        return self.shape.capacity

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def slots(self, places_RN: Tensor, real_RN: Tensor | None = None) -> Tensor:
        """Slots of some places of each sequence; the bin for those that are not real. int64 [R, N]."""
        if self._table_RS is None:
            slots_RN = self._first_R1 + places_RN
        else:
            slots_RN = self._table_RS.gather(1, places_RN)
        return slots_RN if real_RN is None else torch.where(real_RN, slots_RN, self._bin)

    def write(self, layer: int, slots_RN: Tensor, keys_RNGd: Tensor, values_RNGd: Tensor) -> None:
        """Store one layer's keys and values."""
        flat = slots_RN.flatten()
        self.keys[layer].index_copy_(0, flat, keys_RNGd.flatten(0, 1))
        self.values[layer].index_copy_(0, flat, values_RNGd.flatten(0, 1))

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """The first `span` places of every sequence: keys and values, each [R, span, G, d]."""
        return self._gather(self.keys[layer], span), self._gather(self.values[layer], span)

    def keep(self, from_places_RP: Tensor, to_places_RP: Tensor, real_RP: Tensor) -> None:
        """Move places of all layers; gathers everything before it scatters, so ranges may overlap."""
        source = self.slots(from_places_RP).flatten()
        target = self.slots(to_places_RP, real_RP).flatten()
        for pool in (self.keys, self.values):
            pool.index_copy_(1, target, pool.index_select(1, source))

    def drop_others(self, sequences_R: Tensor) -> None:
        """Keep some of the sequences alone, in ascending order, as sequences 0, 1, ... of a smaller cache."""
        assert self._table_RS is None, "sequences behind a table are dropped from the table"
        capacity, count = self.shape.capacity, sequences_R.numel()
        for pool in (self.keys, self.values):
            for layer in pool:  # one at a time, so that what is kept exists twice for one layer only
                whole = layer[: self._bin].view(self.shape.sequences, capacity, *layer.shape[1:])
                whole[:count] = whole[sequences_R]
        self.shape = replace(self.shape, sequences=count)
        self._bin = count * capacity
        self._first_R1 = self._first_R1[:count]

    def _gather(self, pool_SGd: Tensor, span: int) -> Tensor:
        shape = self.shape
        if self._table_RS is not None:
            return pool_SGd[self._table_RS[:, :span]]
        return pool_SGd[: self._bin].view(shape.sequences, shape.capacity, *pool_SGd.shape[1:])[:, :span]
