"""Tokenize queries with their documents, for a reranker that reads both in one text.

    template[0] + query + template[1] + document + template[2]

as sentence-transformers' CrossEncoder renders a pair with a chat template: the text is tokenized
without further special tokens and cut at its end, and the tokens behind the document replace the
last ones of a text that was cut. A text without a pair is a document without a query, for timing
and comparisons. A model without a template reads pairs as every other text model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..bounds import TEXT as READ_AT_MOST
from . import text
from .kind import Encoded
from .text import TEXT, TextTokenizer, TokenIds, check_length, check_texts, tokenize

if TYPE_CHECKING:
    from ..contract import Contract

SHORT, LONG = ("0", "0"), ("1 2 3 4", "1 2 3 4")
"""Pairs that share no last token, by which the library finds the tokens behind a document."""


def encode(
    contract: Contract,
    tokenizer: TextTokenizer,
    queries: Sequence[str],
    documents: Sequence[str | None] | None = None,
    length: int | None = None,
) -> list[Encoded]:
    """Tokenize each query with its document, in at most `length` tokens, by default the contract's
    max_length. Raises InputError as text.encode does."""
    if contract.template is None:
        return text.encode(contract, tokenizer, queries, documents, length)
    check_texts(queries, documents)
    limit = check_length(contract, length)
    rows = [
        render(contract, tokenizer.head(query, limit), document and tokenizer.head(document, limit))
        for query, document in zip(queries, documents or [None] * len(queries), strict=True)
    ]
    encodings = tokenize(tokenizer.cut_at(limit), rows, special=False)
    encoded = []
    for query, one in zip(queries, encodings, strict=True):
        ids = list(one.ids)
        if one.overflowing:
            last = suffix(contract, tokenizer)[-limit:]
            ids[len(ids) - len(last) :] = last
        unknown = ids.count(tokenizer.unknown_id)
        row = TokenIds(ids, one.offsets)
        encoded.append(Encoded(query, row, len(ids), bool(one.overflowing), unknown=unknown))
    return encoded


def render(contract: Contract, query: str, document: str | None) -> str:
    """Return the model's input text of a query and its document.

    document: None for a text `query` that is itself a document, without a query
    """
    before, between, after = contract.template or ("", "", "")
    first, second = ("", query) if document is None else (query, document)
    return before + first + between + second + after


def suffix(contract: Contract, tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of the input template's tokens after the document, the same for every pair; []
    for a template that ends with the document."""
    rows = [render(contract, *pair) for pair in (SHORT, LONG)]
    one, other = (encoding.ids for encoding in tokenize(tokenizer, rows, special=False))
    count = 0
    while count < len(one) and one[-1 - count] == other[-1 - count]:
        count += 1
    return list(one[len(one) - count :]) if count < len(one) else []


def count_full_lengths(
    contract: Contract,
    tokenizer: TextTokenizer,
    queries: Sequence[str],
    documents: Sequence[str | None] | None = None,
) -> list[int]:
    """Return the number of tokens of each query with its document, without truncation."""
    if contract.template is None:
        return text.count_full_lengths(contract, tokenizer, queries, documents)
    rows = [
        render(contract, query[:READ_AT_MOST], document and document[:READ_AT_MOST])
        for query, document in zip(queries, documents or [None] * len(queries), strict=True)
    ]
    return [len(e.ids) for e in tokenize(tokenizer, rows, special=False)]


QUERY = replace(TEXT, encode=encode, full_sizes=count_full_lengths)
