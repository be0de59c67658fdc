"""Penalties for repetition, for every node of a tree along its own path.

A node is judged with the counts that step-by-step decoding would have at that place: the committed tokens and
the drafted tokens on the way from the root to the node, the node itself included. Committed tokens are
counted once for all rows; only the few (row, token) cells that a path touches are evaluated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddtree.tree.structure import DraftTree

__all__ = ["Penalties", "TokenCounts", "count_tokens", "node_paths", "penalise"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of M rows, float64 [M, 1] each; None where no row has one.

    repetition_M1 divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar
    et al. 2019, arXiv 1909.05858). presence_M1 is subtracted once from every token of the output,
    frequency_M1 once for each time that it occurs there.
    """

    repetition_M1: Tensor | None
    presence_M1: Tensor | None
    frequency_M1: Tensor | None

    @property
    def any(self) -> bool:
        """Whether any row has a penalty."""
        return not (self.repetition_M1 is None and self.presence_M1 is None and self.frequency_M1 is None)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token occurs before each of M rows. M is a multiple of R: M / R rows a sequence, in order.

    prompt_RV, output_RV: int32, the committed tokens. path_ML: int64, the tokens that each row has beyond
    them, L places padded with any token; real_ML: bool, which places count. None: no row has any.
    """

    prompt_RV: Tensor
    output_RV: Tensor
    path_ML: Tensor | None = None
    real_ML: Tensor | None = None

    def committed(self, tokens_RL: Tensor, real_RL: Tensor) -> TokenCounts:
        """The counts after more output tokens were committed; paths are dropped. Shapes as for paths."""
        output_RV = self.output_RV.scatter_add(1, tokens_RL, real_RL.to(self.output_RV.dtype))
        return TokenCounts(self.prompt_RV, output_RV)

    def along(self, path_ML: Tensor, real_ML: Tensor) -> TokenCounts:
        """The same committed tokens, and a path for each row."""
        return replace(self, path_ML=path_ML, real_ML=real_ML)


def count_tokens(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab_size: int,
    device: torch.device | None = None,
) -> TokenCounts:
    """Counts of R sequences from their tokens. Ids at or past vocab_size cannot be drawn and are not counted."""

    def counts_RV(sequences: Sequence[Sequence[int]]) -> Tensor:
        ids = [torch.tensor(tokens, dtype=torch.int64) for tokens in sequences]
        rows = [torch.bincount(t[t < vocab_size], minlength=vocab_size) for t in ids]
        return torch.stack(rows).to(device=device, dtype=torch.int32)

    return TokenCounts(counts_RV(prompts), counts_RV(outputs))


def node_paths(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """The drafted tokens from each node up to its root, for `TokenCounts.along`. [R * N, horizon] each.

    int64 tokens and bool marks. The root is not among them: it is a committed token.
    """
    sequences, rows = tree.tokens_RN.shape
    path_LRN = tree.tokens_RN.new_zeros(tree.horizon, sequences, rows)
    real_LRN = torch.zeros_like(path_LRN, dtype=torch.bool)
    node_RN = torch.arange(rows, device=path_LRN.device).expand(sequences, -1)
    for step in range(tree.horizon):
        path_LRN[step] = tree.tokens_RN.gather(1, node_RN)
        real_LRN[step] = tree.depths_RN.gather(1, node_RN) > 0
        node_RN = tree.parents_RN.gather(1, node_RN)
    return path_LRN.flatten(1).T, real_LRN.flatten(1).T


def penalise(logits_MV: Tensor, penalties: Penalties, counts: TokenCounts) -> Tensor:
    """The logits after repetition, then presence and frequency penalties. A new tensor [M, V]."""
    sequences, vocab_size = counts.output_RV.shape
    logits_RNV = logits_MV.reshape(sequences, -1, vocab_size)
    prompt_RNV = counts.prompt_RV[:, None].expand_as(logits_RNV)
    output_RNV = counts.output_RV[:, None].expand_as(logits_RNV)
    by_sequence = [
        None if value_M1 is None else value_M1.to(logits_MV.dtype).reshape(sequences, -1, 1)
        for value_M1 in (penalties.repetition_M1, penalties.presence_M1, penalties.frequency_M1)
    ]
    # A CPU can look which tokens were used, mostly one in a hundred, and leave the others alone.
    committed = _penalise_used if logits_MV.device.type == "cpu" else _penalise
    scores_RNV = committed(logits_RNV, prompt_RNV, output_RNV, *by_sequence)
    if counts.path_ML is None or counts.real_ML is None:
        return scores_RNV.flatten(0, 1)
    path_RNL = counts.path_ML.reshape(*logits_RNV.shape[:2], counts.path_ML.shape[1])
    real_RNL = counts.real_ML.reshape(path_RNL.shape)
    # A padding place gets the true counts of whatever token it holds: places of one token write one value.
    drafted_RNL = ((path_RNL[..., None] == path_RNL[..., None, :]) & real_RNL[..., None, :]).sum(dim=-1)
    logit_RNL, prompt_RNL, output_RNL = (
        every_RNV.gather(2, path_RNL) for every_RNV in (logits_RNV, prompt_RNV, output_RNV)
    )
    cells_RNL = _penalise(logit_RNL, prompt_RNL, output_RNL + drafted_RNL, *by_sequence)
    return scores_RNV.scatter(2, path_RNL, cells_RNL).flatten(0, 1)


def _penalise_used(
    logits_RNV: Tensor, prompt_RNV: Tensor, output_RNV: Tensor, *by_sequence: Tensor | None
) -> Tensor:
    """`_penalise` for the tokens that some sequence has used; the same for every other token."""
    used_U = (prompt_RNV[:, 0] + output_RNV[:, 0]).any(dim=0).nonzero()[:, 0]
    cells_RNU = _penalise(logits_RNV[..., used_U], prompt_RNV[..., used_U], output_RNV[..., used_U], *by_sequence)
    return logits_RNV.index_copy(2, used_U, cells_RNU)


def _penalise(
    logits: Tensor,
    prompt: Tensor,
    output: Tensor,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
) -> Tensor:
    """Penalties of cells whose token was counted `prompt` and `output` times; all shapes broadcast."""
    scores = logits
    if repetition is not None:
        changed = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores = torch.where(prompt + output > 0, changed, scores)
    if presence is not None:
        scores = scores - presence * (output > 0)
    if frequency is not None:
        scores = scores - frequency * output
    return scores
