"""Packed weights: their layout, products with them in Triton's interpreter, and how those of a
quantized checkpoint are loaded, all against the values that are read without packing.

The interpreter cuts bfloat16 where a GPU rounds it, so products are compared in float16. Sums are
in fp32 and y is rounded once, 2^-11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fp8_cases import as_fp8_weight
from lora_pools import batch_of
from test_triton_linear import make_backend

from weft.bench.engine import preset_folder
from weft.core.shards import Shard
from weft.kernels.linear import DenseWeight
from weft.kernels.quant import FORMATS
from weft.kernels.quant.packed import (
    BITS,
    Codes,
    Coding,
    fits,
    pack_words,
    unpack_words,
)
from weft.kernels.quant.packed_weight import PackedWeight, concatenated, pack
from weft.kernels.quant.rounded import in_fp8, in_int4
from weft.models.blueprint import model_shard
from weft.models.config import load_model_config
from weft.models.family import FUSED_MLP_NAMES
from weft.models.loading import allocate_weights
from weft.models.matrices import LinearMatrices
from weft.models.quantized.values import of_codes
from weft.models.weights import places_of

pytest.importorskip("triton")

from weft.kernels.quant import gluon_packed_many, triton_packed, triton_values
from weft.kernels.quant.triton_packed import Form
from weft.kernels.triton_base import INTERPRETED
from weft.kernels.tuned import MEETING_FLOATS

interpreted = pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are for a GPU")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def make_codes(coding: Coding, outputs: int, inputs: int, group: int, dtype: torch.dtype) -> Codes:
    generator = torch.Generator().manual_seed(group)
    most = 1 << BITS[coding]
    codes = torch.randint(0, most, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group, generator=generator) / 64).to(dtype)
    if coding == "e4m3":
        codes[codes % 128 == 127] = 8  # is not a number
        return Codes(coding, codes, scales)
    zeros = torch.randint(0, most, scales.shape, generator=generator, dtype=torch.int32)
    return Codes(coding, codes, scales, zeros)


KINDS: list[tuple[Coding, int, torch.dtype, torch.dtype]] = [
    ("int4", 128, BF16, BF16),
    ("int4", 32, F16, F16),
    ("int4", 64, F16, BF16),
    ("int8", 512, BF16, BF16),
    ("int8", 32, F16, F16),
    ("e4m3", 512, BF16, BF16),
    ("e4m3", 128, F32, BF16),
    ("e4m3", 128, F32, F16),
]


@pytest.mark.parametrize(("coding", "group", "scale", "dtype"), KINDS)
def test_the_layout_keeps_the_values(
    coding: Coding, group: int, scale: torch.dtype, dtype: torch.dtype
) -> None:
    codes = make_codes(coding, 128, 512, group, scale)
    words = pack_words(codes.codes_OK, BITS[coding])
    assert torch.equal(unpack_words(words, BITS[coding]), codes.codes_OK)
    assert fits(codes, dtype)
    weight = pack(codes, dtype)
    assert weight.shape == (128, 512) and weight.group == group
    assert weight.num_bytes == 64 * 512 * BITS[coding] // 4 + 4 * 128 * (512 // group)
    assert torch.equal(weight.dequantized(F32), codes.values().to(dtype).float())


def test_scales_that_fit_a_bf16_are_held_as_one() -> None:
    codes = make_codes("e4m3", 64, 128, 128, BF16)
    wide = Codes("e4m3", codes.codes_OK, codes.scale_OG.float())
    short = pack(wide, BF16)
    assert short.scale_dtype == BF16
    assert torch.equal(short.dequantized(BF16), wide.values().bfloat16())
    both = concatenated([short, pack(make_codes("e4m3", 64, 128, 128, F32), BF16)])
    assert both is not None and both.scale_dtype == F32
    assert torch.equal(both.dequantized(BF16)[:64], short.dequantized(BF16))


@pytest.mark.parametrize(
    ("codes", "dtype"),
    [
        (make_codes("int4", 96, 256, 128, F16), F16),
        (make_codes("int4", 64, 128, 128, F16), F16),
        (make_codes("int8", 64, 128, 16, F16), F16),
        (make_codes("int4", 64, 768, 96, F16), F16),
        (make_codes("int4", 64, 256, 128, BF16), F16),
        (make_codes("int4", 64, 256, 128, F32), BF16),
        (make_codes("e4m3", 64, 128, 128, F16), BF16),
        (make_codes("int4", 64, 256, 128, F16), F32),
        (Codes("e4m3", torch.zeros(64, 128, dtype=torch.uint8), torch.full((64, 1), 200.0)), BF16),
    ],
    ids=[
        "rows",
        "inputs",
        "group",
        "group across blocks",
        "scale",
        "wide scale",
        "short scale",
        "fp32",
        "large scale",
    ],
)
def test_what_there_is_no_kernel_for(codes: Codes, dtype: torch.dtype) -> None:
    assert not fits(codes, dtype)


FORMS = [Form(64, 3), Form(128, 2, split=3, warps=8, pieces=2), Form(64, 2, split=2)]


@interpreted
@pytest.mark.parametrize(
    ("coding", "group", "scale"), [("int4", 128, F16), ("int8", 768, F16), ("e4m3", 32, F32)]
)
def test_products_are_those_of_the_values(coding: Coding, group: int, scale: torch.dtype) -> None:
    weight = pack(make_codes(coding, 128, 768, group, scale), F16)
    values = weight.dequantized(F16)
    assert torch.equal(triton_values.expand(weight), values)
    x, bias = torch.randn(300, 768).to(F16), torch.randn(128).to(F16)
    want = x.double() @ values.double().t() + bias.double()
    found = [triton_packed.launch(x[:5], weight, bias, form, None).y_TO for form in FORMS]
    found += [weight.apply(x[:rows], bias) for rows in (0, 1, 64, 130, 300)]
    found.append(triton_packed.launch(x[:130], weight, bias, FORMS[1], None).y_TO)
    for y in found:
        error = (y.double() - want[: len(y)]).abs()
        assert bool((error <= 2.0**-11 * want[: len(y)].abs() + 2.0**-14).all())


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("group", [32, 128, 4096])
def test_a_form_has_room(group: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices with as little shared memory as an L40S has, and where there is just too little
    for what takes most."""
    weight = pack(make_codes("int4", 128, 4096, group, F16), F16)
    x = torch.empty(rows, 4096, dtype=F16)
    most = triton_packed.form_of(x, weight)
    for limit in (101_376, triton_packed._shared_bytes(most, min(max(8, rows), 128), weight) - 1):
        monkeypatch.setattr(triton_packed, "_shared_memory", lambda _device, limit=limit: limit)
        form = triton_packed.form_of(x, weight)
        assert triton_packed._shared_bytes(form, min(max(8, rows), 128), weight) <= limit
        assert form.stages >= 2


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_many_rows_are_cut_for_any_number_of_processors(processors: int) -> None:
    """Parts of K have a block at least, and there is room where they meet."""
    found = set()
    for outputs, inputs in ((28672, 4096), (4096, 14336), (4096, 512)):
        words = torch.empty(outputs // 64, inputs // 256, 64, 32, dtype=torch.int32, device="meta")
        weight = PackedWeight(words, words[0, :1, 0], "int4", BF16, BF16)
        for rows in (64, 65, 128, 256, 512, 1024, 1025):
            form = gluon_packed_many.cut(rows, weight, processors)
            found.add((rows, form is None))
            if form is not None and form.split > 1:
                assert form.split <= inputs // 256
                padded = -(-rows // form.rows) * form.rows
                assert padded * outputs * form.split <= MEETING_FLOATS
    assert {(64, True), (65, False), (512, False), (1025, True)} <= found
    assert not {(65, True), (512, True)} & found


@interpreted
def test_adapters_beside_a_packed_product() -> None:
    """The same as beside a dense product, and pending as there."""
    backend = make_backend(F16)
    group = backend.pool.table.groups[1]
    assert (group.out_features, group.in_features) == (128, 256)
    weight = pack(make_codes("int4", 128, 256, 64, F16), F16)
    x = torch.randn(3, 256).to(F16)
    packed = backend.begin(batch_of([-1, 0, 1])).product(x, weight, None, 1)
    assert packed is not None and packed.pending is not None
    added = packed.pending.add_TO.clone()
    whole = DenseWeight(weight.dequantized(F16))
    dense = backend.begin(batch_of([-1, 0, 1])).product(x, whole, None, 1)
    assert dense is not None and dense.pending is not None
    assert torch.equal(added[1:], dense.pending.add_TO[1:])
    torch.testing.assert_close(packed.y_TO, dense.y_TO)


# -- rounding ----------------------------------------------------------------------------------


def test_rounding_takes_the_nearest_code() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix[3] = 0
    values = in_int4(matrix).dequantized(F32)
    steps = matrix.float().view(64, 2, 128).abs().amax(2) / 7 * (1 + 2**-7)
    error = (values - matrix.float()).abs()
    assert bool((error <= 0.51 * steps.repeat_interleave(128, 1) + 2**-8 * matrix.abs()).all())
    assert torch.equal(in_fp8(matrix).dequantized(F32), as_fp8_weight(matrix.float()))


@pytest.mark.parametrize(("inputs", "group"), [(192, 64), (6848, 64), (160, 32), (100, 100)])
def test_a_share_that_can_not_be_cut_by_128_has_smaller_groups(inputs: int, group: int) -> None:
    """A row of which one number is large: those in other groups keep scales of their own."""
    matrix = torch.randn(2, inputs, generator=torch.Generator().manual_seed(0))
    matrix[:, -1] = 100
    error = (in_int4(matrix).dequantized(F32) - matrix).abs()
    steps = matrix.view(2, -1, group).abs().amax(2) / 7 * (1 + 2**-7)
    assert bool((error <= 0.51 * steps.repeat_interleave(group, 1)).all())


@pytest.mark.parametrize(("name", "bits"), [("fp8-weight-only", 8), ("int4", 4)])
def test_a_gpu_holds_them_packed(name: str, bits: int) -> None:
    """As `weft plan` counts them, too."""
    weight = FORMATS[name].quantize(torch.empty(128, 512, dtype=BF16, device="meta"))
    assert isinstance(weight, PackedWeight)
    assert weight.num_bytes == 128 * 512 * bits // 8 + 4 * 128 * (4 if bits == 4 else 1)
    odd = FORMATS[name].quantize(torch.empty(100, 512, dtype=BF16, device="meta"))
    assert isinstance(odd, DenseWeight)


# -- loading -----------------------------------------------------------------------------------


def load(shard: Shard, tensors: dict[str, Any], packs: bool) -> dict[str, Any]:
    """What is made of the tensors of the first layer."""
    weights = allocate_weights(shard, BF16, "cpu", None, late=True)
    places = {n: p for n, p in places_of(weights, shard, None).items() if n in tensors}
    sizes = {key: weights.matrices[key].shape for key in weights.matrices}
    linear = LinearMatrices(
        weights.matrices,
        places.values(),
        None,
        lambda k: torch.empty(sizes[k], dtype=BF16),
        fits if packs else None,
    )
    for name, place in places.items():
        linear.take(place, tensors[name])
    return weights.matrices


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoints_matrices_are_packed_as_they_come(size: int) -> None:
    """q, k and v are one matrix; one of gate and up is not quantized; down is cut for two ranks
    within a group, where it can't stay packed."""
    with preset_folder("tiny") as folder:
        config = load_model_config(folder)
    config = replace(
        config,
        hidden_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=768,
        num_layers=1,
    )
    shard = model_shard(config, 0, size)
    whole = {
        n: p.shape
        for n, p in places_of(allocate_weights(shard, BF16, "meta", None), shard, None).items()
        if p.of is not None
    }
    tensors: dict[str, Any] = {}
    for name, shape in whole.items():
        codes = make_codes("int4", *shape, 256 if "down" in name else 128, BF16)
        tensors[name] = of_codes(shape, lambda codes=codes: codes)
    up = next(name for name in whole if "up_proj" in name)
    tensors[up] = tensors[up][:]
    packed, plain = load(shard, tensors, True), load(shard, tensors, False)
    kinds = {key: type(packed[key]) for key in ("0.qkv", "0.o", "0.gate_up", "0.down")}
    down = PackedWeight if size == 1 else DenseWeight
    assert list(kinds.values()) == [PackedWeight, PackedWeight, DenseWeight, down]
    for key in kinds:
        assert torch.equal(packed[key].dequantized(BF16), plain[key].dequantized(BF16)), key


def test_a_rank_packs_its_part_of_each_projection_in_one() -> None:
    """q, k and v are one tensor of the checkpoint, of which each rank has three parts, and so are
    gate and up."""
    with preset_folder("tiny") as folder:
        config = load_model_config(folder)
    sizes = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    config = replace(
        config,
        **sizes,
        intermediate_size=512,
        num_layers=1,
        fused_qkv=True,
        mlp_names=FUSED_MLP_NAMES,
    )
    for rank in range(2):
        shard = model_shard(config, rank, 2)
        places = places_of(allocate_weights(shard, BF16, "meta", None), shard, None)
        tensors: dict[str, Any] = {}
        for name, place in places.items():
            if place.of is not None:
                codes = make_codes("int4", *place.shape, 128, BF16)
                tensors[name] = of_codes(place.shape, lambda codes=codes: codes)
        packed, plain = load(shard, tensors, True), load(shard, tensors, False)
        for key in ("0.qkv", "0.gate_up"):
            assert isinstance(packed[key], PackedWeight), key
            assert torch.equal(packed[key].dequantized(BF16), plain[key].dequantized(BF16)), key
