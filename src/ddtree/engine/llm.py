"""`LLM`: a model by name, ready to answer. The Python face of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ddtree.engine.config import EngineConfig, check_device
from ddtree.engine.engine import BatchEngine
from ddtree.engine.hardware import resolve_dtype
from ddtree.engine.request import Completion, Gathering, Piece
from ddtree.engine.service import Service
from ddtree.errors import RequestError
from ddtree.models.catalog import DEFAULT_MODEL
from ddtree.models.hub import Progress, locate
from ddtree.models.load import load_drafter, load_target
from ddtree.models.shipped import drafter_folder
from ddtree.models.tokenizer import ChatTokenizer
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import ALGORITHMS, RoundPlan

__all__ = ["LLM", "Prompt"]

# One user turn, a chat, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


class LLM:
    """A target with its drafter, answering one request at a time, or many at once through `service`.

    model: a known name (`smollm2-135m`), a hub id or a folder. drafter: likewise; None takes the one shipped for
    the model. dtype `auto` is bfloat16 where the hardware has it. The other options are those of `EngineConfig`.

    Raises ConfigError, CheckpointError, UnsupportedError, DownloadError or StorageError.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        drafter: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        config = config or EngineConfig()
        where = torch.device(check_device(device, torch.cuda.device_count()))
        kind = resolve_dtype(dtype, where)
        local = locate(model, cache_dir=cache_dir, progress=progress)
        target = load_target(local.folder, kind, where)
        loaded = None
        self.drafter_name: str | None = None
        if ALGORITHMS[config.mode].drafts_blocks or drafter is not None:
            folder = drafter_folder(drafter, local)
            loaded, self.drafter_name = load_drafter(folder, target), folder.name
        self.name = local.name
        self.tokenizer = ChatTokenizer(local.folder)
        self.engine = BatchEngine(target, loaded, config, self.tokenizer.decode)

    def service(self, *, max_queue: int = 64) -> Service:
        """The engine on a thread of its own, for many requests at once; `max_sequences` of the configuration says
        how many are decoded together. From then on the engine answers through the service alone."""
        return Service(self.engine, max_queue=max_queue)

    def plan(self, mode: str | None = None, budget: int | None = None, block_size: int | None = None) -> RoundPlan:
        """The engine's plan with some of it changed, for one request."""
        asked = {"mode": mode, "budget": budget, "block_size": block_size}
        changes = {key: value for key, value in asked.items() if value is not None}
        return self.engine.admission.plan_for(dataclasses.replace(self.engine.config, **changes))  # type: ignore[arg-type]

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Text is one user turn in the model's chat template, unless raw or without one."""
        if isinstance(prompt, str):
            if raw or not self.tokenizer.can_chat:
                return self.tokenizer.encode(prompt)
            return self.tokenizer.chat_ids([{"role": "user", "content": prompt}])
        tokens = [item for item in prompt if isinstance(item, int) and not isinstance(item, bool)]
        if len(tokens) == len(prompt):
            return tokens
        messages = [item for item in prompt if isinstance(item, Mapping) and {"role", "content"} <= set(item)]
        if len(messages) == len(prompt):
            return self.tokenizer.chat_ids(messages)
        raise RequestError("a prompt is a text, a list of messages with role and content, or a list of token ids")

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        plan: RoundPlan | None = None,
        records: bool = False,
        raw: bool = False,
    ) -> Iterator[Piece]:
        """Answer piece by piece: the first token, then what each round emits. Joined, they are the answer."""
        job = self.engine.fixed_job(self.encode(prompt, raw=raw), params or SamplingParams(), plan, records)
        return self.engine.run(job)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        plan: RoundPlan | None = None,
        records: bool = False,
        raw: bool = False,
    ) -> Completion:
        """Answer at once."""
        ids = self.encode(prompt, raw=raw)
        clock = self.engine.clock
        started = clock()
        gathering = Gathering(len(ids), started)
        for piece in self.stream(ids, params, plan=plan, records=records):
            gathering.add(piece, clock())
        return gathering.completion()
