"""Read the credentials of registries that `docker login` stored; they are never printed.

config.json in docker's folder: {"auths": {HOST: {"auth": base64 of "user:password"}},
"credHelpers": {HOST: helper}, "credsStore": helper}. A helper is a program
docker-credential-<helper>, which reads the host and prints {"Username", "Secret"}.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import InputError
from optimizer.harness.trust.plain_file import read

HELPER_SECONDS = 30


def read_basic(folder: Path, host: str) -> str | None:
    """Return "Basic ...", the value of the header Authorization for a registry's host; None if not
    stored.

    folder: docker's folder, usually ~/.docker.

    Raises MachineError for an unreadable config.json or a failing helper, without its content.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(read(path))
        helper = (config.get("credHelpers") or {}).get(host) or config.get("credsStore")
        entry = (config.get("auths") or {}).get(host) or {}
        stored = entry.get("auth") or ""
        base64.b64decode(stored, validate=True)
    except (InputError, ValueError, AttributeError, TypeError, RecursionError, binascii.Error):
        raise MachineError(
            "docker's settings cannot be read", where=str(path), fix=f"docker login {host}"
        ) from None
    if stored:
        return f"Basic {stored}"
    return _from_helper(str(helper), host) if helper else None


def _from_helper(helper: str, host: str) -> str | None:
    """Return "Basic ..." from docker's credential helper; None if it has none for the host.

    Raises MachineError if the helper fails.
    """
    if not re.fullmatch("[A-Za-z0-9_-]+", helper):
        raise MachineError(
            "not valid as the name of docker's credential helper", where=f"{helper!r:.50}"
        )
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=host.encode(),
            capture_output=True,
            timeout=HELPER_SECONDS,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise MachineError(
            "the helper fails", where=f"docker-credential-{helper}", fix=f"docker login {host}"
        ) from None
    if "Secret" not in answer:
        return None
    pair = f"{answer.get('Username', '')}:{answer['Secret']}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
