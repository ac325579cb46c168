"""What wrap_fsdp_meta_safe refuses, on every rank and soon; and what it checks, verifies and finds."""

from __future__ import annotations

from typing import Any

import pytest
from engines import needs
from fsdp_cases import NOTHING
from rank_server import RankServer

SCRIPT = """
import json, os, pathlib, shutil, sys, time, warnings
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import *
from safe_loading import SafeLoadingError, assert_optimizer_sharded, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
folder = pathlib.Path(sys.argv[1])
one = reference(llama)
if rank == 0:
    save(one, folder / "llama")
    shutil.copytree(folder / "llama", folder / "lacking")
    sorted((folder / "lacking").glob("*.safetensors"))[1].unlink()
    save(reference(lambda: llama(vocab_size=97)), folder / "other")
    save(reference(llama, seed=1), folder / "second")
    from safetensors.torch import load_file, save_file
    state = {k: v for f in sorted((folder / "llama").glob("*.safetensors")) for k, v in load_file(f).items()}
    norm = state["model.norm.weight"]
    faults = {
        "missing keys": {k: v for k, v in state.items() if not k.startswith(("model.norm", "model.layers.2.mlp.up"))},
        "unexpected keys": {**state, "model.norm.bias": norm.clone(), "model.layers.3.mlp.up_proj.weight": norm + 1},
        "another kind": {**state, "model.norm.weight": norm.to(torch.int32)},
        "quantized": {**state, "model.norm.weight": norm.to(torch.float8_e4m3fn)},
        "shapes on disk": {**state, "model.norm.weight": norm[:59], "lm_head.weight": state["lm_head.weight"].T},
    }
    for label, tensors in faults.items():
        (folder / label).mkdir()
        shutil.copy(folder / "llama" / "config.json", folder / label)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / label / "model.safetensors")
    # a file that no index names, as an interrupted download or another fine-tuning leaves it
    shutil.copytree(folder / "llama", folder / "stray")
    save_file({"model.norm.weight": norm + 1}, folder / "stray" / "model-stray.safetensors")
dist.barrier()

def described(model):
    return [(n, t.device.type, str(t.dtype), list(t.shape), type(t).__name__) for n, t in model.state_dict().items()]

def attempt(label, model, *args, **options):
    before = None if model is None else described(model)
    started = time.monotonic()
    try:
        wrap_fsdp_meta_safe(model, *args, **options)
        found = {"error": None}
    except SafeLoadingError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    found["seconds"] = time.monotonic() - started
    found["same"] = before is None or described(model) == before
    report(**{label: found})

small = dict(hidden_size=48, num_attention_heads=6)
attempt("shapes", on_meta(llama if rank == 0 else lambda: llama(**small)), str(folder / "llama"))
attempt("dtypes", on_meta(llama).to(torch.bfloat16 if rank else torch.float32), str(folder / "llama"))
tied = on_meta(gpt2)
if rank == 1:
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
attempt("ties", tied)
frozen = on_meta(llama)
frozen.model.norm.weight.requires_grad_(rank == 0)
attempt("grads", frozen, str(folder / "llama"))
attempt("units", on_meta(llama), str(folder / "llama"), auto_wrap_policy="LlamaMLP" if rank else None)
attempt("arguments", on_meta(llama), str(folder / "llama"), verify="off" if rank else "structure")
attempt("missing shard", on_meta(llama), str(folder / ("lacking" if rank else "llama")))
attempt("other files", on_meta(llama), str(folder / ("second" if rank else "llama")))
attempt("no such folder", on_meta(llama), str(folder / "nowhere"))
attempt("absent on a rank", on_meta(llama), str(folder / ("llama" if rank == 0 else "elsewhere")))
def changed(): # on every rank, as a script without load_at_prepare has it
    model = reference(llama)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
        model.model.norm.weight.mul_(2)
    return model
attempt("other values", changed(), str(folder / "llama"))
attempt("other values 1", changed(), str(folder / "llama"), version=1)
attempt("other values on rank 0", changed() if rank == 0 else on_meta(llama), str(folder / "llama"))
attempt("prefer", on_meta(llama), str(folder / "llama"), prefer="model" if rank else "source")
attempt("prefer what", on_meta(llama), str(folder / "llama"), prefer="folder")
attempt("prefer nothing", on_meta(llama), prefer="model")
preferred = {}
for version in (2, 1):
    for label, model, prefer, wanted in (
        ("equal", reference(llama), None, reference(llama)),
        ("cast", reference(llama).bfloat16(), None, reference(llama).bfloat16()),
        ("source", changed(), "source", reference(llama)), ("model", changed(), "model", changed()),
    ):
        model = wrap_fsdp_meta_safe(model, str(folder / "llama"), version=version, prefer=prefer, verify="bytes")
        preferred[f"{label} {version}"] = differences(wanted, model, inputs("llama")), model.fsdp_report.bytes_sent > 0
report(preferred=preferred)
attempt("mismatch", on_meta(llama), str(folder / "other"))
for label in ("missing keys", "unexpected keys", "another kind", "quantized", "shapes on disk"):
    attempt(label, on_meta(llama), str(folder / label))
    attempt(f"{label} 1", on_meta(llama), str(folder / label), version=1)
stray = wrap_fsdp_meta_safe(on_meta(llama), str(folder / "stray"))
report(stray=torch.equal(whole(stray.model.norm.weight), one.model.norm.weight))
attempt("meta everywhere", on_meta(llama))
attempt("lone rank fails", on_meta(llama) if rank == 0 else None, str(folder / "llama"))
attempt("bad state", on_meta(llama), {"model.norm.weight": torch.zeros(3), "x": torch.zeros(1)} if rank == 0 else None)
state = {"model.norm.weight": on_meta(llama).model.norm.weight, "lm_head.weight": [1.0]}
attempt("state without values", on_meta(llama), state if rank == 0 else None)
state = {name: tensor.clone() for name, tensor in reference(gpt2).state_dict().items()}
state["lm_head.weight"] += 1
attempt("two values of a tie", on_meta(gpt2), state if rank == 0 else None)
def with_buffer(model, value=None):
    model.register_buffer("scale", torch.ones(3, device="meta") if value is None else torch.full((3,), value))
    return model
attempt("buffer without values", with_buffer(on_meta(llama)), str(folder / "llama"))
attempt("buffer without values on rank 0", with_buffer(reference(llama) if rank == 0 else on_meta(llama)))
buffered = [
    wrap_fsdp_meta_safe(with_buffer(on_meta(llama), None if rank else 7.0), source, version=version)
    for source in (str(folder / "llama"), one.state_dict() if rank == 0 else None)
    for version in (2, 1)
]
report(buffered=[b.tolist() for model in buffered for n, b in model.named_buffers() if n.endswith("scale")])
attempt("bad wrap", on_meta(llama), str(folder / "llama"), auto_wrap_policy=["NoSuchLayer"])
attempt("bad ignored", on_meta(llama), str(folder / "llama"), ignored_params=["no.such"])
attempt("ignored nothing", on_meta(llama), str(folder / "llama"), ignored_params=3)
attempt("bad adapters", on_meta(llama), str(folder / "llama"), adapters=["a"])
attempt("bad mesh", on_meta(llama), str(folder / "llama"), mesh=(3,))
attempt("turned mesh", on_meta(llama), str(folder / "llama"), mesh=DeviceMesh("cpu", [1, 0]))
attempt("replicas of one shard", on_meta(llama), str(folder / "llama"), mesh=(2, 1), version=1)

# a checkpoint of other values under the same headers: only the bytes tell
wrong = on_meta(llama)
from safe_loading._sharding import checkpoint_folder
class Lying(checkpoint_folder.Folder):
    reads = 0
    def read(self, shard, device):
        result = super().read(shard, device)
        Lying.reads += 1
        if Lying.reads == 1 and rank == 1:
            shard.local["model.norm.weight"][-1] += 1
        return result
true, checkpoint_folder.Folder = checkpoint_folder.Folder, Lying
attempt("bytes", wrong, str(folder / "llama"), verify="bytes")
checkpoint_folder.Folder = true
good = wrap_fsdp_meta_safe(on_meta(llama), str(folder / "llama"), verify="bytes")
sent = wrap_fsdp_meta_safe(reference(llama) if rank == 0 else on_meta(llama), verify="bytes", mesh=(2,))
both = [differences(one, each, inputs("llama")) for each in (good, sent)]
report(verified=[good.fsdp_report.verified, *both])
try:
    wrap_fsdp_meta_safe(good, str(folder / "llama"))
    again = None
except SafeLoadingError as error:
    again = str(error)
report(again=again)

# an optimizer made before the wrap
model = on_meta(llama)
early = torch.optim.SGD(model.parameters(), lr=0.1)
model = wrap_fsdp_meta_safe(model, str(folder / "llama"))
late = torch.optim.SGD(model.parameters(), lr=0.1)
assert_optimizer_sharded(late, model)
try:
    assert_optimizer_sharded(early, model)
    told = None
except SafeLoadingError as error:
    told = str(error)
model.extra = torch.nn.Linear(3, 3)
try:
    assert_optimizer_sharded(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain_found = None
except SafeLoadingError as error:
    plain_found = str(error)
report(optimizer=[[f.code for f in model.fsdp_report.findings], told, plain_found])

# another dtype on disk, ignored parameters, and what is new
half = wrap_fsdp_meta_safe(on_meta(llama).to(torch.bfloat16), str(folder / "llama"))
report(cast=[
    [f.code for f in half.fsdp_report.findings],
    all(torch.equal(whole(p), dict(one.named_parameters())[n].bfloat16()) for n, p in half.named_parameters()),
    str(half.model.rotary_emb.inv_freq.dtype),
])
ignored = ["model.embed_tokens", "*.o_proj.weight"]
kept = wrap_fsdp_meta_safe(on_meta(llama), str(folder / "llama"), ignored_params=ignored)
report(ignored=[
    sorted(n for n, p in kept.named_parameters() if not isinstance(p, DTensor)),
    all(torch.equal(whole(p), dict(one.named_parameters())[n]) for n, p in kept.named_parameters()),
    kept.fsdp_report.ok,
])
def with_head(model):
    model.value = torch.nn.Linear(60, 3)
    return model
def init(module):
    torch.nn.init.normal_(module.weight); torch.nn.init.ones_(module.bias)
with torch.device("meta"):
    headed = with_head(on_meta(llama))
torch.manual_seed(5)
state = torch.get_rng_state()
headed = wrap_fsdp_meta_safe(headed, str(folder / "llama"), init_new=init)
unmoved = torch.equal(state, torch.get_rng_state())
single = with_head(reference(llama)); torch.manual_seed(5); init(single.value)
equal = [torch.equal(whole(getattr(headed.value, n)), getattr(single.value, n)) for n in ("weight", "bias")]
report(new=[*equal, unmoved])
# a classifier over a language model's folder: its head is new, and the folder's has no place
from transformers import LlamaForSequenceClassification, LlamaModel
classifier = lambda: (LlamaForSequenceClassification, llama(num_labels=3, pad_token_id=0)[1])
single = reference(classifier)
single.model.load_state_dict(one.model.state_dict())
torch.manual_seed(5)
torch.nn.init.normal_(single.score.weight)
batch = {"input_ids": TOKENS, "labels": torch.tensor([0, 2])}
for version in (2, 1):
    torch.manual_seed(5)
    model = wrap_fsdp_meta_safe(
        on_meta(classifier), str(folder / "llama"), version=version,
        init_new=lambda module: torch.nn.init.normal_(module.weight),
    )
    report(**{f"classifier {version}": [
        differences(single, model, batch), [f.code for f in model.fsdp_report.findings]
    ]})
# as FSDP1 is given it, on the ranks without weights alone
attempt("a name on one rank", on_meta(llama), str(folder / "llama"), param_init_fn=print if rank else None)
attempt("new head without a word", on_meta(classifier), str(folder / "llama"))
attempt("head that is not wanted", on_meta(lambda: (LlamaModel, llama()[1])), str(folder / "llama"))
with torch.device("meta"):
    empty = with_head(on_meta(llama))
attempt("not initialized", empty, str(folder / "llama"), init_new=lambda module: None)
with torch.device("meta"):
    empty = with_head(on_meta(llama))
attempt("new without a word", empty, str(folder / "llama"))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, args=[tmp_path_factory.mktemp("refuses")], timeout=240).found


REFUSED = {
    "shapes": ("RanksDisagree", ["model.embed_tokens.weight: float32[251, 48]", "[251, 60]", "rank 1", "rank 0"]),
    "dtypes": ("RanksDisagree", ["bfloat16", "model.embed_tokens.weight"]),
    "ties": ("RanksDisagree", ["tied to lm_head.weight", "tie_weights()"]),
    "grads": ("RanksDisagree", ["model.norm.weight: float32[60], trained"]),
    "units": ("RanksDisagree", ["unit model.layers.0.mlp"]),
    "arguments": ("RanksDisagree", ["verify=structure", "verify=off"]),
    "other files": ("RanksDisagree", ["different checkpoints", "rank 1"]),
    "mismatch": ("CheckpointError", ["model.embed_tokens.weight", "[251, 60]", "[97, 60]"]),
    "other values": ("ArgumentError|RankError", ["lm_head.weight: float32[251, 60]", "model.norm.weight", "2 param"]),
    "other values 1": ("ArgumentError|RankError", ["pass prefer='source'", "pass prefer='model'"]),
    "other values on rank 0": ("ArgumentError|RankError", ["model.norm.weight", "other values than the folder"]),
    "prefer": ("RanksDisagree", ["prefer=model", "prefer=source"]),
    "prefer what": ("ArgumentError", ["prefer='folder': pass 'source', 'model' or None"]),
    "prefer nothing": ("ArgumentError", ["prefer='model' chooses between a folder and the model"]),
    "meta everywhere": ("CheckpointError|RankError", ["init_new", "model.embed_tokens.weight"]),
    "bad state": ("CheckpointError|RankError", ["model.norm.weight", "x: the model has no such tensor"]),
    "bad wrap": ("ArgumentError", ["NoSuchLayer"]),
    "bad ignored": ("ArgumentError", ["no.such"]),
    "ignored nothing": ("ArgumentError", ["ignored_params=3"]),
    "bad adapters": ("ArgumentError", ["adapters=['a']"]),
    "replicas of one shard": ("ArgumentError", ["mesh=[2, 1]", "version=2"]),
    "state without values": (
        "CheckpointError|RankError",
        ["model.norm.weight: the state dict has it on meta", "lm_head.weight: the state dict has a list"],
    ),
    "two values of a tie": ("CheckpointError|RankError", ["transformer.wte.weight, lm_head.weight", "two values"]),
    "buffer without values": ("CheckpointError|RankError", ["scale: float32[3], a buffer"]),
    "buffer without values on rank 0": ("CheckpointError|RankError", ["scale: float32[3], a buffer"]),
    "bad mesh": ("ArgumentError", ["there are 2 ranks"]),
    "turned mesh": ("ArgumentError", ["mesh has its ranks in the order [1, 0]: make it with init_device_mesh"]),
    "a name on one rank": ("ArgumentError|RankError", ["param_init_fn=: leave it out"]),
    "lone rank fails": ("ArgumentError|RankError", ["NoneType"]),
    "bytes": ("CheckpointError|RankError", ["model.norm.weight", "differs from the checkpoint"]),
    "not initialized": ("ArgumentError|RankError", ["init_new left", "value.weight"]),
    "new without a word": ("CheckpointError|RankError", ["value.weight: float32[3, 60]", "init_new=fn(module)"]),
    "new head without a word": (
        "CheckpointError|RankError",
        ["score.weight: float32[3, 60]", "init_new=fn(module)", "lm_head.weight"],
    ),
    "head that is not wanted": ("CheckpointError|RankError", ["lm_head.weight", "a head that the model does not have"]),
    "no such folder": ("CheckpointNotFound|RankError", ["nowhere"]),
    "absent on a rank": (
        "CheckpointNotFound",
        ["source: is not there for rank 1 (", "elsewhere); it is for rank 0 (", "llama)", "Copy it to each node"],
    ),
    "missing shard": ("CheckpointError|CheckpointNotFound|RankError", ["lacking"]),
}
# Both sides and the file, on every rank and for both versions.
FAULTS = {
    "missing keys": ["model.norm.weight: float32[60]", "model.layers.2.mlp.up_proj.weight: float32[64, 60]"],
    "unexpected keys": ["model.norm.bias", "model.layers.3.mlp.up_proj.weight", "model.safetensors"],
    "another kind": ["model.norm.weight: the model has torch.float32", "I32", "model.safetensors"],
    "quantized": ["model.norm.weight: the model has torch.float32", "F8_E4M3", "model.safetensors"],
    "shapes on disk": ["model.norm.weight: the model has [60]", "[59]", "lm_head.weight", "[60, 251]"],
}
REFUSED |= {
    f"{label}{one}": ("CheckpointError|RankError", words) for label, words in FAULTS.items() for one in ("", " 1")
}


# Before 5.1 transformers ties no weights on meta, so there is no tie to break.
TIES = ("ties", "two values of a tie")


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=needs("transformers", "5.1") if label in TIES else ()) for label in REFUSED]
)
def test_every_rank_refuses_soon_and_leaves_the_model_as_it_was(found: list[dict[str, Any]], label: str) -> None:
    kinds, words = REFUSED[label]
    for facts in found:
        each = facts[label]
        assert str(each["error"]) in kinds.split("|")
        assert each["seconds"] < 5
        assert each["same"] or each["error"] is None
        for word in words:
            assert word in each["text"]


def test_the_caller_says_whose_values_of_a_real_model_win(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert {label: each for label, (each, _) in facts["preferred"].items() if each != NOTHING} == {}
    assert {label for label, (_, sent) in found[0]["preferred"].items() if sent} == {"model 2", "model 1"}


def test_a_file_that_the_index_does_not_name_is_not_read(found: list[dict[str, Any]]) -> None:
    assert [facts["stray"] for facts in found] == [True, True]


@needs("torch", "2.11")
def test_bytes_are_verified(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["verified"] == ["bytes", NOTHING, NOTHING]


def test_a_wrapped_model_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("its weights are there" in facts["again"] for facts in found)


def test_an_optimizer_made_before_the_wrap_is_found(found: list[dict[str, Any]]) -> None:
    for facts in found:
        codes, told, plain = facts["optimizer"]
        assert codes == ["optimizer-before-wrap"]
        assert "not the model's" in told
        assert "extra.weight is a plain tensor" in plain


def test_the_dtype_of_the_model_is_kept_and_said(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["cast"] == [["dtype-cast"], True, "torch.float32"]


def test_ignored_parameters_stay_whole(found: list[dict[str, Any]]) -> None:
    for facts in found:
        names, equal, ok = facts["ignored"]
        assert names == ["model.embed_tokens.weight", *(f"model.layers.{n}.self_attn.o_proj.weight" for n in range(3))]
        assert equal
        assert ok


def test_a_buffer_that_the_source_lacks_is_that_of_rank_0(found: list[dict[str, Any]]) -> None:
    assert [facts["buffered"] for facts in found] == [[[7.0] * 3] * 4] * 2


def test_new_parameters_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    assert [facts["new"] for facts in found] == [[True, True, True]] * 2


@needs("torch", "2.11")
@pytest.mark.parametrize("version", [2, 1])
def test_a_classifier_over_a_language_models_folder_equals_one_process(
    found: list[dict[str, Any]], version: int
) -> None:
    assert [facts[f"classifier {version}"] for facts in found] == [[NOTHING, ["head-not-loaded"]]] * 2
