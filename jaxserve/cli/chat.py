"""`jaxserve chat`: talk to a model in the terminal, without a server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli import sampling_options as sampling
from jaxserve.cli.terminal import say, set_up_logging, with_clear_errors
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.loading import hub
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:  # imported when the command runs: `jaxserve --help` stays quick
    from jaxserve.cli.engine_start import StartedEngine

HELP = "/exit or Ctrl-D: leave   /clear: forget the conversation   Ctrl-C: stop the answer"

SystemText = Annotated[str | None, typer.Option("--system", help="The system message.")]
Message = Annotated[
    str | None, typer.Option("--message", "-m", help="Ask this, print the answer and leave.")
]


def register(app: typer.Typer) -> None:
    """Add the command `chat`."""
    app.command("chat")(with_clear_errors(chat_command))


def chat_command(
    model: opt.Model = opt.DEFAULT_MODEL,
    message: Message = None,
    system: SystemText = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    sampling_seed: sampling.Seed = None,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    quantization: opt.Quantization = None,
    threads: opt.Threads = None,
    max_model_len: opt.MaxModelLen = None,
    kv_memory: opt.KVMemory = opt.DEFAULTS.kv_memory,
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    attention_backend: opt.AttentionBackend = opt.DEFAULTS.attention_backend,
    model_file: opt.ModelFile = None,
    chat_template: opt.ChatTemplateFile = None,
) -> None:
    """Talk to a model. Answers appear as they are made; the conversation is kept.

    In the conversation: /exit leaves, /clear forgets what was said, Ctrl-C stops an answer.
    """
    set_up_logging()
    config = EngineConfig(
        dtype=dtype,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=attention_backend,
    )
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": sampling_seed,
    }
    sampling.make_params({}, given)  # what is mistyped is told before a model is loaded
    hub.resolve(model)

    from jaxserve.cli.engine_start import start_engine

    options = opt.EngineOptions(model, config, model_file, chat_template, quantization, threads)
    started = start_engine(options, say)
    try:
        params = sampling.make_params(started.model.sampling_defaults, given)
        conversation = Conversation(started, params, system)
        if message is not None:
            _print_pieces(conversation.answers(message))
        else:
            _talk(conversation)
    finally:
        started.client.shutdown()


class Conversation:
    """What has been said, and how to go on."""

    def __init__(
        self, started: "StartedEngine", params: SamplingParams, system: str | None
    ) -> None:
        if started.model.chat_template is None:
            raise InvalidRequestError(
                f"{started.model.name} has no chat template (it is a base model); use "
                "jaxserve generate, or pass --chat-template"
            )
        self._started = started
        self._template = started.model.chat_template
        self._params = params
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self.messages: list[dict[str, Any]] = list(self._system)

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def answers(self, text: str) -> Iterator[str]:
        """Say `text` and yield the answer's pieces. A refused turn is forgotten.

        An answer that was cut short stays in the conversation as far as it came.
        """
        from jaxserve.cli.text_run import TextRun

        turn = [*self.messages, {"role": "user", "content": text}]
        prompt = self._template.render(turn, add_generation_prompt=True)
        ids = self._started.model.tokenizer.encode(prompt, add_special_tokens=False)
        run = TextRun(self._started.client, ids, self._params)
        pieces: list[str] = []
        try:
            for piece in run:
                pieces.append(piece)
                yield piece
        finally:
            self.messages = [*turn, {"role": "assistant", "content": "".join(pieces)}]


def _talk(conversation: Conversation) -> None:
    say(HELP)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            conversation.clear()
            say("forgotten")
        elif text in ("/help", "/?"):
            say(HELP)
        elif text:
            _one_turn(conversation, text)


def _one_turn(conversation: Conversation, text: str) -> None:
    try:
        _print_pieces(conversation.answers(text))
    except InvalidRequestError as error:
        say(f"error: {error} (/clear starts over)")


def _print_pieces(pieces: Iterator[str]) -> None:
    """Print as it comes; Ctrl-C ends the answer, not the conversation."""
    try:
        for piece in pieces:
            typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    typer.echo()
