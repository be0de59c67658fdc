"""What DDTREE was asked for, and what that becomes for one target and one drafter. Frozen; no tensors, no SGLang.

Invariant: the launcher and every scheduler process resolve the same flags to the same settings. The launcher
leaves its answer in SGLang's own fields (block size and width); resolving once more from those changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from ddtree.errors import ConfigError
from ddtree.speculation.plan import RoundPlan, fixed_plan

__all__ = ["COUPLING_SCALE", "DEFAULT_ROWS", "MODES", "Flags", "Settings", "resolve"]

# The names that SGLang's users know, and the project's own.
MODES = MappingProxyType({"tree": "tree", "chain": "chain", "shadow-linear": "shadow", "off": "off"})
DEFAULT_ROWS = 32  # root and 31 nodes: one tile of rows
COUPLING_SCALE = 1.25


@dataclass(frozen=True, slots=True)
class Flags:
    """The `--speculative-ddtree-*` options as given. budget: nodes besides the root, None when not given."""

    budget: int | None = None
    mode: str = "tree"
    coupled: bool = True
    allow_hybrid_unsafe: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """One plan for every round. coupling: scale of coupled drafting, None without. notices: what the operator must
    know, one sentence each."""

    plan: RoundPlan
    block_size: int
    coupling: float | None
    hybrid: bool
    notices: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Rows that are verified and slots that are reserved for each request: the one effective width."""
        return max(self.plan.width, self.block_size) if self.plan.capabilities.drafts_blocks else 1

    @property
    def mode(self) -> str:
        """The plan's mode in the words of the flags."""
        return next(name for name, own in MODES.items() if own == self.plan.mode)


def resolve(flags: Flags, *, block_size: int, num_draft_tokens: int | None, hybrid: bool) -> Settings:
    """Settings for a drafter's block and a target. ConfigError says what cannot be honoured, why, and the mend.

    num_draft_tokens: SGLang's `--speculative-num-draft-tokens`, the rows that are verified; None when not given.
    hybrid: the target has recurrent layers, which see a tree as a chain.
    """
    if flags.mode not in MODES:
        raise ConfigError(f"--speculative-ddtree-mode must be one of {', '.join(MODES)}: got {flags.mode!r}")
    mode, notices = MODES[flags.mode], []
    branches = mode in ("tree", "shadow")
    if flags.budget is not None and not branches:
        raise ConfigError(
            f"--speculative-ddtree-budget has no meaning in mode {flags.mode}, which verifies no tree; "
            "leave it out, or use --speculative-ddtree-mode tree"
        )
    if hybrid and branches and flags.allow_hybrid_unsafe:
        notices.append(
            "the target has recurrent layers and --speculative-ddtree-allow-hybrid-unsafe is set: siblings leak "
            "into each other there, so answers may differ from plain decoding"
        )
    elif hybrid and branches:
        notices.append(
            "the target has recurrent layers, which see a tree as a chain: mode chain runs instead of "
            f"{flags.mode}"
        )
        mode = "chain"
    budget = flags.budget
    if budget is None and mode in ("tree", "shadow"):
        budget = _default_budget(mode, block_size, num_draft_tokens)
    plan = fixed_plan(mode, block_size, budget or 0)
    settings = Settings(plan, block_size, COUPLING_SCALE if flags.coupled else None, hybrid, tuple(notices))
    if num_draft_tokens is not None and num_draft_tokens != settings.width:
        raise ConfigError(
            f"--speculative-num-draft-tokens {num_draft_tokens} contradicts mode {settings.mode} with blocks of "
            f"{block_size} and a budget of {plan.budget}, whose width is {settings.width}; leave it out"
        )
    return settings


def _default_budget(mode: str, block_size: int, num_draft_tokens: int | None) -> int:
    spine = block_size - 1 if mode == "shadow" else 0
    rows = num_draft_tokens - spine if num_draft_tokens is not None else max(DEFAULT_ROWS, block_size)
    return rows - 1
