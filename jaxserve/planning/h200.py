"""Compiling for an H200 on a machine without a GPU.

The CUDA plugin of the GPU extra brings XLA's compiler for NVIDIA GPUs, and takes a description of
the GPU in place of a driver. Nothing runs; memory and layouts are those of the real program.
"""

import importlib.util
import os

import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, Mesh

from jaxserve.core.mesh import MODEL_AXIS

INSTALL = 'pip install "jaxserve[gpu]"'
# What tracing a kernel asks about the GPU that it is for.
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# A GpuTargetConfigProto, in text: the limits of the H200 SXM (NVIDIA H200 data sheet; compute
# capability 9.0 in the CUDA programming guide, table "Technical Specifications").
_TARGET = """
gpu_device_info {
  name: "NVIDIA H200"
  model_str: "sm_9.0a H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  clock_rate_ghz: 1.98
  pcie_bandwidth: 34359738368
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def why_not() -> str | None:
    """None where programs can be compiled for an H200, else the reason and what would help."""
    if not any(_is_installed(plugin) for plugin in _PLUGINS):
        return f"the GPU extra is not installed; {INSTALL}"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        # The plugin's own checks want a driver, unless JAX is told to keep to the CPU.
        return "JAX was started with GPUs in use; set JAX_PLATFORMS=cpu"
    return None


def h200_mesh() -> Mesh:
    """A mesh of one H200 to compile for. Raises RuntimeError where the plugin is broken."""
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", topology="1x1x1", target_config=_TARGET
    )
    return Mesh(np.array(topology.devices), (MODEL_AXIS,))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
