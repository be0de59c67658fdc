"""Where SGLang asks by name, or knows one width where DDTREE has two: the answers, around SGLang's own functions.

Every hook leaves other algorithms exactly as they are.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from ddtree.sglang_plugin.algorithm import NAME, DDTreeAlgorithm

__all__ = [
    "add_speculative_state",
    "dummy_verify_input",
    "need_hidden_states",
    "validate_request",
    "verify_mask_policy",
]


def need_hidden_states(original: Any) -> bool:
    """Whether rounds hand hidden states on through the scheduler: DDTREE's, like DFLASH's, do not."""
    return False if get_spec().speculative_algorithm == NAME else bool(original())


def dummy_verify_input(
    original: Any, spec_algorithm: Any, custom_mask: Any, num_tokens_per_req: int, is_draft_worker: bool
) -> Any:
    """The input of warm-up passes: as wide as what runs, with a mask where trees will be verified."""
    made = original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    if isinstance(spec_algorithm, DDTreeAlgorithm):
        made.draft_token_num = made.num_tokens_per_req = made.num_tokens_for_logprob_per_req = num_tokens_per_req
        if not is_draft_worker and spec_algorithm.verifies_trees:
            made.custom_mask = custom_mask
    return made


def verify_mask_policy(original: Any, attn_backend: Any) -> tuple[str, bool]:
    """Whether CUDA graphs of the verification are captured with a mask. A graph that was captured without one
    would run a tree as a chain, and say nothing."""
    name, builds = original(attn_backend)
    return name, builds or _verifies_trees()


def validate_request(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """What a request may not ask for, or None. Refused by name, because it would be answered wrong in silence."""
    message = original(req, enable_overlap)
    if message is not None or get_spec().speculative_algorithm != NAME:
        return message if message is None else str(message)
    params = req.sampling_params
    refused = (
        (params.repetition_penalty != 1.0, "repetition_penalty"),
        (params.frequency_penalty != 0.0, "frequency_penalty"),
        (params.presence_penalty != 0.0, "presence_penalty"),
        (params.min_new_tokens > 0, "min_new_tokens"),
        (req.custom_logit_processor is not None, "custom_logit_processor"),
        (req.return_hidden_states, "return_hidden_states"),
        (req.return_sampling_mask, "return_sampling_mask"),
    )
    named = [name for unwanted, name in refused if unwanted]
    if not named:
        return None
    return (
        f"DDTREE does not support {', '.join(named)}: SGLang evaluates that for committed text alone, not along "
        "the "
        "paths of a round; leave it out, or ask a server that decodes plainly"
    )


def add_speculative_state(original: Any, controller: Any, state: dict[str, Any]) -> None:
    """`/server_info` says what DDTREE runs, why, and how much is accepted."""
    original(controller, state)
    worker = controller.scheduler.draft_worker
    if isinstance(controller.scheduler.spec_algorithm, DDTreeAlgorithm) and worker is not None:
        state["ddtree"] = worker.describe()


def _verifies_trees() -> bool:
    """Whether this process runs DDTREE in a mode whose rows may branch."""
    if get_spec().speculative_algorithm != NAME:
        return False
    algorithm = SpeculativeAlgorithm.from_string(NAME)
    assert isinstance(algorithm, DDTreeAlgorithm)
    return algorithm.verifies_trees
