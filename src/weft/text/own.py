"""Tokenizers and chat templates that adapters bring along."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from weft.core.errors import AdapterInvalid
from weft.core.files import TOKENIZER_FILES
from weft.core.folders import Deadline, Folder, read_aside
from weft.text.tokenizer import Tokenizer

MAX_BYTES = {"tokenizer.json": 64 << 20, "chat_template.jinja": 1 << 20}
"""How large these files may be; any other may have MAX_OTHER_BYTES."""
MAX_OTHER_BYTES = 8 << 20
MAX_KEPT = 32
"""How many tokenizers are kept, beside those in use, for adapters that bring the same files."""

NO_FORMS = (
    "structured_outputs are made of the base model's tokens, and the tokenizer of this adapter has"
    " others"
)
"""The answer to requests of an adapter whose tokenizer does not extend the base's."""

_TOKENIZER, _CONFIG, _, _ADDED, _TEMPLATE = TOKENIZER_FILES
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Transformers' own, which marks the text of assistants."""


@dataclass(frozen=True, slots=True)
class OwnTokenizer:
    """What an adapter's texts are read and written with, in place of the base's."""

    tokenizer: Tokenizer
    """It has the base's chat template if the adapter brings none."""
    eos_ids: tuple[int, ...]
    """These tokens end its outputs, as the model's own do."""
    extends_base: bool
    """Whether all tokens of the base are in it, under the same ids."""


class AdapterTokenizers:
    """The tokenizers of adapters, by the adapters' names. `read` and `load` are for any thread, the
    rest for one."""

    def __init__(self, base: Tokenizer | None) -> None:
        """If `base` is None, texts are not served and nothing is ever loaded."""
        self.base = base
        self._by_name: dict[str, OwnTokenizer] = {}
        self._kept: OrderedDict[str, OwnTokenizer | None] = OrderedDict()
        """What was loaded, by a digest of the files."""
        self._lock = threading.Lock()

    def read(self, folder: Folder) -> dict[str, bytes]:
        """The files in the folder of an adapter that make a tokenizer of its own; for a thread.

        Raises AdapterError, naming the file that can't be read or is too large.
        """
        if self.base is None:
            return {}
        return read_aside(lambda deadline: _read(folder, deadline))

    def load(self, files: Mapping[str, bytes]) -> OwnTokenizer | None:
        """The tokenizer that these files are, or None if it is the base's. This is slow.

        Raises AdapterInvalid, naming the file, for what is malformed or asks for remote code.
        """
        if self.base is None or not files:
            return None
        digest = _digest(files)
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = _load(files, self.base)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(digest)
            return self._kept[digest]

    def put(self, name: str, own: OwnTokenizer | None) -> None:
        """Requests of this adapter use `own` from now on; None stands for the base's."""
        if own is None:
            self._by_name.pop(name, None)
        else:
            self._by_name[name] = own

    def get(self, name: str) -> OwnTokenizer | None:
        """The tokenizer of this adapter, or None if it has the base's."""
        return self._by_name.get(name)


# -- reading ---------------------------------------------------------------------------------------


def _refuse(file: str, why: str) -> NoReturn:
    raise AdapterInvalid(f"{file}: {why}", file)


def _read(folder: Folder, deadline: Deadline) -> dict[str, bytes]:
    files = {}
    for name in TOKENIZER_FILES:
        if content := folder.read(name, MAX_BYTES.get(name, MAX_OTHER_BYTES), deadline):
            files[name] = bytes(content)
    return files


def _digest(files: Mapping[str, bytes]) -> str:
    sha = hashlib.sha256()
    for name, content in files.items():
        sha.update(f"{name} {len(content)} ".encode())
        sha.update(content)
    return sha.hexdigest()


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    if name not in files:
        return {}
    try:
        found = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        _refuse(name, f"not JSON ({str(error)[:200]})")
    if not isinstance(found, dict):
        _refuse(name, "does not hold an object")
    return found


# -- loading ---------------------------------------------------------------------------------------


def _load(files: Mapping[str, bytes], base: Tokenizer) -> OwnTokenizer | None:
    own = _tokenizer(files, base)
    template = own.chat_template
    if template is not None:
        _check_template(template, _TEMPLATE if _TEMPLATE in files else _CONFIG)
    own = own.with_template(template or base.chat_template)
    for token, token_id in _object(files, _ADDED).items():
        if own.id_of(token) != token_id:
            _refuse(_ADDED, f"{token[:80]!r} has another id in the tokenizer, or none")
    if own.fingerprint != base.fingerprint:
        return OwnTokenizer(own, own.eos_ids, own.extends(base))
    if own.chat_template == base.chat_template:
        return None
    return OwnTokenizer(base.with_template(own.chat_template), (), True)


def _tokenizer(files: Mapping[str, bytes], base: Tokenizer) -> Tokenizer:
    """The tokenizer that these files describe; what is missing is the base's. It is loaded from
    copies in a folder of their own, so that nothing else can be read by way of them."""
    config = _object(files, _CONFIG)
    if config.get("auto_map"):
        _refuse(_CONFIG, "auto_map asks for remote code, which is never run")
    config = {name: value for name, value in config.items() if not name.endswith("_file")}
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as name:
        folder = Path(name)
        if _TOKENIZER not in files or _CONFIG not in files:
            base.save(folder)
            of_base = json.loads((folder / _CONFIG).read_bytes())
            if _TEMPLATE in files or "chat_template" in config:
                of_base.pop("chat_template", None)
                (folder / _TEMPLATE).unlink(missing_ok=True)
            config = of_base | config
        for file, content in files.items():
            (folder / file).write_bytes(content)
        config.setdefault("tokenizer_class", base.class_name)
        (folder / _CONFIG).write_text(json.dumps(config))
        try:
            return Tokenizer.from_folder(folder)
        except Exception as error:  # of whatever kind the broken file provokes
            first = next((file for file in (_TOKENIZER, _CONFIG) if file in files), _TEMPLATE)
            reason = " ".join(str(error).split()).replace(name, "")[:300]
            _refuse(first, f"no tokenizer can be made of it ({reason})")


def _check_template(template: str, file: str) -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template.encode(errors="replace")) > MAX_BYTES[_TEMPLATE]:
        _refuse(file, "the chat template is larger than any that is served here")
    try:
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        environment.parse(_GENERATION_TAG.sub("", template))
    except (TemplateError, RecursionError) as error:
        _refuse(file, f"the chat template is malformed: {str(error)[:200]}")
