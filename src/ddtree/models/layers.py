"""Decoder layers that targets and drafters share.

A layer does not know where keys and values live: it hands query, key and value to the `attend` function of
the pass, which stores, reads and attends. The same layer therefore serves a cache, a training batch, and
whatever comes later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.models.spec import DecoderSpec
from ddtree.ops import Ops

__all__ = ["Angles", "Attend", "DecoderLayer", "RMSNorm", "project"]

# Cosines and sines of the rows, each [R, N, e].
Angles = tuple[Tensor, Tensor]
# (layer, query_RNHd, key_RNGd, value_RNGd) -> attention output [R, N, H, d].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)


class Attention(nn.Module):
    """Projections around attention: one product for query, key and value, optional norms on query and key."""

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        super().__init__()
        self._spec = spec
        self._ops = ops
        heads = spec.heads + 2 * spec.kv_heads
        self.qkv_proj = nn.Linear(spec.hidden, heads * spec.head_dim, bias=spec.attention_bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.attention_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, ops)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, ops)

    def forward(self, layer: int, x_RNh: Tensor, angles: Angles, attend: Attend) -> Tensor:
        spec = self._spec
        qkv_RNTd = self.qkv_proj(x_RNh).unflatten(-1, (-1, spec.head_dim))
        query_RNHd, key_RNGd, value_RNGd = qkv_RNTd.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=2)
        if spec.qk_norm:
            query_RNHd = self._ops.rotate(self.q_norm(query_RNHd), *angles)
            key_RNGd = self._ops.rotate(self.k_norm(key_RNGd), *angles)
        else:  # without norms query and key turn together
            turned_RNTd = self._ops.rotate(qkv_RNTd[:, :, : spec.heads + spec.kv_heads], *angles)
            query_RNHd, key_RNGd = turned_RNTd.split([spec.heads, spec.kv_heads], dim=2)
        return self.o_proj(attend(layer, query_RNHd, key_RNGd, value_RNGd).flatten(2))

    def context(self, features_RNh: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Key and value of context features, without a query: what a drafter keeps of committed positions."""
        spec = self._spec
        queries = spec.heads * spec.head_dim
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[queries:]
        kv = F.linear(features_RNh, self.qkv_proj.weight[queries:], bias).unflatten(-1, (-1, spec.head_dim))
        key_RNGd, value_RNGd = kv.chunk(2, dim=2)
        if spec.qk_norm:
            key_RNGd = self.k_norm(key_RNGd)
        return self._ops.rotate(key_RNGd, *angles), value_RNGd


class GatedMLP(nn.Module):
    """silu(gate) * up, then down; gate and up in one product."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(spec.hidden, 2 * spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals, as in Llama and Qwen3."""

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps, ops)
        self.self_attn = Attention(spec, ops)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps, ops)
        self.mlp = GatedMLP(spec)

    def forward(self, layer: int, x_RNh: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x_RNh = x_RNh + self.self_attn(layer, self.input_layernorm(x_RNh), angles, attend)
        return x_RNh + self.mlp(self.post_attention_layernorm(x_RNh))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T over the last dimension, as one product of matrices.

    torch turns a product of a strided 3-D tensor into a batched one and copies the weight for it; for a large
    vocabulary that takes ten times as long as the product itself.
    """
    return F.linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
