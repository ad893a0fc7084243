"""Turns a plan into the arrays of one step: numpy only, a few calls per row.

Every call makes fresh arrays: on CPU the step reads them in place, so they are never reused.

Rows: decode rows first, in the plan's order, then, from row bucket.decode_rows on, the prefill
rows. Padding: query_lens and kv_lens 0, row_of_token R, write_slot and prev_row -1, and page 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.core.buckets import Bucket
from jaxserve.core.step_batch import MAX_SUPPRESS_IDS, SamplingBatch, StepBatch
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import Request
from jaxserve.sampling_params import MAX_LOGIT_BIAS, SamplingParams

_INT32_MAX = 2**31 - 1
_WORD = 2**32 - 1
# What padded rows carry, in the order of _float_settings and _int_settings.
_FLOAT_PADDING = np.array([[0], [1], [0], [1], [0], [0]], np.float32)
_INT_PADDING = np.array([[0], [0], [0], [-1]], np.int32)


class InDraw(NamedTuple):
    """Tokens of a request that are being drawn: in which row of the step, how many at most."""

    row: int
    most: int


def plan_rows(plan: Plan, bucket: Bucket) -> list[tuple[int, Scheduled]]:
    """(row of the batch and of the step's output, what runs there), in the batch's order."""
    return [*enumerate(plan.decode), *enumerate(plan.prefill, bucket.decode_rows)]


def build_batch(
    plan: Plan,
    bucket: Bucket,
    *,
    num_groups: int,
    pages_per_row: int,
    page_size: int,
    previous_rows: Mapping[str, InDraw] | None = None,
) -> StepBatch:
    """The step's StepBatch: R = bucket.num_rows rows, T = bucket.num_tokens tokens.

    num_groups: table groups, one list of pages each in `request.pages`; a 0 in a list is a page
    given back, which nothing of this step may see.
    previous_rows: where each request was in the step before, needed where the token to run is
    still being drawn there. Such a token is marked in prev_row, and its positions and kv_lens are
    those before the draw (see `resolve_previous`).
    """
    R, T, W = bucket.num_rows, bucket.num_tokens, bucket.width
    items = plan_rows(plan, bucket)
    rows = np.array([row for row, _ in items], np.int32)
    starts = np.array([item.start for _, item in items], np.int32)
    lens = np.array([item.num_tokens for _, item in items], np.int32)
    begins, prefill = rows * W, slice(len(plan.decode), None)  # first flat token
    begins[prefill] = bucket.decode_rows * W + np.cumsum(lens[prefill]) - lens[prefill]
    page_table = _page_table(items, (num_groups, R, pages_per_row))
    flat, row, position = _ranges(begins, lens), np.repeat(rows, lens), _ranges(starts, lens)
    slots = page_table[:, row, position // page_size] * page_size + position % page_size
    token_ids, drawing = _token_ids(items)
    prev_row = np.full(T, -1, np.int32)
    kv_lens = starts + lens
    if drawing:
        draws = _in_draw(items, drawing, previous_rows)
        most = np.zeros(len(items), np.int32)
        most[drawing] = [draw.most for draw in draws]
        prev_row[begins[drawing]] = [draw.row for draw in draws]
        ahead = np.repeat(most, lens)
        slots[:, ahead > 0] = -1
        position -= ahead
        kv_lens -= most
    write_slot = np.full((num_groups, T), -1, np.int32)
    write_slot[:, flat] = slots
    query_starts = np.minimum(np.arange(R, dtype=np.int32), bucket.decode_rows) * np.int32(W)
    query_starts[rows] = begins
    return StepBatch(
        tokens=_scatter(T, 0, flat, token_ids),
        positions=_scatter(T, 0, flat, position),
        row_of_token=_scatter(T, R, flat, row),
        prev_row=prev_row,
        write_slot=write_slot,
        query_starts=query_starts,
        query_lens=_scatter(R, 0, rows, lens),
        kv_lens=_scatter(R, 0, rows, kv_lens),
        page_table=page_table,
        adapter_slot=np.zeros(R, np.int32),
        state_slot=np.zeros(R, np.int32),
        sample_at=_sample_at(plan, bucket, rows, begins, lens),
        decode_rows=bucket.decode_rows,
        width=W,
    )


def _sample_at(
    plan: Plan, bucket: Bucket, rows: np.ndarray, begins: np.ndarray, lens: np.ndarray
) -> np.ndarray:
    """[R, W]: a row's last token; with drafts all of its tokens, the last one again where there
    are fewer."""
    sample_at = np.zeros((bucket.num_rows, bucket.width), np.int32)
    samples = [item.samples for item in (*plan.decode, *plan.prefill)]
    sample_at[rows, 0] = np.where(samples, begins + lens - 1, 0)
    if bucket.width > 1:
        decode = slice(len(plan.decode))
        at = np.minimum(np.arange(bucket.width, dtype=np.int32), lens[decode, None] - 1)
        sample_at[rows[decode]] = begins[decode, None] + at
    return sample_at


@dataclass(frozen=True)
class TableRows:
    """A request's rows of the page tables as they were built last, [G, pages], and from what.

    Most pages of most requests are those of the step before: telling that lists are equal costs a
    tenth of making an array of them.
    """

    pages: tuple[list[int], ...]
    array: np.ndarray
    length: int  # of the longest list


def _page_table(items: list[tuple[int, Scheduled]], shape: tuple[int, int, int]) -> np.ndarray:
    page_table = np.zeros(shape, np.int32)
    for row, item in items:
        request = item.request
        rows: TableRows | None = request.table_rows
        if rows is None or rows.pages != request.pages:
            rows = request.table_rows = _table_rows(request.pages)
        page_table[:, row, : rows.length] = rows.array
    return page_table


def _table_rows(pages: tuple[list[int], ...]) -> TableRows:
    longest = max(map(len, pages), default=0)
    array = np.zeros((max(len(pages), 1), longest), np.int32)
    for group, ids in enumerate(pages):
        array[group, : len(ids)] = ids
    return TableRows(tuple(map(list, pages)), array, longest)


def _token_ids(items: list[tuple[int, Scheduled]]) -> tuple[list[int], list[int]]:
    """The tokens of all rows, one after the other, and which items' are still being drawn (0)."""
    ids: list[int] = []
    drawing: list[int] = []
    for index, (_, (request, start, num_tokens, _, _, drafts)) in enumerate(items):
        outputs = request.output_token_ids
        at = start - len(request.prompt_token_ids)
        if at >= len(outputs):
            drawing.append(index)
            ids.append(0)
        elif drafts:
            ids += request.token_ids(start, start + 1)
            ids += drafts
        elif at >= 0 and num_tokens == 1:  # decoding: no slices
            ids.append(outputs[at])
        else:
            ids += request.token_ids(start, start + num_tokens)
    return ids, drawing


def _in_draw(
    items: list[tuple[int, Scheduled]], drawing: list[int], rows: Mapping[str, InDraw] | None
) -> list[InDraw]:
    assert rows is not None, "a token still being drawn needs its previous row"
    assert all(items[index][1].num_tokens == 1 for index in drawing), "drafts of an unknown token"
    return [rows[items[index][1].request.request_id] for index in drawing]


def _ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lens[0] of them), then those of starts[1], and so on."""
    before = np.cumsum(lens, dtype=np.int32) - lens
    return np.repeat(starts - before, lens) + np.arange(lens.sum(), dtype=np.int32)


def _scatter(size: int, padding: int, at: np.ndarray, values: np.ndarray | list) -> np.ndarray:
    """int32 [size]: `values` at the indices `at`, `padding` elsewhere."""
    array = np.full(size, padding, np.int32)
    array[at] = values
    return array


def build_sampling(plan: Plan, bucket: Bucket) -> SamplingBatch:
    """The step's SamplingBatch. Rows that draw nothing are inactive, greedy and unfiltered."""
    items = [(row, item) for row, item in plan_rows(plan, bucket) if item.samples]
    rows = np.array([row for row, _ in items], np.intp)
    requests = [item.request for _, item in items]
    R = bucket.num_rows
    floats = np.repeat(_FLOAT_PADDING, R, axis=1)
    ints = np.repeat(_INT_PADDING, R, axis=1)
    seed = np.zeros((R, 2), np.uint32)
    if items:
        floats[:, rows] = np.array([_float_settings(r.params) for r in requests], np.float32).T
        ints[:, rows] = np.array([_int_settings(r) for r in requests], np.int32).T
        seed[rows] = [(r.seed & _WORD, r.seed >> 32 & _WORD) for r in requests]
    active = np.zeros(R, np.bool_)
    active[rows] = True
    bias_ids = np.full((R, MAX_LOGIT_BIAS), -1, np.int32)
    bias_values = np.zeros((R, MAX_LOGIT_BIAS), np.float32)
    suppress_ids = np.full((R, MAX_SUPPRESS_IDS), -1, np.int32)
    suppress_until = np.zeros(R, np.int32)
    positions = np.zeros((R, bucket.width), np.int32)
    for row, item in items:
        position = item.start + item.num_tokens - len(item.drafts)
        positions[row] = position + np.arange(bucket.width)
        bias = item.request.params.logit_bias
        if bias:
            bias_ids[row, : len(bias)] = list(bias)
            bias_values[row, : len(bias)] = list(bias.values())
        until = len(item.request.prompt_token_ids) + item.request.params.min_tokens
        if position < until:
            ids = _suppressed(item)
            suppress_ids[row, : len(ids)] = ids
            suppress_until[row] = min(until, _INT32_MAX)
    return SamplingBatch(
        active=active,
        temperature=floats[0],
        top_k=ints[0],
        top_p=floats[1],
        min_p=floats[2],
        repetition_penalty=floats[3],
        presence_penalty=floats[4],
        frequency_penalty=floats[5],
        bias_ids=bias_ids,
        bias_values=bias_values,
        suppress_ids=suppress_ids,
        suppress_until=suppress_until,
        seed=seed,
        choice=ints[1],
        positions=positions,
        slot=ints[2],
        num_logprobs=ints[3],
    )


def _float_settings(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _int_settings(request: Request) -> tuple[int, ...]:
    top_k = min(max(request.params.top_k, 0), _INT32_MAX)
    logprobs = request.params.logprobs
    return top_k, request.choice, request.sampling_slot, -1 if logprobs is None else logprobs


def _suppressed(item: Scheduled) -> list[int]:
    """Ids that may not be drawn before min_tokens are out: whatever would end the request."""
    params = item.request.params
    eos_ids = () if params.ignore_eos else item.request.eos_token_ids
    ids = list(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
    assert len(ids) <= MAX_SUPPRESS_IDS, f"{len(ids)} ids end this request"
    return ids
