"""Looking at an installed SGLang and a launch command without starting anything.

Checks go from the outside in, and each says what is wrong and the mend. Nothing is loaded but configurations and
the drafter's edge correction, which is small.
"""

from __future__ import annotations

import argparse
import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr
from importlib.metadata import entry_points
from typing import Any

import torch

from ddtree.errors import ConfigError, DDTreeError
from ddtree.models.edges import EDGES_FILE, EdgeNet
from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.demand import demand_of
from ddtree.sglang_plugin.diagnosis import Diagnosis, Finding
from ddtree.sglang_plugin.host import SUPPORTED
from ddtree.sglang_plugin.memory import Plan, plan_memory
from ddtree.sglang_plugin.settings import Settings

__all__ = ["examine"]

GROUP = "sglang.srt.plugins"


class _Settled:
    """SGLang's arguments with what settling writes over them."""

    def __init__(self, arguments: Any) -> None:
        object.__setattr__(self, "_arguments", arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_arguments"), name)


def examine(launch: str | None, plugins_variable: str | None, gpu_bytes: int | None) -> Diagnosis:
    """Check the stack and, when it stands, a launch command. plugins_variable: SGLANG_PLUGINS, which names the
    plugins that SGLang may load. gpu_bytes: the memory of one GPU, None when there is none to plan for."""
    findings = list(_stack(plugins_variable))
    if launch is None or not all(finding.state == "ok" for finding in findings):
        return Diagnosis(tuple(findings))
    try:
        arguments = _Settled(_parse(launch))
        if str(arguments.speculative_algorithm).upper() != "DDTREE":
            raise ConfigError(
                f"the command's speculative algorithm is {arguments.speculative_algorithm}; give "
                "--speculative-algorithm DDTREE"
            )
        if arguments.attention_backend is None:
            setattr(arguments, "attention_backend", "triton")  # noqa: B010 - SGLang's field, unknown to types
            note = "none given: SGLang chooses one by GPU and model; --attention-backend triton is known to work"
            findings.append(Finding("attention backend", "warning", note))
        from ddtree.sglang_plugin.launch import settle

        settings = settle(arguments)
    except DDTreeError as error:
        findings.append(Finding("launch command", "wrong", str(error)))
        return Diagnosis(tuple(findings))
    except (ValueError, AssertionError, OSError) as error:  # SGLang's own refusals, files that are not there
        findings.append(Finding("launch command", "wrong", f"SGLang refuses it: {error}"))
        return Diagnosis(tuple(findings))
    width = f"mode {settings.mode}, blocks of {settings.block_size}, {settings.width} rows a request"
    findings.append(Finding("launch command", "ok", width))
    findings += [Finding("mode", "warning", notice) for notice in settings.notices]
    findings += _models(arguments)
    edges = _edges(arguments, settings)
    findings.append(_judge_edges(arguments, edges, settings))
    plan = None
    if gpu_bytes is None:
        findings.append(Finding("memory", "warning", "no GPU here to plan for; give --gpu-memory-gib"))
    else:
        demand = demand_of(arguments, settings, edges)
        if isinstance(demand, Finding):
            findings.append(demand)
        else:
            plan = plan_memory(gpu_bytes, demand)
            findings.append(_judge(plan, arguments))
    return Diagnosis(tuple(findings), settings, plan)


def _stack(plugins_variable: str | None) -> Iterator[Finding]:
    found = contract.installed_version()
    if found is None:
        yield Finding("SGLang", "wrong", f"not installed here; pip install sglang=={SUPPORTED}")
        return
    differences = contract.differences()
    if differences:
        yield Finding("SGLang", "wrong", contract.refusal(differences))
        return
    state = "ok" if found == SUPPORTED else "warning"
    yield Finding("SGLang", state, f"{found}; ddtree is tested with {SUPPORTED}")
    names = [entry.name for entry in entry_points(group=GROUP) if entry.value.startswith("ddtree.")]
    if not names:
        yield Finding("plugin", "wrong", "not registered as an entry point; install ddtree again with pip")
        return
    allowed = {part.strip() for part in (plugins_variable or "").split(",") if part.strip()}
    if allowed and not allowed & set(names):
        mend = f"add {names[0]} to it or unset it"
        yield Finding("plugin", "wrong", f"SGLANG_PLUGINS={plugins_variable} keeps ddtree out; {mend}")
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        answers = SpeculativeAlgorithm.from_string("DDTREE").is_dflash()
    except ValueError:
        answers = False
    if not answers:
        yield Finding("plugin", "wrong", "SGLang does not know DDTREE although the plugin is installed")
        return
    yield Finding("plugin", "ok", "loaded; SpeculativeAlgorithm.from_string('DDTREE').is_dflash() is True")


def _parse(launch: str) -> Any:
    """SGLang's arguments of a command line such as `python -m sglang.launch_server --model-path ...`."""
    from sglang.srt.server_args import ServerArgs

    words = shlex.split(launch)
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return ServerArgs.from_cli_args(parser.parse_args(words[first:]))
    except SystemExit:
        lines = complaint.getvalue().strip().splitlines()
        raise ConfigError(f"SGLang does not understand the command: {lines[-1] if lines else launch}") from None


def _models(arguments: Any) -> Iterator[Finding]:
    """Whether target and drafter were made for each other, and whether the target hands out its features."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from ddtree.sglang_plugin.launch import draft_config_of, draft_hf_config

    target = model_config_of(arguments).hf_text_config
    hf = draft_hf_config(arguments)
    text, draft = getattr(hf, "text_config", None) or hf, draft_config_of(arguments)
    wrong = []
    if int(text.hidden_size) != int(target.hidden_size):
        wrong.append(f"the drafter's hidden size is {text.hidden_size}, the target's {target.hidden_size}")
    if draft.num_target_layers not in (None, int(target.num_hidden_layers)):
        wrong.append(
            f"the drafter was made for {draft.num_target_layers} layers, the target has {target.num_hidden_layers}"
        )
    if draft.mask_token_id is not None and not 0 <= draft.mask_token_id < int(target.vocab_size):
        wrong.append(f"the mask token {draft.mask_token_id} is outside the vocabulary of {target.vocab_size}")
    if wrong:
        yield Finding("drafter and target", "wrong", "; ".join(wrong) + "; take the drafter of this target")
    else:
        layers = draft.resolve_target_layer_ids(target_num_layers=int(target.num_hidden_layers))
        yield Finding("drafter and target", "ok", f"match; features of target layers {list(layers)}")
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    context = arguments.context_length or int(getattr(target, "max_position_embeddings", 0) or 0)
    if positions and context > positions:
        detail = f"the drafter has {positions} positions, the context {context}: acceptance falls beyond"
        yield Finding("context", "warning", detail + "; try --speculative-draft-window-size")
    yield _capture(arguments)


def _capture(arguments: Any) -> Finding:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.models.registry import ModelRegistry

    names = list(model_config_of(arguments).hf_config.architectures)
    cls, name = ModelRegistry.resolve_model_cls(names)
    if hasattr(cls, "set_dflash_layers_to_capture"):
        return Finding("features", "ok", f"{name} hands out the outputs of its layers")
    return Finding(
        "features", "wrong", f"SGLang's {name} has no set_dflash_layers_to_capture: no features, no drafts"
    )


def _edges(arguments: Any, settings: Settings) -> EdgeNet | None:
    """The edge correction that a server would draft with, which `settle` has found to be whole."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from ddtree.sglang_plugin.edges import draft_edges

    if not settings.plan.capabilities.drafts_blocks:
        return None
    hidden = int(model_config_of(arguments).hf_text_config.hidden_size)
    return draft_edges(arguments, hidden, torch.float32, torch.device("cpu"))


def _judge_edges(arguments: Any, edges: EdgeNet | None, settings: Settings) -> Finding:
    from ddtree.sglang_plugin.edges import weights_folder

    if edges is not None:
        return Finding("edges", "ok", f"{EDGES_FILE} beside the drafter is used: candidates are rescored by it")
    if not settings.plan.capabilities.drafts_blocks:
        return Finding("edges", "ok", "not used: this mode drafts nothing")
    if weights_folder(arguments) is None:
        return Finding(
            "edges", "warning", f"not known before the drafter's weights are here; {EDGES_FILE} among them is used"
        )
    return Finding("edges", "ok", f"not used: no {EDGES_FILE} beside the drafter")


def _judge(plan: Plan, arguments: Any) -> Finding:
    """What the plan means for the launch command."""
    given = arguments.mem_fraction_static
    advice = f"--mem-fraction-static {plan.fraction:.2f} leaves {plan.tokens:,} tokens of KV"
    if not plan.works:
        mend = "lower --context-length, --max-running-requests or the budget, or use more GPUs"
        return Finding("memory", "wrong", f"not one request of the whole context fits; {mend}")
    if given is not None and float(given) > plan.fraction + 0.005:
        return Finding(
            "memory",
            "wrong",
            f"--mem-fraction-static {given} leaves too little beside the KV pool, and the server would die "
            f"while it captures graphs, with a message that asks for more; {advice}",
        )
    wanted = int(arguments.max_running_requests)
    if plan.fitting < wanted:
        return Finding(
            "memory",
            "warning",
            f"{advice}, room for {plan.fitting} requests of the whole context, not {wanted}: more will wait or be "
            "preempted when all are that long",
        )
    return Finding("memory", "ok", f"{advice}, room for {plan.fitting} requests of the whole context")
