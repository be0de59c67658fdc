"""`ddtree chat`: a conversation in the terminal."""

from __future__ import annotations

import typer

from ddtree.cli.answer import status_line, stream_answer
from ddtree.cli.common import (
    BLOCK_OPTION,
    BUDGET_OPTION,
    DEVICE_OPTION,
    DRAFTER_OPTION,
    DTYPE_OPTION,
    MODE_OPTION,
    MODEL_OPTION,
    THREADS_OPTION,
    notes,
    open_llm,
    settle_threads,
)

__all__ = ["chat"]

HELP = "an empty line or Ctrl-D ends; Ctrl-C stops an answer; /new starts over; /undo takes back the last turn"


def chat(
    model: str = MODEL_OPTION,
    drafter: str = DRAFTER_OPTION,
    system: str = typer.Option(None, help="System message; the template's own when not given."),
    mode: str = MODE_OPTION,
    budget: int = BUDGET_OPTION,
    block_size: int = BLOCK_OPTION,
    max_tokens: int = typer.Option(512, help="Longest answer."),
    temperature: float = typer.Option(0.0, help="0 takes the best token each time."),
    top_p: float = typer.Option(1.0, help="Keep the best tokens that hold this share of probability."),
    seed: int = typer.Option(None, help="Makes sampled answers repeatable."),
    dtype: str = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    threads: int = THREADS_OPTION,
) -> None:
    """Talk with the model; each answer knows all turns before it."""
    from ddtree.errors import RequestError
    from ddtree.speculation.params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    llm = open_llm(
        model,
        drafter=drafter,
        dtype=dtype,
        device=device,
        mode=mode,
        budget=budget,
        block_size=block_size,
        prefix_cache=True,  # every turn begins with all turns before it
    )
    settle_threads(llm, threads)
    notes.print(f"[dim]{llm.name}: {HELP}[/]")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (said := _ask()) is not None:
        if said == "/new":
            messages = list(opening)
        elif said == "/undo":
            messages = messages[: max(len(messages) - 2, len(opening))]
        else:
            turn = [*messages, {"role": "user", "content": said}]
            try:
                completion = stream_answer(llm, llm.encode(turn), params, llm.engine.plan)
            except RequestError as error:
                notes.print(f"{error}; /new starts over", style="red", markup=False)
                continue
            except KeyboardInterrupt:
                notes.print("[dim]stopped; that turn is not kept[/]")
                continue
            notes.print(status_line(llm.engine.plan, completion))
            messages = [*turn, {"role": "assistant", "content": completion.text}]


def _ask() -> str | None:
    """The next user turn; None at the end of the conversation."""
    try:
        said = notes.input("[bold]you>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        notes.print()
        return None
    return said or None
