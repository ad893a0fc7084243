"""transformers in scripts/bench_vs_peers: `generate` in float32, prompts as one batch."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
import torch
import transformers
from transformers_peer import load as load_model
from worker_loop import Generate, Prompts, Run, serve


class Clock(transformers.StoppingCriteria):
    """Asked after every token whether to stop, it never says so and notes the time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, *_scores: Any, **_options: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    torch.set_num_threads(options["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = load_model(options["path"])

    @torch.inference_mode()
    def generate(prompts: Prompts, new_tokens: int) -> Run:
        ids, clock = torch.tensor(prompts), Clock()
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        new = [row[ids.shape[1] :].tolist() for row in out]
        first, last = clock.times[0] - start, clock.times[-1] - start
        return Run(first, last, [len(row) for row in new], new)

    about = {
        "version": f"{transformers.__version__}, torch {torch.__version__}",
        "settings": f"generate, float32, {torch.get_num_threads()} threads, "
        f"{model.config._attn_implementation} attention",
    }
    return generate, about


if __name__ == "__main__":
    serve(load)
