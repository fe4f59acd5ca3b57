"""iGSM against an oracle that reads the English and solves it, and knows nothing of how it was drawn."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.errors import UserError
from keyshift.tasks.igsm import IGSM, decode
from keyshift.tasks.igsm.grading import grade, read_problem
from keyshift.tasks.igsm.vocabulary import CATEGORIES, END, PAD, VOCABULARY, WORDS

SMALL: dict[str, int] = {
    "operations": 3,
    "test_operations": 4,
    "distractors": 2,
    "inputs": 2,
    "items": 2,
    "names": 4,
    "sequence_length": 128,
}
CATEGORY_OF = {name: category for category, names in CATEGORIES.items() for name in names.split("|")}


@dataclass
class Rule:
    """``number`` more than (or times) the sum, difference or sum of products in pairs of the inputs."""

    inputs: list[str]
    combined: str = "sum"
    number: int | None = None
    scaled: bool = False


@dataclass
class Told:
    """A problem as its text tells it: what each named quantity equals, and what is asked."""

    sentences: dict[str, str]
    asked: str

    def rule(self, name: str) -> Rule:
        owner, counted = name.split("'s ")
        if counted not in CATEGORIES:
            pattern = r"(?:(\d+)(?: (more than|times) )?)?(?:the (sum|difference) of )?(.*)"
            number, scaled, combined, inputs = re.fullmatch(pattern, self.sentences[name]).groups()  # type: ignore[union-attr]
            names = re.split(", | and ", inputs) if inputs else []
            return Rule(names, combined or "sum", int(number) if number else None, scaled == "times")
        owned = [other.split("'s ")[1] for other in self.sentences if other.startswith(f"{owner}'s ")]
        assert owned
        if CATEGORY_OF[owned[0]] == counted:
            return Rule([f"{owner}'s {item}" for item in owned])
        return Rule(
            [one for item in owned for one in (f"{owner}'s {item}", f"{item}'s {counted}")], "products"
        )

    def value(self, name: str) -> int:
        rule = self.rule(name)
        numbers = [self.value(one) for one in rule.inputs]
        if rule.combined == "products":
            numbers = [a * b for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        result = numbers[0] - numbers[1] if rule.combined == "difference" else sum(numbers)
        number = rule.number or 0
        return (number * result if rule.scaled else number + result) % 23

    def operations(self, name: str) -> int:
        rule = self.rule(name)
        return max(1, len(rule.inputs) + (rule.number is not None) - 1)

    def needed(self) -> set[str]:
        needed, waiting = set(), [self.asked]
        while waiting:
            needed.add(name := waiting.pop())
            waiting += [one for one in self.rule(name).inputs if one not in needed]
        return needed


def abstract(name: str) -> bool:
    return name.split("'s ")[1] in CATEGORIES


def read(text: str) -> Told:
    told, question = text.split("How many ")
    item, owner = re.fullmatch(r"(.*) does (.*) have\?", question.strip()).groups()  # type: ignore[union-attr]
    pairs = [sentence.split(" equals ") for sentence in told.strip().removesuffix(".").split(". ")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return Told(dict(pairs), f"{owner}'s {item}")


def check_solution(told: Told, solution: str) -> int:
    """Every step of the English solution; returns its number of operations."""
    number: dict[str, int] = {}
    made_of: dict[str, Counter[str]] = {}  # the quantities that a letter was computed from
    done: list[str] = []
    operations = 0
    for sentence in solution.removesuffix(".").split(". "):
        head, *steps = sentence.split("; ")
        name, letter = re.fullmatch(r"Define (.*) as ([a-zA-Z])", head).groups()  # type: ignore[union-attr]
        assert steps[-1].startswith(f"so {letter} = ")
        assert len(steps) == told.operations(name)
        for step in steps:
            target, first, *rest = step.removeprefix("so ").split(" = ")
            assert target not in number
            operands = first.split()
            numbers = " ".join(str(number.get(one, one)) for one in operands)
            number[target] = eval(numbers) % 23
            expected = [numbers, str(number[target])] if len(operands) == 3 else [numbers]
            assert rest == expected[: len(rest)]
            assert len(rest) == (0 if first.isdigit() else len(expected))
            made_of[target] = sum((made_of.get(one, Counter()) for one in operands), Counter())
        assert number[letter] == told.value(name)
        assert made_of[letter] == Counter(told.rule(name).inputs)
        made_of[letter] = Counter([name])
        done.append(name)
        operations += len(steps)
    assert done[-1] == told.asked
    assert len(done) == len(set(done))
    assert set(done) == told.needed()
    return operations


def encode(text: str) -> list[int]:
    """The tokens of English made of the vocabulary's words."""
    words = "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True))
    return [WORDS.index(word) for word in re.findall(words, text.replace("'s ", " "))]


def solve(told: Told) -> list[int]:
    """A solution of our own, depth first, with letters from z backwards."""
    letters = list("zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA")
    known: dict[str, str] = {}
    number: dict[str, int] = {}
    sentences: list[str] = []

    def compute(name: str) -> None:
        rule = told.rule(name)
        for one in rule.inputs:
            if one not in known:
                compute(one)
        letter = known[name] = letters.pop(0)
        sign = {"sum": "+", "difference": "-", "products": "*"}[rule.combined]
        terms = [known[one] for one in rule.inputs]
        todo = [(sign, term) for term in terms[1:]]
        if rule.number is not None:
            todo.append(("*" if rule.scaled else "+", str(rule.number)))
        if not terms:
            todo, terms = [], [str(rule.number)]
        left, steps = terms[0], []
        for place, (sign, right) in enumerate(todo):
            target = letter if place + 1 == len(todo) else letters.pop(0)
            shown = f"{number[left]} {sign} {number.get(right, right)}"
            number[target] = eval(shown) % 23
            steps.append(f"{target} = {left} {sign} {right} = {shown} = {number[target]}")
            left = target
        if not steps:
            number[letter] = told.value(name)
            steps = [f"{letter} = {left}" if left.isdigit() else f"{letter} = {left} = {number[letter]}"]
        sentences.append(f"Define {name} as {letter}; " + "; ".join([*steps[:-1], f"so {steps[-1]}."]))

    compute(told.asked)
    return encode(" ".join(sentences))


def split(batch: dict[str, Tensor]) -> list[tuple[list[int], list[int]]]:
    """Problem and solution of every row, without padding; checks where the labels are."""
    pairs = []
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        start = next(place for place, label in enumerate(labels) if label != -100)
        stop = tokens.index(END) + 1
        assert labels == [-100] * start + tokens[start:stop] + [-100] * (len(tokens) - stop)
        assert all(token == PAD for token in tokens[stop:])
        assert PAD not in tokens[:stop]
        assert WORDS[tokens[start - 1]] == "have?"
        pairs.append((tokens[:start], tokens[start:stop]))
    return pairs


sizes = st.fixed_dictionaries(
    {
        "least_operations": st.integers(1, 14),
        "operations": st.integers(1, 14),
        "test_operations": st.integers(1, 14),
        "distractors": st.integers(0, 6),
        "inputs": st.integers(1, 4),
        "abstract": st.integers(0, 8),
        "items": st.integers(1, 5),
        "names": st.integers(1, 12),
    }
)


def build(sizes: dict[str, int]) -> IGSM | None:
    """The task with the shortest rows that it accepts."""
    try:
        return IGSM(**sizes, sequence_length=0)
    except UserError as error:
        if (needed := re.search(r"take up to (\d+) tokens", str(error))) is None:
            return None
        return IGSM(**sizes, sequence_length=int(needed[1]))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1000), step=st.integers(0, 1000), sizes=sizes)
def test_solutions_are_right_necessary_and_of_the_stated_length(
    seed: int, step: int, sizes: dict[str, int]
) -> None:
    if (task := build(sizes)) is None:
        return
    for problem, solution in split(task.batch(seed, step, 6)):
        told = read(decode(problem))
        operations = check_solution(told, decode(solution))
        assert operations == sum(told.operations(name) for name in told.needed())
        assert task.least_operations <= operations <= task.operations
        unwritten = [name for name in told.needed() if abstract(name)]
        assert len(unwritten) <= task.abstract
        unneeded = len(told.sentences) - (len(told.needed()) - len(unwritten))
        assert 0 <= unneeded <= task.distractors
        assert all(len(told.rule(name).inputs) <= task.inputs for name in told.sentences)
        assert encode(decode(problem)) == problem
        assert encode(decode(solution)) == solution[:-1]
        told_by_us = read_problem(problem)
        assert told_by_us.value(told_by_us.asked) == told.value(told.asked)
        assert grade(told_by_us, solution) == (True, True)
        assert grade(told_by_us, [*solve(told), END]) == (True, True)


@pytest.mark.parametrize("inputs", [1, 2, 4])
def test_the_longest_problem_just_fits(inputs: int) -> None:
    task = IGSM(
        least_operations=6, operations=6, test_operations=6, inputs=inputs, distractors=1, sequence_length=200
    )
    lengths = [len(p) + len(s) for step in range(40) for p, s in split(task.batch(0, step, 50))]
    bound = task._longest_problem(6) + task._longest_solution(6)
    assert 0.8 * bound < max(lengths) <= bound


def test_numbers_of_operations_are_uniform() -> None:
    task = IGSM(least_operations=2, operations=6, test_operations=8, sequence_length=303)
    counts = Counter(decode(solution).count(";") for _, solution in split(task.batch(0, 0, 5000)))
    assert set(counts) == {2, 3, 4, 5, 6}
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 1000**0.5


def test_all_kinds_of_parameters_and_rules_occur() -> None:
    kinds: Counter[str] = Counter()
    for problem, _ in split(IGSM().batch(0, 0, 300)):
        told = read(decode(problem))
        kinds.update(f"{len(told.rule(name).inputs)} inputs" for name in told.sentences)
        for words in ("more than", "times", "the difference of", "the sum of"):
            kinds[words] += words in decode(problem)
        needed = [name for name in told.needed() if abstract(name)]
        kinds["products"] += sum(told.rule(name).combined == "products" for name in needed)
        kinds["totals"] += sum(told.rule(name).combined != "products" for name in needed)
        kinds["abstract question"] += abstract(told.asked)
        kinds["abstract input"] += any(
            abstract(one) for name in told.sentences for one in told.rule(name).inputs
        )
        kinds["first sentence answers"] += next(iter(told.sentences)) == told.asked
    assert len(kinds) == 14
    assert min(kinds.values()) >= 10, kinds


def test_the_problem_does_not_give_its_answer_away() -> None:
    task = IGSM(least_operations=4, operations=12)
    answers, guesses = [], {"first": 0, "last": 0, "most frequent": 0}
    for problem, solution in split(task.batch(3, 0, 6000)):
        answer = int(WORDS[solution[-3]])
        numbers = [int(word) for word in re.findall(r"\d+", decode(problem))]
        answers.append(answer)
        guesses["first"] += numbers[0] == answer
        guesses["last"] += numbers[-1] == answer
        guesses["most frequent"] += Counter(numbers).most_common(1)[0][0] == answer
    # A difference of equal numbers and a product with 0 are 0, so 0 is the answer a little more often.
    shares = np.bincount(answers, minlength=23) / len(answers)
    assert 1 / 23 < shares[0] < 0.075
    assert abs(shares[1:] - (1 - shares[0]) / 22).max() < 5 * (1 / 23 / 6000) ** 0.5
    # A constant reaches the answer unchanged through copies and sums of one: a little above chance.
    assert all(count / len(answers) < 0.075 for count in guesses.values()), guesses


def test_batches_are_pure_and_held_out_ones_are_others() -> None:
    for task in (IGSM(), IGSM(**SMALL)):
        first, again = task.batch(3, 7, 16), task.batch(3, 7, 16)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert all(tensor.shape == (16, task.sequence_length) for tensor in first.values())
        assert all(tensor.dtype == torch.int64 for tensor in first.values())
        assert first["input_ids"].max() < task.vocab_size == VOCABULARY
    trained = {tuple(row) for step in range(20) for row in IGSM().batch(0, step, 50)["input_ids"].tolist()}
    held_out = {tuple(row) for row in IGSM().batch(0, 0, 1000, "validation")["input_ids"].tolist()}
    assert len(trained) > 990
    assert not trained & held_out


def test_naming_every_number_is_no_answer() -> None:
    problem = read_problem(encode(PROBLEM))
    every = [f"Define Tote's Ruler as e; so e = {number}." for number in range(23)]
    assert grade(problem, [*encode(" ".join(every)), END]) == (False, False)
    assert grade(problem, [*encode(" ".join([every[3], *every])), END]) == (True, False)


def test_guessing_the_most_frequent_token_is_as_good_as_stated() -> None:
    task = IGSM()
    labels = task.batch(9, 0, 1000)["labels"]
    right = labels[labels != -100] == encode("=")[0]
    assert right.float().mean().item() == pytest.approx(task.chance_level(), abs=0.01)


PROBLEM = (  # Duffel's Stationery is its Ruler and its Eraser
    "Duffel's Ruler equals 5. Duffel's Eraser equals 3 more than Duffel's Ruler. Tote's Pencil equals 8. "
    "Satchel's Marker equals the difference of Duffel's Stationery and Duffel's Ruler. "
    "Tote's Ruler equals 2 times the sum of Duffel's Ruler and Satchel's Marker. "
    "How many Ruler does Tote have?"
)
STEPS = {
    "a": "Define Duffel's Ruler as a; so a = 5.",
    "b": "Define Duffel's Eraser as b; so b = 3 + a = 3 + 5 = 8.",
    "c": "Define Duffel's Stationery as c; so c = a + b = 5 + 8 = 13.",
    "d": "Define Satchel's Marker as d; so d = c - a = 13 - 5 = 8.",
    "e": "Define Tote's Ruler as e; f = a + d = 5 + 8 = 13; so e = 2 * f = 2 * 13 = 3.",
    "t": "Define Tote's Pencil as t; so t = 8.",
}


@pytest.mark.parametrize(
    ("order", "old", "new", "lenient", "strict"),
    [
        ("abcde", "", "", True, True),
        ("abcde", "b = 3 + a = 3 + 5", "b = a + 3 = 5 + 3", True, True),  # sums commute
        ("abcde", "f = a + d = 5 + 8", "f = d + a = 8 + 5", True, True),
        ("abcde", "c = a + b = 5 + 8", "c = b + a = 8 + 5", True, True),
        ("abcde", "d = c - a = 13 - 5 = 8", "d = a - c = 5 - 13 = 15", True, False),  # differences do not
        ("abcde", "3 + 5 = 8", "3 + 5 = 9", True, False),
        ("abcde", "3 + 5 = 8", "4 + 5 = 8", True, False),
        ("abcde", "2 * 13 = 3", "2 * 13 = 4", False, False),
        ("abcde", "f = a + d = 5 + 8 = 13", "f = a + b = 5 + 8 = 13", True, False),  # by luck the same number
        ("abcde", "; f = a + d = 5 + 8 = 13", "", True, False),
        ("abcde", "f = a + d = 5 + 8 = 13", "f = a + d = 13", True, False),
        ("abcde", "so e", "e", False, False),
        ("abcde", "as b", "as a", True, False),  # a letter twice
        ("abcde", "so a = 5", "so a = 5 = 5", True, False),
        ("abcde", "so a = 5.", "so a = 5 5.", True, False),
        ("abcde", "so a = 5.", "so a = .", True, False),
        ("abcde", "so a = 5.", "so a.", True, False),
        ("abcde", "so a = 5.", "so a = 5 =.", True, False),
        ("abcde", "so a = 5.", "so a = 5;.", True, False),
        ("abcde", "so a = 5.", "so a = 5..", True, False),
        ("abcde", "so a = 5.", "", True, False),
        ("abcde", "Define Duffel's Ruler as a", "Define Duffel's Compass as a", True, False),
        ("abcde", "Define Duffel's Ruler as a", "Define Duffel's Duffel's Ruler as a", True, False),
        ("abcde", "Define Duffel's Ruler as a", "Duffel's Ruler as a", True, False),
        ("acde", "", "", True, False),  # b is used and never computed
        ("bacde", "", "", True, False),  # a is used before
        ("abced", "", "", True, False),
        ("abcdet", "", "", True, False),  # right, then more
        ("atbcde", "", "", True, False),  # an unneeded one
        ("abcdee", "", "", True, False),
        ("abcd", "", "", False, False),  # the right number of another quantity
        ("abcde", "Define Tote's Ruler as e", "Define Tote's Pencil as e", False, False),
        ("t", "so t = 8", "so t = 3", False, False),
        ("", "", "", False, False),
    ],
)
def test_solutions_are_judged_by_both_rules(
    order: str, old: str, new: str, lenient: bool, strict: bool
) -> None:
    text = " ".join(STEPS[step] for step in order)
    assert old in text
    problem = read_problem(encode(PROBLEM))
    solution = encode(text.replace(old, new, 1))
    assert grade(problem, [*solution, END]) == (lenient, strict)
    assert grade(problem, [*solution, END, PAD, *solution]) == (lenient, strict)
    assert grade(problem, solution) == (lenient, False)  # it never stops


def test_a_solution_that_is_cut_off_has_no_answer_yet() -> None:
    problem = read_problem(encode(PROBLEM))
    solution = encode(" ".join(STEPS[step] for step in "abcde"))
    for stop in range(len(solution)):
        assert grade(problem, solution[:stop]) == (False, False)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
def test_a_solution_with_one_token_changed_fails_the_strict_rule(seed: int, data: Any) -> None:
    problem, solution = split(IGSM(least_operations=3, operations=8).batch(seed, 0, 1))[0]
    place = data.draw(st.integers(0, len(solution) - 1))
    token = data.draw(st.integers(0, VOCABULARY - 1).filter(lambda token: token != solution[place]))
    for instead in ([token], [], [token, solution[place]]):
        changed = [*solution[:place], *instead, *solution[place + 1 :]]
        assert not grade(read_problem(problem), changed)[1]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
def test_anything_a_model_says_can_be_judged(tokens: list[int]) -> None:
    assert grade(read_problem(encode(PROBLEM)), tokens)[1] is False


class Solver:
    """What `IGSM.examine` calls of a model, giving the oracle's solutions, every third spoiled."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[int] = []

    def generate(self, ids: Tensor, attention_mask: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        answers = []
        for row, mask in zip(ids, attention_mask, strict=True):
            assert mask.sum() == (row != PAD).sum() == mask.flip(0).cumprod(0).sum()  # padded on the left
            told = read(decode(row.tolist()))
            solution = [*solve(told), END]
            assert len(solution) <= max_new_tokens
            self.asked.append(sum(told.operations(name) for name in told.needed()))
            if len(self.asked) % 3 == 0:
                solution = [*solution[:-1], *encode("Define"), END]
            answers.append(solution + [PAD] * (max_new_tokens + 1 - len(solution)))
        return torch.cat((ids, torch.tensor(answers)), dim=1)


def test_the_examination_asks_problems_of_the_two_lengths() -> None:
    model = Solver()
    scores = IGSM(examined=120, **SMALL).examine(model)
    assert model.asked == [3] * 120 + [4] * 120
    assert scores == {
        "in-range lenient": 1.0,
        "in-range strict": pytest.approx(2 / 3),
        "test lenient": 1.0,
        "test strict": pytest.approx(2 / 3),
    }


@pytest.mark.parametrize("shift", ["none", "kv"])
def test_an_untrained_model_solves_nothing(shift: str) -> None:
    torch.manual_seed(0)
    config = KeyshiftConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        shift=shift,
    )
    model = KeyshiftForCausalLM(config).eval()
    task = IGSM(examined=60, **SMALL)
    scores = task.examine(model)
    assert set(scores.values()) == {0.0}
    assert scores == task.examine(model)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"operations": 0}, "operations=0 must be from 1 to 52"),
        ({"operations": 53}, "operations=53 must be from 1 to 52"),
        ({"test_operations": 53}, "test_operations=53"),
        ({"least_operations": 13}, "least_operations=13 must be from 1 to 12"),
        ({"distractors": -1}, "distractors=-1 must be at least 0"),
        ({"inputs": 5}, "inputs=5 must be from 1 to 4"),
        ({"abstract": -1}, "abstract=-1"),
        ({"names": 13}, "names=13 must be from 1 to 12"),
        ({"items": 5, "names": 4}, "items=5 must be from 1 to 4"),
        ({"examined": 0}, "examined=0 must be at least 1"),
        ({"items": 2}, r"items=2 names 12 parameters.*may need 20; raise items"),
        ({"sequence_length": 400}, r"sequence_length=400 is too short: 15 operations.*up to 506 tokens"),
    ],
)
def test_sizes_that_do_not_work_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        IGSM(**sizes)
