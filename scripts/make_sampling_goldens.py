"""Writes tests/sampling/filters_by_transformers.json: what its logits processors keep and compute.

Runs in the environment that scripts/make_goldens makes (torch and transformers, no jax):

    .venv-goldens/bin/python scripts/make_sampling_goldens.py

The logits are drawn from a numpy seed, so the tests make them again and the file stays small.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.generation import logits_process

OUT = Path(__file__).resolve().parent.parent / "tests/sampling/filters_by_transformers.json"
SEED = 20240
VOCAB = 300
SPREAD = 3.0
CASES = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 200},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.7},
]
SEEN = [3, 3, 17, 250]
REPETITION = 1.3


def kept(logits: torch.Tensor, case: dict[str, float]) -> list[int]:
    """Ids that survive transformers' warpers in the order of `generate`."""
    warpers = logits_process.LogitsProcessorList()
    if "temperature" in case:
        warpers.append(logits_process.TemperatureLogitsWarper(case["temperature"]))
    if "top_k" in case:
        warpers.append(logits_process.TopKLogitsWarper(int(case["top_k"])))
    if "top_p" in case:
        warpers.append(logits_process.TopPLogitsWarper(case["top_p"]))
    if "min_p" in case:
        warpers.append(logits_process.MinPLogitsWarper(case["min_p"]))
    scores = warpers(torch.zeros((1, 0), dtype=torch.long), logits[None])[0]
    return torch.nonzero(torch.isfinite(scores))[:, 0].tolist()


def main() -> None:
    drawn = np.random.default_rng(SEED).normal(size=VOCAB).astype(np.float32)
    logits = torch.from_numpy(drawn * np.float32(SPREAD))
    repeated = logits_process.RepetitionPenaltyLogitsProcessor(REPETITION)
    penalised = repeated(torch.tensor([SEEN]), logits[None].clone())[0]
    golden = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "seed": SEED,
        "vocab": VOCAB,
        "spread": SPREAD,
        "cases": [{"settings": case, "kept": kept(logits, case)} for case in CASES],
        "repetition": {
            "penalty": REPETITION,
            "seen": SEEN,
            "logits": {str(token): float(penalised[token]) for token in sorted(set(SEEN))},
        },
    }
    OUT.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
