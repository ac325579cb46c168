"""load_at_prepare: scripts with one line more, under Trainer, TRL and accelerate, equal to their plain runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import needs
from rank_server import RankServer
from trainer_matrix import BY_HAND, CASES, NAMED, OTHER_NORMS, table

PRELUDE = """
import pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
import datasets
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
datasets.disable_progress_bars()
from trainer_matrix import *
tell_accelerate()
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), pathlib.Path(sys.argv[1])
base = folder / "base"
if rank == 0:
    save_base(base)
dist.barrier()
"""
MATRIX = """
compare, cases = {"by hand": (by_hand, BY_HAND), "by name": (by_name, NAMED)}.get(sys.argv[2], (outcome, CASES))
for case in cases:
    if str(case) in sys.argv[3].split(","):
        report(**{str(case): compare(case, base, folder / str(case))})
dist.barrier()
dist.destroy_process_group()
"""
SCRIPT = """
import os
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM,
    LlamaForSequenceClassification, PreTrainedModel,
)
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from fsdp_cases import error_of
from safe_loading import load_at_prepare
from safe_loading._sharding.peak_memory import Peak

# all that a run can be told at once
settings = Case("Trainer", "LoRA", "FULL")
options = dict(
    bf16=True, gradient_accumulation_steps=2, max_grad_norm=0.3,
    fsdp_config={"activation_checkpointing": True, "cpu_ram_efficient_loading": True, "reshard_after_forward": False},
)
plain_run = run_trainer(settings, base, folder / "plain", road="plain", **options)
lean_run = run_trainer(settings, base, folder / "lean", road="block", **options)
model = lean_run.model
report(settings=[
    history(plain_run) == history(lean_run), differing(weights(plain_run.model), weights(model)),
    sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
    type(model.base_model.model.model.layers[0]).__name__,
    model.fsdp_report.bytes_sent if rank else 0,
    [finding.code for finding in model.fsdp_report.findings],
])
os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)

# evaluation with generate, the best model at the end, and the final save
best = Case("Seq2SeqTrainer", "full", "FULL")
options = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True)
plain_run = run_trainer(best, base, folder / "best plain", road="plain", **options)
lean_run = run_trainer(best, base, folder / "best", road="block", **options)
lean_run.save_model(str(folder / "best" / "saved"))
dist.barrier()
saved = AutoModelForCausalLM.from_pretrained(folder / "best" / "saved", attn_implementation="eager")
evaluated = [[entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    for run in (plain_run, lean_run)]
report(best=[
    history(plain_run) == history(lean_run), evaluated[0] == evaluated[1], len(evaluated[0]),
    differing(weights(lean_run.model), weights(saved)), differing(weights(plain_run.model), weights(saved)),
])

# a new head with a single row, of which the second rank owns nothing
def classifier(lean):
    torch.manual_seed(5)
    with load_at_prepare() if lean else contextlib.nullcontext():
        return AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, attn_implementation="eager")

def trained_classifier(lean):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none"))
    model = classifier(lean).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        batch = torch.arange(2, 34).reshape(2, 16)
        accelerator.backward(model(input_ids=batch, labels=torch.tensor([0.5, 2.0])).loss)
        optimizer.step()
        optimizer.zero_grad()
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return weights(model), torch.get_rng_state(), len(held), {id(parameter) for parameter in held} == own
plain_run, lean_run = trained_classifier(False), trained_classifier(True)
report(head=[differing(plain_run[0], lean_run[0]), torch.equal(plain_run[1], lean_run[1]), lean_run[2:]])

# a file in float32 that is loaded in bfloat16, and trained with copies in float32
def loaded_in_bfloat16(around):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none"), mixed_precision="bf16")
    with around:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return weights(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0])
plain_weights = loaded_in_bfloat16(contextlib.nullcontext())
report(rounded=[
    differing(plain_weights, loaded_in_bfloat16(load_at_prepare(verify="bytes"))),
    sorted({str(value.dtype) for value in plain_weights.values()}),
])

# when FSDP1 gathers the next unit
def prefetching(around, **told):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none", 1))
    for name, value in told.items():
        setattr(accelerator.state.fsdp_plugin, name, value)
    with around:
        model = AutoModelForCausalLM.from_pretrained(base)
    units = FullyShardedDataParallel.fsdp_modules(accelerator.prepare(model))
    return sorted({(str(unit.backward_prefetch), unit.forward_prefetch, unit.limit_all_gathers) for unit in units})
told = dict(backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True, limit_all_gathers=False)
report(prefetching=[
    [prefetching(contextlib.nullcontext(), **each), prefetching(load_at_prepare(), **each)] for each in ({}, told)
])

# classes of layers that are not the model's own hints, as most files name them for models of text and images
def named_units(around):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none"))
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = ["LlamaDecoderLayer", "LlamaMLP"]
    with around:
        model = AutoModelForCausalLM.from_pretrained(base)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    return [name for name, module in prepared.named_modules() if isinstance(module, FSDPModule)]
report(named_units=[named_units(contextlib.nullcontext()), named_units(load_at_prepare())])

# memory, from from_pretrained to the first step
if rank == 0:
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8)
    large = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8000)).save_pretrained(folder / "large")
dist.barrier()
AcceleratorState._reset_state(reset_partial_state=True)
accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none"))
with Peak(torch.device("cpu")) as peak:
    with load_at_prepare():
        model = AutoModelForCausalLM.from_pretrained(folder / "large")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
report(memory=[peak.bytes, sum(p._local_tensor.nbytes for p in model.parameters()), model.fsdp_report.model_bytes])

def lean(kind=AutoModelForCausalLM, path=base, **options):
    with load_at_prepare():
        return kind.from_pretrained(path, **options)

def prepared(model):
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = lean(), lean()

stepped = lean()
early = torch.optim.SGD(stepped.parameters(), lr=0.1, momentum=0.9)
early.state[next(stepped.parameters())] = {"momentum_buffer": torch.zeros(1)}
four_bit, eight_bit = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)
accelerator.state.distributed_type, true_type = "MULTI_GPU", accelerator.state.distributed_type
refused = {"no FSDP": error_of(lambda: prepared(lean()))}
accelerator.state.distributed_type = true_type
before = PreTrainedModel.__dict__["from_pretrained"]
report(refused=refused | {
    "forward": error_of(lambda: lean()(input_ids=torch.ones(1, 4, dtype=torch.long))),
    "copy": error_of(lambda: __import__("copy").deepcopy(lean())(input_ids=torch.ones(1, 4, dtype=torch.long))),
    "options": error_of(lambda: lean(device_map="auto", quantization_config=four_bit)),
    "8 bits": error_of(lambda: lean(quantization_config=eight_bit)),
    "dora": error_of(lambda: prepared(get_peft_model(
        lean(quantization_config=four_bit), LoraConfig(use_dora=True, target_modules=["q_proj"])
    ))),
    "two": error_of(lambda: prepared(Both())),
    "two models": error_of(lambda: accelerator.prepare(lean(), lean(), early)),
    "stepped": error_of(lambda: accelerator.prepare(stepped, early)),
    "verify": error_of(lambda: load_at_prepare(verify="all").__enter__()),
})
ids = torch.ones(1, 4, dtype=torch.long)
references = [prepared(__import__("copy").deepcopy(made))[0] for made in (lean(), get_peft_model(lean(), LoraConfig()))]
report(copies=[torch.equal(each(input_ids=ids).logits, LlamaForCausalLM.from_pretrained(base)(input_ids=ids).logits)
    for each in references])
report(plain=[
    PreTrainedModel.__dict__["from_pretrained"] is before,
    differing(weights(LlamaForCausalLM.from_pretrained(base)), weights(AutoModelForCausalLM.from_pretrained(base))),
    lean(output_loading_info=True)[1]["missing_keys"] == set(),
])
with load_at_prepare():  # what is around the base, and a copy of a module of it, takes no memory
    copied = get_peft_model(lean(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    packed = __import__("copy").deepcopy(get_peft_model(
        lean(quantization_config=four_bit), LoraConfig(target_modules=["q_proj"])
    ))
report(empty_packed=sum(parameter.untyped_storage().nbytes() for name, parameter in packed.named_parameters()
    if "lora_" not in name))
report(empty=sum(parameter.untyped_storage().nbytes() for name, parameter in copied.named_parameters()
    if "lora_" not in name))
dist.barrier()
dist.destroy_process_group()
"""
SAMPLE = ["SFTTrainer LoRA SHARDED 2", "accelerate full none 1", "accelerate QLoRA SHARDED 2"]


def check(found: list[dict[str, Any]], cases: list[str]) -> None:
    for case in cases:
        for facts in found:
            each = dict(facts[case])
            assert each.pop("steps") == 4
            if case in OTHER_NORMS:
                assert each["largest"] < 1e-6
                continue
            each.pop("largest")
            assert each in (
                {"log": True, "weights": []},
                {"log": True, "weights": [], "resumed log": True, "resumed": []},
            )


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(PRELUDE + SCRIPT, 2, args=[tmp_path_factory.mktemp("prepare")], timeout=600).found


def test_a_sample_of_trainers_equals_its_plain_runs(rank_server: RankServer, tmp_path: Path) -> None:
    args = [tmp_path, "lines", ",".join(SAMPLE)]
    check(rank_server.run(PRELUDE + MATRIX, 2, args=args, timeout=240).found, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted({case.trainer for case in CASES}))
def test_every_trainer_equals_its_plain_runs(rank_server: RankServer, tmp_path: Path, trainer: str) -> None:
    cases = [str(case) for case in CASES if case.trainer == trainer]
    args = [tmp_path, "lines", ",".join(cases)]
    check(rank_server.run(PRELUDE + MATRIX, 2, args=args, timeout=600).found, cases)


def wrapped_by_hand(rank_server: RankServer, folder: Path, cases: list[str]) -> None:
    args = [folder, "by hand", ",".join(cases)]
    check(rank_server.run(PRELUDE + MATRIX, 2, args=args, timeout=600).found, cases)


def test_a_model_that_was_wrapped_by_hand_trains_as_ever(rank_server: RankServer, tmp_path: Path) -> None:
    wrapped_by_hand(rank_server, tmp_path, ["SFTTrainer LoRA FULL 2"])


@pytest.mark.slow
def test_every_model_that_was_wrapped_by_hand_trains_as_ever(rank_server: RankServer, tmp_path: Path) -> None:
    wrapped_by_hand(rank_server, tmp_path, [str(case) for case in BY_HAND])


def given_a_folder(rank_server: RankServer, folder: Path, cases: list[str]) -> None:
    args = [folder, "by name", ",".join(cases)]
    for facts in rank_server.run(PRELUDE + MATRIX, 2, args=args, timeout=600).found:
        for case in cases:
            assert facts[case].pop("largest") == 0.0, case
            assert facts[case] == {"steps": 4, "log": True, "weights": [], "ours": True}, case


def test_a_trainer_that_loads_its_models_itself_may_be_made_in_the_block(
    rank_server: RankServer, tmp_path: Path
) -> None:
    """DPO's reference is given to no prepare, and the new head of a reward model is in no report of missing keys."""
    given_a_folder(rank_server, tmp_path, ["DPOTrainer full none 2", "RewardTrainer LoRA none 2"])


@pytest.mark.slow
def test_every_trainer_that_loads_its_models_itself_may_be_made_in_the_block(
    rank_server: RankServer, tmp_path: Path
) -> None:
    given_a_folder(rank_server, tmp_path, [str(case) for case in NAMED])


def test_the_table_in_the_documentation_is_that_of_the_tests() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "fsdp.md").read_text(encoding="utf-8")


def test_all_that_accelerate_was_told_holds(found: list[dict[str, Any]]) -> None:
    for facts in found:
        logs, differing, dtypes, layer, sent, codes = facts["settings"]
        assert logs
        assert differing == []
        assert dtypes == ["torch.float32"]
        assert layer == "CheckpointWrapper"
        assert sent == 0
        assert codes == []


def test_fsdp1_gathers_the_next_unit_when_accelerate_was_told(found: list[dict[str, Any]]) -> None:
    for facts in found:
        for plain, lean in facts["prefetching"]:
            assert plain == lean
        (default, _), (told, _) = facts["prefetching"]
        assert default == [["None", False, True]]
        assert told == [["BackwardPrefetch.BACKWARD_POST", True, False]]


@needs("accelerate", "1.15")
def test_embeddings_and_head_are_units_beside_the_layers_that_accelerate_was_told(found: list[dict[str, Any]]) -> None:
    for plain, lean in (facts["named_units"] for facts in found):
        assert sorted(plain) == sorted(lean)
        assert {"model.embed_tokens", "lm_head", "model.layers.0.mlp"} < set(plain)


def test_evaluation_the_best_model_and_its_save_are_those_of_a_plain_run(found: list[dict[str, Any]]) -> None:
    assert [facts["best"] for facts in found] == [[True, True, 2, [], []]] * 2


def test_a_new_head_is_drawn_as_ever_and_a_rank_may_own_nothing_of_it(found: list[dict[str, Any]]) -> None:
    for facts in found:
        differing, same_draws, (held, own) = facts["head"]
        assert differing == []
        assert same_draws
        assert held > 0
        assert own


def test_values_are_rounded_to_the_dtype_they_were_loaded_in(found: list[dict[str, Any]]) -> None:
    assert [facts["rounded"] for facts in found] == [[[], ["torch.float32"]]] * 2


def test_no_rank_holds_more_than_its_shard_and_64_mib(found: list[dict[str, Any]]) -> None:
    for facts in found:
        peak, shard, model = facts["memory"]
        assert shard < 0.51 * model
        assert peak < shard + (64 << 20) < model


REFUSED = {
    "no FSDP": ["accelerate runs MULTI_GPU, not FSDP", "fsdp=True", "--use_fsdp"],
    "forward": ["has no weights yet", "outside of load_at_prepare()"],
    "copy": ["has no weights yet"],
    "options": ["device_map", "outside of load_at_prepare()"],
    "8 bits": ["only BitsAndBytesConfig(load_in_4bit=True)", "from_pretrained"],
    "dora": ["q_proj.weight are needed before accelerator.prepare", "packed in 4 bits"],
    "two": ["Several models", "LlamaForCausalLM"],
    "two models": ["one sharded model a call"],
    "stepped": ["SGD has taken steps"],
    "verify": ["verify='all'"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_go_wrong_is_refused(found: list[dict[str, Any]], case: str) -> None:
    for facts in found:
        for word in REFUSED[case]:
            assert word in facts["refused"][case]


def test_after_the_block_from_pretrained_is_as_before(found: list[dict[str, Any]]) -> None:
    assert [facts["plain"] for facts in found] == [[True, [], True]] * 2


def test_a_copy_computes_once_it_is_prepared(found: list[dict[str, Any]]) -> None:
    assert [facts["copies"] for facts in found] == [[True, True]] * 2


def test_weights_that_are_read_later_and_copies_of_them_take_no_memory(found: list[dict[str, Any]]) -> None:
    assert all(facts["empty"] < 1000 and facts["empty_packed"] < 1000 for facts in found)
