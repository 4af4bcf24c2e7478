"""The files of the page at `/`, and who gets them. `make test-page` tries the page in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from http_api import Web, World
from memory_store import MemoryStore
from toy_tokenizers import byte_level

from weft.api.routes_page import page_files
from weft.cli.args import ServeFlags
from weft.registry.records import SetTenant
from weft.registry.shared import SharedRegistry
from weft.registry.tenants_file import TenantsFile


async def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    web = Web(World(tmp_path, byte_level()))
    page = await web.get("/")
    assert page.status_code == 200 and "<title>Weft</title>" in page.text
    found = {"/"}
    for path in re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text):
        assert (await web.get(f"/{path}")).status_code == 200, path
        found.add(f"/{path}")
    for path, (content, _) in page_files().items():
        text = content.decode()
        answer = await web.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        for module in re.findall(r'from "\./([^"]+)"|import "\./([^"]+)"', text):
            found.add(f"/ui/{module[0] or module[1]}")
        for name in re.findall(r'get\("([\w-]+)"\)', text):
            assert f'id="{name}"' in page.text, (path, name)
    assert found == page_files().keys()
    assert not re.search(r"<script(?! type=.module. src)|<style| style=| on\w+=", page.text)
    about = (await web.get("/ui/about.json")).json()
    assert about == {"registry": False, "metrics": True, "fleet": False}


async def test_who_gets_the_page(tmp_path: Path) -> None:
    """The page itself needs no key, and all that it asks for does."""
    for page in (True, False):
        web = Web(World(tmp_path, byte_level(), api_keys=["secret"], page=page))
        for path in ("/", "/ui/app.js", "/ui/about.json"):
            assert (await web.get(path)).status_code == (200 if page else 401)
        assert (await web.get("/v1/models")).status_code == 401


def test_servers_that_ask_for_keys_have_no_page_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.acme]")
    assert ServeFlags().page(None)
    assert not ServeFlags(api_key=["one"]).page(None)
    assert not ServeFlags().page(TenantsFile(file))
    with SharedRegistry(MemoryStore()) as shared:
        assert ServeFlags().page(ServeFlags().shared_tenants(shared))
        shared.change(SetTenant("acme", "{}"))
        tenants = ServeFlags().shared_tenants(shared)
        assert not ServeFlags().page(tenants)
        assert ServeFlags(ui=True).page(tenants) and not ServeFlags(ui=False).page(None)
