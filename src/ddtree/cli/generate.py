"""`ddtree generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from ddtree.cli.answer import document, status_line, stream_answer
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
    from ddtree.engine.request import Completion

__all__ = ["generate"]


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
