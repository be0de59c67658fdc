"""One arm of sglang_gpu.py, in a process of its own: SGLang ends the process that it dies in."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import interval, load_prompts, write_result

SETS = ("gsm8k_test", "mt_bench", "humaneval")
ASKED = ("target", "drafter", "limit", "tokens", "dtype", "concurrency", "repeats")  # alike in arms that compare
BASE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    "disable_radix_cache": True,
    "log_level": "warning",
    "random_seed": 7,
}


@dataclass(frozen=True)
class Arm:
    """One way to decode. algorithm: None for plain decoding. budget: of DDTREE's trees."""

    name: str
    algorithm: str | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Answer:
    """One greedy answer: tokens, their log-probabilities, and the gap between the two best at each place."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    gaps: tuple[float, ...]


def measure(arm: Arm, arguments: argparse.Namespace, out: Path) -> None:
    """Answers with as many requests together as the largest concurrency, and one by one; speeds; a profile."""
    prompts = render(arguments.target, arguments.limit)
    flat = [prompt for group in prompts.values() for prompt in group]
    with serving(arm, arguments) as engine:
        result: dict[str, Any] = {
            "asked": {name: str(getattr(arguments, name)) for name in ASKED},
            "together": [asdict(a) for a in answers(engine, flat, arguments.tokens, max(arguments.concurrency))],
        }
        if arm.algorithm is None:
            result["alone"] = [asdict(a) for a in answers(engine, flat, arguments.tokens, 1)]
        result["speed"] = {
            str(concurrency): {
                name: timed(engine, group, arguments.tokens, concurrency, arguments.repeats)
                for name, group in prompts.items()
            }
            for concurrency in arguments.concurrency
        }
        if arm.algorithm == "DDTREE":
            result["server"] = engine.get_server_info()["internal_states"][0]["ddtree"]
            if arguments.profile_tokens:
                result["stages"] = stages(engine, flat[0], arguments)
    write_result(out, result)


def render(target: Path, limit: int) -> dict[str, list[list[int]]]:
    """Token ids of the prompts in the target's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)

    def ids(text: str) -> list[int]:
        turns = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    return {name: [ids(text) for text in load_prompts(name, limit)] for name in SETS}


@contextmanager
def serving(arm: Arm, arguments: argparse.Namespace) -> Iterator[Any]:
    import sglang
    from ddtree.sglang_plugin.flags import server_args
    from ddtree.sglang_plugin.settings import Flags

    fields = {**BASE, "model_path": str(arguments.target), "dtype": arguments.dtype}
    if arm.algorithm is not None:
        fields["speculative_draft_model_path"] = str(arguments.drafter)
        fields["speculative_draft_attention_backend"] = BASE["attention_backend"]
    if arm.algorithm == "DDTREE":
        engine = sglang.Engine(server_args=server_args(Flags(budget=arm.budget), **fields))
    else:
        engine = sglang.Engine(**fields, speculative_algorithm=arm.algorithm)
    try:
        yield engine
    finally:
        engine.shutdown()


def generate(
    engine: Any, prompts: Sequence[list[int]], tokens: int, concurrency: int, **options: Any
) -> list[Any]:
    """Greedy answers with so many requests in flight at once, in the order of the prompts."""
    params = {"temperature": 0, "max_new_tokens": tokens}
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Any:
        async with gate:
            return await engine.async_generate(input_ids=prompt, sampling_params=params, **options)

    async def everything() -> list[Any]:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return engine.loop.run_until_complete(everything())


def answers(engine: Any, prompts: Sequence[list[int]], tokens: int, concurrency: int) -> list[Answer]:
    found = []
    for said in generate(engine, prompts, tokens, concurrency, return_logprob=True, top_logprobs_num=2):
        info = said["meta_info"]
        best = [[entry[0] for entry in place] for place in info["output_top_logprobs"]]
        found.append(
            Answer(
                tuple(said["output_ids"]),
                tuple(entry[0] for entry in info["output_token_logprobs"]),
                tuple(two[0] - two[1] for two in best),
            )
        )
    return found


def timed(
    engine: Any, prompts: Sequence[list[int]], tokens: int, concurrency: int, repeats: int
) -> dict[str, Any]:
    """Medians over repeats of the whole set, after its first prompts have warmed up."""
    generate(engine, prompts[:concurrency], tokens, concurrency)
    seconds, counts, rounds = [], [], []
    for _ in range(repeats):
        began = time.perf_counter()
        said = generate(engine, prompts, tokens, concurrency)
        seconds.append(time.perf_counter() - began)
        infos = [answer["meta_info"] for answer in said]
        counts.append(sum(info["completion_tokens"] for info in infos))
        rounds.append(sum(info.get("spec_verify_ct", info["completion_tokens"]) for info in infos))
    rates = [count / taken for count, taken in zip(counts, seconds, strict=True)]
    return {
        "tokens_per_s": interval(rates, statistics.median)
        if len(rates) > 2
        else {"value": statistics.median(rates)},
        "tokens_per_round": statistics.median(c / r for c, r in zip(counts, rounds, strict=True)),
        "ms_per_round": 1000
        * statistics.median(taken * concurrency / r for taken, r in zip(seconds, rounds, strict=True)),
        "completion_tokens": counts,
        "seconds": seconds,
    }


def stages(engine: Any, prompt: list[int], arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a round of each of the worker's stages on the GPU's timeline, one request at a time, under the
    profiler. Gaps in which the GPU waits for launches are inside, and the profiler lengthens them: stages compare
    with each other, not with rounds."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["CPU", "GPU"])
        said = generate(engine, [prompt], arguments.profile_tokens, 1)
        engine.stop_profile()
        rounds = said[0]["meta_info"]["spec_verify_ct"]
        total: dict[str, float] = defaultdict(float)
        for trace in Path(folder).rglob("*.trace.json.gz"):
            with gzip.open(trace, "rt") as file:
                for event in json.load(file)["traceEvents"]:
                    if event.get("cat") == "gpu_user_annotation" and event["name"].startswith("ddtree."):
                        total[event["name"]] += event["dur"] / 1000
    return {name: spent / rounds for name, spent in sorted(total.items())}
