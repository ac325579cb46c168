"""Adapters of other writers than peft, each named by its writer with the one road, which is taken."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import adapters as faults
from loaded_models import logits
from models import save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointNotFound,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    verify_merge,
)


def rewritten(adapter: Path, folder: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(adapter, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_of_adapterhub_is_named(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    inner = {"mh_adapter": False, "output_adapter": True, "reduction_factor": 16}
    config = {"config": inner, "model_class": "BertAdapterModel", "model_name": "bert-base-uncased", "name": "a"}
    adapter = rewritten(tiny_adapter, tmp_path / "adapter", config)
    with pytest.raises(AdapterError, match=r"AdapterHub.*load it with the library adapters"):
        load_peft_on_rank(adapter, tiny_llama)
    (finding,) = check_checkpoint(adapter).findings
    assert "AdapterHub" in finding.message
    assert finding.fix.startswith("load it with the library adapters")  # to correct the config would not help


def test_an_adapter_of_ms_swift_is_named_and_its_lora_is_read(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """Its own tuners are told; its LoRA is peft's, without peft's prefix and the name of its method."""
    adapter = rewritten(tiny_adapter, tmp_path / "adapter", {"swift_type": "LONGLORA", "r": 4, "lora_alpha": 8})
    with pytest.raises(AdapterError, match=r"a LONGLORA of ms-swift.*load it with ms-swift"):
        load_peft_on_rank(adapter, tiny_llama)
    (finding,) = check_checkpoint(adapter).findings
    assert finding.fix.startswith("load it with ms-swift")
    peft_config = json.loads((tiny_adapter / "adapter_config.json").read_text())
    config = {name: peft_config[name] for name in ("r", "lora_alpha", "target_modules")}
    config |= {"swift_type": "LORA", "use_merged_linear": False, "enable_lora": None, "lora_dtype": None}
    wanted = load_file(tiny_adapter / faults.WEIGHTS)
    named = {key.removeprefix("base_model.model.").replace(".weight", ".default.weight"): wanted[key] for key in wanted}
    save_file(named, adapter / faults.WEIGHTS)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match='add "peft_type": "LORA", whose r and lora_alpha it has'):
        load_peft_on_rank(adapter, tiny_llama)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LORA"}))
    model = load_peft_on_rank(adapter, tiny_llama)
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_adapter, tiny_llama)))


def test_adapters_in_folders_of_one_that_holds_none_are_named(tmp_path: Path, tiny_adapter: Path) -> None:
    for name in ("first", "second"):
        shutil.copytree(tiny_adapter, tmp_path / "saved" / name)
    (found,) = check_checkpoint(tmp_path / "saved").findings
    assert found.code == "not-a-folder"
    assert "holds no checkpoint itself, but 2 adapters in folders inside it" in found.message
    first, second = (str(tmp_path / "saved" / name) for name in ("first", "second"))
    assert found.fix == f"pass {first!r}, or {second!r}."
    assert check_checkpoint(first).ok


def test_the_adapter_in_a_checkpoint_of_qlora_is_named(tmp_path: Path, tiny_adapter: Path) -> None:
    """Its scripts save it as a folder beside the states of the Trainer."""
    shutil.copytree(tiny_adapter, tmp_path / "checkpoint-10" / "adapter_model")
    torch.save({}, tmp_path / "checkpoint-10" / "training_args.bin")
    (found,) = check_checkpoint(tmp_path / "checkpoint-10").findings
    assert found.fix == f"pass {str(tmp_path / 'checkpoint-10' / 'adapter_model')!r}."


@pytest.mark.parametrize("name", ["model.unembed_tokens", "model.layers.0.mlp.experts.w1"])
def test_an_adapter_as_tinker_keeps_it_is_named(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, name: str
) -> None:
    """Its own names: the head is model.unembed_tokens, and experts are one, of three dimensions."""
    own = {f"base_model.model.{name}.lora_A.weight": torch.ones(1, 4, 32)}
    adapter = faults.edited(
        tiny_adapter,
        tmp_path / "adapter",
        tensors=lambda tensors: {**tensors, **own},
        config=lambda config: config.update(target_modules="all-linear"),
    )
    with pytest.raises(AdapterError, match=rf"names of modules that Tinker has, by .*{name}.* with build_lora_adapter"):
        load_peft_on_rank(adapter, tiny_llama)
    (found,) = check_checkpoint(adapter).findings
    assert "build_lora_adapter" in found.message
    edited = faults.edited(
        adapter, tmp_path / "edited", config=lambda config: config.update(target_modules=["lm_head"])
    )
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(edited, tiny_llama)
    assert "Tinker" not in str(refused.value)  # a key mapping may lead it to the modules of a config that names them


def test_a_lora_of_diffusers_is_named(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    (tmp_path / "lora").mkdir()
    shutil.copy(tiny_adapter / faults.WEIGHTS, tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    with pytest.raises(CheckpointNotFound, match="load it there, with load_lora_weights of the pipeline"):
        load_peft_on_rank(tmp_path / "lora", tiny_llama)
    assert "load_lora_weights" in check_checkpoint(tmp_path / "lora").findings[0].fix


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha",
        "unet.up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k.lora.up.weight",
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    ],
)
def test_a_lora_in_one_file_is_named_as_that_of_a_pipeline(tmp_path: Path, tiny_llama: Path, name: str) -> None:
    file = tmp_path / "my_style.safetensors"
    save_file({"other.weight": torch.ones(2), name: torch.ones(2, 2)}, file)
    for path in (tmp_path, file):
        with pytest.raises(CheckpointNotFound, match=rf"my_style.* LoRA for a pipeline .*by '{name}'; load it there"):
            load_peft_on_rank(path, tiny_llama)
    assert "load_lora_weights" in check_checkpoint(tmp_path).findings[0].fix
    save_file({"model.layers.0.mlp.lora_proj.weight": torch.ones(2, 2)}, file)  # a plain model
    with pytest.raises(CheckpointNotFound, match="pass its folder"):
        load_peft_on_rank(file, tiny_llama)


def test_names_of_kohya_beside_a_config_of_peft(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter")
    wanted = load_file(adapter / faults.WEIGHTS)
    named = {key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): each for key, each in wanted.items()}
    save_file(named, adapter / faults.WEIGHTS)
    mapping = {r"\.lora_down\.": ".lora_A.", r"\.lora_up\.": ".lora_B."}
    shown = re.escape(r"pass key_mapping={'\.lora_down\.': '.lora_A.', '\.lora_up\.': '.lora_B.'}")
    with pytest.raises(AdapterError, match=rf"names of kohya's scripts for what peft calls lora_A .*{shown}"):
        load_peft_on_rank(adapter, tiny_llama)
    model = load_peft_on_rank(adapter, tiny_llama, key_mapping=mapping)
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_adapter, tiny_llama)))
    flat = {f"lora_unet_{key.replace('.', '_', key.count('.') - 1)}": each for key, each in named.items()}
    save_file(flat, adapter / faults.WEIGHTS)
    said = "is a LoRA for a pipeline of diffusers or ComfyUI, by 'lora_unet_.*Load it there, with load_lora_weights"
    with pytest.raises(AdapterError, match=said):
        load_peft_on_rank(adapter, tiny_llama)
    (found,) = check_checkpoint(adapter).findings
    assert "load_lora_weights" in found.message


def test_a_base_that_names_its_class_without_a_list_is_that_base(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """As transformers takes it, which loads such a folder by the type of its model."""
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    document = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**document, "architectures": document["architectures"][0]}))
    assert check_checkpoint(base).ok
    assert type(meta_model(base)).__name__ == "LlamaForCausalLM"
    model = load_peft_on_rank(tiny_adapter, base)
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_adapter, tiny_llama)))
    merge_lora_checkpoint(base, tiny_adapter, tmp_path / "merged")
    assert verify_merge(tiny_llama, tiny_adapter, tmp_path / "merged").ok
    assert verify_merge(base, tiny_adapter, tmp_path / "merged").ok


class Net(torch.nn.Module):
    """A model of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.to_q(x)
        return answer


def test_a_model_of_another_library_is_passed(tmp_path: Path, tiny_llama: Path) -> None:
    torch.manual_seed(0)
    base = Net()
    trained = get_peft_model(base, LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))  # type: ignore[arg-type]
    expected = trained(torch.ones(4))
    trained.save_pretrained(tmp_path / "adapter")
    mapping = {"base_model_class": "PI0Policy", "parent_library": "lerobot.policies.pi0.modeling_pi0"}
    change = {"auto_mapping": mapping, "base_model_name_or_path": None}
    adapter = faults.edited(tmp_path / "adapter", tmp_path / "of lerobot", config=lambda c: c.update(change))
    for refused in (
        lambda: load_peft_on_rank(adapter, tiny_llama),
        lambda: merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "merged"),
    ):
        with pytest.raises(AdapterError, match=r"a PI0Policy of lerobot.* Load that model with lerobot, and pass it"):
            refused()
    plain = Net()
    plain.load_state_dict({"to_q.weight": base.to_q.base_layer.weight, "to_q.bias": base.to_q.base_layer.bias})  # type: ignore[union-attr,dict-item]
    loaded = load_peft_on_rank(adapter, plain)  # type: ignore[arg-type]  # of transformers alone, by its annotation
    assert torch.equal(loaded(torch.ones(4)), expected)


class WithProjection(torch.nn.Module):
    """A text model under a name, and a layer beside it, as ColPali's are."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        self.custom_text_proj = torch.nn.Linear(32, 8)


def test_no_key_mapping_is_named_that_would_move_what_fits(tmp_path: Path, tiny_llama: Path) -> None:
    base = WithProjection(AutoModelForCausalLM.from_pretrained(tiny_llama).model)
    config = LoraConfig(r=2, target_modules=["q_proj", "custom_text_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(str(tmp_path / "adapter"))  # type: ignore[arg-type]
    named = {key.replace(".body.", "."): each for key, each in load_file(tmp_path / "adapter" / faults.WEIGHTS).items()}
    adapter = faults.edited(tmp_path / "adapter", tmp_path / "named", tensors=lambda _: named)
    plain = WithProjection(AutoModelForCausalLM.from_pretrained(tiny_llama).model)
    with pytest.raises(AdapterError, match=r"no module 'layers\.0") as refused:
        load_peft_on_rank(adapter, plain)  # type: ignore[arg-type]
    assert "pass key_mapping" not in str(refused.value)  # "^" is before custom_text_proj, too
    model = load_peft_on_rank(adapter, plain, key_mapping={r"^layers\.": "body.layers."})  # type: ignore[arg-type]
    assert model.load_report.ok


def test_a_revision_that_is_not_of_the_base_is_told(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    cache = tmp_path / "cache" / "models--owner--base"
    shutil.copytree(tiny_llama, cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    change = {"base_model_name_or_path": "owner/base", "revision": "unsloth"}
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", config=lambda c: c.update(change))
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    with pytest.raises(CheckpointNotFound, match=r"at the revision 'unsloth';.* or base_revision='main' if"):
        load_peft_on_rank(adapter, base_kwargs=hub)
    model = load_peft_on_rank(adapter, base_kwargs=hub, base_revision="main")
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_adapter, tiny_llama)))


def test_what_is_no_model_is_named_where_one_is_planned(tmp_path: Path, tiny_adapter: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"folder of an adapter\. Pass that of its base"):
        meta_model(tiny_adapter)
    base = json.loads((tiny_adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    meta_model(base)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointNotFound, match=r"GGUF files.* pass a folder that transformers saved"):
        meta_model(tmp_path)


@pytest.mark.parametrize(
    ("passed", "said", "instead"),
    [
        ({"revision": "v2"}, "use adapter_revision=", {"adapter_revision": None}),
        ({"subfolder": "x"}, "use adapter_subfolder=", {"adapter_subfolder": None}),
        ({"device_map": "auto"}, "leave it out: an adapter goes where its model is", {}),
        ({"torch_dtype": "float32"}, "use adapter_dtype=", {"adapter_dtype": "float32"}),
        ({"low_cpu_mem_usage": False}, "leave it out: it is always on", {}),
        ({"ephemeral_gpu_offload": True}, "leave it out: the norms of a DoRA are read", {}),
    ],
    ids=str,
)
def test_names_of_peft_have_an_answer(
    tiny_llama: Path, tiny_adapter: Path, passed: Any, said: str, instead: Any
) -> None:
    model = load_peft_on_rank(tiny_adapter, tiny_llama)
    with pytest.raises(ArgumentError, match=re.escape(said)):
        load_adapter_on_rank(model, tiny_adapter, "later", **passed)
    load_adapter_on_rank(model, tiny_adapter, "later", torch_device="cpu", local_files_only=True, **instead)


def test_an_alpha_that_its_writer_did_not_know_is_asked_for(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """verl's merger of checkpoints writes 0, with which peft computes what the base does and says nothing."""
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", config=lambda c: c.update(lora_alpha=0))
    for verb in (load_peft_on_rank, lambda *folders: merge_lora_checkpoint(folders[1], folders[0], tmp_path / "out")):
        with pytest.raises(AdapterError, match=r"lora_alpha is 0, by which peft multiplies .* that of its training"):
            verb(adapter, tiny_llama)
    assert [found.code for found in check_checkpoint(adapter).findings] == ["adapter-config"]
    faults.edited(adapter, tmp_path / "one", config=lambda c: c.update(alpha_pattern={"1.self_attn.q_proj": 4}))
    assert load_peft_on_rank(tmp_path / "one", tiny_llama).load_report.ok


def test_biases_of_single_layers_load_once_the_advice_is_taken(tmp_path: Path) -> None:
    """mergekit-extract-lora writes lora_B.bias for the layers that have a bias, and no lora_bias; peft drops them."""
    base = save_llama(tmp_path / "base", attention_bias=True)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "down_proj"])
    wanted = load_file(adapter / faults.WEIGHTS)
    biases = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.bias": torch.ones(32) for layer in range(3)
    }
    save_file({**wanted, **biases}, adapter / faults.WEIGHTS)
    with pytest.raises(AdapterError, match="set lora_bias to true in adapter_config"):
        load_peft_on_rank(adapter, base)
    adapter = faults.edited(adapter, tmp_path / "set", config=lambda c: c.update(lora_bias=True))
    with pytest.raises(
        AdapterError, match=r"down_proj\.lora_B\.default\.bias: .* pass strict=False to load it with 0 "
    ):
        load_peft_on_rank(adapter, base)
    with pytest.warns(UserWarning, match="lora_B"):
        model = load_peft_on_rank(adapter, base, strict=False)
    truth = AutoModelForCausalLM.from_pretrained(base)
    for layer in truth.model.layers:
        layer.self_attn.q_proj.bias.data += 2  # lora_alpha / r
    plain = load_peft_on_rank(faults.edited(tmp_path / "adapter", tmp_path / "plain", tensors=lambda _: wanted), truth)
    assert torch.allclose(logits(model), logits(plain), atol=1e-6)


def test_the_tensors_of_a_whole_model_load_once_those_of_the_base_are_removed(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    whole = {name: each.clone() for name, each in load_peft_on_rank(tiny_adapter, tiny_llama).state_dict().items()}
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", tensors=lambda _: whole)
    with pytest.raises(AdapterError, match="remove all tensors of the base from the file") as caught:
        load_peft_on_rank(adapter, tiny_llama)
    assert "to modules_to_save in adapter_config" not in str(caught.value)
    save_file({name: each for name, each in whole.items() if "lora_" in name}, adapter / faults.WEIGHTS)
    assert torch.equal(
        logits(load_peft_on_rank(adapter, tiny_llama)), logits(load_peft_on_rank(tiny_adapter, tiny_llama))
    )


def test_weights_without_their_config_load_once_it_is_copied(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """As optimum-neuron consolidates the shards of an adapter."""
    shutil.copytree(tiny_adapter, tmp_path / "adapter", ignore=shutil.ignore_patterns(faults.CONFIG))
    with pytest.raises(CheckpointNotFound, match=r"Copy the adapter_config\.json there that was saved with adapter_mo"):
        load_peft_on_rank(tmp_path / "adapter", tiny_llama)
    shutil.copy(tiny_adapter / faults.CONFIG, tmp_path / "adapter")
    assert load_peft_on_rank(tmp_path / "adapter", tiny_llama).load_report.ok


def test_a_lora_whose_file_is_empty_is_to_be_saved_again(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    """As alpaca-lora's script left it with later releases of peft."""
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter")
    (adapter / faults.WEIGHTS).unlink()
    torch.save({}, adapter / "adapter_model.bin")
    with pytest.raises(
        AdapterError, match=r"holds no tensor at all\. Fix: save it again with save_pretrained of the Peft"
    ):
        load_peft_on_rank(adapter, tiny_llama, allow_pickle=True)


def test_a_lora_of_a_tied_head_under_the_name_of_the_embedding_is_told(tmp_path: Path) -> None:
    """As build_lora_adapter of tinker-cookbook writes it; peft leaves it out and warns."""
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    wanted = save_adapter(tmp_path / "wanted", base, target_modules=["q_proj", "lm_head"])
    named = {
        key.replace("model.lm_head.", "model.model.embed_tokens."): each
        for key, each in load_file(wanted / faults.WEIGHTS).items()
    }
    change = {"target_modules": ["q_proj", "embed_tokens"]}
    adapter = faults.edited(wanted, tmp_path / "adapter", tensors=lambda _: named, config=lambda c: c.update(change))
    mapping = {r"^model\.embed_tokens": "lm_head"}
    said = re.escape(f'write "lm_head" in its place into target_modules, and pass key_mapping={mapping}')
    with pytest.raises(AdapterError, match=rf"factors are those of a linear layer, .* is an embedding\. Fix: {said}"):
        load_peft_on_rank(adapter, base)
    shutil.copy(wanted / faults.CONFIG, adapter)
    model = load_peft_on_rank(adapter, base, key_mapping=mapping)
    assert torch.equal(logits(model), logits(load_peft_on_rank(wanted, base)))


def test_the_raw_names_of_all_that_is_trained_are_read(tmp_path: Path, tiny_llama: Path) -> None:
    """zero_to_fp32.py --exclude_frozen_parameters writes a saved module, too, with the name of the adapter in it."""
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, modules_to_save=["lm_head"], target_modules=["q_proj"])
    wanted = load_peft_on_rank(adapter, tiny_llama)
    found = load_peft_on_rank(adapter, tiny_llama, is_trainable=True)
    raw = {name: each.detach().clone() for name, each in found.named_parameters() if each.requires_grad}
    assert "base_model.model.lm_head.modules_to_save.default.weight" in raw
    save_file(raw, adapter / faults.WEIGHTS)
    model = load_peft_on_rank(adapter, tiny_llama)
    assert torch.equal(logits(model), logits(wanted))
    assert [finding.code for finding in model.load_report.findings] == ["adapter-keys-renamed"]
    merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.lm_head.weight, raw["base_model.model.lm_head.modules_to_save.default.weight"])


def test_weights_beside_an_adapter_are_told_and_run_once_the_base_has_them(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """LLaVA's non_lora_trainables.bin and LongLoRA's trainable_params.bin, which peft leaves where they are."""
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter")
    assert "trained-beside" not in [finding.code for finding in check_checkpoint(adapter).findings]
    (adapter / "embedding").mkdir()
    torch.save(torch.nn.Embedding(2, 2), adapter / "embedding" / "emb.pth")  # of FlagEmbedding
    (found,) = [finding for finding in check_checkpoint(adapter).findings if finding.code == "trained-beside"]
    assert "'embedding/emb.pth'" in found.message
    shutil.rmtree(adapter / "embedding")
    torch.save({"model.norm.weight": torch.full((32,), 0.5)}, adapter / "non_lora_trainables.bin")
    model = load_peft_on_rank(adapter, tiny_llama)
    (found,) = model.load_report.findings
    assert (found.code, found.severity) == ("trained-beside", "warning")
    assert "'non_lora_trainables.bin'" in found.message
    assert found.bytes == (adapter / "non_lora_trainables.bin").stat().st_size
    assert found in check_checkpoint(adapter).findings
    report = merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "merged")
    assert "trained-beside" in [finding.code for finding in report.findings]
    # the advice
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    base.load_state_dict(torch.load(adapter / "non_lora_trainables.bin", weights_only=True), strict=False)
    trained = load_peft_on_rank(adapter, base)
    assert torch.equal(trained.get_base_model().model.norm.weight, torch.full((32,), 0.5))
    assert not torch.equal(logits(trained), logits(model))
    (adapter / "non_lora_trainables.bin").unlink()
    assert load_peft_on_rank(adapter, tiny_llama).load_report.findings == ()
