"""Plain torch twins of the fast ops: as the definitions say, one step at a time, in the widest float.

They are the oracle for tests and for kernels, and run on any device. H query heads share G key/value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.ops.rows import FULL_VIEW, Rows, View
from ddtree.tree import unpack_words

__all__ = ["attend", "best", "ranked", "rms_norm", "rotate", "top_log_probs", "visible"]


def visible(rows: Rows, view: View = FULL_VIEW) -> Tensor:
    """Which of the first `span` places of its sequence each row sees. bool [R, N, S].

    Places below lengths_R are committed and hold the position of the same number; place lengths_R + j is row
    j of this pass.
    """
    count, device = rows.count, rows.tokens_RN.device
    place_S = torch.arange(rows.span, device=device)
    row_RS = place_S[None, :] - rows.lengths_R[:, None]
    committed_RS = row_RS < 0
    inside_RS = (row_RS >= 0) & (row_RS < count)
    index_RNS = row_RS.clamp(0, count - 1)[:, None, :].expand(-1, count, -1)
    sees_RNS = unpack_words(rows.words_RNW, count).gather(2, index_RNS)
    visible_RNS = committed_RS[:, None, :] | (inside_RS[:, None, :] & sees_RNS)
    if view != FULL_VIEW:
        row_position_RS = rows.positions_RN.gather(1, row_RS.clamp(0, count - 1))
        position_RS = torch.where(committed_RS, place_S[None, :], row_position_RS)
        distance_RNS = rows.positions_RN[:, :, None] - position_RS[:, None, :]
        if view.window is not None:
            visible_RNS = visible_RNS & (distance_RNS.abs() < view.window)
        if view.causal:
            visible_RNS = visible_RNS & (distance_RNS >= 0)
    return visible_RNS


def attend(query_RNHd: Tensor, key_RSGd: Tensor, value_RSGd: Tensor, visible_RNS: Tensor) -> Tensor:
    """Softmax attention of each row over the places it sees, scaled by 1 / sqrt(d). [R, N, H, d]."""
    wide = torch.promote_types(query_RNHd.dtype, torch.float32)
    groups = query_RNHd.shape[2] // key_RSGd.shape[2]
    key_RSHd = key_RSGd.to(wide).repeat_interleave(groups, dim=2)
    value_RSHd = value_RSGd.to(wide).repeat_interleave(groups, dim=2)
    score_RHNS = torch.einsum("rnhd,rshd->rhns", query_RNHd.to(wide), key_RSHd)
    score_RHNS = score_RHNS / query_RNHd.shape[-1] ** 0.5
    score_RHNS = score_RHNS.masked_fill(~visible_RNS[:, None], -torch.inf)
    weight_RHNS = score_RHNS.softmax(dim=-1)
    # Places that a row does not see may hold anything, NaN too, and 0 * NaN is NaN: each row sums what it sees.
    rows = [
        torch.einsum("rhs,rshd->rhd", weight_RHNS[:, :, n], torch.where(seen_RS[..., None, None], value_RSHd, 0))
        for n, seen_RS in enumerate(visible_RNS.unbind(dim=1))
    ]
    return torch.stack(rows, dim=1).to(query_RNHd.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x_RNHd: Tensor, cos_RNe: Tensor, sin_RNe: Tensor) -> Tensor:
    """Rotary embedding of the first e dimensions of every head (halves convention); the others pass."""
    rotary = cos_RNe.shape[-1]
    turned, passed = x_RNHd[..., :rotary], x_RNHd[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    turned = turned * cos_RNe[:, :, None] + crossed * sin_RNe[:, :, None]
    return torch.cat([turned, passed], dim=-1)


def top_log_probs(logits_RDV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest log-probabilities of each distribution, descending, and their token ids.

    A distribution with NaN in it has no candidates: all its log-probabilities are -inf.
    """
    wide = logits_RDV.to(torch.promote_types(logits_RDV.dtype, torch.float32))
    log_probs_RDV = wide.log_softmax(dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    log_probs_RDK, tokens_RDK = ranked(log_probs_RDV, count)
    return log_probs_RDK.float(), tokens_RDK


def ranked(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` whose ties go by token id, so that the best one does not depend on how many were asked for."""
    if count == 1:
        tokens = best(scores)[..., None]
        return scores.gather(-1, tokens), tokens
    tokens = scores.topk(min(count, scores.shape[-1]), dim=-1).indices.sort(dim=-1).values
    values, order = scores.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)


def best(logits: Tensor) -> Tensor:
    """The token of the largest logit, the lowest id of several. int64, without the last dimension."""
    return logits.argmax(dim=-1)
