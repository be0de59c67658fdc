"""`ddtree eval`: how far drafts are accepted, on which text, at which budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ddtree.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MODEL_OPTION,
    cache_dir,
    fetching,
    notes,
    print_json,
    stages,
)

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM
    from ddtree.engine.request import Completion
    from ddtree.evaluation.arms import Arm
    from ddtree.evaluation.bench import Plan, Report
    from ddtree.evaluation.online import Ask
    from ddtree.evaluation.tasks import Task
    from ddtree.speculation.params import SamplingParams

__all__ = ["evaluate"]

FEWEST = 32  # prompts of a set below which its mean says little


def evaluate(
    more_tasks: list[str] = typer.Argument(None, help="More tasks.", metavar="[TASK]..."),
    task: list[str] = typer.Option(
        [], help="A known set, or a FILE.jsonl with a `prompt` on each line; repeatable."
    ),
    budget: str = typer.Option("4,8,16,32,64,128,256", help="Nodes of the trees, root not counted."),
    max_tokens: int = typer.Option(256, min=2, help="Longest answer."),
    limit: int = typer.Option(0, min=0, help="Take only the first prompts of each task; 0 takes all."),
    drafter: list[str] = typer.Option([], help="Folder or hub id; repeatable; else the shipped one."),
    model: str = MODEL_OPTION,
    temperature: list[float] = typer.Option([0.0], min=0.0, help="0 is greedy; repeatable."),
    seed: int = typer.Option(0, min=0, help="Of sampled answers."),
    coupling: float = typer.Option(1.25, min=0.1, max=100, help="Scale of coupled drafts when sampling."),
    online: bool = typer.Option(False, "--online/--offline", help="Run the engine itself, not known answers."),
    shadow: bool = typer.Option(True, help="Also what each tree would have accepted where the chain stands."),
    batch: int = typer.Option(0, min=0, help="Answers decoded together; 0 chooses by the device."),
    answers: Path = typer.Option(None, help="Folder where answers are kept; the cache's own when not given."),
    skip_broken: bool = typer.Option(False, help="Leave broken lines of a file out and count them."),
    dtype: str = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure drafters: tokens per round of the chain and of trees, by task, draft position and context."""
    from ddtree.evaluation.arms import LARGEST_MEASURED, check_budgets
    from ddtree.evaluation.bench import Plan
    from ddtree.models.hub import user_cache
    from ddtree.speculation.plan import LARGEST_BUDGET

    bound, why = LARGEST_MEASURED, "larger trees accept hardly more"
    if online:
        bound, why = LARGEST_BUDGET, "what the engine verifies in one round; --offline measures larger ones"
    budgets = check_budgets(_numbers(budget), bound, why)
    tasks = _tasks([*task, *(more_tasks or [])] or ["coding"], limit, skip_broken)
    folder = answers or (cache_dir() or user_cache()) / "answers"
    plans = [
        Plan(budgets, max_tokens, heat, seed, coupling, shadow, batch, folder)
        for heat in dict.fromkeys(temperature)
    ]
    measure = _online if online else _offline
    with stages() as report:
        documents = measure(model, drafter, dtype, device, tasks, plans, report)
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})


def _offline(
    model: str,
    drafters: Sequence[str],
    dtype: str,
    device: str,
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    report: Report,
) -> list[dict[str, Any]]:
    import torch

    from ddtree.engine.config import check_device
    from ddtree.engine.hardware import resolve_dtype
    from ddtree.evaluation.bench import offline_documents, unique_names
    from ddtree.models.hub import locate
    from ddtree.models.load import load_drafter, load_target
    from ddtree.models.shipped import drafter_folder
    from ddtree.models.tokenizer import ChatTokenizer

    where = torch.device(check_device(device, torch.cuda.device_count()))
    with fetching(model) as progress:
        local = locate(model, cache_dir=cache_dir(), progress=progress)
    folders = [drafter_folder(one, local) for one in drafters] or [drafter_folder(None, local)]
    target = load_target(local.folder, resolve_dtype(dtype, where), where)
    loaded = {
        name: load_drafter(folder, target) for name, folder in zip(unique_names(folders), folders, strict=True)
    }
    tokenizer = ChatTokenizer(local.folder)
    return [
        document
        for plan in plans
        for document in offline_documents(local.name, target, loaded, tokenizer, tasks, plan, report)
    ]


def _online(
    model: str,
    drafters: Sequence[str],
    dtype: str,
    device: str,
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    report: Report,
) -> list[dict[str, Any]]:
    from ddtree.evaluation.bench import online_document, unique_names
    from ddtree.models.hub import locate
    from ddtree.models.shipped import drafter_folder
    from ddtree.models.tokenizer import ChatTokenizer

    with fetching(model) as progress:
        local = locate(model, cache_dir=cache_dir(), progress=progress)
    folders = [drafter_folder(one, local) for one in drafters] or [drafter_folder(None, local)]
    tokenizer = ChatTokenizer(local.folder)
    documents = []
    for name, folder in zip(unique_names(folders), folders, strict=True):
        for plan in plans:
            engine = RealEngine(model, str(folder), dtype, device, plan.coupling)
            documents.append(online_document(local.name, name, engine, tokenizer, tasks, plan, report))
    return documents


class RealEngine:
    """The engine as measuring wants it: one that drafts with the target's noise, and one that does not."""

    def __init__(self, model: str, drafter: str, dtype: str, device: str, coupling: float) -> None:
        self._open = (model, drafter, dtype, device)
        self._coupling = coupling
        self._coupled = True
        self._llm = self._load(True)

    @property
    def positions(self) -> int:
        return self._llm.engine.max_context

    @property
    def block_size(self) -> int:
        return self._llm.engine.block_size

    @property
    def dtype(self) -> str:
        return str(self._llm.engine.target.dtype)

    @property
    def device(self) -> str:
        return str(self._llm.engine.target.device)

    def asker(self, coupled: bool) -> Ask:
        """Answers from one engine; the other kind is let go first, so that only one takes memory."""
        if coupled != self._coupled:
            del self._llm
            self._llm, self._coupled = self._load(coupled), coupled
        llm = self._llm

        def ask(prompt: Sequence[int], params: SamplingParams, arm: Arm) -> Completion:
            plan = llm.plan(arm.mode, arm.budget or None)
            return llm.generate(prompt, params, plan=plan, records=True)

        return ask

    def _load(self, coupled: bool) -> LLM:
        from ddtree.engine.config import EngineConfig
        from ddtree.engine.llm import LLM

        model, drafter, dtype, device = self._open
        config = EngineConfig(coupling=self._coupling if coupled else None)
        return LLM(model, drafter=drafter, dtype=dtype, device=device, config=config, cache_dir=cache_dir())


def _tasks(names: Sequence[str], limit: int, skip_broken: bool) -> list[Task]:
    from ddtree.errors import ConfigError
    from ddtree.evaluation.tasks import load_task

    found: dict[str, Task] = {}
    for name in names:
        task = load_task(name, limit, skip_broken)
        if task.name in found:
            raise ConfigError(f"two tasks are called {task.name}: name each once, or rename a file")
        found[task.name] = task
        if task.broken:
            notes.print(f"{task.name}: {task.broken} broken lines left out")
        if task.repeated:
            notes.print(f"{task.name}: {task.repeated} prompts repeat others and are left out")
        if len(task.prompts) < FEWEST:
            few = len(task.prompts)
            notes.print(f"[dim]{task.name} has {few} prompts; fewer than {FEWEST} say little about others[/]")
    return list(found.values())


def _numbers(text: str) -> list[int]:
    from ddtree.errors import ConfigError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.lstrip("-").isdigit()]
    if wrong:
        raise ConfigError(f"--budget must be whole numbers with commas between, as in 16,64: got {wrong[0]!r}")
    return [int(part) for part in parts]
