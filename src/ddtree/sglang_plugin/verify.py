"""All rows of all trees in one pass of the target, each row seeing its request's committed tokens and its
ancestors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from ddtree.errors import UnsupportedError
from ddtree.sglang_plugin.masks import MaskLayout, full_cells, pack_mask, tree_sees
from ddtree.sglang_plugin.window import Window
from ddtree.tree import DraftTree, positions

if TYPE_CHECKING:
    from ddtree.sglang_plugin.worker import DDTreeWorker

__all__ = ["Verified", "Verifier", "flat_rows", "gather_rows"]


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target returned. output: SGLang's own, with logits and features of every row."""

    output: Any
    features_RNF: Tensor | None
    result: Any


class Verifier:
    """Runs trees through the target of a worker. layout: None where rows are a chain, which needs no mask."""

    def __init__(self, host: DDTreeWorker, layout: MaskLayout | None, features: int) -> None:
        """features: the width of the captured context features, that of all feature layers together."""
        self._host = host
        self._layout = layout
        self._features = features
        self._longest = int(host.model_runner.model_config.context_len)

    def verify(self, batch: Any, tree: DraftTree, window: Window) -> Verified:
        """Run the trees. Leaves the batch's host lengths as it found them."""
        target = self._host.target_worker
        rows = tree.rows
        request = DFlashVerifyInput(
            draft_token=tree.tokens_RN.flatten(),
            positions=positions(tree, window.prefix_R).flatten(),
            draft_token_num=rows,
            custom_mask=self._mask(tree, window),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=window.plan(target.model_runner.kv_index_translator, window.slots_RN),
        )
        batch.out_cache_loc = window.slots_RN.flatten()
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        # What backends plan with: a bound of what they read, the window included where it is exact.
        batch.seq_lens_cpu = window.bounds_R + rows if window.exact else window.bounds_R
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward, _ = request.prepare_for_verify(batch, target)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        result = target.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        output = result.logits_output
        return Verified(output, self._check(output.hidden_states, tree), result)

    def _mask(self, tree: DraftTree, window: Window) -> Tensor | None:
        if self._layout is None:
            return None
        bounds_R = window.bounds_R.clamp(max=self._longest)
        return pack_mask(tree_sees(tree), window.prefix_R, self._layout, full_cells(bounds_R, tree.rows))

    def _check(self, hidden_MF: Tensor | None, tree: DraftTree) -> Tensor | None:
        """The features of every row. An error when this pass captured none, or too few layers."""
        if self._features == 0:
            return None
        found = 0 if hidden_MF is None else hidden_MF.shape[-1]
        if hidden_MF is None or found != self._features:
            raise UnsupportedError(
                f"the target's verification captured features of width {found} instead of {self._features}; the "
                "drafter would draft from stale context, so the server stops"
            )
        return hidden_MF[: tree.tokens_RN.numel()].view(*tree.tokens_RN.shape, -1)


def gather_rows(features_RNF: Tensor, path_RP: Tensor) -> Tensor:
    """Features of the rows on a path. [R, P, F]."""
    return features_RNF.gather(1, path_RP[..., None].expand(-1, -1, features_RNF.shape[-1]))


def flat_rows(path_RP: Tensor, rows: int) -> Tensor:
    """Rows of a path as rows of the whole batch. int64 [R, P]."""
    start_R1 = torch.arange(path_RP.shape[0], device=path_RP.device)[:, None] * rows
    return start_R1 + path_RP
