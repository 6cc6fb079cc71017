"""Apply rotation to a decoder: assign each parameter its role, and view the checkpoint rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from optimizer.compress.methods.activations.hadamard import make_orthogonal
from optimizer.compress.methods.activations.rotation import Role, Rotated
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.sections.method_options import RotationOptions
from optimizer.recipe.compression.quantize import Quantize


class RotatedTensors(Rotated):
    """Rotated view of a checkpoint that also reads single rows of the embedding."""

    def __init__(
        self,
        tensors: Any,
        roles: Mapping[str, Role],
        residual: Tensor | None,
        head: Tensor | None,
    ) -> None:
        super().__init__(tensors, roles, residual, head)
        self._source, self._roles_of = tensors, roles

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rotated rows `ids` of the embedding or head `name`: a rotation acts on each row alone."""
        role = self._roles_of.get(name, Role())
        return self._rotate(self._source.rows(role.source or name, ids), role)


class ChangedTensors(Mapping[str, Tensor]):
    """The parameters that a transform of the model changes, each computed from the checkpoint's
    when it is read.

    tensors: all parameters of the transformed model
    names: those that differ from the checkpoint's
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def rotate(source: ModelSource, quantize: Quantize) -> ModelSource:
    """The source with a rotated view of its tensors; `replaced` has the changed tensors. Raises
    RecipeError for an architecture whose function a rotation would change."""
    options, family = quantize.rotation, source.family
    norms = {p.producer: p.consumers for p in family.smooth if p.producer not in family.linears}
    _check(source, norms, options)
    config = source.model.config
    width = int(config.hidden_size)  # type: ignore[union-attr, arg-type]
    residual = make_orthogonal(width, options.seed) if options.residual else None
    size = int(getattr(config, "head_dim", None) or width // config.num_attention_heads)  # type: ignore[union-attr, operator]
    head = make_orthogonal(size, options.seed + 1) if options.values else None
    roles = _residual_roles(source, norms) if options.residual else {}
    for block in source.blocks:
        roles = _block_roles(source, block, options, roles)
    tensors = RotatedTensors(source.tensors, roles, residual, head)
    changed = ChangedTensors(tensors, [n for n in tensors if n in roles])
    return replace(source, tensors=tensors, replaced=changed)


def _residual_roles(source: ModelSource, norms: Mapping[str, tuple[str, ...]]) -> dict[str, Role]:
    """Return {parameter: role in a rotation} of embedding, head, linears that read the residual
    stream, and norms."""
    embedding, last = f"{source.embedding}.weight", f"{source.final_norm}.weight"
    head = f"{source.family.head}.weight"
    tied = head not in dict(source.model.named_parameters())
    roles = {
        embedding: Role(reads=True),
        last: Role(ones=True),
        head: Role(reads=True, gain=last, source=embedding if tied else ""),
    }
    for block in source.blocks:
        for norm, readers in norms.items():
            gain = f"{block}.{norm}.weight"
            roles[gain] = Role(ones=True)
            roles |= {f"{block}.{r}.weight": Role(reads=True, gain=gain) for r in readers}
    return roles


def _block_roles(
    source: ModelSource, block: str, options: RotationOptions, roles: dict[str, Role]
) -> dict[str, Role]:
    """Return `roles` in a rotation with the block's writers of the residual stream, value and
    output linears added."""
    family = source.family
    for linear in dict.fromkeys((*family.writes, family.value, family.output)):
        module = source.model.get_submodule(f"{block}.{linear}")
        for name, _ in module.named_parameters(prefix=f"{block}.{linear}"):
            role = replace(
                roles.get(name, Role()),
                writes=options.residual and linear in family.writes,
                heads_in=options.values and linear == family.output and name.endswith("weight"),
                heads_out=options.values and linear == family.value,
            )
            if role != Role():
                roles = {**roles, name: role}
    return roles


def _check(
    source: ModelSource, norms: Mapping[str, tuple[str, ...]], options: RotationOptions
) -> None:
    where, family = "quantize.rotation", source.family
    if family.kind != "decoder":
        raise RecipeError(
            "a rotation of the residual is taken back by a head over the vocabulary, and the model "
            "of this task has none",
            where=where,
            accepted="causal language models under task text-generation",
            fix="Remove rotation from quantize.methods.",
        )
    if not family.value or not family.smooth:
        raise RecipeError(
            f"model/architectures/families.py does not list the values and norms of "
            f"{family.model_type}",
            where=where,
            fix="Remove rotation from quantize.methods, or add these to the table.",
        )
    places = [source.final_norm, *(f"{source.blocks[0]}.{n}" for n in norms)]
    centring = [p for p in places if isinstance(source.model.get_submodule(p), nn.LayerNorm)]
    if options.residual and centring:
        raise RecipeError(
            f"{centring[0]} is a LayerNorm: it subtracts a mean, which a rotation changes",
            where=f"{where}.residual",
            accepted="architectures with RMSNorm",
            fix="Set rotation: {residual: false}, which rotates the values only.",
        )
