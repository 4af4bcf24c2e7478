"""What `peft` computes for tokens that Weft has chosen."""

from __future__ import annotations

import torch

from weft.llm import RequestOutput

TOLERANCE = 1e-3
"""How far a log-probability in float32 may be from the oracle's."""


@torch.inference_mode()
def oracle_logprobs(
    oracle: torch.nn.Module, prompt: list[int], ids: list[int], invocation: tuple[int, ...] = ()
) -> torch.Tensor:
    """The log-probabilities of each token that follows the prompt: (len(ids), vocabulary).

    `invocation`: the tokens from which an activated LoRA is at work, or none.
    """
    known = prompt + ids[:-1]
    more: dict[str, list[int]] = {}
    if invocation:
        size = len(invocation)
        start = next(i for i in range(len(prompt)) if tuple(prompt[i : i + size]) == invocation)
        more["alora_offsets"] = [len(known) - start]
    logits = oracle(input_ids=torch.tensor([known]), **more).logits[0]
    return logits[len(prompt) - 1 :].float().log_softmax(-1)


def check_output(
    oracle: torch.nn.Module, output: RequestOutput, invocation: tuple[int, ...] = ()
) -> None:
    """Greedy tokens, and the log-probabilities that are told of each."""
    prompt, ids = output.prompt_token_ids, output.token_ids
    want = oracle_logprobs(oracle, prompt, ids, invocation)
    assert (want.amax(-1) - want[range(len(ids)), ids]).max() < TOLERANCE
    for step, entry in enumerate(output.logprobs or ()):
        for token, logprob in entry.top:
            assert abs(want[step, token] - logprob) < TOLERANCE
