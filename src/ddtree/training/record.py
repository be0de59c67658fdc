"""What a run reports while it goes: `log.jsonl`, and TensorBoard's events where tensorboard is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree.models.storage import writing

__all__ = ["RunLog"]


class RunLog:
    """The log of a run's folder. Rows are appended, so a resumed run goes on in the same files."""

    def __init__(self, run: Path) -> None:
        self._path = run / "log.jsonl"
        with writing(self._path):
            run.mkdir(parents=True, exist_ok=True)
        self._events = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with writing(run):
                self._events = SummaryWriter(str(run / "events"))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row; `step` says where it belongs. Numbers become curves, lists one for each draft position."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        if self._events is None:
            return
        for key, value in row.items():
            if isinstance(value, list):
                for place, one in enumerate(value, start=1):
                    self._events.add_scalar(f"{key}/position-{place}", one, row["step"])
            elif key != "step":
                self._events.add_scalar(key, value, row["step"])
        self._events.flush()
