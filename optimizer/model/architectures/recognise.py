"""Derive the facts of an architecture without a row in families.FAMILIES from its skeleton.

Nothing is guessed: a fact that cannot be derived is an error. The result has no smooth pairs,
because a list of modules does not show how they are connected.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.tasks import text_generation
from optimizer.harness.tasks.embeddings import feature_extraction
from optimizer.model.architectures.families import FAMILIES, is_causal
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint import own_code
from optimizer.model.checkpoint.model import STORED_TRANSPOSED, build_skeleton_from_config

OUTSIDE = 3  # maximum linear layers outside the blocks: projections of the embedding
GENERIC_FIX = "Add a row for this model_type to optimizer/model/architectures/families.py."


def recognise(model_type: str, config: Any, code: Path | None = None) -> Family:
    """Derive the facts of an architecture from its skeleton: the model with a head if transformers
    has a causal language model of it, else the base model. Raises CheckpointError where a fact is
    missing.

    config, code: as in architecture.find_family
    """
    from transformers import AutoConfig

    is_trusted = code is not None and any(code.glob("*.py"))
    if isinstance(config, Mapping) and is_trusted:
        config = AutoConfig.from_pretrained(code, trust_remote_code=True)
    elif isinstance(config, Mapping):
        fields = {k: v for k, v in config.items() if k != "model_type"}
        try:
            config = AutoConfig.for_model(model_type, **fields)
        except ValueError as e:
            raise CheckpointError(
                f"transformers has no architecture {model_type!r}",
                where="config.json: model_type",
                accepted=f"one of {', '.join(sorted(FAMILIES))}, or another text model of "
                "transformers with one list of equal blocks",
            ) from e
    if is_causal(config):
        return _recognise_decoder(
            model_type, build_skeleton_from_config(config, text_generation.TASK.name)
        )
    has_own_code = type(config).__module__.startswith(own_code.COPIES)
    if has_own_code and "AutoModel" not in (getattr(config, "auto_map", None) or {}):
        raise CheckpointError(
            f"the checkpoint's code for {model_type!r} has no model without a head",
            where=f"{code or ''}/config.json: auto_map",
            accepted="AutoModel, besides the class of the task",
            fix='Add it, e.g. "AutoModel": "modeling.MyModel".',
        )
    model: Any = build_skeleton_from_config(config, feature_extraction.TASK.name, is_trusted)
    blocks = block_list(model, model_type)
    embeddings = next(
        (
            path.split(".")[0]
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding)
        ),
        "",
    )
    first = model.get_submodule(blocks)[0]
    return Family(
        model_type=model_type,
        base=str(model.base_model_prefix),
        blocks=blocks,
        embeddings=embeddings,
        linears=list_linears(first),
        smooth=(),
        positions_after_padding=any(
            isinstance(m, nn.Embedding) and "position" in path and m.padding_idx is not None
            for path, m in model.named_modules()
        ),
    )


def _recognise_decoder(model_type: str, model: Any) -> Family:
    """Derive the facts of a decoder from its skeleton with a head over the vocabulary. Raises
    CheckpointError where the base model, the embedding, the head or the blocks cannot be
    identified."""
    base = str(model.base_model_prefix)
    body: Any = getattr(model, base, None)
    if body is None:
        raise _uncovered(model_type, f"it has no base model named {base!r}")
    blocks = block_list(body, model_type)
    paths = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = paths.get(id(embedding), "").removeprefix(f"{base}.")
    if not isinstance(embedding, nn.Embedding) or not embeddings:
        raise _uncovered(model_type, "it has no embedding of tokens")
    if not isinstance(head, nn.Linear) or id(head) not in paths:
        raise _uncovered(model_type, "it has no linear head over the vocabulary")
    linears = _linears_of_all(body.get_submodule(blocks), model_type)
    parent = blocks.rpartition(".")[0]
    siblings = dict(body.get_submodule(parent).named_children())
    norms = [n for n, m in siblings.items() if [p.ndim for p in m.parameters()][:1] == [1]]
    return Family(
        model_type=model_type,
        base=base,
        blocks=blocks,
        embeddings=embeddings,
        linears=linears,
        smooth=(),
        kind="decoder",
        head=paths[id(head)],
        final_norm=f"{parent}.{norms[-1]}".lstrip(".") if norms else "",
        position_ids="position_ids" in inspect.signature(model.forward).parameters,
    )


def _linears_of_all(blocks: Any, model_type: str) -> tuple[str, ...]:
    """Return the names of the linear layers of a block. Raises CheckpointError where blocks have
    different linear layers, or weights with two or more axes outside them."""
    linears = list_linears(blocks[0])
    covered = {f"{name}.weight" for name in linears}
    for block in blocks:
        other = [n for n, p in block.named_parameters() if p.ndim >= 2 and n not in covered]
        if other:
            what = f"its blocks have weights outside linear layers: {', '.join(other)}"
            raise _uncovered(model_type, what)
        if list_linears(block) != linears:
            raise _uncovered(model_type, "its blocks do not all have the same linear layers")
        if any(hasattr(m, STORED_TRANSPOSED) for m in block.modules()):
            raise _uncovered(model_type, "its files store linear weights as (in, out)")
    return linears


def _uncovered(model_type: str, missing: str) -> CheckpointError:
    return CheckpointError(
        f"architecture {model_type!r} is not covered: {missing}",
        where="config.json: model_type",
        accepted=", ".join(sorted(FAMILIES)),
        fix=GENERIC_FIX,
    )


def list_linears(block: nn.Module) -> tuple[str, ...]:
    """Return the names of a block's linear layers, in the order of their construction, as facts of
    an architecture."""
    return tuple(path for path, m in block.named_modules() if isinstance(m, nn.Linear))


def block_list(model: nn.Module, model_type: str) -> str:
    """Find in an architecture's skeleton the name of the ModuleList that holds the blocks: the
    outermost one whose items have one class and which contains all but OUTSIDE of the model's
    linear layers. Raises CheckpointError if the model has no such list."""
    total = len(list_linears(model))
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        outside = total - len(list_linears(module))
        if len({type(m) for m in module}) == 1 and 0 <= outside <= OUTSIDE < total:
            lists.append(path)
    if not lists:
        raise _uncovered(
            model_type,
            f"it has no list of equal blocks with all but {OUTSIDE} of its linear layers",
        )
    return lists[0]  # the outermost: named_modules walks from the root
