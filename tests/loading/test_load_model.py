"""load_model end to end: a path or a name in, everything needed to serve out."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from jaxserve.errors import ModelLoadError, PullError
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.llama import MODEL
from tests.support.gguf_files import Q, model_metadata, to_gguf, tokenizer_metadata, write_gguf
from tests.support.paged_model import params_of_tensors
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def write_model_gguf(path: Path, **extra: Any) -> Path:
    metadata = model_metadata(LLAMA) | tokenizer_metadata() | extra
    return write_gguf(path, "llama", metadata, to_gguf(LLAMA, tiny_tensors(LLAMA)))


def write_folder(folder: Path, **config: Any) -> Path:
    """A Hugging Face folder: a word tokenizer of 6 ids, a template, EOS ids and sampling."""
    folder.mkdir(exist_ok=True)
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2, "<eos>": 3, "<turn>": 4, "<bos>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>", "<turn>", "<bos>"])
    backend.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": LLAMA | {"eos_token_id": 4} | config,
        "tokenizer_config.json": {"eos_token": "<eos>", "chat_template": TEMPLATE},
        "generation_config.json": {
            "eos_token_id": [3, 4], "do_sample": True, "temperature": 0.6, "top_k": 20,
            "top_p": 0.95, "repetition_penalty": 1.1, "transformers_version": "5.0",
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_file(tiny_tensors(LLAMA), folder / "model.safetensors")
    return folder


def check_params(model: LoadedModel) -> None:
    expected = params_of_tensors(MODEL, model.config, tiny_tensors(LLAMA))
    for got, want in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_gguf_file(tmp_path: Path) -> None:
    told: list[str] = []
    path = write_model_gguf(tmp_path / "tiny.Q8.gguf")
    model = load_model(str(path), progress=told.append)
    check_params(model)
    assert model.name == "tiny.Q8"
    assert model.model is MODEL
    assert model.vocab_size == 259  # of 272 rows: the rest is padding nobody may draw
    assert model.config.vocab_size == 272
    assert model.max_model_len == 128
    assert model.eos_token_ids == (257,)
    assert model.chat_template is None
    assert model.sampling_defaults == {}
    assert model.tokenizer.decode(model.tokenizer.encode("abc é")) == "abc é"
    assert [text.rpartition(":")[0] for text in told] == [
        "read header and tokenizer of tiny.Q8.gguf",
        "loaded weights as float32",
    ]
    assert all(text.endswith(" s") for text in told)


def test_gguf_ends_of_turn_and_sampling(tmp_path: Path) -> None:
    key = "tokenizer.ggml."
    model = load_model(
        str(
            write_model_gguf(
                tmp_path / "m.gguf",
                **{key + "eot_token_id": 256, key + "eom_token_id": 257,
                   "tokenizer.chat_template": TEMPLATE,
                   "general.sampling.temp": 0.5, "general.sampling.top_k": 40},
            )
        )
    )  # fmt: skip
    # eos and eom are one id, eot another; the template ends turns with <|im_end|>, id 258.
    assert model.eos_token_ids == (257, 256, 258)
    assert model.sampling_defaults == {"temperature": 0.5, "top_k": 40}
    assert model.chat_template is not None
    rendered = model.chat_template.render([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>hi<|im_end|><|im_start|>"


def test_a_folder(tmp_path: Path) -> None:
    model = load_model(str(write_folder(tmp_path / "org-name")))
    check_params(model)
    assert model.name == "org-name"
    assert model.eos_token_ids == (3, 4)
    assert model.vocab_size == 6
    assert model.sampling_defaults == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert model.chat_template is not None
    assert model.tokenizer.encode("hello world") == [1, 2]


def test_a_folder_without_generation_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").unlink()
    model = load_model(str(folder))
    assert model.eos_token_ids == (4, 3)  # config.json's, then the tokenizer's own
    assert model.sampling_defaults == {}


def test_bfloat16_and_auto(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "m"))
    leaves = jax.tree.leaves(load_model(folder, dtype="bfloat16").params)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}
    leaves = jax.tree.leaves(load_model(folder, dtype="auto").params)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}  # these tests run on CPU
    with pytest.raises(ModelLoadError, match="dtype is 'float16'; choose auto, float32"):
        load_model(folder, dtype="float16")


def test_random_weights_need_no_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    told: list[str] = []
    first = load_model(str(folder), random_weights_seed=5, progress=told.append)
    again = load_model(str(folder), random_weights_seed=5)
    np.testing.assert_array_equal(first.params["embed"], again.params["embed"])
    assert np.asarray(first.params["embed"]).std() == pytest.approx(0.02, rel=0.05)
    assert any(text.startswith("drew float32 weights from seed 5: ") for text in told)
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        load_model(str(folder))


def test_a_model_file_takes_the_place_of_the_family(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "m", architectures=["MyOwn"]))
    with pytest.raises(ModelLoadError, match="'MyOwn' has no built-in model"):
        load_model(folder)
    file = tmp_path / "my_model.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from jaxserve.models.llama import MODEL as LLAMA\n"
        "def config_from_hf(config):\n"
        "    return LLAMA.config_from_hf(dict(config, architectures=['LlamaForCausalLM']))\n"
        "MODEL = replace(LLAMA, name='mine', config_from_hf=config_from_hf)\n"
    )
    model = load_model(folder, model_file=str(file))
    assert model.model.name == "mine"
    check_params(model)
    file.write_text(file.read_text().replace("return ", "return config['hidden'] or "))
    with pytest.raises(ModelLoadError, match=r"config_from_hf of model 'mine' failed: KeyError"):
        load_model(folder, model_file=str(file))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quantization_config": {"quant_method": "new"}}, "weights are quantised by 'new'"),
        ({"architectures": None}, "names no architectures"),
        ({"architectures": []}, "names no architectures"),
        ({"hidden_size": "wide"}, "hidden_size is wide"),
        ({"rope_scaling": {"rope_type": "new"}}, "rope_type is 'new'"),
        ({"hidden_size": 128, "num_attention_heads": 8}, "of another shape: "),
    ],
)
def test_refused_configurations_name_the_folder(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "m", **config)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        load_model(str(folder))
    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        ({"eos_token_id": 6}, "eos_token_id is 6; want an id below 6"),
        ({"eos_token_id": [3, True]}, "eos_token_id is True"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ([], "not an object"),
    ],
)
def test_refused_generation_settings(generation: Any, problem: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ModelLoadError, match=problem) as caught:
        load_model(str(folder))
    assert str(folder) in str(caught.value)


def test_more_ends_than_the_sampler_holds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3] * 40}))
    assert load_model(str(folder)).eos_token_ids == (3,)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([f"w{i}" for i in range(20)])
    backend.save(str(folder / "tokenizer.json"))
    ids = json.dumps({"eos_token_id": list(range(17))})
    (folder / "generation_config.json").write_text(ids)
    with pytest.raises(ModelLoadError, match="names 17 ids, the limit is 16"):
        load_model(str(folder))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="is no file or folder"):
        load_model(str(tmp_path / "absent"))
    with pytest.raises(ModelLoadError, match=r"config\.json: there is no such file"):
        load_model(str(tmp_path))
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"weights\.bin: want a \.gguf file, or a folder"):
        load_model(str(other))
    long = " " * (1 << 20) + "{}"
    for text, problem in (
        ("{", "cannot be read as JSON"), ("[" * 9999, "JSON"), ("[]", "list"),
        (long, "longer than the limit"), ("\ud800", "cannot be read as JSON"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(text, errors="surrogatepass")
        with pytest.raises(ModelLoadError, match=problem):
            load_model(str(tmp_path))


def test_names_that_clients_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "readable")
    monkeypatch.chdir(folder)
    assert load_model(".").name == "readable"
    blob = write_model_gguf(tmp_path / "0123abcd")
    (tmp_path / "model.gguf").symlink_to(blob)
    assert load_model(str(tmp_path / "model.gguf")).name == "model"


def test_tokenizer_errors_name_the_gguf_file(tmp_path: Path) -> None:
    path = write_model_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.model": "new"})
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tokenizer\.ggml\.model is 'new'"):
        load_model(str(path))


def test_a_packed_embedding_loads_to_the_same_tree(tmp_path: Path) -> None:
    tensors = to_gguf(LLAMA, tiny_tensors(LLAMA))
    types = {name: Q.Q8_0 for name, tensor in tensors.items() if tensor.ndim == 2}
    metadata = model_metadata(LLAMA) | tokenizer_metadata()
    model = load_model(str(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors, types)))
    expected = params_of_tensors(MODEL, model.config, tiny_tensors(LLAMA))
    for got, want in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=0.01)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "vocab_size", "eos", "context", "chat"),
    [
        ("smollm2", 134_515_008, 49_152, (2,), 8192, True),
        ("gemma3-270m", 268_098_176, 262_144, (1,), 32_768, False),
    ],
)
def test_the_models_that_pull_brings(
    name: str, parameters: int, vocab_size: int, eos: tuple[int, ...], context: int, chat: bool
) -> None:
    model = load_model(name)
    assert model.name == name
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == parameters
    assert (model.vocab_size, model.eos_token_ids) == (vocab_size, eos)
    assert model.max_model_len == context
    assert (model.chat_template is not None) == chat
