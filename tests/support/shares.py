"""A long search divided among processes."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch


def shared_out(function, name, moments, num_processes):
    """Yield results of ``function(name, some)`` for shares of the moments, in new processes.

    There are eight shares for each process, so that a slow share delays the end less.
    """
    num_shares = 8 * num_processes
    shares = [moments[first::num_shares] for first in range(num_shares)]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(function, [name] * num_shares, shares)
