"""The words of iGSM problems, one token each, and how tokens read as English."""

from __future__ import annotations

from collections.abc import Iterable

MODULUS = 23

CATEGORIES = {
    "School": "Riverview High|Central High|Oakwood Academy|Lakeside Prep|Hillcrest College|Maple Grove|"
    "Northgate Hall|Summit Charter|Westbrook School|Cedar Ridge|Harbor View|Pinecrest Lyceum",
    "Classroom": "Film Studio|Dance Studio|Chemistry Lab|Music Room|Art Workshop|Robotics Lab|"
    "Lecture Hall|Pottery Room|Language Lab|Reading Room|Drama Stage|Map Room",
    "Backpack": "School Daypack|Messenger Backpack|Canvas Rucksack|Hiking Pack|Laptop Bag|Duffel|"
    "Satchel|Sling Bag|Tote|Drawstring Bag|Camera Bag|Rolling Pack",
    "Stationery": "Pencil|Eraser|Ruler|Notebook|Stapler|Marker|Compass|Protractor|Glue Stick|Sharpener|"
    "Highlighter|Fountain Pen",
}
"""From the top of the hierarchy down: a school owns classrooms, a classroom backpacks, and so on."""

LAYERS = len(CATEGORIES)
NAMES = 12
"""Names per category."""

# fmt: off
_GRAMMAR = [
    "equals", "more than", "times", "the sum of", "the difference of", ",", "and", ".", "How many", "does",
    "have?", "Define", "as", ";", "so", "=", "+", "-", "*",
]
# fmt: on

PAD, END, NUMBER = 0, 1, 2
LETTER = NUMBER + MODULUS
LETTERS = 52
(
    EQUALS,
    MORE_THAN,
    TIMES,
    SUM_OF,
    DIFFERENCE_OF,
    COMMA,
    AND,
    STOP,
    HOW_MANY,
    DOES,
    HAVE,
    DEFINE,
    AS,
    SEMICOLON,
) = range(LETTER + LETTERS, LETTER + LETTERS + 14)
SO, IS, PLUS, MINUS, STAR = range(SEMICOLON + 1, SEMICOLON + 6)
CATEGORY = STAR + 1
NAME = CATEGORY + LAYERS
VOCABULARY = NAME + LAYERS * NAMES

WORDS = [
    "<pad>",
    "<end>",
    *map(str, range(MODULUS)),
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    *_GRAMMAR,
    *CATEGORIES,
    *(name for names in CATEGORIES.values() for name in names.split("|")),
]


def decode(tokens: Iterable[int]) -> str:
    """The English of some tokens, without padding and end; a name that follows a name belongs to it."""
    text, previous = "", PAD
    for token in tokens:
        if token in (PAD, END):
            continue
        owned = token >= CATEGORY and previous >= NAME
        if text and token not in (COMMA, STOP, SEMICOLON):
            text += "'s " if owned else " "
        text += WORDS[token]
        previous = token
    return text
