"""Check the arrays that the harness gives a decoder, at every length of a text. No model is run.

compared   token ids, masks and positions of each step, and the token ids behind each row's KV
           cache, with integers that are computed here independently. An IntegerModel stands for
           the model, below the decoders and slots of ONNX Runtime
limit      none: equal
caught     test_a_fault_that_begins_at_a_length_is_found_at_that_length,
           test_a_token_that_is_fed_a_step_late_is_found, test_padding_on_the_right_is_found

 1. loop   generate() on one text from its first token to the end of the context, on a prompt that
           fills the context, on rows padded on the left; with growing and shared KV caches
 2. slots  texts that begin and end at any time (runtimes/slots.py), token by token, and with
           prompt-lookup guesses that are undone

Beyond DENSE tokens only lengths around powers of two and at the end of the context are covered.
Called by generation_laws.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optimizer.harness.contract import Contract
from optimizer.harness.generate import Options, generate
from optimizer.harness.inputs import kv_cache
from optimizer.harness.runtimes.ort.decoder import FIRST_SCORED, LOGITS, SHARED, OrtDecoder
from optimizer.harness.runtimes.ort.slots import OrtSlots
from optimizer.harness.runtimes.slots import SeparateDecoders, Slots
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.laws.decoder.sampling_laws import NoText

DENSE = 8192  # tokens up to which every length is covered: their masks have DENSE^2 / 2 numbers
AROUND = 6  # tokens that are generated around a longer length
TEXTS = 3  # texts in the slots at once
VOCABULARY, TOKENS = 64, 20  # number of token ids of the stand-in, and of each text
PIECE = 5  # tokens of a prompt that are read at once in the slots
SHOWN = 3  # messages of one comparison at most


@dataclass(frozen=True)
class ModelStep:
    """One run of the model, as the harness called it."""

    arrays: Mapping[str, Array]  # its inputs except the KV cache
    cached: Sequence[Array]  # token ids in each row's KV cache (columns,), this step's included


class IntegerModel:
    """Stand-in for ort/decoder.BindableModel whose KV cache holds token ids as keys.

    contract: contract of the decoder
    shared: True where past and present are one buffer
    watch: function that receives each step and returns the likeliest next token of each row
    """

    device = "cpu"

    def __init__(
        self, contract: Contract, shared: bool, watch: Callable[[ModelStep], Sequence[int]]
    ) -> None:
        self.names = kv_cache.list_names(contract.decoder.layers)
        dtypes = {i.name: np.dtype(i.dtype) for i in contract.inputs}
        self.inputs = {**dtypes, **{past: np.dtype(np.float32) for past, _ in self.names}}
        self.outputs = [LOGITS, *(present for _, present in self.names)]
        self.metadata = {**dict([SHARED]), FIRST_SCORED: ""} if shared else {}
        self.adapters: Mapping[str, Any] = {}
        self._shared, self._watch = shared, watch

    def decoder(self, contract: Contract, capacity: int = 0) -> OrtDecoder:
        """Make the decoder that OrtRunner.decoder would make of this model."""
        return OrtDecoder(self, contract, capacity)

    def binding(self) -> _Binding:
        return _Binding()

    def value(self, array: Array) -> _Value:
        return _Value(array)

    def run_values(self, feeds: Mapping[str, Any], fetches: Mapping[str, Any]) -> None:
        """Run as `run_bound`, but return the logits of the newest tokens only."""
        binding = _Binding()
        binding.values = {name: value for name, value in feeds.items() if kv_cache.is_past(name)}
        binding.arrays = {
            n: a for n, a in feeds.items() if n not in (*binding.values, FIRST_SCORED)
        }
        binding.logits = fetches[LOGITS]
        self.run_bound(binding)

    def run_bound(self, binding: _Binding) -> None:
        """Write the new tokens into the KV cache, and a logit of 1 for each row's next token."""
        ids, mask = binding.arrays["input_ids"], binding.arrays["attention_mask"]
        new, past = ids.shape[1], self.names[0][0]
        ends = mask.shape[1] - np.argmax(mask[:, ::-1] != 0, axis=1)  # behind the last 1
        if self._shared:
            keys = binding.values[past].array
            ends = np.minimum(ends, keys.shape[2])
            for row, end in enumerate(
                ends.tolist()
            ):  # a mask that is too short holds the tokens that fit
                count = min(new, end)
                keys[row, 0, end - count : end, 0] = ids[row, new - count :]
        else:
            added = ids[:, None, :, None].astype(np.float32)
            keys = np.concatenate([binding.values[past].array, added], 2)
            binding.present = [_Value(keys) for _ in self.names]
        cached = [keys[row, 0, :end, 0] for row, end in enumerate(ends)]
        logits = binding.logits
        logits[:] = 0
        for row, token in enumerate(self._watch(ModelStep(binding.arrays, cached))):
            logits[row, -1, token] = 1


@dataclass(frozen=True)
class _Value:
    """An array with the interface of ONNX Runtime's OrtValue."""

    array: Array

    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def numpy(self) -> Array:
        return self.array


class _Binding:
    """Inputs and outputs bound for one run, with the methods of ONNX Runtime's IOBinding."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.values: dict[str, _Value] = {}
        self.present: list[_Value] = []
        self.logits = np.zeros((0, 0, 0), np.float32)

    def bind_cpu_input(self, name: str, array: Array) -> None:
        self.arrays[name] = array

    def bind_ortvalue_input(self, name: str, value: _Value) -> None:
        self.values[name] = value

    def bind_ortvalue_output(self, name: str, value: _Value) -> None:
        """Accept an output that lies in a shared buffer: the KV cache after the step takes the
        place of the one before."""

    def bind_output(
        self,
        name: str,
        device: str,  # noqa: ARG002 - as IOBinding has it
        number: int = 0,  # noqa: ARG002
        kind: Any = None,  # noqa: ARG002
        shape: tuple[int, ...] = (),
        address: int = 0,
    ) -> None:
        if name == LOGITS:
            memory = (ctypes.c_float * math.prod(shape)).from_address(address)
            self.logits = np.frombuffer(memoryview(memory), np.float32).reshape(shape)

    def get_outputs(self) -> list[Any]:
        return [None, *self.present]


def find_problems(contract: Contract) -> list[str]:
    """Return a problem for each wrong array that the harness gives the model in a step of
    generate() or of slots.

    contract: contract whose context, inputs and padding are used
    """
    about = replace(
        contract.decoder,
        layers=1,
        kv_heads=1,
        head_dim=1,
        vocabulary=VOCABULARY,
        eos_ids=(0,),
        bos_id=None,
    )
    small = replace(contract, generation=about)
    messages: list[str] = []
    for lengths, new in _prompts(about.context):
        messages += _loop(small, lengths, new, shared=len(lengths) > 1)
    for make, count in ((_separate, 1), (_together, 1), (_together, TEXTS)):
        messages += _slots(small, make, count)
    return list(dict.fromkeys(messages))


def describe_unseen(context: int) -> str:
    """Describe the lengths of texts at which find_problems ran no step; "" for none.

    context: largest number of tokens of the model
    """
    if context <= DENSE:
        return ""
    return f"lengths from {DENSE:,} to {context:,} tokens but for those around powers of two"


def _prompts(context: int) -> Iterator[tuple[list[int], int]]:
    """Yield (number of tokens of each prompt of a batch, number of tokens to generate).

    context: largest number of tokens of the model
    """
    dense = min(context, DENSE)
    yield [1], dense - 1
    if context > 2:
        yield [context - 1], 1
    padded = [min(n, context - 1) for n in (2, 9, 5)]
    yield padded, dense - max(padded)
    half = max(1, dense // 2)
    yield [half, max(1, half - 3), 1], min(AROUND, dense - half)
    length = DENSE
    while length < context:
        yield [length - AROUND // 2], AROUND
        length *= 2
    if context > DENSE:
        yield [context - AROUND], AROUND


def choose_token(text: Any, column: Any) -> Any:
    """Return the token id at `column` of text number `text`, both integers or arrays. No two texts
    share an id."""
    return 1 + TOKENS * text + column % (TOKENS - 1)


class _Differences:
    """Collects the first differences between the arrays of steps and the expected ones.

    what: text before each message
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.messages: list[str] = []

    def compare(self, name: str, start: int, actual: Array, expected: Array) -> None:
        """Add a message where the arrays differ. start: tokens in the KV cache before the step."""
        same = actual.shape == expected.shape and bool((actual == expected).all())
        if same or len(self.messages) >= SHOWN:
            return
        where = f"{self._what}, after {start} cached tokens: {name}"
        if actual.shape != expected.shape:
            self.messages.append(f"{where} has shape {actual.shape}, expected {expected.shape}")
            return
        at = tuple(int(i) for i in np.argwhere(actual != expected)[0])
        self.messages.append(f"{where}{list(at)} is {actual[at]:g}, expected {expected[at]:g}")


def _loop(contract: Contract, lengths: Sequence[int], new: int, shared: bool) -> list[str]:
    """Return a problem for each wrong array that generate() gives the model for prompts that run
    together.

    lengths: tokens of each prompt
    new: tokens to generate
    shared: True where the KV cache is one buffer
    """
    width = max(lengths)
    columns, rows = np.arange(width + new), np.arange(len(lengths))[:, None]
    padding = width - np.array(lengths)[:, None]
    mask = (columns >= padding).astype(np.int64)
    ids = np.where(mask == 1, choose_token(rows, columns[None]), contract.text.pad_id)
    places = np.where(mask == 1, columns - padding, 0)
    kind = "shared" if shared else "growing"
    differ = _Differences(f"generate() on prompts of {list(lengths)} tokens, {kind} cache")
    done = 0

    def watch(step: ModelStep) -> list[int]:
        nonlocal done
        start, done = done, done + step.arrays["input_ids"].shape[1]
        differ.compare("input_ids", start, step.arrays["input_ids"], ids[:, start:done])
        differ.compare("attention_mask", start, step.arrays["attention_mask"], mask[:, :done])
        if "position_ids" in step.arrays:
            actual = step.arrays["position_ids"]
            differ.compare("position_ids", start, actual, places[:, start:done])
        for row, cached in enumerate(step.cached):
            differ.compare(f"cached tokens of row {row}", start, cached, ids[row, :done])
        return [int(choose_token(row, done)) for row in range(len(lengths))]

    options = Options(max_new_tokens=new, do_sample=False, repetition_penalty=1.0)
    prompts = [ids[i, width - n : width].tolist() for i, n in enumerate(lengths)]
    model = IntegerModel(contract, shared, watch)
    answers = generate(contract, model, NoText(), prompts, options)
    drawn = np.array([answer.tokens for answer in answers])
    differ.compare("tokens drawn", width, drawn, choose_token(rows, columns[None, width:]))
    differ.compare("steps", width, np.array([[done]]), np.array([[width + new - 1]]))
    return differ.messages


def _separate(model: IntegerModel, contract: Contract, rows: int, capacity: int) -> Slots:  # noqa: ARG001
    return SeparateDecoders(model, contract, capacity)


def _together(model: IntegerModel, contract: Contract, rows: int, capacity: int) -> Slots:
    return OrtSlots(model, contract, rows, capacity)


def _slots(contract: Contract, make: Callable[..., Slots], count: int) -> list[str]:
    """Return sentences on wrong arrays of slots with `count` texts. Each text begins when the text
    before has read its prompt; of several texts the first ends in the middle of the context and
    begins again.

    make: function that makes the slots
    """
    context = min(contract.decoder.context, DENSE)
    differ = _Differences(f"{make.__name__.strip('_')} slots of {count} texts")
    tokens, columns = (
        choose_token(np.arange(count)[:, None], np.arange(context)),
        np.arange(context + 1),
    )
    lengths: dict[int, int] = {}  # tokens by text, a running step's included
    new, seen = 1, list[int]()  # a step's tokens per text, and the texts that it ran

    def watch(step: ModelStep) -> list[int]:
        texts = (step.arrays["input_ids"][:, 0] - 1) // TOKENS
        seen.extend(texts.tolist())
        for row, text in enumerate(texts.tolist()):
            if text not in lengths:  # reported by the comparison of texts
                continue
            stop = lengths[text]
            start, ids = stop - new, tokens[text, :stop]
            arrays = {name: array[row] for name, array in step.arrays.items()}
            mask = columns[: len(arrays["attention_mask"])] < stop
            differ.compare("input_ids", start, arrays["input_ids"], ids[start:])
            differ.compare("attention_mask", start, arrays["attention_mask"], mask)
            if "position_ids" in arrays:
                differ.compare("position_ids", start, arrays["position_ids"], columns[start:stop])
            differ.compare("cached tokens", start, step.cached[row], ids)
        return [0] * len(texts)

    slots = make(IntegerModel(contract, True, watch), contract, count, context + 1)

    def step(texts: Sequence[int], size: int, call: Callable[[dict[int, list[int]]], Any]) -> None:
        nonlocal new
        new = size
        ids = {t: tokens[t, lengths[t] : lengths[t] + size].tolist() for t in texts}
        for text in texts:
            lengths[text] += size
        seen.clear()
        call(ids)
        differ.compare("texts", max(lengths.values()), np.sort(seen), np.array(texts))

    def continued() -> None:
        going = sorted(t for t, n in lengths.items() if n < context)
        step(going, 1, lambda ids: slots.step({t: i for t, (i,) in ids.items()}))

    def begin(text: int) -> None:
        slots.open(text)
        lengths[text] = 0
        for size in (1, PIECE, PIECE):
            if lengths[text] + size < context:
                step([text], size, lambda ids: slots.read(text, ids[text]))

    for text in range(count):
        begin(text)
        continued()
    while any(n < context for t, n in lengths.items() if t or count == 1):
        if count == 1 and slots.together and lengths[0] + 2 <= context:
            step([0], 2, lambda ids: slots.scores(0, ids[0]))
            slots.undo(0, 1)  # the second was a guess
            lengths[0] -= 1
        else:
            continued()
        if count > 1 and lengths[0] == max(context // 2, 1):
            slots.close(0)
            begin(0)
    return differ.messages
