"""What requests have answered: suffix automata of ended outputs, bounded, groups kept apart.

A group is a cache salt and an adapter: nothing that was generated for one is ever seen by another,
not even as a guess that turns out wrong. Each group has two generations. New outputs enter the
younger one; when that is full it becomes the older one, and what was that is dropped. If all groups
together hold too much, the one not used for the longest time loses a generation.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from jaxserve.engine.proposers.suffix_automaton import SuffixAutomaton

_MAX_GROUPS = 256
_MAX_QUEUED = 1 << 15  # tokens of ended outputs that wait to be learned; older ones are dropped


class _Generation:
    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.num_outputs = 0


class OutputHistory:
    """At most max_tokens tokens of at most max_outputs outputs (of one more while it is learned).

    A token takes some 500 bytes.
    """

    def __init__(self, max_tokens: int, max_outputs: int) -> None:
        self._max_tokens = max_tokens
        self._max_outputs = max_outputs
        self._groups: OrderedDict[Hashable, deque[_Generation]] = OrderedDict()  # used last: last
        self._queue: deque[tuple[Hashable, list[int]]] = deque()
        self._num_queued = 0
        self._learning: tuple[Hashable, list[int], int] | None = None  # an output and how far
        self.num_tokens = 0  # that are held, those not learned yet apart
        self.num_outputs = 0

    def add(self, group: Hashable, output: Sequence[int]) -> None:
        """Note an output; `learn` takes it in."""
        if not output or not self._max_outputs:
            return
        kept = list(output[-_MAX_QUEUED:])
        self._queue.append((group, kept))
        self._num_queued += len(kept)
        while self._num_queued > _MAX_QUEUED:
            self._num_queued -= len(self._queue.popleft()[1])

    def learn(self, num_tokens: int) -> None:
        """Take in at most so many tokens of the outputs that were added: a call's time is bounded,
        however long they are."""
        while num_tokens > 0:
            if self._learning is None:
                if not self._queue:
                    return
                group, output = self._queue.popleft()
                self._num_queued -= len(output)
                self._learning = group, output, 0
                self._generation(group, new_output=True)
            group, output, start = self._learning
            generation = self._generation(group, new_output=False)
            room = self._generation_tokens - generation.automaton.num_tokens
            stop = min(start + num_tokens, start + room, len(output))
            for token in output[start:stop]:
                generation.automaton.append(token)
            num_tokens -= stop - start
            self.num_tokens += stop - start
            self._learning = (group, output, stop) if stop < len(output) else None
            self._evict()

    def draft(
        self, group: Hashable, tail: Sequence[int], limit: int, spec_factor: float, min_prob: float
    ) -> tuple[int, list[int]]:
        """(length of the match, drafts) for a text that ends in `tail`, from the generation that
        matches most of it. At most `limit` drafts, and spec_factor times the length of the match.
        """
        generations = self._groups.get(group)
        if generations is None:
            return 0, []
        self._groups.move_to_end(group)
        best, automaton, longest = 0, None, 0
        for generation in generations:  # the older one first: of equal matches the younger counts
            state, length = generation.automaton.match(tail)
            if length >= longest and length:
                best, automaton, longest = state, generation.automaton, length
        if automaton is None:
            return 0, []
        limit = min(limit, int(spec_factor * longest))
        return longest, automaton.continuation(best, limit, min_prob)

    @property
    def _generation_tokens(self) -> int:
        return max(self._max_tokens // 2, 1)

    def _generation(self, group: Hashable, *, new_output: bool) -> _Generation:
        """The one that takes in the next token of a group. new_output: which begins an output."""
        generations = self._groups.setdefault(group, deque())
        self._groups.move_to_end(group)
        young = generations[-1] if generations else None
        full = young is not None and (
            young.automaton.num_tokens >= self._generation_tokens
            or (new_output and young.num_outputs >= max(self._max_outputs // 2, 1))
        )
        if young is None or full:
            if len(generations) == 2:
                self._drop_oldest(generations)
            young = _Generation()
            generations.append(young)
            new_output = True  # the rest of an output that was cut counts as one
        if new_output:
            self.num_outputs += 1
            young.num_outputs += 1
            young.automaton.start_text()
        return young

    def _evict(self) -> None:
        while (
            self.num_tokens > self._max_tokens
            or self.num_outputs > self._max_outputs
            or len(self._groups) > _MAX_GROUPS
        ):
            group, generations = next(iter(self._groups.items()))
            if len(self._groups) == 1 and len(generations) == 1:
                return  # the one that is being filled
            self._drop_oldest(generations)
            if not generations:
                del self._groups[group]

    def _drop_oldest(self, generations: deque[_Generation]) -> None:
        dropped = generations.popleft()
        self.num_tokens -= dropped.automaton.num_tokens
        self.num_outputs -= dropped.num_outputs
