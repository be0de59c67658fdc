"""Short training runs that differ in one setting, as one result file.

python benchmarks/collect_ablation.py base=run-a dpace=run-b --from-step 400 --out benchmarks/results/ablation.json

Each run saw fresh examples only, so its accuracy while training is accuracy on text that it was not trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER of a run, or NAME=its log.jsonl")
    parser.add_argument("--from-step", type=int, required=True, help="average the reports after this step")
    parser.add_argument("--note", default="", help="what the runs have in common, and where they ran")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = {}
    for name, _, place in (pair.partition("=") for pair in options.runs):
        path = Path(place) / "log.jsonl" if Path(place).is_dir() else Path(place)
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        runs[name] = summary([row for row in rows if "accuracy" in row and row["step"] > options.from_step])
        if validations := [row for row in rows if "chain" in row]:
            runs[name]["validation"] = validations[-1]
    report = {"note": options.note, "runs": runs}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


def summary(rows: list[dict]) -> dict:
    """Means over some reports of one run. accuracy: of each draft position; expected: what a chain would commit if
    positions were right independently of each other."""
    accuracy = [sum(column) / len(rows) for column in zip(*(row["accuracy"] for row in rows), strict=True)]
    expected, reached = 1.0, 1.0
    for share in accuracy:
        reached *= share
        expected += reached
    return {
        "steps": rows[-1]["step"],
        "reports": len(rows),
        "accuracy": [round(share, 4) for share in accuracy],
        "expected_chain": round(expected, 4),
        "edge_loss": round(sum(row["edge_loss"] for row in rows) / len(rows), 4),
        "seconds": rows[-1]["seconds"],
    }


if __name__ == "__main__":
    main()
