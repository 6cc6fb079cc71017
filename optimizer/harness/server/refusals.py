"""The ways a request ends without an answer, each with its status in HTTP and gRPC.

A message says what is wrong with the request and never repeats a text of it: texts are the
client's, and messages go to logs.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request that is not answered. http: the status. grpc: the name of the status code.
    retry_after: seconds, where it is worth asking again; None where it is not. param, code: which
    field is wrong, and in which way, as OpenAI's clients read them."""

    http = 400
    grpc = "INVALID_ARGUMENT"

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
    """No such model, or no such path."""

    http, grpc = 404, "NOT_FOUND"


class MethodError(RequestError):
    """The path takes another method. accepted: which."""

    http, grpc = 405, "UNIMPLEMENTED"

    def __init__(self, accepted: str) -> None:
        super().__init__(f"this path takes {accepted}")
        self.accepted = accepted


class TooLargeError(RequestError):
    http, grpc = 413, "INVALID_ARGUMENT"


class SlowClientError(RequestError):
    """The client did not send its request in time."""

    http, grpc = 408, "CANCELLED"


class HostError(RequestError):
    """The request names another host than this server's."""

    http, grpc = 421, "INVALID_ARGUMENT"


class TokenError(RequestError):
    """Another bearer token than the server's, or none."""

    http, grpc = 401, "UNAUTHENTICATED"


class ForbiddenError(RequestError):
    """Not for this client, whatever it shows."""

    http, grpc = 403, "PERMISSION_DENIED"


class OverloadError(RequestError):
    """More waits than can be answered soon."""

    http, grpc = 503, "RESOURCE_EXHAUSTED"


class DrainingError(RequestError):
    """The server ends, or is not ready."""

    http, grpc = 503, "UNAVAILABLE"


class DeadlineError(RequestError):
    """It cannot be answered within the client's time, or was not."""

    http, grpc = 503, "DEADLINE_EXCEEDED"


class ModelError(RequestError):
    """What the model computed is no number, or it failed."""

    http, grpc = 500, "INTERNAL"
