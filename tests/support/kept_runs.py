"""What the commands in ``tests/`` printed, in the form that docs/benchmarks keeps."""

import json
import os
import platform
import sys
from datetime import date
from importlib import metadata
from pathlib import Path


def add_json_option(parser):
    parser.add_argument("--json", type=Path, help="where to write what was printed, to be kept")


def keep(path, columns, rows, *, none_of=(), packages=("torch",), **more):
    """Write the rows of a table; what a run may have none of gets a limit.

    Args:
        path: The file; None writes nothing.
        columns: The names of the columns.
        rows: The cells, as they were printed.
        none_of: How often each kind of breach came, by its name; 0 is wanted.
        packages: Whose versions matter.
        more: Other figures of the run, by name.
    """
    if path is None:
        return
    script = Path(sys.argv[0])
    name = script.stem
    folder = "tests/benchmarks" if script.parent.name == "benchmarks" else "tests"
    measurements = [
        {
            "name": kind,
            "value": number,
            "unit": "times",
            "limit": 0,
            "at_least": False,
            "runs": 1,
            "detail": "",
            "passed": not number,
        }
        for kind, number in dict(none_of).items()
    ]
    report = {
        "benchmark": name,
        "command": " ".join(["python", f"{folder}/{name}.py", *_arguments()]),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "versions": {each: metadata.version(each).partition("+")[0] for each in packages},
        "passed": all(each["passed"] for each in measurements),
        **more,
        "measurements": measurements,
        "records": [dict(zip(columns, cells, strict=True)) for cells in rows],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _arguments():
    """What the command was called with, but for where its result goes."""
    words = iter(sys.argv[1:])
    for word in words:
        if word == "--json":
            next(words)
        elif not word.startswith("--json="):
            yield f'"{word}"' if " " in word else word
