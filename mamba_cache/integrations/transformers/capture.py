"""Capture of states inside one forward: only scans are computed in pieces."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn import functional

from mamba_cache.integrations.transformers.batching.kernels import pieces_torch
from mamba_cache.integrations.transformers.layers import LayerParts, SequenceMemory, numbered
from mamba_cache.integrations.transformers.replacement import intercepted
from mamba_cache.states import kernels_for

__all__ = ["ScanRun", "StateCapture"]

_INITIAL = frozenset({"initial_state", "initial_states"})
_RETURNS_FINAL = frozenset({"output_final_state", "return_final_states"})
_KERNELS = "mamba_cache.integrations.transformers.batching.kernels.pieces"


@dataclass(slots=True)
class ScanRun:
    """The scans of one forward over a rectangle of tokens, and the states saved from them.

    A scan runs as one call for each piece of the rows, and returns a state after each piece. A cut
    is the boundary between two pieces. All rows have the same cuts, or ``bounds`` has each row's.
    """

    num_rows: int  # sequences in the rectangle
    num_tokens: int  # tokens per row, padding at the end included
    widths: tuple[int, ...]  # tokens of each piece, padding included
    device: torch.device
    # [rows, pieces + 1] int64: the starts of each row's pieces, and the end of the last piece.
    bounds: torch.Tensor | None = None
    # For each cut two [rows] int64: the rows whose states are saved, and their indices in the
    # target. Several rows may write the same state to the same index.
    saved: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    # For each cut an iterator over the target of each state, [indices, *shape], in layer order.
    states: Sequence[Iterator[torch.Tensor]] = ()
    # For each cut an iterator over targets of attention windows, [1, heads, width, head_dim].
    windows: Sequence[Iterator[torch.Tensor]] = ()
    is_kernel: bool = False  # the scans are kernels, which compute step sizes in float32
    pieces: Sequence[torch.Tensor] | None = None  # the last scan's states at the cuts, until saved
    num_written: int = 0  # number of the model's state tensors that were saved at all cuts
    ends: Sequence[Any] = field(init=False)  # for each cut: [rows] int64, or an int for all rows
    kernels: Any = field(init=False)

    def __post_init__(self) -> None:
        self.ends = self.cuts if self.bounds is None else self.bounds[:, 1:-1].unbind(1)
        self.kernels = kernels_for("auto", self.device, kernels=_KERNELS, twins=pieces_torch)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts in tokens, ascending, if they are the same in all rows."""
        return tuple(accumulate(self.widths[:-1]))

    def compute(self, scan: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the function ``scan``: compute it in pieces, and keep their last states."""
        initial = next(iter(_INITIAL & kwargs.keys()), None)
        if initial is None or not any(kwargs.get(name) for name in _RETURNS_FINAL):
            return scan(*args, **kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        sequences = [key for key, x in given.items() if key != initial and self._is_sequence(x)]
        if not sequences:
            return scan(*args, **kwargs)
        self.pieces = []
        if len(self.widths) == 1 and self.bounds is None:
            return scan(*args, **kwargs)
        fills = {} if self.bounds is None else self._stop_steps(scan, given, len(args))
        values = [given[key] for key in sequences]
        padding = [fills.get(key, 0.0) for key in sequences]
        numbers = [number for number, width in enumerate(self.widths) if width]
        state, outputs, states, first = given[initial], [], [], 0
        for number, width in enumerate(self.widths):
            if width:  # with zero tokens kernels write out of bounds
                if self.bounds is None:
                    parts = [value[:, first : first + width] for value in values]
                else:
                    parts = self.kernels.take_piece(values, padding, self.bounds, number, width)
                part = {**given, **dict(zip(sequences, parts, strict=True)), initial: state}
                output, state = scan(
                    *(part[place] for place in range(len(args))),
                    **{key: part[key] for key in kwargs},
                )
                outputs.append(output)
            states.append(state)
            first += width
        self.pieces = states[:-1]
        if self.bounds is not None:
            joined = self.kernels.join_pieces(outputs, numbers, self.bounds, self.num_tokens)
            return joined, state
        return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), state

    def _is_sequence(self, value: Any) -> bool:
        size = self.num_rows, self.num_tokens
        return torch.is_tensor(value) and value.dim() > 2 and tuple(value.shape[:2]) == size

    def _stop_steps(
        self, scan: Callable[..., Any], given: dict[Any, Any], num_args: int
    ) -> dict[Any, float]:
        """Give padding a step size of zero: return the fill value of ``dt``, if it is not zero.

        For all other inputs zeros are neutral. Softplus turns minus infinity into a step of zero.
        If step sizes have a lower limit, they are computed here, and the scan does not change them.
        """
        names = _names_of(scan)
        key = "dt" if "dt" in given else names.index("dt") if "dt" in names[:num_args] else None
        if key is None:
            return {}
        low, high = given.get("dt_limit", (0.0, float("inf")))
        if given.get("dt_softplus") and low <= 0:
            return {key: float("-inf")}
        steps, bias = given[key], given.get("dt_bias")
        if self.is_kernel:
            steps = steps.float()
        if bias is not None:
            steps = steps + bias.to(steps.dtype)
        if given.get("dt_softplus"):
            steps = functional.softplus(steps)
        given[key] = steps.clamp(low, high)
        neutral = {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))}
        given.update({name: x for name, x in neutral.items() if name in given})
        return {}


@lru_cache(maxsize=32)
def _names_of(scan: Callable[..., Any]) -> list[str]:
    """Return the parameter names of a scan."""
    return list(inspect.signature(scan).parameters)


class StateCapture:
    """Copies states at checkpoints to slots during one forward.

    A layer scans a sequence with a function that takes the initial state and returns the final one.
    During capture this function is replaced: it scans piece by piece, each from the state of the
    piece before, and the states between pieces are saved. Scans are thus computed as by several
    forwards, while projections, attention and MLPs run once over all tokens. The inputs of
    convolutions and of sliding windows are read in the update methods of the cache's layers.
    """

    def __init__(self, model: torch.nn.Module, layers: Sequence[LayerParts]) -> None:
        self._layers = layers
        found = list(_functions_of(model))
        self._scans = [(owner, name) for owner, name, function in found if _is_scan(function)]
        self._has_conv_kernel = any(
            name == "causal_conv1d_fn" and _is_kernel(function) for _, name, function in found
        )
        self.num_tensors = sum(
            len(parts.convs) + len(parts.recurrents) + 2 * bool(parts.window) for parts in layers
        )

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute the scans; the reference code needs far more memory."""
        return all(_is_kernel(getattr(owner, name)) for owner, name in self._scans)

    @contextmanager
    def during(
        self,
        cache: Any,
        start: int,
        num_tokens: int,
        rooms: Mapping[int, SequenceMemory],
    ) -> Iterator[set[int]]:
        """Capture states of the forward in the body, over ``num_tokens`` from ``start`` on.

        ``rooms`` has the target of each position's state. Targets of windows have their full width;
        places for tokens that do not exist are zeroed. Yield a set; after the body it has the
        positions of which all states were captured.
        """
        positions = sorted(rooms)
        cuts = tuple(position - start for position in positions)
        widths = tuple(end - begin for begin, end in pairwise((0, *cuts, num_tokens)))
        own = [rooms[position] for position in positions]
        at = torch.zeros(1, dtype=torch.int64, device=own[0].states[0].device)
        run = ScanRun(
            1,
            num_tokens,
            widths,
            at.device,
            saved=[(at, at)] * len(cuts),
            states=[iter(room.states) for room in own],
            windows=[iter(room.windows) for room in own],
        )
        captured: set[int] = set()
        with self.scanning(run, cache):
            yield captured
        if run.num_written == self.num_tensors:
            captured.update(positions)

    @contextmanager
    def scanning(self, run: ScanRun, cache: Any) -> Iterator[None]:
        """Have ``run`` compute the scans of this thread's forward, and save states, in the body.

        The update methods of the layers of ``cache`` are replaced too while the body runs.
        """
        with ExitStack() as undo:
            self._tap(undo, cache, run)
            for owner, name in self._scans:
                undo.enter_context(intercepted(self, owner, name, run.compute))
            yield

    def _tap(self, undo: ExitStack, cache: Any, run: ScanRun) -> None:
        for layer, parts in zip(cache.layers, self._layers, strict=True):
            convs = {i: [next(of_cut) for of_cut in run.states] for i in parts.convs}
            recurrents = {i: [next(of_cut) for of_cut in run.states] for i in parts.recurrents}
            taps: dict[str, Callable[..., Any]] = {}
            if convs:
                update = layer.update_conv_state
                if self._has_conv_kernel:
                    update = partial(_update_by_token, update, layer, run)
                taps["update_conv_state"] = partial(_keep_windows, update, layer, run, convs)
            if recurrents:
                taps["update_recurrent_state"] = partial(
                    _keep_states, layer.update_recurrent_state, run, recurrents
                )
            if parts.window:
                pairs = [(next(of_cut), next(of_cut)) for of_cut in run.windows]
                taps["update"] = partial(_keep_tokens, layer.update, layer, run, pairs)
            for name, tap in taps.items():
                setattr(layer, name, tap)
                undo.callback(delattr, layer, name)  # the tap refers to the layer: a cycle


def _state_index(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the index of the updated state in its layer, from the arguments after the state."""
    index: int = args[0] if args else kwargs.get("state_idx", 0)
    return index


def _update_by_token(
    update: Callable[..., torch.Tensor], layer: Any, run: ScanRun, *args: Any, **options: Any
) -> torch.Tensor:
    """Stand in for a layer's ``update_conv_state``, and keep each token's channels contiguous.

    The projection returns them contiguous, and a kernel reads them so in a third of the time.
    """
    new, index = args[0] if args else options["conv_states"], _state_index(args[1:], options)
    # With contiguous channels the kernel needs a number of channels that is a multiple of 8.
    is_served = new.stride(1) == 1 and new.shape[1] % 8 == 0
    if not is_served or not numbered(layer.has_previous_state)[index]:
        return update(*args, **options)
    window = numbered(layer.conv_states)[index]
    full: torch.Tensor = run.kernels.join_window(window, new)
    last = new[..., -window.shape[-1] :]
    update(last, *args[1:], **options) if args else update(**{**options, "conv_states": last})
    return full


def _keep_windows(
    update: Callable[..., torch.Tensor],
    layer: Any,
    run: ScanRun,
    to: Mapping[int, Sequence[torch.Tensor]],
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """Stand in for a layer's ``update_conv_state``; save conv windows at cuts and rows' ends.

    ``to`` has the target of each cut, by the index of the convolution.
    """
    full = update(*args, **options)
    new, index = args[0] if args else options["conv_states"], _state_index(args[1:], options)
    # Inputs of another shape are not those of the whole rectangle.
    if index in to and (new.shape[0], new.shape[-1]) == (run.num_rows, run.num_tokens):
        num_before = full.shape[-1] - run.num_tokens
        for (owners, places), end, room in zip(run.saved, run.ends, to[index], strict=True):
            if torch.is_tensor(end):
                run.kernels.copy_windows(full, end, room, owners, places)
            else:
                window = _window_before(full, num_before + end, room.shape[-1])
                room.index_copy_(0, places, window.to(room.dtype))
        if run.bounds is not None:
            window = numbered(layer.conv_states)[index]
            run.kernels.copy_windows(full, run.bounds[:, -1], window)
        run.num_written += 1
    return full


def _window_before(full: torch.Tensor, end: int, width: int) -> torch.Tensor:
    """Return a convolution's ``width`` inputs before column ``end``, padded left with zeros."""
    window = full[..., max(end - width, 0) : end]
    return functional.pad(window, (width - window.shape[-1], 0))


def _keep_states(
    update: Callable[..., torch.Tensor],
    run: ScanRun,
    to: Mapping[int, Sequence[torch.Tensor]],
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """Stand in for a layer's ``update_recurrent_state``; save the scan's states at the cuts."""
    pieces, run.pieces = run.pieces, None
    own = to.get(_state_index(args[1:], options))
    if pieces is not None and own is not None:
        shapes = [
            (state.shape[1:], room.shape[1:]) for state, room in zip(pieces, own, strict=True)
        ]
        if all(shape == expected for shape, expected in shapes):
            for (owners, places), state, room in zip(run.saved, pieces, own, strict=True):
                run.kernels.copy_rows(state.contiguous()[None], room[None], owners, places)
            run.num_written += 1
    return update(*args, **options)


def _keep_tokens(
    update: Callable[..., Any],
    layer: Any,
    run: ScanRun,
    rooms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *args: Any,
    **options: Any,
) -> Any:
    """Stand in for a layer's ``update``; save the attention window before each cut."""
    before = layer.keys, layer.values
    new = [*args, options.get("key_states"), options.get("value_states")][:2]
    size = run.num_rows, run.num_tokens
    if all(x is not None and (x.shape[0], x.shape[2]) == size for x in new):
        for cut, pair in zip(run.cuts, rooms, strict=True):
            for room, old, tokens in zip(pair, before, new, strict=True):
                _fill_window(room, old, tokens[:, :, :cut])
        run.num_written += 2
    return update(*args, **options)


def _fill_window(room: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor) -> None:
    width = room.shape[2]
    if new.shape[2] < width and old is not None and old.numel():
        new = torch.cat([old, new], dim=2)
    new = new[:, :, -width:]
    room[:, :, : new.shape[2]].copy_(new)
    room[:, :, new.shape[2] :].zero_()


def _functions_of(model: torch.nn.Module) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield functions that a model's layers can call: attributes of modules and of their files."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        code = sys.modules.get(type(module).__module__)
        owners |= {id(owner): owner for owner in (code, module) if owner is not None}
    for owner in owners.values():
        for name, value in list(vars(owner).items()):
            if inspect.isroutine(value):
                yield owner, name, value


def _is_kernel(function: Callable[..., Any]) -> bool:
    """Return whether a function is a kernel, also behind a wrapper of transformers."""
    cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    implementation = cells.get("implementation", function)
    module = getattr(implementation, "__module__", None) or "transformers."
    return not module.startswith("transformers.")


def _is_scan(function: Callable[..., Any]) -> bool:
    """Return whether a function computes a sequence from one state to the next.

    Recognised by parameters, because names differ between versions of transformers and kernel
    packages. The functions are in the file of the model's code or in its layers.
    """
    try:
        parameters = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):
        return False
    return bool(parameters & _INITIAL) and bool(parameters & _RETURNS_FINAL)
