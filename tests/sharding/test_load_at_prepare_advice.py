"""The advice of load_at_prepare, taken on the ranks that accelerate prepares for: every weight is that of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsdp_cases import llama, reference, save
from rank_server import RankServer

if TYPE_CHECKING:
    from conftest import Simulated

SCRIPT = """
import pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trainer_matrix import *
from safe_loading import SafeLoadingError, load_at_prepare
tell_accelerate()
dist.init_process_group("gloo")
base = pathlib.Path(sys.argv[1], "base")
packed = pathlib.Path(sys.argv[1], "packed")
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.float32)
if dist.get_rank() == 0:
    save_base(base)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4).save_pretrained(packed)
dist.barrier()
outside, Auto = contextlib.nullcontext, AutoModelForCausalLM

def accelerator(version=2, strategy=None, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    of_version = {"sharding_strategy": strategy} if strategy else {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        use_orig_params=True if version == 1 else None, **of_version,
    )
    parallel = ParallelismConfig(**options) if options else None
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=parallel)

def load(block=load_at_prepare, folder=base, **options):
    with block():
        return Auto.from_pretrained(folder, attn_implementation="sdpa", **options)

def prepared(with_accelerator, model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return with_accelerator.prepare(model, optimizer)[0]

def case(name, refused, *taken):
    try:
        refused()
        error = ""
    except SafeLoadingError as raised:
        error = str(raised)
    differ = []
    for take in taken:
        have, wanted = take()
        differ.append(differing(weights(have), weights(wanted)))
    report(**{name: [error, differ]})

of_context = dict(cp_size=2, dp_shard_size=2)
case(
    "parallelism", lambda: prepared(accelerator(**of_context), load()),
    lambda: (prepared(accelerator(**of_context), load(outside)), load(outside)),
)
case(
    "strategy", lambda: prepared(accelerator(1, "HYBRID_SHARD"), load()),
    lambda: (prepared(accelerator(dp_replicate_size=2, dp_shard_size=2), load()), load(outside)),
)

def attached(block, bits=None, **options):
    torch.manual_seed(4)
    base = load(block) if bits is None else load(block, quantization_config=bits)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], **options))
starts = [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}]
case(
    "values of the base", lambda: attached(load_at_prepare, nf4, use_dora=True),
    *(lambda start=start: (prepared(accelerator(), attached(outside, **start)), attached(outside, **start))
      for start in starts),
)

dropping = dict(lora_dropout=0.1)
case(
    "parts", lambda: prepared(accelerator(tp_size=2, dp_shard_size=2), attached(load_at_prepare, **dropping)),
    lambda: (prepared(accelerator(dp_shard_size=4), attached(load_at_prepare, **dropping)), attached(outside)),
    lambda: (prepared(accelerator(tp_size=2, dp_shard_size=2), attached(load_at_prepare)), attached(outside)),
)

def both(version):
    of_two = accelerator(version)
    found = [prepared(of_two, load()) for _ in range(2)]
    return [(each, load(outside)) for each in found]
case(
    "two in a call", lambda: accelerator(1).prepare(load(), load()),
    *(lambda version=version, which=which: both(version)[which] for version in (1, 2) for which in range(2)),
)

class Pair(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.one, self.other = load(block), load(block)
case(
    "several in one", lambda: prepared(accelerator(), Pair(load_at_prepare)),
    lambda: (prepared(accelerator(), Pair(outside)), Pair(outside)),
)
state = {name: value + 1 for name, value in load(outside).state_dict().items()}
own = load(outside).config
case(
    "options", lambda: load(key_mapping={"^transformer": "model"}),
    lambda: (prepared(accelerator(), load()), load(outside)),
    lambda: (prepared(accelerator(), load(outside, key_mapping={"^transformer": "model"})), load(outside)),
)

def on_packed(block):
    torch.manual_seed(4)
    return get_peft_model(load(block, packed), LoraConfig(r=4, target_modules=["q_proj"]))
case(
    "codes", lambda: load(folder=packed),
    lambda: (prepared(accelerator(), on_packed(outside)), on_packed(outside)),
)

def hooked(block):
    model = load(block)
    handles = [model.lm_head.weight.register_hook(lambda grad: 2 * grad)]
    return model, handles
def without_hook():
    model, (handle,) = hooked(load_at_prepare)
    handle.remove()
    return model
case(
    "hooks", lambda: prepared(accelerator(), hooked(load_at_prepare)[0]),
    lambda: (prepared(accelerator(), without_hook()), load(outside)),
)
dist.barrier()
dist.destroy_process_group()
"""
ON_A_DEVICE = """
    import sys, torch_npu
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM
    from safe_loading import SafeLoadingError, meta_model, wrap_fsdp_meta_safe

    folder = sys.argv[1]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    try:
        wrap_fsdp_meta_safe(meta_model(folder), folder, mesh=mesh, device="npu:0")
    except SafeLoadingError as error:
        report({"error": str(error)})
    model = wrap_fsdp_meta_safe(meta_model(folder), folder, mesh=mesh, device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    report({"equal": all((value.full_tensor() == expected[name]).all().item()
                         for name, value in model.state_dict().items())})
"""
ADVICE = {
    "parallelism": "load this model outside of it",
    "parts": "Leave 'tp' out of the mesh, or tp_size= out of accelerate's ParallelismConfig, and FSDP shards the model",
    "strategy": "Use FSDP2 with parallelism_config=ParallelismConfig(dp_replicate_size=, dp_shard_size=)",
    "values of the base": "(PiSSA, OLoRA, DoRA) to a model that was loaded outside of load_at_prepare()",
    "two in a call": "one sharded model a call; call prepare once for each",
    "several in one": "load them outside of it",
    "options": "Leave them out, or make this call outside of load_at_prepare()",
    "hooks": "lm_head.weight has a hook on its gradient, which would never be called: remove the hook",
    "codes": "Make this call outside of it",
}


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 4, args=[tmp_path_factory.mktemp("advice")], timeout=240).found


@pytest.mark.parametrize("kind", ADVICE)
def test_the_advice_is_right(found: list[dict[str, Any]], kind: str) -> None:
    for facts in found:
        error, differing = facts[kind]
        assert ADVICE[kind] in error
        assert differing
        assert not any(differing), differing


def test_a_mesh_and_a_device_are_made_the_same(simulated: Simulated, tmp_path: Path) -> None:
    folder = save(reference(lambda: llama(num_hidden_layers=1)), tmp_path)
    facts = simulated.run_forked(ON_A_DEVICE, args=[folder])
    assert "mesh is one of cpu devices, device=npu:0. Make them the same." in facts["error"]
    assert facts["equal"]
