"""Forecasts of the Trainer over ranks, whose units are accelerate's: held against its own steps over NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from peft import LoraConfig
from trainer_jobs import ADAPTER, IN_FOUR_BITS, JOBS, OF_GRPO, OF_LIGER, OF_TRL, OWN, ROWS, SIZES, TOKENS, Job
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Spread, TraceError, Workload, predict_memory

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
SCRIPT = """
    import tempfile, time
    import transformers
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers import BitsAndBytesConfig, default_data_collator
    from models import tokenizer
    from safe_loading import load_at_prepare
    from safe_loading._memory.trace.liger_lm_head import liger_forward  # held against Liger's source by its own tests

    try:  # whose kernels allocate nothing, and are in no simulation
        import trl
        import trl.kernels.chunked_logprob as kernels
        from datasets import Dataset
        from datasets.table import InMemoryTable

        trl.trainer.utils._use_triton = lambda *_, **__: True
        kernels._forward_tile = kernels._backward_tile = kernels._addmm_fp32 = lambda *_, **__: None
    except ImportError:
        trl = None

    transformers.logging.set_verbosity_error()
    device = int(os.environ["RANK"])

    class Asked(TrainerCallback):
        # the most that the steps and evaluations ask the allocator for, whichever stream still uses what is freed
        def on_train_begin(self, *_, **__):
            torch.cuda.synchronize()
            self.begun = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
            torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)

        def on_step_end(self, *_, **__):
            time.sleep(0.3)  # NCCL's watchdog looks every 0.1 s, and lets go of the buckets that DDP replaces

        def most(self):
            torch.cuda.synchronize()
            most = held = self.begun
            for event in torch.cuda.memory._snapshot()["device_traces"][device]:
                if event["action"] in ("alloc", "free_requested"):
                    held += event["size"] if event["action"] == "alloc" else -event["size"]
                    most = max(most, held)
            return most

    def dataset(**columns):
        # with a fingerprint: to compute one, datasets 5.2 pickles the table, which pyarrow 26 forbids
        return Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")

    def sampled():
        class Sampled(trl.GRPOTrainer):
            def _generate_single_turn(self, prompt_ids, *_, **__):  # as vLLM, which takes nothing of the allocator
                return [[5] * (TOKENS // 2) for _ in prompt_ids], None

        return Sampled

    def trained(number, arguments, adapted, dtype, by_trl, packed, by_liger, prepared, samples):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) % 20000 + 30000 + number)  # one for each group
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, dtype or "float32"))
        if packed:
            torch.cuda.set_device(device)
            quantized = BitsAndBytesConfig(**packed)
            model = LlamaForCausalLM.from_pretrained(sys.argv[1], quantization_config=quantized, dtype="bfloat16")
        if prepared:
            with load_at_prepare():
                model = LlamaForCausalLM.from_pretrained(sys.argv[1])
        if by_liger:
            model.forward = liger_forward(model)
        if adapted and not samples:
            model = get_peft_model(model, LoraConfig(**ADAPTER), autocast_adapter_dtype=not packed)
        row = {"input_ids": [5] * TOKENS, "attention_mask": [1] * TOKENS, "labels": [5] * TOKENS}
        usual = dict(
            per_device_train_batch_size=ROWS, max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True,
            ddp_backend="cpu:gloo,cuda:nccl",
        )
        asked, rows = Asked(), [row] * 64
        if samples:
            rows = dataset(prompt=[" ".join(["w5"] * (TOKENS // 2))] * 64)
            own = {"bf16": False, "gradient_checkpointing": False, "num_generations": ROWS, "beta": 0.0}
            own |= {"max_completion_length": TOKENS // 2}
            args = trl.GRPOConfig(tempfile.mkdtemp(), **usual, **{**own, **arguments})
            trainer = sampled()(
                model, lambda completions, **_: [*map(float, range(len(completions)))], args=args, train_dataset=rows,
                processing_class=tokenizer(), callbacks=[asked],
                peft_config=LoraConfig(**ADAPTER) if adapted else None,  # trl keeps a copy of an adapter that is there
            )
        elif by_trl:
            rows = dataset(input_ids=[row["input_ids"]] * 64)
            own = {"bf16": False, "gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
            args = trl.SFTConfig(tempfile.mkdtemp(), **usual, **{**own, **arguments})
            trainer = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer(), callbacks=[asked])
        else:
            # whose forward names no columns here
            args = TrainingArguments(tempfile.mkdtemp(), remove_unused_columns=not by_liger, **usual, **arguments)
            given = dict(train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator)
            trainer = Trainer(model, args, callbacks=[asked], **given)
        trainer.train()
        return asked.most()

    for number, (name, job) in enumerate(JOBS.items()):
        case(lambda: trained(number, *job), name)
"""


def forecast(job: Job) -> int:
    adapter = LoraConfig(**ADAPTER) if job.adapted else None
    if job.samples:
        half = TOKENS // 2
        step = Workload.grpo(ROWS, half, half, adapter=adapter, steps_per_generation=0, **job.step)
    else:
        step = Workload.train(ROWS, TOKENS, adapter=adapter, **job.step)
    dtype = "bfloat16" if job.packed else job.dtype
    options: Any = {"quantization_config": job.packed} if job.packed else {}
    found = predict_memory(LlamaConfig(**SIZES), step, spread=job.spread, capability=(9, 0), dtype=dtype, **options)
    return max(found.ranks.values()) + found.components["workspaces"]


def hold(cuda: CudaRunner, jobs: dict[str, Job], folder: Path | None = None) -> None:
    """Hold the forecasts of jobs against what the Trainer, or trl's, asks for in them."""
    script = SCRIPT
    texts = {name: (job.arguments, *job[3:]) for name, job in jobs.items()}
    for name, value in {"SIZES": SIZES, "ROWS": ROWS, "TOKENS": TOKENS, "JOBS": texts, "ADAPTER": ADAPTER}.items():
        script = script.replace(name, repr(value))
    env = {"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": "65536"}
    ranks = cuda.run_ranks(script, 2, args=[] if folder is None else [folder], env=env, timeout=400)
    for name, job in jobs.items():
        most = [found[name] for found in ranks]
        assert not any(isinstance(each, dict) for each in most), (name, most)
        # a few numbers of the Trainer's own
        assert max(most) == pytest.approx(forecast(job), abs=8192), name


def test_the_trainer_over_ranks_asks_for_the_forecast(simulated_cuda: CudaRunner) -> None:
    hold(simulated_cuda, JOBS)


def test_trls_trainer_over_ranks_asks_for_the_forecast(simulated_cuda: CudaRunner) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: it comes with trl")
    pytest.importorskip("trl", minversion="1.16", reason="this trl has no fused LM head")
    hold(simulated_cuda, {name: job._replace(by_trl=True) for name, job in OF_TRL.items()})


def test_an_adapter_on_a_base_in_4_bits_asks_for_the_forecast(simulated_cuda: CudaRunner, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(tmp_path)
    hold(simulated_cuda, IN_FOUR_BITS, tmp_path)


def test_the_trainer_over_ranks_with_ligers_head_asks_for_the_forecast(
    simulated_cuda: CudaRunner, tmp_path: Path
) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    hold(simulated_cuda, OF_LIGER, tmp_path)


def test_a_head_that_accelerate_does_not_gather_for_liger_fails_in_the_step_and_in_the_forecast(
    simulated_cuda: CudaRunner,
) -> None:
    job = OF_LIGER["FSDP2, LoRA"]._replace(spread=Spread.fsdp2(2, **OWN), prepared=False)
    with pytest.raises(AssertionError, match="forecast its units"):  # of the head that the step itself meets
        hold(simulated_cuda, {"FSDP2": job})
    with pytest.raises(TraceError, match=r"LlamaForCausalLM: Liger's loss reads.*wrapped_by=\"safe_loading\""):
        forecast(job)
    assert forecast(job._replace(spread=Spread.fsdp2(2, wrapped_by="safe_loading")))
    assert forecast(job._replace(step={"fused_lm_head": False}))


def test_grpo_over_ranks_asks_for_the_forecast(simulated_cuda: CudaRunner) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: it comes with trl")
    pytest.importorskip("trl", minversion="1.16", reason="this trl has no fused LM head")
    hold(simulated_cuda, OF_GRPO)
