"""``meta_model`` is ``from_pretrained`` without the weights: same modules, shapes, dtypes and ties, in no memory."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_hub import serve
from models import save_llama
from tiny_models import causal_lm_classes, image_text_classes, skip_unless_buildable, tiny_config
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
)

from safe_loading import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    check_checkpoint,
    meta_model,
    plan_device_map,
)
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._loading.base_model import base_config, base_on_meta
from safe_loading._model.meta_model import build_on_meta, class_in_config, class_to_build

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})


@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", torch.float16, torch.float32])
def test_everything_but_the_values_is_what_from_pretrained_makes(dtype: Any, tmp_path: Path) -> None:
    folder = save_llama(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    model: Any = meta_model(folder, dtype=dtype)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if dtype is None else dtype)
    assert type(model) is type(wanted)
    facts = {name: (tensor.shape, tensor.dtype) for name, tensor in wanted.named_parameters()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters()} == facts
    buffers = {name: (tensor.shape, tensor.dtype) for name, tensor in wanted.named_buffers()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_buffers()} == buffers
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.training is wanted.training
    assert model.config.dtype == wanted.config.dtype
    assert model.config._attn_implementation == wanted.config._attn_implementation
    assert model.name_or_path == str(folder)


def test_weights_that_a_class_draws_on_the_host_are_on_meta(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DiffLlamaConfig(**sizes, vocab_size=64)
    drawn = DiffLlamaForCausalLM(config).state_dict()
    model = meta_model(config)
    assert {name: (each.shape, each.dtype) for name, each in model.state_dict().items()} == {
        name: (each.shape, each.dtype) for name, each in drawn.items()
    }
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", random.Random(5).sample(EVERY, 5))
def test_no_random_number_is_drawn_and_the_config_stays(name: str) -> None:
    skip_unless_buildable(name)
    config = tiny_config(name)
    before, state = json.dumps(config.to_dict(), sort_keys=True, default=str), torch.get_rng_state()
    model = meta_model(config, getattr(transformers, name), torch.bfloat16)
    assert torch.equal(state, torch.get_rng_state())
    assert json.dumps(config.to_dict(), sort_keys=True, default=str) == before
    assert torch.get_default_dtype() == torch.float32
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_a_class_keeps_in_float32_has_that_dtype(tmp_path: Path) -> None:
    class Careful(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ["norm"]  # noqa: RUF012 - a list before transformers 5.1

    folder = save_llama(tmp_path)
    model = meta_model(folder, Careful, torch.bfloat16)
    wanted = Careful.from_pretrained(folder, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in wanted.state_dict().items()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes


def test_the_dtype_of_a_config_that_says_none_is_that_of_the_first_tensor(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, torch.float16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert {parameter.dtype for parameter in meta_model(folder).parameters()} == {torch.float16}


def test_the_class_is_the_one_that_is_named(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    assert type(meta_model(folder)) is LlamaForCausalLM
    assert type(meta_model(folder, LlamaModel)) is LlamaModel
    assert type(meta_model(folder, transformers.AutoModel)) is LlamaModel
    assert type(meta_model(LlamaConfig(num_hidden_layers=1), AutoModelForCausalLM)) is LlamaForCausalLM


def test_what_cannot_be_built_is_refused_with_the_fix(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    with pytest.raises(ArgumentError, match="not a class of transformers"):
        meta_model(folder, dict)
    with pytest.raises(ArgumentError, match="floating-point"):
        meta_model(folder, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="floating-point"):
        meta_model(folder, dtype="bfloat17")
    assert next(meta_model(folder, dtype="bf16").parameters()).dtype == torch.bfloat16
    with pytest.raises(CheckpointNotFound):
        meta_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        meta_model(tmp_path / "empty")
    config = LlamaConfig(quantization_config={"quant_method": "fp8"}, architectures=["LlamaForCausalLM"])
    with pytest.raises(ArgumentError, match=r"quantized \(fp8\)"):
        meta_model(config)


def test_a_large_model_takes_no_memory() -> None:
    config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64)
    before = resident()
    model = meta_model(config, AutoModelForCausalLM)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 10 * 2**30
    assert resident() - before < 32 * 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_config_that_names_no_architecture_gets_the_class_that_knows_it() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    assert type(meta_model(config)).__name__ == "LlamaForCausalLM"
    with pytest.raises(ArgumentError, match="auto_class="):
        meta_model(PreTrainedConfig())


def test_the_base_of_an_adapter_is_built_with_the_dtypes_of_from_pretrained(tmp_path: Path) -> None:
    class Careful(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ["norm"]  # noqa: RUF012 - a list before transformers 5.1

    folder = save_llama(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    for dtype in ("auto", torch.float16):
        model: Any = base_on_meta(Careful, ModelFolder(folder), dtype, {})
        wanted: Any = Careful.from_pretrained(folder, dtype=dtype)
        for named in ("named_parameters", "named_buffers"):
            dtypes = {name: tensor.dtype for name, tensor in getattr(wanted, named)()}
            assert {name: tensor.dtype for name, tensor in getattr(model, named)()} == dtypes
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # model.to(dtype) would have cast it
        assert model.model.norm.weight.dtype == torch.float32
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.dtype == wanted.config.dtype
        assert model.training is wanted.training


def test_a_class_of_no_engine_is_cast_whole() -> None:
    class Own(torch.nn.Linear):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config.hidden_size, 2)

    model = build_on_meta(Own, LlamaConfig(), torch.bfloat16)
    assert {(parameter.dtype, parameter.is_meta) for parameter in model.parameters()} == {(torch.bfloat16, True)}


def test_a_model_is_built_in_one_thread_at_a_time_because_the_default_dtype_is_the_whole_process_s() -> None:
    inside = threading.Barrier(2)

    class Met(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            with pytest.raises(threading.BrokenBarrierError):  # nobody else comes
                inside.wait(timeout=1)

    def build(dtype: torch.dtype) -> torch.dtype:
        config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        parameter = next(build_on_meta(Met, config, dtype).parameters())
        return parameter.dtype

    dtypes = [torch.bfloat16, torch.float16]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(build, dtypes)] == dtypes
    assert torch.get_default_dtype() == torch.float32


def test_the_class_is_that_of_the_config_or_the_auto_class_of_its_code() -> None:
    config = LlamaConfig(architectures=["Mine", "LlamaForCausalLM"])
    assert class_in_config(config, trust_remote_code=False) is LlamaForCausalLM
    config.auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Mine"}
    assert class_in_config(config, trust_remote_code=True) is AutoModelForCausalLM
    assert class_in_config(config, trust_remote_code=False) is LlamaForCausalLM
    config.architectures = ["Mine"]
    assert class_in_config(config, trust_remote_code=False) is AutoModelForCausalLM  # which says what to trust
    assert class_in_config(LlamaConfig(architectures=["Mine"]), trust_remote_code=True) is None


def test_the_class_is_that_of_the_code_where_the_architectures_name_another() -> None:
    """ChatGLM2: its architectures name the decoder, and its auto_map the model around it under three auto classes."""
    around = "modeling_chatglm.ChatGLMForConditionalGeneration"
    config = LlamaConfig(architectures=["ChatGLMModel"])
    config.auto_map = dict.fromkeys(["AutoModel", "AutoModelForSeq2SeqLM", "AutoModelForCausalLM"], around)
    assert class_to_build(config, None, trust_remote_code=True) is AutoModelForCausalLM
    config.architectures = None
    assert class_to_build(config, None, trust_remote_code=True) is AutoModelForCausalLM
    config.architectures = ["LlamaForCausalLM"]  # which that auto class would not build
    assert class_to_build(config, None, trust_remote_code=True) is AutoModelForCausalLM
    config.auto_map = {"AutoModelForTokenClassification": "code.Tagger", "AutoModel": 3}
    assert class_to_build(config, None, trust_remote_code=True) is LlamaForCausalLM


def test_without_trust_code_that_transformers_has_too_is_transformers_own(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    document = json.loads((folder / "config.json").read_text())
    for auto_class in ("AutoModel", "AutoModelForSeq2SeqLM"):
        document["auto_map"] = {auto_class: "code.LlamaForCausalLM"}
        (folder / "config.json").write_text(json.dumps(document))
        assert type(meta_model(folder)) is LlamaForCausalLM


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    version = "{}"
"""
TRUST = "m = meta_model('org/own', trust_remote_code=True, revision='v1'); print(m.version, m.config.name_or_path)"


def test_trusted_code_is_that_of_the_revision(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, architectures=["OwnModel"]).to_dict()
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    revisions = {name: tmp_path / name for name in ("main", "v1")}
    for name, folder in revisions.items():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": code}))
        (folder / "modeling_own.py").write_text(CODE.format(name))
    with serve({"org/own": revisions}) as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", f"from safe_loading import meta_model; {TRUST}"]
        done = subprocess.run(command, env={**os.environ, **online}, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["v1", "org/own"], done.stderr
    assert not [request for request in hub.requests if "/resolve/main/" in request]


@pytest.mark.parametrize(
    ("config", "built"),
    [
        (transformers.BartConfig, "BartForConditionalGeneration"),
        (transformers.MarianConfig, "MarianMTModel"),
        (transformers.WhisperConfig, "WhisperForConditionalGeneration"),
        (transformers.Llama4Config, "Llama4ForConditionalGeneration"),
        (transformers.MllamaConfig, "MllamaForConditionalGeneration"),
        (transformers.Llama4TextConfig, "Llama4ForCausalLM"),
        (transformers.GPT2Config, "GPT2LMHeadModel"),
        (transformers.BertConfig, "BertLMHeadModel"),
        (transformers.ViTConfig, "ViTModel"),
    ],
)
def test_a_config_that_names_no_class_is_built_whole(config: type, built: str) -> None:
    """AutoModelForCausalLM knows many of these, too, and builds a decoder without its encoder."""
    made = config()
    auto_class: Any = class_to_build(made, None, trust_remote_code=False)
    assert auto_class._model_mapping[config].__name__ == built


def test_a_decoder_alone_is_built_where_the_config_says_so() -> None:
    config = transformers.BartConfig(is_encoder_decoder=False, is_decoder=True)
    assert class_to_build(config, None, trust_remote_code=False) is transformers.AutoModelForCausalLM


def test_architectures_that_transformers_lacks_leave_the_type_of_the_model_to_decide() -> None:
    config = LlamaConfig(num_hidden_layers=1, architectures=["LlamaForMyHead"])
    assert type(meta_model(config)) is LlamaForCausalLM
    config.auto_map = {"AutoModelForTokenClassification": "code.LlamaForMyHead"}  # not trusted, as for the auto classes
    assert type(meta_model(config, "AutoModelForCausalLM")) is LlamaForCausalLM
    config.auto_map = {"AutoModel": "code.Inner"}
    assert type(meta_model(config)) is LlamaForCausalLM


def test_a_class_that_a_repository_spells_otherwise_has_the_head_that_its_name_says() -> None:
    """Kimi-K2.5: its auto_map names AutoModel first, whose class has no head."""
    config = LlavaConfig(architectures=["LLaVA15ForConditionalGeneration"])
    config.auto_map = {"AutoModel": "code.LLaVA15ForConditionalGeneration"}
    assert class_to_build(config, None, trust_remote_code=False) is LlavaForConditionalGeneration
    assert class_to_build(config, None, trust_remote_code=True) is transformers.AutoModel


@pytest.mark.parametrize(
    ("config", "named", "built"),
    [
        (transformers.Qwen2Config, "LlamaForCausalLM", "Qwen2ForCausalLM"),
        (transformers.Gemma3TextConfig, "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),  # the text alone
        (transformers.XLMRobertaConfig, "RobertaForMaskedLM", "XLMRobertaForMaskedLM"),
        (LlamaConfig, "InternLMForSequenceClassification", "LlamaForSequenceClassification"),
    ],
)
def test_the_type_of_a_model_decides_where_the_named_class_is_of_another(config: type, named: str, built: str) -> None:
    """The auto classes go by the type: a merge of the text of Qwen3.5 names the class with images."""
    made = config(**TINY, architectures=[named])
    model = meta_model(made)
    assert type(model).__name__ == built
    (found,) = plan_device_map(made, {0: "9GB"}, verify=False).findings
    assert found.code == "class-assumed"
    assert re.search(rf"{named}, which the config names.*; {built} is taken", found.message)


def test_a_folder_whose_config_names_a_class_of_another_type_is_checked_as_it_is_loaded(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["MistralForCausalLM"]}))
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is LlamaForCausalLM
    assert not check_checkpoint(folder).findings


TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaForCausalLMEagle3", {"draft_vocab_size": 32}),
        ("DFlashDraftModel", {"dflash_config": {"block_size": 16, "target_layer_ids": [1]}}),
        # as SpecForge writes them: code that is not trusted leaves no other class
        ("DSparkDraftModel", {"dflash_config": {}, "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}),
        ("Eagle3LlamaForCausalLM", {"draft_vocab_size": 32}),  # the head is that of a class, too
    ],
)
def test_a_draft_model_is_no_model_of_its_type(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    """EAGLE-3 and DFlash: their embeddings are those of the target, and the class of their type is larger."""
    LlamaConfig(**TINY, architectures=[name], **fields).save_pretrained(tmp_path)
    said = rf"draft .*{next(iter(fields))}.* {name}.* Pass auto_class="
    for refused in (meta_model, lambda folder: plan_device_map(folder, {0: "1GB"}, verify=False)):
        with pytest.raises(ArgumentError, match=said):
            refused(tmp_path)
    assert type(meta_model(tmp_path, auto_class=AutoModelForCausalLM)) is LlamaForCausalLM
    assert not check_checkpoint(tmp_path).ok
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    LlamaConfig(**TINY, architectures=[name], **fields).save_pretrained(tmp_path)
    assert not check_checkpoint(tmp_path).ok


def test_sizes_that_a_class_would_ignore_are_refused_until_they_are_where_it_reads_them(tmp_path: Path) -> None:
    """The original config of llava-v1.5-13b: transformers takes the sizes of the 7B model, without a word."""
    document = {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "torch_dtype": "float16"}
    sizes = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "vocab_size": 32000}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document | sizes))
    said = r"ignores hidden_size=5120 \(it takes 4096\), num_hidden_layers=40 .* in 'text_config', which the file lacks"
    with pytest.raises(CheckpointError, match=said):
        meta_model(tmp_path)
    path.write_text(json.dumps(document | {"text_config": {"model_type": "llama", **sizes}}))  # the advice
    assert meta_model(tmp_path).config.text_config.hidden_size == 5120
    path.write_text(json.dumps(document | {"hidden_size": 4096, "num_hidden_layers": 32}))
    meta_model(tmp_path)  # the original 7B: the defaults are its sizes


def test_a_vocabulary_that_a_class_would_ignore_is_planned_with_a_finding_and_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step-3.7, whose file has the sizes of the text model at its top: all but one are the defaults of the class."""
    document = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vocab_size": 31000}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    said = r"ignores vocab_size=31000 \(it takes \d+\): LlavaConfig .* which the file lacks"
    plan = plan_device_map(tmp_path, {0: "90GB"}, verify=False)
    (found,) = [finding for finding in plan.findings if finding.code == "sizes-ignored"]
    assert found.severity == "warning"
    assert re.search(said, found.message)
    with caplog.at_level("WARNING", logger="safe_loading"):
        meta_model(tmp_path)
    assert re.search(said, caplog.text)
    with pytest.raises(CheckpointError, match=said):
        base_config(tmp_path, {}, document)
    path.write_text(json.dumps(document | {"text_config": {"model_type": "llama", "vocab_size": 31000}}))
    assert meta_model(tmp_path).config.text_config.vocab_size == 31000  # the advice


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"model_type": "janus_x", "hidden_size": 8}, "does not know the model type 'janus_x'. Upgrade"),
        (
            {"alignment_heads": [[1, 2]], "suppress_ids": [1]},
            "another engine's .*Pass the folder that it was converted",
        ),
        ({"hidden_size": 8}, 'has no model_type.* Set it to the architecture, such as "llama"'),
        (
            {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32},
            r"draft for speculative decoding \(eagle3\).* Pass the folder of its target",
        ),
    ],
    ids=["unknown", "CTranslate2", "none", "speculators"],
)
def test_a_config_without_a_known_type_is_named(tmp_path: Path, document: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=said):
        meta_model(tmp_path)


def test_a_class_taken_by_the_type_of_the_model_is_a_finding_that_its_name_ends() -> None:
    config = LlamaConfig(num_hidden_layers=1, vocab_size=64, architectures=["LlamaForMyHead"])
    (found,) = plan_device_map(config, {0: "9GB"}).findings
    assert (found.code, found.severity) == ("class-assumed", "warning")
    assert "no LlamaForMyHead, which the config names; LlamaForCausalLM is taken" in found.message
    assert not plan_device_map(config, {0: "9GB"}, auto_class="LlamaForSequenceClassification").findings
    with pytest.raises(ArgumentError, match="'LlamaForMyHead' is not a class of transformers"):
        plan_device_map(config, {0: "9GB"}, auto_class="LlamaForMyHead")
