"""Files of samples: what is read of them, what is learnt of it, and which of them are refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tiny_models import CHAT, save_model, write_lines
from tokenizers import processors

from shoal.errors import ConfigError, DataError
from shoal.libs.hf.source import load_tokenizer
from shoal.libs.hf.tasks import CausalLM, SequenceClassification, TokenClassification
from shoal.libs.hf.texts import Record, TextSpec, encode_language, find_label, read_records

YES = {"role": "assistant", "content": "yes"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


def read_values(path: Path, content: str) -> list[tuple[str, Any]]:
    path.write_bytes(content.encode())
    return [(each.where.rpartition(":")[2], each.values) for each in read_records(path)]


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    text = "a\u2028b\x85c"
    line = json.dumps({"text": text}, ensure_ascii=False)
    assert read_values(tmp_path / "a.jsonl", f"\ufeff{line}\r\n\n{line}") == [
        ("1", {"text": text}),
        ("3", {"text": text}),
    ]
    assert read_values(tmp_path / "a.txt", f"{text}\r\nd\n") == [("1", {"text": text}), ("2", {"text": "d"})]


def test_a_file_may_be_one_array(tmp_path: Path) -> None:
    expected = [("1", {"text": "a"}), ("2", {"text": "b"})]
    assert read_values(tmp_path / "a.json", json.dumps([each for _, each in expected], indent=2)) == expected
    assert read_values(tmp_path / "b.json", '{"text": "a"}\n{"text": "b"}\n') == expected


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", '{"text": "a"}\n{"text"\n'), ("a.json", "[1,\n}]")])
def test_a_line_that_is_no_json_is_named(name: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{name}:2.*is no JSON.*give"):
        read_values(tmp_path / name, content)


def test_texts_of_csv_may_look_like_numbers(tmp_path: Path) -> None:
    found = read_values(tmp_path / "a.csv", '\ufefftext,label,size\n12,true,1\nNA,01,2\n"a\nb",,3\n')
    rows = [("12", "true", 1), ("NA", "01", 2), ("a\nb", None, 3)]
    names = ("text", "label", "size")
    assert found == [(str(number), dict(zip(names, row, strict=True))) for number, row in enumerate(rows, 1)]


def test_classes_of_csv_are_names_or_numbers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n1,1\n2,bad\n")
    task = SequenceClassification(model=str(folder), data=str(tmp_path / "a.csv"), labels=["bad", "good"])
    assert task.data().train.batch([0, 1])["labels"].tolist() == [1, 0]


@pytest.mark.parametrize("kind", [CausalLM, SequenceClassification])
def test_a_text_that_is_null_is_named(kind: type[Any], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nno,0\n,1\n")
    with pytest.raises(DataError, match=r"a.csv:2.*text is null"):
        kind(model=str(folder), data=str(tmp_path / "a.csv")).data()
    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet:2.*text is null"):
        CausalLM(model=str(folder), data=str(tmp_path / "a.parquet")).data()


def test_lists_are_columns_of_parquet(tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "labels": [0, 1], "messages": [YES]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [each.values for each in read_records(tmp_path / "a.parquet")] == rows


@pytest.mark.parametrize("labels", [[False, True], [1, 2], ["a"], ["a", "a"], [], "ab", 1, 0, True])
def test_labels_are_two_names_or_more(labels: Any) -> None:
    with pytest.raises(ConfigError, match=r"labels = .*(quote them: \['no','yes'\]|give)"):
        SequenceClassification(labels=labels)


def test_numbers_are_names_before_they_are_indices() -> None:
    record = Record("a:1", {})
    assert find_label(record, 1, {"1": 0, "2": 1}) == 0
    assert find_label(record, "2", {"1": 0, "2": 1}) == 1
    assert find_label(record, 1, {"bad": 0, "good": 1}) == 1
    for label, names in ((0, {"1": 0, "2": 1}), (True, {"bad": 0, "good": 1}), (2, {"bad": 0, "good": 1})):
        with pytest.raises(DataError, match="is none of the model's 2"):
            find_label(record, label, names)


def test_the_model_pads_as_the_tokenizer_does(tmp_path: Path) -> None:
    save_model(tmp_path / "model", pad_token_id=7)
    task = SequenceClassification(model=str(tmp_path / "model"), labels=2)
    assert task.config["pad_token_id"] == 0
    registered = SequenceClassification(config={"model_type": "llama", "pad_token_id": 7}, labels=2)
    assert registered.config["pad_token_id"] == 7


def test_an_end_that_the_tokenizer_adds_is_learnt(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    records = [Record("a:1", {"prompt": "a", "completion": "b"}), Record("a:2", {"text": "ab"})]
    expected = encode_language(records, TextSpec(tokenizer, 64, False))
    end = ("<end>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[end])
    for one, other in zip(encode_language(records, TextSpec(tokenizer, 64, False)), expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.labels.tolist() == other.labels.tolist()  # type: ignore[union-attr]
        assert end[1] in one.labels.tolist()  # type: ignore[union-attr]


SYSTEM = "{% if messages[0]['role'] != 'system' %}<system>be kind\n{% endif %}"


@pytest.mark.parametrize("template", [CHAT, SYSTEM + CHAT])
def test_a_chat_may_begin_with_the_assistant(template: str, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    records = [Record("a:1", {"messages": [YES, {"role": "user", "content": "hi"}, YES]})]
    (sample,) = encode_language(records, TextSpec(tokenizer, 64, False))
    assert tokenizer.decode([each for each in sample.labels if each >= 0]) == "yes\nyes\n"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "messages", [["yes"], [{"role": "user"}], [{"content": "a"}], [YES, {**YES, "content": None}], []]
)
def test_a_message_has_a_role_and_a_content(messages: list[Any], folder: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": messages}])
    with pytest.raises(DataError, match=r"a.jsonl:2.*(message \d has not a role|has no messages)"):
        CausalLM(model=str(folder), data=data).data()


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"tokens": ["a", 3], "labels": [0, 1]}, "has 3 among its tokens"),
        ({"tokens": ["", ""], "labels": [0, 1]}, "has no"),
    ],
)
def test_words_are_strings(sample: dict[str, Any], problem: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "bert", "AutoModelForMaskedLM")
    data = write_lines(tmp_path / "a.jsonl", [{"tokens": ["a"], "labels": [0]}, sample])
    with pytest.raises(DataError, match=rf"a.jsonl:2.*{problem}"):
        TokenClassification(model=str(tmp_path / "model"), data=data).data()


def test_a_sample_with_nothing_to_learn_is_named(folder: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"prompt": "a" * 20, "completion": "b"}])
    with pytest.raises(DataError, match=r"a.jsonl:2.*nothing to learn in its first 8 tokens"):
        CausalLM(model=str(folder), data=data, max_length=8, truncate=True).data()


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", vocab_size=64)
    data = write_lines(tmp_path / "a.jsonl", [{"text": "!"}, {"text": "~"}])
    with pytest.raises(DataError, match=r"a.jsonl:2.*has token \d+, and the model's vocab_size is 64"):
        CausalLM(model=str(tmp_path / "model"), data=data).data()


@pytest.mark.parametrize(("kind", "limit"), [("llama", None), ("gpt2", 16), ("bert", 16), ("roberta", 14), ("opt", 16)])
def test_rows_are_no_longer_than_learnt_positions(kind: str, limit: int | None, tmp_path: Path) -> None:
    more: dict[str, Any] = {"n_positions": 16} if kind == "gpt2" else {"max_position_embeddings": 16}
    more |= {"opt": {"word_embed_proj_dim": 16, "ffn_dim": 32}, "roberta": {"pad_token_id": 1}}.get(kind, {})
    save_model(tmp_path / "model", kind, "AutoModelForSequenceClassification", **more)
    fits = write_lines(tmp_path / "fits.jsonl", [{"text": "a" * (limit or 20), "label": 0}])
    task = SequenceClassification(model=str(tmp_path / "model"), data=fits, labels=2)
    if kind == "roberta":  # with its own token that pads
        load_tokenizer(task.folder).pad_token = "<end>"
    task.data()
    longer = write_lines(tmp_path / "longer.jsonl", [{"text": "a" * ((limit or 20) + 1), "label": 0}])
    task = SequenceClassification(model=str(tmp_path / "model"), data=longer, labels=2)
    if limit is None:
        task.data()
        return
    with pytest.raises(ConfigError, match=f"max_length = 512.*have {limit + 1} tokens.*give max_length={limit}"):
        task.data()
