"""Answer prompts that share prefixes, with the prefix cache and without, and compare.

A small hybrid model (Mamba-2, attention and MLP layers; random weights, float64, on the CPU) reads
real English: CPython's documentation topics, with bytes as tokens. Every prompt is computed twice,
once without a cache. The answers mean nothing, but both must be the same. Needs rich, which the
extra `test` installs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mamba_cache import CacheConfig
from mamba_cache.reference import Completion, Engine, HybridModel, HybridModelConfig, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=24)
NUM_PROMPTS = 18
SCENES = """\
system prompt  four questions after one long text, submitted together
conversation   each prompt is all that was said before, and a new question
branch         a text, two others that leave it half-way, and the text again
eviction       texts A, B and C, and room for two of them
"""


class Run:
    """One run through all scenes.

    Args:
        model: Answers the prompts.
        cached: Whether prefix caching is on.
        on_answer: Called after each answer.

    Attributes:
        answers: The result of each prompt, by the prompt's name.
    """

    def __init__(self, model: HybridModel, *, cached: bool, on_answer: Callable[[], None]) -> None:
        self.answers: dict[str, Completion] = {}
        self._model = model
        self._cached = cached
        self._on_answer = on_answer

    def all_scenes(self) -> dict[str, Completion]:
        """Run every scene; return the answers."""
        engine = self.make_engine(num_kv_blocks=256, max_slots=32)
        self.system_prompt(engine)
        self.conversation(engine)
        self.branch(engine)
        self.eviction(self.make_engine(num_kv_blocks=24, max_slots=6))
        return self.answers

    def system_prompt(self, engine: Engine) -> None:
        """Ask four questions after one long text; one computes the text, the others wait."""
        system = "Answer from this text.\n\n" + topics["compound"][:2500] + "\n\nQuestion: "
        questions = (
            "When does an if statement run its else clause?",
            "What does break do in a while loop?",
            "May the body of a for loop assign to its target?",
            "Which exceptions does a bare except clause catch?",
        )
        prompts = {
            f"system prompt {number}": (system + question).encode()
            for number, question in enumerate(questions, start=1)
        }
        self.ask(engine, prompts)

    def conversation(self, engine: Engine) -> None:
        """Ask four questions in turn; each prompt contains the answers before."""
        history = b"Let us talk about this.\n\n" + topics["execmodel"][:1400].encode()
        questions = (
            "What binds a name?",
            "Where is a name visible that is bound in a block?",
            "What if it is not found at all?",
            "And what does the nonlocal statement change about that?",
        )
        for turn, question in enumerate(questions, start=1):
            prompt = history + f"\n\nQuestion: {question}\nAnswer: ".encode()
            answer = self.ask(engine, {f"conversation {turn}": prompt})
            history = prompt + bytes(answer.tokens)

    def branch(self, engine: Engine) -> None:
        """Ask a text, two prompts that share its first part, and the text again.

        The first branch finds keys and values but no state, and saves a state for the next one.
        """
        text = topics["debugger"].encode()[:2400]
        half = text[:1500]
        self.ask(engine, {"branch 1": text})
        self.ask(engine, {"branch 2": half + b"\n\nWhat would come next?"})
        self.ask(engine, {"branch 3": half + b"\n\nSum this up in a few words, please."})
        self.ask(engine, {"branch 4": text})

    def eviction(self, engine: Engine) -> None:
        """Ask three texts in turn; only two fit into the cache, so the last B is a miss."""
        texts = {
            "A": topics["formatstrings"],
            "B": topics["types"],
            "C": topics["specialnames"],
        }
        for number, text in enumerate("ABACAB", start=1):
            self.ask(engine, {f"eviction {number}: {text}": texts[text][:1200].encode()})

    def ask(self, engine: Engine, prompts: Mapping[str, bytes]) -> Completion:
        """Run prompts together; return the result of the last one."""
        completions = engine.generate([list(prompt) for prompt in prompts.values()], SAMPLING)
        for name, completion in zip(prompts, completions, strict=True):
            if completion.error is not None:
                raise completion.error
            self.answers[name] = completion
            self._on_answer()
        return completions[-1]

    def make_engine(self, *, num_kv_blocks: int, max_slots: int) -> Engine:
        """Return an engine with memory for this many blocks and saved states."""
        config = CacheConfig(
            block_size_tokens=128,
            ssm_chunk_size=self._model.config.ssm_chunk_size,
            max_requests=4,
            max_tokens=1024,
            max_sequence_length=4096,
            num_kv_blocks=num_kv_blocks,
            max_slots=max_slots,
            enable_prefix_caching=self._cached,
        )
        return Engine(self._model, config)


def play() -> tuple[dict[str, Completion], dict[str, Completion]]:
    """Run all scenes with the cache and without, with a progress bar if stderr is a terminal."""
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float64, seed=0)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("answers", total=2 * NUM_PROMPTS)

        def on_answer() -> None:
            bar.advance(task)

        warm_up(model)
        without_cache = Run(model, cached=False, on_answer=on_answer).all_scenes()
        with_cache = Run(model, cached=True, on_answer=on_answer).all_scenes()
    return with_cache, without_cache


def warm_up(model: HybridModel) -> None:
    """Run a prompt once, so that no measured request includes torch's start-up."""
    run = Run(model, cached=False, on_answer=lambda: None)
    run.ask(run.make_engine(num_kv_blocks=32, max_slots=0), {"warm-up": bytes(range(256)) * 4})


def report(
    with_cache: Mapping[str, Completion], without_cache: Mapping[str, Completion]
) -> dict[str, Any]:
    """Compare two runs, as a JSON object."""
    return {
        "requests": [
            {
                "name": name,
                "prompt_tokens": completion.admission.prompt_tokens,
                "kv_matched_blocks": completion.admission.kv_matched_blocks,
                "state_matched_blocks": completion.admission.state_matched_blocks,
                "skipped_tokens": completion.skipped_tokens,
                "computed_tokens": completion.computed_tokens,
                "ttft_ms": milliseconds(completion),
                "ttft_ms_without_cache": milliseconds(without_cache[name]),
                "miss_reason": completion.admission.miss_reason,
            }
            for name, completion in with_cache.items()
            if completion.admission is not None  # forks have none
        ],
        "outputs_match": {name: answer.tokens for name, answer in with_cache.items()}
        == {name: answer.tokens for name, answer in without_cache.items()},
        "generated_tokens": sum(len(answer.tokens) for answer in with_cache.values()),
        "prefill_tokens_computed": sum(c.computed_tokens for c in with_cache.values()),
        "prefill_tokens_without_cache": sum(c.computed_tokens for c in without_cache.values()),
    }


def milliseconds(completion: Completion) -> float:
    """Return a request's time to first token."""
    assert completion.ttft_seconds is not None, "a request that did not fail has a token"
    return round(completion.ttft_seconds * 1e3, 2)


def show(result: Mapping[str, Any]) -> None:
    """Print a report as a table."""
    columns = {
        "prompt": "prompt_tokens",
        "KV": "kv_matched_blocks",
        "state": "state_matched_blocks",
        "skipped": "skipped_tokens",
        "computed": "computed_tokens",
        "TTFT": "ttft_ms",
        "no cache": "ttft_ms_without_cache",
    }
    requests = result["requests"]
    table = Table(box=SIMPLE_HEAD, show_footer=True, padding=(0, 1, 0, 0))
    table.add_column("request", footer="total", no_wrap=True)
    for header, field in columns.items():
        total = sum(request[field] for request in requests)
        table.add_column(header, footer=f"{total:,.0f}", justify="right", no_wrap=True)
    for request in requests:
        table.add_row(request["name"], *(f"{request[field]:,.0f}" for field in columns.values()))
    computed, needed = result["prefill_tokens_computed"], result["prefill_tokens_without_cache"]
    verdict = "agree" if result["outputs_match"] else "DO NOT AGREE"
    print(SCENES)
    Console().print(table)
    print("KV, state: blocks of 128 tokens found cached, and those before a saved state.")
    print("TTFT: ms from submission to the first token; beside it, in the run without a cache.")
    print(f"Prefill: {computed:,} tokens computed instead of {needed:,}.")
    print(
        f"All {result['generated_tokens']} tokens generated with and without the cache {verdict}."
    )


def main() -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"scenes:\n{SCENES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: more threads mostly wait for each other
    result = report(*play())
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["outputs_match"] else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # ends this script too when a reader such as `head` ends
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
