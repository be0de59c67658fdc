"""Tables about drafters: what is accepted, what training did, what a round costs."""

from __future__ import annotations

from typing import Any

from tables_common import TASKS, markdown, result, span

from ddtree.evaluation.compare import compare


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


def packing() -> str:
    rows = []
    for name, arm in result("packing")["arms"].items():
        ratios = [arm["overall"], *arm["tasks"].values()]
        cells = [f"{r['ratio']:.3f} [{r['interval'][0]:.3f}, {r['interval'][1]:.3f}]" for r in ratios]
        rows.append([name, *cells])
    tasks = next(iter(result("packing")["arms"].values()))["tasks"]
    return markdown(("packed over bfloat16", "all", *(TASKS.get(task, task) for task in tasks)), rows)


def training() -> str:
    rows = []
    for name in ("training_small", "training_continued", "training", "training_second"):
        report = result(name)
        last = report["validations"][-1]
        rows.append(
            [report["note"], str(report["losses"][-1][0]), f"{last['chain']:.2f}", f"{last['tree-64']:.2f}"]
        )
    return markdown(("run", "steps", "chain, held out", "tree of 64, held out"), rows)


def length() -> str:
    """Acceptance after the first stage of training and after both."""
    return gains("acceptance_shorter", "acceptance")


def gains(before: str, after: str) -> str:
    """The chain and trees of one result of `ddtree eval`, of another, and by how much those are more."""
    less, more = result(before), result(after)
    rows = []
    for task, found in more["tasks"].items():
        arms = [arm for arm in found if arm.startswith(("chain", "tree-"))]
        pairs = [(less["tasks"][task][arm]["mean"], found[arm]["mean"]) for arm in arms]
        cells = (f"{a:.2f} → {b:.2f} (+{100 * (b / a - 1):.0f} %)" for a, b in pairs)
        rows.append([TASKS.get(task, task), *cells])
    return markdown(("prompts", *arms), rows)


def verdict() -> str:
    found = compare(result("acceptance_shorter"), result("acceptance"), ("step-3800", "step-3200"))
    return f"    {found.verdict} ({found.arm})\n"


def shape() -> str:
    names = {
        "five": "five layers, Muon",
        "three": "three layers, Muon",
        "adamw": "five layers, AdamW at 0.001",
    }
    runs = result("ablation_shape")["runs"]
    rows = []
    for name, words in names.items():
        run = runs[name]
        positions = (f"{100 * share:.1f}" for share in run["accuracy"][:4])
        rows.append(
            [words, *positions, f"{run['validation']['chain']:.2f}", f"{run['validation']['tree-64']:.2f}"]
        )
    header = ("run", *(f"position {k}" for k in range(1, 5)), "chain, held out", "tree of 64, held out")
    return markdown(header, rows)


def round_cost() -> str:
    """Milliseconds of a round with other numbers of layers, as `drafter_choice.py cost` measured them."""
    report = result("round_cost")
    rows = [["plain step", "", span(report["plain"]["ms_per_round"], 1)]]
    modes = list(next(iter(report["drafters"].values()))["arms"])
    for drafter in report["drafters"].values():
        cells = (span(drafter["arms"][mode]["ms_per_round"], 1) for mode in modes)
        rows.append([f"{drafter['layers']} layers", f"{drafter['parameters'] / 1e6:.1f} M", *cells])
    rows[0] += [""] * (len(modes) - 1)
    return markdown(("ms", "parameters", *modes), rows)


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
    return gains("acceptance_no_edges", "acceptance")


def edge_cost() -> str:
    rows = []
    for budget, found in result("edges")["budgets"].items():
        more = found["edges_ms"] + found["rescore_ms"] + found["tree_ms"] - found["tree_without_ms"]
        cells = (found["edges_ms"], found["rescore_ms"], found["tree_ms"], found["tree_without_ms"], more)
        rows.append([budget, *(f"{cell:.2f}" for cell in cells)])
    return markdown(
        ("budget", "edges, ms", "rescoring, ms", "tree, ms", "tree without edges, ms", "more, ms"), rows
    )


def drafter_choice() -> str:
    """Each task's best mode and its speed-up over plain decode, and their mean, by drafter and device."""
    report = result("drafter_choice")
    rows = []
    for name, drafter in report["drafters"].items():
        about = f"{name} ({drafter['layers']} layers, {drafter['parameters'] / 1e6:.1f} M)"
        for device, found in drafter["devices"].items():
            cells = [
                f"{task['best']}, {span(task['arms'][task['best']]['speed_up'])}"
                for task in found["tasks"].values()
            ]
            rows.append([f"{about}, {device}", *cells, span(found["mean"]["speed_up"])])
    table = markdown(("drafter", *(TASKS.get(task, task) for task in report["tasks"]), "mean"), rows)
    hardware = "; ".join(f"{device}: {d['hardware']}, {d['dtype']}" for device, d in report["devices"].items())
    return f"{table}\n{hardware}. {report['verdict']['words']}.\n"
