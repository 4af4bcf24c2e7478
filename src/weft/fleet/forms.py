"""Forms on their way to an engine's process: each is sent once, not with every request for it.

Both ends keep the forms that were sent last, each in one of a few places. A request brings its form
when it is put in a place, and later ones name the place. As commands arrive in the order in which
they were sent, both ends always agree.
"""

from __future__ import annotations

from dataclasses import replace

from weft.core.messages import Submit
from weft.core.requests import EngineRequest
from weft.core.sampling import StructuredOutputs

NUM_PLACES = 32


class SentForms:
    """The sender's end."""

    def __init__(self) -> None:
        self._places: dict[StructuredOutputs, int] = {}
        """The oldest first."""

    def pack(self, request: EngineRequest) -> Submit:
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


class ReceivedForms:
    """The receiver's end."""

    def __init__(self) -> None:
        self._forms: dict[int, StructuredOutputs] = {}

    def unpack(self, submit: Submit) -> Submit:
        """The command with its form, the same object for all requests that share it."""
        form, place = submit.request.params.structured_outputs, submit.form_place
        if place is None:
            return submit
        if form is None:
            return Submit(_with_form(submit.request, self._forms[place]))
        self._forms[place] = form
        return Submit(submit.request)


def _with_form(request: EngineRequest, form: StructuredOutputs | None) -> EngineRequest:
    return replace(request, params=replace(request.params, structured_outputs=form))
