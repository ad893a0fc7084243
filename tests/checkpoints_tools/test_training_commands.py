"""train-draft and distill as typed, over a tiny target: results load, and guess well."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from checkpoints_tools.main import app
from checkpoints_tools.slice_training import spread_layers
from jaxserve.loading.drafts import load_draft
from jaxserve.loading.load import load_model
from tests.support.gguf_files import model_metadata, to_gguf, tokenizer_metadata, write_gguf
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors
from tests.support.training_target import LAYERS, write_target, write_text


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("texts") / "text.txt")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


SHORT = ("--window", 64, "--batch", 4, "--epochs", 4, "--learning-rate", 5e-3, "--held-out", 0.1)


def scores(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "training.json").read_text())["held_out"]
    return found


# What an untrained head gets right is one guess in 272.
@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("eagle3", ("--guesses", 2, "--draft-vocabulary", 128), [0.2, 0.2]),
        ("eagle", ("--guesses", 2), [0.2, 0.2]),
        ("medusa", ("--guesses", 2), [0.1, 0.05]),
    ],
)
def test_a_trained_draft_loads_and_guesses(
    target: Path, text: Path, tmp_path: Path, method: str, options: tuple[Any, ...], least: Any
) -> None:
    output = tmp_path / "draft"
    arguments = (
        *("train-draft", target, "--text", text, "--output", output, "--method", method),
        *options,
        *SHORT,
    )
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    got = scores(output)["greedy"]["acceptance"]
    assert all(np.array(got) >= least), got
    assert f"held out: greedy {got[0]:.3f}" in result.stderr
    model = load_model(str(target))
    draft = load_draft(str(output), model.config)
    assert draft.draft.name == method
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(draft.params))
    before = load_file(output / "model.safetensors")
    again = run(*arguments)  # done already: nothing is computed anew
    assert again.exit_code == 0, again.output
    after = load_file(output / "model.safetensors")
    assert {name: values.tobytes() for name, values in before.items()} == {
        name: values.tobytes() for name, values in after.items()
    }
    checked = run("verify", output, "--draft-of", target)
    assert checked.exit_code == 0, checked.output
    assert f"draft ({method}): " in checked.stdout


def test_a_slice_is_an_ordinary_model(target: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "slice"
    result = run("distill", target, "--text", text, "--output", output, "--layers", 2, *SHORT)
    assert result.exit_code == 0, result.output
    assert f"layers 0, {LAYERS - 1} of the target's {LAYERS}" in result.stderr
    assert scores(output)["greedy"]["acceptance"][0] > 0.8
    whole, cut = load_model(str(target)), load_model(str(output))
    assert cut.config.num_layers == 2
    np.testing.assert_array_equal(cut.params["embed"], whole.params["embed"])
    assert cut.tokenizer.encode("The ship left") == whole.tokenizer.encode("The ship left")
    assert cut.eos_token_ids == whole.eos_token_ids
    assert run("verify", output).stdout.endswith("parameters, all finite\n")


def test_a_slice_of_a_gguf_file_has_its_tokenizer(tmp_path: Path) -> None:
    """Trained for one epoch only: what matters is the folder."""
    metadata = model_metadata(LLAMA) | tokenizer_metadata()
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, to_gguf(LLAMA, tiny_tensors(LLAMA)))
    whole = load_model(str(path))
    text = tmp_path / "text.txt"
    words = ["the", "dab", "hand", "of", "a", "cabbage", "farmer"]
    text.write_text("\f".join(" ".join(words) for _ in range(30)))
    output = tmp_path / "slice"
    arguments = ("--layers", "1", "--window", 32, "--epochs", 1, "--held-out", 0.2)
    result = run("distill", path, "--text", text, "--output", output, *arguments)
    assert result.exit_code == 0, result.output
    cut = load_model(str(output))
    sample = " ".join(words) + "<|im_end|>"
    assert cut.tokenizer.encode(sample) == whole.tokenizer.encode(sample)
    assert cut.tokenizer.adds_bos == whole.tokenizer.adds_bos
    assert cut.eos_token_ids == whole.eos_token_ids
    kept = np.asarray(whole.params["layers"][0]["mlp_norm"])
    np.testing.assert_allclose(cut.params["layers"][0]["mlp_norm"], kept, atol=0.05)


def test_inspect(target: Path) -> None:
    result = run("inspect", target, "--tensors")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1] == "architecture  LlamaForCausalLM"
    assert lines[2].startswith("sizes         num_hidden_layers 6, hidden_size 64, vocab_size 272")
    assert "model.norm.weight  [64]  vector" in lines
    assert "lm_head.weight  [272, 64]  f32" in lines


def test_verify_names_what_is_not_finite(target: Path, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "final_norm: 1 of 64 numbers are not finite" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train-draft", "--method", "eagle9"), "--method is 'eagle9'; choose eagle3, eagle"),
        (("distill", "--layers", "two"), "--layers is 'two'; give a number, or several with"),
        (("distill", "--layers", "0"), "--layers is 0; keep at least one"),
        (("distill", "--layers", "3,1"), "layers are [3, 1]; want some of 0 to 5, ascending"),
        (("distill", "--layers", "1,6"), "layers are [1, 6]; want some of 0 to 5"),
        (("train-draft", "--max-tokens", "64"), "want at least 20 windows of 256"),
    ],
)
def test_what_is_asked_wrongly(
    target: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    command, *options = arguments
    result = run(command, target, "--text", text, "--output", tmp_path / "out", *options)
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.stderr.split())


def test_layers_of_a_slice_are_spread() -> None:
    assert spread_layers(30, 4) == (0, 10, 19, 29)
    assert spread_layers(6, 1) == (0,)
    assert spread_layers(2, 5) == (0, 1)
