"""Packs requests for an engine's process; what several have in common is sent only once.

The choices of one prompt differ only in their ids and seeds, and the prompts of one request only in
their tokens too. So all but the first are sent as what differs (`SubmitAgain`).

Both ends keep the forms of structured outputs that were sent last, in NUM_PLACES numbered places.
The first request with a form brings it, and later ones name its place. As commands arrive in the
order in which they were sent, both ends always agree.
"""

from __future__ import annotations

from dataclasses import fields, replace

from weft.core.messages import Submit, SubmitAgain
from weft.core.requests import EngineRequest
from weft.core.sampling import StructuredOutputs

NUM_PLACES = 32
_OWN = {"request_id", "seed", "prompt_ids", "params"}
_SHARED = [field.name for field in fields(EngineRequest) if field.name not in _OWN]


def _are_alike(one: EngineRequest, other: EngineRequest) -> bool:
    """Whether they differ only in fields that `SubmitAgain` has."""
    if one.params is not other.params:
        return False
    return all(getattr(one, name) == getattr(other, name) for name in _SHARED)


class SentRequests:
    """The sender's end."""

    def __init__(self) -> None:
        self._places: dict[StructuredOutputs, int] = {}
        """The place of each form, the oldest first."""
        self._last: EngineRequest | None = None

    def pack(self, request: EngineRequest) -> Submit | SubmitAgain:
        last, self._last = self._last, request
        if last is not None and _are_alike(last, request):
            prompt_ids = None if request.prompt_ids is last.prompt_ids else request.prompt_ids
            return SubmitAgain(request.request_id, request.seed, prompt_ids)
        form = request.params.structured_outputs
        if form is None:
            return Submit(request)
        place = self._places.get(form)
        if place is not None:
            return Submit(_with_form(request, None), place)
        place = len(self._places)
        if place == NUM_PLACES:
            place = self._places.pop(next(iter(self._places)))
        self._places[form] = place
        return Submit(request, place)


class ReceivedRequests:
    """The receiver's end."""

    def __init__(self) -> None:
        self._forms: dict[int, StructuredOutputs] = {}
        self._last: EngineRequest | None = None

    def unpack(self, command: Submit | SubmitAgain) -> Submit:
        """The whole command. What requests share is one object."""
        if isinstance(command, SubmitAgain):
            assert self._last is not None
            again = replace(self._last, request_id=command.request_id, seed=command.seed)
            if command.prompt_ids is not None:
                again = replace(again, prompt_ids=command.prompt_ids)
            submit = Submit(again)
        else:
            submit = self._with_its_form(command)
        self._last = submit.request
        return submit

    def _with_its_form(self, submit: Submit) -> Submit:
        form, place = submit.request.params.structured_outputs, submit.form_place
        if place is None:
            return submit
        if form is None:
            return Submit(_with_form(submit.request, self._forms[place]))
        self._forms[place] = form
        return Submit(submit.request)


def _with_form(request: EngineRequest, form: StructuredOutputs | None) -> EngineRequest:
    return replace(request, params=replace(request.params, structured_outputs=form))
