"""Parse the address of a published bundle.

oci://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]     a registry, by the OCI distribution protocol
oci-layout:FOLDER[:TAG][@sha256:DIGEST]          a folder in the OCI image layout
file:///FOLDER[:TAG][@sha256:DIGEST]             the same, from the root of the file system
hf://OWNER/NAME[:TAG][@sha256:DIGEST]            a model repository on the Hugging Face Hub
s3://BUCKET/PREFIX[:TAG][@sha256:DIGEST]         a layout below a prefix of a bucket; gs:// likewise
az://CONTAINER/PREFIX[:TAG][@sha256:DIGEST]      the same, in the environment's storage account
mlflow:[URI#]NAME[:TAG][@sha256:DIGEST]          a registered model of the MLflow server at URI,
                                                 by default MLFLOW_TRACKING_URI
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.buckets.objects import BUCKET, PREFIX
from optimizer.foundation.errors import RecipeError
from optimizer.harness.shown import has_credentials

ACCEPTED = (
    "oci://HOST/NAME:TAG, oci-layout:FOLDER:TAG, file:///FOLDER:TAG, hf://OWNER/NAME:TAG, "
    "s3://BUCKET/PREFIX:TAG, gs://BUCKET/PREFIX:TAG, az://CONTAINER/PREFIX:TAG, mlflow:NAME:TAG or "
    "mlflow:http://HOST:PORT#NAME:TAG; each may end in @sha256:DIGEST"
)
CREDENTIALS = (
    "Set credentials with the tool of the place: `docker login HOST`, `hf auth login`, "
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
HUB = re.compile(f"(?P<store>hf)://(?P<name>{HUB_PART}/{HUB_PART}){TAG}{DIGEST}")
MODEL = r"(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]{0,199})"
SERVER = r"((?P<host>[a-z][a-z0-9+]*:[^#?@\s]+)#)?"
MLFLOW = re.compile(f"(?P<store>mlflow):{SERVER}{MODEL}{TAG}{DIGEST}")
LAYOUT = re.compile(f"(oci-layout:|file://(?=/))(?P<folder>.+?){TAG}{DIGEST}")
STORE = re.compile(f"(?P<store>s3|gs|az)://(?P<name>{BUCKET}{PREFIX}){TAG}{DIGEST}")
"""Names and tags follow the grammar of the OCI distribution specification."""


@dataclass(frozen=True)
class BundleAddress:
    """Address of a published bundle, parsed; "" or None stands for a missing part.

    host: HOST[:PORT] of a registry, or URI of an MLflow server.
    name: repository or model; BUCKET/PREFIX for s3, gs and az.
    folder: folder of a layout.
    store: hf, s3, gs, az or mlflow; "" for a registry or a layout.
    """

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
    """Return True for text that is written as a bundle's address, False for a path."""
    return "://" in text or text.startswith(("oci-layout:", "mlflow:"))


def parse(text: str) -> BundleAddress:
    """Parse an address. Raises RecipeError for invalid text, and for a user or a password in it."""
    refuse_credentials(text, "address", CREDENTIALS)
    for pattern in (REGISTRY, HUB, MLFLOW, LAYOUT, STORE):
        if match := pattern.fullmatch(text):
            parts: dict[str, Any] = match.groupdict(default="")
            folder = Path(parts.pop("folder")) if "folder" in parts else None
            return BundleAddress(**parts, folder=folder)
    if "?" in text or "@" in text.replace("@sha256:", ""):
        raise _report_credentials("address", CREDENTIALS)
    hint = "A name has lower-case letters only." if text.startswith("oci://") else ""
    raise RecipeError(f"{text!r:.200} is not an address", accepted=ACCEPTED, fix=hint)


def refuse_credentials(address: str, where: str, fix: str) -> None:
    """Raises RecipeError for a user or a password, which logs, reports and the shell would store.

    where: name of the option or field that holds the address.
    fix: advice on where to put credentials.
    """
    if has_credentials(address):
        raise _report_credentials(where, fix)


def _report_credentials(where: str, fix: str) -> RecipeError:
    """Build the error without the text, which may hold a password or a signed URL."""
    return RecipeError(
        "the address has a user, a password or a query",
        where=where,
        accepted=ACCEPTED if where == "address" else "SCHEME://HOST[:PORT]",
        fix=fix,
    )
