"""Check the parameters of rotary positions in config.json; transformers only warns about them.

rope_parameters (rope_scaling in older files) is one object, or one for each kind of layer. Names
and meaning: transformers/modeling_rope_utils.py; YaRN: Peng et al. 2023, arXiv:2309.00071.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimizer.foundation.errors import CheckpointError

NAMES = ("rope_parameters", "rope_scaling")
BETA_FAST, BETA_SLOW = 32, 1  # YaRN's defaults
FIX = "Correct it there, or get the file again."

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
Factors = list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None


class Rope(BaseModel):
    """Types of one object of rotary position parameters in config.json; fields that an architecture
    adds are left to transformers."""

    model_config = ConfigDict(strict=True, extra="ignore")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive = None
    factor: Positive = None
    attention_factor: Positive = None
    beta_fast: Positive = None
    beta_slow: Positive = None
    low_freq_factor: Positive = None
    high_freq_factor: Positive = None
    short_factor: Factors = None
    long_factor: Factors = None
    original_max_position_embeddings: Annotated[int, Field(gt=0)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None


def check(config: Mapping[str, Any], file: Path | str) -> None:
    """Raise CheckpointError naming a number of rotary positions in `config`, the content of
    config.json, that is out of range, or two that are not in order."""
    for where, fields in _objects(config, file):
        try:
            rope = Rope.model_validate(dict(fields))
        except ValidationError as e:
            problem = e.errors()[0]
            raise CheckpointError(
                f"{str(problem['input'])[:80]!r} was found",
                where=f"{file}: {where}.{'.'.join(map(str, problem['loc'][:1]))}",
                accepted=problem["msg"].removeprefix("Input should be "),
                fix=FIX,
            ) from None
        kind = rope.rope_type or rope.type
        if kind == "yarn":
            slow, fast = rope.beta_slow or BETA_SLOW, rope.beta_fast or BETA_FAST
            _in_order(f"{file}: {where}", "beta_slow", slow, "beta_fast", fast)
        if rope.low_freq_factor is not None and rope.high_freq_factor is not None:
            low, high = rope.low_freq_factor, rope.high_freq_factor
            _in_order(f"{file}: {where}", "low_freq_factor", low, "high_freq_factor", high)


def _objects(
    config: Mapping[str, Any], file: Path | str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path of the field, object) of each object of rope parameters in config.json, nested or
    not."""
    for name in NAMES:
        document = config.get(name)
        if document is not None and not isinstance(document, dict):
            raise CheckpointError(
                f"{str(document)[:80]!r} was found",
                where=f"{file}: {name}",
                accepted="an object, or null",
                fix=FIX,
            )
        inner = {k: v for k, v in (document or {}).items() if isinstance(v, dict)}
        yield from ((f"{name}.{kind}", fields) for kind, fields in inner.items())
        if document and not inner:
            yield name, document


def _in_order(where: str, low: str, lower: float, high: str, higher: float) -> None:
    if lower >= higher:
        raise CheckpointError(
            f"{low} is {lower:g} and {high} is {higher:g}",
            where=f"{where}.{low}",
            accepted=f"a {low} below {high}",
            fix=FIX,
        )
