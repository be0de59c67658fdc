"""Which drafter to ship: what its rounds cost on this device, and the tokens per second to expect of it.

    python benchmarks/drafter_choice.py cost --drafter old=shipped new=run/step-4000 --device cpu --out cpu.json
    python benchmarks/drafter_choice.py cost --drafter old=shipped new=run/step-4000 --device cuda --out gpu.json
    ddtree eval gsm8k humaneval mt-bench --budget 16,64 --drafter run/step-4000 --json > new.json
    python benchmarks/drafter_choice.py choose --cost cpu.json gpu.json --acceptance old=old.json new=new.json \\
        --out benchmarks/results/drafter_choice.json

`cost` times the engine: one stream, greedy, plain steps and rounds of the chain and of trees. Arms of all drafters
take turns on every prompt, in an order that rotates, so a machine that slows down slows all of them. `choose`
divides the acceptance of each task by those seconds (benchmarks/choosing.py).
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from choosing import choose, read_cost
from common import interval, load_prompts, write_result

from ddtree.cli.common import cache_dir, use_threads
from ddtree.engine.config import EngineConfig, check_device
from ddtree.engine.engine import BatchEngine
from ddtree.engine.hardware import resolve_dtype
from ddtree.errors import ConfigError, DDTreeError
from ddtree.evaluation.result import read_result
from ddtree.models.catalog import DEFAULT_MODEL
from ddtree.models.hub import locate
from ddtree.models.load import LoadedDrafter, load_drafter, load_target
from ddtree.models.shipped import drafter_folder
from ddtree.models.target import TargetModel
from ddtree.models.tokenizer import ChatTokenizer
from ddtree.provenance import device_facts, text_hash
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import PLAIN, RoundPlan, fixed_plan

SETS = ("gsm8k_test", "humaneval", "mt_bench")
SHIPPED = "shipped"


@dataclass(frozen=True)
class Run:
    """The rounds of one answer: their seconds, their number, and all its token ids, the first included."""

    seconds: float
    rounds: int
    token_ids: tuple[int, ...]

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.rounds


@dataclass(frozen=True)
class Arm:
    """One way to decode with one drafter's engine."""

    engine: BatchEngine
    plan: RoundPlan

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Decode until so many tokens are there."""
        # The last rounds of an answer draft less and cost less: a block more is asked for, and left unread.
        asked = tokens + self.engine.block_size
        if len(prompt) + asked > self.engine.max_context:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens leaves no room for {asked} more in a context of "
                f"{self.engine.max_context}; ask for fewer with --max-tokens"
            )
        job = self.engine.fixed_job(prompt, SamplingParams(max_tokens=asked, ignore_eos=True), self.plan)
        pieces = self.engine.run(job)
        said, rounds = list(next(pieces).token_ids), 0
        began = time.perf_counter()
        while len(said) < tokens:
            said += next(pieces).token_ids
            rounds += 1
        seconds = time.perf_counter() - began
        pieces.close()
        return Run(seconds, rounds, tuple(said))


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    try:
        if options.verb == "cost":
            report = cost(options)
        else:
            costs = [read_cost(path) for path in options.cost]
            files = named(options.acceptance, "--acceptance", "FILE")
            report = choose(costs, {name: read_result(Path(file)) for name, file in files.items()})
            print(report["verdict"]["words"])
    except DDTreeError as error:
        raise SystemExit(f"error: {error}") from error
    write_result(options.out, report)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measure = verbs.add_parser("cost", help="time plain steps and rounds on this device")
    measure.add_argument("--drafter", nargs="+", required=True, metavar="NAME=FOLDER", help=f"or NAME={SHIPPED}")
    measure.add_argument("--model", default=DEFAULT_MODEL)
    measure.add_argument("--budget", type=int, nargs="+", default=[16, 64])
    measure.add_argument("--prompts", type=positive, default=4, help="how many, from several sets in turn")
    measure.add_argument("--repeats", type=positive, default=3, help="times that each prompt is answered")
    measure.add_argument("--max-tokens", type=positive, default=64)
    measure.add_argument("--device", default="auto")
    measure.add_argument("--dtype", default="auto")
    measure.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the fastest, by a trial")
    decide = verbs.add_parser("choose", help="expected tokens per second, and the drafter to ship")
    decide.add_argument("--cost", type=Path, nargs="+", required=True, help="a result of `cost` for each device")
    decide.add_argument("--acceptance", nargs="+", required=True, metavar="NAME=FILE", help="of `ddtree eval`")
    for verb in (measure, decide):
        verb.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: got {number}")
    return number


def named(values: Iterable[str], option: str, what: str) -> dict[str, str]:
    """NAME=WHAT, each name once. ConfigError else."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not (name and equals and rest):
            raise ConfigError(f"{option} takes NAME={what}, so that results can be told apart: got {value!r}")
        if name in found:
            raise ConfigError(f"{option} names {name} twice; give each drafter a name of its own")
        found[name] = rest
    return found


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Time every arm of every drafter; the report of one device."""
    asked = named(options.drafter, "--drafter", "FOLDER")
    budgets = sorted(set(options.budget))
    device = torch.device(check_device(options.device, torch.cuda.device_count()))
    local = locate(options.model, cache_dir=cache_dir())
    folders = {name: drafter_folder(None if one == SHIPPED else one, local) for name, one in asked.items()}
    target = load_target(local.folder, resolve_dtype(options.dtype, device), device)
    drafters = {name: load_drafter(folder, target) for name, folder in folders.items()}
    tokenizer = ChatTokenizer(local.folder)
    arms = make_arms(target, drafters, budgets, tokenizer)
    use_threads(target, max(budgets) + 1, options.threads)
    texts = some_texts(options.prompts)
    prompts = [
        tokenizer.chat_ids([{"role": "user", "content": text}]) if tokenizer.can_chat else tokenizer.encode(text)
        for text in texts
    ]
    runs = take_turns(arms, prompts, options.repeats, options.max_tokens)
    plain = runs["", "plain"]
    report = {
        "verb": "cost",
        "model": local.name,
        "device": device.type,
        "hardware": hardware(device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "max_tokens": options.max_tokens,
        "prompts": len(prompts),
        "repeats": options.repeats,
        "prompt_hash": text_hash(tokenizer.decode_all(ids) for ids in prompts),
        "plain": figures(plain, plain),
        "drafters": {
            name: facts(folders[name], loaded)
            | {"arms": {arm: figures(mine, plain) for (owner, arm), mine in runs.items() if owner == name}}
            for name, loaded in drafters.items()
        },
    }
    show(report)
    return report


def make_arms(
    target: TargetModel, drafters: dict[str, LoadedDrafter], budgets: Sequence[int], tokenizer: ChatTokenizer
) -> dict[tuple[str, str], Arm]:
    """Every way to decode by drafter and mode: an engine for each drafter, on one target. Plain decoding needs no
    drafter: one arm, under no name, serves all."""
    config = EngineConfig(budget=max(budgets))
    engines = {name: BatchEngine(target, loaded, config, tokenizer.decode) for name, loaded in drafters.items()}
    arms = {("", "plain"): Arm(next(iter(engines.values())), PLAIN)}
    for name, engine in engines.items():
        arms[name, "chain"] = Arm(engine, fixed_plan("chain", engine.block_size, 0))
        for budget in budgets:
            arms[name, f"tree-{budget}"] = Arm(engine, fixed_plan("tree", engine.block_size, budget))
    return arms


def some_texts(count: int) -> list[str]:
    """Prompts of several sets in turn, because the length of a text decides what a round costs."""
    sets = [load_prompts(name, -(-count // len(SETS))) for name in SETS]
    texts = [text for turn in zip(*sets, strict=False) for text in turn][:count]
    if len(texts) < count:
        raise ConfigError(f"--prompts {count}: the sets give {len(texts)} in turn; ask for no more")
    return texts


def take_turns(
    arms: dict[tuple[str, str], Arm], prompts: Sequence[list[int]], repeats: int, tokens: int
) -> dict[tuple[str, str], list[Run]]:
    """Every arm on every prompt, `repeats` times; run i of two arms is the same turn. One turn before warms up."""
    names = list(arms)
    for name in names:
        arms[name].run(prompts[0], tokens)
    runs: dict[tuple[str, str], list[Run]] = {name: [] for name in names}
    for number in range(repeats * len(prompts)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            runs[name].append(arms[name].run(prompts[number % len(prompts)], tokens))
        print(f"turn {number + 1} of {repeats * len(prompts)}: one prompt, every arm", file=sys.stderr, flush=True)
    return runs


def figures(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Milliseconds of a round. like_plain: answers that are plain decode's; rounding turns some."""
    samples = [run.round_ms for run in runs]
    rounds = sum(run.rounds for run in runs)
    return {
        "ms_per_round": interval(samples, statistics.median),
        "samples_ms": samples,
        "rounds": rounds,
        "tokens_per_round": sum(len(run.token_ids) - 1 for run in runs) / rounds,
        "answers": len(runs),
        "like_plain": sum(
            all(a == b for a, b in zip(run.token_ids, other.token_ids, strict=False))
            for run, other in zip(runs, plain, strict=True)
        ),
    }


def facts(folder: Path, loaded: LoadedDrafter) -> dict[str, Any]:
    """What a drafter is. weights: a hash, by which results of two devices are known to be of the same drafter."""
    parameters = list(loaded.model.parameters())
    if loaded.edges is not None:
        parameters += loaded.edges.net.parameters()
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    spec = loaded.model.spec
    return {
        "layers": spec.decoder.layers,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "block_size": spec.block_size,
        "edges": loaded.edges is not None,
        "weights": digest.hexdigest()[:16],
    }


def hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device_facts()["cpu"])


def show(report: dict[str, Any]) -> None:
    print(f"{report['model']} in {report['dtype']} on {report['hardware']}")
    print(f"{'':28}{'ms/round':>10}{'interval':>20}{'tokens/round':>14}{'like plain':>12}")
    rows = {"plain": report["plain"]}
    for name, found in report["drafters"].items():
        rows |= {f"{name}, {arm}": arm_figures for arm, arm_figures in found["arms"].items()}
    for name, row in rows.items():
        spent = row["ms_per_round"]
        bounds = f"[{spent['low']:.2f}, {spent['high']:.2f}]"
        same = f"{row['like_plain']} of {row['answers']}"
        print(f"{name:28}{spent['value']:10.2f}{bounds:>20}{row['tokens_per_round']:14.2f}{same:>12}")


if __name__ == "__main__":
    main()
