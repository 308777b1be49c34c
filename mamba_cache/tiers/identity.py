"""Identity: all that must be equal for two processes to share an entry."""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch

from mamba_cache._checks import check_int, check_kind
from mamba_cache._extras import installed_version
from mamba_cache._torch import float32_precision
from mamba_cache._version import __version__
from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = [
    "FORMAT_VERSION",
    "CacheIdentity",
    "ModelIdentity",
    "Numerics",
    "ParallelRank",
    "tenant_digest",
]

FORMAT_VERSION: Final = 3
"""Version of headers and row layout. It is part of the identity: other versions are not read."""

_TENANT_BYTES: Final = 16
_CPU_FACTS: Final = Path("/proc/cpuinfo")
_CPU_NAMES: Final = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Hardware and software of a computation: a prompt gives the same bits only if they are equal.

    Attributes:
        architecture: The GPU and its compute capability, or the CPU, its model, and the
            instructions in use.
        torch_version: Version of PyTorch, with that of CUDA.
        triton_version: Version of Triton, or "none".
        kernels: Versions of this package and of other packages that compute the model's layers.
        matmul_precision: Precision of float32 products on the device, as
            ``torch.set_float32_matmul_precision`` names it.

    Raises:
        InvalidArgumentError: A field is empty.
    """

    architecture: str
    torch_version: str
    triton_version: str
    kernels: str
    matmul_precision: str

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_text(each.name, getattr(self, each.name))

    @classmethod
    def of(cls, device: torch.device | str, *, kernels: str = "") -> Numerics:
        """Read the numerics of this process.

        Args:
            device: Device that the model computes on.
            kernels: Other packages that compute layers, with versions, such as "mamba-ssm 2.2".
        """
        own, device = f"mamba-cache {__version__}", torch.device(device)
        return cls(
            architecture=_architecture(device),
            torch_version=f"{torch.__version__} cuda {torch.version.cuda}",
            triton_version=installed_version("triton") or "none",
            kernels=f"{own}, {kernels}" if kernels else own,
            matmul_precision=float32_precision(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRank:
    """The part of the model that a process holds.

    Attributes:
        tensor: Rank in tensor parallelism.
        tensor_size: Number of tensor-parallel ranks.
        pipeline: Rank in pipeline parallelism.
        pipeline_size: Number of pipeline-parallel ranks.
        context: Rank in context parallelism.
        context_size: Number of context-parallel ranks.

    Raises:
        InvalidArgumentError: A size is below 1, or a rank is not below its size.
    """

    tensor: int = 0
    tensor_size: int = 1
    pipeline: int = 0
    pipeline_size: int = 1
    context: int = 0
    context_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context"):
            size = check_int(
                f"{name}_size", getattr(self, f"{name}_size"), minimum=1, maximum=2**16
            )
            rank = check_int(name, getattr(self, name), minimum=0, maximum=size - 1)
            object.__setattr__(self, f"{name}_size", size)
            object.__setattr__(self, name, rank)

    @property
    def number(self) -> int:
        """The rank among all ranks, from 0."""
        outer = self.pipeline * self.context_size + self.context
        return outer * self.tensor_size + self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Facts about a model that the embedder must give: no spec or setting has them.

    Attributes:
        name: The model's full name, not the last component of a path.
        weights: A digest of the weights, or the revision that pins them.
        adapter: A digest of the adapters that are merged into the weights or always active, with
            their scaling. "" if there are none. A request's own ``lora_id`` is in its block
            hashes.
        settings: Other settings that change the results, such as attention's implementation, the
            scale of rotary embeddings, or the dtype of the computation. "" if there are none.
        rank: The part of the model that this process holds.
        numerics: Hardware and software of the computation. Default: those of this process's CPU; a
            context on another device replaces them with that device's.

    Raises:
        InvalidArgumentError: ``name`` or ``weights`` is unset, or a field is of another kind.
    """

    name: str
    weights: str
    adapter: str = ""
    settings: str = ""
    rank: ParallelRank = field(default_factory=ParallelRank)
    numerics: Numerics = field(default_factory=lambda: Numerics.of("cpu"))

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        if not isinstance(self.weights, str) or not self.weights:
            raise InvalidArgumentError(
                "weights must be a digest of the weights or the revision that pins them, got "
                f"{self.weights!r}: without it entries of other weights would be restored, so "
                "they are not shared"
            )
        for name in ("adapter", "settings"):
            _check_text(name, getattr(self, name), may_be_empty=True)
        check_kind("rank", self.rank, ParallelRank)
        check_kind("numerics", self.numerics, Numerics)


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """All that must be equal for two processes to share an entry.

    Made by ``CacheIdentity.of``. Two identities are equal if and only if their canonical bytes are.

    Attributes:
        canonical: JSON of every fact, keys sorted. A disk cache's folder has it as a file, so that
            people can read the facts.
        rank: Number of this process's part of the model, as in ``ParallelRank.number``.
        digest: [32] bytes, SHA-256 of ``canonical``.

    Raises:
        InvalidArgumentError: ``canonical`` was not made by ``CacheIdentity.of``.
    """

    canonical: bytes
    rank: int = field(init=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_kind("canonical", self.canonical, bytes)
        try:
            facts = json.loads(self.canonical)
            rank = ParallelRank(**facts["rank"]).number
            is_canonical = _canonical(facts) == self.canonical
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"canonical must be what CacheIdentity.of makes, got {self.canonical[:80]!r}"
            ) from error
        if not is_canonical:
            raise InvalidArgumentError("canonical must have its keys sorted and no spaces")
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "digest", hashlib.sha256(self.canonical).digest())

    @classmethod
    def of(
        cls,
        model: ModelIdentity,
        config: CacheConfig,
        state_spec: StateSpec,
        kv_spec: KVCacheSpec | None,
    ) -> CacheIdentity:
        """Collect the facts of an identity.

        Args:
            model: Facts about the model from the embedder.
            config: Settings. Those that only bound the size of the cache are left out.
            state_spec: Layout of a state.
            kv_spec: Layout of a token's keys and values; None if the embedder keeps them.

        Raises:
            InvalidArgumentError: ``config.hash_secret`` is unset: processes with different secrets
                have no hash in common. Or an argument is of another kind.
        """
        check_kind("model", model, ModelIdentity)
        check_kind("config", config, CacheConfig)
        check_kind("state_spec", state_spec, StateSpec)
        if kv_spec is not None:
            check_kind("kv_spec", kv_spec, KVCacheSpec)
        if config.hash_secret is None:
            raise InvalidArgumentError(
                "hash_secret must be given to share entries between processes: with a secret drawn "
                "in each process all hashes differ, and no entry would ever be found"
            )
        quantization, algorithm = None, config.hash_algorithm
        if config.slot_quantization is not None:
            quantization = {
                "kind": config.slot_quantization,
                "tensors": list(config.quantized_tensors),
            }
        facts = {
            "format": FORMAT_VERSION,
            "model": model.name,
            "weights": model.weights,
            "adapter": model.adapter,
            "settings": model.settings,
            "rank": asdict(model.rank),
            "numerics": asdict(model.numerics),
            "state": [
                [tensor.name, tensor.num_layers, list(tensor.shape), str(tensor.dtype)]
                for tensor in state_spec.tensors
            ],
            "kv": None if kv_spec is None else {
                "num_layers": kv_spec.num_layers,
                "num_kv_heads": kv_spec.num_kv_heads,
                "head_dim": kv_spec.head_dim,
                "dtype": str(kv_spec.dtype),
            },
            "block_size_tokens": config.block_size_tokens,
            "ssm_chunk_size": config.ssm_chunk_size,
            "quantization": quantization,
            "hash": {
                "algorithm": algorithm,
                "secret": _keyed(config.hash_secret, b"identity " + algorithm.encode()).hex(),
            },
        }  # fmt: skip
        return cls(_canonical(facts))

    def differences(self, other: CacheIdentity) -> tuple[str, ...]:
        """Return the names of the facts that differ, to explain a cache that never hits.

        Returns:
            Names with dots, such as "numerics.torch_version", sorted.
        """
        mine, theirs = (_flat(json.loads(each.canonical)) for each in (self, other))
        return tuple(
            sorted(
                name
                for name in mine.keys() | theirs.keys()
                if name not in mine or name not in theirs or mine[name] != theirs[name]
            )
        )


def tenant_digest(secret: bytes, cache_salt: str | bytes | int | None) -> bytes:
    """Return a keyed digest of a salt, for keys and headers; it does not reveal the salt."""
    if isinstance(cache_salt, bytes):
        content = b"b" + cache_salt
    elif isinstance(cache_salt, str):
        content = b"s" + cache_salt.encode("utf-8", "surrogatepass")
    elif isinstance(cache_salt, int) and not isinstance(cache_salt, bool):
        content = b"i" + str(cache_salt).encode()
    elif cache_salt is None:
        content = b"n"
    else:
        raise InvalidArgumentError(
            f"cache_salt must be a str, bytes, int or None, got {cache_salt!r}"
        )
    return _keyed(secret, b"tenant " + content)[:_TENANT_BYTES]


def _keyed(secret: bytes, content: bytes) -> bytes:
    return hmac.new(secret, b"mamba_cache " + content, hashlib.sha256).digest()


def _canonical(facts: dict[str, Any]) -> bytes:
    """Return the facts as JSON: the bytes are equal if and only if the facts are."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def _flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or may_be_empty):
        what = "a string" if may_be_empty else "a string that is not empty"
        raise InvalidArgumentError(f"{name} must be {what}, got {value!r}")


def _architecture(device: torch.device) -> str:
    if device.type == "cuda":  # pragma: no cover - tests/gpu run it
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} sm_{major}{minor}"
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {platform.machine()} {_processor()} {instructions}"


def _processor() -> str:
    """Return the processor's vendor and model, on which the order of sums in libraries depends."""
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    parts = [line.partition(":") for line in reversed(lines)]  # the first processor's come last
    facts = {name.strip(): value.strip() for name, _, value in parts}
    return " ".join(facts[name] for name in _CPU_NAMES if name in facts) or platform.processor()
