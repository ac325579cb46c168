"""A base that bitsandbytes quantizes on the card of its rank: loaded, swapped, trained and merged there.

The codes are those that the host makes of the same weights, and no other card is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import save_adapter, save_llama

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytestmark = pytest.mark.gpu

SCRIPT = """
    import warnings
    warnings.simplefilter("ignore")
    import bitsandbytes
    from peft import PeftModel, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from quantized_bits import bits, differing, statistics
    from safe_loading import load_adapter_on_rank, load_peft_on_rank, merge_lora_inplace

    base, adapter, second, own = *sys.argv[1:4], int(sys.argv[4])
    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    kinds = {"nf4": {**four, "bnb_4bit_quant_type": "nf4"}, "int8": {"load_in_8bit": True},
             "fp4, double": {**four, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}}

    def codes(model):
        found = {name: bits(tensor) for name, tensor in model.named_parameters()}
        for name, module in model.named_modules():
            weight = module._parameters.get("weight")  # layers of peft pass on that of their base
            found |= statistics(name, getattr(weight, "quant_state", None))
            scales = getattr(weight, "SCB", None)
            scales = scales if scales is not None else getattr(getattr(module, "state", None), "SCB", None)
            if scales is not None:  # the first product takes them from the weight
                found[f"{name} SCB"] = bits(scales)
        return found

    def run(options):
        def loaded(device):
            config = BitsAndBytesConfig(**options)
            return load_peft_on_rank(
                adapter, base, device=device, adapter_dtype=factors, base_kwargs={"quantization_config": config})
        # what peft gives to factors over such codes, whatever their file has
        factors = options.get("bnb_4bit_compute_dtype", torch.float32)
        host, model = loaded("cpu"), loaded(own)
        facts = {"loaded": differing(codes(host), codes(model)), "statistics": sum(" " in n for n in codes(model))}
        tokens = torch.arange(1, 25, device=f"cuda:{own}").reshape(2, 12)
        plain = AutoModelForCausalLM.from_pretrained(
            base, device_map={"": own}, quantization_config=BitsAndBytesConfig(**options))
        plain = PeftModel.from_pretrained(plain, adapter, torch_device=f"cuda:{own}", autocast_adapter_dtype=False)
        with torch.no_grad():
            facts["logits"] = torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        for each in (host, model):
            load_adapter_on_rank(each, second, "default", hotswap=True, adapter_dtype=factors)
        facts["swapped"] = differing(codes(host), codes(model))
        merged = [codes(merge_lora_inplace(each)) for each in (host, model)]
        facts["merged"] = differing(*merged)
        facts["kept"] = sum(" " in name for name in merged[0])
        return {**facts, "contexts": contexts()}

    def train(make):
        os.environ.update(LOCAL_RANK=str(own), LOCAL_WORLD_SIZE=str(torch.cuda.device_count()))
        config = BitsAndBytesConfig(**kinds["nf4"])
        model = load_peft_on_rank(base, adapter, is_trainable=True, base_kwargs={"quantization_config": config})
        model = prepare_model_for_kbit_training(model).train()
        parameters = [p.requires_grad_() for name, p in model.named_parameters() if "lora_" in name]
        optimizer = make(parameters, lr=0.01, min_8bit_size=1)
        tokens, losses = torch.arange(1, 25, device=model.device).reshape(2, 12), []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, "contexts": contexts()}

    for name, options in kinds.items():
        case(lambda options=options: run(options), name)
    for optimizer in ("AdamW8bit", "PagedAdamW8bit"):
        case(lambda optimizer=optimizer: train(getattr(bitsandbytes.optim, optimizer)), optimizer)
"""


@pytest.fixture(scope="module")
def found(simulated_cuda: CudaRunner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("quantized")
    base = save_llama(folder / "base", torch.bfloat16)
    adapters = [save_adapter(folder / str(seed), base, dtype=torch.bfloat16, seed=seed) for seed in (3, 4)]
    last = str(simulated_cuda.count - 1)
    return simulated_cuda.run(SCRIPT, args=[base, *adapters, last], env={"SIMCUDA_VALUES": "all"}, timeout=400)


@pytest.mark.parametrize("kind", ["nf4", "fp4, double", "int8"])
def test_codes_are_those_of_the_host_and_no_other_card_is_touched(
    found: dict[str, Any], simulated_cuda: CudaRunner, kind: str
) -> None:
    facts = found[kind]
    assert "error" not in facts, facts["error"]
    assert facts["loaded"] == facts["swapped"] == []
    assert facts["statistics"] > 10
    assert facts["logits"]
    assert facts["merged"] == []
    assert facts["kept"] == facts["statistics"]  # a merge keeps the format
    assert facts["contexts"] == [simulated_cuda.count - 1]


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "PagedAdamW8bit"])
def test_a_rank_trains_over_codes_with_one_context(
    found: dict[str, Any], simulated_cuda: CudaRunner, optimizer: str
) -> None:
    facts = found[optimizer]
    assert "error" not in facts, facts["error"]
    assert facts["losses"] == sorted(facts["losses"], reverse=True)
    assert len(set(facts["losses"])) == 3
    assert facts["contexts"] == [simulated_cuda.count - 1]
