"""Answer prompts with drafts and without, and compare: fewer steps, the same tokens.

A drafter proposes the tokens that followed an earlier occurrence of an answer's last tokens; one
step of the model verifies all drafts. The texts are CPython's documentation topics, with bytes as
tokens. Each text is answered, and the answer is continued in a second turn, which resumes from a
state that was saved while drafts were accepted.

The model is small and hybrid (Mamba-2, attention and MLP layers; float64, on the CPU). Its weights
are random, with embeddings that give the last token the most weight, so its answers repeat
themselves. The answers mean nothing, and the share of right drafts depends on model and text. But
drafts never change a token. Needs rich, which the extra `test` installs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mamba_cache import CacheConfig
from mamba_cache.reference import (
    Engine,
    HybridModel,
    HybridModelConfig,
    SamplingParams,
)

TEXTS = ("compound", "execmodel", "debugger")
PROMPT_TOKENS = 600
NEXT_TURN = b"\n\nPlease go on.\n\n"
DRAFTS = (0, 3, 7)
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=160),
    "drawn": SamplingParams(max_new_tokens=160, temperature=0.1, seed=1),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        answers: Tokens of every answer, in order.
        decoding: Counts of steps, tokens and drafts.
        skipped_tokens: Tokens of the second turns that were skipped.
        seconds: Duration of the run.
    """

    answers: list[tuple[int, ...]]
    decoding: Counter[str]
    skipped_tokens: int
    seconds: float


def make_model() -> HybridModel:
    """Return a model whose answers sometimes repeat themselves."""
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float64, seed=0)
    model.embedding *= 3
    return model


def run(model: HybridModel, sampling: SamplingParams, num_drafts: int) -> Outcome:
    """Answer every text, then continue every answer."""
    config = CacheConfig(
        block_size_tokens=64,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_requests=len(TEXTS),
        max_tokens=1024,
        max_sequence_length=2048,
        num_kv_blocks=128,
        max_slots=16,
        num_speculative_tokens=num_drafts,
    )
    engine = Engine(model, config)
    started_at = time.perf_counter()
    prompts = [list(topics[name].encode()[:PROMPT_TOKENS]) for name in TEXTS]
    first = engine.generate(prompts, sampling)
    turns = [
        [*prompt, *answer.tokens, *NEXT_TURN] for prompt, answer in zip(prompts, first, strict=True)
    ]
    second = engine.generate(turns, sampling)
    return Outcome(
        answers=[answer.tokens for answer in (*first, *second)],
        decoding=engine.decoding,
        skipped_tokens=sum(answer.skipped_tokens for answer in second),
        seconds=time.perf_counter() - started_at,
    )


def play() -> dict[tuple[str, int], Outcome]:
    """Do every run, with a progress bar if stderr is a terminal."""
    model = make_model()
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("runs", total=len(SAMPLINGS) * len(DRAFTS) + 1)

        def timed(sampling: SamplingParams, num_drafts: int) -> Outcome:
            outcome = run(model, sampling, num_drafts)
            bar.advance(task)
            return outcome

        timed(SamplingParams(max_new_tokens=8), 0)  # so that no run includes torch's start-up
        return {
            (name, num_drafts): timed(sampling, num_drafts)
            for name, sampling in SAMPLINGS.items()
            for num_drafts in DRAFTS
        }


def report(outcomes: Mapping[tuple[str, int], Outcome]) -> dict[str, Any]:
    """Compare runs, as a JSON object."""
    return {
        "runs": [
            {
                "sampling": sampling,
                "num_speculative_tokens": num_drafts,
                **outcome.decoding,
                "tokens_per_step": round(outcome.decoding["tokens"] / outcome.decoding["steps"], 3),
                "skipped_tokens": outcome.skipped_tokens,
                "seconds": round(outcome.seconds, 3),
            }
            for (sampling, num_drafts), outcome in outcomes.items()
        ],
        "outputs_match": all(
            outcome.answers == outcomes[sampling, 0].answers
            for (sampling, _), outcome in outcomes.items()
        ),
    }


def show(result: Mapping[str, Any]) -> None:
    """Print a report as a table."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "sampling": lambda r: r["sampling"],
        "drafts": lambda r: f"up to {r['num_speculative_tokens']}",
        "steps": lambda r: f"{r['steps']:,}",
        "tokens": lambda r: f"{r['tokens']:,}",
        "per step": lambda r: f"{r['tokens_per_step']:.2f}",
        "drafted": lambda r: f"{r['drafted_tokens']:,}",
        "right": lambda r: f"{r['accepted_tokens']:,}",
        "skipped": lambda r: f"{r['skipped_tokens']:,}",
        "seconds": lambda r: f"{r['seconds']:.1f}",
    }
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in columns:
        table.add_column(header, justify="left" if header == "sampling" else "right", no_wrap=True)
    for each in result["runs"]:
        table.add_row(*(cell(each) for cell in columns.values()))
    Console().print(table)
    print("steps, tokens: of decoding, over all answers; a request takes one step at a time.")
    print("skipped: tokens of the second turns that were not computed again, answers included.")
    verdict = "agree" if result["outputs_match"] else "DO NOT AGREE"
    print(f"All answers with and without drafts {verdict}.")


def main() -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: more threads mostly wait for each other
    result = report(play())
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["outputs_match"] else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # ends this script too when a reader such as `head` ends
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
