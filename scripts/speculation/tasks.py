"""Named tasks for measuring speculation: from copying word by word to text that nothing foretells.

Each is what a user would ask, as chat messages; all text here is our own.
"""

from dataclasses import dataclass

_PASSAGE = """The harbour master keeps three ledgers. The first lists every vessel that enters the \
bay, with its name, its length and the hour of its arrival. The second lists what each vessel \
unloads, crate by crate, with the weight and the owner of every crate. The third lists the debts: \
who owes the harbour for a berth, for water, for a pilot or for a repair. At the end of each month \
the harbour master copies the third ledger by hand and sends the copy to the town council, which \
decides whose debts are forgiven and whose boats may not leave."""

_CODE = '''def moving_average(values, window):
    """The mean of each run of `window` values in a row."""
    if window < 1:
        raise ValueError("window must be at least 1")
    total = 0.0
    means = []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            means.append(total / window)
    return means
'''


@dataclass(frozen=True)
class Task:
    """copies: whether the answer consists mostly of text of the prompt."""

    name: str
    prompt: str
    copies: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]


TASKS = (
    Task(
        "proofread",
        "Fix the spelling in this text and return the whole text:\n\n"
        + _PASSAGE.replace("ledger", "leger"),
        True,
    ),
    Task(
        "edit",
        "Rewrite this code, adding type hints:\n\n```python\n" + _CODE + "```",
        True,
    ),
    Task("facts", "List ten facts about rivers, one line each.", False),
    Task("story", "Tell a short story about a clockmaker who finds a letter in a clock.", False),
    Task("advice", "How should I prepare for a long hike in the mountains in spring?", False),
)
