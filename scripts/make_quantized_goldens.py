"""Writes tests/goldens/quantized/: layers packed by the packages that write such checkpoints.

Each case is a layer's tensors as a checkpoint holds them, the settings of config.json, and the
float32 matrix that the package itself (not jaxserve) expands them to. Runs in the environment that
scripts/make_goldens makes, with the three packages beside it. Two of them no longer import whole,
so single modules are run out of their unpacked folders:

    python -m pip install --no-deps --target PACKAGES compressed-tensors==0.20.1 loguru frozendict
    python -m pip download --no-deps auto-gptq==0.7.1 autoawq==0.2.9   # and unpack into PACKAGES
    PYTHONPATH=PACKAGES .venv-goldens/bin/python scripts/make_quantized_goldens.py
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "tests/goldens/quantized"
N, K, GROUP = 32, 96, 32

Tensors = dict[str, torch.Tensor]


def bare_package(name: str) -> None:
    """Let submodules of a package be imported without running its __init__."""
    found = next(Path(entry, *name.split(".")) for entry in sys.path
                 if Path(entry, *name.split(".")).is_dir())  # fmt: skip
    module = types.ModuleType(name)
    module.__path__ = [str(found)]
    sys.modules[name] = module


def drawn(bits: int, symmetric: bool, groups: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Weights on the grid: (weight [N, K], scales [N, groups], zeros [N, groups])."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(N, groups, generator=generator).mul(0.02).add(0.01).half().float()
    top = 2**bits - 1
    zeros = torch.randint(1, top + 1, (N, groups), generator=generator).float()
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    codes = torch.randint(0, top + 1, (N, K), generator=generator).float()
    return codes, scales, zeros


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    return linear


def gptq(bits: int, group: int, symmetric: bool, act_order: bool) -> tuple[Tensors, torch.Tensor]:
    """Packed and expanded by AutoGPTQ's plain torch layer."""
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        bare_package(name)
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    groups = 1 if group == -1 else K // group
    codes, scales, zeros = drawn(bits, symmetric, groups, bits)
    g_idx = torch.arange(K) // (K // groups)
    if act_order:
        g_idx = g_idx[torch.randperm(K, generator=torch.Generator().manual_seed(7))]
    weight = (codes - zeros[:, g_idx]) * scales[:, g_idx]
    layer = QuantLinear(bits, group, K, N, bias=False)
    layer.pack(linear_of(weight), scales.clone(), zeros.clone(), g_idx.int())
    layer.scales = layer.scales.float()
    expanded = layer(torch.eye(K)).T
    tensors = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
    return tensors | {"g_idx": layer.g_idx.int()}, expanded


def awq(version: str) -> tuple[Tensors, torch.Tensor]:
    """Packed by AutoAWQ; "gemm" expanded by it too, "gemv" by the numbers that were packed."""
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        bare_package(name)
    from awq.utils.packing_utils import dequantize_gemm

    codes, scales, zeros = drawn(4, False, K // GROUP, 40)
    g_idx = torch.arange(K) // GROUP
    weight = (codes - zeros[:, g_idx]) * scales[:, g_idx]
    if version == "gemm":
        from awq.modules.linear.gemm import WQLinear_GEMM

        layer = WQLinear_GEMM.from_linear(
            linear_of(weight), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        expanded = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T
    else:
        from awq.modules.linear.gemv import WQLinear_GEMV

        layer = WQLinear_GEMV.from_linear(linear_of(weight), 4, GROUP, scales=scales, zeros=zeros)
        expanded = weight
    names = ("qweight", "qzeros", "scales")
    return {name: getattr(layer, name) for name in names}, expanded


def compressed(form: str, weights: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Packed and expanded by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    generator = torch.Generator().manual_seed(len(form))
    weight = torch.randn(N, K, generator=generator)
    grid = {
        "tensor": (1,),
        "channel": (N, 1),
        "group": (N, K // GROUP),
        "block": (N // 16, K // GROUP),
    }[weights["strategy"]]
    top = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1)
    state = {"weight": weight, "weight_scale": torch.rand(grid, generator=generator) + 2}
    state["weight_scale"] /= top
    if not weights["symmetric"]:
        state["weight_zero_point"] = torch.randint(
            -top, top, grid, dtype=torch.int8, generator=generator
        )
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    return packed, compressor.decompress(packed, scheme)["weight"]


def deepseek() -> tuple[Tensors, torch.Tensor]:
    """Blocks of 16 rows and 32 inputs, expanded by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(N, K, generator=generator).mul(60).to(torch.float8_e4m3fn)
    scale = torch.rand(N // 16, K // GROUP, generator=generator) / 100
    expanded = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    return {"weight": weight, "weight_scale_inv": scale}, expanded


def gptq_settings(bits: int, group: int, symmetric: bool, act_order: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": act_order, "checkpoint_format": "gptq",
    }  # fmt: skip


def weights(kind: str, bits: int, strategy: str, symmetric: bool) -> dict[str, Any]:
    """compressed-tensors' settings of weights."""
    group = {"group_size": GROUP} if strategy == "group" else {}
    block = {"block_structure": [16, GROUP]} if strategy == "block" else {}
    settings = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": symmetric}
    return settings | group | block


def main() -> None:
    cases: dict[str, tuple[dict[str, Any], tuple[Tensors, torch.Tensor]]] = {}
    for name, asked in {
        "gptq-4": (4, GROUP, True, False),
        "gptq-4-act-order": (4, GROUP, False, True),
        "gptq-8-whole": (8, -1, True, False),
        "gptq-8-asymmetric": (8, GROUP, False, False),
        "gptq-3": (3, GROUP, False, False),
        "gptq-2": (2, GROUP, True, True),
    }.items():
        cases[name] = (gptq_settings(*asked), gptq(*asked))
    for version in ("gemm", "gemv"):
        settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        cases[f"awq-{version}"] = (settings | {"version": version}, awq(version))
    for name, (form, of_weights) in {
        "ct-packed-4": ("pack-quantized", weights("int", 4, "group", True)),
        "ct-packed-4-asymmetric": ("pack-quantized", weights("int", 4, "group", False)),
        "ct-packed-4-channel": ("pack-quantized", weights("int", 4, "channel", False)),
        "ct-packed-8": ("pack-quantized", weights("int", 8, "group", True)),
        "ct-int-8": ("int-quantized", weights("int", 8, "channel", True)),
        "ct-int-8-asymmetric": ("int-quantized", weights("int", 8, "channel", False)),
        "ct-fp8-tensor": ("float-quantized", weights("float", 8, "tensor", True)),
        "ct-fp8-channel": ("float-quantized", weights("float", 8, "channel", True)),
        "ct-fp8-block": ("naive-quantized", weights("float", 8, "block", True)),
    }.items():
        group = {"targets": ["Linear"], "weights": of_weights}
        settings = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
        cases[name] = (
            settings | {"config_groups": {"group_0": group}},
            compressed(form, of_weights),
        )
    cases["fp8-block"] = (
        {"quant_method": "fp8", "weight_block_size": [16, GROUP]}, deepseek(),
    )  # fmt: skip
    OUT.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{case}.{name}": tensor.contiguous()
        for case, (_, (packed, expanded)) in cases.items()
        for name, tensor in (packed | {"expanded": expanded}).items()
    }
    save_file(tensors, OUT / "layers.safetensors")
    settings = {case: settings for case, (settings, _) in cases.items()}
    (OUT / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
