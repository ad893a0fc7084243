"""A process that saves runs and is gone, and one that lets them go on.

python -m tests.support.saved_runs save FOLDER      prints {name: whole output} as JSON
python -m tests.support.saved_runs load FOLDER      prints {name: [inherited, cached, output]}
"""

import json
import os
import sys
from pathlib import Path

from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from tests.support.tiny_engine import AMPLE, SMALL, random_prompts, tiny_model

WAIT = 120.0
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, max_tokens=80, ignore_eos=True, seed=5),
    "unseeded": SamplingParams(temperature=1.0, max_tokens=80, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.8,
        max_tokens=80,
        ignore_eos=True,
        seed=6,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={7: 2.0},
    ),
}


def save(llm: LLM, folder: Path) -> dict[str, list[int]]:
    """The whole runs go on after they were saved: that is what the loaded ones must give."""
    runs = {}
    for (name, params), ids in zip(
        PARAMS.items(), random_prompts(4, (20, 40), seed=8), strict=True
    ):
        run = llm.start({"prompt_token_ids": ids}, params).wait_for_tokens(7, WAIT)
        assert run.save(folder / f"{name}.safetensors") >= 7
        runs[name] = run
    return {name: run.wait(WAIT).token_ids for name, run in runs.items()}


def load(llm: LLM, folder: Path) -> dict[str, tuple[int, int, list[int]]]:
    runs = {name: llm.load(folder / f"{name}.safetensors") for name in PARAMS}
    return {
        name: (
            run.num_inherited,
            max(delta.num_cached_tokens for delta in run),
            run.wait(WAIT).token_ids,
        )
        for name, run in runs.items()
    }


def main() -> None:
    do = {"save": save, "load": load}[sys.argv[1]]
    llm = LLM(tiny_model(), **{**SMALL, "num_pages": AMPLE})
    print(json.dumps(do(llm, Path(sys.argv[2]))), flush=True)
    os._exit(0)  # no shutdown: what was saved must not need one


if __name__ == "__main__":
    main()
