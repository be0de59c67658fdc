"""`ddtree generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from ddtree.cli.common import (
    BLOCK_OPTION,
    BUDGET_OPTION,
    DEVICE_OPTION,
    DRAFTER_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MODE_OPTION,
    MODEL_OPTION,
    THREADS_OPTION,
    notes,
    open_llm,
    print_json,
    settle_threads,
    words,
)

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM
    from ddtree.engine.request import Completion, Piece
    from ddtree.speculation.params import SamplingParams
    from ddtree.speculation.plan import RoundPlan

__all__ = ["document", "generate", "status_line", "stream_answer"]


def generate(
    prompt: str = typer.Argument(..., help="The user's turn; - reads it from standard input."),
    model: str = MODEL_OPTION,
    drafter: str = DRAFTER_OPTION,
    mode: str = MODE_OPTION,
    budget: int = BUDGET_OPTION,
    block_size: int = BLOCK_OPTION,
    max_tokens: int = typer.Option(256, help="Longest answer."),
    temperature: float = typer.Option(0.0, help="0 takes the best token each time."),
    top_k: int = typer.Option(0, help="Keep the k best tokens; 0 keeps all."),
    top_p: float = typer.Option(1.0, help="Keep the best tokens that hold this share of probability."),
    min_p: float = typer.Option(0.0, help="Keep tokens of at least this share of the best one's probability."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1: tokens seen before become less likely."),
    presence_penalty: float = typer.Option(0.0, help="Taken once from each token already said."),
    frequency_penalty: float = typer.Option(0.0, help="Taken for each time that a token was said."),
    stop: list[str] = typer.Option([], help="End the answer before this text; may be repeated."),
    seed: int = typer.Option(None, help="Makes a sampled answer repeatable; drawn when not given."),
    raw: bool = typer.Option(False, help="Send the prompt as it is, without the chat template."),
    dtype: str = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    max_context: int = typer.Option(None, help="Tokens of prompt and answer together."),
    threads: int = THREADS_OPTION,
    show_tree: bool = typer.Option(False, help="Draw one draft tree, the committed path marked."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Answer one prompt, streaming, and say how fast it went."""
    from ddtree.speculation.params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop),
        seed=_drawn_seed(seed, temperature),
        max_tokens=max_tokens,
    )
    llm = open_llm(
        model,
        drafter=drafter,
        dtype=dtype,
        device=device,
        mode=mode,
        budget=budget,
        block_size=block_size,
        max_context=max_context,
    )
    settle_threads(llm, threads)
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = llm.encode(text, raw=raw)
    completion = stream_answer(llm, ids, params, llm.engine.plan, records=show_tree, silent=as_json)
    if as_json:
        print_json(document(llm, llm.engine.plan, params, ids, completion))
        return
    notes.print(status_line(llm.engine.plan, completion))
    if show_tree:
        _show_tree(llm, completion)


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
    from ddtree.engine.llm import Gathering

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
    width = {"tree": f" of {plan.budget}", "shadow": f" of {plan.budget}"}.get(plan.mode, "")
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
    import dataclasses

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


def _show_tree(llm: LLM, completion: Completion) -> None:
    from ddtree.cli.show import draw_tree, most_branching

    record = most_branching(completion.records)
    if record is None:
        notes.print("no round drafted anything, so there is no tree to show")
        return
    words.print(draw_tree(record, llm.tokenizer.decode_all))


def _drawn_seed(seed: int | None, temperature: float) -> int | None:
    """A sampled request without a seed gets one here, so that its JSON says how to repeat it."""
    from ddtree.speculation.noise import fresh_seed

    return fresh_seed() if seed is None and temperature > 0 else seed
