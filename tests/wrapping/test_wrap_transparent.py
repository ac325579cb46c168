"""wrap_transparent: the same object to everybody, the user's code in every call, and back again."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import pickle
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import peft.tuners.tuners_utils
import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from models import save_llama
from peft import PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM, PreTrainedModel
from wrapped_models import TOKENS, AuxLoss, Count, Plain, Second, llama, lora, peft_llama

from safe_loading import ArgumentError, Transparent, WrapError, merge_lora_inplace, unwrap_transparent, wrap_transparent


def facts(model: Any) -> dict[str, Any]:
    """What an engine sees of a model, beside its weights."""
    return {
        "name": (type(model).__name__, type(model).__module__, str(type(model)), type(model).__doc__),
        "peft": isinstance(model, PeftModel),
        "transformers": isinstance(model, PreTrainedModel),
        "signature": inspect.signature(type(model).forward),
        "generate": inspect.signature(model.generate),
        "forward": vars(model).get("forward"),
        "keys": list(model.state_dict()),
        "modules": [path for path, _ in model.named_modules()],
        "trainable": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "config": id(model.config),
        "split": model._no_split_modules,
        "map": getattr(model, "hf_device_map", None),
        "8bit": getattr(model, "is_loaded_in_8bit", None),
        "4bit": getattr(model, "is_loaded_in_4bit", None),
        "repr": repr(model),
    }


def test_the_model_is_the_same_object_with_the_same_facts() -> None:
    model = peft_llama()
    before, pointers = facts(model), [parameter.data_ptr() for parameter in model.parameters()]
    assert wrap_transparent(model, Count) is model
    assert isinstance(model, Count)
    assert facts(model) == before
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_the_code_runs_once_per_call_and_changes_what_it_returns() -> None:
    model = peft_llama().eval()
    expected = model(input_ids=TOKENS, labels=TOKENS)
    wrap_transparent(model, AuxLoss, coefficient=0.25)
    out = model(input_ids=TOKENS, labels=TOKENS)
    assert torch.equal(out.loss, expected.loss + 0.25 * expected.logits.square().mean())
    assert torch.equal(out.logits, expected.logits)


def test_state_becomes_attributes_and_the_proof_leaves_it_alone() -> None:
    model = wrap_transparent(peft_llama(), Count, calls=0, log=[], note=torch.ones(2))
    assert (model.calls, model.log) == (0, [])
    model(TOKENS)
    assert model.calls == 1
    assert "note" not in model.state_dict()


@pytest.mark.parametrize("mode", [True, False])
def test_train_and_eval_reach_every_module(mode: bool) -> None:
    model = wrap_transparent(peft_llama(), Count)
    model.train(mode)
    assert {module.training for module in model.modules()} == {mode}
    model(TOKENS)
    assert model.calls == 1


def test_generate_runs_the_code_at_every_step_and_gives_the_same_tokens() -> None:
    model = peft_llama().eval()
    expected = model.generate(input_ids=TOKENS, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    wrap_transparent(model, Count)
    found = model.generate(input_ids=TOKENS, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(found, expected)
    assert model.calls == 6
    assert type(model.get_base_model()) is LlamaForCausalLM
    assert not [name for name in vars(model.get_base_model()) if name.startswith("_transparent")]


class Silence(Transparent):
    """Forbids a token."""

    token: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.logits[..., self.token] = -torch.inf
        return out


def test_the_code_decides_what_is_generated() -> None:
    model = peft_llama().eval()
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    first = model.generate(input_ids=TOKENS[:1], **options)[0, -1]
    wrap_transparent(model, Silence, token=int(first))
    assert model.generate(input_ids=TOKENS[:1], **options)[0, -1] != first
    unwrap_transparent(model)
    assert model.generate(input_ids=TOKENS[:1], **options)[0, -1] == first


def test_generate_of_a_prompt_is_not_given_the_prompt_twice() -> None:
    def prompted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()

    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = prompted().generate(input_ids=TOKENS, **options)
    model = wrap_transparent(prompted(), Count)
    assert torch.equal(model.generate(input_ids=TOKENS, **options), expected)
    assert model.calls == 4


def test_threads_may_generate_and_train_at_the_same_time() -> None:
    model = wrap_transparent(peft_llama().eval(), Count)
    plain = peft_llama().eval()(TOKENS).logits
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = peft_llama().eval().generate(input_ids=TOKENS, **options)
    found: list[Any] = []

    def generate() -> None:
        found.append(torch.equal(model.generate(input_ids=TOKENS, **options), expected))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found.append(torch.equal(model(input_ids=TOKENS).logits, plain))
    for thread in threads:
        thread.join()
    assert all(found)
    assert len(found) > 3
    assert type(model.get_base_model()) is LlamaForCausalLM


def test_a_failing_generate_leaves_nothing_behind() -> None:
    class Fails(Transparent):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("mine")

    model = wrap_transparent(peft_llama(), Fails)
    with pytest.raises(KeyError, match="mine"):
        model.generate(input_ids=TOKENS, max_new_tokens=1)
    assert type(model.get_base_model()) is LlamaForCausalLM
    assert "_transparent_routes" not in vars(model)


def test_save_pretrained_and_from_pretrained_are_bit_equal(tiny_llama: Path, tmp_path: Path) -> None:
    base = LlamaForCausalLM.from_pretrained(tiny_llama)
    plain = peft_llama(copy.deepcopy(base))
    plain.save_pretrained(tmp_path / "plain")
    model = wrap_transparent(peft_llama(base), Count)
    model.save_pretrained(tmp_path / "wrapped")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    again = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_llama), str(tmp_path / "wrapped"))
    assert torch.equal(again.eval()(TOKENS).logits, model.eval()(TOKENS).logits)


def test_a_wrapped_base_saves_its_own_architecture(tmp_path: Path) -> None:
    model = wrap_transparent(llama(), Count)
    before = facts(llama())
    assert {**facts(model), "config": None} == {**before, "config": None}
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(TOKENS).logits, model.eval()(TOKENS).logits)
    hidden = model(TOKENS, output_hidden_states=True).hidden_states  # looked up by the name of the class
    assert len(hidden) == 4
    model.calls = 0
    model.generate(input_ids=TOKENS, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    assert model.calls == 3


def test_a_deep_copy_has_weights_and_state_of_its_own() -> None:
    model = wrap_transparent(peft_llama().eval(), Count, log=[1])
    expected = model(TOKENS).logits
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.log.append(2)
    assert not twin(TOKENS).logits.any()
    assert torch.equal(model(TOKENS).logits, expected)
    assert (model.calls, twin.calls, model.log) == (2, 2, [1])
    unwrap_transparent(twin)
    assert isinstance(model, Count)


def test_a_pickled_model_is_wrapped_in_the_same_classes() -> None:
    model = wrap_transparent(wrap_transparent(peft_llama().eval(), Count), Second, order=[])
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        again = pickle.loads(pickle.dumps(model, protocol))
        assert type(again) is type(model)
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
        assert again.order == model.order == ["Second"]
        model.order.clear()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert facts(again)["name"] == facts(model)["name"]
    unwrap_transparent(unwrap_transparent(again))
    assert type(again) is type(peft_llama())


def test_compile_traces_the_code_without_a_graph_break() -> None:
    model = wrap_transparent(peft_llama().eval(), AuxLoss, coefficient=0.25)
    expected = model(input_ids=TOKENS, labels=TOKENS).loss
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(whole(input_ids=TOKENS, labels=TOKENS).loss, expected)
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).loss, expected)


def test_accelerate_unwraps_to_the_model() -> None:
    model = wrap_transparent(peft_llama(), Count)
    # one state for the whole process: a Trainer of another test may have made it for another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    prepared(TOKENS)
    assert model.calls == 1
    assert "forward" in vars(model)  # accelerate's autocast, on the object
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert extract_model_from_parallel(model) is model
    assert vars(model)["forward"].__func__ is type(peft_llama()).forward  # accelerate puts the plain one back
    model(TOKENS)
    assert model.calls == 2
    AcceleratorState._reset_state(reset_partial_state=True)  # nor may the next test find this one's


def test_hooks_of_a_dispatched_model_stay() -> None:
    base = llama()
    dispatch_model(base, {"": "cpu"}, force_hooks=True)
    assert base.hf_device_map == {"": "cpu"}
    model = peft_llama(base).eval()
    expected = model(TOKENS).logits
    wrap_transparent(model, Count)
    assert model.hf_device_map == {"": "cpu"}
    assert torch.equal(model(TOKENS).logits, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_stays_one(bits: int, tmp_path: Path) -> None:
    # 64 wide: on CPUs with AVX512-BF16 bitsandbytes cannot compute with 4 bits below its block size
    wide = save_llama(tmp_path, hidden_size=64)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    base = AutoModelForCausalLM.from_pretrained(wide, quantization_config=config, device_map={"": "cpu"})
    model = peft_llama(base).eval()
    before, expected = facts(model), model(TOKENS).logits
    wrap_transparent(model, Count)
    assert facts(model) == before
    assert before[f"{bits}bit"]
    assert torch.equal(model(TOKENS).logits, expected)


def test_merge_lora_inplace_gives_back_the_plain_base() -> None:
    expected = merge_lora_inplace(peft_llama().eval())
    model = wrap_transparent(peft_llama().eval(), Count)
    assert merge_lora_inplace(model, unload=False) is model
    model(TOKENS)
    assert model.calls == 1
    model.unmerge_adapter()
    merged = merge_lora_inplace(wrap_transparent(peft_llama().eval(), Count))
    assert type(merged) is LlamaForCausalLM
    assert torch.equal(merged(TOKENS).logits, expected(TOKENS).logits)


def test_the_last_mixin_is_called_first() -> None:
    class Inner(Transparent):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.order.append("Inner")
            return super().__call__(*args, **kwargs)

    model = wrap_transparent(peft_llama(), Inner, order=[])
    with pytest.raises(WrapError, match="the state 'order' would hide 'order' of PeftModelForCausalLM"):
        wrap_transparent(model, Second, order=[])
    wrap_transparent(model, Second)
    model(TOKENS)
    assert model.order == ["Second", "Inner"]
    assert model.wrap_report.mixins == ("Second", "Inner")
    assert str(model.wrap_report).startswith("Second -> Inner -> PeftModelForCausalLM\n")


def test_unwrap_takes_off_the_last_and_leaves_what_was_there() -> None:
    model = peft_llama()
    cls, before, own = type(model), facts(model), set(vars(model))
    wrap_transparent(model, Count, extra=3)
    first = model.wrap_report
    wrap_transparent(model, Second, order=[])
    assert unwrap_transparent(model) is model
    assert isinstance(model, Count)
    assert not isinstance(model, Second)
    assert not hasattr(model, "order")
    assert (model.extra, model.wrap_report) == (3, first)
    model(TOKENS)
    unwrap_transparent(model)
    assert type(model) is cls
    assert facts(model) == before
    assert set(vars(model)) == own
    assert wrap_transparent(model, Count).calls == 0  # as often as one likes
    unwrap_transparent(model)
    with pytest.raises(ArgumentError, match="is not wrapped"):
        unwrap_transparent(model)


def test_classes_go_with_their_models() -> None:
    def wrapped() -> weakref.ref[type]:
        class Local(Second):
            pass

        model = wrap_transparent(peft_llama(wrap_transparent(llama(), Local, order=[])), Count)
        model.generate(input_ids=TOKENS, max_new_tokens=2, pad_token_id=0)
        return weakref.ref(Local)

    left = wrapped()
    for _ in range(3):  # a class that is collected lets go of those that it was made from
        gc.collect()
    assert left() is None


def test_classes_are_made_once() -> None:
    one, two = wrap_transparent(peft_llama(), Count), wrap_transparent(peft_llama(), Count)
    assert type(one) is type(two)


def state_of(model: nn.Module) -> Any:
    return (
        type(model),
        {path: {**vars(module)} for path, module in model.named_modules()},
        [(id(each), each.requires_grad, each._version) for each in (*model.parameters(), *model.buffers())],
    )


def test_the_proof_touches_no_weight_no_random_number_and_no_cache() -> None:
    model = peft_llama(lora_dropout=0.5)
    model.get_base_model().model.layers[0].eval()  # a mode that model.train() would lose
    before, random = state_of(model), torch.get_rng_state()
    wrap_transparent(model, Count)
    assert [proof.runs for proof in model.wrap_report.proofs] == [True, True, True]
    assert [proof.mode for proof in model.wrap_report.proofs] == ["train", "eval", "generate"]
    assert torch.equal(torch.get_rng_state(), random)
    unwrap_transparent(model)
    assert str(state_of(model)) == str(before)


def test_a_replaced_forward_on_the_object_runs_inside_the_code() -> None:
    model = peft_llama().eval()
    base = model.get_base_model()
    original = base.forward

    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    base.forward = types.MethodType(fused, base)  # as trl's fused head and Liger do
    wrap_transparent(model, Count)
    model(TOKENS)
    assert model.calls == 1
    assert model.wrap_report.ok


def fused_head(self: Any, input_ids: Any = None, attention_mask: Any = None, **_: Any) -> Any:
    """A forward that multiplies with the weight of the head and leaves the head itself out."""
    return self.model(input_ids=input_ids).last_hidden_state @ self.lm_head.weight.T


def test_code_around_a_part_is_proven_from_the_model_that_is_called() -> None:
    model = peft_llama()
    head = model.get_base_model().lm_head
    before, random = state_of(model), torch.get_rng_state()
    wrap_transparent(head, Count, within=model)
    assert [proof.runs for proof in head.wrap_report.proofs] == [True, True, True]
    unwrap_transparent(head)
    assert str(state_of(model)) == str(before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_fused_head_that_leaves_the_code_out_is_an_error_with_its_cause() -> None:
    model = peft_llama()
    base = model.get_base_model()
    base.forward = types.MethodType(fused_head, base)
    before = state_of(model)
    with pytest.raises(WrapError, match="nothing was changed") as refused:
        wrap_transparent(base.lm_head, Count, within=model)
    assert "base_model.model.forward was replaced on the object by test_wrap_transparent.fused_head" in str(
        refused.value
    )
    assert refused.value.problems[0].startswith("train: a call of PeftModelForCausalLM ended without it")
    assert str(state_of(model)) == str(before)


def test_a_tuner_that_calls_forward_past_the_class_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)  # peft up to 0.20

    old_forward.__qualname__ = "BaseTuner.forward"
    monkeypatch.setattr(peft.tuners.tuners_utils.BaseTuner, "forward", old_forward)
    model = peft_llama()
    with pytest.raises(WrapError) as refused:
        wrap_transparent(model.get_base_model(), Count, within=model)
    assert any(
        "old_forward (line" in problem and "calls the forward of LlamaForCausalLM" in problem
        for problem in refused.value.problems
    )
    assert type(model.get_base_model()) is LlamaForCausalLM
    wrap_transparent(model, Count)  # around the outside it does run
    model(TOKENS)
    assert model.calls == 1


def test_a_replaced_generate_that_leaves_the_code_out_is_an_error_with_its_cause() -> None:
    model = peft_llama()

    def fast_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model().generate(*args, **kwargs)

    model.generate = types.MethodType(fast_generate, model)
    before = state_of(model)
    with pytest.raises(WrapError) as refused:
        wrap_transparent(model, Count)
    (problem,) = refused.value.problems
    assert problem.startswith("generate: transformers.generation.utils.")
    assert "generate was replaced on the object by test_wrap_transparent" in problem
    assert str(state_of(model)) == str(before)


def test_what_cannot_be_simulated_is_a_warning() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, pixels: torch.Tensor) -> Any:
            return self.inner(pixels)

    model = Outer()
    wrap_transparent(model.inner, Count, within=model)
    report = model.inner.wrap_report
    assert [finding.code for finding in report.findings] == ["wrap-not-proven"] * 2
    assert "unexpected keyword argument 'input_ids'" in report.findings[0].message
    assert "unknown" in str(report)
    unwrap_transparent(model.inner)
    wrap_transparent(model.inner, Count, within=model, example={"pixels": torch.ones(1, 4)})
    assert [proof.runs for proof in model.inner.wrap_report.proofs] == [True, True]
    assert model.inner.wrap_report.findings == ()
    report = json.loads(model.inner.wrap_report.to_json())
    assert report["ok"]
    assert report["mixins"] == ["Count"]
    assert "<table>" in model.inner.wrap_report._repr_html_()


def test_a_class_that_pickle_cannot_find_is_told() -> None:
    class Local(Transparent):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    model = wrap_transparent(peft_llama(), Local)
    assert [finding.code for finding in model.wrap_report.findings] == ["mixin-not-importable"]
    copy.deepcopy(model)
    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        pickle.dumps(model)


class HasInit(Transparent):
    def __init__(self) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class HasForward(Transparent):
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class HidesConfig(Transparent):
    config = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class HidesState(Transparent):
    @property
    def weight(self) -> float:
        return 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __getattr__(self, name: str) -> Any: ...


REFUSED: list[tuple[type[Transparent], dict[str, Any], str]] = [
    (HasInit, {}, "HasInit defines '__init__'; it is never called"),
    (HasForward, {}, "HasForward defines 'forward'; trainers"),
    (HidesConfig, {}, "HidesConfig defines 'config'; it would hide 'config' of PeftModelForCausalLM"),
    (HidesState, {}, "HidesState defines '__getattr__'"),
    (HidesState, {"weight": 2.0}, "the state 'weight' would hide 'weight' of HidesState"),
    (Count, {"config": 1}, "the state 'config' would hide 'config' of PeftModelForCausalLM"),
    (Count, {"base_model": 1}, "the state 'base_model' would hide"),
    (Count, {"lm_head": 1}, "the state 'lm_head' would hide"),
    (Count, {"training": 1}, "the state 'training' would hide"),
    (Count, {"wrap_report": 1}, "the state 'wrap_report' would hide"),
    (Count, {"head": nn.Linear(2, 2)}, r"the state 'head' is a Linear: .* attach_head\(model, 'head', ...\)"),
    (Count, {"scale": nn.Parameter(torch.ones(1))}, "the state 'scale' is a Parameter"),
]


@pytest.mark.parametrize(("mixin", "state", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_names_that_would_hide_something_are_refused(mixin: Any, state: dict[str, Any], message: str) -> None:
    model = peft_llama()
    before = str(state_of(model))
    with pytest.raises(WrapError, match=message):
        wrap_transparent(model, mixin, **state)
    assert str(state_of(model)) == before


def test_all_that_clashes_is_told_at_once() -> None:
    with pytest.raises(WrapError) as refused:
        wrap_transparent(peft_llama(), HidesState, config=1, lm_head=2)
    assert len(refused.value.problems) == 3


def test_what_is_no_mixin_is_refused() -> None:
    model = peft_llama()
    for wrong, message in (
        (Plain, "Plain is not a mixin"),
        (lambda model: model, "is not a mixin"),
        (Transparent, "has no __call__"),
        (type("Empty", (Transparent,), {}), "Empty has no __call__"),
        (type("Both", (Transparent, nn.Module), {"__call__": Count.__call__}), "derives from nn.Module too"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrap_transparent(model, wrong)
    with pytest.raises(ArgumentError, match="str is not a model"):
        wrap_transparent("model", Count)
    with pytest.raises(ArgumentError, match="does not contain the Linear"):
        wrap_transparent(nn.Linear(2, 2), Count, within=model)
    with pytest.raises(TypeError, match=r"wrap_transparent\(model, Count, ...\)"):
        Count(model)


def test_slots_have_no_place_in_a_model() -> None:
    class Slots(Transparent):
        __slots__ = ("place",)

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    model = peft_llama()
    before = str(state_of(model))
    with pytest.raises(WrapError, match="Slots cannot go around PeftModelForCausalLM"):
        wrap_transparent(model, Slots)
    assert str(state_of(model)) == before


def test_the_same_mixin_twice_is_refused() -> None:
    model = wrap_transparent(peft_llama(), Count)
    with pytest.raises(WrapError, match="wrapped in Count already"):
        wrap_transparent(model, Count)


WRONG = "    model = get_peft_model(base, config)\n    model = wrap_transparent(model, Count)"


def test_a_plain_wrapper_before_get_peft_model_is_refused_with_the_right_two_lines() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(Plain(llama()), lora(task_type=None))
    with pytest.raises(WrapError) as refused:
        wrap_transparent(model, Count)
    text = str(refused.value)
    assert text.endswith(WRONG)
    assert "get_peft_model received a Plain with the LlamaForCausalLM inside it ('model')" in text
    assert "gradient_checkpointing_enable" in text


def test_a_plain_wrapper_around_everything_is_refused() -> None:
    wrapper = Plain(llama())
    with pytest.raises(WrapError, match="wrap_transparent received a Plain with the LlamaForCausalLM") as refused:
        wrap_transparent(wrapper, Count)
    assert str(refused.value).splitlines()[-2:] == [
        "    model = wrapper.model",  # no adapter, of which nobody spoke
        "    model = wrap_transparent(model, Count)",
    ]
    assert isinstance(wrap_transparent(wrapper.model, Count), Count)
    wrapper = Plain(peft_llama())
    wrapper.value_head = nn.Linear(32, 1)
    with pytest.raises(WrapError, match="with the PeftModelForCausalLM inside") as refused:
        wrap_transparent(wrapper, Count)
    assert str(refused.value).splitlines()[-3:] == [
        "    model = wrapper.model",
        "    model = attach_head(model, 'value_head', wrapper.value_head)  # before it is wrapped",
        "    model = wrap_transparent(model, Count)",
    ]


def test_a_quantized_base_in_a_plain_wrapper_is_told_to_be_prepared_first(tiny_llama: Path) -> None:
    config = BitsAndBytesConfig(load_in_8bit=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config, device_map={"": "cpu"})
    with pytest.raises(WrapError) as refused:
        wrap_transparent(Plain(base), Count)
    assert str(refused.value).splitlines()[-2:] == [
        "    model = get_peft_model(prepare_model_for_kbit_training(base), config)",
        "    model = wrap_transparent(model, Count)",
    ]
    assert "is_loaded_in_8bit" in str(refused.value)


def test_engines_come_after_the_wrapping() -> None:
    model = peft_llama()
    with pytest.raises(WrapError, match="inside OptimizedModule already") as refused:
        wrap_transparent(torch.compile(model, backend="eager"), Count)
    assert "wrap_transparent(model._orig_mod, Count)" in str(refused.value)
    with pytest.raises(WrapError, match="inside DataParallel already"):
        wrap_transparent(nn.DataParallel(model), Count)


def test_any_module_can_be_wrapped() -> None:
    model = wrap_transparent(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Count)
    model(torch.ones(2, 4))
    assert model.calls == 1
    assert [proof.mode for proof in model.wrap_report.proofs] == ["train", "eval"]
    two = nn.ModuleDict({"one": llama(), "two": llama()})
    wrap_transparent(two, Count)  # a model of two models is no wrapper in the wrong place
