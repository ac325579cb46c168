"""trl's own trainers beside the forecast of their step: KTO's second pass, and what an audit reads from a trainer."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from models import tokenizer
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
)

from safe_loading import ArgumentError, Spread, TraceError, Workload, audit_model, plan_device_map, predict_memory
from safe_loading._memory.trace import fused_lm_head
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.formats.four_bit import QLORA

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=1001)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
OF_SCORES = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
ROWS, TOKENS = 4, 64


def made() -> Any:
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).train()  # a trainer writes to the config


@pytest.fixture
def trl() -> Any:
    pytest.importorskip("datasets", reason="datasets is not installed: it comes with trl")
    return pytest.importorskip("trl", minversion="1.16", reason="this trl has no fused LM head")


def table(columns: dict[str, list[Any]]) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # with a fingerprint: to compute one, datasets 5.2 pickles the table, which pyarrow 26 forbids
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
    }


def kto_trainer(trl: Any, model: Any, reference: Any, folder: Path) -> Any:
    words = [" ".join(f"w{number}" for number in range(3, 9))] * 8
    rows = table({"prompt": words, "completion": words, "label": [True, False] * 4})
    args = trl.KTOConfig(
        **options(folder), gradient_checkpointing=False, max_length=TOKENS, train_sampling_strategy="sequential"
    )
    return trl.KTOTrainer(model, ref_model=reference, args=args, train_dataset=rows, processing_class=tokenizer())


def kto_batch(length: int, mismatched: int) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = {"label": torch.tensor([True, False] * (ROWS // 2))}
    for prefix, tokens in (("", length), ("KL_", mismatched)):
        ids = torch.full((ROWS, tokens), 5)
        for name in ("input_ids", "attention_mask", "completion_mask"):
            batch[prefix + name] = ids if name == "input_ids" else torch.ones_like(ids)
    return batch


@pytest.mark.parametrize("adapter", [None, LORA])
def test_the_second_pass_of_kto_is_within_the_forecast_of_its_longest_rows(
    trl: Any, tmp_path: Path, adapter: LoraConfig | None
) -> None:
    model: Any = made()
    step = Workload.train(ROWS, TOKENS, optimizer="none", adapter=adapter, fused_lm_head=True)
    step = step.replace(reference="model" if adapter is None else "adapter_off")
    alike, longer = (
        above_start(trace_step(model, step.replace(sequence_length=length)), "forward", "backward")
        for length in (TOKENS, TOKENS + 16)
    )
    running = model if adapter is None else get_peft_model(model, adapter)
    trainer = kto_trainer(trl, running, made() if adapter is None else None, tmp_path)

    def allocated(mismatched: int) -> int:
        def run() -> None:
            loss = trainer.compute_loss(trainer.model.train(), kto_batch(TOKENS, mismatched))
            loss.backward()

        with fused_lm_head.fused_stand_ins():
            peak = peak_above_start(run)
        trainer.model.zero_grad(set_to_none=True)
        return peak

    assert allocated(TOKENS) == pytest.approx(alike, rel=0.002)
    assert alike < allocated(TOKENS + 16) <= longer * 1.002  # a completion of another row may be longer
    found = audit_model(running, step.replace(adapter=None, fused_lm_head=False, reference=None), trainer).forecast
    assert found is not None
    assert found.workload == step.replace(adapter=None)


def test_the_head_is_that_of_the_trainer(trl: Any) -> None:
    model = get_peft_model(made(), LORA).train()
    step = Workload.train(ROWS, TOKENS)

    def report(kind: type, **attributes: Any) -> Any:
        made = kind.__new__(kind)
        vars(made).update({"model": model, "args": None, "optimizer": None, **attributes})
        return audit_model(model, step, made)

    assert report(trl.SFTTrainer).forecast.workload == step.replace(fused_lm_head=True)
    # this needs the logits
    assert not report(trl.SFTTrainer, compute_loss_func=print).forecast.workload.fused_lm_head
    smoothed = step.replace(fused_lm_head=True, label_smoothing=True)  # with logits, and once more for the metrics
    assert report(trl.SFTTrainer, label_smoother=print).forecast.workload == smoothed
    assert not report(trl.RewardTrainer).forecast.workload.fused_lm_head

    class Weighted(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return self.compute_loss(*args, **kwargs)

    assert report(Weighted).forecast.workload.fused_lm_head
    assert not report(Weighted).skipped


def test_a_loss_that_no_forecast_knows_is_said_beside_it(trl: Any) -> None:
    model, step = get_peft_model(made(), LORA).train(), Workload.train(ROWS, TOKENS)

    class Distilled(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return (model(**inputs).logits - self.teacher(**inputs).logits).square().mean()

    class Returned(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss

    for teacher, said in ((None, 0), (made().requires_grad_(requires_grad=False), 1)):
        own: Any = Returned.__new__(Returned)
        vars(own).update({"model": model, "args": None, "optimizer": None, "teacher": teacher})
        assert len(audit_model(model, step, own).skipped) == said

    gkd: Any = importlib.import_module("trl.experimental.gkd")
    online: Any = importlib.import_module("trl.experimental.online_dpo")  # which has a training_step of its own
    kinds = (Distilled, "Distilled"), (gkd.GKDTrainer, "GKDTrainer"), (online.OnlineDPOTrainer, "OnlineDPOTrainer")
    for kind, name in kinds:
        trainer = kind.__new__(kind)
        copied = copy.deepcopy(model).unload().requires_grad_(requires_grad=False)
        for teacher in (made().requires_grad_(requires_grad=False), copied):
            vars(trainer).update({"model": model, "args": None, "optimizer": None, "teacher_model": teacher})
            report = audit_model(model, step, trainer)
            assert report.forecast is not None
            assert not report.forecast.workload.fused_lm_head  # it reads logits
            assert [text.partition(",")[0] for text in report.skipped] == [
                f"forecast: what the loss of {name} takes: that of the model itself is counted"
            ]
            assert not {each.code for each in report.findings} & {"SL113", "SL114"}


def trainers(trl: Any, folder: Path, adapter: LoraConfig | None, **said: Any) -> dict[str, Any]:
    """Return a trainer of each of trl's kinds that need no sampling, with an evaluation between its steps."""
    words = [" ".join(f"w{number}" for number in range(3, 9))] * 4
    pairs = {"prompt": words, "chosen": words, "rejected": words[::-1]}
    scoring = LlamaForSequenceClassification(LlamaConfig(**CONFIG.to_diff_dict(), num_labels=1))
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "SFT": (made(), {"text": words}),
        "DPO": (made(), pairs),
        "KTO": (made(), {"prompt": words, "completion": words, "label": [True, False] * 2}),
        "Reward": (scoring, {name: pairs[name] for name in ("chosen", "rejected")}),
    }
    found = {}
    for kind, (model, columns) in kinds.items():
        args = getattr(trl, f"{kind}Config")(**options(folder), max_length=TOKENS, eval_strategy="epoch", **said)
        given = {"ref_model": made()} if kind in ("DPO", "KTO") and adapter is None else {}
        rows, trainer = table(columns), getattr(trl, f"{kind}Trainer")
        found[kind] = trainer(
            model,
            args=args,
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tokenizer(),
            peft_config=OF_SCORES if adapter is not None and kind == "Reward" else adapter,
            **given,
        )
    return found


@pytest.mark.parametrize("adapter", [None, LORA])
def test_the_arguments_say_what_the_audit_of_their_trainer_reads(
    trl: Any, tmp_path: Path, adapter: LoraConfig | None
) -> None:
    for kind, trainer in trainers(trl, tmp_path, adapter, per_device_eval_batch_size=2).items():
        said = Workload.from_training_args(trainer.args, adapter=adapter)
        trained, evaluated = (
            next(iter(loader))["input_ids"]
            for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader())
        )
        assert (said.batch_size, said.eval_batch_size) == (len(trained), len(evaluated)), kind
        step = Workload.train(
            said.batch_size, TOKENS, gradient_checkpointing=said.gradient_checkpointing, optimizer=said.optimizer
        )
        found = audit_model(trainer.model, step, trainer).forecast
        assert found is not None
        # no mixture, so that no coefficient weighs anything
        assert found.workload == said.replace(adapter=None, model_init_kwargs=None, router_aux_loss_coef=0.0), kind


@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize(
    ("kind", "said", "loss"),
    [
        ("ORPO", {}, "orpo"),
        ("CPO", {}, "cpo"),
        ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}, "cpo_without_nll"),
    ],
)
def test_a_loss_of_pairs_takes_what_trls_trainer_does(
    trl: Any, tmp_path: Path, kind: str, said: dict[str, Any], loss: str, adapter: LoraConfig | None
) -> None:
    module: Any = importlib.import_module(f"trl.experimental.{kind.lower()}")
    plain = {"gradient_checkpointing": False, "remove_unused_columns": False}
    args = getattr(module, f"{kind}Config")(**options(tmp_path), **plain, max_length=TOKENS, **said)
    words = " ".join(["w5"] * TOKENS)
    rows = table({"prompt": [words[: TOKENS * 2]] * 8, "chosen": [f" {words}"] * 8, "rejected": [f" {words}"] * 8})
    trainer = getattr(module, f"{kind}Trainer")(
        made(), args, train_dataset=rows, processing_class=tokenizer(), peft_config=copy.deepcopy(adapter)
    )
    step = Workload.from_training_args(args, adapter=adapter)
    assert (step.batch_size, step.pair_loss, step.reference, step.fused_lm_head) == (2 * ROWS, loss, None, False)
    assert step.model_init_kwargs == {"dtype": "auto"}
    batch = next(iter(trainer.get_train_dataloader()))
    # a prompt is taken to be as long as its row
    held = sum(batch[f"{part}_input_ids"].nbytes * 3 for part in ("chosen", "rejected")) + ROWS * TOKENS * 8 * 2

    def run() -> None:
        trainer.compute_loss(trainer.model.train(), batch).backward()

    traced = above_start(trace_step(made(), step.replace(optimizer="none")), "forward", "backward")
    assert traced - held == pytest.approx(peak_above_start(run), abs=256)  # numbers of its metrics
    audited = audit_model(trainer.model, Workload.train(2 * ROWS, TOKENS), trainer).forecast
    assert audited is not None
    assert audited.workload == step.replace(adapter=None, model_init_kwargs=None)


def test_the_reentry_that_trl_asks_for_under_zero_3_is_forecast_without(trl: Any, tmp_path: Path) -> None:
    reentry = {"use_reentrant": True}
    args: Any = trl.SFTConfig(**options(tmp_path), gradient_checkpointing_kwargs=reentry, max_length=TOKENS)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    args.mixed_precision = "no"
    assert Workload.from_training_args(args).gradient_checkpointing == reentry
    assert Workload.from_training_args(args, adapter=LORA).gradient_checkpointing is True
    args.deepspeed_plugin.zero_stage = 2
    assert Workload.from_training_args(args, adapter=LORA).gradient_checkpointing == reentry


def test_what_a_loss_of_pairs_was_not_held_against_is_refused(trl: Any, tmp_path: Path) -> None:
    step = Workload.train(4, 16, pair_loss="cpo")
    assert eval(repr(step), {"Workload": Workload}) == step
    assert Workload.from_facts(step.facts()) == step
    three, four = (predict_memory(CONFIG, step.replace(batch_size=rows)).allocated_peak_bytes for rows in (3, 4))
    assert three == four  # two pairs
    with pytest.raises(ArgumentError, match=r"pair_loss= was not held against any job over ranks\. Forecast one card"):
        predict_memory(CONFIG, step, spread=Spread.ddp(2))
    with pytest.raises(ArgumentError, match="leave labels=False, fused_lm_head="):
        step.replace(fused_lm_head=True)
    others = dict.fromkeys(("input_ids", "attention_mask", "labels", "position_ids"), torch.zeros(4, 16).long())
    with pytest.raises(TraceError, match=r"of rows of text alone, and this model takes attention_mask, .*position_ids"):
        predict_memory(CONFIG, step, inputs=others)
    with pytest.raises(ArgumentError, match=r"pair_loss='dpo': one of"):
        step.replace(pair_loss="dpo")
    module: Any = importlib.import_module("trl.experimental.cpo")
    args = module.CPOConfig(**options(tmp_path), generate_during_eval=True)
    with pytest.raises(ArgumentError, match="generate_during_eval=True"):
        Workload.from_training_args(args)
    pytest.importorskip("bitsandbytes")
    with pytest.raises(TraceError, match="pair_loss= was not held against trl with a base in 4 or 8 bits"):
        predict_memory(CONFIG, step.replace(adapter=LORA), quantization_config=QLORA)


@pytest.mark.parametrize("coefficient", [None, 0.0])
def test_the_loss_of_a_mixtures_routers_is_part_of_the_step(
    trl: Any, tmp_path: Path, coefficient: float | None
) -> None:
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**CONFIG.to_diff_dict(), **sizes, "num_key_value_heads": 2}))
    args = trl.KTOConfig(
        **options(tmp_path), gradient_checkpointing=False, max_length=TOKENS, router_aux_loss_coef=coefficient
    )
    words = [" ".join(f"w{number}" for number in range(3, 9))] * 8
    rows = table({"prompt": words, "completion": words, "label": [True, False] * 4})
    step = Workload.from_training_args(args, adapter=LORA).replace(optimizer="none")
    left_out, ours = (
        above_start(trace_step(model, each), "forward", "backward")
        for each in (step.replace(router_aux_loss_coef=0.0), step)
    )
    trainer = trl.KTOTrainer(
        model, args=args, train_dataset=rows, processing_class=tokenizer(), peft_config=copy.deepcopy(LORA)
    )

    def run() -> None:
        trainer.compute_loss(trainer.model.train(), kto_batch(TOKENS, TOKENS)).backward()

    with fused_lm_head.fused_stand_ins():
        assert peak_above_start(run) == pytest.approx(ours, rel=0.0005)  # KTO has sums besides
    logits = sizes["num_experts"] * ROWS * TOKENS * 4 * 2  # of each of two layers, kept until the backward pass
    assert 0 <= ours - left_out - (logits if coefficient is None else 0) < 2048
    found = audit_model(trainer.model, step.replace(adapter=None, reference=None, router_aux_loss_coef=0.0), trainer)
    assert found.forecast is not None
    assert bool(found.forecast.workload.router_aux_loss_coef) == (coefficient is None)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_folder_is_counted_as_the_trainers_load_it(trl: Any, tmp_path: Path, dtype: str | None) -> None:
    folder = tmp_path / "base"
    made().bfloat16().save_pretrained(folder)
    words = [" ".join(f"w{number}" for number in range(3, 9))] * 2
    pairs = {"chosen": words, "rejected": words[::-1]}
    for kind, columns in {"SFT": {"text": words}, "DPO": {"prompt": words, **pairs}, "Reward": pairs}.items():
        args = getattr(trl, f"{kind}Config")(
            **options(tmp_path), model_init_kwargs={"dtype": dtype} if dtype else None, eval_strategy="no"
        )
        run = getattr(trl, f"{kind}Trainer")(
            str(folder), args=args, train_dataset=table(columns), processing_class=tokenizer()
        )
        step = Workload.from_training_args(args, 32).replace(batch_size=1, reference=None)
        found = predict_memory(folder, step)
        weights, buffers = (
            sum(tensor.nbytes for tensor in tensors) for tensors in (run.model.parameters(), run.model.buffers())
        )
        assert found.components["weights"] == weights + buffers, kind
        assert any("is loaded by trl in float32" in note for note in found.notes) == (dtype is None)
        own = predict_memory(folder, step, dtype="auto")
        assert own.components["weights"] == weights // (2 if dtype is None else 1) + buffers
        assert not any("loaded by trl" in note for note in own.notes)
    assert predict_memory(made(), step.replace(fused_lm_head=False)).notes  # what is made already is as it was made


def test_the_advice_about_a_trainers_dtype_taken(trl: Any, tmp_path: Path) -> None:
    folder, said = tmp_path / "base", {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    made().bfloat16().save_pretrained(folder)

    def findings(**given: Any) -> list[Any]:
        step = Workload.from_training_args(trl.SFTConfig(**said, **given.pop("of_trl", {})), 32)
        plan = plan_device_map(folder, {"cpu": "1GB"}, workload=step, **given)
        return [found for found in plan.findings if found.code == "loaded-by-trainer"]

    (found,) = findings()
    assert 'model_init_kwargs={"dtype": "bfloat16"}' in str(found.fix)
    assert 'dtype="auto"' in str(found.fix)
    assert not findings(of_trl={"model_init_kwargs": {"dtype": "bfloat16"}})
    assert not findings(dtype="auto")
    assert not findings(dtype=torch.float32)  # the caller's own choice, not the trainer's


PAIRS_ON_CUDA = """
    import importlib, tempfile
    import transformers
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from models import tokenizer
    from peft import LoraConfig
    from safe_loading import Workload, predict_memory
    from transformers import LlamaConfig, LlamaForCausalLM

    transformers.logging.set_verbosity_error()
    SIZES = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=2000)
    ROWS, TOKENS = 2, 128
    WORDS = " ".join(["w5"] * 2 * TOKENS)

    def compare(kind, adapter=None, **said):
        module = importlib.import_module(f"trl.experimental.{kind.lower()}")
        args = getattr(module, f"{kind}Config")(
            tempfile.mkdtemp(), per_device_train_batch_size=ROWS, max_length=TOKENS, max_steps=3, report_to=[],
            save_strategy="no", disable_tqdm=True, remove_unused_columns=False, **said,
        )
        adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
        step = Workload.from_training_args(args, adapter=adapter)
        predicted = predict_memory(LlamaConfig(**SIZES), step, capability=(9, 0))
        columns = {"prompt": [WORDS[:TOKENS]] * 16, "chosen": [" " + WORDS] * 16, "rejected": [" " + WORDS] * 16}
        rows = Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")
        getattr(module, f"{kind}Trainer")(
            LlamaForCausalLM(LlamaConfig(**SIZES)), args, train_dataset=rows, eval_dataset=rows,
            processing_class=tokenizer(), peft_config=adapter,
        ).train()
        return [predicted.allocated_peak_bytes, torch.cuda.max_memory_allocated(0)]

    for kind in ("ORPO", "CPO"):
        case(lambda: compare(kind, bf16=False, gradient_checkpointing=False), kind)
        case(lambda: compare(kind, adapter=True), f"{kind}, LoRA")
        case(lambda: compare(kind, eval_strategy="steps", eval_steps=1), f"{kind}, evaluated")
"""


@pytest.mark.gpu
def test_trainers_of_pairs_take_the_forecast_on_a_card(trl: Any, simulated_cuda: CudaRunner) -> None:
    env = {"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": "65536", "SIMCUDA_DEVICES": "1"}
    found = simulated_cuda.run(PAIRS_ON_CUDA, env=env)
    del found["code"]
    assert len(found) == 6
    for name, (predicted, real) in found.items():
        assert predicted == pytest.approx(real, abs=16384), name  # prompts as long as their rows, and numbers
