"""Adapters of which each rank has a share of both halves: ranks together add what one adds that has
all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from dealing import deal
from lora_pools import batch_of, empty_pool
from rank_threads import on_ranks
from torch import Tensor

from weft.core.errors import ConfigError
from weft.core.shards import Shard
from weft.core.targets import Group, Packed, TargetTable, build_table, layout_of
from weft.kernels.collective.base import ALONE, Ranks, Solo
from weft.kernels.linear import DenseWeight
from weft.kernels.lora import AdapterPool, make_backend
from weft.kernels.lora.base import LoraStep
from weft.kernels.lora.oracle import ImageStep

VOCAB, HIDDEN, INNER, EXPERTS = 12, 256, 256, 3
RANKS = ((3, 1, 0, 8, 5, 2, 7, 3, 4, 4, 6, 2), (0, 16, 2, 0, 4, 4, 40, 1, 1, 2, 3, 5))
"""Of two adapters, by slice."""
SLOTS = [-1, 0, 0, 1, 1]
PAIRS = [0, 1, 3, 2, 4], [0, 0, 0, 1, 2]
"""Tokens and experts of a mixture's rows."""


def table(size: int, pair_ranks: int = 1) -> TargetTable:
    """The share that each of `size` ranks has."""
    heads, inner = 128 // size, INNER // size
    rows = [
        Packed("embed", "embedding", VOCAB, (HIDDEN,), ("embed",)),
        Packed("qkv", "linear", HIDDEN, (2 * heads, heads, heads), ("q", "k", "v"), axis="column"),
        Packed("o", "linear", 2 * heads, (HIDDEN,), ("o",), axis="row"),
        Packed("router", "linear", HIDDEN, (EXPERTS,), ("router",)),
        Packed("one", "linear", HIDDEN, (inner, inner), ("gate_up",), axis="column"),
        Packed("down", "linear", inner, (HIDDEN,), ("down",), axis="row"),
        Packed("experts_in", "experts", HIDDEN, (inner, inner), ("e.gate", "e.up"), axis="column"),
        Packed("experts_out", "experts", inner, (HIDDEN,), ("e.down",), axis="row"),
        Packed("head", "head", HIDDEN, (VOCAB,), ("head",), axis="vocab"),
    ]
    return build_table([replace(r, pair_ranks=pair_ranks) for r in rows], num_experts=EXPERTS)


WHOLE = table(1)
CUT = [g.index for g in WHOLE.groups if g.packed.axis in ("column", "row")]


def whole_pool() -> AdapterPool:
    pool, generator = empty_pool(WHOLE, RANKS), torch.Generator().manual_seed(0)
    pool.arena.normal_(std=0.2, generator=generator)
    return pool


def share_of(whole: AdapterPool, shard: Shard, ranks: Ranks) -> AdapterPool:
    """A rank's part of all adapters."""
    pool = empty_pool(shard.own, RANKS, share=ranks)
    for slot in range(len(RANKS)):
        for group in shard.own.groups:
            for expert in range(shard.own.copies(group.kind)):
                view, mine = (p.view(slot, group.index, expert) for p in (whole, pool))
                if view is None or mine is None:
                    continue
                same = group.kind == "embedding"
                columns = shard.a_columns(group.slices[0])
                mine.a_RI.copy_(view.a_RI if same else view.a_RI[:, columns])
                adapted = [s for s in group.slices if RANKS[slot][s.slice]]
                for target, b, own in zip(adapted, view.slices, mine.slices, strict=True):
                    own.b_OR.copy_(torch.cat([b.b_OR[rows] for rows in shard.b_rows(target)]))
    return pool


def inputs(group: Group, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(SLOTS), group.in_features, generator=generator)


def added(step: LoraStep, own: TargetTable, index: int, x: Tensor) -> Tensor:
    y = torch.zeros(len(x), own.groups[index].out_features)
    call = step.linear
    if own.groups[index].kind == "experts":
        call = step.experts(*map(torch.tensor, PAIRS)).linear
    call(y, x, index)
    return y


def test_a_rank_has_its_share_of_both_halves() -> None:
    for size in (2, 4):
        for ranks in RANKS:
            cut = tuple(
                rank if t.group in CUT else 0 for t, rank in zip(WHOLE.targets, ranks, strict=True)
            )
            whole = layout_of(WHOLE, cut).num_elements
            own = layout_of(table(size, size), cut).num_elements
            assert (
                whole <= size * own <= 1.1 * whole < size * layout_of(table(size), cut).num_elements
            )


@pytest.mark.parametrize(("backend", "size"), deal(["reference", "torch"], [2, 4]))
def test_ranks_add_what_one_would(backend: str, size: int) -> None:
    whole = whole_pool()
    alone = make_backend("reference", whole).begin(batch_of(SLOTS))
    shards = [Shard(WHOLE, table(size, size), rank, size) for rank in range(size)]
    for index in CUT:
        group = WHOLE.groups[index]
        x = inputs(group, index)
        want = added(alone, WHOLE, index, x)

        def work(ranks: Ranks, group: Group = group, x: Tensor = x) -> list[Tensor]:
            shard = shards[ranks.rank]
            pool = share_of(whole, shard, ranks)
            own = x[:, shard.inputs(group.slices[0])]
            steps = make_backend(backend, pool)
            # A set of adapters that is met again has stacks of its matrices.
            return [
                added(steps.begin(batch_of(SLOTS)), shard.own, group.index, own) for _ in range(3)
            ]

        for found in zip(*on_ranks(size, work), strict=True):
            assert_whole(group, shards, found, want)


def assert_whole(
    group: Group, shards: Sequence[Shard], found: Sequence[Tensor], want: Tensor
) -> None:
    if group.packed.axis == "row":
        torch.testing.assert_close(sum(found[1:], found[0]), want, atol=1e-4, rtol=1e-4)
        return
    for shard, y in zip(shards, found, strict=True):
        starts = [(s.offset, rows) for s in group.slices for rows in shard.outputs(s)]
        part = torch.cat([want[:, o + r.start : o + r.stop] for o, r in starts], 1)
        torch.testing.assert_close(y, part, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own_rank", [0, 1])
def test_the_check_of_one_rank_alone(own_rank: int) -> None:
    """What an image says is what a backend makes of it, where sums have a rank's own part alone."""

    class Two:
        rank, size = own_rank, 2

    ranks = Solo(Two())  # type: ignore[arg-type]
    shard = Shard(WHOLE, table(2, 2), own_rank, 2)
    pool = share_of(whole_pool(), shard, ranks)
    layout = layout_of(shard.own, RANKS[1])
    start, _ = pool.placed(1) or (0, None)
    image = pool.arena[start : start + layout.num_elements]
    oracle = ImageStep(shard.own, layout, image, 3, 3, 5, own_rank)
    step = make_backend("torch", pool).begin(batch_of(SLOTS))
    for index in CUT:
        x = inputs(shard.own.groups[index], index)
        got, want = (added(s, shard.own, index, x) for s in (step, oracle))
        rows = [i for i, t in enumerate(PAIRS[0]) if t >= 3] if index in CUT[4:] else [3, 4]
        torch.testing.assert_close(got[rows], want[rows], atol=1e-4, rtol=1e-4)


def test_a_third_party_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "theirs"

    monkeypatch.setattr(metadata, "entry_points", lambda group: [Entry()])
    with pytest.raises(ConfigError, match="theirs") as caught:
        make_backend("theirs", empty_pool(table(2, 2), RANKS))
    assert caught.value.param == "fully_sharded_loras"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("own_rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_triton_kernels_through_inboxes(own_rank: int) -> None:
    """One of two ranks in Triton's interpreter, with what the other would send in its inbox: for
    many rows, beside a product, and through a group in place of inboxes."""
    triton = pytest.importorskip("weft.kernels.lora.triton")
    if not triton.INTERPRETED:
        pytest.skip("compiled kernels are for a GPU")
    from weft.kernels.collective.peers import Inboxes, PeerRanks

    device, row_bytes = torch.device("cpu"), 4 * 1024

    class Group2:
        rank, size = own_rank, 2
        theirs = torch.empty(0)

        def sum(self, x: Tensor) -> Tensor:
            return x + self.theirs

    class Posted(PeerRanks):
        def more_inboxes(self, row_bytes: int) -> Inboxes:
            memory = tuple(
                torch.full((Inboxes.bytes_of(2, row_bytes),), -1, dtype=torch.int8) for _ in "ab"
            )
            return Inboxes.over(memory, row_bytes, device)

    group2 = Group2()
    ranks = Posted(group2, Posted.more_inboxes(None, 64))  # type: ignore[arg-type]
    whole = whole_pool()
    shards = [Shard(WHOLE, table(2, 2), rank, 2) for rank in range(2)]
    mine, other = shards[own_rank], shards[1 - own_rank]
    pool = share_of(whole, mine, ranks)
    theirs = share_of(whole, other, ALONE)
    alone = make_backend("reference", whole).begin(batch_of(SLOTS))
    backend = triton.TritonBackend(pool)
    inboxes = backend.exchange.inboxes
    for index in CUT:
        group = WHOLE.groups[index]
        x = inputs(group, index)
        want = added(alone, WHOLE, index, x)
        if group.packed.axis == "row":
            want = want[:, mine.b_rows(group.slices[0])[0]]
        own = x[:, mine.inputs(group.slices[0])].contiguous()
        for way in ("product", "many") if group.kind == "linear" else ("many",):
            sent = post(theirs, other, index, x, inboxes, own_rank)
            step = backend.begin(batch_of(SLOTS))
            if way == "many":
                got = added(step, mine.own, index, own)
            else:
                out = mine.own.groups[index].out_features
                found = step.product(own, DenseWeight(torch.zeros(out, own.shape[1])), None, index)
                assert found is not None
                got = found.whole()
            if group.packed.axis == "row":
                start = group.slices[0].out_features // 2 * own_rank
                rest = torch.cat((got[:, :start], got[:, start + want.shape[1] :]), 1)
                assert not rest.any()
                got = got[:, start : start + want.shape[1]]
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            else:
                both = [got if s is mine else torch.zeros(len(got), 0) for s in shards]
                assert_whole(group, [mine], [b for b in both if b.numel()], want)
            inbox = inboxes.inbox_S[own_rank]
            assert bool((inbox == -1).all()), "a rank takes all that it is sent"
            outbox = inboxes.inbox_S[1 - own_rank]
            assert int((outbox.view(torch.int32) != -1).sum()) == sent
            outbox.fill_(-1)
    assert row_bytes == 4 * backend.row_floats


def post(pool: AdapterPool, shard: Shard, index: int, x: Tensor, inboxes: object, to: int) -> int:
    """Put v of a rank's share of x into the inbox of the other; how many numbers these are."""
    group = shard.own.groups[index]
    x = x[:, shard.inputs(group.slices[0])]
    num = 0
    memory = inboxes.inbox_S[to].view(torch.float32)  # type: ignore[attr-defined]
    places = memory.view(2, 2, -1, 1024)
    tokens, experts = PAIRS if group.kind == "experts" else (range(len(SLOTS)), [0] * len(SLOTS))
    for row, (token, expert) in enumerate(zip(tokens, experts, strict=True)):
        view = pool.view(SLOTS[token], index, expert) if SLOTS[token] >= 0 else None
        if view is not None:
            v = view.a_RI @ x[row, group.a_columns(shard.rank)]
            turn = int(inboxes.uses_R[row]) % 2  # type: ignore[attr-defined]
            places[turn, shard.rank, row, : len(v)] = v
            num += len(v)
    return num
