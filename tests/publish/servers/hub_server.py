"""Serve the part of the Hugging Face Hub's protocol that the tests use, in this process.

Repositories are lists of commits, branches and tags; large files are stored outside commits by
digest, and must exist before a commit names them. A commit whose parent is no longer the head is
refused (412), and so is an existing name (409). `kill` ends a client at a given request, before or
after the server handles it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from queue import SimpleQueue
from threading import RLock
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import constants

from optimizer.publish.hubs.folders import Folders
from optimizer.publish.hubs.hub import Hub
from tests.publish.servers.loopback import QuietHandler, answering

REPOSITORY = "acme/tiny"
LARGE = (".onnx", ".json")  # what the repository's .gitattributes stores outside git


@dataclass
class Repository:
    """commits: {oid: {path: (True for a large file, bytes)}}."""

    commits: dict[str, dict[str, tuple[bool, bytes]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, tuple[bool, bytes]]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {branch}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        names = {**{oid: oid for oid in self.commits}, **self.branches, **self.tags}
        return names.get(revision)


class Server(ThreadingHTTPServer):
    """log: (method, path, bytes received, header Authorization). large: {digest: bytes}."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.log: list[tuple[str, str, int, str]] = []
        self.lock = RLock()
        self.cut: int | None = None  # bytes after which one answer with a longer file ends
        self.ranges = True
        self.ranged: list[int] = []  # first bytes of the requested ranges
        self.token = ""  # required in every request
        self.ignored: tuple[str, ...] = ()  # endings of names that the .gitignore leaves out
        self.kill_at: int | None = None  # requests until one kills its client
        self.kill_before = True
        self.victims: SimpleQueue[int] = SimpleQueue()
        self.clients: list[Hub] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def repository(self) -> Repository:
        return self.repositories[REPOSITORY]

    def client(self) -> Folders:
        return Folders(Hub(REPOSITORY, self.endpoint))


class Handler(QuietHandler):
    server: Server

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self.chunk, b""))
        with self.server.lock:
            kills = self.server.kill_at == 0
            if self.server.kill_at is not None:
                self.server.kill_at -= 1
            if kills and self.server.kill_before:
                return self.kill()
            authorization = self.headers.get("Authorization", "")
            self.server.log.append((self.command, self.path, len(body), authorization))
            self.status, self.data, self.extra = self.handle_request(body)
            if kills:
                return self.kill()
        return self.reply()

    do_GET = do_HEAD = do_PUT = do_POST = do

    def chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def kill(self) -> None:
        os.kill(self.server.victims.get(), signal.SIGKILL)
        self.close_connection = True

    def handle_request(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        path = unquote(urlsplit(self.path).path)
        token = self.server.token and not path.startswith("/large/")  # those addresses are signed
        if token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return 401, b"", {"X-Error-Message": "Invalid credentials"}
        for pattern, handle in ROUTES:
            if match := re.fullmatch(pattern, path):
                return handle(self, *match.groups(), body)  # type: ignore[no-any-return]
        return 404, b"", {}

    def reply(self) -> None:
        data, cut = self.data, None
        self.server.ranged += [
            int(part.removeprefix("bytes=").rstrip("-"))
            for part in self.headers.get_all("Range", [])
        ]
        if self.status == 200 and "ETag" in self.extra and self.command == "GET":
            if (part := self.headers.get("Range")) and self.server.ranges:
                data, self.status = data[int(part.removeprefix("bytes=").split("-")[0]) :], 206
            if self.server.cut is not None and len(data) > self.server.cut:
                cut, self.server.cut = self.server.cut, None
        self.send_response(self.status)
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if "organization" in asked else "?"
        taken = name in self.server.repositories
        if not taken:
            self.server.repositories[name] = Repository()
            self.server.repositories[name].commit("main", {".gitattributes": (False, b"")})
        return answer({"url": f"{self.server.endpoint}/{name}"}, 409 if taken else 200)

    def validate(self, body: bytes) -> Any:
        front = json.loads(body)["content"].split("---\n")[1]
        errors = [] if isinstance(yaml.safe_load(front), dict) else [{"message": "no metadata"}]
        return answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def refs(self, name: str, _: bytes) -> Any:
        if name not in self.server.repositories:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        repository = self.server.repositories[name]
        listed = {
            kind: [{"name": n, "ref": f"refs/{n}", "targetCommit": c} for n, c in refs.items()]
            for kind, refs in (("branches", repository.branches), ("tags", repository.tags))
        }
        return answer({**listed, "converts": []})

    def files(self, name: str, revision: str) -> dict[str, tuple[bool, bytes]] | None:
        repository = self.server.repositories[name]
        oid = repository.resolve(revision)
        return None if oid is None else repository.commits[oid]

    def info(self, name: str, revision: str, _: bytes) -> Any:
        oid = self.server.repositories[name].resolve(revision)
        if oid is None:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        files = [{"rfilename": path} for path in self.server.repositories[name].commits[oid]]
        return answer({"id": name, "sha": oid, "siblings": files})

    def tree(self, name: str, revision: str, _: bytes) -> Any:
        files = self.files(name, revision)
        if files is None:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        return answer([entry(path, *file) for path, file in files.items()])

    def paths(self, name: str, revision: str, body: bytes) -> Any:
        files = self.files(name, revision) or {}
        listed = parse_qs(body.decode()).get("paths", [])
        return answer([entry(path, *files[path]) for path in listed if path in files])

    def preupload(self, name: str, revision: str, body: bytes) -> Any:
        there = self.files(name, revision) or {}
        files = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            large = path.endswith(LARGE) and asked["size"] > 0
            known = {"oid": oid(*there[path])} if path in there else {}
            ignored = path.endswith(self.server.ignored) if self.server.ignored else False
            mode = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": ignored}
            files.append({"path": path, **mode, **known})
        return answer({"files": files})

    def batch(self, _: str, body: bytes) -> Any:
        objects = []
        for asked in json.loads(body)["objects"]:
            href = f"{self.server.endpoint}/large/{asked['oid']}"
            there = asked["oid"] in self.server.large
            objects.append({**asked, **({} if there else {"actions": {"upload": {"href": href}}})})
        return answer({"transfer": "basic", "objects": objects})

    def upload(self, digest: str, body: bytes) -> Any:
        if hashlib.sha256(body).hexdigest() != digest:
            return 400, b"", {}
        self.server.large[digest] = body
        return answer({})

    def commit(self, name: str, branch: str, body: bytes) -> Any:
        repository = self.server.repositories[name]
        lines = [json.loads(line) for line in body.splitlines()]
        head = repository.branches[branch]
        parent = next(x["value"] for x in lines if x["key"] == "header").get("parentCommit")
        if parent not in (None, head):
            return 412, b"", {"X-Error-Message": "A commit has happened since."}
        files = dict(repository.commits[head])
        for line in lines:
            path = line["value"].get("path")
            if line["key"] == "file":
                files[path] = (False, base64.b64decode(line["value"]["content"]))
            elif line["key"] == "lfsFile":
                if line["value"]["oid"] not in self.server.large:
                    return 400, b"", {"X-Error-Message": "an object is missing"}
                files[path] = (True, self.server.large[line["value"]["oid"]])
            elif line["key"] == "deletedFile":
                del files[path]
        made = repository.commit(branch, files)
        url = f"{self.server.endpoint}/{name}/commit/{made}"
        return answer({"commitOid": made, "commitUrl": url})

    def tag(self, name: str, revision: str, body: bytes) -> Any:
        repository = self.server.repositories[name]
        tag = json.loads(body)["tag"]
        if tag in repository.tags:
            return 409, b"", {}
        repository.tags[tag] = repository.resolve(revision) or ""
        return answer({})

    def branch(self, name: str, branch: str, body: bytes) -> Any:
        repository = self.server.repositories[name]
        if branch in repository.branches:
            return 409, b"", {}
        start = repository.resolve(json.loads(body)["startingPoint"])
        repository.branches[branch] = start or ""
        return answer({})

    def resolve(self, name: str, revision: str, path: str, _: bytes) -> Any:
        if name not in self.server.repositories:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        files = self.files(name, revision)
        if files is None or path not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        oid = self.server.repositories[name].resolve(revision) or ""
        etag = hashlib.sha256(files[path][1]).hexdigest()
        return 200, files[path][1], {"ETag": f'"{etag}"', "X-Repo-Commit": oid}


NAME = "([^/]+/[^/]+)"
ROUTES: list[tuple[str, Any]] = [
    (r"/api/repos/create", Handler.create),
    (r"/api/validate-yaml", Handler.validate),
    (rf"/api/models/{NAME}/refs", Handler.refs),
    (rf"/api/models/{NAME}/revision/(.+)", Handler.info),
    (rf"/api/models/{NAME}/tree/(.+)", Handler.tree),
    (rf"/api/models/{NAME}/paths-info/(.+)", Handler.paths),
    (rf"/api/models/{NAME}/preupload/(.+)", Handler.preupload),
    (rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    (r"/large/(.+)", Handler.upload),
    (rf"/api/models/{NAME}/commit/(.+)", Handler.commit),
    (rf"/api/models/{NAME}/tag/(.+)", Handler.tag),
    (rf"/api/models/{NAME}/branch/(.+)", Handler.branch),
    (rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


def answer(document: Any, status: int = 200) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(document).encode(), {"Content-Type": "application/json"}


def oid(large: bool, data: bytes) -> str:
    """Describe a file as the hub does: a large one by its digest, another by git's."""
    if large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()


def entry(path: str, large: bool, data: bytes) -> dict[str, Any]:
    listed: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
    listed["oid"] = hashlib.sha1(data + bytes([large])).hexdigest()
    if large:
        digest = hashlib.sha256(data).hexdigest()
        listed["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
    return listed


@contextmanager
def serving() -> Iterator[Server]:
    """Turn off Xet, the hub's newer protocol for large files, which this server lacks."""
    server = Server()
    with answering(server), mock.patch.object(constants, "HF_HUB_DISABLE_XET", True):
        yield server
