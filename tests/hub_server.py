"""A small hub: the few endpoints that huggingface_hub needs to make repositories, to upload and to download.

Repositories are in memory. Git LFS as the hub has it: safetensors go by a request of their own, and their
SHA-256 is checked. A token that is not `TOKEN` is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a_token_that_may_write"
READER = "hf_a_token_that_may_read"
OWNER = "me"


@dataclass
class Repository:
    """Branches, each a commit's number and its files; whether it is private."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})
    commits: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"]


class Hub(ThreadingHTTPServer):
    """The server, and what was uploaded to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: object, token: str | None = TOKEN) -> dict[str, str]:
        """Variables of a process that is to use this hub, and nothing of the user's."""
        own = {} if token is None else {"HF_TOKEN": token}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        return {"HF_ENDPOINT": self.address, "HF_HOME": str(home), **quiet, **own}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub for as long as the context lasts."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """One request: the first route that fits answers it."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self) -> None:
        self._route("POST", POSTS)

    def do_GET(self) -> None:
        self._route("GET", GETS)

    def do_HEAD(self) -> None:
        self._route("HEAD", GETS)

    def do_PUT(self) -> None:
        self._route("PUT", PUTS)

    def log_message(self, *arguments: object) -> None:
        pass

    def _route(self, verb: str, routes: dict[str, str]) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{verb} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, name in routes.items():
            if found := re.fullmatch(pattern, path):
                getattr(self, name)(**found.groupdict())
                return
        self.answer({"error": f"no such endpoint: {verb} {path}"}, 404)

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers.setdefault("Content-Type", "application/json")
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def may_write(self) -> bool:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given == TOKEN:
            return True
        self.answer({"error": "not allowed"}, 403 if given == READER else 401)
        return False

    def found(self, repo: str) -> Repository | None:
        repository = self.server.repositories.get(repo)
        if repository is None:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        return repository

    # What is asked before an upload

    def create(self) -> None:
        if not self.may_write():
            return
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        url = {"url": f"{self.server.address}/{name}", "name": name, "id": name}
        if name in self.server.repositories:
            self.answer({**url, "error": "You already created this model repo"}, 409)
            return
        self.server.repositories[name] = Repository(asked.get("visibility") == "private")
        self.answer(url)

    def validate(self) -> None:
        self.answer({"errors": [], "warnings": []})

    def branch(self, repo: str, revision: str) -> None:
        if self.may_write() and (repository := self.found(repo)):
            known = revision in repository.branches
            repository.branches.setdefault(revision, dict(repository.files))
            self.answer({"error": "Reference already exists"} if known else {}, 409 if known else 200)

    def preupload(self, repo: str, revision: str) -> None:
        if self.may_write() and self.found(repo):
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]
            self.answer({"files": files})

    # The upload

    def batch(self, repo: str) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.address}/large/{each['oid']}"}}}
            for each in json.loads(self.body)["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def store(self, digest: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != digest:
            self.answer({"error": "the content is another one's"}, 422)
            return
        self.server.large[digest] = self.body
        self.answer({})

    def commit(self, repo: str, revision: str) -> None:
        if not self.may_write() or not (repository := self.found(repo)):
            return
        files = repository.branches[revision]
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                repository.commits.append(value["summary"])
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                assert operation["key"] == "deletedFile", operation
                del files[value["path"]]
        url = f"{self.server.address}/{repo}/commit/{commit_of(files)}"
        self.answer({"commitUrl": url, "commitOid": commit_of(files), "success": True})

    # Downloads

    def info(self, repo: str, revision: str = "main") -> None:
        if repository := self.found(repo):
            files = self.at(repository, revision)
            if files is None:
                self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in files]
            private, sha = repository.private, commit_of(files)
            self.answer({"id": repo, "modelId": repo, "private": private, "sha": sha, "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        if repository := self.found(repo):
            files = self.at(repository, revision) or {}
            self.answer(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
            )

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if not (repository := self.found(repo)):
            return
        files = self.at(repository, revision)
        if files is None or name not in files:
            self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        tag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        kind = "application/octet-stream"
        self.answer(files[name], ETag=tag, X_Repo_Commit=commit_of(files), Content_Type=kind)

    @staticmethod
    def at(repository: Repository, revision: str) -> dict[str, bytes] | None:
        """The files of a branch, or of the commit that a branch is at."""
        commits = {commit_of(files): files for files in repository.branches.values()}
        return repository.branches.get(revision, commits.get(revision))


def commit_of(files: dict[str, bytes]) -> str:
    """The number of a commit, by its files."""
    content = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in sorted(files.items())})
    return hashlib.sha1(content.encode()).hexdigest()


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[\w.-]+)"
POSTS = {
    "/api/repos/create": "create",
    "/api/validate-yaml": "validate",
    f"/api/models/{REPO}/branch/{REVISION}": "branch",
    f"/api/models/{REPO}/preupload/{REVISION}": "preupload",
    f"/api/models/{REPO}/commit/{REVISION}": "commit",
    rf"/{REPO}\.git/info/lfs/objects/batch": "batch",
}
PUTS = {"/large/(?P<digest>[0-9a-f]+)": "store"}
GETS = {
    f"/api/models/{REPO}": "info",
    f"/api/models/{REPO}/revision/{REVISION}": "info",
    f"/api/models/{REPO}/tree/{REVISION}": "tree",
    f"/{REPO}/resolve/{REVISION}/(?P<name>.+)": "resolve",
}
