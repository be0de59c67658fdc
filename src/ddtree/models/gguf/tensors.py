"""Tensors out of a GGUF file, into safetensors: each is used exactly once, under its Hugging Face name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from ddtree.errors import CheckpointError, UnsupportedError
from ddtree.models.gguf.metadata import LlamaSpec

__all__ = ["Progress", "match_tensors", "write_safetensors"]

Progress = Callable[[int, int], None]  # bytes written, bytes in all

BLOCK_ROWS = 4096  # rows dequantised at a time: bounds memory, whatever the vocabulary
BF16_BYTES = 2


@dataclass(frozen=True)
class Piece:
    """One tensor to write: its new name, the GGUF tensor, its shape, and the order that its rows are taken in."""

    name: str
    tensor: gguf.ReaderTensor
    shape: tuple[int, ...]
    rows: np.ndarray

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape)) * BF16_BYTES


def match_tensors(spec: LlamaSpec, tensors: Mapping[str, gguf.ReaderTensor]) -> list[Piece]:
    """Match the file's tensors with those of the architecture, by name and shape; all of both or an error."""
    expected = list(_expected(spec))
    missing = [name for name, *_ in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"the GGUF file lacks {_some(missing)}: fetch it again")
    unknown = sorted(set(tensors) - {name for name, *_ in expected})
    if unknown:
        raise UnsupportedError(f"the GGUF file holds {_some(unknown)}, which a plain llama model has not")
    pieces = []
    for name, hf_name, shape, rotary_heads in expected:
        found = tuple(int(n) for n in reversed(tensors[name].shape))
        if found != shape:
            raise CheckpointError(f"tensor {name} has shape {found}, but the metadata asks for {shape}")
        n_rows = shape[0] if len(shape) == 2 else 1
        rows = _half_split_order(n_rows, rotary_heads) if rotary_heads else np.arange(n_rows)
        pieces.append(Piece(hf_name, tensors[name], shape, rows))
    return pieces


def _expected(spec: LlamaSpec) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """(GGUF name, Hugging Face name, shape, rotary heads or 0) of each tensor, in the order of writing."""
    m, q, kv = spec, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "token_embd.weight", "model.embed_tokens.weight", (m.vocabulary, m.hidden), 0
    for i in range(m.layers):
        old, new = f"blk.{i}", f"model.layers.{i}"
        yield f"{old}.attn_norm.weight", f"{new}.input_layernorm.weight", (m.hidden,), 0
        yield f"{old}.attn_q.weight", f"{new}.self_attn.q_proj.weight", (q, m.hidden), m.heads
        yield f"{old}.attn_k.weight", f"{new}.self_attn.k_proj.weight", (kv, m.hidden), m.kv_heads
        yield f"{old}.attn_v.weight", f"{new}.self_attn.v_proj.weight", (kv, m.hidden), 0
        yield f"{old}.attn_output.weight", f"{new}.self_attn.o_proj.weight", (m.hidden, q), 0
        yield f"{old}.ffn_norm.weight", f"{new}.post_attention_layernorm.weight", (m.hidden,), 0
        yield f"{old}.ffn_gate.weight", f"{new}.mlp.gate_proj.weight", (m.intermediate, m.hidden), 0
        yield f"{old}.ffn_up.weight", f"{new}.mlp.up_proj.weight", (m.intermediate, m.hidden), 0
        yield f"{old}.ffn_down.weight", f"{new}.mlp.down_proj.weight", (m.hidden, m.intermediate), 0
    yield "output_norm.weight", "model.norm.weight", (m.hidden,), 0
    if not m.tied:
        yield "output.weight", "lm_head.weight", (m.vocabulary, m.hidden), 0


def _half_split_order(n_rows: int, heads: int) -> np.ndarray:
    """Rows of a query or key projection in Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates row i of a head with row i + half. The
    GGUF therefore interleaves the halves of each head, and this takes them apart again.
    """
    return np.arange(n_rows).reshape(heads, n_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def write_safetensors(path: Path, pieces: list[Piece], progress: Progress | None) -> None:
    """Write the pieces one after the other; never more than a block of rows is in memory.

    Layout (safetensors format): length of the header in 8 bytes, the header as JSON, then the tensors' bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for piece in pieces:
        offsets = [total, total + piece.n_bytes]
        header[piece.name] = {"dtype": "BF16", "shape": piece.shape, "data_offsets": offsets}
        total += piece.n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors aligned
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            for block in _blocks(piece):
                done += file.write(block)
                if progress is not None:
                    progress(done, total)


def _blocks(piece: Piece) -> Iterator[bytes]:
    # Quantisation blocks lie within a row, so rows can be reordered before they are dequantised.
    packed = piece.tensor.data if len(piece.shape) == 2 else piece.tensor.data[None]
    for start in range(0, len(piece.rows), BLOCK_ROWS):
        values = gguf.dequantize(packed[piece.rows[start : start + BLOCK_ROWS]], piece.tensor.tensor_type)
        block = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
        yield block.view(torch.int16).numpy().tobytes()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
