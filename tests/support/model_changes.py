"""Kinds of change of a model: each a generator that changes it, yields, and changes it back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

NOTICED = "noticed"
"""The call raises ModelChangedError."""

KEYED = "keyed"
"""The call finds no prefix of before, and those again once the change is undone."""

BYPASSED = "bypassed"
"""The call neither uses the cache nor fills it; prefixes of before are found when it is undone."""

REFUSED = "refused"
"""The call raises InvalidArgumentError."""

HARMLESS = "harmless"
"""Results are the same, and so are the prefixes."""


@dataclass(frozen=True)
class Kind:
    """One kind of change.

    Attributes:
        name: As docs/explanation/model_changes.md names it.
        outcome: What the cache does about it.
        change: Changes a model, yields, and changes it back.
        prepare: What is done to the model before its cache is made.
        family: Which model.
        matters: The model's logits are others then.
        comes_back: Changing it back leaves no trace, so that prefixes of before are found again.
    """

    name: str
    outcome: str
    change: Callable[[nn.Module], Iterator[None]]
    prepare: Callable[[nn.Module], object]
    family: str
    matters: bool
    comes_back: bool = True


KINDS: dict[str, Kind] = {}


def kind(name, outcome, *, prepare=lambda model: None, family="nemotron_h", matters=True,
         comes_back=True):  # fmt: skip
    def add(change):
        assert name not in KINDS
        KINDS[name] = Kind(name, outcome, change, prepare, family, matters, comes_back)
        return change

    return add


def head(model):
    return model.get_output_embeddings()


def norms(model):
    return [m for m in model.modules() if hasattr(m, "variance_epsilon")]


def mixers(model, name="in_proj"):
    return [m for m in model.modules() if hasattr(m, name)]


def attention(model):
    return mixers(model, "q_proj")[0]


def noise(tensor, scale=0.05):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tensor.shape, generator=generator).to(tensor) * scale


class Kept:
    """The bits of a tensor, to be written back."""

    def __init__(self, *tensors):
        self.tensors, self.copies = tensors, [t.detach().clone() for t in tensors]

    def restore(self):
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.data.copy_(copy)


# Weights, written in every way that a training loop has.


def _optimizer(name, make):
    @kind(f"optimizer step: {name}", NOTICED)
    def change(model):
        kept = Kept(*model.parameters())
        optimizer = make(list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = noise(parameter, 1.0)
        optimizer.step()
        yield
        model.zero_grad()
        kept.restore()


for _kind, _options in (
    ("plain", {"foreach": False, "fused": False}),
    ("foreach", {"foreach": True}),
    ("fused", {"fused": True}),
):
    _optimizer(f"SGD, {_kind}", functools.partial(torch.optim.SGD, lr=0.05, **_options))
    _optimizer(f"AdamW, {_kind}", functools.partial(torch.optim.AdamW, lr=0.05, **_options))


def _write(name, write):
    @kind(name, NOTICED)
    def change(model):
        weight = mixers(model)[0].in_proj.weight
        kept = Kept(weight)
        write(weight)
        yield
        kept.restore()


def _under(mode):
    def write(weight):
        with mode():
            weight.add_(noise(weight))

    return write


def _swap(index, other):
    def write(weight):
        with torch.no_grad():
            first, second = weight[index].clone(), weight[other].clone()
            weight[index], weight[other] = second, first

    return write


def _one_bit(weight):
    weight.detach().view(torch.int32)[3, 5] ^= 1 << 22


_write("write under no_grad", _under(torch.no_grad))
_write("write under inference_mode", _under(torch.inference_mode))
_write("write through .data", lambda weight: weight.data.add_(noise(weight)))
_write("write through detach()", lambda weight: weight.detach().add_(noise(weight)))
_write("write through a NumPy view", lambda weight: weight.detach().numpy().__imul__(1.5))
_write("two rows swapped", _swap(0, 17))
_write("two values swapped", _swap((2, 3), (7, 11)))
_write("one bit of one value", _one_bit)
_write("values rounded to int8 in place", lambda w: w.data.copy_((w.data * 20).round() / 20))


@kind(".data put in place of .data", NOTICED)
def data_replaced(model):
    weight = head(model).weight
    before = weight.data
    weight.data = before + noise(before)
    yield
    weight.data = before


@kind("a square weight transposed through .data", NOTICED, family="lfm2")
def transposed(model):
    weight = next(p for p in model.parameters() if p.dim() == 2 and p.shape[0] == p.shape[1])
    weight.data = weight.data.t()
    yield
    weight.data = weight.data.t()


def _in_inference_mode(model):
    with torch.inference_mode():
        weight = head(model).weight.detach().clone()
        head(model).weight = nn.Parameter(weight, requires_grad=False)


@kind("write to an inference tensor", NOTICED, prepare=_in_inference_mode)
def inference_tensor(model):
    weight = head(model).weight
    with torch.inference_mode():
        copy = weight.clone()
        weight.add_(noise(weight))
    yield
    with torch.inference_mode():
        weight.copy_(copy)


@kind("load_state_dict", NOTICED)
def state_dict_loaded(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value + noise(value) for name, value in before.items()})
    yield
    model.load_state_dict(before)


@kind("load_state_dict(assign=True)", NOTICED)
def state_dict_assigned(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    others = {name: value + noise(value) for name, value in before.items()}
    model.load_state_dict(others, assign=True)
    yield
    model.load_state_dict(before, assign=True)


@kind("load_state_dict(assign=True) of equal values", HARMLESS, matters=False)
def same_state_dict_assigned(model):
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    yield


@kind("vector_to_parameters", NOTICED)
def vector(model):
    parameters = list(head(model).parameters())
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    nn.utils.vector_to_parameters(before + noise(before), parameters)
    yield
    nn.utils.vector_to_parameters(before, parameters)


@kind("a parameter replaced", NOTICED)
def parameter_replaced(model):
    before = head(model).weight
    head(model).weight = nn.Parameter(before.detach() + noise(before))
    yield
    head(model).weight = before


@kind("parameters of two modules exchanged", NOTICED)
def parameters_exchanged(model):
    one, other = (mixer.in_proj for mixer in mixers(model)[:2])
    one.weight, other.weight = other.weight, one.weight
    yield
    one.weight, other.weight = other.weight, one.weight


@kind("two modules exchanged", NOTICED)
def modules_exchanged(model):
    one, other = mixers(model)[:2]
    one.in_proj, other.in_proj = other.in_proj, one.in_proj
    yield
    one.in_proj, other.in_proj = other.in_proj, one.in_proj


@kind("output embeddings tied to the input's", KEYED)
def tied(model):
    before = head(model).weight
    head(model).weight = model.get_input_embeddings().weight
    yield
    head(model).weight = before


def _tie(model):
    head(model).weight = model.get_input_embeddings().weight


@kind("output embeddings untied and written", KEYED, prepare=_tie)
def untied(model):
    weight = model.get_input_embeddings().weight
    head(model).weight = nn.Parameter(weight.detach() + noise(weight))
    yield
    head(model).weight = weight


@kind("a module replaced by one of its class", NOTICED)
def module_replaced(model):
    before = mixers(model)[0].in_proj
    torch.manual_seed(5)
    other = nn.Linear(before.in_features, before.out_features, bias=False)
    mixers(model)[0].in_proj = other.eval()
    yield
    mixers(model)[0].in_proj = before


@kind("a bias added", KEYED)
def bias_added(model):
    head(model).bias = nn.Parameter(torch.linspace(-1, 1, head(model).out_features))
    yield
    head(model).bias = None


@kind("a persistent buffer", NOTICED, family="nemotron_h with experts")
def persistent_buffer(model):
    router = next(m for m in model.modules() if "e_score_correction_bias" in m._buffers)
    kept = Kept(router.e_score_correction_bias)
    router.e_score_correction_bias.data.copy_(
        torch.linspace(-9, 9, router.e_score_correction_bias.numel())
    )
    yield
    kept.restore()


@kind("a buffer that is not saved: rotary frequencies", NOTICED, family="falcon_h1")
def rotary_buffer(model):
    rotary = next(m for m in model.modules() if "inv_freq" in m._buffers)
    kept = Kept(rotary.inv_freq)
    rotary.inv_freq.mul_(1.5)
    yield
    kept.restore()


@kind("dtype of one parameter", NOTICED)
def parameter_halved(model):
    mixer = mixers(model)[0]
    before = mixer.A_log
    mixer.A_log = nn.Parameter((before.detach() * 1.2345).bfloat16())
    yield
    mixer.A_log = before


@kind("dtype of the model", NOTICED)
def model_double(model):
    model.double()
    yield
    model.float()


# Weights that are computed from others.


@kind("weight norm put on", KEYED, matters=False, comes_back=False)
def weight_norm(model):
    before = head(model).weight
    parametrizations.weight_norm(head(model))
    yield
    parametrize.remove_parametrizations(head(model), "weight")
    head(model).weight = before


@kind("a parametrised weight's own parameter", NOTICED,
      prepare=lambda model: parametrizations.weight_norm(head(model)))  # fmt: skip
def weight_norm_changed(model):
    scale = head(model).parametrizations.weight.original0
    kept = Kept(scale)
    scale.data.mul_(1.5)
    yield
    kept.restore()


@kind("pruning put on", NOTICED)
def pruned(model):
    before = head(model).weight
    prune.random_unstructured(head(model), "weight", 0.5)
    yield
    prune.remove(head(model), "weight")
    head(model).weight = before


@kind("a pruning mask", NOTICED,
      prepare=lambda model: prune.random_unstructured(head(model), "weight", 0.5))  # fmt: skip
def pruning_mask(model):
    kept = Kept(head(model).weight_mask)
    head(model).weight_mask.data.copy_(1 - head(model).weight_mask)
    yield
    kept.restore()


class Int8Linear(nn.Module):
    """Weights in int8 with a scale for each row, as quantisers put in a linear layer's place."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.codes.to(x) * self.scale).T


@kind("a module quantised in place", KEYED)
def quantised(model):
    before = mixers(model)[0].in_proj
    mixers(model)[0].in_proj = Int8Linear(before).eval()
    yield
    mixers(model)[0].in_proj = before


def _quantise(model):
    mixers(model)[0].in_proj = Int8Linear(mixers(model)[0].in_proj).eval()


@kind("codes of a quantised weight", NOTICED, prepare=_quantise)
def codes(model):
    kept = Kept(mixers(model)[0].in_proj.codes)
    mixers(model)[0].in_proj.codes.data.bitwise_xor_(16)
    yield
    kept.restore()


# Adapters: a stand-in that keeps its settings as PEFT's LoRA layers do.


class Lora(nn.Module):
    """As PEFT's: dicts of weights and scaling by adapter, changed in place."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.scaling = {}
        self._active_adapter = ["default"]
        self._disable_adapters = False
        self.merged_adapters = []
        for seed, name in enumerate(("default", "other")):
            self.add(name, seed)
        self.eval()

    def add(self, name, seed):
        torch.manual_seed(seed + 7)
        base = self.base_layer
        self.lora_A[name] = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B[name] = nn.Linear(2, base.out_features, bias=False)
        self.scaling[name] = 2.0

    def delta(self, name):
        return self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight

    def forward(self, x):
        result = self.base_layer(x)
        if self._disable_adapters or self.merged_adapters:
            return result
        for name in self._active_adapter:
            result = result + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return result


def with_lora(model):
    for mixer in mixers(model):
        mixer.in_proj = Lora(mixer.in_proj)


def loras(model):
    return [m for m in model.modules() if isinstance(m, Lora)]


def _adapter(name, outcome, *, matters=True):
    return kind(f"adapter {name}", outcome, prepare=with_lora, matters=matters)


@_adapter("set_scale", KEYED)
def set_scale(model):
    for lora in loras(model):
        lora.scaling["default"] = 5.0
    yield
    for lora in loras(model):
        lora.scaling["default"] = 2.0


@_adapter("scale_layer", KEYED)
def scale_layer(model):
    loras(model)[-1].scaling["default"] *= 4
    yield
    loras(model)[-1].scaling["default"] /= 4


@_adapter("disabled", KEYED)
def adapter_disabled(model):
    for lora in loras(model):
        lora._disable_adapters = True
    yield
    for lora in loras(model):
        lora._disable_adapters = False


@_adapter("exchanged for another", KEYED)
def adapter_set(model):
    for lora in loras(model):
        lora._active_adapter[0] = "other"
    yield
    for lora in loras(model):
        lora._active_adapter[0] = "default"


@_adapter("added beside it", KEYED)
def adapter_added(model):
    for lora in loras(model):
        lora._active_adapter.append("other")
    yield
    for lora in loras(model):
        lora._active_adapter.pop()


@_adapter("loaded and made active", KEYED)
def adapter_loaded(model):
    for lora in loras(model):
        lora.add("third", 3)
        lora._active_adapter = ["third"]
        lora.eval()
    yield
    for lora in loras(model):
        lora._active_adapter = ["default"]
        del lora.lora_A["third"], lora.lora_B["third"], lora.scaling["third"]


@_adapter("hot-swapped", NOTICED)
def hot_swapped(model):
    kept = Kept(*(p for lora in loras(model) for p in lora.lora_B.parameters()))
    for lora in loras(model):
        lora.lora_B["default"].weight.data.copy_(noise(lora.lora_B["default"].weight, 1))
    yield
    kept.restore()


@_adapter("merged", NOTICED)
def merged(model):
    kept = Kept(*(lora.base_layer.weight for lora in loras(model)))
    for lora in loras(model):
        lora.base_layer.weight.data += lora.delta("default")
        lora.merged_adapters.append("default")
    with torch.no_grad():
        loras(model)[0].base_layer.weight.add_(0.01)
    yield
    for lora in loras(model):
        lora.merged_adapters.clear()
    kept.restore()


@kind("adapters put on", KEYED)
def injected(model):
    with_lora(model)
    yield
    for mixer in mixers(model):
        mixer.in_proj = mixer.in_proj.base_layer


# Settings.


def _attribute(name, find, attribute, value, *, family="nemotron_h", matters=True):
    @kind(name, KEYED, family=family, matters=matters)
    def change(model):
        owner = find(model)
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        yield
        setattr(owner, attribute, before)


_attribute("a norm's epsilon", lambda m: norms(m)[0], "variance_epsilon", 0.5)
_attribute("an attention's scale", attention, "scaling", 3.0)
_attribute("limits of time steps", lambda m: mixers(m)[0], "time_step_limit", (0.5, 2.0))
_attribute("a multiplier of residuals", lambda m: next(
    x for x in m.modules() if hasattr(x, "residual_multiplier")), "residual_multiplier", 0.3,
    family="granite 4")  # fmt: skip
_attribute("a value of the configuration", lambda m: m.config, "logits_scaling", 7.0,
           family="granite 4", matters=True)  # fmt: skip
_attribute("a rotary embedding's scale", lambda m: next(
    x for x in m.modules() if hasattr(x, "attention_scaling")), "attention_scaling", 0.5,
    family="falcon_h1")  # fmt: skip
_attribute("an activation function", lambda m: next(
    x for x in m.modules() if hasattr(x, "act_fn")), "act_fn", nn.Sigmoid())  # fmt: skip
_attribute("the class of a module", lambda m: norms(m)[0], "__class__", nn.Identity)


@kind("attention implementation", KEYED, matters=False)
def attn_implementation(model):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(before)


@kind("a function registered for the attention in use", BYPASSED)
def attention_registered(model):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    name = model.config._attn_implementation
    before = ALL_ATTENTION_FUNCTIONS[name]

    def doubled(*args, **kwargs):
        output, weights = before(*args, **kwargs)
        return output * 2, weights

    ALL_ATTENTION_FUNCTIONS[name] = doubled
    yield
    del ALL_ATTENTION_FUNCTIONS[name]


@kind("a new plain attribute that forward reads", KEYED)
def added_attribute(model):
    attention(model).scaling = 0.01
    attention(model).note = {"scale": [0.01]}
    yield
    attention(model).scaling = 16**-0.5
    del attention(model).note


@kind("probability of dropout, in eval mode", KEYED, family="granite 4", matters=False)
def dropout_probability(model):
    owner = next(m for m in model.modules() if hasattr(m, "attention_dropout"))
    before = owner.attention_dropout
    owner.attention_dropout = 0.3
    yield
    owner.attention_dropout = before


@kind("one submodule in training mode", REFUSED, matters=False)
def submodule_trains(model):
    attention(model).train()
    yield
    attention(model).eval()


@kind("the model in training mode", REFUSED, matters=False)
def model_trains(model):
    model.train()
    yield
    model.eval()


@kind("requires_grad", HARMLESS, matters=False)
def frozen(model):
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)


@kind("gradients", HARMLESS, matters=False)
def gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    yield
    model.zero_grad()


# Code: hooks, forwards that are replaced, compilation.


@kind("a forward hook", BYPASSED)
def forward_hook(model):
    hook = attention(model).register_forward_hook(lambda _, __, output: (output[0] * 2, output[1]))
    yield
    hook.remove()


@kind("a forward pre-hook", BYPASSED)
def forward_pre_hook(model):
    hook = mixers(model)[0].in_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    yield
    hook.remove()


@kind("a hook of all modules", BYPASSED)
def global_hook(model):
    target = norms(model)[0]
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 2 if module is target else None
    )
    yield
    hook.remove()


@kind("a forward replaced on the object", BYPASSED)
def forward_replaced(model):
    mixer = mixers(model)[0].in_proj
    original = mixer.forward
    mixer.forward = lambda x: original(x) * 2
    yield
    del mixer.forward


@kind("a class's forward replaced", BYPASSED)
def class_forward(model):
    owner = type(norms(model)[0])
    original = owner.forward
    owner.forward = lambda self, x: original(self, x) * 2
    yield
    owner.forward = original


@kind("a function of the model's file replaced", KEYED, matters=False)
def function_replaced(model):
    namespace = attention(model).forward.__func__.__globals__
    original = namespace["eager_attention_forward"]
    namespace["eager_attention_forward"] = functools.partial(original)
    yield
    namespace["eager_attention_forward"] = original


@kind("a submodule compiled in place", KEYED, matters=False)
def compiled_in_place(model):
    module = norms(model)[0]
    module.compile(backend="eager")
    yield
    del module._compiled_call_impl


@kind("the model compiled in place", KEYED, matters=False)
def model_compiled(model):
    model.compile(backend="eager")
    yield
    del model._compiled_call_impl


@kind("a submodule replaced by its compiled form", KEYED, matters=False)
def compiled_submodule(model):
    mixer = mixers(model)[0]
    before = mixer.in_proj
    mixer.in_proj = torch.compile(before, backend="eager")
    yield
    mixer.in_proj = before
    del before._is_torch_compile


# What holds for the whole process.


def _within(name, context, *, outcome=KEYED, matters=False):
    @kind(name, outcome, matters=matters)
    def change(model):
        with context():
            yield


def _switch(name, read, write, value, *, comes_back=True):
    @kind(name, KEYED, matters=False, comes_back=comes_back)
    def change(model):
        before = read()
        write(value)
        try:
            yield
        finally:  # or later tests had it, too
            write(before)


_within("autocast to bfloat16", lambda: torch.autocast("cpu", torch.bfloat16), matters=True)
_within("autocast to float16", lambda: torch.autocast("cpu", torch.float16), matters=True)
_within("only some attention kernels", lambda: nn.attention.sdpa_kernel(
    nn.attention.SDPBackend.MATH))  # fmt: skip
_within("inference_mode around the call", torch.inference_mode, outcome=HARMLESS)
_switch("precision of float32 products", torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision, "medium", comes_back=False)  # fmt: skip
_switch("precision of float32 products on the CPU",
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
        lambda value: setattr(torch.backends.mkldnn.matmul, "fp32_precision", value),
        "bf16")  # fmt: skip
_switch("deterministic algorithms", torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms, True)  # fmt: skip
_switch("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float64)
_switch("reductions in lower precision",
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
        False)  # fmt: skip


DUTIES = {
    "what is written in place into a list or dict of a class or its file":
        "they count by which object they are; those among a module's own attributes are read",
    "what a user's own model class reads beside its attributes and the global names in its methods":
        "code is not read; pass `variant=`, and another one when that changes",
    "a module file that is edited after it was imported and before the cache is made":
        "the code of a user's own model class counts by its file as it is then",
    "what `variant=` names": "whoever passes it changes it when the code does something else",
    "weights that accelerate offloaded to disk": "reading them would cost more than the forward; "
        "accelerate itself writes them once, before the model runs",
    "weights written by another thread, or by a streamer that also writes them back, during a call":
        "the check runs once a call, before its first forward",
    "modules put in place whose result for a token depends on the other tokens of the forward, "
    "as dynamic quantisation does":
        "whether a model can resume is tried when the cache is made: make another cache",
    "PyTorch's operators themselves: dispatch modes, `torch.nn.functional` replaced, "
    "`torch.set_flush_denormal`, environment variables": "nothing tells them cheaply",
    "number of threads, and other machines' kernels": "they change rounding, as a batch of another "
        "size does",
}  # fmt: skip
"""What is not noticed, and why: the caller's duty."""
