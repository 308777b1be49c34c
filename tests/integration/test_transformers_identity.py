"""What a prefix cache's entries depend on, beside weights and settings: numerics and adapters."""

from dataclasses import fields, replace
from shutil import copytree

import pytest
import torch
from notebook_rig import REUSABLE, ask, open_cache, prompts
from transformers_rig import make_model, plain

from mamba_cache.integrations.transformers import tiers as prefix_tiers
from mamba_cache.tiers import Numerics

FAMILY = "granite 4"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The package's clock jumps in tests; the disk is waited for all the same."""
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None)


@pytest.fixture(scope="module")
def model():
    return make_model(FAMILY)


def test_other_numerics_and_kernels_find_nothing(tmp_path, model, monkeypatch) -> None:
    """Another GPU, torch, triton, kernel or precision: a hit would not equal a miss."""
    with open_cache(tmp_path / "own", model) as first:
        ask(first, prompts()[:1])
    own = Numerics.of("cpu", kernels="a")

    def other(name):
        return Numerics, "of", lambda *_, **__: replace(own, **{name: "another"})

    changes = [other(field.name) for field in fields(Numerics)]
    changes.append((prefix_tiers, "installed_version", lambda name: "99.0"))
    for number, change in enumerate(changes):
        copytree(tmp_path / "own", tmp_path / str(number))
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with open_cache(tmp_path / str(number), model) as second:
                assert ask(second, prompts()[:1])[1] == 0, change[1:]
    with open_cache(tmp_path / "own", model) as third:
        assert ask(third, prompts()[:1])[1] == REUSABLE[0]


class Adapter(torch.nn.Module):
    """A linear layer with a low-rank one beside it, as adapters put them into a model."""

    def __init__(self, base, seed, scaling):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer, self.scaling = base, scaling
        self.lora_A = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base.out_features, bias=False)
        with torch.no_grad():
            for linear in (self.lora_A, self.lora_B):
                linear.weight.normal_(generator=generator)

    def forward(self, x):
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def adapted(seed, scaling=1.0):
    """A model with an adapter in its first feed-forward layer; without one if ``seed`` is None."""
    model = make_model(FAMILY)
    if seed is not None:
        name, base = next(
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and "mlp" in name
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapter(base, seed, scaling))
    return model.eval()


CASES = {"none": (None,), "one": (1,), "scaled": (1, 2.0), "another": (2,)}


def test_an_adapter_shares_nothing_with_the_model_or_another_adapter(tmp_path) -> None:
    """Neither its weights nor its scaling; and whoever is the same finds his own again."""
    ids = prompts()[3]
    expected = {
        name: plain(adapted(*case), ids).sequences[0].tolist() for name, case in CASES.items()
    }
    for name, case in CASES.items():
        with open_cache(tmp_path / name, adapted(*case)) as cache:
            assert ask(cache, [ids]) == ([expected[name]], 0)
    for of, name in [
        ("none", "one"),
        ("one", "none"),
        ("one", "scaled"),
        ("one", "another"),
        ("one", "one"),
    ]:
        # A copy: who finds nothing makes room for what he stores.
        copytree(tmp_path / of, tmp_path / f"{of} for {name}")
        with open_cache(tmp_path / f"{of} for {name}", adapted(*CASES[name])) as cache:
            skipped = REUSABLE[3] if of == name else 0
            assert ask(cache, [ids]) == ([expected[name]], skipped)
