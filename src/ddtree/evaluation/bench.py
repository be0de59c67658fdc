"""From tasks to documents: renders prompts, gets answers, measures, and writes down what was measured how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ddtree.errors import ConfigError, DataError
from ddtree.evaluation.answers import AnswerRequest, estimate_mib, make_answers
from ddtree.evaluation.arms import Arm, Round, arms_of
from ddtree.evaluation.offline import Measured, measure_offline
from ddtree.evaluation.online import Ask, measure_online
from ddtree.evaluation.result import TaskFacts, task_document
from ddtree.evaluation.tasks import Task
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.provenance import provenance, text_hash

__all__ = ["Plan", "Report", "Tokenizer", "offline_documents", "online_document", "unique_names"]

BATCH = {"cpu": 16, "cuda": 256}
# (what is being done, items done, of all)
Report = Callable[[str, int, int], None]


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def can_chat(self) -> bool: ...
    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode_all(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How one pass measures. coupling: scale of coupled drafts. shadow: whether shadow arms are measured too.
    batch: answers decoded together, 0 for the device's. answers: the folder where they are kept."""

    budgets: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    coupling: float
    shadow: bool
    batch: int
    answers: Path

    def arms(self) -> tuple[Arm, ...]:
        """What is measured."""
        return arms_of(self.budgets, self.temperature > 0, self.shadow)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A task's prompts as token ids, those left out that are too long."""

    request: AnswerRequest
    left_out: dict[str, int]
    prompt_hash: str


def offline_documents(
    name: str,
    target: TargetModel,
    drafters: Mapping[str, LoadedDrafter],
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    plan: Plan,
    report: Report,
) -> list[dict[str, Any]]:
    """A document for each drafter, from known answers. name: of the target."""
    specs = [target.spec.decoder, *(drafter.model.spec.decoder for drafter in drafters.values())]
    positions = min(spec.max_positions for spec in specs)
    found: dict[str, dict[str, Any]] = {drafter: {} for drafter in drafters}
    for task in tasks:
        rendered = _render(task, tokenizer, plan, positions)
        request = rendered.request
        kept = f"kept in {plan.answers.name}, at most {estimate_mib(request):.1f} MiB"
        answers = make_answers(
            target,
            request,
            plan.answers,
            plan.batch or BATCH[target.device.type],
            partial(report, f"{task.name}: answers ({kept})"),
        )
        measured = measure_offline(
            target,
            drafters,
            answers,
            request,
            plan.arms(),
            plan.coupling,
            partial(report, f"{task.name}: drafts"),
        )
        tokens = sum(len(answer.tokens) for answer in answers)
        facts = TaskFacts(len(answers), rendered.left_out, tokens, rendered.prompt_hash)
        for drafter, figures in measured.items():
            found[drafter][task.name] = task_document(facts, figures, plan.temperature > 0)
    dtype, device = str(target.dtype), str(target.device)
    return [
        _document(name, drafter, drafters[drafter].model.spec.block_size, dtype, device, "offline", plan, tasks)
        for drafter, tasks in found.items()
    ]


def online_document(
    name: str,
    drafter: str,
    engine: OnlineEngine,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    plan: Plan,
    report: Report,
) -> dict[str, Any]:
    """The document of one drafter, from the engine itself."""
    found: dict[str, Any] = {}
    for task in tasks:
        rendered = _render(task, tokenizer, plan, engine.positions)
        rounds: dict[str, list[tuple[Round, ...]]] = {}
        told: list[set[tuple[int, ...]]] = [set() for _ in rendered.request.prompts]
        for coupled in dict.fromkeys(arm.coupled for arm in plan.arms()):
            arms = [arm for arm in plan.arms() if arm.coupled == coupled]
            words = f"{task.name}: engine" + ("" if coupled else ", uncoupled")
            some, answers = measure_online(
                engine.asker(coupled),
                rendered.request,
                arms,
                engine.block_size,
                partial(report, words),
            )
            rounds |= some
            told = [mine | more for mine, more in zip(told, answers, strict=True)]
        facts = TaskFacts(
            len(told),
            rendered.left_out,
            sum(len(min(answers)) for answers in told),
            rendered.prompt_hash,
            sum(len(answers) > 1 for answers in told),
        )
        found[task.name] = task_document(facts, Measured(rounds, {}), plan.temperature > 0)
    return _document(name, drafter, engine.block_size, engine.dtype, engine.device, "online", plan, found)


class OnlineEngine(Protocol):
    """An engine as measuring sees it."""

    @property
    def positions(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def asker(self, coupled: bool) -> Ask:
        """Answers with drafts that know the target's noise, or with drafts that do not."""
        ...


def unique_names(folders: Sequence[Path]) -> list[str]:
    """A short name for each drafter's folder: its own, with its parent's where two are the same."""
    short = [folder.name for folder in folders]
    names = [
        name if short.count(name) == 1 else f"{folder.parent.name}/{name}"
        for name, folder in zip(short, folders, strict=True)
    ]
    if len(set(names)) < len(names):
        raise ConfigError("two drafters have the same name; name each folder once, or rename one of them")
    return names


def _render(task: Task, tokenizer: Tokenizer, plan: Plan, positions: int) -> _Rendered:
    rendered = [
        tokenizer.chat_ids(prompt.as_chat()) if tokenizer.can_chat else tokenizer.encode(prompt.text)
        for prompt in task.prompts
    ]
    kept = tuple(tuple(ids) for ids in rendered if len(ids) + plan.max_tokens <= positions)
    if not kept:
        raise DataError(
            f"task {task.name}: no prompt leaves room for {plan.max_tokens} new tokens within {positions} "
            "positions; ask for fewer with --max-tokens"
        )
    left_out = {
        "broken lines": task.broken,
        "repeated": task.repeated,
        "too long": len(rendered) - len(kept),
    }
    return _Rendered(
        AnswerRequest(kept, plan.max_tokens, plan.temperature, plan.seed),
        {reason: count for reason, count in left_out.items() if count},
        text_hash(tokenizer.decode_all(ids) for ids in kept),
    )


def _document(
    model: str,
    drafter: str,
    block_size: int,
    dtype: str,
    device: str,
    method: str,
    plan: Plan,
    tasks: Mapping[str, Any],
) -> dict[str, Any]:
    sampled = plan.temperature > 0
    return {
        "model": model,
        "drafter": drafter,
        "method": method,
        "temperature": plan.temperature,
        "seed": plan.seed if sampled else None,
        "coupling": plan.coupling if sampled else None,
        "max_tokens": plan.max_tokens,
        "block_size": block_size,
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "tasks": dict(tasks),
        "provenance": provenance(),
    }
