"""Computes an upper bound on a trace for any cache of so many states: the bound in the docs.

    python tests/benchmarks/trace_bound.py requests.jsonl --slots 50 200

It needs scipy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from measuring import Measurement, parser_for, report
from scipy.optimize import linprog
from scipy.sparse import coo_array

from mamba_cache.cli.traces import TraceRequest, read_trace

_Int64Array = npt.NDArray[np.int64]


def bound_of(requests: Sequence[TraceRequest], num_states: int | None) -> float:
    """Return an upper bound of the hit rate of any cache of ``num_states`` states.

    It is the share of prompt tokens that need not be computed, by a linear program over all of the
    trace; ``num_states`` None: any number. A state that is kept from one request to another with
    the same prefix takes room at each request in between, and a request resumes at one state. A
    part of a state may be kept here, so no policy and no placement comes above it. States in tiers
    count like those of the GPU; KV blocks have room without limit.
    """
    begins, ends, blocks = _find_repeats(requests)
    states, times = np.arange(len(blocks)), np.arange(len(requests))
    # The unknowns: how much of each state is kept, then how many are kept after each request.
    kept_after = len(states) + times
    num_unknowns = len(states) + len(times)
    limits = np.ones(num_unknowns)
    limits[kept_after] = np.inf if num_states is None else num_states
    # Each request resumes at one state at most.
    resumed = coo_array((np.ones(len(states)), (ends, states)), (len(times), num_unknowns))
    # Kept after a request - kept before it - states that begin + states that end = 0.
    rows = np.concatenate((times, times[1:], begins, ends))
    columns = np.concatenate((kept_after, kept_after[:-1], states, states))
    signs = np.repeat((1, -1, -1, 1), (len(times), len(times) - 1, len(states), len(states)))
    change = coo_array((signs, (rows, columns)), (len(times), num_unknowns))
    found = linprog(
        -np.append(blocks, np.zeros(len(times))),
        A_ub=resumed,
        b_ub=np.ones(len(times)),
        A_eq=change,
        b_eq=np.zeros(len(times)),
        bounds=np.stack((np.zeros(num_unknowns), limits), 1),
    )
    total = sum(request.input_length for request in requests)
    return float(-found.fun * requests[0].block_size / total)


def _find_repeats(requests: Sequence[TraceRequest]) -> tuple[_Int64Array, _Int64Array, _Int64Array]:
    """Return the states that could be resumed: from which request, by which, and their blocks.

    Of boundaries that the same two requests pass in succession only the deepest is returned.
    """
    nodes: dict[tuple[object, int], int] = {}
    last: dict[int, int] = {}  # the last request that passed each node
    deepest: dict[tuple[int, int], int] = {}
    for number, request in enumerate(requests):
        node = nodes.setdefault((request.tenant, -1), len(nodes))
        num_usable = (request.input_length - 1) // request.block_size  # a token is computed
        for depth, hash_id in enumerate(
            request.hash_ids[: request.input_length // request.block_size], 1
        ):
            node = nodes.setdefault((hash_id, node), len(nodes))
            if node in last and depth <= num_usable:
                deepest[last[node], number] = depth
            last[node] = number
    pairs = np.array(list(deepest), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], np.array(list(deepest.values()), np.int64)


def main() -> None:
    """Read a trace, and print its bounds."""
    parser = parser_for(__doc__)
    parser.add_argument("trace", help="a trace as for mamba-cache replay")
    parser.add_argument("--slots", type=int, nargs="+", default=[50, 200], metavar="N")
    options = parser.parse_args()
    requests = read_trace(options.trace)
    bounds = [
        Measurement(f"bound with {slots} slots", bound_of(requests, slots), "share of tokens")
        for slots in options.slots
    ]
    report("bound", bounds, options.json)


if __name__ == "__main__":
    main()
