"""Decoding on a CPU: Hugging Face generate, our plain decode, chain, and trees of several budgets.

    python benchmarks/cpu_decode.py --out benchmarks/results/cpu_decode.json

Arms take turns on every prompt, in an order that rotates, so a machine that slows down slows all of them. Each arm
runs with the number of threads that was fastest for it in a trial just before. Speeds are of tokens after the
first; speed-ups are medians of per-prompt ratios with paired bootstrap intervals. The report also counts, in
float32, the tokens of each arm that equal Hugging Face's greedy decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import interval, load_prompts, median_ratio, sign_test, write_result
from transformers import AutoModelForCausalLM, logging

from ddtree import LLM, EngineConfig, SamplingParams
from ddtree.engine.hardware import thread_counts, threads
from ddtree.models.hub import locate
from ddtree.provenance import text_hash

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Run:
    """One answer: tokens after the first, their seconds, verification rounds, and all token ids."""

    tokens: int
    seconds: float
    rounds: int
    token_ids: tuple[int, ...]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class FirstToken:
    """A Hugging Face streamer that only notes when the first new token came."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen and self.at is None:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def hugging_face(folder: Path, dtype: str, max_tokens: int) -> Callable[[list[int]], Run]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def answer(ids: list[int]) -> Run:
        prompt = torch.tensor([ids])
        first = FirstToken()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=first,
        )
        done = time.perf_counter()
        new = tuple(output[0, len(ids) :].tolist())
        return Run(len(new) - 1, done - (first.at or done), len(new) - 1, new)

    return answer


def ours(llm: LLM, mode: str, budget: int | None, max_tokens: int) -> Callable[[list[int]], Run]:
    plan, params = llm.plan(mode, budget), SamplingParams(max_tokens=max_tokens)

    def answer(ids: list[int]) -> Run:
        done = llm.generate(ids, params, plan=plan)
        return Run(len(done.token_ids) - 1, done.timing.decode_s, done.rounds, done.token_ids)

    return answer


def main() -> None:
    options = read_options()
    folder = locate(options.model).folder
    llms = {
        dtype: LLM(options.model, drafter=options.drafter, dtype=dtype, device="cpu", config=EngineConfig())
        for dtype in DTYPES
    }
    arms: dict[str, Callable[[list[int]], Run]] = {}
    for dtype in DTYPES:
        arms[f"{dtype}/hf"] = hugging_face(folder, dtype, options.max_tokens)
        arms[f"{dtype}/plain"] = ours(llms[dtype], "off", None, options.max_tokens)
        arms[f"{dtype}/chain"] = ours(llms[dtype], "chain", None, options.max_tokens)
        for budget in options.budget:
            arms[f"{dtype}/tree-{budget}"] = ours(llms[dtype], "tree", budget, options.max_tokens)
    tokenizer = llms["float32"]
    texts = load_prompts(options.task, options.limit)
    prompts = [tokenizer.encode(text) for text in texts]
    chosen = {name: fastest_threads(answer, prompts[:2]) for name, answer in arms.items()}
    for name, times in chosen.items():
        print(f"{name}: {best(times)} threads ({', '.join(f'{n}: {s:.1f} tokens/s' for n, s in times.items())})")
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    names = list(arms)
    for number, ids in enumerate(prompts):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with threads(best(chosen[name])):
                runs[name].append(arms[name](ids))
        speeds = "  ".join(f"{name} {runs[name][-1].speed:.1f}" for name in names if name.startswith("bf"))
        print(f"prompt {number + 1} of {len(prompts)}: {speeds}", flush=True)
    report = {
        "task": options.task,
        "prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "model": llms["float32"].name,
        "prompt_hash": text_hash(tokenizer.tokenizer.decode_all(ids) for ids in prompts),
        "identity_float32": identity(runs),
        "threads_tried": {name: {str(n): s for n, s in times.items()} for name, times in chosen.items()},
        "arms": {name: describe(name, runs, best(chosen[name])) for name in names},
        "summary": summary(runs),
    }
    show(report)
    write_result(Path(options.out), report)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default=None, help="drafter folder; the shipped one when not given")
    parser.add_argument("--task", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=32, help="prompts, at least 32 for a figure to quote")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, nargs="+", default=[8, 16, 24, 32])
    return parser.parse_args()


def fastest_threads(answer: Callable[[list[int]], Run], prompts: Sequence[list[int]]) -> dict[int, float]:
    """Tokens per second by number of threads, on a few prompts, after one to warm up."""
    found = {}
    for count in thread_counts(torch.get_num_threads()):
        with threads(count):
            answer(prompts[0][:8])
            found[count] = statistics.median(answer(ids).speed for ids in prompts)
    return found


def best(speeds: dict[int, float]) -> int:
    return max(speeds, key=speeds.__getitem__)


def identity(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """In float32: tokens equal to Hugging Face's greedy decoding, for each of our arms."""
    reference = runs["float32/hf"]
    found: dict[str, Any] = {}
    for name, mine in runs.items():
        if name.startswith("float32/") and name != "float32/hf":
            equal = sum(
                sum(a == b for a, b in zip(x.token_ids, y.token_ids, strict=False))
                for x, y in zip(mine, reference, strict=True)
            )
            found[name] = {"equal": equal, "of": sum(len(r.token_ids) for r in reference)}
    return found


def describe(name: str, runs: dict[str, list[Run]], used: int) -> dict[str, Any]:
    mine, plain = runs[name], runs[f"{name.split('/')[0]}/plain"]
    pairs = [(a.speed, b.speed) for a, b in zip(mine, plain, strict=True)]
    rounds, tokens = sum(r.rounds for r in mine), sum(r.tokens for r in mine)
    return {
        "threads": used,
        "tokens_per_second": interval([r.speed for r in mine], statistics.median),
        "speed_up_over_plain": interval(pairs, median_ratio),
        "sign_test_against_plain": sign_test(pairs),
        "acceptance_length": tokens / rounds,
        "milliseconds_per_round": 1000 * sum(r.seconds for r in mine) / rounds,
        "rounds": rounds,
        "tokens": tokens,
    }


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """The figures that are quoted: our fastest plain decode against Hugging Face, our best tree against both it
    and the chain."""

    def fastest(kind: str, prefix: str = "") -> str:
        names = [n for n in runs if n.split("/")[1].startswith(kind) and n.startswith(prefix)]
        return max(names, key=lambda n: statistics.median(r.speed for r in runs[n]))

    def against(a: str, b: str) -> dict[str, Any]:
        pairs = [(x.speed, y.speed) for x, y in zip(runs[a], runs[b], strict=True)]
        return {"arm": a, "against": b, **interval(pairs, median_ratio), "sign_test": sign_test(pairs)}

    tree, plain, chain = fastest("tree"), fastest("plain"), fastest("chain")
    return {
        "plain_over_hf": against(plain, fastest("hf")),
        "tree_over_plain": against(tree, plain),
        "tree_over_chain": against(tree, chain),
        "chain_over_plain": against(chain, plain),
        "tree_over_hf": against(tree, fastest("hf")),
        "float32_tree_over_plain": against(fastest("tree", "float32"), "float32/plain"),
    }


def show(report: dict[str, Any]) -> None:
    print(f"\n{'arm':22}{'tokens/s':>10}{'x plain':>9}{'interval':>16}{'accept':>8}{'ms/round':>10}{'threads':>9}")
    for name, arm in report["arms"].items():
        speed, ratio = arm["tokens_per_second"], arm["speed_up_over_plain"]
        bounds = f"[{ratio['low']:.2f}, {ratio['high']:.2f}]"
        print(
            f"{name:22}{speed['value']:10.1f}{ratio['value']:9.2f}{bounds:>16}{arm['acceptance_length']:8.2f}"
            f"{arm['milliseconds_per_round']:10.1f}{arm['threads']:9d}"
        )
    for name, figure in report["summary"].items():
        print(
            f"{name}: {figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]  "
            f"({figure['arm']} against {figure['against']})"
        )
    for name, count in report["identity_float32"].items():
        print(f"{name}: {count['equal']} of {count['of']} tokens equal to Hugging Face's")


if __name__ == "__main__":
    main()
