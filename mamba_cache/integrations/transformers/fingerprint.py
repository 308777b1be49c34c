"""The fingerprint of a model: is it still the one that prefixes were cached with?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, Literal, get_args

import torch

from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers.settings import ModelSettings, global_settings
from mamba_cache.states.checksums import TensorChecksums

__all__ = ["ModelFingerprint", "WeightsCheck"]

WeightsCheck = Literal["full", "sample", "off"]
"""How much of a model's weights each call looks at."""

_SAMPLE_STRIDE = 16
_MOST_NAMES = 3
_ROOT = "model."
_RANDOM = (
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.RNNBase,
    torch.nn.RReLU,
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
)
"""Of PyTorch's modules those that are others in training mode, unless their probability is 0."""

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class ModelFingerprint:
    """Tells models apart by all that their results depend on.

    Settings give a key: with other settings other prefixes are found, and with the same ones again
    those of before. Weights are compared by content with what they were when they were first seen.

    Attributes:
        key: Names the settings as they were when ``begin`` was called last.

    Raises:
        InvalidArgumentError: ``weights_check`` is unknown.
    """

    def __init__(self, model: torch.nn.Module, weights_check: WeightsCheck = "full") -> None:
        if weights_check not in get_args(WeightsCheck):
            raise InvalidArgumentError(
                f"weights_check must be one of {list(get_args(WeightsCheck))}, got "
                f"{weights_check!r}"
            )
        self._settings = ModelSettings(model)
        self._weights = _Weights(weights_check)
        self._is_unchecked = True
        self.key = ""

    def leave_out_what_changes(self, run: Callable[[], object]) -> None:
        """Run the model, and take for no setting and no weight what that rewrites.

        Args:
            run: Forwards of the model, which has run before, so that nothing is made only now.
        """
        self._settings.refresh()
        # It holds the tensors: else a new one could get the address of an old one.
        before, weights = self._settings.reading, self._contents()
        run()
        self._settings.refresh()
        after, other_weights = self._settings.reading, self._contents()
        changed = {
            path
            for one, other in ((before.values, after.values), (weights, other_weights))
            for path in one.keys() | other.keys()
            if one.get(path) != other.get(path)
        }
        self._settings.leave_out(frozenset(changed))

    def begin(self, *, may_differ: bool = False) -> None:
        """Read the settings, and begin to compare the weights.

        On a GPU that is enqueued, and ``confirm`` tells the result.

        Args:
            may_differ: Nothing is cached that was computed with other weights, so those that are
                found are the right ones from then on.

        Raises:
            InvalidArgumentError: A module is in training mode, so that dropout would make each run
                another.
            ModelChangedError: The weights were found to be others already.
        """
        self._refresh()
        if self._is_unchecked:
            self._check_modes()
        self.key = self._current_key()
        self._weights.begin(
            self._settings.reading.tensors, is_read_anew=self._is_unchecked, may_differ=may_differ
        )
        self._is_unchecked = False

    def confirm(self) -> None:
        """Wait for the comparison that ``begin`` began, if nobody has yet.

        Raises:
            ModelChangedError: The weights are not those of before.
        """
        self._weights.confirm()

    def portable_key(self) -> str | None:
        """Return what stands for the settings in all processes; None if nothing can."""
        digest = self._settings.reading.portable_digest
        return None if digest is None else f"{digest} {global_settings()}"

    def weights_digest(self) -> str | None:
        """Return a digest of what the weights hold, as ``begin`` found them.

        None if it has not, or does not read them.
        """
        if self._weights.kind == "off" or not self._weights.expected:
            return None
        digest = hashlib.sha256()
        for path, value in sorted(self._weights.expected.items()):
            digest.update(f"{path} {value!r}\n".encode())
        return digest.hexdigest()

    def is_current(self) -> bool:
        """Says whether the settings are still those of ``key``."""
        self._refresh()
        return self._current_key() == self.key

    def forget(self) -> None:
        """Take the weights as they are from now on.

        They are read at once, so that the next prompt does not wait for it; what hinders that is
        told by the next ``begin``.
        """
        self._weights = _Weights(self._weights.kind)
        with suppress(Exception):
            self.begin()

    def _refresh(self) -> None:
        # What is found to be new is checked by the next call that begins, however often it is read.
        self._is_unchecked |= self._settings.refresh()

    def _current_key(self) -> str:
        return f"{self._settings.reading.digest} {global_settings()}"

    def _contents(self) -> dict[str, object]:
        kind: WeightsCheck = "off" if self._weights.kind == "off" else "full"
        return dict(_Weights(kind).measure(self._settings.reading.tensors))

    def _check_modes(self) -> None:
        for path, module in self._settings.reading.modules.items():
            if module.training and _depends_on_mode(module):
                raise InvalidArgumentError(
                    f"no part of the model must be in training mode, {_name(path)} is: call "
                    "model.eval()"
                )


class _Weights:
    """The tensors of a model, and what each held when it was first seen: ``expected``, by path."""

    def __init__(self, kind: WeightsCheck) -> None:
        self.kind: WeightsCheck = kind
        self.expected: dict[str, object] = {}
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._special: dict[str, torch.Tensor] = {}
        self._flat: list[torch.Tensor] = []
        self._layout: list[Any] = []
        self._versions: list[int] = []
        self._checksums: list[TensorChecksums] | None = None
        self._is_pending = False
        self._may_differ = False
        self._num_calls = 0

    def begin(
        self, tensors: Mapping[str, torch.Tensor], *, is_read_anew: bool, may_differ: bool
    ) -> None:
        self._is_pending = False
        self._may_differ = may_differ
        self._num_calls += 1
        if is_read_anew or self._checksums is None or not self._is_laid_out_as_before():
            self._compare(tensors)
            return
        versions = _versions(self._flat) if self.kind != "full" else []
        if versions != self._versions:
            self._compare(tensors)
            return
        if self.kind == "off":
            return
        sample = {"stride": _SAMPLE_STRIDE, "phase": self._num_calls % _SAMPLE_STRIDE}
        for checksums in self._checksums:
            checksums.start(**(sample if self.kind == "sample" else {}))
        self._is_pending = True
        if all(checksums.device.type != "cuda" for checksums in self._checksums):
            self.confirm()

    def confirm(self) -> None:
        """Wait for what ``begin`` began."""
        if not self._is_pending:
            return
        self._is_pending = False
        assert self._checksums is not None
        verdicts = [checksums.is_unchanged() for checksums in self._checksums]
        if not all(verdicts):
            self._take(dict(self._measured()), is_changed=True)

    def measure(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, object]]:
        """Return what each of the tensors holds."""
        self._tensors = {path: _parts(tensor) for path, tensor in tensors.items()}
        self._special = {path: t for path, t in tensors.items() if not _is_plain(t)}
        self._flat = [part for parts in self._tensors.values() for part in parts]
        groups: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in self._flat:
            groups.setdefault(tensor.device, []).append(tensor)
        self._checksums = (
            [TensorChecksums(group) for group in groups.values()] if self.kind != "off" else []
        )
        return self._measured()

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._take(dict(self.measure(tensors)), is_changed=False)
        self._layout = _layout(self._flat)
        self._versions = _versions(self._flat) if self.kind != "full" else []

    def _take(self, found: dict[str, object], *, is_changed: bool) -> None:
        """Expect what was found, or say that it is not what was expected."""
        known = self.expected
        changed = [path for path, value in found.items() if known.get(path, value) != value]
        if self._may_differ:
            self.expected = found
        elif changed or is_changed:
            self._checksums = None
            raise _changed(changed)
        else:
            self.expected |= found

    def _measured(self) -> Iterator[tuple[str, object]]:
        assert self._checksums is not None
        if self.kind == "off":
            for path, parts in self._tensors.items():
                yield path, (_layout(parts), _versions(parts))
            return
        sums = {checksums.device: iter(checksums.measure()) for checksums in self._checksums}
        for path, parts in self._tensors.items():
            if not parts:
                continue
            digest = hashlib.blake2b(digest_size=16)
            for part in parts:
                digest.update(next(sums[part.device]))
            yield path, ([_traits(part) for part in parts], digest.digest())

    def _is_laid_out_as_before(self) -> bool:
        for path, tensor in self._special.items():
            parts, known = _parts(tensor), self._tensors[path]
            if _layout(parts) != _layout(known):
                return False
        return self._layout == _layout(self._flat)


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors with memory of their own that make up one: none if nothing can be read.

    A tensor on the meta device has no values; what stands in for it, such as the map of offloaded
    weights in a hook of accelerate, is found where it is.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if tensor.layout in _SPARSE:
        return [getattr(tensor, name)() for name in _SPARSE[tensor.layout]]
    if tensor.device.type == "meta" or not tensor.numel():
        return []
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return []
    if tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL:
        return [tensor, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return [tensor]


def _is_plain(tensor: Any) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_quantized


def _traits(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what the values of a tensor's bytes depend on."""
    traits = (tensor.dtype, tensor.size(), tensor.stride())
    if tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        return (*traits, tensor.q_scale(), tensor.q_zero_point())
    return traits


def _layout(tensors: list[torch.Tensor]) -> list[Any]:
    """Return where tensors lie and how, for comparison. Every call does it, so in C loops."""
    return [
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.size, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(attrgetter("dtype"), tensors)),
    ]


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _depends_on_mode(module: torch.nn.Module) -> bool:
    """Says whether a module may compute something else in training mode.

    PEFT adds its layers in training mode to a model in eval mode. What is random in them, and in
    containers and plain layers of PyTorch, is in modules of its own; others may look at the flag.
    """
    if isinstance(module, _RANDOM):
        return bool(getattr(module, "p", 1))
    return not type(module).__module__.startswith(("torch.", "peft."))


def _name(path: str) -> str:
    return path.removeprefix(_ROOT)


def _changed(paths: list[str]) -> ModelChangedError:
    names = ", ".join(map(_name, paths[:_MOST_NAMES]))
    more = f" and {len(paths) - _MOST_NAMES} more" if len(paths) > _MOST_NAMES else ""
    return ModelChangedError(
        "the model's weights are not those that the cached prefixes were computed with "
        f"({names or 'they were others for a moment'}{more}): call reset() to forget those"
    )
