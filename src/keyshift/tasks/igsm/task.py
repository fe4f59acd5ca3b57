"""iGSM: grade-school mathematics from random dependency graphs, after Ye et al. 2024 (arXiv 2407.20311)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from keyshift.errors import UserError
from keyshift.tasks.igsm.grading import grade, read_problem
from keyshift.tasks.igsm.graph import MOST_INPUTS, Shape, draw_graphs
from keyshift.tasks.igsm.vocabulary import END, LETTERS, NAMES, PAD, VOCABULARY
from keyshift.tasks.igsm.wording import QUESTION_LENGTH, Slots, join, pack, write
from keyshift.tasks.induction import EXAMINATION, IGNORED, SPLITS

if TYPE_CHECKING:
    from torch import Tensor

ROWS_AT_ONCE = 50


@dataclass(frozen=True)
class IGSM:
    """Sentences about how many items others have, in random order, a question, and the steps to its answer.

    Items belong to four categories: a school owns classrooms, a classroom backpacks, a backpack stationery.
    An *instance* parameter (Riverview High's Film Studio) gets a sentence, which makes it a number, or a sum
    or difference of other parameters, and perhaps a number that is added or multiplied. An *abstract* one
    (Riverview High's Classroom, Riverview High's Backpack) is never explained: it is the sum of what its
    owner has or, where an owner's only item owns more, a product. All numbers are mod 23. The solution
    computes what the question needs, in an order in which that can be done, and nothing else. Every
    arithmetic operation is a step of its own, and a problem's number of them is drawn uniformly from
    ``least_operations`` … ``operations``; a parameter with t inputs, a number included, takes max(1, t - 1).

    Loss and accuracy count the solution and the end token. Which letters a solution uses and, in part, its
    order are chance, so no model has an accuracy of 1: look at `examine`.

    What differs from Ye et al.: they train on the problems too. The wording is shorter ("The number of each"
    and "Answer:" are left out, a name is one token). Numbers of operations are not drawn with more weight on
    small ones. There is one hierarchy of 12 names per category, not four of 100. An abstract parameter across
    two categories is one product, not a sum of products, and none reaches across three. Distractors ask for
    no abstract parameters of their own. "X has Y", for the number 1, is left out. Held-out
    problems are other draws, not other solution templates.

    Args:
        least_operations: the fewest operations in training.
        operations: the most in training, and exactly so many in one half of the examination.
        test_operations: exactly so many in the other half (12 and 15, or 21 and 24, in the KV shifting
            paper).
        distractors: the most sentences that the question does not need; 0 … this many are equally likely.
        inputs: the most inputs of a parameter, at most 4 (as in Ye et al.); with 2, all take one operation.
        abstract: the most abstract parameters in a solution; 0 leaves them out.
        items: items of each category in one problem.
        names: names of each category that problems draw from, at most 12.
        sequence_length: tokens per row. A row holds one problem and padding.
        examined: problems in each half of the examination.

    Raises:
        UserError: sizes out of range, too few items for the parameters, rows too short for some problem.

    Example, as `decode` shows it, of two operations; labels begin with "Define"::

        Tote's Ruler equals 5 times Tote's Pencil. Map Room's Tote equals 3. Tote's Pencil equals 17.
        How many Ruler does Tote have?
        Define Tote's Pencil as p; so p = 17. Define Tote's Ruler as k; so k = 5 * p = 5 * 17 = 16.
    """

    least_operations: int = 1
    operations: int = 12
    test_operations: int = 15
    distractors: int = 5
    inputs: int = 4
    abstract: int = 4
    items: int = 4
    names: int = 12
    sequence_length: int = 512
    examined: int = 200

    def __post_init__(self) -> None:
        self._check("operations", self.operations, 1, LETTERS)
        self._check("least_operations", self.least_operations, 1, self.operations)
        self._check("test_operations", self.test_operations, 1, LETTERS)
        self._check("distractors", self.distractors, 0, None)
        self._check("inputs", self.inputs, 1, MOST_INPUTS)
        self._check("abstract", self.abstract, 0, None)
        self._check("names", self.names, 1, NAMES)
        self._check("items", self.items, 1, self.names)
        self._check("examined", self.examined, 1, None)
        if self._shape.most_abstract(self._longest) < 0:
            raise UserError(
                f"task items={self.items} names {self._shape.owners * self.items} parameters, but operations="
                f"{self._longest} and distractors={self.distractors} may need "
                f"{self._longest + self.distractors}; raise items or lower them"
            )
        needed = self._longest_problem(self._longest) + self._longest_solution(self._longest)
        if self.sequence_length < needed:
            raise UserError(
                f"task sequence_length={self.sequence_length} is too short: {self._longest} operations with "
                f"distractors={self.distractors} take up to {needed} tokens; raise it to that or lower them"
            )

    def _check(self, name: str, value: int, least: int, most: int | None) -> None:
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise UserError(f"task {name}={value} must be {allowed}")

    @property
    def vocab_size(self) -> int:
        """The same for all sizes."""
        return VOCABULARY

    @property
    def _shape(self) -> Shape:
        return Shape(self.distractors, self.inputs, self.items, self.abstract)

    @property
    def _longest(self) -> int:
        return max(self.operations, self.test_operations)

    def _longest_problem(self, operations: int) -> int:
        """No problem and question with so many operations are longer: one sentence per operation."""
        first, second, other = (5, 8, 10) if self.inputs > 1 else (5, 6, 6)
        sentences = first + (second if operations > 1 else 0) + other * max(0, operations - 2)
        distractor = {1: 6, 2: 10, 3: 13, 4: 16}[self.inputs]
        return sentences + distractor * self.distractors + QUESTION_LENGTH

    def _longest_solution(self, operations: int) -> int:
        """Its end included."""
        first, other = 11, 19 if self.inputs > 1 else 13
        return first + other * (operations - 1) + 1

    def _draw(self, rng: np.random.Generator, operations: np.ndarray) -> tuple[Slots, Slots]:
        """Problems with questions, and solutions, with these numbers of operations [B]."""
        graphs = draw_graphs(rng, operations, self._shape)
        return write(rng, graphs, self._shape, self.names)

    def batch(self, seed: int, step: int, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` [batch_size, sequence_length], int64; a pure function of the
        arguments."""
        import torch

        rng = np.random.default_rng([seed, SPLITS[split], step])
        operations = rng.integers(self.least_operations, self.operations, size=batch_size, endpoint=True)
        problem, solution = self._draw(rng, operations)
        tokens = pack(join(problem, solution), self.sequence_length, PAD)
        answered = np.arange(self.sequence_length) >= problem.used.sum(1)[:, None]
        labels = np.where(answered & (tokens != PAD), tokens, IGNORED)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    @property
    def guessing(self) -> str:
        """See `Task`."""
        return "always naming the most frequent token of the solutions, an equals sign"

    def chance_level(self) -> float:
        """The share of the most frequent token in solutions, measured on 512 problems."""
        labels = self.batch(0, 0, 512, "validation")["labels"].numpy()
        answers = labels[labels != IGNORED]
        return float(np.bincount(answers).max() / len(answers))

    @property
    def scores(self) -> tuple[str, ...]:
        """See `Examined`."""
        return tuple(f"{half} {rule}" for half in ("in-range", "test") for rule in ("lenient", "strict"))

    def examine(self, model: Any) -> dict[str, float]:
        """Shares of solutions, decoded greedily by ``model``, that pass; always on the same problems.

        ``lenient`` (KV shifting paper, appendix I): a sentence computes the asked parameter and comes to the
        right number, whatever else is said; of several the first counts, so that naming all 23 numbers does
        not help. ``strict``: every sentence is well-formed, computes its
        parameter from computed ones as the problem says, with all numbers right (the parser of Ye et al.
        checks as much), the last one is the asked parameter's, the end token follows, and only needed
        parameters are computed, each once (Ye et al. count unnecessary ones apart).
        """
        shares = [*self._examine(model, self.operations), *self._examine(model, self.test_operations)]
        return dict(zip(self.scores, shares, strict=True))

    def _examine(self, model: Any, operations: int) -> tuple[float, float]:
        rng = np.random.default_rng([0, EXAMINATION, operations])
        problem, _ = self._draw(rng, np.full(self.examined, operations))
        lengths = problem.used.sum(1)
        prompts = [
            list(row[:n]) for row, n in zip(pack(problem, max(lengths), PAD).tolist(), lengths, strict=True)
        ]
        prompts.sort(key=len)
        grades = []
        for start in range(0, self.examined, ROWS_AT_ONCE):
            some = prompts[start : start + ROWS_AT_ONCE]
            solutions = _solve(model, some, self._longest_solution(operations))
            grades += [grade(read_problem(p), s) for p, s in zip(some, solutions, strict=True)]
        lenient, strict = np.mean(grades, axis=0)
        return float(lenient), float(strict)


def _solve(model: Any, prompts: list[list[int]], longest: int) -> list[list[int]]:
    """What the model says after each prompt, at most ``longest`` tokens of it."""
    import torch

    width = max(map(len, prompts))
    padded = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(padded, device=model.device)
    said = model.generate(
        ids,
        attention_mask=(ids != PAD).long(),
        max_new_tokens=longest,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return said[:, width:].tolist()
