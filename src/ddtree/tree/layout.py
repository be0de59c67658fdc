"""Where a tree's rows stand in the sequence, and which of its rows each row may see.

The ancestor relation is a bit mask: bit j of row i says that row i sees row j. A row sees itself. A prompt
is a chain and a draft block is a clique, so the same words describe prefill, verification and drafting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree.structure import DraftTree

__all__ = ["ancestor_words", "chain_words", "clique_words", "positions", "unpack_words", "word_count"]

WORD_BITS = 64


def word_count(rows: int) -> int:
    """How many 64-bit words hold one bit for each of `rows` rows."""
    return -(-rows // WORD_BITS)


def positions(tree: DraftTree, starts_R: Tensor) -> Tensor:
    """Sequence position of every node: the anchor's position plus the node's depth. int64 [R, N]."""
    return starts_R[:, None] + tree.depths_RN


def ancestor_words(tree: DraftTree) -> Tensor:
    """Bit masks of each node's ancestors and itself. int64 [R, N, W].

    Padding nodes see the root and themselves, so that a softmax over them stays finite.
    """
    sequences, rows = tree.parents_RN.shape
    words_RNW = _own_bits(rows, tree.parents_RN.device).expand(sequences, -1, -1)
    jump_RN = tree.parents_RN
    reach = 1
    # Pointer doubling: after i steps a word holds the nearest 2**i ancestors. The root jumps to itself.
    while reach <= tree.horizon:
        index_RNW = jump_RN[..., None].expand(-1, -1, words_RNW.shape[-1])
        words_RNW = words_RNW | words_RNW.gather(1, index_RNW)
        jump_RN = jump_RN.gather(1, jump_RN)
        reach *= 2
    return words_RNW


def chain_words(sequences: int, rows: int, device: torch.device) -> Tensor:
    """Words of a chain: row i sees rows 0 to i. int64 [R, N, W]."""
    return _pack(torch.ones(rows, rows, dtype=torch.bool, device=device).tril()).expand(sequences, -1, -1)


def clique_words(sequences: int, rows: int, device: torch.device) -> Tensor:
    """Words of a block whose rows all see each other. int64 [R, N, W]."""
    return _pack(torch.ones(rows, rows, dtype=torch.bool, device=device)).expand(sequences, -1, -1)


def unpack_words(words_RNW: Tensor, rows: int) -> Tensor:
    """The dense form of the words, for backends that insist on it. bool [R, N, rows]."""
    column_N = torch.arange(rows, device=words_RNW.device)
    word_RNN = words_RNW[..., column_N // WORD_BITS]
    return (word_RNN >> (column_N % WORD_BITS)) & 1 == 1


def _pack(mask_NN: Tensor) -> Tensor:
    rows = mask_NN.shape[-1]
    bits_NW = _own_bits(rows, mask_NN.device)
    # Distinct bits, so a sum is their union.
    return torch.where(mask_NN[..., None], bits_NW[None], 0).sum(dim=1)


def _own_bits(rows: int, device: torch.device) -> Tensor:
    row_N = torch.arange(rows, device=device)
    words_NW = torch.zeros(rows, word_count(rows), dtype=torch.int64, device=device)
    bit_N1 = (torch.ones_like(row_N) << (row_N % WORD_BITS))[:, None]
    return words_NW.scatter_(1, (row_N // WORD_BITS)[:, None], bit_N1)
