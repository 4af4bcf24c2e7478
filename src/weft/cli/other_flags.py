"""The flags of vLLM, SGLang and LoRAX, and what becomes of them here."""

from __future__ import annotations

BASE = ("--model", "--model-path", "--model-id")
"""The flags by which other servers take the base model, which is an argument here."""

RENAMED = {
    "--adapter-memory-fraction": "--adapter-memory",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--cors-allow-origin": "--allowed-origins",
    "--disable-overlap-schedule": "--no-overlap",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--enable-deterministic-inference": "--deterministic",
    "--hostname": "--host",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--lora-extra-vocab-size": "--max-added-tokens",
    "--lora-paths": "--lora-modules",
    "--max-active-adapters": "--max-loras",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--max-loras-per-batch": "--max-loras",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--num-shard": "--tensor-parallel-size",
    "--page-size": "--block-size",
    "--quantize": "--quantization",
    "--sampling-defaults": "--generation-config",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "-p": "--port",
    "-tp": "--tensor-parallel-size",
}

_VECTORS = "/v1/embeddings, /score, /rerank and /classify are always served"
NEEDLESS = {
    "--api-server-count": "one process answers HTTP for all",
    "--async-scheduling": "it is the default (--overlap)",
    "--attention-backend": "the best kernels for the device are chosen",
    "--calculate-kv-scales": "the KV cache has the precision of the model",
    "--chat-template-content-format": "messages have texts only",
    "--compilation-config": "kernels and CUDA graphs need no settings",
    "--compile": "kernels and CUDA graphs need no settings",
    "--convert": _VECTORS,
    "--cuda-graph-max-bs": "kernels and CUDA graphs need no settings",
    "--disable-cuda-graph": "CUDA graphs are captured in seconds and change no result",
    "--disable-custom-all-reduce": "how GPUs add up their results needs no settings",
    "--disable-fastapi-docs": "there is no page at /docs",
    "--disable-log-requests": "requests are logged only with --log-level debug",
    "--disable-log-stats": "figures are at /metrics, and not in the log",
    "--distributed-executor-backend": "each GPU has a process of this server",
    "--embedding-model": _VECTORS,
    "--enable-auto-tool-choice": "tools work wherever the chat template takes them",
    "--enable-cache-report": "an answer's usage always has its cached tokens",
    "--enable-chunked-prefill": "long prompts are always read in chunks",
    "--enable-lora": "adapters are always served",
    "--enable-lora-bias": "biases of adapters are always served",
    "--enable-lora-overlap-loading": "adapters are always loaded while requests run",
    "--enable-metrics": "metrics are always at /metrics",
    "--enable-prompt-tokens-details": "an answer's usage always has its cached tokens",
    "--enable-reasoning": "reasoning is kept apart wherever the chat template shows it",
    "--enable-request-id-headers": "each answer has an x-request-id",
    "--enable-torch-compile": "kernels and CUDA graphs need no settings",
    "--enforce-eager": "CUDA graphs are captured in seconds and change no result",
    "--grammar-backend": "structured outputs always use xgrammar",
    "--guided-decoding-backend": "structured outputs always use xgrammar",
    "--is-embedding": _VECTORS,
    "--language-model-only": "only the text part of such models is served",
    "--lora-backend": "the best kernels for the device are chosen",
    "--lora-dtype": "adapters are in the model's precision",
    "--lora-target-modules": "an adapter may be on any projection of the model",
    "--max-cpu-loras": "adapters on the host are bounded in bytes, by --adapter-host-memory",
    "--max-loaded-loras": "adapters on the host are bounded in bytes, by --adapter-host-memory",
    "--max-log-len": "prompts and answers are never logged",
    "--max-lora-chunk-size": "the best kernels for the device are chosen",
    "--max-seq-len-to-capture": "CUDA graphs serve requests of any length",
    "--no-enable-chunked-prefill": "long prompts are always read in chunks",
    "--num-scheduler-steps": "the next step is planned while one runs (--overlap)",
    "--preemption-mode": "requests that lose their KV cache are computed again",
    "--random-seed": "each request without a seed gets one of its own",
    "--runner": _VECTORS,
    "--sampling-backend": "the best kernels for the device are chosen",
    "--schedule-conservativeness": "requests that lose their KV cache are computed again",
    "--schedule-policy": "tenants take turns by weight (--tenant-weights)",
    "--scheduling-policy": "tenants take turns by weight (--tenant-weights)",
    "--seed": "each request without a seed gets one of its own",
    "--sharded": "--tensor-parallel-size alone says it",
    "--skip-server-warmup": "a server that is ready has run each kind of step",
    "--specialize-active-lora": "the best kernels for the device are chosen",
    "--stream-interval": "tokens are sent as they come",
    "--structured-outputs-config": "structured outputs always use xgrammar",
    "--swap-space": "requests that lose their KV cache are computed again",
    "--task": _VECTORS,
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--uvicorn-log-level": "--log-level sets it for all",
}
"""Flags that are left out, and why nothing is lost."""

VALUES = {
    ("--generation-config", "model"): "auto",
    ("--generation-config", "openai"): "none",
    ("--generation-config", "vllm"): "none",
}
"""What the values of flags are called here."""

STATED = {
    "--chunked-prefill": ("true",),
    "--generation-config": ("auto",),
    "--kv-cache-dtype": ("auto",),
    "--load-format": ("safetensors",),
    "--logprobs-mode": ("raw_logprobs",),
    "--max-logprobs": ("20",),
    "--model-impl": ("auto", "vllm"),
    "--prefix-caching": ("true",),
    "--quantization": ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin"),
    "--reasoning-parser": (
        *("deepseek-r1", "deepseek_r1", "deepseek-v3", "deepseek_v3", "ernie45", "glm45", "glm47"),
        *("gpt-oss", "hunyuan", "hunyuan_a13b", "kimi", "kimi_k2", "minimax", "minimax_m2"),
        *("nemotron_3", "nemotron_v3", "olmo3", "openai_gptoss", "qwen3", "qwen3-thinking"),
    ),
    "--response-role": ("assistant",),
    "--sampling-defaults": ("openai",),
    "--tokenizer-mode": ("auto", "hf"),
    "--tool-call-parser": (
        *("deepseekv3", "deepseekv31", "glm", "gpt-oss", "granite4", "hunyuan_a13b", "llama3"),
        *("llama4_json", "llama4_pythonic", "minimax-m2", "openai", "qwen", "qwen25", "qwen3_xml"),
    ),
}
"""Values that say what is so without the flag, as the checkpoint says it or as it is never
otherwise. Among them are names that Weft does not know for formats of calls and of reasoning, as
the model's chat template shows which format it is."""

_DATA_PARALLEL = "start a server for each copy of the model; they can share a registry"
_PIPELINE = "a model is spread over GPUs by --tensor-parallel-size"
_DRAFTS = (
    "there are no draft models; --speculative guesses from the text (ngram) or by the model's own"
    " head (mtp)"
)
_PRELOADED = "name each adapter as NAME=PATH in --lora-modules"
_IMAGES = "images are not served; the text part of such a model is"
_ORIGINS = "--allowed-origins alone says which web pages may call the server"
MISSING = {
    "--adapter-cycle-time-s": "--max-adapter-wait bounds how long a request waits for its adapter",
    "--adapter-id": _PRELOADED,
    "--adapter-source": "adapters come from --lora-root or from --registry",
    "--allow-credentials": _ORIGINS,
    "--allowed-headers": _ORIGINS,
    "--allowed-methods": _ORIGINS,
    "--chat-template": "the template of the checkpoint, or of the adapter, is used",
    "--config": "give the flags that this file has in the command",
    "--cpu-offload-gb": "weights stay on the GPU; --quantization makes them smaller",
    "--data-parallel-size": _DATA_PARALLEL,
    "--default-mm-loras": _IMAGES,
    "--download-dir": "HF_HOME in the environment names the folder for downloads",
    "--dp": _DATA_PARALLEL,
    "--dp-size": _DATA_PARALLEL,
    "--enable-expert-parallel": _PIPELINE,
    "--enable-log-requests": "--log-level debug logs requests, and so does --log-format json",
    "--enable-server-load-tracking": "/metrics says how many requests run and wait",
    "--enable-sleep-mode": "end a server that is to free its GPU",
    "--enable-tower-connector-lora": _IMAGES,
    "--hf-overrides": "put the changed config.json beside the weights",
    "--hf-token": "give it as HF_TOKEN in the environment",
    "--json-output": "--log-format json writes the log as JSON",
    "--kv-cache-dtype": "the KV cache has the precision of the model",
    "--kv-transfer-config": "prompts and answers are computed by the same server",
    "--limit-mm-per-prompt": _IMAGES,
    "--long-lora-scaling-factors": "adapters for longer contexts than the base's are not served",
    "--lora-adapters": _PRELOADED,
    "--max-batch-total-tokens": "--max-model-len bounds a request and --kv-cache-memory the cache",
    "--max-concurrent-requests": "--max-num-seqs bounds the requests that run, and --max-queue"
    " those that wait",
    "--max-input-length": "--max-model-len bounds prompt and answer together",
    "--max-logprobs": "a token has at most 20 log-probabilities",
    "--max-prefill-tokens": "--max-num-batched-tokens bounds the tokens of a step",
    "--max-total-tokens": "--max-model-len bounds a request and --kv-cache-memory the cache",
    "--mm-processor-kwargs": _IMAGES,
    "--nnodes": "a model is spread over the GPUs of one machine",
    "--otlp-traces-endpoint": "--otlp-endpoint takes the collector's address for HTTP",
    "--override-generation-config": "a request says how it is sampled, or generation_config.json in"
    " the model's folder does",
    "--pipeline-parallel-size": _PIPELINE,
    "--pp": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--preload-adapter-ids": _PRELOADED,
    "--return-tokens-as-token-ids": "a request asks for it with a field of that name",
    "--root-path": "let the proxy in front of the server remove that part of the path",
    "--rope-scaling": "put it into config.json",
    "--rope-theta": "put it into config.json",
    "--speculative-algorithm": _DRAFTS,
    "--speculative-config": _DRAFTS,
    "--speculative-tokens": _DRAFTS,
    "--ssl-ca-certs": "let a proxy in front of the server speak TLS",
    "--ssl-certfile": "let a proxy in front of the server speak TLS",
    "--ssl-keyfile": "let a proxy in front of the server speak TLS",
    "--tokenizer": "the tokenizer beside the weights is used",
    "--tokenizer-config-path": "the tokenizer beside the weights is used",
    "--tokenizer-path": "the tokenizer beside the weights is used",
    "-dp": _DATA_PARALLEL,
    "-pp": _PIPELINE,
}
"""Flags of which something is lost, and what to do."""

_SWITCHES = """
--allow-credentials --async-scheduling --calculate-kv-scales --compile
--disable-cuda-graph --disable-custom-all-reduce --disable-fastapi-docs
--disable-log-requests --disable-log-stats --disable-overlap-schedule
--disable-radix-cache --enable-auto-tool-choice --enable-cache-report
--enable-chunked-prefill --enable-deterministic-inference --enable-expert-parallel
--enable-log-requests --enable-lora --enable-lora-bias --enable-lora-overlap-loading
--enable-metrics --enable-prompt-tokens-details --enable-reasoning
--enable-request-id-headers --enable-server-load-tracking --enable-sleep-mode
--enable-torch-compile --enable-tower-connector-lora --enforce-eager --is-embedding
--json-output --language-model-only --no-enable-chunked-prefill
--return-tokens-as-token-ids --skip-server-warmup --specialize-active-lora
--trust-remote-code
"""
SWITCHES = frozenset(_SWITCHES.split())
"""Those of the flags above that take no value."""

REPEATED = {"--api-key", "--served-model-name"}
"""Flags that take several values, and that `weft serve` has once for each."""
LISTS = {
    "--lora-modules",
    "--lora-paths",
    "--lora-target-modules",
    "--preload-adapter-ids",
    *REPEATED,
}
"""Flags that take several values."""
