"""Every way a checkpoint may be packed: (settings of config.json, maker of a layer)."""

from functools import partial
from typing import Any

from tests.support import quantized_checkpoints as make

WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (make.gptq_settings(), make.gptq_layer),
    "gptq-act-order": (
        make.gptq_settings(desc_act=True), partial(make.gptq_layer, act_order=True),
    ),
    "gptq-v2": (
        make.gptq_settings(checkpoint_format="gptq_v2"), partial(make.gptq_layer, stored_minus=0),
    ),
    "gptq-8": (
        make.gptq_settings(bits=8, group_size=-1, sym=True),
        partial(make.gptq_layer, bits=8, group=-1, symmetric=True),
    ),
    "awq": (make.awq_settings(), make.awq_layer),
    "packed": (
        make.compressed_settings(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32,
            symmetric=False,
        ),
        partial(make.packed_layer, symmetric=False),
    ),
    "packed-act-order": (
        make.compressed_settings(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32,
            actorder="group",
        ),
        partial(make.packed_layer, act_order=True),
    ),
    "int8": (
        make.compressed_settings("int-quantized", num_bits=8, type="int", strategy="channel"),
        make.int8_layer,
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 48], "activation_scheme": "dynamic"},
        partial(make.fp8_layer, block=(40, 48)),
    ),
}  # fmt: skip
