"""The tree of candidates compared with its rules in plain Python, request by request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from adaptive_model import ModelTree
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_cache.cache import PromptFacts
from mamba_cache.cache.adaptive import CandidateTree


class _Prompts:
    """Prompts of few blocks that share prefixes: a block's hash covers the whole prefix."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._ids: dict[tuple[int, ...], int] = {}
        self._past: list[tuple[int, ...]] = [()]

    def draw(self) -> list[int]:
        start = self._past[int(self._rng.integers(max(0, len(self._past) - 12), len(self._past)))]
        start = start[: int(self._rng.integers(0, len(start) + 1))]
        more = self._rng.integers(0, 3, int(self._rng.integers(1, 6))).tolist()
        content = (*start, *more)[:40]
        self._past.append(content)
        return [
            self._ids.setdefault(content[: n + 1], 1 + len(self._ids)) for n in range(len(content))
        ]


def _run(seed: int, *, num_requests: int, max_ghosts: int, max_kept: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = _Prompts(rng)
    tree, model = CandidateTree(max_ghosts), ModelTree(max_ghosts)
    kept: dict[int, tuple[int, ...]] = {}
    for number in range(num_requests):
        path = prompts.draw()
        matched = int(rng.integers(0, len(path) + 1))
        usable = int(rng.integers(0, len(path) + 1))
        prompt = tree.begin_request(PromptFacts(path, 16, matched, usable))
        expected = model.begin_request(path, matched, usable)
        for depth in sorted({int(rng.integers(1, len(path) + 1)), len(path)}):
            kind = ("end", "branch", "inside")[rng.integers(3)]
            node = tree.propose(prompt, depth, kind)
            twin = model.propose(expected, depth, kind)
            if rng.random() < 0.6 and node not in kept:
                tree.keep(node)
                model.keep(twin)
                kept[node] = twin
        while len(kept) > max_kept:
            nodes = np.array(list(kept), np.intp)
            tree.look_at(nodes)
            assert _values(tree, kept) == [model.value_of(p) for p in kept.values()]
            freed = tree.blocks_freed_by(nodes).tolist()
            assert freed == [model.blocks_freed_by(p) for p in kept.values()]
            first = nodes.item(tree.lowest(nodes))
            by_rule = min(kept.values(), key=model.order_of)
            assert kept[first] == by_rule
            tree.drop(first)
            model.drop(kept.pop(first))
        if number % 16 == 0:
            tree.check_invariants()
    assert len(tree.ghosts) == len(model.ghosts)


def _values(tree: CandidateTree, nodes: Iterable[int]) -> list[int]:
    return [tree.order_of(node)[0] for node in nodes]


@settings(max_examples=12)
@given(st.integers(0, 2**32 - 1), st.integers(2, 20), st.integers(1, 6))
def test_the_tree_decides_by_its_rules(seed: int, max_ghosts: int, max_kept: int) -> None:
    _run(seed, num_requests=80, max_ghosts=max_ghosts, max_kept=max_kept)


def test_the_tree_decides_by_its_rules_through_refits() -> None:
    _run(1, num_requests=300, max_ghosts=12, max_kept=4)


def test_a_prompt_that_comes_very_often_stays_in_the_last_class_of_its_kind() -> None:
    tree, model = CandidateTree(500), ModelTree(500)
    for _ in range(8):
        prompt = tree.begin_request(PromptFacts([1], 16, 1, 1))
        node = tree.propose(prompt, 1, "end")
        path = model.propose(model.begin_request([1], 1, 1), 1, "end")
        assert tree._class_at[node] == model.known[path].klass


def test_a_candidate_serves_all_of_many_below_it() -> None:
    tree, model = CandidateTree(500), ModelTree(500)
    nodes = {}
    for last in range(2, 90):
        path = [1, last] if last < 88 else [1, last, last + 100]
        for depth in range(1, len(path) + 1):
            prompt = tree.begin_request(PromptFacts(path, 16, 0, 0))
            twin = model.begin_request(path, 0, 0)
            nodes[tree.propose(prompt, depth, "end")] = model.propose(twin, depth, "end")
    first, deep = next(iter(nodes)), next(n for n, p in nodes.items() if len(p) == 3)
    kept: list[int] = []
    for node in (deep, first):
        tree.keep(node)
        model.keep(nodes[node])
        kept.append(node)
        assert _values(tree, kept) == [model.value_of(nodes[n]) for n in kept]
        tree.check_invariants()
    tree.drop(first)
    model.drop(nodes[first])
    assert _values(tree, [deep]) == [model.value_of(nodes[deep])]
    tree.check_invariants()
