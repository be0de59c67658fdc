"""DDTREE on SGLang with a GPU, beside plain decoding and SGLang's own DFLASH: the same prompts, one session.

    python benchmarks/sglang_gpu.py prepare models        # where ddtree and its default model are: writes both
    folders python benchmarks/sglang_gpu.py run --target models/target --drafter models/drafter --out result.json

`run` needs SGLang's CUDA stack and ddtree installed beside it (`pip install --no-deps -e .`). CUDA graphs and
overlap scheduling stay on. Arms: plain, DFLASH, DDTREE with each budget, and plain once more, which shows how far
a figure wanders by itself. For each arm:

- correctness first, greedy: its first divergence from plain on each prompt, and whether rounding explains it: the
gap
  between plain's two best log-probabilities there is at most twice the largest difference between the two arms on
  the tokens that they share. Nothing after a divergence is compared. The control is plain against itself at
  another batch size: an arm may not diverge more often.
- then time: tokens a second and milliseconds a round at each concurrency, and tokens a round. Tokens are those
that
  the server counted.
- then a profile of some rounds: milliseconds of GPU time in each stage (`--profile-steps 0` leaves it out).
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import interval, load_prompts, write_result

SETS = ("gsm8k_test", "mt_bench", "humaneval")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("folder", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("--target", type=Path, required=True)
    run.add_argument("--drafter", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64])
    run.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    run.add_argument("--limit", type=int, default=32, help="prompts of each set")
    run.add_argument("--tokens", type=int, default=256)
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--dtype", default="bfloat16")
    run.add_argument("--profile-steps", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.verb == "prepare":
        write_models(arguments.folder)
    else:
        measure(arguments)


def write_models(folder: Path) -> None:
    """The default target and its shipped drafter, the latter in the layout that other engines read."""
    from ddtree.cli.export import export
    from ddtree.models.catalog import DEFAULT_MODEL
    from ddtree.models.hub import locate

    local = locate(DEFAULT_MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(local.folder, folder / "target")
    export(folder / "drafter", drafter=None, model=DEFAULT_MODEL, storage="bfloat16", as_json=False)
    print(f"{folder / 'target'} and {folder / 'drafter'} are ready to be carried")


def measure(arguments: argparse.Namespace) -> None:
    prompts = render(arguments.target, arguments.limit)
    arms = [Arm("plain"), Arm("DFLASH", "DFLASH")]
    arms += [Arm(f"DDTREE-{budget}", "DDTREE", budget) for budget in arguments.budgets]
    arms.append(Arm("plain again"))
    flat = [prompt for group in prompts.values() for prompt in group]
    results: dict[str, Any] = {}
    reference: list[Answer] = []
    for arm in arms:
        print(f"{arm.name}: starting", flush=True)
        with serving(arm, arguments) as engine:
            together = answers(engine, flat, arguments.tokens, max(arguments.concurrency))
            result: dict[str, Any] = {}
            if arm.name == "plain":
                reference = together
                alone = answers(engine, flat, arguments.tokens, 1)
                result["control"] = compare(reference, alone)
            else:
                result["against_plain"] = compare(reference, together)
            result["speed"] = {
                str(concurrency): {
                    name: timed(engine, group, arguments.tokens, concurrency, arguments.repeats)
                    for name, group in prompts.items()
                }
                for concurrency in arguments.concurrency
            }
            if arm.algorithm == "DDTREE" and arguments.profile_steps:
                result["stages"] = stages(engine, flat[0], arguments)
            if arm.algorithm == "DDTREE":
                result["server"] = engine.get_server_info()["internal_states"][0]["ddtree"]
            results[arm.name] = result
            print(json.dumps(result.get("against_plain", result.get("control"))), flush=True)
    control = results["plain"]["control"]["per_1000"]
    verdicts = {
        name: result["against_plain"]["unexplained"] == 0
        and result["against_plain"]["per_1000"] <= max(control, result["against_plain"]["noise_per_1000"])
        for name, result in results.items()
        if "against_plain" in result
    }
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    write_result(arguments.out, {"options": options, "engine": BASE, "right": verdicts, "arms": results})


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


def compare(reference: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """First divergences, and those that rounding does not explain. noise_per_1000: one divergence more than none,
    the least that this many tokens can tell apart from the control."""
    compared = diverged = unexplained = 0
    largest = 0.0
    gaps = []
    for one, other in zip(reference, others, strict=True):
        shared = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), None)
        end = min(len(one.tokens), len(other.tokens)) if shared is None else shared
        difference = max(
            (abs(a - b) for a, b in zip(one.log_probs[:end], other.log_probs[:end], strict=True)), default=0
        )
        largest = max(largest, difference)
        compared += end + (shared is not None)
        if shared is not None:
            diverged += 1
            gaps.append(one.gaps[shared])
            unexplained += one.gaps[shared] > 2 * max(difference, largest)
    return {
        "tokens": compared,
        "divergences": diverged,
        "per_1000": 1000 * diverged / max(compared, 1),
        "noise_per_1000": 1000 / max(compared, 1),
        "unexplained": unexplained,
        "largest_difference": largest,
        "gaps": sorted(gaps),
    }


def timed(
    engine: Any, prompts: Sequence[list[int]], tokens: int, concurrency: int, repeats: int
) -> dict[str, Any]:
    """Medians over repeats of the whole set, after one that warms up."""
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
        "tokens_per_s": interval(rates, statistics.median) if len(rates) > 1 else {"value": rates[0]},
        "tokens_per_round": statistics.median(c / r for c, r in zip(counts, rounds, strict=True)),
        "ms_per_round": 1000
        * statistics.median(taken * concurrency / r for taken, r in zip(seconds, rounds, strict=True)),
        "completion_tokens": counts,
        "seconds": seconds,
    }


def stages(engine: Any, prompt: list[int], arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of GPU time a round in each of the worker's stages, one request at a time."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["CPU", "GPU"])
        said = generate(engine, [prompt], arguments.profile_steps * 4, 1)
        engine.stop_profile()
        rounds = said[0]["meta_info"]["spec_verify_ct"]
        total: dict[str, float] = defaultdict(float)
        for trace in Path(folder).rglob("*.trace.json.gz"):
            with gzip.open(trace, "rt") as file:
                for event in json.load(file)["traceEvents"]:
                    if event.get("cat") == "gpu_user_annotation" and event["name"].startswith("ddtree."):
                        total[event["name"]] += event["dur"] / 1000
    return {name: spent / rounds for name, spent in sorted(total.items())}


if __name__ == "__main__":
    main()
