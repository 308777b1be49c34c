"""The fingerprint of a model: the key of its settings, its weights, and its foreign code."""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import chain, count
from operator import attrgetter, is_
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from mamba_cache._extras import installed_version
from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.replacement import ABSENT, original
from mamba_cache.states.checksums import TensorChecksums

__all__ = [
    "BypassReason",
    "ModelFingerprint",
    "WeightsCheck",
    "check_variant",
    "foreign_layer",
    "global_settings",
    "is_library",
]

WeightsCheck = Literal["full", "sample", "off"]
"""What each call compares of the weights: all bytes, a changing sample, or addresses only."""

_ForeignKind = Literal[
    "forward hook", "replaced method", "registered function", "foreign attribute"
]
BypassReason = _ForeignKind | Literal["hidden tokens"]
"""Why a call neither used the cache nor filled it, as ``CacheStats.bypasses`` counts it."""

# Libraries only if they are installed, because a user's own module may be called kernels.py.
_OPTIONAL = ("accelerate", "kernels", "peft")
_LIBRARIES = frozenset(
    {"mamba_cache", "torch", "transformers", *filter(installed_version, _OPTIONAL)}
)
_KERNEL_PACKAGES = frozenset({"causal_conv1d", "fla", "flash_attn", "mamba_ssm", "triton"})
"""Packages of kernels for layers. Their versions are part of the identity."""

# The path of a kernel that `kernels` has loaded from the hub under another module name.
_HUB_KERNEL = re.compile(r"/snapshots/[0-9a-f]{8,}/build/torch")

_FUNCTION_TYPES = (
    FunctionType, MethodType, partial, type(len), type(str.join), type(object.__init__), type,
)  # fmt: skip

_PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
})  # fmt: skip
_NOT_READ = frozenset(
    {
        *vars(torch.nn.Module()).keys() - {"training"},
        "_loss_function",
        "_output_capturing_hooks_installed",
        "generation_config",  # generate reads it, a forward does not
        "_weight_conversions",  # only save_pretrained reads it
        "generate_batch",  # PrefixCache.install sets it
        "rope_deltas",  # multimodal models set it anew in each generation
    }
)
"""Attributes of modules that a forward does not read, or that ``_read_module`` reads by name."""

_TENSORS_AND_CHILDREN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OPAQUE = (
    "mamba_cache.", "torch._dynamo.", "torch.distributed.", "torch.utils.hooks.",
    "transformers.generation.", "logging.",
)  # fmt: skip
"""Objects of these packages are read by their class only, because their contents change."""

_REGISTRY_FILES = ("transformers.masking_utils", "transformers.integrations.moe")
"""Files of transformers with the registries of mask and expert functions. The registry of attention
functions is in the file of PreTrainedModel, which is always read."""

_SAMPLE_STRIDE = 16
_MAX_NAMES = 3
_ROOT = "model."
_SIZE_WITH_DICT = type("WithDict", (), {}).__basicsize__  # of objects with nothing but __dict__
_CAPTURING = "transformers.utils.output_capturing"  # its hooks return nothing
# Endings of names in classes and files that are not read: a value that transformers caches, its
# name for this process, and methods that a forward does not call.
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
"""PyTorch's modules that compute differently in training mode, unless their probability is 0."""


class ModelFingerprint:
    """Detects any change to a model that could change its results.

    All settings are hashed into ``key``, which is part of block hashes: with changed settings other
    prefixes are found. ``confirm`` raises if weights differ from those of the cached prefixes. Code
    from outside the libraries is foreign and is not read: a call bypasses the cache if there is
    any, unless ``variant`` names it. Each call runs ``begin`` before its forwards, and ``confirm``
    once they are enqueued.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights_check: WeightsCheck = "full",
        variant: str | None = None,
    ) -> None:
        self._model = model
        self._weights = _Weights(weights_check)
        self._variant = self._default_variant = check_variant(variant)
        self._known = _Known()
        self._reading = _Reading(self._known)
        self._is_unchecked = True  # the reading is new: training modes are not checked yet
        self._is_assumed = False  # the settings were not read yet; ``confirm`` reads them
        self._num_handles = 0  # hooks registered in this process so far, at ``begin``
        # Set by ``begin``. The key is random if there is foreign code that no variant names.
        self.key = ""
        self.foreign: tuple[_ForeignKind, str] | None = None  # unnamed foreign code: kind, place
        self.foreign_attention: str | None = None  # its place, also if a variant names it

    def leave_out_what_changes(self, run: Callable[[], object]) -> None:
        """Call ``run``, forwards of the model; ignore from now on all that they rewrite."""
        # The first reading keeps its tensors alive, so no new tensor gets an old address.
        before = _Reading(self._known, self._model)
        one = self._contents(before)
        run()
        other = self._contents(_Reading(self._known, self._model))
        paths = one.keys() | other.keys()
        self._known.left_out |= {path for path in paths if one.get(path) != other.get(path)}
        self._reading = _Reading(self._known)

    def look_ahead(self) -> None:
        """Start to compare weights on a GPU while the host prepares a call of ``generate``.

        The next ``begin`` uses this comparison if the weights still have the same addresses and
        version counters.
        """
        if self._reading.digest:
            self._weights.look_ahead()

    def begin(
        self, *, may_differ: bool = False, variant: str | None = None, has_looked: bool = False
    ) -> None:
        """Read the settings and start to compare the weights; ``confirm`` gets the result.

        With ``may_differ``, when nothing is cached, the present weights become the expected ones.
        ``variant`` is the one of the call. ``has_looked``: the call began with ``look_ahead``.
        """
        self._variant = check_variant(variant) or self._default_variant
        self._is_assumed = False
        self._num_handles = RemovableHandle.next_id
        self._refresh()
        self.foreign_attention = self._reading.foreign.get("registered function")
        self.foreign = self._foreign()
        if self.foreign is not None:
            self.key = f"bypass {secrets.token_hex(16)}"
            self._weights.is_pending = False
            if not self._weights.expected:  # the identity of tiers has a digest of the weights
                self._weights.begin(self._reading.tensors, is_read_anew=True, may_differ=True)
            self._reading, self._is_unchecked = _Reading(self._known), True  # free foreign objects
            return
        if self._is_unchecked:
            self._check_modes()
        self.key = self._current_key()
        self._weights.begin(
            self._reading.tensors,
            is_read_anew=self._is_unchecked,
            may_differ=may_differ,
            has_looked=has_looked,
        )
        self._is_unchecked = False

    def assume(self, *, may_differ: bool, variant: str | None) -> bool:
        """Assume the last call's settings, in the place of ``begin``; return whether that is safe.

        Then ``confirm`` reads the settings while a GPU computes the forwards. This is safe if the
        last call found neither foreign code nor changes, and no hook was registered since. The
        call must have begun with ``look_ahead``.
        """
        is_known = self._reading.digest and not self._reading.foreign and not self._is_unchecked
        is_same = (check_variant(variant) or self._default_variant) == self._variant
        if not (is_known and is_same) or self.has_new_hooks():
            return False
        self._weights.begin(
            self._reading.tensors, is_read_anew=False, may_differ=may_differ, has_looked=True
        )
        self._is_assumed = True
        return True

    def confirm(self) -> None:
        """Check settings that were assumed, and wait for the comparison of the weights."""
        if self._is_assumed:
            self._is_assumed, before = False, self._reading.tensors
            is_current, now = self.is_current(), self._reading.tensors
            # The comparison of weights reads the old tensors, so it cannot notice new ones.
            if not is_current or any(before.get(path) is not now[path] for path in now):
                self.key = ""  # ``is_current`` returns False until the next ``begin``
                raise ModelChangedError("the model has changed since the previous call")
        self._weights.confirm()

    def portable_key(self) -> str | None:
        """Return a key of the settings that is the same in all processes; None if there is none."""
        if self.foreign is not None or (self._unnamed_code() and self._variant is None):
            return None
        code = sorted(self._reading.modules_of_code)
        settings = _digest(
            *(f"{path}={value}" for path, (value, _) in self._reading.values.items()),
            *(f"{name} {self._known.file_digest(name)}" for name in code),
        )
        return f"{settings} {global_settings()} {self._variant!r}"

    def check_files(self) -> None:
        """Check that all code of the model's classes lies in files, or that a variant names it."""
        self._refresh()
        if (missing := self._unnamed_code()) and self._default_variant is None:
            raise InvalidArgumentError(
                f"a disk cache or a store needs variant= here: the code in {', '.join(missing)} "
                "lies in no file, so other processes cannot tell it from other code. Pass a "
                "variant that names the code, and another one when the code changes"
            )

    def weights_digest(self) -> str | None:
        """Return a digest of the expected weights; None if none were read."""
        if self._weights.kind == "off" or not self._weights.expected:
            return None
        weights = sorted(self._weights.expected.items())
        return _digest(*(f"{path} {value!r}" for path, value in weights))

    def is_current(self) -> bool:
        """Return whether the settings are still those of ``key``."""
        if self.foreign is not None:
            return True  # no prefix can be found under the random key
        self._refresh()
        return self._foreign() is None and self._current_key() == self.key

    def has_new_hooks(self) -> bool:
        """Return whether hooks were registered since ``begin``, even if they were removed."""
        return RemovableHandle.next_id != self._num_handles

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the model's tensors, which CUDA graphs depend on.

        Empty while foreign code makes calls bypass the cache; each call has a random key then.
        """
        reading = self._reading
        rewritten = (owner.get(name) for owner, name in reading.rewritten)
        tensors = chain(reading.tensors.values(), filter(torch.is_tensor, rewritten))
        # Tensors of other layouts have no address: a model has them with a variant alone.
        return tuple([each.data_ptr() for each in tensors if each.layout is torch.strided])

    @property
    def has_foreign(self) -> bool:
        """Whether ``begin`` found foreign code, named by a variant or not."""
        return bool(self.foreign or self._reading.foreign)

    def forget(self) -> None:
        """Take the present weights as the expected ones.

        They are read at once, so that the next prompt does not wait for it. An error in reading is
        dropped here, and raised by the next ``begin``.
        """
        self._weights = _Weights(self._weights.kind)
        with suppress(Exception):
            self.begin()

    def _unnamed_code(self) -> list[str]:
        names = sorted(self._reading.modules_of_code)
        return [name for name in names if self._known.file_digest(name) is None]

    def _foreign(self) -> tuple[_ForeignKind, str] | None:
        found = self._reading.foreign.items()
        return next(iter(found), None) if self._variant is None else None

    def _refresh(self) -> None:
        if not self._reading.is_current():
            # The next ``begin`` checks the training modes of the new reading.
            self._reading, self._is_unchecked = _Reading(self._known, self._model), True

    def _current_key(self) -> str:
        return f"{self._reading.digest} {global_settings()} {self._variant!r}"

    def _contents(self, reading: _Reading) -> dict[str, object]:
        """Return by path the values of a reading and the checksums of its tensors."""
        weights = _Weights(self._weights.kind).measure(reading.tensors)
        return {
            path: (value, reading.unknown.get(path), weights.get(path))
            for path, value in reading.values.items()
        }

    def _check_modes(self) -> None:
        for path, module in self._reading.modules.items():
            if module.training and _depends_on_mode(module):
                raise InvalidArgumentError(
                    "no part of the model must be in training mode, "
                    f"{path.removeprefix(_ROOT)} is: call model.eval()"
                )


def check_variant(variant: object) -> str | None:
    """Check that a variant is a name or None."""
    if variant is not None and (not isinstance(variant, str) or not variant):
        raise InvalidArgumentError(f"variant must be a str that is not empty, got {variant!r}")
    return variant


def _digest(*lines: str) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=32).hexdigest()


class _Known:
    """Facts that outlive a reading: first seen functions, numbers of code, digests of files."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()  # paths that forwards rewrite: they are not read
        # By class and library file: its functions when it was first read, by name.
        self.functions: WeakKeyDictionary[type | ModuleType, dict[str, Any]] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._digests: dict[str, str | None] = {}
        self._count = count(1)

    def number(self, code: Any) -> int:
        """Return the number of a function or class; unlike an ``id``, no other object gets it."""
        return self._numbers.setdefault(code, next(self._count))

    def file_digest(self, module_name: str) -> str | None:
        """Return a digest of a module's file, read in the first call; None if it has no file."""
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
    """The result of one walk through a model; ``is_current`` checks it without another walk.

    The walk reads plain values, tensors, modules, functions of the libraries, and lists, tuples,
    dicts, sets and library objects of these. Any other attribute is foreign. Where a call of a
    cache has replaced an attribute, the original is read. Of hooks only the origin is read.
    """

    def __init__(self, known: _Known, model: torch.nn.Module | None = None) -> None:
        self._known = known
        # By path. The number beside a value is the number of its code in this process.
        self.values: dict[str, tuple[str, int]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        # Entries of dicts that forwards rewrite, such as counters among the buffers.
        self.rewritten: list[tuple[dict[str, Any], str]] = []
        self.modules_of_code: set[str] = set()  # Python modules with the model's code, no libraries
        self.foreign: dict[_ForeignKind, str] = {}  # the place of the first foreign code by kind
        self.unknown: dict[str, int] = {}  # ids of all foreign objects, by path
        self.digest = ""  # of all settings; empty before the walk
        self._own: set[str] = set()  # of ``modules_of_code`` those of the model's classes
        self._names: dict[int, str] = {}  # names of the model's modules by id
        self._paths: dict[int, str] = {}  # paths of all objects read, by id
        self._configs: list[Any] = []  # the model's configurations
        # Compared by ``is_current``: members of collections, and single entries of dicts.
        self._members: list[Any] = []
        self._owners: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._found: list[Any] = []
        if model is not None:
            self._walk(model)

    def _walk(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        kinds = {type(module) for module in model.modules()}
        classes = sorted(
            {cls for kind in kinds for cls in kind.__mro__ if cls is not object},
            key=lambda cls: (cls.__module__, cls.__qualname__),
        )
        for kind in classes:
            self._add_code(kind.__module__)
        self._own = set(self.modules_of_code)
        self._read("model", model)
        for name in _HOOKS:
            self._read_hooks(f"all modules.{name}", getattr(torch_modules, f"_global{name}"))
        for kind in classes:
            self._read_namespace(f"class {kind.__module__}.{kind.__qualname__}", kind)
        # The library files, except torch's, that define the classes.
        names = sorted({kind.__module__ for kind in classes} & sys.modules.keys())
        names = [name for name in names if is_library(name) and not name.startswith("torch.")]
        files = [sys.modules[name] for name in names]
        for file in files:
            self._read_namespace(f"module {file.__name__}", file)
        for kind in classes:
            if kind.__module__ in self._own & sys.modules.keys():
                self._read_globals(kind, sys.modules[kind.__module__])
        self._read_selected(files)
        self.digest = _digest(*(f"{path}={value}" for path, value in self.values.items()))
        self._found = self._snapshot()
        self._paths, self._names = {}, {}

    def is_current(self) -> bool:
        """Return whether a new walk would find the same; the loops run in C."""
        if not self.digest:
            return False
        try:
            found = self._snapshot()
            return len(found) == len(self._found) and all(map(is_, found, self._found))
        except RuntimeError:  # another thread changes a dict
            return False

    def _snapshot(self) -> list[Any]:
        """Return the objects that must be identical in the next call."""
        return [
            *chain.from_iterable(self._members),
            *map(dict.get, self._owners, self._keys),
            *map(type, self.modules.values()),
        ]

    def _read(self, path: str, value: Any) -> None:
        kind = type(value)
        if path in self._known.left_out:
            return
        if _is_plain(value):
            self._record(path, f"{kind.__name__} {value!r}")
        elif id(value) in self._paths:
            self._record(path, f"as {self._paths[id(value)]}")
        elif isinstance(value, torch.Tensor):
            self._read_tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            self._read_module(path, value)
        elif kind in (set, frozenset) and all(map(_is_plain, value)):
            self._members.append(value)
            self._record(path, f"{kind.__name__} {sorted(map(repr, value))}")
        elif kind in (list, tuple, dict, OrderedDict):
            self._read_items(path, value)
        elif isinstance(value, _FUNCTION_TYPES):
            self._read_function(path, value, "foreign attribute", self._own)
        else:
            self._read_object(path, value)

    def _read_tensor(self, path: str, tensor: torch.Tensor) -> None:
        self._paths[id(tensor)] = path
        self.tensors[path] = tensor
        self._record(path, f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device.type != "meta" and not _is_readable(tensor):
            name = f"a {type(tensor).__name__} whose values cannot be read"
            self._flag("foreign attribute", path, name, tensor)

    def _read_module(self, path: str, module: torch.nn.Module) -> None:
        self._paths[id(module)] = path
        self._record_code(path, "module", type(module))
        if isinstance(module, torch.jit.ScriptModule):
            self._flag("foreign attribute", path, "a module of TorchScript", module)
            return
        self.modules[path] = module
        for name, value in self._attributes(path, module):
            method = getattr(type(module), name, None)
            if name in _NOT_READ:
                continue
            if _is_own_method(value, module):
                if value.__func__ is not method:
                    self._record(f"{path}.{name}", f"its method {value.__func__.__name__}")
            elif callable(method) and callable(value) and not isinstance(value, torch.nn.Module):
                self._read_function(f"{path}.{name}", value, "replaced method")
            else:
                self._read(f"{path}.{name}", value)
        for name in _HOOKS:
            self._read_hooks(f"{path}.{name}", vars(module)[name])
        for kind in _TENSORS_AND_CHILDREN:
            members = vars(module)[kind]
            self._watch(path, members)
            for name in members:
                self._read(f"{path}.{name}", members[name])

    def _attributes(self, path: str, owner: Any) -> list[tuple[str, Any]]:
        """Watch the attributes of an object; return them without a running call's replacements."""
        attributes = vars(owner)
        self._watch(path, attributes)
        found = ((name, original(attributes, name)) for name in sorted(attributes))
        return [(name, value) for name, value in found if value is not ABSENT]

    def _read_hooks(self, path: str, hooks: Any) -> None:
        self._members.append(hooks)
        for position, hook in enumerate([*hooks.values()]):
            if _module_of(hook) != _CAPTURING:
                self._read_function(f"{path}[{position}]", hook, "forward hook")

    def _read_function(
        self, path: str, function: Any, kind: _ForeignKind, own: set[str] | None = None
    ) -> None:
        if (layer := foreign_layer(function, own)) is not None:
            self._flag(kind, path, layer, function)
        elif isinstance(function, partial):
            self._read_function(f"{path}.func", function.func, kind, own)
            self._read(f"{path}.args", function.args)
            self._read(f"{path}.keywords", function.keywords)
        elif isinstance(function, MethodType):
            owner = self._names.get(id(function.__self__))
            self._record_code(path, f"method of {owner}", function.__func__)
            if owner is None:
                self._read(f"{path}.__self__", function.__self__)
        else:
            self._record_code(path, "function", function)

    def _read_items(self, path: str, items: Any) -> None:
        self._paths[id(items)] = path
        self._record(path, f"{type(items).__name__} {len(items)}")
        if not isinstance(items, dict):
            self._members.append(items)
            for index, value in enumerate(items):
                self._read(f"{path}[{index}]", value)
        elif all(map(_is_plain, items)):
            self._watch(path, items)
            for key in items:
                self._read(f"{path}[{key!r}]", items[key])
        else:
            self._flag("foreign attribute", path, "a dict with other keys than plain ones", items)

    def _read_object(self, path: str, value: Any) -> None:
        self._paths[id(value)] = path
        kind = type(value)
        is_config = isinstance(value, transformers().PreTrainedConfig)
        if is_config:
            self._configs.append(value)
        elif f"{kind.__module__}.".startswith(_OPAQUE):
            self._record_code(path, "object", kind)
            return
        is_foreign = not (is_config or is_library(kind.__module__))
        is_patched = callable(value) and foreign_layer(value) is not None
        # Fields of C code and slots, which cannot be read, make objects larger.
        has_more = kind.__basicsize__ != _SIZE_WITH_DICT or not hasattr(value, "__dict__")
        if is_foreign or is_patched or has_more:
            what = f"an object of class {kind.__qualname__} of module {kind.__module__}"
            self._flag("foreign attribute", path, what, value)
            return
        self._record_code(path, "object", kind)
        self._add_code(kind.__module__)
        for name, found in self._attributes(path, value):
            self._read(f"{path}.{name}", found)

    def _read_namespace(self, path: str, owner: type | ModuleType) -> None:
        """Read the plain values and the functions of a class or a library's file.

        Functions of the first reading belong to the model, wherever they come from, so earlier
        patches are no foreign code. No code looks up names that were added to a file later.
        """
        namespace = vars(owner)
        self._members += [namespace, namespace.values()]
        functions: dict[str, Any] = {}
        for name in list(namespace):
            if name.endswith(_NOT_READ_OF_CODE) or name.startswith("_abc"):
                continue
            value = original(namespace, name)
            if (function := _function_in(value)) is not None:
                functions[name] = function
                self._add_code(_module_of(function))
            elif _is_plain(value) and not name.startswith("__"):
                self._record(f"{path}.{name}", repr(value))
        first = self._known.functions.setdefault(owner, functions)
        names = first.keys() if isinstance(owner, ModuleType) else first.keys() | functions.keys()
        for name in sorted(names):
            if name not in functions:
                self._record(f"{path}.{name}", "removed")
            elif functions[name] is not first.get(name):
                self._read_function(f"{path}.{name}", functions[name], "replaced method")

    def _read_globals(self, kind: type, file: ModuleType) -> None:
        """Read the global names that the methods of a user's own class look up."""
        namespace = vars(file)
        methods = [f for f in map(_function_in, vars(kind).values()) if hasattr(f, "__code__")]
        used = {name for method in methods for name in method.__code__.co_names}
        for name in sorted(used & namespace.keys()):
            path, value = f"module {file.__name__}.{name}", namespace[name]
            if isinstance(value, _FUNCTION_TYPES):
                self._record_code(path, "function", value)
                self._add_code(_module_of(value))
            elif _is_plain(value) or isinstance(value, (torch.Tensor, list, tuple, dict)):
                self._read(path, value)
            else:
                continue
            self._owners.append(namespace)
            self._keys.append(name)

    def _read_selected(self, files: list[ModuleType]) -> None:
        """Read functions that configurations select in registries of transformers or the model."""
        fields = ("_attn_implementation_internal", "_experts_implementation_internal")
        chosen = {original(vars(c), f) for c in self._configs for f in fields if f in vars(c)}
        files = [*files, *(sys.modules[name] for name in _REGISTRY_FILES if name in sys.modules)]
        found: dict[int, tuple[str, Any]] = {}
        for name, value in chain.from_iterable(list(vars(file).items()) for file in files):
            if isinstance(getattr(value, "_local_mapping", None), dict):
                found.setdefault(id(value), (name, value))
        for name, registry in found.values():
            for choice in sorted(each for each in chosen if isinstance(each, str)):
                mappings = (registry._local_mapping, registry._global_mapping)
                self._owners += mappings
                self._keys += [choice] * len(mappings)
                function = next((each[choice] for each in mappings if choice in each), None)
                if function is not None:
                    path = f"{name}[{choice!r}]"
                    self._read_function(path, function, "registered function")

    def _flag(self, kind: _ForeignKind, path: str, layer: str, value: object) -> None:
        self._record(path, "foreign")
        self.unknown[path] = id(value)
        self.foreign.setdefault(kind, f"{path.removeprefix(_ROOT)} is {layer}")

    def _record(self, path: str, value: str, number: int = 0) -> None:
        self.values[path] = value, number

    def _record_code(self, path: str, what: str, code: Any) -> None:
        if not isinstance(code, _FUNCTION_TYPES):  # a callable object: its class has the code
            code = type(code)
        module = _module_of(code)
        number = 0 if is_library(module) else self._known.number(code)
        self._record(path, f"{what} {module}.{getattr(code, '__qualname__', '')}", number)

    def _add_code(self, module_name: str | None) -> None:
        root = str(module_name).partition(".")[0]
        if root not in sys.stdlib_module_names | _KERNEL_PACKAGES and not is_library(module_name):
            self.modules_of_code.add(str(module_name))

    def _watch(self, path: str, items: dict[str, Any]) -> None:
        """Watch a dict, except for entries that a forward rewrites."""
        self._members.append(items)
        rewritten = {name for name in items if f"{path}.{name}" in self._known.left_out}
        self.rewritten += [(items, name) for name in rewritten]
        if not rewritten:
            self._members.append(items.values())
            return
        for name in items.keys() - rewritten:
            self._owners.append(items)
            self._keys.append(name)


def is_library(module_name: str | None) -> bool:
    """Return whether a module belongs to torch, transformers, peft, accelerate or kernels."""
    if not module_name:
        return False
    if module_name.partition(".")[0] in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return "kernels" in _LIBRARIES and bool(file and _HUB_KERNEL.search(file))


def _module_of(thing: Any) -> str | None:
    """Return the name of the module that defines a callable's code; None if it has none."""
    if isinstance(thing, FunctionType):
        # functools.wraps copies __module__ from the wrapped function; globals cannot be copied.
        name = thing.__globals__.get("__name__")
        return name if isinstance(name, str) else None
    if isinstance(thing, type):
        return thing.__module__
    name = getattr(thing, "__module__", None)
    if isinstance(name, str):
        return name
    owner = getattr(thing, "__objclass__", None)  # the class of a C method
    return None if owner is None else owner.__module__


def foreign_layer(thing: Any, own: Collection[str] | None = None) -> str | None:
    """Return the first function inside a callable that is of no library; None if there is none.

    Partials, bound methods, wrapped functions and the methods of callable objects are unwrapped.
    ``own`` are the names of the modules of a model's classes. If given, functions of kernel
    packages and named functions of these modules are not foreign either.
    """
    inner = [getattr(thing, "__dict__", {}).get("__wrapped__")]
    if isinstance(thing, partial):
        arguments = (*thing.args, *thing.keywords.values())
        inner += [thing.func, *(each for each in arguments if isinstance(each, _FUNCTION_TYPES))]
    elif isinstance(thing, MethodType):
        inner.append(thing.__func__)
    else:
        name, called = _module_of(thing), getattr(thing, "__qualname__", type(thing).__qualname__)
        if not (is_library(name) or (own is not None and _is_named(thing, called, name, own))):
            return f"{called} of module {name}"
        if not isinstance(thing, _FUNCTION_TYPES):  # an object: its class may be patched
            inner.append(vars(type(thing)).get("__call__", type(thing)))
    layers = (foreign_layer(each, own) for each in inner if each is not None)
    return next(filter(None, layers), None)


def _is_named(function: Any, called: str, module_name: str | None, own: Collection[str]) -> bool:
    """Return whether a function's name identifies it: names of closures and lambdas do not."""
    if str(module_name).partition(".")[0] in _KERNEL_PACKAGES:
        return True
    return module_name in own and "<" not in called and not getattr(function, "__closure__", None)


def _is_plain(value: Any) -> bool:
    """Return whether a value is immutable and ``repr`` shows all of it."""
    kind = type(value)
    if kind in (tuple, torch.Size):
        return all(map(_is_plain, value))
    return kind in _PLAIN or isinstance(value, (Enum, np.generic))


def _is_own_method(value: Any, module: torch.nn.Module) -> bool:
    """Return whether an attribute is a method of the module's class, bound to the module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return getattr(type(module), value.__func__.__name__, None) is value.__func__


def _function_in(value: Any) -> Any:
    """Return the function in an entry of a class or file; None if the entry is no function."""
    value = getattr(value, "__func__" if isinstance(value, (staticmethod, classmethod)) else "fget",
                    value)  # fmt: skip
    return value if isinstance(value, _FUNCTION_TYPES) and not isinstance(value, type) else None


def global_settings() -> tuple[object, ...]:
    """Return PyTorch's global settings that change results: precision and choice of kernels."""
    found: list[object] = [
        (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    ]
    for read in _SWITCHES:
        try:
            found.append(read())
        except (AttributeError, RuntimeError) as error:  # noqa: PERF203 - an old torch, or the old and the new names of one switch were both used
            found.append(str(error))
    return tuple(found)


_SWITCHES: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    *(partial(attrgetter(name), torch.backends) for name in (
        "cuda.matmul.allow_tf32", "cuda.matmul.fp32_precision",
        "cuda.matmul.allow_fp16_reduced_precision_reduction",
        "cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation",
        "cudnn.allow_tf32", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic",
        "cudnn.conv.fp32_precision",
        "mkldnn.enabled", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision",
    )),
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
)  # fmt: skip


class _Weights:
    """The tensors of a model, and the checksum of each in the first call: ``expected``, by path."""

    def __init__(self, kind: WeightsCheck) -> None:
        self.kind: WeightsCheck = kind
        self.expected: dict[str, object] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._layout: list[Any] = []
        self._checksums: list[TensorChecksums] | None = None
        self.is_pending = False
        self._may_differ = False
        self._num_calls = 0
        self._versions: list[int] = []  # version counters at ``look_ahead``; empty: it did nothing

    def look_ahead(self) -> None:
        """Start the comparison before ``begin``, if all weights are on GPUs and have not moved."""
        self._versions = []
        if not self._checksums or any(each.device.type != "cuda" for each in self._checksums):
            return
        if self._snapshot() == self._layout:  # pragma: no cover - tests/gpu run it
            self._start()
            self._versions = _versions(self._tensors.values())

    def begin(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        is_read_anew: bool,
        may_differ: bool,
        has_looked: bool = False,
    ) -> None:
        self.is_pending = False
        self._may_differ = may_differ
        began_with = self._versions if has_looked else []
        self._versions = []
        if is_read_anew or self._checksums is None or self._snapshot() != self._layout:
            self._take(self.measure(tensors), is_changed=False)
            self._layout = self._snapshot()
        elif self.kind != "off":
            if not began_with or began_with != _versions(self._tensors.values()):
                self._start()
            self.is_pending = True
            if all(checksums.device.type != "cuda" for checksums in self._checksums):
                self.confirm()

    def _start(self) -> None:
        assert self._checksums is not None
        self._num_calls += 1
        stride = _SAMPLE_STRIDE if self.kind == "sample" else 1
        for checksums in self._checksums:
            checksums.start(stride=stride, phase=self._num_calls % stride)

    def confirm(self) -> None:
        """Wait for the comparison that ``begin`` started; raise if weights have changed."""
        if not self.is_pending:
            return
        self.is_pending = False
        assert self._checksums is not None
        verdicts = [checksums.is_unchanged() for checksums in self._checksums]
        if not all(verdicts):
            self._take(self._measured(), is_changed=True)

    def measure(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Return dtype, layout and checksum of each tensor that has values.

        Tensors on the meta device have none. Their values lie elsewhere, for example in a map of
        offloaded weights in a hook of accelerate, which is read as an attribute.
        """
        self._tensors = {p: t for p, t in tensors.items() if t.numel() and _is_readable(t)}
        groups: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in self._tensors.values():
            groups.setdefault(tensor.device, []).append(tensor)
        self._checksums = (
            [TensorChecksums(group) for group in groups.values()] if self.kind != "off" else []
        )
        return self._measured()

    def _take(self, found: dict[str, object], *, is_changed: bool) -> None:
        """Compare ``found`` with the expected weights; raise if they have changed and may not."""
        known = self.expected
        changed = [path for path, value in found.items() if known.get(path, value) != value]
        if self._may_differ:
            self.expected = found
        elif changed or is_changed:
            self._checksums = None
            names = ", ".join(path.removeprefix(_ROOT) for path in changed[:_MAX_NAMES])
            more = f" and {len(changed) - _MAX_NAMES} more" if len(changed) > _MAX_NAMES else ""
            raise ModelChangedError(
                "the model's weights are not those that the cached prefixes were computed with "
                f"({names or 'they differed for a moment'}{more}): call reset() to drop these"
            )
        else:
            self.expected |= found

    def _measured(self) -> dict[str, object]:
        assert self._checksums is not None
        sums = {checksums.device: iter(checksums.measure()) for checksums in self._checksums}
        return {
            path: (tensor.dtype, tensor.size(), tensor.stride(), (
                (tensor.data_ptr(), _version(tensor)) if self.kind == "off"
                else next(sums[tensor.device])
            ))
            for path, tensor in self._tensors.items()
        }  # fmt: skip

    def _snapshot(self) -> list[list[Any]]:
        """Return addresses and layouts of the tensors; in C loops, because every call needs it."""
        tensors = [*self._tensors.values()]
        return [
            list(map(torch.Tensor.data_ptr, tensors)),
            list(map(torch.Tensor.size, tensors)),
            list(map(torch.Tensor.stride, tensors)),
            list(map(attrgetter("dtype"), tensors)),
            _versions(tensors) if self.kind != "full" else [],
        ]


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether all values of a tensor can be read from its bytes."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    try:
        return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() >= 0
    except (NotImplementedError, RuntimeError):
        return False


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _versions(tensors: Collection[torch.Tensor]) -> list[int]:
    """Return PyTorch's counter of in-place writes of each tensor, -1 if it has none."""
    try:
        return list(map(attrgetter("_version"), tensors))
    except RuntimeError:  # tensors made in inference mode have no counter
        return list(map(_version, tensors))


def _depends_on_mode(module: torch.nn.Module) -> bool:
    """Return whether a module may compute something else in training mode.

    PEFT adds its layers in training mode to a model in eval mode. Layers of PEFT, and containers
    and plain layers of PyTorch, do not read the flag: their random parts are separate modules.
    """
    if isinstance(module, _RANDOM):
        return bool(getattr(module, "p", 1))
    return not type(module).__module__.startswith(("torch.", "peft."))
