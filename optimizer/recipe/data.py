"""Data sets that a recipe names, and the calibrate section."""

from __future__ import annotations

from pydantic import Field, field_validator

from optimizer.foundation.sections.fields import MANY, BatchSize, Column, Length, Pattern, Seed
from optimizer.foundation.sections.section import Section


class DataSpec(Section):
    """Which rows of which data set, so exactly that two machines read the same rows.

    Written inline in a recipe or in a file of its own (calibration/*.yaml).
    """

    source: Pattern = Field(
        description="csv, json, parquet or text (then give files), a folder that `datasets` "
        "loads, or a hub id"
    )
    files: tuple[Pattern, ...] = Field((), description="file names or globs, relative to this spec")
    name: Pattern | None = Field(None, description="configuration name of a hub data set")
    revision: Pattern | None = Field(
        None,
        description="commit, tag or branch of a hub data set; resolved to a commit once per run, "
        "and its newest when absent",
    )
    split: Pattern = "train"
    columns: dict[Column, Column] = Field(
        default_factory=lambda: {"text": "text"},
        description="our field -> the data set's column; fields: text, text_pair, image, label, "
        "score, tags; image: paths relative to this spec, or the bytes of files",
    )
    labels: tuple[Pattern, ...] = Field(
        (), description="label names in id order, when labels are ids"
    )
    samples: int | None = Field(
        None, ge=1, le=MANY, description="take this many rows, drawn with `seed`"
    )
    seed: Seed = 0
    obtain: str = Field(
        "",
        description="how to get files that are not kept beside this spec: the commands; the "
        "message of a missing file ends with them",
    )
    licence: str = ""
    attribution: str = ""
    base: str = Field("", exclude=True, description="set by the loader: the folder of this spec")

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for i, name in enumerate(labels) if name in labels[:i]]
        if twice:
            raise ValueError(f"label {twice[0]!r} is named twice, so its id is not clear")
        return labels


class Calibrate(Section):
    data: DataSpec
    samples: int = Field(
        256,
        ge=1,
        le=MANY,
        description="texts or images; for text-generation windows of sequence_length tokens",
    )
    sequence_length: Length = Field(
        128,
        description="texts are cut to this many tokens; for "
        "text-generation they are joined and cut into windows of exactly as many",
    )
    batch_size: BatchSize = 8
    generated: int = Field(
        0,
        ge=0,
        le=100_000,
        description="text-generation: windows of the float model's own text beside the given ones; "
        "the whole model is in memory to write them",
    )
    seed: Seed = 0
