"""jaxserve in scripts/bench_vs_peers: the GGUF as a user serves it, through LLM's client.

Its "about" also says what one decode step reads (bytes of all parameters, once) and how many
multiply-adds one prompt token costs, for the rates that the report prints.
"""

import itertools
import math
import os
import queue
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from worker_loop import Generate, Prompts, Run, serve


def load(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    # After the process has been pinned: XLA counts the cores when it starts.
    from importlib.metadata import version

    from jaxserve.engine.outputs import GenerationRequest, OutputDelta
    from jaxserve.llm import LLM
    from jaxserve.sampling_params import SamplingParams

    started = time.perf_counter()
    llm = LLM(options["path"], max_batch_rows=options["streams"], prefix_cache=False)
    start_seconds = time.perf_counter() - started
    numbers = itertools.count()

    def generate(prompts: Prompts, new_tokens: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        ids: Prompts = [[] for _ in prompts]
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        times: list[float] = []

        def sink_of(index: int) -> Any:
            def sink(delta: OutputDelta) -> None:
                times.append(time.perf_counter())
                ids[index].extend(delta.token_ids)
                if delta.finish_reason is not None:
                    ended.put(index)

            return sink

        requests = [
            GenerationRequest(str(next(numbers)), tuple(prompt), params) for prompt in prompts
        ]
        start = time.perf_counter()
        for index, request in enumerate(requests):
            llm.client.submit(request, sink_of(index))
        for _ in prompts:
            ended.get()
        llm.client.raise_if_dead()
        return Run(times[0] - start, times[-1] - start, [len(out) for out in ids], ids)

    about = {
        "version": f"{version('jaxserve')}, jax {version('jax')}",
        "settings": f"the GGUF as it is, {options['streams']} rows, everything else default",
        "start_seconds": start_seconds,
        **costs(llm.model.params),
    }
    return generate, about


def costs(params: Any) -> dict[str, int]:
    """Bytes of all parameters, and multiply-adds of one prompt token in the layers' matrices.

    Right for models whose output matrix is the embedding, as both of the benchmark's are: a decode
    step then reads every parameter once.
    """
    import jax

    from pallas_kernels.quantized_matmul import QuantizedArray, StackedRows

    def packed(node: Any) -> bool:
        return isinstance(node, QuantizedArray | StackedRows)

    matrices = jax.tree_util.tree_leaves(params["layers"], is_leaf=packed)
    return {
        "bytes_per_step": sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(params)),
        "multiply_adds_per_token": sum(
            math.prod(matrix.shape) for matrix in matrices if len(matrix.shape) > 1
        ),
    }


if __name__ == "__main__":
    serve(load)
