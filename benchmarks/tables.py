"""The tables of the documents, made from the result files: `python benchmarks/tables.py` writes them.

A document holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between is made here, and a test compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/concepts/exactness.md", "docs/drafters.md", "docs/guides/serving.md")
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SETS = {"gsm8k_test": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-bench, first turns"}
TASKS = {
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "mt-bench": "MT-bench, first turns",
    "coding": "own coding tasks",
}


def main() -> None:
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """A document with every table made anew."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


def result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def cpu_decode() -> str:
    report = result("cpu_decode")
    rows = []
    for name, arm in report["arms"].items():
        ratio = arm["speed_up_over_plain"]
        dtype, arm_name = name.split("/")
        rows.append(
            [
                f"{arm_name.replace('hf', 'Hugging Face generate').replace('plain', 'plain decode')}, {dtype}",
                f"{arm['tokens_per_second']['value']:.1f}",
                f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
                f"{arm['acceptance_length']:.2f}",
                f"{arm['milliseconds_per_round']:.1f}",
            ]
        )
    table = markdown(("", "tokens/s, median", "over plain decode of that dtype", "acceptance", "ms/round"), rows)
    told = {
        "plain_over_hf": "our fastest plain decode over Hugging Face at its best",
        "tree_over_plain": "our best tree over our fastest plain decode",
        "tree_over_chain": "our best tree over our best chain",
    }
    figures = [
        f"{words}: **{f['value']:.2f}** [{f['low']:.2f}, {f['high']:.2f}]"
        for key, words in told.items()
        if (f := report["summary"][key])
    ]
    return (
        f"{report['prompts']} {SETS[report['task']]} prompts, {report['max_tokens']} new tokens, greedy; arms "
        "take turns; threads chosen for each arm by measurement; 95 % intervals over prompts.\n\n"
        f"{table}\nMedian ratio per prompt: {'; '.join(figures)}.\n"
    )


def acceptance(name: str) -> str:
    """The chain and trees of a document of `ddtree eval`; where tokens were drawn, with uncoupled drafts below."""
    report = result(name)
    rows = []
    for task, found in report["tasks"].items():
        arms = [arm for arm in found if arm.startswith(("chain", "tree-"))]
        for ending, note in (("", ""), ("-uncoupled", ", uncoupled")):
            cells = [acceptance_cell(found[arm]) for arm in arms if arm.endswith("-uncoupled") == bool(ending)]
            if cells or not ending:
                rows.append([f"{TASKS.get(task, task)} ({found['prompts']}){note}", *cells])
    coupled = [arm for arm in arms if not arm.endswith("-uncoupled")]
    return markdown(("prompts", *coupled), rows)


def acceptance_cell(arm: dict[str, Any]) -> str:
    low, high = arm["interval"]
    return f"{arm['mean']:.2f} [{low:.2f}, {high:.2f}]"


def parity() -> str:
    report = result("parity")
    rows = []
    for dtype in ("float32", "bfloat16"):
        for name, tally in report[dtype].items():
            what = "plain decode, batch of 2" if name == "batch-2" else f"{name.removeprefix('rows-')} rows"
            rows.append(
                [
                    f"{dtype}, {what}",
                    str(tally["positions"]),
                    f"{tally['flips']} ({tally['flips_per_1000']:.1f})",
                    str(tally["exact_ties"]),
                    str(tally["unexplained"]),
                    f"{tally['largest_difference']:.2g}",
                ]
            )
    header = (
        "against plain decode",
        "positions",
        "flips (per 1,000)",
        "exact ties",
        "unexplained",
        "max difference",
    )
    return markdown(header, rows)


def training() -> str:
    rows = []
    for name in ("training_small", "training_continued", "training"):
        report = result(name)
        last = report["validations"][-1]
        rows.append(
            [report["note"], str(report["losses"][-1][0]), f"{last['chain']:.2f}", f"{last['tree-64']:.2f}"]
        )
    return markdown(("run", "steps", "chain, held out", "tree of 64, held out"), rows)


def ablation() -> str:
    names = {
        "base": "decay weights, the answers' tokens as labels",
        "dpace": "D-PACE weights",
        "soft": "half soft labels",
        "causal": "causal block",
    }
    runs = result("ablation")["runs"]
    rows = [
        [
            words,
            *(f"{100 * share:.1f}" for share in runs[name]["accuracy"][:5]),
            f"{runs[name]['expected_chain']:.3f}",
        ]
        for name, words in names.items()
    ]
    return markdown(("objective", *(f"position {k}" for k in range(1, 6)), "chain, expected"), rows)


def edges() -> str:
    with_edges, without = result("acceptance"), result("acceptance_no_edges")
    rows = []
    for task, found in with_edges["tasks"].items():
        arms = [arm for arm in found if arm.startswith(("chain", "tree-"))]
        cells = []
        for arm in arms:
            less, more = without["tasks"][task][arm]["mean"], found[arm]["mean"]
            cells.append(f"{less:.2f} → {more:.2f} (+{100 * (more / less - 1):.0f} %)")
        rows.append([TASKS.get(task, task), *cells])
    return markdown(("prompts", *arms), rows)


def serving() -> str:
    report = result("serving")
    rows = []
    plain = {c["concurrency"]: c["tokens_per_second"] for c in report["cells"] if c["mode"] == "off"}
    for c in sorted(report["cells"], key=lambda c: (c["concurrency"], c["mode"] != "off", c["mode"])):
        rows.append(
            [
                f"{c['concurrency']}, {c['mode']}",
                f"{c['tokens_per_second']:.1f}",
                f"{c['tokens_per_second'] / plain[c['concurrency']]:.2f}",
                f"{c['acceptance_length']:.2f}",
                f"{c['first_token_s']['p50']:.2f} / {c['first_token_s']['p90']:.2f}",
                f"{1000 * c['per_token_s']['p50']:.0f} / {1000 * c['per_token_s']['p90']:.0f}",
            ]
        )
    header = (
        "concurrency, mode",
        "tokens/s, all together",
        "over off",
        "acceptance",
        "first token, s (p50 / p90)",
        "ms per token (p50 / p90)",
    )
    over = report["overload"]
    told = (
        f"{over['sent']} requests at once, four times the {over['capacity']} that may run and wait: "
        f"{over['accepted']} answered, {over['refused_429']} told 429 (half of them within "
        f"{over['refused_after_s']['p50']:.2f} s), {over['other']} anything else.\n"
    )
    return markdown(header, rows) + "\n" + told


def edge_cost() -> str:
    rows = []
    for budget, found in result("edges")["budgets"].items():
        more = found["edges_ms"] + found["rescore_ms"] + found["tree_ms"] - found["tree_without_ms"]
        cells = (found["edges_ms"], found["rescore_ms"], found["tree_ms"], found["tree_without_ms"], more)
        rows.append([budget, *(f"{cell:.2f}" for cell in cells)])
    return markdown(
        ("budget", "edges, ms", "rescoring, ms", "tree, ms", "tree without edges, ms", "more, ms"), rows
    )


def packing() -> str:
    rows = []
    for name, arm in result("packing")["arms"].items():
        ratios = [arm["overall"], *arm["tasks"].values()]
        cells = [f"{r['ratio']:.3f} [{r['interval'][0]:.3f}, {r['interval'][1]:.3f}]" for r in ratios]
        rows.append([name, *cells])
    tasks = next(iter(result("packing")["arms"].values()))["tasks"]
    return markdown(("packed over bfloat16", "all", *(TASKS.get(task, task) for task in tasks)), rows)


def drafter_choice() -> str:
    """Each task's best mode and its speed-up over plain decode, and their mean, by drafter and device."""
    report = result("drafter_choice")
    rows = []
    for name, drafter in report["drafters"].items():
        about = f"{name} ({drafter['layers']} layers, {drafter['parameters'] / 1e6:.1f} M)"
        for device, found in drafter["devices"].items():
            cells = [
                f"{task['best']}, {speed_up_cell(task['arms'][task['best']]['speed_up'])}"
                for task in found["tasks"].values()
            ]
            rows.append([f"{about}, {device}", *cells, speed_up_cell(found["mean"]["speed_up"])])
    table = markdown(("drafter", *(TASKS.get(task, task) for task in report["tasks"]), "mean"), rows)
    hardware = "; ".join(f"{device}: {d['hardware']}, {d['dtype']}" for device, d in report["devices"].items())
    return f"{table}\n{hardware}. {report['verdict']['words']}.\n"


def speed_up_cell(figure: dict[str, float]) -> str:
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


TABLES: dict[str, Callable[[], str]] = {
    "cpu_decode": cpu_decode,
    "acceptance": lambda: acceptance("acceptance"),
    "acceptance_sampled": lambda: acceptance("acceptance_t1"),
    "parity": parity,
    "training": training,
    "ablation": ablation,
    "edges": edges,
    "edge_cost": edge_cost,
    "packing": packing,
    "drafter_choice": drafter_choice,
    "serving": serving,
}

if __name__ == "__main__":
    sys.exit(main())
