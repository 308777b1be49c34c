"""The plugin: this package's copies in the place of vLLM's, from 0.32 on.

vLLM loads it through the entry point ``mamba_cache`` of ``vllm.general_plugins``, in every process.
It does nothing unless ``MAMBA_CACHE_VLLM=1`` is set, or a program calls ``install()`` before it
makes an engine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from mamba_cache._version import __version__
from mamba_cache.errors import InvalidArgumentError, MissingExtraError, UnsupportedVersionError
from mamba_cache.integrations.vllm import align_on_gpu, align_on_host
from mamba_cache.integrations.vllm.align_on_gpu import MambaBuffers, MambaSpecDecodeGPUContext
from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers
from mamba_cache.integrations.vllm.kernels import kernels_for
from mamba_cache.integrations.vllm.plugin_checks import copy_differences, use_differences

__all__ = ["SWITCH", "install", "installed", "load", "replaced", "uninstall"]

SWITCH = "MAMBA_CACHE_VLLM"
"""The environment variable that turns the plugin on: "1", or "0" or nothing for off."""

_HOME = "vllm.v1.worker.mamba_utils"
_MODEL_STATE = "vllm.v1.worker.gpu.model_states.mamba_hybrid"
_STATE_CLASS = "MambaHybridModelState"

_CLASSES = {
    "MambaBuffers": MambaBuffers,
    "MambaCopyBuffers": MambaCopyBuffers,
    "MambaSpecDecodeGPUContext": MambaSpecDecodeGPUContext,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], str, type]] = {
    "preprocess_mamba": (align_on_host.preprocess_mamba, "copy_bufs", MambaCopyBuffers),
    "postprocess_mamba_align_gpu": (
        align_on_host.postprocess_mamba_align_gpu,
        "bufs",
        MambaBuffers,
    ),
    "stage_postprocess_inputs_to_gpu": (
        align_on_gpu.stage_postprocess_inputs_to_gpu,
        "ctx",
        MambaSpecDecodeGPUContext,
    ),
}
"""What takes a function's place, and by which argument an engine that was made before is known."""

_originals: list[tuple[Any, str, Any]] = []
"""Who had what by which name, while it is replaced."""

_log = logging.getLogger("vllm.plugins.mamba_cache")


def load() -> None:
    """Install if the environment says so: what vLLM calls.

    Raises:
        InvalidArgumentError: The variable has another value than "0" and "1".
        MissingExtraError: As ``install`` does.
        UnsupportedVersionError: Likewise.
    """
    value = os.environ.get(SWITCH) or "0"
    if value not in ("0", "1"):
        raise InvalidArgumentError(f"{SWITCH} must be 0 or 1, got {value!r}")
    if value == "1":
        install()


def install() -> None:
    """Make vLLM copy states within its block tables by this package's functions and kernels.

    They are put into vLLM's module of such functions (``replaced`` lists them), and into its class
    of states that are resident on the device. Engines that exist already keep vLLM's own. Doing it
    again does nothing.

    Raises:
        MissingExtraError: vLLM is not installed, or cannot be imported.
        UnsupportedVersionError: Its version lacks what is replaced, calls it in another way, or
            would list other copies; the message says what differs. Nothing was replaced.
    """
    if _originals:
        return
    home, model_state = _import_vllm()
    uses = {name: function for name, (function, _, _) in _FUNCTIONS.items()} | _CLASSES
    methods = {name: make(install) for name, make in _METHODS.items()}
    differences = use_differences(home, model_state, _STATE_CLASS, uses, methods)
    differences = differences or copy_differences(home)
    version = getattr(importlib.import_module("vllm"), "__version__", "(no version)")
    if differences:
        raise UnsupportedVersionError(
            f"vLLM {version} does not copy Mamba states as this package can do it for it: "
            + "; ".join(differences)
        )
    for name, ours in _CLASSES.items():
        _replace(home, name, ours)
        if hasattr(model_state, name):
            _replace(model_state, name, ours)
    for name, (function, argument, own) in _FUNCTIONS.items():
        _replace(home, name, _for_own_engines(function, getattr(home, name), argument, own))
    state_class = getattr(model_state, _STATE_CLASS)
    for name, make in _METHODS.items():
        _replace(state_class, name, make(getattr(state_class, name)))
    _log.info("mamba_cache %s copies the Mamba states of vLLM %s", __version__, version)


def uninstall() -> None:
    """Give vLLM its own functions and classes back; without an ``install`` before, do nothing.

    Engines that were made meanwhile keep this package's buffers, and must not go on.
    """
    for owner, name, original in reversed(_originals):
        setattr(owner, name, original)
    _originals.clear()


def replaced() -> list[str]:
    """List what of vLLM is replaced now, as dotted names; nothing before ``install``."""
    owners = [
        owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
        for owner, _, _ in _originals
    ]
    return [f"{owner}.{name}" for owner, (_, name, _) in zip(owners, _originals, strict=True)]


@contextmanager
def installed() -> Iterator[None]:
    """Installs for the length of a ``with`` block; what was installed before stays afterwards.

    Raises:
        MissingExtraError: As ``install`` does.
        UnsupportedVersionError: Likewise.
    """
    was_installed = bool(_originals)
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _import_vllm() -> tuple[ModuleType, ModuleType]:
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise MissingExtraError(
            "vLLM is not installed, or cannot be imported: pip install vllm"
        ) from error
    try:
        return importlib.import_module(_HOME), importlib.import_module(_MODEL_STATE)
    except ModuleNotFoundError as error:
        if error.name is None or (not _MODEL_STATE.startswith(error.name) and error.name != _HOME):
            raise
        raise UnsupportedVersionError(
            f"this vLLM has no module {error.name}; install 0.32 or later"
        ) from error


def _replace(owner: Any, name: str, ours: Any) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, ours)


def _for_own_engines(
    ours: Callable[..., Any], theirs: Callable[..., Any], argument: str, own: type
) -> Callable[..., Any]:
    """Call ``ours`` for engines whose buffers are this package's, and ``theirs`` for others."""
    place = list(inspect.signature(ours).parameters).index(argument)

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs[argument]
        return (ours if isinstance(given, own) else theirs)(*args, **kwargs)

    return call


def _preprocess(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Do the work of ``MambaHybridModelState.preprocess_state`` in one launch instead of two."""

    def preprocess_state(
        self: Any,
        input_batch: Any,
        block_tables: Any,
        kv_cache_config: Any,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        context = getattr(self, "_mamba_ctx", None)
        if not isinstance(context, MambaSpecDecodeGPUContext):
            theirs(self, input_batch, block_tables, kv_cache_config, num_computed_tokens)
        elif input_batch.num_reqs:
            context.run_resident_precopy(
                input_batch.num_reqs,
                input_batch.idx_mapping,
                input_batch.query_start_loc,
                num_computed_tokens,
                self.num_accepted_tokens_gpu,
                self._mamba_state_idx_gpu,
                self._mamba_src_col_gpu,
                self._mamba_src_off_gpu,
                None,
            )

    return preprocess_state


def _postprocess(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Do the work of ``MambaHybridModelState.postprocess_state`` in one launch."""

    def postprocess_state(
        self: Any,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        context = getattr(self, "_mamba_ctx", None)
        is_own = isinstance(context, MambaSpecDecodeGPUContext)
        # What a Kimi layer commits comes between the counts and the copies: vLLM's own order.
        if context is None or not is_own or self.recoverssm is not None:
            theirs(self, idx_mapping, num_sampled, num_computed_tokens)
            return
        if not len(idx_mapping):
            return
        if isinstance(num_sampled, int):
            num_sampled = torch.full_like(idx_mapping, num_sampled)
        accepted = self.num_accepted_tokens_gpu
        if num_computed_tokens is None:
            kernels = kernels_for(context.backend, context.table.device)
            kernels.accept_tokens(idx_mapping, num_sampled, accepted)
        else:
            context.run_resident_postprocess(
                idx_mapping, num_sampled, accepted, self._mamba_state_idx_gpu, num_computed_tokens
            )

    return postprocess_state


_METHODS = {"preprocess_state": _preprocess, "postprocess_state": _postprocess}
"""Methods of the resident state that are amended, and how."""
