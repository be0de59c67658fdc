"""Fast torch ops for CPUs and GPUs without kernels of our own: a dense mask and the vendor's attention.

Query heads that share a key/value head are folded into rows, because the fused CPU attention reads keys once
for each head: for 9 query heads on 3 key/value heads that is three times less memory traffic at one row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.ops import reference
from ddtree.ops.rows import Rows, View

__all__ = ["attend", "best", "mask", "rms_norm", "rotate"]


def mask(rows: Rows, heads_per_group: int, dtype: torch.dtype, view: View) -> Tensor:
    """What `attend` needs to know of the rows, made once a pass. Additive, [R, 1, heads_per_group * N, S]."""
    visible_RNS = reference.visible(rows, view)
    hidden = torch.zeros(visible_RNS.shape, dtype=dtype, device=visible_RNS.device)
    hidden.masked_fill_(~visible_RNS, -torch.inf)
    return hidden.repeat(1, heads_per_group, 1)[:, None]


def attend(query_RNHd: Tensor, key_RSGd: Tensor, value_RSGd: Tensor, mask_R1MS: Tensor) -> Tensor:
    """`reference.attend` with the fused attention of torch. [R, N, H, d]."""
    sequences, count, heads, dim = query_RNHd.shape
    groups = key_RSGd.shape[2]
    folded_RGMd = query_RNHd.transpose(1, 2).reshape(sequences, groups, -1, dim)
    out_RGMd = F.scaled_dot_product_attention(
        folded_RGMd, key_RSGd.transpose(1, 2), value_RSGd.transpose(1, 2), attn_mask=mask_R1MS
    )
    return out_RGMd.reshape(sequences, heads, count, dim).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` in one call."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x_RNHd: Tensor, cos_RNe: Tensor, sin_RNe: Tensor) -> Tensor:
    """`reference.rotate` without the split when all dimensions rotate."""
    if cos_RNe.shape[-1] != x_RNHd.shape[-1]:
        return reference.rotate(x_RNHd, cos_RNe, sin_RNe)
    half = x_RNHd.shape[-1] // 2
    crossed = torch.cat([-x_RNHd[..., half:], x_RNHd[..., :half]], dim=-1)
    return torch.addcmul(x_RNHd * cos_RNe[:, :, None], crossed, sin_RNe[:, :, None])


def best(logits: Tensor) -> Tensor:
    """`reference.best`; on a CPU argmax of bfloat16 takes five times as long."""
    return logits.max(dim=-1).indices
