"""What the tests without an engine share: SGLang with the plugin loaded, and stand-ins for what it hands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.plugins import load_plugins

from ddtree.sglang_plugin.flags import server_args
from ddtree.sglang_plugin.settings import Flags

load_plugins()

from sglang.srt.runtime_context import get_spec  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import spec_info  # noqa: E402

DDTREE = spec_info.SpeculativeAlgorithm.from_string("ddtree")
DFLASH = spec_info.SpeculativeAlgorithm.DFLASH
NONE = spec_info.SpeculativeAlgorithm.NONE

__all__ = ["DDTREE", "DFLASH", "NONE", "Launch", "ServerArgs", "published"]


class Launch:
    """A stand-in for what SGLang hands to `handle_server_args`: reads fall through, writes are kept."""

    def __init__(self, toys: dict[str, Path], flags: Flags, **fields: Any) -> None:
        drafter = fields.pop("drafter", toys["drafter"])
        self._args = server_args(
            flags,
            model_path=str(toys["target"]),
            speculative_draft_model_path=None if drafter is None else str(drafter),
            device=fields.pop("device", "cuda"),
            attention_backend=fields.pop("attention_backend", "triton"),
            **fields,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def published(**fields: Any) -> Any:
    """SGLang's process-wide configuration, with some fields of speculation, for the length of a block."""
    return get_spec().override(**fields)
