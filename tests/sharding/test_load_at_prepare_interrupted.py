"""A prepare of load_at_prepare that is interrupted or fails, on either rank: all is as it was, and it runs again."""

from __future__ import annotations

from typing import Any

import pytest
from rank_server import RankServer
from test_load_at_prepare import PRELUDE

SCRIPT = """
import accelerate
from accelerate.state import AcceleratorState
from peft import get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from interrupts import WITHIN, everything, interrupted_at, sampled
from safe_loading import load_at_prepare

mixed, version, most = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
case = Case("accelerate", "LoRA", "none", version)
within = (*WITHIN, str(pathlib.Path(accelerate.__file__).parent))
checkpoints = {"activation_checkpointing": True} if version == 2 else {}

class Script:
    # what a script has before it calls prepare
    def __init__(self, lean=True):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(11)
        self.accelerator = accelerate_with_fsdp(case, mixed_precision=mixed)
        self.accelerator.state.fsdp_plugin.activation_checkpointing = version == 2
        with load_at_prepare() if lean else contextlib.nullcontext():
            self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, attn_implementation="eager")
        options = {} if mixed == "no" else {"autocast_adapter_dtype": False}
        self.model = get_peft_model(self.model, lora(case), **options)
        with torch.no_grad():
            self.model.get_parameter(scaled).mul_(2)  # read by the script, so that it is real
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW([{"params": trained[:3], "lr": 1e-3}, {"params": trained[3:]}], lr=1e-2)
        self.loader = DataLoader(torch.arange(40).reshape(20, 2), batch_size=2, shuffle=True)

    def prepare(self):
        if version == 1:
            model, loader = self.accelerator.prepare(self.model, self.loader)
            return model, None, loader
        return self.accelerator.prepare(self.model, self.optimizer, self.loader)

    def facts(self):
        found = everything(self.model)
        owners = {"optimizer": self.optimizer, "loader": self.loader, "sampler": self.loader.sampler,
                  "plugin": self.accelerator.state.fsdp_plugin, "accelerator": self.accelerator}
        for name, owner in owners.items():
            found[name] = {key: id(value) for key, value in vars(owner).items()}
        found["groups"] = [{key: [id(p) for p in value] if key == "params" else value for key, value in group.items()}
                           for group in self.optimizer.param_groups]
        accelerator = self.accelerator
        found["prepared"] = [[id(each) for each in items] for items in
                             (accelerator._models, accelerator._optimizers, accelerator._dataloaders)]
        return found

    def trained(self):
        # the weights as prepared, which parameters the optimizer has, and the order of the rows
        model, optimizer, loader = self.prepare()
        names = {id(p): plain(name) for name, p in model.named_parameters()}
        groups = optimizer.param_groups if optimizer is not None else []
        held = [[names.get(id(p), "the script's") for p in group["params"]] for group in groups]
        return weights(model), held, [row.tolist() for row in loader]

scaled = "base_model.model.model.layers.1.mlp.up_proj.weight"
plain_run = Script(lean=False).trained()
with interrupted_at(within=within) as lines:
    lean_run = Script().trained()
report(lean=[differing(plain_run[0], lean_run[0]), plain_run[1:] == lean_run[1:], sorted({len(each) for each in lean_run[1]})])

def counted():
    script = Script()
    with interrupted_at(within=within) as lines:
        script.prepare()
    return lines.count

def problems_of(call, script, before):
    error = None
    try:
        call()
    except BaseException as raised:
        error = type(raised).__name__
    after = script.facts()
    return error, [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]

def fails(script):
    raise RuntimeError("no room for the optimizer")

count = counted()
numbers = [*sampled(count, most // 2), *(count * 2 // 3 + number for number in sampled(count // 4, most))]
found = []
for turn, number in enumerate(numbers):
    script, victim = Script(), turn % 2
    before = script.facts()
    if rank == victim:
        with interrupted_at(number, within=within, signalled=turn % 4 < 2) as lines:
            error, problems = problems_of(script.prepare, script, before)
    else:
        error, problems = problems_of(script.prepare, script, before)
    found.append([number, lines.place if rank == victim else "", error, problems])
    report(found=found)
    dist.barrier()
    again = script.trained()
    found[-1] += [differing(plain_run[0], again[0]), plain_run[1:] == again[1:]]
    report(found=found)
report(done=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def most() -> int:
    return 4


@pytest.mark.parametrize(("mixed", "version"), [("bf16", 2), ("no", 1)])
def test_a_prepare_that_is_interrupted_leaves_all_as_it_was_and_runs_again(
    rank_server: RankServer, tmp_path: Any, mixed: str, version: int, most: int
) -> None:
    args = [tmp_path, mixed, str(version), str(most)]
    found = rank_server.run(PRELUDE + SCRIPT, 2, args=args, timeout=400, check=False)
    print(found.output[-6000:])
    for facts in found.found:
        print(facts)
    assert 0
