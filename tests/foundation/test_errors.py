"""Errors of a search on a cluster reach the process that asked for it, pickled."""

from __future__ import annotations

import pickle

from optimizer.foundation import errors
from optimizer.harness import errors as of_the_harness
from optimizer.harness.errors import ExplainedError


def test_a_pickled_error_of_any_kind_says_the_same() -> None:
    names = {**vars(errors), **vars(of_the_harness)}.values()
    kinds = [c for c in names if isinstance(c, type) and issubclass(c, ExplainedError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("17 was found", where="a.b")
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.as_dict()) == (str(error), error.as_dict())
