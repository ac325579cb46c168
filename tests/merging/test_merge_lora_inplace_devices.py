"""merge_lora_inplace on simulated accelerators: where it runs, what it allocates, and a device without float64.

A process that imports the engines costs seconds before its first line, so one script tries everything. A new case is a
function of that script that returns what it found, and a test that takes it from `facts`.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
import torch
from models import KINDS, save_adapter, save_llama

MEASURED = ("all linear", "dora", "embedding")
WITHOUT_FLOAT64 = ("all linear", "dora")
SCRIPT = """
    import sys, torch, torch_npu
    from accelerate import dispatch_model
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from safe_loading import load_peft_on_rank, merge_lora_inplace
    from safe_loading._merging.weights import update

    folder = sys.argv[1]

    def measured(kind):
        found = {}
        for scratch in (1 << 12, 1 << 16, 1 << 20):
            model = load_peft_on_rank(f"{folder}/wide", f"{folder}/wide {kind}", device=0)
            live = torch_npu.stats()[0]["live"]
            torch_npu.reset()
            merged = merge_lora_inplace(model, scratch_bytes=scratch)
            del model
            stats = torch_npu.stats()[0]
            size = sum(t.nbytes for t in {t.data_ptr(): t for t in (*merged.parameters(), *merged.buffers())}.values())
            found[scratch] = {"live": live, "peak": stats["peak"], "after": stats["live"], "size": size,
                              "sums": [float(p.double().sum()) for p in merged.parameters()]}
            del merged
        return found

    class NoFloat64(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in tree_leaves((args, kwargs, made)):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "npu" and tensor.dtype == torch.float64:
                    raise TypeError(f"{function}: this device has no float64")
            return made

    def without_float64(kind):
        adapter, base = f"{folder}/narrow {kind}", f"{folder}/narrow"
        expected = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu")).state_dict()
        model, known = load_peft_on_rank(base, adapter, device=0), update.WITHOUT_FLOAT64
        update.WITHOUT_FLOAT64 = frozenset({"npu"})
        try:
            with NoFloat64():
                merged = merge_lora_inplace(model, scratch_bytes=1 << 14).state_dict()
        finally:
            update.WITHOUT_FLOAT64 = known
        return {name: tensor.device.type == "npu" and torch.equal(tensor.cpu(), expected[name])
                for name, tensor in merged.items()}

    def dispatched():
        adapter, base = f"{folder}/spread all linear", f"{folder}/spread"
        names = ["embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "rotary_emb"]
        places = dict(zip(names, [0, 0, 1, "cpu", "disk", 0]))
        places = {f"base_model.model.model.{name}": place for name, place in places.items()}
        places["base_model.model.lm_head"] = 1
        plain = load_peft_on_rank(base, adapter, device="cpu")
        model = dispatch_model(load_peft_on_rank(base, adapter, device="cpu"), places, offload_dir=f"{folder}/offload")
        tokens = torch.arange(1, 25).reshape(2, 12)
        with torch.no_grad():
            before = model(input_ids=tokens.to("npu:0")).logits.cpu()
            merged, expected = merge_lora_inplace(model), merge_lora_inplace(plain)
            after = merged(input_ids=tokens.to("npu:0")).logits.cpu()
            steps = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
            same = torch.equal(merged.generate(tokens.to("npu:0"), **steps).cpu(), expected.generate(tokens, **steps))
        theirs = dict(expected.named_parameters())
        equal = {}
        for path, module in merged.named_modules():
            for name, tensor in module.named_parameters(recurse=False):
                value = module._hf_hook.weights_map[name] if tensor.is_meta else tensor
                equal[f"{path}.{name}"] = torch.equal(value.cpu(), theirs[f"{path}.{name}"])
        return {"close": torch.allclose(before, after, atol=1e-4), "equal": equal, "generate": same,
                "devices": sorted({str(p.device) for p in merged.parameters()})}

    for kind in MEASURED:
        report({f"measured {kind}": measured(kind)})
    for kind in WITHOUT_FLOAT64:
        report({f"without float64 {kind}": without_float64(kind)})
    report({"dispatched": dispatched()})
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, simulated: Any) -> dict[str, Any]:
    """What the script reports."""
    folder = tmp_path_factory.mktemp("devices")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 3000}
    for name, dtype, kinds, config in (
        ("wide", torch.bfloat16, MEASURED, sizes),
        ("narrow", torch.bfloat16, WITHOUT_FLOAT64, {}),
        ("spread", torch.float32, ("all linear",), {}),
    ):
        base = save_llama(folder / name, dtype, **config)
        for kind in kinds:
            save_adapter(folder / f"{name} {kind}", base, dtype=dtype, **KINDS[kind])
    kinds = f"MEASURED, WITHOUT_FLOAT64 = {MEASURED!r}, {WITHOUT_FLOAT64!r}\n"
    found: dict[str, Any] = simulated.run_forked(kinds + textwrap.dedent(SCRIPT), args=[folder])
    return found


@pytest.mark.parametrize("kind", MEASURED)
def test_the_memory_is_the_scratch_and_the_factors(facts: dict[str, Any], kind: str) -> None:
    found = facts[f"measured {kind}"]
    for scratch, seen in found.items():
        rows, factors = 8 * 512 * 16, 10 * 4 * 3000 * 8  # eight rows; ten times rank x the longest side in float64
        assert seen["peak"] - seen["live"] <= max(int(scratch), rows) + factors, (scratch, seen)
        assert seen["after"] <= seen["size"] + 4096
    assert len({json.dumps(seen["sums"]) for seen in found.values()}) == 1


@pytest.mark.parametrize("kind", WITHOUT_FLOAT64)
def test_a_device_without_float64_holds_the_same_bits(facts: dict[str, Any], kind: str) -> None:
    equal = facts[f"without float64 {kind}"]
    assert equal
    assert all(equal.values()), [name for name, same in equal.items() if not same]


def test_each_layer_is_merged_where_it_lives(facts: dict[str, Any]) -> None:
    found = facts["dispatched"]
    assert found["devices"] == ["meta", "npu:0", "npu:1"]
    assert found["close"]
    assert found["generate"]
    assert all(found["equal"].values()), found["equal"]
