"""Decides which cell of a very large fleet serves a request. Pure.

In a cell every node is linked with every other and knows its load, which works up to about 64
nodes. A larger fleet has several cells. Whatever routes between them (a proxy, or any node) needs
the name of each cell and one number, and decides for itself:

    tenant, adapter ──hash──> an order of all cells, this pair's own
    the first cell has room                  ──> it serves
    it is nearly full, and the next one less ──> a part of the requests goes on to that one, the
                                                 larger the fuller the first is; and so on

So an adapter lives in one cell, or in two while its own is full; one that has more requests than
two cells can serve lives in more. A cell that comes or goes moves only adapters that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from weft.fleet.keys import hash_of

FULL_FROM, FULL_AT = 0.8, 0.95
"""At the first load of a cell some of its requests begin to go on; at the second all of them do."""


def choose_cell(tenant: str, adapter: str, request_id: str, loads: Mapping[str, float]) -> str:
    """The cell for a request of a tenant for an adapter.

    loads: the part of each living cell's seats that is taken, which may be more than 1 where
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
