"""openvino-genai's continuous batching in scripts/bench_vs_peers.

Takes an OpenVINO folder or a GGUF of an architecture that it reads itself. As a user has it by
default, its key/value cache is 8-bit and, with compressed weights, so are the activations.
"""

import itertools
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker_loop import Generate, Prompts, Run, serve


def load(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB, as jaxserve's default
    scheduler.max_num_seqs = options["streams"]
    scheduler.max_num_batched_tokens = options["batched_tokens"]
    properties = {"INFERENCE_NUM_THREADS": options["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["path"], scheduler, "CPU", properties
    )
    numbers = itertools.count()

    def generate(prompts: Prompts, new_tokens: int) -> Run:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.asarray([prompt], np.int64)) for prompt in prompts]
        ids: Prompts = [[] for _ in prompts]
        first = last = 0.0
        start = time.perf_counter()
        handles = [pipeline.add_request(next(numbers), given, config) for given in inputs]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for out, handle in zip(ids, handles, strict=True):
                if handle.can_read():
                    for piece in handle.read().values():
                        out.extend(piece.generated_ids)
                    last = time.perf_counter() - start
                    first = first or last
        return Run(first, last, [len(out) for out in ids], ids)

    about = {
        "version": openvino_genai.get_version(),
        "settings": f"continuous batching, {options['batched_tokens']} tokens a step, "
        f"{options['threads']} threads, 1 GB of cache",
    }
    return generate, about


if __name__ == "__main__":
    serve(load)
