"""The Python API: `LLM(model).generate(prompts, params)` and `.chat(messages, params)`.

Names and shapes are vLLM's. Prompts are checked and tokenised before anything starts, then run
through the same client, scheduler and steps as the server's requests.
"""

import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

from jaxserve.config import EngineConfig
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.core.gpu_memory import use_gpu_memory
from jaxserve.core.program_loader import ProgramLoader, program_store
from jaxserve.core.threads import use_threads
from jaxserve.engine.batch_display import batch_display
from jaxserve.engine.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from jaxserve.engine.client import EngineClient
from jaxserve.engine.engine import Engine
from jaxserve.engine.offline_batch import BatchProgress, OfflineBatch
from jaxserve.engine.outputs import GenerationRequest
from jaxserve.engine.read_prompt import (
    Prompt,
    ReadPrompt,
    at_place,
    many_prompts,
    read_conversation,
    read_prompt,
    require_list,
)
from jaxserve.engine.request_output import CompletionOutput, OutputCollector, RequestOutput
from jaxserve.engine.run import Run
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.loading.load import load_model
from jaxserve.loading.load_draft import load_draft
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.model_cache import home
from jaxserve.loading.quantize_on_load import kept_layout
from jaxserve.loading.tokenizer import Tokenizer
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "Run",
]

Message = Mapping[str, Any]
OneOrMoreParams = SamplingParams | Iterable[SamplingParams] | None


class _PromptJob(OutputCollector):
    """A prompt on its way through the engine, and its place among the prompts."""

    def __init__(self, index: int, request: GenerationRequest, prompt: str | None) -> None:
        super().__init__(request, prompt)
        self.index = index


class LLM:
    """A model ready to generate, on engine threads of its own.

    model: a name or path that `jaxserve serve` takes too, or a LoadedModel. quantization: int8 or
    int4, to pack a plain checkpoint's matrices while loading; quantised checkpoints need none.
    threads: CPU threads of this process to compute on, given before anything has used JAX. The
    other arguments are the fields of EngineConfig. The phases of starting up are logged as INFO.
    It returns with every program loaded. Several threads may call it; their batches run one after
    the other. Use it as a context manager, or call `close()`, to give the memory back.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        quantization: str | None = None,
        threads: int | None = None,
        **engine_config: Any,
    ) -> None:
        config = _engine_config(engine_config)
        use_threads(threads, interpreting=config.attention_backend == "interpret")
        use_gpu_memory(config.gpu_memory_utilization)
        use_compile_cache(home() / "compiled")
        name = model if isinstance(model, str) else model.name
        loader = ProgramLoader(program_store(), start=(name, quantization, config))
        loader.prefetch()
        path = model if isinstance(model, str) else None
        if isinstance(model, str):
            model = load_model(
                model,
                dtype=config.dtype,
                progress=logger.info,
                weight_layout=kept_layout(config.attention_backend, quantization),
                quantization=quantization,
            )
        elif quantization is not None:
            raise TypeError("quantization packs a checkpoint while loading; give a name or path")
        self.model = model
        layout = kept_layout(config.attention_backend, quantization)
        draft = load_draft(config, model, path, layout, logger.info)
        self._client: EngineClient | None = EngineClient(
            Engine(self.model, config, loader=loader, draft=draft),
            self.model.tokenizer,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            seed=config.seed,
            max_inflight=config.max_batch_rows + config.max_queue,
        )
        self._shutdown = weakref.finalize(self, _end, self._client, loader)  # also at exit
        self._request_ids = itertools.count()
        self._turn = threading.Lock()
        self._client.start(progress=logger.info)
        try:
            self._client.wait_ready()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: OneOrMoreParams = None,
        use_tqdm: bool = True,
        *,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results in the order of the prompts.

        prompts: a text, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these; a text
        is tokenised with the tokenizer's special tokens, ids are taken as they are. Prompts with
        the same "cache_salt" share KV among each other only. sampling_params: one for all, one
        per prompt, or None for the model's defaults. timeout: seconds from its start after which a
        request ends as "timeout", with what it has.

        Raises InvalidRequestError, naming the prompt's index. A list is checked before anything
        starts; prompts of an iterator are read as there is room for them, and a bad one then ends
        those before it.
        """
        prompts = many_prompts(prompts)
        if isinstance(prompts, Sequence):
            read = [
                at_place("prompt", i, read_prompt, self.model, p) for i, p in enumerate(prompts)
            ]
            return self._run(read, sampling_params, use_tqdm, timeout)
        results = dict(self.stream_results(prompts, sampling_params, use_tqdm, timeout=timeout))
        return [results[index] for index in range(len(results))]

    def stream_results(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: OneOrMoreParams = None,
        use_tqdm: bool = False,
        *,
        timeout: float | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete any number of prompts, and yield (index of the prompt, result) as each ends.

        Prompts are read as there is room for them and results are not kept, so an endless iterator
        is welcome. Arguments as of `generate`; closing the iterator early aborts what is open.

        Raises InvalidRequestError naming the prompt's index, after what ended before it.
        """
        prompts = many_prompts(prompts)
        count = len(prompts) if isinstance(prompts, Sized) else None
        return self._stream(self._jobs(prompts, sampling_params, timeout), use_tqdm, count)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: OneOrMoreParams = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, each a list of messages.

        chat_template_kwargs go to the template as they are. The templated text is tokenised
        without special tokens of our own. Raises InvalidRequestError as `generate` does, and for
        a model without a chat template.
        """
        require_list("messages", messages)
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message", "messages")
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "extra": chat_template_kwargs,
        }
        if isinstance(messages[0], Mapping):
            read = [read_conversation(self.model, messages, options)]
        else:
            read = [
                at_place("conversation", i, read_conversation, self.model, conversation, options)
                for i, conversation in enumerate(messages)
            ]
        return self._run(read, sampling_params, use_tqdm, timeout)

    def start(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> Run:
        """Begin one request and return it as an object that can be read while it grows, forked,
        saved and aborted (see `Run`). Arguments as of `generate`; n must be 1.

        Raises InvalidRequestError, QueueFullError or EngineDeadError.
        """
        read = read_prompt(self.model, prompt)
        params = sampling_params or self.get_default_sampling_params()
        run = Run(self.client, self._new_id, read.token_ids, params)
        return run.submit(timeout, read.cache_salt)

    def load(self, path: str | Path) -> Run:
        """Let a run go on from the file that `Run.save` wrote: with the tokens that it would have
        had, if model, dtype and backend are the same.

        Raises InvalidRequestError if the file is damaged, of another model, or does not fit.
        """
        return Run(self.client, self._new_id).load(path)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Search for the most likely outputs of each prompt; see engine/beam_search.py.

        Raises InvalidRequestError naming the prompt's index, before anything starts.
        """
        step = params.one_step()
        longest = SamplingParams(max_tokens=params.max_tokens)
        read = [
            at_place("prompt", i, read_prompt, self.model, p)
            for i, p in enumerate(many_prompts(prompts))
        ]
        for index, prompt in enumerate(read):
            at_place("prompt", index, self.client.check, prompt.token_ids, longest)
        eos = self.model.eos_token_ids
        searches = [BeamSearch(prompt.token_ids, params, eos) for prompt in read]
        salts = [prompt.cache_salt for prompt in read]
        while growing := [i for i, search in enumerate(searches) if not search.done]:
            beams = [
                ReadPrompt(None, tokens, salts[i])
                for i in growing
                for tokens in searches[i].prompts
            ]
            found = iter(self._run(beams, step, use_tqdm, None))
            for i in growing:
                outputs = [next(found).outputs[0] for _ in searches[i].prompts]
                searches[i].advance(
                    [each.logprobs[0] if each.logprobs else None for each in outputs]
                )
        decode = self.model.tokenizer.decode
        return [
            BeamSearchOutput(
                [dataclasses.replace(one, text=decode(one.tokens)) for one in search.results()]
            )
            for search in searches
        ]

    @property
    def client(self) -> EngineClient:
        """What feeds the engine: to serve the same model over HTTP, say."""
        if self._client is None:
            raise EngineDeadError("this LLM has been closed; make a new one")
        return self._client

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means: the defaults, with those of the model on top."""
        defaults: dict[str, Any] = {**self.model.sampling_defaults}
        return SamplingParams(**defaults)

    def close(self) -> None:
        """Abort what runs, stop the threads and let go of the engine; may be called again."""
        self._client = None
        self._shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _new_id(self) -> str:
        return str(next(self._request_ids))

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        sampling_params: OneOrMoreParams,
        use_tqdm: bool,
        timeout: float | None,
    ) -> list[RequestOutput]:
        """Run prompts that are all there, and the checks of all before the first."""
        all_params = self._params_per_prompt(sampling_params, len(prompts))
        jobs = [
            at_place("prompt", index, self._job, index, prompt, params, timeout)
            for index, (prompt, params) in enumerate(zip(prompts, all_params, strict=True))
        ]
        with self._turn:
            results = dict(self._stream(jobs, use_tqdm, len(jobs)))
        return [results[index] for index in range(len(jobs))]

    def _jobs(
        self, prompts: Iterable[Prompt], sampling_params: OneOrMoreParams, timeout: float | None
    ) -> Iterator[_PromptJob]:
        """Prompts read and checked one by one."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            all_params: Iterator[SamplingParams] = itertools.repeat(sampling_params)
        else:
            all_params = iter(sampling_params)
        for index, prompt in enumerate(prompts):
            read = at_place("prompt", index, read_prompt, self.model, prompt)
            params = next(all_params, None)
            if params is None:
                raise InvalidRequestError(
                    f"there are {index} sampling_params and more prompts; give one for all or one "
                    "for each",
                    "sampling_params",
                )
            yield at_place("prompt", index, self._job, index, read, params, timeout)

    def _job(
        self, index: int, prompt: ReadPrompt, params: SamplingParams, timeout: float | None
    ) -> _PromptJob:
        self.client.check(prompt.token_ids, params)
        request = GenerationRequest(
            self._new_id(),
            prompt.token_ids,
            params,
            timeout=timeout,
            cache_salt=prompt.cache_salt,
        )
        return _PromptJob(index, request, prompt.text)

    def _stream(
        self, jobs: Iterable[_PromptJob], use_tqdm: bool, count: int | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        batch = OfflineBatch(self.client, jobs, progress=BatchProgress(count))
        display = batch_display("prompts", batch.progress) if use_tqdm else nullcontext(None)
        with display as tell:
            for job in batch.run(tell):
                yield job.index, job.output()

    def _params_per_prompt(
        self, sampling_params: OneOrMoreParams, count: int
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        sampling_params = list(sampling_params)
        if len(sampling_params) != count:
            raise InvalidRequestError(
                f"{len(sampling_params)} sampling_params for {count} prompts; give one for all or "
                "one for each",
                "sampling_params",
            )
        return sampling_params


def _end(client: EngineClient, loader: ProgramLoader) -> None:
    client.shutdown()
    loader.close()


def _engine_config(fields: Mapping[str, Any]) -> EngineConfig:
    fields = dict(fields)
    if "speculative_config" in fields:  # vLLM's name
        fields["speculative"] = fields.pop("speculative_config")
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise TypeError(
            f"LLM has no argument {unknown[0]!r}; besides the model it takes "
            + ", ".join(sorted(known))
        )
    if isinstance(fields.get("speculative"), str | Mapping):
        fields = {**fields, "speculative": SpeculativeConfig.parse(fields["speculative"])}
    return EngineConfig(**{"max_stall": 0, **fields})  # results come whole: nobody's stream stalls
