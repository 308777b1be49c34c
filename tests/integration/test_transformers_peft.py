"""Changes by PEFT and accelerate to a model between two calls of its prefix cache."""

from dataclasses import replace

import pytest

peft = pytest.importorskip("peft", reason="needs the extra peft")
accelerate = pytest.importorskip("accelerate", reason="needs the extra peft")

import torch  # noqa: E402
from changes_rig import check_change  # noqa: E402
from model_changes import BYPASSED, KEYED, NOTICED, Kept, kind, mixers, noise  # noqa: E402
from transformers_rig import BLOCK, assert_same, cached, make_cache, make_model, plain, text  # noqa: E402

from mamba_cache.errors import InvalidArgumentError, UnresumableModelError  # noqa: E402
from mamba_cache.integrations.transformers import layers  # noqa: E402
from mamba_cache.integrations.transformers.layers import read_layers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of PEFT about its own future

KINDS = {}


def adapters(model):
    return [m for m in model.modules() if hasattr(m, "lora_A")]


def change(name, outcome, **others):
    """As in ``model_changes``, for a model with two adapters of PEFT."""
    return kind(name, outcome, kinds=KINDS, **others)


@change("`set_scale` of PEFT", KEYED)
def set_scale(model):
    for layer in adapters(model):
        layer.set_scale("default", 3.0)
    yield
    for layer in adapters(model):
        layer.set_scale("default", 1.0)


@change("`set_adapter` of PEFT", KEYED)
def set_adapter(model):
    model.set_adapter("other")
    yield
    model.set_adapter("default")


@change("`set_adapter` of PEFT, to two adapters", KEYED)
def set_adapter_to_both(model):
    model.base_model.set_adapter(["default", "other"])
    yield
    model.set_adapter("default")


@change("`disable_adapter` of PEFT", KEYED)
def disable_adapter(model):
    with model.disable_adapter():
        yield


@change("`merge_adapter` of PEFT", NOTICED)
def merge_and_unmerge(model):
    kept = Kept(*(layer.base_layer.weight for layer in adapters(model)))
    model.merge_adapter()
    yield
    model.unmerge_adapter()
    kept.restore()


@change("`add_weighted_adapter` of PEFT", KEYED, comes_back=False)
def add_weighted_adapter(model):
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", "linear")
    model.set_adapter("both")
    model.eval()
    yield
    model.set_adapter("default")
    model.delete_adapter("both")


@change("`delete_adapter` of PEFT, and another one under its name", NOTICED)
def delete_and_load_another_under_its_name(model):
    kept = [p.detach().clone() for layer in adapters(model) for p in layer.lora_B.parameters()]
    model.set_adapter("other")
    model.delete_adapter("default")
    add_adapter(model, "default", seed=9)
    model.set_adapter("default")
    yield
    del kept


@change("`hotswap` of PEFT", NOTICED)
def hotswap(model):
    from peft.utils.hotswap import hotswap_adapter_from_state_dict  # noqa: PLC0415

    parts = {
        name: p for name, p in model.named_parameters() if "lora_" in name and "default" in name
    }
    before = {name: value.detach().clone() for name, value in parts.items()}
    others = {name: value + noise(value, 1.0) for name, value in before.items()}
    config = model.peft_config["default"]
    hotswap_adapter_from_state_dict(model, others, "default", config)
    yield
    hotswap_adapter_from_state_dict(model, before, "default", config)


@change("training of an adapter of PEFT", NOTICED)
def train_the_adapter(model):
    weights = [p for layer in adapters(model) for p in layer.lora_B["default"].parameters()]
    kept = Kept(*weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, lr=0.1, fused=True).step()
    yield
    kept.restore()


@change("a hook of the user's, put on by accelerate", BYPASSED)
def accelerate_hook_of_a_user(model):
    class Doubling(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 2

    module = mixers(model)[0].in_proj
    accelerate.hooks.add_hook_to_module(module, Doubling())
    yield
    accelerate.hooks.remove_hook_from_module(module)


@change("a hook of accelerate's own", KEYED, matters=False)
def accelerate_hook(model):
    module = mixers(model)[0].in_proj
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    yield
    accelerate.hooks.remove_hook_from_module(module)  # it leaves the bound method on the object


def offload(model):
    accelerate.cpu_offload(mixers(model)[0].in_proj.base_layer)


@change("weights that accelerate offloaded to the host", NOTICED, prepare=offload)
def weights_that_accelerate_offloaded(model):
    module = mixers(model)[0].in_proj.base_layer
    maps = [getattr(hook, "weights_map", None) for hook in module._hf_hook.hooks]
    weights = next(each for each in maps if each is not None).dataset
    kept = Kept(*weights.values())
    for weight in weights.values():
        weight.add_(noise(weight))
    yield
    kept.restore()


def add_adapter(peft_model, name, seed):
    peft_model.add_adapter(name, CONFIG)
    torch.manual_seed(seed)
    for layer in adapters(peft_model.get_base_model()):
        for part in (layer.lora_A, layer.lora_B):
            torch.nn.init.normal_(part[name].weight, std=0.3)


CONFIG = peft.LoraConfig(r=2, target_modules=["in_proj", "q_proj"], lora_dropout=0.0)


@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_of_the_model_before_is_never_served(name, generator):
    base = make_model("nemotron_h")
    peft_model = peft.get_peft_model(base, CONFIG)
    add_adapter(peft_model, "other", seed=1)
    torch.manual_seed(2)
    for layer in adapters(base):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    peft_model.set_adapter("default")
    one = KINDS[name]
    one.prepare(base)
    check_change(replace(one, change=lambda model: one.change(peft_model)), base, generator)


# Ways of loading a model, as in docs/how-to/transformers.md.


@pytest.mark.parametrize("placed", ["auto", "cpu", "half of the layers on the disk"])
def test_a_model_that_accelerate_placed_is_served(placed, tmp_path, generator):
    model = make_model("granite 4")
    model.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.norm", "lm_head"]
    parts += [f"model.layers.{index}" for index in range(len(model.model.layers))]
    offloaded = parts[-len(parts) // 2 :]
    on_disk = {name: "disk" if name in offloaded else "cpu" for name in parts}
    loaded = type(model).from_pretrained(
        tmp_path / "model",
        device_map=on_disk if "disk" in placed else placed,
        offload_folder=str(tmp_path / "offloaded"),
    )
    cache, ids = make_cache(loaded), text(generator, 3 * BLOCK)
    for _ in range(2):
        assert_same(cached(cache, ids), plain(model, ids))
    assert (cache.stats().hits, dict(cache.stats().bypasses)) == (1, {})


def test_a_dynamically_quantised_model_is_refused():
    model = torch.ao.quantization.quantize_dynamic(make_model("granite 4"), {torch.nn.Linear})
    with pytest.raises(UnresumableModelError, match="does not go on correctly"):
        make_cache(model)


def test_a_model_over_several_devices_is_refused(monkeypatch):
    def read_elsewhere(*arguments):
        memory = read_layers(*arguments)
        return replace(memory, tokens=[tensor.to("meta") for tensor in memory.tokens])

    monkeypatch.setattr(layers, "read_layers", read_elsewhere)
    with pytest.raises(InvalidArgumentError, match=r"one device, got \['cpu', 'meta'\]"):
        make_cache(make_model("granite 4"))
