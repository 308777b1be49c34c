"""Whether a vLLM can be served: how it calls what is replaced, and which copies it would make."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from mamba_cache.integrations.vllm.align_on_gpu import MambaBuffers, MambaSpecDecodeGPUContext
from mamba_cache.integrations.vllm.align_on_host import preprocess_mamba
from mamba_cache.integrations.vllm.copy_buffers import CpuGpuBuffer, MambaCopyBuffers

__all__ = ["copy_differences", "use_differences"]

_HELD_BY = {
    "mamba_bufs": MambaBuffers,
    "_mamba_bufs": MambaBuffers,
    "_mamba_ctx": MambaSpecDecodeGPUContext,
    "ctx": MambaSpecDecodeGPUContext,
    "postprocess_align": MambaSpecDecodeGPUContext,
}
"""Names by which vLLM's runners and model states hold what is replaced."""

_STATE_FIELDS = (
    "_align_mode",
    "_mamba_ctx",
    "_mamba_src_col_gpu",
    "_mamba_src_off_gpu",
    "_mamba_state_idx_gpu",
    "num_accepted_tokens_gpu",
    "recoverssm",
)
"""What the amended methods of the resident state call for, and read."""


def use_differences(
    home: ModuleType,
    model_state: ModuleType,
    state_class: str,
    uses: Mapping[str, Any],
    methods: Mapping[str, Callable[..., Any]],
) -> list[str]:
    """List where this vLLM lacks what is replaced, or uses it in another way.

    Names of parameters make no difference unless vLLM gives arguments by them.

    Args:
        home: The module whose functions and classes are replaced.
        model_state: The module of the resident state.
        state_class: Its class.
        uses: What takes their place, by name.
        methods: The same of methods of the class.
    """
    missing = [f"{home.__name__} has no {name}" for name in uses if not hasattr(home, name)]
    theirs = getattr(model_state, state_class, None)
    if theirs is None:
        return [*missing, f"{model_state.__name__} has no {state_class}"]
    source = Path(str(model_state.__file__)).read_text(encoding="utf-8")
    fields = {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}
    missing += [f"{state_class} has no {name}" for name in _STATE_FIELDS if name not in fields]
    missing += [f"{state_class} has no {name}" for name in methods if name not in vars(theirs)]
    differences: list[str] = []
    worker = Path(str(home.__file__)).parent
    own = {**uses, **{f"model_state.{name}": method for name, method in methods.items()}}
    for path in sorted(worker.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path != Path(str(home.__file__)) and ("mamba_utils" in text or "model_state." in text):
            where = path.relative_to(worker.parents[1]).as_posix()
            differences += _differences_in(ast.parse(text), where, own)
    return missing + sorted(set(differences))


def _differences_in(tree: ast.AST, where: str, uses: Mapping[str, Any]) -> Iterator[str]:
    """Find calls that what takes their place would refuse, and attributes that it has not."""
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    # A module may have a ``ctx`` of another kind.
    held = _HELD_BY if {"mamba_utils", "MambaSpecDecodeGPUContext"} & set(names) else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = held.get(_last_name(node.value))
            if own is not None and not _has(own, node.attr):
                yield f"{where}:{node.lineno} uses {ast.unparse(node)}, which is not known here"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            function = _called(node.func, {**held, **uses})
            if function is not None and not _takes(function, node):
                call = " ".join(ast.unparse(node).split())
                yield f"{where}:{node.lineno} calls {call}"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _has(own: type, name: str) -> bool:
    return hasattr(own, name) or name in inspect.get_annotations(own)


def _called(function: ast.Attribute, uses: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what of this package would be called, as it is called."""
    owner = _last_name(function.value)
    if owner == "mamba_utils":
        found = uses.get(function.attr)
        return None if inspect.isclass(found) else found
    if owner == "model_state":
        found = uses.get(f"{owner}.{function.attr}")
    elif owner in uses:
        found = getattr(uses[owner], function.attr, None)
    else:
        return None
    if inspect.isfunction(found):
        # Any instance does: only the signature of what is bound to it is read.
        return MethodType(found, found)
    return found if inspect.ismethod(found) else None  # of its class, as ``create`` is


def _takes(function: Callable[..., Any], call: ast.Call) -> bool:
    """Say whether a function can be called like that."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return True
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        inspect.signature(function).bind(*call.args, **keywords)
    except TypeError:
        return False
    return True


def copy_differences(home: ModuleType) -> list[str]:
    """List what vLLM decides otherwise for a small batch, which is not copied by it.

    Both get requests that are fresh, resumed, finished, and at a column's end, in two groups of
    layers. Compared are the columns, the accepted counts, and every copy by address and size.

    Args:
        home: vLLM's module of such functions.
    """
    try:
        theirs, ours = _Batch(home), _Batch(home)
        ours.move_to(theirs)
        expected = theirs.decide_by(home)
        found = ours.decide()
    except Exception as error:
        return [f"a small batch cannot be compared: {type(error).__name__}: {error}"]
    names = ("running columns", "accepted counts", "copies")
    return [
        f"{name} of a small batch are {theirs_}, and not {ours_}"
        for name, theirs_, ours_ in zip(names, expected, found, strict=True)
        if theirs_ != ours_
    ]


_REQUESTS = {"fresh": (0, 5), "running": (7, 1), "resumed": (8, 1), "moving": (4, 1)}
"""Computed and scheduled tokens of each request of a batch, where a column has four."""


class _Batch:
    """Four requests of two groups of layers, in vLLM's own classes."""

    def __init__(self, home: Any) -> None:
        kinds = home.MambaSpec.__dataclass_fields__["mamba_type"].default
        options = {"mamba_cache_mode": "align", "num_speculative_blocks": 1}
        shapes, dtypes = ((4, 6), (2, 3)), (torch.float32, torch.float32)
        specs = [
            home.MambaSpec(block_size=4, shapes=shapes, dtypes=dtypes, mamba_type=kinds, **options)
            for _ in range(2)
        ]
        by_layer = home.UniformTypeKVCacheSpecs(
            block_size=4, kv_cache_specs={"layer.2": specs[1], "layer.3": specs[1]}
        )
        groups = [
            (["layer.0"], specs[0]),
            (["attention"], object()),
            (["layer.2", "layer.3"], by_layer),
        ]
        self.config: Any = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups
            ]
        )
        self.layers = {
            name: SimpleNamespace(kv_cache=[torch.zeros(40, *s, device="cpu") for s in shapes])
            for name in ("layer.0", "layer.2", "layer.3")
        }
        self.funcs = {kinds: (home.get_conv_copy_spec, home.get_temporal_copy_spec)}
        self.state_idx = {"running": 1, "moving": 0, "resumed": 9, "finished": 3}
        self.requests = {
            name: SimpleNamespace(
                num_computed_tokens=computed,
                block_ids=[list(range(first, first + 5)) for first in (10 * i, 99, 10 * i + 5)],
            )
            for i, (name, (computed, _)) in enumerate(_REQUESTS.items())
        }
        is_dim_first = home.is_conv_state_dim_first()  # whose shifts vLLM does not list
        self.input_batch: Any = SimpleNamespace(
            req_ids=list(_REQUESTS),
            num_accepted_tokens_cpu=np.array([1, 2, 1, 1 if is_dim_first else 2]),
        )
        self.scheduled: Any = SimpleNamespace(
            finished_req_ids={"finished"},
            preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"resumed"}),
            num_scheduled_tokens={name: count for name, (_, count) in _REQUESTS.items()},
            scheduled_spec_decode_tokens={},
        )
        self.settings: Any = SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="align")

    def move_to(self, other: _Batch) -> None:
        """Have the same states in memory as another batch."""
        self.layers = other.layers

    def decide_by(self, home: Any) -> tuple[Any, ...]:
        """Let vLLM's functions decide, and do not let them copy."""
        bufs = home.MambaCopyBuffers.create(4, self.config, self.funcs, _make_buffer)
        module = copy.copy(vars(home))
        module["do_mamba_copy_block"] = lambda copy_bufs: None
        # The same code over other globals: nobody else sees that it does not copy.
        decide = type(home.preprocess_mamba)(home.preprocess_mamba.__code__, module)
        decide.__defaults__ = home.preprocess_mamba.__defaults__
        return self._call(decide, bufs)

    def decide(self) -> tuple[Any, ...]:
        """Decide, and copy zeros."""
        bufs = MambaCopyBuffers.create(4, self.config, self.funcs, _make_buffer)
        bufs.counts.forget()
        return self._call(preprocess_mamba, bufs)

    def _call(self, decide: Callable[..., Any], bufs: Any) -> tuple[Any, ...]:
        decide(
            self.scheduled, self.config, self.settings, self.state_idx, self.input_batch,
            self.requests, self.layers, self.funcs, bufs,
        )  # fmt: skip
        columns = (bufs.src_ptrs, bufs.dst_ptrs, bufs.sizes)
        copies = [[int(value) for value in buffer.np[: bufs.offset]] for buffer in columns]
        counts = self.input_batch.num_accepted_tokens_cpu.tolist()
        return self.state_idx, counts, sorted(zip(*copies, strict=True))


def _make_buffer(n: int, *, dtype: torch.dtype) -> CpuGpuBuffer:
    return CpuGpuBuffer(n, dtype=dtype, device="cpu")
