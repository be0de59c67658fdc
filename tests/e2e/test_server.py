"""`ddtree serve` as it is used: the default model, the unmodified OpenAI client, a browser, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serving import browser, console, eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
MODEL = "smollm2-135m"
KEY = "a-key-for-tests"
# float32: rounding alone has never changed a choice of this model there, so texts can be compared.
OPTIONS = (
    "--dtype",
    "float32",
    "--max-context",
    "1024",
    "--max-sequences",
    "16",
    "--max-queue",
    "16",
    "--threads",
    "1",
)
TOKENS = 24
QUESTION = [{"role": "user", "content": "Name three fruits and say one thing about each."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Process:
    """A server process and its address."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "ddtree", "serve", "--port", "0", *OPTIONS, *options]
        environment = os.environ | {"DDTREE_API_KEY": KEY, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        eventually(lambda: self.url is not None, 120)

    def _read(self):
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def url(self):
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(self.lines))
        return found[0] if found else None

    def events(self):
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def ready(self):
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def server():
    one = Process()
    assert httpx.get(f"{one.url}/health", timeout=60).json() == {"status": "alive"}
    eventually(one.ready, 180)
    yield one
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(60) == 0
    assert one.events()[-1]["event"] == "drained"
    assert not any("fruits" in line for line in one.lines), "no words of anybody in the log"


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(client, mode=None, **fields):
    fields = {"messages": QUESTION, "temperature": 0, "max_tokens": TOKENS} | fields
    extra = {"ddtree": {"mode": mode}} if mode else {}
    return client.chat.completions.create(model=MODEL, extra_body=extra, **fields)


def words(answer):
    return answer.choices[0].message.content


def test_models(client):
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client):
    answer = ask(client)
    assert len(words(answer)) > 20
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS
    extension = answer.usage.model_extra["ddtree"]
    assert extension["acceptance_length"] > 1
    assert extension["passes_saved"] == TOKENS - 1 - extension["rounds"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}])
def test_no_mode_changes_a_text(client, sampling):
    texts = {mode: words(ask(client, mode, **sampling)) for mode in ("off", "chain", "tree")}
    assert len(set(texts.values())) == 1, texts


def test_streaming(client):
    whole = ask(client, temperature=0.9, seed=3)
    parts = list(ask(client, temperature=0.9, seed=3, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == words(whole)
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"


def test_streaming_helper_of_the_client(client):
    fields = {"messages": QUESTION, "temperature": 0, "max_tokens": 64, "stop": ["."]}
    with client.chat.completions.stream(model=MODEL, **fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert words(final) == words(ask(client, **fields))


def test_logprobs_are_plain_decodings(client):
    found = {
        mode: ask(client, mode, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        for mode in ("off", "tree")
    }
    assert "".join(one.token for one in found["tree"]) == words(ask(client))
    for plain, drafted in zip(found["off"], found["tree"], strict=True):
        assert plain.token == drafted.token
        assert drafted.logprob == pytest.approx(plain.logprob, abs=2e-3)
        assert drafted.logprob < 0
        assert len(drafted.top_logprobs) == 3
        assert drafted.top_logprobs[0].token == drafted.token, "greedy takes the likeliest"
        for a, b in zip(plain.top_logprobs, drafted.top_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=2e-3)


def test_stop(client):
    text = words(ask(client))
    stop = text[12:17]
    want = text.split(stop)[0]
    answer = ask(client, stop=[stop])
    assert words(answer) == want
    assert answer.choices[0].finish_reason == "stop"
    assert "".join(part.choices[0].delta.content or "" for part in ask(client, stop=[stop], stream=True)) == want


def test_seeds(client):
    def said(seed):
        return words(ask(client, temperature=1, seed=seed, max_tokens=8))

    assert said(7) == said(7)
    assert len({said(seed) for seed in range(3)}) > 1
    many = ask(client, temperature=1, seed=7, n=3, max_tokens=8)
    assert many.choices[0].message.content == said(7)
    assert len({choice.message.content for choice in many.choices}) > 1


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema(client, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    question = [{"role": "user", "content": "Invent a person. Answer in JSON with name and age."}]
    fields = {
        "messages": question,
        "response_format": form,
        "temperature": temperature,
        "seed": 2,
        "max_tokens": 96,
    }
    texts = {mode: words(ask(client, mode, **fields)) for mode in ("off", "tree")}
    person = json.loads(texts["tree"])
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    assert texts["off"] == texts["tree"], "the grammar is asked at every node, along its own path"


def test_json_object(client):
    question = [{"role": "user", "content": "Give me a small JSON object about a cat."}]
    answer = ask(client, messages=question, response_format={"type": "json_object"}, max_tokens=48)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(words(answer)), dict)
    assert words(answer).lstrip().startswith("{")


def test_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt=["One, two, three,", "A, B, C,"], temperature=0, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "four" in answer.choices[0].text
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="image_url") as found:
        ask(client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert found.value.param == "messages.0.content.0.type"
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        ask(client, reasoning_effort="low")
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError, match="together"):
        ask(client, messages=[{"role": "user", "content": "word " * 2000}])
    schema = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
        ask(client, response_format={"type": "json_schema", "json_schema": schema})
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_sixteen_at_once(client):
    """Seeded requests say what they say alone, whoever runs beside them."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_p": 0.8},
        {"frequency_penalty": 0.5},
    ]

    def one(index):
        question = [{"role": "user", "content": f"Tell me something about the number {index}."}]
        mode = ("tree", "chain", "off", "tree")[index % 4]
        return words(ask(client, mode, messages=question, seed=index, max_tokens=10, **kinds[index % 4]))

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, range(16)))
    alone = [one(index) for index in range(16)]
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    assert same >= 15, list(zip(together, alone, strict=True))  # one may meet a tie that rounding breaks


def test_more_than_it_can_take(server, client):
    """Twice what may run and wait: the excess is told 429 at once, the accepted are answered."""

    def asked(index):
        try:
            return words(ask(client, seed=index, max_tokens=4))
        except openai.RateLimitError as error:
            return int(error.response.headers["retry-after"])

    with ThreadPoolExecutor(64) as pool:
        outcomes = list(pool.map(asked, range(64)))
    answered = [one for one in outcomes if isinstance(one, str)]
    refused = [one for one in outcomes if isinstance(one, int)]
    assert len(answered) >= 32
    assert refused
    assert all(seconds >= 1 for seconds in refused)
    assert words(ask(client, max_tokens=4))


def test_metrics_and_facts(server):
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(re.findall(r"^(ddtree_\S+) (\S+)$", text, re.MULTILINE))
    assert float(values['ddtree_rounds_total{mode="tree"}']) > 0
    assert float(values['ddtree_accepted_tokens_total{mode="tree"}']) > 0
    assert float(values['ddtree_position_accepted_total{depth="1",mode="tree"}']) > 0
    assert float(values['ddtree_phase_seconds_total{phase="verify"}']) > 0
    assert float(values["ddtree_requests_running"]) == 0
    info = httpx.get(f"{server.url}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert (info["model"], info["dtype"], info["max_sequences"]) == (MODEL, "float32", 16)


def test_the_page(server):
    from selenium.webdriver.common.by import By

    with browser() as chrome:
        chrome.get(server.url)
        eventually(lambda: "API key" in chrome.find_element(By.ID, "model").text)
        chrome.get_log("browser")  # the answer 401 is in it
        chrome.find_element(By.ID, "key").send_keys(f"{KEY}\t")
        eventually(lambda: MODEL in chrome.find_element(By.ID, "model").text)
        chrome.find_element(By.ID, "budget").send_keys("\ue012" * 4)  # arrow left
        tokens = chrome.find_element(By.ID, "tokens")
        tokens.clear()
        tokens.send_keys("32")
        chrome.find_element(By.ID, "say").send_keys("List five prime numbers.\n")
        eventually(lambda: chrome.find_element(By.ID, "gain").text.endswith("\u00d7"), 120)
        chrome.find_element(By.ID, "round").send_keys("\ue011")  # home: the last round has little to draft
        nodes = chrome.find_elements(By.CSS_SELECTOR, "#tree .node")
        assert 3 < len(nodes) <= 14, "twelve nodes, the anchor, and the model's own choice"
        assert chrome.find_element(By.ID, "budget-shown").text == "12"
        assert "the same" in chrome.find_element(By.ID, "same").text
        assert console(chrome) == []


def test_a_second_server_on_the_port(server):
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "ddtree", "serve", "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2
    assert "is taken by another program" in second.stderr
    assert "Traceback" not in second.stderr
    assert server.ready()
