"""Resolves each kind of adapter source to a local folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from copy import copy
from errno import EXDEV
from functools import cached_property, partial
from pathlib import Path
from urllib.parse import unquote

from weft.core.errors import AdapterError, AdapterInvalid, AdapterNotFound, AdapterPathRefused
from weft.core.files import ADAPTER_FILES, CONFIG_FILE, MAX_BYTES
from weft.core.folders import Folder, Roots, at_home, read_aside
from weft.registry.allowed import BUCKETS, HUB, SCHEMES, WEB, Allowed
from weft.registry.contents import MAX_ADAPTER_BYTES, Contents, cache_folder, not_kept
from weft.registry.download import download
from weft.registry.unpack import unpack

logger = logging.getLogger(__name__)

MAX_PATH_LENGTH = 4096
"""Characters of a path that a client names."""

UPLOAD = "upload"
"""The scheme of what a client sent with its request."""

_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
"""`org/name`, or `org/name@revision`: a branch, a tag or a commit."""


class AdapterRoots:
    """The folders below which adapters lie; nothing outside them is ever opened. They are first
    accessed when an adapter is opened, as their disk may not answer."""

    def __init__(self, roots: Sequence[Path], called: str = "--lora-root") -> None:
        """`called`: what messages call the folders."""
        self._given = tuple(roots)
        self._called = called

    @cached_property
    def _roots(self) -> Roots:
        return Roots(str(Path(root).resolve()) for root in self._given)

    def open(self, path: str) -> Folder:
        """The folder that `path` names; a relative one is tried below each root.

        A link must end below a root (any of them), and those of its files below the same one.
        Raises AdapterPathRefused, or AdapterNotFound when there is no such folder; whether a path
        outside the roots exists can't be learned from the answer.
        """
        if not path or not path.isprintable() or ".." in Path(path).parts:
            raise _refused(path, "must be a plain path without '..'")
        if len(path) > MAX_PATH_LENGTH:
            raise _refused(path, f"is longer than {MAX_PATH_LENGTH} characters")
        refused = not self._roots.paths
        for root in self._roots.paths:
            try:
                return Folder(str(Path(root) / path), self._roots)
            except OSError as error:
                refused = refused or error.errno == EXDEV
        if refused:
            message = f"is outside the folders that you may load from ({self._called})"
            raise _refused(path, message)
        raise AdapterNotFound(self.missing(path), "lora_path")

    def missing(self, path: str) -> str:
        """The error message for a path that names no folder."""
        below = f" below {self._called}, where relative paths begin"
        where = "" if path.startswith("/") else below
        return f"lora_path {path[:200]!r}: no such folder{where}"

    def contain(self, path: str) -> bool:
        """Whether a root has anything at this relative path, allowed or not."""
        return any(os.path.lexists(Path(root) / path) for root in self._roots.paths)


class AnyFolder:
    """All folders of this machine, for those who run it; it answers as `AdapterRoots` does."""

    def open(self, path: str) -> Folder:
        try:
            return Folder(str(at_home(path).absolute()))
        except NotADirectoryError:
            raise AdapterNotFound(f"{path} is not a folder", "lora_path") from None
        except OSError:
            raise AdapterNotFound(self.missing(path), "lora_path") from None

    def missing(self, path: str) -> str:
        """As that of `AdapterRoots`."""
        return f"there is no folder {path}"

    def contain(self, path: str) -> bool:
        return os.path.lexists(at_home(path))


class Sources:
    """Opens adapters by the paths and URIs that name them.

    file   /folder, relative/folder, file:///folder
    hf     hf://org/name[@revision], and org/name[@revision] unless that is a folder
    https  https://host/adapter.tar.gz, or https://host/folder with the files of an adapter
    s3     s3://bucket/adapter.tar.gz, s3://bucket/folder; gs:// and az:// likewise

    What comes from the web or a bucket may end in #sha256=HEX: the checksum of the tar, or the
    digest of the adapter that is in the folder.
    """

    def __init__(
        self,
        folders: AdapterRoots | AnyFolder | None = None,
        allowed: Allowed | None = None,
        contents: Contents | None = None,
        max_bytes: int = MAX_ADAPTER_BYTES,
    ) -> None:
        """Without `folders`, any folder may be read; without `allowed`, any URI may. Downloads are
        kept in `contents`, by default in the user's cache folder. They may have `max_bytes`, packed
        or not."""
        self.contents = contents or Contents(cache_folder())
        self._folders = folders or AnyFolder()
        self._allowed = allowed or Allowed.everything()
        self.max_bytes = max_bytes
        self._upload: Path | None = None

    def within(self, folders: AdapterRoots) -> Sources:
        """The same, but for the folders that may be read."""
        other = copy(self)
        other._folders = folders
        return other

    def with_upload(self, packed: Path) -> Sources:
        """These sources, and one more, upload://NAME with any name: a tar or a safetensors file
        that lies in a file of our own."""
        more = copy(self)
        more._upload = packed
        return more

    def plain(self, name: str) -> str:
        """The same name as Weft shows it: a path without a scheme, or a URI of another scheme.

        Raises AdapterPathRefused for what is not served, AdapterNotFound for what can't be on the
        hub.
        """
        scheme, separator, place = name.partition("://")
        if not separator:
            return name
        if scheme == "file" and (path := place.removeprefix("localhost")).startswith("/"):
            return unquote(path)
        if scheme == HUB and not is_hub_id(place):
            message = f"{name!r} is not of the form hf://org/name[@revision]"
            raise AdapterNotFound(message, "lora_path")
        if scheme in (*WEB, *BUCKETS):
            self._allowed.check(name)
        elif scheme != HUB and not (scheme == UPLOAD and self._upload):
            served = ", ".join(f"{each}://" for each in ("file", *SCHEMES))
            raise AdapterPathRefused(f"{scheme}:// is not served, only {served}", "lora_path")
        return name

    def open(self, name: str) -> Folder:
        """The folder of an adapter, which is downloaded first if it is elsewhere.

        This may be slow, and is work for a thread. Raises AdapterNotFound, AdapterPathRefused,
        AdapterUnavailable, AdapterError.
        """
        plain = self.plain(name)
        scheme, separator, place = plain.partition("://")
        if scheme == HUB:
            return self._from_hub(place)
        if separator:
            return self._from_afar(plain)
        if not self._on_hub(plain):
            return read_aside(lambda _: self._folders.open(plain))
        try:
            return self._from_hub(plain)
        except AdapterPathRefused as refused:
            message = f"{self._folders.missing(plain)}; {refused.message}"
            raise AdapterNotFound(message, "lora_path") from refused
        except AdapterError as error:
            raise type(error)(
                f"{self._folders.missing(plain)}, and {error.message}", error.param
            ) from error

    def absolute(self, name: str) -> str:
        """The absolute path of a folder; whatever else is named stays as it is."""
        plain = self.plain(name)
        if "://" in plain or self._on_hub(plain):
            return plain
        return str(at_home(plain).absolute())

    def _on_hub(self, path: str) -> bool:
        return is_hub_id(path) and not self._folders.contain(path)

    def _from_hub(self, hub_id: str) -> Folder:
        if not self._allowed.scheme(HUB):
            raise AdapterPathRefused(
                f"{hub_id!r} is fetched from the Hugging Face hub only with --allow-sources hf",
                "lora_path",
            )
        return fetch_adapter(hub_id, self.max_bytes)

    def _from_afar(self, uri: str) -> Folder:
        try:
            return self._kept(uri)
        except OSError as error:
            raise not_kept(error) from error

    def _kept(self, uri: str) -> Folder:
        with self.contents.stage() as stage:
            if uri.startswith(f"{UPLOAD}://"):
                assert self._upload is not None
                files = stage / "adapter"
                files.mkdir()
                unpack(self._upload, files, self.max_bytes)
            else:
                files = download(uri, self._allowed, stage, self.max_bytes)
            return self.contents.keep(files)


def _refused(path: str, why: str) -> AdapterPathRefused:
    return AdapterPathRefused(f"lora_path {path[:200]!r} {why}", "lora_path")


def is_hub_id(text: str) -> bool:
    """Whether this could name a repository of the hub."""
    return ".." not in text and _ID.fullmatch(text) is not None


def fetch_adapter(hub_id: str, max_bytes: int) -> Folder:
    """The folder of an adapter, which is downloaded unless the hub's cache has it. Its weights may
    have `max_bytes`.

    This is slow, and work for a thread. Raises AdapterNotFound if the hub does not have it,
    AdapterInvalid if it is no adapter or a file is too large, AdapterError if it can't be fetched.
    """
    from huggingface_hub.errors import HfHubHTTPError

    found = _ID.fullmatch(hub_id)
    assert found is not None, hub_id
    try:
        folder = _snapshot(found[1], found[2], max_bytes)
    except AdapterInvalid as error:
        raise AdapterInvalid(f"{hub_id!r}: {error.message}", error.param) from None
    except Exception as error:  # of many kinds, from several libraries
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise AdapterNotFound(
                f"the Hugging Face hub has no {hub_id!r}, or it is not public", "lora_path"
            ) from error
        logger.info("%s can't be fetched from the Hugging Face hub: %s", hub_id, error)
        raise AdapterError(
            f"{hub_id!r} can't be fetched from the Hugging Face hub: {_reason(error)}", "lora_path"
        ) from error
    return Folder(str(Path(folder).absolute()))


def _snapshot(name: str, revision: str | None, max_bytes: int) -> str:
    """The path of an adapter in the hub's cache. Its files are downloaded after their sizes are
    known, from the same commit; without the hub, what the cache has counts. Raises AdapterInvalid
    if there are none or one is too large, and what the hub's client raises."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, name, allow_patterns=list(ADAPTER_FILES))
    try:
        files = fetch(revision=revision, dry_run=True)
    except DryRunError as error:
        try:
            return str(fetch(revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise error.__cause__ or error from None
    if not files:
        raise AdapterInvalid(f"it has no file {CONFIG_FILE}", "lora_path")
    for file in files:
        most = MAX_BYTES.get(file.filename, max_bytes)
        if (file.file_size or 0) > most:
            message = f"{file.filename} is larger than {most} bytes, which it may have here"
            raise AdapterInvalid(message, "lora_path")
    return str(fetch(revision=files[0].commit_hash))


def _reason(error: Exception) -> str:
    """What went wrong, without the paths of this machine."""
    from huggingface_hub.constants import HF_HOME

    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0].replace(HF_HOME, "...") if lines else type(error).__name__
