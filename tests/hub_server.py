"""A local stand-in for the HTTP interface of the Hugging Face Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_token_of_the_tests"


class Hub:
    """Repositories by name; each has its commits, oldest first."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.requests: list[str] = []
        self.address = ""

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        commits = self.repositories.setdefault(name, {})
        latest = commits[[*commits][-1]] if commits else {}
        oid = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits[oid] = {**latest, **files}
        return oid

    def resolve(self, name: str, revision: str) -> str | None:
        commits = self.repositories[name]
        if revision == "main":
            return [*commits][-1] if commits else None
        return revision if revision in commits else None


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Serve an empty Hub until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            words = path.strip("/").split("/")
            if words[:2] == ["api", "models"]:
                self._send_info(words[2:])
            elif len(words) > 4 and words[2] == "resolve":
                self._send_file("/".join(words[:2]), words[3], "/".join(words[4:]))
            else:
                self._send(404, {}, code="RepoNotFound")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            hub.requests.append(f"POST {path}")
            words = path.strip("/").split("/")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._send(401, {"error": "Invalid username or password."})
            elif path == "/api/repos/create":
                data = json.loads(body)
                name = f"{data.get('organization', 'user')}/{data['name']}"
                exists = name in hub.repositories
                hub.repositories.setdefault(name, {})
                url = f"{hub.address}/{name}"
                self._send(409 if exists else 200, {"url": url, "id": name})
            elif path == "/api/validate-yaml":
                self._send(200, {"errors": [], "warnings": []})
            elif words[4:5] == ["preupload"]:
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                self._send(200, {"files": files})
            else:
                lines = [json.loads(line) for line in body.splitlines()]
                files = {
                    line["value"]["path"]: base64.b64decode(line["value"]["content"])
                    for line in lines
                    if line["key"] == "file"
                }
                name = "/".join(words[2:4])
                oid = hub.commit(name, files)
                url = f"{hub.address}/{name}/commit/{oid}"
                data = {"success": True, "commitOid": oid, "commitUrl": url}
                self._send(200, data)

        def _send_info(self, words: list[str]) -> None:
            name = "/".join(words[:2])
            revision = words[3] if len(words) > 3 else "main"
            if name not in hub.repositories:
                self._send(404, {}, code="RepoNotFound")
            elif (oid := hub.resolve(name, revision)) is None:
                self._send(404, {}, code="RevisionNotFound")
            else:
                files = [{"rfilename": x} for x in hub.repositories[name][oid]]
                self._send(200, {"id": name, "sha": oid, "siblings": files})

        def _send_file(self, name: str, revision: str, file: str) -> None:
            oid = hub.resolve(name, revision)
            files = hub.repositories[name].get(oid or "", {})
            if file not in files:
                self._send(404, {}, code="EntryNotFound")
                return
            digest = hashlib.sha256(files[file]).hexdigest()
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": oid or ""}
            self._send(200, files[file], headers=headers)

        def _send(
            self,
            status: int,
            body: Any,
            code: str = "",
            headers: dict[str, str] | None = None,
        ) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
