"""Names and passwords of registries, from where `docker login` keeps them, and from nowhere else.

config.json in docker's folder: {"auths": {HOST: {"auth": base64 of "user:password"}},
"credHelpers": {HOST: helper}, "credsStore": helper}; a helper is the program
docker-credential-<helper>, which is given the host and prints {"Username", "Secret"}. What is read
here is never printed.
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


def basic(folder: Path, host: str) -> str | None:
    """The value of a header "Authorization: Basic ..." for the host; None where none is kept.

    folder: docker's, usually ~/.docker. Raises MachineError for a config.json or a helper that
    does not work, naming the file and never what is in it.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(read(path))
        helper = (config.get("credHelpers") or {}).get(host) or config.get("credsStore")
        entry = (config.get("auths") or {}).get(host) or {}
        kept = entry.get("auth") or ""
        base64.b64decode(kept, validate=True)
    except (InputError, ValueError, AttributeError, TypeError, RecursionError, binascii.Error):
        raise MachineError(
            "docker's settings cannot be read", where=str(path), fix=f"docker login {host}"
        ) from None
    if kept:
        return f"Basic {kept}"
    return _from_helper(str(helper), host) if helper else None


def _from_helper(helper: str, host: str) -> str | None:
    if not re.fullmatch("[A-Za-z0-9_-]+", helper):
        raise MachineError("a credential helper of this name", where=f"{helper!r:.50}")
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
            "it does not answer", where=f"docker-credential-{helper}", fix=f"docker login {host}"
        ) from None
    if "Secret" not in answer:
        return None
    pair = f"{answer.get('Username', '')}:{answer['Secret']}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
