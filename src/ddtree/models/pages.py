"""Keys and values in pages that many sequences share, behind the same interface as a contiguous cache.

A page holds `page_size` consecutive places of one sequence. Two more pages stand behind the real ones: the *void*,
always zero, is read wherever a sequence has no page; the *bin* takes what is written there, or by padding, and is
never read. So rows outside a sequence's own pages can neither harm another sequence nor read from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["PageTable", "PagedCache"]


class PageTable:
    """Which page holds which places of each sequence of a batch, in a buffer that stays where it is.

    Target and drafter caches share a table: a page of one is the page of the other. When the only sequence has
    consecutive pages, as it mostly does, reads are views and nothing is looked up.
    """

    def __init__(self, pages: int, page_size: int, sequences: int, places: int, device: torch.device) -> None:
        """places: the most that one sequence may use."""
        self.pages, self.page_size = pages, page_size
        self._host_SP = np.full((sequences, -(-places // page_size)), pages, dtype=np.int64)
        self._buffer_SP = torch.from_numpy(self._host_SP).to(device, copy=True)
        self._rows: list[list[int]] = [[] for _ in range(sequences)]
        self.seat([[]])

    def seat(self, rows: Sequence[list[int]]) -> None:
        """The pages of the sequences of the passes to come; a sequence without pages is padding."""
        sequences, width = self._host_SP.shape
        assert 0 < len(rows) <= sequences, "more sequences than seats"
        for r, row in enumerate(rows):
            if row != self._rows[r]:
                self._rows[r] = list(row)
                self._host_SP[r] = self.pages
                self._host_SP[r, : len(row)] = row
        self.pages_RP = self._buffer_SP[: len(rows)]
        self.pages_RP.copy_(torch.from_numpy(self._host_SP[: len(rows)]))
        self.first_place: int | None = None  # of the only sequence, where its pages are consecutive
        self.capacity = width * self.page_size
        if len(rows) == 1 and rows[0] and rows[0] == list(range(rows[0][0], rows[0][0] + len(rows[0]))):
            self.first_place = rows[0][0] * self.page_size
            self.capacity = len(rows[0]) * self.page_size

    @property
    def device(self) -> torch.device:
        return self._buffer_SP.device


class PagedCache:
    """Keys and values [layers, pages + 2, page_size, G, d] of the sequences that a table names."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, table: PageTable) -> None:
        cells = (layers, table.pages + 2, table.page_size, kv_heads, head_dim)
        self.keys = torch.zeros(cells, dtype=dtype, device=table.device)
        self.values = torch.zeros(cells, dtype=dtype, device=table.device)
        self.table = table

    def under(self, table: PageTable) -> PagedCache:
        """The same memory for the sequences of another table."""
        assert (table.pages, table.page_size) == (self.table.pages, self.table.page_size)
        other = object.__new__(PagedCache)
        other.keys, other.values, other.table = self.keys, self.values, table
        return other

    @property
    def capacity(self) -> int:
        return self.table.capacity

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def clear(self, pages: Sequence[int]) -> None:
        """Make pages zero again before somebody new gets them: masked places count for nothing, but 0 * NaN is
        NaN."""
        index = torch.tensor(pages, device=self.keys.device)
        self.keys.index_fill_(1, index, 0)
        self.values.index_fill_(1, index, 0)

    def slots(self, places_RN: Tensor, real_RN: Tensor | None = None) -> Tensor:
        table = self.table
        bin_page = table.pages + 1
        if table.first_place is not None:
            slots_RN = places_RN + table.first_place
        else:
            # Padding may stand past the last place.
            column_RN = (places_RN // table.page_size).clamp(max=table.pages_RP.shape[1] - 1)
            page_RN = table.pages_RP.gather(1, column_RN)
            page_RN = torch.where(page_RN == table.pages, bin_page, page_RN)
            slots_RN = page_RN * table.page_size + places_RN % table.page_size
        return slots_RN if real_RN is None else torch.where(real_RN, slots_RN, bin_page * table.page_size)

    def write(self, layer: int, slots_RN: Tensor, keys_RNGd: Tensor, values_RNGd: Tensor) -> None:
        flat = slots_RN.flatten()
        self.keys[layer].flatten(0, 1).index_copy_(0, flat, keys_RNGd.flatten(0, 1))
        self.values[layer].flatten(0, 1).index_copy_(0, flat, values_RNGd.flatten(0, 1))

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        return self._gather(self.keys[layer], span), self._gather(self.values[layer], span)

    def keep(self, from_places_RP: Tensor, to_places_RP: Tensor, real_RP: Tensor) -> None:
        source = self.slots(from_places_RP).flatten()
        target = self.slots(to_places_RP, real_RP).flatten()
        for pool in (self.keys.flatten(1, 2), self.values.flatten(1, 2)):
            pool.index_copy_(1, target, pool.index_select(1, source))

    def _gather(self, pool_QpGd: Tensor, span: int) -> Tensor:
        table = self.table
        if table.first_place is not None:
            return pool_QpGd.flatten(0, 1)[None, table.first_place : table.first_place + span]
        pages_RP = table.pages_RP[:, : -(-span // table.page_size)]
        # Whole pages are copied, not single places: longer runs of memory.
        found = pool_QpGd.flatten(1).index_select(0, pages_RP.flatten())
        return found.view(pages_RP.shape[0], -1, *pool_QpGd.shape[2:])[:, :span]
