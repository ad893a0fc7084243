"""A whole batch over a scripted engine: results as OpenAI has them, failures line by line."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.batch import input_file, line_job
from jaxserve.batch.input_file import InputFile
from jaxserve.batch.line_job import LineReader
from jaxserve.batch.results_file import ResultsFile
from jaxserve.batch.run import run_batch, start_progress
from jaxserve.engine.client import EngineClient
from jaxserve.engine.offline_batch import BatchProgress
from jaxserve.engine.request import Request
from jaxserve.errors import EngineDeadError
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import serve, strict_json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def echo(request: Request) -> list[int]:
    return [*request.prompt_token_ids[1:], 257]


def line(custom_id: Any, body: Any = None, url: Any = COMPLETIONS, **more: Any) -> str:
    body = {"prompt": "hi", "max_tokens": 20} if body is None else body
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more
    return json.dumps({key: value for key, value in fields.items() if value is not ...})


@contextmanager
def started(engine: FakeEngine, max_inflight: int = 64, **model: Any) -> Iterator[LineReader]:
    fake = ByteModel(**model)
    client = EngineClient(
        engine,
        fake.tokenizer,
        vocab_size=fake.vocab_size,
        eos_token_ids=fake.eos_token_ids,
        max_inflight=max_inflight,
    )
    client.start()
    try:
        yield LineReader(client, fake, ("fake", "other-name"), seed=3)  # type: ignore[arg-type]
    finally:
        client.shutdown()


class Files:
    """An input and where its results go."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.write(*lines)

    def write(self, *lines: str) -> None:
        self.input.write_text("\n".join(lines) + "\n")

    def run(self, engine: FakeEngine | None = None, **options: Any) -> BatchProgress:
        max_open = options.pop("max_open", 8)
        with started(engine or FakeEngine(echo), **options) as reader:
            source = InputFile(self.input)
            with ResultsFile(self.output, source) as results:
                progress = start_progress(source, results)
                run_batch(source, results, reader, max_open=max_open, progress=progress)
        return progress

    def results(self) -> list[dict[str, Any]]:
        return [strict_json(text) for text in self.output.read_bytes().splitlines()]

    def by_line(self) -> dict[int, dict[str, Any]]:
        found = {int(record["id"].split("_")[2]): record for record in self.results()}
        assert len(found) == len(self.results())
        return found


def test_results_have_openais_shape(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hé"}], "model": "other-name"}
    files = Files(tmp_path, line("a"), line("b", chat, CHAT))
    progress = files.run()
    assert (progress.num_jobs, progress.finished_jobs, progress.failed_jobs) == (2, 2, 0)
    results = files.by_line()
    for number, custom_id in ((1, "a"), (2, "b")):
        record = results[number]
        assert list(record) == ["id", "custom_id", "response", "error"]
        assert (record["custom_id"], record["error"]) == (custom_id, None)
        assert list(record["response"]) == ["request_id", "status_code", "body"]
        assert record["response"]["status_code"] == 200
    body = results[1]["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "fake")
    assert body["choices"][0]["text"] == "hi"
    assert body["usage"]["completion_tokens"] == 3
    body = results[2]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "user: hé\nassistant:"


async def test_bodies_are_those_of_the_server(tmp_path: Path) -> None:
    bodies = {
        COMPLETIONS: {
            "prompt": ["ab", "cde"],
            "n": 2,
            "logprobs": 2,
            "max_tokens": 9,
            "echo": False,
        },
        CHAT: {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 5},
    }
    files = Files(tmp_path, *(line(url, body, url) for url, body in bodies.items()))
    files.run()
    async with serve(FakeEngine(echo), ByteModel()) as server:
        for record in files.results():
            url, body = record["custom_id"], record["response"]["body"]
            _, answer = await server.post(url, bodies[url])
            assert body | {"id": 0, "created": 0} == answer | {"id": 0, "created": 0}


# What is on a line -> the error's code, and the custom_id in the result.
BAD_LINES: list[tuple[str, str, str | None]] = [
    ("{", "invalid_json", None),
    ("[1]", "invalid_json", None),
    ('"text"', "invalid_json", None),
    ('{"custom_id": "x", "body": NaN}', "invalid_json", None),
    ("[" * 100_000, "invalid_json", None),
    (line(...), "invalid_custom_id", None),
    (line(None), "invalid_custom_id", None),
    (line(5), "invalid_custom_id", None),
    (line(""), "invalid_custom_id", None),
    (line("x" * 513), "invalid_custom_id", None),
    (line("\ud800"), "invalid_custom_id", None),
    (line("m1", method=...), "invalid_method", "m1"),
    (line("m2", method="GET"), "invalid_method", "m2"),
    (line("u1", url="/v1/embeddings"), "invalid_url", "u1"),
    (line("u2", url=...), "invalid_url", "u2"),
    (line("u3", url=["/v1/completions"]), "invalid_url", "u3"),
    (line("b1", body=...), "invalid_body", "b1"),
    (line("b2", body=["x"]), "invalid_body", "b2"),
    (line("good"), "duplicate_custom_id", "good"),
    (json.dumps({"custom_id": "v", "values": list(range(300_000))}), "request_too_large", None),
]  # fmt: skip


def test_lines_that_are_no_requests_fail_alone(tmp_path: Path) -> None:
    files = Files(tmp_path, line("good"), *(bad for bad, _, _ in BAD_LINES), line("last"))
    engine = FakeEngine(echo)
    progress = files.run(engine)
    assert progress.failed_jobs == len(BAD_LINES)
    assert len(engine.added) == 2
    results = files.by_line()
    for number, (bad, code, custom_id) in enumerate(BAD_LINES, start=2):
        record = results[number]
        assert (record["error"]["code"], record["custom_id"]) == (code, custom_id), bad[:80]
        assert record["response"] is None
        assert record["error"]["message"].startswith(f"line {number}: ")
        assert len(json.dumps(record)) < 500
    assert results[1]["response"]["status_code"] == 200
    assert results[len(BAD_LINES) + 2]["response"]["status_code"] == 200


BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "invalid_value"),
    ({"prompt": "x", "stream": True}, 400, "unsupported_value"),
    ({"prompt": "x", "stream": 1}, 400, "invalid_value"),
    ({"prompt": "x", "model": "gpt-4o"}, 404, "model_not_found"),
    ({"prompt": "x", "temperature": -1}, 400, "invalid_value"),
    ({"prompt": "x" * 5_000}, 400, "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 5_000}, 400, "context_length_exceeded"),
    ({"prompt": [1, 99_999]}, 400, "invalid_value"),
    ({"prompt": "x", "n": 100}, 400, "invalid_value"),  # more choices than can be open
    ({"prompt": "x", "timeout": 0}, 400, "invalid_value"),
]


def test_refused_requests_have_the_servers_answer(tmp_path: Path) -> None:
    lines = [line(f"r{number}", body) for number, (body, _, _) in enumerate(BAD_BODIES)]
    files = Files(tmp_path, *lines, line("last"))
    assert files.run().failed_jobs == len(BAD_BODIES)
    results = files.by_line()
    for number, (body, status, code) in enumerate(BAD_BODIES, start=1):
        record = results[number]
        assert record["error"] is None
        assert record["response"]["status_code"] == status, str(body)[:80]
        assert record["response"]["body"]["error"]["code"] == code, str(body)[:80]
    assert results[len(BAD_BODIES) + 1]["response"]["status_code"] == 200


def test_a_line_above_the_limit_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (input_file, line_job):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    files = Files(tmp_path, line("big", {"prompt": "x" * 2000}), line("small"))
    files.run()
    results = files.by_line()
    assert results[1]["error"]["code"] == "line_too_large"
    assert results[2]["response"]["status_code"] == 200


def test_a_bug_fails_its_line_and_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setitem(line_job.CALLS, CHAT, broken)
    files = Files(tmp_path, line("a", {"messages": []}, CHAT), line("b"))
    assert files.run().failed_jobs == 1
    assert files.by_line()[1]["response"]["status_code"] == 500
    assert "secret" not in files.output.read_text()


def test_time_limits_count_line_by_line(tmp_path: Path) -> None:
    endless = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
    files = Files(
        tmp_path,
        line("late", endless | {"timeout": 0.2}),
        line("waits", endless | {"timeout": 0.1}),
    )
    files.run(FakeEngine([65], max_rows=1, step_seconds=0.01))
    results = files.by_line()
    (choice,) = results[1]["response"]["body"]["choices"]
    assert (choice["finish_reason"], set(choice["text"])) == ("timeout", {"A"})
    assert results[2]["response"]["status_code"] == 408


def test_results_are_written_as_they_end_and_lines_read_as_there_is_room(tmp_path: Path) -> None:
    lengths = [200, *[1 + number % 7 for number in range(100)]]
    lines = [
        line(f"r{number}", {"prompt": "x", "max_tokens": length, "ignore_eos": True})
        for number, length in enumerate(lengths)
    ]
    files = Files(tmp_path, *lines)
    engine = FakeEngine([65], step_seconds=0.001)
    files.run(engine, max_open=5)
    order = [record["custom_id"] for record in files.results()]
    assert len(order) == 101
    assert order.index("r0") > 50
    assert engine.max_open <= 5


def test_seeds_depend_on_the_line_alone(tmp_path: Path) -> None:
    lines = [
        line("a"),
        line("b", {"prompt": ["x", "y"], "n": 2}),
        line("c", {"prompt": "x", "seed": 7}),
    ]

    def seeds(*chosen: str) -> dict[str, int]:
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        engine = FakeEngine(echo)
        Files(tmp_path, *chosen).run(engine)
        return {
            bytes(r.prompt_token_ids[1:]).decode() + str(r.choice): r.seed for r in engine.added
        }

    first = seeds(*lines)
    assert first == seeds(*lines)
    assert first["x0"] == 7  # the last to ask with this prompt
    assert first["y0"] == first["y1"]
    assert len({first["hi0"], first["y0"]}) == 2
    blank = seeds("", lines[1], "")
    assert blank["y0"] == first["y0"]


def test_a_second_run_does_what_is_left_and_nothing_twice(tmp_path: Path) -> None:
    lines = [line(f"r{number}", {"prompt": f"p{number}", "max_tokens": 9}) for number in range(40)]
    lines[7] = "{"
    lines[20] = line("r3")
    files = Files(tmp_path, *lines)
    files.run()
    whole = files.by_line()
    kept = files.output.read_bytes().splitlines(keepends=True)
    for cut in (0, 1, 17, 39, 40):
        files.output.write_bytes(b"".join(kept[:cut]) + kept[min(cut, 39)][:25])
        engine = FakeEngine(echo)
        progress = files.run(engine)
        assert files.output.read_bytes().startswith(b"".join(kept[:cut]))
        again = files.by_line()
        assert sorted(again) == sorted(whole) == list(range(1, 41))
        for number, record in again.items():
            assert record["custom_id"] == whole[number]["custom_id"]
            assert record["error"] == whole[number]["error"]
        assert (progress.finished_jobs, progress.failed_jobs) == (40, 2)
        assert len(engine.added) <= 40 - cut


def test_lines_may_be_added_between_runs(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"))
    files.run()
    files.write(line("a"), line("b"), line("a"))
    progress = files.run()
    assert (progress.finished_jobs, progress.failed_jobs) == (3, 1)
    assert files.by_line()[3]["error"]["code"] == "duplicate_custom_id"


def test_an_engine_that_dies_leaves_its_lines_to_the_next_run(tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
    lines = [line("short"), *(line(f"r{number}", body) for number in range(5))]
    files = Files(tmp_path, *lines)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        files.run(FakeEngine(echo, fail_at_step=10))
    assert [record["custom_id"] for record in files.results()] in (["short"], [])
    files.run()
    assert len(files.by_line()) == 6
    assert not re.search("engine_error|device is gone", files.output.read_text())


def test_a_row_the_engine_gives_up_is_a_500_of_its_line(tmp_path: Path) -> None:
    from jaxserve.engine.request import TokenEvent

    class Failing(FakeEngine):
        def _advance(self, request: Request) -> TokenEvent:
            if bytes(request.prompt_token_ids[1:]) == b"bad":
                self._free(request.request_id)
                return TokenEvent(request.request_id, (), None, "error", error="logits are NaN")
            return super()._advance(request)

    files = Files(tmp_path, line("a", {"prompt": "bad"}), line("b"))
    assert files.run(Failing(echo)).failed_jobs == 1
    response = files.by_line()[1]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "engine_error")
    assert files.by_line()[2]["response"]["status_code"] == 200
