"""Run a bundle for text generation behind a server: prompts, sampling rules and slots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from ..generate import Options
from ..generate.grammar import Grammars
from ..generate.row import Rules
from ..runtimes.decoder import DecoderRunner
from ..runtimes.ort.run import OrtRunner
from ..runtimes.slots import Slots
from ..tasks.text_generation import Prompt, tokenize_prompt
from .options import ANSWER
from .refusals import RequestError, TooLargeError, UnknownError
from .warm_up.sharing import ALONE

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle

NO_GRAMMARS = (
    "response_format needs the package llguidance, which is not installed here "
    "(requirements-serve.txt of a bundle names it)"
)


@dataclass(frozen=True)
class Room:
    """Limits of a text-generation server.

    slots: texts that are generated at once
    context: maximum tokens of a text, prompt and answer together; 0 for the model's context
    texts: maximum texts of a request
    answer: maximum bytes of an answer
    """

    slots: int
    context: int
    texts: int
    answer: int = ANSWER


class TextModel:
    """An open bundle by which a server generates texts in slots.

    room: limits of the server
    memory: maximum bytes of the KV cache of all slots; None: no limit
    sharing: texts that may share a decode step: "alone", none; "equal", all, measured to change no
        bit of their scores; "padded", all, although scores may change. Set by warm_up/generation.py

    Raises MachineError for a KV cache of more than `memory` bytes.
    """

    def __init__(self, bundle: Bundle, room: Room, memory: int | None = None) -> None:
        self.name, self.version = str(bundle.manifest["name"]), str(bundle.manifest["version"])
        self.contract, self.task = bundle.contract, bundle.task
        self.target, self.device = str(bundle.engine["target"]), str(bundle.engine["device"])
        self.encoder, self.runner = bundle.encoder, bundle.runner
        self.adapters = self.contract.adapters
        self.decoders: dict[str, DecoderRunner] = {"": self.runner}  # by adapter
        if isinstance(self.runner, OrtRunner):
            self.decoders |= self.runner.adapters
        self.room, self._bundle = room, bundle
        longest = self.contract.decoder.context
        self.context = min(room.context or longest, longest)
        self.most_tokens = room.slots * self.context  # of all texts of a request

        def cache_bytes(tokens: int) -> int:
            return room.slots * self.runner.cache_bytes(self.contract, tokens)

        self.cache_bytes = cache_bytes(self.context)
        if memory is not None and self.cache_bytes > memory:
            fitting = bisect_right(range(1, self.context), memory, key=cache_bytes)
            shorter = f", or --context {fitting} at most" if fitting else ""
            raise MachineError(
                f"{room.slots} slots of {self.context:,} tokens take {self.cache_bytes >> 20:,} "
                f"MiB of KV cache, and {memory >> 20:,} MiB of memory may be taken",
                where="serve",
                fix=f"Give fewer --slots{shorter}.",
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
        except Exception as e:  # the library does not support the tokenizer
            self._no_grammars = (
                f"response_format: llguidance does not read this tokenizer ({str(e)[:100]})"
            )

    def rules(self, options: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> Rules:
        """Return the sampling rules of a request. Raises RequestError for an option out of range.

        schema: JSON schema of the texts; None: free text
        """
        try:
            rules = Rules.build(self.contract, self.encoder, Options.from_json(options))
            if schema is None:
                return rules
            if self.grammars is None:
                raise RequestError(self._no_grammars, param="response_format")
            return replace(rules, grammar=self.grammars.compile_schema(schema, "response_format"))
        except InputError as e:
            raise client_error(e) from None

    def adapter(self, name: Any, param: str) -> str:
        """Return the adapter that a request names; "" if it names the model itself.

        param: field of the request, for errors

        Raises UnknownError for an adapter that this version of the model does not have.
        """
        if name == self.name:
            return ""
        if name not in self.adapters:
            accepted = ", ".join((self.name, *self.adapters))
            raise UnknownError(
                f"this version of the model has no such adapter; here are {accepted}",
                param=param,
                code="model_not_found",
            )
        return str(name)

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Tokenize a request's prompts; return the token ids of each.

        Raises RequestError for a prompt that leaves no room for a new token.
        """
        if not 0 < len(prompts) <= self.room.texts:
            raise TooLargeError(f"{len(prompts)} texts; accepted: 1 to {self.room.texts}")
        rows, tokens = list[list[int]](), 0
        for i, prompt in enumerate(prompts):
            try:
                row = tokenize_prompt(self.contract, self.encoder, prompt, f"prompt {i}")
            except InputError as e:
                raise client_error(e) from None
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
        """Return (token ids of each prompt, sampling rules) of a request. Raises RequestError."""
        rows, rules = self.prompts(prompts), self.rules(options)
        self.check_room(rows, rules.options.max_new_tokens)
        return rows, rules

    def check_room(self, rows: Sequence[Sequence[int]], answer: int) -> None:
        """Raise RequestError if a request's prompt and `answer` more tokens exceed the context of a
        slot.

        A slot with the model's whole context is not checked, because a text ends there by itself.
        """
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


def client_error(error: InputError) -> RequestError:
    """Convert an InputError to what the server sends a client: names and ranges, without the values
    that it sent."""
    accepted = f"; accepted: {error.accepted}" if error.accepted else ""
    return RequestError(f"{error.where} is not accepted{accepted}", param=error.where)
