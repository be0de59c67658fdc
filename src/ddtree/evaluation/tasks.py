"""Prompt sets by name, and any JSONL file.

Ten coding prompts of the project's own come in the package. GSM8K, HumanEval and MT-bench lie in a checkout's
`benchmarks/prompts`; what is not there is fetched through the `datasets` library. A prompt that repeats another is
left out: repeated text would count twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddtree.data.hub_prompts import fetch_rows
from ddtree.data.prompts import Prompt, read_prompts
from ddtree.errors import ConfigError

__all__ = ["KNOWN_TASKS", "Task", "load_task"]

Row = Mapping[str, Any]
PACKAGED = Path(__file__).resolve().parent / "prompts"
CHECKOUT = Path(__file__).resolve().parents[3] / "benchmarks" / "prompts"


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to measure on. broken: lines of the file that were left out. repeated: prompts that were."""

    name: str
    prompts: tuple[Prompt, ...]
    broken: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Where a known set comes from: a file of the project's, or rows of a data set. first: rows taken, 0: all."""

    file: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str = "test"
    text: Callable[[Row], str] = lambda row: str(row["prompt"])
    licence: str = "unknown"
    first: int = 0


def _alpaca(row: Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else str(row["instruction"])


KNOWN_TASKS: Mapping[str, TaskSource] = MappingProxyType(
    {
        "coding": TaskSource(file="coding.jsonl"),
        "humaneval": TaskSource("humaneval.jsonl", "openai/openai_humaneval", licence="MIT"),
        "gsm8k": TaskSource(
            "gsm8k_test.jsonl",
            "openai/gsm8k",
            "main",
            text=lambda row: str(row["question"]),
            licence="MIT",
            first=256,
        ),
        "mt-bench": TaskSource(
            "mt_bench.jsonl",
            "HuggingFaceH4/mt_bench_prompts",
            split="train",
            text=lambda row: str(row["prompt"][0]),
            licence="Apache-2.0",
        ),
        "mbpp": TaskSource(None, "google-research-datasets/mbpp", "sanitized", licence="CC-BY-4.0"),
        "math-500": TaskSource(
            None, "HuggingFaceH4/MATH-500", text=lambda row: str(row["problem"]), licence="MIT"
        ),
        "alpaca": TaskSource(
            None, "tatsu-lab/alpaca", split="train", text=_alpaca, licence="CC-BY-NC-4.0", first=256
        ),
    }
)


def load_task(name: str, limit: int = 0, skip_broken: bool = False) -> Task:
    """The task of a known name or a JSONL file; its first `limit` prompts, or all for 0.

    ConfigError for a name that is neither, DataError for a broken file, DownloadError when a set is out of reach.
    """
    path = Path(name)
    if path.suffix == ".jsonl" or path.is_file():
        prompts, broken = read_prompts(path, skip_broken)
        return _task(path.stem, prompts, broken, limit)
    found = {_plain(known): known for known in KNOWN_TASKS}.get(_plain(name))
    if found is None:
        raise ConfigError(
            f"unknown task {name!r}: pass one of {', '.join(KNOWN_TASKS)}, or a FILE.jsonl with a `prompt` "
            "on each line"
        )
    source = KNOWN_TASKS[found]
    for folder in (PACKAGED, CHECKOUT):
        if source.file is not None and (folder / source.file).is_file():
            return _task(found, read_prompts(folder / source.file)[0], 0, limit)
    return _task(found, _fetch(source), 0, limit)


def _task(name: str, prompts: Sequence[Prompt], broken: int, limit: int) -> Task:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    once = tuple(first.values())
    return Task(name, once[:limit] if limit else once, broken, len(prompts) - len(once))


def _fetch(source: TaskSource) -> list[Prompt]:
    hub = str(source.hub)
    rows = fetch_rows(hub, source.config, source.split)
    count = min(len(rows), source.first or len(rows))
    return [Prompt((("user", source.text(rows[i])),), hub, source.licence) for i in range(count)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
