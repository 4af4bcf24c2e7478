"""Takes the reasoning off the beginning of a model's text, and the marks around its answer."""

from __future__ import annotations

from weft.text.pieces import Piece, held
from weft.text.reasoning import REASONING, ReasoningMarks


class Thoughts:
    """Reads an output up to its answer: the reasoning, and the marks before the answer."""

    def __init__(self, reasoning: str, is_open: bool, ends: tuple[str, ...]) -> None:
        """`reasoning`: a name in REASONING. `is_open`: the prompt ends with its first mark. `ends`:
        marks that end reasoning, too, and belong to the answer."""
        self.style: ReasoningMarks = REASONING[reasoning]
        self._is_open = is_open
        self._ends = ends
        self._step = self._begin
        self._before_answer = [*self.style.before_answer]
        self.has_reasoning = False
        """Whether the output begins with reasoning, even if it is empty."""
        self.has_marked_answer = False
        """Whether a mark stands before the answer."""
        self.is_over = False
        """Whether the answer begins with the text that is left."""

    def read(self, text: str, piece: Piece, final: bool) -> tuple[str, bool]:
        """Add what is certain to the piece. Returns the text that is left, and `is_over`."""
        again = True
        while again:
            text, again = self._step(text, piece, final)
        return text, self.is_over

    # Each step returns the text that is left, and whether another step can follow.

    def _begin(self, text: str, piece: Piece, final: bool) -> tuple[str, bool]:
        stripped, begin = text.lstrip(), self.style.begin
        if stripped.startswith(begin):
            text = stripped[len(begin) :]
            self._step = self._begin_thinking
        elif begin.startswith(stripped) and not final:
            return text, False
        else:
            self._step = self._begin_thinking if self._is_open else self._begin_answer
        return text, True

    def _begin_thinking(self, text: str, piece: Piece, final: bool) -> tuple[str, bool]:
        self.has_reasoning = True
        if text:
            self._step = self._think
        return text.removeprefix("\n"), bool(text)

    def _think(self, text: str, piece: Piece, final: bool) -> tuple[str, bool]:
        ends = (self.style.end, *self._ends)
        found = [(at, end) for end in ends if (at := text.find(end)) >= 0]
        if found:
            at, end = min(found)
            piece.write("reasoning", text[:at].removesuffix("\n"))
            self._step = self._begin_answer
            return text[at + len(end) * (end == self.style.end) :], True
        num_held = max(held(text, f"{line}{end}") for end in ends for line in ("", "\n"))
        num_given = len(text) - (0 if final else num_held)
        piece.write("reasoning", text[:num_given])
        return text[num_given:], False

    def _begin_answer(self, text: str, piece: Piece, final: bool) -> tuple[str, bool]:
        while self._before_answer:
            stripped, mark = text.lstrip(), self._before_answer[0]
            if not stripped.startswith(mark):
                if mark.startswith(stripped) and not final:
                    return text, False
            else:
                text, self.has_marked_answer = stripped[len(mark) :], True
            self._before_answer.pop(0)
        if self.has_marked_answer:
            rest = text.lstrip()
            waits = not rest
        elif self.has_reasoning:
            rest = text.removeprefix("\n").removeprefix("\n")
            waits = not rest and len(text) < 2
        else:
            rest, waits = text, False
        self.is_over = final or not waits
        return (rest if self.is_over else text), False


class AnswerEnd:
    """Leaves out the mark after an answer, with the white space beside it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held: list[str] = []
        """White space, and what may be the mark."""

    def feed(self, text: str) -> str:
        """The text of the answer that is certain now."""
        self._held.append(text)
        if text.isspace():
            return ""
        text = "".join(self._held)
        end = len(text.rstrip())
        if text.endswith(self._mark, 0, end):
            end -= len(self._mark)
        elif end == len(text):
            end -= held(text, self._mark)
        num_given = len(text[:end].rstrip())
        self._held = [text[num_given:]]
        return text[:num_given]

    def flush(self) -> str:
        """Returns the text that was held back, unless it is the mark. To be called when the answer
        has ended or a call follows."""
        text, self._held = "".join(self._held), []
        return "" if text.strip() == self._mark else text
