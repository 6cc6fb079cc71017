"""Candidates of a search: the variants of a model that its recipe admits, each as a recipe.

A candidate is a choice per dimension: target, methods, attention, size, and the share of the
quantized weights that is kept in higher precision (float; 8 bits where the recipe has fewer and no
quantized activations). The modules of a share are those that cost most accuracy per weight
(`kept_modules`): where costs add up, no other set of modules of that size gains more, so that one
number stands for the choice per module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pydantic import ValidationError

from optimizer import targets
from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.foundation.errors import InputError, RecipeError
from optimizer.harness import tasks
from optimizer.load.config.config import peek_config
from optimizer.model.architectures.families import FAMILIES
from optimizer.recipe.compression import methods
from optimizer.recipe.compression.quantize import Activations, LayerRule, Quantize, Weights
from optimizer.recipe.model import Model
from optimizer.recipe.reduce import Goal, Reduce
from optimizer.recipe.schema import Recipe, Section
from optimizer.recipe.search import Search
from optimizer.recipe.validate import Latency, Validate

SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the quantized weights that precision: per_module keeps in higher precision; a
choice."""
FLOAT_BITS = (16, 32)
"""Fewest and most bits of a weight that stays float."""
SCALE_BYTES = 5
"""Most bytes of a group's scale and zero point: float32 and int8."""
TRIED = ("smoothing", "rounding", "block-tuning")
"""Kinds of the methods that an absent `over.method` stands for."""


@dataclass(frozen=True)
class Candidate:
    """One variant of the model, which a search tries.

    target: index in the recipe's targets
    methods: names of quantization methods, in order
    attention: value of quantize.activations.attention
    finer: share of the quantized weights in higher precision: one of SHARES, or the one that fills
        the limit on size
    size: value of reduce.goal.keep; 1.0: the model is not reduced
    """

    target: int
    methods: tuple[str, ...]
    attention: str = "float"
    finer: float = 0.0
    size: float = 1.0

    def label(self, recipe: Recipe) -> str:
        """Return the candidate's name for the tables and messages of a search."""
        parts = ["+".join(self.methods)]
        if self.finer:
            parts.append(f"{self.finer:.0%} of weights {name_finer_precision(recipe.quantize)}")
        if self.attention != "float":
            parts.append(f"{self.attention} attention")
        if self.size < 1:
            parts.append(f"size {self.size:g}")
        name = recipe.targets[self.target].name
        same = sum(t.name == name for t in recipe.targets) > 1
        return ", ".join([*parts, f"{name} (target {self.target})" if same else name])


def name_finer_precision(quantize: Quantize) -> str:
    """Name the precision in which a search's candidates keep the most sensitive modules."""
    return "int8" if finer_weights(quantize) else "float"


def finer_weights(quantize: Quantize) -> Weights | None:
    """Return the weight format in which a search's candidates keep the most sensitive modules; None
    if they stay float."""
    if quantize.activations is None and quantize.weights.bits < 8:
        return Weights(bits=8, granularity="channel")
    return None


def list_candidates(recipe: Recipe) -> list[Candidate]:
    """List the candidates that the recipe's targets admit; the recipe itself comes first.

    Raises RecipeError for a value of search.over with which no candidate is admitted.
    """
    search = get_section(recipe)
    own = recipe.quantize.chosen or (methods.NEAREST,)
    first = tuple(m.name for m in own)
    activations = recipe.quantize.activations
    attention = activations.attention if activations else "float"
    measurable = recipe.calibrate is not None  # sensitivity.py measures modules on its texts
    chosen: dict[str, Sequence[Any]] = {
        "targets": _targets(recipe, search),
        "method": _first(first, search.over.method or _every_method(recipe)),
        "attention": _first(attention, search.over.attention or _every_attention(recipe)),
        "precision": SHARES if measurable and search.over.precision == "per_module" else (0.0,),
        "size": _sizes(recipe, search),
    }
    admitted, refused = [], dict[tuple[str, Any], InputError]()
    for values in product(*chosen.values()):  # in the order of Candidate's fields
        candidate = Candidate(*values)
        if candidate.finer and candidate.size < 1:
            continue  # modules are measured in the model as it is, whose blocks have other names
        if problem := find_objection(recipe, candidate):
            refused |= dict.fromkeys(zip(chosen, values, strict=True), problem)
        else:
            admitted.append(candidate)
    _check_each(search, admitted, refused)
    return admitted


def count_added_bytes(quantize: Quantize) -> tuple[float, float]:
    """Predict, for a search's candidates, the fewest and the most bytes that a weight takes more in
    higher precision than in the recipe's format.

    The fewest are negative for small groups, whose scales take more than the bits that they save.
    """
    finer, weights = finer_weights(quantize), quantize.weights
    fewest, most = (finer.bits, finer.bits) if finer else FLOAT_BITS
    scales = SCALE_BYTES / weights.group_size if weights.group_size else 0.0
    return (fewest - weights.bits) / 8 - scales, (most - weights.bits) / 8


def drops_choice(quantize: Quantize) -> bool:
    """Return True where a search's candidates with a share in higher precision drop a choice of
    precision that the recipe makes by itself (`_quantize`), so that their files may be smaller than
    the recipe's."""
    return quantize.allocate is not None or quantize.keep_float_auto is not None


def fill_limit(
    recipe: Recipe, space: Sequence[Candidate], size: int, weights: int
) -> list[Candidate]:
    """Add candidates whose share in higher precision fills the limit on size, one for each of the
    first target that keeps nothing in higher precision: SHARES may leave half of the room to the
    limit.

    space: candidates that the recipe admits
    size: bytes of the recipe's own files
    weights: number of quantized weights
    """
    limit = get_section(recipe).constraints.size_mb
    if limit is None or drops_choice(recipe.quantize) or not any(c.finer for c in space):
        return list(space)
    share = (limit * 1e6 - size) / (count_added_bytes(recipe.quantize)[1] * weights)
    if not 0 < share < max(SHARES):
        return list(space)
    target = space[0].target  # whose files `size` is of
    plain = [c for c in space if c.target == target and c.size == 1 and not c.finer]
    return [*space, *(replace(c, finer=share) for c in plain)]


def _sizes(recipe: Recipe, search: Search) -> tuple[float, ...]:
    """Return the values of reduce.goal.keep that a search tries, the recipe's own first.

    Raises RecipeError for sizes below 1 of a model that generates text.
    """
    goal = recipe.reduce.goal if recipe.reduce else None
    own = goal.keep if goal and goal.keep else 1.0
    sizes = _first(own, search.over.size or ())
    if min(sizes) < 1 and tasks.find_task(recipe.model.task).generates:
        raise RecipeError(
            "the model generates text, and candidates of other sizes would be judged and timed "
            "with its KV cache",
            where="search.over.size",
            accepted="sizes of models of other tasks",
            fix="Run a recipe with section reduce first, and search from the checkpoint that it "
            "writes.",
        )
    return sizes


def _first(own: Any, others: Sequence[Any]) -> tuple[Any, ...]:
    """List the values of a choice that a search tries: the recipe's own, then the others, without
    duplicates."""
    return tuple(dict.fromkeys((own, *others)))


def get_section(recipe: Recipe) -> Search:
    """Return the section `search` of a recipe. Raises RecipeError without one."""
    if recipe.search is None:
        raise RecipeError(
            "missing, so there is nothing to search for",
            where="search",
            accepted="a section search; search: {} tries what the targets and the model admit",
            fix="Add `search: {}` to the recipe, or --set search={}.",
        )
    return recipe.search


def _targets(recipe: Recipe, search: Search) -> tuple[int, ...]:
    """Return the indices of the targets that a search tries.

    If the search needs times, search.over.targets: all leaves out the targets that are not timed.

    Raises RecipeError for an index without a target, for a listed target that is not timed, and if
    no target is left.
    """
    count, listed = len(recipe.targets), search.over.targets
    names = ", ".join(f"{i} ({t.name})" for i, t in enumerate(recipe.targets))
    if listed != "all" and max(listed) >= count:
        raise RecipeError(
            f"target {max(listed)} does not exist", where="search.over.targets", accepted=names
        )
    tried = range(count) if listed == "all" else listed
    untimed = {i: targets.look_up(recipe.targets[i].runtime).untimed for i in tried}
    if not search.timed:
        return tuple(tried)
    left = tuple(i for i in tried if not untimed[i])
    if not left or (listed != "all" and len(left) < len(listed)):
        i = next(i for i in tried if untimed[i])
        raise RecipeError(
            f"target {i} ({recipe.targets[i].name}) is not timed: {untimed[i]}",
            where="search.over.targets",
            accepted="targets that are timed; with objective: size and no limit on p99, all",
            fix="Add a target such as onnxruntime, or set search.objective: size.",
        )
    return left


def _every_method(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Return the quantization methods that a search tries, each alone.

    () for a recipe that quantizes nothing, or takes the checkpoint's integers as they are.
    """
    if recipe.quantize.passes_through or recipe.quantize.leaves_float:
        return ()
    return tuple((m.name,) for m in methods.METHODS.values() if m.kind in TRIED)


def _every_attention(recipe: Recipe) -> tuple[str, ...]:
    """Return the kinds of attention that a search tries: int8, too, where activations are static,
    and the model has attention whose products are quantized, or is not on this machine."""
    quantized = recipe.quantize.static_activations and _attends(recipe.model)
    return ("float", "int8") if quantized else ("float",)


def _attends(model: Model) -> bool:
    peeked = peek_config(model, fetch=False)
    if peeked is None:
        return not tasks.find_task(model.task).of_file
    family = FAMILIES.get(str(peeked[1].get("model_type")))
    return family is not None and bool(family.attention_products)


def find_objection(recipe: Recipe, candidate: Candidate) -> InputError | None:
    """Return the error with which the recipe checks refuse a search's candidate; None if they
    accept it."""
    try:
        accepted.check(derive_recipe(recipe, candidate), Context())
    except InputError as e:
        return e
    return None


def _check_each(
    search: Search, admitted: Sequence[Candidate], refused: Mapping[tuple[str, Any], InputError]
) -> None:
    """Raise RecipeError for a value, listed in `search.over`, that no admitted candidate has."""
    over = search.over
    fields = {"method": "methods", "attention": "attention", "size": "size"}
    for name, attribute in fields.items():
        used = {getattr(candidate, attribute) for candidate in admitted}
        for value in getattr(over, name) or ():
            if value not in used:
                shown = "+".join(value) if isinstance(value, tuple) else value
                raise RecipeError(
                    f"{shown}: no target of this recipe admits it: {refused[name, value].problem}",
                    where=f"search.over.{name}",
                    fix="Remove it from the list, or add a target that admits it.",
                )
    if not admitted:
        problem = next(iter(refused.values()))
        raise RecipeError(
            f"no candidate is admitted: {problem.problem}", where="search.over", fix=problem.fix
        )


def choose_kept_modules(
    sensitivities: Mapping[str, Mapping[str, float]], share: float
) -> tuple[str, ...]:
    """Choose the modules that a search's candidate keeps in higher precision.

    These are the modules with the largest squared error per weight, as long as their weights are at
    most `share` of all; () for share 0.

    sensitivities: {module: {"error", "weights"}} (stages/sensitivity.py)
    """

    def gain(name: str) -> float:
        return sensitivities[name]["error"] ** 2 / sensitivities[name]["weights"]

    left = share * sum(m["weights"] for m in sensitivities.values())
    kept = set()
    for name in sorted(sensitivities, key=gain, reverse=True):
        if sensitivities[name]["weights"] <= left:
            left -= sensitivities[name]["weights"]
            kept.add(name)
    return tuple(name for name in sensitivities if name in kept)


def derive_recipe(recipe: Recipe, candidate: Candidate, kept: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a search's candidate, with one target, and without section `search`.

    The limits of the search become its gates.

    kept: modules in higher precision

    Raises RecipeError if the schema refuses the recipe.
    """
    target = recipe.targets[candidate.target].without_on_fail
    try:
        changes = {
            "quantize": _quantize(recipe.quantize, candidate, kept),
            "targets": (target,),
            "validate": _validate(recipe),
            **_reduce(recipe, candidate.size),
        }
        removed = ("search", "reduce")
        fields = {n: v for n, v in _fields_set(recipe).items() if n not in removed}
        return Recipe.model_validate(fields | changes)
    except ValidationError as e:
        problem = str(e.errors()[0]["msg"]).removeprefix("Value error, ")
        raise RecipeError(problem, where="search") from None


def _quantize(quantize: Quantize, candidate: Candidate, kept: Sequence[str]) -> Quantize:
    """Return the recipe's section `quantize` with a candidate's methods, attention and precision.

    kept: modules in higher precision
    """
    fields = _fields_set(quantize) | dict(quantize.__pydantic_extra__ or {})
    if candidate.methods != tuple(m.name for m in quantize.chosen or (methods.NEAREST,)):
        options = {m.name for m in quantize.chosen if m.name not in candidate.methods}
        fields = {n: v for n, v in fields.items() if n not in {"method", "methods", *options}}
        several = len(candidate.methods) > 1
        fields["methods" if several else "method"] = (
            candidate.methods if several else candidate.methods[0]
        )
    activations = quantize.activations
    if activations is None and candidate.attention != "float":
        raise RecipeError("attention: int8 needs quantized activations", where="search.over")
    if activations is not None and activations.attention != candidate.attention:
        attention = {"attention": candidate.attention}
        fields["activations"] = Activations.model_validate(_fields_set(activations) | attention)
    if candidate.finer:
        for chooser in ("keep_float_auto", "allocate"):
            fields.pop(chooser, None)
        finer = finer_weights(quantize)
        if finer is None:
            fields["keep_float"] = (*quantize.keep_float, *kept)
        elif kept:
            fields["layers"] = (LayerRule(modules=tuple(kept), weights=finer), *quantize.layers)
    return Quantize.model_validate(fields)


def _reduce(recipe: Recipe, size: float) -> dict[str, Reduce]:
    """Return a candidate's section of reduce: {"reduce": the recipe's with goal.keep = size}; {}
    for size 1."""
    if size == 1:
        return {}
    fields = _fields_set(recipe.reduce) if recipe.reduce else {}
    return {"reduce": Reduce.model_validate(fields | {"goal": Goal(keep=size)})}


def _validate(recipe: Recipe) -> Validate:
    """Return the recipe's section `validate`, with the constraints of the search as its limits, and
    no more seconds of timing than the search's budget has for a confirmation."""
    search, section = get_section(recipe), recipe.validate_
    constraints, seconds = search.constraints, search.budget.seconds_of_confirming
    changes, limits = dict[str, Any](), dict[str, Any]()
    if constraints.max_drop is not None:
        changes["max_drop"] = constraints.max_drop
    if constraints.p99_ms is not None:
        limits["p99_ms"] = constraints.p99_ms
    if seconds < section.latency.max_seconds:
        limits["max_seconds"] = seconds
    if limits:
        changes["latency"] = Latency.model_validate(_fields_set(section.latency) | limits)
    return Validate.model_validate(_fields_set(section) | changes) if changes else section


def _fields_set(section: Section) -> dict[str, Any]:
    """Return {key in YAML: value} of the fields that a section of the searched recipe sets
    explicitly."""
    fields = type(section).model_fields
    return {
        fields[n].alias or n: getattr(section, n) for n in section.model_fields_set if n in fields
    }
