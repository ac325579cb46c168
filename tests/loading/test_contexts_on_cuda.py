"""On which cards a process has a context, through all that people do with a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import save_adapter, save_llama

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    import transformers, peft
    from safe_loading import (
        MemoryGuard, Transparent, Workload, attach_head, audit_model, check_checkpoint, load_adapter_on_rank,
        load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace, plan_device_map, predict_memory,
        unwrap_transparent, wrap_transparent)

    base, adapter, second, out, own = *sys.argv[1:5], int(sys.argv[5])
    device = torch.device("cuda", own)

    def load(**arguments):
        return load_peft_on_rank(base, adapter, is_trainable=True, **(arguments or {"device": own}))

    def train(model, make, *, clip=False, scaler=False, checkpointing=False):
        seen = [contexts()]
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model.train()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cuda", enabled=scaler)
        tokens = torch.arange(1, 25, device=device).reshape(2, 12)
        for _ in range(3):
            scaler.scale(model(input_ids=tokens, labels=tokens).loss).backward()
            scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(contexts())
        return seen

    optim = torch.optim
    LOOPS = {
        "adamw": lambda model: train(model, optim.AdamW),
        "foreach": lambda model: train(model, lambda p: optim.AdamW(p, foreach=True)),
        "fused": lambda model: train(model, lambda p: optim.AdamW(p, fused=True)),
        "sgd": lambda model: train(model, optim.SGD),
        "adafactor": lambda model: train(model, optim.Adafactor),
        "transformers' adafactor": lambda model: train(model, transformers.Adafactor),
        "scaler": lambda model: train(model, optim.AdamW, scaler=True, clip=True),
        "checkpointing": lambda model: train(model, optim.AdamW, checkpointing=True),
    }

    def as_a_rank():
        os.environ.update(LOCAL_RANK=str(own), LOCAL_WORLD_SIZE=str(torch.cuda.device_count()))
        before = torch.cuda.current_device()
        model = load(device=None)
        return model, [before, torch.cuda.current_device(), [f.code for f in model.load_report.findings]]

    for name, loop in LOOPS.items():
        case(lambda: loop(as_a_rank()[0]), f"rank: {name}")
    case(lambda: as_a_rank()[1], "made current")

    @case
    def named_device():
        model = load()
        fixes = [f.fix for f in model.load_report.findings if f.code == "current-device"]
        plain = LOOPS["sgd"](model)
        return {"current": torch.cuda.current_device(), "fixes": fixes, "sgd": plain, "adamw": LOOPS["adamw"](model)}

    @case
    def named_device_after_the_fix():
        model = load()
        exec(model.load_report.findings[0].fix.partition("call ")[2].partition(", and")[0])
        return LOOPS["adamw"](model)

    @case
    def the_rest():
        model, seen = load(), {}
        tokens = torch.arange(1, 25, device=device).reshape(2, 12)
        def note(name):
            seen[name] = contexts()
        note("load")
        model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3)
        note("generate")
        model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=True)
        note("sample")
        model.save_pretrained(out + "/adapter")
        note("save")
        load_adapter_on_rank(model, second, "second")
        model.set_adapter("second")
        note("next adapter")
        load_adapter_on_rank(model, adapter, "second", hotswap=True)
        note("hot swap")
        predict_memory(base, Workload.train(2, 16, optimizer="adamw"))
        note("forecast of a config")
        predict_memory(model, Workload.generate(1, 16))
        note("forecast of the model")
        plan_device_map(base, {0: "1GiB"}, workload=Workload.generate(1, 16)).verify()
        note("plan")
        with MemoryGuard() as guard:
            guard.step()
        note("guard")
        findings = [f.code for f in audit_model(model).findings]
        note("audit")
        merged = merge_lora_inplace(model, adapter_names=["second"])
        note("merge")
        merged.save_pretrained(out + "/merged")
        note("save of the merged model")
        return {"seen": seen, "audit": findings}

    @case
    def fresh_forecasts():
        predict_memory(base, Workload.train(2, 16, optimizer="adamw"))
        plan_device_map(base, workload=Workload.generate(1, 16)).verify()
        with MemoryGuard() as guard:
            guard.step()
        return contexts()

    class Unchanged(Transparent):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    @case
    def on_the_host():
        seen, head = {}, torch.nn.Linear(32, 1)
        def note(name):
            seen[name] = contexts()
        model = load(device="cpu")
        note("load")
        tokens = torch.arange(1, 25).reshape(2, 12)
        model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3)
        note("generate")
        load_adapter_on_rank(model, second, "second")
        load_adapter_on_rank(model, adapter, "second", hotswap=True)
        note("hot swap")
        attach_head(model, "score", head)
        wrap_transparent(model, Unchanged)
        note("head and wrapper")
        model(input_ids=tokens, labels=tokens).loss.backward()
        note("backward pass")
        model.save_pretrained(out + "/of the host")
        note("save")
        audit_model(model)
        note("audit")
        unwrap_transparent(model)
        merge_lora_inplace(load(device="cpu"))
        note("merge")
        merge_lora_checkpoint(base, adapter, out + "/merged on the host")
        note("merge on disk")
        check_checkpoint(adapter)
        note("check")
        try:
            import bitsandbytes
        except ImportError:
            return seen
        for bits in ({"load_in_4bit": True}, {"load_in_8bit": True}):
            quantized = transformers.BitsAndBytesConfig(**bits)
            load(device="cpu", base_kwargs={"quantization_config": quantized})
            note(f"{bits}")
        return seen

    @case
    def traces_of_moves():
        from test_trace_inputs import MOVES, Moving
        from safe_loading._memory.trace.trace_step import trace_step
        problems = [trace_step(Moving(how), Workload.train(2, 8, optimizer="none")).problems for how in MOVES]
        return [len(problems), any(problems), contexts()]

    @case
    def stray_is_audited():
        model = load()
        torch.empty(1, device="cuda:0")
        return [[f.code, f.where] for f in audit_model(model).findings if f.code == "SL116"]

    @case
    def plain_peft():
        model = transformers.AutoModelForCausalLM.from_pretrained(base, device_map={"": own})
        loaded = contexts()
        peft.PeftModel.from_pretrained(model, adapter)
        return [loaded, contexts()]
"""
LOOPS = ["adamw", "foreach", "fused", "sgd", "adafactor", "transformers' adafactor", "scaler", "checkpointing"]


@pytest.fixture(scope="module")
def facts(cuda: CudaRunner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if cuda.count < 2:
        pytest.skip("one CUDA device is nobody else's")
    root = tmp_path_factory.mktemp("contexts")
    base = save_llama(root / "base", torch.float32)
    adapter = save_adapter(root / "adapter", base)
    second = save_adapter(root / "second", base, seed=4)
    return cuda.run(SCRIPT, args=[base, adapter, second, root, str(cuda.count - 1)], timeout=600)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rank_that_trains_has_one_context(facts: dict[str, Any], cuda: CudaRunner, loop: str) -> None:
    assert facts[f"rank: {loop}"] == [[cuda.count - 1]] * 4


def test_the_device_of_a_rank_is_made_current(facts: dict[str, Any], cuda: CudaRunner) -> None:
    assert facts["made current"] == [0, cuda.count - 1, []]


def test_a_device_that_was_named_is_not_made_current(facts: dict[str, Any], cuda: CudaRunner) -> None:
    own, named = cuda.count - 1, facts["named_device"]
    assert named["current"] == 0
    assert len(named["fixes"]) == 1
    assert named["sgd"] == [[own]] * 4
    # why there is a finding; when torch's optimizers ask the device of their parameters, this test says so
    assert named["adamw"] == [[own], *[[0, own]] * 3]
    assert facts["named_device_after_the_fix"] == [[own]] * 4


def test_nothing_else_leaves_a_context(facts: dict[str, Any], cuda: CudaRunner) -> None:
    seen = facts["the_rest"]["seen"]
    assert seen == {step: [cuda.count - 1] for step in seen}
    assert "SL116" not in facts["the_rest"]["audit"]


def test_forecasts_and_plans_touch_no_card(facts: dict[str, Any]) -> None:
    assert facts["fresh_forecasts"] == []


def test_what_is_on_the_host_touches_no_card(facts: dict[str, Any]) -> None:
    assert "error" not in facts["on_the_host"], facts["on_the_host"]["error"]
    assert len(facts["on_the_host"]) >= 10
    assert facts["on_the_host"] == {step: [] for step in facts["on_the_host"]}


def test_a_traced_model_that_moves_its_input_to_a_card_moves_nothing(facts: dict[str, Any]) -> None:
    assert facts["traces_of_moves"] == [9, False, []]


def test_a_stray_context_is_found(facts: dict[str, Any]) -> None:
    assert facts["stray_is_audited"] == [["SL116", "cuda:0"]]


def test_the_plain_call_does_stray(facts: dict[str, Any], cuda: CudaRunner) -> None:
    # the reason for all this; when peft mends it, this test says so
    loaded, after = facts["plain_peft"]
    assert loaded == [cuda.count - 1]
    assert after == list(range(cuda.count))
