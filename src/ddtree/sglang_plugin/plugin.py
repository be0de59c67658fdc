"""The entry point that SGLang calls, without arguments, before it reads its command line and in every process.

SGLang logs an exception of a plugin and goes on without it; a server that was asked for DDTREE would then fail
later, or run without it. So a failure here ends the process, with one message."""

from __future__ import annotations

import traceback

from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.host import HOOKED

__all__ = ["register"]


def register() -> None:
    """Check SGLang, then register DDTREE, its options and its hooks. SystemExit when anything fails."""
    try:
        _register()
    except SystemExit:
        raise
    except Exception as error:  # whatever it is, SGLang must not go on as if the plugin were there
        traceback.print_exc()
        raise SystemExit(f"ddtree: the plugin could not be registered: {error}") from error


def _register() -> None:
    found = contract.differences()
    if found:
        raise SystemExit(contract.refusal(found))
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ddtree.sglang_plugin.algorithm import NAME, DDTreeAlgorithm, worker_class

    unanswered = contract.unanswered(DDTreeAlgorithm, SpeculativeAlgorithm)
    if unanswered:
        raise SystemExit(contract.refusal([f"algorithms are asked {', '.join(unanswered)}"]))
    _hook()
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)(worker_class)


def _hook() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ddtree.sglang_plugin import flags, hooks

    hooked = {
        "add_cli_args": flags.add_options,
        "from_cli_args": flags.from_arguments,
        "spec_need_hidden_states": hooks.need_hidden_states,
        "create_dummy_verify_input": hooks.dummy_verify_input,
        "resolve_dflash_verify_mask_policy": hooks.verify_mask_policy,
        "validate_dflash_request": hooks.validate_request,
        "_add_speculative": hooks.add_speculative_state,
    }
    for target in HOOKED:
        HookRegistry.register(target, hooked[target.rsplit(".", 1)[1]], HookType.AROUND)
