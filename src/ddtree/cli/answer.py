"""One answer in the terminal: streamed as it comes, summed up in a line, or as a JSON document."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from ddtree.cli.common import notes, words

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM
    from ddtree.engine.request import Completion, Piece
    from ddtree.speculation.params import SamplingParams
    from ddtree.speculation.plan import RoundPlan

__all__ = ["document", "status_line", "stream_answer"]


def stream_answer(
    llm: LLM,
    ids: list[int],
    params: SamplingParams,
    plan: RoundPlan,
    *,
    records: bool = False,
    silent: bool = False,
) -> Completion:
    """Print an answer as it comes and gather it. Interrupted, it says what was measured so far."""
    from ddtree.engine.request import Gathering

    clock = llm.engine.clock
    gathering = Gathering(len(ids), clock())
    try:
        for piece in llm.stream(ids, params, plan=plan, records=records):
            gathering.add(piece, clock())
            if not silent:
                _print_piece(piece)
    except KeyboardInterrupt:
        if not silent:
            words.print()
            notes.print(status_line(plan, gathering.completion()))
        raise
    if not silent:
        words.print()
    return gathering.completion()


def status_line(plan: RoundPlan, completion: Completion) -> str:
    """Mode, tokens, acceptance and speed of an answer, in one line."""
    width = f" of {plan.budget}" if plan.capabilities.verifies_trees else ""
    parts = [f"[bold]{plan.mode}{width}[/]", f"{len(completion.token_ids)} tokens", f"{completion.rounds} rounds"]
    if completion.acceptance_length is not None:
        parts.append(f"acceptance {completion.acceptance_length:.2f}")
    if completion.would_commit is not None and completion.rounds:
        parts.append(f"the tree alone {completion.would_commit / completion.rounds:.2f}")
    if completion.tokens_per_second is not None:
        parts.append(f"{completion.tokens_per_second:.1f} tokens/s")
    return "[dim]" + " · ".join([*parts, f"ended by {completion.finish_reason}"]) + "[/]"


def document(
    llm: LLM, plan: RoundPlan, params: SamplingParams, ids: list[int], completion: Completion
) -> dict[str, Any]:
    """The JSON document of an answer; docs/reference/json.md describes it."""
    from ddtree.provenance import text_hash

    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "acceptance_length": completion.acceptance_length,
        "tokens_per_second": completion.tokens_per_second,
        "prompt_tokens": completion.prompt_tokens,
        "prompt_hash": text_hash([llm.tokenizer.decode_all(ids)]),
        "model": llm.name,
        "mode": plan.mode,
        "budget": plan.budget,
        "block_size": plan.block_size,
        "temperature": params.temperature,
        "seed": params.seed,
        "dtype": str(llm.engine.target.dtype).removeprefix("torch."),
        "device": str(llm.engine.target.device),
        "prefill_s": completion.timing.prefill_s,
        "decode_s": completion.timing.decode_s,
    }
    if completion.would_commit is not None:
        result["would_commit"] = completion.would_commit
    if completion.records:
        result["trees"] = [dataclasses.asdict(record) for record in completion.records]
    return result


def _print_piece(piece: Piece) -> None:
    # Straight to the stream: an answer is text, not markup, and must appear at once.
    sys.stdout.write(piece.text)
    sys.stdout.flush()
