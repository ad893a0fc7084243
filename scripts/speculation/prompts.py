"""Things to ask a small chat model: what its own answers, for training drafts, are answers to.

Every kind of request with every subject; the subjects that are held out are in no training prompt.
"""

import itertools
import random

_KINDS = (
    "Explain {} to a child.",
    "What is {}?",
    "Why does {} matter?",
    "Write a short paragraph about {}.",
    "List five facts about {}.",
    "Give three tips for somebody who is new to {}.",
    "Write a short story in which {} plays a part.",
    "What are common mistakes with {}, and how does one avoid them?",
    "Describe the history of {} in a few sentences.",
    "Compare {} of today with that of a hundred years ago.",
    "Write a friendly letter that is about {}.",
    "How does one get started with {}?",
    "Name the advantages and the disadvantages of {}.",
    "Write a dialogue between a teacher and a student about {}.",
    "What would the world be without {}?",
    "Summarise what an expert would say about {}.",
)

_SUBJECTS = (
    "bread baking", "railways", "the moon", "bees", "photography", "chess", "earthquakes",
    "swimming", "libraries", "the human heart", "bicycles", "democracy", "volcanoes", "tea",
    "software testing", "gardening", "whales", "money", "the violin", "maps", "vaccines",
    "running", "poetry", "bridges", "electricity", "dogs", "rainforests", "fractions", "clocks",
    "recycling", "dreams", "the Roman Empire", "painting", "solar panels", "football",
    "the alphabet", "antibiotics", "islands", "friendship", "computers", "coffee", "ice",
    "sailing", "newspapers", "cooking", "black holes", "honesty", "dinosaurs", "language learning",
    "sleep", "the printing press", "deserts", "music theory", "wheat", "public transport",
    "thunderstorms", "museums", "knots", "teamwork", "the Silk Road",
)  # fmt: skip

_HELD_OUT = (
    "lighthouses", "carpentry", "the immune system", "rivers", "theatre", "probability",
    "camping", "glass", "elections", "owls",
)  # fmt: skip


def training_prompts(count: int, seed: int) -> list[str]:
    """`count` different ones, or all there are, in an order that the seed decides."""
    return _some(_SUBJECTS, count, seed)


def held_out_prompts(count: int, seed: int) -> list[str]:
    """The same about subjects that no training prompt names."""
    return _some(_HELD_OUT, count, seed)


def _some(subjects: tuple[str, ...], count: int, seed: int) -> list[str]:
    every = [kind.format(subject) for kind, subject in itertools.product(_KINDS, subjects)]
    random.Random(seed).shuffle(every)
    return every[:count]
