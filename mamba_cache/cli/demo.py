"""``mamba-cache demo``: a small model answers prompts that share prefixes, while you watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from rich.console import RenderableType
from rich.live import Live

from mamba_cache.bench.measure import print_json
from mamba_cache.cli.output import AsJson, console, make_table
from mamba_cache.config import CacheConfig
from mamba_cache.reference import Completion, Engine, HybridModel, HybridModelConfig, SamplingParams

__all__ = ["Answer", "demo", "play"]

_BLOCK = 128
_SAMPLING = SamplingParams(max_new_tokens=16)
_RULES = (
    b"You are the librarian of a small town. You are patient, you answer in one or two short "
    b"sentences, and you name the shelf on which a book stands whenever somebody asks for one. "
) * 8
_RULES = _RULES[:1390]  # a question crosses a block boundary: the rules end inside a block


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one prompt.

    Attributes:
        name: What the prompt shows.
        prompt_tokens: Tokens of the prompt.
        skipped_tokens: Those that were not computed, because a state was restored.
        ttft_ms: Milliseconds to the first token.
        ttft_ms_without_cache: The same in an engine that caches nothing.
        outputs_match: Whether both generated the same tokens.
        miss_reason: Why nothing was skipped; None if something was.
    """

    name: str
    prompt_tokens: int
    skipped_tokens: int
    ttft_ms: float
    ttft_ms_without_cache: float
    outputs_match: bool
    miss_reason: str | None


def demo(as_json: AsJson = False) -> None:
    """Watch a small model answer prompts that share prefixes, with the cache and without.

    Its weights are random and bytes are its tokens, so what it says means nothing; but the answers
    with the cache and without must be the same.
    """
    torch.set_num_threads(1)  # the tensors are small: more threads mostly wait for each other
    answers: list[Answer] = []
    out = console()
    watched = out.is_terminal and not as_json
    with Live(console=out, auto_refresh=False) if watched else nullcontext() as live:
        for answer in play():
            answers.append(answer)
            if live is not None:
                live.update(_table(answers), refresh=True)
    result = _report(answers)
    if as_json:
        print_json(result)
    else:
        if not watched:
            out.print(_table(answers))
        _conclude(result)
    if not result["outputs_match"]:
        raise typer.Exit(1)


def play() -> Iterator[Answer]:
    """Run the prompts one after the other in two engines; yield what became of each."""
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float64, seed=0)
    with_cache, without = (_make_engine(model, cached=cached) for cached in (True, False))
    _ask(_make_engine(model, cached=False), _RULES)  # so that no answer pays for torch's start
    talk = _RULES
    for name, question, goes_on in (
        ("the first prompt", b"Where is Moby Dick?", False),
        ("the same rules, another question", b"Do you have books about stars?", False),
        ("again: a state is now at the rules' end", b"What do you read yourself?", True),
        ("the conversation goes on", b"And what is it about?", True),
        ("and on", b"Would my daughter like it?", True),
    ):
        prompt = talk + b"\n\nQuestion: " + question + b"\nAnswer: "
        cached, plain = _ask(with_cache, prompt), _ask(without, prompt)
        yield _compare(name, cached, plain)
        if goes_on:
            talk = prompt + bytes(cached.tokens)


def _make_engine(model: HybridModel, *, cached: bool) -> Engine:
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_requests=1,
        max_tokens=2048,
        max_sequence_length=4096,
        num_kv_blocks=128,
        max_slots=16,
        enable_prefix_caching=cached,
    )
    return Engine(model, config)


def _ask(engine: Engine, prompt: bytes) -> Completion:
    return engine.generate([list(prompt)], _SAMPLING)[0]


def _compare(name: str, cached: Completion, plain: Completion) -> Answer:
    return Answer(
        name,
        cached.prompt_tokens,
        cached.skipped_tokens,
        _first_token_ms(cached),
        _first_token_ms(plain),
        outputs_match=cached.tokens == plain.tokens,
        miss_reason=None if cached.miss_reason is None else cached.miss_reason.value,
    )


def _first_token_ms(completion: Completion) -> float:
    assert completion.ttft_seconds is not None, "the demo's cache holds each of its prompts"
    return round(completion.ttft_seconds * 1e3, 2)


def _report(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "answers": [asdict(answer) for answer in answers],
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "skipped_tokens": sum(answer.skipped_tokens for answer in answers),
        "outputs_match": all(answer.outputs_match for answer in answers),
    }


def _table(answers: Sequence[Answer]) -> RenderableType:
    table = make_table(
        ["prompt", ">tokens", ">skipped", ">first token", ">without cache", "answers", "why a miss"]
    )
    for answer in answers:
        table.add_row(
            answer.name,
            f"{answer.prompt_tokens:,}",
            f"{answer.skipped_tokens:,}",
            f"{answer.ttft_ms:,.1f} ms",
            f"{answer.ttft_ms_without_cache:,.1f} ms",
            "equal" if answer.outputs_match else "[bold red]DIFFERENT",
            answer.miss_reason or "",
        )
    return table


def _conclude(result: dict[str, Any]) -> None:
    share = result["skipped_tokens"] / result["prompt_tokens"]
    verdict = "are equal" if result["outputs_match"] else "DIFFER"
    console().print(
        f"{result['skipped_tokens']:,} of {result['prompt_tokens']:,} prompt tokens "
        f"({share:.0%}) were not computed again; the answers with and without the cache {verdict}."
    )
