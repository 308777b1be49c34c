"""A plain model of the tree of candidates: dicts only, and every answer computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mamba_cache.cache.adaptive import (
    CLASS_GROUPS,
    FORGOTTEN_AT_ONCE,
    REQUESTS_PER_REFIT,
    REQUESTS_PER_SWEEP,
    ReturnRates,
)

__all__ = ["ModelTree"]

Path = tuple[int, ...]

_KINDS = ("end", "branch", "inside")
_SIZES = (3, 5, 2, 5, 4, 5)  # kinds, uses, extended, turns, new blocks, hints


@dataclass
class _Candidate:
    kind: str
    traits: tuple[int, int, int]
    turn: int
    born: int
    last_use: int
    is_extended: bool
    uses: int = 0
    kept: int = 0
    weight: int = 0

    @property
    def klass(self) -> int:
        place = (_KINDS.index(self.kind), min(self.uses, 4), int(self.is_extended), *self.traits)
        return int(np.ravel_multi_index(place, _SIZES))


@dataclass
class _Prompt:
    path: Path
    turn: int
    traits: tuple[int, int, int]


@dataclass
class ModelTree:
    """Candidates by their path."""

    max_ghosts: int
    clock: int = 0
    made: int = 0
    known: dict[Path, _Candidate] = field(default_factory=dict)
    ghosts: list[Path] = field(default_factory=list)
    rates: ReturnRates = field(default_factory=lambda: ReturnRates(CLASS_GROUPS))

    def begin_request(self, path: Sequence[int], num_matched: int, num_usable: int) -> _Prompt:
        self.clock += 1
        if self.clock % REQUESTS_PER_REFIT == 0:
            self.rates.refit(
                np.array([c.klass for c in self.known.values()], np.int64),
                np.array([self.clock - c.last_use for c in self.known.values()], np.int64),
            )
        elif self.clock % REQUESTS_PER_SWEEP == 0:
            for ghost in self.ghosts:
                self.known[ghost].weight = self.index_of(ghost)
        if len(self.ghosts) >= self.max_ghosts + FORGOTTEN_AT_ONCE:
            self._forget_oldest()
        path = tuple(path)
        on_path = [p for p in self.known if path[: len(p)] == p and len(p) <= num_usable]
        turn = 0
        if on_path:
            used = max(on_path, key=len)
            candidate = self.known[used]
            turn = candidate.turn + (candidate.kind == "end")
            self._leave_class(candidate, is_event=True)
            candidate.uses += 1
            candidate.last_use = self.clock
            if used in self.ghosts:
                self.ghosts.remove(used)
                self.ghosts.append(used)
                candidate.weight = self.index_of(used)
        # Evicted blocks are not new if another prompt left a candidate there.
        new = len(path) - max([num_matched, *map(len, on_path)])
        new_class = 0 if new < 3 else 1 if new < 8 else 2 if new < 30 else 3
        turn_class = turn if turn < 3 else 3 if turn < 6 else 4
        return _Prompt(path, turn, (turn_class, new_class, 0))

    def order_of(self, path: Path) -> tuple[int, int, int, int]:
        """The sort key of kept candidates for eviction."""
        candidate = self.known[path]
        return self.value_of(path), len(path), candidate.last_use, candidate.born

    def propose(self, prompt: _Prompt, depth: int, kind: str) -> Path:
        path = prompt.path[:depth]
        if path in self.known:
            return path
        above = self.above(path)
        below = [p for p in self.known if p[: len(above) + 1] == prompt.path[: len(above) + 1]]
        below = [p for p in below if len(p) > len(above)]
        if below:
            common = min(_common(p, prompt.path) for p in below)
            if common < depth:
                self._add(prompt, common, "branch", has_below=True)
                return self.propose(prompt, depth, kind)
        self._add(prompt, depth, kind, has_below=bool(below))
        return path

    def _add(self, prompt: _Prompt, depth: int, kind: str, *, has_below: bool) -> None:
        path = prompt.path[:depth]
        above = self.above(path)
        if above and not self.known[above].is_extended:
            candidate = self.known[above]
            self._leave_class(candidate, is_event=False)
            candidate.is_extended = True
            self.rates.count(candidate.klass, self.clock - candidate.last_use, -1)
            if above in self.ghosts:
                candidate.weight = self.index_of(above)
        is_extended = has_below or depth < len(prompt.path)
        self.made += 1
        self.known[path] = _Candidate(
            kind, prompt.traits, prompt.turn, self.made, self.clock, is_extended
        )
        self.ghosts.append(path)
        self.known[path].weight = self.index_of(path)

    def keep(self, path: Path) -> None:
        self.known[path].kept += 1
        if path in self.ghosts:
            self.ghosts.remove(path)

    def drop(self, path: Path) -> None:
        candidate = self.known[path]
        candidate.kept -= 1
        if not candidate.kept:
            self.ghosts.append(path)
            candidate.weight = self.index_of(path)

    def value_of(self, path: Path) -> int:
        served = [g for g in self.ghosts if self._kept_above(g) == path]
        weights = sum(self.known[g].weight for g in served) + self.index_of(path)
        return (len(path) - len(self._kept_above(path))) * weights

    def index_of(self, path: Path) -> int:
        candidate = self.known[path]
        return self.rates.index_of(candidate.klass, self.clock - candidate.last_use)

    def blocks_freed_by(self, path: Path) -> int:
        above = self.above(path)
        while above and not self.known[above].kept and len(self._directly_below(above)) < 2:
            above = self.above(above)
        return len(path) - len(above)

    def above(self, path: Path) -> Path:
        """Return the nearest candidate above, () for none."""
        return max(
            (p for p in self.known if path[: len(p)] == p and p != path), key=len, default=()
        )

    def _kept_above(self, path: Path) -> Path:
        above = self.above(path)
        while above and not self.known[above].kept:
            above = self.above(above)
        return above

    def _directly_below(self, path: Path) -> list[Path]:
        return [p for p in self.known if self.above(p) == path and p]

    def _forget_oldest(self) -> None:
        for oldest in list(self.ghosts):
            if len(self.ghosts) > self.max_ghosts:
                self.ghosts.remove(oldest)
                if len(self._directly_below(oldest)) < 2:
                    self._leave_class(self.known[oldest], is_event=False)
                    del self.known[oldest]
                else:
                    self.ghosts.append(oldest)

    def _leave_class(self, candidate: _Candidate, *, is_event: bool) -> None:
        age = self.clock - candidate.last_use
        self.rates.count(candidate.klass, age, 1, is_event=is_event)


def _common(a: Path, b: Path) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
