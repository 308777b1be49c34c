"""States in block tables: models with random shapes, and their tensors."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st

from mamba_cache.integrations.vllm import (
    MambaSpec,
    get_conv_copy_spec,
    get_conv_copy_spec_ds,
    get_temporal_copy_spec,
)

NUM_COLUMNS = 10
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8]


@dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    num_layers: int = 2
    channels: int = 6
    conv_dtype: torch.dtype = torch.bfloat16
    ssm_shape: tuple[int, ...] = (2, 3, 4)
    ssm_dtype: torch.dtype = torch.float32
    gap: int = 0  # elements between the blocks of a state


@dataclass(frozen=True)
class Model:
    """The sizes of states, and the settings that decide copies."""

    block_size: int = 8
    num_drafts: int = 2
    kernel_size: int = 4
    is_ds: bool = False
    groups: tuple[Group, ...] = (Group(),)
    max_requests: int = 8

    @property
    def conv_width(self):
        return self.kernel_size - 1 + self.num_drafts

    @property
    def copy_funcs(self):
        conv = get_conv_copy_spec_ds if self.is_ds else get_conv_copy_spec
        return conv, get_temporal_copy_spec

    @property
    def num_blocks(self):
        return self.max_requests * NUM_COLUMNS + 1

    @property
    def max_tokens(self):
        return (NUM_COLUMNS - self.num_drafts) * self.block_size

    def kv_cache_config(self):
        """All groups; an attention group comes first, so that Mamba groups do not start at 0."""
        attention = SimpleNamespace(block_size=3 * self.block_size)
        groups = [SimpleNamespace(layer_names=["attention"], kv_cache_spec=attention)]
        for number, group in enumerate(self.groups):
            spec = MambaSpec(
                block_size=self.block_size,
                num_speculative_blocks=self.num_drafts,
                shapes=(self.conv_shape(group), group.ssm_shape),
                dtypes=(group.conv_dtype, group.ssm_dtype),
                mamba_cache_mode="align",
            )
            names = [f"mamba.{number}.{layer}" for layer in range(group.num_layers)]
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
        return SimpleNamespace(kv_cache_groups=groups)

    def conv_shape(self, group):
        shape = self.conv_width, group.channels
        return shape[::-1] if self.is_ds else shape


@st.composite
def models(draw, max_requests, block_sizes=(4, 5, 8, 16, 64), min_drafts=0):
    group = st.builds(
        Group,
        num_layers=st.integers(1, 2),
        channels=st.sampled_from([1, 3, 16]),
        conv_dtype=st.sampled_from(DTYPES),
        ssm_shape=st.sampled_from([(1,), (2, 3, 5), (4, 16)]),
        ssm_dtype=st.sampled_from(DTYPES),
        gap=st.sampled_from([0, 1, 16]),
    )
    return Model(
        block_size=draw(st.sampled_from(block_sizes)),
        num_drafts=draw(st.integers(min_drafts, 4)),
        kernel_size=draw(st.integers(2, 4)),
        is_ds=draw(st.booleans()),
        groups=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        max_requests=draw(st.integers(1, max_requests)),
    )


class States:
    """All state tensors of a model, with random bits also in the gaps between blocks."""

    def __init__(self, model, rng, device="cpu"):
        self.model = model
        self.storage = []
        self.layers = []  # by group: (conv, ssm) of each layer
        for group in model.groups:
            kinds = (model.conv_shape(group), group.conv_dtype), (group.ssm_shape, group.ssm_dtype)
            layers = []
            for _ in range(group.num_layers):
                layers.append([self._random(*kind, group.gap, rng, device) for kind in kinds])
            self.layers.append(layers)

    def _random(self, shape, dtype, gap, rng, device):
        page = int(np.prod(shape)) + gap
        data = rng.integers(0, 256, self.model.num_blocks * page * dtype.itemsize, dtype=np.uint8)
        self.storage.append(torch.from_numpy(data).to(device))
        pages = self.storage[-1].view(dtype).view(self.model.num_blocks, page)
        return pages[:, : page - gap].view(self.model.num_blocks, *shape)

    def windows(self, group):
        """Conv states of a group's layers as [blocks, W, channels] bits, for either layout."""
        convs = [conv.view(BITS[conv.itemsize]) for conv, _ in self.layers[group]]
        return [conv.transpose(1, 2) for conv in convs] if self.model.is_ds else convs

    def temporal(self, group):
        """Temporal states of a group's layers as bits."""
        return [ssm.view(BITS[ssm.itemsize]) for _, ssm in self.layers[group]]

    def forward_context(self):
        return {
            f"mamba.{number}.{layer}": SimpleNamespace(kv_cache=kinds)
            for number, layers in enumerate(self.layers)
            for layer, kinds in enumerate(layers)
        }

    def write(self, step, rng):
        """Stand in for the forward: write random bits to all columns that it writes."""
        for group in range(len(self.layers) if step.batch else 0):
            running, written = [], []
            for request in step.batch:
                column, ids = step.running_column(request), request.block_ids[1 + group]
                running.append(ids[column])
                written += ids[column : column + 1 + self.model.num_drafts]
            for conv in self.windows(group):
                randomize(conv, running, rng)
            for ssm in self.temporal(group):
                randomize(ssm, written, rng)

    def bits(self):
        return [storage.cpu() for storage in self.storage]


def randomize(tensor, blocks, rng):
    shape = len(blocks), *tensor.shape[1:], tensor.element_size()
    values = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).view(tensor.dtype)
    tensor[torch.tensor(blocks, dtype=torch.int64)] = values.squeeze(-1).to(tensor.device)
