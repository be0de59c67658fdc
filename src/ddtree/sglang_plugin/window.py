"""The slots behind the committed tokens that one round may write, and the lengths that they hang from.

Lengths on the device are the truth. Under overlap scheduling the host may know only a bound that is ahead of them;
it sizes buffers and never places anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded
from torch import Tensor

__all__ = ["Window", "open_window"]


@dataclass(frozen=True, slots=True)
class Window:
    """N reserved slots for each of R requests.

    prefix_R: int64, committed positions, on the device. bounds_R: int64 on the host, at least as much. exact: the
    bounds are the lengths themselves. slots_RN: int64. rows_R: the requests' rows in SGLang's pool.
    """

    prefix_R: Tensor
    bounds_R: Tensor
    exact: bool
    slots_RN: Tensor
    rows_R: Tensor

    @property
    def sequences(self) -> int:
        return self.slots_RN.shape[0]

    def plan(self, translator: Any, slots_RW: Tensor) -> KVLocPlan:
        """SGLang's plan of a forward pass that writes some of the slots."""
        return translator.plan(
            req_pool_indices=self.rows_R,
            seq_lens=self.prefix_R,
            seq_lens_cpu=self.bounds_R,
            write_virtual=slots_RW.flatten(),
            read_extent=slots_RW.shape[1],
        )

    def token_count(self, rows: int) -> Tensor | None:
        """The number of real tokens on the device, where SGLang's expert parallelism wants it."""
        if not enable_num_token_non_padded():
            return None
        return torch.full((), self.sequences * rows, dtype=torch.int32, device=self.slots_RN.device)


def open_window(batch: Any, draft_input: Any, req_to_token: Tensor, rows: int) -> Window:
    """The window of a decode batch. The scheduler reserved it when it prepared the batch."""
    prefix_R = batch.seq_lens
    if prefix_R.is_cuda:  # carried over from the round before, which may have run on another stream
        prefix_R.record_stream(torch.cuda.current_stream())
    slots_M = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=req_to_token,
        start_offset=prefix_R,
        end_offset=prefix_R + rows,
        batch_size=len(prefix_R),
        draft_token_num=rows,
        device=prefix_R.device,
    )
    exact = batch.seq_lens_cpu is not None
    bounds_R = batch.seq_lens_cpu if exact else draft_input.nxt_kv_lens_cpu
    assert bounds_R is not None, "the scheduler knows lengths, or the reservation that bounds them"
    return Window(
        prefix_R, bounds_R.to(torch.int64), exact, slots_M.view(-1, rows).to(torch.int64), batch.req_pool_indices
    )
