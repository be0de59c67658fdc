"""DDTREE as SGLang's scheduler sees it: one class that answers every question the built-in algorithms answer.

Invariant: it answers as DFLASH does wherever a question is about DFLASH's infrastructure (hidden-state capture,
the drafter's model and pools, overlap), because that infrastructure serves it. A question that is new in SGLang is
found at registration (`contract.unanswered`), not in the middle of a request."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree.errors import UnsupportedError
from ddtree.sglang_plugin.host import HOOKED
from ddtree.sglang_plugin.launch import settle
from ddtree.sglang_plugin.settings import Settings

__all__ = ["NAME", "DDTreeAlgorithm", "require_hooks", "worker_class"]

NAME = "DDTREE"
DFLASH = SpeculativeAlgorithm.DFLASH


class DDTreeAlgorithm(CustomSpecAlgo):
    """What DDTREE answers. Methods that are not here answer the same for every plugin.

    settings: what this scheduler process runs, from the moment its worker has been made.
    """

    settings: Settings | None = None

    @property
    def verifies_trees(self) -> bool:
        """Whether the target's passes need a tree mask, captured graphs included."""
        return self.settings is not None and self.settings.plan.capabilities.verifies_trees

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return DFLASH.supports_target_verify_for_draft()

    def supports_prefill_shared_read_done(self) -> bool:
        return DFLASH.supports_prefill_shared_read_done()

    def supports_mixed_chunk(self) -> bool:
        return DFLASH.supports_mixed_chunk()

    def supports_ragged_verify(self) -> bool:
        return DFLASH.supports_ragged_verify()

    def supports_grammar_overlap(self) -> bool:
        return DFLASH.supports_grammar_overlap()

    def has_draft_kv(self) -> bool:
        return DFLASH.has_draft_kv()

    def carries_draft_hidden_states(self) -> bool:
        return DFLASH.carries_draft_hidden_states()

    def need_topk(self) -> bool:
        return DFLASH.need_topk()

    def get_platform_worker_cls(self) -> type | None:
        """No platform brings a worker of its own for a plugin's algorithm."""
        return None

    def create_future_map(self, *arguments: Any, **keywords: Any) -> Any:
        """The enum's own code: it asks only what this class answers."""
        return SpeculativeAlgorithm.create_future_map(self, *arguments, **keywords)

    def handle_server_args(self, server_args: Any) -> None:
        require_hooks()
        settle(server_args)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """The drafter runs blocks, the target runs trees: their graphs have different widths."""
        return int(get_spec().speculative_dflash_block_size) if is_draft_worker else num_draft_tokens


def require_hooks() -> None:
    """UnsupportedError when a hook is not in place: SGLang only logs that, and would go on without it."""
    missing = [target for target in HOOKED if target not in HookRegistry._patched]
    if missing:
        raise UnsupportedError(
            f"SGLang did not apply ddtree's hooks to {', '.join(missing)}, and DDTREE would be wrong without "
            "them; SGLang's log says why"
        )


def worker_class(server_args: Any) -> type:
    """What SGLang asks for once, in each scheduler process. The worker's imports are heavy, so they wait for
    it."""
    del server_args
    require_hooks()
    from ddtree.sglang_plugin.worker import DDTreeWorker

    return DDTreeWorker
