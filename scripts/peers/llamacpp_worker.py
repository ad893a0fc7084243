"""llama.cpp in scripts/bench_vs_peers: the server of the xllamacpp wheel, in this process.

Options: flash_attention, unified_cache, micro_batch (tokens of a physical batch).
"""

import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import xllamacpp
from worker_loop import Generate, Prompts, Run, serve

FLASH = {
    True: xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


def load(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    params = xllamacpp.CommonParams()
    params.model.path = options["path"]
    params.n_parallel = options["streams"]
    params.cont_batching = True
    params.n_ctx = options["streams"] * options["context"]
    params.kv_unified = options["unified_cache"]
    params.n_ubatch = options["micro_batch"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.flash_attn_type = FLASH[options["flash_attention"]]
    params.verbosity = 0
    params.ui = False
    server = xllamacpp.Server(params)

    def generate(prompts: Prompts, new_tokens: int) -> Run:
        requests = [
            {
                "prompt": prompt,
                "max_tokens": new_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
            for prompt in prompts
        ]
        return stream(server, requests[0]) if len(requests) == 1 else run_all(server, requests)

    about = {
        "version": f"xllamacpp {version('xllamacpp')}",
        "settings": f"{options['streams']} slots, continuous batching, {options['threads']} "
        f"threads, flash attention {'on' if options['flash_attention'] else 'off'}, "
        f"{'one cache for all' if options['unified_cache'] else 'a cache per slot'}, "
        f"micro-batches of {options['micro_batch']}",
        "built": xllamacpp.get_system_info(),
    }
    return generate, about


def tokens_made(answer: dict[str, Any], request: dict[str, Any]) -> int:
    """The tokens generated; all prompt tokens must have been computed, none taken from a cache."""
    usage = answer["usage"]
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    if usage["prompt_tokens"] != len(request["prompt"]) or cached:
        raise RuntimeError(f"wanted {len(request['prompt'])} prompt tokens computed, got {usage}")
    return int(usage["completion_tokens"])


def stream(server: Any, request: dict[str, Any]) -> Run:
    """One streamed request, timed chunk by chunk; the last chunk brings the counts."""
    chunks: list[tuple[float, dict[str, Any]]] = []

    def take(chunk: dict[str, Any]) -> None:
        chunks.append((time.perf_counter(), chunk))

    start = time.perf_counter()
    server.handle_completions({**request, "stream": True}, take)
    (first, _), (last, answer) = chunks[0], chunks[-1]
    return Run(first - start, last - start, [tokens_made(answer, request)], None)


def run_all(server: Any, requests: list[dict[str, Any]]) -> Run:
    """All requests at once, not streamed: only the end is timed, at no cost per token."""
    with ThreadPoolExecutor(len(requests)) as pool:
        start = time.perf_counter()
        answers = list(pool.map(server.handle_completions, requests))
        last = time.perf_counter() - start
    counts = [tokens_made(*pair) for pair in zip(answers, requests, strict=True)]
    return Run(last, last, counts, None)


if __name__ == "__main__":
    serve(load)
