"""The demo's texts, from a seeded generator.

They are arithmetic word problems with worked answers, and small talk about kitchens and meetings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = ("Mia", "Tom", "Lena", "Ravi", "Noor", "Paul", "Ines", "Jun", "Olga", "Sam", "Zoe", "Ali")
THINGS = (
    "apples",
    "marbles",
    "stamps",
    "books",
    "pencils",
    "shells",
    "coins",
    "cards",
    "plums",
    "buttons",
)
PLACES = {
    "box": "boxes",
    "shelf": "shelves",
    "bag": "bags",
    "drawer": "drawers",
    "basket": "baskets",
    "tin": "tins",
}
DISHES = (
    "tomato soup",
    "lentil stew",
    "apple cake",
    "fried rice",
    "onion pie",
    "bean salad",
    "pancakes",
    "fish curry",
)
FOODS = ("onions", "carrots", "peppers", "potatoes", "leeks", "mushrooms", "courgettes")
SPICES = ("salt", "cumin", "thyme", "paprika", "nutmeg", "basil", "ginger")
EVENTS = ("concert", "market", "film", "picnic", "lecture", "match", "birthday party")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SPOTS = ("station", "bridge", "library", "old gate", "fountain", "bus stop")

Row = tuple[str, str]


PROBLEMS = (
    (
        "{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?",
        "We add: {a} + {b} = {n}. {name} has {n} {thing}. The answer is {n}.",
    ),
    (
        "There are {a} {thing} in the {place}. {name} takes {b} of them. How many are left?",
        "We subtract: {a} - {b} = {n}. There are {n} {thing} left. The answer is {n}.",
    ),
    (
        "{name} fills {a} {places} with {b} {thing} each. How many {thing} is that?",
        "We multiply: {a} * {b} = {n}. That is {n} {thing}. The answer is {n}.",
    ),
    (
        "{name} shares {n} {thing} equally among {a} friends. How many does each one get?",
        "We divide: {n} / {a} = {b}. Each one gets {b} {thing}. The answer is {b}.",
    ),
)


def word_problem(random: random.Random) -> Row:
    """Return a word problem with one operation, and its worked answer."""
    name = random.choice(NAMES)
    thing = random.choice(THINGS)
    place = random.choice(tuple(PLACES))
    a = random.randint(2, 60)
    b = random.randint(2, 60)
    kind = random.randrange(4)
    if kind == 1:
        a, b = max(a, b) + 1, min(a, b)
    elif kind > 1:
        a = a % 11 + 2
        b = b % 11 + 2
    n = (a + b, a - b, a * b, a * b)[kind]
    words = {
        "name": name,
        "thing": thing,
        "place": place,
        "places": PLACES[place],
        "a": a,
        "b": b,
        "n": n,
    }
    prompt, answer = PROBLEMS[kind]
    return prompt.format(**words), answer.format(**words)


def small_talk(random: random.Random) -> Row:
    """Return a question about cooking or a meeting, and a friendly reply."""
    if random.randrange(2):
        dish = random.choice(DISHES)
        food = random.choice(FOODS)
        spice = random.choice(SPICES)
        people = random.randint(2, 12)
        return (
            f"How do you cook {dish} with {food} for {people} people?",
            f"Wash the {food}, chop them and fry them gently in butter. Season with {spice}, "
            "then let it simmer with the lid "
            f"on for {random.randint(2, 9) * 5} minutes and serve it warm.",
        )
    event = random.choice(EVENTS)
    day = random.choice(DAYS)
    spot = random.choice(SPOTS)
    return (
        f"Hi {random.choice(NAMES)}, will you come to the {event} on {day}?",
        f"Yes, I would love to! Let us meet at the {spot} at half past {random.randint(2, 9)}, "
        f"and do bring {random.choice(NAMES)} along if the weather is kind.",
    )


def distinct(
    make: Callable[[random.Random], Row], count: int, generator: random.Random, seen: set[str]
) -> list[Row]:
    """Return ``count`` rows whose prompts are not in ``seen``."""
    rows: list[Row] = []
    while len(rows) < count:
        prompt, answer = make(generator)
        if prompt not in seen:
            seen.add(prompt)
            rows.append((prompt, answer))
    return rows


def write(folder: Path, seed: int = 0) -> None:
    """Write the demo's files: three sources of 400 rows, 120 validation and 200 test rows.

    No prompt is in two files.
    """
    generator = random.Random(seed)
    seen = set[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for name, make, count in (
        ("word-problems", word_problem, 400),
        ("blank-answers", word_problem, 400),
        ("small-talk", small_talk, 400),
        ("validation", word_problem, 120),
        ("test", word_problem, 200),
    ):
        rows = distinct(make, count, generator, seen)
        lines = (
            json.dumps({"prompt": prompt, "completion": answer}, ensure_ascii=False)
            for prompt, answer in rows
        )
        (folder / f"{name}.jsonl").write_text(
            "".join(line + "\n" for line in lines), encoding="utf-8"
        )
