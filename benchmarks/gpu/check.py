"""Check of answers before suite.py times a system.

The reference is ONNX Runtime on the CPU with the same graph, operator by operator; the tolerance is
the distance of correct runs from each other (optimizer/validate/ledger/limits/spread.py). A system
beyond it is not timed.

An encoder answers three times, so that a captured graph is replayed, and once more with its inputs
on the device. A decoder gets a prompt and STEPS tokens; its KV cache stays where the system has it.
Only ROWS of a batch are compared, since rows are independent. Reference files are .npz.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]
ROWS = (0, 1, 7, 31)  # the first, and the last of each batch that is timed
LARGEST = 32
PROMPT, NEW, STEPS = 128, 64, 8
REPLAYS = 3


@dataclass(frozen=True)
class Judge:
    """Reference arrays and tolerance.

    expected: arrays of a reference file
    limit: maximum relative L2 of a row
    of: origin of the limit, for messages
    """

    expected: Mapping[str, Any]
    limit: float
    of: str

    def problem(self, found: Iterable[tuple[Any, Any]], where: str) -> str:
        """Explain why (found, expected) pairs are too far apart; "" if they are not."""
        from optimizer.validate.ledger.distance import measure_distance

        measured = measure_distance((np.asarray(f), np.asarray(e)) for f, e in found).worst
        if measured <= self.limit:
            return ""
        return (
            f"answers: {where} is {measured:.1e} from ONNX Runtime on the CPU, relative L2; "
            f"{self.limit:.1e} is declared ({self.of})"
        )


def ids(batch: int, sequence: int) -> Arrays:
    """Make inputs without padding; a row is the same in every batch, a prefix of longer ones."""
    chosen = np.random.default_rng(0).integers(5, 80, (512, LARGEST)).T[:batch, :sequence]
    return {
        "input_ids": np.ascontiguousarray(chosen, np.int64),
        "attention_mask": np.ones((batch, sequence), np.int64),
        "token_type_ids": np.zeros((batch, sequence), np.int64),
    }


def of(arrays: Arrays, names: Iterable[str]) -> Arrays:
    return {n: arrays[n] for n in names}


def stepped(batch: int, step: int) -> Arrays:
    """Make the prompt (step 0), or the token of a later step."""
    start, stop = (0, PROMPT) if step == 0 else (PROMPT + step - 1, PROMPT + step)
    return continuing(ids(batch, stop)["input_ids"][:, start:], start)


def continuing(tokens: Any, past: int) -> Arrays:
    """Make a decoder's arrays for tokens that follow `past` others."""
    batch, new = tokens.shape
    return {
        "input_ids": tokens,
        "attention_mask": np.ones((batch, past + new), np.int64),
        "position_ids": np.tile(np.arange(past, past + new, dtype=np.int64), (batch, 1)),
    }


def chosen_rows(batch: int) -> list[int]:
    return [row for row in ROWS if row < batch]


def reference(kind: str, model: Path, contract: Path, grid: Mapping[str, Any], out: Path) -> None:
    """Write the CPU's answers for ROWS.

    An encoder has "<sequence>.<output>" (rows, ...), a decoder "logits" (1 + STEPS, rows,
    vocabulary).
    """
    from optimizer.harness.contract import read
    from optimizer.harness.runtimes.ort.run import OrtRunner

    rows = chosen_rows(max(grid["batch"]))
    made: Arrays = {}
    with OrtRunner(model, fuse=False) as runner:
        if kind == "encoder":
            for sequence in grid["sequence"]:
                given = {n: a[rows] for n, a in ids(LARGEST, sequence).items()}
                for name, array in runner.infer(of(given, runner.inputs)).items():
                    made[f"{sequence}.{name}"] = np.asarray(array, np.float32)
        else:
            opened = read(contract)
            decoder = runner.decoder(opened, PROMPT + STEPS)
            names = [i.name for i in opened.inputs]
            logits = []
            for step in range(1 + STEPS):
                given = {n: a[rows] for n, a in stepped(LARGEST, step).items()}
                logits.append(decoder.step(of(given, names))[:, -1])
            made["logits"] = np.stack(logits)
    np.savez(out, **made)


def limit(
    kind: str, variant: str, loaded: Path, state_folder: Path, grid: Mapping[str, Any]
) -> float:
    """Measure how far two correct float16 runs may lie apart, as relative L2 of a row.

    Uses Monte Carlo arithmetic on the torch model, as the ledger does.

    loaded: folder of the load stage
    """
    from optimizer.compress.simulate import simulate_state
    from optimizer.foundation import state as states
    from optimizer.foundation.rounding import random_rounding
    from optimizer.foundation.rounding.tolerance import RUNS
    from optimizer.harness.contract import read
    from optimizer.harness.inputs.batch import Batch
    from optimizer.model.checkpoint.checkpoint import open_checkpoint
    from optimizer.model.checkpoint.model import load_torch_model
    from optimizer.validate.ledger import trace
    from optimizer.validate.ledger.limits import monte_carlo, spread
    from optimizer.validate.ledger.pieces.roundoff import UNIT

    contract, state = read(loaded / "contract.json"), states.read(state_folder)
    source = load_torch_model(open_checkpoint(loaded), contract.task)
    modules = [n.removesuffix(".weight") for n in state.weights]
    modules = [n for n in modules if hasattr(source.get_submodule(n), "in_features")]
    model = simulate_state(source, state)
    if variant == "float":
        model = load_torch_model(open_checkpoint(loaded), contract.task, overrides=state.replaced)
    outputs = [o.name for o in contract.outputs]
    batch = ids(len(ROWS), min(grid["sequence"])) if kind == "encoder" else stepped(len(ROWS), 0)
    named = of(batch, [i.name for i in contract.inputs])
    mask = np.asarray(named["attention_mask"])
    arrays = Batch(named, (), (), mask.astype(bool))
    arithmetic = random_rounding.Arithmetic(unit=UNIT["fp16"])
    rounded = monte_carlo.RoundedModel(model, modules, arithmetic)
    runs = list(monte_carlo.make_runs(rounded, [arrays], outputs, range(RUNS)))
    plain = trace.run(model, arrays, outputs)
    if kind == "decoder":  # only the last token of each step is compared
        runs = [[{n: a[:, -1:] for n, a in result.items()} for result in run] for run in runs]
        plain, mask = {n: a[:, -1:] for n, a in plain.items()}, mask[:, -1:]
    expected = [trace.Trace(mask, arrays, plain)]
    looks = len(ROWS) * len(grid["sequence"]) * (1 + STEPS)
    found = spread.measure_spread(runs, None, expected, outputs, UNIT["fp16"], looks)
    return max(found.limits.values())


def judge(variant: str, prepared: Mapping[str, Any]) -> Judge:
    """Read the judge of a variant. prepared: result of models.prepare."""
    expected = dict(np.load(prepared["references"][variant]))
    return Judge(expected, prepared["limits"][variant], "what correct float16 runs differ by")


def encoder_problem(system: Any, judge: Judge, batch: int, sequence: int) -> str:
    """Explain why a cell of an encoder is not timed; "" if it is."""
    arrays, rows = ids(batch, sequence), chosen_rows(batch)

    def pairs(found: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        named = {n: judge.expected.get(f"{sequence}.{n}") for n in found}
        both = [(found[n], e) for n, e in named.items() if e is not None]
        return [(f[row], e[i]) for f, e in both for i, row in enumerate(rows)] or [(0, [1])]

    for time in range(REPLAYS):
        if why := judge.problem(pairs(system.infer(arrays)), f"answer {time + 1} of infer"):
            return why
    if system.resident is not None:
        held = system.resident(arrays)
        for time in range(REPLAYS):
            held.run()
            if why := judge.problem(pairs(held.outputs()), f"resident answer {time + 1}"):
                return why
        held.close()
    return ""


def decoder_problem(system: Any, judge: Judge, batch: int) -> str:
    """Explain why a cell of a decoder is not timed; "" if it is."""
    writer, rows = system.start(batch, PROMPT + NEW), chosen_rows(batch)
    for step in range(1 + STEPS):
        logits = np.asarray(writer.step(stepped(batch, step)))[:, -1]
        expected = judge.expected["logits"][step]
        pairs = [(logits[row], expected[i]) for i, row in enumerate(rows)]
        if why := judge.problem(pairs, f"step {step} after the prompt" if step else "the prompt"):
            return why
    writer.close()
    return ""
