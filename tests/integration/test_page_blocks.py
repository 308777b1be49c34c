"""Blocks of Python on the pages: their names exist, and the blocks of four pages run, in order.

The tests supply a reader's own objects (a model, a context, prompts); the page must import the
package's names. Budgets of a GPU, ports and paths are exchanged. Blocks with output (`testcode`)
are Sphinx's.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from context_rig import MODEL, add, make_config, make_context, run_step
from pages import blocks, names_of_pages, python_blocks

import mamba_cache
from mamba_cache import DynamicInferenceContext, Request


def is_of_the_package(value: object) -> bool:
    named = inspect.isclass(value) or inspect.isfunction(value)
    return named and value.__module__.partition(".")[0] == mamba_cache.__name__


def check_names(code: str, names: dict[str, object], kinds: dict[str, type]) -> None:
    """Check that imports exist, and methods and keywords of the imported names."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mamba_cache"):
            exec(ast.unparse(node), names)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = names.get(ast.unparse(node.value.func))
            if inspect.isclass(made):
                kinds |= {ast.unparse(target): made for target in node.targets}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = names.get(ast.unparse(call.func))
        if isinstance(call.func, ast.Attribute):
            kind = kinds.get(ast.unparse(call.func.value))
            called = kind and getattr(kind, call.func.attr)
        if called is None or not is_of_the_package(called):
            continue
        takes = inspect.signature(called).parameters
        given = {keyword.arg for keyword in call.keywords} - {None}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        assert takes_any or given <= takes.keys(), ast.unparse(call)


@pytest.mark.parametrize("page", names_of_pages())
def test_what_the_blocks_name_is_there(page: str) -> None:
    kinds = {"context": DynamicInferenceContext}
    names: dict[str, object] = {}
    if any("integrations.transformers" in code for code in python_blocks(page)):
        pytest.importorskip("transformers", reason="needs the extra transformers")
    for code in python_blocks(page):
        check_names(code, names, kinds)


@pytest.mark.parametrize(
    "code",
    [
        "from mamba_cache import Nothing",
        "context.nothing()",
        "context.begin_step(nothing=1)",
        "from mamba_cache import CacheConfig\nCacheConfig(nothing=1)",
        "from mamba_cache.cache import LruSlotPolicy\nlru = LruSlotPolicy()\nlru.nothing()",
    ],
)
def test_what_is_not_there_is_noticed(code: str) -> None:
    with pytest.raises((AttributeError, AssertionError, ImportError)):
        check_names(code, {}, {"context": DynamicInferenceContext})


class Page:
    """A page whose blocks run one after the other in one namespace."""

    def __init__(self, path: str, /, **names: object) -> None:
        assert [key for key, value in names.items() if is_of_the_package(value)] == []
        self.path, self.names = path, {"__name__": path, **names}
        # tests/integration/test_trl.py trains.
        self._left = [code for code in python_blocks(path) if "GRPOConfig(" not in code]
        for code in blocks(path, r"\{testcode\}|\{testsetup\}"):
            for line in ast.parse(code).body:
                if isinstance(line, ast.Import | ast.ImportFrom):
                    self._execute(ast.unparse(line))

    def run(self, exchanged: dict[str, str] | None = None) -> SimpleNamespace:
        """Runs the next block with some of its text exchanged; returns the namespace after it."""
        code = self._left.pop(0)
        for old, new in (exchanged or {}).items():
            assert old in code
            code = code.replace(old, new)
        self._execute(code)
        return SimpleNamespace(**self.names)

    def end(self) -> None:
        assert self._left == []

    def _execute(self, code: str) -> None:
        exec(compile(code, self.path, "exec"), self.names)


@pytest.fixture
def page() -> Iterator[Callable[..., Page]]:
    """Opens a page; at the end of the test all its blocks must have run."""
    opened: list[Page] = []

    def open_page(path: str, /, **names: object) -> Page:
        opened.append(Page(path, **names))
        return opened[-1]

    yield open_page
    for one in opened:
        one.end()


# Pages about transformers.


def small(*settings: str) -> dict[str, str]:
    """Replace budgets of a GPU by budgets of a tiny model."""
    return {setting: re.sub(r"=\d+", "=0.01", setting) for setting in settings}


class Encoding(dict):
    """The result of a tokenizer, on the CPU."""

    def to(self, device: object) -> "Encoding":
        return self


class Tokenizer:
    """A tokenizer with one token per word, with the methods that the pages use."""

    def __call__(self, text: str, return_tensors: str | None = None, **_: object) -> dict:
        ids = [3 + len(word) for word in text.split()]
        if return_tensors is None:
            return {"input_ids": ids}
        ids = torch.tensor([ids])
        return Encoding(input_ids=ids, attention_mask=torch.ones_like(ids))

    def decode(self, tokens: object) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, **options):
        text = "".join(f"<{m['role']}> {m['content']} </> " for m in messages)
        text += "<assistant> " * add_generation_prompt
        return self(text, options.get("return_tensors")) if tokenize else text


TEXT = "a state is saved where it is likely that another prompt will go on from it " * 3


@pytest.fixture
def transformers_rig():
    pytest.importorskip("transformers", reason="needs the extra transformers")
    import transformers_rig  # noqa: PLC0415 - it needs transformers

    return transformers_rig


@pytest.fixture
def model(transformers_rig):
    model = transformers_rig.make_model("granite 4")
    model.generation_config.eos_token_id = None
    return model


BLOCKS_OF_8 = {"kv_cache_gb=8": "kv_cache_gb=0.01, block_size_tokens=8"}


def test_the_quickstart(page, model, monkeypatch, capsys) -> None:
    transformers = importlib.import_module("transformers")
    for loader, loaded in (("AutoTokenizer", Tokenizer()), ("AutoModelForCausalLM", model)):
        stand_in = SimpleNamespace(from_pretrained=lambda *_, loaded=loaded, **__: loaded)
        monkeypatch.setattr(transformers, loader, stand_in)
    opened = page("quickstart.md", MODEL="a model")
    names = opened.run(small("mamba_cache_gb=4") | BLOCKS_OF_8)
    skipped = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert skipped[0] == 0
    assert min(skipped[1:]) > 150
    names.cache.close()


def test_the_readme(page, model, transformers_rig, generator) -> None:
    input_ids = transformers_rig.text(generator, 40)
    opened = page("../README.md", model=model, input_ids=input_ids)
    names = opened.run(small("mamba_cache_gb=4", "kv_cache_gb=8"))
    expected = transformers_rig.plain(model, input_ids, max_new_tokens=64).sequences
    assert torch.equal(names.output, expected)
    assert torch.equal(names.cache.generate(input_ids, max_new_tokens=64), expected)
    assert names.cache.stats().hits == 1
    names.cache.close()
    request = Request(request_id="a", prompt_tokens=[1, 2, 3])
    opened.names.update(model=MODEL, context=make_context(), request=request)
    assert len(opened.run().context.output("a")) == 1


def test_the_page_on_transformers(page, model, generator) -> None:
    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, 97, (1, length), generator=generator)

    system = {"role": "system", "content": TEXT}
    opened = page(
        "how-to/transformers.md", model=model, tokenizer=Tokenizer(), prompt=TEXT,
        inputs={"input_ids": ids(40)}, num_system_tokens=24, system_ids=ids(24),
        messages=[system, {"role": "user", "content": "why is that so"}],
        input_ids=ids(30), next_ids=ids(1),
    )  # fmt: skip
    budgets = small("mamba_cache_gb=4") | BLOCKS_OF_8
    names = opened.run(budgets)
    assert names.output.shape == (1, len(TEXT.split()) + 64)
    saved = names.cache.stats().saved_states
    opened.run()
    assert names.cache.stats().saved_states > saved
    names = opened.run()
    assert names.ends[0] == len(TEXT.split()) + 2
    assert opened.run().pin.num_tokens == 24
    names = opened.run()
    whole = torch.cat([names.input_ids, names.next_ids], dim=1)
    expected = model(whole).logits[:, -1:]
    torch.testing.assert_close(names.logits, expected, rtol=0, atol=1e-4)
    names.cache.close()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of its compiler
def test_the_page_on_batches(page, model) -> None:
    texts = [f"{TEXT} and number {number}" for number in range(3)]
    opened = page("how-to/batching.md", model=model, tokenizer=Tokenizer(), texts=texts)
    names = opened.run(
        small("mamba_cache_gb=8")
        | {"kv_cache_gb=16": "kv_cache_gb=0.01, block_size_tokens=8", "=64": "=4", "=128": "=9"}
    )
    assert [len(output.generated_tokens) for output in names.outputs.values()] == [9] * 3
    assert opened.run().stats.eager_steps > 0
    opened.run()  # compiles nothing before it is called
    names.cache.close()
    opened.names.update(context=waiting_context(), my_kv_cache=torch.zeros(2, 300))
    assert len(opened.run().forks.blocks) == 2


# Pages about an engine of the reader's.


def waiting_context(**options: object):
    """A context in which a request decodes."""
    context = make_context(**options)
    add(context, "a", [1, 2, 3])
    run_step(context)
    return context


def test_the_page_on_tiers(page, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shape = MODEL.config
    opened = page(
        "how-to/tiers.md", model=model, tokens={"a": 3},
        request=Request(request_id="b", prompt_tokens=[1, 2, 3]),
        state_spec=shape.state_spec(MODEL.dtype), kv_spec=shape.kv_spec(MODEL.dtype),
    )  # fmt: skip
    names = opened.run(small("mamba_cache_gb=4", "host_cache_gb=16") | BLOCKS_OF_8)
    assert [folder.name[:4] for folder in (tmp_path / "cache").glob("mc1*")] == ["mc1-"]
    names.cache.close()
    names = opened.run(
        small("host_cache_gb=64", "disk_cache_gb=500")
        | {"/var/cache/mamba": str(tmp_path / "var"), '"cuda"': '"cpu"'}
        | {"num_kv_blocks=20_000": "num_kv_blocks=9", "max_slots=200": "max_slots=9"}
    )
    assert sorted(each.name[:4] for each in (tmp_path / "var").iterdir()) == ["mc1-", "secr"]
    names.context.close()
    opened.names["context"] = context = waiting_context()
    context.begin_step()
    assert opened.run().preempted == ()
    assert opened.run().context.status("b")
    opened.names["config"] = make_config(num_host_blocks=4, num_host_states=4)
    names = opened.run({'"cuda"': '"cpu"'})
    assert [row.name for row in names.context.tier_stats()] == ["host"]
    names.context.close()
