"""The tensors of an adapter's file: read into memory of their own, hashed, and their values checked once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.faults import fault, note
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.header import Header, TensorInfo
from safe_loading._checkpoint.mlx import is_of_experts, peft_keys
from safe_loading._core.report import Finding
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensor_values import as_buffer, value_range
from safe_loading.errors import CheckpointError

_MOST_RANKS = 1 << 12  # that a training may have had


def read_tensors(facts: AdapterFolder) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors by their key on disk, in memory of their own.

    A file that was written or cut short since its header was read, or a pickle of something other than tensors, is
    a CheckpointError.
    """
    if facts.header is not None:
        return _of_mlx(_read(facts.header)) if facts.is_mlx else _read(facts.header)
    with open_regular(facts.weights) as file:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler raises whatever a damaged or a hostile file makes it raise
            raise CheckpointError(f"{facts.weights} cannot be read with weights_only=True: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{facts.weights} does not hold a mapping of names to tensors.")
    return tensors


def digest_of(facts: AdapterFolder, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return :meth:`AdapterFolder.digest` of tensors that :func:`read_tensors` has read, without another reading."""
    if facts.header is None or facts.is_mlx:
        return facts.digest()
    # No byte of the file belongs to none of the tensors: its header was checked.
    in_order = sorted(facts.header.tensors.values(), key=lambda info: (info.start, info.stop))
    return facts.digest([facts.header.content, *(as_buffer(tensors[info.name]) for info in in_order)])


def _of_mlx(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the factors of MLX as peft has them: transposed, those of experts apart; and a DoRA's magnitudes."""
    found, shapes = dict[str, torch.Tensor](), {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        keys = peft_keys(name, shapes)
        if is_of_experts(name):
            found.update(zip(keys, tensor.view(len(keys), -1, tensor.shape[-1]), strict=True))
        else:
            found[keys[0]] = tensor if tensor.dim() == 1 else tensor.t().contiguous()
    return found


def _read(header: Header) -> dict[str, torch.Tensor]:
    # Not mapped: a training loop saves over its adapter, and a mapped file that gets shorter ends the process (SIGBUS).
    path = header.path
    with open_regular(path) as file:
        before = os.fstat(file.fileno())
        tensors = {name: _read_tensor(file.fileno(), header, info) for name, info in header.tensors.items()}
        after = os.fstat(file.fileno())
        content = file.read(header.data_start)
    # The header once more, because a clock may be too coarse to tell two writes apart.
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or content != header.content:
        raise CheckpointError(f"{path} was written again while it was read. Load it again when its writer is done.")
    return tensors


def _read_tensor(descriptor: int, header: Header, info: TensorInfo) -> torch.Tensor:
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(f"{header.path}: {info.name!r} is {info.dtype}, a dtype that torch does not have.")
    tensor = torch.empty(info.shape, dtype=dtype)
    read_into(descriptor, as_buffer(tensor), info.start)
    return tensor


def tensors_on_meta(header: Header, *, is_mlx: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by their key on disk, without a value of them."""
    found = {
        name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta") for name, info in header.tensors.items()
    }
    return _of_mlx(found) if is_mlx else found


def value_findings(
    facts: AdapterFolder, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = torch.float32
) -> list[Finding]:
    """Return findings for NaN and infinity, for factors of 8 bits or integers, and for a ``lora_B`` that is zero.

    ``dtype`` is that to which factors are cast; None leaves them as they are.
    """
    findings, zero, factors = _factor_dtypes(facts, tensors, dtype), [], dict[str, torch.Tensor]()
    if not tensors:  # of a method that peft put on none of the layers that it was given
        fix = "train it again with a method that adapts the layers of its base, such as LoRA"
        if facts.config.get("peft_type") == "LORA":  # as scripts left it that put a state_dict() of their own
            fix = "save it again with save_pretrained of the PeftModel, without a state_dict of your own"
        findings.append(fault("no-tensors", facts.weights, "holds no tensor at all", fix))
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        low, high = value_range(tensor)
        if not (math.isfinite(low) and math.isfinite(high)):
            findings.append(_non_finite(facts, key, tensor))
        elif dtype is not None and ".lora_" in key and max(-low, high) > torch.finfo(dtype).max:
            message = f"has values up to {max(-low, high):.3g}, which {dtype} does not hold"
            fix = "pass another adapter_dtype=, such as torch.bfloat16"
            findings.append(fault("non-finite", f"{facts.weights}: {key}", message, fix, tensor.nbytes))
        if ".lora_B" in key or ".lora_embedding_B" in key:
            factors[key] = tensor
            if low == 0 and high == 0:
                zero.append(key)
    if zero:
        effect = "the adapter changes nothing" if len(zero) == len(factors) else "these layers are unchanged"
        message = f"{len(zero)} of {len(factors)} lora_B tensors are all zero, such as {zero[0]!r}: {effect}"
        fix = "check that the adapter was trained, and that it was gathered before it was saved (ZeRO-3, FSDP)"
        size = sum(tensors[key].nbytes for key in zero)
        findings.append(note("warning", "lora-b-zero", facts.weights, message, fix, size))
    if shard := _shard_alone(factors):
        ranks, rank = shard
        message = (
            f"in all {len(factors)} lora_B tensors only the rows that are those of rank {rank} of {ranks} under FSDP "
            f"have values, and the others are zero: the rest was not gathered, or got no gradient"
        )
        fix = "save it again, gathered, from the model that was sharded; if it has these zeros too, train it again"
        size = sum(tensor.nbytes for tensor in factors.values())
        findings.append(note("warning", "lora-b-of-one-rank", facts.weights, message, fix, size))
    return findings


def _shard_alone(factors: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
    """Return the ranks, and the one of them, of which alone all of these tensors have rows with values; else None."""
    found, kinds = set[tuple[int, int]](), set[str]()
    for key, tensor in factors.items():
        # One look at two rows ends it for nearly every adapter.
        if tensor.dim() < 2 or all(tensor[row].float().any() for row in (0, -1)):
            return None
        rows = tensor.float().flatten(1).any(dim=1).nonzero()
        if len(rows):  # else it is all zero, which another finding says
            shards = _shards_at(len(tensor), int(rows[0]), int(rows[-1]))
            found = found & shards if kinds else shards
            kinds.add(key.split(".lora_")[0].rpartition(".")[2])
        if kinds and not found:
            return None
    # Layers of one kind may be fused ones, of which the adapter was trained on one part.
    return min(found) if len(kinds) > 1 else None


def _shards_at(length: int, first: int, last: int) -> set[tuple[int, int]]:
    """Return each number of ranks, with one of them, whose shard of so many rows begins and ends at these."""
    found = set[tuple[int, int]]()
    for ranks in range(2, min(length, _MOST_RANKS) + 1):
        rows = -(-length // ranks)
        if first % rows == 0 and last == min(first + rows, length) - 1:
            found.add((ranks, first // rows))
    return found


def _factor_dtypes(
    facts: AdapterFolder, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> list[Finding]:
    """Return a finding for each factor in whose dtype no forward pass would run."""
    findings = []
    for key, tensor in tensors.items():
        message = f"the tensor is {tensor.dtype}, {list(tensor.shape)}; "
        if ".lora_" not in key:
            continue
        if not tensor.is_floating_point():
            message += "LoRA factors are floats, and peft would cast it without a warning"
            fix = "save the adapter again; dequantize a quantized one with the library that quantized it"
        elif dtype is None and tensor.dtype.itemsize == 1:
            message += "no forward pass would run, since torch multiplies no floats of 8 bits"
            fix = "pass adapter_dtype=torch.bfloat16, or another dtype that holds the values"
        else:
            continue
        findings.append(fault("adapter-dtype", f"{facts.weights}: {key}", message, fix, tensor.nbytes))
    return findings


def _non_finite(facts: AdapterFolder, key: str, tensor: torch.Tensor) -> Finding:
    values = tensor.float()
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    kind = f"{tensor.dtype}, {list(tensor.shape)}"
    message = f"{nans} NaN and {infinities} infinite of {tensor.numel()} values ({kind})"
    fix = "take an earlier checkpoint of the adapter"
    return fault("non-finite", f"{facts.weights}: {key}", message, fix, tensor.nbytes)
