"""Sums and gathers through inboxes, in Triton's interpreter: one rank at a time, with what the
others would send put into its inbox beforehand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from weft.kernels.collective import peers
from weft.kernels.collective.base import sum_in_order
from weft.kernels.collective.peers import Inboxes, PeerRanks
from weft.kernels.ops import Pending, reference_rms_norm
from weft.kernels.triton_base import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are for a GPU"),
    pytest.mark.timeout(60),  # who waits for what never comes waits for ever
]
CPU = torch.device("cpu")
ROW_BYTES = 256
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}
DTYPES = pytest.mark.parametrize("dtype", list(BITS), ids=["fp32", "fp16"])
SIZES = pytest.mark.parametrize("size", [2, 3])


class NoGroup:
    """A group for ranks that never need one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, x_Tn: Tensor) -> Tensor:
        return x_Tn + 100

    def gather_columns(self, x_Tn: Tensor) -> Tensor:
        raise AssertionError

    def barrier(self) -> None:
        raise AssertionError


class Post:
    """The inboxes of all ranks, and what is in them."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        num_bytes = Inboxes.bytes_of(size, ROW_BYTES)
        memory = tuple(torch.full((num_bytes,), -1, dtype=torch.int8) for _ in range(size))
        self.inboxes = Inboxes.over(memory, ROW_BYTES, CPU)

    def ranks(self, rank: int) -> PeerRanks:
        return PeerRanks(NoGroup(rank, self.size), self.inboxes)

    def place(self, to: int, source: int, row: int, width: int) -> Tensor:
        """Where a row of `source` goes in the inbox of `to`."""
        turn = int(self.inboxes.uses_R[row]) % 2
        inbox = self.inboxes.inbox_S[to].view(2, self.size, -1, ROW_BYTES)
        return inbox[turn, source, row].view(self.dtype)[:width]

    def is_empty(self, rank: int) -> bool:
        return bool((self.inboxes.inbox_S[rank] == -1).all())


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan_that_looks_empty(x: Tensor) -> Tensor:
    """x with all bits of its first element set."""
    x.view(BITS[x.dtype])[0, 0] = -1
    return x


@pytest.fixture(params=[False, True], ids=["one shot", "two shots"])
def two_shot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(PeerRanks, "_two_shot", lambda *_: request.param)
    return bool(request.param)


def exchange(
    post: Post, rank: int, sent: list[Tensor], two_shot: bool, call: Callable[[], Tensor]
) -> Tensor:
    """Make a call of one rank, and check what it leaves in inboxes. `sent`: by rank, the rows that
    each has a part of."""
    total, width = sum_in_order(sent), sent[0].shape[1]
    expected: list[tuple[Tensor, Tensor]] = []
    for row in range(len(total)):
        owner = row % post.size
        for other in {*range(post.size)} - {rank}:
            if not two_shot or owner == rank:
                post.place(rank, other, row, width).copy_(sent[other][row])
                what = total if two_shot else sent[rank]
                expected.append((post.place(other, rank, row, width), what[row]))
        if two_shot and owner != rank:
            post.place(rank, owner, row, width).copy_(total[row])
            expected.append((post.place(owner, rank, row, width), sent[rank][row]))
    made = call()
    for place, row_n in expected:
        torch.testing.assert_close(place, row_n, rtol=0, atol=0, equal_nan=True)
        place.view(torch.int8).fill_(-1)
    assert all(post.is_empty(each) for each in range(post.size))
    return made


@DTYPES
@SIZES
def test_sums(size: int, dtype: torch.dtype, two_shot: bool) -> None:
    """The same bits as the oracle on each rank, whose turn it is to use which places, with a NaN
    that looks like an empty place."""
    sent = [random(r, 5, 40, dtype=dtype) for r in range(size)]
    nan_that_looks_empty(sent[-1])
    for uses in (0, 1):
        for rank in range(size):
            post = Post(size, dtype)
            post.inboxes.uses_R.fill_(uses)
            want = sum_in_order(sent)
            safe = [torch.nan_to_num(x, nan=torch.nan) for x in sent]
            x = sent[rank].clone()
            got = exchange(post, rank, safe, two_shot, lambda: post.ranks(rank).sum(x))  # noqa: B023
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert got.isnan().sum() == 1
            assert post.inboxes.uses_R.tolist()[:6] == [uses + 1] * 5 + [uses]


@DTYPES
def test_sum_add_and_norm(dtype: torch.dtype, two_shot: bool) -> None:
    """As the single operations one after the other, with what adapters have pending on a rank."""
    size, rank = 2, 1
    parts = [random(r, 4, 48, dtype=dtype) for r in range(size)]
    slot = torch.tensor([-1, 0, 3, -1], dtype=torch.int32)
    pending = [Pending(random(10 + r, 4, 48), slot) for r in range(size)]
    for each in pending:
        each.add_TO[0] = torch.nan
    sent = [p.added_to(y) for p, y in zip(pending, parts, strict=True)]
    weight = random(20, 48, dtype=dtype)
    for with_pending in (False, True):
        post, x = Post(size, dtype), random(21, 4, 48, dtype=dtype)
        scale = 1.0 if with_pending else 0.25
        total = sum_in_order(sent if with_pending else parts)
        want_x = (x.float() + total.float() * scale).to(dtype)
        more = (pending[rank].add_TO, slot) if with_pending else None
        got = exchange(
            post,
            rank,
            sent if with_pending else parts,
            two_shot,
            lambda: post.ranks(rank).sum_and_norm(x, weight, 1e-6, parts[rank], more, scale),  # noqa: B023
        )
        assert torch.equal(x, want_x)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(
            got, reference_rms_norm(want_x, weight, 1e-6), rtol=4 * unit, atol=unit
        )


def test_more_rows_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several launches, each of which uses the first places."""
    monkeypatch.setattr(peers, "MAX_ROWS", 3)
    post = Post(2, torch.float32)
    x, other = random(0, 5, 8), random(1, 5, 8)
    for row in range(5):
        post.inboxes.uses_R.fill_(row // 3)
        post.place(0, 1, row % 3, 8).copy_(other[row])
    post.inboxes.uses_R.fill_(0)
    want = x + other
    assert torch.equal(post.ranks(0).sum(x), want)
    assert post.inboxes.uses_R.tolist() == [2, 2, 1]
    assert post.is_empty(0)


def test_rows_that_are_too_wide_go_through_the_group() -> None:
    x = random(0, 2, ROW_BYTES)
    assert torch.equal(Post(2, torch.float32).ranks(0).sum(x), x + 100)


@DTYPES
@SIZES
def test_gathered_columns(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is cut into pieces; the last may be narrower."""
    monkeypatch.setattr(peers, "PIECE", 16)
    rank, num_rows, width = 1, 3, 40
    columns = [random(r, num_rows, width, dtype=dtype) for r in range(size)]
    columns[0][1, 1] = -torch.inf
    post = Post(size, dtype)
    pieces = [(t, slice(start, min(start + 16, width))) for t in range(3) for start in (0, 16, 32)]
    for place, (t, cut) in enumerate(pieces):
        for other in {*range(size)} - {rank}:
            piece = columns[other][t, cut]
            post.place(rank, other, place, len(piece)).copy_(piece)
    got = post.ranks(rank).gather_columns(columns[rank])
    assert torch.equal(got, torch.cat(columns, 1))
    assert post.is_empty(rank)
    post.inboxes.uses_R.fill_(0)
    for place, (t, cut) in enumerate(pieces):
        piece = columns[rank][t, cut]
        for other in {*range(size)} - {rank}:
            assert torch.equal(post.place(other, rank, place, len(piece)), piece)


def test_two_shots_are_for_more_than_two_ranks() -> None:
    """With two ranks they send as much as one shot does; with more they save most of it."""
    pair, four = Post(2, torch.float32).ranks(0), Post(4, torch.float32).ranks(0)
    assert not pair._two_shot(1 << 30)
    assert not four._two_shot(64 << 10)
    assert four._two_shot(1 << 20)
