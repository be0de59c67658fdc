"""Everything a client can be told is wrong, in OpenAI's shape.

Invariant: what a client sees names the field and the mend; it never holds a traceback or another request's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from ddtree.errors import BusyError, ClosedError, ConfigError, DDTreeError, RequestError, UnsupportedError

__all__ = ["Problem", "from_error", "from_validation"]

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
MESSAGE_LIMIT = 600
# Tags that pydantic puts into the place of an error to say which kind of a union it tried.
UNION_TAGS = {"text", "texts", "parts", "ids", "lists", "system", "developer", "user", "assistant", "tool"}
UNION_TAGS |= {"json_object", "json_schema"}


class Problem(Exception):  # noqa: N818 - it is the answer itself, not a failure of the server
    """An HTTP answer that says what is wrong: status, message, the field (`param`) and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # Echoed input may be anything, half a surrogate pair included.
        self.message = message[:MESSAGE_LIMIT].encode("utf-8", "replace").decode("utf-8")
        self.param = None if param is None else param.encode("utf-8", "replace").decode("utf-8")
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(math.ceil(self.retry_after_s), 1))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def from_error(error: DDTreeError) -> Problem:
    """The answer for an error that the project raises on purpose."""
    if isinstance(error, BusyError):
        return Problem(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, ClosedError):
        return Problem(503, str(error), code="shutting_down", retry_after_s=5)
    if isinstance(error, UnsupportedError):
        return Problem(400, str(error), code="unsupported")
    if isinstance(
        error, RequestError | ConfigError
    ):  # a request may name a mode or a budget that is no such thing
        return Problem(400, str(error), code="invalid_value")
    return Problem(500, "the engine could not finish this request; the server's log says why", code="engine")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The answer for what pydantic found, the first of it: one field at a time is what people mend."""
    first = errors[0]
    place = [part for part in first["loc"] if part not in {"body", "query", "path"}]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return Problem(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    # The tags of unions follow the field that they belong to; a field of that name is never the first part.
    names = [
        str(part) for i, part in enumerate(place) if i == 0 or part not in UNION_TAGS or place[i - 1] in UNION_TAGS
    ]
    param = ".".join(names) or None
    if first["type"] == "extra_forbidden":
        message = (
            f"{param}: this server does not honour it; leave it out (docs/reference/http.md lists what it does)"
        )
        return Problem(400, message, param=param, code="unsupported_field")
    if not place and first["type"] in {"model_attributes_type", "missing"}:
        return Problem(
            400, "the body must be a JSON object, sent with Content-Type: application/json", code="no_json"
        )
    if first["type"] == "missing":
        return Problem(400, f"{param}: is missing", param=param, code="missing_field")
    if first["type"] == "literal_error":
        message = f"{param}: {first['input']!r} is not honoured; this server knows {first['ctx']['expected']}"
        return Problem(400, message, param=param, code="unsupported_value")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    text = str(first["msg"]).removeprefix("Value error, ")
    return Problem(400, f"{param or 'the body'}: {text}{more}", param=param, code="invalid_value")
