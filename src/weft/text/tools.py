"""The formats in which models call tools."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from weft.text.calls.template import marks_of, split


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    begin: str
    """The mark before a call, or before all calls."""
    call: str = ""
    """The template of a call (see `weft.text.calls.template`), as the family's own chat template
    writes it."""
    end: str = ""
    """The mark after a call, or after all calls."""
    syntax: Literal["json", "named", "xml", "gemma", "python", "harmony"] = "json"
    """json: an object with a name and arguments. named: a name between marks, then the arguments as
    an object. xml: parameters between marks. gemma: `call:name{key:value}` with marks for quotes.
    python: `name(key=value)`. harmony: messages, which `weft.text.harmony` reads."""
    layout: Literal["each", "list", "run"] = "each"
    """Where the marks stand. each: around each call. list: around a list of calls, in brackets and
    with commas. run: around calls that follow one another."""
    opening: str = ""
    """What is written between the first mark and a call, or all calls."""
    closing: str = ""
    """What is written before the last mark."""
    between: str = "\n"
    """What is written between calls."""
    separator: str = ""
    """What may stand between calls that share the mark before them, beside white space."""
    bare: bool = False
    """Whether an output may begin with a call that has no mark."""
    also_begin: tuple[str, ...] = ()
    """Other marks that models write instead of the first."""
    reads: str = ""
    """The template by which calls are read, if it differs from `call`: it is of named calls, and
    has parentheses around what may be missing."""
    parameter: str = ""
    """The template of a parameter in XML."""
    quote: str = ""
    """The mark that stands for quotes."""
    ends_reasoning: bool = False
    """Whether the mark before calls ends the reasoning, too."""

    @property
    def is_single(self) -> bool:
        """Whether an answer ends after one call."""
        return self.bare and self.syntax == "named"

    @property
    def begins(self) -> tuple[str, ...]:
        """All marks that may stand before a call."""
        return (self.begin, *self.also_begin)

    @property
    def lead(self) -> str:
        """What a call itself begins with, if only calls begin like that; else "". It is read as the
        beginning of a call, too, as some models forget the mark before it."""
        lead = split(self.call)[0].strip()
        if self.syntax == "named":
            lead = next((mark for mark in marks_of(lead) if lead.startswith(mark)), "")
        return lead if self.syntax in ("named", "xml") else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. Where they are special tokens, the text must not leave them out."""
        inner = map(marks_of, (*self.also_begin, self.call, self.reads, self.parameter))
        found = (self.begin, self.end, self.quote, *(mark for each in inner for mark in each))
        return tuple(dict.fromkeys(mark for mark in found if mark))


_OBJECT = '{"name": {name}, "arguments": {arguments}}'
_FUNCTION = "<function={name}>\n{parameters}</function>"
_ARGUMENT = "<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}"
_GEMMA = "call:{name}{{parameters}}"
_PYTHON = "{name}({parameters})"
_MISTRAL = "{name}([CALL_ID]{id})([ARGS]){arguments}"


def _list(begin: str, end: str = "", call: str = _OBJECT, **fields: Any) -> ToolFormat:
    """A format whose calls are a list."""
    between = {"opening": "[", "closing": "]", "between": ", ", **fields}
    return ToolFormat(begin, call, end, layout="list", **between)


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", _OBJECT, "</tool_call>", opening="\n", closing="\n"),
    "llama3_json": ToolFormat(
        "<|python_tag|>",
        '{"name": {name}, "parameters": {arguments}}',
        separator=";",
        between="; ",
        bare=True,
        also_begin=("<|python_start|>",),
    ),
    "mistral": _list("[TOOL_CALLS]", opening=" [", reads=_MISTRAL),
    "mistral_v11": ToolFormat(
        "[TOOL_CALLS]", "{name}[ARGS]{arguments}", syntax="named", between="", reads=_MISTRAL
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>",
        _FUNCTION,
        "</tool_call>",
        "xml",
        opening="\n",
        closing="\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "seed_oss": ToolFormat(
        "<seed:tool_call>",
        _FUNCTION,
        "</seed:tool_call>",
        "xml",
        opening="\n",
        closing="\n",
        parameter="<parameter={key}>{value}</parameter>\n",
    ),
    "minimax_m2": ToolFormat(
        "<minimax:tool_call>",
        '<invoke name="{name}">\n{parameters}</invoke>\n',
        "</minimax:tool_call>",
        "xml",
        "run",
        opening="\n",
        between="",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    "glm45": ToolFormat(
        "<tool_call>",
        "{name}\n{parameters}</tool_call>",
        syntax="xml",
        parameter=_ARGUMENT.replace("{gap}", "\n"),
    ),
    "glm47": ToolFormat(
        "<tool_call>",
        "{name}{parameters}</tool_call>",
        syntax="xml",
        between="",
        parameter=_ARGUMENT.replace("{gap}", ""),
    ),
    "granite": _list("<|tool_call|>", also_begin=("<tool_call>",)),
    "cohere": _list(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '{"tool_call_id": "{n}", "tool_name": {name}, "parameters": {arguments}}',
        opening="[\n    ",
        closing="\n]",
        between=",\n    ",
    ),
    "phi4_mini_json": _list("<|tool_call|>", "<|/tool_call|>", also_begin=("functools",)),
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "gemma4": ToolFormat(
        "<|tool_call>", _GEMMA, "<tool_call|>", "gemma", between="", quote='<|"|>'
    ),
    "functiongemma": ToolFormat(
        "<start_function_call>",
        _GEMMA,
        "<end_function_call>",
        "gemma",
        between="",
        quote="<escape>",
    ),
    "olmo3": ToolFormat("<function_calls>", _PYTHON, "</function_calls>", "python", "run"),
    "lfm2": _list("<|tool_call_start|>", "<|tool_call_end|>", _PYTHON, syntax="python"),
    "pythonic": _list(
        "<|python_start|>",
        "<|python_end|>",
        _PYTHON,
        syntax="python",
        bare=True,
        also_begin=("<|python_tag|>",),
    ),
    "deepseek_v3": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "named",
        "run",
    ),
    "deepseek_v31": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "named",
        "run",
        between="",
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "named",
        "run",
        between="",
        reads="<|tool_call_begin|>(functions.){name}(:{n})<|tool_call_argument_begin|>{arguments}",
        ends_reasoning=True,
    ),
    "solar_open": ToolFormat(
        "<|tool_calls|>",
        "<|tool_call:begin|>{n}<|tool_call:name|>{name}<|tool_call:args|>{arguments}"
        "<|tool_call:end|>",
        syntax="named",
        layout="run",
        between="",
        also_begin=("<|begin|>assistant<|tool_calls|>",),
        reads="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}",
    ),
    "hunyuan": ToolFormat(
        "<tool_calls>",
        "<tool_call>{name}\n```json\n{arguments}\n```</tool_call>",
        "</tool_calls>",
        "named",
        "run",
    ),
    "glm4": ToolFormat("<|assistant|>", "{name}\n{arguments}", syntax="named", bare=True),
    "harmony": ToolFormat(
        "<|channel|>",
        "<|start|><|constrain|><|message|><|end|><|call|><|return|>",  # all marks of messages
        syntax="harmony",
    ),
}
"""Formats by name. The templates show how each is written. Beyond that:

- hermes: Hermes, Qwen 2.5 and 3, Granite 4, EXAONE 4, K-EXAONE, SmolLM 3, ERNIE 4.5 Thinking
- llama3_json: Llama 3.1 to 3.3, and 4 by its first templates, at the beginning of an output or
  behind a mark
- mistral: up to version 7 of its tokenizers; a name and its arguments are read, too
- mistral_v11: later ones
- qwen3_coder: Qwen3-Coder, Qwen 3.5, Nemotron 3. As in all XML, values are JSON where the tool's
  schema asks for more than text
- glm45: GLM 4.5 and 4.6; glm47: GLM 4.7, without line breaks
- granite: Granite 3, of which 3.1 has another mark
- cohere: Command R7B and A
- phi4_mini_json: Phi-4-mini, which writes `functools` if the prompt is its vendor's example
- nemotron_json: Nemotron Nano 2
- lfm2: LFM2, LFM2.5
- pythonic: Llama 4 and 3.2, and others whose template asks for it, at the beginning of an output
  or behind a mark
- deepseek_v3: DeepSeek V3 and R1
- hunyuan: also as a JSON list, as Hunyuan-A13B writes it
- glm4: GLM-4-0414, at the beginning of an output or behind the mark
- harmony: gpt-oss
"""


_SHOWN_BY: tuple[tuple[str | None, *tuple[str, ...]], ...] = (
    ("gemma4", r"<\|tool_call>"),
    ("functiongemma", r"<start_function_call>"),
    ("olmo3", r"<function_calls>"),
    ("phi4_mini_json", r"<\|/tool\|>"),
    ("kimi_k2", r"<\|tool_calls_section_begin\|>|<\|im_system\|>tool_declare"),
    ("solar_open", r"<\|tool_call:begin\|>"),
    ("deepseek_v3", r"<｜tool▁sep｜>.{0,80}```json"),
    ("deepseek_v31", r"<｜tool▁calls▁begin｜>"),
    ("nemotron_json", r"<TOOLCALL>"),
    ("lfm2", r"<\|tool_call_start\|>|<\|tool_list_start\|>"),
    ("harmony", r"<\|channel\|>"),
    ("mistral_v11", r"\[ARGS\]"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("minimax_m2", r"<minimax:tool_call>"),
    ("seed_oss", r"<seed:tool_call>"),
    ("qwen3_coder", r"<function="),
    ("cohere", r"<\|START_ACTION\|>"),
    (None, r"<tool_calls>", r"<arg_key"),  # Hunyuan 3
    ("hunyuan", r"<tool_calls>"),
    ("glm47", r"<arg_key>", r"['\"]<tool_call>['\"] *[+~]"),
    ("glm45", r"<arg_key>"),
    ("hermes", r"<tool_call>"),
    ("granite", r"<\|tool_call\|>|<\|start_of_role\|>(?:available_)?tools<\|end_of_role\|>"),
    (None, r"item\['tools'\]", r"<\|observation\|>"),  # the first GLM-4 has tools in messages
    ("glm4", r"<\|observation\|>"),
    ("pythonic", r"\[func_name1\("),
    ("llama3_json", r'<\|python_tag\|>|"parameters": dictionary'),
)
"""Formats, or None for one that is not served, each with patterns that all occur in its chat
templates. The first format found counts. Anyone may bring a template, so the time that a pattern
needs must not grow faster than the template."""

_BY_TOKEN = ("lfm2", "kimi_k2")
"""Formats of families whose chat templates may not show calls, though they take tools."""


def detect_tool_format(
    chat_template: str, has_token: Callable[[str], bool] = lambda mark: False
) -> str | None:
    """The format that a model's own chat template writes, or None if it writes none of ours.
    `has_token` says whether a mark is a token of the model."""
    for name, *shown in _SHOWN_BY:
        if all(re.search(pattern, chat_template) for pattern in shown):
            return name
    if not re.search(r"\btools\b", chat_template):
        return None
    return next((name for name in _BY_TOKEN if has_token(TOOL_FORMATS[name].begin)), None)
