"""User code around an 8-bit model with LoRA: the memory of one training step and the checkpoint, method by method.

The bare PeftModel is the unit. ``plain module first`` is prepared and given its adapter inside a plain ``nn.Module``;
``plain module last`` is put into one at the end. Bytes are counted: parameters by storage, activations by what autograd
saves in one forward pass, the checkpoint by the files that ``transformers.Trainer.save_model`` writes.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import headline, mib, options, ratio, table, write_json
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer
from transformers.training_args import TrainingArguments

from safe_loading import Transparent, prepare_and_wrap


class Same(Transparent):
    """Code that changes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return super().__call__(*args, **kwargs)


class Plain(nn.Module):
    """The wrapper that people write first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(**kwargs)


def _config(task: str | None = "CAUSAL_LM") -> LoraConfig:
    return LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type=task)


def _bare(base: Any) -> nn.Module:
    made: nn.Module = get_peft_model(prepare_model_for_kbit_training(base), _config())  # type: ignore[no-untyped-call]  # peft leaves it untyped
    return made


def _first(base: Any) -> nn.Module:
    prepared = prepare_model_for_kbit_training(Plain(base))  # type: ignore[no-untyped-call]  # as above
    made: nn.Module = get_peft_model(prepared, _config(None))
    return made


METHODS: dict[str, Callable[[Any], nn.Module]] = {
    "bare PeftModel": _bare,
    "prepare_and_wrap": lambda base: prepare_and_wrap(base, _config(), Same),
    "plain module first": _first,
    "plain module last": lambda base: Plain(_bare(base)),
}


def _measure(model: nn.Module, tokens: torch.Tensor, folder: Path) -> dict[str, int]:
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    own, saved = set(weights), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.append(tensor)  # held, so that no address is used twice
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept: list[torch.Tensor] = []
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    trainer = Trainer(model, TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to=[]))
    trainer.save_model(str(folder / "saved"))
    files = [path for path in (folder / "saved").iterdir() if path.suffix == ".safetensors"]
    return {
        "parameters": sum(weights.values()),
        "saved activations": sum(saved.values()),
        "checkpoint": sum(path.stat().st_size for path in files),
    }


def main() -> None:
    """Measure every method and print the table."""
    parser = options(__doc__, "two layers")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers = 2
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    heads = max(1, arguments.hidden // 32)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=1000,
    )
    tokens = torch.randint(3, 1000, (arguments.batch, arguments.tokens))
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.nn.Module.to(model := LlamaForCausalLM(config), torch.bfloat16)
        model.save_pretrained(folder / "base")
        for method, make in METHODS.items():
            base = AutoModelForCausalLM.from_pretrained(
                folder / "base",
                quantization_config=BitsAndBytesConfig(load_in_8bit=True),  # type: ignore[no-untyped-call]  # untyped in transformers
                device_map={"": "cpu"},
                dtype=torch.bfloat16,
            )
            found[method] = _measure(make(base), tokens, folder / method.replace(" ", "_"))
    unit = found["bare PeftModel"]
    rows = [
        (method, *(cell for key in unit for cell in (mib(facts[key]), ratio(facts[key], unit[key]))))
        for method, facts in found.items()
    ]
    header = ("method", *(cell for key in unit for cell in (f"{key} MiB", "ratio")))
    print(headline())
    print(
        table(
            f"8-bit Llama, {arguments.layers} layers of {arguments.hidden}, {arguments.batch} x {arguments.tokens}",
            header,
            rows,
        )
    )
    write_json(arguments.json, {"methods": found})


if __name__ == "__main__":
    main()
