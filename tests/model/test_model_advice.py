"""The advice of errors and findings about models on meta, taken: what a message names makes the model."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults import folders
from models import COSTLY, QUANTIZABLE, save_llama
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForKeypointDetection,
    BitsAndBytesConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    SuperPointConfig,
    SuperPointForKeypointDetection,
)

from safe_loading import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    SafeLoadingError,
    TraceError,
    Workload,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    plan_device_map,
    predict_memory,
)
from safe_loading._model import module_limit
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.formats.four_bit_on_meta import four_bit_on_meta
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading._model.quantized_meta_model import quantized_meta_model

LLAMA = LlamaConfig(**QUANTIZABLE)
MOE = Qwen3MoeConfig(**{**QUANTIZABLE, "moe_intermediate_size": 128, "num_experts": 4, "head_dim": 64})
FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": FP8_GROUP}, "use_optimized_inference": True}


def gpt_oss() -> GptOssConfig:
    return GptOssConfig(**QUANTIZABLE, num_local_experts=8, num_experts_per_tok=2, head_dim=64)


def torchao(kind: str = "Int8WeightOnlyConfig", **options: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}, **options}


def intx(packing: str) -> dict[str, Any]:
    data = {
        "intx_packing_format": {"_data": packing, "_type": "IntxPackingFormat"},
        "weight_dtype": {"_data": "int4", "_type": "torch.dtype"},
        "weight_granularity": {"_data": {"group_size": 32}, "_type": "PerGroup", "_version": 1},
    }
    kind = {"_type": "Int8DynamicActivationIntxWeightConfig", "_data": data, "_version": 2}
    return {"quant_method": "torchao", "quant_type": {"default": kind}}


class Plan(NamedTuple):
    """A quantization, a card, what is said of them, and the quantization and card that this advises."""

    config: PreTrainedConfig
    quantization: object
    card: TargetCard
    advice: str
    advised: object
    advised_card: TargetCard


HOST, ANY, TRAINS = TargetCard(on_host=True), TargetCard(), TargetCard(trains=True)
INT8 = torchao()
PLANS: dict[str, Plan] = {
    "fp8 on the host": Plan(LLAMA, FP8, HOST, "Name an accelerator in max_memory", FP8, ANY),
    "fp8 on the host, plain": Plan(LLAMA, FP8, HOST, "or leave quantization_config out", None, HOST),
    "training MXFP4": Plan(
        gpt_oss(),
        {"quant_method": "mxfp4"},
        TRAINS,
        r"quantization_config=Mxfp4Config\(dequantize=True\)",
        {"quant_method": "mxfp4", "dequantize": True},
        TRAINS,
    ),
    "training experts in FP4": Plan(
        MOE,
        {**FP8, "expert_dtype": "fp4"},
        TRAINS,
        r"no backward pass for it\. .* quantization_config=FineGrainedFP8Config\(dequantize=True\)",
        {**FP8, "expert_dtype": "fp4", "dequantize": True},
        TRAINS,
    ),
    "MXFP4 of no gpt-oss": Plan(
        LLAMA, {"quant_method": "mxfp4"}, ANY, "gpt-oss alone, .* Leave quantization_config out", None, ANY
    ),
    "fbgemm on an older card": Plan(
        LLAMA,
        {"quant_method": "fbgemm_fp8"},
        TargetCard((8, 9)),
        r"Pass capability=\(9, 0\)",
        {"quant_method": "fbgemm_fp8"},
        TargetCard((9, 0)),
    ),
    "fbgemm, or fp8": Plan(
        LLAMA, {"quant_method": "fbgemm_fp8"}, TargetCard((8, 9)), "in fine-grained fp8", FP8, TargetCard((8, 9))
    ),
    "training fbgemm": Plan(
        LLAMA, {"quant_method": "fbgemm_fp8"}, TRAINS, "Use a checkpoint in fine-grained", FP8, TRAINS
    ),
    "training compressed": Plan(
        LLAMA,
        COMPRESSED,
        TRAINS,
        "Use dequantize=True in place of use_optimized_inference",
        {**COMPRESSED, "use_optimized_inference": False, "dequantize": True},
        TRAINS,
    ),
    "another layout of AWQ": Plan(
        LLAMA, {"quant_method": "awq", "version": "gemv"}, ANY, "Plan the model that it was made of", None, ANY
    ),
    "a rule of GPTQ that is not known": Plan(
        LLAMA,
        {"quant_method": "gptq", "dynamic": {".*mlp.*": {"pack_dtype": "int16"}}},
        ANY,
        "Plan the model that it was made of",
        None,
        ANY,
    ),
    "other codes of AutoRound": Plan(
        LLAMA,
        {"quant_method": "auto-round", "data_type": "mx_fp"},
        ANY,
        "Plan the model that it was made of",
        None,
        ANY,
    ),
    "blocks that the model does not have": Plan(
        LLAMA,
        {"quant_method": "gptq", "block_name_to_quantize": "transformer.h"},
        ANY,
        r"Write the path of the blocks as the model has it, such as 'model\.layers'",
        {"quant_method": "gptq", "block_name_to_quantize": "model.layers"},
        ANY,
    ),
    "training int4": Plan(
        LLAMA, torchao("Int4WeightOnlyConfig"), TRAINS, "Quantize with Int8WeightOnlyConfig", INT8, TRAINS
    ),
    "training int4, or bitsandbytes": Plan(
        LLAMA,
        torchao("Int4WeightOnlyConfig"),
        TRAINS,
        r"BitsAndBytesConfig\(load_in_4bit=True\)",
        FOUR_BITS,
        TRAINS,
    ),
    "embeddings of torchao": Plan(
        LLAMA, torchao(include_input_output_embeddings=True), ANY, "cannot be planned; leave it out", INT8, ANY
    ),
    "torchao by a name": Plan(
        LLAMA,
        {"quant_method": "torchao", "quant_type": "int8"},
        ANY,
        r"what config\.json has: \{'default': \{'_type': 'Int8WeightOnlyConfig', '_data': \{\}\}\}",
        INT8,
        ANY,
    ),
    "int4 on an older card": Plan(
        LLAMA,
        torchao("Int4WeightOnlyConfig"),
        TargetCard((7, 5)),
        "Pass capability= of the card",
        torchao("Int4WeightOnlyConfig"),
        TargetCard((8, 0)),
    ),
    "int4 on an older card, or int8": Plan(
        LLAMA, torchao("Int4WeightOnlyConfig"), TargetCard((7, 5)), "or Int8WeightOnlyConfig", INT8, TargetCard((7, 5))
    ),
    "codes packed for one kind of CPU": Plan(
        LLAMA,
        intx("OPAQUE_ATEN_KLEIDIAI"),
        ANY,
        "Plan that: it takes a byte for each code",
        intx("UNPACKED_TO_INT8"),
        ANY,
    ),
    "a costly pattern": Plan(
        LLAMA,
        {**FP8, "modules_to_not_convert": [COSTLY]},
        ANY,
        "Write the names of modules instead",
        {**FP8, "modules_to_not_convert": ["lm_head"]},
        ANY,
    ),
    "two methods": Plan(
        LlamaConfig(**{**QUANTIZABLE, "quantization_config": FP8}),
        FOUR_BITS,
        ANY,
        "Leave quantization_config out",
        None,
        ANY,
    ),
    "8 bits of weights that stay in 16": Plan(
        LLAMA,
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True),
        ANY,
        "Pass llm_int8_has_fp16_weight=False",
        BitsAndBytesConfig(load_in_8bit=True),
        ANY,
    ),
    "no config": Plan(
        LLAMA,
        4,
        ANY,
        "pass a config of transformers, such as BitsAndBytesConfig",
        FOUR_BITS,
        ANY,
    ),
    "no method that is known": Plan(
        LLAMA,
        {"quant_method": "quanto"},
        ANY,
        "take the checkpoint in 16 bits, whose plan is an upper bound",
        None,
        ANY,
    ),
}


def size_of(config: PreTrainedConfig, quantization: object, card: TargetCard) -> int:
    made = quantized_meta_model(config, quantization, card=card, dtype=torch.bfloat16)
    return sum(parameter.nbytes for parameter in made.model.parameters())


@pytest.mark.parametrize("kind", PLANS)
def test_a_quantization_is_planned_once_the_advice_is_taken(kind: str) -> None:
    plan = PLANS[kind]
    with pytest.raises(ArgumentError, match=plan.advice):
        size_of(plan.config, plan.quantization, plan.card)
    plain = type(plan.config)(**{**plan.config.to_dict(), "quantization_config": None})
    assert 0 < size_of(plan.config, plan.advised, plan.advised_card) <= size_of(plain, None, plan.card)


def test_each_finding_of_a_quantization_ends_by_its_fix() -> None:
    def codes(config: PreTrainedConfig, quantization: object, **options: Any) -> dict[str, str]:
        made = quantized_meta_model(config, quantization, dtype=torch.bfloat16, **options)
        return {finding.code: finding.message + finding.fix for finding in made.findings}

    old = codes(LLAMA, FP8, card=TargetCard((8, 0)))
    assert "pass capability= of the card if it is another one; or quantize with bitsandbytes" in old["dequantized"]
    assert "dequantized" not in codes(LLAMA, FP8, card=TargetCard((8, 9)))
    assert "dequantized" not in codes(LLAMA, FOUR_BITS, card=TargetCard((8, 0)))
    unknown = codes(LLAMA, FP8)["kernels-needed"]
    assert "pass capability= to plan for another one)" in unknown
    assert "capability" not in codes(LLAMA, FP8, card=TargetCard((9, 0)))["kernels-needed"]
    assert "take a checkpoint in fp8" in codes(MOE, FOUR_BITS)["experts-not-quantized"]
    assert "experts-not-quantized" not in codes(MOE, FP8)
    taken_apart = codes(MOE, {"quant_method": "auto-round", "bits": 4, "group_size": 128})["experts-not-quantized"]
    assert "auto-round makes linear layers of the experts" in taken_apart
    assert "so this is an upper bound" in taken_apart
    loading = codes(LLAMA, INT8)
    assert "or load a checkpoint that is quantized already" in loading["load-not-counted"]
    assert "load-not-counted" not in codes(LlamaConfig(**{**QUANTIZABLE, "quantization_config": INT8}), None)
    other = codes(LLAMA, None, attn_implementation="flash_attention_3")["scratch-unknown"]
    assert 'or plan with attn_implementation="flash_attention_2" or "sdpa"' in other
    for known in ("flash_attention_2", "sdpa"):
        assert codes(LLAMA, None, attn_implementation=known) == {}


def test_four_bits_on_meta_once_the_advice_is_taken() -> None:
    def made(quantization: object, config: PreTrainedConfig = LLAMA) -> Any:
        model = meta_model(config, dtype=torch.bfloat16)
        four_bit_on_meta(model, quantization, torch.bfloat16)
        return model

    with pytest.raises(ArgumentError, match=r"only BitsAndBytesConfig\(load_in_4bit=True\) can\. Load the model with"):
        made(BitsAndBytesConfig(load_in_8bit=True))
    assert made(FOUR_BITS).is_quantized
    odd = LlamaConfig(**{**QUANTIZABLE, "hidden_size": 36, "intermediate_size": 13, "num_attention_heads": 2})
    storage: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.float64}
    with pytest.raises(ArgumentError, match=r"pass bnb_4bit_quant_storage=torch\.uint8, or llm_int8_skip_modules"):
        made(BitsAndBytesConfig(**storage), odd)
    assert made(BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.uint8), odd).is_quantized
    skipped = ["gate_proj", "up_proj", "down_proj", "lm_head"]
    assert made(BitsAndBytesConfig(**storage, llm_int8_skip_modules=skipped), odd).is_quantized


def test_a_method_that_a_config_does_not_name_is_written_into_it() -> None:
    """As in configs of engines that know only one method."""
    blocks: dict[str, Any] = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}

    def planned(quantization: dict[str, Any]) -> Any:
        return plan_device_map(LlamaConfig(**{**QUANTIZABLE, "quantization_config": quantization}), {"cpu": "8GB"})

    with pytest.raises(ArgumentError, match=r"has no quant_method(.|\n)*Write the method of the engine that quantized"):
        planned(blocks)
    assert planned({**blocks, "quant_method": "fp8"}).ok


def test_a_single_quantized_layer_is_put_into_a_sequential() -> None:
    engine: Any = importlib.import_module("bitsandbytes").nn
    layer = engine.Linear4bit(64, 64)
    advice = r"put it into torch\.nn\.Sequential\(Linear4bit\(\.\.\.\)\)"
    with pytest.raises(ArgumentError, match=advice), with_stand_ins(layer):
        pass
    with with_stand_ins(nn.Sequential(layer)) as made:
        assert list(made) == ["0"]


def config_of(folder: Path, **entries: Any) -> None:
    folders._json_fields("config.json", entries)(folder)


class OnMeta(NamedTuple):
    """What is wrong with a folder, the advice, and the arguments or the change that it names."""

    spoil: Callable[[Path], Any]
    advice: str
    mend: Callable[[Path], Any] = lambda folder: None
    options: dict[str, Any] = {}  # noqa: RUF012 - of a tuple, and never written
    wrong: dict[str, Any] = {}  # noqa: RUF012


CAUSAL = {"auto_class": AutoModelForCausalLM}
ON_META: dict[str, OnMeta] = {
    "no config": OnMeta(
        lambda folder: (folder / "config.json").rename(folder / "away"),
        r"Pass the folder of a model, or save it there again",
        lambda folder: (folder / "away").rename(folder / "config.json"),
    ),
    "no model type": OnMeta(
        lambda folder: config_of(folder, model_type=...),
        'Set it to the architecture, such as "llama"',
        lambda folder: config_of(folder, model_type="llama"),
    ),
    "no class of transformers": OnMeta(
        lambda folder: None, "pass for example AutoModelForCausalLM", options=CAUSAL, wrong={"auto_class": dict}
    ),
    "a dtype of integers": OnMeta(
        lambda folder: None,
        r"pass a floating-point torch\.dtype such as torch\.bfloat16, its name, or 'auto'",
        options={"dtype": "auto"},
        wrong={"dtype": torch.int8},
    ),
    "a dtype of integers in the config": OnMeta(
        lambda folder: config_of(folder, dtype="int8"),
        'Set it to the dtype of the weights, such as "bfloat16"',
        lambda folder: config_of(folder, dtype="float32"),
    ),
    "a dtype of integers, or the argument": OnMeta(
        lambda folder: config_of(folder, dtype="int8"), "or pass dtype=", options={"dtype": torch.float32}
    ),
    "a config of a value too many": OnMeta(
        lambda folder: config_of(folder, hidden_act="nothing"),
        "Correct the config, or pass the class that it is for",
        lambda folder: config_of(folder, hidden_act="silu"),
    ),
    "a generation config of wrong values": OnMeta(
        lambda folder: (folder / "generation_config.json").write_text('{"max_new_tokens": -1}'),
        r"Correct it, or delete it: the model's defaults are taken then",
        lambda folder: (folder / "generation_config.json").unlink(),
    ),
}


@pytest.mark.parametrize("kind", ON_META)
def test_a_model_is_made_once_the_advice_is_taken(tmp_path: Path, tiny_llama: Path, kind: str) -> None:
    case = ON_META[kind]
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "folder"))
    case.spoil(folder)
    with pytest.raises((ArgumentError, CheckpointError, CheckpointNotFound), match=case.advice):
        meta_model(folder, **case.wrong)
    case.mend(folder)
    model = meta_model(folder, **case.options)
    assert type(model) is LlamaForCausalLM
    expected = {name: (p.shape, p.dtype) for name, p in meta_model(tiny_llama).named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == expected


def test_a_type_that_only_another_auto_class_knows_is_made_by_that_class() -> None:
    config = SuperPointConfig(architectures=["Nobody"])
    with pytest.raises(ArgumentError, match=r"Pass auto_class=, for example transformers\.AutoModelForCausalLM"):
        meta_model(config)
    config.auto_map = {"AutoModel": "x.Nobody2"}
    with pytest.raises(ArgumentError, match=r"Read it and pass trust_remote_code=True, or pass auto_class="):
        meta_model(config)
    config.auto_map = {"AutoConfig": "x.Nobody2"}
    with pytest.raises(ArgumentError, match=r"Nothing says which class to build: .*Pass auto_class="):
        meta_model(config, trust_remote_code=True)
    assert type(meta_model(config, AutoModelForKeypointDetection)) is SuperPointForKeypointDetection


def test_code_that_is_read_and_trusted_runs(tmp_path: Path, tiny_llama: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "folder"))
    (folder / "x.py").write_text(
        "from transformers import LlamaConfig\n\nclass Mine(LlamaConfig):\n    model_type = 'mine'\n"
    )
    config_of(folder, model_type="mine", auto_map={"AutoConfig": "x.Mine"})
    with pytest.raises(ArgumentError, match=r"runs only with trust_remote_code=True\. Read it first"):
        meta_model(folder)
    assert type(meta_model(folder, trust_remote_code=True)) is LlamaForCausalLM


MODEL = "from transformers import LlamaForCausalLM\n\nclass Mine(LlamaForCausalLM):\n"


def test_code_of_a_repository_that_fails_is_left_out_where_transformers_has_the_model(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """Code of 2024 reads config.rope_scaling["type"], which transformers 5 does not write."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "folder"))
    (folder / "x.py").write_text(
        f"{MODEL}    def __init__(self, config):\n        super().__init__(config.to_dict()['no such'])\n"
    )
    config_of(folder, architectures=["Mine"], auto_map={"AutoModelForCausalLM": "x.Mine"})
    calls: list[Callable[[bool], Any]] = [
        lambda trust: meta_model(folder, trust_remote_code=trust),
        lambda trust: load_peft_on_rank(folder, tiny_adapter, trust_remote_code=trust),
        lambda trust: merge_lora_checkpoint(folder, tiny_adapter, tmp_path / "merged", trust_remote_code=trust),
    ]
    left_out = r"Leave trust_remote_code out: transformers has the model type 'llama' itself\."
    for call in calls:
        with pytest.raises(SafeLoadingError, match=rf"own code fails with .*: KeyError: 'no such'\. {left_out}"):
            call(True)
        call(False)
    (folder / "x.py").write_text(f"{MODEL}    def forward(self, **inputs):\n        return inputs.no_such\n")
    with pytest.raises(TraceError, match=rf"`return inputs\.no_such`.*\. {left_out}"):
        predict_memory(folder, Workload.generate(1, 8), trust_remote_code=True)
    predict_memory(folder, Workload.generate(1, 8))
    (folder / "x.py").unlink()
    with pytest.raises(CheckpointError, match=rf"own code fails with .*x\.py.*\. {left_out}"):
        meta_model(folder, trust_remote_code=True)


def test_code_of_a_repository_that_transformers_lacks_is_told_with_its_release(
    tmp_path: Path, tiny_llama: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "folder"))
    own = "from transformers import LlamaConfig\n\nclass Mine(LlamaConfig):\n    model_type = 'mine'\n"
    (folder / "x.py").write_text(f"import no_such_package\n{own}")
    code = {"AutoConfig": "x.Mine", "AutoModelForCausalLM": "x.Model"}
    config_of(folder, model_type="mine", architectures=["Model"], auto_map=code, transformers_version="4.30.2")
    with pytest.raises(
        CheckpointError, match=r"Install what it imports, or the release .* \(4\.30\.2 wrote the config\)"
    ):
        meta_model(folder, trust_remote_code=True)
    (folder / "x.py").write_text(own)
    code["AutoModelForCausalLM"] = "y.Model"
    config_of(folder, auto_map=code)
    with pytest.raises(CheckpointError, match=r"y\.py.*\. Copy the \.py files of the repository into the folder\."):
        meta_model(folder, trust_remote_code=True)
    model = "from transformers import LlamaForCausalLM\nfrom .x import Mine\n\nclass Model(LlamaForCausalLM):\n"
    (folder / "y.py").write_text(f"{model}    config_class = Mine\n")
    assert type(meta_model(folder, trust_remote_code=True)).__name__ == "Model"


def test_counts_that_are_corrected_make_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path, num_hidden_layers=1)
    config_of(folder, num_hidden_layers=3)
    limited = module_limit.module_limit
    monkeypatch.setattr("safe_loading._model.meta_model.module_limit", lambda kind: limited(kind, 60))
    with pytest.raises(CheckpointError, match=r"Correct the counts in config\.json, or save the model again with"):
        meta_model(folder)
    config_of(folder, num_hidden_layers=1)
    assert not any(name.startswith("model.layers.1.") for name, _ in meta_model(folder).named_parameters())


def test_values_are_checked_again_once_the_file_is_copied_again(tmp_path: Path, tiny_llama: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "folder"))
    folders.tensors(lambda held: held[folders.NORM].fill_(torch.nan), folders.NORM)(folder)
    (finding,) = check_checkpoint(folder, values=True).findings
    assert (finding.code, finding.fix) == ("nan", "download or copy the file again, or save the model again.")
    for path in tiny_llama.iterdir():
        shutil.copy(path, folder)
    assert check_checkpoint(folder, values=True).ok


def test_sizes_that_are_corrected_are_loaded(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "folder"))
    config_of(folder, vocab_size=90_000_000)
    with pytest.raises(CheckpointError, match=r"Correct its sizes, or save the model again\."):
        load_peft_on_rank(folder, tiny_adapter)
    config_of(folder, vocab_size=101)
    assert load_peft_on_rank(folder, tiny_adapter).load_report.ok
