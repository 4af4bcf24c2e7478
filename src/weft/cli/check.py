"""`weft check`: says whether an adapter can be served, without the base's weights or a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from weft.checkpoint.config import PeftConfig, layer_of
from weft.checkpoint.examine import Examined, examine
from weft.checkpoint.kinds import find_kind, parse_config, parse_files
from weft.checkpoint.read import DTYPES, MAX_CONFIG_BYTES, AdapterFiles, read_adapter
from weft.checkpoint.refuse import show
from weft.checkpoint.trained_on import trained_on, was_in_four_bits
from weft.core.config import MAX_RANK
from weft.core.errors import AdapterError, AdapterInvalid, ConfigError
from weft.core.files import CONFIG_FILE
from weft.core.folders import Folder, at_home
from weft.core.targets import Target, TargetTable
from weft.models.blueprint import target_table
from weft.models.config import load_model_config
from weft.registry import Sources

if TYPE_CHECKING:
    from weft.checkpoint.pack import AdapterImage

_HELP = {
    "peft_type": "Train a LoRA, or merge this adapter into a base of its own.",
    "task_type": "Train for CAUSAL_LM, SEQ_CLS or FEATURE_EXTRACTION.",
    **dict.fromkeys(
        (
            "bias",
            "ensure_weight_tying",
            "layers_to_transform",
            "lora_bias",
            "modules_to_save",
            "target_modules",
            "trainable_token_indices",
            "use_dora",
        ),
        "The configuration and the tensors are not of one training.",
    ),
}
"""What to do about a refusal, by the refused field; `_help` knows the rest."""

_OTHER_BASE = ("no such projection", "has the shape", "larger than any")
"""Parts of messages that tell of an adapter for another base."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason not to serve the adapter."""

    param: str | None
    """The field, tensor or file."""
    message: str
    help: str | None


@dataclass(frozen=True, slots=True)
class Adapted:
    """Projections of one kind that are adapted alike."""

    target: str
    layers: str
    """Such as "0-3, 7"; empty for what lies outside the layers."""
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class CheckedFacts:
    """What a served adapter is."""

    kind: str
    """LoRA, or what is served as one."""
    conversion_error: float
    """How far that is off at worst, as a relative Frobenius norm."""
    provisional: bool
    """Whether the verdict depends on the base's weights, which were not read; sizes are upper
    bounds then."""
    rank: int
    """`r`, which counts for targets that `rank_pattern` does not name."""
    invocation_token_ids: tuple[int, ...]
    """The token ids from which an activated LoRA is active."""
    alpha: float
    """`lora_alpha`, which counts for targets that `alpha_pattern` does not name."""
    rslora: bool
    changes: tuple[str, ...]
    """The modules that it changes in any way, without the layer."""
    targets: tuple[Adapted, ...]
    """The projections that have a low-rank update."""
    dtypes: tuple[str, ...]
    """The precisions of the file's tensors."""
    file_bytes: int
    digest: str
    device_bytes: int
    """The size of its image in `device_dtype`."""
    device_dtype: str
    trained_on: str | None
    """The config's base_model_name_or_path, which nothing enforces."""


@dataclass(frozen=True, slots=True)
class AdapterVerdict:
    """The verdict: either `facts` or `refusals`."""

    adapter: str
    base: str
    served: bool
    facts: CheckedFacts | None
    refusals: tuple[Refusal, ...]


def check_adapter(
    adapter: str, base: str, max_rank: int, conversion_tolerance: float
) -> AdapterVerdict:
    """Ask the code that the engine loads adapters with.

    Raises ConfigError when there is no such base or adapter, or the base is not served.
    """
    config = load_model_config(base)
    table = target_table(config)
    try:
        folder = Sources().open(adapter)
    except AdapterError as error:
        raise ConfigError(error.message, "adapter") from None
    with folder:
        try:
            files = read_adapter(folder, table, max_rank)
            image = _image(files, table, config.dtype, max_rank, conversion_tolerance)
        except AdapterError as error:
            refusals = tuple(_refusals(folder, error, max_rank))
            if error.param == CONFIG_FILE and not refusals[0].help:
                refusals = (replace(refusals[0], help=_adapters_in(adapter)),)
            return AdapterVerdict(adapter, base, False, None, refusals)
    facts = _facts(files, image, table, config.dtype, max_rank)
    return AdapterVerdict(adapter, base, True, facts, ())


def _image(
    files: AdapterFiles, table: TargetTable, dtype: str, max_rank: int, tolerance: float
) -> Examined | AdapterImage:
    if found := examine(files, table, dtype, max_rank, tolerance):
        return found
    import torch

    from weft.checkpoint.pack import pack_image

    return pack_image(files, table, getattr(torch, dtype), max_rank, conversion_tolerance=tolerance)


_PROVISIONAL = """\
This depends on the base's weights too, which were not read: the server looks at them when it loads
the adapter, and may refuse it then. Sizes are upper bounds."""


def show_report(report: AdapterVerdict) -> str:
    """Lines for people."""
    verdict = "served" if report.served else "refused"
    head = f"{verdict}: {report.adapter} on {report.base}"
    if report.facts is not None and report.facts.provisional:
        head += f"\n\n{_PROVISIONAL}"
    if report.facts is None:
        return "\n\n".join([head, *map(_show_refusal, report.refusals)])
    rows = _rows(report.facts, report.base)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    targets = ["", *_show_targets(report.facts.targets)] if report.facts.targets else []
    return "\n".join([head, "", *lines, *targets])


# -- why not ---------------------------------------------------------------------------------------


def _refusals(folder: Folder, first: AdapterError, max_rank: int) -> Iterator[Refusal]:
    """The first refusal; if a field of the config is at fault, those of its other fields too."""
    fields = _fields(folder) if isinstance(first, AdapterInvalid) else {}
    error: AdapterError | None = first
    while error is not None:
        yield Refusal(error.param, error.message, _help(error, fields, max_rank))
        if error.param not in fields:
            return
        del fields[error.param]
        error = _config_error(fields, max_rank)


def _adapters_in(folder: str) -> str | None:
    """Help for a folder that is no adapter but holds some, such as a trainer's checkpoints."""
    found = [path.parent.name for path in at_home(folder).glob(f"*/{CONFIG_FILE}")]
    found.sort(key=lambda name: (len(name), name))  # checkpoint-500, checkpoint-1000
    return f"These folders in it have one: {', '.join(found)}." if found else None


def _config_error(fields: dict[str, object], max_rank: int) -> AdapterError | None:
    try:
        parse_config(json.dumps(fields).encode(), max_rank)
    except AdapterError as error:
        # Without its kind the fields of a config mean nothing.
        return error if error.param in fields else None
    return None


def _fields(folder: Folder) -> dict[str, object]:
    """The config's fields; none when it is not an object."""
    try:
        fields = json.loads(bytes(folder.read(CONFIG_FILE, MAX_CONFIG_BYTES) or b""))
    except (AdapterError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _help(error: AdapterError, fields: dict[str, object], max_rank: int) -> str | None:
    param = error.param or ""
    if param in _HELP:
        return _HELP[param]
    if param in ("r", "rank_pattern"):
        return f"--max-lora-rank allows up to {MAX_RANK}." if max_rank < MAX_RANK else None
    if "NaN" in error.message:
        return "The training diverged; take an earlier checkpoint."
    if any(sign in error.message for sign in _OTHER_BASE):
        trained_on = fields.get("base_model_name_or_path")
        return f"It says that it was trained on {show(trained_on)}." if trained_on else None
    return None


def _show_refusal(refusal: Refusal) -> str:
    return "\n".join(f"  {line}" for line in (refusal.message, refusal.help) if line)


# -- what it is ------------------------------------------------------------------------------------


def _facts(
    files: AdapterFiles,
    image: Examined | AdapterImage,
    table: TargetTable,
    dtype: str,
    max_rank: int,
) -> CheckedFacts:
    config, tensors = parse_files(files, max_rank)
    stored = {tensor.dtype for tensor in tensors.values()}
    return CheckedFacts(
        kind=find_kind(config.peft_type).title,
        conversion_error=image.conversion_error,
        provisional=image.provisional,
        rank=config.r,
        invocation_token_ids=config.invocation,
        alpha=config.alpha,
        rslora=config.use_rslora,
        changes=image.targets,
        targets=tuple(_adapted(config, image, table)),
        dtypes=tuple(sorted(name for name, dtype in DTYPES.items() if dtype in stored)),
        file_bytes=len(files.config) + len(files.weights),
        digest=image.digest,
        device_bytes=image.num_bytes,
        device_dtype=dtype,
        trained_on=trained_on(files.config),
    )


def _adapted(
    config: PeftConfig, image: Examined | AdapterImage, table: TargetTable
) -> Iterator[Adapted]:
    alike: dict[tuple[str, int, float], list[Target]] = {}
    for target in table.targets:
        rank = image.layout.rank[target.slice]
        if rank:
            # A conversion includes the scale.
            scale = config.scale_of(target.name, rank) if config.peft_type == "LORA" else 1.0
            key = target.suffix, rank, scale
            alike.setdefault(key, []).append(target)
    order = list(image.targets).index
    for (suffix, rank, scale), targets in sorted(alike.items(), key=lambda item: order(item[0][0])):
        yield Adapted(suffix, _ranges(layer_of(target.name) for target in targets), rank, scale)


def _ranges(layers: Iterable[int | None]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if layer is None:
            continue
        if runs and runs[-1][-1] == layer - 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _rows(facts: CheckedFacts, base: str) -> list[tuple[str, str]]:
    ranks = sorted({adapted.rank for adapted in facts.targets})
    scales = sorted({adapted.scale for adapted in facts.targets})
    tokens = ", ".join(map(str, facts.invocation_token_ids))
    updates = [
        ("rank", ", ".join(map(str, ranks))),
        ("alpha", f"{facts.alpha:g}"),
        ("scale", ", ".join(f"{scale:.4g}" for scale in scales)),
    ]
    return [
        ("kind", "LoRA, rank-stabilised (rsLoRA)" if facts.rslora else _kind(facts)),
        *(updates if ranks else [("changes", ", ".join(facts.changes))]),
        ("dtype", ", ".join(facts.dtypes)),
        ("files", decimal(facts.file_bytes)),
        ("on the device", _on_device(facts)),
        ("digest", facts.digest),
        ("trained on", _trained_on(facts.trained_on, base)),
        *([("activated by", f"the token ids {tokens} in the prompt")] if tokens else []),
    ]


def _kind(facts: CheckedFacts) -> str:
    if facts.kind == "LoRA":
        return facts.kind
    return f"{facts.kind}, served with an error of {facts.conversion_error:.2g} at worst"


def _on_device(facts: CheckedFacts) -> str:
    size = f"{decimal(facts.device_bytes)} as {facts.device_dtype}"
    if facts.device_dtype == "float32":
        return size
    return f"{size}; twice that on a CPU, which serves float32"


def _trained_on(trained_on: str | None, base: str) -> str:
    if trained_on is None:
        return "it does not say"
    if Path(trained_on).name == Path(base).resolve().name:
        return show(trained_on)
    if was_in_four_bits(trained_on):
        return f"{show(trained_on)}, in 4 bits: the base in 16 bits gives other answers"
    return f"{show(trained_on)}; make sure that this is the base given"


def _show_targets(targets: tuple[Adapted, ...]) -> Iterator[str]:
    width = max(len("layers"), *(len(adapted.layers) for adapted in targets))
    yield f"  {'target':<12}  {'layers':<{width}}  rank  scale"
    for adapted in targets:
        yield (
            f"  {adapted.target:<12}  {adapted.layers or '-':<{width}}"
            f"  {adapted.rank:>4}  {adapted.scale:.4g}"
        )
