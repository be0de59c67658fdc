"""What an engine is asked for, and what that becomes on this machine. Frozen; resolved once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree.errors import ConfigError, UnsupportedError
from ddtree.speculation.plan import RoundPlan, fixed_plan

__all__ = ["DEFAULT_BUDGETS", "DTYPES", "EngineConfig", "check_device", "context_limit"]

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
# Nodes that pay on a device before its budget has been measured there (docs/guides/tuning.md).
DEFAULT_BUDGETS = {"cpu": 16, "cuda": 63}
LARGEST_DEFAULT_CONTEXT = 8192
LARGEST_BATCH, LARGEST_PAGE = 1024, 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine.

    mode: off, chain, tree or shadow. budget: nodes of a tree, root not counted; None: the device's default.
    block_size: anchor and masks of a draft block; None: the drafter's own. max_context: prompt and answer
    together, in tokens; None: what target and drafter can, at most 8192. coupling: scale of coupled drafting when
    sampling, None turns it off. prefill_chunk: prompt tokens in one pass. max_sequences: decoded at once; more
    wait. page_size: places in a page of the caches. pages: how many there are; None: a whole context for every
    sequence. prefix_cache: whether texts that begin alike share pages; None: where there is more than one
    sequence, because alone, in short floats, the same request would round differently the second time.
    memory_gib: for pages and passes, weights not counted; None: most of what is free.
    """

    mode: str = "tree"
    budget: int | None = None
    block_size: int | None = None
    max_context: int | None = None
    coupling: float | None = 1.25
    prefill_chunk: int = 512
    max_sequences: int = 1
    page_size: int = 16
    pages: int | None = None
    prefix_cache: bool | None = None
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        self.plan("cpu", 16)
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(f"max_context must be at least 2 tokens: got {self.max_context}")
        if self.coupling is not None and not 0.1 <= self.coupling <= 100:
            raise ConfigError(f"coupling must lie between 0.1 and 100, or be None: got {self.coupling}")
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1 token: got {self.prefill_chunk}")
        if not 1 <= self.max_sequences <= LARGEST_BATCH:
            raise ConfigError(f"max_sequences must lie between 1 and {LARGEST_BATCH}: got {self.max_sequences}")
        if not 1 <= self.page_size <= LARGEST_PAGE:
            raise ConfigError(f"page_size must lie between 1 and {LARGEST_PAGE} places: got {self.page_size}")
        if self.pages is not None and self.pages < 1:
            raise ConfigError(f"pages must be at least 1: got {self.pages}")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ConfigError(f"memory_gib must be above 0: got {self.memory_gib}")

    @property
    def shares_prefixes(self) -> bool:
        """Whether texts that begin alike share pages."""
        return self.max_sequences > 1 if self.prefix_cache is None else self.prefix_cache

    def plan(self, device_type: str, drafter_block_size: int) -> RoundPlan:
        """The plan of every round. ConfigError when a block is longer than the drafter's own."""
        budget = DEFAULT_BUDGETS[device_type] if self.budget is None else self.budget
        return fixed_plan(self.mode, drafter_block_size if self.block_size is None else self.block_size, budget)


def context_limit(asked: int | None, limits: dict[str, int]) -> int:
    """Tokens of context: what was asked for, if every model can, else the default. limits: model -> positions."""
    if asked is None:
        return min(*limits.values(), LARGEST_DEFAULT_CONTEXT)
    for name, positions in limits.items():
        if asked > positions:
            raise ConfigError(
                f"max_context {asked} exceeds the {positions} positions of the {name}; "
                "ask for less, or decode without it"
            )
    return asked


def check_device(name: str, gpus: int) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N`; auto is the GPU where there is one. gpus: how many torch sees."""
    if name == "auto":
        return "cuda" if gpus else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UnsupportedError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if name == "cpu":
        return name
    if not gpus:
        raise ConfigError(f"device {name} was asked for, but torch sees no GPU here; use --device cpu")
    if ":" in name and int(name.split(":")[1]) >= gpus:
        raise ConfigError(f"device {name} was asked for, but torch sees GPUs 0 to {gpus - 1}; use one of those")
    return name
