"""The formats in which the base's matrices can be held, by the names that `--quantization` takes.

A new format is a file with its `Weight` and a row in FORMATS: the flag's choices and help, and what
errors list, are read from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from weft.core.errors import ConfigError

if TYPE_CHECKING:  # the command line reads FORMATS, and does without torch
    from torch import Tensor

    from weft.kernels.linear import Weight


@dataclass(frozen=True, slots=True)
class Format:
    """One way to hold a matrix."""

    maker: str
    """`module:function` of what makes a `Weight` of a matrix (O, I); imported when first used."""
    rounds_inputs: bool
    """Whether inputs are rounded too. An input that was summed in another order may then be rounded
    otherwise, so that results can't be compared closely."""
    help: str
    by_projection: bool = False
    """Whether each projection of a packed matrix is put into the format on its own, and stays
    dense. Then a rank's share alone can't be put into it."""

    def quantize(self, matrix_OI: Tensor) -> Weight:
        """Put a matrix (O, I) into this format, on the device where it is."""
        module, _, function = self.maker.partition(":")
        weight: Weight = getattr(import_module(module), function)(matrix_OI)
        return weight


VALUES = "values"
"""The name of the format in which matrices stay as they are read."""

FORMATS: dict[str, Format] = {
    "fp8": Format(
        "weft.kernels.quant.fp8:quantize_dynamic",
        rounds_inputs=True,
        help="8-bit floating point, and inputs are rounded to 8 bits too",
    ),
    "fp8-weight-only": Format(
        "weft.kernels.quant.rounded:in_fp8",
        rounds_inputs=False,
        help="8-bit floating point, and inputs stay as they are",
    ),
    "int4": Format(
        "weft.kernels.quant.rounded:in_int4",
        rounds_inputs=False,
        help="4-bit integers with a scale for each 128 inputs, and inputs stay as they are",
    ),
    "nf4-values": Format(
        "weft.kernels.quant.nf4:nf4_values",
        rounds_inputs=False,
        help="the values of bitsandbytes' 4 bits, on which QLoRA adapters were trained, in 16 bits",
        by_projection=True,
    ),
    VALUES: Format(
        "weft.kernels.linear:DenseWeight",
        rounds_inputs=False,
        help="16 bits, even for a quantized checkpoint, which otherwise keeps its own bits on a"
        " GPU",
    ),
}


def rounds_inputs(name: str | None) -> bool:
    """Whether products with matrices of that format, None for dense ones, round their inputs."""
    return name is not None and format_named(name).rounds_inputs


def format_named(name: str) -> Format:
    """The format of that name. Raises ConfigError for one that is not in FORMATS."""
    if name not in FORMATS:
        message = f"--quantization has no format {name!r}; there are: {', '.join(FORMATS)}"
        raise ConfigError(message, "quantization")
    return FORMATS[name]
