"""From the token ids of one choice to the text a user sees: detokenising, stop strings, logprobs.

A TextStream turns each TokenEvent into an OutputDelta. Text that could still become a stop string
or the rest of a character is held back, so what was published never has to be taken back, and the
joined deltas equal the result of the whole output at once.
"""

from collections.abc import Sequence
from typing import Protocol

from jaxserve.engine.outputs import Logprob, OutputDelta, PromptEntries
from jaxserve.engine.request import TokenEvent, TokenLogprobs
from jaxserve.engine.stop_strings import StopMatcher
from jaxserve.sampling_params import SamplingParams


class TextDetokenizer(Protocol):
    """Incremental decoding of one output; the prompt decides whether a leading space stays."""

    def push(self, ids: Sequence[int]) -> str:
        """The text the new ids complete; half a character is kept for later."""
        ...

    def finish(self) -> str:
        """What is still kept, with U+FFFD for bytes that never became a character."""
        ...


class TextTokenizer(Protocol):
    """What the text side needs of a tokenizer (`jaxserve.loading.tokenizer.Tokenizer` has it)."""

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> TextDetokenizer: ...

    def id_to_token(self, token_id: int) -> str:
        """One token as text: its own spaces kept, part of a character as U+FFFD."""
        ...


class TextStream:
    """The text of one choice. `push` until `finished`; later events are the caller's to drop.

    Stop strings count from the token after `params.min_tokens` on; a match may begin earlier but
    must end there. `num_tokens` is the length of the output: all tokens pushed, or those up to the
    one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        index: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._request_id = request_id
        self._index = index
        self._detokenizer = tokenizer.detokenizer(prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings)
        self._held = ""  # text not yet published
        self._published = 0  # characters published
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self._published_ids = 0
        self.num_tokens = 0
        self.finished = False

    def push(self, event: TokenEvent) -> OutputDelta:
        """Take the new tokens and return what of text, ids and logprobs is now certain."""
        assert not self.finished, "a finished stream takes no more tokens"
        self._take_tokens(event)
        if event.finish_reason is not None and not self._matcher.decided:
            self._take_text(self._detokenizer.finish())
            self._matcher.close()
        text, ids, logprobs = self._release(ended=event.finish_reason is not None)
        finish_reason = event.finish_reason
        stop_reason: int | str | None = event.stop_reason
        match = self._matcher.match
        if self._matcher.decided and match is not None:
            finish_reason, stop_reason = "stop", match.stop
            self.num_tokens = match.mark
        self.finished = finish_reason is not None
        return OutputDelta(
            request_id=self._request_id,
            index=self._index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=event.error if finish_reason == "error" else None,
            num_cached_tokens=event.num_cached_tokens,
            prompt_logprobs=self._prompt_entries(event),
        )

    def _prompt_entries(self, event: TokenEvent) -> PromptEntries | None:
        if event.prompt_logprobs is None:
            return None
        return PromptEntries(event.prompt_logprobs, self._tokenizer.id_to_token)

    def _take_tokens(self, event: TokenEvent) -> None:
        silent = -1  # the token that stopped the request is an id of the output, but not text
        if event.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            silent = len(event.token_ids) - 1
        for position, token in enumerate(event.token_ids):
            self.num_tokens += 1
            self._held_ids.append(token)
            if event.logprobs is not None:
                self._held_logprobs.append(event.logprobs[position])
            if position != silent:
                self._take_text(self._detokenizer.push((token,)))
            if self._matcher.decided:
                return

    def _take_text(self, piece: str) -> None:
        self._held += piece
        self._matcher.push(
            piece, mark=self.num_tokens, counts=self.num_tokens > self._params.min_tokens
        )

    def _release(
        self, ended: bool
    ) -> tuple[str, tuple[int, ...], tuple[dict[int, Logprob], ...] | None]:
        """Move what is certain out of the held text, ids and logprobs."""
        match = self._matcher.match
        if self._matcher.decided and match is not None:
            keep_stop = self._params.include_stop_str_in_output
            text_end = match.end if keep_stop else match.start
        elif ended:
            text_end = self._published + len(self._held)
        else:
            text_end = self._matcher.safe_length
        num_chars = text_end - self._published
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._published += num_chars

        num_ids = (self.num_tokens if match is None else match.mark) - self._published_ids
        ids, self._held_ids = self._held_ids[:num_ids], self._held_ids[num_ids:]
        self._published_ids += len(ids)
        if self._params.logprobs is None:
            return text, tuple(ids), None
        raw, self._held_logprobs = self._held_logprobs[:num_ids], self._held_logprobs[num_ids:]
        return text, tuple(ids), tuple(map(self._logprob_dict, ids, raw))

    def _logprob_dict(self, token: int, raw: TokenLogprobs) -> dict[int, Logprob]:
        text_of = self._tokenizer.id_to_token
        entries = {token: Logprob(raw.logprob, raw.rank, text_of(token))}
        for rank, (other, logprob) in enumerate(raw.top, start=1):
            if other != token:
                entries[other] = Logprob(logprob, rank, text_of(other))
        return entries
