"""Broken models are refused at start with a sentence that says where, what was got and wanted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.core.backends import make_ops
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.errors import ModelLoadError
from jaxserve.models.base import ModelDef, ParamSpec, WeightNames
from jaxserve.models.contract import check_contract


@dataclass(frozen=True)
class Config:
    vocab_size: int = 11
    max_position_embeddings: int = 32


SPEC = KVSpec((KVGroup("global", (0,), 2, 4), KVGroup("windowed", (1,), 2, 4, 8)))


def param_specs(config: Config) -> dict[str, Any]:
    return {
        "embed": ParamSpec((11, 8), (None, None)),
        "layers": [{"out": ParamSpec((8, 8), (None, None))} for _ in range(2)],
    }


def weight_names(config: Config) -> dict[str, Any]:
    return {
        "embed": WeightNames(("embed.weight",)),
        "layers": [{"out": WeightNames((f"layers.{i}.out",))} for i in range(2)],
    }


def forward(config: Config, params: Any, batch: Any, pool: Any, ops: Any) -> Any:
    hidden = params["embed"][batch.tokens]
    for index, layer in enumerate(params["layers"]):
        heads = hidden.reshape(-1, 2, 4)
        window = SPEC.groups[index].window
        out, pool = ops.attend(index, heads, heads, heads, pool, batch, scale=0.5, window=window)
        hidden = hidden + ops.linear(out.reshape(hidden.shape), layer["out"], None)
    return hidden, {}, pool


def unembed(config: Config, params: Any, hidden: Any, ops: Any) -> Any:
    return ops.linear(hidden, params["embed"], None).astype(jnp.float32)


GOOD = ModelDef(
    "toy", lambda hf: Config(), param_specs, weight_names, lambda config: SPEC, forward, unembed
)


def _check(model: ModelDef, config: Any = None) -> None:
    check_contract(model, Config() if config is None else config, make_ops("reference", SPEC))


def _attending(**changes: Any) -> Callable[..., Any]:
    """forward, with arguments of its calls of attend replaced."""

    def broken(config: Config, params: Any, batch: Any, pool: Any, ops: Any) -> Any:
        def attend(layer: int, q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
            call = {"layer": layer, "q": q, "k": k, "v": v, **options}
            call |= {key: change(call[key]) for key, change in changes.items()}
            layer, q, k, v = (call.pop(key) for key in ("layer", "q", "k", "v"))
            return ops.attend(layer, q, k, v, *args, **call)

        return forward(config, params, batch, pool, replace(ops, attend=attend))

    return broken


def _after(change: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    return lambda *args: change(*forward(*args))


def test_a_model_that_keeps_the_contract_passes() -> None:
    _check(GOOD)


def test_a_head_may_be_of_another_float_type_but_not_of_ints() -> None:
    _check(replace(GOOD, forward=_after(lambda h, t, p: (h.astype(jnp.bfloat16), t, p))))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (_after(lambda h, t, p: (h, p)), ["forward", "tuple", "hidden, taps, kv_pool"]),
        (_after(lambda h, t, p: (h[:, None], t, p)), ["hidden", "(7, 1, 8)", "(7, E)"]),
        (_after(lambda h, t, p: (h[:3], t, p)), ["hidden", "(3, 8)", "(7, E)"]),
        (_after(lambda h, t, p: (h.astype(int), t, p)), ["hidden", "int32", "float"]),
        (_after(lambda h, t, p: (None, t, p)), ["hidden", "NoneType"]),
        (_after(lambda h, t, p: (h, None, p)), ["taps", "NoneType", "dict"]),
        (_after(lambda h, t, p: (h, t, p.keys)), ["kv_pool", "tuple", "ops.attend"]),
        (
            _after(lambda h, t, p: (h, t, replace(p, keys=(p.keys[0][:2],)))),
            ["kv_pool", "keys", "(2, 16, 2, 4)", "(6, 16, 2, 4)"],
        ),
        (_attending(k=lambda k: k[:, :1]), ["layer 0", "k:", "(7, 1, 4)", "(7, 2, 4)"]),
        (_attending(v=lambda v: None), ["layer 0", "both or neither"]),
        (_attending(q=lambda q: q[..., :2]), ["layer 0", "q:", "(7, 2, 2)", "multiple of 2"]),
        (_attending(layer=lambda layer: layer + 2), ["layer 2", "0 to 1"]),
        (_attending(layer=lambda layer: 0), ["never called", "[1]"]),
        (_attending(window=lambda window: None), ["layer 1", "window", "None", "8", "windowed"]),
        (lambda *args: 1 / 0, ["forward", "ZeroDivisionError"]),
        (
            lambda config, params, *rest: forward(
                config, {**params, "embed": params["emb"]}, *rest
            ),
            ["forward", "KeyError", "emb"],
        ),
    ],
)
def test_broken_forward(broken: Callable[..., Any], words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        _check(replace(GOOD, forward=broken))
    message = str(error.value)
    assert all(word in message for word in ["'toy'", *words]), message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda logits: logits[:, :10], ["unembed", "(3, 10)", "(3, 11) float32"]),
        (lambda logits: logits.astype(jnp.bfloat16), ["unembed", "bfloat16", "float32"]),
        (lambda logits: None, ["unembed", "NoneType"]),
    ],
)
def test_broken_unembed(change: Callable[[Any], Any], words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        _check(replace(GOOD, unembed=lambda *args: change(unembed(*args))))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("param_specs", {"extra": ParamSpec((1,), (None,))}, ["extra", "not in weight_names"]),
        ("weight_names", {"extra": WeightNames(("x",))}, ["extra", "not in param_specs"]),
        ("param_specs", {"embed": (11, 8)}, ["param_specs", "embed", "int", "ParamSpec"]),
        ("weight_names", {"embed": "embed.weight"}, ["embed", "str", "WeightNames"]),
        ("weight_names", {"embed": WeightNames(())}, ["embed", "no tensor name"]),
        ("weight_names", {"embed": WeightNames(("layers.1.out",))}, ["layers.1.out", "already"]),
    ],
)
def test_broken_parameters(field: str, change: dict[str, Any], words: list[str]) -> None:
    good = getattr(GOOD, field)
    with pytest.raises(ModelLoadError) as error:
        _check(replace(GOOD, **{field: lambda config: {**good(config), **change}}))
    assert all(word in str(error.value) for word in words), error.value


def test_empty_parameters() -> None:
    with pytest.raises(ModelLoadError, match="empty tree"):
        _check(replace(GOOD, param_specs=lambda config: {}))


def test_kv_spec_of_the_wrong_type() -> None:
    with pytest.raises(ModelLoadError, match=r"kv_spec: got dict, want KVSpec"):
        _check(replace(GOOD, kv_spec=lambda config: {}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 11}, ["not hashable", "frozen"]),
        ((), ["config.vocab_size", "None"]),
        (Config(vocab_size=0), ["config.vocab_size", "0"]),
        (Config(max_position_embeddings=None), ["max_position_embeddings", "None"]),  # type: ignore[arg-type]
    ],
)
def test_broken_config(config: Any, words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        _check(GOOD, config)
    assert all(word in str(error.value) for word in words), error.value
