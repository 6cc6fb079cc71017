"""Options of a generation request, and their defaults.

An option that is None has the default of the model's authors (generation.defaults of the contract,
from generation_config.json), else the neutral value, which changes no probability.

Tokens are sampled if `do_sample` is true; if it is None, when temperature, top_k, top_p or min_p
was given; else by the authors' default; else not. Temperature 0 takes the most likely token. A
repetition penalty applies in both modes. transformers differs in one rule: it ignores a temperature
without do_sample.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..bounds import NEW_TOKENS, STOP, STOPS
from ..errors import InputError
from ..inputs.text import check_text

COLDEST = 1e-4  # minimum temperature: scores divided by less overflow float32
RANGES = {  # option -> (low, high, range in messages)
    "max_new_tokens": (1, NEW_TOKENS, f"1 to {NEW_TOKENS:,}"),
    "temperature": (COLDEST, 1e4, f"0 (the most likely token), or {COLDEST:g} to 10,000"),
    "top_k": (0, 1 << 31, f"0 (all) to {1 << 31:,}"),
    "top_p": (0, 1, "0 to 1"),
    "min_p": (0, 1, "0 to 1"),
    "repetition_penalty": (1e-6, 1e9, "0.000001 to 1,000,000,000; 1: no penalty"),
    "seed": (0, (1 << 63) - 1, "0 to 2^63 - 1"),
}
NEVER_NONE = ("max_new_tokens", "seed")  # options without a default of the authors
INTEGERS = ("max_new_tokens", "top_k", "seed")
SHAPES = ("temperature", "top_k", "top_p", "min_p")  # options that only sampling uses
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a generation with all defaults resolved."""

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Options:
    """Options of a generation request.

    An option that is None has the default of the model's authors, else the neutral value, which
    changes no probability.

    max_new_tokens: maximum number of generated tokens
    do_sample: True samples; False takes the most likely token; None: as described above
    temperature: divisor of the logits; 0 takes the most likely token
    top_k: number of most likely tokens to sample from
    top_p: least total probability of the tokens to sample from
    min_p: least probability of a token, as a share of the highest
    repetition_penalty: factor that makes tokens of the prompt and the text less likely
    seed: seed of the random numbers; equal prompts, options and model give equal texts
    stop: stop strings; the text ends before the first that is completed
    ignore_eos: True does not stop at an end-of-text token, to time a fixed number of tokens

    Raises InputError for invalid values.
    """

    max_new_tokens: int = 128
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, (low, high, accepted) in RANGES.items():
            value = getattr(self, name)
            if value is None and name not in NEVER_NONE:
                continue
            number = isinstance(value, int if name in INTEGERS else int | float)
            likeliest = name == "temperature" and number and value == 0
            if not number or isinstance(value, bool) or not (likeliest or low <= value <= high):
                raise InputError(f"{value!r:.60} was given", where=name, accepted=accepted)
        self._check_stop()
        for name in ("do_sample", "ignore_eos"):
            if not isinstance(getattr(self, name), bool | None):
                raise InputError(
                    f"{getattr(self, name)!r} was given", where=name, accepted="true or false"
                )
        shaping = [n for n in SHAPES if getattr(self, n) not in (None, NEUTRAL[n])]
        if self.do_sample is False and shaping and self.temperature != 0:
            raise InputError(
                f"{', '.join(shaping)} has no effect with do_sample false",
                where="do_sample",
                fix="Leave one of the two out.",
            )

    def _check_stop(self) -> None:
        stop: Any = self.stop
        texts = isinstance(stop, list | tuple) and len(stop) <= STOPS
        if not texts or not all(isinstance(s, str) and 0 < len(s) <= STOP for s in stop):
            raise InputError(
                f"{stop!r:.60} was given",
                where="stop",
                accepted=f"up to {STOPS} texts of 1 to {STOP:,} characters",
            )
        for text in stop:
            check_text(text, "stop")
        object.__setattr__(self, "stop", tuple(stop))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Options:
        """Parse the options of a generation request. Raises InputError for an unknown option,
        naming the closest option."""
        names = [f.name for f in fields(cls)]
        for name in document:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                raise InputError(
                    "unknown option",
                    where=str(name),
                    accepted=", ".join(names),
                    fix=f"Maybe you meant {close[0]}." if close else "",
                )
        return cls(**document)

    def sampling(self, defaults: Mapping[str, float]) -> Sampling:
        """Return a generation's sampling parameters with all defaults resolved.

        defaults: generation.defaults of the contract
        """
        options = {n: getattr(self, n) for n in NEUTRAL}
        decided = {n: defaults.get(n, NEUTRAL[n]) if v is None else v for n, v in options.items()}
        if self.do_sample is not None:
            draws = self.do_sample
        elif any(options[n] is not None for n in SHAPES):
            draws = True
        else:
            draws = bool(defaults.get("do_sample", False))
        penalty = float(decided["repetition_penalty"])
        if not draws or decided["temperature"] == 0:
            return Sampling(False, repetition_penalty=penalty)
        return Sampling(
            True,
            float(decided["temperature"]),
            int(decided["top_k"]),
            float(decided["top_p"]),
            float(decided["min_p"]),
            penalty,
        )
