"""Read the trace ids of a request for its log line (W3C Trace Context).

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re

HEADER = "traceparent"
FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.A)


def trace_fields(header: str | None) -> dict[str, str]:
    """Return {trace_id, parent_id} of a request's traceparent header, for a log line.

    Returns {} without a header, and for a malformed one.
    """
    match = None if header is None else FORM.fullmatch(header)
    if match is None:
        return {}
    version, trace, parent, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace.strip("0"):
        return {}
    return {"trace_id": trace, "parent_id": parent} if parent.strip("0") else {}
