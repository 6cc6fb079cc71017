"""Command `serve` of a bundle for vLLM: start vLLM, say when it is ready, and end with it."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import tasks
from ..bundle.manifest import MANIFEST, list_damaged_files, read_manifest
from ..errors import BundleError, InputError, MachineError
from ..runtimes import machine, vllm
from ..runtimes.table import VLLM

if TYPE_CHECKING:
    import argparse

TAKEN = (
    *("run", "bundle", "json", "runtime", "cache", "genai", "threads", "host", "port", "insecure"),
    *("require_signature", "signature", "at_least"),
)
"""Names of the options of `serve` that mean the same for vLLM, or nothing."""
ASK_EVERY, END = 0.2, 60.0  # seconds


def engine_of(bundle: Path | None, runtime: str | None) -> dict[str, Any] | None:
    """Return the manifest's entry of the engine that vLLM serves.

    None for a bundle without one, for another value of --runtime, and without --runtime for a
    bundle that the harness runs itself.

    bundle: folder or tar; None: the bundle that contains this file
    runtime: value of --runtime, or None
    """
    folder = bundle if bundle is not None else Path(__file__).parents[2]
    if runtime not in (None, VLLM) or not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    own = [e for e in manifest["engines"] if e["runtime"] == VLLM]
    alone = runtime == VLLM or not manifest["runnable"]
    return {**own[0], "bundle": manifest} if own and alone else None


def run(folder: Path, engine: Mapping[str, Any], args: argparse.Namespace, defaults: Any) -> int:
    """Run the command `serve` with vLLM until SIGTERM or SIGINT, or until vLLM ends; return the
    exit code.

    folder: folder of the bundle
    engine: result of `engine_of`
    args: options of `serve`
    defaults: options of `serve` where none is given

    Raises InputError for an option that vLLM does not take, BundleError for a damaged model, the
    errors of vllm.check, and MachineError if vLLM ends before it is ready.
    """
    from ..server.http.listening import refuse_exposed, resolve_addresses
    from .serve import say

    for name, value in sorted(vars(args).items()):
        if name in TAKEN or value == getattr(defaults, name):
            continue
        raise InputError(
            f"--{name.replace('_', '-')} was given, which vLLM's server does not have",
            where="serve",
            accepted="--host, --port, --insecure",
            fix="Put a proxy that asks for a token, or limits requests, in front of it.",
        )
    if not (all(a.loopback for a in resolve_addresses(args.host, args.port)) or args.insecure):
        raise refuse_exposed(args.host)
    fit, manifest = engine["fit"], engine["bundle"]
    if damaged := list_damaged_files(folder, manifest) & {*engine["model_files"]}:
        raise BundleError(f"damaged or missing: {', '.join(sorted(damaged))}", where=str(folder))
    packages, importable = machine.describe_machine().packages, find_spec("vllm") is not None
    vllm.check(fit, packages, machine.list_gpus(), importable=importable)
    port = args.port or free_port(args.host)
    model = (folder / engine["model"]).parent
    generates = tasks.find_task(manifest["contract"]["task"]).generates
    where = args.host, port
    words = vllm.build_command(fit, model, manifest["name"], where, generates=generates)
    say(level="info", event="starting", command=words)
    child = subprocess.Popen(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: child.terminate())
    try:
        wait_until_ready(child, f"http://{args.host}:{port}/health")
        say(level="info", event="listening", host=args.host, port=port)
        name, version = manifest["name"], manifest["version"]
        say(level="info", event="ready", model=name, version=version, serves=[name])
        code = child.wait()
    finally:
        end(child)
    say(level="info", event="ended")
    if code in (0, -signal.SIGTERM, -signal.SIGINT):
        return 0
    raise MachineError(f"vLLM ended with {code}", where="vllm", fix="Its log is above.")


def free_port(host: str) -> int:
    """Find a free port of the host, at which the command's vLLM server can listen."""
    from ..server.http.listening import open_sockets, resolve_addresses

    (first, *others) = open_sockets(resolve_addresses(host, 0))
    port = int(first.getsockname()[1])
    for each in (first, *others):
        each.close()
    return port


def wait_until_ready(child: subprocess.Popen[bytes], address: str) -> None:
    """Wait until vLLM's server answers at the address with status 200.

    Raises MachineError if the process ends before.
    """
    while True:
        if (code := child.poll()) is not None:
            raise MachineError(
                f"vLLM ended with {code} before it was ready", where="vllm", fix="Its log is above."
            )
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(ASK_EVERY)


def end(child: subprocess.Popen[bytes]) -> None:
    """End vLLM's server process and wait for it; kill it after END seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
