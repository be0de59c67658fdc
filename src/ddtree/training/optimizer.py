"""Optimisers and the learning-rate curve of a run."""

from __future__ import annotations

import math

import torch
from torch import nn

from ddtree.training.config import TrainConfig

__all__ = ["learning_rate", "make_optimizers", "set_learning_rate"]

BETAS = (0.9, 0.95)


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for matrices with AdamW for the vectors. Vectors never decay."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    fused = next(model.parameters()).is_cuda
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "muon":
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(vectors, lr=rate, betas=BETAS, weight_decay=0.0, fused=fused)]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=fused)]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to the final rate. step counts from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
