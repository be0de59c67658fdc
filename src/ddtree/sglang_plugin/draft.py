"""One block for every request, by SGLang's drafter, on SGLang's memory.

The block is exactly [anchor, MASK x (b - 1)] at the positions from the anchor on; it writes the first b slots of
the window that the verification writes afterwards. With a draft window the drafter reads a table of its own over
the last committed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from ddtree.models.block import block_tokens
from ddtree.sglang_plugin.window import Window

if TYPE_CHECKING:
    from ddtree.sglang_plugin.worker import DDTreeWorker

__all__ = ["BlockDrafter"]


class BlockDrafter:
    """Drafts with the drafter of a worker. It keeps no state of requests: their drafter KV stands in SGLang's
    pool."""

    def __init__(self, host: DDTreeWorker, block_size: int, mask_token_id: int) -> None:
        self._host = host
        self._block_size = block_size
        self._mask_token_id = mask_token_id
        self._place_b = torch.arange(block_size, device=host.device)
        self._block_info = make_draft_block_spec_info(draft_token_num=block_size, device=host.device)

    def hidden(self, batch: Any, anchors_R: Tensor, window: Window) -> Tensor:
        """The drafter's hidden states at the masked positions. [R, b - 1, h]."""
        host, size = self._host, self._block_size
        tokens_Rb = block_tokens(anchors_R, size, self._mask_token_id)
        positions_Rb = window.prefix_R[:, None] + self._place_b
        slots_Rb = window.slots_RN[:, :size].contiguous()
        plan = window.plan(host.target_worker.model_runner.kv_index_translator, slots_Rb)
        lengths_R, host_lengths_R, plan = self._reads(batch, window, slots_Rb, plan)
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=window.sequences,
            input_ids=tokens_Rb.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lengths_R,
            out_cache_loc=slots_Rb.flatten(),
            seq_lens_sum=int(host_lengths_R.sum()),
            seq_lens_cpu=host_lengths_R,
            positions=positions_Rb.flatten(),
            input_embeds=self._embed(tokens_Rb),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._block_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=window.token_count(size),
            global_num_token_non_padded_cpu=window.sequences * size,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward, host.draft_model_runner.kv_index_translator)
        with torch.inference_mode(), draft_tp_context(host.draft_parallel_layout):
            output = host.draft_model_runner.forward(forward).logits_output
        assert output.hidden_states is not None, "the drafter's model returns hidden states"
        return output.hidden_states.view(window.sequences, size, -1)[:, 1:]

    def _embed(self, tokens_Rb: Tensor) -> Tensor:
        """The target's embedding of the block, one row a token, at the target's own scale."""
        embedded_Mh = self._host.embedding(tokens_Rb).flatten(0, 1)
        scale = self._host.noise_embedding_scale
        return embedded_Mh if scale == 1.0 else embedded_Mh * scale

    def _reads(
        self, batch: Any, window: Window, slots_Rb: Tensor, plan: KVLocPlan
    ) -> tuple[Tensor, Tensor, KVLocPlan]:
        """What the block reads before itself: lengths on the device, bounds for them on the host, and the plan."""
        host, size = self._host, self._block_size
        if not host.use_compact_draft_cache:
            return window.prefix_R, (window.bounds_R + size).to(torch.int32), plan
        host._ensure_draft_block_buffers(window.sequences)
        lengths_R = host._compute_compact_draft_seq_lens(window.prefix_R)
        bounds_R = torch.empty(window.sequences, dtype=torch.int32)
        host._compute_compact_draft_seq_lens_host(window.bounds_R, out=bounds_R)
        host._rebuild_compact_draft_cache(
            req_pool_indices=batch.req_pool_indices,
            prefix_lens=window.prefix_R,
            draft_prefix_lens=lengths_R,
            verify_out_cache_loc_2d=slots_Rb,
            bs=window.sequences,
            block_size=size,
        )
        reads = plan.reads_from(
            host.draft_model_runner.kv_index_translator,
            seq_lens=lengths_R,
            seq_lens_cpu=bounds_R,
            read_extent=size,
        )
        return lengths_R, bounds_R, reads
