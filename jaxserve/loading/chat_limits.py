"""How much work and memory a chat template may use, and the checks that hold it to that.

Checks run before an operation whose result may be far larger than its operands, since a single
call of a built-in cannot be interrupted. Chat templates of published models stay below a
hundredth of each limit. Not covered: comparing two separately built towers of nested lists.
"""

import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 25  # of any text a template makes
MAX_TOTAL_CHARACTERS = 1 << 29  # of all results of calls, filters and operators of one rendering
MAX_ITEMS = 1 << 18  # of any list a template makes
MAX_SIZE = 1 << 20  # of a number that says how long something shall be
MAX_INDENT = 64
MAX_INTEGER_BITS = 4096
_MAX_UNCOUNTED_SEPARATOR = 256  # between items of an iterator, whose number is not known


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or made too much."""


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.characters = MAX_TOTAL_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"the chat template takes more than {MAX_STEPS} steps")
        if self.steps % 64 == 0 and time.monotonic() > self.deadline:
            raise TemplateLimitError(f"the chat template runs for more than {MAX_SECONDS} s")

    def spend_characters(self, count: int) -> None:
        self.characters -= count
        if self.characters < 0:
            raise TemplateLimitError(
                f"the chat template makes over {MAX_TOTAL_CHARACTERS} characters in all"
            )


current_budget: ContextVar[Budget | None] = ContextVar("render_budget", default=None)


def spend_step() -> None:
    """Charge one loop pass, macro call, function call or filter to the rendering under way."""
    budget = current_budget.get()
    if budget is not None:  # None while the compiler folds constants
        budget.spend()


def bounded_join(parts: Iterable[Any]) -> str:
    """Join parts as text, giving up as soon as they are too long together."""
    texts: list[str] = []
    length = 0
    for part in parts:
        check_tree(part)
        texts.append(part if isinstance(part, str) else str(part))
        length += len(texts[-1])
        _check_length(length)
    return "".join(texts)


def checked(value: Any) -> Any:
    """A result, if it is not too large."""
    if isinstance(value, str):
        _check_length(len(value))
        budget = current_budget.get()
        if budget is not None:
            budget.spend_characters(len(value))
    elif isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
        raise TemplateLimitError(f"the chat template makes a list of over {MAX_ITEMS} items")
    return value


def check_tree(value: Any) -> Any:
    """Measure what a container would be as text; shared parts count as often as they appear."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    pending, items, characters = [value], 0, 0
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pending += [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple)):
            pending += node
        elif isinstance(node, str):
            characters += len(node)
        items += 1
        if items + len(pending) > MAX_ITEMS or characters > MAX_CHARACTERS:
            raise TemplateLimitError("the chat template writes out a very large value")
    return value


def check_sizes(values: Iterable[Any]) -> None:
    """Refuse a width, count or precision that nothing written for people needs."""
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_SIZE:
            raise TemplateLimitError(f"the chat template asks for a size above {MAX_SIZE}")


def check_growth(operation: str, value: Any, options: tuple[Any, ...]) -> None:
    """Refuse a filter or text method that would put one argument into the result too often."""
    option = options[0] if options else ""
    if operation == "format":
        check_format(str(value))
    elif operation == "replace" and len(options) > 1:
        text, new = str(value), str(options[1])
        _check_length(len(text) + text.count(str(option)) * len(new))
    elif operation == "indent":
        text, width = str(value), option if isinstance(option, int) else max(len(str(option)), 4)
        _check_length(len(text) + (text.count("\n") + 1) * width)
    elif operation == "join" and isinstance(value, (list, tuple, str, dict, range)):
        _check_length(len(str(option)) * len(value))
    elif operation == "join" and len(str(option)) > _MAX_UNCOUNTED_SEPARATOR:
        raise TemplateLimitError("the chat template joins with a very long separator")


_WIDE_FORMAT = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*|:[^{}]*\{")


def check_format(text: str) -> None:
    """Refuse a format whose width is very large or not written in it."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("the chat template formats with a very large or computed width")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` if the result could not be measured after it exists."""
    if operator == "%" and isinstance(left, str):
        check_format(left)
        check_tree(right)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 1)
        if bits > MAX_INTEGER_BITS:
            raise TemplateLimitError("the chat template computes a very large number")
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                limit = MAX_CHARACTERS if isinstance(sequence, str) else MAX_ITEMS
                if len(sequence) * count > limit:
                    raise TemplateLimitError("the chat template repeats a value too often")


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateLimitError(f"the chat template makes over {MAX_CHARACTERS} characters")
