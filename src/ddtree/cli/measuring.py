"""What `eval` and `compare` share: reading tasks and budgets, opening models, and measuring them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.cli.common import cache_dir, fetching, notes

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM
    from ddtree.engine.request import Completion
    from ddtree.evaluation.arms import Arm
    from ddtree.evaluation.bench import Plan, Report
    from ddtree.evaluation.online import Ask
    from ddtree.evaluation.tasks import Task
    from ddtree.models.hub import LocalModel
    from ddtree.speculation.params import SamplingParams

__all__ = ["measured_offline", "measured_online", "read_budgets", "read_tasks"]

FEWEST = 32  # prompts of a set below which its mean says little


def measured_offline(
    model: str,
    drafters: Sequence[str | None],
    dtype: str,
    device: str,
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    report: Report,
) -> list[dict[str, Any]]:
    import torch

    from ddtree.engine.config import check_device
    from ddtree.engine.hardware import resolve_dtype
    from ddtree.evaluation.bench import offline_documents
    from ddtree.models.load import load_drafter, load_target
    from ddtree.models.tokenizer import ChatTokenizer

    where = torch.device(check_device(device, torch.cuda.device_count()))
    local = _located(model)
    folders = _named(drafters, local)
    target = load_target(local.folder, resolve_dtype(dtype, where), where)
    loaded = {name: load_drafter(folder, target) for name, folder in folders.items()}
    tokenizer = ChatTokenizer(local.folder)
    return [
        document
        for plan in plans
        for document in offline_documents(local.name, target, loaded, tokenizer, tasks, plan, report)
    ]


def measured_online(
    model: str,
    drafters: Sequence[str | None],
    dtype: str,
    device: str,
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    report: Report,
) -> list[dict[str, Any]]:
    from ddtree.evaluation.bench import online_document
    from ddtree.models.tokenizer import ChatTokenizer

    local = _located(model)
    tokenizer = ChatTokenizer(local.folder)
    documents = []
    for name, folder in _named(drafters, local).items():
        for plan in plans:
            engine = RealEngine(model, str(folder), dtype, device, plan.coupling)
            documents.append(online_document(local.name, name, engine, tokenizer, tasks, plan, report))
    return documents


def _located(model: str) -> LocalModel:
    from ddtree.models.hub import locate

    with fetching(model) as progress:
        return locate(model, cache_dir=cache_dir(), progress=progress)


def _named(drafters: Sequence[str | None], local: LocalModel) -> dict[str, Path]:
    """The folder of each drafter by its name: of its folder, or its own on the hub, where folders are hashes."""
    from ddtree.evaluation.bench import unique_names
    from ddtree.models.shipped import drafter_folder

    folders = [drafter_folder(one, local) for one in drafters]
    named = [
        Path(one) if one is not None and not Path(one).exists() else folder
        for one, folder in zip(drafters, folders, strict=True)
    ]
    return dict(zip(unique_names(named), folders, strict=True))


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


def read_tasks(names: Sequence[str], limit: int, skip_broken: bool) -> list[Task]:
    from ddtree.errors import ConfigError
    from ddtree.evaluation.tasks import load_task

    found: dict[str, Task] = {}
    for name in names:
        task = load_task(name, limit, skip_broken)
        if task.name in found:
            raise ConfigError(f"two tasks are called {task.name}: name each once, or rename a file")
        found[task.name] = task
        told = {
            f"{task.broken} broken lines left out": task.broken,
            f"{task.repeated} prompts that repeat others left out": task.repeated,
            f"{len(task.prompts)} prompts; fewer than {FEWEST} say little about others": len(task.prompts)
            < FEWEST,
        }
        for line, applies in told.items():
            if applies:
                notes.print(f"{task.name}: {line}", markup=False)
    return list(found.values())


def read_budgets(text: str | None, online: bool) -> tuple[int, ...]:
    """Budgets with commas between; by default the usual ones, as far as they can be measured."""
    from ddtree.errors import ConfigError
    from ddtree.evaluation.arms import BUDGETS, LARGEST_MEASURED, check_budgets
    from ddtree.speculation.plan import LARGEST_BUDGET

    bound, why = LARGEST_MEASURED, "larger trees accept hardly more"
    if online:
        bound, why = LARGEST_BUDGET, "what the engine verifies in one round; --offline measures larger ones"
    if text is None:
        return tuple(budget for budget in BUDGETS if budget <= bound)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.removeprefix("-").isdecimal()]
    if wrong:
        raise ConfigError(f"--budget must be whole numbers with commas between, as in 16,64: got {wrong[0]!r}")
    return check_budgets([int(part) for part in parts], bound, why)
