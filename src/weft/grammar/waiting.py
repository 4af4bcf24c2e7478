"""Decides whose form is compiled next."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from weft.core.errors import Overloaded
from weft.core.sampling import StructuredOutputs
from weft.core.tenants import Tenant
from weft.grammar.regex import FIELD

MAX_FORMS = 4096
"""How many forms of one tenant may wait or be compiled, unless its caps say otherwise."""


class WaitingForms:
    """Waiting forms, in order for each tenant; tenants take turns. One tenant has at most
    `most_each` forms compiled at a time, so that processes are left for others."""

    def __init__(self, most_each: int) -> None:
        self._most_each = most_each
        self._waiting: OrderedDict[str, deque[StructuredOutputs]] = OrderedDict()
        """By tenant; the tenant whose turn is next comes first."""
        self._running: Counter[str] = Counter()
        self._caps: dict[str, int] = {}

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Apply these tenants' `max_forms` from now on."""
        caps = {tenant.name: tenant.caps.max_forms for tenant in tenants}
        self._caps = {name: cap for name, cap in caps.items() if cap is not None}

    def add(self, tenant: str, form: StructuredOutputs) -> None:
        """Raises Overloaded if the tenant has too many forms here."""
        forms = self._waiting.get(tenant, ())
        cap = self._caps.get(tenant, MAX_FORMS)
        if len(forms) + self._running[tenant] >= cap:
            raise Overloaded(f"{FIELD}: {cap} forms of yours are being compiled already", FIELD, 1)
        self._waiting.setdefault(tenant, deque()).append(form)

    def take(self) -> tuple[str, StructuredOutputs] | None:
        """The tenant and the form to compile now, if any. `ended` must follow."""
        for tenant, forms in self._waiting.items():
            if self._running[tenant] < self._most_each:
                form = forms.popleft()
                self._running[tenant] += 1
                self._waiting.move_to_end(tenant)
                if not forms:
                    del self._waiting[tenant]
                return tenant, form
        return None

    def ended(self, tenant: str) -> None:
        """Note that one compilation for this tenant has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
