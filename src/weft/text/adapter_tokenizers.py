"""The tokenizers and chat templates that adapters bring."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from weft.core.errors import refuse_file
from weft.core.files import MAX_BYTES, TOKENIZER_FILES
from weft.core.folders import Deadline, Folder, read_aside
from weft.text.adapter_tokenizer import AdapterTokenizer
from weft.text.chat_parser import ALL_MARKS
from weft.text.reader import TokenReader
from weft.text.sandbox.jobs import LoadTokenizer
from weft.text.sandbox.pool import Sandbox
from weft.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_KEPT, MAX_KEPT_BYTES = 32, 128 << 20
"""How many unused tokenizers are kept, for adapters that will bring the same files, and how large
the files of those with another vocabulary than the base's may be together. These take about five
times as much memory."""

NO_FORMS = (
    "structured_outputs are made of the base model's tokens, and the tokenizer of this adapter has"
    " others"
)
"""The answer to requests of an adapter whose tokenizer does not extend the base's."""


@dataclass(frozen=True, slots=True)
class OwnTokenizer:
    """The tokenizer and chat template of an adapter, used instead of the base's."""

    tokenizer: TokenReader
    """It has the base's chat template if the adapter brings none."""
    eos_ids: tuple[int, ...]
    """Tokens that end its outputs, in addition to the model's own."""
    extends_base: bool
    """Whether it has all tokens of the base, under the same ids."""


class AdapterTokenizers:
    """The tokenizers of adapters, by the adapters' names. `read` and `load` are for any thread, the
    rest for one."""

    def __init__(self, base: Tokenizer | None, ignore: bool = False) -> None:
        """If `base` is None, texts are not served and nothing is ever loaded. With `ignore`,
        adapters use the base's tokenizer and template whatever they bring."""
        self.base = base
        self.sandbox = Sandbox()
        self._ignore = ignore
        self._by_name: dict[str, OwnTokenizer] = {}
        self._kept: OrderedDict[str, tuple[OwnTokenizer | None, int]] = OrderedDict()
        """What was loaded, by a digest of the files, and the bytes that count towards
        MAX_KEPT_BYTES."""
        self._lock = threading.Lock()

    def read(self, folder: Folder) -> dict[str, bytes]:
        """Read the tokenizer's files in an adapter's folder. This blocks: call it on a thread.

        Raises AdapterError, naming the file that can't be read or is too large.
        """
        if self.base is None:
            return {}
        return read_aside(lambda deadline: _read(folder, deadline))

    def load(self, files: Mapping[str, bytes]) -> OwnTokenizer | None:
        """The tokenizer made of these files, or None if it is the base's. This is slow.

        Raises AdapterInvalid, naming the file, for what is malformed, asks for remote code, or
        takes too much time or memory; if adapters' tokenizers are ignored, for added tokens.
        """
        if self.base is None or not files:
            return None
        if self._ignore:
            _check_ignored(files, self.base)
            return None
        digest = _digest(files)
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest][0]
        own = self._load(files, self.base)
        of_base = own is None or isinstance(own.tokenizer, Tokenizer)
        num_bytes = 0 if of_base else sum(map(len, files.values()))
        with self._lock:
            self._kept[digest] = own, num_bytes
            while len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return own

    @property
    def _num_kept_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._kept.values())

    def put(self, name: str, own: OwnTokenizer | None) -> None:
        """Requests of this adapter use `own` from now on; None stands for the base's."""
        if own is None:
            self._by_name.pop(name, None)
        else:
            self._by_name[name] = own

    def get(self, name: str) -> OwnTokenizer | None:
        """The tokenizer of this adapter, or None if it has the base's."""
        return self._by_name.get(name)

    def _load(self, files: Mapping[str, bytes], base: Tokenizer) -> OwnTokenizer | None:
        first = next(iter(files))
        with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as folder:
            job = LoadTokenizer(
                dict(files), self._base_files, base.class_name, base.fingerprint, folder, ALL_MARKS
            )
            loaded = self.sandbox.load(job, first)
        templates = loaded.templates or base.templates
        if loaded.vocabulary is not None and loaded.material is not None:
            own = AdapterTokenizer(loaded.vocabulary, templates, loaded.eos_ids, loaded.material)
            return OwnTokenizer(own, own.eos_ids, own.extends(base, base.vocab()))
        if templates == base.templates:
            return None
        if not base.is_portable:
            refuse_file(first, "this model's tokenizer can't be used with adapters' chat templates")
        _ = base.material  # it is made once for all copies of the base
        return OwnTokenizer(base.with_template(templates), (), True)

    @cached_property
    def _base_files(self) -> dict[str, bytes]:
        """The files of the base's tokenizer."""
        assert self.base is not None
        with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as name:
            self.base.save(Path(name))
            return {file.name: file.read_bytes() for file in Path(name).iterdir() if file.is_file()}


# -- reading ---------------------------------------------------------------------------------------


def _read(folder: Folder, deadline: Deadline) -> dict[str, bytes]:
    files = {}
    for name in TOKENIZER_FILES:
        if content := folder.read(name, MAX_BYTES[name], deadline):
            files[name] = bytes(content)
    return files


def _digest(files: Mapping[str, bytes]) -> str:
    sha = hashlib.sha256()
    for name, content in files.items():
        sha.update(f"{name} {len(content)} ".encode())
        sha.update(content)
    return sha.hexdigest()


# -- adapters whose tokenizers are ignored ---------------------------------------------------------


_BESIDE_TOKENS = 1000
"""In a tokenizer's file, the sign by which tokens are counted may also stand elsewhere: so often,
and once more for each token of the base."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _decoded(
    files: Mapping[str, bytes], name: str, kind: type[T], sign: bytes, base: Tokenizer
) -> T:
    """The tokens in a file; `sign` is there for each of them. Millions of them would hold up other
    threads, and are not the base's."""
    content = files.get(name, b"{}")
    if content.count(sign) > 2 * base.vocab_size + _BESIDE_TOKENS:
        refuse_file(name, "adds more tokens than the base has")
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        refuse_file(name, f"can't be read to see whether it adds tokens ({error})")


def _check_ignored(files: Mapping[str, bytes], base: Tokenizer) -> None:
    """Raises AdapterInvalid for a tokenizer with tokens that the base's lacks."""
    name, _, _, more, _ = TOKENIZER_FILES
    added = _decoded(files, name, _TokenizerFile, b"{", base).added_tokens
    tokens = {token.content: (token.id, name) for token in added}
    others = _decoded(files, more, dict[str, int], b":", base)
    tokens |= {token: (token_id, more) for token, token_id in others.items()}
    vocab = base.vocab() if tokens else {}
    for token, (token_id, file) in tokens.items():
        if vocab.get(token) != token_id:
            refuse_file(
                file,
                f"{token[:80]!r} is no token of the base's, and this server ignores adapters'"
                " tokenizers (--adapter-templates off)",
            )
