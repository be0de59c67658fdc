"""The command line that users type, on a CPU: launch, health, a chat-less completion, server info, and an end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang import models

PROMPT, COUNT, BLOCK = [5, 6, 7, 8, 9], 16, 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body = answer.read()
    return json.loads(body) if body else None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("http")
    target = models.write_target(folder / "target", "qwen3")
    drafter = models.write_drafter(folder / "drafter", BLOCK)
    truth = models.greedy(target, PROMPT, COUNT + BLOCK)
    models.write_oracle(folder / "rig", {tuple(PROMPT): models.foresight(truth)})
    port = free_port()
    options = {
        "--model-path": target,
        "--device": "cpu",
        "--dtype": "float32",
        "--attention-backend": "cpu_ref",
        "--speculative-algorithm": "ddtree",
        "--speculative-draft-model-path": drafter,
        "--speculative-draft-attention-backend": "cpu_ref",
        "--speculative-ddtree-mode": "shadow-linear",
        "--speculative-ddtree-budget": 19,
        "--speculative-dflash-block-size": BLOCK,
        "--max-total-tokens": 4096,
        "--max-running-requests": 4,
        "--context-length": 256,
        "--grammar-backend": "none",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--mem-fraction-static": 0.1,
        "--log-level": "warning",
        "--port": port,
    }
    command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
    command += [str(part) for pair in options.items() for part in pair]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command,
        env=os.environ | {"DDTREE_RIG": str(folder / "rig")},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                pytest.fail((folder / "log").read_text()[-3000:])
            try:
                get(url + "/health")
                break
            except OSError:
                time.sleep(0.2)
        else:
            pytest.fail("the server did not come up: " + (folder / "log").read_text()[-3000:])
        yield url, folder
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def test_completions_equal_hugging_face_and_shadow_mode_commits_the_chain(server: tuple[str, Path]) -> None:
    url, folder = server
    truth = models.greedy(folder / "target", PROMPT, COUNT)
    params = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    answer = post(url + "/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert answer["output_ids"] == truth
    said = post(
        url + "/v1/completions",
        {"model": "m", "prompt": [PROMPT], "max_tokens": COUNT, "temperature": 0, "ignore_eos": True},
    )
    assert said["usage"]["completion_tokens"] == COUNT
    words = " ".join(f"w{token}" for token in truth)
    assert "".join(said["choices"][0]["text"].split()) == "".join(words.split())
    (state,) = get(url + "/server_info")["internal_states"]
    facts = state["ddtree"]
    assert (facts["mode"], facts["rows"]) == ("shadow-linear", 27)
    # The chain misses every third token, the tree does not: only the chain's path is committed.
    assert facts["acceptance_length"] <= 3
    assert facts["would_accept_length"] > 3.5
