"""A step is predicted from the shapes of what it reads, whatever step changed them."""

from __future__ import annotations

from pathlib import Path

from optimizer.commands.build import predictions
from optimizer.store import Estimate, Shapes, Stage, Store


def values(_: object, shapes: Shapes) -> Estimate:
    return Estimate(memory=sum(shape[0] for shape in shapes.values()))


def halved(_: object, shapes: Shapes) -> Shapes:
    return {name: (shape[0] // 2,) for name, shape in shapes.items()}


def test_what_follows_a_step_that_shrinks_the_model_needs_less(tmp_path: Path) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("nothing runs in a dry store")

    first = Stage("load", 1, run, estimate=values, shapes=lambda _: {"weight": (100,)})
    smaller = Stage("compress", 1, run, estimate=values, shapes=halved)
    last = Stage("export", 1, run, estimate=values)
    store = Store(tmp_path, dry=True)
    read = store.step(first, None)
    store.step(last, None, store.step(smaller, None, read), read)
    store.step(last, None, read)
    memory = [entry["memory"] for entry in predictions.build_document(store)]
    assert memory == [100, 100, 50, 100]


def test_what_a_stage_says_of_its_prediction_stands_beside_why_it_runs(tmp_path: Path) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("nothing runs in a dry store")

    store = Store(tmp_path, dry=True)
    stage = Stage("load", 1, run, shapes=lambda _: {}, remark=lambda _: "an upper bound")
    store.step(stage, None)
    (entry,) = predictions.build_document(store)
    assert entry["why"] == "not in this store yet; an upper bound"
