"""Rotary angles for positions, from a decoder's spec; scaled variants take their frequencies from transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddtree.models.spec import DecoderSpec

__all__ = ["Rope"]


class Rope(nn.Module):
    """Positions in, cosines and sines out. Angles are float32 whatever the model's dtype."""

    frequencies_h: Tensor

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        with torch.device("cpu"):  # real numbers, even where a model is laid out on the meta device
            frequencies_h, self._magnitude = _frequencies(spec)
        self.register_buffer("frequencies_h", frequencies_h, persistent=False)

    def forward(self, positions_RN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [R, N, rotary_dim], halves repeated."""
        angle_RNh = positions_RN[..., None].float() * self.frequencies_h
        angle_RNe = torch.cat([angle_RNh, angle_RNh], dim=-1)
        return (angle_RNe.cos() * self._magnitude).to(dtype), (angle_RNe.sin() * self._magnitude).to(dtype)


def _frequencies(spec: DecoderSpec) -> tuple[Tensor, float]:
    rope = spec.rope
    if rope.kind == "default":
        exponent_h = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        return 1.0 / rope.theta**exponent_h, 1.0

    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PreTrainedConfig()
    config.head_dim = rope.rotary_dim
    config.hidden_size, config.num_attention_heads = spec.hidden, spec.heads
    config.max_position_embeddings = spec.max_positions
    config.rope_parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **dict(rope.scaling)}
    frequencies_h, magnitude = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies_h, float(magnitude)
