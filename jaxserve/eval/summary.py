"""The numbers of an evaluation, from the scores of its tokens; sums are float64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.eval.position_scores import Scores

# Below this gap between first and second choice, float32 rounding alone may swap them.
FLIP_MARGIN = 1e-3
_LARGEST_EXPONENT = 700.0  # e to this is near the largest float


@dataclass(frozen=True)
class TextScores:
    """Scores of N tokens, numpy [N]. With a baseline: its scores, and kl [N] from it, in nats."""

    served: Scores
    baseline: Scores | None = None
    kl: np.ndarray | None = None


def summarize(scores: TextScores, num_bytes: int) -> dict[str, Any]:
    """num_scored_tokens, num_scored_bytes, perplexity, nats_per_token and bits_per_byte.

    With a baseline also "baseline" (its perplexity, ...), kl_mean, kl_p99 and kl_max in nats, and
    top1_agreement; num_flips: tokens where the likeliest word differs; num_flips_above_margin:
    those where the baseline's first choice led by more than FLIP_MARGIN, which rounding does not
    explain; largest_flipped_margin: the widest lead that was lost, or None.
    """
    report: dict[str, Any] = {
        "num_scored_tokens": len(scores.served.logprob),
        "num_scored_bytes": num_bytes,
        **_surprise(scores.served, num_bytes),
    }
    if scores.baseline is None or scores.kl is None:
        return report
    baseline, kl = scores.baseline, np.asarray(scores.kl, np.float64)
    flipped = np.asarray(scores.served.best != baseline.best)
    lost = np.asarray(baseline.margin)[flipped]
    return report | {
        "baseline": _surprise(baseline, num_bytes),
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.percentile(kl, 99)),
        "kl_max": float(kl.max()),
        "top1_agreement": 1 - float(flipped.mean()),
        "num_flips": int(flipped.sum()),
        "num_flips_above_margin": int((lost > FLIP_MARGIN).sum()),
        "largest_flipped_margin": float(lost.max()) if lost.size else None,
    }


def _surprise(scores: Scores, num_bytes: int) -> dict[str, float]:
    nats = -np.asarray(scores.logprob, np.float64)
    per_token = float(nats.mean())
    return {
        "perplexity": math.exp(min(per_token, _LARGEST_EXPONENT)),
        "nats_per_token": per_token,
        "bits_per_byte": float(nats.sum()) / math.log(2) / max(num_bytes, 1),
    }
