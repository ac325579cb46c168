"""Adapters with the names that vision-language models had before transformers 4.52, against updates added by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_models
import torch
import transformers
from engines import needs
from faults import adapters as faults
from loaded_models import logits
from models import save_adapter, save_llama
from peft import PeftModel
from safetensors.torch import load_file, save_file

from safe_loading import (
    AdapterError,
    ArgumentError,
    Workload,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    predict_memory,
    verify_merge,
)
from safe_loading.__main__ import main

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.10")]

RANK, ALPHA = 2, 5
FAMILIES = {
    "Qwen2VLForConditionalGeneration": "model",
    "Qwen2_5_VLForConditionalGeneration": "model",
    "LlavaForConditionalGeneration": "language_model.model",
    "PaliGemmaForConditionalGeneration": "language_model.model",
    "MllamaForConditionalGeneration": "language_model.model",
    "Gemma3ForConditionalGeneration": "language_model.model",
}
Tensors = dict[str, torch.Tensor]


def save_base(folder: Path, name: str) -> Path:
    """A tiny model of a class whose files have the names of transformers 4.51."""
    tiny_models.saved(name, folder / "new")
    tensors = {}
    for path in sorted((folder / "new").glob("*.safetensors")):
        for key, value in load_file(path).items():
            tensors[re.sub(r"^vision_tower\.", "vision_tower.vision_model.", key)] = value
    base = folder / "base"
    base.mkdir()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text((folder / "new" / "config.json").read_text())
    return base


def factors(weights: Tensors, select: Callable[[str], bool], rank: Callable[[str], int]) -> Tensors:
    torch.manual_seed(1)
    made = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if weight.dim() == 2 and name.endswith(".weight") and select(path):
            made[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank(path), weight.shape[1]) / 8
            made[f"base_model.model.{path}.lora_B.weight"] = torch.randn(weight.shape[0], rank(path)) / 8
    return made


def save_old_adapter(
    folder: Path, base: Path, config: dict[str, Any], select: Callable[[str], bool], first: str = ""
) -> tuple[Path, Tensors]:
    """An adapter of the modules that `select` takes, by their names on disk, and the base with what it adds.

    The module `first` has a rank and an alpha of its own.
    """
    weights = load_file(base / "model.safetensors")
    tensors = factors(weights, select, lambda path: 3 if path == first else RANK)
    truth = dict(weights)
    for key in [key for key in tensors if ".lora_A." in key]:
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        scaling = 7 / 3 if path == first else ALPHA / RANK
        delta = tensors[key.replace(".lora_A.", ".lora_B.")].double() @ tensors[key].double()
        truth[f"{path}.weight"] = (weights[f"{path}.weight"].double() + scaling * delta).float()
    auto_class = transformers.AutoModelForImageTextToText
    plain = save_adapter(folder / "plain", base, target_modules=["o_proj"], r=RANK, auto_class=auto_class)

    def replace(old: faults.Tensors) -> None:
        old.clear()
        old.update(tensors)

    changes = {"r": RANK, "lora_alpha": ALPHA, "peft_version": "0.14.0", **config}
    return faults.edited(plain, folder / "adapter", tensors=replace, config=lambda c: c.update(changes)), truth


def weights_in(folder: Path) -> Tensors:
    found = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    return {re.sub(r"^vision_tower\.vision_model\.", "vision_tower.", name): value for name, value in found.items()}


def assert_adds(folder: Path, base: Path, truth: Tensors) -> None:
    found, before = weights_in(folder), weights_in(base)
    truth = {re.sub(r"^vision_tower\.vision_model\.", "vision_tower.", name): value for name, value in truth.items()}
    assert found.keys() == truth.keys()
    assert any(not torch.equal(value, before[name]) for name, value in truth.items())
    off = {name: float((found[name] - value).abs().max()) for name, value in truth.items()}
    assert {name: error for name, error in off.items() if error > 1e-6} == {}


def assert_right(tmp_path: Path, base: Path, adapter: Path, truth: Tensors) -> None:
    """Load, later load, and both merges."""
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert_adds(tmp_path / "merged", base, truth)
    assert verify_merge(base, adapter, tmp_path / "merged").ok
    model = load_peft_on_rank(adapter, base)
    load_adapter_on_rank(model, adapter, "later")
    merge_lora_inplace(model, adapter_names=["later"]).save_pretrained(tmp_path / "later")
    assert_adds(tmp_path / "later", base, truth)
    merge_lora_inplace(load_peft_on_rank(adapter, base)).save_pretrained(tmp_path / "in memory")
    assert_adds(tmp_path / "in memory", base, truth)


def is_target(path: str) -> bool:
    return path.rpartition(".")[2] in ("q_proj", "v_proj", "qkv")


@pytest.mark.parametrize("name", FAMILIES)
def test_old_names_are_placed_by_the_table_of_the_layout(tmp_path: Path, name: str) -> None:
    base = save_base(tmp_path, name)
    config = {"target_modules": ["q_proj", "v_proj", "qkv"]}
    adapter, truth = save_old_adapter(tmp_path, base, config, is_target)
    assert_right(tmp_path, base, adapter, truth)


@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_and_full_names_speak_of_the_old_names(tmp_path: Path, name: str) -> None:
    base, text = save_base(tmp_path, name), FAMILIES[name].replace(".", r"\.")
    pattern = rf"{text}\.layers\.\d+\.(self_attn|cross_attn)\.(q_proj|v_proj)"
    first = next(
        path
        for key in load_file(base / "model.safetensors")
        if re.fullmatch(pattern, path := key.removesuffix(".weight"))
    )
    config = {"target_modules": pattern, "rank_pattern": {first: 3}, "alpha_pattern": {f"^{first}": 7}}
    adapter, truth = save_old_adapter(
        tmp_path, base, config, lambda path: re.fullmatch(pattern, path) is not None, first
    )
    assert_right(tmp_path, base, adapter, truth)
    listed = sorted(
        {
            key.removeprefix("base_model.model.").split(".lora_")[0]
            for key in load_file(adapter / "adapter_model.safetensors")
        }
    )
    full = faults.edited(adapter, tmp_path / "full", config=lambda c: c.update(target_modules=listed))
    merge_lora_checkpoint(base, full, tmp_path / "merged too")
    assert_adds(tmp_path / "merged too", base, truth)
    held = sum(tensor.nbytes for tensor in load_file(adapter / "adapter_model.safetensors").values())
    for folder in (adapter, full):
        assert predict_memory(base, Workload.generate(1, 4, adapter=folder)).components["adapters"] == held
    (full / "adapter_model.safetensors").rename(full / "not here")
    assert predict_memory(base, Workload.generate(1, 4, adapter=full)).components["adapters"] == held
    (full / "not here").rename(full / "adapter_model.safetensors")
    model = load_peft_on_rank(full, base)
    load_adapter_on_rank(model, adapter, "default", hotswap=True)
    merge_lora_inplace(model).save_pretrained(tmp_path / "again")
    assert_adds(tmp_path / "again", base, truth)


@pytest.mark.parametrize("kind", ["listed", "by a pattern"])
def test_a_config_may_have_the_new_names_where_the_tensors_have_the_old(tmp_path: Path, kind: str) -> None:
    """Exporters rename the one and leave the other (NVIDIA-NeMo/Automodel#3672)."""
    base = save_base(tmp_path, "Qwen2VLForConditionalGeneration")
    new = [f"model.language_model.layers.{number}.self_attn.q_proj" for number in (0, 1)]
    targets = new if kind == "listed" else r"model\.language_model\.layers\.\d+\.self_attn\.q_proj"
    old = [name.replace("language_model.", "") for name in new]
    adapter, truth = save_old_adapter(tmp_path, base, {"target_modules": targets}, old.__contains__)
    assert_right(tmp_path, base, adapter, truth)


ONE = {"layers.1.attention.q_proj": 2}


def _of_peft(name: str, **fields: Any) -> Any:
    """A config whose class an older peft may lack."""
    return getattr(peft, name)(**fields)


OTHER_METHODS: dict[str, Any] = {
    "LOHA": peft.LoHaConfig(
        r=RANK, alpha=ALPHA, target_modules=["q_proj", "v_proj"], alpha_pattern={"layers.1.attention.q_proj": 7}
    ),
    "IA3": peft.IA3Config(target_modules=["q_proj", "fc2"], feedforward_modules=["fc2"]),
    "OFT": peft.OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]),
    "FOURIERFT": peft.FourierFTConfig(
        n_frequency=8,
        target_modules=["q_proj", "v_proj"],
        n_frequency_pattern={"layers.1.attention.q_proj": 5, "v_proj": 6},
        init_weights=True,
    ),
    "WAVEFT": partial(_of_peft, "WaveFTConfig", n_frequency=8, target_modules=["q_proj"], n_frequency_pattern=ONE),
    "C3A": partial(_of_peft, "C3AConfig", block_size=4, target_modules=["q_proj"], block_size_pattern=ONE),
    "DELORA": partial(_of_peft, "DeloraConfig", r=RANK, target_modules=["q_proj"], lambda_pattern=ONE),
    "ADALORA": peft.AdaLoraConfig(init_r=4, target_r=RANK, total_step=9, target_modules=["q_proj"]),
}


@needs("transformers", "5.23")  # where the layers of ViT have the names of Llama's
@pytest.mark.parametrize("method", OTHER_METHODS)
def test_adapters_of_other_methods_are_placed_too(tmp_path: Path, method: str) -> None:
    kind: Any = transformers.ViTForImageClassification
    config = OTHER_METHODS[method]
    tiny_models.saved("ViTForImageClassification", tmp_path / "base")
    torch.manual_seed(0)
    model = peft.get_peft_model(kind.from_pretrained(tmp_path / "base"), config() if callable(config) else config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if method == "ADALORA":
        kept = [True, False, True, True]
        path = "vit.layers.0.attention.q_proj.lora_E"
        model.peft_config["default"].rank_pattern = {path: kept, path.replace(".0.", ".1."): kept[::-1]}
        model.base_model.resize_modules_by_rank_pattern(model.peft_config["default"].rank_pattern, "default")
    model.save_pretrained(str(tmp_path / "new"))
    truth = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), str(tmp_path / "new"))
    old = faults.edited(tmp_path / "new", tmp_path / "old", tensors=_with_old_names, config=_names_old_modules)
    later = load_peft_on_rank(tmp_path / "base", {"first": tmp_path / "new"})
    load_adapter_on_rank(later, old, "default")
    later.set_adapter("default")
    pixels = torch.randn(1, 3, 32, 32)
    expected = truth.eval()(pixel_values=pixels).logits
    for found in (
        load_peft_on_rank(tmp_path / "base", old),
        load_peft_on_rank(kind.from_pretrained(tmp_path / "base"), old),
        later,
    ):
        assert torch.equal(found.eval()(pixel_values=pixels).logits, expected)


def _old_name(name: str) -> str:
    for new, old in {
        "vit.layers.": "vit.encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.v_proj": "attention.attention.value",
        "mlp.fc2": "output.dense",
    }.items():
        name = name.replace(new, old)
    return name


def _with_old_names(tensors: Tensors) -> None:
    renamed = {_old_name(name): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def _names_old_modules(config: dict[str, Any]) -> None:
    last = {"q_proj": "query", "v_proj": "value", "fc2": "output.dense"}
    for field in ("target_modules", "feedforward_modules"):
        if field in config:
            config[field] = [last[name] for name in config[field]]
    for field in [name for name in config if name.endswith("_pattern") and isinstance(config[name], dict)]:
        config[field] = {
            last.get(name, _old_name(name).replace("layers.1.", "layer.1.")): value
            for name, value in config[field].items()
        }


def test_the_same_without_the_table_is_a_key_mapping(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    def rename(tensors: faults.Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("base_model.model.model.layers", "base_model.model.decoder.blocks")] = tensors.pop(key)

    renamed, mapping = faults.edited(tiny_adapter, tmp_path / "renamed", tensors=rename), r"^decoder\.blocks"
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "plain")
    with pytest.raises(AdapterError, match="decoder"):
        merge_lora_checkpoint(tiny_llama, renamed, tmp_path / "merged")
    merge_lora_checkpoint(tiny_llama, renamed, tmp_path / "merged", key_mapping={mapping: "model.layers"})
    options = ["--key-mapping", mapping, "model.layers"]
    assert main(["merge", str(tiny_llama), str(renamed), str(tmp_path / "by command"), *options]) == 0
    assert main(["verify", str(tiny_llama), str(renamed), str(tmp_path / "merged"), *options]) == 0
    plain = weights_in(tmp_path / "plain")
    for folder in ("merged", "by command"):
        assert all(torch.equal(value, plain[name]) for name, value in weights_in(tmp_path / folder).items())


@pytest.mark.parametrize("mapping", [["^visual"], {"(": "model"}, {"^visual": None}])
def test_a_key_mapping_that_is_none_is_refused(tiny_llama: Path, tiny_adapter: Path, mapping: Any) -> None:
    with pytest.raises(ArgumentError, match=r"pass a mapping of regular|Correct it, or leave it out"):
        load_peft_on_rank(tiny_adapter, tiny_llama, key_mapping=mapping)
    load_peft_on_rank(tiny_adapter, tiny_llama, key_mapping={"^visual": "model"})


def test_an_old_name_beside_the_new_one_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path, "LlavaForConditionalGeneration")
    adapter, _ = save_old_adapter(tmp_path, base, {"target_modules": ["q_proj", "v_proj"]}, is_target)

    def twice(tensors: faults.Tensors) -> None:
        old = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight"
        tensors[old.replace("language_model.model.", "model.language_model.")] = tensors[old].clone()

    with pytest.raises(AdapterError, match="both mean"):
        load_peft_on_rank(faults.edited(adapter, tmp_path / "twice", tensors=twice), base)


def test_a_layer_that_an_old_pattern_names_and_the_file_lacks_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path, "LlavaForConditionalGeneration")
    pattern = r"language_model\.model\.layers\.\d+\.self_attn\.q_proj"
    adapter, _ = save_old_adapter(
        tmp_path, base, {"target_modules": pattern}, lambda path: re.fullmatch(pattern, path) is not None
    )
    cut = faults.edited(adapter, tmp_path / "cut", tensors=faults.without("layers.1."))
    with pytest.raises(AdapterError, match=r"adapter-key-missing"):
        load_peft_on_rank(cut, base)


def test_the_class_is_the_one_that_has_the_adapters_modules(tmp_path: Path) -> None:
    base = save_base(tmp_path, "MllamaForConditionalGeneration")
    config = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    adapter, _ = save_old_adapter(tmp_path, base, config, is_target)
    model = load_peft_on_rank(adapter, base)
    assert type(model.get_base_model()).__name__ == "MllamaForConditionalGeneration"
    assert "base-class-chosen" in {finding.code for finding in model.load_report.findings}
    report = merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert "base-class-chosen" in {finding.code for finding in report.findings}
    text = save_adapter(tmp_path / "text", base, target_modules=["q_proj"])  # of MllamaForCausalLM
    model = load_peft_on_rank(text, base)
    assert type(model.get_base_model()).__name__ == "MllamaForCausalLM"
    assert "base-class-chosen" not in {finding.code for finding in model.load_report.findings}
    mapping = {"base_model_class": "MllamaForConditionalGeneration", "parent_library": "transformers.models.mllama"}
    mapped = faults.edited(adapter, tmp_path / "mapped", config=lambda c: c.update(auto_mapping=mapping))
    model = load_peft_on_rank(mapped, base)
    assert type(model.get_base_model()).__name__ == "MllamaForConditionalGeneration"
    assert "base-class-chosen" not in {finding.code for finding in model.load_report.findings}


def test_the_error_names_the_key_mapping_with_which_all_fits(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    def rename(tensors: faults.Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("model.model.layers", "model.decoder.layers")] = tensors.pop(key)

    renamed = faults.edited(tiny_adapter, tmp_path / "renamed", tensors=rename)
    with pytest.raises(AdapterError, match=re.escape(r"pass key_mapping={'^decoder\\.': 'model.'}, with which all")):
        load_peft_on_rank(renamed, tiny_llama)
    model = load_peft_on_rank(renamed, tiny_llama, key_mapping={"^decoder\\.": "model."})
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_adapter, tiny_llama)))
    unlike = save_llama(tmp_path / "unlike", hidden_size=64)
    for auto_class in (None, "AutoModelForCausalLM", "LlamaModel"):  # there is none with which it fits
        with pytest.raises(AdapterError) as refused:
            load_peft_on_rank(renamed, unlike, auto_class=auto_class)
        assert "key_mapping" not in str(refused.value)
        assert "leave it out" not in str(refused.value)


def test_the_error_names_the_key_mapping_beside_a_tower_with_layers_of_the_same_names(tmp_path: Path) -> None:
    """As of an adapter of Gemma3ForCausalLM on the base with images (vllm#34186): both parts have a q_proj."""
    tiny_models.saved("Gemma3ForConditionalGeneration", tmp_path / "base")
    text, auto_class = r".*language_model.*\.(q_proj|v_proj)", transformers.AutoModelForImageTextToText
    own = save_adapter(tmp_path / "own", tmp_path / "base", target_modules=text, auto_class=auto_class)

    def as_of_the_text_model(tensors: faults.Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("model.language_model.", "model.")] = tensors.pop(key)

    targets = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r"model\.vision_tower(\..*)?"}
    alone = faults.edited(
        own, tmp_path / "alone", tensors=as_of_the_text_model, config=lambda c: c.update(targets, auto_mapping=None)
    )
    advice = r"pass key_mapping={'^model\\.': 'model.language_model.'}, with which all"
    with pytest.raises(AdapterError, match=re.escape(advice)):
        load_peft_on_rank(tmp_path / "base", alone)
    model = load_peft_on_rank(tmp_path / "base", alone, key_mapping={"^model\\.": "model.language_model."})
    assert torch.equal(logits(model), logits(load_peft_on_rank(tmp_path / "base", own)))


def test_the_error_names_the_class_with_which_all_fits(tmp_path: Path) -> None:
    base = save_base(tmp_path, "MllamaForConditionalGeneration")
    adapter, _ = save_old_adapter(tmp_path, base, {"target_modules": ["q_proj", "v_proj"]}, is_target)
    with pytest.raises(AdapterError, match=r"leave it out, or pass MllamaForConditionalGeneration, which has the mod"):
        load_peft_on_rank(adapter, base, auto_class="AutoModelForCausalLM")
    load_peft_on_rank(adapter, base, auto_class="MllamaForConditionalGeneration")


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])  # without one, peft writes the class as auto_mapping
def test_of_two_classes_with_all_modules_the_one_that_names_them_so_is_taken(tmp_path: Path, task: str | None) -> None:
    base = tmp_path / "base"
    tiny_models.saved("Qwen3_5ForConditionalGeneration", base)
    for kind in ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"):
        own = getattr(transformers, kind)
        adapter = save_adapter(tmp_path / kind, base, auto_class=own, target_modules=["q_proj"], task_type=task)
        model = load_peft_on_rank(adapter, base)
        assert type(model.get_base_model()).__name__ == kind
        merge_lora_checkpoint(base, adapter, tmp_path / f"merged {kind}")
        assert verify_merge(base, adapter, tmp_path / f"merged {kind}").ok


def test_the_class_of_the_text_model_may_be_asked_for_by_itself(tmp_path: Path) -> None:
    base, kind = tmp_path / "base", transformers.Qwen3_5ForCausalLM
    tiny_models.saved("Qwen3_5ForConditionalGeneration", base)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    model = load_peft_on_rank(base, adapter, auto_class=kind)
    plain = PeftModel.from_pretrained(kind.from_pretrained(base), adapter).eval()
    assert torch.equal(logits(model), logits(plain))
    assert type(meta_model(base, "Qwen3_5ForCausalLM")) is kind
    merge_lora_checkpoint(base, adapter, tmp_path / "merged", auto_class=kind)
    assert verify_merge(base, adapter, tmp_path / "merged", auto_class=kind).ok
    verbs: list[Callable[..., object]] = [load_peft_on_rank, partial(merge_lora_checkpoint, output=tmp_path / "other")]
    for verb in verbs:
        with pytest.raises(ArgumentError, match="auto_class=LlamaForCausalLM is for a LlamaConfig"):
            verb(base, adapter, auto_class=transformers.LlamaForCausalLM)


def advised_exclusion(refused: AdapterError) -> Any:
    advised = re.search(r'if it was trained without .*, write ("exclude_modules": ".*?") into', str(refused))
    assert advised is not None
    return json.loads(f"{{{advised[1]}}}")


@pytest.mark.parametrize("targets", [r".*(q_proj|v_proj|\bproj)", ["q_proj", "v_proj", "proj"]])
def test_a_part_that_old_names_lack_is_excluded_by_the_name_that_is_advised(tmp_path: Path, targets: Any) -> None:
    base = save_base(tmp_path, "Qwen2VLForConditionalGeneration")
    ends = ("q_proj", "v_proj", "proj")  # of matrices: the convolution of the patches is left out
    adapter, truth = save_old_adapter(
        tmp_path, base, {"target_modules": targets}, lambda path: path.rpartition(".")[2] in ends
    )
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(adapter, base)
    mended = faults.edited(adapter, tmp_path / "mended", config=lambda c: c.update(advised_exclusion(refused.value)))
    assert_right(tmp_path, base, mended, truth)


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_an_adapter_of_the_text_model_alone_is_loaded_once_the_other_part_is_excluded(
    name: str, tmp_path: Path
) -> None:
    tiny_models.saved(name, tmp_path / "base")
    base, text = tmp_path / "base", r".*language_model.*\.(q_proj|down_proj)"
    auto_class = transformers.AutoModelForImageTextToText
    own = save_adapter(tmp_path / "own", base, target_modules=text, auto_class=auto_class)

    def as_of_the_text_model(tensors: faults.Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("model.language_model.", "model.")] = tensors.pop(key)

    alone = faults.edited(
        own,
        tmp_path / "alone",
        tensors=as_of_the_text_model,
        config=lambda c: c.update(target_modules=["q_proj", "down_proj"]),
    )
    mapping = {r"^model\.layers": "model.language_model.layers"}
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(base, alone, key_mapping=mapping)
    mended = faults.edited(alone, tmp_path / "mended", config=lambda c: c.update(advised_exclusion(refused.value)))
    model = load_peft_on_rank(base, mended, key_mapping=mapping)
    assert torch.equal(logits(model), logits(load_peft_on_rank(base, own)))
