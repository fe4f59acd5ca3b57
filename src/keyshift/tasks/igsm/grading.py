"""Reading a problem back from its tokens, and judging a solution by two rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keyshift.tasks.igsm.vocabulary import (
    AS,
    CATEGORY,
    DEFINE,
    DIFFERENCE_OF,
    DOES,
    END,
    EQUALS,
    HAVE,
    HOW_MANY,
    IS,
    LETTER,
    LETTERS,
    MINUS,
    MODULUS,
    NAME,
    NAMES,
    NUMBER,
    PLUS,
    SEMICOLON,
    SO,
    STAR,
    STOP,
    TIMES,
)

Parameter = tuple[int, int]
"""The tokens of an owner and of what is counted: an item, or a category."""
Formula = dict[tuple[Parameter, ...], int]
"""A polynomial mod 23: the coefficient of each product of parameters; () is the constant term."""


@dataclass
class Problem:
    """What the text of a problem says."""

    asked: Parameter
    formulas: dict[Parameter, Formula] = field(default_factory=dict)
    """Of the parameters that the problem gives, in terms of others."""
    operations: dict[Parameter, int] = field(default_factory=dict)

    def formula(self, parameter: Parameter) -> Formula:
        """Of an abstract parameter too: over the items that its owner has.

        Raises:
            KeyError: the problem says nothing of it.
        """
        self._infer(parameter)
        return self.formulas[parameter]

    def _infer(self, parameter: Parameter) -> None:
        owner, counted = parameter
        if parameter in self.formulas or not CATEGORY <= counted < NAME:
            return
        items = [item for of, item in self.formulas if of == owner and item >= NAME]
        if not items:
            return
        nearest = counted == CATEGORY + (items[0] - NAME) // NAMES
        self.formulas[parameter] = {
            tuple(sorted([(owner, item)] if nearest else [(owner, item), (item, counted)])): 1
            for item in items
        }
        self.operations[parameter] = max(1, len(items) * (1 if nearest else 2) - 1)

    def value(self, parameter: Parameter) -> int:
        """Mod 23.

        Raises:
            KeyError: the problem does not determine it.
        """
        total = 0
        for factors, coefficient in self.formula(parameter).items():
            for factor in factors:
                coefficient *= self.value(factor)
            total += coefficient
        return total % MODULUS

    def needed(self) -> set[Parameter]:
        """The asked parameter and all that it depends on."""
        needed: set[Parameter] = set()
        waiting = [self.asked]
        while waiting:
            if (parameter := waiting.pop()) not in needed:
                needed.add(parameter)
                waiting.extend(factor for factors in self.formula(parameter) for factor in factors)
        return needed


def read_problem(tokens: Sequence[int]) -> Problem:
    """The problem in the tokens of its sentences and question, which are taken to be well-formed."""
    *sentences, question = _split(tokens, STOP)
    assert [question[place] for place in (0, 2, 4)] == [HOW_MANY, DOES, HAVE]
    problem = Problem(asked=(question[3], question[1]))
    for owner, item, equals, *rest in sentences:
        assert equals == EQUALS
        constant = rest[0] - NUMBER if rest[0] < LETTER else None
        names = [token for token in rest if token >= CATEGORY]
        inputs = list(zip(names[::2], names[1::2], strict=True))
        factor = constant if constant is not None and TIMES in rest else 1
        formula: Formula = {(): constant} if constant and TIMES not in rest else {}
        for place, parameter in enumerate(inputs):
            minus = place == 1 and DIFFERENCE_OF in rest
            formula[(parameter,)] = (-factor if minus else factor) % MODULUS
        problem.formulas[(owner, item)] = formula
        problem.operations[(owner, item)] = max(1, len(inputs) + (constant is not None) - 1)
    return problem


def grade(problem: Problem, solution: Sequence[int]) -> tuple[bool, bool]:
    """Whether the tokens of a solution pass the lenient and the strict rule of `IGSM`."""
    complete = END in solution
    *sentences, rest = _split(solution[: solution.index(END)] if complete else solution, STOP)
    head, answer = [DEFINE, *problem.asked, AS], [IS, NUMBER + problem.value(problem.asked)]
    asked = next((sentence for sentence in sentences if sentence[:4] == head), [])
    *_, last = _split(asked, SEMICOLON)
    lenient = last[-2:] == answer and last[:2] == [SO, *asked[4:5]]
    return lenient, complete and not rest and _Reader(problem).reads(sentences)


def _split(tokens: Sequence[int], at: int) -> list[list[int]]:
    """The parts between the tokens ``at``; one more than there are of them, and some may be empty."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == at:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


class _Reader:
    """Follows a solution step by step: what each letter stands for."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.meaning: dict[int, tuple[Formula, int]] = {}
        """Of a letter: its formula over parameters, and the number it has been given."""

    def reads(self, sentences: list[list[int]]) -> bool:
        """All is right, and exactly the needed parameters are computed, each once, the asked one last."""
        done: list[Parameter] = []
        for sentence in sentences:
            if (parameter := self._sentence(sentence)) is None:
                return False
            done.append(parameter)
        asked = done[-1:] == [self.problem.asked]
        return asked and len(set(done)) == len(done) and set(done) == self.problem.needed()

    def _sentence(self, tokens: list[int]) -> Parameter | None:
        """The parameter that "Define … as p; …; so p = …" computes, or None if anything in it is wrong."""
        head, *steps = _split(tokens, SEMICOLON)
        if len(head) != 5 or head[0] != DEFINE or head[3] != AS or not self._fresh(head[4]):
            return None
        parameter, letter = (head[1], head[2]), head[4]
        try:
            formula = self.problem.formula(parameter)
        except KeyError:
            return None
        if len(steps) != self.problem.operations[parameter] or steps[-1][:2] != [SO, letter]:
            return None
        for step in steps[:-1]:
            if not step or step[0] == letter or not self._step(step):
                return None
        if not self._step(steps[-1][1:]) or self.meaning[letter][0] != formula:
            return None
        self.meaning[letter] = ({(parameter,): 1}, self.meaning[letter][1])
        return parameter

    def _fresh(self, letter: int) -> bool:
        return LETTER <= letter < LETTER + LETTERS and letter not in self.meaning

    def _step(self, tokens: list[int]) -> bool:
        """``p = 5``, ``p = a = 5`` or ``p = a + b = 2 + 3 = 5``; remembers what p means."""
        letter, *sides = _split(tokens, IS)
        if len(letter) != 1 or not self._fresh(letter[0]) or not sides or len(sides[0]) not in (1, 3):
            return False
        operands = [self._operand(token) for token in sides[0][::2]]
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands):
            return False
        formula, value = known[0]
        expected = [sides[0], [NUMBER + value]]
        if len(known) == 2:
            sign, (other, number) = sides[0][1], known[1]
            if sign not in (PLUS, MINUS, STAR):
                return False
            formula = _combine(formula, sign, other)
            value, first = _combine({(): value}, sign, {(): number}).get((), 0), value
            expected = [sides[0], [NUMBER + first, sign, NUMBER + number], [NUMBER + value]]
        elif expected[0] == expected[1]:  # a number alone is not said twice
            expected.pop()
        self.meaning[letter[0]] = formula, value
        return sides == expected

    def _operand(self, token: int) -> tuple[Formula, int] | None:
        if NUMBER <= token < LETTER:
            number = token - NUMBER
            return ({(): number} if number else {}), number
        return self.meaning.get(token)


def _combine(left: Formula, sign: int, right: Formula) -> Formula:
    """Sum, difference or product, without the terms that vanish."""
    result: Formula = {}
    if sign == STAR:
        for first, one in left.items():
            for second, other in right.items():
                factors = tuple(sorted(first + second))
                result[factors] = result.get(factors, 0) + one * other
    else:
        result.update(left)
        for factors, coefficient in right.items():
            result[factors] = result.get(factors, 0) + (-coefficient if sign == MINUS else coefficient)
    return {
        factors: coefficient % MODULUS for factors, coefficient in result.items() if coefficient % MODULUS
    }
