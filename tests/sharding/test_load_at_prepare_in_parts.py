"""load_at_prepare with accelerate's tensor parallelism: trainers train parts of layers as others train the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import needs
from rank_server import RankServer
from test_load_at_prepare import PRELUDE

pytestmark = needs("transformers", "5.23")

COMMON = (
    PRELUDE
    + """
import logging
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
import trainer_matrix
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from fsdp_cases import error_of, local_bytes
from torch.distributed.device_mesh import init_device_mesh

# peft's other options are refused
trainer_matrix.lora = lambda case: LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")

def told(**sizes):
    AcceleratorState._reset_state(reset_partial_state=True)
    return ParallelismConfig(**{"tp_size": 2, "dp_shard_size": 2, **sizes})
"""
)
TRAINED = (
    COMMON
    + """
def run(case, road, **options):
    # of a model without parts accelerate says that it leaves it whole, and gives each pair of ranks one batch
    options |= dict(parallelism_config=told(**sizes), learning_rate=1e-3, warmup_steps=0)
    return run_trainer(case, base, folder / f"{case} {road}", road=road, **options)

sizes = {"dp_replicate_size": 2} if dist.get_world_size() == 8 else {}
for name in sys.argv[2].split(","):
    trainer, what, checkpoints = name.split()
    case = Case(trainer, what, checkpoints)
    saves, evaluates = dict(save_strategy="steps", save_steps=2), dict(eval_strategy="steps", eval_steps=2)
    options = evaluates if trainer == "Seq2SeqTrainer" else {}
    plain_run, block = run(case, "plain", **options), run(case, "block", **options, **saves)
    resumed = run(case, "block", resume=str(folder / f"{case} block" / "checkpoint-2"), **options)
    # of a sharded state dict Trainer writes no model
    (block.save_model if checkpoints == "FULL" else block.model.save_pretrained)(str(folder / name))
    dist.barrier()
    # of an adapter Trainer saves itself, transformers loads the base that it names
    saved = AutoModelForCausalLM.from_pretrained(folder / name)
    own, facts = weights(block.model), block.model.fsdp_report
    names = {each.replace("base_model.model.", "").replace(".default", ""): each for each in own}
    evaluated = [[each["eval_loss"] for each in trained.state.log_history if "eval_loss" in each]
        for trained in (plain_run, block)]
    report(**{name: {
        "place": [facts.shards, facts.parts], "read": facts.bytes_read, "sent": facts.bytes_sent,
        "local": sum(local_bytes(p) for n, p in block.model.named_parameters() if "lora_" not in n),
        "logged": [history(plain_run), history(block)], "evaluated": evaluated,
        "off": largest_difference(weights(plain_run.model), own),
        "resumed": [history(block) == history(resumed), differing(own, weights(resumed.model))],
        "saved": [n for n, p in saved.named_parameters() if not torch.equal(p, own[names[n.replace(".default", "")]])],
    }})

def split_by_transformers():
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none"), parallelism_config=told(**sizes))
    model = AutoModelForCausalLM.from_pretrained(base, tp_plan="auto", device_mesh=accelerator.torch_device_mesh["tp"])
    try:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ImportError as error:
        return str(error)
report(native=split_by_transformers())

def by_hand(road, *sizes):
    trainer_matrix.MESH = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
    options = dict(parallelism_config=told(), learning_rate=1e-3, warmup_steps=0)
    return run_trainer(Case("Trainer", "full", "FULL"), base, folder / f"{road} {sizes}", road=road, **options)

if dist.get_world_size() == 4:
    plain_run, own = by_hand("plain", 2, 2), by_hand("by hand", 2, 2)
    off = largest_difference(weights(plain_run.model), weights(own.model))
    report(by_hand=[history(plain_run), history(own), off], otherwise=error_of(lambda: by_hand("by hand", 4, 1)))
dist.barrier()
dist.destroy_process_group()
"""
)
SAMPLE = ["Trainer full FULL"]
REST = [
    "Trainer LoRA FULL",
    "Seq2SeqTrainer full SHARDED",
    *(f"{trainer} LoRA SHARDED" for trainer in ("SFTTrainer", "DPOTrainer")),
]


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        pytest.param(SAMPLE, 4, id="sample"),
        pytest.param(REST, 4, marks=pytest.mark.slow, id="rest"),
        pytest.param(SAMPLE, 8, marks=pytest.mark.slow, id="replicas"),
    ],
)
def test_trainers_train_parts_as_the_whole(
    rank_server: RankServer, tmp_path: Path, cases: list[str], ranks: int
) -> None:
    """The plain run has the same shards and batches, and whole layers: they differ in the order of sums alone."""
    for found in rank_server.run(TRAINED, ranks, args=[tmp_path, ",".join(cases)], timeout=300).found:
        assert "cannot import name 'ReplicateParallel'" in found["native"]  # as docs/fsdp.md says of another road
        if ranks == 4:
            wanted, own, off = found["by_hand"]
            assert [pytest.approx(one, rel=1e-5) for one in wanted] == own
            assert off < 1e-5
            assert "Pass ParallelismConfig(tp_size=1), or split the model so" in found["otherwise"]
        for case in cases:
            facts: dict[str, Any] = found[case]
            assert facts["place"] == [2, 2]
            if "LoRA" not in case:
                assert (facts["read"], facts["sent"]) == (facts["local"], 0)
            wanted, own = facts["logged"]
            assert len(own) == 4
            for one, other in zip(wanted, own, strict=True):
                assert other == pytest.approx(one, rel=1e-5)
            assert facts["evaluated"][1] == pytest.approx(facts["evaluated"][0], rel=1e-5)
            # AdamW divides a gradient by its size, so that rounding moves an element by a part of the step of 1e-3
            assert facts["off"] < 1e-5
            assert facts["resumed"] == [True, []]
            assert facts["saved"] == []
