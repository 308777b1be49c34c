"""What the README shows works when it is pasted."""

import importlib
import re
import runpy
from argparse import ArgumentParser

import pytest
import torch
from sources import ROOT

from mamba_cache import DynamicInferenceContext, Request
from mamba_cache.cli.serve import add_options
from mamba_cache.reference import HybridModel

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def block(needle: str) -> str:
    """The README's one Python block that says this."""
    [code] = [code for code in PYTHON if needle in code]
    return code


def run(code: str, **names: object) -> dict[str, object]:
    """Runs code as a reader would who has these names."""
    namespace: dict[str, object] = {"__name__": "readme", **names}
    exec(compile(code, "README.md", "exec"), namespace)
    return namespace


def test_every_block_is_run_by_a_test() -> None:
    needles = "PrefixCache(", "context.add_request(request)"
    assert sorted(map(block, needles)) == sorted(PYTHON)


def engine() -> tuple[HybridModel, DynamicInferenceContext]:
    """A model and a context, as an engine has them."""
    model = HybridModel()
    example = runpy.run_path(str(ROOT / "examples" / "own_engine.py"))
    return model, example["make_context"](model, enable_prefix_caching=True)


def test_the_lines_for_your_own_engine_run() -> None:
    model, context = engine()
    request = Request(request_id="a", prompt_tokens=list(b"What is a slot?"))
    run(block("context.add_request(request)"), model=model, context=context, request=request)
    assert len(context.output("a")) == 1


def test_the_lines_for_scripts_run() -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    rig = importlib.import_module("transformers_rig")
    model, ids = rig.make_model("granite 4"), rig.text(torch.Generator().manual_seed(0), 40)
    model.generation_config.eos_token_id = None
    budgets = "mamba_cache_gb=4, kv_cache_gb=8"  # of a GPU; the tests' machine has less
    code = block("PrefixCache(")
    assert budgets in code
    code = code.replace(budgets, "mamba_cache_gb=0.01, kv_cache_gb=0.01")
    names = run(code, model=model, input_ids=ids)
    expected = rig.plain(model, ids, max_new_tokens=64).sequences
    assert torch.equal(names["output"], expected)
    again = names["cache"].generate(ids, max_new_tokens=64)
    assert torch.equal(again, expected)
    assert names["cache"].stats().hits == 1
    names["cache"].close()


def test_commands_have_the_options_that_are_shown() -> None:
    [serve] = re.findall(r"^mamba-cache serve (.*)$", README, flags=re.MULTILINE)
    parser = ArgumentParser()
    add_options(parser)
    given = parser.parse_args(serve.split())
    assert (given.mamba_cache_gb, given.kv_cache_gb) == (4, 8)


def test_the_times_are_those_of_the_runs_that_are_kept() -> None:
    """If this fails, `python docs/figures/tables.py` writes them anew."""
    tables = runpy.run_path(str(ROOT / "docs" / "figures" / "tables.py"))
    shown = README.split(tables["BEGIN"])[1].split(tables["END"])[0]
    assert shown.strip() == tables["readme_block"]()
