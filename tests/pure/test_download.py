"""Adapters from the web: what is allowed, what comes back, and where nobody gets by it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packed_adapters import TEMPLATE, FileServer, adapter, digest, read, serving_files, tar

from weft.core.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterPathRefused,
    AdapterUnavailable,
    ConfigError,
)
from weft.registry import AdapterRoots, Sources
from weft.registry import fetch as fetch_module
from weft.registry.allowed import Allowed
from weft.registry.contents import Contents
from weft.registry.fetch import is_public

FILES = adapter(size=5000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module.time, "sleep", lambda _: None)


@pytest.fixture(scope="module")
def one_server() -> Iterator[FileServer]:
    with serving_files() as server:
        yield server


@pytest.fixture
def server(one_server: FileServer) -> FileServer:
    one_server.__init__(url=one_server.url)  # type: ignore[misc]
    one_server.files = {f"/a/{name}": content for name, content in FILES.items()}
    one_server.files["/a.tar.gz"] = tar(FILES, "w:gz")
    return one_server


def sources(tmp_path: Path, *allowed: str, max_bytes: int = 1 << 20) -> Sources:
    return Sources(AdapterRoots([]), Allowed(allowed), Contents(tmp_path / "kept"), max_bytes)


def fetched(uri: str, tmp_path: Path, *allowed: str, **options: Any) -> dict[str, bytes]:
    with sources(tmp_path, *allowed, **options).open(uri) as folder:
        return read(Path(folder.path))


def refusal(kind: type[AdapterError], uri: str, tmp_path: Path, *allowed: str) -> str:
    with pytest.raises(kind) as error:
        fetched(uri, tmp_path, *allowed)
    assert error.value.param and "SECRET" not in error.value.message
    assert not list((tmp_path / "kept").rglob("*.safetensors")), "nothing is left"
    return error.value.message


def test_tars_and_folders(server: FileServer, tmp_path: Path) -> None:
    server.files["/b/" + TEMPLATE] = b"{{ x }}"
    server.files |= {f"/b/{name}": content for name, content in FILES.items()}
    checksum = hashlib.sha256(server.files["/a.tar.gz"]).hexdigest()
    for path in (
        "/a",
        "/a/",
        f"/a#sha256={digest(FILES)}",
        f"/a.tar.gz#sha256={checksum}",
        "/a.tar.gz?token=SECRET",
    ):
        assert fetched(server.url + path, tmp_path, server.url) == FILES
    assert fetched(server.url + "/b", tmp_path, server.url) == {**FILES, TEMPLATE: b"{{ x }}"}
    assert ("/a.tar.gz?token=SECRET", None) in server.asked


def test_what_is_not_there_or_not_the_same(server: FileServer, tmp_path: Path) -> None:
    def refused(kind: type[AdapterError], path: str) -> str:
        return refusal(kind, server.url + path, tmp_path, server.url)

    assert "adapter_config.json" in refused(AdapterNotFound, "/missing")
    refused(AdapterNotFound, "/missing.tar?x=SECRET")
    assert "checksum" in refused(AdapterInvalid, "/a.tar.gz#sha256=" + "0" * 64)
    assert "checksum" in refused(AdapterInvalid, "/a#sha256=" + "0" * 64)
    assert "sha256=" in refused(AdapterInvalid, "/a#md5=1")
    assert "query" in refused(AdapterInvalid, "/a?x=SECRET")
    server.files["/a.tar.gz"] = server.files["/a.tar.gz"][:-500]
    refused(AdapterInvalid, "/a.tar.gz")
    server.files["/zeros.tar"] = bytes((1 << 20) + 1)
    assert "larger than" in refused(AdapterInvalid, "/zeros.tar")


@pytest.mark.parametrize("with_tags", [True, False])
def test_what_breaks_off_goes_on(server: FileServer, tmp_path: Path, with_tags: bool) -> None:
    server.break_after, server.with_tags = len(server.files["/a.tar.gz"]) // 3 + 1, with_tags
    if not with_tags:  # nobody knows whether the rest would be of the same file
        refusal(AdapterUnavailable, server.url + "/a.tar.gz", tmp_path, server.url)
        return
    assert fetched(server.url + "/a.tar.gz", tmp_path, server.url) == FILES
    parts = [part for _, part in server.asked]
    assert parts[0] is None and len(parts) == 3 and all(parts[1:])


def test_redirects(server: FileServer, tmp_path: Path) -> None:
    server.redirects["/moved.tar.gz"] = "/a.tar.gz"
    assert fetched(server.url + "/moved.tar.gz", tmp_path, server.url) == FILES
    server.redirects["/loop.tar"] = "/loop.tar"
    message = refusal(AdapterUnavailable, server.url + "/loop.tar", tmp_path / "b", server.url)
    assert "redirects" in message and len(server.asked) == 8
    for place in (
        "http://127.0.0.1:1/x.tar",
        "https://127.0.0.1/",
        "file:///etc/passwd",
        "gopher:",
        "http://[",
    ):
        server.redirects["/out.tar"] = place
        refusal(AdapterError, server.url + "/out.tar", tmp_path / "c", server.url, "https", "s3")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_is_no_name_of_a_host_is_not_fetched(host: str, tmp_path: Path) -> None:
    message = refusal(AdapterUnavailable, f"https://{host}/a.tar", tmp_path, "https")
    assert "is no name of a host" in message


def test_a_name_with_an_address_inside_is_refused(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433"):
        message = refusal(AdapterError, f"http://{host}:{port}/a.tar.gz", tmp_path, "http")
        assert "inside" in message or "can't be fetched" in message
    assert not server.asked

    found = socket.getaddrinfo

    def rebinding(host: str, *args: Any, **options: Any) -> Any:
        if host != "rebind.example":
            return found(host, *args, **options)
        calls.append(host)
        both = ["93.184.216.34", "127.0.0.1"] if len(calls) == 1 else ["127.0.0.1"]
        return [each for ip in both for each in found(ip, args[0], type=socket.SOCK_STREAM)]

    calls: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    uri = f"http://rebind.example:{port}/a.tar.gz"
    assert "inside" in refusal(AdapterPathRefused, uri, tmp_path, "http")
    assert fetched(uri, tmp_path, f"http://rebind.example:{port}/") == FILES
    assert len(calls) == 2, "a name is resolved once, and its address connected to"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("10.0.0.1", False),
        ("172.16.3.4", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
        ("2002:5db8:d822::1", True),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_what_an_operator_allows() -> None:
    allowed = Allowed(["https", "s3://models/acme/", "http://inside:8080/x"])
    for uri in (
        "https://h/x.tar",
        "s3://models/acme/sql",
        "s3://models/acme",
        "http://inside:8080/x/y",
    ):
        allowed.check(uri)
    for uri in (
        "s3://models/acmeevil",
        "s3://models",
        "s3://other/acme/sql",
        "gs://models/acme/x",
        "http://inside:8080/xy",
        "http://inside:80/x/y",
        "http://inside:8080/x/../y",
        "http://inside:8080/x/%2e%2e/y",
        "http://inside:8080/x/..%2fy",
        "http://inside:8080@evil/x/y",
        "https://user:SECRET@h/x.tar",
        "https:///x",
        "https://h:99999/",
        "https://h/" + "x" * 5000,
        "https://h/\nx",
    ):
        with pytest.raises(AdapterPathRefused) as error:
            allowed.check(uri)
        assert error.value.param == "lora_path" and "SECRET" not in error.value.message
    assert allowed.may_be_inside(allowed.check("http://inside:8080/x/y"))
    assert not allowed.may_be_inside(allowed.check("https://inside/x/y"))
    for entry in ("ftp", "hf://org", "https//x", "s3:"):
        with pytest.raises(ConfigError, match="--allow-sources"):
            Allowed([entry])


def test_nothing_is_allowed_by_default(server: FileServer, tmp_path: Path) -> None:
    for uri in (server.url + "/a", "https://h/x.tar", "s3://b/x", "hf://org/x", "upload://x"):
        refusal(AdapterPathRefused, uri, tmp_path)
    assert not server.asked


@pytest.mark.parametrize("name", [f"some/{'x' * 5000}", "~nobody-here/bot"])
def test_a_name_that_no_folder_can_have_is_told_so(name: str) -> None:
    sources = Sources(allowed=Allowed())
    with pytest.raises(AdapterError):
        sources.open(name)
    assert sources.absolute(name).endswith(name)
