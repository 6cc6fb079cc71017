"""A stand-in for a GPU: tensors that say they lie on a device and compute on the CPU.

It refuses an operation on tensors of two devices, as CUDA does. Unlike those of torch's
FakeTensorMode its tensors have values, so that code that branches on values runs, and results can
be compared with the CPU's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class _Module:
    """The device's functions in torch's namespace."""

    def is_available(self) -> bool:
        return False

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def has_primary_context(self, _device: int) -> bool:
        return False

    def is_built(self) -> bool:
        return True


_setup_privateuseone_for_python_backend("standin", _Module(), _Hook())
GPU = torch.device("standin", 0)
aten = torch.ops.aten
_MAY_MIX = {aten.copy_.default, aten._to_copy.default}


class OnGpu(Tensor):
    """A tensor on the stand-in. inner: its values, on the CPU"""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _StandIn(TorchDispatchMode):
    """Creates the tensors of factories with a device on the stand-in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    there: list[OnGpu] = []
    here: list[Tensor] = []
    target = kwargs.get("device")
    inner_args = [_inner(value, there, here) for value in args]
    inner_kwargs = {name: _inner(value, there, here) for name, value in kwargs.items()}
    if there and here and func not in _MAY_MIX:
        shapes = [tuple(t.shape) for t in (*there, *here)]
        raise RuntimeError(f"{func}: tensors on {GPU} and on the CPU, of shapes {shapes}")
    made_there = target is not None and torch.device(target).type == GPU.type
    if made_there:
        inner_kwargs["device"] = torch.device("cpu")
    with no_dispatch():
        out = func(*inner_args, **inner_kwargs)
    on_gpu = made_there if target is not None else bool(there)
    if func is aten.copy_.default:
        on_gpu = isinstance(args[0], OnGpu)
    if not on_gpu or func is aten._local_scalar_dense.default:
        return out
    owners = {id(t.inner): t for t in there}
    if isinstance(out, list | tuple):
        return type(out)(_wrapped(one, owners) for one in out)
    return _wrapped(out, owners)


def _inner(value: Any, there: list[OnGpu], here: list[Tensor]) -> Any:
    """The value with the CPU's tensors in place of the stand-in's.

    there: list to which the stand-in's tensors are added
    here: list to which other tensors with a dimension are added
    """
    if isinstance(value, OnGpu):
        there.append(value)
        return value.inner
    if isinstance(value, Tensor):
        if value.ndim and not value.is_meta:
            here.append(value)
        return value
    if isinstance(value, list | tuple):
        return type(value)(_inner(one, there, here) for one in value)
    return value


def _wrapped(value: Any, owners: dict[int, OnGpu]) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, OnGpu):
        return value
    return owners[id(value)] if id(value) in owners else OnGpu(value)


@contextmanager
def stand_in() -> Iterator[torch.device]:
    """Inside, torch can create tensors on the stand-in. Gives its device."""
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor copies to the device through the mode
    try:
        with _StandIn():
            yield GPU
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
