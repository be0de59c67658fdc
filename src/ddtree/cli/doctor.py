"""`ddtree doctor`: looks at what is installed, and at a launch command, without starting anything."""

from __future__ import annotations

import os
from dataclasses import asdict

import typer
from rich.table import Table

from ddtree.cli.common import JSON_OPTION, notes, print_json, words
from ddtree.errors import ConfigError, UnsupportedError

__all__ = ["doctor"]

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "wrong": "[bold red]wrong[/]"}


def doctor(
    host: str = typer.Argument(..., help="What to look at: sglang."),
    launch: str | None = typer.Option(
        None, "--launch", help="A launch command to check: 'python -m sglang.launch_server --model-path ...'."
    ),
    gpu_memory_gib: float | None = typer.Option(
        None, "--gpu-memory-gib", min=1, help="Memory of one GPU to plan for; without it that of the GPU here."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Check an installed SGLang and a launch command: versions, plugin, models, options, and a memory plan."""
    if host != "sglang":
        raise ConfigError(f"doctor looks at sglang: got {host!r}")
    from ddtree.sglang_plugin.diagnosis import table
    from ddtree.sglang_plugin.doctor import examine

    diagnosis = examine(launch, os.environ.get("SGLANG_PLUGINS"), _gpu_bytes(gpu_memory_gib))
    if as_json:
        plan = diagnosis.plan
        print_json(
            {
                "healthy": diagnosis.healthy,
                "findings": [asdict(finding) for finding in diagnosis.findings],
                "memory": None if plan is None else asdict(plan),
            }
        )
    else:
        rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for finding in diagnosis.findings:
            rows.add_row(f"[bold]{finding.check}[/]", MARKS[finding.state], finding.detail)
        words.print(rows)
        if diagnosis.plan is not None:
            parts = Table("memory", "GiB", box=None, padding=(0, 2, 0, 0))
            for name, size in table(diagnosis.plan):
                parts.add_row(name, f"{size / 2**30:.2f}")
            words.print(parts)
    if not diagnosis.healthy:
        wrong = [finding.check for finding in diagnosis.findings if finding.state == "wrong"]
        raise UnsupportedError(f"not ready: {', '.join(wrong)}; the lines above say what to mend")
    notes.print("ready" if launch else "the stack is ready; check a launch command with --launch")


def _gpu_bytes(given_gib: float | None) -> int | None:
    if given_gib is not None:
        return int(given_gib * 2**30)
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
