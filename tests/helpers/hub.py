"""A small Hugging Face hub in a thread, and folders as its client's cache lays them out."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "1" * 40


@dataclass
class Hub:
    """Repositories by id and commit.

    Attributes:
        branches: (repository, branch) to a commit.
        files: (repository, commit) to the files' content by name.
        gated: repositories whose files are refused.
        gguf: repository to what its GGUF file's header says.
        downloads: names of the files that were sent, in order.
    """

    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    gguf: dict[str, dict] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    url: str = ""

    def add(
        self, repository: str, files: dict[str, bytes], branch: str = "main", commit: str = COMMIT
    ) -> None:
        self.branches[repository, branch] = commit
        self.files[repository, commit] = files


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    # A body would wait until the client has acknowledged the headers, up to 40 ms.
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repository = f"{owner}/{name}"
        if repository not in {known for known, _ in self.hub.branches}:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        revision = rest[1]
        commit = self.hub.branches.get((repository, revision), revision)
        files = self.hub.files.get((repository, commit))
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if is_api:
            found = _api(rest[0], repository, commit, files)
            if rest[0] == "revision" and repository in self.hub.gguf:
                found["gguf"] = self.hub.gguf[repository]
            return self._send(200, json.dumps(found).encode())
        return self._file("/".join(rest[2:]), commit, files, with_body=with_body)

    def _file(self, name: str, commit: str, files: dict, *, with_body: bool) -> None:
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_hash(files[name])}"'}
        if with_body:
            self.hub.downloads.append(name)
        return self._send(200, files[name], headers, with_body=with_body)

    def _send(
        self, status: int, body: bytes, headers: dict | None = None, *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _api(what: str, repository: str, commit: str, files: dict[str, bytes]):
    if what == "tree":
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _hash(content)}
            for name, content in files.items()
        ]
    siblings = [
        {"rfilename": name, "size": len(content), "blobId": _hash(content)}
        for name, content in files.items()
    ]
    return {"id": repository, "sha": commit, "siblings": siblings}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def cache_snapshot(
    cache: Path,
    repository: str,
    files: dict[str, bytes],
    branch: str = "main",
    commit: str = COMMIT,
) -> Path:
    """The folder of a snapshot, as ``hf download`` leaves it: links to blobs, and a ref."""
    root = cache / f"models--{repository.replace('/', '--')}"
    folder = root / "snapshots" / commit
    for name, content in files.items():
        blob = root / "blobs" / _hash(content)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(blob)
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    return folder
