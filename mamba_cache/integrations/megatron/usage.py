"""How a version of Megatron Core uses its slot allocator, read from its source.

Parameters have names of their own in every version, and a name says little. What decides is what
Megatron reads, writes and calls of the allocator, and what the allocator reads of the context.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mamba_cache.slots import MambaSlotAllocator

__all__ = [
    "class_source",
    "context_differences",
    "method_source",
    "names_on_self",
    "use_differences",
]

_FIELD = "mamba_slot_allocator"
"""What contexts call their allocator."""

_CLASS = "MambaSlotAllocator"

_READ_BY_SLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DynamicInferenceContext": (
        ("max_requests",),
        ("block_size_tokens",),
        ("prefix_caching_eviction_policy",),
        ("kv_block_allocator",),
        ("request_to_kv_block_ids",),
        ("mamba_metadata",),
        ("mamba_conv_states",),
        ("mamba_ssm_states",),
        ("mamba_chunk_size",),
        ("batch_dimensions",),
        ("paused_request_count",),
    ),
    "KVBlockAllocator": (
        ("pool_size", "total_count"),
        ("block_ref_counts",),
        ("block_timestamps",),
        ("block_hashes",),
        ("on_blocks_deregistered",),
    ),
    "MambaMetadata": (
        ("request_to_mamba_state_idx",),
        ("intermediate_count",),
        ("per_request_intermediate_counts",),
    ),
}
"""What this package's slots read of Megatron's classes: of the names of a line, one."""


def use_differences(root: Path, *, without: Path) -> list[str]:
    """List what Megatron does with its allocator that this package's cannot answer.

    Args:
        root: The folder of ``megatron.core``.
        without: The module of the allocator itself.
    """
    sample = _sample_allocator()
    differences = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path == without or (_FIELD not in text and _CLASS not in text):
            continue
        for node, problem in _problems(_parse(text), sample):
            differences.append(f"{path.relative_to(root)}:{node.lineno} {problem}")
    return differences


def context_differences(classes: dict[str, ast.ClassDef]) -> list[str]:
    """List what the slots read of Megatron's classes and would not find.

    Args:
        classes: Megatron's classes by name.
    """
    differences = []
    for name, wanted in _READ_BY_SLOTS.items():
        if name not in classes:
            differences.append(f"it has no class {name}")
            continue
        offered = _attributes_of(classes[name])
        differences += [
            f"its {name} has no {' or '.join(names)}"
            for names in wanted
            if offered.isdisjoint(names)
        ]
    return differences


def class_source(paths: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """Return the classes that the modules of these paths define, by name; no path need exist."""
    trees = [_parse(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return {
        node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    }


def method_source(of_class: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a class's own method, or None."""
    for node in of_class.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def names_on_self(method: ast.FunctionDef) -> set[str]:
    """Return the attributes of ``self`` that a method names."""
    return {node.attr for node in _attributes_of_self(method)}


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Megatron writes in its strings
        return ast.parse(text)


def _attributes_of_self(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                yield node


def _problems(tree: ast.AST, sample: MambaSlotAllocator) -> Iterator[tuple[Any, str]]:
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for made in calls.values():
        is_maker = isinstance(made.func, ast.Name) and made.func.id == _CLASS
        if is_maker and not _binds(MambaSlotAllocator, made):
            yield made, f"makes the slots by {ast.unparse(made)}"
    for scope in _scopes(tree):
        aliases = _aliases(scope)
        for node in ast.walk(scope):
            if not (isinstance(node, ast.Attribute) and _is_allocator(node.value, aliases)):
                continue
            call = calls.get(id(node))
            if not hasattr(sample, node.attr):
                yield node, f"uses {node.attr} of the slots, which has nothing here"
            elif call is not None and not _binds(getattr(sample, node.attr), call):
                yield call, f"calls {ast.unparse(call)}"


def _scopes(tree: ast.AST) -> list[ast.AST]:
    """Return the outermost functions, in which an alias of the allocator holds."""
    functions: list[ast.AST] = []
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            (functions if is_function else waiting).append(child)
    return functions


def _aliases(scope: ast.AST) -> set[str]:
    return {
        target.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and _is_allocator(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_allocator(node: ast.AST, aliases: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in aliases
    return isinstance(node, ast.Attribute) and node.attr == _FIELD


def _binds(function: Any, call: ast.Call) -> bool:
    """Says whether a call's arguments are such as a function takes; unpacked ones may be."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return True
    if any(keyword.arg is None for keyword in call.keywords):
        return True
    if not callable(function):
        return False
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        inspect.signature(function).bind(*call.args, **keywords)
    except TypeError:
        return False
    return True


def _attributes_of(of_class: ast.ClassDef) -> set[str]:
    """Return what a class's source gives its instances: assigned on self, or a property."""
    names = {node.name for node in of_class.body if isinstance(node, ast.FunctionDef)}
    return names | {
        node.attr for node in _attributes_of_self(of_class) if isinstance(node.ctx, ast.Store)
    }


def _sample_allocator() -> MambaSlotAllocator:
    """Make an allocator of nothing, to be asked what it has."""
    kv_blocks = SimpleNamespace(pool_size=0)
    context: Any = SimpleNamespace(
        max_requests=1, kv_block_allocator=kv_blocks, device=torch.device("cpu")
    )
    return MambaSlotAllocator(context, 0, 1, (1,), (1,), torch.float32, torch.float32)
