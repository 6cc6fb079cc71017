"""Parse the address of a published bundle.

oci://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]     a registry, by the OCI distribution protocol
oci-layout:FOLDER[:TAG][@sha256:DIGEST]          a folder as the OCI image layout has it
file:///FOLDER[:TAG][@sha256:DIGEST]             the same, from the root of the file system
hf://OWNER/NAME[:TAG][@sha256:DIGEST]            a model repository on the Hugging Face Hub
s3://BUCKET/PREFIX[:TAG][@sha256:DIGEST]         a layout below a prefix of a bucket; gs:// likewise
az://CONTAINER/PREFIX[:TAG][@sha256:DIGEST]      the same, in the environment's storage account
mlflow:[URI#]NAME[:TAG][@sha256:DIGEST]          a registered model of the MLflow server at URI, or
                                                 of the one that MLFLOW_TRACKING_URI names
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation.errors import RecipeError
from optimizer.harness.shown import has_credentials

ACCEPTED = (
    "oci://HOST/NAME:TAG, oci-layout:FOLDER:TAG, file:///FOLDER:TAG, hf://OWNER/NAME:TAG, "
    "s3://BUCKET/PREFIX:TAG, gs://BUCKET/PREFIX:TAG, az://CONTAINER/PREFIX:TAG, mlflow:NAME:TAG or "
    "mlflow:http://HOST:PORT#NAME:TAG; each may end in "
    "@sha256:DIGEST"
)
CREDENTIALS = (
    "Credentials come from where their own tools keep them: `docker login HOST`, `hf auth login`, "
    "`aws configure` or AWS_PROFILE, `gcloud auth application-default login`, "
    "AZURE_STORAGE_ACCOUNT_KEY or `az login`, MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD."
)
HOST = r"(?P<host>[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9a-fA-F:]+\](:[0-9]{1,5})?)"
NAME = r"(?P<name>[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)"
TAG = r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
DIGEST = r"(@(?P<digest>sha256:[0-9a-f]{64}))?"
REGISTRY = re.compile(f"oci://{HOST}/{NAME}{TAG}{DIGEST}")
HUB_PART = "[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
HUB = re.compile(f"hf://(?P<name>{HUB_PART}/{HUB_PART}){TAG}{DIGEST}")
MODEL = r"(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]{0,199})"
MLFLOW = re.compile(rf"mlflow:((?P<uri>[a-z][a-z0-9+]*:[^#?@\s]+)#)?{MODEL}{TAG}{DIGEST}")
LAYOUT = re.compile(f"(oci-layout:|file://(?=/))(?P<folder>.+?){TAG}{DIGEST}")
BUCKET = "[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
PREFIX = "(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
STORE = re.compile(f"(?P<store>s3|gs|az)://(?P<name>{BUCKET}{PREFIX}){TAG}{DIGEST}")
"""The grammar of names and tags is the distribution specification's; that of prefixes has what
needs no escape in any store."""


@dataclass(frozen=True)
class Address:
    """host and name of a registry; or the folder of a layout; or the store (hf, s3, gs, az, mlflow)
    and the name in it, which of s3, gs and az begins with the bucket; host is then the address of
    MLflow's server or "". The tag or "", the digest or ""."""

    tag: str
    digest: str
    host: str = ""
    name: str = ""
    folder: Path | None = None
    store: str = ""

    def __str__(self) -> str:
        place = f"oci-layout:{self.folder}" if self.folder else f"oci://{self.host}/{self.name}"
        if self.store:
            server = f"{self.host}#" if self.host else ""
            place = f"{self.store}:{server if self.store == 'mlflow' else '//'}{self.name}"
        tag = f":{self.tag}" if self.tag else ""
        return f"{place}{tag}" + (f"@{self.digest}" if self.digest else "")


def is_address(text: str) -> bool:
    """Return True for text that is meant as an address and not as a path."""
    return "://" in text or text.startswith(("oci-layout:", "mlflow:"))


def parse(text: str) -> Address:
    """Raises RecipeError for what is not an address, and for one with a user or a password."""
    refuse_credentials(text, "address", CREDENTIALS)
    if match := REGISTRY.fullmatch(text):
        return Address(
            match["tag"] or "", match["digest"] or "", host=match["host"], name=match["name"]
        )
    if match := HUB.fullmatch(text):
        return Address(match["tag"] or "", match["digest"] or "", name=match["name"], store="hf")
    if match := MLFLOW.fullmatch(text):
        return Address(
            match["tag"] or "",
            match["digest"] or "",
            host=match["uri"] or "",
            name=match["name"],
            store="mlflow",
        )
    if match := LAYOUT.fullmatch(text):
        return Address(match["tag"] or "", match["digest"] or "", folder=Path(match["folder"]))
    if match := STORE.fullmatch(text):
        return Address(
            *(match["tag"] or "", match["digest"] or ""), name=match["name"], store=match["store"]
        )
    if "?" in text or "@" in text.replace("@sha256:", ""):
        raise _with_credentials("address", CREDENTIALS)
    hint = "A name is written in small letters." if text.startswith("oci://") else ""
    raise RecipeError(f"{text!r:.200} is not an address", accepted=ACCEPTED, fix=hint)


def refuse_credentials(address: str, where: str, fix: str) -> None:
    """Raises RecipeError for an address with a user or a password: it would stand in logs, reports
    and the shell's history. where: what the address was given as; fix: where credentials belong."""
    if has_credentials(address):
        raise _with_credentials(where, fix)


def _with_credentials(where: str, fix: str) -> RecipeError:
    """Without the text, which may hold a password or a signed URL."""
    return RecipeError(
        "an address holds no user, no password and no query",
        where=where,
        accepted=ACCEPTED if where == "address" else "SCHEME://HOST[:PORT]",
        fix=fix,
    )
