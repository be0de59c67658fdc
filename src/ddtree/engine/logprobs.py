"""Log-probabilities of what was said, from the target's own logits at the nodes where it was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.engine.request import TokenLogprob
from ddtree.ops import Ops

__all__ = ["token_logprobs"]


def token_logprobs(logits_PV: Tensor, tokens: Sequence[int], top: int, ops: Ops) -> tuple[TokenLogprob, ...]:
    """What row p said of tokens[p], and its `top` likeliest tokens."""
    wide_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32)).log_softmax(dim=-1)
    chosen_P1 = torch.tensor(tokens, device=wide_PV.device)[:, None]
    chosen = wide_PV.gather(1, chosen_P1)[:, 0].tolist()
    best: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if top:
        values_PK, ids_PK = ops.ranked(wide_PV, top)
        best = [
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(ids_PK.tolist(), values_PK.tolist(), strict=True)
        ]
    return tuple(TokenLogprob(*each) for each in zip(tokens, chosen, best, strict=True))
