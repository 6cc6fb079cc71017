"""Arrays in a file equal those that were put there."""

from pathlib import Path

import numpy as np
import pytest

from optimizer.validate.ledger.array_file import ArrayFile, LazyArrays


def test_each_array_comes_back_as_it_was(tmp_path: Path) -> None:
    file, draw = ArrayFile(tmp_path), np.random.default_rng(0)
    logits = draw.standard_normal((3, 5, 7)).astype(np.float32)
    first = {"logits": logits, "no tokens": np.zeros((2, 0, 4), np.float32), "one": np.float64(3.5)}
    second = {"logits": logits.transpose(2, 0, 1)[::2], "ids": np.arange(4)}
    kept = [file.put({n: np.asarray(a) for n, a in arrays.items()}) for arrays in (first, second)]
    for arrays, back in zip((first, second), kept, strict=True):
        assert list(back) == list(arrays)
        for name, array in arrays.items():
            assert back[name].dtype == np.asarray(array).dtype
            np.testing.assert_array_equal(back[name], array)


def test_what_is_put_after_a_look_leaves_what_was_there(tmp_path: Path) -> None:
    """Correct runs of one arithmetic are written after limits of another were read."""
    file, draw = ArrayFile(tmp_path), np.random.default_rng(1)
    arrays = [{"a": draw.standard_normal(50), "b": draw.standard_normal(70)} for _ in range(3)]
    kept = []
    for one in arrays:
        kept.append(file.put(one))
        np.testing.assert_array_equal(kept[0]["a"], arrays[0]["a"])
    for one, back in zip(arrays, kept, strict=True):
        for name in one:
            np.testing.assert_array_equal(back[name], one[name])


def test_the_file_has_no_name_and_holds_each_array_once(tmp_path: Path) -> None:
    file = ArrayFile(tmp_path)
    kept = file.put({"a": np.ones(1000, np.float32)})
    assert list(tmp_path.iterdir()) == []
    assert kept["a"].sum() == kept["a"].sum() == 1000
    assert file._file.seek(0, 2) == 4000


def test_a_file_that_is_shorter_than_what_was_written_is_told(tmp_path: Path) -> None:
    file = ArrayFile(tmp_path)
    kept = file.put({"a": np.ones(1000, np.float32)})
    file._file.truncate(1000)
    with pytest.raises(OSError, match="shorter"):
        kept["a"]


def test_what_is_not_looked_at_is_not_read() -> None:
    def read(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        assert name == "a"
        return np.zeros(2, np.float32)

    lazily = LazyArrays(["a", "b"], read)
    assert (list(lazily), len(lazily)) == (["a", "b"], 2)
    assert lazily["a"].shape == (2,)
    with pytest.raises(KeyError):
        lazily["c"]
