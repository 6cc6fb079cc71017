"""Select the modules to quantize, with reasons for the others, from the skeleton alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

from torch import Tensor, nn

from optimizer.compress import convolutions
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import RecipeError, suggest
from optimizer.foundation.qtensor import Scheme, divides, group_sizes
from optimizer.foundation.state import Note
from optimizer.model.checkpoint import cache_operands
from optimizer.model.graph.module import GraphModel
from optimizer.model.graph.record import BODY
from optimizer.recipe.schema import Quantize, Sparsity, Weights

WEIGHTED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Selection:
    """The modules that a recipe compresses, with their schemes.

    quantized: {module: scheme} inside the blocks
    blocks: names of the blocks, in order
    notes: reasons of the other weighted modules to stay float
    outside: {module: scheme} of a decoder's head and token embedding, where quantized
    choices: {module: schemes that allocate may choose, including its present one}
    reasons: {module: reason of its scheme}
    pruned: {module: recipe section} inside the blocks
    """

    quantized: Mapping[str, Scheme]
    blocks: tuple[str, ...]
    notes: tuple[Note, ...]
    outside: Mapping[str, Scheme] = field(default_factory=dict)
    choices: Mapping[str, tuple[Scheme, ...]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    pruned: Mapping[str, Sparsity] = field(default_factory=dict)

    def inside(
        self, source: ModelSource, blocks: Collection[str]
    ) -> tuple[dict[str, Scheme], dict[str, Sparsity]]:
        """Return ({quantized module: scheme}, {pruned module: recipe section}) inside `blocks`."""
        quantized = {n: s for n, s in self.quantized.items() if source.inside(n, blocks)}
        return quantized, {n: s for n, s in self.pruned.items() if source.inside(n, blocks)}


def select(source: ModelSource, quantize: Quantize, sparsity: Sparsity | None = None) -> Selection:
    """Select the modules to quantize or prune by the skeleton.

    Raises RecipeError for a method or precision that the architecture does not have, for a pattern
    that matches nothing, for a group size or an N:M that does not
    divide a module's inputs, and when no module remains to compress.
    """
    if quantize.integer_attention and not source.family.attention_products:
        raise RecipeError(
            f"the attention of a {source.family.model_type} is not two plain products around a "
            "softmax that can be quantized here",
            where="quantize.activations.attention",
            accepted="int8 of bert, roberta, xlm-roberta, camembert and electra",
            fix="Use attention: float.",
        )
    divides = [m.name for m in quantize.chosen if m.folds_biases]
    if divides and not source.family.equalized:
        raise RecipeError(
            f"a model of type {source.family.model_type} has no two layers that {divides[0]} "
            "covers",
            where="quantize.methods",
            accepted="ONNX files in which only ReLU or pooling lies between two convolutions, or "
            "two linear layers",
            fix=f"Remove {divides[0]} from quantize.methods.",
        )
    if quantize.kv_cache == "float8":
        _check_caches(source)
    chosen = _modules_to_quantize(source, quantize)
    modules = {n: source.model.get_submodule(n) for n in chosen.quantized}
    filters = {n: m for n, m in modules.items() if isinstance(m, nn.Conv2d)}
    convolutions.check(quantize, sparsity, filters, [chosen.quantized[n] for n in filters])
    if sparsity is None:
        return chosen
    pruned = _modules_to_prune(source, tuple(chosen.quantized), sparsity)
    if not quantize.leaves_float:
        return replace(chosen, pruned=pruned)
    dense = [Note(n, "float", "sparsity: kept dense") for n in chosen.quantized if n not in pruned]
    return replace(chosen, quantized={}, pruned=pruned, notes=(*chosen.notes, *dense))


def _check_caches(source: ModelSource) -> None:
    """Refuse, before compress starts, a model whose keys and values cannot be read on their way
    into the cache."""
    names = cache_operands.list_attentions(source.model, source.blocks)
    if len(names) == len(source.blocks):
        return
    raise RecipeError(
        f"{len(names)} attentions of {len(source.blocks)} blocks of a {source.family.model_type} "
        f"are named {' or '.join(cache_operands.NAMES)} and take {cache_operands.ARGUMENT}, so "
        "what its KV cache holds cannot be calibrated and judged",
        where="quantize.kv_cache",
        accepted="float8 of decoders such as Llama, Mistral, Qwen2 and Qwen3",
        fix="Use kv_cache: float.",
    )


def _modules_to_prune(
    source: ModelSource, candidates: tuple[str, ...], sparsity: Sparsity
) -> dict[str, Sparsity]:
    """Select the modules to prune: {module among `candidates`: recipe section}. Raises RecipeError
    as `select`."""
    chosen = match_modules(source.model, sparsity.modules, "sparsity.modules")
    dense = match_modules(source.model, sparsity.keep_dense, "sparsity.keep_dense")
    pruned = {n: sparsity for n in candidates if n in chosen and n not in dense}
    if not pruned:
        raise RecipeError(
            "every linear layer is kept dense, so there is nothing to prune",
            where="sparsity.modules",
            accepted="patterns of linear layers inside the blocks that quantize.keep_float leaves",
            fix="Widen sparsity.modules, or remove a pattern of keep_dense.",
        )
    for name in pruned:
        inputs = cast(nn.Linear, source.model.get_submodule(name)).in_features
        if not sparsity.shape.divides(inputs):
            raise RecipeError(
                f"{sparsity.shape.of} does not divide the {inputs} inputs of {name}",
                where="sparsity.pattern",
                fix=f"Use a pattern that divides them, or add {name!r} to sparsity.keep_dense.",
            )
    return pruned


def _modules_to_quantize(source: ModelSource, quantize: Quantize) -> Selection:
    """Select the modules in the blocks that the recipe quantizes; note why others stay float."""
    model, family = source.model, source.family
    patterns = match_modules(model, quantize.keep_float, "quantize.keep_float")
    if not isinstance(quantize.fold_only, bool):
        match_modules(model, quantize.fold_only, "quantize.fold_only")
    rules = _rules(model, quantize)
    outside = _outside(source, quantize)
    blocks = source.blocks
    listed = {f"{source.around(block)}.{linear}" for block in blocks for linear in family.linears}
    quantized: dict[str, Scheme] = {}
    notes: list[Note] = []
    for name, module in model.named_modules():
        if not isinstance(module, WEIGHTED) or name in outside:
            continue
        why = _why_float(name, module, patterns, name in listed, source)
        why = why and dict(family.left_float).get(name, why)
        if why:
            notes.append(Note(name, "float", why))
            continue
        where, weights = rules.get(name, ("quantize.weights", quantize.weights))
        shape = len(module.weight), _inputs(module)
        quantized[name] = _scheme(name, shape, weights, where)
    if not quantized:
        raise RecipeError(
            "every linear layer is kept in float, so there is nothing to compress",
            where="quantize.keep_float",
            fix="Remove a pattern; `*` alone matches every module.",
        )
    free = {n: s for n, s in quantized.items() if n not in rules} if quantize.allocate else {}
    choices = {n: _choices(model, n, s, quantize) for n, s in free.items()}
    return Selection(quantized, blocks, tuple(notes), outside, choices)


def _choices(model: nn.Module, name: str, first: Scheme, quantize: Quantize) -> tuple[Scheme, ...]:
    """The module's scheme `first`, then the schemes of quantize.allocate whose groups divide its
    inputs."""
    assert quantize.allocate is not None
    inputs = _inputs(model.get_submodule(name))
    choices = quantize.allocate.choices
    schemes = [make_scheme(weights) for weights in choices]
    fitting = [s for s in schemes if divides(s.group_size, inputs)]
    return tuple(dict.fromkeys([first, *fitting]))


def _rules(model: nn.Module, quantize: Quantize) -> dict[str, tuple[str, Weights]]:
    """Return {module to quantize: (place in the recipe, weights)} by the first rule in `layers`
    that matches."""
    rules: dict[str, tuple[str, Weights]] = {}
    for i, rule in enumerate(quantize.layers):
        for name in match_modules(model, rule.modules, f"quantize.layers.{i}.modules"):
            rules.setdefault(name, (f"quantize.layers.{i}.weights", rule.weights))
    return rules


def _outside(source: ModelSource, quantize: Quantize) -> dict[str, Scheme]:
    """Return {module: scheme} of a decoder's head and embedding, where quantized. Raises
    RecipeError for a quantized embedding that is tied to a float head."""
    model, head = source.model, source.family.head
    named = {
        "head": (head, quantize.head_weights),
        "embedding": (source.embedding, quantize.embedding),
    }
    schemes: dict[str, Scheme] = {}
    if quantize.head == "tied":
        _check_tied(model, head, source.embedding, quantize)
    for place, (name, weights) in named.items():
        if weights == "float":
            continue
        module = model.get_submodule(name)
        out, inputs = cast(Tensor, module.weight).shape
        if place == "embedding" and head not in schemes:
            _check_untied(model, head, name, quantize)
        schemes[name] = _scheme(name, (out, inputs), weights, f"quantize.{place}")
    return schemes


def _check_tied(model: nn.Module, head: str, name: str, quantize: Quantize) -> None:
    """Refuse to quantize as head: tied where the head does not have the embedding's values."""
    untying = [m.name for m in quantize.chosen if m.unties_head(quantize.options_of(m))]
    tied = model.get_submodule(name).weight is model.get_submodule(head).weight
    if tied and not untying:
        return
    why = f"method {untying[0]} gives it other values" if tied else "the checkpoint does not tie it"
    raise RecipeError(
        f"tied, but {head} is not tied to {name}: {why}",
        where="quantize.head",
        accepted="float, or weights of its own, e.g. {bits: 8, granularity: group, group_size: 32}",
    )


def _check_untied(model: nn.Module, head: str, name: str, quantize: Quantize) -> None:
    """Refuse a quantized embedding with a tied float head, which needs the float table too."""
    unties = any(m.unties_head(quantize.options_of(m)) for m in quantize.chosen)
    if model.get_submodule(name).weight is model.get_submodule(head).weight and not unties:
        raise RecipeError(
            f"{head} is tied to {name} and stays float, so integers would be stored beside "
            "the float values and make the model larger",
            where="quantize.embedding",
            fix="Quantize both: quantize.head: {bits: 8, ...}; or remove quantize.embedding.",
        )


def list_names(module: str) -> tuple[str, ...]:
    """Return the names by which a pattern of the recipe's quantize or sparsity may match a module:
    for an ONNX file also the file's own."""
    return module, module.removeprefix(f"{BODY}.")


def matches(module: str, patterns: Collection[str]) -> bool:
    """Return True where a pattern of the recipe's quantize or sparsity names the module, or a
    module around it."""
    parts = module.split(".")
    around = [n for i in range(len(parts)) for n in list_names(".".join(parts[: i + 1]))]
    return any(fnmatchcase(name, pattern) for name in around for pattern in patterns)


def match_modules(model: nn.Module, patterns: tuple[str, ...], where: str) -> dict[str, str]:
    """Return {module: first pattern that matches the module or a module around it}; unmatched
    modules are absent. Raises RecipeError for a pattern that matches no module."""
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(model, GraphModel):
        names = [name for name in names if name.startswith(f"{BODY}.")]
    patterns_of: dict[str, str] = {}
    for i, pattern in enumerate(patterns):
        hits = [n for n in names if any(fnmatchcase(m, pattern) for m in list_names(n))]
        if not hits:
            known = list(dict.fromkeys(m for n in names for m in list_names(n)))
            raise RecipeError(
                f"{pattern!r} matches no module{_nearest(pattern, known)}",
                where=f"{where}.{i}",
                accepted="names or patterns of modules, as the checkpoint names them",
                fix="Correct the pattern, or remove it.",
            )
        for name in names:
            if any(name == hit or name.startswith(hit + ".") for hit in hits):
                patterns_of.setdefault(name, pattern)
    return patterns_of


def _nearest(pattern: str, names: list[str]) -> str:
    """Return '; did you mean "x"?' for a pattern of the recipe that matches no module to quantize:
    a name with the pattern's ending (a missing or extra prefix is the usual error), or with similar
    spelling."""
    tail = pattern.strip("*.")
    ends = [n for n in names if tail and (n.endswith("." + tail) or tail.endswith("." + n))]
    return f'; did you mean "{ends[0]}"?' if ends else suggest(pattern, names)


def _why_float(
    name: str,
    module: nn.Module,
    patterns: Mapping[str, str],
    listed: bool,
    source: ModelSource,
) -> str | None:
    """Return the reason, for the report, why a module stays float; None for one that is
    quantized."""
    if name in patterns:
        return f"keep_float: {patterns[name]}"
    if isinstance(module, nn.Embedding):
        return "an embedding is looked up, not multiplied"
    if not source.inside(name, source.blocks):
        return "outside the blocks: a small part of the work, and its error reaches the answer"
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return f"{type(module).__name__} is not compressed, only linear and 2-D convolutions are"
    return None if listed else "not among the layers that model/architectures/families.py lists"


def _inputs(module: nn.Module) -> int:
    """Return the number of inputs that one output of a linear layer or convolution to quantize sums
    over."""
    return math.prod(cast(Tensor, module.weight).shape[1:])


def make_scheme(weights: Weights) -> Scheme:
    """Convert the recipe's section on quantized weights to the Scheme by which compress rounds
    them."""
    return Scheme(
        weights.bits,
        weights.symmetric,
        weights.granularity,
        weights.group_size,
        weights.full_range,
        weights.type,
    )


def _scheme(name: str, shape: tuple[int, int], weights: Weights, where: str) -> Scheme:
    """Return the scheme in which a weight (out, in) is to be quantized; RecipeError where its
    groups do not divide it."""
    scheme = make_scheme(weights)
    if scheme.granularity == "block":
        try:
            scheme.shape_of_scale(*shape)
        except ValueError as e:
            raise RecipeError(
                f"{e} of {name}",
                where=f"{where}.granularity",
                accepted="channel, or block for weights of multiples of 128",
                fix=f"Use channel, or add {name!r} to keep_float.",
            ) from None
    inputs = shape[1]
    if not divides(scheme.group_size, inputs):
        raise RecipeError(
            f"{scheme.group_size} does not divide the {inputs} inputs of {name}",
            where=f"{where}.group_size",
            accepted=", ".join(map(str, group_sizes(inputs))) or "no size from 16 to 256",
            fix=f"Use one of these, or add {name!r} to keep_float.",
        )
    return scheme
