"""Acceptance length of the engine on a set of prompts: chain and trees, greedy or sampled.

    python benchmarks/acceptance.py --task gsm8k_test --out benchmarks/results/acceptance_gsm8k.json

Acceptance length is emitted tokens per round, bonus included, over all prompts; its interval resamples prompts.
With --temperature above 0, trees are measured coupled and uncoupled with the same seeds, which changes no text.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import interval, load_prompts, write_result

from ddtree import LLM, EngineConfig, SamplingParams
from ddtree.provenance import text_hash


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    config = EngineConfig(budget=max(options.budget), coupling=options.coupling)
    llm = LLM(options.model, drafter=options.drafter, dtype=options.dtype, device=options.device, config=config)
    prompts = [llm.encode(text) for text in load_prompts(options.task, options.limit)]
    arms: dict[str, tuple[LLM, Any]] = {"chain": (llm, llm.plan("chain"))}
    for budget in options.budget:
        arms[f"tree-{budget}"] = (llm, llm.plan("tree", budget))
    if options.temperature > 0:
        loose = uncoupled(llm)
        arms |= {f"{name}-uncoupled": (loose, plan) for name, (_, plan) in arms.items()}
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in arms}
    differing = 0
    started = time.perf_counter()
    for number, ids in enumerate(prompts):
        texts = set()
        for name, (engine, plan) in arms.items():
            params = SamplingParams(
                temperature=options.temperature,
                seed=number if options.temperature else None,
                max_tokens=options.max_tokens,
            )
            done = engine.generate(ids, params, plan=plan)
            counts[name].append((len(done.token_ids) - 1, done.rounds))
            texts.add(done.token_ids)
        differing += len(texts) > 1
        if (number + 1) % 8 == 0 or number + 1 == len(prompts):
            shown = "  ".join(f"{name} {length(rows):.3f}" for name, rows in counts.items())
            print(f"{number + 1} of {len(prompts)}: {shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    report = {
        "task": options.task,
        "prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "model": llm.name,
        "dtype": str(llm.engine.target.dtype).removeprefix("torch."),
        "block_size": llm.engine.block_size,
        "coupling": options.coupling if options.temperature else None,
        "prompt_hash": text_hash(llm.tokenizer.decode_all(ids) for ids in prompts),
        "prompts_whose_arms_differ": differing,
        "arms": {
            name: {
                "mean": interval(rows, length),
                "tokens": sum(tokens for tokens, _ in rows),
                "rounds": sum(rounds for _, rounds in rows),
            }
            for name, rows in counts.items()
        },
    }
    write_result(Path(options.out), report)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--task", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=0, help="prompts; 0 takes all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default=None, help="drafter folder; the shipped one when not given")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--coupling", type=float, default=1.25)
    parser.add_argument("--budget", type=int, nargs="+", default=[16, 64])
    return parser.parse_args()


def length(rows: Sequence[tuple[int, int]]) -> float:
    """Tokens per round over all prompts."""
    return sum(tokens for tokens, _ in rows) / max(sum(rounds for _, rounds in rows), 1)


def uncoupled(llm: LLM) -> LLM:
    """The same models, drafting without the noise."""
    from copy import copy

    other, other_engine = copy(llm), copy(llm.engine)
    other_engine.config = dataclasses.replace(llm.engine.config, coupling=None)
    other.engine = other_engine
    return other


if __name__ == "__main__":
    main()
