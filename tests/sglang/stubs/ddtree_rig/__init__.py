"""A second SGLang plugin, for tests alone: a CPU attention backend that knows tree masks, a drafter that knows the
future, and faults on purpose.

DDTREE_RIG names a folder. `oracle.json` in it tells what the drafter proposes; `fault` names a fault that the next
rounds have; `record.jsonl`, where there is one, gets what the real drafter's head said, and of which states. All
are looked at in every round, so that one engine serves many tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

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

    def fault() -> str:
        path = folder / "fault"
        return path.read_text() if path.exists() else ""

    compact, sees, positions = worker.compact, verify.tree_sees, verify.positions
    worker.compact = lambda *args: None if fault() == "no move" else compact(*args)

    def tree_sees(tree: Any) -> Any:
        return sees(tree) | (torch.ones_like(sees(tree)).tril() if fault() == "causal" else False)

    def tree_positions(tree: Any, starts: Any) -> Any:
        rows = torch.arange(tree.rows).expand(tree.depths_RN.shape)
        return starts[:, None] + rows if fault() == "positions" else positions(tree, starts)

    verify.tree_sees, verify.positions = tree_sees, tree_positions


def _foresee(folder: Path) -> None:
    """Proposals from `oracle.json`: for each known prompt, logits of some tokens at each position after it."""
    from ddtree.models.edges import EdgeTables
    from ddtree.sglang_plugin.draft import BlockDrafter
    from ddtree.sglang_plugin.head import DraftHead

    hidden, logits, edges = BlockDrafter.hidden, DraftHead._logits, EdgeTables.__call__

    def foreseen(self: Any, batch: Any, anchors_R: Any, window: Any) -> Any:
        drafted = hidden(self, batch, anchors_R, window)  # the real drafter runs all the same
        if (folder / "record.jsonl").exists():
            said = logits(self._host._chooser._head, drafted.flatten(0, 1)).view(*drafted.shape[:2], -1)
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
        given = hidden_Mh.shape[-1] > self._head.weight.shape[-1]
        return hidden_Mh[:, : self.shard.size].float() if given else logits(self, hidden_Mh)

    def of_real_states(self: Any, anchors_R: Any, tokens_RDK: Any, state_RDh: Any) -> Any:
        return edges(self, anchors_R, tokens_RDK, state_RDh[..., -self.net.state.in_features :])

    BlockDrafter.hidden, DraftHead._logits, EdgeTables.__call__ = foreseen, as_given, of_real_states
