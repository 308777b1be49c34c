"""Reports of the commands in ``tests/``, in the format of docs/benchmarks."""

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path


def add_json_option(parser):
    parser.add_argument("--json", type=Path, help="where to write what was printed, to be kept")


def keep(path, columns, rows, *, packages=("torch",), **more):
    """Write the rows of a table as a report."""
    if path is None:
        return
    report = {
        "benchmark": Path(sys.argv[0]).stem,
        "arguments": sys.argv[1:],
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "versions": {each: metadata.version(each).partition("+")[0] for each in packages},
        **more,
        "records": [dict(zip(columns, cells, strict=True)) for cells in rows],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
