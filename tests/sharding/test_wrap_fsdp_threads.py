"""What people reported of adapters under FSDP, made on tiny models: hidden ties, trained rows, single elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_cases import TOKENS, llama
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from safe_loading import ArgumentError, SafeLoadingError, load_peft_on_rank, meta_model, wrap_fsdp_meta_safe
from safe_loading._sharding.local_shard import ElementRange
from safe_loading._sharding.scatter import range_bytes

Q: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"]}
TIED_LORA: dict[str, Any] = {"r": 2, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
TOKEN_ROWS: dict[str, Callable[[], Any]] = {
    "LoRA with tokens": lambda: LoraConfig(**Q, trainable_token_indices=[3, 5]),
    "tokens alone": lambda: TrainableTokensConfig(token_indices=[3, 5]),
}


def save(folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    kind, config = llama(**options)
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return save(tmp_path / "base", tie_word_embeddings=True)


def trained(base: Path, config: Any, folder: Path | None = None) -> Any:
    """A model with an adapter that is not where it started."""
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    if folder is not None:
        model.save_pretrained(str(folder))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
        return found


def stepped(model: Any) -> torch.Tensor:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model.train()
    for _ in range(3):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(model)


@pytest.mark.parametrize("version", [2, 1])
def test_the_lora_of_a_tied_head_cannot_be_trained_apart_from_that_of_the_embeddings(
    one_rank: None, tied: Path, tmp_path: Path, version: Any
) -> None:
    """peft#2864: with ensure_weight_tying the two LoRAs are one memory, seen from both sides."""
    whole = stepped(trained(tied, LoraConfig(**TIED_LORA), tmp_path / "adapter"))
    loaded = load_peft_on_rank(tied, tmp_path / "adapter", device="cpu", is_trainable=True)
    on_meta = get_peft_model(meta_model(tied), LoraConfig(**TIED_LORA))
    for model, source in ((trained(tied, LoraConfig(**TIED_LORA)), None), (loaded, None), (on_meta, tied)):
        with pytest.raises(ArgumentError, match=r"lm_head.*share their memory.*ensure_weight_tying=False") as caught:
            wrap_fsdp_meta_safe(model, source, version=version)
        assert "contiguous" not in str(caught.value)
        assert "plain attributes" not in str(caught.value)
    assert torch.equal(stepped(loaded), whole)  # the refused model trains as ever, on one device
    apart = LoraConfig(**{**TIED_LORA, "ensure_weight_tying": False})
    expected = stepped(trained(tied, apart))
    assert torch.equal(stepped(wrap_fsdp_meta_safe(trained(tied, apart), version=version)), expected)


@pytest.mark.parametrize("version", [2, 1])
def test_parameters_that_share_their_memory_are_made_one(one_rank: None, tmp_path: Path, version: Any) -> None:
    base = save(tmp_path / "base", tie_word_embeddings=False)

    def model(shared: bool) -> Any:
        made: Any = AutoModelForCausalLM.from_pretrained(base)
        embeddings = made.model.embed_tokens.weight
        made.lm_head.weight = nn.Parameter(embeddings.data) if shared else embeddings
        return made

    expected = stepped(model(shared=False))
    assert torch.allclose(stepped(model(shared=True)), expected, atol=1e-5)  # tied they are, on one device
    with pytest.raises(ArgumentError, match=r"embed_tokens\.weight shares its memory with lm_head\.weight"):
        wrap_fsdp_meta_safe(model(shared=True), version=version)
    assert torch.equal(stepped(wrap_fsdp_meta_safe(model(shared=False), version=version)), expected)
    frozen = model(shared=True).requires_grad_(False)
    assert torch.equal(logits(wrap_fsdp_meta_safe(frozen, version=version)), logits(model(shared=True)))


@pytest.mark.parametrize("kind", TOKEN_ROWS)
@pytest.mark.parametrize("tie", [True, False])
def test_trained_rows_of_a_folder_are_wrapped_over_a_base_with_weights(
    one_rank: None, tmp_path: Path, kind: str, tie: bool
) -> None:
    """peft#2399: the rows of a tied head are those of the embeddings, and the file has them once."""
    base, adapter = save(tmp_path / "base", tie_word_embeddings=tie), tmp_path / "adapter"
    expected = logits(trained(base, TOKEN_ROWS[kind](), adapter))
    over_real = get_peft_model(AutoModelForCausalLM.from_pretrained(base), TOKEN_ROWS[kind]())
    assert torch.equal(logits(wrap_fsdp_meta_safe(over_real, adapters=adapter)), expected)
    on_meta = get_peft_model(meta_model(base), TOKEN_ROWS[kind]())
    with pytest.raises(SafeLoadingError, match="Load the two with load_peft_on_rank on every rank") as caught:
        wrap_fsdp_meta_safe(on_meta, base, adapters=adapter)
    assert "reset_buffers" not in str(caught.value)
    loaded = load_peft_on_rank(base, adapter, device="cpu", is_trainable=True)
    assert torch.equal(logits(wrap_fsdp_meta_safe(loaded)), expected)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_saved_copy_of_a_tied_weight_over_a_folder_with_two_values(
    one_rank: None, tied: Path, tmp_path: Path, module: str
) -> None:
    """accelerate#3870: the config ties what the folder holds apart, and the adapter ties its copies."""
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(**Q, modules_to_save=[module], ensure_weight_tying=True)
    expected = logits(trained(tied, config, tmp_path / "adapter"))
    on_meta = get_peft_model(meta_model(tied), LoraConfig(**Q, modules_to_save=[module], ensure_weight_tying=True))
    with pytest.raises(SafeLoadingError, match="one parameter of the model, and two values on disk") as caught:
        wrap_fsdp_meta_safe(on_meta, tied, adapters=tmp_path / "adapter")
    assert "tie a model that was loaded with its values, and pass it without the folder" in str(caught.value)
    loaded = load_peft_on_rank(tied, tmp_path / "adapter", device="cpu", is_trainable=True)
    assert torch.equal(logits(wrap_fsdp_meta_safe(loaded)), expected)


def test_a_head_of_one_label_is_wrapped_with_its_adapter(one_rank: None, tmp_path: Path) -> None:
    """accelerate#3732: the bias of a reward model is one element, of which a copy without memory has a stride of 0."""
    base, adapter = tmp_path / "bert", tmp_path / "adapter"
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=24, vocab_size=40)).save_pretrained(base)
    config = LoraConfig(task_type="SEQ_CLS", r=1, target_modules=["query"])
    model: Any = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config).eval()
    with torch.no_grad():
        model.base_model.model.classifier.modules_to_save["default"].bias.fill_(3)
    model.save_pretrained(str(adapter))
    on_meta = get_peft_model(meta_model(base, auto_class=AutoModelForSequenceClassification), config)
    assert torch.equal(logits(wrap_fsdp_meta_safe(on_meta, base, adapters=adapter)), logits(model))
    one = torch.tensor(1.5).expand(1)
    (found,) = range_bytes([ElementRange("one", 0, 1, torch.float32)], {"one": one}.__getitem__)
    assert found.view(torch.float32).item() == 1.5
