"""A second SGLang plugin, for tests alone: a CPU attention backend that knows tree masks, a drafter that knows the
future, and faults on purpose.

DDTREE_RIG names a folder. `oracle.json` in it tells what the drafter proposes; `fault` names a fault that the next
rounds have; `record.jsonl`, where there is one, gets what the real drafter's head said on the first rank, and of
which states. All are looked at in every round, so that one engine serves many tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["register"]

BACKEND = "cpu_ref"


def register() -> None:
    folder = os.environ.get("DDTREE_RIG")
    if folder is None:
        return
    from sglang.srt.arg_groups import choices

    choices.add_attention_backend_choices([BACKEND])
    choices.add_draft_attention_backend_choices([BACKEND])
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND)(_cpu_backend)
    # Deterministic mode wants GPU kernels whose rows do not depend on the batch; the rig's attention is such.
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    from ddtree.sglang_plugin import algorithm, backends
    from ddtree.sglang_plugin.masks import MaskLayout

    backends.allow_tree_backend(BACKEND, MaskLayout.ROWS)
    original = algorithm.worker_class

    def worker_class(server_args: Any) -> type:
        worker = original(server_args)
        _keep_dtype()
        _spoil(Path(folder))
        _part_ranks(Path(folder))
        _foresee(Path(folder))
        return worker

    from sglang.srt.speculative.spec_registry import _REGISTRY

    # Plugins load in any order: patch what is registered, else what will be.
    if algorithm.NAME in _REGISTRY:
        _REGISTRY[algorithm.NAME].factory = worker_class
    algorithm.worker_class = worker_class


def _cpu_backend(runner: Any) -> Any:
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    # The backend asks this before it reads a mask: 1 is a chain.
    DFlashVerifyInput.tree_topk = property(lambda self: 1 if self.custom_mask is None else -1)
    return IntelAMXAttnBackend(runner)


def _keep_dtype() -> None:
    """SGLang casts a drafter's embeddings to bfloat16, which a float32 drafter cannot multiply."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner._extend_forward_kwargs

    def uncast(self: Any, forward_batch: Any, pp_proxy_tensors: Any) -> dict[str, Any]:
        keywords = original(self, forward_batch, pp_proxy_tensors)
        if "input_embeds" in keywords:
            keywords["input_embeds"] = forward_batch.input_embeds
        return keywords

    ModelRunner._extend_forward_kwargs = uncast


def _spoil(folder: Path) -> None:
    """Faults: keys and values stay where they are, rows see all rows before them, positions count rows."""
    from ddtree.sglang_plugin import verify, worker

    compact, sees, positions = worker.compact, verify.tree_sees, verify.positions
    worker.compact = lambda *args: None if _fault(folder) == "no move" else compact(*args)

    def tree_sees(tree: Any) -> Any:
        return sees(tree) | (torch.ones_like(sees(tree)).tril() if _fault(folder) == "causal" else False)

    def tree_positions(tree: Any, starts: Any) -> Any:
        rows = torch.arange(tree.rows).expand(tree.depths_RN.shape)
        return starts[:, None] + rows if _fault(folder) == "positions" else positions(tree, starts)

    verify.tree_sees, verify.positions = tree_sees, tree_positions


def _part_ranks(folder: Path) -> None:
    """Faults of tensor parallelism: the second rank ranks tokens the other way round, has other edges, chooses
    other tokens; its word counts instead of the first one's; each shard's tokens are named from 0 on."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    from ddtree.models.edges import EdgeTables
    from ddtree.sglang_plugin import head
    from ddtree.sglang_plugin.choices import Chooser

    ranked, edges, decide, top = head.DraftHead.ranked, EdgeTables.__call__, Chooser.decide, head.shard_top
    sync = SpecTpSync.sync

    def strays(fault: str) -> bool:
        return get_parallel().tp_rank == 1 and _fault(folder) == fault

    def other_ranked(self: Any, *arguments: Any) -> Any:
        said = ranked(self, *arguments)
        return tuple(part.flip(-1) for part in said) if strays("ranking") else said

    def other_edges(self: Any, *arguments: Any) -> Any:
        said = edges(self, *arguments)
        return -said if strays("edges") else said

    def other_choices(self: Any, choices_RN: Any, turn: Any) -> Any:
        return decide(self, choices_RN + 1 if strays("choices") else choices_RN, turn)

    def other_sync(self: Any, site: Any, values: Any) -> Any:
        return self._tp_group.broadcast(values, src=1) if _fault(folder) == "second" else sync(self, site, values)

    def nameless_top(logits_MV: Any, shard: Any, *arguments: Any) -> Any:
        named = head.Shard(0, shard.size) if _fault(folder) == "local names" else shard
        return top(logits_MV, named, *arguments)

    head.DraftHead.ranked, EdgeTables.__call__, Chooser.decide = other_ranked, other_edges, other_choices
    head.shard_top, SpecTpSync.sync = nameless_top, other_sync


def _fault(folder: Path) -> str:
    try:
        return (folder / "fault").read_text()
    except FileNotFoundError:  # also when it goes while the second rank still ends its round
        return ""


def _foresee(folder: Path) -> None:
    """Proposals from `oracle.json`: for each known prompt, logits of some tokens at each position after it."""
    from sglang.srt.runtime_context import get_parallel

    from ddtree.models.edges import EdgeTables
    from ddtree.sglang_plugin.draft import BlockDrafter
    from ddtree.sglang_plugin.head import DraftHead

    hidden, logits, edges = BlockDrafter.hidden, DraftHead._logits, EdgeTables.__call__

    def foreseen(self: Any, batch: Any, anchors_R: Any, window: Any) -> Any:
        drafted = hidden(self, batch, anchors_R, window)  # the real drafter runs all the same
        if (folder / "record.jsonl").exists() and get_parallel().tp_rank == 0:
            head = self._host._chooser._head
            said = logits(head, drafted.flatten(0, 1))[:, : head.shard.size].view(*drafted.shape[:2], -1)
            entry = {"prefix": window.prefix_R.tolist(), "anchor": anchors_R.tolist(), "logits": said.tolist()}
            entry["states"] = drafted.tolist()
            with (folder / "record.jsonl").open("a") as record:
                record.write(json.dumps(entry) + "\n")
        known = json.loads((folder / "oracle.json").read_text())
        if not known:
            return drafted
        vocabulary = self._host.model_runner.model_config.vocab_size
        wanted = torch.zeros(*drafted.shape[:2], vocabulary)
        for r, request in enumerate(batch.reqs):
            prompt = list(request.origin_input_ids)
            steps = next((entry["steps"] for entry in known if entry["prompt"] == prompt), [])
            first = int(window.prefix_R[r]) + 1 - len(prompt)
            for depth, step in enumerate(steps[first : first + wanted.shape[1]]):
                for token, logit in step:
                    wanted[r, depth, token] = logit
        return torch.cat([wanted, drafted.float()], dim=-1)  # the real states stay: edges read them

    def as_given(self: Any, hidden_Mh: Any) -> Any:
        columns, width = self._head.weight.shape
        if hidden_Mh.shape[-1] <= width:
            return logits(self, hidden_Mh)
        given_MV = hidden_Mh[:, self.shard.first : self.shard.first + self.shard.size].float()
        return F.pad(given_MV, (0, columns - self.shard.size), value=9.0)  # as likely as padding could ever be

    def of_real_states(self: Any, anchors_R: Any, tokens_RDK: Any, state_RDh: Any) -> Any:
        return edges(self, anchors_R, tokens_RDK, state_RDh[..., -self.net.state.in_features :])

    BlockDrafter.hidden, DraftHead._logits, EdgeTables.__call__ = foreseen, as_given, of_real_states
