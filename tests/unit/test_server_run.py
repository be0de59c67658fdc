"""A server on a real port: clients that vanish or stall, signals, and ports that are taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ddtree.errors import CheckpointError, ConfigError
from ddtree.server.limits import Limits
from ddtree.server.run import listen, serve
from tests.serving import eventually, live
from tests.unit.fake_service import FakeService, backend

LONG = "word " * 4000
BODY = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def request_bytes(body):
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


def connection(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_is_let_go(stream):
    service = FakeService(lambda _: LONG, round_s=0.005)
    with live(backend(service, max_context=100_000)) as url:
        with connection(url) as wire:
            wire.sendall(request_bytes(BODY | {"stream": stream, "n": 3}))
            eventually(lambda: len(service._running) == 3)
        began = time.monotonic()
        eventually(service.idle)
        assert time.monotonic() - began < 2
        assert service.ended.count("cancelled") == 3
        assert httpx.get(f"{url}/health").status_code == 200
        gone = 'ddtree_http_requests_total{route="/v1/chat/completions",status="499"} 1.0'
        eventually(lambda: gone in httpx.get(f"{url}/metrics").text)


def test_a_client_that_does_not_read_is_let_go():
    service = FakeService(lambda _: LONG, per_round=200)
    with live(backend(service, max_context=100_000), limits=Limits(send_s=0.3)) as url:
        body = BODY | {"stream": True, "logprobs": True, "top_logprobs": 2, "n": 4}
        with connection(url) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.sendall(request_bytes(body))
            gone = 'status="499"} 1.0'
            eventually(lambda: gone in httpx.get(f"{url}/metrics").text)
        eventually(service.idle)


def test_a_body_that_does_not_come():
    with live(backend(FakeService()), limits=Limits(receive_s=0.3)) as url:
        with connection(url) as wire:
            wire.sendall(request_bytes(BODY)[:-5])
            answer = ""
            while not answer.endswith("}"):
                answer += wire.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408")
        assert '"type":"invalid_request_error"' in answer
        with connection(url) as wire:
            wire.sendall(request_bytes(BODY)[:-5])
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200


def test_no_http_at_all():
    with live(backend(FakeService())) as url:
        with connection(url) as wire:
            wire.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert b"400" in wire.recv(4096)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_slow_reader_gets_everything():
    service = FakeService(lambda _: "ab " * 200, per_round=1)
    with (
        live(backend(service)) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}) as answer,
    ):
        text = ""
        for line in answer.iter_lines():
            time.sleep(0.0005)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert text == "ab " * 200


def test_overload_is_refused_at_once_and_the_accepted_finish():
    """Four times as many as may run or wait: the excess hears of it while the others are still waiting."""
    service = FakeService(lambda _: "x" * 60, seats=4, max_queue=4)
    refused, accepted = [], []
    with live(backend(service)) as url, httpx.Client(timeout=60) as client:
        service.gate.clear()

        def ask():
            answer = client.post(f"{url}/v1/chat/completions", json=BODY)
            (refused if answer.status_code == 429 else accepted).append(answer)

        threads = [threading.Thread(target=ask) for _ in range(32)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(refused) == 24)
        assert not accepted
        service.gate.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in accepted] == [200] * 8
        assert all(answer.headers["Retry-After"] == "2" for answer in refused)
        assert client.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200


def test_a_port_that_is_taken():
    first = listen("127.0.0.1", 0)
    with first, pytest.raises(ConfigError, match=r"is taken by another program; pass another --port"):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["no.such.host.invalid", "", "256.1.1.1", "\udc00"])
def test_a_host_that_is_none(host):
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(host, 0)


def test_a_model_that_does_not_load_ends_the_server():
    def load():
        raise CheckpointError("weights.safetensors is damaged; fetch it again")

    with listen("127.0.0.1", 0) as bound, pytest.raises(CheckpointError, match="fetch it again"):
        serve(bound, load, limits=Limits(), keys=())


SCRIPT = """
from tests.unit.fake_service import FakeService, backend
from ddtree.server.limits import Limits
from ddtree.server.logs import set_up
from ddtree.server.run import listen, serve
set_up()
service = FakeService(lambda _: "word " * 60, round_s=0.02, per_round=5)
{more}
bound = listen("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
serve(bound, lambda: backend(service), limits=Limits(drain_s={drain}), keys=())
print("ended", flush=True)
"""


def server_process(drain, more=""):
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(drain=drain, more=more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}"

    def up():
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    eventually(up)
    return process, url


def test_told_to_stop_it_finishes_what_it_has_accepted():
    process, url = server_process(30)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [first, *lines]
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "ended" in out
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert events[-2:] == ["request", "drained"] or events[-1] == "drained"
    assert "stopping" in events
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


STUCK = """
import time
service.drain = lambda seconds: time.sleep(seconds)
service.close = lambda: time.sleep(600)
"""


def test_a_stuck_round_does_not_keep_it_alive():
    process, _ = server_process(1, STUCK)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(err.splitlines()[-1])["level"] == "warning"


def test_told_twice_it_ends_at_once():
    process, url = server_process(30)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=30) as answer:
        next(answer.iter_lines())
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        process.communicate(timeout=30)
        assert time.monotonic() - began < 10
