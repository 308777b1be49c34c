"""The settings of a model: all that its results depend on beside the values of its tensors."""

from __future__ import annotations

import hashlib
import sys
import types
import weakref
from collections.abc import Iterator
from enum import Enum
from functools import partial
from operator import attrgetter, getitem, is_
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_modules

from mamba_cache.integrations.transformers.replacement import ABSENT, original

__all__ = ["ModelSettings", "Reading", "global_settings", "is_same"]

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, Enum,
    range,
)  # fmt: skip
_CODE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip
_BOOKKEEPING = frozenset(
    {
        *vars(torch.nn.Module()).keys() - {"training"},
        "generation_config",  # generate reads it, a forward does not
        "rope_deltas",  # multimodal models keep them of a generation; the next sets them anew
    }
)
"""Attributes of modules that a forward does not read, or that are read one by one below."""

_READ_APART = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_OPAQUE = (
    "torch._dynamo", "torch._inductor", "torch.distributed", "torch.optim", "torch.utils.data",
    "logging", "threading", "_thread", "concurrent", "asyncio", "mamba_cache", "tokenizers",
    "transformers.generation", "transformers.tokenization", "transformers.trainer",
)  # fmt: skip
"""Objects of these packages count by which one they are: what is in them changes by itself."""

_DEEPEST = 8
_cell_contents = attrgetter("cell_contents")


class ModelSettings:
    """Reads everything that a model's forward may look at: attributes, configuration, hooks, code.

    Objects are read attribute by attribute as far as they are plain values, containers, modules or
    other Python objects. A function counts by its code and by what it closes over: plain values by
    their value, tensors by which one it is and PyTorch's count of writes, all else by which one it
    is. The same holds for the attributes of an object that is called as a hook. So what a hook
    reads from a list that it closes over is not seen. What a call of a cache has replaced for its
    length counts as what was there before.

    Attributes:
        reading: What was read last; nothing before the first ``refresh``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._identities = _Identities()
        self._left_out: frozenset[str] = frozenset()
        self.reading = Reading(self._identities, self._left_out)

    def leave_out(self, paths: frozenset[str]) -> None:
        """Read no more what lies at these paths: a forward rewrites it, so it is no setting."""
        self._left_out |= paths
        self.reading = Reading(self._identities, self._left_out)

    def refresh(self) -> bool:
        """Read the model again if anything changed since; say whether it had to."""
        if self.reading.digest and self.reading.is_current():
            return False
        reading = Reading(self._identities, self._left_out)
        reading.read(self._model)
        self.reading = reading
        return True


class _Identities:
    """Numbers for objects: the same for as long as the object lives, never given to another."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._next = 0

    def number(self, thing: object) -> int:
        known = self._known.get(id(thing))
        if known is not None and known[0]() is thing:
            return known[1]
        self._next += 1
        try:
            reference: Any = weakref.ref(thing, partial(self._forget, id(thing), self._next))
        except TypeError:
            reference = partial(_itself, thing)  # keeps it alive, so that its id stays its own
        self._known[id(thing)] = (reference, self._next)
        return self._next

    def _forget(self, key: int, number: int, _: object) -> None:
        if self._known.get(key, (None, 0))[1] == number:
            del self._known[key]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _itself(thing: object) -> object:
    return thing


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


class Reading:
    """One walk through a model, and what tells cheaply whether another would find the same.

    Attributes:
        values: What was read, by path.
        tensors: The tensors that were found, by path; one that is found twice has the first path.
        modules: The modules that were found, by path.
        digest: Names all settings; empty before the walk.
    """

    def __init__(self, identities: _Identities, left_out: frozenset[str]) -> None:
        self._identities = identities
        self._left_out = left_out
        self.values: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self._paths: dict[int, str] = {}
        self._kept: list[object] = []
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        # Equal is not enough for what is read on, or watched: it must be the very same object.
        self._owners: list[Any] = []
        self._names: list[Any] = []
        self._objects: list[object] = []
        self._typed: list[object] = []
        self._types: list[type] = []
        self._cells: list[Any] = []
        self._cell_values: list[object] = []
        self._counted: list[torch.Tensor] = []
        self._unread: list[object] = []
        self._codes: list[types.CodeType] = []
        self._versions: list[int] = []
        self.digest = ""

    def read(self, model: torch.nn.Module) -> None:
        """Walk through a model."""
        self._read("model", model, 0)
        for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            self._read_hooks(name, getattr(torch_modules, name))
        self._read_code()
        self._versions = [_version(tensor) for tensor in self._counted]
        lines = "\n".join(f"{path}={value}" for path, value in self.values.items())
        self.digest = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    @property
    def portable_digest(self) -> str | None:
        """Names all settings so that another process names equal ones alike.

        There a function counts by what its code does, for two processes may number different ones
        alike. None if something closes over tensors, or counts by which object it is and was not
        read elsewhere: no name tells what is in it.
        """
        if self._counted or any(id(thing) not in self._paths for thing in self._unread):
            return None
        digest = hashlib.blake2b(self.digest.encode(), digest_size=16)
        for code in self._codes:
            _add_code(digest, code)
        return digest.hexdigest()

    def is_current(self) -> bool:
        """Compare what was read, all of it in loops that Python runs in C."""
        try:
            return (
                self._containers == self._copies
                and all(map(is_, map(getitem, self._owners, self._names), self._objects))
                and all(map(is_, map(type, self._typed), self._types))
                and all(map(is_, map(_cell_contents, self._cells), self._cell_values))
                and [_version(tensor) for tensor in self._counted] == self._versions
            )
        except Exception:  # whatever an object's comparison raises: another object is there
            return False

    def _read(self, path: str, value: Any, depth: int) -> None:
        if path in self._left_out:
            return
        if isinstance(value, _PLAIN):
            self.values[path] = f"{type(value).__name__} {value!r}"
            return
        known = self._paths.get(id(value))
        if isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
            self.values[path] = f"{type(value).__name__} {value!r}"
            if isinstance(value, list):
                self._watch(value)
        elif known is not None:
            self.values[path] = f"as {known}"
        elif isinstance(value, torch.Tensor):
            self._read_tensor(path, value, depth)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            self._remember(path, value)
            self._read_tensor(path, torch.from_numpy(value), depth)
        elif isinstance(value, torch.nn.Module):
            self._read_module(path, value, depth)
        elif isinstance(value, dict):
            self._remember(path, value)
            self._watch(value)
            self._read_items(path, value, depth)
        elif isinstance(value, (list, tuple)):
            self._remember(path, value)
            self._read_sequence(path, value, depth)
        elif isinstance(value, (set, frozenset)):
            self._remember(path, value)
            self._watch(value)
            self.values[path] = f"set {sorted(map(repr, value))}"
        else:
            self._read_object(path, value, depth)

    def _read_tensor(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        self._remember(path, tensor)
        self.tensors[path] = tensor
        self.values[path] = f"tensor {tensor.dtype} {tuple(tensor.shape)}"
        if tensor.is_mkldnn:  # nobody can read what it holds
            self.values[path] += f" {self._identities.number(tensor)}"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.values[path] += f" {self._name(type(tensor))}"
            for name, value in sorted(getattr(tensor, "__dict__", {}).items()):
                self._read(f"{path}.{name}", value, depth + 1)

    def _read_module(self, path: str, module: torch.nn.Module, depth: int) -> None:
        self._remember(path, module)
        self.modules[path] = module
        self.values[path] = f"module {self._name(type(module))}"
        attributes = vars(module)
        self._watch_attributes(path, attributes)
        self._typed.append(module)
        self._types.append(type(module))
        for name in sorted(attributes.keys() - _BOOKKEEPING):
            self._read_member(f"{path}.{name}", attributes, name, depth)
        for kind in _READ_APART:
            members = attributes[kind]
            self._refer(attributes, kind, members)
            if kind.endswith("hooks"):
                self._read_hooks(f"{path}.{kind}", members)
                continue
            self._watch_attributes(path, members)
            for name in members:
                self._read_member(f"{path}.{name}", members, name, depth=0)

    def _read_member(self, path: str, owner: Any, name: Any, depth: int) -> None:
        value = original(owner, name)
        if value is ABSENT:
            return
        if not isinstance(value, _PLAIN) and path not in self._left_out:
            self._refer(owner, name, value)
        self._read(path, value, depth + 1)

    def _read_hooks(self, path: str, hooks: Any) -> None:
        """Read hooks in their order; the numbers that they have in torch are others each time."""
        self._watch(hooks)
        for position, hook in enumerate(hooks.values()):
            self._read_captured(f"{path}[{position}]", hook, 0)

    def _read_captured(self, path: str, value: Any, depth: int) -> None:
        """Read something that is called, or what that has at hand."""
        if path in self._left_out:
            return
        if isinstance(value, _PLAIN):
            self.values[path] = f"{type(value).__name__} {value!r}"
        elif isinstance(value, torch.Tensor):
            self._counted.append(value)
            self.values[path] = f"tensor {self._identities.number(value)} {_version(value)}"
        elif depth >= _DEEPEST:
            self._count_as_one(path, value)
        elif isinstance(value, partial):
            self.values[path] = "partial"
            parts: dict[Any, Any] = {"func": value.func, **value.keywords}
            parts.update(enumerate(value.args))
            for name, part in parts.items():
                self._read_captured(f"{path}.{name}", part, depth + 1)
        elif isinstance(value, types.MethodType):
            self.values[path] = "method"
            self._read_captured(f"{path}.function", value.__func__, depth + 1)
            self._read_captured(f"{path}.self", value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._read_function(path, value, depth)
        elif isinstance(value, torch.nn.Module) or self._is_opaque(value):
            self._count_as_one(path, value)
        else:
            self.values[path] = f"object {self._name(type(value))}"
            for owner, name in self._attributes(path, value):
                if not isinstance(owner[name], _PLAIN):
                    self._refer(owner, name, owner[name])
                self._read_captured(f"{path}.{name}", owner[name], _DEEPEST)

    def _count_as_one(self, path: str, value: object) -> None:
        """Take a value for what it is by which object it is: what is in it is not read."""
        self.values[path] = self._name(value)
        if not isinstance(value, _CODE) and not type(value).__module__.startswith(_OPAQUE):
            self._unread.append(value)

    def _attributes(self, path: str, value: object) -> list[tuple[Any, str]]:
        """Return where the attributes of an object are found, and their names; watch them."""
        attributes = getattr(value, "__dict__", {})
        self._watch_attributes(path, attributes)
        slots = _Slots(value)
        found = [(attributes, name) for name in sorted(attributes)]
        for name in _names_of_slots(value):
            if hasattr(value, name) and f"{path}.{name}" not in self._left_out:
                self._refer(slots, name, slots[name])
                found.append((slots, name))
        return found

    def _read_function(self, path: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        self._codes.append(code)
        self.values[path] = (
            f"function {function.__module__}.{function.__qualname__} "
            f"{self._identities.number(code)}"
        )
        for position, default in enumerate(function.__defaults__ or ()):
            self._read_captured(f"{path}.defaults[{position}]", default, depth + 1)
        for name, default in (function.__kwdefaults__ or {}).items():
            self._read_captured(f"{path}.defaults.{name}", default, depth + 1)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            self._cells.append(cell)
            self._cell_values.append(value)
            self._read_captured(f"{path}.{name}", value, depth + 1)

    def _read_items(self, path: str, items: dict[Any, Any], depth: int) -> None:
        self.values[path] = f"{type(items).__name__} {len(items)}"
        for key in items:
            self._read_member(f"{path}[{key!r}]", items, key, depth)

    def _read_sequence(self, path: str, items: Any, depth: int) -> None:
        self.values[path] = f"{type(items).__name__} {len(items)}"
        for index in range(len(items)):
            self._read_member(f"{path}[{index}]", items, index, depth)
        if isinstance(items, list):
            self._watch(items)

    def _read_object(self, path: str, value: Any, depth: int) -> None:
        self._remember(path, value)
        if isinstance(value, (partial, types.MethodType, types.FunctionType)):
            self._read_captured(path, value, depth)
        elif self._is_opaque(value) or depth >= _DEEPEST:
            del self._paths[id(value)]
            self._count_as_one(path, value)
        else:
            self.values[path] = f"object {self._name(type(value))}"
            for owner, name in self._attributes(path, value):
                self._read_member(f"{path}.{name}", owner, name, depth + 1)

    def _is_opaque(self, value: Any) -> bool:
        has_attributes = isinstance(getattr(value, "__dict__", None), dict)
        if isinstance(value, _CODE) or not (has_attributes or _names_of_slots(value)):
            return True
        return type(value).__module__.startswith(_OPAQUE)

    def _read_code(self) -> None:
        """Read the classes of the model's modules, and the names that their code finds.

        Kernels and fused functions are put into the place of the library's own there.
        """
        for kind in _classes_of(self._types):
            self._watch_code(f"class {kind.__module__}.{kind.__qualname__}", kind)
        for name in sorted({kind.__module__ for kind in _classes_of(self._types)}):
            module = sys.modules.get(name)
            if module is not None and not name.startswith("torch."):
                self._watch_code(f"module {name}", module)
        utilities = sys.modules.get("transformers.modeling_utils")
        for name in ("ALL_ATTENTION_FUNCTIONS", "ALL_EXPERTS_FUNCTIONS"):
            self._read_registry(name, getattr(utilities, name, None))

    def _read_registry(self, path: str, registry: Any) -> None:
        for part in ("_global_mapping", "_local_mapping"):
            functions = getattr(registry, part, None)
            if isinstance(functions, dict):
                self._watch(functions)
                for name in sorted(functions):
                    self.values[f"{path}{part}.{name}"] = self._name(functions[name])

    def _watch_code(self, path: str, owner: Any) -> None:
        namespace = vars(owner)
        names = [name for name in namespace if not name.startswith("__") or name == "__call__"]
        for name in sorted(names):
            value = original(namespace, name)
            if f"{path}.{name}" in self._left_out or name.startswith("_abc"):
                continue
            if name.endswith("_cached_value"):  # transformers remembers what it learned of a class
                continue
            if name == "SESSION_ID":  # transformers' name for this process: nothing depends on it
                continue
            self._refer(namespace, name, value)
            is_plain = isinstance(value, _PLAIN)
            self.values[f"{path}.{name}"] = repr(value) if is_plain else self._name(value)
            if isinstance(value, types.FunctionType):
                self._codes.append(value.__code__)

    def _name(self, thing: Any) -> str:
        name = getattr(thing, "__qualname__", type(thing).__name__)
        return f"{getattr(thing, '__module__', '')}.{name} {self._identities.number(thing)}"

    def _remember(self, path: str, value: object) -> None:
        self._paths[id(value)] = path
        self._kept.append(value)

    def _watch(self, container: Any) -> None:
        self._containers.append(container)
        self._copies.append(container.copy())

    def _watch_attributes(self, path: str, attributes: dict[str, Any]) -> None:
        """Watches them one by one if a forward rewrites some, which would change the whole."""
        rewritten = [name for name in attributes if f"{path}.{name}" in self._left_out]
        if not rewritten:
            self._watch(attributes)
            return
        for name in attributes.keys() - rewritten:
            self._refer(attributes, name, attributes[name])

    def _refer(self, owner: Any, name: Any, value: object) -> None:
        self._owners.append(owner)
        self._names.append(name)
        self._objects.append(value)


def _add_code(digest: Any, code: types.CodeType) -> None:
    """Add what a function does, wherever it was defined, to a digest."""
    digest.update(repr((code.co_name, code.co_code, code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())


def _classes_of(kinds: list[type]) -> list[type]:
    """Return the classes that have the code of ``kinds``, but torch's own, in a stable order."""
    found = {
        f"{kind.__module__}.{kind.__qualname__} {id(kind)}": kind
        for one in set(kinds)
        for kind in one.__mro__
        if kind is not object and not kind.__module__.startswith("torch.")
    }
    return [found[name] for name in sorted(found)]


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


def is_same(one: object, other: object) -> bool:
    """Says whether two values are equal; not if they cannot be compared."""
    try:
        return bool(one == other)
    except Exception:  # tensors of several elements, or whatever an object raises
        return False
