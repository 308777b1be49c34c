"""Foreign code in a model, from outside its libraries, makes a call bypass the cache."""

import collections
import enum
import functools
import gc
import importlib.util
import itertools
import sys
import threading
import warnings
import weakref
from decimal import Decimal

import numpy as np
import pytest
import torch
from model_changes import attention, head, norms
from transformers import (
    AttentionInterface,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    NemotronHConfig,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers_rig import BLOCK, GREEDY, assert_same, cached, make_cache, make_model, plain

from mamba_cache.errors import InvalidArgumentError, MissingStateError, ModelChangedError
from mamba_cache.integrations.transformers import fingerprint
from mamba_cache.integrations.transformers import tiers as prefix_tiers
from mamba_cache.integrations.transformers.fingerprint import ModelFingerprint

FACTOR = 1.0


@pytest.fixture(scope="module")
def shared():
    return make_model("nemotron_h")


@pytest.fixture
def holder(shared):
    """A module of a user's own class in ``shared``, whose attribute ``note`` a test sets."""
    module = head(shared)
    usual, module.__class__ = module.__class__, Scaled
    yield module
    module.__class__ = usual
    del module.note


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.0)
    # The package's clock jumps in tests, so loads from disk have no deadline.
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None, raising=False)


def ask(cache, prompt, **options):
    """Return an answer; ignore the warning of a bypass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cached(cache, prompt, **options)


def bypasses(cache):
    return dict(cache.stats().bypasses)


def tilt(_, __, output):
    return output + torch.linspace(-3, 3, output.shape[-1]) * (FACTOR - 1)


# Cases that gave wrong answers.


def test_what_a_hook_does_is_changed_elsewhere(model, prompt, monkeypatch):
    """A global constant of the hook's module changes, as in the next cell of a notebook."""
    head(model).register_forward_hook(tilt)
    cache = make_cache(model)
    assert_same(plain(model, prompt), ask(cache, prompt))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", -4.0)
    assert_same(plain(model, prompt), ask(cache, prompt))
    assert bypasses(cache) == {"forward hook": 2}
    assert (cache.stats().requests, cache.stats().cached_slots) == (0, 0)


SCRIPT = """
import torch

FACTOR = {factor}


def tilt(_, __, output):
    return output + torch.linspace(-3, 3, output.shape[-1]) * (FACTOR - 1)


class Tilted(torch.nn.Linear):
    def forward(self, x):
        return tilt(None, None, super().forward(x))
"""


def run_script(path, factor, form):
    """Run a script; return its model, which holds the script's code."""
    path.write_text(SCRIPT.format(factor=factor))
    spec = importlib.util.spec_from_file_location("tilting_script", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules["tilting_script"] = script
    spec.loader.exec_module(script)
    model = make_model("nemotron_h")
    if form == "hook":
        head(model).register_forward_hook(script.tilt)
    else:
        head(model).__class__ = script.Tilted
    return model


@pytest.mark.parametrize("form", ["hook", "class"])
def test_a_script_is_edited_between_two_runs_over_one_disk_cache(tmp_path, prompt, form):
    disk = {"host_cache_gb": 0.01, "disk_cache_path": tmp_path / "disk", "disk_cache_gb": 0.1}
    hits = []
    for factor in (1.0, -4.0, -4.0):
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        model = run_script(tmp_path / "script.py", factor, form)
        sys.dont_write_bytecode = before
        with make_cache(model, **disk) as cache:
            assert_same(plain(model, prompt), ask(cache, prompt))
            hits.append(cache.stats().hits)
    del sys.modules["tilting_script"]
    assert hits == ([0, 0, 0] if form == "hook" else [0, 0, 1])


def test_a_mask_function_is_registered(model, cache, prompt, monkeypatch):
    """Each token sees itself only."""
    assert_same(plain(model, prompt), cached(cache, prompt))
    cache.prepare_batches()
    usual = AttentionMaskInterface._global_mapping["sdpa"]
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", usual)  # to be put back

    def myopic(*args, **kwargs):
        mask = usual(*args, **{**kwargs, "allow_is_causal_skip": False})
        rows, columns = mask.shape[-2:]
        return mask & torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows)

    AttentionMaskInterface.register("sdpa", myopic)
    expected = plain(model, prompt)
    assert_same(expected, ask(cache, prompt))
    assert bypasses(cache) == {"registered function": 1}
    with pytest.raises(InvalidArgumentError, match=r"generate_batch computes attention itself.*my"):
        cache.generate_batch(prompt.tolist(), max_new_tokens=2)
    with pytest.raises(InvalidArgumentError, match="generate does"):
        cache.generate_batch(prompt.tolist(), max_new_tokens=2, variant="myopic")


def test_a_function_that_no_configuration_selects_is_not_looked_at(cache, prompt, monkeypatch):
    for kind in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setitem(kind._global_mapping, "of_another_model", None)  # to be put back
        kind.register("of_another_model", lambda *_, **__: None)
    for _ in range(2):
        cached(cache, prompt)
    assert (cache.stats().hits, bypasses(cache)) == (1, {})


class HooksForAWhile(LogitsProcessor):
    """Hooks the model while some tokens of an answer are computed."""

    def __init__(self, model, first, last):
        self.model, self.first, self.last, self.calls = model, first, last, 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == self.first:
            self.handle = norms(self.model)[0].register_forward_hook(lambda _, __, out: out * -2)
        if self.calls == self.last:
            self.handle.remove()
        return scores


def test_a_hook_that_a_processor_adds_for_part_of_an_answer(model, cache, prompt):
    """States computed under the hook were found by prompts that begin like the answer."""
    options = {"max_new_tokens": 3 * BLOCK}
    processors = LogitsProcessorList([HooksForAWhile(model, 2, 2 * BLOCK)])
    answer = cached(cache, prompt, logits_processor=processors, **options).sequences
    assert not norms(model)[0]._forward_hooks
    assert_same(plain(model, answer), cached(cache, answer))
    assert cache.stats().skipped_tokens <= prompt.shape[1]
    assert_same(plain(model, prompt), cached(cache, prompt))  # its states had no hook
    assert (cache.stats().hits, bypasses(cache)) == (2, {})


class Listed(list):
    """A list that can be referred to weakly."""


@pytest.mark.parametrize("variant", [None, "seen"])
def test_a_list_that_a_hook_closes_over_is_collected_after_its_removal(
    model, cache, prompt, variant
):
    def hooked(seen):
        return norms(model)[0].register_forward_hook(lambda *args: seen.append(args[2].sum()))

    seen = Listed()
    handle = hooked(seen)
    ask(cache, prompt, variant=variant)
    ask(cache, prompt, variant=variant)
    assert seen
    collected = weakref.ref(seen)
    handle.remove()
    del seen, handle
    gc.collect()
    assert collected() is None


# Foreign code, and code that is not foreign.


def wrapped(function):
    @functools.wraps(function)
    def doubled(*args, **kwargs):
        return function(*args, **kwargs) * 2

    return doubled


def _put(owner, name, value):
    def put(model, monkeypatch):
        module = owner(model)
        monkeypatch.setattr(module, name, value(module), raising=False)

    return put


FOREIGN = {
    "one that functools.wraps dresses up": _put(head, "forward", lambda m: wrapped(m.forward)),
    "a partial": _put(head, "forward", lambda m: functools.partial(_doubled, m)),
    "a method of another object": _put(head, "forward", lambda m: _Doubler(m).run),
    "one below a decorator of torch": _put(
        head, "forward", lambda m: torch.no_grad()(wrapped(m.forward))
    ),
    "another method": _put(head, "_call_impl", lambda m: wrapped(m._call_impl)),
    "in the model's file": lambda model, monkeypatch: monkeypatch.setitem(
        attention(model).forward.__func__.__globals__, "eager_attention_forward", _doubled
    ),
    "an attribute": _put(head, "note", lambda m: Scaling(2.0)),
}


def _doubled(module, x):
    return x @ module.weight.T * 2


class _Doubler:
    def __init__(self, module):
        self.weight = module.weight

    def run(self, x):
        return _doubled(self, x)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_code_bypasses_the_cache_and_warns_once(model, cache, prompt, name):
    cached(cache, prompt)
    with pytest.MonkeyPatch.context() as patch:
        FOREIGN[name](model, patch)
        expected = plain(model, prompt)
        detail = "lm_head.note is an object" if name == "an attribute" else "of module tests"
        with pytest.warns(UserWarning, match=rf"nothing is reused or cached.*{detail}.*variant"):
            assert_same(expected, cached(cache, prompt))
        assert_same(expected, cached(cache, prompt))  # a second warning would be an error
    kind = "foreign attribute" if name == "an attribute" else "replaced method"
    assert bypasses(cache) == {kind: 2}
    assert_same(plain(model, prompt), cached(cache, prompt))
    assert cache.stats().hits == 1
    cache.reset()
    assert bypasses(cache) == {}


class Scaled(torch.nn.Linear):
    """A module of a user's own class."""


class Scaling:
    def __init__(self, factor):
        self.factor = factor


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of PyTorch about its own future
    QUANTISED = torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)
    PACKED = torch.ops.quantized.linear_prepack(QUANTISED, None)
    SCRIPTED = torch.jit.script(torch.nn.Linear(2, 2))


LIBRARY_OBJECT = DynamicCache()
LIBRARY_OBJECT.lock = threading.Lock()
FAR_LOGGER = type("Logger", (), {"__module__": "logging_of_users"})()
VALUES = {
    "an object": Scaling(2.0),
    "a decimal": Decimal(2),
    "a subclass of float": type("Halved", (float,), {})(2.0),
    "an array of NumPy": np.ones(3),
    "a deque": collections.deque([2.0]),
    "a dict with odd keys": {Scaling(1.0): 2.0},
    "a list with an object in it": [1.0, {"scaling": [Scaling(2.0)]}],
    "packed weights of torch.ao": PACKED,
    "a quantised tensor": QUANTISED,
    "a module of TorchScript": SCRIPTED,
    "a lock in an object of a library": LIBRARY_OBJECT,
    "an object of a module that is called like an opaque one": FAR_LOGGER,
    "a generator of PyTorch": torch.Generator(),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a tensor of MKL": torch.eye(2).to_mkldnn(),
    "a lambda": lambda x: x * 2,
    "a closure": wrapped(_doubled),
    "a partial of torch with an object": functools.partial(torch.mul, other=Scaling(2.0)),
    "a class of the standard library": collections.Counter,
    "a function of the standard library": print,
    "a module of Python": functools,
    "a config with an object": NemotronHConfig(scaling=Scaling(2.0)),
}


@pytest.mark.parametrize("name", VALUES)
def test_an_attribute_of_unknown_kind_is_foreign(shared, holder, name):
    holder.note = VALUES[name]
    fingerprint = ModelFingerprint(shared)
    fingerprint.begin()
    kind, place = fingerprint.foreign
    assert kind == "foreign attribute"
    assert place.startswith("lm_head.note")
    assert fingerprint.portable_key() is None
    fingerprint.begin(variant="named")
    assert fingerprint.foreign is None
    assert fingerprint.portable_key() is not None


@pytest.mark.parametrize("name", ["a quantised tensor", "a sparse tensor", "a tensor of MKL"])
def test_a_tensor_without_an_address_is_served_with_a_variant(shared, holder, name):
    """A batch reads the addresses of all tensors, because its CUDA graphs depend on them."""
    without = ModelFingerprint(shared)
    without.begin()
    holder.note = VALUES[name]
    fingerprint = ModelFingerprint(shared)
    fingerprint.begin(variant="named")
    assert {*fingerprint.addresses()} >= {*without.addresses()}


def known_values(factor):
    """Attribute values that the key reads; each value differs for another factor."""
    config = NemotronHConfig(logits_scaling=factor)
    config._attn_implementation = "sdpa"
    return {
        "a number": factor,
        "a number of NumPy": np.float32(factor),
        "an integer or a bool": True if factor == 2 else 1,
        "a list of numbers": [1.0, factor],
        "a dict of lists": {"default": [{"scale": (factor,)}]},
        "a set": {"a", factor},
        "a member of an enumeration": Precision(factor),
        "a config": config,
        "a function of torch": torch.relu if factor == 2 else torch.sigmoid,
        "a partial of torch": functools.partial(torch.mul, other=[factor]),
        "an object of a library": DynamicCache() if factor == 2 else DynamicCache(config=config),
        "a function of the class's own file": _doubled if factor == 2 else wrapped,
    }


class Precision(enum.Enum):
    LOW, HIGH = 1.0, 2.0


@pytest.mark.parametrize("name", known_values(1.0))
def test_an_attribute_of_known_kind_is_part_of_the_key(shared, holder, name):
    """The attribute is part of the identity too, for other processes."""
    fingerprint, keys = ModelFingerprint(shared), []
    for factor in (1.0, 2.0, 1.0):
        holder.note = known_values(factor)[name]
        fingerprint.begin()
        assert fingerprint.foreign is None
        assert fingerprint.is_current()
        keys.append((fingerprint.key, fingerprint.portable_key()))
    assert keys[0] == keys[2]
    assert None not in keys[0]
    for one, other in zip(*keys[:2], strict=True):
        assert one != other


def test_what_is_written_in_place_into_an_attribute_is_another_key(shared, holder):
    holder.note = {"default": [{"scale": 1}], "seen": {"a"}}
    fingerprint = ModelFingerprint(shared)
    fingerprint.begin()
    for change in (
        lambda note: note["default"][0].update(scale=2),
        lambda note: note["default"].append(3),
        lambda note: note.update(other=1),
        lambda note: note.pop("default"),
        lambda note: note["seen"].add("b"),
    ):
        before = fingerprint.key
        change(holder.note)
        assert not fingerprint.is_current()
        fingerprint.begin()
        assert fingerprint.key != before


def test_a_tensor_that_a_partial_carries_is_a_weight(shared, holder):
    factor = torch.ones(3)
    holder.note = functools.partial(torch.mul, other=factor)
    fingerprint = ModelFingerprint(shared)
    fingerprint.begin()
    factor.mul_(2)
    with pytest.raises(ModelChangedError, match=r"lm_head.note.keywords\['other'\]"):
        fingerprint.begin()


def test_a_buffer_that_forwards_replace_counts_for_cuda_graphs():
    """A graph would read memory that may be another tensor's by then."""
    model = torch.nn.Linear(2, 2).eval()
    model.register_buffer("steps", torch.zeros(1))
    fingerprint = ModelFingerprint(model)
    counts, kept = itertools.count(), []

    def run():
        kept.append(model.steps)  # so that no address comes back
        model.steps = torch.full((1,), next(counts))

    fingerprint.leave_out_what_changes(run)
    fingerprint.begin()
    before = fingerprint.addresses()
    run()
    assert fingerprint.is_current()
    assert fingerprint.addresses() != before


def test_patches_of_classes_that_were_made_before_are_the_model(model, prompt, monkeypatch):
    """Liger patches classes like this. The file of the patch is part of the identity."""
    kind = type(norms(model)[0])
    plain_key = ModelFingerprint(model)
    plain_key.begin()
    monkeypatch.setattr(kind, "forward", wrapped(kind.forward))
    cache = make_cache(model)
    for _ in range(2):
        assert_same(plain(model, prompt), cached(cache, prompt))
    assert (cache.stats().hits, bypasses(cache)) == (1, {})
    assert cache._runner.fingerprint.portable_key() != plain_key.portable_key()
    assert __name__ in cache._runner.fingerprint._reading.modules_of_code


def test_what_libraries_install_is_not_foreign(model, cache, prompt):
    """Hooks of torch and transformers, and a bound method of the class on the object."""
    cached(cache, prompt)
    norm = norms(model)[0]
    norm.forward = norm.forward
    assert_same(plain(model, prompt), cached(cache, prompt))
    assert (cache.stats().hits, bypasses(cache)) == (1, {})
    model.generate(prompt, **GREEDY, output_hidden_states=True)  # it installs hooks that capture
    assert any(module._forward_hooks for module in model.modules())
    assert_same(plain(model, prompt), cached(cache, prompt))
    assert (cache.stats().hits, bypasses(cache)) == (2, {})


def test_a_kernel_of_the_hub_is_not_foreign(tmp_path, monkeypatch):
    """The module lies in the download folder of `kernels`, and has a module name of its own."""
    path = tmp_path / "models--kernels-community--relu/snapshots/0a1b2c3d4e/build/torch-universal"
    path.mkdir(parents=True)
    (path / "relu.py").write_text("def forward(self, x):\n    return x\n")
    spec = importlib.util.spec_from_file_location("relu_8f3a", path / "relu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "relu_8f3a", module)
    spec.loader.exec_module(module)
    assert fingerprint.foreign_layer(module.forward) == "forward of module relu_8f3a"
    monkeypatch.setattr(fingerprint, "_LIBRARIES", fingerprint._LIBRARIES | {"kernels"})
    assert fingerprint.foreign_layer(module.forward) is None


# Variants.


def test_a_variant_keeps_prefixes_apart_and_has_them_found(model, cache, prompt, monkeypatch):
    assert_same(plain(model, prompt), cached(cache, prompt))
    handle = head(model).register_forward_hook(tilt)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    for variant in ("two", "three"):
        expected = plain(model, prompt)
        for _ in range(2):
            assert_same(expected, cached(cache, prompt, variant=variant))
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert (cache.stats().hits, bypasses(cache)) == (2, {})
    handle.remove()
    assert_same(plain(model, prompt), cached(cache, prompt))
    assert cache.stats().hits == 3


def test_each_call_takes_a_variant_and_bypasses_without_one(model, cache, prompt):
    ids = prompt[0].tolist()
    head(model).register_forward_hook(lambda _, __, out: out * -0.5)
    expected = plain(model, prompt)

    def batch(**options):
        settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        [output] = cache.generate_batch([ids], **settings, **options).values()
        return output.generated_tokens

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        past = cache.prefill(prompt)
        assert past.get_seq_length() == len(ids)
        for _ in range(2):
            assert batch() == expected.sequences[0, len(ids) :].tolist()
        with pytest.raises(
            MissingStateError, match=r"nothing is cached of this model now: lm_head"
        ):
            cache.pin(prompt)
        assert cache.stats().hits == 0
        assert bypasses(cache) == {"forward hook": 3}
    cache.prefill(prompt, variant="halved")
    cache.unpin(cache.pin(prompt, variant="halved"))
    assert batch(variant="halved") == expected.sequences[0, len(ids) :].tolist()
    assert_same(expected, cached(cache, prompt, variant="halved"))
    assert cache.stats().hits == 2
    assert bypasses(cache) == {"forward hook": 3}


def test_a_class_of_a_user_is_served_and_needs_a_file_or_a_variant_below(tmp_path, prompt):
    """A class of a notebook has no file, so no digest names it to other processes."""
    kind = type("Halved", (torch.nn.Linear,), {
        "__module__": "a_notebook", "forward": eval(
            "lambda self, x: x @ self.weight.T * -0.5", {"__name__": "a_notebook"}
        ),
    })  # fmt: skip

    def halved():
        model = make_model("nemotron_h")
        head(model).__class__ = kind
        return model

    disk = {"host_cache_gb": 0.01, "disk_cache_path": tmp_path, "disk_cache_gb": 0.1}
    with make_cache(halved(), host_cache_gb=0.01) as cache:
        for _ in range(2):
            assert_same(plain(halved(), prompt), cached(cache, prompt))
        assert (cache.stats().hits, bypasses(cache)) == (1, {})
    with pytest.raises(
        InvalidArgumentError, match=r"needs variant= here: .* a_notebook lies in no"
    ):
        make_cache(halved(), **disk)
    for variant, hits in (("one", 0), ("one", 1), ("two", 0)):
        with make_cache(halved(), variant=variant, **disk) as cache:
            assert_same(plain(halved(), prompt), cached(cache, prompt))
            assert cache.stats().hits == hits
