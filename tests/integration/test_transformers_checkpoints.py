"""States at positions that callers and chat templates name, saved at their first prompt."""

import numpy as np
import pytest
import torch
from chats import CHATML, OPENING, STRIPPING, make_tokenizer
from transformers_rig import (
    BLOCK,
    GREEDY,
    VOCABULARY,
    assert_same,
    cached,
    join,
    make_cache,
    make_model,
    plain,
    skipped,
    text,
)

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers import message_ends
from mamba_cache.integrations.transformers.checkpoints import chat_checkpoints

SYSTEM = 3 * BLOCK + 5
BOUNDARY = 3 * BLOCK


@pytest.fixture(params=["nemotron_h", "zaya"], scope="module")
def model(request):
    """A model whose states are captured inside a forward, and one whose prompts are cut in two."""
    return make_model(request.param)


@pytest.fixture
def cache(model):
    return make_cache(model, segment_tokens=16 * BLOCK)


def served(cache, ids, **options):
    """Return the number of skipped prompt tokens, and the answer."""
    runs = []
    hit = skipped(cache, lambda: runs.append(cached(cache, ids, **options)))
    return hit, runs[0]


@pytest.fixture
def users(generator):
    """Prompts with a system prompt in common."""
    system = text(generator, SYSTEM)
    return [join(system, text(generator, length)) for length in (9, 12, 20)]


SOME = [SYSTEM, BLOCK]


@pytest.mark.parametrize(
    ("named", "hits"),
    [
        (None, (0, 0, BOUNDARY)),  # the third user finds the branch of the second
        ([], (0, 0, BOUNDARY)),
        ([[]], (0, 0, BOUNDARY)),
        *(
            (as_given(SOME), (0, BOUNDARY, BOUNDARY))
            for as_given in (list, tuple, set, np.array, torch.tensor)
        ),
    ],
    ids=str,
)
def test_the_second_user_goes_on_from_a_named_position(model, cache, users, named, hits):
    for user, hit in zip(users, hits, strict=True):
        found, output = served(cache, user, checkpoints=named)
        assert found == hit
        assert_same(plain(model, user), output)


def test_the_state_at_a_named_end_of_the_prompt_is_kept_once(cache, users):
    whole = users[0][:, : 4 * BLOCK]
    cached(cache, whole, max_new_tokens=1, checkpoints=[4 * BLOCK])
    assert cache.stats().saved_states == 2  # and the boundary that the same prompt goes on from
    longer = users[0]
    assert served(cache, longer)[0] == 4 * BLOCK


@pytest.mark.parametrize("way", ["prefill", "batch", "in segments"])
def test_other_ways_to_compute_a_prompt_take_them_too(model, users, way):
    cache = make_cache(model, segment_tokens=(2 if way == "in segments" else 16) * BLOCK)
    if way == "prefill":
        cache.prefill(users[0], checkpoints=SOME)
    elif way == "batch":
        cache.generate_batch(users[0].tolist(), checkpoints=SOME, max_new_tokens=1)
    else:
        assert_same(plain(model, users[0]), cached(cache, users[0], checkpoints=SOME))
    hit, output = served(cache, users[1])
    # A batch cuts no prompt, so it keeps only states captured inside a forward.
    assert hit == (0 if way == "batch" and cache._capture is None else BOUNDARY)
    assert_same(plain(model, users[1]), output)


SAMPLED = {"num_return_sequences": 2, "do_sample": True, "output_logits": False}
BEAMS = {"num_beams": 2, "output_logits": False}
OWN = [(20, [BLOCK]), (29, [3 * BLOCK, 2 * BLOCK]), (24, [])]
TWO = [(4 * BLOCK, [BLOCK]), (4 * BLOCK, [2 * BLOCK])]


@pytest.mark.parametrize(
    ("rows", "options"), [(OWN, {}), (TWO, SAMPLED), (TWO, BEAMS)], ids=["own", "sampled", "beams"]
)
def test_rows_may_have_positions_of_their_own(cache, generator, rows, options):
    prompts = [text(generator, length)[0].tolist() for length, _ in rows]
    named = [positions for _, positions in rows]
    cache.generate(prompts, checkpoints=named, **{**GREEDY, **options})
    cache.check_invariants()
    for row, positions in zip(prompts, named, strict=True):
        longest = max(positions, default=0)
        # The prompts must differ here: an equal token by chance would be one more to reuse.
        parts = torch.tensor([[*row[: longest + 3], 3 + (row[longest + 3] + 1) % (VOCABULARY - 3)]])
        assert served(cache, join(parts, text(generator, 8)))[0] == longest


@pytest.mark.parametrize(
    "named", [[[BLOCK, 2 * BLOCK + 1, BLOCK]], [[BLOCK], [2 * BLOCK]]], ids=["one row", "two equal"]
)
def test_what_rows_of_one_prompt_name_is_joined(cache, generator, named):
    row = text(generator, 4 * BLOCK)[0].tolist()
    cache.generate([row] * len(named), checkpoints=named, **GREEDY)
    for shared in (BLOCK, 2 * BLOCK):
        other = join(torch.tensor([row[:shared]]), text(generator, 9))
        assert served(cache, other)[0] == shared


def test_positions_for_all_rows_count_their_own_tokens(model, cache, generator):
    """Padding is no part of a prompt."""
    system = text(generator, SYSTEM)[0].tolist()
    rows = [[*system, 5, 6, 7], system + [8] * 12]
    expected = [plain(model, torch.tensor([row])).sequences[0, len(row) :] for row in rows]
    output = cache.generate(rows, checkpoints=[SYSTEM], **GREEDY)
    for answer, alone in zip(output.sequences, expected, strict=True):
        assert torch.equal(answer[-len(alone) :], alone)
    other = torch.tensor([system + [9] * 5])
    assert served(cache, other)[0] == BOUNDARY


def test_padding_that_generate_finds_by_itself_is_no_part_of_a_prompt(cache, users, generator):
    """Positions then count the tokens without padding; positions past them are ignored."""
    padded = join(torch.zeros(1, 6, dtype=torch.long), users[0])
    cache.generate(padded, checkpoints=[SYSTEM, padded.shape[1]], **GREEDY)
    cache.check_invariants()
    assert served(cache, users[1])[0] == BOUNDARY


# Where the messages of a chat end.

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a slot?"},
    {"role": "assistant", "content": "Room for a state."},
    {"role": "user", "content": "And a block?"},
]


def ends_as_text(template, messages, **options):
    """The prompt up to the end of each message."""
    tokenizer = make_tokenizer(template)
    ends = message_ends(tokenizer, messages, **options)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert all(0 < end <= len(ids) for end in ends)
    return [tokenizer.decode(ids[:end]) for end in ends]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_each_message_ends_where_the_next_begins(add_generation_prompt):
    found = ends_as_text(CHATML, MESSAGES, add_generation_prompt=add_generation_prompt)
    parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES]
    assert found == ["".join(parts[: n + 1]) for n in range(4)]


def test_options_reach_the_template_but_those_that_choose_what_is_returned():
    [first, *_] = ends_as_text(CHATML, MESSAGES, greeting="Hello.")
    assert first.startswith("Hello.<|im_start|>system")
    tokenizer = make_tokenizer(CHATML)
    options = {"tokenize": True, "return_tensors": "pt", "return_dict": True}
    expected = message_ends(tokenizer, MESSAGES)
    assert message_ends(tokenizer, MESSAGES, **options) == expected


PARTS = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
PROMPTING = {"add_generation_prompt": True}
COUNTING = "{{ messages|length }} messages\n"
THOUGHT = [*MESSAGES[:2], {**MESSAGES[2], "content": "<think>Room? Yes.</think>Room for a state."}]
IN_PARTS = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
"""Contents of parts, as multimodal chats have them."""

TEMPLATES = {
    "refuses a lone system message": (
        "{% if messages|length == 1 and messages[0].role == 'system' %}"
        "{{ raise_exception('No user query found.') }}{% endif %}" + CHATML,
        MESSAGES, (1, 2, 3),
    ),
    # A suffix after the last message only is no part of the message.
    "closes the chat": (
        CHATML.replace("{% if add", "{% if not add_generation_prompt %}END{% endif %}{% if add"),
        MESSAGES, (0, 1, 2, 3),
    ),
    "has contents of parts": (PARTS, IN_PARTS, (0, 1, 2, 3)),
    # The last message is shown with its thought, earlier messages without.
    "strips what was thought before": (STRIPPING, [*THOUGHT, MESSAGES[3]], (0, 1, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ends_of_a_template_are_those_of_its_messages(name):
    template, messages, found = TEMPLATES[name]
    ends, whole = ends_as_text(template, messages, **PROMPTING), ends_as_text(CHATML, MESSAGES)
    assert ends == [whole[number] for number in found]


def test_a_template_that_shows_the_first_message_otherwise_in_a_longer_chat():
    for template, messages in ((CHATML, MESSAGES), (PARTS, IN_PARTS)):
        [only] = ends_as_text(COUNTING + template, messages)
        assert only.endswith("And a block?<|im_end|>\n")


def test_a_template_that_leaves_a_message_out():
    without_system = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")
    assert ends_as_text(without_system, MESSAGES) == ends_as_text(CHATML, MESSAGES[1:])


def test_tokens_that_reach_into_the_next_message_are_left_out():
    """A message ends inside a token of the prompt."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(template, merges=[("b", "c")])
    messages = [{"role": "user", "content": content} for content in ("aab", "caa", "b")]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert len(ids) == 6  # a a bc a a b
    assert message_ends(tokenizer, messages) == [2, 5, 6]


def test_a_tokenizer_without_chats_is_refused():
    with pytest.raises(InvalidArgumentError, match="apply_chat_template, got object"):
        message_ends(object(), MESSAGES)


def test_a_chat_is_found_again_by_where_its_messages_end(generator):
    model, tokenizer = make_model("granite 4", vocab_size=300), make_tokenizer(CHATML)
    cache = make_cache(model)
    for number, question in enumerate(("What is a slot?", "Why?")):
        chat = [MESSAGES[0], {"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_dict": False}
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", **options)
        ends = message_ends(tokenizer, chat, add_generation_prompt=True)
        hit = served(cache, ids, checkpoints=ends)[0]
        assert hit == (ends[0] // BLOCK * BLOCK if number else 0)


# Positions at which other prompts diverge from a chat's, as a server passes them.


def parts_as_text(template, messages, **options):
    """Return the prompt up to each position, and the prompt, as text."""
    tokenizer = make_tokenizer(template)
    options = {"add_generation_prompt": True, **options}
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    found = chat_checkpoints(tokenizer, messages, ids, **options)
    return [tokenizer.decode(ids[:position]) for position in found], tokenizer.decode(ids)


SYSTEM_PART = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


CALLED = [
    *MESSAGES[:2],
    {"role": "assistant", "content": "<think>Look.</think>"},
    {"role": "tool", "content": "A slot is ..."},
]
REFUSING = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('No system.') }}{% endif %}"
    "{% if messages|length > 4 %}{{ raise_exception('Too long.') }}{% endif %}" + OPENING
)
PARTINGS = {
    # The next turn begins with the whole prompt; the prompt's end is kept anyway.
    "where the first words begin": (CHATML, MESSAGES[:2], None),
    "in a longer chat": (CHATML, MESSAGES, None),
    "where later turns are stripped": (STRIPPING, MESSAGES, None),
    "before what the next turn shows otherwise": (OPENING, MESSAGES[:2], "<think>\n"),
    "before it, in a longer chat": (OPENING, MESSAGES, "<think>\n"),
    # The next turn strips a thought of this prompt: they diverge at the answer that had it.
    "at a thought that is shown until the next question": (
        OPENING.replace("not loop.last", "not messages[-1].role == 'tool'"), CALLED,
        "<think>Look",
    ),
    "where a template refuses the longer conversation": (REFUSING, MESSAGES, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTINGS)
def test_chats_part(name):
    template, messages, otherwise = PARTINGS[name]
    parts, prompt = parts_as_text(template, messages)
    assert parts == [SYSTEM_PART, *([prompt[: prompt.rindex(otherwise)]] if otherwise else [])]


def test_a_chat_of_the_system_message_alone_is_one_part():
    assert parts_as_text(OPENING, MESSAGES[:1])[0] == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_what_is_before_the_first_words_depends_on_the_options():
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "ask")]
    [part], _ = parts_as_text(CHATML, MESSAGES[1:], tools=tools)
    assert part.endswith("ask\n<|im_start|>user\n")


def test_a_position_within_a_token_is_before_it():
    """The prompts diverge inside a token of the prompt."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if not loop.last %}b{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}bcde{% endif %}"
    )
    tokenizer = make_tokenizer(template, merges=[("b", "c")])
    messages = [{"role": "user", "content": "xyz"}]
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert len(ids) == 6  # x y z bc d e
    assert chat_checkpoints(tokenizer, messages, ids) == [3]


def test_nothing_is_named_of_what_is_no_chat():
    tokenizer = make_tokenizer(CHATML)
    assert chat_checkpoints(tokenizer, [], [1, 2, 3]) == []
    assert chat_checkpoints(object(), MESSAGES, [1, 2, 3]) == []
    assert chat_checkpoints(tokenizer, MESSAGES, []) == []
    assert chat_checkpoints(tokenizer, MESSAGES, [1, 2, 3]) == []  # not of these messages
