"""A tiny model that has learned to copy, for benchmarks of guessing.

    python benchmarks/copying.py            # trains both tasks, within some minutes on one core

It stands in for a large model that edits or quotes its prompt. A prompt is a piece of a text of
`LENGTH` tokens, and the answer is the same piece: as it is (`extract`), or with each token of a
fixed sixteenth of the vocabulary replaced by another one (`edit`). It is trained on random tokens
and on this repository's code, and asked with this repository's documents. What was trained is kept
in the cache folder.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
TASKS = ("extract", "edit")
LENGTH = 128
VOCABULARY = 1024
REPLACED = 16
"""One token in so many is replaced by an edit."""


def trained(task: str, most_steps: int = 1500, good_loss: float = 0.02) -> Path:
    """The folder of the task's model, which is trained if it is not in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "weft-benchmarks" / f"copying-{task}"
    if not (folder / "model.safetensors").exists():
        _train(task, most_steps, good_loss).save_pretrained(folder)
    return folder


def pieces(pattern: str, count: int, seed: int) -> list[list[int]]:
    """Pieces of the repository's files of that pattern, as token ids."""
    tokens = _tokenizer().encode(_read(pattern)).ids
    chosen = random.Random(seed)
    starts = [chosen.randrange(len(tokens) - LENGTH) for _ in range(count)]
    return [tokens[start : start + LENGTH] for start in starts]


def answer(task: str, piece: Tensor) -> Tensor:
    """The answer that the model should give."""
    return piece if task == "extract" else piece + (piece % REPLACED == 0).long()


def _read(pattern: str) -> str:
    return "\n".join(path.read_text() for path in sorted(ROOT.glob(pattern)))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_read("docs/*.md"), _read("src/weft/*/*.py")], trainer)
    return tokenizer


def _train(task: str, most_steps: int, good_loss: float, rows: int = 8) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4 * LENGTH,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    code = torch.tensor(pieces("src/weft/*/*.py", 2000, 0))
    begun, mean = time.perf_counter(), 10.0
    for step in range(most_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        random_RL = torch.randint(0, VOCABULARY, (rows // 2, LENGTH))
        code_RL = code[torch.randint(0, len(code), (rows // 2,))]
        piece_RL = torch.cat((random_RL, code_RL))
        ids_RT = torch.cat((piece_RL, answer(task, piece_RL)), 1)
        labels_RT = ids_RT.clone()
        labels_RT[:, :LENGTH] = -100
        loss = model(input_ids=ids_RT, labels=labels_RT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.9 * mean + 0.1 * loss.item()
        if step % 50 == 49:
            elapsed = time.perf_counter() - begun
            print(f"{task}: step {step + 1}, loss {mean:.3f}, {elapsed:.0f} s", flush=True)
        if mean < good_loss:
            break
    return model


if __name__ == "__main__":
    argparse.ArgumentParser(description="Train both models, unless they are there.").parse_args()
    for task in TASKS:
        print(trained(task))
