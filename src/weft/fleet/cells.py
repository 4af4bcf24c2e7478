"""Decides which cell of a very large fleet serves a request. Pure.

In a cell every node is linked with every other and knows its load, which works up to about 64
nodes. A larger fleet has several cells. Whatever routes between them (a proxy, or any node) needs
the name of each cell and one number, and decides for itself:

    tenant, adapter ──hash──> an order of all cells, this pair's own
    the first cell has room                  ──> it serves
    it is nearly full, and the next one less ──> a part of the requests goes on to that one, the
                                                 larger the fuller the first is; and so on

So an adapter lives in one cell, in two while its first cell is full, and in more only if its
requests need more. A cell that comes or goes moves only the adapters that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from weft.fleet.keys import hash_of

FULL_FROM, FULL_AT = 0.8, 0.95
"""From the first load on, a cell passes some requests to the next cell; from the second, all."""


def choose_cell(tenant: str, adapter: str, request_id: str, loads: Mapping[str, float]) -> str:
    """The cell for a request of a tenant for an adapter.

    `loads` has, for each living cell, the fraction of its seats that is taken: more than 1 if
    requests wait. It must not be empty. `adapter` is a name without a version, so that a new
    version is served where the old one was; "" is the base.
    """
    key = f"{tenant}\n{adapter}"
    order = sorted(loads, key=lambda cell: (hash_of(f"{cell}\n{key}"), cell))
    chance = hash_of(request_id)
    for cell, following in pairwise(order):
        if loads[cell] <= FULL_FROM or loads[following] >= loads[cell]:
            return cell
        part = (loads[cell] - FULL_FROM) / (FULL_AT - FULL_FROM)
        chance, thousandths = divmod(chance, 1000)
        if thousandths >= 1000 * part:
            return cell
    return order[-1]
