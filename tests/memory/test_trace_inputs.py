"""The inputs of a traced model, and the errors that ask for inputs that cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from allocator import peak_above_start
from allocator_truth import above_start, generation, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import skip_unless_buildable, tiny_config
from torch import nn
from transformers import BartConfig, BatchEncoding, BertConfig, BertModel, NllbMoeConfig

from safe_loading import ArgumentError, TraceError, Workload, audit_model, plan_device_map, predict_memory
from safe_loading._memory.trace.trace_step import trace_step

PROMPT, TRAIN = Workload.generate(2, 16), Workload.train(2, 16, optimizer="none")
SMALL = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 64) | {"vocab_size": 101, "num_labels": 3}
SMALL |= dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
SMALL |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)

LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def made(name: str, config: Any = None) -> Any:
    with torch.device("meta"):
        return getattr(transformers, name)(tiny_config(name) if config is None else config)


class Pictures(nn.Module):
    """Takes what no workload describes."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, pixels: torch.Tensor, *, sizes: torch.Tensor, more: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.out(pixels) * sizes.sum() + more
        return out


def test_arguments_that_nobody_makes_are_asked_for() -> None:
    with pytest.raises(TraceError, match=r"Pictures.*inputs=\{'pixels': "):
        trace_step(Pictures(), PROMPT)
    given = {"pixels": torch.empty(2, 4, device="meta"), "sizes": torch.ones(2)}
    assert not trace_step(Pictures(), PROMPT, inputs=given).problems


def test_a_main_input_that_is_not_of_tokens_is_asked_for() -> None:
    with pytest.raises(TraceError, match=r"model\.encoder .*NoneType.*inputs=\{'input_values': "):
        trace_step(made("MoonshineForConditionalGeneration"), PROMPT)


@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "VisionEncoderDecoderModel"])
@pytest.mark.parametrize("workload", [PROMPT, TRAIN])
def test_images_that_a_model_cannot_be_without_are_made(name: str, workload: Workload) -> None:
    trace = trace_step(made(name), workload)
    images = [
        block for block in trace.allocations if block.component == "inputs" and block.bytes == 2 * 3 * 32 * 32 * 4
    ]
    assert len(images) == 1


def test_the_size_of_images_is_asked_for_where_the_config_does_not_say_it() -> None:
    with pytest.raises(TraceError, match=r"Siglip2ForImageClassification does not say how large.*'pixel_values'"):
        trace_step(made("Siglip2ForImageClassification"), TRAIN)


def test_a_decoder_is_given_the_output_of_its_own_encoder() -> None:
    model = made("NllbMoeForConditionalGeneration", NllbMoeConfig(**SMALL, num_experts=4, expert_capacity=8))
    trace = trace_step(model, PROMPT)
    assert {"prefill", "decode"} < {made.phase for made in trace.allocations}
    assert trace.calls["model.encoder"] == 1


def test_choices_are_asked_for_and_their_mask_and_labels_follow() -> None:
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=101)
    with pytest.raises(TraceError, match=r"BertForMultipleChoice.*choices.*inputs=\{'input_ids': "):
        trace_step(made("BertForMultipleChoice", config), TRAIN)
    trace = trace_step(made("BertForMultipleChoice", config), TRAIN, inputs={"input_ids": torch.ones(2, 4, 16).long()})
    sizes = [block.bytes for block in trace.allocations if block.component == "inputs"]
    assert sizes == [2 * 4 * 16 * 8, 2 * 4 * 16 * 8, 2 * 8]


def test_labels_are_numbers_for_each_class_where_the_loss_compares_numbers() -> None:
    def labels(name: str, **changes: Any) -> int:
        sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.AutoConfig.for_model(name, **sizes, intermediate_size=64, vocab_size=101, **changes)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        blocks = trace_step(model, TRAIN).allocations
        return [block.bytes for block in blocks if block.component == "inputs"][2]

    assert labels("bert", num_labels=3) == 2 * 8
    for problem in ("multi_label_classification", "regression"):
        assert labels("bert", num_labels=3, problem_type=problem) == 2 * 3 * 4
    # a reward is one number, and the loss of DeBERTa has no mean of whole ones
    assert labels("bert", num_labels=1) == labels("deberta-v2", num_labels=1) == 2 * 4


def test_a_classifier_beside_a_decoder_answers_once_and_an_encoder_has_no_cache() -> None:
    classifier = made("BartForSequenceClassification", BartConfig(**SMALL))
    trace = trace_step(classifier, PROMPT)
    assert trace.calls["classification_head"] == trace.calls["model.decoder"] == 1
    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, vocab_size=101)
    assert trace_step(made("T5EncoderModel", config), PROMPT).calls["encoder"] == 1


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["T5GemmaForTokenClassification", "T5Gemma2ForSequenceClassification"])
def test_a_classifier_that_turns_its_cache_off_itself_is_not_told_to(name: str, adapter: LoraConfig | None) -> None:
    """Its ``**kwargs`` go where ``use_cache=False`` goes, so that nobody may pass the argument."""
    skip_unless_buildable(name)
    model = made(name)
    step = TRAIN.replace(adapter=adapter)
    batch = {key: torch.ones(2, 16, dtype=torch.long) for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    assert trace_step(model, step, inputs=batch).devices[0].peak_bytes
    if adapter is None:
        assert trace_step(model, PROMPT, inputs=batch).devices[0].peak_bytes


def switching() -> Any:
    """An encoder that refuses a cache, and routers whose forward moves their layer to float32."""
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_experts": 1, "vocab_size": 101}
    layers = dict.fromkeys(("num_layers", "num_decoder_layers"), 2)
    layers |= dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 1)
    torch.manual_seed(0)
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**sizes, **layers, decoder_start_token_id=0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_that_moves_a_layer_of_its_own(dtype: torch.dtype) -> None:
    """On a model that was never traced before: what torch keeps of fake tensors made the first trace fail."""
    trace = trace_step(switching().to(dtype), TRAIN)
    assert trace.calls["encoder.block.1.layer.1.mlp.router.classifier"] == 1


def test_generation_asks_no_encoder_for_a_cache() -> None:
    forecast = above_start(trace_step(switching(), PROMPT), "prefill", "decode")
    assert forecast == pytest.approx(generation(switching(), 2, 16), rel=2e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_made_has_the_shape_of_what_is_given(rows: int) -> None:
    model = made("LlamaForCausalLM")
    trace = trace_step(model, TRAIN, inputs={"input_ids": torch.ones(rows, 24).long()})
    assert [block.bytes for block in trace.allocations if block.component == "inputs"] == [rows * 24 * 8] * 3
    given = {"inputs_embeds": torch.empty(rows, 24, model.config.hidden_size, device="meta")}
    trace = trace_step(model, TRAIN, inputs=given)
    assert [block.bytes for block in trace.allocations if block.component == "inputs"] == [
        rows * 24 * model.config.hidden_size * 4,
        rows * 24 * 8,
        rows * 24 * 8,
    ]


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_a_decoder_reads_as_many_tokens_as_the_labels_that_are_given(name: str) -> None:
    """A batch of ``DataCollatorForSeq2Seq``: a text, and the shorter one that is learned from it."""
    inputs = {"input_ids": torch.ones(2, 24).long(), "labels": torch.ones(2, 5).long()}
    with_ids = {**inputs, "decoder_input_ids": torch.ones(2, 5).long()}
    long = {**inputs, "labels": torch.ones(2, 24).long()}
    of_labels, of_both, of_long = (trace_step(made(name), TRAIN, inputs=given) for given in (inputs, with_ids, long))
    assert not of_labels.problems
    assert of_labels.devices[0].peak_bytes == of_both.devices[0].peak_bytes < of_long.devices[0].peak_bytes


@pytest.mark.parametrize("name", ["BartForSequenceClassification", "BigBirdPegasusForSequenceClassification"])
def test_classifiers_that_look_for_the_end_of_a_text_find_one(name: str) -> None:
    config = BartConfig(**SMALL) if name.startswith("Bart") else None
    trace = trace_step(made(name, config), TRAIN)
    assert trace.assumptions == ()


def test_whisper_gets_sounds_of_the_length_that_it_takes() -> None:
    sizes: dict[str, Any] = {"d_model": 64, "vocab_size": 101, "pad_token_id": 0, "decoder_start_token_id": 1}
    sizes |= {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.WhisperConfig(**sizes, max_source_positions=100, architectures=[WHISPER])
    model = transformers.WhisperForConditionalGeneration(config)
    sound = {"input_features": torch.empty(2, 80, 200, device="meta")}
    for workload in (Workload.train(2, 8), Workload.generate(2, 8)):
        assert trace_step(model, workload).devices == trace_step(model, workload, inputs=sound).devices
    model.half()  # as Whisper large-v3 is published: its convolutions take sounds of their own dtype alone
    halves = {name: tensor.half() for name, tensor in sound.items()}
    assert trace_step(model, workload).devices == trace_step(model, workload, inputs=halves).devices
    assert predict_memory(config, Workload.train(2, 8)).allocated_peak_bytes > 0


WHISPER = "WhisperForConditionalGeneration"


MOVES = [
    "cuda",
    "cuda of an index",
    "to a text",
    "to an index",
    "to a device",
    "to a keyword",
    "made there",
    "made of values",
    "back and there",
]


class Moving(torch.nn.Module):
    """Moves its input to the accelerator itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.how = how

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        x = torch.ones(input_ids.shape[0], 8, device="cpu")
        ways = {
            "cuda": lambda: x.cuda(),
            "cuda of an index": lambda: x.cuda(0, non_blocking=True),
            "to a text": lambda: x.to("cuda"),
            "to an index": lambda: x.to(0),
            "to a device": lambda: x.to(torch.device("cuda:0"), torch.float32),
            "to a keyword": lambda: x.to(device="cuda:0"),
            "made there": lambda: torch.ones(input_ids.shape[0], 8, device="cuda"),
            "made of values": lambda: torch.tensor([[1.0] * 8] * input_ids.shape[0], device="cuda"),
            "back and there": lambda: x.cuda().cpu().to(self.linear.weight.device),
        }
        return self.linear(ways[self.how]())


@pytest.mark.parametrize("how", MOVES)
def test_a_forward_that_moves_tensors_itself(how: str) -> None:
    trace = trace_step(Moving(how), Workload.train(2, 8, optimizer="none"))
    assert trace.problems == ()
    made = [a.device for a in trace.allocations if a.phase == "forward" and a.bytes == 2 * 8 * 4]
    assert 0 in made


class Recomputed(Moving):
    """Runs as a layer that a checkpoint computes again in the backward pass."""

    def __init__(self, how: str, *, reentrant: bool) -> None:
        super().__init__(how)
        self.first = torch.nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        def layer(x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * super(Recomputed, self).forward(input_ids))

        x = self.first(torch.ones(input_ids.shape[0], 8, device=input_ids.device))
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", MOVES)
def test_a_layer_that_moves_tensors_itself_and_is_computed_again(how: str, reentrant: bool) -> None:
    trace = trace_step(Recomputed(how, reentrant=reentrant), Workload.train(2, 8, optimizer="none"))
    assert trace.problems == ()


def test_an_activated_lora_with_checkpointing() -> None:
    """peft tells each layer where its adapter begins, as a list of numbers, when it is computed again too."""
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, vocab_size=101))
    plain, freed = (
        trace_step(model, Workload.train(2, 16, adapter=lora, gradient_checkpointing=checkpointing))
        for checkpointing in (False, True)
    )
    assert not freed.problems
    assert freed.devices[0].peak_bytes < plain.devices[0].peak_bytes


def test_a_classifier_of_several_rows_has_a_padding_token_as_everybody_sets_it(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**LLAMA, vocab_size=101)
    config.save_pretrained(tmp_path)
    options: Any = {"auto_class": "AutoModelForSequenceClassification", "context_bytes": 0}
    forecasts = [predict_memory(source, TRAIN, **options) for source in (tmp_path, config)]
    assert config.pad_token_id is None
    assert all(any("padding token is assumed" in note for note in forecast.notes) for forecast in forecasts)
    assert plan_device_map(tmp_path, {0: "8GB"}, workload=TRAIN, auto_class=options["auto_class"], verify=False).ok
    # a model that is there already fails in its step, too, until the script sets one
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(TraceError, match=r"no padding token.* set model\.config\.pad_token_id"):
        predict_memory(model, TRAIN, context_bytes=0)
    model.config.pad_token_id = 5
    assert {predict_memory(model, TRAIN, context_bytes=0).allocated_peak_bytes} == {
        forecast.allocated_peak_bytes for forecast in forecasts
    }


def test_pairs_of_sentences_and_sounds_have_one_label_each() -> None:
    pairs = made("BertForNextSentencePrediction")
    trace = trace_step(pairs, TRAIN)
    assert [block.bytes for block in trace.allocations if block.component == "inputs"][-1] == 2 * 8
    sounds = {"input_values": torch.empty(2, 1024, 128, device="meta")}
    trace = trace_step(made("ASTForAudioClassification"), TRAIN, inputs=sounds)
    assert [block.bytes for block in trace.allocations if block.component == "inputs"][-1] == 2 * 8


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("BertForQuestionAnswering", ("start_positions", "end_positions")),
        ("BertForPreTraining", ("labels", "next_sentence_label")),
        ("AlbertForPreTraining", ("labels", "sentence_order_label")),
        ("Gemma3ForSequenceClassification", ("labels",)),  # takes them by **kwargs, for its base
        ("Qwen3_5ForSequenceClassification", ("labels",)),
    ],
)
def test_a_step_is_that_of_the_loss_which_the_head_computes(name: str, targets: tuple[str, ...]) -> None:
    skip_unless_buildable(name)
    model = getattr(transformers, name)(tiny_config(name)).train()
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = 0
    model.config.get_text_config().use_cache = False
    mine = above_start(trace_step(model, TRAIN), "forward", "backward")

    def step() -> None:
        batch = tokens(model, 2, 16)
        for target in targets:
            of_tokens = target == "labels" and name.endswith("PreTraining")
            batch[target] = torch.ones((2, 16) if of_tokens else (2,), dtype=torch.long)
        model(**batch).loss.backward()

    assert mine == peak_above_start(step)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "PhimoeForCausalLM"])
def test_a_router_that_peft_cannot_adapt_is_named_and_left_out_as_advised(name: str) -> None:
    lora: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    step = Workload.train(2, 16, adapter=LoraConfig(**lora))
    with pytest.raises(TraceError, match=r"returns several tensors.*exclude_modules=\['router'\]"):
        predict_memory(made(name), step, context_bytes=0)
    model = get_peft_model(getattr(transformers, name)(tiny_config(name)), LoraConfig(**lora))
    with pytest.raises(AttributeError, match="'tuple' object"):  # the step itself
        model(input_ids=torch.zeros(2, 16, dtype=torch.long))
    advised = Workload.train(2, 16, adapter=LoraConfig(**lora, exclude_modules=["router"]))
    assert predict_memory(made(name), advised, context_bytes=0).allocated_peak_bytes > 0


class Pairs(nn.Module):
    """An encoder of questions and passages, as FlagEmbedding, Tevatron and GritLM train it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        encoder: Any = BertModel(BertConfig(vocab_size=64, **sizes))
        self.encoder = get_peft_model(encoder, LoraConfig(r=2, target_modules=["query", "value"]))

    def encoded(self, texts: Any) -> torch.Tensor:
        if isinstance(texts, list):
            return torch.cat([self.encoded(part) for part in texts])
        first: torch.Tensor = self.encoder(**texts).last_hidden_state[:, 0]
        return nn.functional.normalize(first, dim=-1)

    def forward(self, queries: Any, passages: Any) -> dict[str, torch.Tensor]:
        scores = self.encoded(queries) @ self.encoded(passages).T
        right = torch.arange(len(scores), device=scores.device)
        return {"loss": nn.functional.cross_entropy(scores, right), "scores": scores}


class FlatPairs(Pairs):
    """The same, by tensors."""

    def forward(self, queries: Any, passages: Any, mask: Any = None, mask_of_passages: Any = None) -> Any:
        texts = {"input_ids": passages, "attention_mask": mask_of_passages}
        return super().forward({"input_ids": queries, "attention_mask": mask}, texts)


def test_batches_inside_a_batch_are_traced_as_their_tensors() -> None:
    short, long = torch.ones(2, 8, dtype=torch.long), torch.ones(6, 24, dtype=torch.long)
    flat = {"queries": short, "passages": long, "mask": short, "mask_of_passages": long}
    step = Workload.train(2, 24)
    expected = predict_memory(FlatPairs(), step, inputs=flat)
    of_texts = [{"input_ids": ids, "attention_mask": ids} for ids in (short, long)]
    nested: list[Any] = [dict(zip(("queries", "passages"), of_texts, strict=True))]
    nested += [{name: [texts] for name, texts in nested[0].items()}]
    nested += [{name: BatchEncoding(texts) for name, texts in nested[0].items()}]
    for inputs in nested:
        found = predict_memory(Pairs(), step, inputs=inputs)
        assert found.components == expected.components
        assert found.reserved_peak_bytes == expected.reserved_peak_bytes
        audited = audit_model(Pairs(), step, inputs=inputs)
        assert [each.code for each in audited.findings] == ["SL101"]


def test_the_types_of_inputs_can_be_resolved() -> None:
    for verb in (predict_memory, audit_model):
        assert torch.Tensor in get_args(get_args(get_args(get_type_hints(verb)["inputs"])[0])[1])


def test_what_is_no_tensor_inside_a_batch_is_refused() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    wrong: Any = {"queries": {"input_ids": ids}, "passages": {"input_ids": [[1, 2]]}}
    with pytest.raises(ArgumentError, match=r"passages\['input_ids'\]\[0\]\[0\] is a int; .*dicts and lists of te"):
        predict_memory(Pairs(), Workload.train(2, 8), inputs=wrong)


class Critic(transformers.LlamaPreTrainedModel):
    """A model of one's own that takes what it names, as OpenRLHF's critic does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None) -> torch.Tensor:
        values: torch.Tensor = self.score(self.model(input_ids, attention_mask=attention_mask).last_hidden_state)
        return values


def test_an_adapter_passes_no_more_than_its_base_takes() -> None:
    base = Critic(transformers.LlamaConfig(**LLAMA, vocab_size=101))
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).train()

    def step() -> None:
        batch = tokens(model, 2, 16)
        model(**batch).mean().backward()

    assert above_start(trace_step(model, TRAIN), "forward", "backward") == peak_above_start(step)
