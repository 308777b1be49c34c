"""Answer many prompts with continuous batching: a request joins as soon as the batch has room.

A small model with random weights stands in for a real one: its answers mean nothing, but must equal
those to single prompts. Compare the number of forwards: on a GPU the cost of a forward hardly
depends on the number of decoding requests.

Needs the extra: pip install -e '.[transformers]'
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers

from mamba_cache.integrations.transformers import PrefixCache

SYSTEM = f"Explain Python's keywords.\n{topics['if'][:700]}\n"
WORDS = ("with", "class", "del", "pass", "raise", "return", "import", "global")
LENGTHS = (5, 40, 12, 24, 8, 32, 16, 20)


def make_model() -> Any:
    """Return a Nemotron-H of a few layers, with bytes as tokens."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "nemotron_h", vocab_size=260, hidden_size=64, intermediate_size=128,
        hybrid_override_pattern="M-M*", mamba_num_heads=4, mamba_head_dim=32, n_groups=1,
        ssm_state_size=32, chunk_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def main() -> int:
    """Run the script; return its exit status."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = make_model()
    prompts = [list(f"{SYSTEM}{word}:".encode()) for word in WORDS]
    configs = [
        transformers.GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1)
        for length in LENGTHS
    ]
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    alone = []
    hook = model.register_forward_pre_hook(count)
    for prompt, config in zip(prompts, configs, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        alone.append(output[0, len(prompt) :].tolist())
    hook.remove()

    with PrefixCache(
        model, mamba_cache_gb=0.1, kv_cache_gb=0.1, block_size_tokens=64, max_requests=4
    ) as cache:
        outputs = list(cache.generate_batch(prompts, configs).values())
        rollouts = cache.generate_batch(
            prompts[:1], num_return_sequences=4, do_sample=True, max_new_tokens=12, seeds=1
        )
        stats, counts = cache.stats(), cache.batch_stats()
    assert counts is not None
    agree = [one.generated_tokens == answer for one, answer in zip(outputs, alone, strict=True)]
    answers = {tuple(one.generated_tokens) for one in rollouts.values()}
    batched = counts.prefill_forwards + counts.decode_steps
    print(f"{len(prompts)} prompts of {len(prompts[0])} tokens and more, 5 to 40 new ones each")
    print(f"one by one        {forwards:4} forwards")
    print(f"generate_batch    {batched:4} forwards, those of the rollouts included")
    print(f"prompt tokens     {stats.skipped_tokens:,} came from the cache")
    print(f"answers           {'agree' if all(agree) else 'DIFFER'}")
    print(f"rollouts          {len(answers)} different ones, {stats.forks} of them forks")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
