"""Benchmarks as folders on disk: a few made-up questions under the real names, columns and configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

LISTED = """
the a cat dog bird river stone green blue walks sings runs over under near old small bright morning house
water tree finds sees takes gives slowly quickly never always because when after before light dark seven
"""
WORDS = LISTED.split()
QUESTIONS = 6

Row = dict[str, Any]


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def text(rng: random.Random, words: int) -> str:
    return " ".join(sentence(rng, 9) for _ in range(max(1, words // 9)))


def hellaswag(rng: random.Random) -> Row:
    first, second = sentence(rng, 8), sentence(rng, 4)
    return {
        "ind": rng.randrange(1000),
        "activity_label": "Walking",
        "ctx_a": first,
        "ctx_b": second,
        "ctx": f"{first} {second}",
        "endings": [sentence(rng, rng.randint(3, 9)) for _ in range(4)],
        "source_id": "activitynet~x",
        "split": "val",
        "split_type": "indomain",
        "label": str(rng.randrange(4)),
    }


def winogrande(rng: random.Random) -> Row:
    return {
        "sentence": f"The {rng.choice(WORDS)} saw the {rng.choice(WORDS)} since _ was {sentence(rng, 4)}",
        "option1": rng.choice(WORDS),
        "option2": rng.choice(WORDS),
        "answer": str(rng.randint(1, 2)),
    }


def openbookqa(rng: random.Random) -> Row:
    return {
        "id": f"7-{rng.randrange(1000)}",
        "question_stem": sentence(rng, 7),
        "choices": {"text": [sentence(rng, rng.randint(1, 5)) for _ in range(4)], "label": list("ABCD")},
        "answerKey": rng.choice("ABCD"),
    }


def arc(rng: random.Random) -> Row:
    count = rng.choice((3, 4, 4, 5))
    answers = [sentence(rng, rng.randint(1, 5)) for _ in range(count)]
    return {
        "id": f"MCAS_{rng.randrange(1000)}",
        "question": sentence(rng, 9),
        "choices": {"text": answers, "label": list("ABCDE")[:count]},
        "answerKey": rng.choice("ABC"),
    }


def lambada(rng: random.Random) -> Row:
    return {"text": text(rng, 40)[:-1]}


def mmlu(rng: random.Random) -> Row:
    return {
        "question": sentence(rng, 9),
        "subject": "anatomy",
        "choices": [sentence(rng, 3) for _ in range(4)],
        "answer": rng.randrange(4),
    }


def cmmlu(rng: random.Random) -> Row:
    answers = {letter: sentence(rng, 2) for letter in "ABCD"}
    return {"Unnamed: 0": 0, "Question": sentence(rng, 6), **answers, "Answer": rng.choice("ABCD")}


def math(rng: random.Random) -> Row:
    number = rng.randrange(100)
    return {
        "problem": sentence(rng, 8),
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"It is $\\boxed{{{number}}}$.",
    }


def wikitext(rng: random.Random) -> Row:
    return {"page": f" = {rng.choice(WORDS)} = \n {text(rng, 60)}"}


def write_data_set(
    root: Path, name: str, row: Callable[[random.Random], Row], configs: dict[str, Sequence[str]]
) -> None:
    """A data set as its repository has it: parquet files by configuration and split, and a README.md that
    says which belong together."""
    folder = root / name
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            rng = random.Random(f"{name} {config} {split}")
            file = folder / config / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            table = pyarrow.Table.from_pylist([row(rng) for _ in range(QUESTIONS)])
            pyarrow.parquet.write_table(table, file)
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_mirror(root: Path) -> Path:
    """The data sets of the papers' zero-shot tasks, of one MMLU and one CMMLU subject, and of MATH."""
    three = ("train", "validation", "test")
    write_data_set(root, "Rowan/hellaswag", hellaswag, {"default": three})
    write_data_set(root, "allenai/winogrande", winogrande, {"winogrande_xl": three})
    write_data_set(root, "allenai/openbookqa", openbookqa, {"main": three})
    write_data_set(root, "allenai/ai2_arc", arc, {"ARC-Easy": three, "ARC-Challenge": three})
    write_data_set(root, "EleutherAI/lambada_openai", lambada, {"default": ("test",)})
    write_data_set(root, "cais/mmlu", mmlu, {"anatomy": ("test", "validation", "dev")})
    write_data_set(root, "haonan-li/cmmlu", cmmlu, {"anatomy": ("test", "dev")})
    write_data_set(root, "EleutherAI/hendrycks_math", math, {"algebra": ("train", "test")})
    write_data_set(root, "EleutherAI/wikitext_document_level", wikitext, {"wikitext-2-raw-v1": three})
    write_math_500(root)
    return root


def write_math_500(root: Path) -> None:
    folder = root / "HuggingFaceH4/MATH-500"
    folder.mkdir(parents=True)
    rng = random.Random("MATH-500")
    rows = [
        {**math(rng), "answer": "1", "subject": "Algebra", "unique_id": str(place)}
        for place in range(QUESTIONS)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
