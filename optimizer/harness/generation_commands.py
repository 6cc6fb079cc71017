"""predict and bench for a model that continues texts, and the options that only it has."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:  # only to check types: the command line must open without numpy
    from .bundle import Bundle
    from .generate import Options
    from .tasks.text_generation import Prompt

NUMBERS = {
    "max_new_tokens": (int, "tokens to generate, at most (128)"),
    "temperature": (float, "0 takes the likeliest token"),
    "top_k": (int, "draw among the k likeliest"),
    "top_p": (float, "draw among the likeliest that sum to p"),
    "min_p": (float, "draw among those p times as likely as the likeliest"),
    "repetition_penalty": (float, "above 1 disfavours tokens seen"),
    "seed": (int, "of the draws (0)"),
}
ONLY = ("greedy", "stop", "chat", "system", "jsonl", "stream", "genai", *NUMBERS)
PROMPT_KEYS = ("prompt", "messages")


def add_predict(command: argparse.ArgumentParser) -> None:
    """The options of predict, in a group of their own."""
    group = command.add_argument_group("text-generation only; defaults are the makers' advice")
    for name, (kind, text) in NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    group.add_argument("--chat", action="store_true", help="each text is a turn of the user")
    group.add_argument("--system", metavar="TEXT", help="with --chat: the system's turn before it")
    group.add_argument(
        "--jsonl",
        action="store_true",
        help='each line of input is {"prompt": text} or {"messages": [...]}, with options by name; '
        "each line of output one answer",
    )
    group.add_argument("--stream", action="store_true", help="print tokens as they come")
    group.add_argument("--genai", action="store_true", help="run onnxruntime-genai, if installed")


def add_bench(command: argparse.ArgumentParser) -> None:
    """The options of bench; --sequence is the length of the prompts."""
    group = command.add_argument_group("text-generation only")
    group.add_argument("--new-tokens", type=int, metavar="N", help="after each prompt")
    group.add_argument("--genai", action="store_true", help="run onnxruntime-genai, if installed")


def refuse_others(args: argparse.Namespace, task: str) -> None:
    """Raises InputError when an option of text-generation was given for another task."""
    for name in (*ONLY, "new_tokens"):
        value = getattr(args, name, None)
        if value is not None and value is not False and value != []:
            raise InputError(
                f"the model does {task}",
                where=f"--{name.replace('_', '-')}",
                accepted="text-generation",
            )


def predict(bundle: Bundle, args: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """Answer, and print what must not wait: streamed text, a line of JSON per answer.

    The document has "answers"; "printed" says that a person has seen them.
    """
    if args.pair:
        raise InputError("a text to continue has no second", where="--pair")
    if args.system is not None and not args.chat:
        raise InputError("no conversation", where="--system", fix="Add --chat.")
    if args.jsonl and (args.chat or args.stream):
        raise InputError(
            "with --chat or --stream", where="--jsonl", fix="A line says what it is itself."
        )
    if args.jsonl:
        made = [_answer_line(bundle, args, i, line) for i, line in enumerate(texts)]
        return {"answers": made, "printed": True}
    options = _options(args)
    prompts: list[Prompt] = [_conversation(args, t) if args.chat else t for t in texts]
    if args.stream:
        return {"answers": _streamed(bundle, prompts, options, args), "printed": True}
    made = [c.to_json() for c in bundle.generate(prompts, options, args.batch_size)]
    return {"answers": made, "printed": False}


def bench(bundle: Bundle, args: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """measure_generation's document over the recipe's grid, or the one asked for."""
    from .bench_generation import measure_generation
    from .recorded import asked, asked_new_tokens

    grid = asked(bundle.manifest, args.batch, args.sequence, args.iterations)
    return measure_generation(
        {"candidate": bundle.decoders},
        bundle.contract,
        bundle.tokenizer,
        texts,
        grid.sequence,
        grid.batch,
        asked_new_tokens(bundle.manifest, args.new_tokens),
        grid.iterations,
        threads=bundle.threads,
    )


def largest(document: dict[str, Any]) -> str:
    """The call of a Bundle, as source, that needs the most memory of what was timed."""
    cell = max(document["cells"], key=lambda c: c["batch"] * (c["prompt"] + c["new_tokens"]))
    return (
        f"generate([[0] * {cell['prompt']}] * {cell['batch']}, Options({cell['new_tokens']}, "
        f"do_sample=False, ignore_eos=True), {cell['batch']})"
    )


def _options(args: argparse.Namespace, over: dict[str, Any] | None = None) -> Options:
    """The command line's options, those of a line of input over them."""
    from .generate import Options

    given = {n: getattr(args, n) for n in NUMBERS if getattr(args, n) is not None}
    if args.greedy:
        given["do_sample"] = False
    if args.stop:
        given["stop"] = tuple(args.stop)
    return Options.from_json({**given, **(over or {})})


def _conversation(args: argparse.Namespace, text: str) -> list[dict[str, Any]]:
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _answer_line(bundle: Bundle, args: argparse.Namespace, i: int, line: str) -> dict[str, Any]:
    """Answer one line of JSON on a line of its own, and return the answer."""
    where = f"line {i + 1}"
    try:
        asked = dict(json.loads(line))
    except (ValueError, TypeError) as e:
        raise InputError(f"not a JSON object ({e})", where=where) from None
    found = [k for k in PROMPT_KEYS if k in asked]
    if len(found) != 1:
        raise InputError(
            f"{', '.join(asked) or 'nothing'} was given",
            where=where,
            accepted=f"one of {', '.join(PROMPT_KEYS)}, and options",
        )
    prompt = asked.pop(found[0])
    if isinstance(prompt, str) != (found == ["prompt"]):
        raise InputError(
            f"{found[0]} is {type(prompt).__name__}",
            where=where,
            accepted="a text as prompt, a list as messages",
        )
    if isinstance(asked.get("stop"), list):
        asked["stop"] = tuple(asked["stop"])
    (made,) = bundle.generate([prompt], _options(args, asked))
    answer = made.to_json()
    if not args.json:
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    return answer


def _streamed(
    bundle: Bundle, prompts: list[Prompt], options: Options, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print pieces as they come, row after row; with --json each as a line of JSON."""
    made = []
    for i, prompt in enumerate(prompts):
        text, tokens, last = "", 0, None
        for piece in bundle.stream([prompt], options):
            if args.json:
                print(json.dumps({**asdict(piece), "row": i}, ensure_ascii=False), flush=True)
            else:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            text, tokens, last = text + piece.text, tokens + 1, piece
        assert last is not None
        if not args.json:
            print(flush=True)
        made.append({"text": text, "tokens": tokens, "finish": last.finish, "stop": last.stop})
    return made


def bench_text(document: dict[str, Any]) -> str:
    """measure_generation's document for a terminal, at most 100 columns wide."""
    threads = document["threads"] or document["machine"]["cores"]
    lines = [
        f"{document['engine']} on {document['machine']['cpu']}, {threads} threads",
        "times in ms, with 95 % intervals; ? = too few rounds to bound it",
    ]
    for cell in document["cells"]:
        system = cell["systems"]["candidate"]
        lines += [
            "",
            f"batch {cell['batch']}, prompt {cell['prompt']}, {cell['new_tokens']} new tokens, "
            f"{cell['runs']} rounds",
            *_rows("first token", system["ttft"]),
            *_rows("next token", system["inter_token"]),
            *(
                f"    up to {b['up_to']:>6} tokens of context   p50 {b['p50']:.2f}"
                for b in system["by_context"]
            ),
            f"  prompt {system['prefill_tokens_per_second']:.0f} tokens/s, "
            f"new {system['tokens_per_second']:.1f} tokens/s",
            f"  {_recorded(cell, document['recorded'])}",
        ]
    memory, size = document["peak_memory"]["candidate"], document["size"]["candidate_bytes"]
    lines += ["", f"peak memory {memory / 2**20:.0f} MiB, model {size / 2**20:.1f} MiB"]
    return "\n".join(lines)


def _rows(name: str, figures: dict[str, Any]) -> Iterator[str]:
    parts = []
    for p in ("p50", "p95", "p99"):
        low, high = ("?" if e is None else f"{e:.2f}" for e in figures[f"{p}_interval"])
        parts.append(f"{p} {figures[p]:.2f} [{low}, {high}]")
    yield f"  {name:<12} {'   '.join(parts)}"


def _recorded(cell: dict[str, Any], recorded: dict[str, Any]) -> str:
    """The same cell's ratio to float, which is not measured again here."""
    if "missing" in recorded:
        return f"ratio to float when built: unknown: {recorded['missing']}"
    shape = (cell["batch"], cell["prompt"])
    old = next((c for c in recorded["cells"] if (c["batch"], c.get("prompt")) == shape), None)
    if old is None or not old.get("ratio"):
        return "ratio to float when built: this shape was not measured"
    ratio = old["ratio"]
    return (
        f"when built: {ratio['ttft']['median']:.2f} of {ratio['to']}'s time to the first token, "
        f"{ratio['inter_token']['median']:.2f} per next token"
    )
