"""Random conversations with a prefix cache; each answer is compared with the uncached model.

A conversation is derived from its seed: a tiny model, a cache with random settings, users with
salts and system prompts, and their prompts in order. The cache's answers must equal those of
``model.generate`` to the same calls: every token, and every logit up to rounding. Models and caches
compute in float64, in which no two tokens are equally likely, so rounding decides no token. Padded
batches with sampling, which ``generate`` does not answer row by row, are compared by the logits of
each token, and by the tokens that ``generate`` chooses from these logits.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from batch_rig import SERVED
from slot_rig import LastUsedPolicy
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers_rig import (
    FAMILIES,
    VOCABULARY,
    budgets,
    compute_in_double,
    make_cache,
    make_model,
)

from mamba_cache.cache import (
    BranchPoint,
    EveryNthBlock,
    LastBlock,
    LruSlotPolicy,
    MegatronPlacement,
    RefZeroSlotPolicy,
)

SUBJECTS = [*FAMILIES, *(f"{name}, large weights" for name in FAMILIES)]
"""With its initial weights a model hardly depends on its states, so an error in a state could be
lost in rounding. Large weights prevent this."""

LARGE = 5.0
CLAMPING = ("nemotron_h", "nemotron_h with experts", "zamba2")
"""Families whose time steps reach the clamp with large weights; only the prefill clamps."""

BOUND = 1e-9
"""Maximum error of a float64 logit, relative to the largest logit."""

MAX_TOKENS = 150
PAD = 0
EOS = 2
"""The models' EOS token, for calls without one."""

Tokens = tuple[int, ...]


class WrongAnswerError(AssertionError):
    """The cache's answer differs from the model's, or its bookkeeping is wrong."""


class Boom(Exception):
    """Raised in the middle of a call."""


@dataclass
class Call:
    """A call to the cache and to the model."""

    kind: str
    rows: list[Tokens]
    salt: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of ``generate``
    form: str = "ids"  # of the prompts: "ids", "masked", or "list" (cache only)
    stop_tokens: Tokens = ()  # a criterion ends a row after any of these
    stop_length: int = 0  # a criterion ends all rows at this many columns
    favours: Tokens = ()  # a processor raises the logits of these tokens
    breaks_in: str = ""  # callback that raises ``Boom``; empty: none
    breaks_at: int = 0  # number of the callback's call that raises
    seed: int = 0  # seed of PyTorch's random numbers

    @property
    def num_beams(self) -> int:
        return self.options.get("num_beams", 1)

    @property
    def num_answers(self) -> int:
        return self.options.get("num_return_sequences", 1)

    @property
    def is_padded(self) -> bool:
        return len({len(row) for row in self.rows}) > 1

    @property
    def is_greedy(self) -> bool:
        return self.num_beams == 1 and not self.options.get("do_sample")

    @property
    def width(self) -> int:
        return max(map(len, self.rows))

    def __str__(self) -> str:
        rows = " ".join(f"{len(row)}" for row in self.rows)
        others = {
            name: value
            for name, value in vars(self).items()
            if name not in ("kind", "rows", "salt", "options", "seed") and value
        }
        return f"{self.kind}: prompts of {rows} tokens, salt {self.salt!r}, {self.options} {others}"


@dataclass
class Result:
    """The result of a call."""

    sequences: torch.Tensor | None = None  # [rows, columns]; None after an exception
    logits: Sequence[torch.Tensor] = ()  # by step, [rows, vocabulary] each
    shown: list[torch.Tensor] = field(default_factory=list)  # by step, input of the processor
    error: type[BaseException] | None = None  # class of the exception


class _Callbacks:
    """Callbacks of the caller in one call of ``generate``."""

    def __init__(self, call: Call, result: Result) -> None:
        self._call, self._result = call, result
        self._counts: Counter[str] = Counter()

    def arguments(self) -> dict[str, Any]:
        call, given = self._call, {}
        if call.favours or call.num_beams > 1 or call.breaks_in == "processor":
            given["logits_processor"] = transformers.LogitsProcessorList([self._process])
        if call.stop_tokens or call.stop_length or call.breaks_in == "criterion":
            given["stopping_criteria"] = transformers.StoppingCriteriaList([self._stop])
        return given

    def _count(self, where: str) -> None:
        self._counts[where] += 1
        if self._call.breaks_in == where and self._counts[where] > self._call.breaks_at:
            raise Boom(where)

    def _process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._count("processor")
        self._result.shown.append(input_ids.clone())
        if self._call.favours:
            scores = scores.clone()
            scores[:, list(self._call.favours)] += 0.05 * scores.abs().amax()
        return scores

    def _stop(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._count("criterion")
        stops = torch.tensor(
            [token in self._call.stop_tokens for token in input_ids[:, -1].tolist()]
        )
        length = self._call.stop_length
        return stops | torch.tensor(bool(length) and input_ids.shape[1] >= length)


class Judge:
    """A model without a cache, to compare with."""

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        names = ("cache_params", "past_key_values")
        self.cache_name = next(name for name in names if name in accepted)
        self.takes_positions = "position_ids" in accepted

    def forward(self, tokens: Sequence[int], past: Any, start: int) -> torch.Tensor:
        """Return the logits after each of ``tokens``, [tokens, vocabulary]."""
        named: dict[str, Any] = {self.cache_name: past, "use_cache": True}
        if self.takes_positions:
            positions = torch.arange(start, start + len(tokens))
            named["position_ids"] = positions[None]
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens]), **named).logits[0]

    def logits_after(self, tokens: Tokens, prompt_tokens: int) -> torch.Tensor:
        """Return the logits after the prompt and after each later token, [steps, vocabulary]."""
        past = transformers.DynamicCache(config=self.model.config.get_text_config(decoder=True))
        ends = [*range(prompt_tokens, len(tokens) + 1)]
        found = []
        for start, end in zip([0, *ends], ends, strict=False):
            found.append(self.forward(tokens[start:end], past, start)[-1])
        return torch.stack(found)


class Conversation:
    """One conversation, derived from its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = rng = random.Random(seed)
        self.subject = SUBJECTS[seed % len(SUBJECTS)]
        self.model = _model(self.subject)
        chunk = "chunk_size" in vars(self.model.config) or "mamba_chunk_size" in vars(
            self.model.config
        )
        sizes = (8, 8, 16) if chunk else (3, 4, 5, 7, 8, 8, 16)
        self._block = rng.choice(sizes)
        self._is_clamping = _is_clamping(self.subject)
        self.settings = self._choose_settings()
        self.cache: Any = None
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._judge = Judge(self.model)
        salts = [None, "a", "b", 7]
        self._systems = [self._text(self._length(3)) for _ in range(rng.choice((1, 1, 2)))]
        self._users = [
            _User(salt=rng.choice(salts[: rng.choice((1, 2, 4))]), system=self._system())
            for _ in range(rng.randrange(2, 5))
        ]
        self._seen: dict[Any, list[Tokens]] = {}

    # The calls.

    def run(self) -> None:
        """Run the conversation."""
        try:
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                compute_in_double(patch)
                warnings.simplefilter("ignore")
                self.cache = _cache(self.model, self.subject, **self.settings)
                for _ in range(self._rng.randrange(3, 9)):
                    self._do_something()
                self._check_that_all_can_be_allocated()
        except Exception as error:
            raise WrongAnswerError(self._story(error)) from error
        self.counts["conversations"] += 1

    def _story(self, error: BaseException) -> str:
        steps = "\n".join(f"  {number}. {line}" for number, line in enumerate(self.log, 1))
        return (
            f"conversation {self.seed}: {type(error).__name__}: {error}\n{self.subject}, "
            f"{_described(self.settings)}\n{steps}\n"
            f"repeat with: python tests/conversation_search.py --seed {self.seed} --conversations 1"
        )

    def _do_something(self) -> None:
        kinds = {
            "next turn": 27,
            "again": 11,
            "branch": 13,
            "beginning": 8,
            "batch": 16,
            "several answers": 6,
            "beams": 6,
            "prefill": 6,
            "generate_batch": 12,
            "callback raises": 6,
            "reset": 2,
        }
        kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
        special = {
            "prefill": self._prefill,
            "generate_batch": self._generate_batch,
            "reset": self._reset,
        }
        if kind in special:
            self.counts[kind] += 1
            special[kind]()
            return
        call, users = self._choose_call(kind)
        answers = self._ask(call)
        for row, user in enumerate(users):
            if answers is not None and user is not None:
                user.took(call.rows[row], answers[row * call.num_answers])
        if self._rng.random() < 0.3:
            self.cache.check_invariants()

    def _choose_call(self, kind: str) -> tuple[Call, list[_User | None]]:
        rng, user = self._rng, self._rng.choice(self._users)
        if kind in ("again", "beginning", "branch") and not user.turns:
            kind = "next turn"
        self.counts[kind] += 1
        call = Call(kind, [], user.salt, seed=rng.randrange(2**31))
        users: list[_User | None] = [user]
        if kind == "batch":
            users = rng.choices(self._users, k=rng.randrange(2, 4))
            call.salt = users[0].salt if users[0] else None
            call.rows = [self._prompt_of(one) for one in users if one]
            if rng.random() < 0.3:  # repeated rows
                call.rows, users = [*call.rows, call.rows[0]], [*users, None]
            if rng.random() < 0.3:  # equal lengths: no padding for plain
                shortest = min(map(len, call.rows))
                call.rows = [row[-shortest:] for row in call.rows]
        elif kind == "again":
            call.rows = [rng.choice(user.prompts)]
        elif kind == "beginning":
            call.rows = [self._beginning_of(rng.choice(user.turns))]
        elif kind == "branch":
            begin = rng.choice(user.turns)
            if rng.random() < 0.5:  # an edited message
                begin = begin[: rng.randrange(len(begin) + 1)]
            call.rows = [begin + self._text(self._length(1))]
        else:
            call.rows = [self._prompt_of(user)]
        self._choose_options(call)
        return call, users

    def _choose_options(self, call: Call) -> None:
        rng, kind = self._rng, call.kind
        call.options = {
            "max_new_tokens": self._answer_length(),
            "do_sample": rng.random() < 0.25,
            "eos_token_id": self._some_tokens(8) if rng.random() < 0.4 else None,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        if kind == "several answers":
            call.options |= {"do_sample": True, "num_return_sequences": rng.randrange(2, 4)}
        if kind == "beams":
            call.options["num_beams"] = beams = rng.randrange(2, 4)
            call.options["num_return_sequences"] = rng.randrange(1, beams + 1)
            call.options["early_stopping"] = rng.random() < 0.5
            call.options["max_new_tokens"] = min(8, call.options["max_new_tokens"])
            if rng.random() < 0.4:
                call.rows.append(self._prompt_of(rng.choice(self._users)))
        if call.options["do_sample"]:
            call.options |= {"top_k": rng.choice((0, 5, 50)), "temperature": rng.choice((1.0, 0.3))}
        if rng.random() < 0.12:
            call.options["repetition_penalty"] = 1.3
        if rng.random() < 0.12:
            call.favours = tuple(self._some_tokens(5))
        if rng.random() < 0.15:
            call.stop_tokens = tuple(self._some_tokens(10))
        if rng.random() < 0.1:
            call.stop_length = call.width + rng.randrange(1, 6)
        call.form = rng.choice(("ids", "masked", "masked", "list"))
        if kind == "callback raises":
            where = ("criterion", "processor")
            call.breaks_in, call.breaks_at = rng.choice(where), rng.randrange(6)
        has_pads = call.is_padded or any(PAD in row for row in call.rows)
        if has_pads and call.form == "ids":
            call.form = "masked"

    def _prompt_of(self, user: _User) -> Tokens:
        """The next prompt of a user: the conversation so far, and a message."""
        if len(user.history) > MAX_TOKENS:
            user.history = ()
        return (user.history or user.system) + self._text(self._length(1.5))

    def _beginning_of(self, tokens: Tokens) -> Tokens:
        """A beginning of earlier tokens, whose last token was also computed before."""
        size = self._block
        ends = [len(tokens), len(tokens) - 1, self._rng.randrange(len(tokens)) + 1]
        ends += [len(tokens) // size * size, self._rng.randrange(len(tokens)) // size * size]
        return tokens[: self._rng.choice([end for end in ends if end > 0])]

    def _system(self) -> Tokens:
        return self._rng.choice([*self._systems, *self._systems, ()])

    def _length(self, max_blocks: float) -> int:
        size = self._block
        usual = (1, 2, 3, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1)
        max_length = int(max_blocks * size)
        fitting = [length for length in usual if 0 < length <= max_length]
        return self._rng.choice([*fitting, self._rng.randrange(1, max_length + 1)])

    def _answer_length(self) -> int:
        size = self._block
        lengths = (1, 1, 2, 3, size - 1, size, size + 1, 2 * size - 1, 2 * size + 1)
        return min(self._rng.choice([*lengths, self._rng.randrange(1, 10)]), 19)

    def _text(self, length: int) -> Tokens:
        return tuple(self._rng.choices(range(3, VOCABULARY), k=length))

    def _some_tokens(self, count: int) -> list[int]:
        return self._rng.sample(range(1, VOCABULARY), count)

    def _choose_settings(self) -> dict[str, Any]:
        rng, size = self._rng, self._block
        room = rng.choice(((1, 3), (2, 8), (3, 20), (6, 12), (8, 60), (50, 200), (50, 200)))
        placements = [None, BranchPoint(), LastBlock(), MegatronPlacement()]
        evictions = (None, LruSlotPolicy(), RefZeroSlotPolicy(), LastUsedPolicy())
        return {
            "slots": room[0] + rng.randrange(2),
            "blocks": room[1] + rng.randrange(3),
            "block_size_tokens": size,
            "segment_tokens": rng.choice((None, size, 2 * size, 4 * size, 64 * size)),
            "placement": rng.choice([*placements, EveryNthBlock(1), EveryNthBlock(2)]),
            "slot_policy": rng.choice(evictions),
            "reuse_answers": rng.random() < 0.8,
            "weights_check": rng.choice(("full", "full", "sample", "off")),
        }

    # Running calls.

    def _arguments(self, call: Call, result: Result) -> dict[str, Any]:
        options = dict(call.options)
        if call.seed % 5 == 0:
            kept = ("max_new_tokens", "do_sample", "eos_token_id", "top_k", "temperature")
            config = {name: options.pop(name) for name in kept if name in options}
            options["generation_config"] = transformers.GenerationConfig(pad_token_id=PAD, **config)
        return {**options, **_Callbacks(call, result).arguments()}

    def _prompts(self, call: Call, rows: Sequence[Tokens]) -> dict[str, Any]:
        """Prompts as tensors, padded on the left."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), PAD)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - len(row) :] = torch.tensor(row)
            mask[number, width - len(row) :] = 1
        return (
            {"input_ids": ids} if call.form == "ids" else {"input_ids": ids, "attention_mask": mask}
        )

    def _generate(self, call: Call, generate: Callable[..., Any], **prompts: Any):
        result = Result()
        arguments = self._arguments(call, result)
        torch.manual_seed(call.seed)
        try:
            output = generate(**prompts, **arguments)
        except Boom as error:
            result.error = type(error)
            return result
        result.sequences, result.logits = output.sequences, output.logits
        return result

    def _plain(self, call: Call, rows: Sequence[Tokens] | None = None) -> Result:
        return self._generate(call, self.model.generate, **self._prompts(call, rows or call.rows))

    def _cached(self, call: Call) -> Result:
        skipped = self.cache.stats().skipped_tokens
        if call.form == "list":
            prompts: dict[str, Any] = {"inputs": [list(row) for row in call.rows]}
        else:
            prompts = self._prompts(call, call.rows)
        result = self._generate(call, self.cache.generate, cache_salt=call.salt, **prompts)
        asked = [(call.salt, row) for row in call.rows]
        self._check_skips(asked, self.cache.stats().skipped_tokens - skipped)
        self._seen.setdefault(call.salt, []).extend(self._sequences(call, result))
        return result

    def _sequences(self, call: Call, result: Result) -> list[Tokens]:
        """Sequences of a call that the cache may have stored."""
        keeps_answers = self.settings["reuse_answers"] and not self._is_clamping
        if result.sequences is None or not keeps_answers or call.num_beams > 1:
            return call.rows
        answers = [row[call.width :] for row in result.sequences.tolist()]
        return [call.rows[i // call.num_answers] + tuple(row) for i, row in enumerate(answers)]

    def _check_skips(self, asked: Sequence[tuple[Any, Tokens]], skipped: int) -> None:
        """Check that matches were computed before, under the same salt."""
        self.counts["prompt tokens"] += sum(len(row) for _, row in asked)
        self.counts["skipped tokens"] += skipped
        different = dict.fromkeys(asked)
        limit = 0
        for salt, row in different:
            known = [*self._seen.get(salt, ())]
            known += [other for tag, other in different if tag == salt and other != row]
            limit += max((_shared(row, other) for other in known), default=0)
        if skipped > limit:
            raise WrongAnswerError(f"{skipped} tokens were skipped, of {limit} computed before")

    def _ask(self, call: Call) -> list[Tokens] | None:
        """Call the cache and the model; return the answers, None if both raised as expected."""
        self.log.append(str(call))
        actual = self._cached(call)
        self.counts["calls judged"] += 1
        simple = call.is_greedy and not (
            call.favours or call.stop_length or "repetition_penalty" in call.options
        )
        if call.breaks_in:
            rows = call.rows if not call.is_padded else None
            expected = self._plain(call, rows) if rows else actual
            if actual.error is not expected.error:
                raise WrongAnswerError(f"raised {actual.error}, not {expected.error}")
            if actual.error is not None:
                self.cache.check_invariants()
                return None
        if not call.is_padded:
            self._compare(call, self._plain(call), actual)
        elif simple:
            for number, row in enumerate(call.rows):
                alone = Call(**{**vars(call), "rows": [row], "form": "masked", "breaks_in": ""})
                self._compare(alone, self._plain(alone), self._row_of(call, actual, number))
        else:
            self._judge_by_logits(call, actual)
        return self._answers(call, actual)

    def _row_of(self, call: Call, result: Result, number: int) -> Result:
        padding = call.width - len(call.rows[number])
        assert result.sequences is not None
        return Result(
            result.sequences[number : number + 1, padding:],
            [step[number : number + 1] for step in result.logits],
        )

    def _answers(self, call: Call, result: Result) -> list[Tokens]:
        """The rows' answers, each cut at its end token."""
        assert result.sequences is not None
        ends = {*call.stop_tokens, *(call.options["eos_token_id"] or (EOS,))}
        answers = []
        for row in result.sequences[:, call.width :].tolist():
            length = next((at for at, token in enumerate(row, 1) if token in ends), len(row))
            answers.append(tuple(row[:length]))
        return answers

    # Comparisons.

    def _compare(self, call: Call, expected: Result, actual: Result) -> None:
        answers = self._answers(call, expected)
        if answers != self._answers(call, actual):
            raise WrongAnswerError(f"answered {self._answers(call, actual)}, not {answers}")
        if call.num_beams > 1:
            return
        for number, answer in enumerate(answers):
            steps = range(len(answer))
            reference = torch.stack([expected.logits[step][number] for step in steps])
            got = torch.stack([actual.logits[step][number] for step in steps])
            self._check_logits(reference, got)

    def _check_logits(self, reference: torch.Tensor, got: torch.Tensor) -> None:
        largest, off = reference.abs().max().item(), (got - reference).abs().max().item()
        self.counts["rows of logits"] += len(got)
        if not off <= BOUND * largest:
            raise WrongAnswerError(f"logits are off by {off:.2e}, of {largest:.2e} at most")

    def _judge_by_logits(self, call: Call, actual: Result) -> None:
        """Compare the logits that an answer was chosen from."""
        found: dict[Tokens, torch.Tensor] = {}
        for tokens, got in sorted(self._steps(call, actual), key=lambda step: -len(step[0])):
            found.setdefault(tokens, got)
        done: set[Tokens] = set()
        for tokens in found:
            prompt_tokens = self._prompt_in(call, tokens)
            steps = [tokens[:end] for end in range(prompt_tokens, len(tokens) + 1)]
            if tokens in done:
                continue
            done.update(steps)
            reference = self._judge.logits_after(tokens, prompt_tokens)
            got = torch.stack([found[step] for step in steps])
            self._check_logits(reference, got)
        self._check_choice_from_logits(call, actual)

    def _prompt_in(self, call: Call, tokens: Tokens) -> int:
        return max(len(row) for row in call.rows if tokens[: len(row)] == row)

    def _steps(self, call: Call, actual: Result) -> Iterator[tuple[Tokens, torch.Tensor]]:
        """The tokens up to each step of an answer, and the step's logits."""
        per_prompt = call.num_beams if call.num_beams > 1 else call.num_answers
        answers = self._answers(call, actual)
        for step, logits in enumerate(actual.logits):
            for row, got in enumerate(logits):
                prompt = call.rows[row // per_prompt]
                if call.num_beams > 1:
                    padding = call.width - len(prompt)
                    yield tuple(actual.shown[step][row].tolist()[padding:]), got
                elif step < len(answers[row]):
                    yield prompt + answers[row][:step], got

    def _check_choice_from_logits(self, call: Call, actual: Result) -> None:
        """Check that ``generate`` without a cache chooses the same answer from these logits."""
        logits = iter(actual.logits)

        def dictate(_: Any, __: Any, output: Any) -> None:
            output.logits[:, -1] = next(logits)

        call = Call(**{**vars(call), "form": "masked" if call.form == "list" else call.form})
        call.breaks_in = ""
        hook = self.model.register_forward_hook(dictate)
        try:
            prompts = self._prompts(call, call.rows)
            dictated = self._generate(call, self.model.generate, **prompts)
        finally:
            hook.remove()
        if self._answers(call, dictated) != self._answers(call, actual):
            raise WrongAnswerError("its logits are right, and do not lead to this answer")

    # Other calls.

    def _prefill(self) -> None:
        user = self._rng.choice(self._users)
        prompt = self._prompt_of(user)
        message = self._text(self._rng.randrange(1, 6))
        self.log.append(f"prefill: {len(prompt)} tokens and {len(message)} by the caller")
        skipped = self.cache.stats().skipped_tokens
        given = list(prompt) if self._rng.random() < 0.5 else torch.tensor([prompt])
        past = self.cache.prefill(given, cache_salt=user.salt)
        self._check_skips([(user.salt, prompt)], self.cache.stats().skipped_tokens - skipped)
        self._seen.setdefault(user.salt, []).append(prompt)
        got = [
            self._judge.forward([token], past, len(prompt) + at)[-1]
            for at, token in enumerate(message)
        ]
        tokens = prompt + message
        reference = self._judge.logits_after(tokens, len(prompt))[1:]
        self._check_logits(reference, torch.stack(got))
        self.counts["calls judged"] += 1

    def _generate_batch(self) -> None:
        """Run prompts of several users together, each with its number of answers."""
        rng, room = self._rng, self.settings["blocks"] * self._block
        users = rng.choices(self._users, k=rng.randrange(1, 6))
        asked = [(user.salt, self._prompt_of(user)) for user in users]
        lengths = [self._answer_length() for _ in users]
        longest = max(len(row) + count for (_, row), count in zip(asked, lengths, strict=True))
        if family_of(self.subject) not in SERVED or longest > room:
            return
        counts = rng.choices((1, 1, 1, 2, 3), k=len(users))
        configs = [
            transformers.GenerationConfig(
                max_new_tokens=length, eos_token_id=EOS, pad_token_id=PAD, do_sample=count > 1,
                top_k=1, num_return_sequences=count,
            )
            for length, count in zip(lengths, counts, strict=True)
        ]  # fmt: skip
        self.log.append(f"generate_batch: {[len(row) for _, row in asked]} tokens, {lengths} more")
        before = self.cache.stats()
        outputs = self.cache.generate_batch(
            [list(row) for _, row in asked],
            configs,
            ContinuousBatchingConfig(max_batch_tokens=self._block * rng.choice((1, 3, 8))),
            cache_salt=[salt for salt, _ in asked],
        )
        outputs = list(outputs.values())
        after = self.cache.stats()
        if after.requests - before.requests == len(asked):  # else preempted requests were resumed
            self._check_skips(asked, after.skipped_tokens - before.skipped_tokens)
        self.cache.check_invariants()
        for user, (salt, row), config in zip(users, asked, configs, strict=True):
            options = {"max_new_tokens": config.max_new_tokens, "eos_token_id": [EOS]}
            options |= {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
            call = Call("generate_batch", [row], salt, options, form="masked", seed=1)
            [reference] = self._answers(call, self._plain(call))
            for _ in range(config.num_return_sequences):
                output = outputs.pop(0)
                answer = tuple(output.generated_tokens)
                is_whole = output.error is None  # else the sequence ran out of blocks
                if answer != (reference if is_whole else reference[: len(answer)]):
                    raise WrongAnswerError(f"answered {answer}, not {reference}")
                self._seen.setdefault(salt, []).append(row + answer)
            user.took(row, answer)
            self.counts["calls judged"] += 1

    def _reset(self) -> None:
        self.log.append("reset")
        self.cache.reset()
        self._seen.clear()
        if self.cache.stats().cached_slots or self.cache.stats().requests:
            raise WrongAnswerError("something is left after a reset")

    def _check_that_all_can_be_allocated(self) -> None:
        """Check at the end that all blocks and slots can be allocated."""
        self.cache.check_invariants()
        store, stats = self.cache._store, self.cache.stats()
        num_blocks, num_slots = store.kv_blocks.pool_size - 1, store.slots.max_slots
        have = (
            stats.free_blocks + stats.cached_blocks + stats.used_blocks,
            stats.free_slots + stats.cached_slots + stats.reserved_slots,
        )
        if have != (num_blocks, num_slots):
            raise WrongAnswerError(f"{have} blocks and slots are left of {num_blocks, num_slots}")
        for name in ("evicted_blocks", "evicted_slots", "hits", "saved_states"):
            self.counts[name] += getattr(stats, name)
        blocks = store.kv_blocks.allocate_memory_blocks(num_blocks)
        slots = store.slots.reserve_slots(blocks[:num_slots])
        if len(set(blocks)) != num_blocks or None in slots or len(set(slots)) != len(slots):
            raise WrongAnswerError(f"could have {len(blocks)} blocks and {slots} slots")
        store.slots.cancel_reserved(slots)
        store.kv_blocks.release_memory_blocks(blocks)
        self.cache.check_invariants()


@dataclass
class _User:
    """A user who talks to the model."""

    salt: Any  # salt of all prompts
    system: Tokens  # beginning of the conversations
    history: Tokens = ()
    prompts: list[Tokens] = field(default_factory=list)
    turns: list[Tokens] = field(default_factory=list)  # conversation after each prompt and answer

    def took(self, prompt: Tokens, answer: Tokens) -> None:
        self.history = prompt + answer
        self.prompts.append(prompt)
        self.turns += [prompt, self.history]


_models: dict[str, Any] = {}
_bytes: dict[tuple[str, int], tuple[float, float]] = {}


def family_of(subject: str) -> str:
    return subject.partition(", ")[0]


def _is_clamping(subject: str) -> bool:
    return subject != family_of(subject) in CLAMPING


def _model(subject: str) -> Any:
    if subject not in _models:
        model = make_model(family_of(subject)).double().requires_grad_(False)
        model.set_experts_implementation("eager")  # the default does not support float64
        for parameter in model.parameters():
            if subject != family_of(subject) and parameter.dim() > 1:
                parameter.mul_(LARGE)
        _models[subject] = model
    return _models[subject]


def _cache(model: Any, subject: str, *, slots: int, blocks: int, **settings: Any) -> Any:
    """A cache with exactly these numbers of slots and blocks; their sizes are measured once."""
    size = settings["block_size_tokens"]
    if (subject, size) not in _bytes:
        measured = make_cache(model, block_size_tokens=size, segment_tokens=size)
        zero, one = (budgets(measured, slots=n, blocks=n) for n in (0, 1))
        _bytes[subject, size] = tuple(one[name] - zero[name] for name in sorted(one))
    of_blocks, of_slots = _bytes[subject, size]
    room = {
        "mamba_cache_gb": (slots + 0.5) * of_slots,
        "kv_cache_gb": (blocks + 0.5) * of_blocks,
    }
    return make_cache(model, **room, **settings)


def _shared(one: Tokens, other: Tokens) -> int:
    """The length of the common prefix of two sequences."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _described(settings: dict[str, Any]) -> dict[str, Any]:
    plain = (int, str, type(None))
    return {name: x if isinstance(x, plain) else type(x).__name__ for name, x in settings.items()}
