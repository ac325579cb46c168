"""A hub on loopback that serves folders as repositories and lists the requests that it gets.

::

    with serve({"org/base": folder, "org/tuned": {"main": one, "v2": other}}) as hub:
        ...  # a process with HF_ENDPOINT=hub.url, or endpoint=hub.url, sees these repositories
    assert hub.requests == ["GET /api/models/org/base/revision/main", ...]

huggingface_hub reads ``HF_ENDPOINT`` when it is imported, so a test that loads from this hub starts a process, or has
one forked that calls `ask`. It answers what huggingface_hub asks for: the info of a revision, the tree of a commit, and
the files. Each revision has a commit of its own, `commit_of`; the content of a folder may change while it is served.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def commit_of(repo: str, revision: str = "main") -> str:
    """The commit that the hub gives for a revision."""
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


def ask(url: str | None, cache: str | os.PathLike[str]) -> None:
    """Make this process one that started with this ``HF_ENDPOINT``, or with ``HF_HUB_OFFLINE=1``, and this cache."""
    from huggingface_hub import constants, hf_api

    offline = url is None
    if url is not None:
        constants.ENDPOINT = hf_api.api.endpoint = url
        constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = offline, os.fspath(cache)
    os.environ.update(dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), str(int(offline))))


class Hub:
    """The address of a hub, and the requests that it got, as ``"GET /path"``, in the order in which they came."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[str] = []


@contextmanager
def serve(repositories: Mapping[str, Path | Mapping[str, Path]]) -> Iterator[Hub]:
    """Serve ``{repo id: folder}`` or ``{repo id: {revision: folder}}`` until the block ends."""
    folders = {
        (repo, commit_of(repo, revision)): folder
        for repo, source in repositories.items()
        for revision, folder in (source.items() if isinstance(source, Mapping) else [("main", source)])
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
                self._tree("/".join(parts[2:4]), parts[5], body)
            elif parts[:2] == ["api", "models"]:
                self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", body)
            elif len(parts) > 4 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
            else:
                self._send(404, b"", {}, body)

        def _info(self, repo: str, revision: str, body: bool) -> None:
            commit = revision if (repo, revision) in folders else commit_of(repo, revision)
            folder = folders.get((repo, commit))
            if folder is None:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
                return
            names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            info = {"id": repo, "modelId": repo, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)

        def _tree(self, repo: str, commit: str, body: bool) -> None:
            folder = folders[repo, commit]
            entries = [
                {
                    "type": "file",
                    "path": path.relative_to(folder).as_posix(),
                    "size": path.stat().st_size,
                    "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                }
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            ]
            self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, body)

        def _file(self, repo: str, commit: str, name: str, body: bool) -> None:
            folder = folders.get((repo, commit), folders.get((repo, commit_of(repo, commit))))
            if folder is None or not (folder / name).is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            data = (folder / name).read_bytes()
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            self._send(200, data, headers, body)

        def _send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
