"""Autocast in a trace: which operations run in float32 on CUDA and not on the CPU, beside torch's own CUDA build."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, GPT2Config

from safe_loading import Workload, predict_memory
from safe_loading._core.engines import is_older
from safe_loading._memory.trace.cuda_autocast import cuda_autocast
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.trace_step import trace_step

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

# What each gives for a tensor x in 16 bits under CUDA's autocast: the same text runs there and here.
CALLS = {
    "float32": [
        "functional.layer_norm(x, (8,))",
        "functional.group_norm(x, 2)",
        "functional.softplus(x)",
        "functional.softmax(x, -1)",
        "functional.log_softmax(x, -1)",
        "functional.cross_entropy(x, x.argmax(-1))",
        "torch.nn.Softmax(-1)(x)",
        "torch.nn.CrossEntropyLoss()(x, x.argmax(-1))",
        "torch.softmax(x, -1)",
        "x.softmax(-1)",
        "torch.pow(x, 3.0)",
        "x.pow(2)",
        "x ** 2",
        "x.exp()",
        "x.rsqrt()",
        "x.sum(-1)",
        "torch.sum(x)",
        "x.cumsum(-1)",
        "x.log1p()",
        "torch.log2(x)",
        "x.tan()",
        "x.logsumexp(-1)",
        "torch.dist(x, x)",
        "functional.cosine_similarity(x, x)",
        "functional.normalize(x, dim=-1)",
        "x.norm(dim=-1)",
        "torch.linalg.norm(x)",
        "torch.linalg.matrix_norm(x)",
        "functional.interpolate(x[None], scale_factor=2)",
        "functional.interpolate(x[None], scale_factor=2, mode='linear')",
        "functional.interpolate(x[None, None], scale_factor=0.5, mode='bicubic', antialias=True)",
        "torch.nn.Upsample(scale_factor=2, mode='trilinear')(x[None, None, None])",
        "functional.mse_loss(x, x)",
    ],
    "half": [
        "functional.linear(x, x)",
        "functional.gelu(x)",
        "functional.softmax(x, -1, dtype=x.dtype)",
        "functional.scaled_dot_product_attention(*[x.float()[None, None]] * 3)",
        "x.sum(-1, dtype=x.dtype)",
        "x.mean()",
        "functional.interpolate(x[None], scale_factor=0.5, mode='area')",
        "x * x",
    ],
}
# torch's autocast has it since 2.12
CALLS["half" if is_older("torch", "2.12") else "float32"] += [
    "functional.rms_norm(x, (8,))",
    "torch.nn.RMSNorm(8, elementwise_affine=False)(x)",
]
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
NAMES = {"functional": functional, "torch": torch}
EACH = [(dtype, text) for dtype, texts in CALLS.items() for text in texts]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_operations_run_in_the_dtype_of_cudas_autocast(half: torch.dtype) -> None:
    dtypes = {"float32": torch.float32, "half": half}
    step = Workload.train(1, 8, autocast=str(half).removeprefix("torch."))
    before = functional.layer_norm, torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.is_autocast_enabled
    with cuda_paths((8, 0)), cuda_autocast(step), FakeTensorMode():
        x = torch.rand(8, 8, dtype=half, requires_grad=True)
        assert not torch.is_autocast_enabled()
        assert functional.layer_norm(x, (8,)).dtype == half
        with torch.autocast("cpu", half):
            assert torch.is_autocast_enabled()  # as layers of peft ask, for which it means the card's
            assert not torch.is_autocast_enabled("cuda")
            found = {text: eval(text, {**NAMES, "x": x}) for _, text in EACH}
            assert {text: value.dtype for text, value in found.items()} == {text: dtypes[d] for d, text in EACH}
            loss = functional.cross_entropy(x, torch.zeros(8, dtype=torch.int64))
        # CUDA casts the logarithms, and keeps them in 16 bits too; the CPU casts the logits
        steps = [loss.grad_fn]
        for _ in range(2):
            steps.append(steps[-1].next_functions[0][0])
        assert [type(each).__name__ for each in steps] == ["NllLossBackward0", "ToCopyBackward0", "LogSoftmaxBackward0"]
        (found["x ** 2"].sum() + found["functional.layer_norm(x, (8,))"].sum()).backward()
        assert x.grad is not None
        assert x.grad.dtype == half
    assert before == (
        functional.layer_norm,
        torch.pow,
        torch.Tensor.pow,
        torch.Tensor.__pow__,
        torch.is_autocast_enabled,
    )


def test_norms_and_powers_take_more_under_autocast_than_in_16_bits() -> None:
    """GPT-2 computes its norms and its activation by powers: both stay in float32, where each keeps twice the bytes."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, dtype="bfloat16")
    step = Workload.train(8, 128, optimizer="none")
    plain, cast = (
        predict_memory(config, each).allocated_peak_bytes for each in (step, step.replace(autocast="bfloat16"))
    )
    of_a_width = 2 * 8 * 128 * 64  # bytes of a hidden state in 16 bits
    # in each layer two norms keep a copy of their input, and the activation four tensors of four widths, in float32
    assert cast - plain > 2 * (2 * 2 + 4 * 4) * of_a_width


def test_what_a_model_returns_in_16_bits_is_copied_to_float32() -> None:
    """accelerate does so behind the autocast, while the loss keeps its own copy of the logits or their logarithms."""
    model = BertForMaskedLM(BertConfig(**{**BERT, "vocab_size": 1001}))
    step = Workload.train(2, 16, autocast="bfloat16")
    made = trace_step(model, step).allocations
    logits = [each for each in made if each.bytes == 2 * 16 * 1001 * 4 and each.phase == "forward"]
    assert logits[-1].op == "aten._to_copy.default"


ROWS = """
    half = "float16" if os.environ["SIMCUDA_GPU"] == "T4" else "bfloat16"

    def compare(row):
        predicted = forecast(row).allocated_peak_bytes
        return [predicted, run(row)["allocated"]]

    def autocast(name, method, dtype, **more):
        return compare(Row(name, method, os.environ["SIMCUDA_GPU"], more.pop("road", "to"), dtype=dtype, autocast=half,
                           **more))

    case(lambda: autocast("gpt2", "full", half, attention="eager"), "norms, powers and softmax")
    case(lambda: autocast("llama", "nf4", half, road="device_map"), "nf4")
    case(lambda: autocast("llama", "full", "float32"), "attention in 16 bits")
    case(lambda: autocast("bert", "lora", "float32", checkpointing=True), "cross entropy of 16 bits")
    case(lambda: autocast("bert", "full", "float32", optimizer="sgd", batch=8), "logits in float32 from accelerate")
    case(lambda: autocast("t5", "full", "float32", optimizer="sgd", batch=8), "the same of a decoder")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("card", ["A100", pytest.param("T4", marks=pytest.mark.slow)])
def test_steps_under_autocast_take_what_torch_allocates(simulated_cuda: CudaRunner, card: str) -> None:
    pairs = simulated_cuda.run_rows(ROWS, card)
    assert len(pairs) == 6
    for name, (predicted, real) in pairs.items():
        assert predicted == real, name


@pytest.mark.gpu
def test_the_table_is_that_of_torchs_cuda(cuda: CudaRunner) -> None:
    script = f"""
    from torch.nn import functional

    def dtypes():
        found = {{}}
        for half in (torch.bfloat16, torch.float16):
            x = torch.ones(8, 8, dtype=half, device="cuda", requires_grad=True)
            with torch.autocast("cuda", half):
                for text in {[text for _, text in EACH]!r}:
                    dtype = eval(text, {{"torch": torch, "functional": functional, "x": x}}).dtype
                    found[f"{{half}} {{text}}"] = "half" if dtype == half else str(dtype).removeprefix("torch.")
        report(found=found)

    dtypes()
    """
    halves = (torch.bfloat16, torch.float16)
    found = cuda.run(script)["found"]
    assert found == {f"{half} {text}": dtype for half, (dtype, text) in itertools.product(halves, EACH)}
