"""DDTREE's options on SGLang's command line, and how they reach the scheduler's processes.

SGLang knows its own fields only, so the flags travel as one frozen value beside them on `ServerArgs`, which
survives pickling. `server_args` does for `sglang.Engine` what the command line does for the server."""

from __future__ import annotations

import argparse
from typing import Any

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.settings import MODES, Flags

__all__ = ["add_options", "flags_of", "from_arguments", "server_args"]

ATTRIBUTE = "_ddtree_flags"
OLD_WINDOW = "speculative_dflash_draft_window_size"
WINDOW = "speculative_draft_window_size"


def add_options(original: Any, parser: argparse.ArgumentParser) -> None:
    """Around `ServerArgs.add_cli_args`."""
    original(parser)
    group = parser.add_argument_group("DDTREE")
    group.add_argument(
        "--speculative-ddtree-budget",
        type=int,
        default=None,
        help="Nodes of a draft tree besides its root, 1 to 255. Default: 31, or block size - 1 if that is more.",
    )
    group.add_argument(
        "--speculative-ddtree-mode",
        choices=list(MODES),
        default="tree",
        help=(
            "tree; chain (the drafter's best path alone); shadow-linear (verifies the tree, commits the "
            "chain); off."
        ),
    )
    group.add_argument(
        "--speculative-ddtree-coupled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="When sampling, draft with the noise that the target is judged with. Never changes what is said.",
    )
    group.add_argument(
        "--speculative-ddtree-allow-hybrid-unsafe",
        action="store_true",
        help="Verify trees on targets with recurrent layers although siblings leak into each other there.",
    )
    group.add_argument(
        "--" + OLD_WINDOW.replace("_", "-"),
        type=int,
        default=None,
        help="Older spelling of --speculative-draft-window-size.",
    )


def from_arguments(original: Any, cls: type, arguments: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`."""
    old, new = getattr(arguments, OLD_WINDOW, None), getattr(arguments, WINDOW, None)
    if old is not None and new is not None and old != new:
        raise ConfigError(
            f"--speculative-draft-window-size {new} and its older spelling "
            f"--speculative-dflash-draft-window-size {old} differ; give one of them"
        )
    if old is not None:
        setattr(arguments, WINDOW, old)
    built = original(cls, arguments)
    flags = Flags(
        budget=getattr(arguments, "speculative_ddtree_budget", None),
        mode=getattr(arguments, "speculative_ddtree_mode", "tree"),
        coupled=getattr(arguments, "speculative_ddtree_coupled", True),
        allow_hybrid_unsafe=getattr(arguments, "speculative_ddtree_allow_hybrid_unsafe", False),
    )
    setattr(built, ATTRIBUTE, flags)
    return built


def flags_of(server_args: Any) -> Flags:
    """The flags that travel with SGLang's arguments; defaults where none were given."""
    return getattr(server_args, ATTRIBUTE, None) or Flags()


def server_args(flags: Flags, **fields: Any) -> Any:
    """Arguments for `sglang.Engine(server_args=...)` with DDTREE as the algorithm."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    built = ServerArgs(speculative_algorithm="DDTREE", **fields)
    setattr(built, ATTRIBUTE, flags)
    return built
