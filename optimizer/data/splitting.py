"""Split rows into parts that share no input, the same on every machine."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

Key = str | bytes


def split(
    inputs: Sequence[Sequence[Key]], labels: Sequence[Hashable], shares: Mapping[str, float]
) -> dict[str, list[int]]:
    """Split a data set's rows into parts such that rows that share an input are in one part; return
    {part: indices of its rows, ascending}.

    inputs: keys of the inputs of each row, from same_rows.make_text_keys
    labels: label of each row, None for rows without; the rows of each label are divided by the same
        shares
    shares: {part: its share of the rows}; rows beyond the sum of shares are left out

    The largest groups of connected rows go first, each to the part that lacks most rows.
    """
    groups: dict[Hashable, list[list[int]]] = defaultdict(list)
    for rows in _connected(inputs):
        groups[labels[rows[0]]].append(rows)
    parts: dict[str, list[int]] = {part: [] for part in shares}
    for members in groups.values():
        members.sort(key=lambda rows: (-len(rows), _rank(inputs[rows[0]])))
        lacking = {part: share * sum(map(len, members)) for part, share in shares.items()}
        for rows in members:
            part = max(lacking, key=lacking.__getitem__)
            if lacking[part] < 0.5:  # no part lacks a row
                break
            parts[part] += rows
            lacking[part] -= len(rows)
    return {part: sorted(rows) for part, rows in parts.items()}


def _rank(keys: Sequence[Key]) -> bytes:
    text = [key if isinstance(key, bytes) else key.encode() for key in keys]
    return hashlib.sha256(b"\0".join(text)).digest()


def _connected(inputs: Sequence[Sequence[Key]]) -> list[list[int]]:
    """Group the rows of a data set, before it is split, such that rows of different groups have no
    input in common; return each group's indices."""
    parent = list(range(len(inputs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[Key, int] = {}
    for i, keys in enumerate(inputs):
        for key in keys:
            parent[root(i)] = root(first.setdefault(key, i))
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(inputs)):
        groups[root(i)].append(i)
    return list(groups.values())
