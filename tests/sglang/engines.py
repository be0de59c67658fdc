"""SGLang engines on a CPU, with the rig's drafter and backends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["forget", "said", "serving"]

COMMON = {
    "device": "cpu",
    "dtype": "float32",
    "mem_fraction_static": 0.1,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "context_length": 256,
    "log_level": "warning",
    "skip_server_warmup": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "random_seed": 7,
}


@contextmanager
def serving(rig: Path, target: Path, drafter: Path | None, flags: Any = None, **fields: Any) -> Iterator[Any]:
    """An engine that runs DDTREE with a drafter, plain decoding without. It ends with the block."""
    from sglang.srt.plugins import load_plugins

    import sglang

    os.environ["DDTREE_RIG"] = str(rig)
    # A core for each rank; left to itself SGLang wants as many NUMA nodes as ranks.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(fields.get("tp_size", 1)))
    load_plugins()
    arguments = {**COMMON, "model_path": str(target), "attention_backend": "cpu_ref", **fields}
    arguments.setdefault("grammar_backend", "none")
    if drafter is None:
        engine = sglang.Engine(**arguments)
    else:
        from ddtree.sglang_plugin.flags import server_args

        arguments.setdefault("speculative_draft_attention_backend", arguments["attention_backend"])
        arguments["speculative_draft_model_path"] = str(drafter)
        engine = sglang.Engine(server_args=server_args(flags, **arguments))
    try:
        yield engine
    finally:
        engine.shutdown()


def said(engine: Any, prompts: Sequence[Sequence[int]], count: int, **sampling: Any) -> list[dict[str, Any]]:
    """Answers of `count` tokens to some prompts in one batch, as SGLang returns them."""
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling}
    return list(engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=params))


def forget(engine: Any) -> None:
    """Drop every cached prefix. SGLang refuses while it lets go of answered requests, so ask until it has."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise AssertionError("the engine still has requests")
