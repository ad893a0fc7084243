"""Heads from their folders, through LLM: the target is read from disk, and so are they."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import ModelLoadError, PullError
from jaxserve.llm import LLM
from jaxserve.loading.describe import describe_model
from jaxserve.sampling_params import SamplingParams
from tests.support.draft_checkpoints import write_folder
from tests.support.training_target import CONFIG, LAYERS, write_target

SMALL = {"max_batch_rows": 1, "max_batch_tokens": 16, "num_pages": 40, "max_model_len": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20, 43))}
E, F = CONFIG["hidden_size"], CONFIG["intermediate_size"]


def layer_tensors() -> dict[str, np.ndarray]:
    """A decoder layer that changes nothing."""
    Q, K = (
        CONFIG[key] * CONFIG["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "self_attn.q_proj": (Q, E),
        "self_attn.k_proj": (K, E),
        "self_attn.v_proj": (K, E),
        "self_attn.o_proj": (E, Q),
        "mlp.gate_proj": (F, E),
        "mlp.up_proj": (F, E),
        "mlp.down_proj": (E, F),
    }
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return tensors | {"post_attention_layernorm.weight": np.ones(E, np.float32)}


def join() -> np.ndarray:
    """Of an embedding and a feature: the embedding, which decides what this target says next."""
    return np.eye(E, 2 * E, dtype=np.float32)


def write_eagle(folder: Path, **config: Any) -> Path:
    tensors = {f"layers.0.{name}": values for name, values in layer_tensors().items()}
    return write_folder(
        folder, CONFIG | {"num_hidden_layers": 1} | config, tensors | {"fc.weight": join()}
    )


def add_mtp(folder: Path) -> None:
    """A module behind the target's last layer, in its own files."""
    norms = ("enorm", "hnorm", "input_layernorm", "shared_head.norm")
    own = layer_tensors() | {f"{norm}.weight": np.ones(E, np.float32) for norm in norms}
    own["eh_proj.weight"] = join()
    prefix = f"model.layers.{LAYERS}."
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {prefix + name: values for name, values in own.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def answer(model: Path, **options: Any) -> tuple[list[int], float]:
    """(output tokens, tokens per step)."""
    with LLM(str(model), **SMALL, **options) as llm:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        speculation = llm.client._engine.speculation  # type: ignore[attr-defined]
    steps = 1.0 if speculation is None else speculation.tokens_per_step
    return output.outputs[0].token_ids, steps


def test_heads_of_a_folder_and_a_module_of_the_target(tmp_path: Path) -> None:
    model, heads = write_target(tmp_path / "target"), write_eagle(tmp_path / "heads")
    plain, _ = answer(model)
    config = {"method": "eagle", "model": str(heads), "adaptive": False}
    drafted, steps = answer(model, speculative_config=config)
    assert drafted == plain
    assert steps > 2
    add_mtp(model)
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    drafted, steps = answer(model, speculative_config=config)
    assert drafted == plain
    assert steps > 2


def test_a_module_that_drafts_nothing_is_no_part_of_the_model(tmp_path: Path) -> None:
    model = write_target(tmp_path / "target")
    add_mtp(model)
    assert describe_model(str(model), dtype="float32").config.num_layers == LAYERS
    save_file(
        load_file(model / "model.safetensors") | {"model.layers.9.odd": np.zeros(1, np.float32)},
        model / "model.safetensors",
    )
    with pytest.raises(ModelLoadError, match=r"1 not wanted by the model: model\.layers\.9\.odd"):
        describe_model(str(model), dtype="float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "eagle3"}, "method is eagle3, but the tensors in .* are of the method eagle;"),
        ({"method": "eagle", "model": "nowhere"}, "nowhere"),
        ({"method": "mtp", "model": None}, "no draft of a known kind"),
    ],
)
def test_what_is_refused_at_start(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    model, heads = write_target(tmp_path / "target"), write_eagle(tmp_path / "heads")
    given = {"model": str(heads)} | config
    with pytest.raises((ModelLoadError, PullError), match=message):
        LLM(str(model), **SMALL, speculative_config=given)


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    model = write_target(tmp_path / "target")
    heads = write_eagle(tmp_path / "heads", vocab_size=300)
    with pytest.raises(ModelLoadError, match="vocab_size of the draft is 300, the target's is 272"):
        LLM(str(model), **SMALL, speculative_config={"method": "eagle", "model": str(heads)})
