"""Small adapters as files, and servers of files, for tests of how adapters come and go."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from weft.core.files import CONFIG_FILE, WEIGHTS_FILE, content_digest
from weft.registry.contents import LISTING

CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
TEMPLATE = "chat_template.jinja"


def adapter(seed: int = 0, size: int = 64, **others: bytes) -> dict[str, bytes]:
    """The files of an adapter by name; names of others have `_` for the dot."""
    values = np.random.default_rng(seed).standard_normal((1, size)).astype(np.float32)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): values, name.format("B"): values.reshape(size, 1).copy()}
    files = {CONFIG_FILE: json.dumps(CONFIG).encode(), WEIGHTS_FILE: save(tensors)}
    return files | {name.replace("__", "."): content for name, content in others.items()}


def digest(files: Mapping[str, bytes]) -> str:
    weights = files[WEIGHTS_FILE]
    return content_digest(files[CONFIG_FILE], [weights], len(weights))


def written(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without the list that contents have."""
    files = (file for file in folder.iterdir() if file.is_file() and file.name != LISTING)
    return {file.name: file.read_bytes() for file in files}


def tar(
    files: Mapping[str, bytes],
    mode: str = "w",
    change: Callable[[tarfile.TarInfo], object] = lambda _: None,
    form: int = tarfile.PAX_FORMAT,
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as packed:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            packed.addfile(info, io.BytesIO(content))
    return out.getvalue()


@dataclass
class FileServer:
    """Answers with files by path over plain HTTP, and notes what was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths, and the parts of them that were asked for."""
    break_after: int | None = None
    """Answers end after so many bytes; the rest can be asked for."""
    with_tags: bool = True
    url: str = ""


@contextmanager
def serving_files() -> Iterator[FileServer]:
    served = FileServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            wanted = self.headers.get("range")
            served.asked.append((self.path, wanted))
            if path in served.redirects:
                self._head(302, 0, location=served.redirects[path])
                return
            if (content := served.files.get(path)) is None:
                self._head(404, 0)
                return
            tag = {"etag": f'"é{len(content)}"'} if served.with_tags else {}
            start = 0
            if wanted and self.headers.get("if-range") == tag.get("etag"):
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                tag["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._head(206 if start else 200, len(content) - start, **tag)
            end = len(content) if served.break_after is None else start + served.break_after
            self.wfile.write(content[start:end])
            if end < len(content):
                self.close_connection = True

        def _head(self, status: int, length: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"content-length": str(length), **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
