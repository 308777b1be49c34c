"""The checks of a soak: answers without a cache, and counts that must add up."""

from __future__ import annotations

from dataclasses import replace

from mamba_cache.bench.clients import Turn
from mamba_cache.bench.no_model import NoModel
from mamba_cache.config import CacheConfig
from mamba_cache.context import CacheStats
from mamba_cache.errors import InvariantError
from mamba_cache.reference import Engine, LanguageModel, SamplingParams

__all__ = ["UncachedAnswers", "check_conservation"]

_ENOUGH = 4  # answers from one check to the next


class UncachedAnswers:
    """Asks the model again, without a cache, what it said in a few answers.

    Args:
        model: It never fails. Of ``NoModel``, which makes its answers up, nothing is asked.
        config: Settings of the soak.
    """

    def __init__(self, model: LanguageModel, config: CacheConfig) -> None:
        self._model = model
        self._config = replace(
            config,
            max_requests=1,
            max_tokens=config.max_sequence_length,
            num_kv_blocks=config.max_blocks_per_request,
            max_slots=0,
            enable_prefix_caching=False,
        )
        self._offered: list[tuple[Turn, tuple[int, ...]]] = []

    def offer(self, turn: Turn, answer: tuple[int, ...]) -> None:
        """Take an answer to check, if there are not enough."""
        if len(self._offered) < _ENOUGH and not isinstance(self._model, NoModel):
            self._offered.append((turn, answer))

    def check(self) -> int:
        """Check the answers that were taken, and return how many.

        Raises:
            InvariantError: One is wrong.
        """
        offered, self._offered = self._offered, []
        for turn, answer in offered:
            sampling = SamplingParams(max_new_tokens=turn.max_new_tokens)
            [alone] = Engine(self._model, self._config).generate([turn.prompt], sampling)
            if alone.tokens != answer:
                raise InvariantError(f"the answer is {answer}, without a cache {alone.tokens}")
        return len(offered)


def check_conservation(stats: CacheStats, config: CacheConfig) -> None:
    """Check that all slots, and all blocks, are one thing or another.

    Raises:
        InvariantError: They do not.
    """
    slots = stats.free_slots + stats.reserved_slots + stats.cached_slots
    slots += stats.leaving_slots + stats.arriving_slots
    blocks = stats.free_blocks + stats.cached_blocks + stats.used_blocks
    blocks += stats.leaving_blocks + stats.arriving_blocks
    if (slots, blocks) != (config.max_slots, config.num_kv_blocks):
        raise InvariantError(
            f"{slots} slots and {blocks} KV blocks add up, of {config.max_slots} and "
            f"{config.num_kv_blocks}"
        )
