"""Run the Python code that a checkpoint brings: its attempts to end this program become
CheckpointError."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from optimizer.foundation.errors import CheckpointError

COPIES = "transformers_modules"  # the package under which transformers imports such code


@contextmanager
def contain(folder: Path) -> Iterator[None]:
    """Raise CheckpointError, naming the file, where code of `folder` raises SystemExit or
    KeyboardInterrupt; the user's Ctrl-C still interrupts."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    main = threading.current_thread() is threading.main_thread()
    replaced = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit) as e:
        file = find_source_file(e)
        if interrupts or (file is None and not isinstance(e, SystemExit)):
            raise
        raise CheckpointError(
            f"its code tried to end the program ({type(e).__name__}{f': {e}' if str(e) else ''})",
            where=str(folder / (file or "")),
            fix="Read that code before you trust it, and remove this.",
        ) from e
    finally:
        if replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def find_source_file(e: BaseException) -> str | None:
    """Return the name of the file of a checkpoint's own code that raised `e`; None if other code
    raised it."""
    names = [Path(frame.f_code.co_filename) for frame, _ in walk_tb(e.__traceback__)]
    own = [name.name for name in names if COPIES in name.parts]
    return own[-1] if own else None
