"""The table of docs/methods.md on packed bases: what can be done with each kind of packing, as the tests find it.

`PYTHONPATH=tests python -m tests.packed_table --write` writes it; `tests/test_packed_table.py` makes every cell and
compares it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import save_adapter
from packed import PACKINGS, load, save_packed, save_plain
from peft import PeftModel
from safetensors.torch import load_file

from safe_loading import (
    ArgumentError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    plan_device_map,
    wrap_fsdp_meta_safe,
)
from safe_loading._model.quantized.sizes import bytes_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- packed bases -->\n", "<!-- end of packed bases -->\n"
TOKENS = torch.arange(24).view(2, 12) % 101


class PackedBench:
    """A packed base of one kind and width, and adapters of it, in a folder of their own."""

    def __init__(self, root: Path, kind: str, width: int) -> None:
        self.root, self.kind = root, kind
        self.plain = save_plain(root / "plain", width)
        self.base = save_packed(self.plain, root / "base", kind)
        self.adapter = save_adapter(root / "adapter", self.plain)
        self.second = save_adapter(root / "second", self.plain, seed=1)

    def by_peft(self, adapter: Path, **options: Any) -> Any:
        """Load the base with transformers and an adapter with peft."""
        return PeftModel.from_pretrained(load(self.base), adapter, **options).eval()


def _load(bench: PackedBench) -> str:
    assert torch.equal(_logits(load_peft_on_rank(bench.adapter, bench.base)), _logits(bench.by_peft(bench.adapter)))
    return "exact"


def _train(bench: PackedBench) -> str:
    ours = _trained(load_peft_on_rank(bench.adapter, bench.base, is_trainable=True))
    plain = _trained(bench.by_peft(bench.adapter, is_trainable=True))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in ours.items())
    return "exact"


def _later(bench: PackedBench) -> str:
    model: Any = load_peft_on_rank(bench.adapter, bench.base)
    load_adapter_on_rank(model, bench.second, "second")
    model.set_adapter("second")
    assert torch.equal(_logits(model), _logits(bench.by_peft(bench.second)))
    return "exact"


def _merge_on_disk(bench: PackedBench) -> str:
    merge_lora_checkpoint(bench.base, bench.adapter, bench.root / "out", dequantize=True)
    written = load_file(bench.root / "out" / "model.safetensors")
    merged = merge_lora_inplace(load_peft_on_rank(bench.adapter, bench.base), dequantize=True).state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in written.items())
    return "exact"


def _merge_before_a_forward(bench: PackedBench) -> str:
    return _merged(bench, forward=False)


def _merge_after_a_forward(bench: PackedBench) -> str:
    return _merged(bench, forward=True)


def _merged(bench: PackedBench, *, forward: bool) -> str:
    """Merge with ``dequantize=True``: the exact sum of the decoded weight and the update, rounded once."""
    model: Any = load_peft_on_rank(bench.adapter, bench.base)
    path = "model.layers.1.mlp.down_proj"
    layer = dict(model.base_model.model.named_modules())[path]
    update = (
        layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    values = _decoded(layer.base_layer)
    if forward:
        _logits(model)
        if getattr(getattr(layer.base_layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            # a CPU with AVX-512: the codes are in another order now, and the scales in bfloat16
            values = _decoded(dict(load(bench.base).named_modules())[path], torch.bfloat16)
    merged: Any = merge_lora_inplace(model, dequantize=True)
    weight = dict(merged.named_modules())[path].weight
    step = torch.finfo(weight.dtype).eps * (values + update).abs()
    assert weight.dtype == torch.bfloat16
    # scales that are codes themselves are decoded in float32, as the engine does
    assert bool(((weight.double() - values - update).abs() <= step / 2 + values.abs().max() * 1e-6).all())
    return "exact"


def _decoded(layer: Any, scales_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode a weight by the definition of its format, one element at a time, in float64."""
    if type(layer.weight).__name__ == "Int8Params":
        scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB  # moved there by a forward
        return layer.weight.data.double() * scales.double()[:, None] / 127
    state = layer.weight.quant_state
    codes = layer.weight.data.view(torch.uint8).view(-1)
    scales = state.absmax.double()
    if state.nested:
        outer = state.state2.absmax.double().repeat_interleave(state.state2.blocksize)[: scales.numel()]
        scales = state.state2.code.double()[state.absmax.long()] * outer + state.offset.double()
    scales = scales.to(scales_dtype).double()
    values = state.code.double()[torch.stack([codes >> 4, codes & 15], 1).view(-1).long()]
    return (values * scales.repeat_interleave(state.blocksize)).view(state.shape)


def _save(bench: PackedBench) -> str:
    merged: Any = merge_lora_inplace(load_peft_on_rank(bench.adapter, bench.base))
    merged.save_pretrained(bench.root / "saved")
    assert torch.equal(_logits(load(bench.root / "saved")), _logits(merged))
    return "exact"


def _check(bench: PackedBench) -> str:
    assert check_checkpoint(bench.base, values=True).findings == ()
    return "ok"


def _plan(bench: PackedBench) -> str:
    model = load(bench.base)
    (use,) = plan_device_map(bench.base, {"cpu": "1GB"}).devices
    assert use.weights + use.buffers == sum(map(bytes_of, [*model.parameters(), *model.buffers()]))
    return "to the byte"


def _fsdp(bench: PackedBench) -> str:
    expected = _loss(load_peft_on_rank(bench.adapter, bench.base, is_trainable=True))
    found = []
    for version in (2, 1):
        model = load_peft_on_rank(bench.adapter, bench.base, is_trainable=True)
        try:
            model = wrap_fsdp_meta_safe(model, version=version)
        except ArgumentError:
            continue
        assert torch.equal(_loss(model), expected)
        found.append(f"FSDP{version}")
    return "exact" if len(found) == 2 else f"exact ({found[0]})" if found else "refused"


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


def _loss(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model.train()(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach()


def _trained(model: Any) -> dict[str, torch.Tensor]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
    for _ in range(3):
        _loss(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


COLUMNS: dict[str, Callable[[PackedBench], str]] = {
    "load": _load,
    "train": _train,
    "later adapter": _later,
    "merge on disk": _merge_on_disk,
    "merge in memory": _merge_before_a_forward,
    "the same after a forward": _merge_after_a_forward,
    "save codes": _save,
    "check": _check,
    "plan": _plan,
    "FSDP": _fsdp,
}


def row(root: Path, kind: str, width: int) -> dict[str, str]:
    """Make every cell of a kind of packing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bench = PackedBench(root, kind, width)
        return {name: column(bench) for name, column in COLUMNS.items()}


def in_page() -> dict[str, dict[str, str]]:
    """Return the table that the page has, by kind of packing and column."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line]
    return {cells[0]: dict(zip(rows[0][1:], cells[1:], strict=True)) for cells in rows[2:]}


def written(rows: dict[str, dict[str, str]]) -> str:
    """Return the table as the page has it."""
    head = ["packing", *COLUMNS]
    lines = [head, ["---"] * len(head), *([kind, *cells.values()] for kind, cells in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    import tempfile

    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        made = {kind: row(Path(folder, kind), kind, 128) for kind in PACKINGS}
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + written(made) + END + rest.partition(END)[2], encoding="utf-8")
