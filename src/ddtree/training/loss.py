"""The loss of draft positions, without ever holding all their logits.

Position k of a block (k = 1 is the first mask) predicts the token k places after the anchor: no shift by one. What
it should match is the answer's token, the target's own distribution there (soft labels), or a mixture. How much a
position weighs is fixed by its depth, or follows the drafter's own confidence (D-PACE, arXiv 2605.18810). The head
is frozen, so a chunk's gradient with respect to its hidden states is ready once its logits are.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Labels", "Objective", "decay_weights", "dpace_weights", "draft_loss", "loss_total"]

# Rows whose logits exist at one time: 3 GiB of bfloat16 for a vocabulary of 49,152.
CHUNK_ROWS = 32768


@dataclass(frozen=True, slots=True)
class Objective:
    """What the positions of a block match and how much they weigh.

    gamma: position k weighs exp(-(k - 1) / gamma), because a wrong early token spoils all that follow it.
    dpace_alpha: above 0, D-PACE's weights instead, with this smoothing. soft_share: how much of the label is the
    target's distribution instead of the answer's token; soft_temperature: of that distribution.
    """

    gamma: float
    dpace_alpha: float = 0.0
    soft_share: float = 0.0
    soft_temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Labels:
    """What A blocks of D masks should say.

    tokens_AD: int64. counted_AD: bool; positions past the end of an answer are not counted. teacher_ADh: the
    target's hidden states, which the head turns into its distribution for each position; None without soft labels.
    """

    tokens_AD: Tensor
    counted_AD: Tensor
    teacher_ADh: Tensor | None = None


def decay_weights(counted_AD: Tensor, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for position k, 0 where it is not counted. float32 [A, D]."""
    depth_D = torch.arange(counted_AD.shape[1], dtype=torch.float32, device=counted_AD.device)
    return torch.where(counted_AD, torch.exp(-depth_D / gamma), 0.0)


def dpace_weights(confidence_AD: Tensor, counted_AD: Tensor, alpha: float) -> Tensor:
    """How much of the expected accepted length hangs on each position. float32 [A, D].

    confidence_AD: the drafter's probability of each label. The weight is the sum, over the depths from the
    position on, of the chance that all labels up to there are drafted. alpha mixes each probability with 1: a
    hopeless position then does not silence those behind it.
    """
    smoothed_AD = torch.where(counted_AD, (1 - alpha) * confidence_AD.float() + alpha, 0.0)
    reached_AD = smoothed_AD.cumprod(dim=1)
    return reached_AD.flip(1).cumsum(dim=1).flip(1)


def draft_loss(
    hidden_AbH: Tensor, head_VH: Tensor, labels: Labels, objective: Objective, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of the mask rows of A blocks and which answer tokens were ranked first: a float32 scalar, bool [A, D].

    hidden_AbH includes the anchor's row, which predicts nothing. total: what the weighted sum is divided by, see
    `loss_total`.
    """
    hidden_ADH = hidden_AbH[:, 1:].to(head_VH.dtype)
    result: tuple[Tensor, Tensor] = _DraftLoss.apply(hidden_ADH, head_VH, labels, objective, total)
    return result


class _DraftLoss(torch.autograd.Function):
    """Weighted cross-entropy of hidden_ADh @ head_Vh.T against labels, in chunks of whole blocks."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ADh: Tensor, head_Vh: Tensor, labels: Labels, objective: Objective, total: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ADh.device)
        gradient_ADh = torch.empty_like(hidden_ADh)
        correct_AD = torch.empty_like(labels.counted_AD)
        chunk = _compiled_chunk() if hidden_ADh.is_cuda else _chunk
        blocks, depth, _ = hidden_ADh.shape
        chunks = -(-blocks * depth // CHUNK_ROWS)
        size = -(-blocks // chunks)  # chunks of one size, so that one shape is compiled
        for first in range(0, blocks, size):
            part = slice(first, first + size)
            logits_CV = hidden_ADh[part].flatten(0, 1) @ head_Vh.T
            teacher_CV = None
            if objective.soft_share and labels.teacher_ADh is not None:
                teacher_CV = labels.teacher_ADh[part].flatten(0, 1).to(head_Vh.dtype) @ head_Vh.T
            part_loss, slope_CV, correct_AD[part] = chunk(
                logits_CV, teacher_CV, labels.tokens_AD[part], labels.counted_AD[part], total, *astuple(objective)
            )
            loss += part_loss
            gradient_ADh[part] = (slope_CV @ head_Vh).view_as(gradient_ADh[part])
        ctx.save_for_backward(gradient_ADh)
        ctx.mark_non_differentiable(correct_AD)
        return loss, correct_AD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        (gradient_ADh,) = ctx.saved_tensors
        return gradient_ADh * grads[0], None, None, None, None


def _chunk(
    logits_CV: Tensor,
    teacher_CV: Tensor | None,
    tokens_AD: Tensor,
    counted_AD: Tensor,
    total: Tensor,
    gamma: float,
    dpace_alpha: float,
    soft_share: float,
    soft_temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of some blocks, its slope with respect to their logits, and whether the answer's token ranked first.

    The slope takes the weights for constants, D-PACE's too. Plain numbers, not an `Objective`: it is compiled.
    """
    wide_CV = logits_CV.float()
    norm_C = wide_CV.logsumexp(dim=1)
    label_C = tokens_AD.flatten()
    label_logit_C = wide_CV.gather(1, label_C[:, None])[:, 0]
    if dpace_alpha:
        confidence_AD = (label_logit_C - norm_C).exp().view_as(tokens_AD)
        weights_AD = dpace_weights(confidence_AD, counted_AD, dpace_alpha)
    else:
        weights_AD = decay_weights(counted_AD, gamma)
    share_C = (weights_AD / total).flatten()
    column_V = torch.arange(wide_CV.shape[1], device=wide_CV.device)
    wanted_CV = (column_V[None] == label_C[:, None]).float()
    wanted_logit_C = label_logit_C
    if teacher_CV is not None:
        soft_CV = (teacher_CV.float() / soft_temperature).softmax(dim=1)
        wanted_CV = torch.lerp(wanted_CV, soft_CV, soft_share)
        wanted_logit_C = torch.lerp(label_logit_C, (soft_CV * wide_CV).sum(dim=1), soft_share)
    slope_CV = ((wide_CV - norm_C[:, None]).exp() - wanted_CV) * share_C[:, None]
    correct_C = label_logit_C >= wide_CV.amax(dim=1)
    loss = ((norm_C - wanted_logit_C) * share_C).sum()
    return loss, slope_CV.to(logits_CV.dtype), correct_C.view_as(counted_AD)


@lru_cache(maxsize=1)
def _compiled_chunk() -> Any:
    """`_chunk` in few passes over the logits instead of many."""
    return torch.compile(_chunk, dynamic=False)


def loss_total(counted_AD: Tensor, gamma: float) -> Tensor:
    """What a step's weighted sum is divided by. float32 scalar, above 0.

    The weights that decay would give, whatever the objective: so it depends on the data alone, and every process
    of a group can divide by the group's.
    """
    return decay_weights(counted_AD, gamma).sum().clamp(min=torch.finfo(torch.float32).tiny)
