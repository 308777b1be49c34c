"""Runs random conversations with a prefix cache, and prints a table of the results.

Run ``python tests/conversation_search.py --conversations 2000 --seed 0``: half an hour on one core.
Conversation ``n`` of a search has the seed ``seed + n`` and depends on nothing else: ``--seed``
alone repeats it. The exit status is 1 if anything was wrong.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import torch
from conversations import SUBJECTS, Conversation, WrongAnswerError


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--every", type=int, default=1, help="this share only: every N-th of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return search(range(options.seed, options.seed + options.conversations, options.every), options)


def search(seeds, options):
    """Runs the conversations of ``seeds``, prints the table; returns whether any was wrong."""
    counts, wrong = Counter(), []
    started, number = time.process_time(), 0
    try:
        for number, seed in enumerate(seeds, 1):
            conversation = Conversation(seed)
            try:
                conversation.run()
            except WrongAnswerError as error:
                wrong.append(seed)
                print(error, file=sys.stderr, flush=True)
            counts += conversation.counts
            if number % 100 == 0 or number == len(seeds):
                print(
                    f"{number} conversations, {counts['calls judged']} calls, "
                    f"{len(wrong)} wrong, {time.process_time() - started:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    except KeyboardInterrupt:
        print(f"interrupted in conversation {number} of {len(seeds)}", file=sys.stderr)
    table = {
        "seeds": str(seeds),
        "models": len(SUBJECTS),
        "wrong": wrong,
        "process seconds": round(time.process_time() - started),
        **dict(sorted(counts.items())),
    }
    print(json.dumps(table, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
