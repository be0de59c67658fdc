"""These tests run in SGLang's own environment (`make test-sglang`); elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # SGLang reads these when it is imported, here and in the processes that it starts.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("DDTREE_RIG", "nowhere")  # each engine gets a folder of its own
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing to gain on toys, and compiling takes minutes
