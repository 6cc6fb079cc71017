"""Errors that end a request without an answer, with their statuses in HTTP and gRPC.

A message never repeats a text of the request, because messages go to logs.
"""

from __future__ import annotations


class RequestError(Exception):
    """Error of a request that the server does not answer.

    http: status
    grpc: name of the status code
    closes: true where the connection ends, because its next request cannot be found
    retry_after: seconds after which to ask again; None where asking again is useless
    param, code: wrong field, and kind of the error, as OpenAI's clients read them
    """

    http = 400
    grpc = "INVALID_ARGUMENT"
    closes = False

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after
        self.param, self.code = param, code


class UnknownError(RequestError):
    """Refusal: the requested model or path does not exist."""

    http, grpc = 404, "NOT_FOUND"


class MethodError(RequestError):
    """Refusal: the server's path takes another method. accepted: name of the method that it
    takes."""

    http, grpc = 405, "UNIMPLEMENTED"

    def __init__(self, accepted: str) -> None:
        super().__init__(f"this path takes {accepted}")
        self.accepted = accepted


class TooLargeError(RequestError):
    """Refusal: the request, or its answer, exceeds a limit."""

    http, grpc = 413, "INVALID_ARGUMENT"


class SlowClientError(RequestError):
    """Refusal: the client did not send its request in time."""

    http, grpc, closes = 408, "CANCELLED", True


class FramingError(RequestError):
    """Refusal: the length of the request's body is given twice, so a proxy may have read another
    body."""

    closes = True


class HostError(RequestError):
    """Refusal: the request names another host than this server's."""

    http, grpc = 421, "INVALID_ARGUMENT"


class TokenError(RequestError):
    """Refusal: the request's bearer token is missing or wrong."""

    http, grpc = 401, "UNAUTHENTICATED"


class ForbiddenError(RequestError):
    """Refusal: the request is not allowed to this client, whatever its token."""

    http, grpc = 403, "PERMISSION_DENIED"


class OverloadError(RequestError):
    """Refusal: more requests wait than the queue limit allows."""

    http, grpc = 503, "RESOURCE_EXHAUSTED"


class DrainingError(RequestError):
    """Refusal: the server is ending, or is not ready."""

    http, grpc = 503, "UNAVAILABLE"


class DeadlineError(RequestError):
    """Refusal: the request cannot be answered before its deadline, or was not."""

    http, grpc = 503, "DEADLINE_EXCEEDED"


class ModelError(RequestError):
    """Refusal of a request: the model failed, or its output is NaN or infinite."""

    http, grpc = 500, "INTERNAL"
