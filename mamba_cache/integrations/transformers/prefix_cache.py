"""``PrefixCache``: the prefix cache of one model."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import torch

from mamba_cache._checks import (
    as_items,
    check_choice,
    check_clock,
    check_int,
    check_kind,
    check_number,
)
from mamba_cache._guard import CallGuard, guarded
from mamba_cache._torch import check_device_room
from mamba_cache.cache import (
    SLOT_POLICIES,
    CheckpointPlacement,
    ExtraKey,
    KVBlockAllocator,
    SlotEvictionPolicy,
    SlotPool,
)
from mamba_cache.cache.placement import BranchPoint, check_placement
from mamba_cache.cache.policies import check_policy
from mamba_cache.cache.sequence import check_hint
from mamba_cache.config import CacheConfig, HashAlgorithm, SlotPolicyName
from mamba_cache.context import CacheStats, HitToVerify, Pin, PrefixContent, VerificationStats
from mamba_cache.errors import (
    BudgetError,
    CapacityError,
    InvalidArgumentError,
    MissingStateError,
    ModelChangedError,
    NotCopyableError,
    StepOrderError,
    UnresumableModelError,
)
from mamba_cache.events import Listeners
from mamba_cache.integrations.transformers.batching.batcher import (
    Batcher,
    BatchStats,
)
from mamba_cache.integrations.transformers.batching.calls import BatchCall
from mamba_cache.integrations.transformers.batching.graphs import GRAPH_DEVICES
from mamba_cache.integrations.transformers.batching.paged import register_attention
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.checkpoints import read_checkpoints
from mamba_cache.integrations.transformers.fingerprint import (
    BypassReason,
    WeightsCheck,
    check_variant,
)
from mamba_cache.integrations.transformers.generation import Generation
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.options import (
    OptionsReader,
    ServedOptions,
    has_own_code,
    without_text_types,
)
from mamba_cache.integrations.transformers.prefill import Prefiller
from mamba_cache.integrations.transformers.probe import probe
from mamba_cache.integrations.transformers.prompts import (
    check_prompts,
    pad_prompts,
    read_prompt,
    read_prompts,
)
from mamba_cache.integrations.transformers.replacement import put_back
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore
from mamba_cache.integrations.transformers.tiers import PrefixTiers
from mamba_cache.tiers import TierStats
from mamba_cache.tiers.directory import cache_secret

if TYPE_CHECKING:  # which imports this
    from mamba_cache.integrations.transformers.serve.models import BatchManager

__all__ = ["PrefixCache", "check_settings"]

_GIB = 2**30
_SEGMENT_WITH_KERNELS = 2**20
_SEGMENT_OF_REFERENCE = 1024
_MAX_CHUNK_TOKENS = 8192  # maximum prompt tokens in one step of a batch, and tokens of a block
_MIN_SLOTS = 4
"""Minimum for the adaptive policy by default: with fewer slots one chat could lose its state."""

_BLOCKS_WITHOUT_MEMORY = 2**18
"""KV blocks of a model without attention: only their bookkeeping takes memory."""

_OF_CONFIG = (
    "block_size_tokens", "reuse_answers", "max_requests", "host_cache_gb", "disk_cache_path",
    "verify_hits", "store", "hash_algorithm", "hash_secret", "max_pinned_share",
)  # fmt: skip
"""Settings that are passed on to ``CacheConfig``, which checks them."""


class PrefixCache:
    """Reuses the prefixes of prompts that a transformers model has computed before.

    One thread at a time uses the model through the cache; other threads wait. After any exception
    the call's blocks and slots are released, and the model is as before. If the exception came
    during a change of the bookkeeping, the next call resets the cache and counts that in
    ``stats().self_resets``.

    A call that uses the model raises ``ModelChangedError`` if the model was moved or its weights
    changed, ``StepOrderError`` once the cache is closed, and ``ConcurrentUseError`` in a callback
    of another call.

    Args:
        model: A causal language model of transformers with linear-attention layers. It stays
            usable on its own.
        mamba_cache_gb: Budget for saved states in GiB (2**30 bytes).
        kv_cache_gb: Budget for keys and values in GiB. Not used by models without attention.
        block_size_tokens: Tokens of a block, at most 8,192. States lie at block boundaries, so a
            hit may compute up to one block of cached tokens again. If it is a multiple of the
            model's SSM chunk, a hit computes the same chunks as a miss, and its results are
            bit-identical; with other sizes they are equal to rounding.
        segment_tokens: Maximum tokens of a prompt in one forward; a multiple of
            ``block_size_tokens``. Shorter segments need less memory. Default: the whole prompt with
            kernels; 1,024 with transformers' reference path, whose scans need much memory for each
            token. After a forward that runs out of memory the segment is halved and tried again.
        slot_policy: Which saved states are evicted first: a policy, or a name as in
            ``CacheConfig.slot_policy``. Default: "adaptive", which learns which states are used
            again, and may refuse to save a state; "lru" with fewer than 4 slots.
        placement: Where states inside a prompt are saved. The states at the end of the prompt and
            of the answer cost nothing and are always saved. Default: where a prompt branches off
            from an earlier one (``BranchPoint``).
        reuse_answers: Keep the states of answers, for the next turn of a conversation. These states
            come from decoding, which in low precision rounds differently from a prefill, as in
            transformers' own caches. False: keep prompts only; an answer that comes back as part of
            a prompt is computed again.
        weights_check: How much of the weights each call compares with the weights of the cached
            prefixes. "full": all, by a checksum at the speed of memory, beside the forward on a
            GPU. "sample": the first 64 KiB of each tensor and one sixteenth of the rest in turn; a
            change elsewhere may give wrong answers in up to 15 calls. "off": only the tensors'
            addresses and PyTorch's count of writes, which fused optimizers, ``.data`` and inference
            tensors bypass.
        max_requests: Requests that ``generate_batch`` runs at once. Their live states take memory
            beside the budgets from the first batched call on; their keys and values are in the
            budget.
        cuda_graphs: Whether decode steps and short chunks of prompts are replayed from CUDA graphs,
            in ``generate_batch`` and in calls of ``generate`` that run as a batch. The graphs'
            memory is beside the budgets; ``batch_stats()`` reports it.
        host_cache_gb: Budget in GiB for prefixes in host memory, beyond the budgets above.
            Default: no prefix is kept in host memory.
        disk_cache_path: A directory in which prefixes outlive the process. A later process with the
            same weights, settings and versions finds them. It needs ``host_cache_gb``, through
            which entries are copied, and has one user at a time.
        disk_cache_gb: Maximum size of all files below that path, in GiB.
        verify_hits: Share of hits, from 0 to 1, that ``verify_pending`` computes again without the
            cache and compares.
        store: A store of prefixes that several processes share, on this machine or others: a
            ``stores.BlobStore``, or the URL of one. It needs ``host_cache_gb`` and ``hash_secret``.
        hash_algorithm: Hash function of block digests, as in ``CacheConfig``: "blake2b" and
            "sha256" cannot be forged; "xxh3_128" is only for where every client is trusted.
        hash_secret: Key of the block digests, not empty; the same bytes in all processes that share
            a store. Default: random for this cache; with ``disk_cache_path`` drawn once and kept in
            a file there.
        max_pinned_share: Share of the KV blocks, and of the slots, that pins may hold together,
            from 0 to 1.
        clock: Returns the time in seconds at which pins end; monotonic.
        variant: A name for code in the model that its libraries did not bring: hooks, replaced
            methods, registered attention functions. With such code and no variant, calls bypass the
            cache. Use a new name whenever the behaviour of the code changes.

    Raises:
        InvalidArgumentError: The model is of a kind that cannot be cached, or a setting is out of
            range.
        UnresumableModelError: The model does not resume correctly from a saved state.
        BudgetError: A budget is smaller than one state or one block, or larger than the memory.
        TierInUseError: Another process uses ``disk_cache_path``.
        OSError: ``disk_cache_path`` cannot be created or opened.
        MissingExtraError: transformers is not installed.
        UnsupportedVersionError: transformers is too old.
    """

    def __init__(
        self,
        model: Any,
        *,
        mamba_cache_gb: float,
        kv_cache_gb: float,
        block_size_tokens: int = 32,
        segment_tokens: int | None = None,
        slot_policy: SlotEvictionPolicy | SlotPolicyName | None = None,
        placement: CheckpointPlacement | None = None,
        reuse_answers: bool = True,
        weights_check: WeightsCheck = "full",
        max_requests: int = 64,
        cuda_graphs: bool = True,
        host_cache_gb: float | None = None,
        disk_cache_path: str | os.PathLike[str] | None = None,
        disk_cache_gb: float = 16.0,
        verify_hits: float = 0.0,
        store: Any = None,
        hash_algorithm: HashAlgorithm = "blake2b",
        hash_secret: bytes | None = None,
        max_pinned_share: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        variant: str | None = None,
    ) -> None:
        settings = {**vars()}  # all arguments, by their names
        del settings["self"]
        settings["placement"] = BranchPoint() if placement is None else placement
        self._guard = CallGuard(self, take_back=self._take_back, heal=self._heal)
        self._bypasses: Counter[str] = Counter()
        self._skipped_before = 0
        self._settings = SimpleNamespace(**settings)
        self._config = check_settings(settings)
        register_attention()
        self._num_set_ups = 0  # one, and one for each change of the model's device or dtype
        self._set_up(Listeners())

    def _set_up(self, listeners: Listeners) -> None:
        """Probe the model's layers, and allocate the memory of their cache."""
        settings = self._settings
        self._num_set_ups += 1
        self._is_closed = True  # stays so if the set-up raises
        self._runner = ModelRunner(settings.model, settings.weights_check, settings.variant)
        layout, is_step_exact, self._capture = probe(self._runner, settings.block_size_tokens)
        # The probe was the first run: attributes that this second run rewrites change in every run.
        self._runner.fingerprint.leave_out_what_changes(self._runner.try_out)
        hash_secret = settings.hash_secret
        if hash_secret is None:
            path = settings.disk_cache_path
            hash_secret = secrets.token_bytes(32) if path is None else cache_secret(path)
        budgets = {"mamba_cache_gb": settings.mamba_cache_gb}
        if layout.bytes_per_block:
            budgets["kv_cache_gb"] = settings.kv_cache_gb
        check_device_room(int(sum(budgets.values()) * _GIB), budgets, layout.device)
        num_slots = _count(
            "mamba_cache_gb", settings.mamba_cache_gb, layout.state_spec.bytes_per_slot, "state"
        )
        config = replace(
            self._config,
            max_slots=num_slots,
            num_kv_blocks=_count(
                "kv_cache_gb", settings.kv_cache_gb, layout.bytes_per_block, "KV block"
            ),
            min_computed_tokens=1 if is_step_exact else 2,
            hash_secret=hash_secret,
        )
        self._options = OptionsReader(settings.model)
        max_segment = settings.segment_tokens or _default_segment(
            settings.block_size_tokens, self._capture
        )
        self._chunk_tokens = min(max_segment, _MAX_CHUNK_TOKENS)
        self._store = PrefixStore(
            layout,
            config,
            slot_policy=_read_policy(settings.slot_policy, num_slots),
            listeners=listeners,
            placement=settings.placement,
            clock=settings.clock,
        )
        self._store.join(self._guard)
        may_shrink = settings.segment_tokens is None
        self._prefiller = Prefiller(
            self._runner, self._store, self._capture, max_segment, may_shrink
        )
        self._batcher: Batcher | None = None
        # Without capture a batch could save no states inside of prompts.
        self._can_batch = self._capture is not None  # set to False if no batcher can be made
        self._home = (*self._runner.placement(), self._runner.vocabulary)
        self._runner.fingerprint.begin()
        if settings.host_cache_gb is not None:
            self._store.add_tiers(PrefixTiers(self._store, self._runner))
        self._is_closed = False

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that tells callers of a model, such as pipelines, what to call.

            Raises:
                AttributeError: Always.
            """
            raise AttributeError(
                f"a PrefixCache has no attribute {name!r}. It is no model, so pipeline(model=...) "
                "cannot take it: tokenize the prompt, call cache.generate(**inputs), and decode "
                "what that returns"
            )

    def __repr__(self) -> str:
        model = type(self._settings.model).__name__
        if self._is_closed:
            return f"<PrefixCache of {model}, closed>"
        stats = self._store.stats()
        return (
            f"<PrefixCache of {model} on {self._home[0]}: {stats.cached_slots:,} of "
            f"{self._store.slots.max_slots:,} states and {stats.cached_blocks:,} KV blocks of "
            f"{self.block_size_tokens} tokens are cached; {stats.requests:,} requests, "
            f"{stats.hit_rate:.0%} hits, {stats.skipped_tokens:,} tokens skipped>"
        )

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @guarded(waits=True)
    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *,
        cache_salt: ExtraKey = None,
        checkpoints: Sequence[Any] | None = None,
        will_continue: bool | None = None,
        source: Hashable = None,
        variant: str | None = None,
        **options: Any,
    ) -> Any:
        """Generate as ``model.generate`` does, and compute only tokens that are not cached.

        Args:
            inputs: Token ids, also accepted as ``input_ids``: a tensor [rows, length], padded on
                the left, or a list of prompts of any lengths, each a list of ints.
            generation_config: As for ``model.generate``. Default: the model's.
            cache_salt: Prompts of different salts never share anything.
            checkpoints: Lengths in tokens of prefixes that other prompts will share: a system
                prompt, worked examples (``message_ends`` finds them). Their states are saved at the
                first use; a length inside a block is rounded down to the block's beginning. For
                several rows one list for all rows, or a list for each; padding is not counted.
            will_continue: Whether longer prompts that begin with these will follow, as in
                ``Request``: a hint for ``AdaptiveSlotPolicy``. None: unknown.
            source: The source of the hint; each is trusted as far as its hints come true.
            variant: As in ``PrefixCache``, for this call.
            options: Other arguments of ``model.generate``.

        Returns:
            What ``model.generate`` returns.

        Raises:
            InvalidArgumentError: The prompts, checkpoints or hints are malformed, or an option
                cannot be served.
        """
        self._begin_call()
        check_hint(will_continue, source)
        if generation_config is not None:
            options["generation_config"] = generation_config
        given = options.pop("input_ids", None)
        if inputs is not None and given is not None:
            raise InvalidArgumentError("give prompts as inputs or as input_ids, not both")
        options = without_text_types(options)
        served = self._options.read(options)
        ids, mask = self._read_prompts(given if inputs is None else inputs, options, served)
        named: list[list[int]] = []
        if checkpoints is not None:
            # Without a mask ``generate`` may take tokens for padding.
            lengths = (torch.ones_like(ids) if mask is None else mask).count_nonzero(dim=1)
            named = read_checkpoints(checkpoints, lengths.tolist())
        with Generation(
            runner=self._runner,
            prefiller=self._prefiller,
            store=self._store,
            fields={"cache_salt": cache_salt, "will_continue": will_continue, "source": source},
            checkpoints=named,
            served=served,
            keeps_decoded=self._settings.reuse_answers,
            variant=check_variant(variant),
            find_batcher=self._find_batcher if self._may_batch(served, options) else None,
            has_streamer=options.get("streamer") is not None,
        ) as generation:
            own = options.get("stopping_criteria") or ()
            criteria = [*as_items("stopping_criteria", own, "criteria"), generation.watch]
            arguments = {
                **options,
                **served.overrides,
                "attention_mask": mask,
                self._runner.cache_name: generation.cache,
                "stopping_criteria": transformers().StoppingCriteriaList(criteria),
            }
            output = self._runner.model.generate(ids, **arguments)
            self._runner.fingerprint.confirm()
            generation.publish(output)
        if generation.bypass == "hidden tokens":
            self._count_bypass(
                generation.bypass,
                "without attention_mask, generate also hides tokens inside of prompts that equal "
                f"the pad token ({served.pad_token_id}); pass attention_mask, with ones for tokens "
                "that count",
            )
        elif generation.bypass:
            self._count_foreign()
        return output

    def _may_batch(self, served: ServedOptions, options: Mapping[str, Any]) -> bool:
        """Return whether a batch may compute a call of ``generate``: only if graphs may be used.

        Without graphs a decode step of few rows is slower in a batch than in transformers' loop.
        """
        device = self._home[0].type
        return (
            device in GRAPH_DEVICES
            and served.is_plain
            and self._can_batch
            and not has_own_code(options)
            and not self._why_eager()
            and not self._runner.is_compiled
            and not torch.is_autocast_enabled(device)
        )

    def _find_batcher(self) -> Batcher | None:
        """Return the batcher; None if the model cannot be run in batches or memory is short."""
        try:
            return self._ready_batcher()
        except (
            CapacityError,
            InvalidArgumentError,
            UnresumableModelError,
            torch.OutOfMemoryError,
        ) as error:
            self._can_batch = isinstance(error, CapacityError)  # blocks may become free again
            self._store.let_go()
            return None

    @guarded(waits=True)
    def generate_batch(
        self,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        seeds: int | Sequence[int] | None = None,
        tokenizer: Any = None,
        streamer: Any = None,
        cache_salt: ExtraKey | list[ExtraKey] = None,
        checkpoints: Sequence[Any] | None = None,
        will_continue: bool | list[bool | None] | None = None,
        source: Hashable = None,
        variant: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Generate as ``model.generate_batch`` does, for hybrid models and with the cache.

        Requests of any lengths run together and leave when they finish. Prompts resume from cached
        states and are computed in chunks beside the decoding requests, which are one batch.

        Args:
            inputs: Prompts, each a list of token ids.
            generation_config: How answers are made: one ``GenerationConfig`` for all prompts, or a
                list with one for each. Default: the model's. Further answers to a prompt
                (``num_return_sequences``) are forks of the first.
            continuous_batching_config: A ``ContinuousBatchingConfig``, of which
                ``max_batch_tokens`` (of prompts, in one step), ``max_requests_per_batch``,
                ``use_cuda_graph``, ``return_logprobs`` and ``seed`` count. Its other fields, about
                memory, are ignored.
            record_timestamps: Record the time at which each token arrived.
            progress_bar: Show a progress bar.
            persistent_manager: Ignored: the set-up is always kept.
            warmup: Capture the CUDA graphs that are missing before the first token. If False, only
                those that earlier calls have captured are used.
            seeds: Seeds for sampling: one int, from which each prompt's seed is derived, or one for
                each prompt. Draws depend on the prompt's seed alone, not on the rest of the batch.
                Default: drawn from PyTorch's generator.
            tokenizer: For ``stop_strings``.
            streamer: A function called with the request's id and each of its tokens; or a list with
                a streamer of transformers, or None, for each prompt of one answer.
            cache_salt: Prompts of different salts never share anything; a list has one for each
                prompt.
            checkpoints: As for ``generate``.
            will_continue: As for ``generate``; a list has one for each prompt.
            source: As for ``generate``, for all prompts.
            variant: As for ``generate``.
            options: Changes to each configuration, such as ``max_new_tokens``.

        Returns:
            What ``model.generate_batch`` returns: a ``GenerationOutput`` by request id, in the
            order of the prompts, further answers before the first one. ``error`` is set for an
            answer that stopped at the maximum length of a sequence, or because its processors,
            stop strings or streamer raised.

        Raises:
            InvalidArgumentError: The prompts or another argument are malformed, or an option or the
                model cannot be served.
            SequenceLengthError: A prompt is longer than the model, or the KV blocks, allow.
            BlockCapacityError: Every KV block is pinned.
            UnresumableModelError: The model's results change when several requests run at once.
        """
        self._begin_call()
        call = BatchCall(
            self._runner,
            inputs,
            generation_config,
            continuous_batching_config,
            seeds=seeds,
            tokenizer=tokenizer,
            streamer=streamer,
            cache_salt=cache_salt,
            checkpoints=checkpoints,
            will_continue=will_continue,
            source=source,
            options=options,
        )
        if not call.prompts:
            return {}
        batcher = self._ready_batcher()
        self._begin_batch(variant)
        return call.run(
            batcher,
            warms_up=warmup,
            shows_progress=progress_bar,
            records_timestamps=record_timestamps,
        )

    def install(self) -> AbstractContextManager[object]:
        """Put ``generate_batch`` on the model, for a library that calls it there, such as TRL.

        Such a call may come during training. The model is in eval mode during the call. If its
        weights changed since the last call, all prefixes are dropped. If it was cast or moved, the
        memory is allocated again within the same budgets; pins end and counts restart.

        Returns:
            A context manager that calls ``uninstall`` when it is left.

        Raises:
            InvalidArgumentError: Another cache is installed on the model.
            StepOrderError: The cache is closed.
        """
        if self._is_closed:
            raise StepOrderError("the cache is closed: make a new one")
        model = self._settings.model
        there = vars(model).get("generate_batch", self._generate_for_model)
        if there != self._generate_for_model:
            raise InvalidArgumentError(
                f"the model has a generate_batch of its own already, {there!r}: call uninstall() "
                "of the cache that it belongs to"
            )
        model.generate_batch = self._generate_for_model
        left = ExitStack()
        left.callback(self.uninstall)
        return left

    def uninstall(self) -> None:
        """Remove ``generate_batch`` from the model, if ``install`` put it there."""
        model = self._settings.model
        if vars(model).get("generate_batch") == self._generate_for_model:
            del model.generate_batch

    def _generate_for_model(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Run ``generate_batch`` in eval mode, and adapt to changes of the model first."""
        modes = [(module, module.training) for module in self._settings.model.modules()]
        self._settings.model.eval()
        try:
            self._follow_model(options.get("variant"))
            return self.generate_batch(*args, **options)
        finally:
            for module, mode in modes:
                module.training = mode

    @guarded(renews=True, waits=True)
    def _follow_model(self, variant: str | None) -> None:
        """Drop all prefixes if weights have changed; set up anew if device or dtype has."""
        try:
            self._check_home()
        except ModelChangedError:
            with self._guard.ending(renews=True):
                self._release()
            self._set_up(self.listeners)
            return
        fingerprint = self._runner.fingerprint
        try:
            fingerprint.begin(may_differ=self._store.is_empty, variant=variant)
            fingerprint.confirm()
        except ModelChangedError:
            self._make_new(keeps_graphs=True)

    def _why_eager(self) -> str:
        """Return the reason for using no CUDA graphs in batches; empty if they are used."""
        if not self._settings.cuda_graphs:
            return "cuda_graphs is False"
        # A model that is moved in every call would invalidate its graphs each time.
        return "the model is moved or cast from call to call" if self._num_set_ups > 2 else ""

    @guarded(waits=True)
    def prepare_batches(self) -> int:
        """Do the set-up of ``generate_batch`` now instead of in its first calls.

        On a GPU all CUDA graphs are captured, and kernels tuned, behind a progress bar.

        Returns:
            Maximum length of a sequence in a batch, in tokens.

        Raises:
            InvalidArgumentError: The model cannot be served in batches.
            UnresumableModelError: The model's results change when several requests run at once.
        """
        self._check_ready()
        batcher = self._ready_batcher()
        if self._home[0].type == "cuda":  # pragma: no cover - tests/gpu run it
            self._runner.fingerprint.begin(may_differ=self._store.is_empty, variant=None)
            batcher.prepare()
            self._runner.fingerprint.confirm()
        return batcher.context.config.max_sequence_length

    @guarded(waits=True)
    def run_batches(self, manager: BatchManager) -> None:
        """Let a manager run its requests, including those that arrive during the call.

        Args:
            manager: Its ``run`` returns when no request waits.

        Raises:
            ModelChangedError: The model's settings were changed while requests ran.
        """
        self._check_ready()
        batcher, fingerprint = self._ready_batcher(), self._runner.fingerprint

        def begin() -> None:
            before, was_foreign = fingerprint.key, fingerprint.foreign is not None
            self._begin_batch(None)
            is_same = fingerprint.key == before or (was_foreign and fingerprint.foreign is not None)
            if not is_same and batcher.num_unfinished:
                raise ModelChangedError(
                    "the model's settings were changed while requests ran: call reset()"
                )

        begin()
        batcher.configure(manager.batching_config)
        batcher.begin()
        batcher.warm_up(self._config.max_requests)
        manager.run(batcher, begin)

    def batch_stats(self) -> BatchStats | None:
        """Return the counts of batches, those of ``generate`` included; None before the first."""
        return None if self._batcher is None else self._batcher.stats()

    def _ready_batcher(self) -> Batcher:
        """Return the batcher; the first call makes it, and allocates its live states."""
        if torch.is_autocast_enabled(self._home[0].type):
            raise InvalidArgumentError(
                "generate_batch cannot be called under autocast: the context keeps keys and values "
                "in the model's own dtype; generate can"
            )
        if self._batcher is not None:
            return self._batcher
        batcher = Batcher(
            self._runner,
            self._store,
            self._capture,
            chunk_tokens=self._chunk_tokens,
            is_eager=self._why_eager(),
        )
        batcher.check()
        self._batcher = batcher
        return batcher

    @guarded(waits=True)
    def prefill(
        self,
        input_ids: Any,
        *,
        cache_salt: ExtraKey = None,
        checkpoints: Sequence[int] | None = None,
        variant: str | None = None,
    ) -> Any:
        """Compute a prompt, for callers that run the model's forward themselves.

        Args:
            input_ids: Token ids of one prompt: a tensor [1, length] or [length], or a list of ints.
            cache_salt: Prompts of different salts never share anything.
            checkpoints: Lengths in tokens of prefixes that other prompts will share, as for
                ``generate``.
            variant: As for ``generate``.

        Returns:
            A transformers cache with all tokens computed, to be passed to the model's forward
            with the tokens that follow. The caller owns it.

        Raises:
            InvalidArgumentError: The prompt or checkpoints are malformed.
        """
        self._begin_call()
        self._runner.fingerprint.begin(may_differ=self._store.is_empty, variant=variant)
        tokens = read_prompt(input_ids, self._runner.vocabulary)
        named = [] if checkpoints is None else read_checkpoints(checkpoints, [len(tokens)])[0]
        past = self._runner.new_cache()
        if self._count_foreign():
            self._runner.forward(tokens, past, 0)
            return past
        record, _ = self._prefiller.compute(
            tokens, past, cache_salt=cache_salt, checkpoint_positions=named
        )
        self._runner.fingerprint.confirm()
        record.close()
        return past

    @guarded(waits=True)
    def pin(
        self,
        input_ids: Any,
        *,
        ttl_seconds: float | None = None,
        cache_salt: ExtraKey = None,
        variant: str | None = None,
    ) -> Pin:
        """Keep a cached prompt findable until the pin ends.

        The pin holds the prompt's KV blocks and the slot of its last state, for ``generate`` and
        ``generate_batch``. Entries in host memory or below are loaded first. ``reset`` ends a pin,
        and so does a hit that verification finds wrong.

        Args:
            input_ids: Token ids of the prompt, as for ``prefill``. Only cached tokens are pinned,
                so compute the prompt before, for example by ``prefill``.
            ttl_seconds: Seconds until the pin ends by itself. Default: it does not.
            cache_salt: The salt that the prompt was computed under.
            variant: The variant that the prompt was computed under.

        Returns:
            The pin, for ``unpin``. Its ``num_tokens`` is the number of pinned tokens.

        Raises:
            InvalidArgumentError: The prompt is malformed, or ``ttl_seconds`` is no number from 0 to
                10**9.
            MissingStateError: No state of the prompt is cached.
            BlockCapacityError: Pins would hold more than their share of KV blocks.
            MambaSlotCapacityError: Pins would hold more than their share of slots.
        """
        self._check_ready()
        self._runner.fingerprint.begin(may_differ=self._store.is_empty, variant=variant)
        foreign = self._runner.fingerprint.foreign
        if foreign is not None:
            raise MissingStateError(f"nothing is cached of this model now: {foreign[1]}")
        record = self._store.open(
            read_prompt(input_ids, self._runner.vocabulary),
            self._runner.fingerprint.key,
            min_computed=0,
            cache_salt=cache_salt,
        )
        self._runner.fingerprint.confirm()
        pin = self._store.pins.add(record.restored_blocks, record.match.skip_tokens, ttl_seconds)
        record.close()
        return pin

    @guarded(waits=True)
    def unpin(self, pin: Pin) -> None:
        """End a pin before its time; a pin that has ended is ignored.

        Raises:
            InvalidArgumentError: The argument is no pin.
        """
        self._store.pins.remove(pin)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins that have not ended, oldest first."""
        self._guard.tidy()
        return self._store.pins.current

    @property
    def listeners(self) -> Listeners:
        """The listeners, which get the events of ``mamba_cache.events``."""
        return self._store.kv_blocks.listeners

    @property
    def kv_block_allocator(self) -> KVBlockAllocator:
        """The allocator of KV blocks; it belongs to the cache."""
        return self._store.kv_blocks

    @property
    def slot_allocator(self) -> SlotPool:
        """The pool of slots; it belongs to the cache."""
        return self._store.slots

    @property
    def block_size_tokens(self) -> int:
        """Tokens of a KV block."""
        return self._store.layout.block_size_tokens

    def stats(self) -> CacheStats:
        """Return the cache's counts so far, those of batches included, and its present contents."""
        self._guard.tidy()
        return replace(self._store.stats(), bypasses=dict(self._bypasses))

    @property
    def last_skipped_tokens(self) -> int:
        """Prompt tokens that the last ``generate``, ``generate_batch`` or ``prefill`` skipped."""
        return self._store.counters["skipped_tokens"] - self._skipped_before

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Return the stats of the tiers below the GPU; none without ``host_cache_gb``."""
        return self._store.tiers.stats()

    @guarded(waits=True)
    def verify_pending(self, max_hits: int | None = None) -> int:
        """Compute the sampled hits again, and compare them with the cached entries.

        ``verify_hits`` is the share of hits that is sampled. Call this when idle: a hit takes as
        long as its prefix without a cache. Entries that differ by more than
        ``context.verification.RELATIVE_BOUNDS`` are counted, logged in
        ``mamba_cache.verification``, and removed from the cache and its tiers.

        Args:
            max_hits: Maximum number of hits. Default: all sampled hits.

        Returns:
            Number of hits that were compared.

        Raises:
            InvalidArgumentError: ``max_hits`` is not an int >= 1.
        """
        if max_hits is not None:
            check_int("max_hits", max_hits, minimum=1)
        self._check_ready()
        verifier = self._store.verifier
        if not verifier.stats().waiting:
            return 0
        self._runner.fingerprint.begin()
        if self._runner.fingerprint.foreign is not None:  # hits cannot be recomputed the same way
            return 0
        key = self._store.tiers.key_for(self._runner.fingerprint.key)

        def compute(hit: HitToVerify) -> PrefixContent | None:
            if hit.request.lora_id != key:  # adapters or settings have changed since the hit
                return None
            return self._store.content(self._prefiller.recompute(hit.tokens))

        return verifier.verify(compute, max_hits)

    def verification_stats(self) -> VerificationStats:
        """Return the counts of ``verify_hits``; any thread may call this."""
        return self._store.verifier.stats()

    @guarded(renews=True, waits=True)
    def reset(self) -> None:
        """Drop every prefix and every count, as after a change of the model's weights."""
        self._check_home()
        self._make_new()

    @guarded(renews=True, waits=True)
    def close(self) -> None:
        """Release the memory. The cache cannot be used afterwards; the model can."""
        self.uninstall()
        with self._guard.ending(renews=True):
            self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._remove_hooks()
        self._batcher = None
        self._store.close()
        self._skipped_before = 0

    @guarded(waits=True)
    def check_invariants(self) -> None:
        """Check that the bookkeeping is consistent.

        Raises:
            InvariantError: The bookkeeping contradicts itself: a bug in this package.
        """
        self._store.check_invariants()
        if self._batcher is not None:
            self._batcher.context.check_invariants()
        self._store.tiers.check_invariants()

    def _heal(self) -> None:
        """Reset the cache after a change of its bookkeeping broke off, and count it."""
        num_before = self._store.counters["self_resets"]
        self._make_new()
        self._store.counters["self_resets"] = num_before + 1

    def _make_new(self, *, keeps_graphs: bool = False) -> None:
        with self._guard.ending(renews=True):
            self._remove_hooks()
            if self._batcher is not None:  # its requests hold blocks and slots of the store
                self._batcher.reset(keeps_graphs=keeps_graphs)
            self._store.reset()
            self._bypasses.clear()
            self._skipped_before = 0
            self._runner.fingerprint.forget()
            self._store.tiers.take_weights()

    def _take_back(self) -> None:
        """Release the blocks, slots and hooks of a call that raised."""
        self._remove_hooks()
        if self._guard.poison:
            return  # the next call resets everything
        if self._batcher is not None:
            self._batcher.drop()
        self._store.let_go()

    def _remove_hooks(self) -> None:
        """Remove the replacements that a call that raised has left on the model."""
        put_back(self._store)
        put_back(self._capture)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            NotCopyableError: Always.
        """
        raise NotCopyableError(
            "a PrefixCache cannot be copied or pickled: it owns memory of the device and belongs "
            "to one model; call uninstall() before its model is copied, and make a new one around "
            "the copy"
        )

    def _begin_batch(self, variant: str | None) -> None:
        """Read the settings before requests are added to a batch.

        With foreign code and no variant each call has a random key, so its entries are not found.

        Raises:
            InvalidArgumentError: The model's attention, mask or experts functions are foreign.
        """
        fingerprint = self._runner.fingerprint
        fingerprint.begin(may_differ=self._store.is_empty, variant=variant)
        found = fingerprint.foreign_attention
        if found is not None:
            raise InvalidArgumentError(
                f"generate_batch computes attention itself, and cannot call {found}; generate does"
            )
        self._count_foreign()

    def _count_foreign(self) -> bool:
        """Count a call if foreign code made it bypass the cache; return whether it did."""
        foreign = self._runner.fingerprint.foreign
        if foreign is not None:
            kind, place = foreign
            self._count_bypass(
                kind,
                f"the model has code from outside its libraries ({place}), which may change any "
                "result; pass variant=, a name for the behaviour of this code",
            )
        return foreign is not None

    def _count_bypass(self, reason: BypassReason, why: str) -> None:
        if not self._bypasses[reason]:  # warn once for each reason
            # stacklevel names the caller's line: one of the frames is the guard's.
            warnings.warn(f"nothing is reused or cached: {why}", stacklevel=4)
        self._bypasses[reason] += 1

    def _begin_call(self) -> None:
        """Check that a call can be served; ``last_skipped_tokens`` counts from here."""
        self._check_ready()
        self._skipped_before = self._store.counters["skipped_tokens"]

    def _check_ready(self) -> None:
        self._check_home()
        self._runner.check_mode()

    def _check_home(self) -> None:
        if self._is_closed:
            raise StepOrderError("the cache is closed: make a new one")
        now = (*self._runner.placement(), self._runner.vocabulary)
        if now != self._home:
            had, has = (
                f"{rows} embeddings on {device} in {dtype}"
                for device, dtype, rows in (self._home, now)
            )
            raise ModelChangedError(
                f"the model had {had} when the cache was made and has {has} now: make a new cache"
            )

    def _read_prompts(
        self, prompts: Any, options: Mapping[str, Any], served: ServedOptions
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the prompts as one tensor, and their mask, or None if none was given."""
        mask = options.get("attention_mask")
        if isinstance(prompts, torch.Tensor):
            check_prompts(prompts, mask, self._runner.vocabulary)
            return prompts, mask
        if mask is not None:
            raise InvalidArgumentError(
                f"attention_mask goes with a tensor of token ids only, got prompts of type "
                f"{type(prompts).__name__}"
            )
        rows = read_prompts(prompts, self._runner.vocabulary)
        if not rows:
            raise InvalidArgumentError("give at least one prompt, got an empty list")
        return pad_prompts(rows, served.pad_token_id, self._runner.model.device)


def _read_policy(
    slot_policy: SlotEvictionPolicy | SlotPolicyName | None, num_slots: int
) -> SlotEvictionPolicy:
    if slot_policy is None:
        slot_policy = "adaptive" if num_slots >= _MIN_SLOTS else "lru"
    if isinstance(slot_policy, str):
        check_choice("slot_policy", slot_policy, get_args(SlotPolicyName))
        return SLOT_POLICIES[slot_policy]()
    return check_policy(slot_policy)


def _default_segment(block_size_tokens: int, capture: StateCapture | None) -> int:
    limit = _SEGMENT_WITH_KERNELS if capture and capture.has_kernels else _SEGMENT_OF_REFERENCE
    return max(limit // block_size_tokens, 1) * block_size_tokens


def check_settings(settings: Mapping[str, Any]) -> CacheConfig:
    """Check the settings that do not depend on the model; return them as a ``CacheConfig``."""
    for name in ("mamba_cache_gb", "kv_cache_gb", "disk_cache_gb"):
        check_number(name, settings[name], maximum=2**33)
    # Limited, because the probe computes a block at once, with logits of all its tokens.
    check_int(
        "block_size_tokens", settings["block_size_tokens"], minimum=1, maximum=_MAX_CHUNK_TOKENS
    )
    config = CacheConfig(
        num_kv_blocks=1,
        max_slots=1,
        ssm_chunk_size=1,
        disk_cache_gb=None if settings["disk_cache_path"] is None else settings["disk_cache_gb"],
        **{name: settings[name] for name in _OF_CONFIG},
    )
    if settings["store"] is not None and settings["hash_secret"] is None:
        raise InvalidArgumentError(
            "store needs hash_secret, the same bytes in all processes that share it"
        )
    _read_policy(settings["slot_policy"], _MIN_SLOTS)
    check_placement(settings["placement"])
    check_clock(settings["clock"])
    check_variant(settings["variant"])
    check_kind("cuda_graphs", settings["cuda_graphs"], bool)
    check_choice("weights_check", settings["weights_check"], get_args(WeightsCheck))
    segment, block = settings["segment_tokens"], settings["block_size_tokens"]
    if segment is not None:
        check_int("segment_tokens", segment, minimum=1)
        if segment % block:
            raise InvalidArgumentError(
                f"segment_tokens must be a multiple of block_size_tokens ({block}), got {segment}"
            )
    return config


def _count(name: str, budget_gb: float, unit_bytes: int, unit: str) -> int:
    """Return how many units a budget holds; raise if it is less than one."""
    if not unit_bytes:
        return _BLOCKS_WITHOUT_MEMORY
    count = int(budget_gb * _GIB) // unit_bytes
    if not count:
        raise BudgetError(
            f"{name} must be at least {unit_bytes / _GIB:.3g} to hold one {unit} of "
            f"{unit_bytes} bytes, got {budget_gb}"
        )
    return count
