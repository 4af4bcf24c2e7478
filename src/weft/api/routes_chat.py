"""`POST /v1/chat/completions`, and the turn of a conversation that other routes share with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.bodies import NamedTool
from weft.api.generation import (
    AnswerHead,
    chat_logprobs,
    check_logprobs,
    naming,
    num_choices,
    prompt_logprobs,
    sampling,
    truncated,
    usage,
)
from weft.api.http import ERRORS, STREAMED, EventStream, answer, body_of
from weft.api.reading import read_request
from weft.api.schemas import ChatBody
from weft.api.service import Output, Service
from weft.api.templating import newest_that_fit, template_kwargs
from weft.core.errors import EngineDead, InvalidRequest
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.serving import Pinned
from weft.text import OutputDelta
from weft.text.calls.forms import schemas_of, tools_schema
from weft.text.calls_or_text import EitherParser, calls_or
from weft.text.chat_parser import ChatParser
from weft.text.harmony import HarmonyParser
from weft.text.json_stream import WholePairs, is_json
from weft.text.pieces import Piece, TextDelta, ToolCallDelta
from weft.text.reasoning import REASONING, opens_reasoning

_TAIL_TOKENS = 16
"""Enough of a prompt's end to see whether it opens or closes the reasoning."""


class Turn:
    """One chat request: `n` answers to one conversation.

    `prepare` makes the engine's `requests`, `collect` or `run` runs them, and a `reader()` parses
    one output. `fields` maps fields of SamplingParams to the client's names, for
    `generation.naming`.
    """

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        pinned: Pinned,
        request_id: str,
        drops_oldest: bool = False,
        fills: bool = False,
    ) -> None:
        """`drops_oldest`: drop the oldest turns of a conversation that is too long. `fills`: lower
        a `max_tokens` that doesn't fit after the prompt, instead of refusing it."""
        self._drops_oldest = drops_oldest
        self._fills = fills
        self._service = service
        self._body = body
        self._pinned = pinned
        self._request_id = request_id
        self._language = pinned.language
        self.tokenizer = pinned.language.tokenizer
        self._dialect = service.dialect_of(pinned.language)
        self._tools: list[dict[str, Any]] = []
        self._in_reasoning = False
        self._begins: tuple[str, ...] | None = None
        """What calls begin with, if the answer is either calls or a text of some form."""
        self.num_choices = 1
        self.requests: list[EngineRequest] = []
        self.fields = {
            "logprobs": "top_logprobs",
            "max_tokens": body.max_tokens_field or "max_tokens",
        }

    async def prepare(self) -> None:
        """Encode and make `requests`. Raises InvalidRequest, ContextLengthExceeded."""
        body = self._body
        self.num_choices = num_choices(self._service, body)
        self._tools = self._callable_tools()
        wanted = body.max_completion_tokens
        params = sampling(
            self._service.settings.sampling_defaults,
            body,
            body.max_tokens if wanted is None else wanted,
            (body.top_logprobs or 0) if body.logprobs else None,
            self._form(),
        )
        prompt_ids = await self._prompt_ids(params.max_tokens)
        if self._fills and params.max_tokens is not None:
            room = max(self._service.intake.max_model_len - len(prompt_ids), 1)
            params = replace(params, max_tokens=min(params.max_tokens, room))
        check_logprobs(self._service, params, [prompt_ids], self.num_choices)
        tenant = self._service.settings.tenant_of(self._pinned.name)
        self.requests = await self._service.intake.requests(
            self._request_id,
            [prompt_ids],
            self._thinking_first(params, prompt_ids),
            self._pinned,
            tenant,
            self.num_choices,
            prompt_field="messages",
            asked_in=body.max_tokens_field,
            cache_salt=self._service.salt(tenant, body.cache_salt),
        )

    async def count(self) -> int:
        """The number of tokens of the prompt, which may be longer than what is served."""
        self._tools = self._callable_tools()
        return len(await self._prompt_ids(None, any_length=True))

    async def _prompt_ids(self, max_tokens: int | None, any_length: bool = False) -> list[int]:
        body, language = self._body, self._language
        own = body.chat_template or None
        if own is not None and not self._service.settings.allow_request_templates:
            message = "chat_template is not taken from requests (--allow-request-templates)"
            raise InvalidRequest(message, "chat_template")
        template = own or (self.tokenizer.chat_template if self.tokenizer else None)
        options = {
            "tools": self._tools or None,
            "any_length": any_length or body.truncate_prompt_tokens is not None,
            "own_template": own,
            **body.template_options(),
            "template_kwargs": template_kwargs(body, template),
        }

        async def encode(messages: list[dict[str, Any]]) -> list[int]:
            return await self._service.encode_chat(messages, language, **options)

        messages = [m.to_template(i) for i, m in enumerate(body.messages)]
        if self._drops_oldest:
            room = self._service.intake.max_model_len - max(max_tokens or 1, 1)
            return await newest_that_fit(messages, room, encode)
        return truncated(
            self._service,
            self._body.truncate_prompt_tokens,
            await encode(messages),
            max(max_tokens or 1, 1),
        )

    async def collect(self) -> list[Output]:
        """The whole outputs, in the order of the choices."""
        return await self._service.collect(self.requests, self._language, self._shown_ids())

    def run(
        self, whole: bool = False, by_token: bool = False
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """The outputs' deltas as they come, each with the index of its choice; `whole` and
        `by_token`: as for `Service.run_all`."""
        shown = self._shown_ids()
        return self._service.run_all(self.requests, self._language, shown, whole, by_token)

    def reader(self) -> Reader:
        return Reader(self._parser(), one_call=self._body.parallel_tool_calls is False)

    def begin_of_text(self, reader: Reader) -> int | None:
        """The token ahead of the answer's text, in an output that has one."""
        bare = self._dialect.reasoning is not None and not reader.has_reasoning
        return None if bare else self._dialect.begin_of_text

    def num_reasoning_tokens(self, output: Output, reader: Reader) -> int:
        """How many tokens come up to the end of the reasoning: all, if it does not end."""
        end = self._dialect.end_of_reasoning
        if not reader.has_reasoning:
            return 0
        if end in output.token_ids:
            return output.token_ids.index(end) + 1
        return 0 if reader.content or reader.calls else len(output.token_ids)

    def _parser(self) -> ChatParser | HarmonyParser:
        tool_format, tools = self._dialect.tool_format, self._tools
        if tool_format == "harmony":
            return HarmonyParser(bool(tools), self._begins is not None)
        tool_format, schemas = (tool_format, schemas_of(tools)) if tools else (None, {})
        given = tool_format, self._dialect.reasoning, self._in_reasoning, schemas
        return ChatParser(*given) if self._begins is None else EitherParser(*given, self._begins)

    def _shown_ids(self) -> list[int]:
        """The special tokens that mark reasoning or calls. Texts must show them to be read."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        ids = [tokenizer.mark_id(mark) for mark in self._parser().marks]
        return [token_id for token_id in ids if token_id is not None]

    def _callable_tools(self) -> list[dict[str, Any]]:
        body = self._body
        if not body.tools or body.tool_choice == "none":
            return []
        if self._dialect.tool_format is None:
            message = (
                "tools can't be used: this model's chat template has no known format of calls, or"
                " the server has --tool-call-parser none"
            )
            raise InvalidRequest(message, "tools")
        return [tool.to_template() for tool in body.tools]

    def _form(self) -> StructuredOutputs | None:
        """The form that the answer must have: the client's, either that or calls of tools, or calls
        alone, which leave no text that the client's could bind."""
        form, name = self._body.form()
        self.fields["structured_outputs"] = name
        if not self._tools:
            return form
        choice, tool_format = self._body.tool_choice, self._dialect.tool_format
        assert tool_format is not None
        one_call = self._body.parallel_tool_calls is False
        if choice in (None, "auto"):
            if form is None:
                return None
            self.fields["structured_outputs.around"] = "tools"
            either = calls_or(form, self._tools, tool_format, one_call)
            self._begins = either.never_first
            return either
        self.fields["structured_outputs"] = "tools"
        named = choice.function.name if isinstance(choice, NamedTool) else None
        return tools_schema(self._tools, tool_format, named, one_call)

    def _thinking_first(self, params: SamplingParams, prompt_ids: list[int]) -> SamplingParams:
        """The parameters, whose form binds only after the reasoning if there is any to come."""
        tokenizer, dialect = self.tokenizer, self._dialect
        style, end = dialect.reasoning, dialect.end_of_reasoning
        if style is None or tokenizer is None:
            return params
        tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:])
        self._in_reasoning = opens_reasoning(tail, style)
        is_over = tail.rstrip().endswith(REASONING[style].end)
        if params.structured_outputs is None or end is None or is_over:
            return params
        first = None if self._in_reasoning else dialect.begin_of_reasoning
        form = replace(params.structured_outputs, begin_after_token=end, reasoning_token=first)
        return replace(params, structured_outputs=form)


class Reader:
    """Splits one output into content, reasoning and calls, and adds each up."""

    def __init__(self, parser: ChatParser | HarmonyParser, one_call: bool) -> None:
        self._parser = parser
        self._one_call = one_call
        self._pairs = WholePairs()
        """Reads the newest call's arguments."""
        self._newest = 0
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCallDelta] = []
        self.finish_reason: str | None = None

    def feed(self, part: OutputDelta | Output) -> Piece:
        """What the part adds; with the last one, also what was held back until then."""
        piece = self._parser.feed(part.text)
        if part.finish_reason is not None:
            self._parser.flush(piece)
        self._mend(piece, final=part.finish_reason is not None)
        if self._one_call:
            piece.parts = [p for p in piece.parts if isinstance(p, TextDelta) or p.index == 0]
        self.content += piece.content
        self.reasoning += piece.reasoning
        for delta in piece.tool_calls:
            if delta.index == len(self.calls):
                self.calls.append(replace(delta))
            else:
                self.calls[delta.index].arguments += delta.arguments
        called = part.finish_reason == "stop" and bool(self.calls)
        if called and isinstance(part.stop_reason, str):  # a stop string may have cut the last one
            called = is_json(self.calls[-1].arguments)
        self.finish_reason = "tool_calls" if called else part.finish_reason
        return piece

    def check_whole(self) -> None:
        """Raise EngineDead if the server stopped before the answer had ended, where the API has no
        name for that."""
        if self.finish_reason == "abort":
            raise EngineDead("the server stopped before the answer had ended")

    @property
    def has_reasoning(self) -> bool:
        return self._parser.has_reasoning

    def _mend(self, piece: Piece, final: bool) -> None:
        """Replace halves of surrogate pairs in the arguments of calls."""
        mended: list[TextDelta | ToolCallDelta] = []
        for part in piece.parts:
            if isinstance(part, TextDelta):
                mended += [*self._held(), part]
                continue
            if part.name is not None:
                mended += self._held()
                self._newest = part.index
            part.arguments = self._pairs.feed(part.arguments)
            if part.name is not None or part.arguments:
                mended.append(part)
        piece.parts = [*mended, *(self._held() if final else ())]

    def _held(self) -> list[ToolCallDelta]:
        """What was held back of the newest call's arguments, if anything was."""
        rest = self._pairs.flush()
        return [ToolCallDelta(self._newest, None, None, rest)] if rest else []


_WHOLE = "chat.completion"
_CHUNK = "chat.completion.chunk"


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody), responses=STREAMED)
    async def create_chat_completion(request: Request) -> Response:
        body = await read_request(request, ChatBody, service.settings)
        body.check()
        pinned = await service.pin(body, request.headers)
        chat = _Chat(service, body, pinned)
        headers = service.headers_of(pinned)
        if body.stream:
            return EventStream(chat.chunks(), pinned.release, headers)
        return await answer(request, chat.whole(), pinned.release, headers)

    return router


class _Chat:
    """One chat request."""

    def __init__(self, service: Service, body: ChatBody, pinned: Pinned) -> None:
        self._body = body
        self._head = AnswerHead.new("chatcmpl", body, pinned)
        self._turn = Turn(service, body, pinned, self._head.request_id)
        self._wants_ids = bool(body.return_token_ids) or self._turn.tokenizer is None

    async def whole(self) -> dict[str, Any]:
        turn = self._turn
        with naming(turn.fields):
            await turn.prepare()
            outputs = await turn.collect()
        choices = [self._whole_choice(i, output) for i, output in enumerate(outputs)]
        answer = self._head.chunk(_WHOLE, choices)
        answer["usage"] = usage(turn.requests, outputs, turn.num_choices)
        if self._wants_ids:
            answer["prompt_token_ids"] = turn.requests[0].prompt_ids
        return answer | prompt_logprobs(self._body, turn.tokenizer, turn.requests[0], outputs[0])

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        turn = self._turn
        with naming(turn.fields):
            await turn.prepare()
            outputs = [Output() for _ in turn.requests]
            readers = [turn.reader() for _ in turn.requests]
            async with aclosing(turn.run()) as merged:
                async for i, delta in merged:
                    if not outputs[i].texts:
                        yield self._with_usage(self._opening(i), i, outputs[i])
                    outputs[i].add(delta)
                    piece = readers[i].feed(delta)
                    if self._shows(delta, piece):
                        for choice in self._chunk_choices(i, delta, piece, readers[i]):
                            chunk = self._head.chunk(_CHUNK, [choice])
                            yield self._with_usage(chunk, i, outputs[i])
        if self._body.include_usage:
            total = usage(turn.requests, outputs, turn.num_choices)
            yield self._head.chunk(_CHUNK, []) | {"usage": total}

    def _with_usage(self, chunk: dict[str, Any], index: int, output: Output) -> dict[str, Any]:
        """The chunk, with the usage of its choice so far if each is to have that."""
        if self._body.usage_in_all:
            chunk["usage"] = usage([self._turn.requests[index]], [output], 1)
        return chunk

    def _whole_choice(self, index: int, output: Output) -> dict[str, Any]:
        reader = self._turn.reader()
        reader.feed(output)
        content = None if reader.calls and not reader.content else reader.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reader.reasoning:
            message |= _reasoning(reader.reasoning)
        if reader.calls:
            message["tool_calls"] = [_call(call) for call in reader.calls]
        return self._choice(index, {"message": message}, output, reader)

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head.chunk(_CHUNK, [choice])
        if self._wants_ids:
            chunk["prompt_token_ids"] = self._turn.requests[0].prompt_ids
        return chunk

    def _shows(self, delta: OutputDelta, piece: Piece) -> bool:
        said = piece.content or piece.reasoning or piece.tool_calls
        return bool(said or delta.finish_reason or delta.logprobs or self._wants_ids)

    def _chunk_choices(
        self, index: int, delta: OutputDelta, piece: Piece, reader: Reader
    ) -> list[dict[str, Any]]:
        """The choices of a chunk, or of two if calls come with the end of the answer: clients of
        OpenAI take a call as complete when a later chunk has the finish reason."""
        said: dict[str, Any] = {"content": piece.content} if piece.content else {}
        if piece.reasoning:
            said |= _reasoning(piece.reasoning)
        if piece.tool_calls:
            said["tool_calls"] = [{"index": call.index, **_call(call)} for call in piece.tool_calls]
        choice = self._choice(index, {"delta": said}, delta, reader)
        if not piece.tool_calls or reader.finish_reason is None:
            return [choice]
        nothing = replace(delta, token_ids=[], logprobs=None)
        end = self._choice(index, {"delta": {}}, nothing, reader)
        return [choice | {"finish_reason": None, "stop_reason": None}, end]

    def _choice(
        self, index: int, said: dict[str, Any], part: OutputDelta | Output, reader: Reader
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(self._body, self._turn.tokenizer, part)
        choice = {"index": index, **said, "logprobs": logprobs}
        choice["finish_reason"] = reader.finish_reason
        if part.finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if self._wants_ids:
            choice["token_ids"] = part.token_ids
        return choice


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    """A call, or a piece of one. Its id, type and name come once, with the first piece."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
