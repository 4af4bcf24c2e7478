"""Folders of adapters that somebody changes while they are read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from handed_in import becomes

from weft.core import folders
from weft.core.errors import AdapterError, AdapterPathRefused, AdapterUnavailable
from weft.core.folders import Deadline, Folder, Roots, read_aside

SECRET = "what lies outside"
FILE = "chat_template.jinja"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """root/bot and root/other hold a file each; outside/bot is out of bounds."""
    for folder, text in (("root/bot", "mine"), ("root/other", "other"), ("outside/bot", SECRET)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / FILE).write_text(text)
    return tmp_path


def opened(tree: Path, path: str = "root/bot") -> Folder:
    return Folder(str(tree / path), Roots([str(tree / "root")]))


def content(folder: Folder) -> str | None:
    """The text of the file, or the kind of the refusal."""
    try:
        found = folder.read(FILE, 1 << 10)
    except AdapterError as error:
        assert str(folder.path) not in error.message
        return type(error).kind
    return None if found is None else bytes(found).decode()


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("link", {"adapter_path_refused", "adapter_not_found"}),
        ("absolute link inside", {"other", "adapter_not_found"}),
        ("FIFO", {"adapter_invalid"}),
        ("folder", {"adapter_invalid"}),
        ("device", {"adapter_path_refused", "adapter_not_found"}),
    ],
)
def test_a_file_that_becomes_something_else(
    tree: Path, what: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is looked at, between the look and the opening, and after that."""
    path = tree / "root/bot" / FILE
    look, open_, descriptors = os.readlink, os.open, len([*Path("/proc/self/fd").iterdir()])

    def looks(name: str, dir_fd: int | None = None) -> str:
        try:
            return look(name, dir_fd=dir_fd)
        finally:
            if name == FILE and when == "between" and not path.is_symlink():
                becomes(path, what)

    def opens(name: str, flags: int, dir_fd: int | None = None) -> int:
        try:
            return open_(name, flags, dir_fd=dir_fd)
        finally:
            if name == FILE and when == "after":
                becomes(path, what)

    for when in ("before", "between", "after"):
        with opened(tree) as folder:
            if when == "before":
                becomes(path, what)
            monkeypatch.setattr(os, "readlink", looks)
            monkeypatch.setattr(os, "open", opens)
            found = content(folder)
            monkeypatch.undo()
        assert found in (kinds if when != "after" else {"mine"}), (when, found)
        if path.is_dir():
            path.rmdir()
        becomes(path, "text")
    with opened(tree) as folder:
        assert content(folder) == "mine"
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors


def test_a_folder_stays_the_one_that_was_opened(tree: Path) -> None:
    bot = tree / "root/bot"
    with opened(tree) as folder:
        bot.rename(tree / "root/old")
        bot.symlink_to(tree / "outside/bot")
        assert content(folder) == "mine"
        with pytest.raises(OSError, match="outside"):
            opened(tree)
        bot.unlink()
        bot.symlink_to(tree / "root/other")
        with opened(tree) as other:
            assert content(other) == "other" and other.path == str(tree / "root/other")
            assert other.identity != folder.identity
        with opened(tree, "root/old") as again:
            assert again.identity == folder.identity


def test_links_of_files_may_lead_anywhere_below_the_root(tree: Path) -> None:
    path = tree / "root/bot" / FILE
    path.unlink()
    for link, found in (
        ("../other/" + FILE, "other"),
        (str(tree / "root/other" / FILE), "other"),
        ("../../outside/../root/other/" + FILE, "other"),
        ("../../outside/bot/" + FILE, "adapter_path_refused"),
        ("../../outside/none", "adapter_path_refused"),
        ("../" * 40 + "etc/passwd", "adapter_path_refused"),
        ("/proc/self/environ", "adapter_path_refused"),
        ("none", None),
        (FILE, "adapter_not_found"),
    ):
        path.unlink(missing_ok=True)
        path.symlink_to(link)
        with opened(tree) as folder:
            assert content(folder) == found, link


def test_the_state_of_files_changes_with_their_content_alone(tree: Path) -> None:
    bot, other = tree / "root/bot", tree / "root/other" / FILE
    path, more = bot / FILE, bot / "more"
    states = list[object]()

    def changed() -> bool:
        with opened(tree) as folder:
            states.append(folder.state([FILE, "none"]))
        return states[-1] not in states[:-1]

    assert changed() and not changed()
    more.write_text("more")
    assert not changed()
    path.write_text("its")
    assert changed()
    more.rename(path)
    assert changed()
    path.unlink()
    assert changed()
    path.symlink_to(other)
    assert changed()
    other.write_text("another")
    assert changed()
    path.unlink()
    path.symlink_to(tree / "outside/bot" / FILE)
    with opened(tree) as folder, pytest.raises(OSError, match="outside"):
        folder.state([FILE])


def test_reading_has_a_deadline(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tree) as folder:
        (tree / "root/bot" / FILE).write_bytes(bytes(1 << 10))
        monkeypatch.setattr(folders, "_CHUNK", 1)
        monkeypatch.setattr(folders, "READ_BYTES_PER_S", 1e12)
        with pytest.raises(AdapterUnavailable, match="too long"):
            folder.read(FILE, 1 << 20, Deadline(0.0))
    released = threading.Event()
    with pytest.raises(AdapterUnavailable, match="too long"):
        read_aside(lambda _: released.wait(), seconds=0.05)
    released.set()
    assert read_aside(lambda deadline: deadline.left_s > 1) is True
    with pytest.raises(AdapterPathRefused):
        read_aside(lambda _: raises(AdapterPathRefused("no")))


def raises(error: Exception) -> None:
    raise error
