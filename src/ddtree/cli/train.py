"""`ddtree train`: a drafter for a target, from the target's own answers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ddtree.cli.common import JSON_OPTION, cache_dir, notes, print_json

if TYPE_CHECKING:
    from ddtree.training.examples import Examples
    from ddtree.training.reports import StepReport, ValidationReport
    from ddtree.training.trainer import Trainer

__all__ = ["train"]


def train(
    config: Path = typer.Option(None, help="Recipe in TOML; flags go before it."),
    data: str = typer.Option(None, help="Folder of answers, as `ddtree data` writes it."),
    out: str = typer.Option(None, help="Folder of the run."),
    set_: list[str] = typer.Option([], "--set", help="Any key of the recipe, as key=value; may be repeated."),
    init_from: Path = typer.Option(None, help="Start from the weights of this drafter instead of fresh ones."),
    stop_after_s: float = typer.Option(0.0, min=0.0, help="Save and stop after so many seconds; 0: never."),
    threads: int = typer.Option(0, min=0, help="CPU threads; 0 leaves torch's own number."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Train a drafter. Started again with the same --out, it goes on from the last checkpoint, bit for bit."""
    import torch

    from ddtree.models.hub import locate
    from ddtree.models.load import load_target
    from ddtree.training.checkpoint import latest, read_state
    from ddtree.training.config import read_config
    from ddtree.training.examples import load_examples
    from ddtree.training.parallel import join_group
    from ddtree.training.start import load_edge_weights, load_weights, new_drafter, resolve_device, resolve_dtype
    from ddtree.training.trainer import Trainer

    recipe = read_config(config, {"data": data, "out": out, **_assignments(set_)})
    # Not measured as elsewhere: sums in another order would make a resumed run differ in its last bits.
    if threads:
        torch.set_num_threads(threads)
    group = join_group(os.environ)
    device = resolve_device(recipe.device, int(os.environ.get("LOCAL_RANK", "0")))
    target = load_target(
        locate(recipe.target, cache_dir=cache_dir()).folder, resolve_dtype(recipe.dtype, device), device
    )
    examples = load_examples(Path(recipe.data), target.spec.vocab_size, recipe.max_length)
    drafter = new_drafter(recipe, target)
    if init_from is not None:
        load_weights(drafter[1], init_from)
    trainer = Trainer(recipe, target, drafter, examples, group)
    if init_from is not None and trainer.edges is not None:
        load_edge_weights(trainer.edges, init_from)
    run = Path(recipe.out)
    state = latest(run)
    if state is not None:
        trainer.resume(read_state(state))
    if group.leads:
        _announce(trainer, examples, state)
    reports = _run(trainer, run, stop_after_s)
    group.leave()
    if as_json and group.leads:
        print_json(reports)


def _run(trainer: Trainer, run: Path, stop_after_s: float) -> dict[str, Any]:
    """Train, validate and save by the recipe's intervals, or until the time is up."""
    from ddtree.training.checkpoint import latest
    from ddtree.training.record import RunLog

    recipe, leads = trainer.config, trainer.group.leads
    started, first = time.monotonic(), trainer.step
    steps: list[dict[str, Any]] = []
    validations: list[dict[str, Any]] = []
    log = RunLog(run) if leads else None
    state = latest(run)
    saved = state.parent if state else None
    if trainer.step >= recipe.steps and leads:
        notes.print(f"step {trainer.step} of {recipe.steps}: nothing left to do; --set steps=N trains further")

    def tell(rows: list[dict[str, Any]], row: dict[str, Any], line: str) -> None:
        if log is not None:
            rows.append(row)
            notes.print(line)
            log.write(row)

    for report in trainer.steps():
        spent = time.monotonic() - started
        pace = spent / (report.step - first)
        # Clocks differ between processes, so they decide together.
        late = bool(stop_after_s) and spent > stop_after_s
        out_of_time = trainer.group.any(late, trainer.device)
        last = report.step == recipe.steps or out_of_time
        tell(steps, _step_row(report, spent), _step_line(report, recipe.steps, pace))
        if last or report.step % recipe.validate_every < recipe.log_every:
            validation = trainer.validate()
            tell(validations, _validation_row(validation), _validation_line(validation))
        if last or report.step % recipe.checkpoint_every < recipe.log_every:
            saved = trainer.save(run)
        if out_of_time:
            break
    return {"steps": steps, "validations": validations, "checkpoint": str(saved) if saved else None}


def _announce(trainer: Trainer, examples: Examples, state: Path | None) -> None:
    recipe = trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    notes.print(f"drafter of {parameters / 1e6:.1f} M parameters for {recipe.target}; {len(examples):,} examples")
    if examples.too_short:
        notes.print(f"{examples.too_short:,} examples left out: fewer than two answer tokens")
    if examples.cut:
        notes.print(f"{examples.cut:,} examples cut at max_length, {recipe.max_length} tokens")
    kept = "captured anew each step"
    if recipe.feature_cache_dir:
        kept = f"kept in {Path(recipe.feature_cache_dir).name}"
    elif recipe.feature_cache_gib:
        kept = "kept on the device"
    notes.print(f"features of all examples take {trainer.feature_gib:.1f} GiB: {kept}")
    for key in recipe.__slots__:
        notes.print(f"  {key} = {getattr(recipe, key)!r}")
    if state is not None:
        notes.print(f"resuming from {state.parent.name}")


def _step_row(report: StepReport, spent_s: float) -> dict[str, Any]:
    return {
        "step": report.step,
        "loss": report.loss,
        "edge_loss": report.edge_loss,
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.rate,
        "accuracy": list(report.accuracy),
        "seconds": round(spent_s, 2),
    }


def _step_line(report: StepReport, steps: int, pace_s: float) -> str:
    left = (steps - report.step) * pace_s
    shown = " ".join(f"{a:.2f}" for a in report.accuracy[:4])
    return (
        f"step {report.step}/{steps}  loss {report.loss:.4f}  norm {report.gradient_norm:.2f}  top-1 {shown}  "
        f"{pace_s * 1000:.0f} ms a step, {report.blocks / pace_s:,.0f} blocks/s, {left / 60:.1f} min left"
    )


def _validation_row(report: ValidationReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "chain": report.chain.length,
        f"tree-{report.budget}": report.tree.length,
        "tokens": report.chain.tokens,
    }


def _validation_line(report: ValidationReport) -> str:
    return (
        f"step {report.step}: acceptance length {report.chain.length:.3f} chain, "
        f"{report.tree.length:.3f} tree of {report.budget}, on {report.chain.tokens:,} held-out tokens"
    )


def _assignments(pairs: list[str]) -> dict[str, Any]:
    """key=value pairs with TOML values; bare words are strings."""
    import tomllib

    from ddtree.errors import ConfigError

    values: dict[str, Any] = {}
    for pair in pairs:
        key, found, text = pair.partition("=")
        if not found or not key.isidentifier():
            raise ConfigError(f"--set needs key=value: got {pair!r}")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except ValueError:  # no TOML, or a number too long to read
            values[key] = text
    return values
