"""Ask a Hugging Face hybrid model many questions after one few-shot prompt, and time the answers.

With --model, the model of that folder answers. Else a small one of the chosen family does, with
random weights and bytes as tokens: what it says means nothing, but with the cache and without it
must say the same. The text is real: the documentation topics that ship inside CPython.

Needs the extra: pip install -e '.[transformers,progress]'
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mamba_cache.integrations.transformers import PrefixCache

SHOTS = ("if", "while", "for", "try")
QUESTIONS = ("with", "class", "del", "pass", "raise", "return", "import", "global")
MAX_NEW_TOKENS = 16

_SHARED: dict[str, Any] = {"vocab_size": 260, "hidden_size": 128, "intermediate_size": 256}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*-M-", "mamba_num_heads": 8, "mamba_head_dim": 32,
        "n_groups": 1, "ssm_state_size": 32, "chunk_size": 64,
    },
    "mamba2": {
        "num_hidden_layers": 4, "num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 32,
        "chunk_size": 64,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4, "layer_types": _MIXED, "linear_num_key_heads": 4,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
}  # fmt: skip


class ByteTokenizer:
    """Bytes as tokens, for models that have learned nothing anyway."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        """Return the text's bytes."""
        ids = torch.tensor([list(text.encode())])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load(folder: str | None, family: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    if folder is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        if torch.cuda.is_available():
            model = model.to("cuda")
        return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)
    heads = {} if family == "mamba2" else _HEADS
    config = transformers.AutoConfig.for_model(
        family, **{**_SHARED, **heads, **FAMILIES[family]}, pad_token_id=0, eos_token_id=2
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval(), ByteTokenizer()


def worked_examples() -> str:
    """Return what all prompts begin with."""
    return "".join(f"Keyword: {word}\n{topics[word][:600]}\n\n" for word in SHOTS)


def prompts() -> Iterator[tuple[str, str]]:
    """Yield names and prompts: worked examples that all share, then a question of its own."""
    shots = worked_examples()
    for word in QUESTIONS:
        yield word, f"{shots}Keyword: {word}\n{topics[word][:120]}"


class FirstToken:
    """A streamer that notes when the first token is there.

    Attributes:
        milliseconds: Since the streamer was made.
    """

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self._start = time.perf_counter()
        self._calls = 0

    def put(self, _: torch.Tensor) -> None:
        """Hear the prompt, then each token."""
        self._calls += 1
        if self._calls == 2:
            self.milliseconds = (time.perf_counter() - self._start) * 1e3

    def end(self) -> None:
        """Hear that there are no more."""


def answer(who: Any, inputs: dict[str, torch.Tensor], **more: Any) -> tuple[list[int], float]:
    """Return what a model, or a cache around it, answers, and the time to the first token in ms."""
    clock = FirstToken()
    options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "streamer": clock}
    output = who.generate(**inputs, **options, **more)
    return output[0].tolist(), clock.milliseconds


def play(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Answer every prompt with the cache and without."""
    console = Console(stderr=True)
    rows = []
    with (
        PrefixCache(model, mamba_cache_gb=0.25, kv_cache_gb=0.25) as cache,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        shared = tokenizer(worked_examples(), return_tensors="pt")["input_ids"].shape[1]
        model.generate(**tokenizer("warm up", return_tensors="pt"), max_new_tokens=2)
        for word, prompt in progress.track(list(prompts()), description="answering"):
            inputs = {
                k: v.to(model.device) for k, v in tokenizer(prompt, return_tensors="pt").items()
            }
            skipped = cache.stats().skipped_tokens
            plain, plain_ms = answer(model, inputs)
            cached, cached_ms = answer(cache, inputs, checkpoints=[shared])
            length = inputs["input_ids"].shape[1]
            rows.append(
                {
                    "question": word,
                    "prompt_tokens": length,
                    "computed_tokens": length - (cache.stats().skipped_tokens - skipped),
                    "ttft_ms": round(cached_ms, 2),
                    "ttft_ms_without_cache": round(plain_ms, 2),
                    "outputs_match": cached == plain,
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(box=SIMPLE_HEAD)
    for header in ("question", "prompt", "computed", "TTFT ms", "without cache", "answers"):
        table.add_column(header, justify="left" if header == "question" else "right")
    for row in rows:
        table.add_row(
            row["question"],
            f"{row['prompt_tokens']:,}",
            f"{row['computed_tokens']:,}",
            f"{row['ttft_ms']:,.0f}",
            f"{row['ttft_ms_without_cache']:,.0f}",
            "agree" if row["outputs_match"] else "DIFFER",
        )
    Console().print(table)
    print("The first prompt fills the cache, and saves a state where the others will leave it;")
    print("from the second on, only what is new is computed, and what lies in the same block.")


def main() -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder with a model and its tokenizer")
    parser.add_argument("--family", choices=list(FAMILIES), default="nemotron_h")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the tensors are small: threads mostly wait for each other
    rows = play(*load(arguments.model, arguments.family))
    if arguments.json:
        print(json.dumps({"requests": rows}, indent=2))
    else:
        show(rows)
    return 0 if all(row["outputs_match"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
