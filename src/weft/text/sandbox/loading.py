"""Making a tokenizer of an adapter's files, inside of a worker process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import refuse_file
from weft.core.files import TOKENIZER_FILES
from weft.text.adapter_tokenizer import MAX_TOKENS
from weft.text.sandbox.jobs import LoadedTokenizer, LoadTokenizer, TokenTable
from weft.text.sandbox.limits import MAX_TEMPLATE_BYTES
from weft.text.tokenizer import Tokenizer

_TOKENIZER, _CONFIG, _SPECIAL, _ADDED, _TEMPLATE = TOKENIZER_FILES
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Transformers' own, which marks the text of assistants."""


def load(job: LoadTokenizer) -> LoadedTokenizer:
    """What the files describe; what is missing is the base's. Raises AdapterInvalid."""
    files = job.files
    if files.keys() == {_TEMPLATE}:
        template = files[_TEMPLATE].decode(errors="replace")
        _check_template(template, _TEMPLATE)
        return LoadedTokenizer(template, [])
    own, templates = _tokenizer(job), None
    brings_one = _TEMPLATE in files or _object(files, _CONFIG).get("chat_template")
    if brings_one and own.chat_template:
        templates = own.templates
    for template in templates.values() if isinstance(templates, dict) else [templates or ""]:
        _check_template(template, _TEMPLATE if _TEMPLATE in files else _CONFIG)
    vocab = own.vocab()
    for token, token_id in _object(files, _ADDED).items():
        if vocab.get(token) != token_id:
            refuse_file(_ADDED, f"{token[:80]!r} has another id in the tokenizer, or none")
    if own.fingerprint == job.base_fingerprint:
        return LoadedTokenizer(templates, [])
    if not own.is_portable:
        refuse_file(_TOKENIZER, "there is none, and no other kind of tokenizer is served")
    vocabulary = _vocabulary(own, vocab, job.marks)
    return LoadedTokenizer(templates, list(own.eos_ids), own.material, vocabulary)


def _vocabulary(own: Tokenizer, vocab: Mapping[str, int], marks: tuple[str, ...]) -> TokenTable:
    added = dict(own.added_tokens)
    num_ids = max([*vocab.values(), *added], default=-1) + 1
    if num_ids > MAX_TOKENS:
        refuse_file(
            _TOKENIZER, f"it has a token {num_ids - 1}; at most {MAX_TOKENS} tokens are served"
        )
    pieces: list[str | None] = [None] * num_ids
    for piece, token_id in vocab.items():
        pieces[token_id] = piece
    for token_id, piece in added.items():
        pieces[token_id] = piece
    found = {mark: own.mark_id(mark) for mark in marks}
    ids = {mark: token_id for mark, token_id in found.items() if token_id is not None}
    return TokenTable(pieces, added, sorted(own.special_ids), own.decoder, own.vocab_size, ids)


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    if name not in files:
        return {}
    try:
        found = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        refuse_file(name, f"not JSON ({str(error)[:200]})")
    if not isinstance(found, dict):
        refuse_file(name, "does not hold an object")
    return found


def _tokenizer(job: LoadTokenizer) -> Tokenizer:
    """The tokenizer of the files. It is loaded from copies in a folder of their own, so that
    nothing else can be read by way of them."""
    files, folder = job.files, Path(job.folder)
    config, *_ = (_object(files, name) for name in (_CONFIG, _SPECIAL, _ADDED))
    if config.get("auto_map"):
        refuse_file(_CONFIG, "auto_map asks for remote code, which is never run")
    config = {name: value for name, value in config.items() if not name.endswith("_file")}
    copies = dict(files)
    if _TOKENIZER not in files or _CONFIG not in files:
        copies = job.base_files | copies
        of_base = _object(job.base_files, _CONFIG)
        if _TEMPLATE in files or "chat_template" in config:
            of_base.pop("chat_template", None)
            if _TEMPLATE not in files:
                copies.pop(_TEMPLATE, None)
        config = of_base | config
    config.setdefault("tokenizer_class", job.base_class)
    copies[_CONFIG] = json.dumps(config).encode()
    for file, content in copies.items():
        (folder / file).write_bytes(content)
    try:
        return Tokenizer.from_folder(folder)
    except BaseException as error:  # of whatever kind the broken file provokes, panics too
        first = next(file for file in TOKENIZER_FILES if file in files)
        reason = " ".join(str(error).split()).replace(job.folder, "")[:300]
        refuse_file(first, f"no tokenizer can be made of it ({reason})")


def _check_template(template: str, file: str) -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        refuse_file(file, "the chat template is larger than any that is served here")
    try:
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        environment.parse(_GENERATION_TAG.sub("", template))
    except (TemplateError, RecursionError) as error:
        refuse_file(file, f"the chat template is malformed: {str(error)[:200]}")
