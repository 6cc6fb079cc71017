"""Suppress the progress bars, advice and warnings that libraries write to stderr."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Inside, suppress log records up to `level`, warnings, and text written to sys.stderr.
    Exceptions are raised as usual."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
