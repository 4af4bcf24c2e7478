"""The page at `/` in a real browser, against real servers. `make test-page` runs it.

CHROMIUM names the browser's program; without it, playwright's own is used.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "examples/tiny/adapters"
PYTHON = os.environ["WEFT_PYTHON"]
"""The interpreter that has Weft; the one that runs these tests has playwright."""
SHOTS = os.environ.get("SCREENSHOTS")
"""A folder for pictures of what the tests see."""

expect.set_options(timeout=120_000)


@contextmanager
def serving(*flags: str, modules: tuple[str, ...] = ("reverse", "upper")) -> Iterator[str]:
    """The address of a server of the tiny base."""
    command = [PYTHON, "-m", "weft", "serve", str(ROOT / "examples/tiny/base"), *flags]
    command += ["--served-model-name", "tiny", "--port", "0", "--num-threads", "1"]
    command += ["--kv-cache-memory", "64M", "--adapter-memory", "64M"]
    for name in modules:
        command += ["--lora-modules", f"{name}={ADAPTERS / name}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError("the server did not start")
        yield found[0]
    finally:
        server.terminate()
        server.communicate()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        own = os.environ.get("CHROMIUM")
        browser = play.chromium.launch(executable_path=own, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page without errors, neither of scripts nor of the content security policy."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert not [each for each in troubles if "the server responded" not in each], troubles


def shot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png")


def open_part(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()


def test_models_side_by_side(page: Page, url: str) -> None:
    page.goto(url)
    columns = page.locator(".column")
    expect(columns).to_have_count(2)
    page.get_by_role("button", name="Add a model").click()
    expect(page.get_by_role("button", name="Add a model")).to_be_disabled()
    columns.nth(2).get_by_role("button", name="Sum of adapters").click()
    columns.nth(2).get_by_label("Adapter", exact=True).fill("upper")
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Your message").fill("planet")
    page.keyboard.press("Enter")
    for column, answer in enumerate(("planet?", "tenalp", "PLANET")):
        expect(columns.nth(column).locator(".turn:not(.user)")).to_have_text(answer)
        expect(columns.nth(column)).to_contain_text("tokens, the first after")
    columns.nth(2).get_by_text("As curl or Python").click()
    code = columns.nth(2).locator("pre")
    expect(code.first).to_contain_text('"adapters": [')
    shot(page, "chat")
    python = code.nth(1).inner_text()
    asked = subprocess.run([PYTHON, "-c", python], capture_output=True, text=True, check=True)
    assert "choices" in asked.stdout
    columns.nth(2).get_by_label("Scale").fill("0")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Your message").fill("planet")
    page.get_by_role("button", name="Send").click()
    expect(columns.nth(2).locator(".turn:not(.user)")).to_have_text("planet?")
    columns.nth(1).get_by_label("Model").fill("nobody")
    page.get_by_label("Your message").fill("planet")
    page.keyboard.press("Enter")
    expect(columns.nth(1)).to_contain_text("'nobody'")


def test_loading_and_unloading(page: Page, url: str, tmp_path: Path) -> None:
    page.goto(f"{url}/#adapters")
    page.locator("#folder").set_input_files(ADAPTERS / "sort")
    expect(page.get_by_text("sort: 2 files")).to_be_visible()
    expect(page.locator("#verdict")).to_contain_text("It can be served: rank 16")
    shot(page, "check")
    expect(page.locator("tbody tr", has_text="sort")).to_have_count(0)
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.get_by_text("sort is served as it is")).to_be_visible()
    row = page.locator("tbody tr", has_text="sort")
    expect(row).to_contain_text("host")
    shot(page, "adapters")
    row.get_by_role("button", name="Chat").click()
    page.get_by_label("Your message").fill("planet")
    page.keyboard.press("Enter")
    expect(page.locator(".column").nth(2)).to_contain_text("aelnpt")
    open_part(page, "Adapters")
    expect(row).to_contain_text("device")
    bad = json.loads((ADAPTERS / "sort" / "adapter_config.json").read_text()) | {"r": -1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(bad))
    weights = (ADAPTERS / "sort" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    page.locator("#folder").set_input_files(tmp_path)
    expect(page.locator("#verdict")).to_contain_text("It can't be served: ")
    page.get_by_label("Name", exact=True).fill("bad")
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator("#verdict")).to_contain_text("Not served: ")
    unload = row.get_by_role("button", name="Unload")
    unload.click()
    row.get_by_role("button", name="Really?").click()
    expect(row).to_have_count(0)
    page.get_by_label("Filter").fill("upp")
    expect(page.locator("#table tbody tr")).to_have_count(1)


def test_commands_are_quoted(page: Page, url: str) -> None:
    page.goto(f"{url}/#adapters")
    page.locator("#folder").set_input_files(ADAPTERS / "sort")
    expect(page.locator("#verdict")).to_contain_text("It can be served")
    page.get_by_label("Name", exact=True).fill("it's")
    page.get_by_role("button", name="Load", exact=True).click()
    verdict = page.locator("#verdict")
    expect(verdict).to_contain_text("it's is served as it is")
    verdict.get_by_text("As curl or Python").click()
    words = shlex.split(verdict.locator("pre").first.inner_text())
    assert f"{url}/v1/adapters/it's?pinned=false" in words and "@it's.tar" in words
    post(f"{url}/v1/unload_lora_adapter", {"lora_name": "it's"})


NUM_MANY = 1000


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    """A server of many adapters."""
    with serving("--lora-root", str(ADAPTERS), modules=()) as url:
        folders = sorted(each.name for each in ADAPTERS.iterdir() if each.is_dir())
        for number in range(NUM_MANY):
            folder = folders[number % len(folders)]
            body = {"lora_name": f"{folder}-{number:04}", "lora_path": folder}
            post(f"{url}/v1/load_lora_adapter", body)
        yield url


def post(url: str, body: dict[str, object]) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        answer.read()


def test_a_thousand_adapters(page: Page, many: str) -> None:
    """What the page takes of a processor is less than a few frames. It is the time of its thread,
    not that of the clock, so others who use this machine do not count."""
    page.goto(f"{many}/#adapters")
    rows = page.locator("#table tbody tr")
    expect(page.locator("#num-adapters")).to_have_text("1,000 in all")
    expect(page.locator("#which")).to_have_text("1 to 30 of 1,000")
    expect(rows.first).to_contain_text("host")
    times = page.context.new_cdp_session(page)
    times.send("Performance.enable", {"timeDomain": "threadTicks"})

    def used_ms() -> float:
        found = times.send("Performance.getMetrics")["metrics"]
        return 1000 * next(each["value"] for each in found if each["name"] == "TaskDuration")

    before = used_ms()
    rows.nth(3).get_by_role("button", name="Chat").focus()
    page.wait_for_timeout(11_000)  # the list is fetched twice, and the metrics eleven times
    expect(rows.nth(3).get_by_role("button", name="Chat")).to_be_focused()
    waiting = used_ms() - before
    keys = "reverse-07"
    for typed in range(1, len(keys) + 1):
        page.get_by_label("Filter").press(keys[typed - 1])
        left = sum(keys[:typed] in f"reverse-{number:04}" for number in range(6, NUM_MANY, 11))
    expect(page.locator("#num-adapters")).to_have_text(f"{left} of 1,000")
    expect(rows).to_have_count(left)
    shot(page, "filtered")
    filtering = used_ms() - before - waiting
    page.get_by_label("Filter").fill("")
    for _ in range(33):
        page.get_by_role("button", name="Next").click()
    expect(page.locator("#which")).to_have_text("991 to 1,000 of 1,000")
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    expect(rows).to_have_count(10)
    shot(page, "last")
    turning = used_ms() - before - waiting - filtering
    print(
        f"a second of waiting {waiting / 11:.1f} ms, a key of the filter "
        f"{filtering / len(keys):.1f} ms, a page {turning / 33:.1f} ms"
    )
    assert waiting / 11 < 100 and filtering / len(keys) < 100 and turning / 33 < 100


def test_live_figures(page: Page, url: str) -> None:
    page.goto(f"{url}/#live")
    tile = page.locator(".tile").first.locator("b")
    expect(tile).to_have_text("0")
    body = {"model": "reverse", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 8}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()
    expect(tile).not_to_have_text("0")
    expect(page.locator("#busiest tbody")).to_contain_text("reverse")
    expect(page.locator(".tier")).to_have_count(3)
    shot(page, "live")


def test_the_keyboard_alone_is_enough(page: Page, url: str) -> None:
    page.goto(url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Live")).to_be_visible()


def test_a_phone_in_the_dark(browser: Browser, url: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(url)
    for part in ("Chat", "Adapters", "Live"):
        open_part(page, part)
        expect(page.get_by_role("heading", name=part, exact=True)).to_be_visible()
        width = page.locator("main").bounding_box()
        assert width is not None and width["width"] <= 390
        if part == "Adapters":  # names are not broken
            name = page.get_by_role("cell", name="reverse", exact=True)
            num_lines = name.evaluate(
                "at => { const text = document.createRange(); text.selectNodeContents(at);"
                " return new Set([...text.getClientRects()].map(line => line.top)).size }"
            )
            assert num_lines == 1
    open_part(page, "Chat")
    shot(page, "phone")
    page.close()


def test_a_key_is_asked_for(browser: Browser) -> None:
    with serving("--api-key", "secret", "--ui") as url:
        page = browser.new_page()
        page.goto(url)
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("tiny · 2 adapters")
        page.close()


def test_releases(browser: Browser, tmp_path: Path) -> None:
    push = [PYTHON, "-m", "weft", "push"]
    registry = tmp_path / "registry"
    for adapter in ("reverse", "upper"):
        where = ["--registry", str(registry)]
        subprocess.run([*push, str(ADAPTERS / adapter), "word", *where], check=True)
    with serving("--registry", str(registry), modules=()) as url:
        page = browser.new_page()
        page.goto(f"{url}/#releases")
        page.get_by_label("Adapter", exact=True).fill("word")
        page.get_by_role("button", name="Show").click()
        rows = page.locator("#release tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(0)).to_contain_text("100 % of the requests")
        rows.nth(1).get_by_role("button", name="Canary 10 %").click()
        expect(rows.nth(1)).to_contain_text("10 % of the requests")
        shot(page, "releases")
        page.get_by_role("button", name="Roll back").click()
        expect(rows.nth(0)).to_contain_text("100 % of the requests")
        page.close()


def test_nodes(browser: Browser, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "key").write_text(secrets.token_hex(32))
    (tmp_path / "nodes").write_text(f"{here}\n")
    files = ["--fleet", str(tmp_path / "nodes"), "--fleet-key", str(tmp_path / "key")]
    with serving(*files, "--fleet-listen", here, "--node-name", "n1") as url:
        page = browser.new_page()
        page.goto(f"{url}/#nodes")
        row = page.locator("#node-table tbody tr")
        expect(row).to_contain_text("n1 (this one)")
        expect(row).to_contain_text("0 of ")
        shot(page, "nodes")
        row.get_by_role("button", name="Drain").click()
        expect(row).to_contain_text("draining")
        row.get_by_role("button", name="Use again").click()
        expect(row).to_contain_text("up")
        page.close()
