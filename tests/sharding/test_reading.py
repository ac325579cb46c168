"""Every rank's reads, put together, are the model that ``from_pretrained`` loads; no byte is read twice."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from models import save_llama
from safetensors.torch import load_file, save_file
from tiny_models import causal_lm_classes, image_text_classes, tiny_config

from safe_loading import CheckpointError, meta_model
from safe_loading._core import progress as _progress
from safe_loading._core.report import MiB
from safe_loading._model.layout import read_blocks, reading
from safe_loading._model.layout.checkpoint_source import CheckpointSource, disk_tensors
from safe_loading._model.layout.reading import ShardTarget, differing, read_targets
from safe_loading._ranks import launcher
from safe_loading._sharding.buffers import compute_buffers
from safe_loading._sharding.fsdp2 import own_rows
from safe_loading._sharding.open_source import open_source
from safe_loading.errors import ArgumentError

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
# What each of them stands for is a way in which disk and model differ: experts, transposed and fused weights,
# multipliers in buffers, names of several towers, rotary permutations, an n-gram table.
FIXED = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "FalconH1ForCausalLM",
    "GemmaForCausalLM",
    "HrmTextForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "Inkling2ForCausalLM",
]
SAMPLE = [*FIXED, *random.Random(20261121).sample(sorted(set(EVERY) - set(FIXED)), 3)]


def saved(name: str, folder: Path, seed: int = 0) -> Any:
    """Save a tiny model of a class with random weights in several files, and return the class."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind(tiny_config(name))
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
        model.save_pretrained(folder, max_shard_size="60KB")
    return kind


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, each once, and the persistent buffers."""
    held = model.state_dict().keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in held)


Split = Literal["rows", "flat"]  # as FSDP2 and FSDP1 split
SPLITS: tuple[Split, ...] = ("rows", "flat")


def owned_range(shape: torch.Size, rank: int, world: int, split: Split) -> tuple[int, int]:
    """The elements of a tensor that a rank owns; each rank reads the whole of a scalar."""
    numel = shape.numel()
    if not shape:
        return 0, 1
    if split == "rows":
        start, stop = own_rows(shape, rank, world)
        return start * shape[1:].numel(), stop * shape[1:].numel()
    size = -(-numel // world)
    return min(numel, rank * size), min(numel, (rank + 1) * size)


def read_as_ranks(
    source: CheckpointSource, model: torch.nn.Module, world: int, split: Split
) -> tuple[dict[str, torch.Tensor], int]:
    """Read what the checkpoint has of a model as `world` ranks would, and put their ranges together.

    Returns:
        The tensors by name, and the bytes that all ranks read.
    """
    stored = {name: tensor for name, tensor in tensors_of(model) if source.stored_as(name) is not None}
    full = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in stored.items()}
    bytes_read = 0
    for rank in range(world):
        targets = []
        for name, tensor in stored.items():
            start, stop = owned_range(tensor.shape, rank, world, split)
            targets.append(ShardTarget(name, start, stop, torch.empty(stop - start, dtype=tensor.dtype)))
        bytes_read += read_targets(source, targets)
        for target in targets:
            full[target.name].view(-1)[target.start : target.stop] = target.destination
    return full, bytes_read


def check_class(name: str, folder: Path) -> None:
    """Compare a class, read in several ways, with from_pretrained: parameters, buffers, dtypes and bytes."""
    kind = saved(name, folder)
    splits: tuple[tuple[torch.dtype, int, Split], ...] = ((torch.float32, 4, "rows"), (torch.bfloat16, 2, "flat"))
    for dtype, world, split in splits:
        reference = kind.from_pretrained(folder, dtype=dtype)
        model = meta_model(folder, kind, dtype)
        assert {n: t.dtype for n, t in reference.state_dict().items()} == {
            n: t.dtype for n, t in model.state_dict().items()
        }
        source = open_source(folder, model)
        full, read = read_as_ranks(source, model, world, split)
        missing = {name for name, _ in tensors_of(model)} - full.keys()
        for key, tensor in tensors_of(reference):
            if key not in missing:
                assert torch.equal(full[key], tensor), key
        computed = compute_buffers(model)
        for key, buffer in reference.named_buffers():
            own = computed.get(key, model.get_buffer(key))
            if not own.is_meta:
                assert own.dtype == buffer.dtype, key
                assert torch.equal(own, buffer), key
        if not source.conversions:
            scalars = sum(t.nbytes for _, t in tensors_of(model) if not t.dim()) * (world - 1)
            names = {other for key in full for other in source.all_stored_as(key)}
            used = sum({info.name: info.nbytes for key in names for info in disk_tensors(source, key)}.values())
            assert used <= read <= used + scalars * 2
            stored = sum(info.nbytes for info in source.checkpoint.tensors.values())
            assert used == stored or missing or source.layout.unknown


@pytest.mark.parametrize("name", SAMPLE)
def test_what_the_ranks_read_is_what_from_pretrained_loads(name: str, tmp_path: Path) -> None:
    check_class(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EVERY) - set(SAMPLE)))
def test_what_the_ranks_of_every_class_read_is_what_from_pretrained_loads(name: str, tmp_path: Path) -> None:
    check_class(name, tmp_path)


def test_the_sample_has_the_conversions_that_cannot_be_followed(tmp_path: Path) -> None:
    saved("MistralLarge4ForConditionalGeneration", tmp_path)
    source = open_source(tmp_path, meta_model(tmp_path))
    kinds = {type(op).__name__ for made in source.layout.conversions for op in made.rule.operations}
    assert "PermuteForRope" in kinds


def test_three_experts_on_four_ranks_and_dinov2_swiglu_are_read_right(tmp_path: Path) -> None:
    # loaders that shard before they convert hang on the first, and load the second wrong in silence
    kind: Any = transformers.MixtralForCausalLM
    config = tiny_config("mixtral")
    config.num_local_experts = 3
    dinov2 = transformers.Dinov2Config(
        hidden_size=60, num_hidden_layers=2, num_attention_heads=4, use_swiglu_ffn=True, image_size=28, patch_size=14
    )
    for name, model in (("mixtral", kind(config)), ("dinov2", transformers.Dinov2Model(dinov2))):
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size="60KB")
        reference = type(model).from_pretrained(folder)
        skeleton = meta_model(folder, type(model))
        for split in SPLITS:
            full, _ = read_as_ranks(open_source(folder, skeleton), skeleton, 4, split)
            assert all(torch.equal(full[key], tensor) for key, tensor in tensors_of(reference)), name


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("split", SPLITS)
def test_uneven_and_empty_shards_are_read_once_each(world: int, split: Split, tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 251}
    folder = save_llama(tmp_path, **sizes)
    model, reference = meta_model(folder), dict(load_all(folder))
    source = open_source(folder, model)
    full, read = read_as_ranks(source, model, world, split)
    assert all(torch.equal(full[name], tensor) for name, tensor in reference.items())
    assert read == sum(tensor.nbytes for tensor in reference.values())


def load_all(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in folder.glob("*.safetensors"):
        yield from load_file(path).items()


def test_a_cast_is_the_one_of_torch_and_the_dtype_of_the_model_stays(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, torch.float32)
    model = meta_model(folder, dtype=torch.bfloat16)
    full, read = read_as_ranks(open_source(folder, model), model, 2, "rows")
    for name, tensor in load_all(folder):
        assert full[name].dtype == torch.bfloat16
        assert torch.equal(full[name], tensor.to(torch.bfloat16))
    assert read == sum(t.nbytes for _, t in load_all(folder))


def whole(name: str, destination: torch.Tensor) -> ShardTarget:
    return ShardTarget(name, 0, destination.numel(), destination.view(-1))


def all_of(model: torch.nn.Module) -> list[ShardTarget]:
    return [whole(name, torch.empty(each.shape, dtype=each.dtype)) for name, each in model.named_parameters()]


def test_a_second_read_finds_every_bit_that_differs_and_opens_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = saved("MixtralForCausalLM", tmp_path)
    model = meta_model(tmp_path, kind, dtype=torch.bfloat16)
    source = open_source(tmp_path, model)
    targets = all_of(model)
    read_targets(source, targets)
    opened: list[Path] = []
    real = reading.open_regular
    monkeypatch.setattr(reading, "open_regular", lambda path: opened.append(path) or real(path))
    monkeypatch.setattr(read_blocks, "STAGING_BYTES", 1000)
    assert differing(source, targets) == []
    assert sorted(opened) == sorted(source.checkpoint.files)
    by_name = {target.name: target.destination for target in targets}
    by_name["model.norm.weight"].view(torch.int16)[-1] ^= 1
    by_name["model.layers.1.mlp.experts.gate_up_proj"].view(torch.int16)[-1] ^= 1
    wanted = ["model.layers.1.mlp.experts.gate_up_proj", "model.norm.weight"]
    assert sorted(differing(source, targets)) == wanted


def test_a_bar_goes_to_the_end_when_parameters_are_converted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = saved("MistralLarge4ForConditionalGeneration", tmp_path)
    model = meta_model(tmp_path, kind, dtype=torch.bfloat16)
    source = open_source(tmp_path, model)
    targets = all_of(model)
    bars: list[list[Any]] = []

    class Counted(_progress.Bar):
        def __init__(self, what: str, total: int | None, **options: Any) -> None:
            super().__init__(what, total, **options)
            bars.append([what, total, 0])

        def advance(self, count: int = 1) -> None:
            bars[-1][2] += count

    monkeypatch.setattr(_progress, "Bar", Counted)
    assert source.conversions
    read_targets(source, targets)
    assert differing(source, targets) == []
    total = sum(target.destination.nbytes for target in targets)
    assert bars == [["reading", total, total], ["verifying", total, total]]


def test_a_second_read_compares_bits_and_not_numbers(tmp_path: Path) -> None:
    save_file({"weight": torch.tensor([float("nan"), 0.0])}, tmp_path / "model.safetensors")
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    source = open_source(tmp_path, module)
    place = torch.tensor([float("nan"), 0.0])
    assert differing(source, [whole("weight", place)]) == []
    place[1] = -0.0
    assert differing(source, [whole("weight", place)]) == ["weight"]


def test_a_small_buffer_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder, dtype=torch.float16)
    source = open_source(folder, model)
    wanted = dict(load_all(folder))
    requests: list[int] = []
    real = read_blocks.read_adjacent
    monkeypatch.setattr(
        read_blocks, "read_adjacent", lambda file, places, at: requests.append(at) or real(file, places, at)
    )
    monkeypatch.setattr(read_blocks, "STAGING_BYTES", 36)
    for name, tensor in model.named_parameters():
        place = torch.empty(tensor.shape, dtype=tensor.dtype)
        requests.clear()
        read_targets(source, [whole(name, place)])
        assert torch.equal(place, wanted[name].half())
        assert len(requests) >= wanted[name].nbytes / 36


def test_files_are_read_from_front_to_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder, dtype=torch.float32)
    source = open_source(folder, model)
    requests: list[tuple[int, int]] = []
    filled: list[memoryview] = []
    real = read_blocks.read_adjacent

    def read(file: int, places: list[memoryview], at: int) -> None:
        requests.append((file, at))
        filled.extend(places)
        real(file, places, at)

    monkeypatch.setattr(read_blocks, "read_adjacent", read)
    targets = all_of(model)
    random.Random(0).shuffle(targets)
    read_targets(source, targets)
    files = list(dict.fromkeys(file for file, _ in requests))
    assert len(files) == len(source.checkpoint.files) > 1
    assert requests == sorted(requests, key=lambda request: (files.index(request[0]), request[1]))
    assert len(filled) == len(targets)
    assert len(requests) == len(files)  # whatever follows one another in a file is read in one call


@pytest.mark.parametrize("limits", [{"_BATCH_BYTES": 4000}, {"MOST_BUFFERS": 3}])
@pytest.mark.parametrize("cores", [1, 4])
def test_a_batch_that_begins_where_the_last_one_ended_is_read_from_there(
    limits: dict[str, int], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder)
    monkeypatch.setattr(reading, "cores_of_rank", lambda: cores)
    for name, limit in limits.items():
        monkeypatch.setattr(reading, name, limit)
    full, bytes_read = read_as_ranks(open_source(folder, model), model, 1, "rows")
    wanted = dict(load_all(folder))
    assert [name for name, tensor in full.items() if not torch.equal(tensor, wanted[name])] == []
    assert bytes_read == sum(tensor.nbytes for tensor in full.values())


def slow_reads_in_threads(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = bool) -> set[str]:
    """Have four threads read short calls and each file be closed after its reads; return the names of the threads."""
    names: set[str] = set()
    real = read_blocks.read_adjacent

    def read(file: int, places: list[memoryview], at: int) -> None:
        names.add(threading.current_thread().name)
        meanwhile()
        time.sleep(0.001)
        real(file, places, at)

    monkeypatch.setattr(reading, "cores_of_rank", lambda: 4)
    monkeypatch.setattr(reading, "_MOST_FILES", 1)
    monkeypatch.setattr(read_blocks, "_CALL_BYTES", 1000)
    monkeypatch.setattr(read_blocks, "read_adjacent", read)
    return names


def readers_now() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("safe_loading reads")]


def test_threads_read_the_same_and_end_with_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder)
    source = open_source(folder, model)
    names = slow_reads_in_threads(monkeypatch)
    full, bytes_read = read_as_ranks(source, model, 1, "rows")
    wanted = dict(load_all(folder))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in full.items())
    assert bytes_read == sum(tensor.nbytes for tensor in full.values())
    assert len([name for name in names if name.startswith("safe_loading reads")]) == 4
    assert readers_now() == []


def test_what_a_thread_meets_is_raised_and_no_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder)
    source = open_source(folder, model)
    path = source.checkpoint.file_of["model.norm.weight"]
    slow_reads_in_threads(monkeypatch)
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:-64])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        read_as_ranks(source, model, 1, "rows")
    assert readers_now() == []
    path.write_bytes(whole_file)
    slow_reads_in_threads(monkeypatch, meanwhile=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        read_as_ranks(source, model, 1, "rows")
    assert readers_now() == []


def test_the_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "cores", lambda: 12)
    for ranks, share in (("4", 3), ("8", 1), ("16", 1)):
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert launcher.cores_of_rank() == share
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert launcher.cores_of_rank() == 12


def test_a_read_needs_its_destination_and_little_more(tmp_path: Path) -> None:
    rows = 64 * MiB // 1024
    save_file({"weight": torch.ones(rows, 256)}, tmp_path / "model.safetensors")
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(rows, 256, dtype=torch.bfloat16, device="meta"))
    place = torch.zeros(rows // 2 * 256, dtype=torch.bfloat16)
    source = open_source(tmp_path, module)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    before = peak_bytes()
    read_targets(source, [ShardTarget("weight", rows // 2 * 256, rows * 256, place)])
    assert peak_bytes() - before < 16 * MiB
    assert place.sum() == place.numel()


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_stray_file_is_not_read(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    name = "model.embed_tokens.weight"
    save_file({name: torch.full((101, 32), 7.0)}, folder / "model-99999-of-00003.safetensors")
    model = meta_model(folder)
    source = open_source(folder, model)
    full, _ = read_as_ranks(source, model, 2, "rows")
    assert not (full[name] == 7).any()
    assert "stray-shard" in {finding.code for finding in source.checkpoint.findings}


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder)
    source = open_source(folder, model)
    path = source.checkpoint.file_of["model.norm.weight"]
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        read_as_ranks(source, model, 1, "rows")


def tied_by_the_config(folder: Path) -> Path:
    save_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


def test_two_values_of_a_tied_parameter_are_refused(tmp_path: Path) -> None:
    model: Any = meta_model(tied_by_the_config(tmp_path))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight are one parameter of the model, and two values"):
        read_as_ranks(open_source(tmp_path, model), model, 2, "rows")


@pytest.mark.parametrize("copy", ["equal", "equal as numbers", "equal after the cast", "not a number"])
def test_equal_is_what_the_ties_of_the_files_say(tmp_path: Path, copy: str) -> None:
    folder = save_llama(tmp_path, tie_word_embeddings=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"]["model.embed_tokens.weight"]
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weight = tensors["model.embed_tokens.weight"]
    weight[0, 0] = 0.0
    changed = weight.double()
    if copy == "equal as numbers":
        changed[0, 0] = -0.0
    elif copy == "equal after the cast":
        changed *= 1 + 1e-12
    elif copy == "not a number":
        changed[0, 0] = weight[0, 0] = torch.nan
    tensors["lm_head.weight"] = changed
    save_file(tensors, path, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = path.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bool(open_source(folder, meta_model(folder)).two_values) == (copy == "not a number")


def test_either_name_of_a_tied_parameter_may_be_the_one_on_disk(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, tie_word_embeddings=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"]["model.embed_tokens.weight"]
    # Cloned, because some versions of safetensors map the file that is written below.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = index["weight_map"].pop("model.embed_tokens.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = meta_model(folder)
    full, _ = read_as_ranks(open_source(folder, model), model, 2, "rows")
    assert torch.equal(full["model.embed_tokens.weight"], tensors["lm_head.weight"])


def test_memory_that_is_not_that_of_its_range_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    source = open_source(folder, meta_model(folder))
    place = torch.zeros(10, 5)
    for destination in (place[0], place.T[0], place):
        with pytest.raises(ArgumentError, match=r"model\.norm\.weight: the range has 10 elements, the destination \["):
            read_targets(source, [ShardTarget("model.norm.weight", 0, 10, destination)])
    assert not place.any()
