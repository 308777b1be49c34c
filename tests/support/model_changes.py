"""Kinds of change of a model: generators that change the model, yield, and undo the change."""

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
"""The call finds no earlier prefix; after the undo earlier prefixes are found again."""

BYPASSED = "bypassed"
"""The call bypasses the cache; earlier prefixes are found after the undo."""

REFUSED = "refused"
"""The call raises InvalidArgumentError."""

HARMLESS = "harmless"
"""The results are the same, and earlier prefixes are found."""


@dataclass(frozen=True)
class Kind:
    """One kind of change."""

    name: str
    outcome: str
    change: Callable[[nn.Module], Iterator[None]]
    prepare: Callable[[nn.Module], object] = lambda model: None
    family: str = "nemotron_h"
    matters: bool = True
    comes_back: bool = True


KINDS: dict[str, Kind] = {}


def kind(name, outcome, *, kinds=KINDS, **others):
    def add(change):
        assert name not in kinds
        kinds[name] = Kind(name, outcome, change, **others)
        return change

    return add


def head(model):
    return model.get_output_embeddings()


def norms(model):
    return having(model, "variance_epsilon")


def mixers(model, name="in_proj"):
    return having(model, name)


def attention(model):
    return mixers(model, "q_proj")[0]


def having(model, name):
    return [module for module in model.modules() if hasattr(module, name)]


def noise(tensor, scale=0.05):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tensor.shape, generator=generator).to(tensor) * scale


class Kept:
    """A copy of a tensor's bits, to restore them."""

    def __init__(self, *tensors):
        self.tensors, self.copies = tensors, [t.detach().clone() for t in tensors]

    def restore(self):
        with torch.inference_mode():  # inference tensors can only be written in this mode
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.copy_(copy)


def _projection(model):
    return mixers(model)[0].in_proj


def _projection_weight(model):
    return _projection(model).weight


def _head_weight(model):
    return head(model).weight


# Ways to change a model.


def _write(name, write, find=_projection_weight, **others):
    """Add a kind that writes a tensor, then restores its bits."""

    @kind(name, NOTICED, **others)
    def change(model):
        tensor = find(model)
        kept = Kept(tensor)
        write(tensor)
        yield
        kept.restore()


def _put(name, outcome, find, attribute, value, **others):
    """Add a kind that replaces an attribute by ``value(old)``, then restores the old one."""

    @kind(name, outcome, **others)
    def change(model):
        owner = find(model)
        is_own, before = attribute in vars(owner), getattr(owner, attribute)
        setattr(owner, attribute, value(before))
        yield
        setattr(owner, attribute, before)
        if not is_own and attribute in vars(owner):  # a method of the class
            delattr(owner, attribute)


def _do(name, outcome, do, undo, **others):
    @kind(name, outcome, **others)
    def change(model):
        do(model)
        yield
        undo(model)


def _hook(name, register):
    @kind(name, BYPASSED)
    def change(model):
        handle = register(model)
        yield
        handle.remove()


def _within(name, context, outcome=KEYED, **others):
    @kind(name, outcome, **others)
    def change(model):
        with context():
            yield


def _switch(name, read, write, value, **others):
    @kind(name, KEYED, matters=False, **others)
    def change(model):
        before = read()
        write(value)
        try:
            yield
        finally:  # also after a failure: later tests need the old value
            write(before)


# Weights.


def _step(name, make):
    @kind(name, NOTICED)
    def change(model):
        kept = Kept(*model.parameters())
        optimizer = make(list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = noise(parameter, 1.0)
        optimizer.step()
        yield
        model.zero_grad()
        kept.restore()


def _under(mode):
    def write(weight):
        with mode():
            weight.add_(noise(weight))

    return write


def _swap_values(weight):
    with torch.no_grad():
        first, second = weight[2, 3].clone(), weight[7, 11].clone()
        weight[2, 3], weight[7, 11] = second, first


def _flip_one_bit(weight):
    weight.detach().view(torch.int32)[3, 5] ^= 1 << 22


def _in_inference_mode(model):
    with torch.inference_mode():
        weight = head(model).weight.detach().clone()
        head(model).weight = nn.Parameter(weight, requires_grad=False)


def _assign_state_dict(model, make=torch.clone):
    values = {name: make(value) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def _tie(model):
    head(model).weight = model.get_input_embeddings().weight


def _other_parameter(weight):
    return nn.Parameter(weight.detach() + noise(weight))


def _other_linear(before):
    torch.manual_seed(5)
    return nn.Linear(before.in_features, before.out_features, bias=False).eval()


def _add_weight_norm(model):
    parametrizations.weight_norm(head(model))


def _prune(model):
    prune.random_unstructured(head(model), "weight", 0.5)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a scale for each row, like those of quantisers."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.codes.to(x) * self.scale).T


def _quantise(model):
    mixers(model)[0].in_proj = Int8Linear(_projection(model)).eval()


_step("optimizer step: SGD", functools.partial(torch.optim.SGD, lr=0.05))
_step("optimizer step: AdamW, fused", functools.partial(torch.optim.AdamW, lr=0.05, fused=True))
_write("write under no_grad", _under(torch.no_grad))
_write("write under inference_mode", _under(torch.inference_mode))
_write("write through .data", lambda weight: weight.data.add_(noise(weight)))
_write("write through a NumPy view", lambda weight: weight.detach().numpy().__imul__(1.5))
_write("two values swapped", _swap_values)
_write("one bit of one value", _flip_one_bit)
_write("write to an inference tensor", _under(torch.inference_mode), _head_weight,
       prepare=_in_inference_mode)  # fmt: skip
_write("a persistent buffer",
       lambda bias: bias.copy_(torch.linspace(-9, 9, bias.numel())),
       lambda model: having(model, "e_score_correction_bias")[0].e_score_correction_bias.data,
       family="nemotron_h with experts")  # fmt: skip
_write("a buffer that is not saved: rotary frequencies", lambda buffer: buffer.mul_(1.5),
       lambda model: having(model, "inv_freq")[0].inv_freq, family="falcon_h1")  # fmt: skip
_write("a parametrised weight's own parameter", lambda scale: scale.data.mul_(1.5),
       lambda model: head(model).parametrizations.weight.original0,
       prepare=_add_weight_norm)  # fmt: skip
_write("a pruning mask", lambda mask: mask.copy_(1 - mask), lambda model: head(model).weight_mask,
       prepare=_prune)  # fmt: skip
_write("codes of a quantised weight", lambda codes: codes.bitwise_xor_(16),
       lambda model: _projection(model).codes, prepare=_quantise)  # fmt: skip
_put(".data put in place of .data", NOTICED, _head_weight, "data",
     lambda data: data + noise(data))  # fmt: skip
_put("a square weight transposed through .data", NOTICED,
     lambda model: next(p for p in model.parameters() if p.dim() == 2 and len(set(p.shape)) == 1),
     "data", torch.t, family="lfm2")  # fmt: skip
_put("a parameter replaced", NOTICED, head, "weight", _other_parameter)
_put("a module replaced by one of its class", NOTICED, lambda model: mixers(model)[0], "in_proj",
     _other_linear)  # fmt: skip
_put("dtype of one parameter", NOTICED, lambda model: mixers(model)[0], "A_log",
     lambda before: nn.Parameter((before.detach() * 1.2345).bfloat16()))  # fmt: skip
_put("output embeddings untied and written", KEYED, head, "weight", _other_parameter,
     prepare=_tie)  # fmt: skip
_put("a bias added", KEYED, head, "bias",
     lambda _: nn.Parameter(torch.linspace(-1, 1, 97)))  # fmt: skip
_put("a module quantised in place", KEYED, lambda model: mixers(model)[0], "in_proj",
     lambda before: Int8Linear(before).eval())  # fmt: skip
_do("dtype of the model", NOTICED, nn.Module.double, nn.Module.float)
_do("load_state_dict(assign=True) of equal values", HARMLESS, _assign_state_dict,
    lambda model: None, matters=False)  # fmt: skip


@kind("two modules exchanged", NOTICED)
def modules_exchanged(model):
    one, other = mixers(model)[:2]
    one.in_proj, other.in_proj = other.in_proj, one.in_proj
    yield
    one.in_proj, other.in_proj = other.in_proj, one.in_proj


@kind("load_state_dict(assign=True)", NOTICED)
def state_dict_assigned(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _assign_state_dict(model, lambda value: value + noise(value))
    yield
    model.load_state_dict(before, assign=True)


@kind("weight norm put on", KEYED, matters=False, comes_back=False)
def weight_norm(model):
    before = head(model).weight
    _add_weight_norm(model)
    yield
    parametrize.remove_parametrizations(head(model), "weight")
    head(model).weight = before


# Settings.


def _first_with(name):
    return lambda model: having(model, name)[0]


def _add_attribute(model):
    attention(model).scaling = 0.01
    attention(model).note = {"scale": [0.01]}


def _remove_attribute(model):
    attention(model).scaling = 16**-0.5
    del attention(model).note


def _require_no_grad(model):
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _require_grad(model):
    model.zero_grad()
    model.requires_grad_(True)


for _name, _find, _attribute, _value, _family in (
    ("a norm's epsilon", lambda m: norms(m)[0], "variance_epsilon", 0.5, "nemotron_h"),
    ("an attention's scale", attention, "scaling", 3.0, "nemotron_h"),
    ("a value of the configuration", lambda m: m.config, "logits_scaling", 7.0, "granite 4"),
    ("a rotary embedding's scale", _first_with("attention_scaling"), "attention_scaling", 0.5,
     "falcon_h1"),
    ("an activation function", _first_with("act_fn"), "act_fn", nn.Sigmoid(), "nemotron_h"),
    ("the class of a module", lambda m: norms(m)[0], "__class__", nn.Identity, "nemotron_h"),
):  # fmt: skip
    _put(_name, KEYED, _find, _attribute, lambda _, value=_value: value, family=_family)
_put("probability of dropout, in eval mode", KEYED, _first_with("attention_dropout"),
     "attention_dropout", lambda _: 0.3, family="granite 4", matters=False)  # fmt: skip
_do("a new plain attribute that forward reads", KEYED, _add_attribute, _remove_attribute)
_do("attention implementation", KEYED, lambda m: m.set_attn_implementation("eager"),
    lambda m: m.set_attn_implementation("sdpa"), matters=False)  # fmt: skip
_do("one submodule in training mode", REFUSED, lambda m: attention(m).train(),
    lambda m: attention(m).eval(), matters=False)  # fmt: skip
_do("the model in training mode", REFUSED, nn.Module.train, nn.Module.eval, matters=False)
_do("requires_grad and gradients", HARMLESS, _require_no_grad, _require_grad, matters=False)


# Code: hooks, replaced forwards, compilation.


def _doubled(function):
    return lambda *args: function(*args) * 2


def _hook_all_modules(model):
    target = norms(model)[0]
    return nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 2 if module is target else None
    )


_hook("a forward hook", lambda model: attention(model).register_forward_hook(
    lambda _, __, output: (output[0] * 2, output[1])))  # fmt: skip
_hook("a forward pre-hook", lambda model: _projection(model).register_forward_pre_hook(
    lambda _, args: (args[0] * 2,)))  # fmt: skip
_hook("a hook of all modules", _hook_all_modules)
_put("a forward replaced on the object", BYPASSED, _projection, "forward", _doubled)
_put("a class's forward replaced", BYPASSED, lambda m: type(norms(m)[0]), "forward", _doubled)


_do("a submodule compiled in place", KEYED, lambda model: norms(model)[0].compile(backend="eager"),
    lambda model: delattr(norms(model)[0], "_compiled_call_impl"), matters=False)  # fmt: skip


@kind("a submodule replaced by its compiled form", KEYED, matters=False)
def compiled_submodule(model):
    mixer = mixers(model)[0]
    before = mixer.in_proj
    mixer.in_proj = torch.compile(before, backend="eager")
    yield
    mixer.in_proj = before
    del before._is_torch_compile


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


@kind("a function of the model's file replaced", KEYED, matters=False)
def function_replaced(model):
    namespace = attention(model).forward.__func__.__globals__
    original = namespace["eager_attention_forward"]
    namespace["eager_attention_forward"] = functools.partial(original)
    yield
    namespace["eager_attention_forward"] = original


# Settings of the whole process.

_within("autocast to bfloat16", lambda: torch.autocast("cpu", torch.bfloat16))
_within("autocast to float16", lambda: torch.autocast("cpu", torch.float16))
_within("only some attention kernels", lambda: nn.attention.sdpa_kernel(
    nn.attention.SDPBackend.MATH), matters=False)  # fmt: skip
_within("inference_mode around the call", torch.inference_mode, HARMLESS, matters=False)
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
