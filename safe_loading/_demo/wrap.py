"""Chapter four: user code around the model, compared with the plain module that people write first."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from safe_loading import Transparent, load_peft_on_rank, wrap_transparent
from safe_loading._core.report import format_bytes, text_table
from safe_loading.errors import SafeLoadingError

_HEADER = ("model", "layers that checkpoint", "saved activations", "checkpoint", "loss")


class CallCounter(Transparent):
    """Counts its calls."""

    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.calls += 1
        return super().__call__(*args, **kwargs)


class Plain(torch.nn.Module):
    """The wrapper that people write first."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(**kwargs)


def chapter(folder: Path) -> str:
    """Take one training step with the first chapter's adapter, bare and wrapped in two ways; return the table."""
    steps: dict[str, tuple[int, int, int, float]] = {}
    for kind in ("bare PeftModel", "wrap_transparent", "plain nn.Module"):
        disk = (folder / "adapter", folder / "base")
        model: Any = load_peft_on_rank(*disk, device="cpu", ranks="self", is_trainable=True)
        model = wrap_transparent(model, CallCounter) if kind == "wrap_transparent" else model
        steps[kind] = _step(Plain(model) if kind.startswith("plain") else model)
        if kind == "wrap_transparent" and (model.calls != 1 or not model.wrap_report.ok):
            raise SafeLoadingError("The wrapping of the demo breaks its promise: the code did not run once.")
    if steps["bare PeftModel"] != steps["wrap_transparent"]:
        raise SafeLoadingError("The wrapping of the demo changed the training step:", [str(steps)])
    rows = [
        (kind, str(layers), format_bytes(saved), format_bytes(checkpoint), f"{loss:.6f}")
        for kind, (layers, saved, checkpoint, loss) in steps.items()
    ]
    return "\n".join(
        [
            "wrap: user code around a model that stays the same object to every trainer",
            "  one training step; a trainer switches checkpointing on where the model lets it",
            "",
            text_table(_HEADER, rows),
        ]
    )


def _step(model: Any) -> tuple[int, int, int, float]:
    """Treat the model as a trainer does: switch checkpointing on where it can, take a step, save."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    # Autograd saves weights too, which take no memory of their own.
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.arange(1, 129).reshape(2, 64) % 97
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    layers = sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules())
    return layers, sum(storage.nbytes() for storage in kept.values()), _checkpoint(model), float(loss)


def _checkpoint(model: Any) -> int:
    """Return the bytes of the weights that a trainer would save."""
    if not hasattr(model, "save_pretrained"):
        return sum(tensor.nbytes for tensor in model.state_dict().values())
    with tempfile.TemporaryDirectory(prefix="safe_loading-") as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
