"""One request as an object: read while it grows, forked, saved, ended.

    run = llm.start("Once", SamplingParams(max_tokens=200, seed=1))
    for delta in run: ...          # or run.wait()
    other = run.fork(seed=2)       # goes on alone from where the run is
    run.save("run.safetensors")    # and later, perhaps elsewhere: llm.load("run.safetensors")

Any thread may use a run, and several may; only an iteration belongs to one.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, Logprob, OutputDelta
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams


class Run:
    """A request of one choice. Made by `LLM.start`, `LLM.load` and `fork`.

    request_id; prompt_token_ids; params. num_inherited: output tokens that it began with, drawn by
    the run it was forked or saved from. It runs whether it is read or not, to its end, or until
    `abort`, or until the end of a `with` block.
    """

    def __init__(
        self,
        client: EngineClient,
        new_id: Callable[[], str],
        prompt_token_ids: Sequence[int] = (),
        params: SamplingParams | None = None,
    ) -> None:
        """For those who make runs: `submit` or `load` begins it."""
        self.request_id = new_id()
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params or SamplingParams()
        self.num_inherited = 0
        self._client = client
        self._new_id = new_id
        self._changed = threading.Condition()  # guards what follows
        self._deltas: list[OutputDelta] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._last: OutputDelta | None = None

    # ------------------------------------------------------------------ what there is of it

    @property
    def token_ids(self) -> list[int]:
        """The output so far, what it inherited included, and the EOS or stop id at its end."""
        with self._changed:
            return list(self._token_ids)

    @property
    def text(self) -> str:
        """The output as text, as far as it can no longer change."""
        with self._changed:
            return "".join(self._texts)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """One entry for each token that this run has drawn, none for those it inherited; None
        unless params.logprobs asks for them."""
        with self._changed:
            return None if self.params.logprobs is None else list(self._logprobs)

    @property
    def finished(self) -> bool:
        return self._last is not None

    @property
    def finish_reason(self) -> str | None:
        """None while it runs; then "stop", "length", "abort", "timeout" or "error"."""
        return None if self._last is None else self._last.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token id of the parameters that ended it."""
        return None if self._last is None else self._last.stop_reason

    @property
    def error(self) -> str | None:
        """Why finish_reason is "error"."""
        return None if self._last is None else self._last.error

    def __iter__(self) -> Iterator[OutputDelta]:
        """Every delta from the first one on, as they come. Joined they are the whole output: the
        first one of a forked or loaded run is what it inherited, without logprobs."""
        seen = 0
        while True:
            with self._changed:
                while len(self._deltas) == seen:
                    self._changed.wait()
                delta = self._deltas[seen]
            seen += 1
            yield delta
            if delta.finish_reason is not None:
                return

    def wait(self, timeout: float | None = None) -> Self:
        """Until it has ended. Raises TimeoutError; EngineDeadError if the engine died."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._last is not None, timeout):
                raise TimeoutError(f"the run has not ended within {timeout:g} s")
        self._client.raise_if_dead()
        return self

    def wait_for_tokens(self, count: int, timeout: float | None = None) -> Self:
        """Until it has `count` output tokens, or has ended. Raises as `wait` does."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._last is not None or len(self._token_ids) >= count, timeout
            ):
                raise TimeoutError(f"the run has no {count} tokens after {timeout:g} s")
        self._client.raise_if_dead()
        return self

    # ------------------------------------------------------------------ what can be done with it

    def fork(
        self,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        at: int | None = None,
    ) -> "Run":
        """A second run that goes on alone from here: it begins with the same output and shares
        its KV, copy-on-write.

        Where "here" is: after the last token that the engine has drawn when it gets to it, which
        may be some further than the deltas are; `num_inherited` of the new run says where. at: fork
        after so many output tokens instead. params: what to draw the rest with (max_tokens,
        min_tokens, penalties and stop strings count from the first output token, inherited or
        not); None: as this run. seed: None: that of params, or else this run's, and then the new
        run draws the same tokens as long as the parameters are the same.

        A waiting run is forked too: the new one waits as well. Raises InvalidRequestError if the
        run has ended (start a new one with prompt and output as its prompt), if it has fewer than
        `at` tokens, or if params leave nothing to draw; QueueFullError; EngineDeadError.
        """
        if at is not None and (isinstance(at, bool) or not isinstance(at, int) or at < 0):
            raise InvalidRequestError(f"at is {str(at)[:40]}; give a number of tokens", "at")
        if seed is not None:
            SamplingParams(seed=seed)  # checks it
        if params is not None:
            check_run_params(params)
        run = Run(self._client, self._new_id, self.prompt_token_ids, params or self.params)
        _, inherited = self._client.fork(
            self.request_id,
            self.prompt_token_ids,
            run.request_id,
            run.take,
            params=params,
            seed=seed,
            at=at,
        )
        return run.began_with(inherited)

    def save(self, path: str | Path) -> int:
        """Write it to a file, from which `LLM.load` lets it go on: tokens, parameters, seed and the
        KV of its tokens. Returns how many output tokens are in it. The run goes on.

        Raises InvalidRequestError if it has ended, OSError, EngineDeadError.
        """
        return len(self._client.save(self.request_id, Path(path)).output_token_ids)

    def abort(self) -> None:
        """End it now, as "abort"; nothing if it has ended."""
        self._client.abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    # ------------------------------------------------------------------ for those who make runs

    def submit(self, timeout: float | None = None, cache_salt: str = "") -> Self:
        """Begin it as a new request. Raises as EngineClient.submit does."""
        check_run_params(self.params)
        request = GenerationRequest(
            self.request_id,
            self.prompt_token_ids,
            self.params,
            timeout=timeout,
            cache_salt=cache_salt,
        )
        self._client.submit(request, self.take)
        return self

    def load(self, path: str | Path) -> Self:
        """Begin it from a file. Raises as EngineClient.load does."""
        request, inherited = self._client.load(Path(path), self.request_id, self.take)
        self.prompt_token_ids = request.prompt_token_ids
        self.params = request.params
        return self.began_with(inherited)

    def began_with(self, num_inherited: int) -> Self:
        """Wait until these tokens have come from the text side, which is at once."""
        self.num_inherited = num_inherited
        with self._changed:
            self._changed.wait_for(lambda: bool(self._deltas) or not num_inherited)
        return self

    def take(self, delta: OutputDelta) -> None:
        """The next delta; called on the text side's thread."""
        with self._changed:
            self._deltas.append(delta)
            self._token_ids += delta.token_ids
            self._texts.append(delta.text)
            self._logprobs += delta.logprobs or ()
            if delta.finish_reason is not None:
                self._last = delta
            self._changed.notify_all()


def check_run_params(params: SamplingParams) -> None:
    """Raise InvalidRequestError for what belongs to whole results."""
    if params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "a run has no prompt_logprobs; ask generate for them", "prompt_logprobs"
        )
    if params.n != 1:
        raise InvalidRequestError(
            f"n is {params.n}; a run is one choice: start or fork as many as you need", "n"
        )
