"""From options to a running engine: load, plan, warm up, and say how long each phase took."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxserve.cli.engine_options import EngineOptions
from jaxserve.cli.garbage import collect_as_usual
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.core.gpu_memory import use_gpu_memory
from jaxserve.core.program_loader import ProgramLoader, program_store
from jaxserve.core.threads import use_threads
from jaxserve.engine.client import EngineClient
from jaxserve.engine.engine import Engine
from jaxserve.engine.outputs import StepStats
from jaxserve.errors import ModelLoadError
from jaxserve.loading.chat_template import ChatTemplate
from jaxserve.loading.load import load_model
from jaxserve.loading.load_draft import load_draft
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.model_cache import home
from jaxserve.loading.quantize_on_load import kept_layout
from jaxserve.loading.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class StartedEngine:
    """A client that takes requests. model.max_model_len is the engine's; phases are seconds."""

    client: EngineClient
    model: LoadedModel
    engine: Engine
    phases: dict[str, float]


def start_engine(
    options: EngineOptions, say: Say, on_step: Callable[[StepStats], None] | None = None
) -> StartedEngine:
    """Load the model and return once the engine can answer; it goes on loading shapes beside that.

    say: hears a line per phase, also afterwards, on other threads. Raises PullError,
    ModelLoadError, InvalidRequestError or EngineDeadError.
    """
    config = options.config
    phases: dict[str, float] = {}
    began = time.monotonic()
    use_threads(options.threads, interpreting=config.attention_backend == "interpret")
    use_gpu_memory(config.gpu_memory_utilization)
    use_compile_cache(home() / "compiled")
    loader = ProgramLoader(
        program_store(),
        start=(options.model, str(options.model_file), options.quantization, config),
    )
    loader.prefetch()
    with _timed(phases, "load"):
        model = load_model(
            options.model,
            dtype=config.dtype,
            model_file=str(options.model_file) if options.model_file else None,
            progress=say,
            weight_layout=kept_layout(config.attention_backend, options.quantization),
            quantization=options.quantization,
        )
        if options.chat_template is not None:
            template = read_template(options.chat_template, model.tokenizer)
            model = dataclasses.replace(model, chat_template=template)
        layout = kept_layout(config.attention_backend, options.quantization)
        draft = load_draft(config, model, options.model, layout, say)
    with _timed(phases, "plan"):
        engine = Engine(model, config, on_step=on_step, loader=loader, draft=draft)
    model = dataclasses.replace(model, max_model_len=engine.max_model_len)
    say(
        f"KV pool: {engine.capacity_tokens} tokens in pages of {engine.page_size}; "
        f"context {engine.max_model_len} tokens"
    )
    client = EngineClient(
        engine,
        model.tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        seed=config.seed,
        max_inflight=config.max_batch_rows + config.max_queue,
    )
    with _timed(phases, "warm_up"):
        client.start(say, wait_for_all=False)
        client.wait_ready()
    collect_as_usual()
    phases["total"] = time.monotonic() - began
    say(
        f"ready: load {phases['load']:.1f} s, warm-up {phases['warm_up']:.1f} s, "
        f"total {phases['total']:.1f} s; {len(engine.ready_buckets)} of "
        f"{len(engine.bucket_table)} shapes loaded, the others follow"
    )
    return StartedEngine(client, model, engine, phases)


def read_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template in a file, with the tokenizer's special tokens as its variables."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as text: {error}") from None
    tokens = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "unk_token": tokenizer.unk_token,
        "pad_token": tokenizer.pad_token,
    }
    special = {name: token for name, token in tokens.items() if token is not None}
    try:
        return ChatTemplate(source, special)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    phases[name] = time.monotonic() - began
