"""What an engine takes: plans that its models can run, and requests that fit them. Needs no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.engine.config import EngineConfig
from ddtree.engine.request import Job
from ddtree.errors import ConfigError, RequestError
from ddtree.speculation.plan import RoundPlan, capped

__all__ = ["Admission"]


@dataclass(frozen=True, slots=True)
class Admission:
    """The bounds of an engine. block_size: the drafter's, 1 without one. device: its type, `cpu` or `cuda`."""

    vocab_size: int
    block_size: int
    max_context: int
    device: str

    def plan_for(self, config: EngineConfig) -> RoundPlan:
        """The plan that a configuration means here. ConfigError when this engine cannot run it."""
        return self.checked(config.plan(self.device, max(self.block_size, 2)))

    def checked(self, plan: RoundPlan) -> RoundPlan:
        """The plan, if this engine can run it; else ConfigError."""
        if plan.capabilities.drafts_blocks and self.block_size == 1:
            raise ConfigError(
                f"mode {plan.mode} needs a drafter, and this engine was made without one; use mode off"
            )
        if plan.block_size > max(self.block_size, 1):
            raise ConfigError(
                f"block size {plan.block_size} exceeds the drafter's {self.block_size}: it was trained for no more"
            )
        return plan

    def capped(self, plan: RoundPlan, mode: str | None, budget: int | None) -> RoundPlan:
        """A plan under a request's caps. RequestError when a cap cannot be one."""
        try:
            return capped(plan, mode, budget)
        except ConfigError as error:
            raise RequestError(str(error)) from error

    def check(self, job: Job) -> None:
        """Raise RequestError when a job cannot be honoured."""
        if not job.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(job.prompt) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(job.prompt)} tokens, but the context holds {self.max_context} for prompt "
                "and answer together; shorten it, or raise max_context where the model allows it"
            )
        outside = [token for token in job.prompt if not 0 <= token < self.vocab_size]
        if outside:
            raise RequestError(f"the prompt holds token {outside[0]}, outside the vocabulary of {self.vocab_size}")
        if job.logprobs is not None and not 0 <= job.logprobs <= self.vocab_size:
            raise RequestError(f"logprobs must lie between 0 and {self.vocab_size}: got {job.logprobs}")
        job.params.check_vocabulary(self.vocab_size)
