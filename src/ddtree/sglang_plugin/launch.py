"""From SGLang's arguments to DDTREE's settings, before anything loads.

Invariant: combinations that cannot work are refused here, by name, and everything that later asks for a width
(reservation, graphs, masks, output) reads the one that is written here.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_config

from ddtree.errors import ConfigError, UnsupportedError
from ddtree.sglang_plugin.backends import require_tree_backend
from ddtree.sglang_plugin.edges import draft_edges
from ddtree.sglang_plugin.flags import flags_of
from ddtree.sglang_plugin.host import SUPPORTED
from ddtree.sglang_plugin.settings import Settings, resolve

__all__ = ["draft_config_of", "draft_hf_config", "refuse_windows", "settle"]

logger = logging.getLogger(__name__)

DEFAULT_RUNNING = 48  # what SGLang sets for its own speculative algorithms
# Drafter families that propose in a way of their own, by what parse_dflash_draft_config reads.
FOREIGN = {"is_domino": "Domino", "selector_rank": "DFlash 2", "conv_kernel_size": "DFlash 2"}


def settle(server_args: Any) -> Settings:
    """Refuse what cannot work, then write what SGLang's other parts will read."""
    _refuse(server_args)
    draft = draft_config_of(server_args)
    block_size = server_args.speculative_dflash_block_size or draft.resolve_block_size(default=16)
    target = model_config_of(server_args)
    _check_layers(draft, int(target.hf_text_config.num_hidden_layers))
    hybrid = mambaish_config(target) is not None
    settings = resolve(
        flags_of(server_args),
        block_size=int(block_size),
        num_draft_tokens=server_args.speculative_num_draft_tokens,
        hybrid=hybrid,
    )
    window = server_args.speculative_draft_window_size
    if window is not None and window < settings.block_size:
        raise ConfigError(
            f"--speculative-draft-window-size {window} is shorter than a draft block of {settings.block_size}, "
            "which "
            "must see itself; give at least the block size"
        )
    prefill_backend, decode_backend = attention_backends_of(server_args)
    target_backend = decode_backend if server_args.speculative_attention_mode == "decode" else prefill_backend
    if settings.plan.capabilities.verifies_trees:
        require_tree_backend(target_backend)
        refuse_windows(bool(target.is_hybrid_swa))
    # Before SGLang loads it among the drafter's weights, with an error that names neither file nor mend.
    draft_edges(server_args, int(target.hf_text_config.hidden_size), torch.float32, torch.device("cpu"))
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = 1
    server_args.speculative_dflash_block_size = settings.block_size
    server_args.speculative_num_draft_tokens = settings.width
    server_args.speculative_draft_attention_backend = _draft_backend(server_args, target_backend)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = DEFAULT_RUNNING
    if server_args.device == "cpu":
        server_args.disable_overlap_schedule = True
    for notice in settings.notices:
        logger.warning("DDTREE: %s", notice)
    logger.info(
        "DDTREE: mode %s, blocks of %d, budget %d, %d rows a request",
        settings.mode,
        settings.block_size,
        settings.plan.budget,
        settings.width,
    )
    return settings


def draft_config_of(server_args: Any) -> Any:
    """The drafter's configuration as SGLang reads it. UnsupportedError names families other than plain DFlash."""
    draft = parse_dflash_draft_config(draft_hf_config=draft_hf_config(server_args))
    for attribute, family in FOREIGN.items():
        if getattr(draft, attribute):
            raise UnsupportedError(
                f"{server_args.speculative_draft_model_path} is a {family} drafter, which proposes in a way of "
                "its "
                "own; trees are built from plain DFlash drafters, so use --speculative-algorithm DFLASH for "
                "this one"
            )
    return draft


def draft_hf_config(server_args: Any) -> Any:
    """The drafter's configuration as Hugging Face reads it, read as SGLang reads it."""
    return get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )


def refuse_windows(windowed: bool) -> None:
    """UnsupportedError for trees on targets with sliding windows. SGLang's kernels measure a window in rows, and
    in a tree a row's number is not its depth: rows behind siblings would see a shorter window, and say something
    else."""
    if windowed:
        raise UnsupportedError(
            "the target has sliding-window layers, whose windows SGLang measures in rows, so the rows of a tree "
            "would see too little; use --speculative-ddtree-mode chain"
        )


def _check_layers(draft: Any, target_layers: int) -> None:
    """UnsupportedError when SGLang would not hand out a layer that the drafter reads: then every draft is
    nonsense.

    SGLang takes a layer's output where the next layer begins, so it never sees the last one's.
    """
    ids = draft.resolve_target_layer_ids(target_num_layers=target_layers)
    if target_layers - 1 in ids:
        raise UnsupportedError(
            f"the drafter reads the outputs of target layers {list(ids)}, and SGLang {SUPPORTED} does not "
            "capture that "
            f"of the last one, {target_layers - 1}; use a drafter whose dflash_config.target_layer_ids end earlier"
        )


def _refuse(server_args: Any) -> None:
    """ConfigError for launch options that DDTREE does not go with, each with its reason and mend."""
    if server_args.speculative_draft_model_path is None:
        raise ConfigError("DDTREE needs a drafter; give one with --speculative-draft-model-path")
    refusals = (
        (not str(server_args.device).startswith(("cuda", "cpu")), f"--device {server_args.device}", "use cuda"),
        (server_args.pp_size != 1, "--pp-size above 1", "use tensor parallelism"),
        (server_args.enable_dp_attention, "--enable-dp-attention", "run replicas behind a router"),
        (server_args.disaggregation_mode != "null", "--disaggregation-mode", "serve prefill and decode together"),
        (server_args.speculative_adaptive, "--speculative-adaptive", "its steps are EAGLE's; leave it out"),
        (server_args.enable_two_batch_overlap, "--enable-two-batch-overlap", "leave it out"),
        (server_args.rl_on_policy_target is not None, "--rl-on-policy-target", "leave it out"),
    )
    for unwanted, option, mend in refusals:
        if unwanted:
            raise ConfigError(f"DDTREE does not go with {option}: it has never been shown to be right; {mend}")


def _draft_backend(server_args: Any, target_backend: str | None) -> str:
    """The drafter's attention backend: as given, else the target's."""
    wanted = server_args.speculative_draft_attention_backend or target_backend
    if wanted in DRAFT_ATTENTION_BACKEND_CHOICES:
        return str(wanted)
    raise ConfigError(
        f"the drafter cannot run on attention backend {wanted}; give --speculative-draft-attention-backend, one "
        "of "
        f"{', '.join(DRAFT_ATTENTION_BACKEND_CHOICES)}"
    )
