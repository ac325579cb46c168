"""What a script does to a model between ``from_pretrained`` and ``prepare``: the values are those of a plain script."""

from __future__ import annotations

from typing import Any

import pytest
from rank_server import RankServer

CHANGES = """
def zeros(m): torch.nn.init.zeros_(m.lm_head.weight)
def constant(m): torch.nn.init.constant_(m.lm_head.weight, 2.0)
def filled(m):
    with torch.no_grad(): m.lm_head.weight.fill_(1.5)
def normal(m):
    torch.manual_seed(3); torch.nn.init.normal_(m.lm_head.weight)
def data_normal(m):
    torch.manual_seed(3); m.lm_head.weight.data.normal_()
def data_zero(m): m.model.embed_tokens.weight.data.zero_()
def data_row(m): m.model.embed_tokens.weight.data[5] = 0.25
def detached(m): m.model.embed_tokens.weight.detach().mul_(2)
def view(m): m.model.embed_tokens.weight.data.view(-1)[7:9].fill_(3)
def row(m):
    with torch.no_grad(): m.model.embed_tokens.weight[5] = m.model.embed_tokens.weight[6]
def scaled(m):
    with torch.no_grad():
        for each in m.model.layers[0].parameters(): each.mul_(1.01)
def data_set(m): m.lm_head.weight.data = torch.full((251, 60), 0.5)
def data_of_other(m): m.lm_head.weight.data = m.model.embed_tokens.weight.data
def data_of_other_and_written(m):
    m.lm_head.weight.data = m.model.embed_tokens.weight.data
    with torch.no_grad(): m.model.embed_tokens.weight.mul_(2)
def data_exchanged(m):
    p, q = m.lm_head.weight, m.model.embed_tokens.weight
    kept = p.data; p.data = q.data; q.data = kept
def data_put_back(m):
    kept = m.lm_head.weight.data
    m.lm_head.weight.data = torch.zeros(251, 60); m.lm_head.weight.data = kept; m.model.norm.weight.data *= 2
def all_put_back(m):
    kept = {name: each.data for name, each in m.named_parameters()}
    for each in m.parameters(): each.data = each.data * 0.5
    for name, each in m.named_parameters(): each.data = kept[name]
    m.model.norm.weight.data *= 2
def kept_and_written(m):
    kept = m.lm_head.weight.data
    with torch.no_grad(): m.lm_head.weight.fill_(1.0)
    m.model.embed_tokens.weight.data = kept
def copy_of_written(m):
    kept = m.lm_head.weight.data
    with torch.no_grad(): m.lm_head.weight.fill_(1.0)
    m.model.embed_tokens.weight.data = copy.deepcopy(kept)
def replaced(m): m.lm_head.weight = nn.Parameter(torch.full((251, 60), 0.5))
def fresh(m):
    torch.manual_seed(5); m.lm_head = nn.Linear(60, 251, bias=False)
def swapped(m): m.model.layers[0], m.model.layers[1] = m.model.layers[1], m.model.layers[0]
def reordered(m): m.model.layers = nn.ModuleList([m.model.layers[1], m.model.layers[0]])
def renamed(m): m.model.layers[0].mlp.up_proj, m.model.layers[0].mlp.gate_proj = (
    m.model.layers[0].mlp.gate_proj, m.model.layers[0].mlp.up_proj)
def cut(m):
    m.model.layers = m.model.layers[:1]; m.config.num_hidden_layers = 1
def copied(m):
    m.model.layers.append(copy.deepcopy(m.model.layers[0])); m.config.num_hidden_layers = 3
def loaded(m): m.load_state_dict({name: value + 1 for name, value in m.state_dict().items()})
def resized(m):
    torch.manual_seed(6); m.resize_token_embeddings(260)
def shorter(m): m.resize_token_embeddings(200)
def tied(m): m.lm_head.weight = m.model.embed_tokens.weight
def untied(m):
    tied(m); m.lm_head.weight = nn.Parameter(m.lm_head.weight.clone())
def shared(m): m.lm_head.weight = nn.Parameter(m.model.embed_tokens.weight)
def cast(m): m.to(torch.bfloat16)
def cast_twice(m): m.to(torch.bfloat16).float()
def moved(m): m.cpu()
def frozen(m): m.model.requires_grad_(False)
def read(m): assert m.lm_head.weight.sum().isfinite()
def frozen_and_written(m): frozen(m); zeros(m); swapped(m)
"""
SCRIPT = f"""
import contextlib, copy, io, pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from accelerate.state import AcceleratorState
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import logging as transformers_logging
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
from peft import LoraConfig, get_peft_model
from safe_loading import SafeLoadingError, load_at_prepare
from safe_loading._sharding.weightless import WeightlessParameter
from trainer_matrix import *
tell_accelerate()
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), pathlib.Path(sys.argv[1])
base = folder / "base"
if rank == 0:
    save_base(base)
    torch.manual_seed(8)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).save_pretrained(folder / "classes")
dist.barrier()
{CHANGES}
CHANGED = [value for value in list(globals().values()) if getattr(value, "__module__", "") == "__main__"
    and type(value).__name__ == "function"]
def load(lean, kind=AutoModelForCausalLM, path=base, **options):
    with load_at_prepare() if lean else contextlib.nullcontext():
        return kind.from_pretrained(path, attn_implementation="eager", **options)

def prepared(model, version=2):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none", version))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

def compared(change, version=2, **options):
    plain, lean = load(False, **options), load(True, **options)
    before = weights(plain)
    plain, lean = change(plain) or plain, change(lean) or lean
    wanted = weights(plain)
    lean = prepared(lean, version)
    sent = lean.fsdp_report.bytes_sent
    return [differing(wanted, weights(lean)), bool(differing(before, wanted)), sent]

def attempt(call):
    try:
        return call()
    except Exception as error:
        return [[f"{{type(error).__name__}}: {{error}}"], True, 0]

report(changes={{change.__name__: attempt(lambda: compared(change)) for change in CHANGED}})
some = [normal, row, swapped, replaced, cut]
report(fsdp1={{change.__name__: attempt(lambda: compared(change, version=1)) for change in some}})
def new_score(m):
    torch.manual_seed(9); m.score = nn.Linear(60, 3, bias=False)
report(score=attempt(lambda: compared(
    new_score, kind=AutoModelForSequenceClassification, path=folder / "classes")))
def adapter(**options):
    def attach(m):
        zeros(m); swapped(m); torch.manual_seed(4)
        return get_peft_model(m, LoraConfig(r=4, target_modules=["q_proj"], **options))
    return attach
report(adapters=[attempt(lambda: compared(adapter(**options))) for options in (
    {{}}, {{"use_dora": True}}, {{"init_lora_weights": "pissa"}}, {{"modules_to_save": ["lm_head"]}})])

# what reads a model before the training
plain = load(False)
own = plain.state_dict()
facts = {{"state_dict": differing(own, load(True).state_dict())}}
load(True).save_pretrained(folder / "saved")
dist.barrier()
facts["save_pretrained"] = differing(weights(plain), weights(load(False, path=folder / "saved")))
buffer = io.BytesIO()
torch.save(load(True).state_dict(), buffer)
buffer.seek(0)
facts["torch.save"] = differing(own, torch.load(buffer))
buffer = io.BytesIO()
torch.save(load(True).lm_head.weight, buffer)
buffer.seek(0)
facts["a parameter"] = differing({{"": plain.lm_head.weight}}, {{"": torch.load(buffer)}})
facts["sum"] = float(load(True).lm_head.weight.sum() - plain.lm_head.weight.sum())
for road in ("detach", "cpu", "clone"):
    value = getattr(load(True).lm_head.weight, road)().detach().numpy()
    facts[road] = differing({{"": plain.lm_head.weight}}, {{"": torch.from_numpy(value)}})
report(read=facts)
untouched = load(True)
copy.deepcopy(untouched).to(torch.bfloat16)
report(untouched=all(type(each) is WeightlessParameter for each in untouched.parameters()))
# ranks whose scripts differ: the first one decides, and what it does not have is in the folder or refused
lean = load(True)
if rank:
    zeros(lean)
report(others=differing(own, weights(prepared(lean))))
lean = load(True)
if rank:
    replaced(lean)
report(alone=attempt(lambda: prepared(lean) and None))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, args=[tmp_path_factory.mktemp("later")], timeout=240).found


def names(text: str) -> list[str]:
    return [line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def ")]


KEEPS = ("tied", "untied", "shared", "moved", "frozen", "read")  # the values that the model had
REAL = ("swapped", "reordered", "renamed", "cut", "copied", "cast", "moved", "frozen", "tied")  # nothing is sent


@pytest.mark.parametrize("change", names(CHANGES))
def test_what_a_script_does_to_weights_is_kept(found: list[dict[str, Any]], change: str) -> None:
    for facts in found:
        differing, changed, sent = facts["changes"][change]
        assert differing == []
        assert changed or change in KEEPS
        assert not sent or change not in REAL


def test_under_fsdp1_too(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert all(differing == [] and changed for differing, changed, _ in facts["fsdp1"].values())


def test_a_fresh_head_over_a_folder_with_a_head_of_its_size_is_the_scripts(found: list[dict[str, Any]]) -> None:
    assert [facts["score"][:2] for facts in found] == [[[], True]] * 2


def test_adapters_over_changed_weights_start_as_ever(found: list[dict[str, Any]]) -> None:
    assert [[differing for differing, *_ in facts["adapters"]] for facts in found] == [[[]] * 4] * 2


def test_what_reads_a_model_before_it_trains_reads_the_folder(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert not any(facts["read"].values()), facts["read"]
        assert facts["untouched"]


def test_what_another_rank_than_the_first_wrote_alone_is_no_garbage(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["others"] == []


def test_a_parameter_that_one_rank_replaced_alone_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    assert any("lm_head.weight" in facts["alone"][0][0] for facts in found)
    assert "lm_head.weight" in found[1]["alone"][0][0]
