"""What can never run, said before it is queued."""

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.request import Request
from jaxserve.errors import InvalidRequestError


def check_prompt(num_prompt_tokens: int, max_model_len: int, pool: KVManager) -> None:
    """Raise InvalidRequestError for a prompt that could never run, even alone."""
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens; give at least one", "prompt")
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens and the context length is "
            f"{max_model_len} tokens of prompt and output together; shorten the "
            f"prompt to at most {max_model_len - 1} tokens",
            "prompt",
        )
    if num_prompt_tokens > pool.capacity_tokens:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens and the KV pool holds "
            f"{pool.capacity_tokens} ({pool.num_pages - 1} pages of {pool.page_size} tokens, "
            "one more is reserved); shorten the prompt or give the pool more memory",
            "prompt",
        )


def longest_allowed(request: Request, most: int) -> int:
    """Tokens of prompt and output at which a request ends; at most `most`.

    Raises InvalidRequestError if it has as many already.
    """
    num_prompt = len(request.prompt_token_ids)
    longest = min(num_prompt + request.max_tokens, most)
    if request.num_tokens >= longest:
        raise InvalidRequestError(
            f"the request has {len(request.output_token_ids)} output tokens and may have "
            f"{longest - num_prompt}; ask for more tokens",
            "max_tokens",
        )
    return longest
