"""Sections that describe data sets: DataSpec, and `calibrate`."""

from __future__ import annotations

import codecs

from pydantic import Field, field_validator

from optimizer.foundation.sections.fields import (
    MANY,
    Base,
    BatchSize,
    Column,
    Length,
    Pattern,
    Seed,
)
from optimizer.foundation.sections.section import Section


class DataSpec(Section):
    """Data set of a recipe, named so exactly that two machines read the same rows.

    Written inline in a recipe or in a separate file (calibration/*.yaml).
    """

    source: Pattern = Field(
        description="csv, json, parquet, text or npz (then give files), a folder that `datasets` "
        "loads, or a hub id"
    )
    files: tuple[Pattern, ...] = Field((), description="file names or globs, relative to this spec")
    name: Pattern | None = Field(None, description="configuration name of a hub data set")
    revision: Pattern | None = Field(
        None,
        description="commit, tag or branch of a hub data set, resolved to a commit once per run; "
        "default: the newest commit",
    )
    split: Pattern = "train"
    separator: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="csv: character between fields; default: that of , ; tab | with which the "
        "first line has the columns",
    )
    encoding: Pattern | None = Field(
        None, description="csv and text: encoding of the files, such as cp1252; default: UTF-8"
    )
    columns: dict[Column, Column] = Field(
        default_factory=lambda: {"text": "text"},
        description="our field -> the data set's column; fields: text, text_pair, image (paths "
        "relative to this spec, or the bytes of files), messages (conversations: lists of role and "
        "content, for text-generation), label, labels "
        "(a list, or a text with label_separator), score, tags, answers (texts, one text, or "
        "SQuAD's objects with text), objects (boxes with labels), mask and depth (image files with "
        'a number for each pixel), arrays (column of a model\'s only input; "*": every other '
        "column is the input of its name)",
    )
    labels: tuple[Pattern, ...] = Field(
        (), description="label names in id order, where the column holds ids"
    )
    reduce_labels: bool | None = Field(
        None,
        description="mask: true where 0 is background that counts as nothing, and other values are "
        "label ids plus 1, as with do_reduce_labels of the processor",
    )
    label_separator: Pattern = Field(
        ",", description="separator of the labels of a row where column labels holds texts"
    )
    samples: int | None = Field(
        None, ge=1, le=MANY, description="number of rows to draw, with `seed`; default: all"
    )
    seed: Seed = 0
    obtain: str = Field(
        "",
        description="commands that fetch the files; the message about a missing file ends with "
        "them",
    )
    licence: str = ""
    attribution: str = ""
    base: Base = ""

    @field_validator("encoding")
    @classmethod
    def _encoding_is_known(cls, encoding: str | None) -> str | None:
        try:
            codecs.lookup(encoding or "utf-8")
        except LookupError:
            accepted = "accepted is a name of Python's, such as utf-8 or cp1252"
            raise ValueError(f"{encoding!r} is not an encoding; {accepted}") from None
        return encoding

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for i, name in enumerate(labels) if name in labels[:i]]
        if twice:
            raise ValueError(
                f"label {twice[0]!r} is listed twice, so its id is ambiguous; list it once"
            )
        return labels


class Calibrate(Section):
    """Recipe section on calibration data: texts or images, from which methods measure
    activations."""

    data: DataSpec
    samples: int = Field(
        256,
        ge=1,
        le=MANY,
        description="number of texts or images; for text-generation, of windows of "
        "sequence_length tokens",
    )
    sequence_length: Length = Field(
        128,
        description="maximum tokens per text; for text-generation, texts are joined and cut into "
        "windows of exactly this many tokens",
    )
    batch_size: BatchSize = 8
    generated: int = Field(
        0,
        ge=0,
        le=100_000,
        description="text-generation: number of windows that the float model writes, in "
        "addition to the given ones; the whole model is in memory for it",
    )
    seed: Seed = 0
