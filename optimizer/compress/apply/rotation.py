"""Which parameter of a decoder plays which part in a rotation, and the checkpoint seen rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from optimizer.compress.methods.hadamard import orthogonal
from optimizer.compress.methods.rotation import Role, Rotated
from optimizer.errors import RecipeError
from optimizer.load.checkpoint import Tensors
from optimizer.load.families import Family
from optimizer.recipe.quantize import Rotation


class RotatedTensors(Rotated):
    """Rotated, with the embedding's rows one by one."""

    def __init__(
        self,
        tensors: Tensors,
        roles: Mapping[str, Role],
        residual: Tensor | None,
        head: Tensor | None,
    ) -> None:
        super().__init__(tensors, roles, residual, head)
        self._rows_of, self._part = tensors, roles

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows `ids` of an embedding; rows do not mix when it is rotated."""
        return self._rotated(self._rows_of.rows(name, ids), self._part.get(name, Role()))

    @property
    def replaced(self) -> Mapping[str, Tensor]:
        """The parameters that are other than the checkpoint's, each made when it is asked for."""
        return _Changed(self, [n for n in self if n in self._part])


class _Changed(Mapping[str, Tensor]):
    def __init__(self, whole: RotatedTensors, names: list[str]) -> None:
        self._whole, self._names = whole, names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def rotated(
    tensors: Tensors,
    model: nn.Module,
    facts: Family,
    prefix: str,
    blocks: tuple[str, ...],
    asked: Rotation,
) -> RotatedTensors:
    """model: a skeleton; prefix: of the base model's names.

    Raises RecipeError for an architecture whose function a rotation would change.
    """
    norms = {p.producer: p.consumers for p in facts.smooth if p.producer not in facts.linears}
    _check(model, facts, norms, prefix, blocks, asked)
    config = model.config
    width = int(config.hidden_size)  # type: ignore[union-attr, arg-type]
    residual = orthogonal(width, asked.seed) if asked.residual else None
    size = int(getattr(config, "head_dim", None) or width // config.num_attention_heads)  # type: ignore[union-attr, operator]
    head = orthogonal(size, asked.seed + 1) if asked.values else None
    roles = _roles(model, facts, norms, prefix, blocks, asked)
    return RotatedTensors(tensors, roles, residual, head)


def _roles(
    model: nn.Module,
    facts: Family,
    norms: Mapping[str, tuple[str, ...]],
    prefix: str,
    blocks: tuple[str, ...],
    asked: Rotation,
) -> dict[str, Role]:
    embedding, last = f"{prefix}{facts.embeddings}.weight", f"{prefix}{facts.final_norm}.weight"
    found: dict[str, Role] = {}
    if asked.residual:
        found[embedding] = Role(reads=True)
        found[last] = Role(ones=True)
        head = f"{facts.head}.weight"
        tied = head not in dict(model.named_parameters())
        found[head] = Role(reads=True, gain=last, source=embedding if tied else "")
    for block in blocks:
        for norm, readers in norms.items() if asked.residual else ():
            gain = f"{block}.{norm}.weight"
            found[gain] = Role(ones=True)
            found |= {f"{block}.{r}.weight": Role(reads=True, gain=gain) for r in readers}
        for linear in dict.fromkeys((*facts.writes, facts.value, facts.output)):
            for name, _ in model.get_submodule(f"{block}.{linear}").named_parameters(
                prefix=f"{block}.{linear}"
            ):
                before = found.get(name, Role())
                made = Role(
                    reads=before.reads,
                    gain=before.gain,
                    writes=asked.residual and linear in facts.writes,
                    heads_in=asked.values and linear == facts.output and name.endswith("weight"),
                    heads_out=asked.values and linear == facts.value,
                )
                if made != Role():
                    found[name] = made
    return found


def _check(
    model: nn.Module,
    facts: Family,
    norms: Mapping[str, tuple[str, ...]],
    prefix: str,
    blocks: tuple[str, ...],
    asked: Rotation,
) -> None:
    where = "quantize.rotation"
    if not facts.value or not facts.smooth or facts.kind != "decoder":
        raise RecipeError(
            f"load/families.py does not say where {facts.model_type} has its values and norms",
            where=where,
            fix="Remove rotation from quantize.methods, or add these facts.",
        )
    places = [f"{prefix}{facts.final_norm}", *(f"{blocks[0]}.{n}" for n in norms)]
    centring = [p for p in places if isinstance(model.get_submodule(p), nn.LayerNorm)]
    if asked.residual and centring:
        raise RecipeError(
            f"{centring[0]} is a LayerNorm: it subtracts a mean, which a rotation moves",
            where=f"{where}.residual",
            accepted="architectures with RMSNorm",
            fix="Set rotation: {residual: false}, which rotates the values only.",
        )
