"""Errors on the wire: OpenAI's shape, naming the field, and which status each error of ours is."""

from __future__ import annotations

from typing import Any

from foredraft.errors import (
    CacheFullError,
    ConfigError,
    ContextLengthError,
    ForedraftError,
    NumericalError,
    RequestTimeoutError,
)

FAILED = "the server failed on this request; its log has the request's id"


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: What is wrong and what to do about it.
        param: The field of the body at fault.
        code: A word for programs, such as ``context_length_exceeded``.
        retry_after: Seconds after which to try again; becomes a header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def type(self) -> str:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self, request_id: str) -> dict[str, Any]:
        """OpenAI's error object, with the id of the request beside the usual fields."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | {"request_id": request_id}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: ForedraftError, rename: dict[str, str] | None = None) -> ApiError:
    """One of our own errors as an answer.

    Args:
        error: What was raised.
        rename: Names of fields in the body where they differ from ours.
    """
    names = rename or {}
    param = names.get(error.field or "", error.field)
    message = f"{param}: {error.problem}" if param else error.problem
    message += f"; {error.remedy}" if error.remedy else ""
    if isinstance(error, ContextLengthError):
        return invalid(message, param, "context_length_exceeded")
    if isinstance(error, ConfigError):
        return invalid(message, param, "invalid_value")
    if isinstance(error, NumericalError) and error.field != "logits":  # the client's own controls left no token
        return invalid(message, param, "no_token_left")
    if isinstance(error, RequestTimeoutError) and error.field == "queue_timeout":
        return ApiError(503, message, code="queue_timeout", retry_after=10)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, message, param=param, code="timeout")
    if isinstance(error, CacheFullError):
        return ApiError(503, message, code="cache_full", retry_after=5)
    # What failed inside may hold what no client should see; the log has it, by the request's id.
    shown = message if type(error) is not ForedraftError else FAILED
    return ApiError(500, shown, code="request_failed")
