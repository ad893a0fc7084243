"""Every architecture and variant gives what transformers gives in float32, ids exactly."""

import numpy as np
import pytest

from tests.support.paged_model import GOLDENS, PagedSequence, golden_model, load_golden

NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))
CHUNK = 20


def test_there_is_a_golden_of_every_variant() -> None:
    covered = {load_golden(name)["config"]["architectures"][0] for name in NAMES}
    assert covered == {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
    }  # fmt: skip
    assert len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_ids_match(name: str) -> None:
    golden = load_golden(name)
    run = golden_model(golden)
    sequence = PagedSequence(range(1, 25))
    prompt, rows = golden["prompt"], []
    for start in range(0, len(prompt), CHUNK):
        rows.extend(run.step(prefill=[(sequence, prompt[start : start + CHUNK])])[0])
    ids = []
    for _ in golden["ids"]:
        ids.append(int(np.argmax(rows[-1])))
        rows.extend(run.step(decode=[(sequence, ids[-1])])[0])
    assert ids == golden["ids"]
    assert golden["min_margin"] > 1e-3
    for position, logits in golden["logits"].items():
        np.testing.assert_allclose(rows[int(position)], logits, atol=3e-5, rtol=3e-5)
