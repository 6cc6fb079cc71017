"""Parts of a file share no input, and each label is in each part."""

from __future__ import annotations

from collections import Counter

from optimizer.data.splitting import split

SHARES = {"calibrate": 0.25, "time": 0.25, "evaluate": 0.5}


def test_rows_that_share_a_text_go_to_one_part() -> None:
    pairs = [[f"query {i // 3}", f"answer {i}"] for i in range(60)]
    parts = split(pairs, [None] * 60, SHARES)
    queries = [{pairs[i][0] for i in rows} for rows in parts.values()]
    assert sum(map(len, queries)) == len(set.union(*queries)) == 20
    assert sorted(i for rows in parts.values() for i in rows) == list(range(60))


def test_each_label_is_shared_out_alike() -> None:
    labels = ["rare" if i % 10 == 0 else "usual" for i in range(200)]
    parts = split([[f"text {i}"] for i in range(200)], labels, SHARES)
    counts = {part: Counter(labels[i] for i in rows) for part, rows in parts.items()}
    assert [counts[part]["rare"] for part in SHARES] == [5, 5, 10]
    assert [counts[part]["usual"] for part in SHARES] == [45, 45, 90]


def test_the_order_of_other_rows_does_not_move_a_row() -> None:
    texts = [[f"text {i}"] for i in range(40)]
    parts = split(texts, [None] * 40, SHARES)
    turned = split(texts[::-1], [None] * 40, SHARES)
    assert {p: sorted(39 - i for i in rows) for p, rows in turned.items()} == parts


def test_many_rows_that_share_a_text_leave_rows_for_each_part() -> None:
    """Half of the rows are on one document: were they taken first, no row would be left to time."""
    pairs = [["document", f"question {i}"] for i in range(50)]
    pairs += [[f"text {i}", f"question {50 + i}"] for i in range(50)]
    parts = split(pairs, [None] * 100, SHARES)
    assert {part: len(rows) for part, rows in parts.items()} == {
        "calibrate": 25, "time": 25, "evaluate": 50,
    }  # fmt: skip
    assert parts["evaluate"] == list(range(50))
