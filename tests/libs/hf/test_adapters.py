"""Adapters as folders: written as peft writes them, read as it does, and begun with; the logits are equal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_models import save_model, write_lines

import shoal
from shoal.cluster.job_main import job_main
from shoal.errors import ConfigError, SpecMismatch
from shoal.libs.hf.finetune import make_spec, translate
from shoal.libs.hf.kinds import KINDS
from shoal.libs.hf.tasks import CausalLM
from shoal.libs.hf.transfer import push
from shoal.registry import Registry
from shoal.train.initial_weights import load_initial_weights
from typed import said, typed

# peft 0.21 asks transformers by a name that 5.x deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TOKENS = torch.arange(10).reshape(2, 5)
LORAS = {
    "alpha": {"rank": 4, "alpha": 3.0},
    "rslora": {"rank": 4, "alpha": 5.0, "rslora": True},
    "patterns": {
        **{"rank": 2, "modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 4}},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 6.0},
    },
}


def compute(network: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        found = network.eval()(TOKENS, torch.ones_like(TOKENS))
    return np.asarray(getattr(found, "logits", found))


def save_by_peft(folder: Path, base: Path, auto: str = "AutoModelForCausalLM", **config: Any) -> np.ndarray:
    """Write adapters that change much, with peft alone; returns the logits."""
    torch.manual_seed(2)
    network = getattr(transformers, auto).from_pretrained(base, local_files_only=True)
    adapted = peft.get_peft_model(network, peft.LoraConfig(init_lora_weights=False, **config))
    adapted.save_pretrained(folder)
    return compute(adapted)


def load_by_peft(folder: Path, base: Path, auto: str = "AutoModelForCausalLM") -> np.ndarray:
    network = getattr(transformers, auto).from_pretrained(base, local_files_only=True)
    return compute(peft.PeftModel.from_pretrained(network, folder))


def build(ref: str) -> np.ndarray:
    network = Registry().get(ref).manifest.model.build()
    load_initial_weights(network, ref)
    return compute(network)


@pytest.mark.parametrize("name", LORAS)
def test_what_peft_wrote_is_registered_and_written_back_with_equal_logits(name: str, tmp_path: Path) -> None:
    lora = LORAS[name]
    plain = compute(save_model(tmp_path / "base"))
    given = {"r": lora["rank"], "lora_alpha": lora.get("alpha", 8), "use_rslora": lora.get("rslora", False)}
    given |= {"target_modules": lora.get("modules"), "task_type": "CAUSAL_LM"}
    given |= {each: lora.get(each, {}) for each in ("rank_pattern", "alpha_pattern")}
    expected = save_by_peft(tmp_path / "theirs", tmp_path / "base", **given)
    assert np.abs(expected - plain).max() > 0.01
    shown = said("models pull", str(tmp_path / "theirs"), "--name", "tuned")
    assert "shoal serve deploy base-base@1 endpoint.model.text.adapters='[tuned]'" in shown
    version = Registry().get("tuned@champion")
    assert Registry().get(version.manifest.lineage["base"]).name == "base-base"
    np.testing.assert_allclose(build(version.ref), expected, atol=1e-6)
    said("models push tuned@1", str(tmp_path / "ours"), "--adapter")
    assert {each.name for each in (tmp_path / "ours").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    np.testing.assert_array_equal(load_by_peft(tmp_path / "ours", tmp_path / "base"), expected)
    ours, theirs = (json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("ours", "theirs"))
    assert {**ours, "target_modules": None} == {**theirs, "target_modules": None, "init_lora_weights": True}
    assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])


def test_a_registered_base_is_referred_to_and_not_stored_again(tmp_path: Path) -> None:
    save_model(tmp_path / "base")
    expected = save_by_peft(tmp_path / "theirs", tmp_path / "base", target_modules=["q_proj"], task_type="CAUSAL_LM")
    said("models pull", str(tmp_path / "base"), "--name", "plain")
    data = write_lines(tmp_path / "texts.jsonl", [{"text": "a cat"}, {"text": "a dog"}])
    shoal.fit(CausalLM(model="plain@1", data=data), say=None, name="further", optimizer={"learning_rate": 0.1})
    for base in ("plain@1", "further@1"):
        shown = said("models pull", str(tmp_path / "theirs"), "--name", "tuned", "--base", base)
        assert f"shoal serve deploy {base} endpoint.model.text.adapters='[tuned]'" in shown
        assert Registry().get("tuned").manifest.lineage["base"] == base
    assert {each.name for each in Registry().list()} == {"further", "plain", "tuned"}
    np.testing.assert_allclose(build("tuned@1"), expected, atol=1e-6)
    assert np.abs(build("tuned@2") - expected).max() > 0.01
    for version, source in (("tuned@1", str(tmp_path / "base")), ("tuned@2", "further@1")):
        push(Registry().get(version), tmp_path / version, adapter=True)
        written = json.loads((tmp_path / version / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == source


def test_a_classifier_takes_its_head_along(tmp_path: Path) -> None:
    kind = ("bert", "AutoModelForSequenceClassification")
    save_model(tmp_path / "base", *kind)
    made = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    expected = save_by_peft(tmp_path / "theirs", tmp_path / "base", kind[1], **made)
    said("models pull", str(tmp_path / "theirs"), "--name", "judge", "--base", str(tmp_path / "base"))
    assert Registry().get("judge").manifest.model.kwargs["task"] == KINDS["sequence_classification"]
    np.testing.assert_allclose(build("judge"), expected, atol=1e-6)
    push(Registry().get("judge"), tmp_path / "ours", adapter=True)
    np.testing.assert_allclose(load_by_peft(tmp_path / "ours", tmp_path / "base", kind[1]), expected, atol=1e-6)


def test_a_run_begins_with_adapters_scaled_as_they_were(tmp_path: Path) -> None:
    save_model(tmp_path / "base")
    expected = save_by_peft(tmp_path / "theirs", tmp_path / "base", r=4, lora_alpha=2, target_modules=["q_proj"])
    for words in ([f"model={tmp_path / 'theirs'}"], [f"model={tmp_path / 'base'}", f"init={tmp_path / 'theirs'}"]):
        overrides = translate([*words, "data=texts.jsonl"])
        spec = make_spec(overrides).override(overrides)  # as a job applies them
        assert (spec.args["model"], spec.init) == (str(tmp_path / "base"), str(tmp_path / "theirs"))
        network = CausalLM(**spec.args).model()
        load_initial_weights(network, spec.init)
        np.testing.assert_allclose(compute(network), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="are both what the adapters begin with"):
        translate([f"model={tmp_path / 'theirs'}", "init=tuned@1"])
    with pytest.raises(ConfigError, match="holds adapters without their base"):
        CausalLM(model=str(tmp_path / "theirs")).model()
    said("models pull", str(tmp_path / "theirs"), "--name", "tuned")
    spec = make_spec(translate([f"model={tmp_path / 'base'}", "init=tuned@1", "data=texts.jsonl"]))
    assert (spec.args["lora"]["alpha"], spec.args["lora"]["modules"]) == (2.0, ["q_proj"])
    others = {"rank": 4, "alpha": 8.0, "modules": ["q_proj"]}
    for lora, problem in (
        (others, "scales model.layers.0"),
        ({**others, "modules": ["v_proj"]}, "adapts other layers"),
    ):
        network = CausalLM(model=str(tmp_path / "base"), lora=lora).model()
        with pytest.raises(SpecMismatch, match=problem):
            load_initial_weights(network, str(tmp_path / "theirs"))
    with pytest.raises(ConfigError, match="the network has none"):
        load_initial_weights(CausalLM(model=str(tmp_path / "base")).model(), str(tmp_path / "theirs"))


def test_what_would_compute_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "base")
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file({}, folder / "adapter_model.safetensors")
    asked = ["models", "pull", str(folder), "--name", "tuned"]
    values = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    for field, value in (("use_dora", True), ("peft_type", "LOHA"), ("bias", "all"), ("init_lora_weights", "pissa")):
        (folder / "adapter_config.json").write_text(json.dumps({**values, field: value}))
        error = typed("", *asked).exception
        assert isinstance(error, ConfigError)
        assert (error.field, error.value) == (field, value)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    monkeypatch.setattr("sys.argv", ["finetune.py", f"model={folder}"])
    with pytest.raises(SystemExit):
        job_main(make_spec, lambda spec, job: None, "train", translate=translate)
    assert "are adapters that name no base" in capsys.readouterr().err
    said("models pull", str(tmp_path / "base"), "--name", "base")
    with pytest.raises(ConfigError, match="has no adapters"):
        push(Registry().get("base"), tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
