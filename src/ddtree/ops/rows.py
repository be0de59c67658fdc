"""The rows of one forward pass and what each of them may see.

A row sees every committed position of its sequence, and those rows of the same pass that its bits name:
the rows before it (a prompt chunk, a chain), its ancestors (a draft tree), or all (a draft block).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["FULL_VIEW", "Rows", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """What a layer takes away from what its rows may see.

    window: tokens of a sliding window, None for all: a row at position p sees positions p - window + 1 to
    p + window - 1. causal: rows see no later position, whatever their bits say.
    """

    window: int | None = None
    causal: bool = False


FULL_VIEW = View()


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows for each of R sequences.

    tokens_RN: int64. positions_RN: int64, sequence positions, for rope and sliding windows. lengths_R: int64,
    committed positions of each sequence; row n keeps its key and value at place lengths_R[r] + n. words_RNW:
    int64, which rows of this pass each row sees. span: host-side bound, at least max(lengths_R) + N; it may be
    larger than needed and never changes a result. real_RN: bool, None when all rows are real; the others are
    padding, which writes nowhere and which no real row sees.
    """

    tokens_RN: Tensor
    positions_RN: Tensor
    lengths_R: Tensor
    words_RNW: Tensor
    span: int
    real_RN: Tensor | None = None

    @property
    def count(self) -> int:
        """N, the rows of each sequence."""
        return self.tokens_RN.shape[1]
