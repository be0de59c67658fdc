"""From raw logits to the scores that tokens are chosen by, for many rows with settings of their own.

The order is Hugging Face's: logit bias, repetition penalty, presence and frequency penalties (which Hugging
Face lacks), constraint, temperature, top-k, top-p, min-p. Functions are pure; what no row asks for costs
nothing. A row's scores do not depend on the rows beside it, so a batch says what its requests say alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.speculation.filters import Filters, filter_scores
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.penalties import Penalties, TokenCounts, penalise

__all__ = ["RowParams", "draft_scores", "row_params", "target_scores"]


@dataclass(frozen=True, slots=True)
class RowParams:
    """The settings of M rows as tensors, made once for a batch; None where no row has the setting.

    greedy_M1: bool. temperature_M1: float64, 1 where greedy. bias_tokens_MB, bias_MB: int64 and float32, the
    shifts of B tokens in each row; a token may be listed twice, with the same shift.
    """

    greedy_M1: Tensor | None
    all_greedy: bool
    temperature_M1: Tensor | None
    bias_tokens_MB: Tensor | None
    bias_MB: Tensor | None
    penalties: Penalties
    filters: Filters


def row_params(
    params: Sequence[SamplingParams], rows_each: int = 1, device: torch.device | None = None
) -> RowParams:
    """Settings of len(params) sequences, each of which has `rows_each` consecutive rows."""

    def rows(values: list[list[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(rows_each, dim=0)

    def column(
        setting: Callable[[SamplingParams], float], off: float, dtype: torch.dtype = torch.float64
    ) -> Tensor | None:
        values = [setting(p) for p in params]
        return None if all(value == off for value in values) else rows([[value] for value in values], dtype)

    # Greedy rows need no filters: those never remove the best token.
    filters = Filters(
        top_k_M1=column(lambda p: 0 if p.greedy else p.top_k, 0, torch.int64),
        largest_k=max((p.top_k for p in params if not p.greedy), default=0),
        top_p_M1=column(lambda p: 1 if p.greedy else p.top_p, 1),
        min_p_M1=column(lambda p: 0 if p.greedy else p.min_p, 0),
    )
    penalties = Penalties(
        repetition_M1=column(lambda p: p.repetition_penalty, 1),
        presence_M1=column(lambda p: p.presence_penalty, 0),
        frequency_M1=column(lambda p: p.frequency_penalty, 0),
    )
    shifts = [list(p.logit_bias.items()) or [(0, 0.0)] for p in params]
    widest = max(len(row) for row in shifts)
    shifts = [row + row[-1:] * (widest - len(row)) for row in shifts]
    biased = any(p.logit_bias for p in params)
    return RowParams(
        greedy_M1=column(lambda p: p.greedy, False, torch.bool),
        all_greedy=all(p.greedy for p in params),
        temperature_M1=column(lambda p: 1 if p.greedy else p.temperature, 1),
        bias_tokens_MB=rows([[token for token, _ in row] for row in shifts], torch.int64) if biased else None,
        bias_MB=rows([[shift for _, shift in row] for row in shifts], torch.float32) if biased else None,
        penalties=penalties,
        filters=filters,
    )


def target_scores(
    logits_MV: Tensor,
    params: RowParams,
    counts: TokenCounts | None = None,
    allowed_MV: Tensor | None = None,
) -> Tensor:
    """Scores whose softmax is the distribution that the request asks for; its argmax where greedy. [M, V].

    float32 and float64 logits keep their type, shorter ones become float32. counts: what stands before each
    row, needed where there are penalties. allowed_MV: bool, what the constraint lets follow each row. A row
    that may have nothing is all -inf. The result may be the logits themselves: do not write to it.
    """
    scores_MV = _before_temperature(logits_MV, params, counts)
    if allowed_MV is not None:
        scores_MV = scores_MV.masked_fill(~allowed_MV, -torch.inf)
        # As in Hugging Face, a constraint holds even when the model gives its tokens no chance at all.
        hopeless_M1 = scores_MV.amax(dim=1, keepdim=True) == -torch.inf
        scores_MV = scores_MV.masked_fill(allowed_MV & hopeless_M1, 0.0)
    if params.temperature_M1 is not None:
        scores_MV = scores_MV / params.temperature_M1.to(scores_MV.dtype)
    return filter_scores(scores_MV, params.filters)


def draft_scores(
    logits_MV: Tensor,
    params: RowParams,
    counts: TokenCounts | None = None,
    noise_MV: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Log-probabilities that trees are built from, for D depths of each sequence. float32 [M, V], M = R * D.

    The drafter's logits with bias, penalties of the committed tokens and temperature (1 where greedy). With
    noise, the Gumbel noise of each depth's position, rows that sample are coupled to it: softmax((log q + g) /
    scale) says which token the target will choose, given that it will see the same g. Choices are the
    target's own, so none of this can change the text. NaN becomes -inf: a broken row drafts nothing.
    """
    scores_MV = _before_temperature(logits_MV, params, counts)
    if params.temperature_M1 is not None:
        scores_MV = scores_MV / params.temperature_M1.to(scores_MV.dtype)
    if noise_MV is not None and not params.all_greedy:
        # log q is the scores but for a constant, which the softmax forgets.
        coupled_MV = (scores_MV + noise_MV.to(scores_MV.dtype)).div_(scale)
        greedy_M1 = params.greedy_M1
        scores_MV = coupled_MV if greedy_M1 is None else torch.where(greedy_M1, scores_MV, coupled_MV)
    return scores_MV.log_softmax(dim=1).float().nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def _before_temperature(logits_MV: Tensor, params: RowParams, counts: TokenCounts | None) -> Tensor:
    """What targets and drafts share: upcast, bias, penalties."""
    scores_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    if params.bias_tokens_MB is not None and params.bias_MB is not None:
        cells_MB = scores_MV.gather(1, params.bias_tokens_MB) + params.bias_MB
        scores_MV = scores_MV.scatter(1, params.bias_tokens_MB, cells_MB)
    if params.penalties.any:
        assert counts is not None, "penalties need the counts of the tokens before each row"
        scores_MV = penalise(scores_MV, params.penalties, counts)
    return scores_MV
