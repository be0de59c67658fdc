"""Plain torch in place of SGLang's compiled CPU operators, which the package index does not have. For tests alone.

Only what the tests reach is here; any other name raises when it is called. `convert_weight_packed` must stay
absent: on machines with AMX its presence would switch SGLang to other paths."""

import ctypes
from typing import Any

import torch
from torch import Tensor

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(rows, table, start, end, slots, width) -> None:
    """table[rows[i], start[i]:end[i]] = the next slots."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[taken : taken + last - first].to(table.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(rows, table, start, end, slots, width) -> None:
    """The reverse: read the slots of a range of positions of each request."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        slots[taken : taken + last - first] = table[row, first:last].to(slots.dtype)
        taken += last - first


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources) -> None:
    """Move rows of raw buffers, every source read before any target is written."""
    targets, sources = targets.long(), sources.long()
    if not sources.numel():
        return
    rows = int(max(sources.max(), targets.max())) + 1
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(pointer)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[targets] = buffer[sources].clone()


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name == "convert_weight_packed":
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the tests' sgl_kernel has no {name}")

    return absent


def _attend(q_QHd: Tensor, k_KGd: Tensor, v_KGd: Tensor, sees_QK: Tensor, scale: float, cap: float) -> Tensor:
    groups = q_QHd.shape[1] // k_KGd.shape[1]
    k_KHd, v_KHd = (a.float().repeat_interleave(groups, dim=1) for a in (k_KGd, v_KGd))
    score_HQK = torch.einsum("qhd,khd->hqk", q_QHd.float(), k_KHd) * scale
    if cap and cap > 0:
        score_HQK = cap * torch.tanh(score_HQK / cap)
    weight_HQK = score_HQK.masked_fill(~sees_QK, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weight_HQK, v_KHd).to(q_QHd.dtype)


def extend_attention_cpu(
    q, k, v, out, k_buffer, v_buffer, k_scale, v_scale, table, rows, lengths, new_lengths, starts, longest,
    scale, cap, is_cross, window, encoder_lengths, sinks, tree_mask, is_causal=True,
) -> None:  # fmt: skip
    """Rows of a prompt, a block or a tree over their request's slots, the rows' own included.

    Without a sliding window rows of a block that is not causal see the whole block.
    """
    taken = 0
    for i in range(lengths.numel()):
        length, new, start = int(lengths[i]), int(new_lengths[i]), int(starts[i])
        slots = table[int(rows[i]), :length].long()
        place, first = torch.arange(length), length - new
        if tree_mask is not None:
            sees = torch.ones(new, length, dtype=torch.bool)
            sees[:, first:] = tree_mask[taken : taken + new * new].view(new, new).bool()
            taken += new * new
        elif is_causal:
            sees = place <= (first + torch.arange(new))[:, None]
        else:
            sees = torch.ones(new, length, dtype=torch.bool)
        if window and window > 0:
            sees &= place > (first + torch.arange(new))[:, None] - window
        out[start : start + new] = _attend(
            q[start : start + new], k_buffer[slots], v_buffer[slots], sees, scale, cap
        )


def decode_attention_cpu(
    q, k_buffer, v_buffer, k_scale, v_scale, out, key, value, loc, logits, table, rows, lengths,
    scale, cap, is_cross, window, encoder_lengths, sinks,
) -> None:  # fmt: skip
    """One row a request."""
    if key is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i in range(lengths.numel()):
        length = int(lengths[i])
        slots = table[int(rows[i]), :length].long()
        sees = torch.ones(1, length, dtype=torch.bool)
        if window and window > 0:
            sees &= torch.arange(length) > length - 1 - window
        out[i : i + 1] = _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], sees, scale, cap)


class _Murmur:
    """SGLang's seeded noise: MurmurHash3 of (seed, position, column) as four 32-bit words."""

    MASK = 0xFFFFFFFF

    def default(self, seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        # int64 throughout: unsigned types lack most operators on a CPU.
        seed = seeds.view(torch.int64)
        h = torch.zeros(len(seeds), 1, dtype=torch.int64)
        for word in (seed & self.MASK, (seed >> 32) & self.MASK, positions.long() & self.MASK):
            h = self._mix(h, word[:, None])
        h = self._mix(h, columns.long()[None] & self.MASK) ^ 16
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = self._times(h ^ (h >> shift), factor)
        return (h ^ (h >> 16)).to(torch.uint32)

    def _mix(self, h: Tensor, word: Tensor) -> Tensor:
        word = self._times(self._turn(self._times(word, 0xCC9E2D51), 15), 0x1B873593)
        return (self._times(self._turn(h ^ word, 13), 5) + 0xE6546B64) & self.MASK

    def _times(self, a: Tensor, factor: int) -> Tensor:
        """The low 32 bits of a product, without leaving int64."""
        high = ((a >> 16) * factor & 0xFFFF) << 16
        return (high + (a & 0xFFFF) * factor) & self.MASK

    def _turn(self, a: Tensor, bits: int) -> Tensor:
        return ((a << bits) | (a >> (32 - bits))) & self.MASK


_ops = torch.ops.sgl_kernel
_ops.extend_attention_cpu = extend_attention_cpu
_ops.decode_attention_cpu = decode_attention_cpu
_ops.murmur_hash32_cpu = _Murmur()
