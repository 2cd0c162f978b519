"""Classifiers of texts, words and pictures as Tasks."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_models import save_model, write_lines

import shoal
from shoal.errors import ConfigError
from shoal.libs.hf.tasks import ImageClassification, SequenceClassification, TokenClassification
from shoal.registry import Registry
from shoal.train.initial_weights import load_initial_weights

REVIEWS = [{"text": "good film", "label": "good"}, {"text": "bad", "label": "bad"}] * 4
LABELS = ["bad", "good"]
SHORT = {"stop": {"steps": 12}, "evaluate": {"every_steps": 12}, "batch_size": 6, "say": None}


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_texts_are_classified_by_a_new_head_on_a_body_of_the_folder(kind: str, tmp_path: Path) -> None:
    auto = "AutoModelForCausalLM" if kind == "llama" else "AutoModelForMaskedLM"
    model = save_model(tmp_path / "model", kind, auto)
    data = write_lines(tmp_path / "reviews.jsonl", REVIEWS)
    args = {"model": str(tmp_path / "model"), "data": data, "labels": LABELS}
    network = SequenceClassification(**args).model()
    load_initial_weights(network, SequenceClassification(**args).initial_weights())
    body = {name: each for name, each in model.state_dict().items() if "embed" in name and name in network.state_dict()}
    assert body
    assert all(torch.equal(network.state_dict()[name], each) for name, each in body.items())
    if kind == "bert":
        return
    task = shoal.hf.sequence_classification(validation=0.25, **args)
    result = shoal.fit(task, optimizer={"learning_rate": 3e-2}, **SHORT)
    assert result.metrics["accuracy"] == 1.0
    assert Registry().get("sequenceclassification").manifest.signature.outputs[0].shape == [-1, 2]


def test_adapters_leave_the_head_to_be_trained(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    task = SequenceClassification(model=str(tmp_path / "model"), labels=LABELS, lora={"rank": 2})
    names = [name for name, each in task.model().named_parameters() if each.requires_grad]
    assert "score.weight" in names
    assert all("lora_" in name for name in names if name != "score.weight")


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("modules", [None, "all-linear"])
def test_what_is_registered_of_adapters_is_what_was_trained(merge: bool, modules: str | None, tmp_path: Path) -> None:
    """Also a head, and a pooler, that the folder does not have."""
    save_model(tmp_path / "model", "bert", "AutoModelForMaskedLM")
    data = write_lines(tmp_path / "reviews.jsonl", REVIEWS)
    lora = {"rank": 2} if modules is None else {"rank": 2, "modules": modules}
    args = {"model": str(tmp_path / "model"), "data": data, "labels": LABELS, "lora": lora, "merge": merge}
    result = shoal.fit(SequenceClassification(**args), stop={"steps": 1}, batch_size=2, say=None, seed=1)
    assert result.weights is not None
    trained = SequenceClassification(**args).model().eval()
    load_initial_weights(trained, str(result.weights))
    found = Registry().get("sequenceclassification")
    served = found.manifest.model.build().eval()
    load_initial_weights(served, found.ref)
    tokens = torch.randint(2, 259, (2, 5))
    with torch.no_grad():
        expected, given = (each(tokens, torch.ones_like(tokens)) for each in (trained, served))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)


def test_words_are_classified_at_their_first_token(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "bert", "AutoModelForMaskedLM")
    data = write_lines(
        tmp_path / "words.jsonl", [{"tokens": ["Rome", "is", "old"], "labels": ["place", "none", 0]}] * 2
    )
    task = shoal.hf.token_classification(str(tmp_path / "model"), data=data, labels=["none", "place"])
    assert isinstance(task, TokenClassification)
    labels = task.data().train.batch([0])["labels"][0].tolist()
    assert [each for each in labels if each >= 0] == [1, 0, 0]
    assert [index for index, each in enumerate(labels) if each >= 0] == [0, 4, 6]
    shoal.fit(task, stop={"steps": 1}, batch_size=2, say=None)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for label, level in (("dark", 20), ("light", 220)):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for index in range(4):
            values = np.full((12, 12, 3), level + index, np.uint8)
            Image.fromarray(values).save(tmp_path / "pictures" / label / f"{index}.png")
    return tmp_path / "pictures"


def save_vision(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(folder)


def test_pictures_are_classified(pictures: Path, tmp_path: Path) -> None:
    save_vision(tmp_path / "model")
    args = {"data": str(pictures), "validation": 0.25, "labels": ["dark", "light"]}
    task = shoal.hf.image_classification(str(tmp_path / "model"), **args)
    result = shoal.fit(task, optimizer={"learning_rate": 3e-2}, **SHORT)
    assert result.metrics["accuracy"] == 1.0
    found = Registry().get("imageclassification").manifest
    assert found.signature.inputs[0].shape == [-1, 3, 8, 8]
    with pytest.raises(ConfigError, match="the folder has dark, light"):
        ImageClassification(model=str(tmp_path / "model"), data=str(pictures)).data()


def test_pictures_go_through_the_processor_of_the_folder(pictures: Path, tmp_path: Path) -> None:
    save_vision(tmp_path / "model")
    made = transformers.ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.2] * 3, image_std=[0.5] * 3)
    made.save_pretrained(tmp_path / "model")
    task = ImageClassification(model=str(tmp_path / "model"), data=str(pictures), labels=["dark", "light"])
    first = task.data().train.batch(np.array([0]))[0]
    assert torch.allclose(first, torch.full((1, 3, 8, 8), (20 / 255 - 0.2) / 0.5), atol=1e-5)


@pytest.mark.parametrize("label", ["fair", 2, -1, None])
def test_a_label_out_of_range_is_named(label: object, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "bert", "AutoModelForMaskedLM")
    data = write_lines(tmp_path / "reviews.jsonl", [*REVIEWS, {"text": "so so", "label": label}])
    task = SequenceClassification(model=str(tmp_path / "model"), data=data, labels=LABELS)
    with pytest.raises(ConfigError, match=r"reviews.jsonl:9.*none of the model's 2: bad, good"):
        task.data()
