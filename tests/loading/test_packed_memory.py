"""What loading a packed model adds to the memory of a process, measured in one of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import native

ROOT = Path(__file__).resolve().parent.parent.parent

LOAD = """
import gc, json, re, sys
from pathlib import Path
import jax
from jaxserve.loading.assemble import assemble
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.hub import resolve
from jaxserve.models.registry import find_model
from pallas_kernels import native

def memory():
    status = Path("/proc/self/status").read_text()
    found = (re.search(key + r":\\s+(\\d+) kB", status) for key in ("VmRSS", "VmHWM"))
    return [int(match[1]) * 1024 for match in found]

path = resolve(sys.argv[1])
file = GGUFFile(path)
config = hf_config(file)
source = GGUFTensors(file, config["num_attention_heads"], config["num_key_value_heads"])
model = find_model(config["architectures"][0])
jax.block_until_ready(jax.device_put([1.0]))
native.why_not()  # loads the module, where there is one
before = memory()
params = assemble(model, model.config_from_hf(config), source, "float32", layout=sys.argv[2])
jax.block_until_ready(params)
gc.collect()
grown = [after - start for after, start in zip(memory(), before)]
largest = max(file.raw(name).nbytes for name in file.names())
print(json.dumps({"file": path.stat().st_size, "largest": largest, "held": grown[0],
                  "peak": grown[1]}))
"""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_loading_adds_less_than_the_file_and_a_third(name: str) -> None:
    """Above the weights, no more than two tensors are ever in memory."""
    layout = "panels" if native.why_not() is None else "rows"
    result = subprocess.run(
        [sys.executable, "-c", LOAD, name, layout],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    sizes = json.loads(result.stdout)
    assert sizes["held"] > 0.9 * sizes["file"]  # else nothing was measured
    assert sizes["held"] < 1.3 * sizes["file"], sizes
    assert sizes["peak"] < 1.3 * sizes["file"] + 2 * sizes["largest"], sizes
