"""The most that any cache could have skipped of a trace, had it known the whole of it.

A linear program. What is kept between two requests that pass the same boundary takes room at each
request in between, and a request skips at most the tokens before one boundary whose state, and the
KV blocks before it, were kept. A part of a state may be kept here, so no policy, no placement and
no look ahead comes above what it finds. States and blocks in tiers count like those of the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import check_int, check_number
from mamba_cache._extras import install_hint
from mamba_cache.cli.traces import TraceRequest
from mamba_cache.errors import MissingExtraError

__all__ = ["Bound", "bound_of"]

_Int64Array = npt.NDArray[np.int64]

_SECONDS = 600.0


class Bound(NamedTuple):
    """What no cache can exceed.

    Attributes:
        token_hit_rate: The share of prompt tokens that are not computed.
        is_solved: Whether the program was solved. If not, for it took too long, the rate is that of
            unlimited memory.
        seconds: What that took.
    """

    token_hit_rate: float
    is_solved: bool
    seconds: float


class _Passings(NamedTuple):
    """Requests that pass a boundary which matters: at which others part, or a prompt ends."""

    requests: _Int64Array  # which request passes, ascending; of one request from its start on
    spans: _Int64Array  # blocks from the boundary before it on the same path to this one
    before: _Int64Array  # which passing was the last one of the same boundary; -1: none
    deeper: _Int64Array  # which passing is the next one of the same request; -1: none
    is_usable: npt.NDArray[np.bool_]  # whether the request could resume there


def bound_of(
    requests: Sequence[TraceRequest],
    num_states: int | None,
    *,
    num_blocks: int | None = None,
    seconds: float = _SECONDS,
) -> Bound:
    """Return the bound for a trace.

    Args:
        requests: The trace, in order; all of one block size.
        num_states: States that there is room for, on the GPU and in tiers together; None: any.
        num_blocks: KV blocks that there is room for, likewise.
        seconds: How long the solver may take.

    Raises:
        InvalidArgumentError: A number is out of range.
        MissingExtraError: scipy is not installed.
    """
    for name, number in (("num_states", num_states), ("num_blocks", num_blocks)):
        if number is not None:
            check_int(name, number, minimum=0)
    check_number("seconds", seconds, maximum=1e9)
    scipy = _scipy()
    started = time.perf_counter()
    passings = _passings(requests)
    blocks, is_solved = 0.0, True
    if len(passings.requests):
        program = _Program(passings, len(requests), num_states, num_blocks)
        found = program.solve(scipy, seconds)
        is_solved = found is not None
        if found is None:
            found = _Program(passings, len(requests), None, None).solve(scipy, _SECONDS)
        blocks = 0.0 if found is None else found
    total = sum(request.input_length for request in requests)
    rate = blocks * requests[0].block_size / total
    return Bound(rate, is_solved, round(time.perf_counter() - started, 2))


def _passings(requests: Sequence[TraceRequest]) -> _Passings:
    paths, tree = _paths(requests)
    num_passings = np.zeros(len(tree.depths), np.int64)
    for path in paths:
        num_passings[path] += 1
    matters = (num_passings > 1) & (np.array(tree.are_ends) | (np.array(tree.num_children) > 1))
    columns: list[tuple[int, int, int, bool]] = []
    last: dict[int, int] = {}
    for number, (request, path) in enumerate(zip(requests, paths, strict=True)):
        usable, above = _usable_blocks(request), 0
        for node in [node for node in path if matters[node]]:
            depth = tree.depths[node]
            columns.append((number, depth - above, last.get(node, -1), depth <= usable))
            last[node], above = len(columns) - 1, depth
    table = np.array(columns, np.int64).reshape(-1, 4)
    of, spans, before, is_usable = table.T
    deeper = np.arange(1, len(of) + 1)
    deeper[of != np.append(of[1:], -1)] = -1
    return _Passings(of, spans, before, deeper, is_usable.astype(np.bool_))


class _Tree:
    """Boundaries of all prompts. The first one is that of no tokens."""

    def __init__(self) -> None:
        self.depths, self.num_children, self.are_ends = [0], [0], [False]
        self._children: dict[tuple[int, object], int] = {}

    def child(self, node: int, name: object) -> int:
        """Return the boundary one block further."""
        found = self._children.setdefault((node, name), len(self.depths))
        if found == len(self.depths):
            self.num_children[node] += 1
            self.depths.append(self.depths[node] + 1)
            self.num_children.append(0)
            self.are_ends.append(False)
        return found


def _paths(requests: Sequence[TraceRequest]) -> tuple[list[list[int]], _Tree]:
    """Return the boundaries of each prompt's complete blocks."""
    tree = _Tree()
    paths = []
    for request in requests:
        # A tenant is the name of a block of no tokens, as it were, before all others.
        node = 0 if request.tenant is None else tree.child(0, request.tenant)
        tree.depths[node] = 0
        path = []
        for hash_id in request.whole_ids:
            node = tree.child(node, hash_id)
            path.append(node)
        for end in {len(path), _usable_blocks(request)} - {0}:
            tree.are_ends[path[end - 1]] = True
        paths.append(path)
    return paths, tree


def _usable_blocks(request: TraceRequest) -> int:
    """Return the blocks that can be skipped: a token at least is computed."""
    return (request.input_length - 1) // request.block_size


class _Program:
    """The linear program.

    Its unknowns, each from 0 to 1 but for the last two: of each passing, what is kept of the state
    from the passing before to this one (x), what is kept of the KV blocks up to the boundary above
    (z), and how much of the request skips these blocks (w); then, after each request, how many
    states and blocks are kept.
    """

    def __init__(
        self,
        passings: _Passings,
        num_requests: int,
        num_states: int | None,
        num_blocks: int | None,
    ) -> None:
        self._passings, self._num_requests = passings, num_requests
        self._rooms = num_states, num_blocks

    def solve(self, scipy: Any, seconds: float) -> float | None:
        """Return the blocks that are skipped; None if that takes too long."""
        spans, before = self._passings.spans, self._passings.before
        count, steps = len(spans), self._num_requests
        width = 3 * count + 2 * steps
        gains = np.zeros(width)
        gains[2 * count : 3 * count] = spans
        most = np.ones(width)
        for part in range(3):  # nothing is kept for those who come first
            most[part * count : (part + 1) * count][before < 0] = 0
        for part, room in enumerate(self._rooms):
            first = 3 * count + part * steps
            most[first : first + steps] = np.inf if room is None else room
        uses = _matrix(scipy, self._uses(), 3 * count, width)
        rooms = _matrix(scipy, self._rooms_taken(), 2 * steps, width)
        found = scipy.optimize.linprog(
            -gains,
            A_ub=uses,
            b_ub=np.zeros(3 * count),
            A_eq=rooms,
            b_eq=np.zeros(2 * steps),
            bounds=np.stack((np.zeros(width), most), 1),
            method="highs-ds",
            options={"time_limit": seconds},
        )
        return None if found.x is None or found.status else float(-found.fun)

    def _uses(self) -> Iterator[tuple[_Int64Array, _Int64Array, npt.NDArray[np.float64]]]:
        """Yield rows, columns and factors: all sums of a row are at most 0."""
        passings = self._passings
        count = len(passings.spans)
        each, ones = np.arange(count), np.ones(count)
        x, z, w = each, count + each, 2 * count + each
        has_deeper = passings.deeper >= 0
        own, deeper = each[has_deeper], 2 * count + passings.deeper[has_deeper]
        # Whoever skips a block skips those before it: w[deeper] <= w, and w <= z.
        yield own, deeper, ones[has_deeper]
        yield own, w[has_deeper], -ones[has_deeper]
        if self._rooms[1] is not None:
            yield count + each, w, ones
            yield count + each, z, -ones
        # Whoever skips no more than this resumes here: w - w[deeper] <= x, or 0.
        yield 2 * count + each, w, ones
        yield 2 * count + own, deeper, -ones[has_deeper]
        usable = each[passings.is_usable]
        yield 2 * count + usable, x[usable], -ones[usable]

    def _rooms_taken(self) -> Iterator[tuple[_Int64Array, _Int64Array, npt.NDArray[np.float64]]]:
        """Yield the same of sums that are 0: what is kept after each request, less before it."""
        passings, steps = self._passings, self._num_requests
        count = len(passings.spans)
        kept = (passings.before >= 0).nonzero()[0]
        begins, ends = passings.requests[passings.before[kept]], passings.requests[kept]
        each = np.arange(steps)
        for part, sizes in enumerate((np.ones(count), passings.spans.astype(np.float64))):
            if self._rooms[part] is None:
                continue
            row, room = part * steps, 3 * count + part * steps
            yield row + each, room + each, np.ones(steps)
            yield row + each[1:], room + each[:-1], -np.ones(steps - 1)
            yield row + begins, part * count + kept, -sizes[kept]
            yield row + ends, part * count + kept, sizes[kept]


def _matrix(scipy: Any, entries: Iterator[Any], height: int, width: int) -> Any:
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    rows, columns, factors = map(np.concatenate, zip(nothing, *entries, strict=True))
    return scipy.sparse.coo_matrix((factors, (rows, columns)), (height, width)).tocsr()


def _scipy() -> Any:
    try:
        import scipy.optimize  # noqa: PLC0415 - an optional extra
        import scipy.sparse  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            f"a bound needs scipy, which solves linear programs: {install_hint('bound')}"
        ) from error
    return scipy
