"""DDTREE on SGLang with a GPU, beside plain decoding and SGLang's own DFLASH: the same prompts, one session.

    python benchmarks/sglang_gpu.py prepare models        # where ddtree and its default model are: writes both
    folders
    python benchmarks/sglang_gpu.py run --target models/target --drafter models/drafter --out result.json

`run` needs SGLang's CUDA stack and ddtree installed beside it (`pip install --no-deps -e .`). CUDA graphs and
overlap scheduling stay on. Arms: plain, DFLASH, DDTREE with each budget, and plain once more, which shows how far
a figure wanders by itself. Each arm is measured in a process of its own and kept in `--work`: a run that was
interrupted goes on with the arms that are missing, and an arm that dies costs no other. For each arm:

- correctness, greedy: its first divergence from plain on each prompt, and whether rounding explains it: the gap
  between plain's two best log-probabilities there is at most twice the largest difference between the two arms on
  the tokens that they share. Nothing after a divergence is compared. The control is plain against itself at
  another batch size: an arm may not diverge more often.
- time: tokens a second and milliseconds a round at each concurrency, and tokens a round. Tokens are those that the
  server counted.
- a profile of some rounds: milliseconds of GPU time in each stage (`--profile-steps 0` leaves it out).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import write_result
from sglang_arm import BASE, Answer, Arm, measure


def main() -> None:
    arguments = parse()
    if arguments.verb == "prepare":
        write_models(arguments.folder)
        return
    arms = {arm.name: arm for arm in every_arm(arguments.budgets)}
    work = arguments.work or arguments.out.with_suffix(".arms")
    if arguments.only is not None:
        measure(arms[arguments.only], arguments, work / f"{arguments.only}.json")
        return
    failed = [name for name in arms if not present(name, work)]
    found = {name: json.loads((work / f"{name}.json").read_text()) for name in arms if name not in failed}
    if "plain" not in found:
        raise SystemExit(
            "plain decoding failed (see above), and everything is compared with it; nothing is written"
        )
    results = {name: summary(name, arm, found["plain"]) for name, arm in found.items()}
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    content = {"options": options, "engine": BASE, "right": verdicts(results), "failed": failed, "arms": results}
    write_result(arguments.out, content)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)} (see above); the same command tries these again")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("folder", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("--target", type=Path, required=True)
    run.add_argument("--drafter", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--work", type=Path, help="where finished arms are kept; beside --out when not given")
    run.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64])
    run.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    run.add_argument("--limit", type=int, default=32, help="prompts of each set")
    run.add_argument("--tokens", type=int, default=256)
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--dtype", default="bfloat16")
    run.add_argument("--profile-steps", type=int, default=20)
    run.add_argument("--only", help="measure this arm alone, in this process, and compare nothing")
    return parser.parse_args()


def every_arm(budgets: Sequence[int]) -> list[Arm]:
    trees = [Arm(f"DDTREE-{budget}", "DDTREE", budget) for budget in budgets]
    return [Arm("plain"), Arm("DFLASH", "DFLASH"), *trees, Arm("plain again")]


def present(name: str, work: Path) -> bool:
    """Whether the arm has been measured; it is now, where it had not been."""
    if not (work / f"{name}.json").exists():
        print(f"{name}: starting", flush=True)
        subprocess.run([sys.executable, *sys.argv, "--only", name], check=False)
    return (work / f"{name}.json").exists()


def summary(name: str, arm: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What goes into the result of one arm: its answers only as they compare with those of plain decoding."""
    reference = [Answer(**answer) for answer in plain["together"]]
    result = {key: value for key, value in arm.items() if key not in ("together", "alone")}
    if name == "plain":
        result["control"] = compare(reference, [Answer(**answer) for answer in plain["alone"]])
    else:
        result["against_plain"] = compare(reference, [Answer(**answer) for answer in arm["together"]])
    return result


def verdicts(results: dict[str, Any]) -> dict[str, bool]:
    """Whether each arm is right: every divergence is explained, and there are no more than the control has."""
    control = results["plain"]["control"]["per_1000"]
    right = {}
    for name, result in results.items():
        if "against_plain" in result:
            found = result["against_plain"]
            allowed = max(control, found["noise_per_1000"])
            right[name] = found["unexplained"] == 0 and found["per_1000"] <= allowed
    return right


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


if __name__ == "__main__":
    main()
