"""Tokenize a text with one hypothesis per candidate label, each a row of the model.

The labels of a request are its second text: names with a comma between, a JSON list of names, or a
JSON object with candidate_labels, hypothesis_template and multi_label; without it they are the
contract's. The text alone is cut (truncation="only_first"), as by transformers' pipeline.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..bounds import TEXT as READ_AT_MOST
from ..zero_shot_settings import SLOT, ZeroShotSettings, is_template
from .kind import Encoded
from .text import TEXT, TextTokenizer, check_length, check_text, check_texts, tokenize

if TYPE_CHECKING:
    from ..contract import Contract

NAMES = ("candidate_labels", "hypothesis_template", "multi_label")
ACCEPTED = f'"politics, sport", ["politics", "sport"], or an object with {", ".join(NAMES)}'


@dataclass(frozen=True)
class Claim:
    """A text with one candidate label, whose hypothesis the model judges.

    number: index of the label among those of the request
    """

    text: str
    label: str
    number: int
    settings: ZeroShotSettings

    @property
    def pair(self) -> tuple[str, str]:
        """The input text and its hypothesis, as the tokenizer reads them."""
        return self.text, self.settings.hypothesis(self.label)


def list_claims(text: str, settings: ZeroShotSettings) -> list[Claim]:
    """Return one claim on a text per label, in an order rotated by a hash of the text. Calibration
    reads only the first claim, so the rotation lets it see every label."""
    labels = settings.candidate_labels
    start = zlib.crc32(text.encode()) % len(labels)
    order = [*range(start, len(labels)), *range(start)]
    return [Claim(text, labels[i], i, settings) for i in order]


def encode(
    contract: Contract,
    tokenizer: TextTokenizer,
    texts: Sequence[Any],
    labels: Sequence[str | None] | None = None,
    length: int | None = None,
) -> list[Encoded]:
    """Tokenize each text with the hypothesis of each label.

    A result is the row of the first label; its `more` are the rows of the others. A Claim in place
    of a text is encoded alone. A text without a token, or labels that cannot be read, get a
    `problem`.

    labels: labels per text, as described above; None: the contract's
    length: tokens of the first row, which is then the only one; None: the contract's max_length,
        and all rows

    Raises InputError as text.encode does.
    """
    check_texts([t.text if isinstance(t, Claim) else t for t in texts], labels)
    limit, results = check_length(contract, length), list[Encoded]()
    for i, (text, named) in enumerate(zip(texts, labels or [None] * len(texts), strict=True)):
        if isinstance(text, Claim):
            rows = [text]
        else:
            settings, problem = read_settings(contract.choice, named)
            if problem:
                results.append(Encoded(text, None, problem=problem, fix=f"Give {ACCEPTED}."))
                continue
            for label in settings.candidate_labels:
                check_text(label, f"labels[{i}]")
            rows = list_claims(text, settings)
        results.append(_encoded(tokenizer, rows[: None if length is None else 1], limit, length))
    return results


def read_settings(default: ZeroShotSettings, named: str | None) -> tuple[ZeroShotSettings, str]:
    """Parse the labels that a request gives beside its text or image.

    Returns (settings, ""), or (any settings, reason why the labels cannot be read).

    default: the contract's settings
    named: labels of the request; None: the contract's
    """
    if named is None:
        return default, ""
    try:
        options = _options(named)
    except (ValueError, RecursionError):
        return default, "the labels are not JSON"
    if set(options) - set(NAMES):
        return default, f"the labels have another field than {', '.join(NAMES)}"
    names = options.get(NAMES[0], list(default.candidate_labels))
    names = names.split(",") if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        return default, "the labels are not a list of texts"
    names = [name.strip() for name in names if name.strip()]
    template = options.get(NAMES[1], default.hypothesis_template)
    several = options.get(NAMES[2], default.multi_label)
    if not names:
        return default, "there are none among the labels"
    if not isinstance(template, str) or not is_template(template):
        return default, f"hypothesis_template is not a sentence with one {SLOT}"
    if not isinstance(several, bool):
        return default, "multi_label is not true or false"
    return ZeroShotSettings(tuple(names), template, several, default.entailment), ""


def add_labels(named: str | None, labels: str | None) -> str | None:
    """Merge the labels of one input text with those of the command line.

    Fields that `named` lacks are taken from `labels`. If either is not JSON, it is returned
    unchanged, so that reading it refuses the text.

    named: labels of the text; None: none
    labels: labels of the command line; None: none
    """
    if named is None or labels is None:
        return labels if named is None else named
    read = []
    for one in (labels, named):
        try:
            read.append(_options(one))
        except (ValueError, RecursionError):
            return one
    return json.dumps(read[0] | read[1])


def _options(named: str) -> dict[str, Any]:
    """Parse an input's labels to their fields. Raises ValueError or RecursionError if they are not
    JSON."""
    value: Any = json.loads(named) if named.lstrip().startswith(("[", "{")) else named
    return value if isinstance(value, dict) else {NAMES[0]: value}


def _encoded(
    tokenizer: TextTokenizer, rows: Sequence[Claim], limit: int, length: int | None
) -> Encoded:
    """Tokenize one text with the hypotheses of its labels; the result has a part per label.

    limit: maximum tokens of a row
    length: tokens of the only row; None: all rows
    """
    special = int(tokenizer.num_special_tokens_to_add(True))
    text = tokenizer.head(rows[0].text, limit)
    longest = max(len(ids) for ids in tokenizer.ids([row.pair[1] for row in rows]))
    room = limit - special - longest
    if room < 1 and length is None:
        return Encoded(
            rows[0],
            None,
            problem=f"a label leaves {max(room, 0)} of {limit} tokens for the text",
            fix="Shorten the labels.",
        )
    cut = tokenizer.cut_at(limit, strategy="only_first" if room > 0 else "longest_first")
    encodings = tokenize(cut, [(text, row.pair[1]) for row in rows])
    if 0 not in encodings[0].sequence_ids:
        return Encoded(
            rows[0], encodings[0], problem="the text has no token", fix="Give at least one word."
        )
    shorter = len(text) < len(rows[0].text) or any(e.overflowing for e in encodings)
    parts = [Encoded(r, e, len(e.ids)) for r, e in zip(rows, encodings, strict=True)]
    return replace(
        parts[0],
        cut=shorter,
        unknown=encodings[0].ids.count(tokenizer.unknown_id),
        more=tuple(parts[1:]),
        whole=max(part.size for part in parts),
    )


def count_full_lengths(
    contract: Contract,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    labels: Sequence[str | None] | None = None,
) -> list[int]:
    """Return the number of tokens of each text with its longest hypothesis, without truncation."""
    sizes = []
    for text, named in zip(texts, labels or [None] * len(texts), strict=True):
        settings, _ = read_settings(contract.choice, named)
        pairs = [(text[:READ_AT_MOST], row.pair[1]) for row in list_claims(text, settings)]
        sizes.append(max(len(e.ids) for e in tokenize(tokenizer, pairs)))
    return sizes


HYPOTHESIS = replace(
    TEXT,
    encode=encode,
    full_sizes=count_full_lengths,
    requested=("text", NAMES[0]),
    example='"a lovely film" --labels "cinema, sport"',
)
