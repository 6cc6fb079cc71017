"""Estimate the memory, disk and time of validate from the checkpoint's headers and text lengths.

memory = libraries + float model + parameters that a method folded + linear weights de-quantized
         + inputs and outputs of the modules that are judged alone (depth.py) while the ledger's
         sample goes through the float and the compressed model (materials.py: sampled), for
         text-generation with the logits
         + inputs of the linear modules, and logits, of two correct runs at a time
         + copies of the logits of a batch that is perturbed, or compared
         + for a large decoder in half precision, the largest weight in float32 in each thread
         + a cut graph: read, written, held by its session, and repacked for its kernels;
         for text-generation at least the logits of some windows, or the candidate's session and
         that of the float model, where both are timed (docs/decisions/0061).
         Weights of a graph with external data lie in mapped files (model/checkpoint/mapped.py), but
         for those that a session transposes or repacks
disk     outputs of the correct runs, in each arithmetic, while they are compared, and mapped files,
         as for weights in float32
seconds  the ledger, evaluation and timing, at the measured speed of this machine, with the openings
         of all systems that timing is likely to take (timing/predicted.py)

For an ONNX file, memory and time follow from the needs of its parts (model/graph/needs.py)
instead of the lengths and widths above.

Bytes follow from shapes; LIBRARIES and COPIES are measured (benchmarks/ledger/validate_memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optimizer import targets
from optimizer.data.datasets import read_samples
from optimizer.export import onnx_file
from optimizer.foundation.process import machine_speed
from optimizer.foundation.process.torch_device import CONTEXT
from optimizer.foundation.rounding.tolerance import RUNS
from optimizer.load.image_inputs import count_positions
from optimizer.model.architectures.family_record import BLOCK
from optimizer.model.graph.needs import GraphShapes, graph_of
from optimizer.recipe.schema import DataSpec, Validation
from optimizer.recipe.validate import Depth
from optimizer.store import (
    NARROWEST,
    CompressedShapes,
    Estimate,
    Shapes,
    lowered_bytes,
)
from optimizer.validate.ledger import decoder_batches, inputs
from optimizer.validate.ledger.depth import LARGE, choose, choose_depth
from optimizer.validate.ledger.inputs import LEDGER_TEXTS, select_inputs
from optimizer.validate.ledger.limits.monte_carlo import AT_ONCE
from optimizer.validate.quality.perplexity import AHEAD
from optimizer.validate.timing.predicted import (
    REFERENCE,
    EncoderSizes,
    Prediction,
    predict_batches,
    predict_generation,
)

LIBRARIES = 576 << 20  # resident bytes after a first model ran, without its weights
COPIES = 3  # copies of a float graph's weights, while its pieces run
MOVED = 6  # copies of a batch's logits while they are perturbed, or compared in float64
SESSION = 2  # copies of a float graph's weights in a session with fused kernels
# Kinds of runs that are written (ledger/limits/correct_runs.py): folded; the state's as it is
# written, with its kernels, and these with a flip in every token.
ARITHMETICS = 4
CACHED = ("k_proj.weight", "v_proj.weight")
REPORT = 1 << 20
MODELS = 2  # of an adapter's model that the ledger runs: float, and compressed
START = 30  # seconds: imports, models and sessions
# Turns of MachineSpeed.interpreted, measured on models of which all else takes no time:
BEGUN = 13e6  # opening the stage's models and sessions
READ = 13e3  # reading, comparing and judging a row of a data set
CALLED = 4500  # one call of a linear module, other operators included
JUDGED = 2.8e6  # judging a linear module in all hops of the ledger
LEDGER_PASSES = 27  # time of the ledger on an encoder, in passes of its usual batches on one thread
ASSUMED = 100  # positions at which each weight of a convolutional network is used
PASSES: dict[Depth, float] = {"full": 115, "sampled": 72, "end_to_end": 68}
"""Time of the ledger on a decoder, in passes of its tokens through the float weights on all
threads. Their ratios are those of 0.13B at each depth, on one thread. On all threads validate of
SmolLM2 was predicted in 440 s and took 401 (full), on two cores of an AMD EPYC."""
EVALUATED = 3.2  # time of held-out text in two models, in passes of its tokens (measured)
TOKENS = 512  # assumed length of the longest text
LONGEST = 128  # tokens of a ledger input, at most
BESIDE = 620_000_000  # bytes of sessions, and of a process whose memory is measured (measured)
GRAPH_BATCH = 8  # rows of an ONNX file whose modules are judged alone
GRAPH_BEGUN, GRAPH_JUDGED = 30e6, 4.4e6  # as BEGUN and JUDGED, of an ONNX file (measured)
CHARACTERS = 4  # characters per token of English, about


def estimate(section: Validation, shapes: Shapes) -> Estimate:
    """Estimate the memory, disk space and seconds that stage validate needs.

    shapes: shape of every tensor of the checkpoint
    """
    if graph := graph_of(shapes):
        return _of_graph(section, shapes, graph)
    settings = section.validate_
    elements = sum(math.prod(s) for s in shapes.values())
    generates = settings.metric == "perplexity"
    ledger, disk = _ledger(section, shapes, elements, generates)
    memory = LIBRARIES + ledger
    if section.reduce:
        memory += REFERENCE * 4 * elements
    latency, comments = settings.latency, list[str]()
    if generates:
        seconds, timing = _decoder_seconds(section, shapes, elements)
        vocabulary = max((max(s) for s in shapes.values()), default=0)
        logits = (AHEAD + 2) * 4 * settings.sequence_length * vocabulary
        converted = _converted(shapes, elements)
        memory = max(memory + AT_ONCE * converted, LIBRARIES + logits) + converted
        if latency.time_float and not targets.look_up(section.target.runtime).untimed:
            floats, cost = _session(shapes, elements), targets.look_up(section.target.runtime).cost
            timed = LIBRARIES + converted + floats + round(cost.copies * lowered_bytes(shapes, 4))
            memory = max(memory, timed)
            comments.append(
                f"timing takes {timed / 1e9:.1f} GB, of which the float model has "
                f"{floats / 1e9:.1f} (validate.latency.time_float)"
            )
    else:
        seconds, timing = _encoder_seconds(section, shapes)
    if timing.openings:
        comments.append(
            f"of which timing {timing.likely:.0f} s for {timing.openings} openings of each model, "
            f"at least {timing.least:.0f} s for {timing.fewest}"
        )
    if adapters := _adapter_seconds(section, shapes, elements):
        count = len(section.adapters)
        comments.append(f"of which {adapters / 60:.1f} min for {count} adapter{'s' * (count > 1)}")
    gpu = estimate_device_memory(section, shapes)
    return Estimate(memory, disk, seconds + adapters, gpu, "; ".join(comments))


def _of_graph(section: Validation, shapes: Shapes, graph: GraphShapes) -> Estimate:
    """Estimate the stage for a model that is an ONNX file, from the memory and operations of the
    nodes of its graph."""
    settings, latency, speed = section.validate_, section.validate_.latency, machine_speed.measure()
    integers = shapes.integers if isinstance(shapes, CompressedShapes) else {}
    elements = sum(map(math.prod, shapes.values()))
    quantized = sum(math.prod(shape) for shape, _ in integers.values())
    edges, live = sum(p.edges for p in graph.parts), max(p.live for p in graph.parts)
    rows = sum(
        len(read_samples(d)) for d in (settings.data, *(s.data for s in settings.also.values()))
    )
    passes = LEDGER_PASSES * (1 + GRAPH_BATCH + LEDGER_TEXTS) + 2 * rows
    passes += 12 * latency.iterations * sum(latency.batch)
    return Estimate(
        memory=graph.libraries
        + BESIDE
        + 4 * (elements + quantized + COPIES * elements)
        + 2 * edges * GRAPH_BATCH
        + LEDGER_TEXTS * live,
        disk=RUNS * GRAPH_BATCH * edges + REPORT,
        seconds=speed.interpret(GRAPH_BEGUN + GRAPH_JUDGED * len(integers))
        + passes * graph.seconds,
    )


def _adapter_seconds(section: Validation, shapes: Shapes, elements: int) -> float:
    """Predict the seconds that all adapters add: the texts of their gates in both models, and the
    ledger's inputs in correct runs of both models with each adapter.

    elements: number of values in the checkpoint
    """
    if not section.adapters:
        return 0.0
    sets = [spec or section.validate_.data for spec in section.adapters.values()]
    runs = MODELS * (1 + RUNS) * _ledger_tokens(shapes) * len(sets)
    speed = machine_speed.measure()
    read = EVALUATED * sum(map(_text_tokens, sets))
    return elements * runs / speed.products + speed.multiply(elements * read)


def _decoder_seconds(
    section: Validation, shapes: Shapes, elements: int
) -> tuple[float, Prediction]:
    """Predict the time of the ledger, of held-out text and of timing, without other work beside."""
    settings, speed = section.validate_, machine_speed.measure()
    depth = choose_depth(settings.ledger, elements)
    alone = speed.multiply(PASSES[depth] * elements * _ledger_tokens(shapes))
    sets = [settings.data, *(s.data for s in settings.also.values())]
    read = EVALUATED * sum(map(_text_tokens, sets)) * elements
    if section.reduce:  # one of the two models is the reference
        read *= (1 + REFERENCE) / 2
    timing = predict_generation(section, shapes, speed)
    return START + alone + speed.multiply(read) + timing.likely, timing


def _encoder_seconds(section: Validation, shapes: Shapes) -> tuple[float, Prediction]:
    """Predict the time of the ledger, of both models' answers and of timing, without other work
    beside. Images of convolutional networks, whose sizes are not in headers, count as ASSUMED
    positions."""
    settings, speed = section.validate_, machine_speed.measure()
    images = "image" in settings.data.columns
    each = (count_positions(shapes) or ASSUMED) if images else 0
    model = EncoderSizes.of(shapes)
    judged = [settings.data, *(s.data for s in settings.also.values())]
    if section.embeddings is not None:
        judged += [section.embeddings.queries, section.embeddings.documents]
    by_both = [_lengths(spec, each) for spec in judged]
    by_reference = [_lengths(settings.train, each)] if settings.train else []
    integers = section.quantize.activations is not None

    def answer(lengths: Sequence[int], rate: float, threads: int) -> float:
        batches = -(-len(lengths) // settings.batch_size)
        length = sum(lengths) / max(len(lengths), 1)
        called = speed.interpret(batches * model.modules * CALLED)
        return called + model.forward(speed, sum(lengths), length, rate, threads)

    seconds = speed.interpret(BEGUN)
    for lengths in by_both:
        rate = speed.integers if integers else speed.products
        seconds += answer(lengths, rate, speed.threads)
    for lengths in (*by_both, *by_reference):
        seconds += answer(lengths, speed.products, 1) + speed.interpret(READ * len(lengths))
    _, whole = _tokens(section, each)
    passes: float = LEDGER_PASSES * whole
    if section.calibrate is not None:  # the float and the compressed model read them again
        count = len(_lengths(section.calibrate.data, each))
        share = min(section.calibrate.samples, count) / max(count, 1)
        passes += 2 * share * sum(_lengths(section.calibrate.data, each))
    seconds += speed.interpret(model.modules * JUDGED)
    seconds += model.forward(speed, passes, each, speed.products, 1)
    timing = predict_batches(section, shapes, model, each, speed)
    return seconds + timing.likely, timing


def _lengths(spec: DataSpec, each: int) -> list[int]:
    """Estimate, to predict validate's time, the number of positions of each row of a data set.

    each: positions of one image; 0 where the rows are texts
    """
    if each:
        return [each] * len(read_samples(spec))
    rows = ((s.input, s.text_pair or "") for s in read_samples(spec))
    return [min(TOKENS, (len(a) + len(b)) // CHARACTERS + 2) for a, b in rows]


def estimate_device_memory(section: Validation, shapes: Shapes) -> int:
    """Predict the bytes of GPU memory in which the reference model answers the evaluation rows; 0
    where the recipe runs it on the CPU."""
    settings = section.validate_
    if settings.reference_device == "cpu":
        return 0
    elements = sum(math.prod(s) for s in shapes.values())
    matrices = [s for s in shapes.values() if len(s) == 2]
    vocabulary = max((max(s) for s in matrices), default=0)
    widest = max((max(s) for s in matrices if vocabulary not in s), default=0)
    generates = settings.metric == "perplexity"  # window by window
    rows, length = (1, settings.sequence_length) if generates else (settings.batch_size, TOKENS)
    answer = vocabulary if generates or settings.metric == "log_likelihood" else 0
    scores = length * max(1, widest // NARROWEST)  # eager attention keeps one for every pair
    return CONTEXT + 4 * elements + 4 * rows * length * (3 * answer + 4 * widest + 2 * scores)


def _ledger(section: Validation, shapes: Shapes, elements: int, generates: bool) -> tuple[int, int]:
    """Estimate (memory of the hop that cuts the float graph into pieces, disk space of the correct
    runs), both in bytes.

    elements: number of values in the checkpoint
    generates: True for text-generation
    """
    # Embeddings are left out as the widest matrices, whose length is the vocabulary's.
    matrices = {n: s for n, s in shapes.items() if len(s) == 2}
    tables = max((max(s) for s in matrices.values()), default=0)
    images = "image" in section.validate_.data.columns
    linear = {n: s for n, s in matrices.items() if max(s) < tables or images}
    quantized = sum(map(math.prod, linear.values()))
    folded = quantized if any(m.folds for m in section.quantize.chosen) else 0
    if generates:
        linear["head"] = _head(matrices)
    per_token = 4 * sum(map(sum, linear.values()))
    depth = choose_depth(section.validate_.ledger, elements)
    edges = [linear[name] for name in choose(depth, list(linear), "")]
    at_edges = 4 * sum(map(sum, edges))
    each = max(count_positions(shapes), 1) if images else 0
    pruned = section.sparsity is not None and section.sparsity.record.judged_by != "recomputed"
    compared = pruned or any(m.judged_by not in ("", "nearest") for m in section.quantize.chosen)
    entering = 4 * sum(s[1] for s in edges)
    longest = 0
    if generates:  # two traces: edges of the sample, inputs of the rest, logits of all
        sampled, whole = decoder_batches.count_positions(per_token)
        longest, many = decoder_batches.count_extreme_positions(per_token, inputs.ROWS)
        answer = 4 * (tables + _cached(shapes))
        rest = entering * (whole - sampled) if compared else 0
        answered = answer * (whole + longest + many)
        between = entering if depth == "full" else 0
        runs = (between + answer) * sampled + answer * longest
        kept = 2 * (at_edges * sampled + rest + answered + runs)
        kept += MOVED * 4 * tables * max(longest, many)
    else:
        sampled, whole = _tokens(section, each)
        answer = 0  # next to what enters the modules
        kept = 2 * at_edges * sampled + (at_edges * whole if compared else 0)
    written = RUNS * sampled * (entering + (1 + ARITHMETICS) * answer)
    written += RUNS * longest * ARITHMETICS * answer
    in_graph = elements + (_tied(shapes) if generates else 0)
    if 4 * in_graph > onnx_file.LIMIT:
        on_disk = 2 * elements + folded  # the float model, and the one that quantizes it
        transposed = sum(map(math.prod, edges))  # one graph multiplies by all of these
        return 4 * transposed + kept, written + 4 * on_disk + REPORT
    weights = elements + quantized + folded + COPIES * in_graph
    return 4 * weights + kept, written + REPORT


def _head(matrices: Shapes) -> tuple[int, int]:
    """Return, to predict validate's memory, the shape of a decoder's head, a linear module:
    (vocabulary, width)."""
    vocabulary = max((max(s) for s in matrices.values()), default=0)
    return vocabulary, max((min(s) for s in matrices.values() if vocabulary in s), default=0)


def _ledger_tokens(shapes: Shapes) -> int:
    """Count the tokens of all batches that the ledger runs of a decoder, padding included."""
    matrices = {n: s for n, s in shapes.items() if len(s) == 2}
    head = _head(matrices)
    per_token = 4 * (sum(sum(s) for s in matrices.values() if max(s) < head[0]) + sum(head))
    usual = decoder_batches.count_positions(per_token)[1]
    return usual + sum(decoder_batches.count_extreme_positions(per_token, inputs.ROWS))


def _session(shapes: Shapes, elements: int) -> int:
    """Estimate for validate the bytes of an open session of a decoder's float graph. Weights lie in
    a mapped file. The session repacks all but the embedding, and holds the copies."""
    in_graph = elements + _tied(shapes)
    if 4 * in_graph <= onnx_file.LIMIT:
        return SESSION * 4 * in_graph
    matrices = [s for s in shapes.values() if len(s) == 2]
    tables = max((max(s) for s in matrices), default=0)
    embedding = max((math.prod(s) for s in matrices if tables in s), default=0)
    return 4 * (in_graph - embedding)


def _converted(shapes: Shapes, elements: int) -> int:
    """Estimate for validate the bytes, per thread that runs it, in which a large decoder's weights
    in half precision (run_artifacts.py: halves_weights) are converted: those of the largest."""
    return 4 * max(map(math.prod, shapes.values())) if elements > LARGE else 0


def _tied(shapes: Shapes) -> int:
    """Count, to predict validate's memory, the values that a decoder's graph stores twice: an
    embedding that is also the output head, which the graph holds transposed as well."""
    matrices = [s for s in shapes.values() if len(s) == 2]
    tables = max((max(s) for s in matrices), default=0)
    heads = [math.prod(s) for s in matrices if tables in s]
    return heads[0] if len(heads) == 1 else 0


def _text_tokens(spec: DataSpec) -> int:
    """Estimate, to predict validate's time, the total number of tokens in the texts of a data
    set."""
    return sum(len(s.input) for s in read_samples(spec)) // CHARACTERS


def _cached(shapes: Shapes) -> int:
    """Count, to predict validate's memory, the numbers per token in the KV cache: the rows of the
    key and value matrices. Where no matrix has such a name, return an upper bound of two hidden
    states per block."""
    own = [s[0] for n, s in shapes.items() if n.endswith(CACHED) and len(s) == 2]
    blocks = {number[1] for n in shapes if (number := BLOCK.search(n))}
    widths = [min(s) for s in shapes.values() if len(s) == 2]
    return sum(own) or 2 * len(blocks) * max(widths, default=0)


def _tokens(section: Validation, each: int = 0) -> tuple[int, int]:
    """Count the tokens that the ledger runs, padding included: (of the sampled batches, of all
    batches).

    each: positions of one image; 0 where the inputs are texts
    """
    if each:  # one, eight, all
        return 8 * each, (1 + 8 + LEDGER_TEXTS) * each
    texts = select_inputs(read_samples(section.validate_.data))
    lengths = [min(LONGEST, len(text) // CHARACTERS + 3) for text in texts]
    middle = lengths[len(lengths) // 2 :][:8] or lengths[-1:]
    sampled = 3 * lengths[-1] + 8 * middle[-1]
    return sampled, sum(lengths) + 4 * lengths[-1]
