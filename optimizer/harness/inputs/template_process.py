"""Render chat templates in a child process with limits on time and memory.

A template is a program from a checkpoint. Jinja's sandbox keeps it from reaching Python objects,
but not from using unlimited time: `10**(10**8)`, `x.translate(y)` or nested loops may run for
hours, some within a single call. So templates run in a child process, which the system ends at a
limit of processor time (setitimer) or address space (setrlimit) where it has these, and which is
killed at a limit of wall-clock time everywhere.

The child runs this file alone, so this file imports nothing else of the package. The child answers
one request after another. A message is its length in 8 bytes, little-endian, followed by JSON.

    request   {"template", "variables": {"messages": [...], "bos_token", ...}, "now": date | null}
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

TEMPLATE = 100_000  # maximum characters; long published templates have 20,000
SECONDS = 5.0  # processor time per rendering; a long conversation takes a tenth
WALL = 60.0  # wall-clock seconds per rendering
MEMORY = 512 << 20  # bytes beyond those of Python and Jinja
REPLY = 16 << 20  # maximum bytes of a reply; the longest accepted prompt has a megabyte


class NotJinja(Exception):
    """Raised for a chat template that cannot be compiled."""


class Rejected(Exception):
    """Raised where the chat template, or one of its expressions, rejects a conversation."""


class TooMuch(Exception):
    """Raised where rendering a chat template reached a limit of memory, time or text."""


ERRORS = {"not Jinja": NotJinja, "refused": Rejected, "too much": TooMuch}


class Renderer:
    """Renderer of chat templates to prompts, whose child process starts on first use, and again
    after it was ended.

    Thread-safe: one rendering at a time.
    seconds: maximum seconds of processor time per rendering.
    memory: maximum bytes of address space beyond those of Python and Jinja.
    wall: maximum wall-clock seconds per rendering.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY, wall: float = WALL) -> None:
        self.seconds, self.memory, self.wall = seconds, memory, wall
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, template: str, variables: Mapping[str, Any], now: str | None = None) -> str:
        """Render a chat template to the text of a prompt.

        variables: plain JSON data.
        now: ISO date that the template prints as today's; None: today.
        Raises NotJinja, Rejected or TooMuch; ValueError, TypeError or RecursionError for variables
        that are not plain data.
        """
        request = json.dumps({"template": template, "variables": variables, "now": now}).encode()
        with self._lock:
            reply = self._exchange(request)
        if "text" in reply:
            return str(reply["text"])
        raise ERRORS[reply["error"]](reply["message"])

    def close(self) -> None:
        """End the child process that renders chat templates; the next rendering starts a new
        one."""
        self._end()
        self._child = None

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """Send a chat to render to the child process, started if necessary, and return its reply.

        Raises TooMuch if the child reaches a limit; it is then ended.
        """
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
        except (OSError, ValueError):  # the child ended, or its reply is too long
            self.close()
            raise TooMuch(self._limits(child.returncode)) from None
        except BaseException:  # an interrupt: the late reply would answer the next request
            self.close()
            raise
        finally:
            timer.cancel()
        if reply.get("error") == "too much":  # the child may still hold the memory
            self.close()
            raise TooMuch(f"{reply['message']}; {self._limits(0)}")
        return reply

    def _limits(self, code: int) -> str:
        ended = f"; its process ended with code {code}" if code else ""
        return (
            f"a rendering may take {self.seconds:g} seconds of processor time, "
            f"{self.memory >> 20} MiB of memory and {REPLY >> 20} MiB of text{ended}"
        )

    def _start(self) -> None:
        # -P: keep the working directory off the path unless it is on ours
        """Start the child process that renders chat templates, which runs `answer_requests` of this
        file alone."""
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
    """Return this process's Renderer of chat templates: after a fork, two processes would share one
    child."""
    del pid
    return Renderer()


def renderer() -> Renderer:
    """Return the one renderer of chat templates of this process."""
    return _renderer_of(os.getpid())


def _end(child: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() == pid:
        child.kill()
        child.wait()
    else:  # in a fork, which is not the child's parent
        child.returncode = 0
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):  # unread data of a child that has ended
                stream.close()


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _read(stream: IO[bytes], most: int) -> bytes | None:
    """Read the next message between the renderer of chats and its parent; None at the end of the
    stream.

    most: maximum bytes; a longer message raises ValueError.
    """
    size = int.from_bytes(stream.read(8), "little")
    if size > most:
        raise ValueError(f"{size} bytes")
    return stream.read(size) or None


# Code of the child process


def answer_requests(seconds: float, memory: int) -> None:
    """Render the chat templates that arrive on standard input until it is closed.

    seconds: processor seconds that one template may take
    memory: bytes that this process may use
    """
    from jinja2 import ext, sandbox  # noqa: F401 - before the limits

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a server answers its last requests after Ctrl-C
    _limit_memory(memory)
    while message := _read(sys.stdin.buffer, sys.maxsize):
        _limit_seconds(seconds)
        _write(sys.stdout.buffer, _reply(message))
        _limit_seconds(0)


def _limit_memory(size: int) -> None:
    """Limit the growth of address space of this process, the renderer of chats, to `size` bytes."""
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # only Linux enforces the limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + size if hard == resource.RLIM_INFINITY else min(taken + size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_seconds(seconds: float) -> None:
    """Let the system end this process, the renderer of chats, after `seconds` of processor time; 0:
    no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _reply(message: bytes) -> bytes:
    """Render the chat template of one request in the child process; return the reply as JSON."""
    error = "not Jinja"
    try:
        from jinja2.exceptions import TemplateError

        request = json.loads(message)
        template = compile_template(request["template"])
        error = "refused"
        variables = request["variables"]
        if request["now"] is not None:
            variables["strftime_now"] = datetime.fromisoformat(request["now"]).strftime
        return json.dumps({"text": template.render(**variables)}).encode()
    except (MemoryError, RecursionError) as e:
        error, why = "too much", type(e).__name__
    except TemplateError as e:
        why = str(e)
    except Exception as e:  # a template is a program
        why = f"{type(e).__name__}: {e}"
    return json.dumps({"error": error, "message": why[:1000]}).encode()


@lru_cache(maxsize=8)
def compile_template(text: str) -> Any:
    """Compile a chat template. Raises jinja2's TemplateError if invalid or too long.

    The environment equals that of transformers (utils/chat_template_utils.py), so that published
    templates render alike: trimmed blocks, loop controls, a {% generation %} block that prints its
    body, tojson without HTML escapes, raise_exception and strftime_now. In addition `dict` and
    `namespace` are replaced, so that a template cannot reach Python objects through them.
    """
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    if len(text) > TEMPLATE:
        raise TemplateError(f"it has {len(text):,} characters; up to {TEMPLATE:,} are accepted")

    class GenerationBlock(Extension):
        """{% generation %}...{% endgeneration %}, which marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PlainNamespace(Namespace):
        """Namespace without underscored names, which reach Python objects."""

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
