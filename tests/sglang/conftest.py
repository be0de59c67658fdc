"""These tests run in SGLang's own environment (`make test-sglang`); elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # SGLang reads these when it is imported, here and in the processes that it starts.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("DDTREE_RIG", "nowhere")  # each engine gets a folder of its own
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing to gain on toys, and compiling takes minutes


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and drafters for it: one that fits, and one that reads the target's last layer."""
    from tests.sglang import models

    folder = tmp_path_factory.mktemp("toys")
    return {
        "target": models.write_target(folder / "target", "qwen3"),
        "drafter": models.write_drafter(folder / "drafter"),
        "last_layer": models.write_drafter(folder / "last_layer", layer_ids=[0, 3]),
    }


@pytest.fixture(scope="module")
def configured(toys: dict[str, Path]) -> None:
    """This process is a plain server's scheduler, as far as SGLang's configuration knows."""
    from sglang.srt.runtime_context import publish

    from tests.sglang import host  # which loads the plugins, and they the backend

    fields = {"device": "cpu", "attention_backend": "cpu_ref"}
    publish(host.ServerArgs(model_path=str(toys["target"]), **fields), role="scheduler")
