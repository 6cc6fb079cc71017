"""Commands predict and bench for text-generation, and its options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import bounds
from ..errors import InputError
from ..shown import Pieces, escape_lines
from ..trust.verify import parse

if TYPE_CHECKING:  # only to check types: the command line must open without numpy
    from ..bundle.bundle import Bundle
    from ..generate import Options
    from ..output import Summary
    from ..tasks.answering import Answered, Query
    from ..tasks.task import Task
    from ..tasks.text_generation import Prompt

NUMBERS = {
    "max_new_tokens": (int, "maximum tokens to generate; default: 128"),
    "temperature": (float, "0: always the likeliest token"),
    "top_k": (int, "sample among the k likeliest tokens"),
    "top_p": (float, "sample among the likeliest tokens, whose probabilities sum to p"),
    "min_p": (float, "sample among tokens at least p times as likely as the likeliest"),
    "repetition_penalty": (float, "above 1: tokens that occurred become less likely"),
    "seed": (int, "seed of the sampling; default: 0"),
}
ONLY = (
    *("greedy", "stop", "chat", "system", "jsonl", "stream", "adapter", "genai", "prompt_lookup"),
    *NUMBERS,
)
PROMPT_KEYS = ("prompt", "messages")


def add_predict(command: argparse.ArgumentParser) -> None:
    """Add the options of text generation to `predict`."""
    group = command.add_argument_group(
        "text-generation only; other defaults: those of the model's generation_config.json"
    )
    for name, (kind, text) in NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    group.add_argument("--chat", action="store_true", help="each text is a message of the user")
    group.add_argument("--system", metavar="TEXT", help="with --chat: system message before it")
    group.add_argument(
        "--jsonl",
        action="store_true",
        help='each line of input is {"prompt": text} or {"messages": [...]}, which may hold these '
        "options by name; each line of output is one answer",
    )
    group.add_argument("--stream", action="store_true", help="print tokens as they come")
    group.add_argument(
        "--adapter",
        metavar="NAME",
        help="adapter of the bundle that changes the model; default: none",
    )
    group.add_argument(
        "--prompt-lookup",
        type=int,
        choices=bounds.GUESSES,
        help="guess up to N tokens from the text itself and check them in one step: faster where a "
        "text repeats its prompt (try 3), slower elsewhere; one prompt at a time",
    )
    group.add_argument("--genai", action="store_true", help="run onnxruntime-genai, if installed")


def add_bench(command: argparse.ArgumentParser) -> None:
    """Add the options of text generation to `bench`; --sequence is the length of the prompts."""
    group = command.add_argument_group("text-generation only")
    group.add_argument(
        "--new-tokens", type=int, metavar="N", help="tokens generated after each prompt"
    )
    group.add_argument("--genai", action="store_true", help="run onnxruntime-genai, if installed")


def refuse_generation_options(args: argparse.Namespace, task: Task) -> None:
    """Raise InputError for an option of text-generation with another task."""
    from ..tasks import list_generating

    for name in (*ONLY, "new_tokens"):
        value = getattr(args, name, None)
        if value is not None and value is not False and value != []:
            raise InputError(
                f"the task is {task.name}",
                where=f"--{name.replace('_', '-')}",
                accepted=", ".join(list_generating()),
            )


def predict(
    bundle: Bundle,
    args: argparse.Namespace,
    windows: Iterator[Sequence[Query]],
    emit: Callable[[Answered], None],
) -> Summary:
    """Run the command `predict`: generate a text for each prompt and emit it or its error; return
    the totals.

    args: command line; with --stream a text is printed token by token
    windows: prompts, in the portions in which they were read
    emit: function that prints one result

    Raises InputError for options that exclude each other.
    """
    from ..output import write
    from ..tasks.text_generation import NO_PAIRS

    if args.pair:
        raise InputError(NO_PAIRS, where="--pair")
    if args.system is not None and not args.chat:
        raise InputError("given without --chat", where="--system", fix="Add --chat.")
    if args.jsonl and (args.chat or args.stream):
        raise InputError(
            "given with --chat or --stream",
            where="--jsonl",
            fix="Each line says by its key whether it is a prompt or a conversation.",
        )
    numbered = enumerate(query for window in windows for query in window)
    if args.jsonl:
        return write((_answer_json(bundle, args, query) for _, query in numbered), emit)
    options = _options(args)
    if args.stream:
        shown = emit if args.json else _emit_errors(emit)
        return write(
            (_stream_answer(bundle, args, options, i, query) for i, query in numbered), shown
        )
    return write(_answer_batches(bundle, args, options, windows), emit)


def bench(bundle: Bundle, args: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """Run the command `bench`: time text generation over the recipe's grid; return the document of
    measure_generation.

    args: options that replace parts of the grid
    texts: texts that prompts are cut from
    """
    from ..bundle.bench_generation import measure_generation
    from ..bundle.recorded import bench_grid, choose_new_tokens

    grid = bench_grid(bundle.manifest, args.batch, args.sequence, args.iterations)
    return measure_generation(
        {"candidate": bundle.decoders},
        bundle.contract,
        bundle.encoder,
        texts,
        grid.sequence,
        grid.batch,
        choose_new_tokens(bundle.manifest, args.new_tokens),
        grid.iterations,
        threads=bundle.threads,
    )


def largest_cell_call(document: dict[str, Any]) -> str:
    """Return, for the command `bench`, Python source that calls the Bundle for the timed cell with
    the most memory."""
    cell = max(document["cells"], key=lambda c: c["batch"] * (c["prompt"] + c["new_tokens"]))
    return (
        f"generate([[0] * {cell['prompt']}] * {cell['batch']}, Options({cell['new_tokens']}, "
        f"do_sample=False, ignore_eos=True), {cell['batch']})"
    )


def _options(args: argparse.Namespace, over: dict[str, Any] | None = None) -> Options:
    """Return the generation options of the command line.

    over: options by name that replace them, from a line of input; None: none
    """
    from ..generate import Options

    options = {n: getattr(args, n) for n in NUMBERS if getattr(args, n) is not None}
    if args.greedy:
        options["do_sample"] = False
    if args.stop:
        options["stop"] = tuple(args.stop)
    return Options.from_json({**options, **(over or {})})


def _make_conversation(args: argparse.Namespace, text: str) -> list[dict[str, Any]]:
    from ..inputs.text import check_text

    if args.system is not None:
        check_text(args.system, "--system")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _tokenize(bundle: Bundle, args: argparse.Namespace, query: Query) -> list[int]:
    """Tokenize a prompt of the command line. Raises InputError that names the text."""
    from ..tasks.text_generation import tokenize_prompt

    prompt: Prompt = _make_conversation(args, query.input) if args.chat else query.input
    return tokenize_prompt(bundle.contract, bundle.encoder, prompt, query.where)


def _answer_batches(
    bundle: Bundle,
    args: argparse.Namespace,
    options: Options,
    windows: Iterator[Sequence[Query]],
) -> Iterator[Answered]:
    """Yield, for `predict`, the results of prompts, neighbouring ones generated as one batch."""
    from ..tasks.answering import Answered

    first = 0
    for window in windows:
        for start in range(0, len(window), args.batch_size):
            part = window[start : start + args.batch_size]
            refused: dict[int, Answered] = {}
            prompts: dict[int, list[int]] = {}
            for i, query in enumerate(part):
                try:
                    prompts[i] = _tokenize(bundle, args, query)
                except InputError as e:
                    refused[i] = Answered(query.where, None, e)
            numbers = [first + start + i for i in prompts]
            rows = list(prompts.values())
            completions = bundle.generate(rows, options, args.batch_size, numbers) if rows else []
            answers = dict(zip(prompts, completions, strict=True))
            for i, query in enumerate(part):
                yield refused.get(i) or Answered(query.where, answers[i].to_json())
        first += len(window)


def _answer_json(bundle: Bundle, args: argparse.Namespace, query: Query) -> Answered:
    """Answer one line of JSON on standard input, a prompt that may have its own options."""
    from ..tasks.answering import Answered

    try:
        prompt, options = _parse_request(args, query)
        (completion,) = bundle.generate([prompt], options)
    except InputError as e:
        if not e.where.startswith(query.where):
            e = InputError(
                e.problem, where=f"{query.where}: {e.where}", accepted=e.accepted, fix=e.fix
            )
        return Answered(query.where, None, e)
    return Answered(query.where, completion.to_json())


def _parse_request(args: argparse.Namespace, query: Query) -> tuple[Prompt, Options]:
    """Parse a line of JSON on the command's standard input to (prompt, options); options that it
    lacks are the command line's.

    Raises InputError for a line that is not such an object.
    """
    try:
        fields = parse(query.input.encode())
    except ValueError as e:
        raise InputError(f"not a JSON object ({e})", where=query.where) from None
    if not isinstance(fields, dict):
        raise InputError(f"not a JSON object ({type(fields).__name__})", where=query.where)
    keys = [k for k in PROMPT_KEYS if k in fields]
    if len(keys) != 1:
        raise InputError(
            f"{', '.join(fields)[:200] or 'nothing'} was given",
            where=query.where,
            accepted=f"one of {', '.join(PROMPT_KEYS)}, and options",
        )
    prompt = fields.pop(keys[0])
    if isinstance(prompt, str) != (keys == ["prompt"]):
        raise InputError(
            f"{keys[0]} is {type(prompt).__name__}",
            where=query.where,
            accepted="a text as prompt, a list as messages",
        )
    if isinstance(fields.get("stop"), list):
        fields["stop"] = tuple(fields["stop"])
    return prompt, _options(args, fields)


def _stream_answer(
    bundle: Bundle, args: argparse.Namespace, options: Options, number: int, query: Query
) -> Answered:
    """Print one answer token by token, with --json as lines of JSON; return it, or its error."""
    from ..tasks.answering import Answered

    try:
        prompt = _tokenize(bundle, args, query)
    except InputError as e:
        return Answered(query.where, None, e)
    text, tokens, last, printed = "", 0, None, Pieces()
    for piece in bundle.stream([prompt], options, numbers=[number]):
        if args.json:
            print(escape_lines(json.dumps({**asdict(piece), "row": number})), flush=True)
        else:
            sys.stdout.write(printed.add(piece.text))
            sys.stdout.flush()
        text, tokens, last = text + piece.text, tokens + 1, piece
    assert last is not None
    if not args.json:
        print(printed.end(), flush=True)
    answer = {"text": text, "tokens": tokens, "finish": last.finish, "stop": last.stop}
    return Answered(query.where, {**answer, "prompt_tokens": len(prompt)})


def _emit_errors(emit: Callable[[Answered], None]) -> Callable[[Answered], None]:
    """Return a function for `predict --stream` that prints errors only, because answers were
    printed token by token."""

    def shown(answered: Answered) -> None:
        if answered.error is not None:
            emit(answered)

    return shown
