"""Run one function in several processes that exchange tensors.

torch starts the processes and ends them all when one fails; accelerate
(https://huggingface.co/docs/accelerate) gives each its device and connections. They find each other
through a file, and communicate over the loopback interface only. They end when the process that
started them ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from optimizer.foundation import errors
from optimizer.foundation.errors import MachineError, OptimizeError, RecipeError
from optimizer.foundation.process.torch_device import CPU
from optimizer.harness.process.child import end_by_signal

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessException

T = TypeVar("T")
LONGEST = timedelta(days=1)  # time for which one process waits for another
MEETING, FAILURE = "meeting", "failure.json"  # files of one launch in its folder


@dataclass(frozen=True)
class Processes:
    """This process among all that train or compress together. The first one writes files and prints
    progress.

    rank: number of this process, 0 to count - 1
    count: number of processes
    device: device that this process computes on
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """True for the first process, of rank 0, of those launched together."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Divide `items` among launched processes: return every count-th item, starting with number
        `rank`, so that each item is in one process's share."""
        return items[self.rank :: self.count]

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all launched processes."""
        if self.count == 1:
            return
        from accelerate.utils import reduce

        for tensor in tensors:
            tensor.copy_(reduce(tensor, reduction="sum"))

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over all launched processes."""
        together = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.add([together])
        return [float(number) for number in together]

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the first process's `numbers`, in all processes."""
        return self.sums(numbers if self.first else [0.0] * len(numbers))

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by that of the first of the launched processes."""
        if self.count == 1:
            return
        from accelerate.utils import broadcast

        for tensor in tensors:
            tensor.copy_(broadcast(tensor.detach().clone(), from_process=0))

    def copy(self, sums: object, rank: int) -> None:
        """Replace, in a launched process, the attributes of `sums` that are tensors or numbers by
        those of process `rank`. Tensors have the same shapes in all processes."""
        if self.count == 1:
            return
        from accelerate.utils import broadcast

        attributes = vars(sums)
        numbers = {n: v for n, v in attributes.items() if isinstance(v, int | float)}
        packed = torch.tensor([float(v) for v in numbers.values()], dtype=torch.float64)
        packed = broadcast(packed.to(self.device), from_process=rank)
        for (name, before), number in zip(numbers.items(), packed.tolist(), strict=True):
            attributes[name] = type(before)(number)
        for tensor in attributes.values():
            if isinstance(tensor, Tensor):
                tensor.copy_(broadcast(tensor.to(self.device).contiguous(), from_process=rank))

    def wait(self) -> None:
        """Wait until every process of the group has called this."""
        self.gather(None)

    def gather(self, thing: T) -> list[T]:
        """Return the `thing` of each launched process, ordered by rank, in all processes."""
        if self.count == 1:
            return [thing]
        from accelerate.utils import gather_object

        things: list[T] = gather_object([thing])
        return things


ALONE = Processes()


@dataclass(frozen=True)
class Group:
    """Settings of processes that are launched together, for training or compression.

    count: number of processes
    device: type of their devices, "cpu" or "cuda"
    where: place in the recipe of the number of processes
    fix: advice for the message where one is killed from outside
    """

    count: int
    device: str
    where: str
    fix: str


class EndedError(MachineError):
    """Raised where a process was ended from outside, for example for lack of memory."""


def launch(function: Callable[..., object], group: Group, folder: Path, *arguments: Any) -> None:
    """Run function(processes, *arguments) in the new processes of `group`, and wait.

    function: function of a module, so that each process can import it
    folder: folder for the files of the launch

    Raises the OptimizeError of the first process that failed, EndedError where one was killed, and
    torch's ProcessRaisedException, with the traceback, for any other exception. When one process
    ends, the others lose their connection and fail too, often before torch notices the first; the
    error raised is always the first one's.
    """
    from torch.multiprocessing.spawn import ProcessException, start_processes

    for name in (MEETING, FAILURE):
        (folder / name).unlink(missing_ok=True)
    threads = max(1, torch.get_num_threads() // group.count)
    what = _ProcessStart(function, arguments, group, threads, folder.resolve(), os.getpid())
    context = start_processes(
        _process,
        (what,),
        nprocs=group.count,
        join=False,
        daemon=True,  # none outlives an interrupt
        start_method="spawn",
    )
    try:
        while not context.join():
            pass
    except ProcessException as e:
        codes = [process.exitcode for process in context.processes]
        raise _error_of(folder / FAILURE, codes, e, group) from None
    finally:
        for name in (MEETING, FAILURE):
            (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _ProcessStart:
    """Function that each newly launched process runs.

    parent: id of the process that starts them
    """

    function: Callable[..., object]
    arguments: Sequence[Any]
    group: Group
    threads: int
    folder: Path
    parent: int


def _process(rank: int, what: _ProcessStart) -> None:
    """Run the function in one of the launched processes. A failure is recorded in the launch's
    folder before the process ends."""
    end_by_signal(what.parent)
    from accelerate import PartialState
    from accelerate.utils import patch_environment
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's own tutorials do

    torch.set_num_threads(what.threads)
    loopback = next((n for _, n in socket.if_nameindex() if n.startswith("lo")), "lo")
    environment = dict.fromkeys(("rank", "local_rank"), rank)
    environment |= dict.fromkeys(("world_size", "local_world_size"), what.group.count)
    environment["omp_num_threads"] = what.threads
    interfaces = dict.fromkeys(("gloo_socket_ifname", "nccl_socket_ifname"), loopback)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch_environment(**environment, **interfaces))
        if rank:  # the first process alone prints progress
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(silence))
        store = FileStore(str(what.folder / MEETING), what.group.count)
        state = PartialState(
            cpu=what.group.device == "cpu",
            store=store,
            rank=rank,
            world_size=what.group.count,
            **({"timeout": LONGEST} if what.group.device == "cpu" else {}),
        )
        try:
            what.function(Processes(rank, what.group.count, state.device), *what.arguments)
            state.wait_for_everyone()
        except OptimizeError as e:
            refusal = {"kind": type(e).__name__, "problem": e.problem, "where": e.where}
            _record(what.folder, {**refusal, "accepted": e.accepted, "fix": e.fix})
            sys.exit(e.exit_code)
        except Exception:
            _record(what.folder, {"rank": rank, "traceback": traceback.format_exc()})
            raise
        state.destroy_process_group()


def _record(folder: Path, failure: dict[str, Any]) -> None:
    """Write `failure`, the reason why this process ends, to failure.json, unless another process
    has written it: only the first failure has a cause of its own."""
    text = json.dumps(failure)
    with contextlib.suppress(FileExistsError), (folder / FAILURE).open("x", encoding="utf-8") as f:
        f.write(text)


def _error_of(
    file: Path, codes: Sequence[int | None], seen: ProcessException, group: Group
) -> Exception:
    """Choose the error to raise after processes have ended, from failure.json of _record (`file`),
    the exit status of each process, and the failure that torch noticed (`seen`).

    1. The first that failed raised an OptimizeError: the same error.
    2. One was killed and wrote nothing: EndedError. (torch ends the others with SIGTERM, and gloo
       aborts one whose peer is gone.)
    3. The first that failed raised something else: ProcessRaisedException with its traceback.
    4. None wrote anything: EndedError for the process that torch noticed.
    """
    from torch.multiprocessing.spawn import ProcessRaisedException

    first: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # no file, or killed while writing it
        first = json.loads(file.read_text(encoding="utf-8"))
    if "kind" in first:  # 1.
        kind: type[OptimizeError] = getattr(errors, first.pop("kind"), RecipeError)
        return kind(first.pop("problem"), **first)
    with_others = (-signal.SIGTERM, -signal.SIGABRT)
    killed = [n for n, c in enumerate(codes) if c and c < 0 and c not in with_others]
    if first and not killed:  # 3.
        message = f"\n\n-- Process {first['rank']}:\n{first['traceback']}"
        return ProcessRaisedException(message, first["rank"], seen.error_pid)
    index = killed[0] if killed else seen.error_index  # 2. and 4.
    return EndedError(
        f"process {index} of {len(codes)} was ended from outside (exit {codes[index]})",
        where=group.where,
        fix=group.fix,
    )
