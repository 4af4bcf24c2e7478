"""The names of a registry as one caller may use them.

    what is asked     whose it is
    sql               the caller's own acme/sql, if there is one; else the shared sql
    acme/sql          acme's: for acme itself, and for those who were granted it
    base:NAME         the same as NAME

All routes look names up, list and change them through an `Access`, and nowhere else. What its
caller may not see is answered as if it did not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice

from weft.core.adapters import WeightedAdapter
from weft.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
)
from weft.registry.names import one_form
from weft.registry.registry import AdapterCard, AdapterRegistry, Lease, ModelCard
from weft.registry.tenants import Caller, Role

_MAX_COMPARED, _MAX_COMPARED_CHARS = 500, 64
"""How many names are looked at to find the one that was meant, and how long these may be."""


class Access:
    """One caller's view of a registry. An admin's names are those of the registry itself."""

    __slots__ = ("_is_admin", "_registry", "caller")

    def __init__(self, registry: AdapterRegistry, caller: Caller) -> None:
        self._registry = registry
        self.caller = caller
        self._is_admin = caller.may("admin")

    def need(self, role: Role) -> None:
        """Raises PermissionDenied unless the caller has this role."""
        if not self.caller.may(role):
            raise PermissionDenied(f"this needs an API key with the role {role!r}")

    # -- use -----------------------------------------------------------------------------------

    def resolve(self, model: str) -> Lease:
        """As `AdapterRegistry.resolve`. Raises PermissionDenied, ModelNotFound."""
        self.need("use")
        with self._suggesting(model):
            return self._registry.resolve(self._model(model))

    def resolve_sum(self, adapters: Sequence[WeightedAdapter]) -> Lease:
        """As `AdapterRegistry.resolve_sum`. Raises PermissionDenied, InvalidRequest,
        ModelNotFound."""
        self.need("use")
        adapters = [replace(each, name=one_form(each.name)) for each in adapters]
        if self._is_admin:
            return self._registry.resolve_sum(adapters)
        whole: list[WeightedAdapter] = []
        for each in adapters:
            name = self._find(each.name)
            if name is None:
                raise ModelNotFound(f"The adapter {each.name!r} does not exist", "adapters")
            whole.append(replace(each, name=name))
        return self._registry.resolve_sum(whole)

    # -- look ----------------------------------------------------------------------------------

    def card(self, model: str) -> ModelCard:
        """As `AdapterRegistry.card`. Raises ModelNotFound."""
        with self._suggesting(model):
            return self._shown(self._registry.card(self._model(model)))

    def models(self) -> list[ModelCard]:
        """The base's names, then the adapters that the caller may use, by their whole names."""
        cards = self._registry.models()
        shown = [card for card in cards if card.parent is None or self._means(card.id)]
        return [self._shown(card) for card in shown]

    def adapter_cards(self) -> list[AdapterCard]:
        """The adapters that the caller may use."""
        cards = self._registry.adapter_cards()
        return [
            card if self.caller.owns(card.ref.name) else replace(card, path=card.ref.name)
            for card in cards
            if self._means(card.ref.name)
        ]

    def digest_of(self, whole: str) -> str | None:
        """The content of the adapter of this whole name, if there is one that the caller sees."""
        info = self._registry.info(whole) if self.caller.sees(whole) else None
        return info.digest if info is not None else None

    # -- change --------------------------------------------------------------------------------

    def to_publish(self, name: str) -> str:
        """The whole name under which the caller may load an adapter that it calls `name`.

        Namespaces of others are refused whether or not they exist, or hold that name. Raises
        PermissionDenied, InvalidRequest, AdapterConflict.
        """
        self.need("publish")
        name = one_form(name)
        if self._is_admin:
            return name
        tenant = self.caller.tenant
        namespace, slash, rest = name.partition("/")
        if not slash:
            namespace, rest = tenant, name
        if namespace != tenant:
            message = f"this API key may load adapters only in its own namespace, {tenant!r}"
            raise PermissionDenied(message, "lora_name")
        if not rest:
            raise InvalidRequest("lora_name must not be empty", "lora_name")
        if rest in self._registry.base_names:
            raise AdapterConflict(f"{rest!r} is the base model's name", "lora_name")
        self._registry.check_prefix(rest)
        return f"{tenant}/{rest}"

    def to_retire(self, name: str) -> str:
        """The whole name of the adapter that the caller calls `name` and may unload. Raises
        PermissionDenied, AdapterNotFound."""
        self.need("publish")
        name = one_form(name)
        if self._is_admin:
            return name
        whole = self._find(name)
        if whole is None:
            raise AdapterNotFound(f"The lora adapter {name!r} cannot be found", "lora_name")
        if not self.caller.owns(whole):
            message = f"this API key may use the adapter {name!r}, but not change it"
            raise PermissionDenied(message, "lora_name")
        return whole

    # -- names ---------------------------------------------------------------------------------

    def _model(self, model: str) -> str:
        """The name in the registry of what the caller calls `model`. Raises ModelNotFound."""
        bases = self._registry.base_names
        if model in bases:
            return model
        model = one_form(model)
        if self._is_admin:
            return model
        prefixes = ("", *(f"{base}:" for base in bases))
        for prefix in prefixes:
            if model.startswith(prefix) and (whole := self._find(model[len(prefix) :])):
                return whole
        raise ModelNotFound(f"The model {model!r} does not exist", "model")

    @contextmanager
    def _suggesting(self, model: str) -> Iterator[None]:
        """Inside this context, an error about an unknown model names one that the caller may use
        and may have meant."""
        try:
            yield
        except ModelNotFound as error:
            own = f"{self.caller.tenant}/"
            seen = filter(self._means, islice(self._registry.names(), _MAX_COMPARED))
            names = (*self._registry.base_names, *(name.removeprefix(own) for name in seen))
            short = [name for name in names if len(name) <= _MAX_COMPARED_CHARS]
            if len(model) > _MAX_COMPARED_CHARS or not (like := get_close_matches(model, short, 1)):
                raise
            message = f"{error.message}; did you mean {like[0]!r}?"
            raise ModelNotFound(message, error.param) from None

    def _find(self, name: str) -> str | None:
        """The whole name of the adapter that the caller calls `name`; None if it sees none."""
        names = (name,) if "/" in name else (f"{self.caller.tenant}/{name}", name)
        live = self._registry.info
        return next((n for n in names if self.caller.sees(n) and live(n) is not None), None)

    def _means(self, whole: str) -> bool:
        """Whether the caller gets this adapter when it asks for its whole name: a shared one may
        hide behind one of its own."""
        return self._is_admin or self._find(whole) == whole

    def _shown(self, card: ModelCard) -> ModelCard:
        """Where the server's own models, and those of others, come from is not the caller's to
        know."""
        return card if self.caller.owns(card.id) else replace(card, root=card.id)
