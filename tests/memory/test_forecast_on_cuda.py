"""A sample of benchmarks/predict_on_cuda.py: forecasts are what PyTorch's own CUDA allocator counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    def compare(row):
        predicted = forecast(row).allocated_peak_bytes
        return [predicted, run(row)["allocated"]]

    if os.environ["SIMCUDA_GPU"] == "H100":  # cuDNN's attention, and the state of a fused optimizer
        case(lambda: compare(Row("qwen3", "full", "H100", "device_map")), "whole")
        case(lambda: compare(Row("qwen3", "dora", "H100", "to", checkpointing=True)), "dora")
        case(lambda: compare(Row("llama", "nf4", "H100", "device_map")), "nf4")
        case(lambda: compare(Row("gpt2", "nf4", "H100", "device_map")), "nf4 with biases")
        case(lambda: compare(Row("llama", "generate", "H100", "to")), "generate")
    elif os.environ["SIMCUDA_GPU"] == "T4":  # products of experts one by one, and the scratch of Adafactor's reductions
        case(lambda: compare(Row("mixtral", "lora", "T4", "to", dtype="float16")), "mixture")
        case(lambda: compare(Row("mistral", "full", "T4", "device_map", dtype="float16", optimizer="adafactor",
                                 checkpointing=True)), "adafactor")
        case(lambda: compare(Row("qwen3-moe", "full", "T4", "to", dtype="float16", checkpointing=True)), "recomputed")
        case(lambda: compare(Row("gemma3", "generate", "T4", "made", dtype="float16")), "generate")
    else:  # flash attention, and the efficient kernel in float32
        case(lambda: compare(Row("mistral", "full", "A100", "made", optimizer="sgd")), "whole")
        case(lambda: compare(Row("t5", "full", "A100", "to", checkpointing=True)), "trained bias of attention")
        case(lambda: compare(Row("llama", "lora", "A100", "to", dtype="float32")), "float32")
        case(lambda: compare(Row("mixtral", "lora", "A100", "made")), "mixture")
        case(lambda: compare(Row("mixtral", "full", "A100", "made", optimizer="adafactor")), "first update")
        case(lambda: compare(Row("llava", "full", "A100", "made", optimizer="adamw_foreach")), "images")
"""


@pytest.mark.parametrize("card", ["H100", pytest.param("A100", marks=pytest.mark.slow), "T4"])
def test_allocated_bytes_are_those_of_torch(simulated_cuda: CudaRunner, card: str) -> None:
    pairs = simulated_cuda.run_rows(SCRIPT, card)
    assert len(pairs) >= 3
    for name, (predicted, real) in pairs.items():
        assert predicted == real, name


LEFT_ON_THE_HOST = """
    import peft.tuners.boft.layer
    from transformers import LlamaConfig, LlamaForCausalLM

    peft.tuners.boft.layer.get_fbd_cuda = lambda: None  # which compiles an extension

    def permutations():
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=101)
        model = LlamaForCausalLM(LlamaConfig(**sizes)).cuda()
        config = peft.BOFTConfig(target_modules=["q_proj", "v_proj"], boft_block_size=4)
        adapted = peft.get_peft_model(model, config)
        attached = [b.device.type for name, b in adapted.named_buffers() if name.endswith("boft_P")]
        return attached, [b.device.type for name, b in adapted.cuda().named_buffers() if name.endswith("boft_P")]

    case(permutations, "permutations")
"""


def test_what_peft_leaves_on_the_host(cuda: CudaRunner) -> None:
    """BOFT's permutations, unless the model is moved again: so forecasts with ``loaded_by="device_map"`` count them."""
    assert cuda.run(LEFT_ON_THE_HOST)["permutations"] == [["cpu", "cpu"], ["cuda", "cuda"]]
