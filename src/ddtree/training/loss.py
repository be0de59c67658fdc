"""The loss of draft positions, without ever holding all their logits.

Position k of a block (k = 1 is the first mask) predicts the token k places after the anchor: no shift by one. Its
cross-entropy weighs exp(-(k - 1) / gamma), because a wrong early token spoils all that follow it. The head is
frozen, so a chunk's gradient with respect to its hidden states is ready once its logits are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["DraftLoss", "decay_weights", "draft_loss"]

# Rows whose logits exist at one time: 3 GiB of bfloat16 for a vocabulary of 49,152.
CHUNK_ROWS = 32768


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 to b - 1. float32 [b - 1]."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


class DraftLoss(torch.autograd.Function):
    """Weighted mean cross-entropy of hidden_Mh @ head_Vh.T against labels_M, in chunks of rows.

    weights_M: float32; rows of weight 0 are ignored, whatever their label. Returns the loss (0 when every weight
    is 0) and, for each row, whether the label was the most probable token.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_Mh: Tensor, head_Vh: Tensor, labels_M: Tensor, weights_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = weights_M.sum().clamp(min=torch.finfo(torch.float32).tiny)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_Mh.device)
        gradient_Mh = torch.empty_like(hidden_Mh)
        correct_M = torch.empty_like(labels_M, dtype=torch.bool)
        chunk = _compiled_chunk() if hidden_Mh.is_cuda else _chunk
        count = hidden_Mh.shape[0]
        size = -(-count // -(-count // CHUNK_ROWS))  # chunks of one size, so that one shape is compiled
        for first in range(0, count, size):
            rows = slice(first, first + size)
            logits_CV = hidden_Mh[rows] @ head_Vh.T
            part, slope_CV, correct_M[rows] = chunk(logits_CV, labels_M[rows], weights_M[rows] / total)
            loss += part
            gradient_Mh[rows] = slope_CV @ head_Vh
        ctx.save_for_backward(gradient_Mh)
        ctx.mark_non_differentiable(correct_M)
        return loss, correct_M

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (gradient_Mh,) = ctx.saved_tensors
        return gradient_Mh * grads[0], None, None, None


def _chunk(logits_CV: Tensor, labels_C: Tensor, shares_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of some rows, its slope with respect to their logits, and whether the label ranked first."""
    wide_CV = logits_CV.float()
    norm_C = wide_CV.logsumexp(dim=1)
    label_logit_C = wide_CV.gather(1, labels_C[:, None])[:, 0]
    column_V = torch.arange(wide_CV.shape[1], device=wide_CV.device)
    hit_CV = column_V[None] == labels_C[:, None]
    slope_CV = ((wide_CV - norm_C[:, None]).exp() - hit_CV.float()) * shares_C[:, None]
    correct_C = label_logit_C >= wide_CV.amax(dim=1)
    return ((norm_C - label_logit_C) * shares_C).sum(), slope_CV.to(logits_CV.dtype), correct_C


@lru_cache(maxsize=1)
def _compiled_chunk() -> Any:
    """`_chunk` in two passes over the logits instead of eight."""
    return torch.compile(_chunk, dynamic=False)


def draft_loss(
    hidden_Abh: Tensor, head_Vh: Tensor, labels_AD: Tensor, weights_AD: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of the mask rows of A blocks and which labels were ranked first. hidden_Abh includes the anchor's row,
    which predicts nothing. Returns a float32 scalar and bool [A, D]."""
    hidden_Mh = hidden_Abh[:, 1:].reshape(-1, hidden_Abh.shape[-1]).to(head_Vh.dtype)
    result: tuple[Tensor, Tensor] = DraftLoss.apply(hidden_Mh, head_Vh, labels_AD.flatten(), weights_AD.flatten())
    loss, correct_M = result
    return loss, correct_M.view(labels_AD.shape)
