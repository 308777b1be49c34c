"""TRL's GRPO trainer on a hybrid model, whose rollouts come from an installed prefix cache.

tests/engines/trl.sh makes an environment for it.
"""

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers_rig import VOCABULARY, make_cache, make_model, plain, text

# Of TRL's and transformers' own code.
pytestmark = pytest.mark.filterwarnings("ignore")

ANSWER = 6
STEPS = 3
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Allowed distance of the chosen logit below the greatest, by dtype, for logits of size 1."""


def make_tokenizer():
    """A token for each word, w0 to w96."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Rollouts:
    """A reward that checks each rollout before the optimizer changes the weights."""

    def __init__(self, model):
        self.__name__ = "rollouts"
        self.model = model
        self.tokenizer = make_tokenizer()
        self.weights, self.answers = [], []

    def __call__(self, prompts, completions, completion_ids, **_):
        assert self.model.training
        assert len(prompts) == 2 * len(set(prompts))
        self.model.eval()
        for prompt, answer in zip(prompts, completion_ids, strict=True):
            self.check(torch.tensor([self.tokenizer(prompt)["input_ids"]]), answer)
        self.model.train()
        self.weights.append([tensor.detach().clone() for tensor in self.model.parameters()])
        self.answers.append(completion_ids)
        return [float(number % 2) for number in range(len(prompts))]

    def check(self, prompt, answer):
        """Compare an answer with the model's answer to its prompt alone, without a cache."""
        ids = torch.cat([prompt, torch.tensor([answer])], dim=1)
        with torch.no_grad():
            logits = self.model(ids).logits[0, prompt.shape[1] - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        lowered = logits.amax(dim=1) - chosen
        assert lowered.max() <= ROUNDING[self.model.dtype] * logits.std()
        if self.model.dtype == torch.float32:
            own = plain(self.model, prompt, max_new_tokens=ANSWER, eos_token_id=2).sequences[0]
            assert answer == own[prompt.shape[1] :].tolist()


def make_trainer(folder, generator, *, is_cast=False, has_adapter=False):
    rollouts = Rollouts(make_model("qwen3_5"))
    prompts = [" ".join(f"w{t}" for t in text(generator, n)[0].tolist()) for n in (20, 37)]
    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=ANSWER,
        max_steps=STEPS,
        use_transformers_continuous_batching=True,
        generation_kwargs={"do_sample": False},
        entropy_coef=1.0,  # the two answers to a prompt are equal: rewards alone move nothing
        learning_rate=1e-2,
        use_cpu=True,
        bf16=is_cast,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        rollouts.model,
        reward_funcs=rollouts,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=rollouts.tokenizer,
        peft_config=LoraConfig(target_modules=["in_proj_qkv", "q_proj"]) if has_adapter else None,
    )
    return trainer, rollouts


@pytest.mark.parametrize(
    "options", [{}, {"is_cast": True}, {"has_adapter": True}], ids=["plain", "cast", "adapter"]
)
def test_three_steps(tmp_path, generator, options):
    trainer, rollouts = make_trainer(tmp_path, generator, **options)
    model = trainer.model.get_base_model() if options.get("has_adapter") else trainer.model
    assert model is rollouts.model
    if not options:  # control: transformers' own generate_batch refuses the model
        with pytest.raises(ValueError, match="Invalid layer type: linear_attention"):
            trainer.train()
    with make_cache(model, max_requests=8, variant="trl") as cache, cache.install():
        trainer.train()
        stats = cache.stats()
        cache.check_invariants()
    assert "generate_batch" not in vars(model)
    assert model.dtype == (torch.bfloat16 if options.get("is_cast") else torch.float32)
    assert not stats.bypasses
    assert not stats.self_resets
    # Weights change at each step, so only the second answer to each prompt is a hit.
    assert (stats.requests, stats.hits) == (4, 2)
    assert len(rollouts.answers) == STEPS
    for one, other in zip(rollouts.weights, rollouts.weights[1:], strict=False):
        assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    if not options.get("has_adapter"):
        assert rollouts.answers[0] != rollouts.answers[-1]  # stale prefixes: equal answers
