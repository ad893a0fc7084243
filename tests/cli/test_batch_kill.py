"""kill -9 in the middle of a real batch, twice: no line lost, none repeated, all the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_files import model_metadata, to_gguf, tokenizer_metadata, write_gguf
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NUM_LINES = 100
WAIT = 240.0  # seconds for a start and a few lines, on a machine that may be busy


def write_model(folder: Path) -> Path:
    metadata = model_metadata(LLAMA) | tokenizer_metadata()
    metadata["tokenizer.chat_template"] = TEMPLATE
    return write_gguf(folder / "tiny.gguf", "llama", metadata, to_gguf(LLAMA, tiny_tensors(LLAMA)))


def input_lines() -> list[str]:
    """Greedy and drawn requests of both kinds and many lengths, and three that must fail."""
    lines = []
    for number in range(NUM_LINES - 3):
        body: dict[str, Any] = {"max_tokens": 8 + number % 25, "temperature": number % 3 / 2}
        if number % 2:
            body["messages"] = [{"role": "user", "content": f"question {number}"}]
        else:
            body["prompt"] = [f"text {number}"] * (1 + number % 5 // 4)
        kind = "chat/completions" if number % 2 else "completions"
        fields = {"custom_id": f"r{number}", "method": "POST", "url": f"/v1/{kind}", "body": body}
        lines.append(json.dumps(fields))
    duplicate = lines[3]
    too_long = lines[0].replace("text 0", "x" * 300)
    return [*lines[:30], duplicate, *lines[30:60], "{", *lines[60:], too_long.replace("r0", "long")]


class Batch:
    """The command on one input, in processes of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder)
        self.source = folder / "in.jsonl"
        self.source.write_text("\n".join(input_lines()) + "\n")

    def start(self, out: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "jaxserve", "batch", self.source, out]
        command += ["--model", self.model, "--max-batch-rows", "2", "--max-batch-tokens", "64"]
        env = os.environ | {"JAXSERVE_HOME": str(self.folder / "home"), "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)

    def run(self, out: Path) -> tuple[int, str]:
        process = self.start(out)
        _, said = process.communicate(timeout=WAIT)
        return process.returncode, said

    def kill_at(self, out: Path, num_results: int) -> int:
        """Kill the run as soon as there are so many results; how many there are then."""
        process = self.start(out)
        deadline = time.monotonic() + WAIT
        while count(out) < num_results:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        return count(out)


def count(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def read(out: Path) -> dict[str, Any]:
    """The results by id, without what differs between two runs."""
    results = {}
    for text in out.read_text().splitlines():
        record = json.loads(text)
        assert record["id"] not in results
        if record["response"] is not None:
            body = record["response"]["body"]
            for key in ("id", "created"):
                body.pop(key, None)
            body.get("usage", {}).pop("prompt_tokens_details", None)  # what ran just before
        results[record["id"]] = record
    return results


@pytest.mark.slow
def test_killed_again_and_again_a_batch_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    whole = tmp_path / "whole.jsonl"
    status, said = batch.run(whole)
    assert status == 1, said
    assert f"{NUM_LINES - 3} of {NUM_LINES} lines answered, 3 failed" in said

    out = tmp_path / "out.jsonl"
    for num_results in (1, 55):
        before = out.read_bytes() if out.exists() else b""
        done = batch.kill_at(out, num_results)
        assert done < NUM_LINES
        assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
        with out.open("ab") as file:  # a line that was being written
            file.write(b'{"id":"batch_req_1_0123')
    status, said = batch.run(out)
    assert status == 1, said
    assert f"has {done} results; {NUM_LINES - done} lines are left" in said
    assert f"{NUM_LINES - 3} of {NUM_LINES} lines answered, 3 failed" in said

    results = read(out)
    assert len(results) == NUM_LINES
    assert results == read(whole)
