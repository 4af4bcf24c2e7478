"""Two tiny tokenizers of the kinds that matter, built on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from weft.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{{ mood | default('') }}{% endif %}"
)


def byte_chars() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a few merges that cut characters in the middle, two specials."""
    vocab = {c: i for i, c in enumerate(byte_chars())}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = []
    for text in ("th", "the", " t", "日本", "é", "😀"):
        chars = pre.pre_tokenize_str(text)[0][0]
        if chars[:2] not in vocab:
            merges.append((chars[0], chars[1]))
            vocab[chars[:2]] = len(vocab)
    rust.model = models.BPE(vocab=vocab, merges=merges)
    rust.pre_tokenizer = pre
    rust.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    hf.chat_template = TEMPLATE
    return Tokenizer(hf)


TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}<s>tool: {{ t.function.name }} {{ t.function.parameters | tojson }}"
    "{% endfor %}{% for m in messages %}<s>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if begun %}<think>\n{% endif %}{% endif %}"
)


@cache
def thinking() -> Tokenizer:
    """As `byte_level`, of a model that thinks and calls tools, as Qwen 3 does. The marks are
    tokens, and those of calls are special."""
    tokenizer = byte_level.__wrapped__()
    hf = tokenizer._hf
    hf.chat_template = TOOLS_TEMPLATE
    hf.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    hf.add_tokens([AddedToken(t, special=True) for t in ("<tool_call>", "</tool_call>")], True)
    return Tokenizer(hf)


@cache
def sentencepiece() -> Tokenizer:
    """As Llama 2's: a space is written U+2581, the first is dropped, and bytes are a fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    pieces += [chr(c) for c in range(33, 127)] + ["▁h", "▁w", "el", "lo", "▁the"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁", "w"), ("e", "l"), ("l", "o")]
    rust = RustTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>"))
