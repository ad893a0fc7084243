"""The engines of scripts/bench_vs_peers: their settings, and a process that runs one of them.

Where settings could matter, each peer has variants; all are run with `--engines all`, and a ratio
is always taken against the best variant. Those run by default won on a quiet machine, or are what
a user would take.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent.parent
PEERS = ROOT / ".peers"
OURS = "jaxserve"


@dataclass(frozen=True)
class Engine:
    """weights: "gguf", or the OpenVINO folder's name. Its environment is .peers/<environment>."""

    name: str
    family: str
    worker: str
    environment: str | None = None  # None: the product's own
    weights: str = "gguf"
    options: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("smollm2", "gemma3-270m")
    default: bool = True

    @property
    def python(self) -> str:
        if self.environment is None:
            return sys.executable
        return str(PEERS / self.environment / "bin" / "python")


def _llama(name: str, default: bool, **changes: Any) -> Engine:
    options = {"flash_attention": True, "unified_cache": False, "micro_batch": 512, **changes}
    return Engine(
        name, "llama.cpp", "llamacpp_worker.py", "llamacpp", options=options, default=default
    )


def _openvino(name: str, weights: str, batched_tokens: int, **fields: Any) -> Engine:
    family = "openvino float32" if weights == "float32" else "openvino int4"
    options = {"batched_tokens": batched_tokens}
    return Engine(name, family, "openvino_worker.py", "openvino", weights, options, **fields)


ENGINES = (
    Engine(OURS, OURS, "jaxserve_worker.py"),
    _llama("llama.cpp", True),
    _llama("llama.cpp-noflash", False, flash_attention=False),
    _llama("llama.cpp-onecache", False, unified_cache=True),
    _llama("llama.cpp-ubatch2048", False, micro_batch=2048),
    _openvino("openvino-f32", "float32", 2048),
    _openvino("openvino-f32-256", "float32", 256, default=False),  # openvino-genai's default
    _openvino("openvino-int4", "int4", 2048),
    _openvino("openvino-int4-256", "int4", 256, default=False),
    # Its own reader: exactly the GGUF's weights, but of the Llama family only.
    _openvino("openvino-gguf", "gguf", 2048, models=("smollm2",)),
    Engine("transformers", "transformers", "transformers_worker.py", "transformers"),
)


def environment() -> dict[str, str]:
    """The environment variables, less those that force a kernel or a thread count on OpenBLAS."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}


class EngineProcess:
    """One engine, loaded, in a process of its own; stopped by a signal whenever it is not asked."""

    def __init__(self, engine: Engine, load: Mapping[str, Any]) -> None:
        self.engine = engine
        log = PEERS / "logs" / f"{engine.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [engine.python, str(SCRIPTS / engine.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                text=True,
            )
        self.about: dict[str, Any] = self._ask({"load": {**engine.options, **load}})["about"]

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One measurement. Ends the benchmark when a stream did not get its tokens."""
        answer = self._ask({"prompts": prompts, "new_tokens": new_tokens})
        if answer["counts"] != [new_tokens] * len(prompts):
            sys.exit(f"{self.engine.name} made {answer['counts']} tokens, not {new_tokens} each")
        return answer

    def close(self) -> None:
        self._process.kill()  # it may be stopped; there is nothing to save
        self._process.wait()

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            tail = self._log.read_text(errors="replace")[-1000:]
            sys.exit(f"{tail}\n{self.engine.name} ended with exit code {code}; see {self._log}")
        self._process.send_signal(signal.SIGSTOP)
        return dict(json.loads(answer))
