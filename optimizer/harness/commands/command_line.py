"""Commands in the folder of a bundle: python -m harness predict|bench|check|serve|web.

predict   answer texts, given as arguments or one per line on standard input; one line per text, in
          order, or a JSON object with --json; a text that cannot be answered has an error instead.
          A model that was judged on pairs takes --pair, or a line {"text": ..., "text_pair": ...},
          one that answers questions {"question": ..., "context": ...}, and one that chooses labels
          {"text": ..., "candidate_labels": [...]} ("image": a path), or takes --labels for all.
          text-generation accepts generation options, and --stream prints token by token
bench     time it end to end and by stage, over the recipe's batch sizes and sequence lengths or
          others, with the ratio to float measured at build time; for text-generation, the first
          token and the next ones
check     verify every digest, and list which engines run here and why
serve     answer over HTTP until SIGTERM: Open Inference Protocol v2, OpenAI's paths, metrics
web       serve a page on this machine only, whose browser runs the model, until interrupted

Answers go to standard output, messages such as a fallback to standard error. Exit: 0 done, 2 the
request or the bundle is wrong, or some text has no answer; 5 this machine cannot run it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import bounds, tasks
from ..bundle import signed
from ..embedding_settings import LARGEST
from ..errors import HarnessError, InputError, MachineError
from ..server import options as serving
from ..shown import escape_line, escape_lines, scrub, scrub_document
from . import generation_commands as generation
from . import queries
from .opening import find_verified, make_opener, open_bundle

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..tasks.answering import Answered

JSON = "print one JSON document; predict prints one object per line"
RECORDED = "default: the recipe's, from the manifest"
PROGRAM = "python -m harness"
WORDS = 50  # words of the text that memory is measured with


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run one command of the harness and return the exit code.

    arguments: command line; None: that of the process
    program: words before the command, for messages
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = parse_arguments(words, program)
    except InputError as e:
        return _print_error(e, as_json="--json" in words)
    try:
        with ExitStack() as stack:
            code: int = (
                serve(args)
                if args.run is serve
                else args.run(find_verified(args, stack, _say), args)
            )
            sys.stdout.flush()
            return code
    except HarnessError as e:
        return _print_error(e, args.json)
    except (
        BrokenPipeError
    ):  # the reader has closed the pipe; Python must not write to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        return _print_error(
            MachineError(str(e.strerror or e), where=str(e.filename or "")), args.json
        )


def _print_error(error: HarnessError, as_json: bool) -> int:
    """Print an error of the harness's command, with --json as a document, and return its exit
    code."""
    if as_json:
        print(
            escape_lines(
                json.dumps(scrub_document({"exit_code": error.exit_code, **error.as_dict()}))
            )
        )
    else:
        _say(str(error))
    return error.exit_code


def _print_document(document: dict[str, Any], text: str, args: argparse.Namespace) -> int:
    """Print a command's `text`, or with --json the document; return the document's exit code, by
    default 0."""
    print(escape_lines(json.dumps(document) if args.json else text))
    return int(document.get("exit_code", 0))


def predict(folder: Path, args: argparse.Namespace) -> int:
    """Run the command `predict`: print an answer or an error per input; return the exit code."""
    from .. import output

    with open_bundle(folder, args, _say, lookup=args.prompt_lookup or 0) as bundle:
        engine, task = bundle.engine["target"], tasks.look_up(bundle.contract)

        def emit(answered: Answered) -> None:
            as_json = args.json or args.jsonl
            line = (
                output.format_json(answered, engine)
                if as_json
                else output.format_text(answered, task)
            )
            print(line, flush=True)

        if task.reads_texts:  # a word without --text is a path
            args.text = [json.dumps({task.inputs.instead: one}) for one in args.text]
        queries.check_labels(args.labels, bundle.contract)
        windows = queries.read_queries(args, task.inputs.name)
        if task.generates:
            summary = generation.predict(bundle, args, windows, emit)
        else:
            generation.refuse_generation_options(args, task)
            if not args.pair and queries.accepts_pairs(bundle):
                names = task.inputs.fields
                queries.refuse_single_texts(args, names)
                windows = (queries.parse_pairs(window, names) for window in windows)
            elif queries.accepts_labels(bundle.contract):
                field = task.inputs.fields[0]
                windows = (queries.parse_labels(w, args.labels, field) for w in windows)
            elif task.pairs_together and bundle.contract.image is not None:
                boxes = task.inputs.fields
                windows = (queries.parse_objects(window, boxes) for window in windows)
            parsed = (queries.parse_inputs(window, task) for window in windows)
            answers = (a for window in parsed for a in bundle.answer(window, args.batch_size))
            summary = output.write(answers, emit, task.inputs.name)
    if not summary.texts:
        kind = task.inputs
        fix = f"Give one: predict {kind.example}." if kind.example else ""
        raise InputError(f"no {kind.name} was given", fix=fix)
    for line in summary.lines:
        _say(line)
    return summary.exit_code


def bench(folder: Path, args: argparse.Namespace) -> int:
    """Run the command `bench`: time the bundle, and print the times beside those recorded in it;
    return the exit code."""
    from ..bundle.bench import read_peak
    from ..bundle.recorded import recorded_speed
    from ..generate import Options
    from ..inputs.lines import read_lines
    from .bench_text import bench_text, format_generation

    lines = read_lines(args.texts_file) if args.texts_file else []
    with open_bundle(folder, args, _say) as bundle:
        task = tasks.look_up(bundle.contract)
        own = [task.inputs.parse(line) for line in lines if line.strip()]
        texts = own if args.texts_file else list(task.inputs.neutral(bundle.contract))
        if task.generates:
            document = generation.bench(bundle, args, texts)
        else:
            generation.refuse_generation_options(args, task)
            document = _measure_batches(bundle, args, texts)
        document["engine"] = bundle.engine["target"]
        document["device"] = bundle.engine["device"]
        document["inputs"] = {"noun": task.inputs.name, "size": task.inputs.size}
        document["decision"] = bundle.decision.reason
        document["size"] = {"candidate_bytes": bundle.size}
        document["recorded"] = recorded_speed(folder, bundle.manifest, bundle.engine["target"])
    one = f"kind.lengthen(kind.neutral(bundle.contract), {WORDS})"
    job = f"predict(['who'], [{one}])" if task.extracts else f"predict([{one}])"
    job = generation.largest_cell_call(document) if task.generates else job
    cache = f"Path({str(args.cache.resolve())!r})" if args.cache else "None"
    code = (
        f"from pathlib import Path\nfrom {type(bundle).__module__} import Bundle\n"
        f"from {Options.__module__} import Options\n"
        f"bundle = Bundle(Path({str(folder.resolve())!r}), runtime={args.runtime!r}, "
        f"threads={args.threads!r}, genai={args.genai!r}, cache={cache})\n"
        f"kind = bundle.task.inputs\nbundle.{job}"
    )
    document["peak_memory"] = {"candidate": read_peak(code)}
    text = (format_generation if task.generates else bench_text)(document)
    return _print_document(document, text, args)


def _measure_batches(bundle: Bundle, args: argparse.Namespace, texts: list[Any]) -> dict[str, Any]:
    """Time for the command `bench` a model that answers a batch in one run; return the document of
    bench.measure."""
    from ..bundle.bench import measure
    from ..bundle.recorded import bench_grid

    grid = bench_grid(bundle.manifest, args.batch, args.sequence, args.iterations)
    if not bundle.task.inputs.size:  # all inputs have one size
        grid = replace(grid, sequence=(1,))
    tokenizer = bundle.contract.tokenizer
    if tokenizer is not None and tokenizer.padded_to:  # all texts are padded to one size
        grid = replace(grid, sequence=(tokenizer.padded_to,))
    too_long = [s for s in grid.sequence if s > bundle.max_length]
    if too_long:
        raise InputError(
            f"{too_long[0]} tokens",
            where="--sequence",
            accepted=f"up to {bundle.max_length}",
        )
    return measure(
        {"candidate": bundle.system()},
        [(b, s) for b in grid.batch for s in grid.sequence],
        texts,
        iterations=grid.iterations,
        threads=bundle.threads,
    )


def check(folder: Path, args: argparse.Namespace) -> int:
    """Run the command `check`: compare the bundle with its manifest, and print which engines run
    here; return the exit code."""
    from ..bundle.engines import Workshop
    from ..bundle.fit import Refuse, decide, judge_engines
    from ..bundle.manifest import list_damaged_files, list_unlisted_files, read_manifest
    from ..runtimes import table
    from ..runtimes.machine import describe_machine
    from ..runtimes.ort.onnx_external import check_inside
    from ..trust.verify import REPORT, list_unjudged_files

    manifest = read_manifest(folder)
    damaged = list_damaged_files(folder, manifest, reports=True)
    extra = list_unlisted_files(folder, manifest)
    unjudged = [] if REPORT in damaged else list_unjudged_files(folder, manifest)
    for engine in manifest["engines"]:
        opened = engine["model"].endswith(".onnx") or table.look_up(engine["runtime"]).runs
        if opened and engine["model"] not in damaged:
            check_inside(folder / engine["model"], folder, set(manifest["files"]))
    machine = describe_machine()
    verdicts = judge_engines(manifest, machine, damaged=damaged, runtime=args.runtime)
    decision = decide(manifest, verdicts, args.runtime)
    refused = isinstance(decision, Refuse)
    shop = Workshop(folder, manifest, machine, args.cache)
    rows = [
        {
            "target": row.target,
            "how": row.how,
            "decided": list(row.decided),
            "why": row.why,
            "install": row.install,
            "built_before": row.how == "build" and shop.is_cached(manifest["engines"][row.index]),
        }
        for row in verdicts
    ]
    document = {
        "exit_code": 2 if damaged or extra or unjudged else 5 if refused else 0,
        "files": len(manifest["files"]),
        "damaged": sorted(damaged),
        "unlisted": extra,
        "unjudged": unjudged,
        "decision": type(decision).__name__,
        "reason": decision.reason,
        "install": decision.install if isinstance(decision, Refuse) else "",
        "engines": rows,
        "machine": machine.to_json(),
    }
    lines = [f"{len(manifest['files'])} files, {len(damaged)} damaged, {len(extra)} unlisted"]
    lines += [f"  damaged   {name}" for name in sorted(damaged)]
    lines += [f"  unlisted  {name}" for name in extra]
    lines += [f"  unjudged  {difference}" for difference in unjudged]
    lines += [line for row in rows for line in _render_verdict(row)]
    lines.append(f"{document['decision']}: {decision.reason}")
    return _print_document(document, "\n".join(map(escape_line, lines)), args)


def serve(args: argparse.Namespace) -> int:
    """Run the command `serve`: serve a bundle, with vLLM if its engine is vLLM's, until SIGTERM;
    return the exit code."""
    serving.check_installed("serve", {p: p for p in ("orjson", "starlette", "uvicorn")})
    from . import vllm_server

    if engine := vllm_server.engine_of(args.bundle, args.runtime):
        with ExitStack() as stack:
            folder = find_verified(args, stack, _say)
            return vllm_server.run(folder, engine, args, parse_arguments(["serve"]))
    from . import serve as command

    return command.run(make_opener(args, _say), args)


def parse_arguments(words: Sequence[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parse a command line of the harness. Raises InputError."""
    parser = _parser(program)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(parser.subcommands[args.run.__name__], unknown[0])
    return args


def _refuse_unknown(command: argparse.ArgumentParser, word: str) -> NoReturn:
    options = [o for a in command._actions for o in a.option_strings]
    near = get_close_matches(word.partition("=")[0], options, 1)
    raise InputError(
        f"unknown option {word}" if word.startswith("-") else f"{word!r} is one word too many",
        where=command.prog,
        fix=f"Did you mean {near[0]}?" if near else f"`{command.prog} --help` lists the options.",
    )


def describe_options(command: str) -> str:
    """Return the help text of the options of a command of the harness, in groups, for a program
    that passes them on."""
    parser = _parser("optimize").subcommands[command]
    parser.usage, parser.description = argparse.SUPPRESS, None
    return parser.format_help()


def web(folder: Path, args: argparse.Namespace) -> int:
    """Run the command `web`: serve the bundle's page until interrupted; return the exit code."""
    from .web import PageServer, find_pages

    with PageServer(find_pages(folder), args.port) as server:
        print(json.dumps({"address": server.address}) if args.json else server.address, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _render_verdict(row: dict[str, Any]) -> list[str]:
    """Return the lines of the command `check` on one engine."""
    before = " (built here before)" if row["built_before"] else ""
    lines = [f"  {row['how'] or 'no':<6} {row['target']}: {row['why']}{before}"]
    return lines + ([f"         {row['install']}"] if row["install"] else [])


class _CommandParser(argparse.ArgumentParser):
    """Parser of the harness's command line that raises InputError. subcommands: {name: parser}"""

    subcommands: Mapping[str, argparse.ArgumentParser]

    def error(self, message: str) -> NoReturn:
        raise InputError(message, where=self.prog, fix=f"See `{self.prog} --help`.")


def _add_embedding(command: argparse.ArgumentParser) -> None:
    """Add the options of `predict` for sentence embeddings."""
    command.add_argument(
        "--prompt",
        metavar="NAME",
        help="prompt before each text, by its name in the model (sentence-embedding)",
    )
    command.add_argument(
        "--embedding-type",
        metavar="TYPE",
        help="type of the numbers of a sentence embedding: float32 (default), or one that "
        "the bundle has: int8, uint8, binary, ubinary",
    )
    command.add_argument(
        "--dimensions",
        type=bounds.whole(1, LARGEST),
        help="numbers of a sentence embedding; default: the model's",
    )


def _parser(program: str) -> _CommandParser:
    parser = _CommandParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="predict|bench|check|serve|web")
    for run, text in (
        (predict, "answer texts, or the images at paths"),
        (bench, "measure time, memory and size"),
        (check, "verify digests, and list which engines run here and why"),
        (serve, "answer over HTTP"),
        (web, "serve a page whose browser runs the model"),
    ):
        command = commands.add_parser(run.__name__, help=text, description=text)
        command.set_defaults(run=run)
        own = program == PROGRAM  # elsewhere the bundle is an argument of the other command line
        where = "folder or tar; default: this one" if own else argparse.SUPPRESS
        command.add_argument("--bundle", type=Path, help=where)
        command.add_argument("--json", action="store_true", help=JSON)
        signed.add_options(command)
        if run is web:
            port = bounds.whole(0, bounds.PORT)
            command.add_argument("--port", type=port, default=0, help="default: a free one")
            continue
        command.add_argument("--runtime", help="use engines of this runtime only")
        command.add_argument(
            "--cache",
            type=Path,
            default=_default_cache(),
            help="folder of the engines built here; default: %(default)s",
        )
        if run is not check:
            threads = bounds.whole(0, bounds.THREADS)
            command.add_argument(
                "--threads", type=threads, help="number of threads; default: the recipe's"
            )
        if run is serve:
            serving.add_options(command)
            command.set_defaults(genai=False)
        if run is predict:
            command.add_argument("texts", nargs="*", metavar="TEXT", help="a text or a file's path")
            command.add_argument("--text", action="append", default=[], help="a text; repeatable")
            command.add_argument(
                "--pair",
                action="append",
                default=[],
                metavar="TEXT",
                help="second text of a pair; repeatable, one per text",
            )
            command.add_argument(
                "--labels",
                metavar="LABELS",
                help="zero-shot: labels of inputs that name none, with commas between; default: "
                "those of the recipe",
            )
            _add_embedding(command)
            command.add_argument(
                "--batch-size",
                type=bounds.whole(1, bounds.BATCH),
                default=8,
                help="maximum texts per batch; default: %(default)s",
            )
            generation.add_predict(command)
        if run is bench:
            for option, most, noun in (
                ("--batch", bounds.BATCH, "batch sizes"),
                ("--sequence", bounds.SEQUENCE, "lengths in tokens"),
            ):
                size = bounds.whole(1, most)
                command.add_argument(option, type=size, nargs="+", help=f"{noun}; {RECORDED}")
            rounds = bounds.whole(1, bounds.ITERATIONS)
            command.add_argument("--iterations", type=rounds, help=f"timed rounds; {RECORDED}")
            command.add_argument(
                "--texts-file", type=Path, help="texts to time, or paths of images, one per line"
            )
            generation.add_bench(command)
    parser.subcommands = commands.choices
    return parser


def _default_cache() -> Path | None:
    """Default of a command's option --cache, the cache folder; None for a user without a home
    folder."""
    try:
        return Path.home() / ".cache" / "optimize-engines"
    except RuntimeError:
        return None


def _say(message: str) -> None:
    """Print a command's message to standard error, escaped and without secrets."""
    print(escape_line(scrub(message)), file=sys.stderr, flush=True)
