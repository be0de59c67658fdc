"""A training run as one result file: its log, its recipe and where it ran.

python benchmarks/collect_training.py run/step-2600 --log run/log.jsonl --out benchmarks/results/training.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ddtree.config import read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of the run")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--note", default="", help="what this run was for")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines()]
    made = read_json(options.checkpoint / "training.json")
    report = {
        "note": options.note,
        "recipe": made.pop("recipe"),
        "losses": [[row["step"], round(row["loss"], 4)] for row in rows if "loss" in row],
        "first_position_accuracy": [[r["step"], round(r["accuracy"][0], 4)] for r in rows if "accuracy" in r],
        "validations": [row for row in rows if "chain" in row],
        "seconds": max(row["seconds"] for row in rows if "seconds" in row),
        "provenance": made,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
