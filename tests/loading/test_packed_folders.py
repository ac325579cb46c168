"""Folders packed by bitsandbytes: the whole ones work in every verb, and each damaged one is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from models import save_adapter, tokenizer
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file

from safe_loading import (
    CheckpointError,
    Transparent,
    Workload,
    audit_model,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    plan_device_map,
    predict_memory,
    prepare_and_wrap,
    verify_merge,
)
from safe_loading._model.quantized.kbit_preparation import KbitPreparation, preparation_of
from safe_loading._model.quantized.sizes import bytes_of as bytes_of_tensor

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from packed import PACKINGS, Tensors, edit, edit_config, load, save_packed, save_plain

LAYER = "model.layers.1.mlp.up_proj."
W = f"{LAYER}weight"
STATE = f"{W}.quant_state.bitsandbytes__nf4"
TOKENS = torch.arange(24).view(2, 12) % 101


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Path]]:
    """Return the packed base of a kind and a width, and an adapter of it; each is saved once."""
    root, made = tmp_path_factory.mktemp("packed"), dict[Any, Path]()

    def of(kind: str, width: int) -> tuple[Path, Path]:
        if width not in made:
            made[width] = save_plain(root / f"plain {width}", width)
            made[-width] = save_adapter(root / f"adapter {width}", made[width])
        if (kind, width) not in made:
            made[kind, width] = save_packed(made[width], root / f"{kind} {width}", kind)
        return made[kind, width], made[-width]

    return of


def _make_nothing(_: object) -> None:
    """Make a trainer without its parts."""


@pytest.mark.each_value
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("kind", PACKINGS)
def test_a_whole_folder_works_in_every_verb(folders: Any, tmp_path: Path, kind: str, width: int) -> None:
    base, adapter = folders(kind, width)
    report = check_checkpoint(base, values=True)
    assert report.findings == (), report
    ours, plain = load_peft_on_rank(adapter, base), PeftModel.from_pretrained(load(base), adapter)
    with torch.no_grad():
        assert torch.equal(ours(TOKENS).logits, plain.eval()(TOKENS).logits)
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    # of another load: bitsandbytes' first forward rounds the scales to bfloat16 on CPUs with AVX-512
    expected = merge_lora_inplace(load_peft_on_rank(adapter, base), dequantize=True).state_dict()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys() - ({"lm_head.weight"} - written.keys())
    for name, tensor in written.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    (use,) = plan_device_map(base, {"cpu": "1GB"}).devices
    model = load(base)
    assert use.weights + use.buffers == sum(map(bytes_of_tensor, [*model.parameters(), *model.buffers()]))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 nested"])
def test_a_table_that_a_narrow_default_dtype_rounded_changes_no_value(folders: Any, tmp_path: Path, kind: str) -> None:
    """bitsandbytes keeps its table in torch's default dtype while it quantizes, and never reads it again."""
    base, adapter = folders(kind, 128)
    rounded = Path(shutil.copytree(base, tmp_path / "rounded"))
    edit(rounded, lambda t: t.update({k: v.bfloat16() for k, v in t.items() if k.endswith(".weight.quant_map")}))
    assert load(rounded).get_submodule(LAYER[:-1]).weight.quant_state.code.dtype == torch.bfloat16
    assert check_checkpoint(rounded, values=True).findings == ()
    merge_lora_checkpoint(base, adapter, tmp_path / "right", dequantize=True)
    merge_lora_checkpoint(rounded, adapter, tmp_path / "out", dequantize=True)
    in_memory = merge_lora_inplace(load_peft_on_rank(rounded, adapter), dequantize=True).state_dict()
    right = load_file(tmp_path / "right" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, right[name]), name
        assert torch.equal(tensor, in_memory[name].to(tensor.dtype)), name
    load(tmp_path / "right", kind).save_pretrained(tmp_path / "codes")
    edit(tmp_path / "codes", lambda t: t.update({k: v.bfloat16() for k, v in t.items() if k.endswith(".quant_map")}))
    assert verify_merge(base, adapter, tmp_path / "codes").ok


def described(**fields: Any) -> Callable[[Tensors], object]:
    """Change the description of a weight; an entry of None is deleted."""

    def change(tensors: Tensors) -> None:
        facts = json.loads(bytes(tensors[STATE].tolist())) | fields
        kept = {key: value for key, value in facts.items() if value is not None}
        tensors[STATE] = torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)

    return change


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def cut(name: str, count: int | None = None) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        size = len(tensors[name]) // 2 if count is None else count
        tensors[name] = tensors[name][:size].clone()

    return change


def bytes_of(data: bytes) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({STATE: torch.tensor(list(data), dtype=torch.uint8)})


def as_after_a_forward(tensors: Tensors) -> None:
    """What bitsandbytes 0.50 saves after a forward on a CPU with AVX-512."""
    tensors[f"{W}.absmax"] = tensors[f"{W}.absmax"].view(256, -1).T.contiguous().bfloat16()


ALL = [STATE, f"{W}.absmax", f"{W}.quant_map"]
DAMAGES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no absmax": ("nf4", without(f"{W}.absmax"), f"lacks {W}.absmax"),
    "no quant_map": ("nf4", without(f"{W}.quant_map"), f"lacks {W}.quant_map"),
    "no quant_state": ("nf4", without(STATE), f"no description of its codes ({STATE})"),
    "no statistics": ("nf4", without(*ALL), "no statistics that decode them"),
    "no statistics of codes in bfloat16": ("nf4 as bfloat16", without(*ALL), "no statistics that decode them"),
    "no weight": ("nf4", without(W), "and not the weight"),
    "no nested_absmax": ("nf4 nested", without(f"{W}.nested_absmax"), f"lacks {W}.nested_absmax"),
    "no nested_quant_map": ("nf4 nested", without(f"{W}.nested_quant_map"), f"lacks {W}.nested_quant_map"),
    "nothing nested": (
        "nf4 nested",
        without(f"{W}.nested_quant_map", f"{W}.nested_absmax"),
        f"lacks {W}.nested_absmax",
    ),
    "nested and not described so": (
        "nf4 nested",
        described(nested_blocksize=None, nested_dtype=None, nested_offset=None),
        "says nothing of nested statistics",
    ),
    "an empty nested_absmax": ("nf4 nested", cut(f"{W}.nested_absmax", 0), "F32 [0]"),
    "short absmax": ("nf4", cut(f"{W}.absmax"), "its 32768 elements in blocks of 64 need"),
    "short quant_map": ("nf4", cut(f"{W}.quant_map"), "F32 [8]"),
    "half the codes": ("nf4", cut(W), "is 8192 bytes in U8"),
    "half the codes in float32": ("nf4 as float32", cut(W), "is 8192 bytes in F32"),
    "another blocksize": ("nf4", described(blocksize=128), "in blocks of 128 need"),
    "no blocksize": ("nf4", described(blocksize=None), "blocksize: None"),
    "a blocksize of 0": ("nf4", described(blocksize=0), "blocksize: 0"),
    "another nested_blocksize": ("nf4 nested", described(nested_blocksize=64), "nested_blocksize: 64"),
    "an infinite offset": ("nf4 nested", described(nested_offset="inf"), "nested_offset: 'inf'"),
    "another nested_dtype": ("nf4 nested", described(nested_dtype="int"), "nested_dtype: 'int'"),
    "another type": ("nf4", described(quant_type="fp4"), "the name of its tensor says nf4"),
    "another dtype": ("nf4", described(dtype="uint8"), "dtype: 'uint8'"),
    "one size": ("nf4", described(shape=[32768]), "shape: [32768]"),
    "no shape": ("nf4", described(shape=None), "shape: None"),
    "no JSON": ("nf4", bytes_of(b"{'quant_type'"), "is not valid JSON"),
    "a list": ("nf4", bytes_of(b"[1]"), "not an object"),
    "no text": ("nf4", bytes_of(b"\xff\xfe"), "not valid UTF-8"),
    "two descriptions": (
        "nf4",
        lambda tensors: tensors.update({STATE.replace("nf4", "fp4"): tensors[STATE].clone()}),
        "two descriptions",
    ),
    "after a forward": ("nf4", as_after_a_forward, "is BF16 [2, 256]"),
    "no SCB": ("int8", without(f"{LAYER}SCB"), "no statistics that decode them"),
    "short SCB": ("int8", cut(f"{LAYER}SCB"), "its 256 rows need"),
    "8 bits without the weight": ("int8", without(W), "and not the weight"),
    "codes in the order of a card": (
        "int8",
        lambda tensors: tensors.update({f"{LAYER}weight_format": torch.tensor(2, dtype=torch.uint8)}),
        "in the order of a card",
    ),
    "8 bits over a plain weight": (
        "int8",
        lambda tensors: tensors.update({W: tensors[W].bfloat16()}),
        "is BF16 [256, 128]",
    ),
}


def refusals(base: Path, adapter: Path, output: Path) -> dict[str, Callable[[], object]]:
    """Return the verbs that read a base from its folder."""
    return {
        "load": lambda: load_peft_on_rank(adapter, base),
        "merge": lambda: merge_lora_checkpoint(base, adapter, output, dequantize=True),
        "plan": lambda: plan_device_map(base, {"cpu": "1GB"}),
        "predict": lambda: predict_memory(base, Workload.generate(1, 8)),
    }


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_refused_by_name_in_every_verb(folders: Any, tmp_path: Path, kind: str) -> None:
    packing, damage, words = DAMAGES[kind]
    sound, adapter = folders(packing, 128)
    base = Path(shutil.copytree(sound, tmp_path / "base"))
    edit(base, damage)
    report = check_checkpoint(base)
    assert [finding.code for finding in report.findings] == ["packed-statistics"], report
    assert not report.ok
    assert words in report.findings[0].message
    assert LAYER in report.findings[0].problem
    for verb, call in refusals(base, adapter, tmp_path / "out").items():
        with pytest.raises(CheckpointError) as refused:
            call()
        assert words in str(refused.value), verb
    assert not (tmp_path / "out").exists()


def test_weights_of_one_damage_are_one_finding_and_its_advice_works(folders: Any, tmp_path: Path) -> None:
    sound, adapter = folders("nf4", 128)
    base = Path(shutil.copytree(sound, tmp_path / "base"))
    edit(base, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".absmax")])
    (finding,) = check_checkpoint(base).findings
    assert "so it is with 13 more" in finding.message
    assert finding.fix == "download or copy the folder again, or quantize the model again and save it."
    shutil.copytree(sound, base, dirs_exist_ok=True)
    again = save_packed(save_plain(tmp_path / "plain"), tmp_path / "again", "nf4")
    loaded = [load_peft_on_rank(adapter, folder) for folder in (base, again)]
    assert all(torch.equal(a, b) for a, b in zip(*(each.parameters() for each in loaded), strict=True))


@pytest.mark.parametrize(("kind", "right"), [("nf4", "load_in_4bit"), ("int8", "load_in_8bit")])
def test_a_config_of_the_other_bits_is_refused_and_the_advice_works(
    folders: Any, tmp_path: Path, kind: str, right: str
) -> None:
    sound, adapter = folders(kind, 128)
    base = Path(shutil.copytree(sound, tmp_path / "base"))
    wrong = {"load_in_4bit", "load_in_8bit"} - {right}
    edit_config(base, **{right: False, wrong.pop(): True})
    (finding,) = check_checkpoint(base).findings
    assert finding.fix.startswith(f"set {right} to true")
    for call in refusals(base, adapter, tmp_path / "out").values():
        with pytest.raises(CheckpointError, match=f"set {right} to true"):
            call()
    edit_config(base, load_in_4bit=right == "load_in_4bit", load_in_8bit=right == "load_in_8bit")
    assert check_checkpoint(base).findings == ()
    load_peft_on_rank(adapter, base)


@pytest.mark.parametrize("skips", ["null", "lm_head", ["lm_head", None], 5])
def test_skips_that_are_no_list_of_names_are_refused_and_the_advice_works(
    folders: Any, tmp_path: Path, skips: Any
) -> None:
    sound, adapter = folders("nf4", 128)
    base = Path(shutil.copytree(sound, tmp_path / "base"))
    edit_config(base, llm_int8_skip_modules=skips)
    (finding,) = check_checkpoint(base).findings
    assert (finding.code, finding.fix) == (
        "config-class",
        "write null without quotes, or a list of names of modules.",
    )
    for call in refusals(base, adapter, tmp_path / "out").values():
        with pytest.raises(CheckpointError, match=r"llm_int8_skip_modules is .*must be a list of names of modules"):
            call()
    for mended in (None, ["lm_head"]):
        edit_config(base, llm_int8_skip_modules=mended)
        assert check_checkpoint(base).ok
        load_peft_on_rank(adapter, base)


class Counted(Transparent):
    """Code of a user around the model."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_packed_folder_is_audited_and_wrapped(folders: Any, kind: str) -> None:
    base, adapter = folders(kind, 128)
    model = load_peft_on_rank(adapter, base, is_trainable=True)
    assert audit_model(model, Workload.train(2, 12)).findings == ()
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped: Any = prepare_and_wrap(load(base), config, Counted)
    torch.manual_seed(0)
    plain: Any = get_peft_model(prepare_model_for_kbit_training(load(base)), config)
    wrapped.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(wrapped.eval()(TOKENS).logits, plain.eval()(TOKENS).logits)
    assert wrapped.calls == 1


def test_trl_trains_a_packed_folder_as_it_trains_what_peft_loads(folders: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    base, adapter = folders("nf4", 128)
    options: dict[str, Any] = {"max_steps": 2, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}

    def trained(model: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        args = trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], dataset_kwargs={"skip_prepare_dataset": True}, **options
        )
        data = datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()})
        trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer()).train()
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    ours = trained(load_peft_on_rank(adapter, base, is_trainable=True))
    plain = trained(PeftModel.from_pretrained(load(base), adapter, is_trainable=True))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in ours.items())


def test_factors_that_trl_rounded_are_cast_back_after_the_trainer_is_made(folders: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    base, _ = folders("nf4", 128)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    args = trl.SFTConfig(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        max_steps=2,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    data = datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()})
    sft = trl.SFTTrainer(load(base), args, train_dataset=data, processing_class=tokenizer(), peft_config=config)

    def told() -> list[str | None]:
        report = audit_model(sft.model, Workload.train(2, 12), sft, forecast=False)
        return [finding.fix for finding in report.findings if finding.code == "SL143"]

    (fix,) = told()
    assert str(fix).startswith("cast what is trained back to float32 once the trainer is made")
    trained = [parameter for parameter in sft.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    assert told() == []
    before = [parameter.detach().clone() for parameter in trained]
    sft.train()
    moved = [float((parameter != old).float().mean()) for parameter, old in zip(trained, before, strict=True)]
    assert min(moved) > 0.5


def test_a_forecast_has_the_dtypes_of_whoever_prepares_the_base(folders: Any, tmp_path: Path) -> None:
    """trl's own trainer, peft's own preparation and neither: the bytes of weights and adapter, and who it was."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    base, _ = folders("nf4", 128)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    step = Workload.train(2, 12, adapter=config)
    args = trl.SFTConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    data = datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()})
    sft = trl.SFTTrainer(load(base), args, train_dataset=data, processing_class=tokenizer(), peft_config=config)
    prepared: Any = get_peft_model(prepare_model_for_kbit_training(load(base)), config)
    back: Any = prepare_model_for_kbit_training(load(base))
    for name, module in back.named_modules():  # as axolotl does it, whose trainers are known by their module
        if "norm" in name or (("embed_tokens" in name or "lm_head" in name) and hasattr(module, "weight")):
            module.to(torch.bfloat16)
    of_axolotl = type("Trainer", (SimpleNamespace,), {"__module__": "axolotl.core.trainers.base"})
    trainers = {
        "axolotl": of_axolotl(model=get_peft_model(back, config)),
        "trl": sft,
        "peft": SimpleNamespace(model=prepared),
        "none": SimpleNamespace(model=get_peft_model(load(base), config)),
    }
    for word, trainer in trainers.items():
        assert preparation_of(trainer) == word
        found = predict_memory(base, step, prepare_for_kbit=cast("KbitPreparation", word)).components
        real = predict_memory(trainer.model, step.replace(adapter=None)).components
        assert (found["weights"], found["adapters"]) == (real["weights"], real["adapters"])
        report = audit_model(base, step, trainer)
        assert report.forecast is not None
        assert report.forecast.components == found
    assert preparation_of(SimpleNamespace(model=torch.nn.Linear(2, 2))) is None
    of_both = type("Trainer", (trl.SFTTrainer,), {"__module__": "axolotl.core.trainers.dpo", "__init__": _make_nothing})
    assert preparation_of(of_both()) == "axolotl"
