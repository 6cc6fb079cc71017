"""The trace that a request is part of, as W3C Trace Context has it, for the log.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re

HEADER = "traceparent"
FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.A)


def trace_fields(header: str | None) -> dict[str, str]:
    """{trace_id, parent_id} for a log line; empty where there is no such header, or it is not as
    the standard has it, which is no reason to refuse a request."""
    match = None if header is None else FORM.fullmatch(header)
    if match is None:
        return {}
    version, trace, parent, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace.strip("0"):
        return {}
    return {"trace_id": trace, "parent_id": parent} if parent.strip("0") else {}
