"""What the doctor found, and its memory plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.sglang_plugin.memory import Plan
from ddtree.sglang_plugin.settings import Settings

__all__ = ["Diagnosis", "Finding", "table"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. state: ok, warning or wrong."""

    check: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, and where a launch command was given and its models are here, the memory plan."""

    findings: tuple[Finding, ...]
    settings: Settings | None = None
    plan: Plan | None = None

    @property
    def healthy(self) -> bool:
        return all(finding.state != "wrong" for finding in self.findings)


def table(plan: Plan) -> Sequence[tuple[str, int]]:
    """The plan's parts with their bytes, for printing."""
    return (
        ("target weights", plan.weights),
        ("drafter weights", plan.drafter),
        ("tables of the drafter's edge correction", plan.edges),
        ("KV pool, target and drafter", plan.kv),
        ("logits of all rows", plan.logits),
        ("index tables of captured graphs", plan.graph_indices),
        ("tree masks", plan.masks),
        ("candidates that edges rescore", plan.pairs),
        ("activations and libraries", plan.activations),
    )
