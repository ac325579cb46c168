"""Forecasts against what was measured on a GPU, against arithmetic, and what they must not do to the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from allocator import bytes_kept_by
from engines import needs
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.core_model_loading import dot_natural_key

from safe_loading import ArgumentError, DeviceMapInfeasible, Workload, largest_micro_batch, predict_memory
from safe_loading._core.cards import CARDS
from safe_loading._core.report import MiB
from safe_loading._memory.trace.allocator import EMPTY_CACHE, replay
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.records import Allocation, StepTrace
from safe_loading._memory.trace.timeline import Loading, natural_key, run_events
from safe_loading._model.quantized.kbit_preparation import KbitPreparation

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def tiny(**changes: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
    }
    return LlamaConfig(**{**sizes, **changes})


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **changes})


def _never(*_: object) -> bool:
    """What a Mock with a `return_value` would do, but for its arguments, which it keeps alive."""
    return False


# Peaks in MiB of torch.cuda.max_memory_allocated and max_memory_reserved on a Tesla T4 with a torch before 2.13:
# SmolLM2-135M in float16, LoRA of rank 32, AdamW, checkpointing; rows of the fitcheck-llm archive.
MEASURED = [
    ("none", "eager", 2, 512, 1027.29443359375, 1104),
    pytest.param("none", "sdpa", 2, 512, 1026.91943359375, 1070, marks=pytest.mark.slow),
    pytest.param("none", "eager", 1, 4096, 3180.10693359375, 4476, marks=pytest.mark.slow),
    pytest.param("nf4", "sdpa", 1, 4096, 3576.75146484375, 3784, marks=pytest.mark.slow),
]


@needs("transformers", "5.10")
@pytest.mark.parametrize(("quantized", "attention", "rows", "length", "allocated", "reserved"), MEASURED)
def test_what_a_gpu_measured(
    quantized: str, attention: str, rows: int, length: int, allocated: float, reserved: float
) -> None:
    config = tiny(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        dtype="float16",
    )
    if quantized == "nf4":
        config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
    workload = Workload.train(rows, length, gradient_checkpointing=True, optimizer="adamw_foreach", adapter=lora(r=32))
    with mock.patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", _never):
        found = predict_memory(
            config,
            workload,
            capability=(7, 5),
            attn_implementation=attention,
            keep_outputs=True,
            prepare_for_kbit="peft",
        )
    limit = 0.012 if quantized == "nf4" else 0.001
    assert found.allocated_peak_bytes / MiB == pytest.approx(allocated, rel=limit)
    taken = replay(found.events, oldest_first=False).reserved_peak_bytes
    assert taken / MiB == pytest.approx(reserved, rel=0.005)  # a segment more or less of the small blocks


def test_a_run_is_loaded_as_the_engines_do_and_each_thread_takes_its_scratch_at_its_first_product() -> None:
    names = [
        "m.embed.weight",
        "m.layers.10.q.weight",
        "m.layers.10.q.absmax",
        "m.layers.10.q.code",
        "m.layers.2.q.weight",
    ]
    parts: Any = ["weights", "weights", "buffers", "buffers", "weights"]
    load = [
        Allocation(100 + i, 0, part, "", "load", name) for i, (name, part) in enumerate(zip(names, parts, strict=True))
    ]
    adapter = Allocation(200, 0, "adapters", "", "load", "m.layers.2.q.lora_A.default.weight")
    made: Any = (
        (300, "forward", "aten.add.Tensor"),
        (301, "forward", "aten.mm.default"),
        (302, "backward", "aten.bmm.default"),
        (303, "backward", "aten.mm.default"),
    )
    step = [Allocation(size, 0, "temporary", "", phase, op) for size, phase, op in made]
    blocks = (*load, adapter, *step)
    trace = StepTrace(Workload.weights_only(), blocks, tuple((index, False) for index in range(len(blocks))), {}, {})
    loading = Loading(True, {"m.layers.10.q.weight": (50, 51)}, {"m.embed.weight": 60})
    events = run_events(trace, 0, loading, (8, 9))
    sizes = {key: size for key, size in events if size > 0}
    said = [size if size != -1 else -sizes[key] for key, size in events if key < 10 or size > 0]
    # all at once; each weight in the checkpoint's order; the cast; an empty cache; the adapter
    assert said[:2] == [60 + 101 + 104, -(60 + 101 + 104)]
    assert said[2:9] == [60, 104, 50, 51, 102, 101, 103]
    assert said[9:13] == [64, 1, -64, -1]  # bitsandbytes divides the 16 codes by the largest
    assert said[13:16] == [-50, -51, 100]
    assert said[16:19] == [-60, -2, 200]
    assert said[19:25] == [300, 301, 8, 302, 9, 303]


def test_biases_of_quantized_layers_come_by_themselves_and_are_cast_once() -> None:
    """bitsandbytes casts a bias to the dtype of the inputs in the first step, and later steps find it so."""
    weight = Allocation(100, 0, "weights", "q", "load", "q.weight")
    bias = Allocation(16, 0, "weights", "q", "load", "q.bias")
    recast = Allocation(8, 0, "temporary", "q", "forward", "aten._to_copy.default")
    output = Allocation(300, 0, "activations", "q", "forward", "aten.mm.default")
    trace = StepTrace(
        Workload.weights_only(),
        (weight, bias, recast, output),
        ((0, False), (1, False), (2, False), (1, True), (3, False), (3, True)),
        {},
        {},
    )
    events = run_events(trace, 0, Loading(True, {"q.weight": (50,)}, {"q.bias": 9}), ())
    sizes = {key: size for key, size in events if size > 0}
    said = [size if size > 0 else -sizes[key] for key, size in (e for e in events if e != EMPTY_CACHE)]
    # all at once; the bias in 16 bits, the weight and its packed form; the bias in float32
    assert said[:8] == [109, -109, 9, 50, 100, -50, 16, -9]
    assert said[8:] == [8, -16, *3 * [300, -300]]


@needs("transformers", "5.10")
def test_the_order_of_a_checkpoint_is_the_engines() -> None:
    names = ["lm_head.weight", "model.layers.10.mlp.up.weight", "model.layers.9.mlp.up.weight", "model.norm2.weight"]
    names += ["model.norm10.weight", "model.norm.weight", "model.embed_tokens.weight", "model.layers.9.a1.b.weight"]
    assert sorted(names, key=natural_key) == sorted(names, key=dot_natural_key)


def test_the_parts_are_arithmetic_and_sum_to_the_peak() -> None:
    config = tiny(dtype="float32")
    found = predict_memory(config, Workload.train(2, 16, adapter=lora()))
    with torch.device("meta"):
        weights = sum(p.nbytes for p in AutoModelForCausalLM.from_config(config).parameters())
    adapter = 2 * 4 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))  # layers, bytes, rank, in and out of each target
    parts = found.components
    assert sum(parts.values()) == found.allocated_peak_bytes
    assert all(size >= 0 for size in parts.values())
    assert 0 <= parts["weights"] - weights < 4096  # rotary frequencies
    assert parts["adapters"] == adapter
    assert parts["optimizer"] - 2 * adapter < 16 * 512  # and a step counter for each
    assert found.reserved_peak_bytes >= found.allocated_peak_bytes
    assert sum(m.weights for m in found.modules) == parts["weights"] + parts["adapters"]


def test_checkpointing_keeps_less_and_longer_rows_more() -> None:
    config = tiny(num_hidden_layers=4)
    kept = [
        predict_memory(config, Workload.train(1, length, gradient_checkpointing=on)).components["saved_activations"]
        for length, on in ((256, True), (256, False), (512, False))
    ]
    assert 2 * kept[0] < kept[1] < kept[2]


def test_weights_alone_and_generation() -> None:
    alone = predict_memory(tiny(), Workload.weights_only())
    assert set(alone.components) >= {"weights", "gradients", "saved_activations", "temporary"}
    assert alone.components["weights"] + alone.components["rounding"] == alone.allocated_peak_bytes
    generated = predict_memory(tiny(), Workload.generate(2, 64))
    assert generated.components["kv_cache"] >= 2 * 2 * 2 * 2 * 64 * 16 * 2  # layers, k and v, rows, heads, tokens, size
    assert generated.components["gradients"] == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_config_gives_packed_weights(bits: int) -> None:
    config = tiny(hidden_size=128, intermediate_size=256)
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    before = config.to_json_string()
    workload = Workload.train(1, 128, gradient_checkpointing=True, adapter=lora())
    found = predict_memory(config, workload, prepare_for_kbit="peft")
    assert config.to_json_string() == before
    linear = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256)
    scales = linear // 64 * 4 if bits == 4 else 2 * 4 * (128 + 64 + 64 + 128 + 256 + 256 + 128)
    rest = (2 * 256 * 128 + 5 * 128) * 4  # embeddings, head and norms, cast to float32
    assert 0 <= found.components["weights"] - (linear * bits // 8 + scales + rest) < 2048
    assert any("float32" in note for note in found.notes)


def test_double_quantization_stores_less() -> None:
    sizes = []
    for nested in (False, True):
        config = tiny(hidden_size=512, intermediate_size=1024)
        config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=nested)
        sizes.append(predict_memory(config, Workload.weights_only()).components["weights"])
    assert sizes[1] < sizes[0]


def test_the_wrapper_that_hides_the_quantized_base_costs_what_was_promised_to_be_saved() -> None:
    config = tiny(num_hidden_layers=7, hidden_size=128, intermediate_size=512)
    config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    right, wrong = (
        predict_memory(
            config, Workload.train(4, 256, gradient_checkpointing=on, adapter=lora()), prepare_for_kbit="peft"
        )
        for on in (True, False)
    )
    assert wrong.allocated_peak_bytes > 2 * right.allocated_peak_bytes


def test_a_model_is_forecast_as_it_is_and_stays_so() -> None:
    model = AutoModelForCausalLM.from_config(tiny())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = model.training, functional.softmax, list(model.modules())
    from_model = predict_memory(model, Workload.train(2, 16, adapter=lora()))
    from_config = predict_memory(tiny(), Workload.train(2, 16, adapter=lora()))
    assert dataclasses.replace(from_model, model="") == dataclasses.replace(from_config, model="")
    assert (model.training, functional.softmax, list(model.modules())) == flags
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_hooks


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_of_bitsandbytes_own_layers_is_forecast_as_its_config(bits: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(tiny(**sizes)).save_pretrained(tmp_path)
    quantized = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_use_double_quant=True)
    real: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantized, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    config = tiny(**sizes, quantization_config=quantized)
    modules = [(name, id(module)) for name, module in real.named_modules()]

    def same(prepared: KbitPreparation, **on: Any) -> None:
        workload = Workload.train(2, 128, adapter=lora(), **on)
        mine, expected = (predict_memory(model, workload, prepare_for_kbit=prepared) for model in (real, config))
        assert mine.components == expected.components
        assert mine.reserved_peak_bytes == expected.reserved_peak_bytes

    same("trl")
    same("none")
    real = prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    same("peft", gradient_checkpointing=True)
    assert [(name, id(module)) for name, module in real.named_modules()] == modules
    attached = predict_memory(get_peft_model(real, lora()), Workload.train(2, 128))
    expected = predict_memory(config, Workload.train(2, 128, adapter=lora()), prepare_for_kbit="peft")
    assert attached.components == expected.components


def test_eight_bits_keep_their_inputs_unless_checkpointing_is_reentrant(tmp_path: Path) -> None:
    """As measured on the CPU's allocator with bitsandbytes 0.50: it keeps them on the node, where no hook sees them."""
    AutoModelForCausalLM.from_config(tiny()).save_pretrained(tmp_path)
    kept = []
    for reentrant in (False, True):
        base: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
        )
        base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model = get_peft_model(base, lora()).train()
        ids = torch.ones(2, 128, dtype=torch.long)
        seen = bytes_kept_by(lambda model=model, ids=ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
        trace = predict_memory(model, Workload.train(2, 128, gradient_checkpointing=True))
        kept.append((seen, trace.components["saved_activations"]))
    layer = 2 * 128 * (64 + 64 + 64 + 128) * 4  # the inputs of attention, its output layer, and the two of the MLP
    assert kept[0][0] - kept[1][0] == 2 * layer
    assert kept[0][1] > kept[1][1] + layer


def test_an_adapter_folder_stands_for_its_base(tiny_llama: Path, tiny_adapter: Path) -> None:
    adapted = predict_memory(tiny_adapter, Workload.train(1, 16))
    alone = predict_memory(tiny_llama, Workload.train(1, 16))
    assert adapted.components["adapters"] > 0 == alone.components["adapters"]
    assert adapted.components["optimizer"] < alone.components["optimizer"]


def test_the_users_own_batch_is_what_is_run() -> None:
    ids = torch.ones(3, 48, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    model = tiny(num_hidden_layers=1)
    expected = predict_memory(model, Workload.train(3, 48))
    for own in (batch, {name: tensor.to("meta") for name, tensor in batch.items()}):
        found = predict_memory(model, Workload.train(1, 8), inputs=own)
        assert (found.components, found.reserved_peak_bytes) == (expected.components, expected.reserved_peak_bytes)
    assert any(
        "reads a number whose value is unknown; True is assumed" in note for note in found.notes
    )  # is the mask all ones?
    padded = {**batch, "attention_mask": ids.tril()}
    found = predict_memory(model, Workload.train(1, 8), inputs=padded)
    assert found.components["saved_activations"] > expected.components["saved_activations"]
    config = AutoConfig.for_model("vit", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    config.architectures = ["ViTForImageClassification"]
    images = {"pixel_values": torch.empty(4, 3, 32, 32), "labels": ids[0, :4]}
    sizes = [
        predict_memory(config, Workload.train(rows, 1), inputs=inputs).components["saved_activations"]
        for rows, inputs in ((4, None), (1, images), (1, None))
    ]
    assert sizes[0] == sizes[1] > 2 * sizes[2]
    with pytest.raises(ArgumentError, match="pass tensors by argument name"):
        predict_memory(tiny(), Workload.train(1, 8), inputs=cast(Any, {"input_ids": [[1, 2]]}))
    with pytest.raises(ArgumentError, match="fixes the number of rows"):
        largest_micro_batch(tiny(), Workload.train(1, 8), 2**30, inputs=batch)


def test_a_held_output_is_counted() -> None:
    config = tiny(vocab_size=4096)
    free, held = (predict_memory(config, Workload.train(1, 256), keep_outputs=keep) for keep in (False, True))
    assert held.allocated_peak_bytes > free.allocated_peak_bytes


def test_an_output_that_the_loop_holds_across_steps_is_alive_in_the_next_forward_pass() -> None:
    output = Allocation(300, 0, "activations", "", "forward", "aten.add.Tensor")
    gradient = Allocation(302, 0, "temporary", "", "backward", "aten.add.Tensor")
    made = ((0, False), (1, False), (1, True))
    trace = StepTrace(Workload.weights_only(), (output, gradient), made, {}, {})

    def sizes(*, left_across_steps: bool) -> list[int]:
        events = run_events(trace, 0, Loading(), (), left_across_steps=left_across_steps)
        known = {key: size for key, size in events if size > 0}
        return [size if size > 0 else -known[key] for key, size in events]

    assert sizes(left_across_steps=False)[:6] == [300, 302, -302, -300, 300, 302]
    assert sizes(left_across_steps=True)[:6] == [300, 302, -302, 300, -300, 302]
    config, step = tiny(vocab_size=4096), Workload.train(1, 256)
    within, across = (predict_memory(config, step, keep_outputs=keep) for keep in (True, "across_steps"))
    assert within.events != across.events
    assert within.allocated_peak_bytes == across.allocated_peak_bytes
    with pytest.raises(ArgumentError, match="keep_outputs='always': True, False or 'across_steps'"):
        predict_memory(config, step, keep_outputs="always")  # type: ignore[arg-type]


def test_a_loop_that_empties_the_cache_between_steps() -> None:
    config, step = tiny(vocab_size=4096), Workload.train(1, 256)
    kept, emptied = (predict_memory(config, step, empties_cache=empties) for empties in (False, True))
    assert [place for place, event in enumerate(emptied.events) if event == EMPTY_CACHE][-1] == len(emptied.events) - 1
    assert [event for event in emptied.events if event != EMPTY_CACHE] == list(kept.events)
    assert emptied.allocated_peak_bytes == kept.allocated_peak_bytes


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"head_dim": 16}),
        ("t5", {}),
    ],
)
def test_other_architectures(kind: str, extra: dict[str, Any]) -> None:
    sizes = {k: v for k, v in tiny().to_dict().items() if k.startswith(("hidden", "inter", "num_", "vocab"))}
    config = AutoConfig.for_model(kind, **({"d_model": 64, "num_layers": 2} if kind == "t5" else sizes), **extra)
    found = predict_memory(config, Workload.train(1, 32), dtype=torch.bfloat16)
    assert found.allocated_peak_bytes > 3 * found.components["weights"] > 0  # and optimizer state of twice as much


def test_fits_replays_under_the_limit() -> None:
    found = predict_memory(tiny(), Workload.train(2, 512), context_bytes=100)
    assert found.total_bytes == found.reserved_peak_bytes + 100
    assert found.fits(found.total_bytes)
    assert not found.fits(found.allocated_peak_bytes // 2)


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    config, workload = tiny(), Workload.train(1, 256, adapter=lora())
    limit = predict_memory(config, workload.replace(batch_size=5), context_bytes=0).total_bytes + MiB
    found = largest_micro_batch(config, workload, limit, context_bytes=0)
    rows = found.batch_size
    assert rows is not None
    assert rows >= 5
    assert found.fits(limit)
    assert not predict_memory(config, workload.replace(batch_size=rows + 1), context_bytes=0).fits(limit)
    with pytest.raises(DeviceMapInfeasible, match="One row takes") as caught:
        largest_micro_batch(config, workload, 2 * MiB, context_bytes=0)
    one = predict_memory(config, workload, context_bytes=0).total_bytes
    assert caught.value.missing_bytes == one - 2 * MiB
    with pytest.raises(DeviceMapInfeasible, match=r"the card has 2\.0 MiB"):
        largest_micro_batch(config, workload, "2MiB", context_bytes=0)
    with pytest.raises(ArgumentError, match="no batch"):
        largest_micro_batch(config, Workload.weights_only(), limit)


def test_what_cannot_be_forecast_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny())
    with pytest.raises(ArgumentError, match=r"dtype.*built already"):
        predict_memory(model, Workload.weights_only(), dtype=torch.float16)
    config = tiny()
    config.quantization_config = {"quant_method": "quark"}
    with pytest.raises(ArgumentError, match="quark"):
        predict_memory(config, Workload.weights_only())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(ArgumentError, match="names no base"):
        predict_memory(tmp_path, Workload.train(1, 8))


def test_the_report_as_text_html_json_and_picture() -> None:
    found = predict_memory(tiny(), Workload.train(1, 16, adapter=lora()))
    text = str(found)
    assert "saved activations" in text
    assert "optimizer" in text
    assert "KV cache" not in text, "a step without one has no row for it"
    assert "model.layers.0" in text
    assert "LoraConfig(r=4)" in text
    assert "<table>" in found._repr_html_()
    facts = json.loads(found.to_json())
    assert facts["components"] == dict(found.components)
    assert facts["total_bytes"] == found.total_bytes
    assert facts["workload"]["sequence_length"] == 16
    assert facts["workload"]["adapter"]["r"] == 4
    assert Workload.from_facts(facts["workload"]) == found.workload
    root = ElementTree.fromstring(found._repr_svg_())
    widths = [float(bar.get("width", 0)) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if len(bar)]
    assert sum(widths) == pytest.approx(480 * found.total_bytes / CARDS["t4"].memory, abs=1), "inside the least card"
    assert "Workload.train" in found._repr_svg_()
    assert found._repr_html_().count("Workload.train") == 1, "the page has the title once"


def test_a_forecast_is_drawn_inside_the_largest_card_that_is_too_small_and_the_next() -> None:
    found = predict_memory(tiny(), Workload.weights_only())
    size = 30 * 2**30
    changes = {"reserved_peak_bytes": size, "allocated_peak_bytes": size, "components": {"weights": size}}
    large = dataclasses.replace(found, **changes)
    texts = [
        str(text.text) for text in ElementTree.fromstring(large._repr_svg_()).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert [text for text in texts if text in CARDS] == ["rtx-4090", "a100-40gb"]
    assert [text.rpartition(" ")[2] for text in texts if " of " in text] == ["much", "free"]


def test_cuda_paths_are_taken_back_and_take_cudas_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = functional.softmax, functional.dropout, functional.scaled_dot_product_attention
    with cuda_paths((8, 0)), FakeTensorMode():
        x = torch.empty(4, 8, dtype=torch.float16, requires_grad=True)
        assert functional.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
        y = functional.dropout(x, 0.5)
        assert y.grad_fn is not None
        assert "NativeDropout" in type(y.grad_fn).__name__  # its mask has one byte an element
        q = torch.empty(1, 4, 16, 8, dtype=torch.float16, requires_grad=True)
        k = torch.empty(1, 2, 16, 8, dtype=torch.float16)
        out = functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        assert "_Flash" in type(out.grad_fn).__name__
        masked = functional.scaled_dot_product_attention(q, q, q, torch.ones(1, 1, 16, 16, dtype=torch.bool))
        assert "_Efficient" in type(masked.grad_fn).__name__
        (out.sum() + masked.sum()).backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    assert before == (functional.softmax, functional.dropout, functional.scaled_dot_product_attention)
