"""Publish to a registered model of an MLflow server.

    version     a model version, numbered by MLflow, with the tags optimize.version (the bundle's
                version, its name here) and optimize.digest. Its run holds the report's numbers as
                metrics, the recipe as parameters, report.html, the model (mlflow_model.py) and,
                under attestations/, the attachments
    environment an alias; the model's tag optimize.history.<alias> lists the digests it has named

A version is made after its files are sent, and tagged last: a killed run leaves no version that can
be pulled, and the next one resumes it. MLflow has no conditional write. An alias is compared before
it is set and read again afterwards; if two writers set it at once the last one wins, perhaps
unnoticed by the other. MLflow reads servers and credentials itself (MLFLOW_TRACKING_URI, ...).
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.foundation.progress import bar
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.hubs.folders import BundleFolder
from optimizer.publish.hubs.mlflow_model import (
    BUNDLE,
    build_model_files,
    collect_metrics,
    flatten_recipe,
)

MODEL = "model"
ATTESTATIONS = "attestations"
VERSION, DIGEST, HISTORY = "optimize.version", "optimize.digest", "optimize.history."
RESERVED = re.compile(r"latest|[vV][0-9]+")
"""Aliases that MLflow reserves."""
PASSWORD = re.compile(r"//[^/@\s]+@")
"""User and password in an address, which are removed from messages."""
HISTORY_LENGTH = 60  # digests; fits the shortest limit of a tag on MLflow servers, 5,000 characters
BATCH = 100  # parameters or metrics per request
PAGE = 100


class RegisteredModel:
    """FolderRegistry in a registered model of MLflow; uri: URI of the server, None for MLflow's own
    setting."""

    def __init__(self, name: str, uri: str | None = None) -> None:
        import mlflow

        if uri is None and not mlflow.tracking.is_tracking_uri_set():
            raise RecipeError(
                "no MLflow server is set",
                where=f"mlflow:{name}",
                fix=f"Set MLFLOW_TRACKING_URI, or write mlflow:http://HOST:PORT#{name}.",
            )
        self.name = name
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        self.where = f"mlflow:{uri}#{name}" if uri else f"mlflow:{name}"
        self.mlflow_version = str(mlflow.__version__)
        self._runs: dict[str, str] = {}  # {version: id of its run}
        self._roots: dict[str, str] = {}  # {id of a run: address of its artifacts}

    def versions(self) -> dict[str, str]:
        return {v.tags[VERSION]: str(v.version) for v in self._versions() if VERSION in v.tags}

    def environments(self) -> dict[str, str]:
        model = self._model()
        return {} if model is None else {n: str(v) for n, v in model.aliases.items()}

    def read(self, revision: str, name: str) -> bytes | None:
        run = self._run_of(revision)
        return None if run is None else self._read(run, f"{MODEL}/{BUNDLE}/{name}")

    def receive(self, revision: str, name: str, size: int, into: Path) -> None:
        """Fetch a published bundle's file completely: MLflow servers have no range requests."""
        run = self._run_of(revision)
        if run is None:
            raise BundleError(f"version {revision} is not a bundle", where=self.where)
        with (
            TemporaryDirectory(dir=into.parent, prefix=".mlflow-") as folder,
            self._explain_errors(),
        ):
            path = f"{MODEL}/{BUNDLE}/{name}"
            file = self._download(run, path, folder)
            if file.stat().st_size != size:
                raise BundleError(
                    f"{name} has {file.stat().st_size:,} bytes instead of {size:,}",
                    where=self.where,
                )
            file.replace(into)

    def publish(self, folder: BundleFolder, tag: str, *, replace: bool) -> int:
        with self._explain_errors():
            run = self._find_or_create_run(folder)
            sent = self._send(run.info.run_id, folder)
            self.client.set_terminated(run.info.run_id)
            number = self._register(run, folder)
            self._tag(number, folder, tag, replace)
            return sent

    def attachments(self, digest: str) -> dict[str, bytes]:
        run = self._run_with(digest)
        if run is None:
            return {}
        with self._explain_errors():
            names = [posixpath.basename(name) for name in self._list_artifacts(run, ATTESTATIONS)]
        contents = {name: self._read(run, f"{ATTESTATIONS}/{name}") for name in names}
        return {name: data for name, data in contents.items() if data is not None}

    def attach(self, digest: str, attachments: Mapping[str, bytes]) -> None:
        run = self._run_with(digest)
        if run is None:
            raise MachineError(f"{digest} was removed meanwhile", where=self.where)
        with self._explain_errors():
            for name, data in attachments.items():
                self._log(run, f"{ATTESTATIONS}/{name}", data)

    def read_history(self, environment: str) -> list[str]:
        model = self._model()
        return [] if model is None else str(model.tags.get(f"{HISTORY}{environment}", "")).split()

    def move(
        self, environment: str, revision: str, past: Sequence[str] | None, expected: str
    ) -> bool:
        """Set MLflow's alias of the environment if it names the revision `expected`, and read it
        again.

        Not atomic: MLflow has no conditional write, so another writer may set it in between.
        """
        if RESERVED.fullmatch(environment):
            raise RecipeError(
                f"MLflow reserves the alias {environment!r}",
                where=self.where,
                accepted="another name, e.g. production",
            )
        if self.environments().get(environment, "") != expected:
            return False
        with self._explain_errors():
            if past is not None:
                listed = " ".join([*past][-HISTORY_LENGTH:])
                self.client.set_registered_model_tag(self.name, f"{HISTORY}{environment}", listed)
            self.client.set_registered_model_alias(self.name, environment, revision)
        return self.environments().get(environment) == revision

    def close(self) -> None:
        """Do nothing: MLflow has one session per process."""

    def _versions(self) -> list[Any]:
        """Return all versions of the MLflow model, ordered by number."""
        versions: list[Any] = []
        token = None
        with self._explain_errors():
            while True:
                page = self.client.search_model_versions(
                    f"name='{self.name}'", max_results=PAGE, page_token=token
                )
                versions += page
                token = page.token
                if not token:
                    return sorted(versions, key=lambda v: int(v.version))

    def _model(self) -> Any | None:
        with self._explain_errors():
            return self._call_unless("RESOURCE_DOES_NOT_EXIST", self.client.get_registered_model)

    def _call_unless(self, code: str, call: Any) -> Any | None:
        """Call MLflow by call(name of the model); return None where it answers with the error
        `code`."""
        from mlflow.exceptions import MlflowException

        try:
            return call(self.name)
        except MlflowException as e:
            if e.error_code == code:
                return None
            raise

    def _run_of(self, revision: str) -> str | None:
        """Return the id of the MLflow run that holds a version's files; None for a version that is
        not a bundle."""
        if revision not in self._runs:
            self._runs |= {str(v.version): v.run_id for v in self._versions() if DIGEST in v.tags}
        return self._runs.get(revision)

    def _run_with(self, digest: str) -> str | None:
        versions = [v for v in self._versions() if v.tags.get(DIGEST) == digest]
        return next((v.run_id for v in reversed(versions) if VERSION in v.tags), None)

    def _find_or_create_run(self, folder: BundleFolder) -> Any:
        """Return the MLflow run of this bundle, after logging metrics and parameters to it."""
        experiment = self.client.get_experiment_by_name(self.name)
        if experiment is None:
            self._call_unless("RESOURCE_ALREADY_EXISTS", self.client.create_experiment)
            experiment = self.client.get_experiment_by_name(self.name)
        runs = self.client.search_runs(
            [experiment.experiment_id], f"tags.`{DIGEST}` = '{folder.digest}'", max_results=1
        )
        name = f"{folder.manifest['name']} {folder.version}"
        tags = {DIGEST: folder.digest}
        run = (
            runs[0]
            if runs
            else self.client.create_run(experiment.experiment_id, tags=tags, run_name=name)
        )
        self._describe(run.info.run_id, folder)
        return run

    def _describe(self, run: str, folder: BundleFolder) -> None:
        from mlflow.entities import Metric, Param

        now = int(time.time() * 1000)
        values = [Metric(n, v, now, 0) for n, v in collect_metrics(folder.reports).items()]
        texts = [Param(n, text) for n, text in flatten_recipe(folder.manifest["recipe"]).items()]
        for start in range(0, max(len(values), len(texts)), BATCH):
            stop = start + BATCH
            self.client.log_batch(run, metrics=values[start:stop], params=texts[start:stop])

    def _send(self, run: str, folder: BundleFolder) -> int:
        """Send the bundle's files that the MLflow run lacks, by name and size; return their
        bytes."""
        contents: dict[str, Any] = {
            f"{MODEL}/{BUNDLE}/{name}": blob.content for name, blob in folder.files.items()
        }
        required = Path(contents[f"{MODEL}/{BUNDLE}/requirements.txt"]).read_text()
        beside = build_model_files(folder.manifest, required, self.mlflow_version)
        contents |= {f"{MODEL}/{name}": data for name, data in beside.items()}
        contents |= {f"{ATTESTATIONS}/{name}": data for name, data in folder.attachments.items()}
        if "report.html" in folder.files:
            contents["report.html"] = folder.files["report.html"].content
        present = self._list_artifacts(run, "")
        sent = 0
        counted = {f"{MODEL}/{BUNDLE}/{name}" for name in folder.files}
        counted |= {f"{ATTESTATIONS}/{name}" for name in folder.attachments}
        for name, content in bar(contents.items(), "publish", len(contents)):
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            if present.get(name) != size:
                self._log(run, name, content)
                sent += size if name in counted else 0
        return sent

    def _register(self, run: Any, folder: BundleFolder) -> str:
        """Return the number of an untagged version, in MLflow, of this bundle, a killed run's or a
        new one."""
        unnamed = [
            str(v.version)
            for v in self._versions()
            if v.tags.get(DIGEST) == folder.digest and VERSION not in v.tags
        ]
        if unnamed:
            return unnamed[-1]
        self._call_unless("RESOURCE_ALREADY_EXISTS", self.client.create_registered_model)
        source = f"{run.info.artifact_uri}/{MODEL}"
        tags = {DIGEST: folder.digest}
        version = self.client.create_model_version(self.name, source, run.info.run_id, tags=tags)
        return str(version.version)

    def _tag(self, number: str, folder: BundleFolder, tag: str, replace: bool) -> None:
        """Tag a version of the MLflow model, then read all tags again: a writer that finds another
        bundle with this tag fails, so that at most one of simultaneous writers succeeds."""
        self.client.set_model_version_tag(self.name, number, VERSION, tag)
        for other in self._versions():
            if other.tags.get(VERSION) != tag or str(other.version) == number:
                continue
            is_older = int(other.version) < int(number)
            if other.tags.get(DIGEST) == folder.digest or replace:
                if is_older:
                    self.client.delete_model_version_tag(self.name, str(other.version), VERSION)
                continue
            self.client.delete_model_version(self.name, number)
            raise RecipeError(
                "another bundle was published under this version at the same time",
                where=f"{self.where}:{tag}",
                fix="See the bundle that it names now (optimize versions); run the command again.",
            )

    def _list_artifacts(self, run: str, at: str) -> dict[str, int]:
        """Return {name: bytes} of all artifacts of an MLflow run below the folder `at`."""
        files: dict[str, int] = {}
        waiting = [at]
        while waiting:
            for entry in self.client.list_artifacts(run, waiting.pop() or None):
                if entry.is_dir:
                    waiting.append(entry.path)
                else:
                    files[entry.path] = int(entry.file_size or 0)
        return files

    def _log(self, run: str, name: str, content: Path | bytes) -> None:
        """Send one file to an MLflow run; the MLflow client names the artifact after the file."""
        folder, base = posixpath.split(name)
        if isinstance(content, Path):
            self.client.log_artifact(run, str(content), folder or None)
            return
        with TemporaryDirectory(prefix="optimize-mlflow-") as temporary:
            file = Path(temporary) / base
            file.write_bytes(content)
            self.client.log_artifact(run, str(file), folder or None)

    def _read(self, run: str, name: str) -> bytes | None:
        """Return the bytes of a small artifact of an MLflow run; None for a missing artifact."""
        with self._explain_errors():
            listed = self.client.list_artifacts(run, posixpath.dirname(name) or None)
            entry = next((e for e in listed if e.path == name and not e.is_dir), None)
            if entry is None:
                return None
            if int(entry.file_size or 0) > verify.LARGEST:
                raise BundleError(f"{name} is above {verify.LARGEST:,} bytes", where=self.where)
            with TemporaryDirectory(prefix="optimize-mlflow-") as folder:
                return self._download(run, name, folder).read_bytes()

    def _download(self, run: str, name: str, folder: str) -> Path:
        """Download one artifact of an MLflow run into the folder, by the run's URI: with its id the
        client would ask for the run's models each time."""
        from mlflow.artifacts import download_artifacts

        if run not in self._roots:
            self._roots[run] = self.client.get_run(run).info.artifact_uri
        address = f"{self._roots[run]}/{name}"
        return Path(
            download_artifacts(
                artifact_uri=address, dst_path=folder, tracking_uri=self.client.tracking_uri
            )
        )

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, ConnectionError) as e:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
            reason = PASSWORD.sub("//", reason)
            fix = "Run the same command again; it resumes."
            raise MachineError(reason, where=self.where, fix=fix) from e
