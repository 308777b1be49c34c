"""Tiny models with the states of every kind, computed token by token.

Their bits do not depend on how steps are cut. Sizes are odd, and each tensor has its own dtype, to
which the state is rounded after every token. The layers' formulas are invented; real formulas run
in the tests of transformers' models.
"""

import math

import torch
from context_rig import CHUNK, VOCAB

from mamba_cache import KVCacheSpec, LayerKind, StateSpec

HIDDEN, HEADS, KEY_DIM, VALUE_DIM = 6, 2, 3, 5
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def apply(weight, x):
    """Project with a fixed order of sums, independent of the rest of the step."""
    return (weight * x).sum(-1)


def normalized(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Drawn:
    """A source of random float64 weights, the same on every device."""

    def __init__(self, seed, device):
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def __call__(self, *shape, scale=0.5):
        drawn = torch.randn(*shape, generator=self._generator, dtype=F64, device="cpu")
        return (drawn * scale).to(self._device)


class Recurrence:
    """A layer with a kind's tensors: windows hold the newest inputs, other tensors a decayed sum.

    Each tensor's input is the output of the tensor before, so that all tensors affect the output.
    """

    tensors, windows = (), ()

    def __init__(self, draw):
        self.steps = {}
        for name, shape, _ in self.tensors:
            size = shape[0] if name in self.windows else math.prod(shape)
            taps = draw(size, math.prod(shape[1:]) + 1) if name in self.windows else draw(size)
            self.steps[name] = draw(size, HIDDEN), taps, draw(HIDDEN, size)

    def __call__(self, x, state):
        mixed, after = x, {}
        for name, shape, _ in self.tensors:
            in_proj, taps, out_proj = self.steps[name]
            old, new = state[name].double(), apply(in_proj, mixed)
            if name in self.windows:
                seen = torch.cat([old.view(len(new), -1), new[:, None]], dim=1)
                new, after[name] = (taps * seen).sum(-1), seen[:, 1:].reshape(shape)
            else:
                new = torch.sigmoid(taps) * old.flatten() + new
                after[name] = new.view(shape)
            mixed = mixed + torch.tanh(apply(out_proj, new))
        return mixed - x, after


class GatedDelta(Recurrence):
    name = "gdn"
    tensors = (
        ("conv", (HEADS * (2 * KEY_DIM + VALUE_DIM), 3), BF16),
        ("recurrent", (HEADS, KEY_DIM, VALUE_DIM), F32),
    )
    windows = ("conv",)


class KimiDelta(Recurrence):
    name = "kda"
    tensors = (
        ("q_conv", (HEADS * KEY_DIM, 3), F64),
        ("k_conv", (HEADS * KEY_DIM, 3), F64),
        ("v_conv", (HEADS * VALUE_DIM, 3), BF16),
        ("recurrent", (HEADS, KEY_DIM, VALUE_DIM), F64),
    )
    windows = ("q_conv", "k_conv", "v_conv")


class RWKV7(Recurrence):
    name = "rwkv7"
    tensors = (
        ("shift", (HIDDEN,), F32),
        ("wkv", (HEADS, KEY_DIM, KEY_DIM), F32),
        ("ffn_shift", (HIDDEN,), BF16),
    )
    windows = ("shift", "ffn_shift")


class ShortConv(Recurrence):
    name = "short_conv"
    tensors = (("conv", (HIDDEN + 1, 2), BF16),)
    windows = ("conv",)


class Mamba2(Recurrence):
    name = "mamba2"
    tensors = (
        ("conv", (HEADS * VALUE_DIM + 2 * KEY_DIM, 3), F32),
        ("ssm", (HEADS, VALUE_DIM, KEY_DIM), F64),
    )
    windows = ("conv",)


class Attention:
    """One head over all tokens so far."""

    def __init__(self, draw):
        self.qkv = draw(3, KEY_DIM, HIDDEN)
        self.out_proj = draw(HIDDEN, KEY_DIM)

    def project(self, x):
        return apply(self.qkv, x)

    def __call__(self, query, keys, values):
        weights = torch.softmax((keys * query).sum(-1), 0)
        return apply(self.out_proj, (weights[:, None] * values).sum(0))


KINDS = {"G": GatedDelta, "K": KimiDelta, "R": RWKV7, "C": ShortConv, "M": Mamba2, "*": Attention}


class KindsModel:
    """A language model with a letter for each layer; it is also its own ``config``."""

    vocab_size, ssm_chunk_size = VOCAB, CHUNK
    dtype = F64

    def __init__(self, pattern, seed=3, device="cpu"):
        self.device = torch.device(device)
        draw = Drawn(seed, self.device)
        self.embedding, self.head = draw(VOCAB, HIDDEN, scale=1.0), draw(VOCAB, HIDDEN)
        self.layers = [KINDS[letter](draw) for letter in pattern]
        self.places = [pattern[:place].count(letter) for place, letter in enumerate(pattern)]
        kept = [kind for letter, kind in KINDS.items() if letter in pattern and letter != "*"]
        counts = {
            kind.name: pattern.count(letter) for letter, kind in KINDS.items() if kind in kept
        }
        self.spec = StateSpec.of(*(LayerKind(k.name, counts[k.name], k.tensors) for k in kept))
        self.num_attention = pattern.count("*")

    @property
    def config(self):
        return self

    def state_spec(self, dtype):
        return self.spec

    def kv_spec(self, dtype):
        return KVCacheSpec(self.num_attention, 1, KEY_DIM, F64)

    def forward(self, metadata, caches):
        """Compute one step of a context, layer by layer and token by token."""
        bounds = metadata.query_start_loc.tolist()
        hidden = self.embedding[metadata.token_ids[: metadata.num_tokens]]
        for layer, place in zip(self.layers, self.places, strict=True):
            run = self._attend if isinstance(layer, Attention) else self._advance
            hidden = hidden + run(layer, place, normalized(hidden), bounds, metadata, caches)
        ends = bounds[metadata.num_decodes + 1 : metadata.num_requests + 1]
        rows = [*range(metadata.num_decode_tokens), *(end - 1 for end in ends)]
        return torch.stack([apply(self.head, normalized(hidden[row])) for row in rows])

    def _advance(self, layer, place, hidden, bounds, metadata, caches):
        names = {name: f"{layer.name}.{name}" for name, _, _ in layer.tensors}
        live = {name: caches.live_states[full][place] for name, full in names.items()}
        outputs, writes, after = torch.empty_like(hidden), [], []
        for request in range(metadata.num_requests):
            is_decode = request < metadata.num_decodes
            row = int(metadata.state_rows[request])
            written = [row]
            if is_decode:
                row, *written = metadata.decode_state_rows[request].tolist()
            state = {name: tensor[row].clone() for name, tensor in live.items()}
            for step, token in enumerate(range(bounds[request], bounds[request + 1])):
                outputs[token], state = self.advance(layer, hidden[token], state)
                if is_decode:
                    writes.append((written[step], state))
                else:
                    after.append(state)
            if not is_decode:
                writes.append((row, state))
        if metadata.num_prefills:
            self._hand_over(layer, place, after, metadata, caches)
        for row, state in writes:
            for name, tensor in live.items():
                tensor[row] = state[name]
        return outputs

    @staticmethod
    def advance(layer, x, state):
        y, state = layer(x, state)
        return y, {name: state[name].to(dtype) for name, _, dtype in layer.tensors}

    def _hand_over(self, layer, place, after, metadata, caches):
        ends = metadata.cu_chunk_seqlens[1 : metadata.num_chunks + 1].tolist()
        states, inputs = {}, {}
        for name, shape, _ in layer.tensors:
            if name in layer.windows:
                newest = [state[name] if len(shape) == 1 else state[name][:, -1] for state in after]
                inputs[name] = torch.stack(newest)
            else:
                states[name] = torch.stack([after[end - 1][name] for end in ends])
        caches.extract_states(layer.name, place, states, inputs, metadata)

    def _attend(self, layer, place, hidden, bounds, metadata, caches):
        kv_cache = caches.kv_cache[place]
        places = kv_cache.flatten(1, 2)[:, :, 0]
        projected = [layer.project(x) for x in hidden]
        for token, (_, key, value) in enumerate(projected):
            target = int(metadata.kv_slot_mapping[token])
            if target >= 0:
                places[0, target], places[1, target] = key, value
        outputs, block_size = torch.empty_like(hidden), kv_cache.shape[2]
        for request in range(metadata.num_requests):
            table = metadata.block_tables[request].long()
            for token in range(bounds[request], bounds[request + 1]):
                seen = torch.arange(int(metadata.positions[token]) + 1, device=self.device)
                where = table[seen // block_size] * block_size + seen % block_size
                keys, values = places[:, where]
                outputs[token] = layer(projected[token][0], keys, values)
        return outputs

    def answer(self, prompt, num_tokens):
        """Answer a prompt without the package.

        Return the likeliest tokens, the logits of each, and the states after each computed token.
        """
        states = {
            tensor.name: torch.zeros(
                tensor.num_layers, *tensor.shape, dtype=tensor.dtype, device=self.device
            )
            for tensor in self.spec.tensors
        }
        seen = [[] for _ in range(self.num_attention)]
        tokens, logits, history = list(prompt), [], []
        while len(history) < len(prompt) + num_tokens - 1:
            hidden = self.embedding[tokens[len(history)]]
            for layer, place in zip(self.layers, self.places, strict=True):
                hidden = hidden + self._alone(layer, place, normalized(hidden), states, seen)
            history.append({name: tensor.clone() for name, tensor in states.items()})
            if len(history) >= len(prompt):
                logits.append(apply(self.head, normalized(hidden)))
                tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :], logits, history

    def _alone(self, layer, place, x, states, seen):
        """Compute one layer for one token of a single sequence."""
        if isinstance(layer, Attention):
            query, key, value = layer.project(x)
            seen[place].append((key, value))
            return layer(query, *map(torch.stack, zip(*seen[place], strict=True)))
        names = {name: f"{layer.name}.{name}" for name, _, _ in layer.tensors}
        state = {name: states[full][place].clone() for name, full in names.items()}
        y, state = self.advance(layer, x, state)
        for name, full in names.items():
            states[full][place] = state[name]
        return y


GDN, RWKV, SHORT_CONV = KindsModel("GG"), KindsModel("RR"), KindsModel("C*C")
MIXED = KindsModel("GMC*G")
EVERY = KindsModel("KRM*CG")
MODELS = {"gdn": GDN, "rwkv7": RWKV, "short_conv": SHORT_CONV, "mixed": MIXED, "every": EVERY}
