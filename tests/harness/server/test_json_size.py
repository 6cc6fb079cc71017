"""JSON is counted before it is parsed: as a parser counts it, whatever stands in its strings."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.harness.server import json_size
from optimizer.harness.server.json_size import LIST, check_size
from optimizer.harness.server.refusals import RequestError, TooLargeError

TEXTS = st.text(alphabet='a"\\[]{},:\n é😀', max_size=9)
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


def counted(value: Any) -> int:
    """1, plus LIST + max(elements - 1, 0) for each list or object."""

    def inside(value: Any) -> int:
        if not isinstance(value, list | dict):
            return 0
        parts = list(value.values() if isinstance(value, dict) else value)
        return LIST + max(len(parts) - 1, 0) + sum(map(inside, parts))

    return 1 + inside(value)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(1, 40), st.booleans())
def test_a_document_is_counted_as_it_is_parsed(value: Any, piece: int, escaped: bool) -> None:
    data = json.dumps(value, ensure_ascii=escaped).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "PIECE", piece)  # wherever it is cut
        check_size(data, counted(value))
        if counted(value) > 1:
            with pytest.raises(TooLargeError):
                check_size(data, counted(value) - 1)


def test_depth_is_that_of_lists_and_objects_and_not_of_strings() -> None:
    check_size(b"[" * 64 + b"]" * 64, 10_000)
    check_size(b'["' + b"[" * 100 + b'"]', 10_000)
    with pytest.raises(RequestError, match="nested objects and lists"):
        check_size(b"[" * 65 + b"]" * 65, 10_000)


def test_a_body_of_sixteen_mebibytes_of_nothing_is_refused_at_its_beginning() -> None:
    seen = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        escaped = json_size._find_escaped
        patch.setattr(
            json_size, "_find_escaped", lambda p, b: (seen.append(len(p)), escaped(p, b))[1]
        )
        with pytest.raises(TooLargeError):
            check_size(b"[" + b"{}," * (5 << 20) + b"{}]", 1 << 19)
    assert sum(seen) < 1 << 20
