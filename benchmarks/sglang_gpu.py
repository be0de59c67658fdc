"""DDTREE on SGLang with a GPU, beside plain decoding and SGLang's own DFLASH, on the same prompts.

    python benchmarks/sglang_gpu.py prepare models        # where ddtree and its default model are: writes both
    folders
    python benchmarks/sglang_gpu.py run --target models/target --drafter models/drafter --out result.json
    python benchmarks/sglang_gpu.py compare --out result.json     # anew, and without a GPU, from the arms kept

`run` needs SGLang's CUDA stack and ddtree installed beside it (`pip install --no-deps -e .`). CUDA graphs and
overlap scheduling stay on. Arms: plain, DFLASH, DDTREE with each budget, and plain once more, which shows how far
a figure wanders by itself. Each arm is measured in a process of its own and kept in `--work`: a run that was
interrupted goes on with the arms that are missing, and an arm that dies costs no other. For each arm:

- correctness, greedy, against plain decoding (benchmarks/sglang_compare.py).
- time: tokens a second and milliseconds a round at each concurrency, and tokens a round. Tokens are those that the
  server counted.
- a profile of some rounds: how the stages share the GPU's timeline (`--profile-tokens 0` leaves it out).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common import write_result
from sglang_arm import BASE, Arm, measure
from sglang_compare import compared


def main() -> None:
    arguments = parse()
    if arguments.verb == "prepare":
        write_models(arguments.folder)
        return
    arms = {arm.name: arm for arm in every_arm(arguments.budgets)}
    work = arguments.work or arguments.out.with_suffix(".arms")
    if arguments.verb == "run" and arguments.only is not None:
        measure(arms[arguments.only], arguments, work / f"{arguments.only}.json")
        return
    if arguments.verb == "run":
        for name in arms:
            measure_missing(name, work)
    found = {name: json.loads(path.read_text()) for name in arms if (path := work / f"{name}.json").exists()}
    if "plain" not in found:
        raise SystemExit(f"{work}: no answers of plain decoding, and everything is compared with those")
    missing = [name for name in arms if name not in found]
    content = {"note": arguments.note, "engine": BASE, "missing": missing, **compared(found)}
    write_result(arguments.out, content)
    if missing:
        raise SystemExit(f"not measured: {', '.join(missing)}; `run` with the same --out tries these again")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("folder", type=Path)
    run, compare = verbs.add_parser("run"), verbs.add_parser("compare")
    for verb in (run, compare):
        verb.add_argument("--out", type=Path, required=True)
        verb.add_argument("--work", type=Path, help="where finished arms are kept; beside --out when not given")
        verb.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64])
        verb.add_argument("--note", default="", help="what a reader must know, such as what else the host did")
    run.add_argument("--target", type=Path, required=True)
    run.add_argument("--drafter", type=Path, required=True)
    run.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    run.add_argument("--limit", type=int, default=32, help="prompts of each set")
    run.add_argument("--tokens", type=int, default=256)
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--dtype", default="bfloat16")
    run.add_argument("--profile-tokens", type=int, default=80, help="0: no profile")
    run.add_argument("--only", help="measure this arm alone, in this process, and compare nothing")
    return parser.parse_args()


def every_arm(budgets: Sequence[int]) -> list[Arm]:
    trees = [Arm(f"DDTREE-{budget}", "DDTREE", budget) for budget in budgets]
    return [Arm("plain"), Arm("DFLASH", "DFLASH"), *trees, Arm("plain again")]


def measure_missing(name: str, work: Path) -> None:
    """Measure an arm that is not there yet, in a process of its own."""
    if not (work / f"{name}.json").exists():
        print(f"{name}: starting", flush=True)
        subprocess.run([sys.executable, *sys.argv, "--only", name], check=False)


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


if __name__ == "__main__":
    main()
