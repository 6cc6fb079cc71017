"""A bundle that continues texts, as a server uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from ..generate import Options
from ..generate.grammar import Grammars
from ..generate.row import Rules
from ..runtimes.slots import Slots
from ..tasks.text_generation import Prompt, prompt_ids
from .options import ANSWER
from .refusals import RequestError, TooLargeError
from .warm_up.sharing import ALONE

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle

NO_GRAMMARS = (
    "response_format needs the package llguidance, which is not installed here "
    "(requirements-serve.txt of a bundle names it)"
)


@dataclass(frozen=True)
class Room:
    """What a server holds. slots: texts at once. context: tokens of each, prompt and answer; 0:
    what the model has. texts: that a request may ask for. answer: bytes of an answer, at most."""

    slots: int
    context: int
    texts: int
    answer: int = ANSWER


class TextModel:
    """An open bundle that continues texts in slots.

    sharing: "alone" runs each text by itself; "equal" lets texts share a step, which was measured
    to change no bit of their scores; "padded" whatever it changes. warm_up/generation.py decides.
    Raises MachineError for slots whose cache is larger than `memory` bytes; None: for none.
    """

    def __init__(self, bundle: Bundle, room: Room, memory: int | None = None) -> None:
        self.name, self.version = str(bundle.manifest["name"]), str(bundle.manifest["version"])
        self.contract, self.task = bundle.contract, bundle.task
        self.target = str(bundle.engine["target"])
        self.encoder, self.runner = bundle.encoder, bundle.runner
        self.room, self._bundle = room, bundle
        longest = self.contract.decoder.context
        self.context = min(room.context or longest, longest)
        self.most_tokens = room.slots * self.context  # of all texts of a request
        self.cache_bytes = room.slots * self.runner.cache_bytes(self.contract, self.context)
        if memory is not None and self.cache_bytes > memory:
            fitting = self.context * memory // self.cache_bytes
            raise MachineError(
                f"{room.slots} slots of {self.context:,} tokens take {self.cache_bytes >> 20:,} "
                f"MiB of cache, and {memory >> 20:,} MiB of memory may be taken",
                where="serve",
                fix=f"Give fewer --slots, or --context {fitting} at most.",
            )
        self.slots: Slots = self.runner.slots(self.contract, room.slots, self.context)
        self.sharing = ALONE
        self.grammars: Grammars | None = None
        self._no_grammars = NO_GRAMMARS
        try:
            spec = self.contract.decoder
            self.grammars = Grammars(self.encoder, spec.vocabulary, spec.eos_ids[0])
        except MachineError:
            pass
        except Exception as e:  # a tokenizer that the library does not know
            self._no_grammars = (
                f"response_format: llguidance reads no such tokenizer ({str(e)[:100]})"
            )

    def rules(self, options: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> Rules:
        """How a request's tokens are chosen. schema: of the JSON that its texts are to be. Raises
        RequestError for an option out of range."""
        try:
            rules = Rules.of(self.contract, self.encoder, Options.from_json(options))
            if schema is None:
                return rules
            if self.grammars is None:
                raise RequestError(self._no_grammars, param="response_format")
            return replace(rules, grammar=self.grammars.of_schema(schema, "response_format"))
        except InputError as e:
            raise asked_wrongly(e) from None

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each. Raises RequestError for one that leaves no room for a token."""
        if not 0 < len(prompts) <= self.room.texts:
            raise TooLargeError(f"{len(prompts)} texts; accepted: 1 to {self.room.texts}")
        rows, tokens = list[list[int]](), 0
        for i, prompt in enumerate(prompts):
            try:
                row = prompt_ids(self.contract, self.encoder, prompt, f"prompt {i}")
            except InputError as e:
                raise asked_wrongly(e) from None
            if len(row) >= self.context:
                raise RequestError(
                    f"a prompt has {len(row)} tokens; accepted: up to {self.context - 1}",
                    code="context_length_exceeded",
                )
            rows.append(row)
            tokens += len(row)
            if tokens > self.most_tokens:  # before the next one is tokenized
                raise RequestError(
                    f"the prompts have more than the {self.most_tokens} tokens that all texts of "
                    "a request together may have"
                )
        return rows

    def read(
        self, prompts: Sequence[Prompt], options: Mapping[str, Any]
    ) -> tuple[list[list[int]], Rules]:
        """(token ids of each prompt, how what follows them is chosen). Raises RequestError."""
        rows, rules = self.prompts(prompts), self.rules(options)
        self.check_room(rows, rules.options.max_new_tokens)
        return rows, rules

    def check_room(self, rows: Sequence[Sequence[int]], answer: int) -> None:
        """Raises RequestError where answers of so many tokens do not fit behind these prompts, and
        the model's own context, which ends a text by itself, is not what they do not fit into."""
        longest = max(map(len, rows))
        if self.context < self.contract.decoder.context and longest + answer > self.context:
            raise RequestError(
                f"a prompt of {longest} tokens and {answer} more do not fit into the "
                f"{self.context} that a slot has here",
                param="max_new_tokens",
                code="context_length_exceeded",
            )

    def close(self) -> None:
        self._bundle.close()


def asked_wrongly(error: InputError) -> RequestError:
    """A client's error without what it sent: names and ranges are ours, values are not."""
    accepted = f"; accepted: {error.accepted}" if error.accepted else ""
    return RequestError(f"{error.where} is not accepted{accepted}", param=error.where)
