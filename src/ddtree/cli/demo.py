"""`ddtree demo`: four questions, answered with plain decoding, a draft chain and a draft tree, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from ddtree.cli.answer import stream_answer
from ddtree.cli.common import (
    BUDGET_OPTION,
    DEVICE_OPTION,
    DRAFTER_OPTION,
    JSON_OPTION,
    MODEL_OPTION,
    THREADS_OPTION,
    counting,
    notes,
    open_llm,
    print_json,
    settle_threads,
    words,
)

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM
    from ddtree.engine.request import Completion
    from ddtree.speculation.plan import RoundPlan

__all__ = ["demo"]

QUESTIONS = (
    "A baker makes 24 muffins in the morning and 18 in the afternoon. She sells 30 of them and packs the rest "
    "into boxes of 4. How many boxes does she fill?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain in simple words why the sky is blue.",
    "List five tips for learning a new language.",
)
MODES = ("off", "chain", "tree")


@dataclass(frozen=True, slots=True)
class Arm:
    """One plan over all questions. identical of compared: tokens equal to plain decoding's in float32."""

    plan: RoundPlan
    tokens: int
    rounds: int
    seconds: float
    identical: int
    compared: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.rounds


def demo(
    model: str = MODEL_OPTION,
    drafter: str = DRAFTER_OPTION,
    budget: int = BUDGET_OPTION,
    max_tokens: int = typer.Option(128, min=2, help="Longest answer."),
    device: str = DEVICE_OPTION,
    threads: int = THREADS_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Answer four questions three ways, show how fast each was and that all say the same, and draw one tree."""

    def opened(dtype: str) -> LLM:
        return open_llm(
            model, drafter=drafter, dtype=dtype, device=device, mode="tree", budget=budget, block_size=None
        )

    llm = opened("auto")
    used = settle_threads(llm, threads)
    dtype = str(llm.engine.target.dtype).removeprefix("torch.")
    notes.print(f"[dim]{llm.name} in {dtype} on {llm.engine.target.device}, {used} threads[/]")
    fast = _answers(llm, max_tokens, silent=as_json)
    exact = _exact_answers(llm if dtype == "float32" else opened("float32"), max_tokens)
    arms = [_arm(llm.plan(mode), fast[mode], exact) for mode in MODES]
    record = _tree_to_show(fast["tree"])
    if as_json:
        print_json(_document(llm, dtype, used, arms, fast))
        return
    words.print(_table(arms, dtype))
    if record is not None:
        from ddtree.cli.show import draw_tree

        words.print("\nOne draft tree; the target committed the marked path in a single pass:\n")
        words.print(draw_tree(record, llm.tokenizer.decode_all))


def _answers(llm: LLM, max_tokens: int, silent: bool) -> dict[str, list[Completion]]:
    """Every question in every mode, streamed, modes taking turns so that a busy machine slows all alike."""
    from ddtree.speculation.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    found: dict[str, list[Completion]] = {mode: [] for mode in MODES}
    with notes.status("warming up"):
        for mode in MODES:
            llm.generate(QUESTIONS[0], SamplingParams(max_tokens=12), plan=llm.plan(mode))
    for question in QUESTIONS:
        ids = llm.encode(question)
        if not silent:
            words.print(f"\n[bold]{question}[/]")
        for mode in MODES:
            plan = llm.plan(mode)
            if not silent:
                words.print(f"[cyan]── {_name(plan)}[/]")
            records = plan.capabilities.verifies_trees
            found[mode].append(stream_answer(llm, ids, params, plan, records=records, silent=silent))
            if not silent:
                notes.print(_speed(found[mode][-1]))
    return found


def _exact_answers(llm: LLM, max_tokens: int) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of every question in every mode in float32, where rounding leaves the choices alone."""
    from ddtree.speculation.params import SamplingParams

    found: dict[str, list[tuple[int, ...]]] = {mode: [] for mode in MODES}
    total = len(QUESTIONS) * len(MODES)
    with counting("checking in float32 that all modes say the same") as show:
        for question in QUESTIONS:
            for mode in MODES:
                show(sum(map(len, found.values())), total)
                answer = llm.generate(question, SamplingParams(max_tokens=max_tokens), plan=llm.plan(mode))
                found[mode].append(answer.token_ids)
    return found


def _arm(plan: RoundPlan, completions: list[Completion], exact: dict[str, list[tuple[int, ...]]]) -> Arm:
    identical = compared = 0
    for mine, plain in zip(exact[plan.mode], exact["off"], strict=True):
        identical += sum(a == b for a, b in zip(mine, plain, strict=False))
        compared += max(len(mine), len(plain))
    return Arm(
        plan=plan,
        tokens=sum(len(c.token_ids) - 1 for c in completions),
        rounds=sum(c.rounds for c in completions),
        seconds=sum(c.timing.decode_s for c in completions),
        identical=identical,
        compared=compared,
    )


def _name(plan: RoundPlan) -> str:
    if not plan.capabilities.drafts_blocks:
        return "plain decode"
    return f"{plan.mode} of {plan.budget} nodes" if plan.capabilities.verifies_trees else plan.mode


def _table(arms: list[Arm], dtype: str) -> Table:
    table = Table(title=f"\n{len(QUESTIONS)} questions, greedy; speed in {dtype}, identity in float32")
    for heading in ("", "tokens/s", "speed-up", "acceptance length", "rounds", "identical tokens (float32)"):
        table.add_column(heading, justify="left" if not heading else "right")
    plain = arms[0].tokens_per_second
    for arm in arms:
        table.add_row(
            _name(arm.plan),
            f"{arm.tokens_per_second:.1f}",
            f"{arm.tokens_per_second / plain:.2f} x",
            f"{arm.acceptance_length:.2f}",
            str(arm.rounds),
            f"{arm.identical} of {arm.compared}",
        )
    return table


def _document(
    llm: LLM, dtype: str, used: int, arms: list[Arm], answers: dict[str, list[Completion]]
) -> dict[str, Any]:
    from ddtree.provenance import provenance

    plain = arms[0].tokens_per_second
    return {
        "model": llm.name,
        "dtype": dtype,
        "device": str(llm.engine.target.device),
        "threads": used,
        "budget": llm.engine.plan.budget,
        "questions": list(QUESTIONS),
        "modes": {
            arm.plan.mode: {
                "tokens_per_second": arm.tokens_per_second,
                "speed_up": arm.tokens_per_second / plain,
                "acceptance_length": arm.acceptance_length,
                "rounds": arm.rounds,
                "tokens": arm.tokens,
                "identical_float32": arm.identical,
                "compared_float32": arm.compared,
                "answers": [completion.text for completion in answers[arm.plan.mode]],
            }
            for arm in arms
        },
        "provenance": provenance(),
    }


def _tree_to_show(completions: list[Completion]) -> Any:
    from ddtree.cli.show import most_branching

    return most_branching([record for completion in completions for record in completion.records])


def _speed(completion: Completion) -> str:
    speed, length = completion.tokens_per_second, completion.acceptance_length
    if speed is None or length is None:
        return ""
    return f"[dim]{speed:.1f} tokens/s, {length:.2f} tokens a round[/]"
