"""What a launch command asks of a GPU, from the models' configurations and the sizes of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree.errors import DDTreeError
from ddtree.models.edges import EdgeNet
from ddtree.sglang_plugin.diagnosis import Finding
from ddtree.sglang_plugin.memory import Demand
from ddtree.sglang_plugin.settings import Settings
from ddtree.speculation.rescoring import edge_count

__all__ = ["demand_of"]

HALF = 2  # bytes of a number in the KV pool, unless its dtype is given
BYTES = {"auto": HALF, "bfloat16": HALF, "float16": HALF, "float32": 4, "fp8_e5m2": 1, "fp8_e4m3": 1}
GRAPH_BATCH = 160  # what SGLang captures at most on a large GPU when nothing is given


def demand_of(arguments: Any, settings: Settings, edges: EdgeNet | None) -> Demand | Finding:
    """What a launch asks of each GPU; a finding when the models are not on this machine."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from ddtree.sglang_plugin.launch import draft_hf_config

    paths = (arguments.model_path, arguments.speculative_draft_model_path)
    sizes = [_weights(path) for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size is None:
            return Finding("memory", "warning", f"{path}: its weights are not on this machine, so no plan is made")
    config = model_config_of(arguments)
    target = config.hf_text_config
    hf = draft_hf_config(arguments)
    drafter = getattr(hf, "text_config", None) or hf
    context = int(arguments.context_length or target.max_position_embeddings)
    ranks = int(arguments.tp_size)
    number = BYTES.get(str(arguments.kv_cache_dtype), HALF)
    cells = sum(_kv_cells(text, ranks) for text in (target, drafter))
    return Demand(
        weights=(sizes[0] or 0) // ranks,
        drafter=(sizes[1] or 0) // ranks,
        edges=0 if edges is None else edges.table_width * int(target.vocab_size) * _number(arguments),
        pairs=0 if edges is None else _pairs(settings),
        kv_token=cells * number,
        rows=settings.width,
        horizon=settings.plan.horizon,
        vocab_size=int(target.vocab_size),
        hidden=int(target.hidden_size),
        requests=int(arguments.max_running_requests),
        context=context,
        prefill_chunk=_prefill_chunk(arguments, context),
        graph_batch=_graph_batch(arguments),
    )


def _pairs(settings: Settings) -> int:
    """Pairs of candidates that edges rescore in a round of one request."""
    count = edge_count(settings.plan.candidates)
    return settings.plan.horizon * count * count


def _prefill_chunk(arguments: Any, context: int) -> int:
    """Prompt tokens in one pass. Below 0 SGLang cuts no prompt, and one of the whole context is one pass."""
    chunk = int(arguments.chunked_prefill_size or 8192)
    return chunk if chunk > 0 else max(context, int(arguments.max_prefill_tokens))


def _number(arguments: Any) -> int:
    """Bytes of one of the models' numbers."""
    from sglang.srt.arg_groups.overrides import model_config_of

    return int(model_config_of(arguments).dtype.itemsize)


def _kv_cells(text: Any, ranks: int) -> int:
    """Numbers that one token keeps in one rank's pool."""
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * int(text.num_hidden_layers) * max(heads // ranks, 1) * width


def _graph_batch(arguments: Any) -> int:
    if arguments.disable_cuda_graph or getattr(arguments, "cuda_graph_backend_decode", None) == "disabled":
        return 0
    largest = getattr(arguments, "cuda_graph_max_bs_decode", None) or getattr(arguments, "cuda_graph_max_bs", None)
    return min(int(largest or GRAPH_BATCH), int(arguments.max_running_requests))


def _weights(path: str) -> int | None:
    """Bytes of a model's weights when they are on this machine."""
    from ddtree.models.hub import find

    try:
        local = find(path)
    except DDTreeError:
        return None
    if local is None:
        return None
    folder = Path(local.folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        size = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if size:
            return int(size)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
