"""What a run says of itself: of a step, and of a validation."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.training.acceptance import Acceptance

__all__ = ["StepReport", "ValidationReport"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as logged: loss, the edges' own (0 without any), gradient norm, rate, blocks drafted, and top-1
    accuracy of each position."""

    step: int
    loss: float
    edge_loss: float
    gradient_norm: float
    rate: float
    blocks: int
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Acceptance on held-out answers, teacher-forced: exact for greedy decoding."""

    step: int
    chain: Acceptance
    tree: Acceptance
    budget: int
