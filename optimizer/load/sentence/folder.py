"""Read the files of a sentence-transformers folder that change what `SentenceTransformer.encode`
answers, as a contract's pooling, normalize, embedding and sparse.

    modules.json                        order of the modules, and a folder for each
    config_sentence_transformers.json   prompts, default_prompt_name, truncate_dim, similarity
    1_Pooling/config.json               modes, include_prompt
    1_SpladePooling/config.json         pooling_strategy, activation_function (sparse embeddings)
    2_Dense/, 3_LayerNorm/              config.json and weights
    sentence_bert_config.json           max_seq_length (tokenizer.py), do_lower_case
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.harness.contract import POOLINGS
from optimizer.harness.embedding_settings import SIMILARITIES, EmbeddingSettings, LayerAfterPooling
from optimizer.harness.sparse_settings import ACTIVATIONS as WEIGHED
from optimizer.harness.sparse_settings import POOLINGS as POOLED
from optimizer.harness.sparse_settings import SparseSettings
from optimizer.harness.tasks import Task, fill_mask
from optimizer.harness.tasks.embeddings import sentence_embedding, sparse_embedding
from optimizer.load import weights
from optimizer.load.config.modules_json import locate_config, locate_module, read_modules
from optimizer.load.sentence.keys import SCORES_ONLY, TEXT_ONLY, find_unread_keys
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
SPLADE = "SpladePooling"
LAYERS = "sentence_layers.npy"  # file that load writes beside the tokenizer
FLAGS = {  # of older versions, in the order in which the library joins the results
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
}
"""{class of torch.nn: activation of a dense layer}."""
ORDER = "Transformer, Pooling, then any of Dense, LayerNorm, Normalize; Dropout anywhere"

SPARSE_ORDER = "Transformer (transformer_task: fill-mask) or MLMTransformer, then SpladePooling"

Arrays = list[NDArray[np.float32]]


@dataclass(frozen=True)
class FolderSettings:
    """Settings of a sentence-transformers folder: pooling, prompts and layers after it. pooling,
    normalize and sparse are None where it has none.

    values: parameters of the layers, in the order of `settings`
    lower_case: True where texts are lower-cased before the tokenizer
    unread: sentences on keys that are not read and are not at the library's default
    """

    pooling: str | tuple[str, ...] | None = None
    normalize: bool | None = None
    settings: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    values: NDArray[np.float32] | None = None
    lower_case: bool = False
    unread: tuple[str, ...] = ()
    sparse: SparseSettings | None = None


def is_sentence_folder(root: Path) -> bool:
    """Return True for a folder that sentence-transformers wrote."""
    return (root / MODULES).is_file()


def is_sparse(root: Path) -> bool:
    """Return True for a folder that sentence-transformers wrote of a SPLADE model."""
    return any(str(m.get("type", "")).endswith(f".{SPLADE}") for m in read_modules(root))


def check_plain_texts(folder: Path, task: Task) -> None:
    """Raise CheckpointError unless modality_config says texts only. Call it for a tokenizer with a
    chat template, by which sentence-transformers would render every text or pair.

    folder: the Transformer module's
    """
    file = locate_config(folder)
    config = read_json(file) if file.is_file() else {}
    modalities = SCORES_ONLY if task.ranks or task.weighs else TEXT_ONLY
    output = "scores" if task.ranks else "token_embeddings"
    if config.get("modality_config") == modalities:
        return
    plain = json.dumps({"modality_config": modalities, "module_output_name": output})
    raise CheckpointError(
        "sentence-transformers renders every text with the tokenizer's chat template, and here "
        "texts go to the model without a template",
        where=f"{file}: modality_config",
        accepted=f"{modalities}, or a tokenizer without chat_template",
        fix="If the model was trained on plain texts, as Qwen3-Embedding and E5-Mistral were, "
        "remove chat_template.jinja and the key chat_template of tokenizer_config.json; or, in a "
        f"folder with modules.json, add {plain[1:-1]} to this file.",
    )


def read(root: Path, section: Model, width: int) -> FolderSettings:
    """Read the settings of a sentence-transformers folder; of one without modules.json, such as the
    Transformer module's own, only the lower-casing.

    width: size of the hidden states

    Raises CheckpointError for a module, an activation or a value that is not covered.
    """
    if tasks.find_task(section.task).weighs:
        return _read_sparse(root, section)
    if not is_sentence_folder(root):
        file = locate_config(root)
        return FolderSettings(
            lower_case=file.is_file() and bool(read_json(file).get("do_lower_case"))
        )
    pooling: str | tuple[str, ...] | None = None
    include_prompt, lower_case = True, False
    layers, arrays, unread = list[LayerAfterPooling](), Arrays(), list[str]()
    for module in read_modules(root):
        folder, kind = locate_module(root, module), str(module.get("type", "")).rpartition(".")[2]
        file = locate_config(folder) if kind == "Transformer" else folder / "config.json"
        config = read_json(file) if file.is_file() else {}
        if kind == "Transformer":
            lower_case = bool(config.get("do_lower_case"))
        elif kind == "Pooling" and pooling is None:
            include_prompt = bool(config.get("include_prompt", True))
            pooling = _modes(config, file)
            width *= 1 if isinstance(pooling, str) else len(pooling)
        elif kind in LAYER_READERS and pooling is not None:
            layer, tensors = LAYER_READERS[kind](config, folder, section, width)
            width = layer.outputs or width
            layers.append(layer)
            arrays += tensors
        elif kind != "Dropout":  # which does nothing outside training
            raise CheckpointError(
                f"sentence-transformers module {kind} ({module.get('path')}) is not covered in "
                "this place",
                where=str(root / MODULES),
                accepted=ORDER,
                fix=f"Set model.task: {sparse_embedding.TASK.name}."
                if kind == SPLADE
                else "If you want the vectors of the transformer without it, set task: "
                "feature-extraction.",
            )
        unread += find_unread_keys(root / MODULES, MODULES, module)
        unread += find_unread_keys(file, kind, config)
    settings, more = _settings(root, SETTINGS)
    # the last Normalize is the contract's `normalize`, which a recipe can set
    normalize = bool(layers) and layers[-1].kind == "normalize"
    kept = tuple(layers[:-1] if normalize else layers)
    file_name = LAYERS if arrays else None
    return FolderSettings(
        pooling=pooling,
        normalize=normalize,
        settings=replace(settings, include_prompt=include_prompt, layers=kept, file=file_name),
        values=np.concatenate([a.reshape(-1) for a in arrays]) if arrays else None,
        lower_case=lower_case,
        unread=tuple(dict.fromkeys([*unread, *more])),
    )


def _modes(config: Mapping[str, Any], file: Path) -> str | tuple[str, ...]:
    """Read the pooling modes of a sentence-transformers folder's Pooling module: a list in newer
    files, a flag per mode in older ones."""
    named = config.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in FLAGS.items() if config.get(key)] or ["mean"]
    modes = [named] if isinstance(named, str) else named
    known = isinstance(modes, list) and bool(modes) and all(m in POOLINGS for m in modes)
    if not known:
        raise CheckpointError(
            f"pooling {str(named)[:80]} is not covered",
            where=f"{file}: pooling_mode",
            accepted=", ".join(POOLINGS) + ", or a list of them",
        )
    return str(modes[0]) if len(modes) == 1 else tuple(modes)


def _read_sparse(root: Path, section: Model) -> FolderSettings:
    """The reading of a folder of SparseEncoder, or of a masked language model alone, which
    SparseEncoder pools by its defaults. Raises CheckpointError for other modules and values."""
    modules = read_modules(root) if is_sentence_folder(root) else []
    kinds = [str(m.get("type", "")).rpartition(".")[2] for m in modules]
    masked = kinds[:1] in (["Transformer"], ["MLMTransformer"])
    if modules and (not masked or kinds[1:] != [SPLADE]):
        dense = "Pooling" in kinds
        raise CheckpointError(
            f"the modules are {', '.join(kinds)}",
            where=str(root / MODULES),
            accepted=SPARSE_ORDER,
            fix=f"Set model.task: {sentence_embedding.TASK.name}." if dense else "",
        )
    folder = locate_module(root, modules[0]) if modules else root
    file = locate_config(folder)
    config = read_json(file) if file.is_file() else {}
    if kinds[:1] == ["Transformer"]:
        reads, masks = config.get("transformer_task"), fill_mask.TASK.name
        _check(reads == masks, file, "transformer_task", reads, masks)
    unread = find_unread_keys(file, "MLMTransformer", config)
    settings, more = _settings(root, "SparseEncoder")
    document = read_json(root / SETTINGS) if (root / SETTINGS).is_file() else {}
    most = document.get("max_active_dims")
    _check(_is_count(most), root / SETTINGS, "max_active_dims", most, "a number from 1, or null")
    pooling = SparseSettings(max_active_dims=section.max_active_dims or most)
    if modules:
        file = locate_module(root, modules[1]) / "config.json"
        stored = read_json(file) if file.is_file() else {}
        unread += [u for m in modules for u in find_unread_keys(root / MODULES, MODULES, m)]
        unread += find_unread_keys(file, SPLADE, stored)
        read = {"pooling_strategy": POOLED, "activation_function": WEIGHED}
        for key, accepted in read.items():
            value = stored.get(key, accepted[0])
            _check(value in accepted, file, key, value, ", ".join(accepted))
        pooling = replace(
            pooling,
            pooling=stored.get("pooling_strategy", pooling.pooling),
            activation=stored.get("activation_function", pooling.activation),
        )
    return FolderSettings(
        settings=replace(settings, similarity=settings.similarity or "dot"),
        lower_case=bool(config.get("do_lower_case")),
        unread=tuple(dict.fromkeys([*unread, *more])),
        sparse=pooling,
    )


def _is_count(value: object) -> bool:
    """Test a value of a sentence-transformers folder's config: True for None and for a whole number
    from 1."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value is None or whole


def _settings(root: Path, kind: str) -> tuple[EmbeddingSettings, list[str]]:
    """Read a sentence-transformers folder: (settings of config_sentence_transformers.json,
    sentences on its keys that are not read).

    kind: key of KEYS
    """
    file = root / SETTINGS
    document = read_json(file) if file.is_file() else {}
    prompts, name = document.get("prompts") or {}, document.get("default_prompt_name")
    _check(isinstance(prompts, dict), file, "prompts", prompts, "texts by name")
    texts = {str(n): "" if text is None else text for n, text in prompts.items()}
    _check(all(isinstance(t, str) for t in texts.values()), file, "prompts", prompts, "texts")
    accepted = ", ".join(EmbeddingSettings(texts).all_prompts)
    known = name is None or name in EmbeddingSettings(texts).all_prompts
    _check(known, file, "default_prompt_name", name, accepted)
    numbers, similarity = document.get("truncate_dim"), document.get("similarity_fn_name")
    _check(_is_count(numbers), file, "truncate_dim", numbers, "a number from 1, or null")
    settings = EmbeddingSettings(
        prompts={n: text for n, text in texts.items() if text or n not in ("query", "document")},
        prompt=name,
        dimensions=numbers,
        similarity=similarity if similarity in SIMILARITIES else None,
    )
    return settings, find_unread_keys(file, kind, document)


def _check(fits: bool, file: Path, key: str, value: object, accepted: str) -> None:
    if not fits:
        raise CheckpointError(
            f"{str(value)[:80]!r} was found", where=f"{file}: {key}", accepted=accepted
        )


def _dense(
    config: Mapping[str, Any], folder: Path, section: Model, width: int
) -> tuple[LayerAfterPooling, Arrays]:
    file = folder / "config.json"
    path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = path.rpartition(".")[2]
    fits = name in ACTIVATIONS and path.startswith("torch.nn.")
    accepted = ", ".join(f"torch.nn.{n}" for n in ACTIVATIONS)
    _check(fits, file, "activation_function", path, accepted)
    inputs, outputs = config.get("in_features"), config.get("out_features")
    _check(inputs == width, file, "in_features", inputs, f"{width}, the width before it")
    whole = isinstance(outputs, int) and 0 < outputs <= 1 << 16
    _check(whole, file, "out_features", outputs, "1 to 65536")
    layer = LayerAfterPooling(
        "dense",
        width,
        int(str(outputs)),
        bias=bool(config.get("bias", True)),
        activation=ACTIVATIONS[name],
        residual=bool(config.get("use_residual", False)),
    )
    names = ["linear.weight", *(["linear.bias"] if layer.bias else [])]
    names += ["residual.weight"] if len(layer.shapes) > len(names) else []
    return layer, _tensors(folder, section, dict(zip(names, layer.shapes, strict=True)))


def _layer_norm(
    config: Mapping[str, Any], folder: Path, section: Model, width: int
) -> tuple[LayerAfterPooling, Arrays]:
    size = config.get("dimension")
    accepted = f"{width}, the width before it"
    _check(size == width, folder / "config.json", "dimension", size, accepted)
    layer = LayerAfterPooling("layer_norm", width)
    names = ("norm.weight", "norm.bias")
    return layer, _tensors(folder, section, dict(zip(names, layer.shapes, strict=True)))


def _normalize(
    _config: Mapping[str, Any], _folder: Path, _section: Model, _width: int
) -> tuple[LayerAfterPooling, Arrays]:
    return LayerAfterPooling("normalize"), []


LAYER_READERS: Mapping[
    str, Callable[[Mapping[str, Any], Path, Model, int], tuple[LayerAfterPooling, Arrays]]
]
LAYER_READERS = {"Dense": _dense, "LayerNorm": _layer_norm, "Normalize": _normalize}
"""(config, folder, section, width before it) -> (layer, parameters), by a module's class."""


def _tensors(folder: Path, section: Model, shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """Read the tensors of a sentence-transformers module's folder in float32, in the order of
    `shapes`. Raises CheckpointError for one that is missing, of another shape, or not finite."""
    stored = weights.find(folder, section)
    pairing = weights.SourceWeights(stored, {n: n for n in shapes if n in stored}, ())
    for name, shape in shapes.items():
        size = tuple(stored[name].shape) if name in stored else None
        if size != tuple(shape):
            raise CheckpointError(
                f"{name!r} {'is missing' if size is None else f'has shape {size}'}",
                where=str(folder),
                accepted=f"shape {tuple(shape)}, as its config.json says",
                fix="Save the model again with sentence-transformers.",
            )
    return [pairing.read(name).float().numpy() for name in shapes]
