"""Tree speculative decoding over block-diffusion drafters: the same text, several times faster.

from ddtree import LLM, SamplingParams
print(LLM().generate("Why is the sky blue?", SamplingParams(max_tokens=64)).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.engine.config import EngineConfig
    from ddtree.engine.llm import LLM
    from ddtree.engine.request import Completion, Piece, RoundRecord
    from ddtree.errors import DDTreeError
    from ddtree.speculation.params import SamplingParams
    from ddtree.speculation.plan import RoundPlan

__all__ = [
    "LLM",
    "Completion",
    "DDTreeError",
    "EngineConfig",
    "Piece",
    "RoundPlan",
    "RoundRecord",
    "SamplingParams",
]

_HOMES = {
    "LLM": "engine.llm",
    "Completion": "engine.request",
    "DDTreeError": "errors",
    "EngineConfig": "engine.config",
    "Piece": "engine.request",
    "RoundPlan": "speculation.plan",
    "RoundRecord": "engine.request",
    "SamplingParams": "speculation.params",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `import ddtree` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    return getattr(import_module(f"ddtree.{_HOMES[name]}"), name)
