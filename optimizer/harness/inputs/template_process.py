"""The process in which chat templates are rendered, with limits of time and memory.

A template is a program that comes with a checkpoint. Jinja's sandbox keeps it from reaching into
Python; `10**(10**8)`, `x.translate(y)` and loops in loops it lets run, and one call of a text's
method can take hours without a turn of a loop in between. So templates run in a child process,
which the system ends when it reaches a limit of processor time (setitimer) or address space
(setrlimit), where the system has such limits, and of wall-clock time everywhere.

The child runs this file alone, so nothing else of the package is imported here. It answers one
request after the other. A message is its length in 8 bytes, little-endian, and then JSON.

    request   {"template", "variables": {"messages": [...], "bos_token", ...}}
    reply     {"text"} or {"error": "not Jinja" | "refused" | "too much", "message"}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

TEMPLATE = 100_000  # characters; a long published one has 20,000
SECONDS = 5.0  # of processor time for one rendering; a long conversation takes a tenth
WALL = 60.0  # seconds for one, where the processor is shared or its time is not limited
MEMORY = 512 << 20  # bytes beyond what Python and Jinja take
REPLY = 16 << 20  # bytes; the longest prompt that is accepted has a megabyte


class NotJinja(Exception):
    """Raised for a template that cannot be compiled."""


class Refused(Exception):
    """Raised by a template, or by one of its expressions, for this conversation."""


class TooMuch(Exception):
    """Raised for a rendering that reached a limit."""


ERRORS = {"not Jinja": NotJinja, "refused": Refused, "too much": TooMuch}


class Renderer:
    """A child that renders templates, started with the first one and again after it was ended.
    Threads take turns.

    seconds: processor time for one rendering, at most.
    memory: bytes of addresses beyond what Python and Jinja take, at most.
    wall: wall-clock seconds for one rendering, at most.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY, wall: float = WALL) -> None:
        self.seconds, self.memory, self.wall = seconds, memory, wall
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. variables: plain data, as JSON has it.

        Raises NotJinja, Refused, TooMuch; ValueError, TypeError or RecursionError for variables
        that are not plain data.
        """
        request = json.dumps({"template": template, "variables": variables}).encode()
        with self._lock:
            reply = self._exchange(request)
        if "text" in reply:
            return str(reply["text"])
        raise ERRORS[reply["error"]](reply["message"])

    def close(self) -> None:
        """End the child; the next rendering starts another."""
        self._end()
        self._child = None

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._start()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(self.wall, child.kill)
        timer.start()
        try:
            _write(child.stdin, request)
            reply: dict[str, Any] = json.loads(_read(child.stdout, REPLY) or b"")
        except (OSError, ValueError):  # it ended, or its text is endless
            self.close()
            raise TooMuch(self._limits(child.returncode)) from None
        except BaseException:  # an interrupt: the reply would be taken for the next one's
            self.close()
            raise
        finally:
            timer.cancel()
        if reply.get("error") == "too much":  # what it took may be in use still
            self.close()
            raise TooMuch(f"{reply['message']}; {self._limits(0)}")
        return reply

    def _limits(self, code: int) -> str:
        ended = f"; its process ended with code {code}" if code else ""
        return (
            f"laying a conversation out may take {self.seconds:g} seconds of processor time, "
            f"{self.memory >> 20} MiB and {REPLY >> 20} MiB of text{ended}"
        )

    def _start(self) -> None:
        # -P: the folder where we run is on the path if it is on ours, and not otherwise
        places = [os.path.abspath(place) for place in sys.path]
        code = (
            f"import sys; sys.path[:] = {places!r}\nimport runpy\n"
            f"runpy.run_path({str(Path(__file__).resolve())!r})['answer_requests']"
            f"({self.seconds!r}, {self.memory!r})"
        )
        pipe = subprocess.PIPE
        child = self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _end, child, os.getpid())


@lru_cache(maxsize=1)
def _renderer_of(pid: int) -> Renderer:
    """A process's own: after a fork, two would write into one child."""
    del pid
    return Renderer()


def renderer() -> Renderer:
    """This process's renderer."""
    return _renderer_of(os.getpid())


def _end(child: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() == pid:
        child.kill()
        child.wait()
    else:  # a fork of ours, whose child it is not
        child.returncode = 0
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):  # of what a child that has ended does not read
                stream.close()


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _read(stream: IO[bytes], most: int) -> bytes | None:
    """The next message; None at the stream's end. Raises ValueError where it is longer."""
    size = int.from_bytes(stream.read(8), "little")
    if size > most:
        raise ValueError(f"{size} bytes")
    return stream.read(size) or None


# The child's part


def answer_requests(seconds: float, memory: int) -> None:
    """Answer requests from standard input until it ends."""
    from jinja2 import ext, sandbox  # noqa: F401 - before memory is limited, and no time is counted

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a server that Ctrl-C ends answers to the last
    _limit_memory(memory)
    while message := _read(sys.stdin.buffer, sys.maxsize):
        _limit_seconds(seconds)
        _write(sys.stdout.buffer, _reply(message))
        _limit_seconds(0)


def _limit_memory(size: int) -> None:
    """Limit the addresses that this process takes from now on.

    size: bytes.
    """
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # elsewhere than on Linux the limit is not kept anyway
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + size if hard == resource.RLIM_INFINITY else min(taken + size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_seconds(seconds: float) -> None:
    """Have the system end this process after a processor time.

    seconds: 0 for no limit.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _reply(message: bytes) -> bytes:
    error = "not Jinja"
    try:
        from jinja2.exceptions import TemplateError

        request = json.loads(message)
        template = compiled(request["template"])
        error = "refused"
        return json.dumps({"text": template.render(**request["variables"])}).encode()
    except (MemoryError, RecursionError) as e:
        error, why = "too much", type(e).__name__
    except TemplateError as e:
        why = str(e)
    except Exception as e:  # a template is a program
        why = f"{type(e).__name__}: {e}"
    return json.dumps({"error": error, "message": why[:1000]}).encode()


@lru_cache(maxsize=8)
def compiled(text: str) -> Any:
    """The template. Raises jinja2's TemplateError for what is not Jinja, or has more than TEMPLATE
    characters.

    The environment is that of transformers (utils/chat_template_utils.py), without which published
    templates do not render alike: blocks trimmed, loop controls, a {% generation %} block that
    prints its body, tojson without HTML escapes, raise_exception, strftime_now; and a dict and a
    namespace through which a template cannot reach into Python.
    """
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    if len(text) > TEMPLATE:
        raise TemplateError(f"it has {len(text):,} characters; {TEMPLATE:,} at most are read")

    class GenerationBlock(Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's words for training."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PlainNamespace(Namespace):
        """Without underscored names, which reach into Python."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *pairs = args
            Namespace.__init__(self)
            for name, value in dict(*pairs, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a template cannot set {name!r} of a namespace")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = lambda *pairs, **values: dict(*pairs, **values)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
