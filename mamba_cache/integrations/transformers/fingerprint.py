"""The fingerprint of a model: the key of its settings, its weights, and its foreign code."""

from __future__ import annotations

import hashlib
import secrets
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, getitem, is_, methodcaller
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.presence import (
    FUNCTION_TYPES,
    ForeignCode,
    ForeignKind,
    foreign_layer,
    is_library,
    module_of,
    registries,
)
from mamba_cache.integrations.transformers.replacement import ABSENT, original
from mamba_cache.states.checksums import TensorChecksums

__all__ = ["ModelFingerprint", "WeightsCheck", "check_variant", "global_settings"]

WeightsCheck = Literal["full", "sample", "off"]
"""How much of a model's weights each call looks at."""

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, Enum,
    range,
)  # fmt: skip
_NOT_READ = frozenset(
    {
        *vars(torch.nn.Module()).keys() - {"training"},
        "_loss_function",
        "_output_capturing_hooks_installed",
        "generation_config",  # generate reads it, a forward does not
        "generate_batch",  # where PrefixCache.install puts its own
        "rope_deltas",  # multimodal models keep them of a generation; the next sets them anew
    }
)
"""Attributes of modules that a forward does not read, or that are read one by one below."""

_TENSORS_AND_CHILDREN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OPAQUE = (
    "torch._dynamo", "torch._inductor", "torch.distributed", "torch.optim", "torch.utils.data",
    "torch.utils.hooks",
    "logging", "threading", "_thread", "concurrent", "asyncio", "mamba_cache", "tokenizers",
    "transformers.generation", "transformers.tokenization", "transformers.trainer",
)  # fmt: skip
"""Objects of these packages count by their class: what is in them changes by itself."""

# What layers take their kernels from, beside the libraries. Versions are part of the identity.
_KERNEL_PACKAGES = frozenset({"causal_conv1d", "fla", "flash_attn", "mamba_ssm", "triton"})
_MAX_DEPTH = 8
_SAMPLE_STRIDE = 16
_MOST_NAMES = 3
_ROOT = "model."
_CAPTURING = "transformers.utils.output_capturing"  # its hooks return nothing
# What transformers learns of a class while it runs, its name for this process, and methods that
# a forward does not call.
_NOT_READ_OF_CODE = ("_cached_value", "SESSION_ID", "__init__", "__setstate__")
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
    Foreign code is not read: its presence makes a call bypass the cache, unless a variant names it.

    Attributes:
        key: Names the settings as they were when ``begin`` was called last. While foreign code is
            present it is a random one, so that nothing is found under it later.
        foreign: The foreign code that ``begin`` found last; None if there is none, or if a variant
            names it.

    Raises:
        InvalidArgumentError: ``weights_check`` is unknown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights_check: WeightsCheck = "full",
        variant: str | None = None,
    ) -> None:
        if weights_check not in get_args(WeightsCheck):
            raise InvalidArgumentError(
                f"weights_check must be one of {list(get_args(WeightsCheck))}, got "
                f"{weights_check!r}"
            )
        self._model = model
        self._weights = _Weights(weights_check)
        self._variant = self._default_variant = check_variant(variant)
        self._known = _Known()
        self._reading = _Reading(self._known)
        self._is_unchecked = True
        self._num_handles = 0
        self.key = ""
        self.foreign: ForeignCode | None = None
        self._foreign_attention: ForeignCode | None = None

    def leave_out_what_changes(self, run: Callable[[], object]) -> None:
        """Run the model, and take for no setting and no weight what that rewrites.

        Args:
            run: Forwards of the model, which has run before, so that nothing is made only now.
        """
        before = self._read()  # it holds the tensors: a new one cannot get the address of an old
        weights = self._contents(before)
        run()
        after = self._read()
        other_weights = self._contents(after)
        changed = {
            path
            for one, other in ((before.values, after.values), (weights, other_weights))
            for path in one.keys() | other.keys()
            if one.get(path) != other.get(path)
        }
        self._known.left_out |= changed
        self._reading = _Reading(self._known)

    def begin(self, *, may_differ: bool = False, variant: str | None = None) -> None:
        """Read the settings, and begin to compare the weights.

        On a GPU that is enqueued, and ``confirm`` tells the result.

        Args:
            may_differ: Nothing is cached that was computed with other weights, so those that are
                found are the right ones from then on.
            variant: What names foreign code in this call. Default: the cache's.

        Raises:
            InvalidArgumentError: A module is in training mode, so that dropout would make each run
                another.
            ModelChangedError: The weights were found to be others already.
        """
        self._variant = check_variant(variant) or self._default_variant
        self._num_handles = _num_handles()
        self._refresh()
        self._foreign_attention = self._reading.foreign_by_kind.get("registered function")
        self.foreign = self._foreign()
        if self.foreign is not None:
            self.key = f"bypass {secrets.token_hex(16)}"
            self._weights.skip()
            if not self._weights.expected:  # tiers are named by what the weights hold
                self._weights.begin(self._reading.tensors, is_read_anew=True, may_differ=True)
            self._reading, self._is_unchecked = _Reading(self._known), True  # keep nothing alive
            return
        if self._is_unchecked:
            self._check_modes()
        self.key = self._current_key()
        self._weights.begin(
            self._reading.tensors, is_read_anew=self._is_unchecked, may_differ=may_differ
        )
        self._is_unchecked = False

    def confirm(self) -> None:
        """Wait for the comparison that ``begin`` began, if nobody has yet.

        Raises:
            ModelChangedError: The weights are not those of before.
        """
        self._weights.confirm()

    @property
    def foreign_attention(self) -> ForeignCode | None:
        """A foreign attention, mask or experts function that ``begin`` found."""
        return self._foreign_attention

    def portable_key(self) -> str | None:
        """Return what stands for the settings in all processes; None if nothing can."""
        if self.foreign is not None or (self._reading.unnamed and self._variant is None):
            return None
        digest = hashlib.blake2b(digest_size=16)
        for path, value in self._reading.portable.items():
            digest.update(f"{path}={value}\n".encode())
        for name in sorted(self._reading.modules_of_code):
            file = self._known.file_digest(name)
            if file is None and self._variant is None:
                return None
            digest.update(f"{name} {file}\n".encode())
        return f"{digest.hexdigest()} {global_settings()} {self._variant!r}"

    def check_files(self) -> None:
        """Check that the code of the model's classes can be named in other processes.

        Raises:
            InvalidArgumentError: A class was defined in no file, and there is no variant.
        """
        self._refresh()
        names = sorted(self._reading.modules_of_code)
        missing = [name for name in names if self._known.file_digest(name) is None]
        if missing and self._default_variant is None:
            raise InvalidArgumentError(
                f"a disk cache or a store needs variant= here: the code in {', '.join(missing)} "
                "lies in no file, so other processes cannot tell it from other code. Pass a "
                "variant that names the code, and another one when the code changes"
            )

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
        """Return whether the settings are still those of ``key``."""
        if self.foreign is not None:
            return True  # nothing else is found under that key
        self._refresh()
        return self._foreign() is None and self._current_key() == self.key

    def has_new_hooks(self) -> bool:
        """Return whether hooks were registered since ``begin``, removed again or not."""
        return _num_handles() != self._num_handles

    def forget(self) -> None:
        """Take the weights as they are from now on.

        They are read at once, so that the next prompt does not wait for it; what hinders that is
        told by the next ``begin``.
        """
        self._weights = _Weights(self._weights.kind)
        with suppress(Exception):
            self.begin()

    def _foreign(self) -> ForeignCode | None:
        found = self._reading.foreign_by_kind.values()
        return next(iter(found), None) if self._variant is None else None

    def _read(self) -> _Reading:
        reading = _Reading(self._known, self._reading)
        reading.read(self._model)
        return reading

    def _refresh(self) -> None:
        if not self._reading.is_current():
            # What is found to be new is checked by the next call that begins.
            self._reading, self._is_unchecked = self._read(), True

    def _current_key(self) -> str:
        return f"{self._reading.digest} {global_settings()} {self._variant!r}"

    def _contents(self, reading: _Reading) -> dict[str, object]:
        kind: WeightsCheck = "off" if self._weights.kind == "off" else "full"
        return dict(_Weights(kind).measure(reading.tensors))

    def _check_modes(self) -> None:
        for path, module in self._reading.modules.items():
            if module.training and _depends_on_mode(module):
                raise InvalidArgumentError(
                    f"no part of the model must be in training mode, {_name(path)} is: call "
                    "model.eval()"
                )


def check_variant(variant: object) -> str | None:
    """Check that a variant is a name or None.

    Raises:
        InvalidArgumentError: It is not.
    """
    if variant is not None and (not isinstance(variant, str) or not variant):
        raise InvalidArgumentError(f"variant must be a str that is not empty, got {variant!r}")
    return variant


def _num_handles() -> int:
    """Return how many hooks of any kind were registered in this process so far."""
    return int(RemovableHandle.next_id)


class _Known:
    """What outlives a reading: code as it was first seen, numbers of it, digests of its files."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self.classes: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()
        self.files: dict[str, dict[str, Any]] = {}
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._digests: dict[str, str | None] = {}
        self._count = 0

    def new_number(self) -> int:
        self._count += 1
        return self._count

    def number(self, code: Any) -> int:
        """Return a number for a function or class: the same while it lives, never another's."""
        if code not in self._numbers:
            self._numbers[code] = self.new_number()
        return self._numbers[code]

    def file_digest(self, module_name: str) -> str | None:
        """Return a digest of a module's file as it was when it was asked for first."""
        if module_name not in self._digests:
            file = getattr(sys.modules.get(module_name), "__file__", None)
            try:
                content = Path(file).read_bytes() if file else None
            except OSError:
                content = None
            digest = None if content is None else hashlib.sha256(content).hexdigest()
            self._digests[module_name] = digest
        return self._digests[module_name]


class _Reading:
    """One walk through a model, and what tells cheaply whether another would find the same.

    Attributes are read as far as they are plain values, containers, modules, functions or other
    Python objects. What a call of a cache has replaced for its length counts as what was there
    before. Hooks are only looked at for where they come from, and are not held.

    Attributes:
        values: What was read, by path.
        portable: Likewise, without what is different in each process.
        unnamed: Objects that count by which one they are, and their numbers, by path.
        tensors: The tensors that were found, by path; one that is found twice has the first path.
        modules: The modules that were found, by path.
        modules_of_code: Names of the Python modules whose code is part of the model, libraries not
            counted.
        foreign_by_kind: Foreign code that was found, the first of each kind.
        digest: Names all settings; empty before the walk.
    """

    def __init__(self, known: _Known, before: _Reading | None = None) -> None:
        self._known = known
        self._unnamed_before = {} if before is None else before.unnamed
        self.values: dict[str, str] = {}
        self.portable: dict[str, str] = {}
        self.unnamed: dict[str, tuple[object, int]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.modules_of_code: set[str] = set()
        self.foreign_by_kind: dict[ForeignKind, ForeignCode] = {}
        self._own = _KERNEL_PACKAGES
        self._paths: dict[int, str] = {}
        self._kept: list[object] = []  # so that no id is given to another object meanwhile
        self._configs: list[Any] = []
        self._dicts: list[Any] = []
        self._keyed: list[Any] = []
        self._lists: list[list[Any]] = []
        self._sets: list[Any] = []
        self._owners: list[Any] = []
        self._names: list[Any] = []
        self._hooks: list[Any] = []
        self._mappings: list[dict[str, Any]] = []
        self._selected: list[str] = []
        self._objects: list[Any] = []
        self._equals: list[Any] = []
        self.digest = ""

    def read(self, model: torch.nn.Module) -> None:
        """Walk through a model."""
        kinds = {type(module) for module in model.modules()}
        classes = sorted(
            {cls for kind in kinds for cls in kind.__mro__ if cls is not object},
            key=lambda cls: (cls.__module__, cls.__qualname__),
        )
        self.modules_of_code = {c.__module__ for c in classes if not is_library(c.__module__)}
        self._own = _KERNEL_PACKAGES | self.modules_of_code
        self._read("model", model, 0)
        for name in _HOOKS:
            self._read_hooks(f"all modules.{name}", getattr(torch_modules, f"_global{name}"))
        self._read_classes(classes)
        self._read_selected(classes)
        lines = "\n".join(f"{path}={value}" for path, value in self.values.items())
        self.digest = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
        self._objects, self._equals = self._look()
        self._paths, self._kept = {}, []

    def is_current(self) -> bool:
        """Compare what was read, in loops that Python runs in C."""
        if not self.digest:
            return False
        try:
            objects, names = self._look()
            same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
            return same and names == self._equals
        except Exception:  # whatever a comparison raises: another object is there
            return False

    def _look(self) -> tuple[list[Any], list[Any]]:
        """Return what must be the very same objects in the next look, and what must be equal."""
        objects = [
            *chain.from_iterable(map(methodcaller("values"), self._dicts)),
            *chain.from_iterable(self._lists),
            *map(getitem, self._owners, self._names),
            *map(type, self.modules.values()),
            *map(dict.get, self._mappings, self._selected),
        ]
        return objects, [*chain.from_iterable([*self._keyed, *self._hooks, *self._sets])]

    def _read(self, path: str, value: Any, depth: int) -> None:
        if path in self._known.left_out:
            return
        if isinstance(value, _PLAIN):
            self._say(path, f"{type(value).__name__} {value!r}")
            return
        known = self._paths.get(id(value))
        if isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
            self._say(path, f"{type(value).__name__} {value!r}")
            self._watch_list(value)
        elif known is not None:
            self._say(path, f"as {known}")
        elif isinstance(value, torch.Tensor):
            self._read_tensor(path, value, depth)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            self._remember(path, value)
            self._read_tensor(path, torch.from_numpy(value), depth)
        elif isinstance(value, torch.nn.Module):
            self._read_module(path, value, depth)
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            self._read_container(path, value, depth)
        elif isinstance(value, FUNCTION_TYPES):
            self._read_function(path, value, self._own)
        else:
            self._read_object(path, value, depth)

    def _read_tensor(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        self._remember(path, tensor)
        self.tensors[path] = tensor
        self._say(path, f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.is_mkldnn:  # nothing can read its values
            self._count_as_one(path, tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self._read_function(f"{path}.__class__", type(tensor), self._own)
            for name, value in sorted(getattr(tensor, "__dict__", {}).items()):
                self._read(f"{path}.{name}", value, depth + 1)

    def _read_module(self, path: str, module: torch.nn.Module, depth: int) -> None:
        self._remember(path, module)
        self.modules[path] = module
        self._say_name(path, "module", type(module))
        attributes = vars(module)
        self._watch(path, attributes)
        for name in sorted(attributes.keys() - _NOT_READ):
            self._read_attribute(f"{path}.{name}", module, name, depth)
        for kind in _HOOKS:
            self._read_hooks(f"{path}.{kind}", attributes[kind])
        for kind in _TENSORS_AND_CHILDREN:
            members = attributes[kind]
            self._watch(path, members)
            for name in members:
                self._read(f"{path}.{name}", members[name], 0)

    def _read_attribute(self, path: str, module: torch.nn.Module, name: str, depth: int) -> None:
        value, method = original(vars(module), name), getattr(type(module), name, None)
        if value is ABSENT:
            return
        if name == "_hf_hook":  # of accelerate, whose hooks users may derive from
            for hook in getattr(value, "hooks", (value,)):
                if (layer := foreign_layer(type(hook))) is not None:
                    self._find("forward hook", path, layer)
        if not (callable(method) and callable(value)) or isinstance(value, torch.nn.Module):
            self._read(path, value, depth + 1)
        elif not _is_own_method(value, module):
            self._read_function(path, value, frozenset())
        elif value.__func__ is not method:
            self._say(path, f"its method {value.__func__.__name__}")

    def _read_hooks(self, path: str, hooks: Any) -> None:
        self._hooks.append(hooks)
        for position, hook in enumerate([*hooks.values()]):
            if (layer := foreign_layer(hook)) is not None:
                self._find("forward hook", path, layer)
            elif module_of(hook) != _CAPTURING:
                self._say_name(f"{path}[{position}]", "hook", hook)

    def _read_function(self, path: str, function: Any, allowed: frozenset[str]) -> None:
        if (layer := foreign_layer(function, allowed)) is not None:
            self._find("replaced method", path, layer)
        else:
            self._say_name(path, "function", function)

    def _read_container(self, path: str, items: Any, depth: int) -> None:
        self._remember(path, items)
        self._say(path, f"{type(items).__name__} {len(items)}")
        if isinstance(items, dict):
            self._watch(path, items)
            for key in items:
                self._read(f"{path}[{key!r}]", items[key], depth + 1)
        elif isinstance(items, (set, frozenset)):
            self._sets.append(items)
            self._say(path, f"set {sorted(map(repr, items))}")
        else:
            self._watch_list(items)
            for index, value in enumerate(items):
                self._read(f"{path}[{index}]", value, depth + 1)

    def _read_object(self, path: str, value: Any, depth: int) -> None:
        self._remember(path, value)
        if callable(value) and (layer := foreign_layer(value, self._own)) is not None:
            self._find("replaced method", path, layer)
            return
        self._say_name(path, "object", type(value))
        if type(value).__module__.startswith(_OPAQUE) or isinstance(value, types.ModuleType):
            return
        attributes, slots = getattr(value, "__dict__", None), _names_of_slots(value)
        if depth >= _MAX_DEPTH or not (isinstance(attributes, dict) or slots):
            self._count_as_one(path, value)
            return
        self._add_code(type(value).__module__)
        if isinstance(value, transformers().PreTrainedConfig):
            self._configs.append(value)
        if isinstance(attributes, dict):
            self._watch(path, attributes)
            for name in sorted(attributes):
                if (found := original(attributes, name)) is not ABSENT:
                    self._read(f"{path}.{name}", found, depth + 2)
        for name in slots:
            if hasattr(value, name) and f"{path}.{name}" not in self._known.left_out:
                self._watch_entry(_Slots(value), name)
                self._read(f"{path}.{name}", getattr(value, name), depth + 2)

    def _read_classes(self, classes: list[type]) -> None:
        """Read the namespaces that the code of the model's modules looks names up in.

        A function that was there when a class was seen first is the class's own, wherever it comes
        from: patches that were made before are the model.
        """
        for kind in classes:
            name = f"class {kind.__module__}.{kind.__qualname__}"
            self._read_namespace(name, vars(kind), self._known.classes.setdefault(kind, {}))
        for name in _files_of(classes):
            first = self._known.files.setdefault(name, {})
            self._read_namespace(f"module {name}", vars(sys.modules[name]), first)
        for kind in classes:
            if kind.__module__ in self.modules_of_code and kind.__module__ in sys.modules:
                self._read_globals(vars(sys.modules[kind.__module__]), kind)

    def _read_namespace(self, path: str, namespace: Any, first: dict[str, Any]) -> None:
        self._dicts.append(namespace)
        self._keyed.append(namespace)
        now = {
            name: original(namespace, name)
            for name in list(namespace)
            if not name.endswith(_NOT_READ_OF_CODE) and not name.startswith("_abc")
        }
        first = first or first.update(now) or now
        if path.startswith("module "):  # its code looks up no names that are new, as dynamo's are
            now = {name: value for name, value in now.items() if name in first}
        for name in sorted(now.keys() | first.keys()):
            value = now.get(name, ABSENT)
            if isinstance(value, _PLAIN) and not name.startswith("__"):
                self._say(f"{path}.{name}", repr(value))
            function = _function_in(value)
            if function is not None and not is_library(module_of(function)):
                self._add_code(module_of(function))
            was = _function_in(first.get(name))
            if function is None and was is not None:
                self._say(f"{path}.{name}", "removed")
            elif function is not was:
                self._read_function(f"{path}.{name}", function, frozenset())

    def _read_globals(self, namespace: dict[str, Any], kind: type) -> None:
        """Read the global names that the methods of a user's own class look up."""
        methods = [f for f in map(_function_in, vars(kind).values()) if hasattr(f, "__code__")]
        for name in sorted({name for method in methods for name in method.__code__.co_names}):
            value = namespace.get(name)
            path = f"module {kind.__module__}.{name}"
            if path in self.values or name not in namespace:
                continue
            if isinstance(value, FUNCTION_TYPES):
                self._say_name(path, "function", value)
                self._add_code(module_of(value))
            elif isinstance(value, (*_PLAIN, torch.Tensor, np.ndarray, list, tuple, dict)):
                self._read(path, value, 1)
            else:
                continue
            self._watch_entry(namespace, name)

    def _read_selected(self, classes: list[type]) -> None:
        """Read the functions that the model's configurations select from registries."""
        fields = ("_attn_implementation_internal", "_experts_implementation_internal")
        chosen = {original(vars(c), f) for c in self._configs for f in fields if f in vars(c)}
        namespaces = [vars(sys.modules[name]) for name in _files_of(classes)]
        for name, registry in registries(namespaces):
            for choice in sorted(each for each in chosen if isinstance(each, str)):
                mappings = (registry._local_mapping, registry._global_mapping)
                self._mappings += mappings
                self._selected += [choice] * len(mappings)
                function = next((each[choice] for each in mappings if choice in each), None)
                if function is None:
                    continue
                if (layer := foreign_layer(function)) is not None:
                    self._find("registered function", f"{name}[{choice!r}]", layer)
                else:
                    self._say_name(f"{name}[{choice!r}]", "function", function)

    def _find(self, kind: ForeignKind, path: str, layer: str) -> None:
        place = f"{path.removeprefix(_ROOT)} is {layer}"
        self.foreign_by_kind.setdefault(kind, ForeignCode(kind, place))

    def _say(self, path: str, value: str) -> None:
        self.values[path] = self.portable[path] = value

    def _say_name(self, path: str, what: str, code: Any) -> None:
        self.portable[path] = f"{what} {self._named(code, is_numbered=False)}"
        self.values[path] = f"{what} {self._named(code, is_numbered=True)}"

    def _named(self, code: Any, *, is_numbered: bool) -> str:
        if isinstance(code, partial):
            given = [*code.args, *chain.from_iterable(code.keywords.items())]
            told = [repr(x) if isinstance(x, _PLAIN) else type(x).__qualname__ for x in given]
            return f"partial {self._named(code.func, is_numbered=is_numbered)} {told}"
        if isinstance(code, types.MethodType):
            owner = self._paths.get(id(code.__self__), type(code.__self__).__qualname__)
            return f"{self._named(code.__func__, is_numbered=is_numbered)} of {owner}"
        if not isinstance(code, FUNCTION_TYPES):  # an object that is called
            code = type(code)
        name = f"{module_of(code)}.{getattr(code, '__qualname__', '')}"
        if is_numbered and not is_library(module_of(code)):
            return f"{name} {self._known.number(code)}"
        return name

    def _count_as_one(self, path: str, value: object) -> None:
        """Take a value for what it is by which object it is: what is in it is not read."""
        before = self._unnamed_before.get(path, (None, 0))
        number = before[1] if before[0] is value else self._known.new_number()
        self.unnamed[path] = value, number
        self.values[path] += f" {number}"

    def _add_code(self, module_name: str | None) -> None:
        root = str(module_name).partition(".")[0]
        if root not in sys.stdlib_module_names | _KERNEL_PACKAGES and not is_library(module_name):
            self.modules_of_code.add(str(module_name))

    def _remember(self, path: str, value: object) -> None:
        self._paths[id(value)] = path
        self._kept.append(value)

    def _watch(self, path: str, items: dict[str, Any]) -> None:
        """Watch a dict; entry by entry if a forward rewrites some of them."""
        self._keyed.append(items)
        rewritten = {name for name in items if f"{path}.{name}" in self._known.left_out}
        if not rewritten:
            self._dicts.append(items)
            return
        for name in items.keys() - rewritten:
            self._watch_entry(items, name)

    def _watch_list(self, items: Any) -> None:
        if isinstance(items, list):
            self._lists.append(items)

    def _watch_entry(self, owner: Any, name: Any) -> None:
        self._owners.append(owner)
        self._names.append(name)


class _Slots:
    """The attributes of an object that has slots for them, as those of others lie in a dict."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __getitem__(self, name: str) -> Any:
        return getattr(self._thing, name)


def _names_of_slots(thing: object) -> list[str]:
    """Return the names of an object's slots, in a stable order."""
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(thing).__mro__)
    names = {name for one in slots for name in ((one,) if isinstance(one, str) else one)}
    return sorted(name for name in names if not name.startswith("__"))


def _is_own_method(value: Any, module: torch.nn.Module) -> bool:
    """Return whether an attribute is a method of the module's class, bound to the module."""
    if not isinstance(value, types.MethodType) or value.__self__ is not module:
        return False
    return getattr(type(module), value.__func__.__name__, None) is value.__func__


def _function_in(value: Any) -> Any:
    """Return the function that an entry of a class or of a file is; None if it is none."""
    value = getattr(value, "__func__" if isinstance(value, (staticmethod, classmethod)) else "fget",
                    value)  # fmt: skip
    return value if isinstance(value, FUNCTION_TYPES) and not isinstance(value, type) else None


def _files_of(classes: list[type]) -> list[str]:
    """Return the names of the library files that classes are defined in, but torch's."""
    names = {kind.__module__ for kind in classes if is_library(kind.__module__)}
    return sorted(name for name in names if name in sys.modules and not name.startswith("torch."))


def global_settings() -> tuple[object, ...]:
    """Return what PyTorch's results depend on beside the model: precision and choice of kernels.

    Autocast, the precision of float32 products, reductions in lower precision, deterministic
    algorithms, which attention kernels are allowed, and the default dtype.
    """
    found: list[object] = [
        (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    ]
    found += [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
    for read in _SWITCHES:
        try:
            found.append(read())
        except RuntimeError as error:  # noqa: PERF203 - the old and the new names of one switch were both used
            found.append(str(error))
    return tuple(found)


def _switches() -> Iterator[Any]:
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    yield torch.get_float32_matmul_precision
    for owner, name in (
        (cuda.matmul, "allow_tf32"),
        (cuda.matmul, "fp32_precision"),
        (cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (cuda.matmul, "allow_fp16_accumulation"),
        (cudnn, "allow_tf32"),
        (cudnn, "enabled"),
        (cudnn, "benchmark"),
        (cudnn, "deterministic"),
        (getattr(cudnn, "conv", None), "fp32_precision"),
        (mkldnn, "enabled"),
        (getattr(mkldnn, "matmul", None), "fp32_precision"),
        (getattr(mkldnn, "conv", None), "fp32_precision"),
    ):
        try:
            getattr(owner, name)
        except (AttributeError, RuntimeError):
            continue
        yield partial(getattr, owner, name)
    for name in ("flash", "mem_efficient", "math", "cudnn", "fp16_bf16_reduction_math"):
        for spelling in (f"{name}_sdp_enabled", f"{name}_sdp_allowed"):
            if hasattr(cuda, spelling):
                yield getattr(cuda, spelling)


_SWITCHES = tuple(_switches())


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

    def skip(self) -> None:
        """Leave nothing for ``confirm`` to wait for."""
        self._is_pending = False

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
