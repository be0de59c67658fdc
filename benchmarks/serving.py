"""Serving under load: throughput and latency by concurrency and mode, and what happens at four times capacity.

    python benchmarks/serving.py --out benchmarks/results/serving.json

Starts `ddtree serve` once and keeps `concurrency` streams open at a time, as users would. Modes take turns at
every concurrency, in an order that rotates, through the request's own `ddtree.mode`, so all arms share one server
and one stretch of time. Modes get the same prompts, each with a number of its own in front, so that the prefix
cache finds the template alone. Only emitted tokens count (`usage.completion_tokens`). The last part sends four
times as many requests as may run and wait, all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import load_prompts, write_result

from ddtree.provenance import text_hash

MODES = ("off", "chain", "tree")
START_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it. Seconds from sending; tokens and rounds from the usage."""

    status: int
    first_s: float
    whole_s: float
    tokens: int
    rounds: int

    @property
    def per_token_s(self) -> float:
        return (self.whole_s - self.first_s) / max(self.tokens - 1, 1)


def main() -> None:
    options = arguments()
    prompts = load_prompts("gsm8k_test", 0) + load_prompts("mt_bench", 0)
    supply, serial = itertools.cycle(prompts), itertools.count(1)
    process, url = start(options)
    try:
        with httpx.Client() as client:
            info = client.get(f"{url}/server_info").json()
        cells = []
        for place, concurrency in enumerate(options.concurrency):
            turn = place % len(MODES)
            count = max(options.requests, round(options.rounds_of * concurrency))
            shared = list(itertools.islice(supply, count))
            for mode in (*MODES[turn:], *MODES[:turn]):
                taken = [f"({next(serial)}) {prompt}" for prompt in shared]
                answers, seconds = asyncio.run(load(url, info["model"], taken, mode, concurrency, options.tokens))
                cells.append(cell(mode, concurrency, answers, seconds))
                print(json.dumps(cells[-1]), flush=True)
        over = overload(url, info, list(itertools.islice(supply, 4096)), options)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    result = {
        "server": info,
        "tokens": options.tokens,
        "prompt_hash": text_hash(prompts),
        "cells": cells,
        "overload": over,
        "exit_status": process.returncode,
    }
    write_result(options.out, result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving.json"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--requests", type=int, default=8, help="fewest requests in a cell")
    parser.add_argument("--rounds-of", type=float, default=2.0, help="requests of a cell, in concurrencies")
    parser.add_argument("--tokens", type=int, default=64, help="max_tokens of a request")
    parser.add_argument("--max-sequences", type=int, default=32)
    parser.add_argument("--max-queue", type=int, default=32)
    parser.add_argument("serve", nargs="*", help="more options of ddtree serve, after --")
    return parser.parse_args()


def start(options: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """A ready server, and its address."""
    command = [sys.executable, "-m", "ddtree", "serve", "--port", "0", *options.serve]
    command += ["--max-sequences", str(options.max_sequences), "--max-queue", str(options.max_queue)]
    log = options.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as sink:
        process = subprocess.Popen(command, stderr=sink, text=True, env=os.environ | {"COLUMNS": "200"})
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"http://\S+:\d+", log.read_text())
        try:
            if found and httpx.get(f"{found[0]}/ready").status_code == 200:
                return process, found[0]
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    sys.exit(f"the server did not start; {log} says why")


async def load(
    url: str, model: str, prompts: Sequence[str], mode: str, concurrency: int, tokens: int
) -> tuple[list[Answer], float]:
    """All prompts, so many at a time; the answers and the seconds that they took together."""
    seats = asyncio.Semaphore(concurrency)
    began = time.perf_counter()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(prompt: str) -> Answer:
            async with seats:
                return await ask(client, url, model, prompt, mode, tokens)

        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return list(answers), time.perf_counter() - began


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: str, mode: str, tokens: int) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ddtree": {"mode": mode},
    }
    sent = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return Answer(response.status_code, 0.0, time.perf_counter() - sent, 0, 0)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return Answer(500, 0.0, time.perf_counter() - sent, 0, 0)
            if first is None and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = time.perf_counter()
            usage = chunk["usage"] or usage
    done = time.perf_counter()
    return Answer(200, (first or done) - sent, done - sent, usage["completion_tokens"], usage["ddtree"]["rounds"])


def cell(mode: str, concurrency: int, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    assert all(answer.status == 200 for answer in answers), "nothing is refused within capacity"
    tokens = sum(answer.tokens for answer in answers)
    rounds = sum(answer.rounds for answer in answers)
    return {
        "mode": mode,
        "concurrency": concurrency,
        "requests": len(answers),
        "tokens_per_second": tokens / seconds,
        "acceptance_length": (tokens - len(answers)) / rounds,
        "first_token_s": quantiles([answer.first_s for answer in answers]),
        "per_token_s": quantiles([answer.per_token_s for answer in answers]),
        "seconds": seconds,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p90": ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]}


def overload(
    url: str, info: dict[str, Any], prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Four times as many requests as may run and wait, at once."""
    capacity = info["max_sequences"] + info["max_queue"]
    count = 4 * capacity
    answers, seconds = asyncio.run(
        load(url, info["model"], prompts[:count], "tree", count, max(options.tokens // 4, 8))
    )
    refused = [answer.whole_s for answer in answers if answer.status == 429]
    accepted = [answer for answer in answers if answer.status == 200]
    return {
        "capacity": capacity,
        "sent": count,
        "accepted": len(accepted),
        "refused_429": len(refused),
        "other": len(answers) - len(accepted) - len(refused),
        "refused_after_s": quantiles(refused),
        "accepted_whole_s": quantiles([answer.whole_s for answer in accepted]),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
