"""Write a model's own answers to many short prompts, as a text for `checkpoints_tools train-draft`.

Usage: python scripts/write_answers.py MODEL OUTPUT [--documents 600] [--tokens 256]
       [--temperature 0.7] [--seed 0] [--threads N]

A draft guesses what its target says, so that is the best text to learn from. Half of the answers
are greedy. Documents (the prompt as the model's chat template writes it, and the answer) are
separated by form feeds.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from speculation.prompts import training_prompts

from jaxserve import LLM, SamplingParams
from jaxserve.engine.read_prompt import read_conversation


def documents(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> Iterator[str]:
    """Prompt and answer of each, as they end."""
    decode = llm.get_tokenizer().decode
    read = [read_conversation(llm.model, [{"role": "user", "content": p}], {}) for p in prompts]
    jobs = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in read]
    for index, result in llm.stream_results(jobs, params, use_tqdm=True):
        ids = [*read[index].token_ids, *result.outputs[0].token_ids]
        yield decode(ids, skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    prompts = training_prompts(args.documents, args.seed)
    params = [
        SamplingParams(
            temperature=args.temperature if index % 2 else 0.0, max_tokens=args.tokens, seed=index
        )
        for index in range(len(prompts))
    ]
    with (
        LLM(args.model, max_batch_rows=32, max_queue=len(prompts), threads=args.threads) as llm,
        args.output.open("w", encoding="utf-8") as file,
    ):
        for text in documents(llm, prompts, params):
            file.write(text + "\n\f\n")
            file.flush()
    print(f"{len(prompts)} answers in {args.output}")


if __name__ == "__main__":
    main()
