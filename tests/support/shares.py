"""A long search divided among processes."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch


def shared_out(function, name, moments, num_processes):
    """What ``function(name, some)`` returns for shares of the moments, each in a fresh process.

    There are eight shares a process, so that one which got the slow moments holds nobody up.
    """
    num_shares = 8 * num_processes
    shares = [moments[first::num_shares] for first in range(num_shares)]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(function, [name] * num_shares, shares)
