"""Random dependency graphs of iGSM problems, a batch at a time, as arrays.

Letters of shapes: B problems, S solution parameters at most (in topological order, the asked one last), M of
those and the distractors (from index S on), O owners in a problem, 4 inputs at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyshift.tasks.igsm.vocabulary import LAYERS, MODULUS

MOST_INPUTS = 4
INSTANCE, TOTAL, PRODUCT = 0, 1, 2
"""Kinds of parameters: given in the problem; the items an owner has; the items that its items have."""

OPERATIONS_SHARE = (0.6, 0.25, 0.15)
"""How often a parameter takes 1, 2 and 3 operations."""
TOTAL_SHARE, PRODUCT_SHARE = 0.3, 0.3
"""How often a parameter that could be abstract is."""


@dataclass(frozen=True)
class Shape:
    """What bounds a graph: see the fields of `IGSM`."""

    distractors: int
    inputs: int
    items: int
    abstract: int

    @property
    def owners(self) -> int:
        """Items that can own others: all but those of the lowest category."""
        return (LAYERS - 1) * self.items

    def most_abstract(self, operations: int) -> int:
        """So many abstract parameters, or any fewer, leave names for everything else; -1 if none do.

        An abstract parameter has its owner to itself, and stands with at least one counted parameter for two
        nodes.
        """

        def enough(count: int) -> bool:
            names = (self.owners - count) * self.items
            return names >= operations + self.distractors - 2 * count

        most = -1
        while most < min(self.abstract, self.owners) and enough(most + 1):
            most += 1
        return most


@dataclass
class Graphs:
    """A batch of graphs; ``inputs`` beyond ``inputs_count`` are meaningless, and so are absent nodes."""

    operations: np.ndarray
    """[B, S], of each solution parameter; 0 where absent."""
    kind: np.ndarray
    """[B, M]."""
    present: np.ndarray
    """[B, M], bool."""
    inputs: np.ndarray
    """[B, M, 4], nodes."""
    inputs_count: np.ndarray
    """[B, M]."""
    constant: np.ndarray
    """[B, M], 0 … 22, or -1 without one."""
    scaled: np.ndarray
    """[B, M], bool: the constant multiplies; otherwise it is added."""
    difference: np.ndarray
    """[B, M], bool: of the two inputs; otherwise their sum."""
    owner: np.ndarray
    """[B, M], of the O items that can own."""
    item: np.ndarray
    """[B, M], the owned one of the next category; meaningless for abstract parameters."""
    partial: np.ndarray
    """[B, S, 4], what the first 1, 2, … inputs come to."""
    value: np.ndarray
    """[B, S], mod 23."""


def draw_graphs(rng: np.random.Generator, operations: np.ndarray, shape: Shape) -> Graphs:
    """One graph for each entry of ``operations`` [B], solved with exactly so many."""
    share = np.array(OPERATIONS_SHARE[: max(1, shape.inputs - 1)])
    widest = int(operations.max())
    each = 1 + np.searchsorted(share.cumsum(), rng.random((len(operations), widest)) * share.sum())
    each = np.minimum(each, np.maximum(1, np.arange(widest)))  # 3 inputs need 2 earlier nodes and a constant
    each = np.diff(np.minimum(each.cumsum(1), operations[:, None]), axis=1, prepend=0)
    tree = _Tree(rng, each, shape)
    for node in reversed(range(widest)):
        tree.add(node)
    return _complete(rng, tree, shape)


class _Tree:
    """Which parameter needs which, from the asked one backwards, so that every one is needed.

    Going backwards, each node is counted by an abstract parameter or picked as an input by a later instance
    parameter that has room. There always is one: the next node, unless it is abstract, and then it counts
    this one.
    """

    def __init__(self, rng: np.random.Generator, each: np.ndarray, shape: Shape):
        rows, nodes = each.shape
        self.shape = shape
        self.operations = each
        self.most = shape.most_abstract(nodes)
        self.degree = np.where(each > 1, each + 1, 1)
        if shape.inputs > 1:
            self.degree += (each == 1) & (rng.random(each.shape) < 0.7)
        self.degree[:, 0] = 1
        self.last = (each > 0).sum(1) - 1
        self.uses = np.zeros((rows, nodes, nodes), bool)
        self.used = np.zeros((rows, nodes), bool)
        self.counted = np.zeros((rows, nodes), bool)
        self.room = np.where(each > 0, self.degree, 0)
        self.kind = np.zeros((rows, nodes), np.int64)
        self.owner = np.full((rows, nodes), -1)
        self.item = np.full((rows, nodes), -1)
        self.taken = np.zeros((rows, shape.owners), bool)
        self.due = np.full(rows, -1)
        """The owner whose total the next node must be, or -1."""
        self.coins = rng.random((2, rows, nodes), np.float32)
        self.lots = rng.random((2, rows, nodes, nodes), np.float32)
        self.owner_lots = rng.random((rows, nodes, shape.owners), np.float32)

    def add(self, node: int) -> None:
        """Decide what ``node`` is, and what uses it."""
        if self.most > 0 and node > 0:
            self._make_total(node)  # first: what is due is due from the node after this one
            if node > 2:
                self._make_product(node)
        free = np.flatnonzero((node < self.last) & ~self.used[:, node])
        if len(free):
            lots = np.where(self.room[free, node + 1 :] > 0, self.lots[0, free, node, node + 1 :], -1)
            self._use(free, node + 1 + lots.argmax(1), node)

    def _use(self, rows: np.ndarray, users: np.ndarray | int, nodes: np.ndarray | int) -> None:
        self.uses[rows, users, nodes] = True
        self.used[rows, nodes] = True
        self.room[rows, users] -= 1

    def _open(self, node: int) -> np.ndarray:
        """[B], bool: ``node`` is there, and no abstract parameter counts it or has its name."""
        return (node <= self.last) & ~self.counted[:, node] & (self.kind[:, node] == INSTANCE)

    def _make_product(self, node: int) -> None:
        """Some rows' node: how many items of its only item, say "film studios" × "backpacks in each".

        The node before it becomes the total of that item.
        """
        single = (self.operations[:, node] == 1) & (self.operations[:, node - 1] == 1)
        chosen = single & (self.coins[1, :, node] < PRODUCT_SHARE) & (self.due < 0) & self._open(node)
        chosen &= ~self.counted[:, node - 1] & ~self.counted[:, node - 2]
        chosen &= (self.shape.inputs > 1) & (self.taken.sum(1) + 2 <= self.most)
        chosen &= ~self.counted[:, : node - 2].all(1)
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return
        lots = np.where(self.taken[rows], -1, self.owner_lots[rows, node])
        layers = lots.reshape(len(rows), LAYERS - 1, self.shape.items)
        lower = np.where(layers[:, :-1].max(2, keepdims=True) >= 0, layers[:, 1:], -1)
        lower = lower.reshape(len(rows), (LAYERS - 2) * self.shape.items)
        rows, lots, lower = (array[(lower >= 0).any(1)] for array in (rows, layers, lower))
        if not len(rows):
            return
        below = self.shape.items + lower.argmax(1)
        layer = below // self.shape.items - 1
        above = layer * self.shape.items + lots[np.arange(len(rows)), layer].argmax(1)
        candidates = np.where(self.counted[rows, : node - 2], -1, self.lots[1, rows, node, : node - 2])
        counted = candidates.argmax(1)
        self.kind[rows, node] = PRODUCT
        self.owner[rows, node] = self.owner[rows, counted] = above
        self.item[rows, counted] = below % self.shape.items
        self.taken[rows, above] = self.taken[rows, below] = True
        self.counted[rows, counted] = True
        self.due[rows] = below
        self._use(rows, node, counted)
        self._use(rows, node, node - 1)
        self.room[rows, node] = 0
        self.degree[rows, node] = 2

    def _make_total(self, node: int) -> None:
        """Some rows' node: how many items its owner has, the node before it and others; all that are due."""
        eligible = (~self.counted[:, :node]).sum(1)
        due = self.due >= 0
        degree = self.degree[:, node]
        degree[due & (np.minimum(eligible, self.shape.items) < degree)] = 1
        chosen = self._open(node) & (self.coins[0, :, node] < TOTAL_SHARE) & ~self.counted[:, node - 1]
        chosen &= (self.taken.sum(1) < self.most) & (degree <= np.minimum(eligible, self.shape.items))
        rows = np.flatnonzero(chosen | due)
        if not len(rows):
            return
        owner = np.where(self.taken[rows], -1, self.owner_lots[rows, node]).argmax(1)
        owner = np.where(due[rows], self.due[rows], owner)
        lots = np.where(self.counted[rows, :node], -1, self.lots[1, rows, node, :node])
        lots[:, -1] = 2
        order = np.argsort(-lots, axis=1)[:, :MOST_INPUTS]
        which, rank = np.nonzero(np.arange(order.shape[1]) < degree[rows, None])
        counted = order[which, rank]
        self.kind[rows, node] = TOTAL
        self.owner[rows, node] = owner
        self.taken[rows, owner] = True
        self.owner[rows[which], counted] = owner[which]
        self.item[rows[which], counted] = (owner[which] + rank) % self.shape.items
        self.counted[rows[which], counted] = True
        self._use(rows[which], node, counted)
        self.room[rows, node] = 0
        self.due[rows] = -1


def _complete(rng: np.random.Generator, tree: _Tree, shape: Shape) -> Graphs:
    """Distractors, the inputs that the tree left open, constants, names and values."""
    rows, solution = tree.operations.shape
    nodes = solution + shape.distractors
    there = np.arange(solution) <= tree.last[:, None]
    extra = np.arange(shape.distractors) < rng.integers(shape.distractors, size=(rows, 1), endpoint=True)
    present = np.concatenate((there, extra), axis=1)
    kind = np.concatenate((tree.kind, np.zeros_like(extra, np.int64)), axis=1)
    degree = rng.integers(1, shape.inputs, size=(rows, nodes), endpoint=True)
    degree[:, :solution] = tree.degree
    uses = np.zeros((rows, nodes, nodes), bool)
    uses[:, :solution, :solution] = tree.uses
    allowed = _allowed_inputs(rng, present, kind, uses, solution)
    available = allowed.sum(2)
    degree = np.minimum(degree, available + (kind == INSTANCE))
    spare = degree > uses.sum(2)
    constant = (kind == INSTANCE) & spare & ((rng.random(kind.shape) < 0.5) | (degree > available))
    count = degree - constant
    inputs = _choose_inputs(rng, uses, allowed, count, kind != INSTANCE)
    scaled = constant & (count > 0) & (rng.random(kind.shape) < 0.5)
    graphs = Graphs(
        operations=tree.operations,
        kind=kind,
        present=present,
        inputs=inputs,
        inputs_count=count,
        constant=np.where(constant, rng.integers(scaled, MODULUS), -1),  # nothing is multiplied with 0
        scaled=scaled,
        difference=(kind == INSTANCE) & (count == 2) & (rng.random(kind.shape) < 0.5),
        owner=np.pad(tree.owner, ((0, 0), (0, shape.distractors)), constant_values=-1),
        item=np.pad(tree.item, ((0, 0), (0, shape.distractors)), constant_values=-1),
        partial=np.zeros((rows, solution, MOST_INPUTS), np.int64),
        value=np.zeros((rows, solution), np.int64),
    )
    _name_the_rest(rng, graphs, tree.taken, shape)
    _evaluate(graphs)
    return graphs


def _allowed_inputs(
    rng: np.random.Generator, present: np.ndarray, kind: np.ndarray, uses: np.ndarray, solution: int
) -> np.ndarray:
    """[B, M, M]: the nodes that a node may depend on; an abstract one depends on what it ``uses``.

    Half of the distractors, those after the first ``solution`` nodes, depend on other distractors alone.
    """
    rows, nodes = present.shape
    allowed = np.tri(nodes, nodes, -1, dtype=bool) & present[:, None, :]
    apart = rng.random((rows, nodes - solution, 1)) < 0.5
    allowed[:, solution:, :solution] &= ~apart
    return np.where((kind == INSTANCE)[:, :, None], allowed, uses)


def _choose_inputs(
    rng: np.random.Generator, uses: np.ndarray, allowed: np.ndarray, count: np.ndarray, abstract: np.ndarray
) -> np.ndarray:
    """[B, M, 4]: for each node what it ``uses`` [B, M, M] and others that are allowed, ``count`` in all."""
    nodes = count.shape[1]
    lots = rng.random(uses.shape, np.float32) + 2 * uses
    order = np.argsort(np.where(allowed, -lots, 1), axis=2)[:, :, :MOST_INPUTS]
    if nodes < MOST_INPUTS:
        order = np.pad(order, ((0, 0), (0, 0), (0, MOST_INPUTS - nodes)))
    # Abstract parameters are nowhere written, so their inputs come in the order they were computed in.
    place = np.where(abstract[:, :, None], order / nodes, rng.random(order.shape))
    place = np.where(np.arange(MOST_INPUTS) < count[:, :, None], place, 2)
    return np.take_along_axis(order, np.argsort(place, axis=2), axis=2)


def _name_the_rest(rng: np.random.Generator, graphs: Graphs, taken: np.ndarray, shape: Shape) -> None:
    """Distinct pairs of an owner without abstract parameters and an item, for what has no name yet."""
    lots = rng.random((len(taken), shape.owners * shape.items), np.float32)
    pairs = np.argsort(np.where(np.repeat(taken, shape.items, axis=1), 1, lots), axis=1)
    nameless = graphs.present & (graphs.owner < 0)
    row, node = np.nonzero(nameless)
    pair = pairs[row, nameless.cumsum(1)[row, node] - 1]
    graphs.owner[row, node], graphs.item[row, node] = pair // shape.items, pair % shape.items


def _evaluate(graphs: Graphs) -> None:
    """Fill in ``partial`` and ``value``, node by node."""
    rows, solution = graphs.value.shape
    row = np.arange(rows)[:, None]
    filled = np.arange(MOST_INPUTS) < graphs.inputs_count[:, :solution, None]
    sign = filled.astype(np.int64)
    sign[:, :, 1] -= 2 * graphs.difference[:, :solution]
    inputs = np.where(filled, graphs.inputs[:, :solution], 0)
    product = graphs.kind[:, :solution] == PRODUCT
    constant = np.maximum(graphs.constant[:, :solution], 0)
    for node in range(solution):
        terms = graphs.value[row, inputs[:, node]]
        partial = (terms * sign[:, node]).cumsum(1)
        total = np.where(product[:, node], terms[:, 0] * terms[:, 1], partial[:, -1])
        scaled = graphs.scaled[:, node]
        graphs.partial[:, node] = partial
        graphs.value[:, node] = (
            np.where(scaled, constant[:, node] * total, constant[:, node] + total) % MODULUS
        )
    graphs.partial %= MODULUS
