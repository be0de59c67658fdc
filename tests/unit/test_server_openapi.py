"""The published OpenAPI document, and what happens when a machine makes requests out of it."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.serving import live
from tests.unit.fake_service import FakeService, backend


@pytest.fixture(scope="module")
def url():
    with live(backend(FakeService(lambda _: "x" * 5))) as one:
        yield one


def test_no_request_is_the_servers_fault(url):
    statuses: dict[str, set[int]] = {}
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()

        @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case):
            if isinstance(case.body, dict):
                case.body["model"] = (
                    "toy"  # a name that nobody would guess, and nothing is asked behind a wrong one
                )
            response = case.call_and_validate(checks=[not_a_server_error])
            statuses.setdefault(case.operation.label, set()).add(response.status_code)

        ask()
    for label in ("POST /v1/chat/completions", "POST /v1/completions"):
        assert statuses[label] >= {200, 400}
    assert statuses["GET /v1/models/{name}"] >= {404}


def test_the_document(url):
    document = httpx.get(f"{url}/openapi.json").json()
    paths = set(document["paths"])
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"} <= paths
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "408", "413", "429", "503"} <= set(chat["responses"])
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
