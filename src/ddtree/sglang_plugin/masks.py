"""Who sees whom, in the layouts that SGLang's attention backends read.

FULL: for each request its N rows, one after the other, each with one cell for every committed position and every
row: N x (prefix + N). ROWS: only the N x N cells between rows. Requests follow each other without gaps, so where a
request begins depends on the lengths of those before it: the device's lengths, never a host copy, which may be
ahead of them.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ddtree.tree import DraftTree, ancestor_words, unpack_words

__all__ = ["MaskLayout", "full_cells", "pack_mask", "tree_sees"]


class MaskLayout(Enum):
    """How a backend reads the mask of a verification."""

    FULL = "full"
    ROWS = "rows"


def tree_sees(tree: DraftTree) -> Tensor:
    """Which row sees which: its ancestors and itself; padding sees the root and itself. bool [R, N, N]."""
    return unpack_words(ancestor_words(tree), tree.rows)


def full_cells(bounds_R: Tensor, rows: int) -> int:
    """Cells that hold a FULL mask whatever the device's lengths are. bounds_R: on the host, at least the
    lengths."""
    return int((bounds_R.to(torch.int64) + rows).sum()) * rows


def pack_mask(sees_RNN: Tensor, prefix_R: Tensor, layout: MaskLayout, cells: int) -> Tensor:
    """The flat mask. bool [cells] for FULL (cells past the last request are True), bool [R * N * N] for ROWS."""
    if layout is MaskLayout.ROWS:
        return sees_RNN.flatten()
    rows = sees_RNN.shape[1]
    device = sees_RNN.device
    each_R = rows * (prefix_R.to(torch.int64) + rows)
    start_R = each_R.cumsum(dim=0) - each_R
    place_N = torch.arange(rows, device=device)
    row_start_RN = start_R[:, None] + place_N * (prefix_R.to(torch.int64) + rows)[:, None] + prefix_R[:, None]
    index_RNN = row_start_RN[:, :, None] + place_N
    mask = torch.ones(cells, dtype=torch.bool, device=device)
    return mask.scatter_(0, index_RNN.flatten(), sees_RNN.flatten())
