"""Read from a model's files what `optimize init` proposes for it; no weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.checks.lengths import POSITIONS
from optimizer.data.same_rows import TokenIds
from optimizer.foundation.errors import CheckpointError, MachineError, RecipeError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.harness.tasks import (
    feature_extraction,
    image_feature_extraction,
    image_text_embedding,
    sentence_embedding,
    sparse_embedding,
    text_classification,
    text_generation,
    text_ranking,
    token_classification,
    zero_shot_classification,
    zero_shot_image_classification,
)
from optimizer.load import source, weights
from optimizer.load.adapters import adapter
from optimizer.load.config import model_type
from optimizer.load.config.model_folder import model_folder
from optimizer.load.providers.pairs import is_pair
from optimizer.load.providers.timm import is_timm
from optimizer.load.providers.timm_architectures import find_architecture as find_timm
from optimizer.load.sentence import cross_encoder, logit_score
from optimizer.load.sentence.folder import is_sparse
from optimizer.load.stage import open_skeleton
from optimizer.load.text_inputs import ENTAILS
from optimizer.load.tokenizer import tokenizer
from optimizer.model.architectures.families import ENCODER, FAMILIES, has_encoder
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model

UNKNOWN = 0.1  # maximum share of unknown tokens in texts of the model's own kind
READ, SHOWN = 400, 60  # characters of a text that are read, and shown
HEADS = {  # beginning of tensors' names: head of a model whose type is not certain
    "qa_outputs.": "question answering",
    "classifier.": "a classifier, of texts or of tokens",
    "cls.predictions.": "masked language model",
    "lm_head.": "masked language model",
}
ADAPTED = {  # task_type of an adapter: task
    "CAUSAL_LM": text_generation.TASK.name,
    "SEQ_CLS": text_classification.TASK.name,
    "TOKEN_CLS": token_classification.TASK.name,
}


ONE_SCORE = (
    "the model has one label; if it scores documents for a query, set task: "
    f"{text_ranking.TASK.name}, and metric: ndcg"
)

INFERENCE = (
    "the labels are those of natural language inference; to choose among labels that a request "
    f"names (zero-shot), call init with --task {zero_shot_classification.TASK.name}"
)

TWO_SIDES = (
    "the model compares images with texts, and this recipe takes its vectors of images; for "
    f"vectors of texts call init with --task {sentence_embedding.TASK.name}, and to choose among "
    f"labels that the recipe names with --task {zero_shot_image_classification.TASK.name}; "
    f"for both sides in one bundle with --task {image_text_embedding.TASK.name}"
)

NO_TEMPLATE = (
    "the decoder ranks by its logits of yes and no: set template to the text that it was trained "
    "with (docs/recipe.md, Rerankers, has Qwen3-Reranker's)"
)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model from which `optimize init` proposes a recipe.

    name: as given on the command line
    adapter: adapter that is merged into the model, as given on the command line
    folder: folder of config.json; None where the files are not on this machine
    kind: model_type; "" where it is not certain
    labels: names of the model's labels, in id order; () without
    problem: problem_type of config.json; "" without
    positions: maximum tokens; None where unknown
    convolves: True for quantized convolutions, and where no norm can be folded; None where unknown
    settings: further keys of the recipe's section `model`, "key: value"
    decisions: sentences about what must still be decided
    """

    name: str
    task: tasks.Task
    gguf_file: str | None = None
    folder: Path | None = None
    kind: str = ""
    adapter: str | None = None
    labels: tuple[str, ...] = ()
    problem: str = ""
    positions: int | None = None
    convolves: bool | None = None
    settings: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()

    @property
    def token_ids(self) -> TokenIds | None:
        """Token ids of texts, for `optimize init`, by the model's tokenizer; None where it cannot
        be opened."""
        if self.folder is None or self.task.inputs.name != TEXT.name:
            return None
        opened = _open_tokenizer(self.folder, self.kind)
        if opened is None:
            return None
        return lambda texts: opened(list(texts), add_special_tokens=False)["input_ids"]


def look(name: str, task: str | None, gguf_file: str | None = None) -> ModelFacts:
    """Find the facts about a model for `optimize init`. From a hub only the config is fetched, and
    nothing where a task is given.

    Raises RecipeError for a head that no task here has, and the errors of stage load for a model
    that it refuses by its config.
    """
    if gguf_file is not None:
        return ModelFacts(name, tasks.find_task(task or tasks.list_generating()[0]), gguf_file)
    local = source.is_local(name)
    if not local and task is not None:
        return ModelFacts(name, tasks.find_task(task))
    root = _root(name)
    if adapter.is_alone(root):
        return _look_at_base(name, task, adapter.Adapter(name, source.Source(root, root, None)))
    only = sorted(p.name for p in root.glob("*.gguf"))
    if len(only) == 1 and not (root / "config.json").is_file():
        return ModelFacts(name, tasks.find_task(task or tasks.list_generating()[0]), only[0])
    with reading(root):
        folder = model_folder(root)
        file = folder / "config.json"
        raw = read_json(file)
    if is_timm(raw) and (record := find_timm(str(raw.get("architecture")))):
        raw = {"architectures": ["ForImageClassification"], **raw, **record.fields}
    stored = weights.read_headers(folder) if local else {}
    kind, taken, decisions = _kind(raw, file, stored)
    family = FAMILIES.get(kind)
    if task is None and is_pair(raw):
        task = image_feature_extraction.TASK.name
        decisions.append(TWO_SIDES)
    if task is None:
        task, doubt = _task(raw, file, stored, kind, root)
        decisions += [doubt] if doubt else []
        if task == text_classification.TASK.name and len(raw.get("id2label") or ()) == 1:
            scorer = cross_encoder.scores_pairs(root, raw)
            task = text_ranking.TASK.name if scorer else task
            decisions += [] if scorer else [ONE_SCORE]
        elif tasks.find_task(task).generates and cross_encoder.read_settings(root):
            task = text_ranking.TASK.name
    facts = ModelFacts(name, tasks.find_task(task), None, folder if local else None, kind)
    plain = family is not None and (family.quantizes_convolutions or not family.smooth)
    facts = replace(facts, convolves=plain)
    if local:
        settings, more = _files(folder, facts.task, kind)
        facts = replace(facts, settings=(*taken, *settings))
        decisions += more
    facts = replace(facts, decisions=tuple(decisions), positions=_positions(raw, kind))
    ranking = Model(source=str(folder), task=task)
    if logit_score.takes(ranking, folder) and not (root / "modules.json").is_file():
        template = '# template: "... {query} ... {document} ..."'
        facts = replace(facts, settings=(*facts.settings, template))
        facts = replace(facts, decisions=(*facts.decisions, NO_TEMPLATE))
    if raw.get("auto_map"):
        own = "the model has code of its own: read it, then set trust_remote_code: true"
        return replace(facts, decisions=(*facts.decisions, own))
    if not kind:
        return facts
    section = Model(source=name, task=task, model_type=None if _named(raw) else kind)
    with reading(folder, own_faults=True):
        config, skeleton, _ = open_skeleton(section, folder)
    there = section.model_copy(update={"source": str(folder)})
    read_whole = is_timm(raw) or is_pair(raw)  # their providers choose tensors
    if unread := _list_unread_tensors(there, stored) if stored and not read_whole else None:
        patterns = ", ".join(map(json.dumps, weights.write_patterns(unread, skeleton)))
        setting = f"ignore_tensors: [{patterns}]    # tensors that task {task} has no use for"
        facts = replace(facts, settings=(*facts.settings, setting))
    problem = str(getattr(config, "problem_type", None) or "")
    labels = _labels(config) if facts.task.classifies and not facts.task.needs_labels else ()
    if task == text_classification.TASK.name and any(map(_entails, labels)):
        facts = replace(facts, decisions=(*facts.decisions, INFERENCE))
    return replace(facts, labels=labels, problem=problem)


def _entails(label: str) -> bool:
    return label.lower().startswith(ENTAILS)


def _look_at_base(name: str, task: str | None, alone: adapter.Adapter) -> ModelFacts:
    """Return the facts about the model that an adapter was trained on, with the adapter's name.
    Raises RecipeError for an adapter that names no model."""
    file = alone.folder / adapter.CONFIG
    if not alone.base:
        raise RecipeError(
            "the adapter does not name the model that it was trained on",
            where=f"{file}: base_model_name_or_path",
            fix="Write the name there, or call init with the model, and add to its section model: "
            f"adapters: [{name}].",
        )
    if source.is_local(alone.base) and adapter.is_alone(_root(alone.base)):
        raise RecipeError(
            f"the adapter names {alone.base!r} as its model, which is an adapter too",
            where=f"{file}: base_model_name_or_path",
            accepted="a model with weights",
        )
    trained_for = ADAPTED.get(str(alone.config.get("task_type")))
    facts = look(alone.base, task or trained_for)
    return replace(facts, adapter=name)


def _root(name: str) -> Path:
    """Return the folder of the files that `init` reads of a model; from a hub only its config is
    fetched."""
    try:
        return source.peek(Model(source=name, task=feature_extraction.TASK.name)).folder
    except MachineError as e:
        if source.is_local(name):
            raise
        raise MachineError(
            f"folder {name!r} does not exist, and {e.problem}",
            where="MODEL",
            accepted="a folder, python-package:<name>, or a hub id that can be reached",
            fix="Correct the path, or give the task to write the recipe without a look at the "
            f"model: --task {' | '.join(tasks.list_names())}.",
        ) from e


def _kind(
    raw: dict[str, Any], file: Path, stored: Mapping[str, weights.Stored]
) -> tuple[str, list[str], list[str]]:
    """Find the model_type of a model, by which transformers knows its architecture. Returns
    (model_type, or "" where it is not certain; lines that `init` writes into the recipe; sentences
    that it prints)."""
    if _named(raw):
        return str(raw.get("model_type")), [], []
    kinds = model_type.list_candidates(raw, stored)
    if stored:  # names may lack the base model's
        fitting = [kind for kind in kinds or sorted(FAMILIES) if _fits(kind, file.parent, stored)]
        kinds = fitting or kinds
    unnamed = f"{file.name} names no model_type"
    if len(kinds) == 1:
        why = "the weights have the names and shapes of its model" if stored else "by architectures"
        setting = f"model_type: {kinds[0]}            # {unnamed}"
        return kinds[0], [setting], [f"{unnamed}; {kinds[0]} is assumed: {why}"]
    if kinds:
        alike = f"the weights fit {', '.join(kinds)} equally well: choose one"
        return "", [f"# model_type: {kinds[0]}     # {' | '.join(kinds)}"], [f"{unnamed}; {alike}"]
    known = ", ".join(sorted(FAMILIES))
    return (
        "",
        ["# model_type: bert"],
        [f"{unnamed}, and the weights do not tell which it is: choose one of {known}"],
    )


def _named(raw: dict[str, Any]) -> bool:
    return bool(raw.get("model_type")) or is_timm(raw)


def _fits(kind: str, folder: Path, stored: Mapping[str, weights.Stored]) -> bool:
    """Test for `optimize init` that every parameter of this type's model has a tensor of its name
    and shape."""
    section = Model(source=str(folder), task=_find_headless_task(kind), model_type=kind)
    return _list_unread_tensors(section, stored) is not None


def _find_headless_task(kind: str) -> str:
    """Find for a new recipe the task that a model of this type without a head has."""
    family = FAMILIES[kind]
    plain = tasks.list_generating()[0] if family.kind == "decoder" else feature_extraction.TASK.name
    return image_feature_extraction.TASK.name if family.inputs == IMAGE.name else plain


def _list_unread_tensors(section: Model, stored: Mapping[str, weights.Stored]) -> list[str] | None:
    """Return, to choose a new recipe's task, the names of the tensors that the model of
    section.task does not read.

    None if one of its parameters has no tensor of its name and shape.
    """
    try:
        with quiet():  # of tokens that a config of another type has by default
            skeleton = open_skeleton(section, Path(section.source))[1]
            return weights.find_useless(weights.match(stored, skeleton, section), skeleton)
    except CheckpointError:
        return None
    except NotImplementedError:  # values of a pickle, which are not read, had to be compared
        return []


def _task(
    raw: dict[str, Any],
    file: Path,
    stored: Mapping[str, weights.Stored],
    kind: str,
    root: Path,
) -> tuple[str, str]:
    """Find the task for a new recipe: (task of the head that the model has, sentence about it, or
    "").

    The head is that of the class in `architectures`; where the weights lack it, or no class is
    named, that of the task whose model has a place for every tensor.
    """
    listed = raw.get("architectures")
    named = str(listed[0]) if isinstance(listed, list) and listed else ""
    family = FAMILIES.get(kind)
    sentences = (root / "modules.json").is_file() and cross_encoder.read_settings(root) is None
    if sentences and is_sparse(root):
        return sparse_embedding.TASK.name, ""
    if (raw.get("is_encoder_decoder") and family is None) or has_encoder(kind):
        if sentences:
            return sentence_embedding.TASK.name, ""
        if has_encoder(kind) and named and not named.endswith(ENCODER):
            raise _report_no_task(named, file)
        of_images = (
            t.name
            for t in _list_headed_tasks()
            if t.inputs.name == IMAGE.name and named.endswith(t.heads)
        )
        return next(of_images, feature_extraction.TASK.name), ""  # refused when it is opened
    own = Model(
        source=str(file.parent),
        task=feature_extraction.TASK.name if family is None else _find_headless_task(kind),
        model_type=None if _named(raw) else kind or None,
    )
    looks = stored and kind and not raw.get("auto_map") and not is_timm(raw)
    decodes = family is not None and family.kind == "decoder"  # its plain task reads the head
    if sentences and (decodes or named.endswith(text_generation.TASK.heads)):
        return sentence_embedding.TASK.name, ""  # a backbone keeps the name of its language model
    head = _list_unread_tensors(own, stored) if looks and not decodes else None  # None: not known
    of_class = next((t.name for t in _list_headed_tasks() if named.endswith(t.heads)), "")
    if of_class and head != []:
        return of_class, ""
    doubt = f"config.json names {named}, but the weights have no head of it" if of_class else ""
    if (root / "modules.json").is_file():
        return sentence_embedding.TASK.name, doubt
    if decodes:
        return own.task, doubt
    if named and not of_class and not _is_base(named):
        raise _report_no_task(named, file)
    if head:
        sections = [own.model_copy(update={"task": t.name}) for t in _list_headed_tasks()]
        if fitting := [s.task for s in sections if _list_unread_tensors(s, stored) == []]:
            return fitting[0], f"the weights have the head of task {fitting[0]}"
        raise _report_no_task(f"{named}, {head[0]}" if named else head[0], file)
    if head is None and not named:
        for sign, what in HEADS.items():
            if any(n.startswith(sign) for n in stored):
                raise _report_no_task(f"{sign}*, {what}", file)
    return own.task, doubt


def _list_headed_tasks() -> list[tasks.Task]:
    return [t for t in tasks.TASKS.values() if t.heads]


def _is_base(named: str) -> bool:
    """Return True for the name of a transformers class without a head for a task, at `optimize
    init`."""
    return named.endswith("Model") and not named.endswith("DoubleHeadsModel")


def _report_no_task(head: str, file: Path) -> RecipeError:
    return RecipeError(
        f"no task here has the model's head ({head})",
        where=f"{file}: architectures",
        accepted=f"{', '.join(h for t in _list_headed_tasks() for h in t.heads)}, no head",
        fix=f"Name the task if it is one of {', '.join(tasks.list_names())}. For hidden states "
        "save the model without its head: "
        "transformers.AutoModel.from_pretrained(MODEL).save_pretrained("
        "FOLDER), with its tokenizer. To keep the head, export the model to ONNX and give that "
        "file: task tensors answers its arrays.",
    )


def _files(folder: Path, task: tasks.Task, kind: str) -> tuple[tuple[str, ...], list[str]]:
    """Find for a new recipe (settings, sentences) that the files of weights and tokenizer need."""
    settings: list[str] = []
    decisions: list[str] = []
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        settings.append(
            "allow_pickle: true          # the weights are a pickle, read as data: no code runs"
        )
    if task.inputs.name != TEXT.name:
        return tuple(settings), decisions
    if not any((folder / name).is_file() for name in tokenizer.FILES if "config" not in name):
        decisions.append(
            f"{folder} has no tokenizer: copy the files of the one that the model was trained with"
        )
    elif not (folder / "tokenizer.json").is_file():
        file = folder / "tokenizer_config.json"
        known = read_json(file) if file.is_file() else {}
        if "tokenizer_class" not in known and "do_lower_case" not in known:
            name = _class_name(_open_tokenizer(folder, kind))
            decisions.append(
                f"{folder} does not name its tokenizer; {name} is assumed. If the model was "
                "trained with another, save that one there with save_pretrained"
            )
    return tuple(settings), decisions


def _open_tokenizer(folder: Path, kind: str) -> Any:
    """Open transformers' tokenizer of a model for `optimize init`; None where it cannot be opened.
    Its class depends on the model type, which is `kind` where config.json names none."""
    with make_temporary_folder("tokenizer") as scratch:
        taken = None if _named(read_json(folder / "config.json")) else kind
        try:
            return tokenizer.open_tokenizer(model_type.complete_config(folder, taken, scratch))
        except CheckpointError:
            return None


def describe_unknown_tokens(model: ModelFacts, texts: Sequence[str]) -> str:
    """Return, for a new recipe, a sentence with an example where the tokenizer does not know many
    tokens of the texts. Returns "" where it knows most of them, or cannot be opened."""
    if model.folder is None or model.task.inputs.name != TEXT.name:
        return ""
    opened = _open_tokenizer(model.folder, model.kind)
    unknown = getattr(opened, "unk_token", None)
    if unknown is None:
        return ""
    with quiet():  # of texts longer than the model takes
        rows = [opened.tokenize(text[:READ]) for text in texts]
    count, total = sum(row.count(unknown) for row in rows), sum(map(len, rows))
    if count <= UNKNOWN * total:
        return ""
    worst = max(range(len(rows)), key=lambda i: rows[i].count(unknown) / max(len(rows[i]), 1))
    return (
        f"the tokenizer does not know {count:,} of the {total:,} tokens of {len(rows)} rows: it "
        f"reads {texts[worst][:SHOWN]!r} as {' '.join(rows[worst])[:SHOWN]!r}. The model was "
        f"trained with another: save that one in {model.folder} with save_pretrained "
        "(docs/tutorial.md, section 1)"
    )


def _class_name(opened: Any) -> str:
    if opened is None:
        return "transformers' choice"
    lower = getattr(opened, "do_lower_case", None)
    return type(opened).__name__ + (" (lower-cases texts)" if lower else "")


def _positions(raw: dict[str, Any], kind: str) -> int | None:
    count = next((raw[p] for p in POSITIONS if isinstance(raw.get(p), int)), None)
    family = FAMILIES.get(kind)
    if count is not None and family is not None and family.positions_after_padding:
        return int(count) - int(raw.get("pad_token_id") or 1) - 1
    return count


def _labels(config: Any) -> tuple[str, ...]:
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[i]) for i in sorted(names))
