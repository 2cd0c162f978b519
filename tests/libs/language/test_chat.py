"""Texts without an endpoint, by its client, in the terminal and of a table's rows: all read one stream of events."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from click.testing import _NamedTextIOWrapper
from tests.libs.language.tiny_served import CHATML, Models, make_tokenizer, serve_tiny
from tiny_language import continue_greedily

import shoal.runs
from refusals import refused
from registered import arrays_of, register
from shoal.cli.commands.runs import list_views
from shoal.cli.display.first_request import suggest_text_commands
from shoal.errors import ConfigError, ConnectionLost, InferenceError
from shoal.extend.serve import ModelOptions, RegisteredModel
from shoal.home import home
from shoal.libs.batch_predict import flow
from shoal.libs.batch_predict.output import count_rows, has_rows
from shoal.libs.batch_predict.table_predictor import TextPredictor
from shoal.libs.language.command import Conversation
from shoal.models.decoder import Decoder
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot
from typed import said, typed

SIZES = {"num_tokens": 259, "context": 512, "width": 32, "depth": 1, "heads": 2}
TENSORS = {
    "inputs": [TensorSignature(name="ids", datatype="INT64", shape=[-1, -1])],
    "outputs": [TensorSignature(name="logits", datatype="FP32", shape=[-1, -1, 259])],
}


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    """Registered as `tiny`, with a chat template."""
    torch.manual_seed(0)
    made = Decoder(**SIZES).eval()  # type: ignore[arg-type]
    make_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    weights = WeightSnapshot.of(1, arrays_of(made))
    factory = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs=SIZES)
    files = {each.name: each.read_bytes() for each in (tmp_path / "tokenizer").iterdir()}
    Registry().register("tiny", weights, model=factory, signature=Signature(**TENSORS), files=files)
    Registry().register("wordless", weights, model=factory, signature=Signature(**TENSORS))
    return made


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(scope="module")
def url(models: Models) -> Iterator[str]:
    with serve_tiny(models) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_version_writes_here_what_decoding_without_a_cache_gives(decoder: Decoder) -> None:
    model = shoal.load("tiny")
    tokenizer = make_tokenizer(CHATML)
    prompt = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    chat = model.chat("hi", temperature=0, max_tokens=6)
    other = model.generate("Once", temperature=0, max_tokens=6)
    parts = [part for pair in zip(chat, other, strict=False) for part in pair]  # by turns
    assert len(parts) > 2
    assert chat.read().text == tokenizer.decode(continue_greedily(decoder, prompt, 6))
    assert other.read().text == tokenizer.decode(continue_greedily(decoder, tokenizer.encode("Once"), 6))
    assert (chat.finish, chat.spans, chat.num_prompt_tokens, chat.num_new_tokens) == ("length", ((1, 6),), 21, 6)
    again = [model.chat("hi", seed=1, max_tokens=9).read().text, model.chat("hi", seed=1, max_tokens=9).read().text]
    rest = model.chat("hi", seed=1, max_tokens=9, given=[[1, [*make_tokenizer(None).encode(again[0])[:4]]]]).read()
    assert (rest.spans, again[0][4:]) == (((1, 9),), rest.text)
    assert again[0] == again[1] != model.chat("hi", seed=2, max_tokens=9).read().text


def test_a_closed_text_is_cancelled_and_an_interrupted_step_ends_those_in_progress(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shoal.load("tiny")
    text = model.chat("hi", temperature=0)  # which ends by itself after more than six tokens
    text.close()
    model.chat("hi", max_tokens=1).read()
    assert model._texts._engine.observe().running == 0
    first, second = (model.chat("hi", temperature=0) for _ in range(2))
    engine = model._texts._engine

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.read()
    with pytest.raises(InferenceError, match="interruption"):
        second.read()
    assert model.chat("hi", max_tokens=3, temperature=0).read().num_new_tokens == 3


def test_what_writes_no_text_and_wrong_fields_are_refused_with_a_remedy(decoder: Decoder) -> None:
    register("linear")
    with pytest.raises(ConfigError, match=r"linear@1.*no language model.*shoal predict"):
        shoal.load("linear").chat("hi")
    with pytest.raises(ConfigError, match=r"wordless@1.*no tokenizer"):
        shoal.load("wordless").generate("hi")
    with pytest.raises(InferenceError, match="max_tokens") as wrong:
        shoal.load("tiny").chat("hi", max_token=3)
    assert (wrong.value.status, wrong.value.field) == (400, "max_token")
    with pytest.raises(ConfigError, match="once for each"):
        shoal.load("tiny").chat("hi", n=2)
    for prompt in (["a"], ["a", "b"], None, 3, b"a"):
        with pytest.raises(ConfigError, match=r"prompt.*is no text"):
            shoal.load("tiny").generate(prompt)  # type: ignore[arg-type]


def test_the_client_streams_with_spans_and_ends_with_the_error(models: Models, url: str) -> None:
    with shoal.Client(url) as client:
        assert [client.has_chat(each) for each in ("tiny", "bare")] == [True, False]
        models.tiny.switch_at = models.tiny.engine.observe().new_tokens + 4
        text = client.chat("tiny", [{"role": "user", "content": "hi"}], max_tokens=30, seed=1)
        parts = list(text)
        assert "".join(parts) == text.text
        assert len(parts) > 5
        assert [version for version, _ in text.spans] == [3, 4]
        assert sum(num for _, num in text.spans) == text.num_new_tokens == 30
        assert client.generate("bare", "Once").read().num_new_tokens == 16
        tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}}
        called = client.chat("tiny", "hi", tools=[tool], tool_choice="required", max_tokens=400).read()
        assert (called.finish, called.tool_calls[0]["function"]["name"]) == ("tool_calls", "now")
        for model, status in (("none", 404), ("bare", 400), ("tiny@9", 404)):
            with pytest.raises(InferenceError) as caught:
                client.chat(model, "hi")
            assert (caught.value.status, caught.value.field) == (status, "model")
        models.tiny.switch_at = models.tiny.engine.observe().new_tokens + 4
        with refused(409, "refuse"):
            client.chat("tiny", "hi", swap="refuse", max_tokens=60, seed=1).read()
        client.chat("tiny", "hi", max_tokens=300).close()
        client.chat("tiny", "hi", max_tokens=1).read()  # its place is free again
        client.close()
    cut = shoal.client.StreamedText(chunk for chunk in [b'data: {"choices": [{"delta": {"content": "a"}}]}\n\nda'])
    with pytest.raises(ConnectionLost, match="before the text did"):
        cut.read()
    assert cut.text == "a"


class Told:
    """Answers a conversation with prepared texts; an exception is raised in the middle."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self._answers = iter(answers)

    def __call__(self, messages: list[dict[str, str]]) -> shoal.client.StreamedText:
        self.asked.append(list(messages))
        return shoal.client.StreamedText(self._write(next(self._answers)))

    def _write(self, answer: str | BaseException) -> Any:
        content = {"delta": {"content": answer if isinstance(answer, str) else "begun "}}
        yield b"data: " + json.dumps({"choices": [content]}).encode() + b"\n\n"
        if isinstance(answer, BaseException):
            raise answer
        yield b'data: {"choices": [{"finish_reason": "stop", "shoal": {"spans": [[3, 5], [4, 2]]}}]}\n\n'
        yield b"data: [DONE]\n\n"


def test_a_conversation_has_commands_and_survives_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = Told("one", KeyboardInterrupt(), InferenceError(503, "away"), "two")
    talk = Conversation(ask)

    def say(text: str) -> str:
        assert talk.take(text)
        return "".join(capsys.readouterr())

    assert "no answer" in say("/version")
    assert "is empty" in say(f"/save {tmp_path / 'none'}")
    assert say("/system be short") == "system: be short\n"
    assert say("hi") == "one\n"
    assert say("/version") == "version 3 wrote 5 tokens, version 4 wrote 2 tokens\n"
    assert say("more") == "begun \ncancelled\n"
    assert "away" in say("and?")
    assert say("last") == "two\n"
    roles = [each["role"] for each in ask.asked[-1]]
    assert roles == ["system", *["user", "assistant"] * 3, "user"]
    saved = tmp_path / "talk.jsonl"
    assert "8 messages" in say(f"/save {saved}")
    assert json.loads(saved.read_text())["messages"] == [*ask.asked[-1], {"role": "assistant", "content": "two"}]
    assert "is a directory" in say(f"/save {tmp_path}").lower()
    assert "'/system'" in say("/sytem")
    assert "needs a FILE" in say("/save")
    assert "no system prompt" in say("/system")
    assert talk._list_messages()[0]["role"] == "user"
    assert "/save FILE" in say("/help")
    say("/reset")
    assert talk._messages == []
    assert not talk.take("/quit")


def test_a_run_names_the_commands_for_its_language_model(decoder: Decoder) -> None:
    with shoal.runs.create("finetune", "", "one"):
        pass
    tiny = Registry().get("tiny@1")
    about, files = tiny.manifest, {"tokenizer_config.json": tiny.fetch_file("tokenizer_config.json").read_bytes()}
    more: dict[str, Any] = {"files": files, "lineage": {"base": tiny.ref}}
    Registry().register("poet", tiny.snapshot(), model=about.model, signature=about.signature, **more)
    refs = ["wordless@1", "removed@1", "tiny@1", "poet@1"]
    commands = list_views(shoal.runs.load("one"), refs)
    shown = [f"shoal models show {each}" for each in refs]
    beside = "shoal serve deploy tiny@1 endpoint.model.text.adapters='[poet]'"
    own = [f"shoal {verb} {each}" for each in ("tiny@1", "poet@1") for verb in ("serve deploy", "chat")]
    assert commands == [*shown, "shoal up", "shoal serve deploy wordless@1", *own, beside, "shoal console --open"]


def test_a_text_in_a_pipe_is_answered_once(
    decoder: Decoder, models: Models, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "chat tiny --max-tokens 5 --temperature 0"
    done = typed(words, stdin="hi\n", is_caught=False)
    assert done.stdout == shoal.load("tiny").chat("hi", max_tokens=5, temperature=0).read().text + "\n"
    served = said(words, "--endpoint", url, stdin="hi")
    with shoal.Client(url) as client:
        assert served == client.chat("tiny", "hi", max_tokens=5, temperature=0).read().text + "\n"
    assert [*models.tiny.requests][-2].sampling.temperature == 0
    with pytest.raises(ConfigError, match=r"no chat template.*--text"):
        said("chat bare --endpoint", url, stdin="hi")
    with pytest.raises(InferenceError, match="there is no model 'tiny:poet'"):  # an adapter's name is the endpoint's
        said("chat tiny:poet --endpoint", url, stdin="hi")
    with pytest.raises(ConfigError, match="has no text"):
        said(words, stdin=" \n")
    assert "loading" not in done.stderr
    with monkeypatch.context() as patched:
        patched.setattr(_NamedTextIOWrapper, "isatty", lambda _: True)
        shown = typed(words, stdin="hi\n/quit\n", is_caught=False)
    assert "loading tiny@1" in shown.stderr
    assert done.stdout in shown.stdout


@pytest.mark.parametrize(("name", "verb"), [("tiny", "chat"), ("bare", "predict")])
def test_what_is_suggested_for_a_model_that_writes_is_answered(name: str, verb: str, url: str) -> None:
    (home() / "token").write_text("t")
    with shoal.Client(url) as client:
        ask, curl = suggest_text_commands(name, url, url, client.has_chat(name))
    ended = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(ended.stdout)["usage"]["completion_tokens"] > 0
    _, *words = shlex.split(ask)
    assert words[0] == verb
    words += ["--max-tokens", "5"] * (verb == "chat")
    said(shlex.join(words), stdin="hi")


def test_predict_answers_texts_of_words_and_files(url: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('a line\n\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "three"}]}\n')

    def predict(model: str, *words: str) -> str:
        return said("predict", model, "--endpoint", url, *words)

    given = ["--text", "one", "--text", f"@{file}", "--with", "max_tokens=4", "--with", "temperature=0"]
    rows = json.loads(predict("tiny", *given, "--output", "json"))
    assert [(row["finish"], sum(num for _, num in row["spans"])) for row in rows] == [("length", 4)] * 4
    with shoal.Client(url) as client:
        assert rows[3]["text"] == client.chat("tiny", "three", max_tokens=4, temperature=0).read().text
        continued = client.generate("bare", "Once", max_tokens=4, temperature=0).read().text
    [row] = json.loads(
        predict("bare", "--text", "Once", "--with", "max_tokens=4", "--with", "temperature=0", "--output", "json")
    )
    assert row["text"] == continued
    assert "length" in predict("tiny", "--text", "one", "--with", "max_tokens=4")
    with pytest.raises(InferenceError, match=r"text 0: max_token"):
        predict("tiny", "--text", "one", "--with", "max_token=4")
    for wrong in ('{"promt": 1}', "{"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="text"):
            predict("tiny", "--text", f"@{file}")


def test_an_adapter_is_asked_of_an_endpoint(models: Models, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.tiny, "name", "tiny:poet")
    for words in (["chat"], ["predict", "--text", "hi"]):
        for version in ("", "@3"):
            asked = [*words, f"tiny:poet{version}", "--endpoint", url]
            asked += ["--max-tokens", "5"] if words == ["chat"] else ["--with", "max_tokens=5"]
            said("", *asked, stdin="hi")
            assert models.tiny.calls[-1].version == (3 if version else None)
    with pytest.raises(ConfigError, match="is not a model reference"):
        said("predict tiny@3:poet --text hi --endpoint", url)
    with pytest.raises(ConfigError, match=r"adapter.*beside its base.*`shoal chat ADAPTER`"):
        said("chat tiny:poet", stdin="hi")


def test_batch_prediction_answers_a_column_of_texts_or_messages(decoder: Decoder) -> None:
    source = RegisteredModel("tiny", str(Registry().location))
    predictor = TextPredictor(source, 1, ModelOptions(), {"max_tokens": 6, "temperature": 0}, 1)
    texts = [f"number {row}" for row in range(40)]
    answers = predictor(pa.chunked_array([texts]), False)
    assert answers.column_names == ["answer", "finish_reason", "new_tokens", "model_version"]
    alone = shoal.load("tiny").chat(texts[39], max_tokens=6, temperature=0).read()
    assert answers.to_pylist()[39] == {
        "answer": alone.text,
        "finish_reason": "length",
        "new_tokens": 6,
        "model_version": 1,
    }
    messages = pa.chunked_array([[[{"role": "user", "content": texts[39]}], None, [{"role": "judge", "content": ""}]]])
    first, second, third = predictor(messages, True).to_pylist()
    assert (first["answer"], first["error"]) == (alone.text, None)
    assert "messages" in second["error"]
    assert "judge" in third["error"]
    with pytest.raises(InferenceError, match="--skip-errors"):
        predictor(messages, False)


def test_a_batch_prediction_of_texts_is_checked_before_it_begins(decoder: Decoder, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"id": 1, "question": "a"}\n\n{"id": 2, "question": "b"}\n')
    given = {"model": "tiny", "input": str(lines), "output": str(tmp_path / "out"), "text": "question"}
    flow.check(flow.BatchPredictSpec.parse(given))
    assert (has_rows([lines]), count_rows([lines])) == (True, 2)
    for fields, problem in (
        ({"text": "questions"}, "it has id, question"),
        ({"text": ""}, "--text COLUMN"),
        ({"generate": {"max_token": 3}}, "max_tokens"),
        ({"generate": {"n": 2}}, "once for each"),
        ({"model": "wordless"}, "has no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=problem):
            flow.check(flow.BatchPredictSpec.parse(given | fields))
    lines.write_text('{"question": ')
    with pytest.raises(ConfigError, match=r"sound \.jsonl"):
        flow.check(flow.BatchPredictSpec.parse(given))
