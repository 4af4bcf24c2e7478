"""The registry's names as one caller may see and use them.

    what is asked     whose it is
    sql               the caller's own acme/sql, if there is one; else the shared sql
    acme/sql          acme's: for acme itself, and for those who were granted it
    base:NAME         the same as NAME

Where there is a shared registry, each of them may be followed by a version: `acme/sql@v7`. All
routes look names up, list and change them only through an `Access`. Names that the caller may not
see are treated as if they did not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, chain, islice
from typing import NamedTuple, Protocol

from weft.core.adapters import WeightedAdapter
from weft.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
)
from weft.registry.names import check_prefix, one_form
from weft.registry.registry import AdapterCard, AdapterRegistry, Lease, ModelCard
from weft.registry.tenants import Caller, Role

_MAX_LOOKED_AT, _MAX_PAIRS, _MAX_TOLD = 500, 20_000, 3
"""How many names are looked at for one like an unknown name, and how many pairs of characters are
compared, for which all other requests wait for a few milliseconds; and how many are told."""


class Names(Protocol):
    """The adapters' names that exist, in an `AdapterRegistry` or in a shared registry."""

    def split(self, name: str) -> tuple[str, str]:
        """Split into the name and its version, such as `@v7`, or "" without one."""
        ...

    def has(self, name: str) -> bool:
        """Whether an adapter has this whole name."""
        ...

    def digest(self, name: str) -> str | None:
        """The digest that all or most of the name's requests get; None if there is none."""
        ...

    def names(self, namespaces: Collection[str] | None = None, after: str = "") -> Iterator[str]:
        """The names that follow `after`. Those outside of `namespaces` may be left out; "" is the
        namespace of names without a "/". Raises InvalidRequest (`after`)."""
        ...

    def card(self, model: str) -> ModelCard:
        """Describe a base model or an adapter by its whole name. Raises ModelNotFound."""
        ...

    def check_new(self, name: str) -> None:
        """Raises InvalidRequest or AdapterConflict for a name that no adapter may have."""
        ...


class Page(NamedTuple):
    """Some of the models that a caller may use, in their order."""

    cards: list[ModelCard]
    has_more: bool


class Access:
    """One caller's view of a registry. An admin sees the registry's whole names."""

    __slots__ = ("_is_admin", "_names", "_registry", "caller")

    def __init__(
        self, registry: AdapterRegistry, caller: Caller, names: Names | None = None
    ) -> None:
        """`names` are a shared registry's, if there is one; `registry` has the versions loaded
        here."""
        self._registry = registry
        self._names: Names = names or registry
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
        whole: list[WeightedAdapter] = []
        for each in adapters:
            name = self._called(each.name)
            if name is None:
                raise ModelNotFound(f"The adapter {each.name!r} does not exist", "adapters")
            whole.append(replace(each, name=name))
        return self._registry.resolve_sum(whole)

    # -- look ----------------------------------------------------------------------------------

    def find(self, model: str) -> str | None:
        """The whole name of an adapter, with the version if one is named; None for a base model.
        Raises PermissionDenied, ModelNotFound."""
        self.need("use")
        with self._suggesting(model):
            whole = self._model(model)
            return None if whole in self._registry.base_names else whole

    def card(self, model: str) -> ModelCard:
        """As `AdapterRegistry.card`. Raises ModelNotFound."""
        with self._suggesting(model):
            return self._shown(self._names.card(self._model(model)))

    def models(self, after: str = "", limit: int | None = None) -> Page:
        """The base's names, then the whole names of the adapters that the caller may use: at most
        `limit` of those that follow `after`. Raises InvalidRequest (`after`)."""
        bases = self._registry.base_names
        if after in bases:
            bases, after = bases[bases.index(after) + 1 :], ""
        elif after:
            bases = ()
            if not self.caller.sees(after):
                raise InvalidRequest(f"after: there is no model {after!r}", "after")
        names = filter(self._means, self._names.names(self._namespaces(), after))
        models = chain(bases, names)
        cards = [self._shown(self._names.card(model)) for model in islice(models, limit)]
        return Page(cards, limit is not None and next(models, None) is not None)

    def adapter_cards(self) -> list[AdapterCard]:
        """The loaded adapters that the caller may use. The version that most requests for a name
        get has the bare name, others `name@v7`. A card is pinned if any of these adapters pins its
        content."""
        cards: list[AdapterCard] = []
        for card in self._registry.adapter_cards():
            name, version = self._names.split(card.ref.name)
            if not self._means(name):
                continue
            if version and self._names.digest(name) == card.ref.digest:
                card = replace(card, ref=replace(card.ref, name=name))
            cards.append(card if self.caller.owns(name) else replace(card, path=name))
        pinned = {card.ref.digest for card in cards if card.pinned}
        return [replace(card, pinned=card.ref.digest in pinned) for card in cards]

    def digest_of(self, whole: str) -> str | None:
        """The digest of the adapter with this whole name; None if the caller sees none."""
        return self._names.digest(whole) if self.caller.sees(whole) else None

    # -- change --------------------------------------------------------------------------------

    def to_publish(self, name: str) -> str:
        """The whole name under which the caller may load an adapter that it calls `name`.

        Other tenants' namespaces are refused, whether or not they exist or have that name. Raises
        PermissionDenied, InvalidRequest, AdapterConflict.
        """
        self.need("publish")
        name = one_form(name)
        if self._is_admin:
            self._names.check_new(name)
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
        check_prefix(rest, self._registry.base_names)
        self._names.check_new(f"{tenant}/{rest}")
        return f"{tenant}/{rest}"

    def to_retire(self, name: str) -> str:
        """The whole name of the adapter that the caller calls `name` and may unload. Raises
        PermissionDenied, AdapterNotFound."""
        self.need("publish")
        name, whole = one_form(name), self._called(name)
        if self._is_admin:
            return whole or name
        if whole is None:
            raise AdapterNotFound(f"The lora adapter {name!r} cannot be found", "lora_name")
        if not self.caller.owns(whole):
            message = f"this API key may use the adapter {name!r}, but not change it"
            raise PermissionDenied(message, "lora_name")
        return whole

    # -- names ---------------------------------------------------------------------------------

    def _model(self, model: str) -> str:
        """The registry's name for what the caller calls `model`. Raises ModelNotFound."""
        if model in self._registry.base_names:
            return model
        if whole := self._called(model):
            return whole
        raise ModelNotFound(f"The model {one_form(model)!r} does not exist", "model")

    @contextmanager
    def _suggesting(self, model: str) -> Iterator[None]:
        """Inside this context, an error about an unknown model names one that the caller may use
        and may have meant, or some of those that it may use."""
        try:
            yield
        except ModelNotFound as error:
            own = f"{self.caller.tenant}/"
            some = islice(self._names.names(self._namespaces()), _MAX_LOOKED_AT)
            seen = filter(self._means, some)
            names = [*self._registry.base_names, *(name.removeprefix(own) for name in seen)]
            names.sort(key=lambda name: name[:1] != model[:1])  # most who err begin rightly
            pairs = accumulate(len(name) * len(model) for name in names)
            few = [name for name, count in zip(names, pairs, strict=True) if count <= _MAX_PAIRS]
            like = get_close_matches(model, few, 1)
            some_do = [*map(repr, names[:_MAX_TOLD]), *["..."] * (len(names) > _MAX_TOLD)]
            hint = f"did you mean {like[0]!r}?" if like else f"models that do: {', '.join(some_do)}"
            raise ModelNotFound(f"{error.message}; {hint}", error.param) from None

    def _called(self, name: str) -> str | None:
        """As `_find`, for a name as clients may write it: in any form of Unicode, or after a name
        of the base."""
        name = one_form(name)
        for prefix in ("", *(f"{base}:" for base in self._registry.base_names)):
            if name.startswith(prefix) and (whole := self._find(name[len(prefix) :])):
                return whole
        return None

    def _find(self, name: str) -> str | None:
        """The whole name of the adapter that the caller calls `name`, with the version if one is
        named; None if it sees none."""
        name, version = self._names.split(name)
        whole = "/" in name or self._is_admin
        names = (name,) if whole else (f"{self.caller.tenant}/{name}", name)
        found = next((n for n in names if self.caller.sees(n) and self._names.has(n)), None)
        return found and found + version

    def _namespaces(self) -> set[str] | None:
        """The namespaces whose adapters the caller may see; None for all."""
        if self._is_admin:
            return None
        granted = (name.partition("/")[0] for name in self.caller.may_use)
        return {"", self.caller.tenant, *granted}

    def _means(self, whole: str) -> bool:
        """Whether the caller gets this adapter when it asks for its whole name: a shared one may
        hide behind one of its own."""
        return self._is_admin or self._find(whole) == whole

    def _shown(self, card: ModelCard) -> ModelCard:
        """Where the server's own models, and those of others, come from is not the caller's to
        know."""
        return card if self.caller.owns(card.id) else replace(card, root=card.id)
