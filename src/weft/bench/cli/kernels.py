"""`weft bench kernels` times single kernels; `weft tune` finds how to cut them for a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from weft.bench.cli.options import (
    Measure,
    Model,
    Rank,
    Seed,
    measuring,
    output_option,
    workload_option,
)
from weft.core.errors import ConfigError
from weft.terminal.options import HELP, adapters_option, ending_in_one_line, model_option

Device = Annotated[Literal["auto", "cpu", "cuda"], model_option(help=HELP["device"])]


@measuring
def kernels(
    measure: Measure,
    model: Model = None,
    device: Device = "auto",
    lora_backend: Annotated[
        str, adapters_option(metavar="NAME", help=HELP["lora_backend"])
    ] = "auto",
    quantization: Annotated[
        Literal["fp8-weight-only", "int4"] | None,
        model_option(help="Hold the base's matrices in 8 or 4 bits."),
    ] = None,
    batch: Annotated[
        str, workload_option(metavar="N,...", help="Rows of the batch.")
    ] = "1,8,32,64,256",
    pattern: Annotated[
        str,
        workload_option(metavar="NAME,...", help="Adapters of the rows, as in weft bench decode."),
    ] = "none,identical,uniform,skewed,distinct",
    rank: Rank = 16,
    repeats: Annotated[
        int, workload_option(help="Each result is the median of this many runs.", min=1)
    ] = 9,
    seed: Seed = 0,
) -> None:
    """Measure each kernel for linear layers and adapters, against the time to move its bytes.

    Times each product of a decoder layer, and all of them: the base product (base), the same with
    the adapters' part (linear), and the halves of that part if they are separate launches (shrink,
    expand). The floor is the time to read and write their bytes at the bandwidth that the same run
    measures. Exit status 1 if a result is further from fp32 than rounding explains.
    """
    from weft.bench.kernels import KernelPlan, run_kernels
    from weft.bench.workload import PATTERNS, parse_counts, parse_names

    plan = KernelPlan(
        batches=parse_counts(batch, "batch"),
        patterns=parse_names(pattern, PATTERNS, "pattern"),
        rank=rank,
        repeats=repeats,
        seed=seed,
        quantization=quantization,
    )
    measure(run_kernels, model, device, lora_backend, plan)


def tune(
    model: Model = None,
    device: Device = "auto",
    tensor_parallel_size: Annotated[
        int,
        model_option(
            help="Tune for the shapes that a model has on each of this many GPUs. Tuning needs"
            " only one.",
            min=1,
        ),
    ] = 1,
    rank: Rank = 16,
    repeats: Annotated[
        int, workload_option(help="Each time is the median of this many runs.", min=1)
    ] = 9,
    output: Annotated[
        Path | None,
        output_option(
            metavar="FILE.json",
            help="The file to write the table to. Its entries for other shapes are kept."
            " Default: weft/tuned/DEVICE.json in the user's cache folder, where Weft finds it.",
        ),
    ] = None,
) -> None:
    """Find the fastest settings of the kernels for this device and a model's shape.

    Takes minutes, and writes a table that the next start uses. Weft comes with tables for some
    devices; entries of yours take precedence. For shapes that no table has, Weft chooses settings
    by rule. The settings change speed only: adapters add the same bits to a product.
    """
    with ending_in_one_line():
        from weft.kernels.linear import HAS_TRITON

        if not HAS_TRITON:
            raise ConfigError("weft tune needs Triton, which only runs on Linux", "device")
        from weft.bench.tune import run_tune

        run_tune(model, device, tensor_parallel_size, rank, repeats, output)
