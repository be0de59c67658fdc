"""The endpoints over a fake service: answers, refusals, limits, keys, metrics, and what is logged."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ddtree.errors import CheckpointError, ConfigError, EngineError, RequestError
from ddtree.server.app import create_app
from ddtree.server.limits import Limits
from ddtree.server.logs import LOGGER, JsonLines
from ddtree.speculation.noise import choice_seed
from tests.serving import eventually
from tests.unit.fake_service import TEMPLATE, FakeService, backend

JSON = {"content-type": "application/json"}
ROOT = Path(__file__).resolve().parents[2]
ODD = "héllo 😀, naïve — 日本語!"


@contextmanager
def client_of(service=None, *, limits=None, keys=(), max_context=2048):
    service = service or FakeService(lambda _: ODD)
    app = create_app(lambda: backend(service, max_context=max_context), limits=limits or Limits(), keys=keys)
    with TestClient(app) as client:
        eventually(lambda: client.get("/ready").status_code == 200)
        service.submitted.clear()  # the warm-up
        client.service = service
        yield client


@pytest.fixture(scope="module")
def client():
    with client_of() as one:
        yield one


def chat(client, words="hi", **fields):
    body = {"model": "toy", "messages": [{"role": "user", "content": words}]} | fields
    return client.post("/v1/chat/completions", json=body)


def chunks(response):
    frames = [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def submitted(client):
    return client.service.submitted[-1]


def test_a_chat_answer(client):
    answer = chat(client).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ODD, "refusal": None, "tool_calls": None}
    assert choice["finish_reason"] == "stop"
    assert answer["model"] == "toy"
    prompt = client.service.tokenizer.chat_ids([{"role": "user", "content": "hi"}])
    tokens = len(client.service.tokenizer.encode(ODD)) + 1
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), tokens)
    assert usage["total_tokens"] == len(prompt) + tokens
    extension = usage["ddtree"]
    assert extension["rounds"] == math.ceil((tokens - 1) / 3)
    assert extension["acceptance_length"] == pytest.approx((tokens - 1) / extension["rounds"])
    assert extension["passes_saved"] == tokens - 1 - extension["rounds"]
    assert submitted(client).prompt == tuple(prompt)


def test_what_the_engine_is_asked_for(client):
    chat(
        client,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=-3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"5": 2},
        stop=["x", "y"],
        stop_token_ids=[7],
        max_tokens=9,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        ddtree={"mode": "chain", "budget": 4, "rounds": True},
    )
    asked = submitted(client)
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.1)
    assert params.seed == 2**64 - 3
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.25)
    assert dict(params.logit_bias) == {5: 2.0}
    assert (params.stop, params.stop_token_ids, params.max_tokens) == (("x", "y"), (7,), 9)
    assert params.ignore_eos
    assert (asked.mode, asked.budget, asked.records, asked.logprobs) == ("chain", 4, True, 3)


def test_defaults_are_openais(client):
    chat(client)
    asked = submitted(client)
    assert asked.params.temperature == 1
    assert asked.params.seed is None
    assert asked.params.max_tokens == 2048 - len(asked.prompt)
    assert (asked.mode, asked.budget, asked.logprobs, asked.records) == (None, None, None, False)
    client.post("/v1/completions", json={"model": "toy", "prompt": "hi"})
    assert submitted(client).params.max_tokens == 16


def test_each_choice_has_a_seed_of_its_own(client):
    answer = chat(client, n=3, seed=11).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [one.params.seed for one in client.service.submitted[-3:]] == [choice_seed(11, i) for i in range(3)]


def test_parts_and_roles_become_what_templates_expect(client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    chat(client, messages=messages)
    shown = client.service.tokenizer.decode_all(submitted(client).prompt)
    assert "<|im_start|>system\nbe kind<|im_end|>" in shown
    assert "<|im_start|>user\nab<|im_end|>" in shown


@pytest.mark.parametrize("per_round", [1, 2, 3, 5, 64])
def test_streamed_text_is_the_gathered_text(per_round):
    with client_of(FakeService(lambda _: ODD, per_round=per_round)) as client:
        whole = chat(client, n=2).json()
        parts = chunks(chat(client, n=2, stream=True))
        for index in range(2):
            mine = [c["choices"][0] for c in parts if c["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            texts = [one["delta"].get("content", "") for one in mine]
            assert "".join(texts) == whole["choices"][index]["message"]["content"] == ODD
            assert not any("\ufffd" in text for text in texts)
            assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["stop"]
            assert mine[-1]["finish_reason"] == "stop"
        assert all("usage" not in part for part in parts)
        assert len({part["id"] for part in parts}) == 1


@pytest.mark.parametrize("per_round", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("stop", ["naïve", "😀, n", "日", ", naïve — x", "no such"])
def test_stop_strings_across_chunks(per_round, stop):
    with client_of(FakeService(lambda _: ODD, per_round=per_round)) as client:
        want = ODD.split(stop)[0]
        parts = chunks(chat(client, stop=[stop], stream=True))
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in parts) == want
        assert chat(client, stop=stop).json()["choices"][0]["message"]["content"] == want


def test_usage_in_a_stream(client):
    parts = chunks(chat(client, stream=True, stream_options={"include_usage": True}))
    assert all(part["usage"] is None for part in parts[:-1])
    assert parts[-1]["choices"] == []
    whole = chat(client).json()["usage"]
    assert {key: parts[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens")} == {
        key: whole[key] for key in ("prompt_tokens", "completion_tokens")
    }


def test_logprobs_of_a_chat(client):
    content = chat(client, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == ODD, "the end token is no part of the text"
    assert content[0]["token"] == "h"
    assert content[1]["token"] == "bytes:\\xc3"
    assert [one["logprob"] for one in content[0]["top_logprobs"]] == [-1.0, -2.0, -9999.0]
    parts = chunks(chat(client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [one for part in parts for one in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    assert chat(client, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(client).json()["choices"][0]["logprobs"] is None


def test_logprobs_of_a_completion(client):
    body = {"model": "toy", "prompt": "x", "max_tokens": 100, "logprobs": 2}
    found = client.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = found["logprobs"]
    assert logprobs["text_offset"][-1] == len(found["text"]) - 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or found["text"][offset : offset + len(token)] == token
    parts = chunks(client.post("/v1/completions", json=body | {"stream": True}))
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [x for p in parts if p["choices"][0]["logprobs"] for x in p["choices"][0]["logprobs"][key]] == (
            logprobs[key]
        )


def test_completions_of_several_prompts(client):
    body = {"model": "toy", "prompt": ["ab", "c"], "n": 2, "seed": 5, "max_tokens": 4}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == 3, "each prompt counts once"
    assert answer["usage"]["completion_tokens"] == 16
    assert [len(one.prompt) for one in client.service.submitted[-4:]] == [2, 2, 1, 1]
    parts = chunks(client.post("/v1/completions", json=body | {"stream": True}))
    for choice in answer["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]


def test_token_prompts_go_through_untouched(client):
    client.post("/v1/completions", json={"model": "toy", "prompt": [[1, 2, 3], [4]]})
    assert [one.prompt for one in client.service.submitted[-2:]] == [(1, 2, 3), (4,)]


def test_rounds_where_they_are_asked_for(client):
    whole = chat(client, ddtree={"rounds": True}).json()["choices"][0]["ddtree_rounds"]
    parts = chunks(chat(client, ddtree={"rounds": True}, stream=True))
    streamed = [part["choices"][0]["ddtree_round"] for part in parts if "ddtree_round" in part["choices"][0]]
    assert streamed == whole
    first = whole[0]
    assert first["mode"] == "tree"
    assert first["probabilities"][0] == 1
    sizes = {len(first[key]) for key in ("tokens", "texts", "parents", "depths", "probabilities")}
    assert len(sizes) == 1
    assert chat(client).json()["choices"][0]["ddtree_rounds"] is None


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "JSON"),
        (b"", "JSON"),
        (b"null", "JSON"),
        (b"[]", "JSON"),
        (b'"text"', "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b'{"model": "toy", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        (b'{"model": "toy", "messages": [{"role": "user", "content": "x"}], "top_p": -Infinity}', "top_p"),
        (
            b'{"model": "toy", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 6000 + b"}",
            "JSON",
        ),
        (b'{"model": "toy", "messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
    ],
)
def test_bodies_that_are_none(client, body, word):
    response = client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    assert chat(client).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-5"}, 404, "model"),
        ({"stop_token_ids": [10**9]}, 400, None),
        ({"logit_bias": {"999999": 1}}, 400, None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "ignore_eos"),
        ({"chat_template_kwargs": {"messages": "x"}}, 400, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, None),
    ],
)
def test_refused(client, fields, status, param):
    response = chat(client, **fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(("},
        {"type": "array", "uniqueItems": True},
        {"enum": []},
        {"type": "number", "minimum": "x"},
        {"not": {}},
    ],
)
def test_a_grammar_that_cannot_compile(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = chat(client, response_format=form)
    assert response.status_code == 400
    assert "schema" in response.json()["error"]["message"]


def test_a_schema_of_many_levels(client):
    schema: dict = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert chat(client, response_format=form).status_code == 400


def test_a_template_that_fails_is_a_bad_request():
    template = "{{ messages[0]['content'] + 5 }}"
    with client_of(FakeService(template=template)) as client:
        response = chat(client)
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]


def test_variables_of_the_template():
    with client_of(FakeService(template="{% if loud %}LOUD{% endif %}" + TEMPLATE)) as client:
        chat(client, chat_template_kwargs={"loud": True})
        assert client.service.tokenizer.decode_all(submitted(client).prompt).startswith("LOUD")


def test_unknown_paths_and_methods(client):
    assert client.get("/v2/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.get("/v1/models/none").status_code == 404


def test_models(client):
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["toy", "toy-alias"]
    assert client.get("/v1/models/toy-alias").json()["max_model_len"] == 2048
    assert chat(client, model="toy-alias").status_code == 200


def test_server_info(client):
    info = client.get("/server_info").json()
    assert (info["mode"], info["budget"], info["state"]) == ("tree", 16, "ready")


def test_errors_of_the_engine():
    def reply(asked):
        if asked.params.seed == 1:
            return RequestError("the grammar became too complex")
        return EngineError("secret detail") if asked.params.seed == 2 else ODD

    with client_of(FakeService(reply)) as client:
        mine, fault = chat(client, seed=1), chat(client, seed=2)
        assert (mine.status_code, fault.status_code) == (400, 500)
        assert "secret" not in fault.text
        streamed = chat(client, seed=2, stream=True)
        assert streamed.status_code == 200
        last = [line for line in streamed.text.split("\n\n") if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert chat(client).status_code == 200


def test_one_failed_choice_ends_the_others():
    service = FakeService(
        lambda asked: EngineError("x") if asked.params.seed == choice_seed(4, 1) else ODD * 40, round_s=0.01
    )
    with client_of(service) as client:
        assert chat(client, n=3, seed=4).status_code == 500
        eventually(service.idle)
        assert service.ended.count("cancelled") == 2


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Bearer key-1x", 401),
        ("Basic key-1", 401),
        ("key-1", 401),
        ("Bearer key-1", 200),
        ("bearer key-2", 200),
    ],
)
def test_api_keys(given, status):
    with client_of(keys=["key-1", "key-2"]) as client:
        headers = {} if given is None else {"Authorization": given}
        for path in ("/v1/models", "/server_info"):
            response = client.get(path, headers=headers)
            assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"
            assert chat(client).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/"):
            assert client.get(path).status_code == 200


def test_a_body_that_is_too_long():
    with client_of(limits=Limits(body_bytes=1000)) as client:
        assert chat(client, words="x" * 2000).status_code == 413

        def pieces():
            for _ in range(100):
                yield b"x" * 100

        response = client.post("/v1/chat/completions", content=pieces(), headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "too_large"
        assert chat(client).status_code == 200


def test_limits_of_an_answer():
    with client_of(limits=Limits(tokens=8, choices=3)) as client:
        assert chat(client, max_tokens=9).json()["error"]["param"] == "max_tokens"
        chat(client)
        assert submitted(client).params.max_tokens == 8
        many = client.post("/v1/completions", json={"model": "toy", "prompt": ["a", "b"], "n": 2})
        assert many.json()["error"]["code"] == "too_many_choices"
    with client_of(FakeService(seats=2, max_queue=1)) as client:
        assert chat(client, n=3).status_code == 200
        refused = chat(client, n=4)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("field", ["body_bytes", "choices", "receive_s", "send_s", "drain_s", "stuck_s", "tokens"])
def test_limits_that_are_none(field):
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: 0})


def test_a_full_queue_is_told_when_to_come_back():
    service = FakeService(lambda _: ODD, seats=1, max_queue=1)
    with client_of(service) as client:
        service.gate.clear()
        waiting = [threading.Thread(target=chat, args=(client,)) for _ in range(2)]
        for one in waiting:
            one.start()
        eventually(lambda: len(service.submitted) == 2)
        began = time.monotonic()
        refused = chat(client)
        assert time.monotonic() - began < 1
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "2"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        service.gate.set()
        for one in waiting:
            one.join(10)
        assert chat(client).status_code == 200


def test_loading_and_failing():
    gate = threading.Event()
    failed = threading.Event()

    def load():
        gate.wait(10)
        raise CheckpointError("no such model")

    app = create_app(load, limits=Limits(), on_failure=failed.set)
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        early = chat(client)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
        assert "Retry-After" in early.headers
        assert "ddtree_requests_running" not in client.get("/metrics").text
        gate.set()
        assert failed.wait(10)
    assert isinstance(app.state.life.failure, CheckpointError)


def test_metrics(client):
    chat(client)
    text = client.get("/metrics").text
    for line in (
        "ddtree_ready 1.0",
        "ddtree_requests_running 0.0",
        'ddtree_cache_pages{state="free"}',
        'ddtree_rounds_total{mode="tree"}',
        'ddtree_acceptance_length{mode="tree"}',
        'ddtree_position_accepted_total{depth="2",mode="tree"} 3.0',
        'ddtree_phase_seconds_total{phase="verify"} 0.25',
        "ddtree_zero_acceptance_alarm 0.0",
        'ddtree_http_requests_total{route="/v1/chat/completions",status="200"}',
        "ddtree_time_to_first_token_seconds_count",
        "ddtree_round_stuck 0.0",
    ):
        assert line in text, line
    assert "/v2/nothing" not in text, "paths that nobody serves must not become labels"


def test_the_dashboard_asks_for_metrics_that_exist(client):
    chat(client)
    text = client.get("/metrics").text
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    names = {
        name for p in dashboard["panels"] for t in p["targets"] for name in re.findall(r"ddtree_\w+", t["expr"])
    }
    assert len(names) > 15
    for name in names:
        assert f"\n{name}{{" in text or f"\n{name} " in text, name
    documented = (ROOT / "docs" / "reference" / "http.md").read_text()
    for name in re.findall(r"^# TYPE ddtree_(\w+) ", text, re.MULTILINE):
        if not name.endswith("_created"):
            assert f"`{name.removesuffix('_total')}`" in documented, name


def test_a_huge_prompt_is_refused_by_its_length(client):
    began = time.monotonic()
    response = chat(client, words="word " * 600_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 20


def test_the_watchdog_names_a_stuck_round(caplog):
    service = FakeService(lambda _: ODD)
    with client_of(service, limits=Limits(stuck_s=0.05)) as client:
        LOGGER.propagate = True
        with caplog.at_level(logging.INFO, LOGGER.name):
            service.gate.clear()
            asking = threading.Thread(target=chat, args=(client,))
            asking.start()
            eventually(lambda: client.get("/ready").json()["status"] == "stuck")
            assert client.get("/health").status_code == 200
            assert "ddtree_round_stuck 1.0" in client.get("/metrics").text
            service.gate.set()
            asking.join(10)
            eventually(lambda: client.get("/ready").status_code == 200)
        facts = next(r.facts for r in caplog.records if r.message == "round stuck")
        assert facts["round"] > 0
        assert facts["running"] + facts["waiting"] == 1
        assert "tree" in facts["modes"]


def test_logs_have_ids_and_no_words():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    secret = "my-secret-prompt"

    def reply(asked):
        if asked.params.seed == 3:
            raise ValueError(secret)
        return secret

    try:
        with client_of(FakeService(reply)) as client:
            given = client.post(
                "/v1/chat/completions",
                json={"model": "toy", "messages": [{"role": "user", "content": secret}]},
                headers={"X-Request-Id": "mine-7"},
            )
            assert given.headers["X-Request-Id"] == "mine-7"
            drawn = chat(client, secret, seed=3)
            assert drawn.status_code == 500
            assert secret not in drawn.text
            odd = client.get("/health", headers={"X-Request-Id": "a b\tc"})
            assert odd.headers["X-Request-Id"].startswith("req_")
            chat(client, secret, temperature=9)
    finally:
        LOGGER.removeHandler(handler)
    assert secret not in stream.getvalue()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    mine = next(line for line in lines if line.get("request_id") == "mine-7")
    assert mine["event"] == "request"
    assert mine["status"] == 200
    assert mine["completion_tokens"] == len(secret) + 1
    fault = next(line for line in lines if line["event"] == "fault")
    assert fault["error"] == "ValueError"
    assert any("fake_service" in place for place in fault["trace"])


def test_the_page_is_self_contained(client):
    page = client.get("/")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
    for name in ("style.css", "app.js", "tree.js", "run.js"):
        found = client.get(f"/ui/{name}")
        assert found.status_code == 200
        assert "https://" not in found.text
