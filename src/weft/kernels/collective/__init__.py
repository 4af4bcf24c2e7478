"""Sums and gathers over the ranks that share a model."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from weft.kernels.collective.base import Ranks
from weft.kernels.collective.group import GroupRanks


def make_ranks(device: torch.device, row_bytes: int) -> Ranks:
    """The ranks of torch's default process group, in which this process has `device`. They exchange
    through each other's GPU memory if possible, else through the group. `row_bytes`: the bytes of a
    row of the widest sums. All ranks must call it."""
    group = GroupRanks()
    if device.type == "cuda" and find_spec("triton"):
        from weft.kernels.collective.peers import can_connect, connect

        if can_connect(group.size):
            return connect(group, row_bytes, device)
    return group
