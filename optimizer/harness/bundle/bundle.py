"""Open a bundle and answer with it.

    with Bundle(folder) as bundle:
        bundle.predict(["some text"])
        bundle.generate(["some text"], Options(max_new_tokens=64))      text-generation

Opening verifies first: the manifest's version, digest and file names, the digest of every file that
runs or computes, and that the model stores no weights elsewhere. It then decides which engine fits
this machine (fit.py), and starts a runtime last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import tasks
from ..contract import Contract, adapter_file
from ..errors import (
    BuildError,
    BundleError,
    HarnessError,
    InputError,
    MachineError,
    UnopenedError,
    require,
)
from ..generate import Completion, Options, Piece, generate, stream
from ..generate.prompt_lookup import PromptLookup, measure_lookup
from ..process.closing import Closing
from ..runtimes import table
from ..runtimes.decoder import DecoderRunner
from ..runtimes.machine import Machine, describe_machine
from ..runtimes.ort.adapters import read
from ..runtimes.ort.genai import GenaiRunner
from ..runtimes.ort.onnx_external import check_inside
from ..runtimes.ort.run import OrtRunner
from ..runtimes.runner import Runner
from ..tasks import Array, decode, encode, list_generating
from ..tasks.answering import Answered, Predictor, Query, answer
from ..tasks.embeddings import image_text_embedding
from ..tasks.embeddings.sentence_embedding import with_form
from ..tasks.text_generation import NO_PAIRS, Prompt
from .bench import System
from .engines import Workshop
from .fit import Decision, FallBack, Rebuild, Refuse, decide, judge_engines
from .label_encoder import LabelEncoder
from .manifest import MANIFEST, TEXTS, read_manifest, refuse_damage

BATCH = 8


class Bundle(Closing):
    """Opened bundle. decision: chosen engine and reason. engine: its entry in the manifest.
    texts: second model of a task that reads texts beside other inputs, a bundle in folder `texts`
    that chooses its engine by itself; None of other tasks.

    An engine that fits but does not open is built here if possible; an engine that fails is skipped
    with a message, and the next engine is tried.

    runtime, target: name of the only runtime, of the only target to use; None: any
    threads: threads of a run; None shares the recipe's number among the workers
    workers: concurrent runs of a server, which share the threads
    say: receives a line if an engine is skipped, and lines while an engine is built
    genai: generate with onnxruntime-genai instead of the plain loop, one prompt at a time
    prompt_lookup: maximum guessed tokens per step (generate/prompt_lookup.py), of bounds.GUESSES
    cache: folder of engines built here; None: none is built
    prompt: name of the prompt before each text of a sentence embedding; None: the model's default
    adapter: name of the adapter that changes the model in `generate` and `stream`; None: none
    embedding_type, dimensions: type and number of the numbers of a sentence embedding, of the forms
        that the bundle has; None: the model's own

    Raises BundleError for a damaged file, MachineError if no engine runs here, InputError for a
    prompt or a form of vectors that the model does not have.
    """

    def __init__(
        self,
        folder: Path,
        *,
        runtime: str | None = None,
        target: str | None = None,
        threads: int | None = None,
        workers: int = 1,
        machine: Machine | None = None,
        say: Callable[[str], None] | None = None,
        genai: bool = False,
        prompt_lookup: int = 0,
        cache: Path | None = None,
        prompt: str | None = None,
        adapter: str | None = None,
        embedding_type: str | None = None,
        dimensions: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        damaged = refuse_damage(self.folder, self.manifest)
        contract = Contract.from_json(self.manifest["contract"], MANIFEST)
        self.task = tasks.check(contract, MANIFEST)
        self.contract = contract.open_layers(self.folder / "tokenizer").with_prompt(prompt)
        self.encoder = self.task.inputs.open(self.folder / "tokenizer", self.contract)
        if self.contract.label_texts is not None:
            threads_of_texts = 0 if threads is None else threads
            self.encoder = LabelEncoder(self.folder, self.manifest["files"], threads_of_texts)
        self._shop = Workshop(
            self.folder,
            self.manifest,
            machine or describe_machine(),
            cache,
            say,
            self.contract,
            damaged=damaged,
        )
        self.texts: Bundle | None = None
        self._check_adapter(adapter, other_loop=genai or bool(prompt_lookup))
        engines = enumerate(self.manifest["engines"])
        others = [i for i, e in engines if target not in (None, e["target"])]
        unasked = dict.fromkeys(others, f"the target to open is {target}")
        self._choose(damaged, runtime, threads, workers, genai, unasked)
        if isinstance(self.decision, FallBack) and say is not None:
            say(f"falling back: {self.decision.reason}")
        self._open_adapters(adapter)
        self._open_texts(threads, workers, say, cache)
        self.contract = with_form(self.contract, embedding_type, dimensions)
        self.lookup = self._prompt_lookup(prompt_lookup) if prompt_lookup else None

    def _choose(
        self,
        damaged: frozenset[str],
        runtime: str | None,
        threads: int | None,
        workers: int,
        genai: bool,
        failed: dict[int, str],
    ) -> None:
        """Choose the engine of the bundle that fits this machine and open it; repeat without it if
        it fails.

        failed: {index of an engine: reason not to try it}, extended in place
        """
        unopened: dict[int, str] = {}
        fix = ""
        self._genai: GenaiRunner | None = None
        self._open: Runner | None = None
        while True:
            rows = judge_engines(
                self.manifest,
                self._shop.machine,
                damaged=damaged,
                runtime=runtime,
                failed=failed,
                unopened=unopened,
            )
            self.decision: Decision = decide(self.manifest, rows, runtime)
            if isinstance(self.decision, Refuse):
                if damaged:
                    raise BundleError(self.decision.reason, where=str(self.folder))
                fix = self.decision.install or fix or self.decision.advice
                raise MachineError(self.decision.reason, fix=fix)
            index = self.decision.index
            self.engine: dict[str, Any] = self.manifest["engines"][index]
            self.threads = self._threads_of(workers) if threads is None else threads
            model = self.folder / self.engine["model"]
            check_inside(model, self.folder, set(self.manifest["files"]))
            if genai:
                self._genai = self._open_genai(model.parent)
                return
            build = (
                isinstance(self.decision, Rebuild) or getattr(self.decision, "how", "") == "build"
            )
            try:
                self._open = self._shop.open(
                    self.engine, "build" if build else "load", self.threads
                )
            except (MachineError, BuildError) as e:
                again = isinstance(e, UnopenedError) and not build
                again = again and table.look_up(self.engine["runtime"]).engine_files
                (unopened if again else failed)[index] = str(e)
                fix = fix or e.fix
            else:
                return

    def _check_adapter(self, chosen: str | None, *, other_loop: bool) -> None:
        """Raise InputError for an adapter that cannot be used.

        chosen: name of the adapter; None: none
        other_loop: True for onnxruntime-genai or prompt lookup, which were not proven with adapters
        """
        if chosen is None:
            return
        if chosen not in self.contract.adapters:
            raise InputError(
                f"the bundle has no adapter {chosen[:80]!r}",
                where="adapter",
                accepted=", ".join(self.contract.adapters) or "none: the bundle has no adapters",
            )
        if other_loop:
            raise InputError(
                f"{chosen} goes with neither genai nor prompt lookup, which are proven without "
                "adapters",
                where="adapter",
                fix="Leave out one of the two.",
            )

    def _open_adapters(self, chosen: str | None) -> None:
        """Load the bundle's adapters into the runner, and use the chosen one for generation.

        chosen: name of the adapter; None: the model without an adapter

        Raises BundleError for a runtime that cannot apply adapters.
        """
        self._adapted: DecoderRunner | None = None
        if not self.contract.adapters or self._open is None:
            return
        if not isinstance(self._open, OrtRunner):
            raise BundleError(
                f"the bundle has adapters, and {self.engine['runtime']} cannot apply them",
                where=str(self.folder),
                accepted="engines of onnxruntime",
            )
        files = {name: self.folder / adapter_file(name) for name in self.contract.adapters}
        adapted = {name: self._open.adapted(read(file)) for name, file in files.items()}
        self._open.adapters = adapted
        self._adapted = None if chosen is None else adapted[chosen]

    def _open_texts(
        self,
        threads: int | None,
        workers: int,
        say: Callable[[str], None] | None,
        cache: Path | None,
    ) -> None:
        """Open the text model of a task that reads texts and images, with the parameters of Bundle;
        for other tasks do nothing."""
        if not self.task.reads_texts:
            return
        machine, folder = self._shop.machine, self.folder / TEXTS
        try:
            self.texts = Bundle(
                folder, threads=threads, workers=workers, machine=machine, say=say, cache=cache
            )
            texts, own = self.texts.contract, self.texts.manifest["content_digest"]
            require(own == self.manifest.get("texts"), f"{MANIFEST}: texts", own, "its digest")
            image_text_embedding.check_texts(self.contract, texts, str(folder / MANIFEST))
        except HarnessError:
            self.close()
            raise
        self.contract, self.encoder = replace(self.contract, texts=texts), self.texts.encoder

    @property
    def reentrant(self) -> bool:
        """True if several threads may run the bundle's engine at once."""
        alone = table.is_reentrant(self.engine) and not self.task.generates
        return alone and (self.texts is None or self.texts.reentrant)

    def _threads_of(self, workers: int) -> int:
        """Return the threads of one run of the chosen engine; 0: one per processor.

        workers: concurrent runs, which share the threads
        """
        threads: int = self.engine["threads"]
        if workers == 1 or not self.reentrant:
            return threads
        return max(1, (threads or self._shop.machine.cores) // workers)

    def _open_genai(self, folder: Path) -> GenaiRunner:
        if not self.task.generates:
            raise InputError(
                f"the task is {self.task.name}",
                where="genai",
                accepted=", ".join(list_generating()),
            )
        return GenaiRunner(folder)

    def _prompt_lookup(self, guesses: int) -> PromptLookup:
        """Measure prompt lookup on the bundle's engine. Raises InputError for a task without
        generation, MachineError if texts would depend on guessed tokens."""
        if not self.task.generates or self._genai is not None:
            problem = f"the task is {self.task.name}"
            if self._genai is not None:
                problem = "onnxruntime-genai (genai) has no prompt lookup"
            raise InputError(
                problem,
                where="prompt_lookup",
                accepted=f"a model for {', '.join(list_generating())}, without genai",
            )
        try:
            return measure_lookup(
                partial(self.runner.slots, self.contract, 1), self.contract, guesses
            )
        except MachineError:
            self.close()
            raise

    def predict(
        self,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        batch_size: int = BATCH,
    ) -> list[dict[str, Any]]:
        """Answer inputs with the bundle's engine: one JSON object per input, in order; tasks/
        documents its fields.

        text-generation uses the default options of the model; `generate` accepts options and
        conversations.

        inputs: inputs of the contract's kind, such as texts
        pairs: second input per input; None: no pairs

        Raises InputError and AnswerError for the first input that fails; `answer` continues.
        """
        if self.task.generates:
            if pairs is not None:
                raise InputError(NO_PAIRS, where="pairs")
            return [c.to_json() for c in self.generate(inputs, batch_size=batch_size)]
        plural = f"{self.task.inputs.name}s"
        if isinstance(inputs, str) or not len(inputs):
            raise InputError(f"a list of at least one {plural[:-1]} is needed", where=plural)
        if pairs is not None and len(pairs) != len(inputs):
            raise InputError(f"{len(pairs)} pairs for {len(inputs)} {plural}", where="pairs")
        seconds = pairs or [None] * len(inputs)
        queries = [
            Query(f"{plural}[{i}]", *both)
            for i, both in enumerate(zip(inputs, seconds, strict=True))
        ]
        results: list[dict[str, Any]] = []
        for answered in self.answer(queries, batch_size):
            if answered.error is not None:
                raise answered.error
            results.append(dict(answered.answer or {}))
        return results

    def answer(self, queries: Sequence[Query], batch_size: int = BATCH) -> Iterator[Answered]:
        """Yield the bundle's answer or error for each query, in order (tasks/answering.py)."""
        return answer(self.predictor, queries, batch_size)

    @property
    def predictor(self) -> Predictor:
        """Encoder and engine of this bundle, as `answering.answer` takes them."""
        return Predictor(self.contract, self.encoder, self.infer)

    def infer(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run the bundle's chosen engine, or the second model if the arrays are its inputs.

        arrays: inputs of the model by name
        """
        if self.texts is not None and not set(self.task.inputs.arrays) <= set(arrays):
            return self.texts.runner.infer(arrays)
        return self.runner.infer(arrays)

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = None,
        batch_size: int = BATCH,
        numbers: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Generate with the bundle's engine a text for each prompt.

        prompts: a text, a conversation or token ids each
        options: options of generation; None: the model's defaults
        batch_size: maximum prompts per batch
        numbers: number of each prompt, which with the seed determines its random numbers; None: 0,
            1, ...

        Raises InputError without prompts, or naming the prompt that cannot be read.
        """
        return generate(
            self.contract,
            self.decoders,
            self.encoder,
            prompts,
            options,
            batch_size=1 if self._genai else batch_size,
            numbers=numbers,
            lookup=self.lookup,
        )

    def stream(
        self,
        prompts: Sequence[Prompt],
        options: Options | None = None,
        batch_size: int = BATCH,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """Generate with the bundle as `generate` does, and yield a Piece per token as it is
        generated."""
        return stream(
            self.contract,
            self.decoders,
            self.encoder,
            prompts,
            options,
            batch_size=1 if self._genai else batch_size,
            numbers=numbers,
            lookup=self.lookup,
        )

    @property
    def decoders(self) -> DecoderRunner:
        """Runner for text generation: the model with the chosen adapter, or onnxruntime-genai with
        `genai`, or `runner`."""
        return self._adapted or self._genai or self.runner

    @property
    def runner(self) -> Runner:
        """Runner of the bundle's chosen engine. Raises InputError if the bundle was opened with
        `genai`."""
        if self._open is None:
            raise InputError(
                "onnxruntime-genai returns texts only", where="genai", fix="Open it without genai."
            )
        return self._open

    def values(self, inputs: Sequence[Any]) -> Array:
        """Run the bundle's model on inputs as one batch; return the task's array
        (tasks/__init__.py)."""
        batch = encode(self.contract, self.encoder, inputs)
        return decode(self.contract, self.infer(batch), batch)

    def system(self) -> System:
        """Wrap this bundle as a system for bench.measure."""
        return System(
            pre=lambda texts, length: encode(
                self.contract, self.encoder, texts, None, min(length, self.max_length)
            ),
            forward=self.runner.infer,
            post=lambda outputs, batch: decode(self.contract, outputs, batch),
            lengthen=self.task.inputs.lengthen,
        )

    @property
    def max_length(self) -> int:
        """Maximum size of an input of the bundle: for texts the number of tokens."""
        return tasks.longest(self.contract)

    @property
    def size(self) -> int:
        """Bytes of the files of the engine that was chosen for this machine."""
        names = [self.engine["engine"]] if self.engine["engine"] else self.engine["model_files"]
        return sum(self.manifest["files"][n]["size"] for n in names)

    def close(self) -> None:
        for opened in (self._open, self._genai, self.texts):
            if opened is not None:
                opened.close()
        if isinstance(self.encoder, LabelEncoder):
            self.encoder.close()
