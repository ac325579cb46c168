"""Folders of models and adapters, each with one fault: a good one is copied, and one thing about it is changed.

A fault is a function of the copy's folder. ``refused`` holds words that the error must have; the name of the file is
one of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from faults.checkpoints import LFS_POINTER, safetensors

INDEX = "model.safetensors.index.json"
Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Fault:
    """One fault of a folder.

    Attributes:
        change: Makes it, in a copy.
        words: What an error about it must say: the file, the tensor where one is concerned, a word of the fix.
    """

    change: Change
    words: tuple[str, ...]


def first(folder: Path) -> Path:
    """The first weight file of a folder."""
    return min(folder.glob("*.safetensors"))


def put(name: str, data: bytes | str) -> Change:
    """Replace a file by these bytes."""
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def put_first(data: Callable[[bytes], bytes]) -> Change:
    """Replace the first weight file by what the function makes of its bytes."""

    def change(folder: Path) -> None:
        path = first(folder)
        path.write_bytes(data(path.read_bytes()))

    return change


def header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Edit the header of the first weight file, or return another text for it; the tensors stay."""

    def change(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        held = json.loads(data[8:end])
        edited = edit(held)
        return safetensors(held if edited is None else edited, data[end:])

    return put_first(change)


def tensor_named(held: Mapping[str, Any]) -> str:
    """The first tensor of a header."""
    return next(name for name in held if name != "__metadata__")


def entry(**fields: Any) -> Change:
    """Replace fields of the first tensor's entry."""
    return header(lambda held: held[tensor_named(held)].update(fields))


def instead(make: Callable[[Path], Any], name: str | None = None) -> Change:
    """Put something else at the place of the first weight file, or of a file."""

    def change(folder: Path) -> None:
        path = folder / name if name else first(folder)
        path.unlink()
        make(path)

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any], pick: str = "") -> Change:
    """Edit the tensors of the weight file that holds the tensor `pick`, and its index, and save both as before."""

    def change(folder: Path) -> None:
        path = next(p for p in sorted(folder.glob("*.safetensors")) if not pick or pick in load_file(p))
        held = {name: value.clone() for name, value in load_file(path).items()}
        before = set(held)
        edit(held)
        save_file(held, path, metadata={"format": "pt"})
        if (folder / INDEX).exists():
            document = json.loads((folder / INDEX).read_text())
            weight_map = document["weight_map"]
            for name in before - set(held):
                del weight_map[name]
            weight_map.update(dict.fromkeys(held, path.name))
            document["metadata"].pop("total_size", None)
            (folder / INDEX).write_text(json.dumps(document))

    return change


def index(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Edit the index."""

    def change(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        edit(document)
        (folder / INDEX).write_text(json.dumps(document))

    return change


def moved(target: str) -> Change:
    """Let the index name the first weight file at another place, where it is put."""

    def change(folder: Path) -> None:
        path, aim = first(folder), Path(os.path.normpath(folder / target))
        name = path.name
        shutil.move(path, aim)
        index(lambda d: d["weight_map"].update({k: target for k, v in d["weight_map"].items() if v == name}))(folder)

    return change


def behind_a_link(folder: Path) -> None:
    """Let the index name the first weight file through a link to a folder outside."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (folder / "sub").symlink_to(elsewhere)
    name = first(folder).name
    moved(f"sub/{name}")(folder)


def config(**fields: Any) -> Change:
    """Replace fields of config.json; `...` takes one out."""
    return _json_fields("config.json", fields)


def adapter_config(**fields: Any) -> Change:
    """Replace fields of adapter_config.json; `...` takes one out."""
    return _json_fields("adapter_config.json", fields)


def _json_fields(name: str, fields: Mapping[str, Any]) -> Change:
    def change(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        document.update({key: value for key, value in fields.items() if value is not ...})
        for key in [key for key, value in fields.items() if value is ...]:
            document.pop(key, None)
        (folder / name).write_text(json.dumps(document))

    return change


def renamed(prefix: str) -> Change:
    """Put a prefix before every key of every weight file and of the index."""

    def change(folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            held = {prefix + name: value.clone() for name, value in load_file(path).items()}
            save_file(held, path, metadata={"format": "pt"})
        index(lambda d: d.update(weight_map={prefix + k: v for k, v in d["weight_map"].items()}))(folder)

    return change


def twice(folder: Path) -> None:
    """Put a tensor of the first file into the second too, with other values."""
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    name, value = next(iter(load_file(one).items()))
    save_file({**load_file(two), name: value + 1}, two, metadata={"format": "pt"})


def single_beside(folder: Path) -> None:
    """Put a single file of a part of the model beside its index and shards."""
    shutil.copy(first(folder), folder / "model.safetensors")


def outside(name: str | None = None) -> Change:
    """Move the first weight file, or a file, out of the folder, and leave a link to it."""

    def change(folder: Path) -> None:
        path = folder / name if name else first(folder)
        path.rename(folder.parent / "secret")
        path.symlink_to("../secret")

    return change


def swapped(folder: Path) -> None:
    """Exchange two weight files, as a hasty copy does."""
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def repeated(held: dict[str, Any]) -> str:
    """The header with its first tensor in it twice."""
    text = json.dumps(held)
    name = tensor_named(held)
    return f"{text[:-1]}, {json.dumps(name)}: {json.dumps(held[name])}}}"


def bomb(folder: Path) -> None:
    """A header of very many empty tensors."""
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    first(folder).write_bytes(safetensors("{" + ",".join(f'"{n}":{empty}' for n in range(250_000)) + "}"))


WEIGHTS: dict[str, Fault] = {
    "cut tail": Fault(put_first(lambda data: data[:-7]), ("7 bytes are missing",)),
    "no bytes": Fault(put_first(lambda data: b""), ("is empty",)),
    "trailing bytes": Fault(put_first(lambda data: data + bytes(9)), ("9 bytes after tensor",)),
    "header past the end": Fault(put_first(lambda d: (len(d) + 5).to_bytes(8, "little") + d[8:]), ("is cut short",)),
    "header of 2^63 - 1": Fault(put_first(lambda d: (2**63 - 1).to_bytes(8, "little") + d[8:]), (str(2**63 - 1),)),
    "header no JSON": Fault(header(lambda held: json.dumps(held)[:-1]), ("not valid JSON",)),
    "header not UTF-8": Fault(header(lambda held: json.dumps(held).encode().replace(b"w", b"\xff", 1)), ("UTF-8",)),
    "tensor twice in a header": Fault(header(repeated), ("same key twice",)),
    "overlapping": Fault(
        header(lambda held: held.update(other=dict(held[tensor_named(held)]))), ("they overlap", "'other'")
    ),
    "negative offset": Fault(entry(data_offsets=[-4, 0]), ("negative", "[-4, 0]")),
    "shape overflows": Fault(entry(shape=[2**62, 2**62]), (str(2**62),)),
    "hole": Fault(header(lambda held: held.pop(tensor_named(held)) and None), ("belong to no tensor",)),
    "header bomb": Fault(bomb, ("200000 tensors",)),
    "unknown dtype": Fault(entry(dtype="F12"), ("'F12'",)),
    "Git LFS pointer": Fault(put_first(lambda data: LFS_POINTER), ("git lfs pull",)),
    "dangling link": Fault(instead(lambda path: path.symlink_to("nowhere")), ("nowhere",)),
    "folder in its place": Fault(instead(Path.mkdir), ("a directory",)),
    "FIFO in its place": Fault(instead(os.mkfifo), ("a FIFO",)),
    "not readable": Fault(lambda folder: first(folder).chmod(0), ("may not read it", "chmod u+r")),
    "link out of the folder": Fault(outside(), ("out of its folder", "secret")),
    "saved by TensorFlow": Fault(header(lambda h: h.update(__metadata__={"format": "tf"})), ("'tf'", "'pt'")),
    "device in its place": Fault(instead(lambda path: path.symlink_to("/dev/zero")), ("a character device",)),
}
"""Faults of one safetensors file, of a model or an adapter alike."""

INDEXES: dict[str, Fault] = {
    "missing shard": Fault(lambda folder: first(folder).unlink(), ("no such file", "places")),
    "index leaves the folder": Fault(moved("../outside.safetensors"), ("../outside.safetensors", "do not trust")),
    "index is absolute": Fault(
        lambda folder: moved(str(folder.parent / "elsewhere.safetensors"))(folder), ("is absolute", "do not trust")
    ),
    "index cut": Fault(lambda f: (f / INDEX).write_bytes((f / INDEX).read_bytes()[:-9]), (INDEX, "not valid JSON")),
    "index without weight_map": Fault(index(lambda d: d.pop("weight_map")), (INDEX, "weight_map is missing")),
    "index key twice": Fault(
        lambda f: (f / INDEX).write_text(
            (f / INDEX).read_text().replace('"weight_map"', '"metadata": {}, "weight_map"')
        ),
        (INDEX, "same key twice", "'metadata'"),
    ),
    "index through a link": Fault(behind_a_link, ("passes through a link", "do not trust")),
    "index a FIFO": Fault(instead(os.mkfifo, INDEX), (INDEX, "a FIFO")),
    "two shards exchanged": Fault(swapped, ("does not hold", "places in it")),
    "tensor that no file has": Fault(
        index(lambda d: d["weight_map"].update({"model.ghost": min(d["weight_map"].values())})), ("'model.ghost'",)
    ),
    "tensor in two shards": Fault(twice, ("holds too", "not from one save")),
}
"""Faults of several files together."""

NORM = "model.norm.weight"
CONTENTS: dict[str, Fault] = {
    "missing tensor": Fault(tensors(lambda held: held.pop(NORM), NORM), (NORM,)),
    "extra tensor": Fault(tensors(lambda held: held.update(extra=torch.ones(3)), NORM), ("extra",)),
    "wrong shape": Fault(tensors(lambda held: held.update({NORM: torch.ones(31)}), NORM), (NORM, "[31]", "[32]")),
    "transposed": Fault(
        tensors(lambda h: h.update({Q: h[Q].view(16, 64)}), Q := "model.layers.1.self_attn.q_proj.weight"),
        (Q, "[16, 64]", "[32, 32]"),
    ),
    "I32 for F32": Fault(tensors(lambda held: held.update({NORM: held[NORM].int()}), NORM), (NORM, "I32")),
    "I8 for F32": Fault(tensors(lambda held: held.update({NORM: held[NORM].to(torch.int8)}), NORM), (NORM, "I8")),
    "keys of DataParallel": Fault(renamed("module."), ("module.",)),
    "keys of torch.compile": Fault(renamed("_orig_mod."), ("_orig_mod.",)),
    "fewer layers than the config": Fault(config(num_hidden_layers=4), ("model.layers.3.",)),
    "more layers than the config": Fault(config(num_hidden_layers=2), ("model.layers.2.",)),
    "tied by the config, not on disk": Fault(config(tie_word_embeddings=True), ("tie_word_embeddings", "lm_head")),
}
"""Whole files that do not fit their config."""

CONFIGS: dict[str, Fault] = {
    "no config": Fault(lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "config cut": Fault(put("config.json", '{"model_type": "lla'), ("config.json", "not valid JSON")),
    "config no object": Fault(put("config.json", "[1]"), ("config.json", "list")),
    "config key twice": Fault(put("config.json", '{"model_type": "llama", "model_type": "gpt2"}'), ("'model_type'",)),
    "config not UTF-8": Fault(put("config.json", b'{"model_type": "\xff"}'), ("config.json", "UTF-8")),
    "config a FIFO": Fault(instead(os.mkfifo, "config.json"), ("config.json", "FIFO")),
    "config a folder": Fault(instead(Path.mkdir, "config.json"), ("config.json", "directory")),
    "config not readable": Fault(lambda f: (f / "config.json").chmod(0), ("config.json", "may not read it")),
    "config a link out of the folder": Fault(outside("config.json"), ("config.json", "out of its folder")),
    "config a pointer": Fault(put("config.json", LFS_POINTER), ("config.json", "git lfs pull")),
    "config of no known model": Fault(config(model_type="zzz"), ("config.json", "zzz")),
    "config without model_type": Fault(config(model_type=..., architectures=...), ("config.json", "model_type")),
    "config with a negative size": Fault(config(hidden_size=-32), ("config.json", "-32")),
    "config with text for a size": Fault(config(hidden_size="big"), ("config.json", "big")),
    "config of a size beyond memory": Fault(config(hidden_size=2**62), (str(2**62),)),
    "config with a number for its classes": Fault(config(architectures=-1), ("architectures is -1",)),
    "config with text for its code": Fault(config(auto_map="x.Model"), ("auto_map is 'x.Model'",)),
    "config of very many layers": Fault(config(num_hidden_layers=10**9), ("num_hidden_layers", "2000")),
    "config of very many layers in a stage": Fault(config(depths=[2, 10**9]), ("depths", "1000000000")),
    "config with the backbone of another": Fault(
        config(model_type="upernet", backbone="who/model", backbone_config=None), ("backbone", "who/model")
    ),
    "config of 17 MB": Fault(config(note="x" * (17 << 20)), ("config.json", "16.0 MiB")),
    "config with a dtype of another library": Fault(config(dtype="numpy.float32"), ("config.json", "numpy.float32")),
    "config of very many labels": Fault(config(num_labels=10**9), ("num_labels", "100000")),
    "config with slow patterns of a quantizer": Fault(
        config(quantization_config={"quant_method": "fp8", "modules_to_not_convert": [r"([a-z_.0-9]+)+!"]}),
        ("quantization_config", "100000 steps"),
    ),
    "config of minus one layer": Fault(config(num_hidden_layers=-1), ("num_hidden_layers is -1", "at least 0")),
    "config of a size beyond all models": Fault(config(hidden_size=10**9), ("hidden_size is 1000000000", "1000000")),
    "config with a number beyond all": Fault(config(rms_norm_eps=10**400), ("config.json", "floating-point number")),
    "config with infinity": Fault(
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace("{", '{"initializer_range": 1e400,', 1)
        ),
        ("config.json", "1e400"),
    ),
    "config with a kernel": Fault(config(_attn_implementation="who/attn"), ("_attn_implementation", "who/attn")),
    "config with a kernel for a part": Fault(
        config(attn_implementation={"": "sdpa", "text_config": "who/attn@main:run"}),
        ("attn_implementation", "who/attn"),
    ),
    "config with a paged kernel": Fault(config(attn_implementation="paged|who/attn"), ("who/attn", "native code")),
    "config with kernels for experts": Fault(config(experts_implementation="who/experts"), ("experts", "who/experts")),
    "config with code": Fault(
        config(auto_map={"AutoConfig": "x.Config", "AutoModelForCausalLM": "x.Model"}, model_type="zzz"),
        ("trust_remote_code",),
    ),
}
"""Faults of config.json."""

ADAPTER_CONFIGS: dict[str, Fault] = {
    "adapter config missing": Fault(lambda f: (f / "adapter_config.json").unlink(), ("adapter_config.json",)),
    "adapter config cut": Fault(put("adapter_config.json", '{"peft_t'), ("adapter_config.json", "not valid JSON")),
    "adapter config key twice": Fault(
        put("adapter_config.json", '{"peft_type": "LORA", "r": 4, "r": 8}'), ("adapter_config.json", "'r'")
    ),
    "adapter config a FIFO": Fault(instead(os.mkfifo, "adapter_config.json"), ("adapter_config.json", "FIFO")),
    "adapter config not readable": Fault(
        lambda folder: (folder / "adapter_config.json").chmod(0), ("adapter_config.json", "may not read it")
    ),
    "adapter config no object": Fault(put("adapter_config.json", "3"), ("adapter_config.json", "int")),
    "adapter without peft_type": Fault(adapter_config(peft_type=...), ("adapter_config.json", "peft_type")),
    "adapter of no method": Fault(adapter_config(peft_type="ZZZ"), ("adapter_config.json", "ZZZ")),
    "adapter without lora_alpha": Fault(adapter_config(lora_alpha=...), ("adapter_config.json", "lora_alpha")),
    "adapter with r text": Fault(adapter_config(r="four"), ("adapter_config.json", "four")),
    "adapter with r negative": Fault(adapter_config(r=-4), ("adapter_config.json", "-4")),
    "adapter with half a rank": Fault(adapter_config(r=4.0), ("adapter_config.json", "r is 4.0", "whole number")),
    "adapter with half a rank for one": Fault(
        adapter_config(rank_pattern={"q_proj": 4.0}), ("rank_pattern['q_proj'] is 4.0", "whole number")
    ),
    "adapter with an alpha of text for one": Fault(
        adapter_config(alpha_pattern={"q_proj": "8"}), ("alpha_pattern['q_proj'] is '8'", "a number")
    ),
    "adapter with null for its ranks": Fault(adapter_config(rank_pattern=None), ("rank_pattern is null", "{}")),
    "adapter with null for its alphas": Fault(adapter_config(alpha_pattern=None), ("alpha_pattern is null", "{}")),
    "adapter with null for its dropout": Fault(adapter_config(lora_dropout=None), ("lora_dropout is None", "0 to 1")),
    "adapter with text for a flag": Fault(
        adapter_config(use_rslora="false"), ("use_rslora is 'false'", "true or false")
    ),
    "adapter with null for its bias": Fault(adapter_config(bias=None), ("bias is None", "lora_only")),
    "adapter with a start of random numbers": Fault(
        adapter_config(init_lora_weights="pissa_niter_4"), ("pissa_niter_4",)
    ),
    "adapter with an alpha under another name": Fault(
        adapter_config(lora_alpha=..., alpha=16), ("lora_alpha is missing", '"alpha": 16')
    ),
    "adapter with the fields of MLX beside a method": Fault(
        adapter_config(r=..., lora_parameters={"rank": 4, "scale": 2.0}), ("r is missing", '"rank": 4')
    ),
    "adapter with letters for its saved modules": Fault(
        adapter_config(modules_to_save="lm_head"), ("modules_to_save is 'lm_head'", "a list of names")
    ),
    "adapter with no row to train": Fault(
        adapter_config(trainable_token_indices={"embed_tokens": []}), ("trainable_token_indices is {", "null")
    ),
    "adapter with a config of Windows": Fault(
        lambda f: (f / "adapter_config.json").write_text((f / "adapter_config.json").read_text(), "utf-16"),
        ("adapter_config.json", "byte 0 is 0xff"),
    ),
    "adapter with a comment": Fault(
        lambda f: (f / "adapter_config.json").write_text(
            (f / "adapter_config.json").read_text().replace("{", "{  // the last run", 1)
        ),
        ("adapter_config.json", "'// the last run"),
    ),
    "adapter with a web page for its config": Fault(
        lambda f: (f / "adapter_config.json").write_text("<!DOCTYPE html>\n<title>Sign in</title>"),
        ("adapter_config.json", "'<!DOCTYPE html>"),
    ),
    "adapter with NaN for its dropout": Fault(
        lambda f: (f / "adapter_config.json").write_text(
            (f / "adapter_config.json").read_text().replace("{", '{"lora_dropout": NaN, ', 1)
        ),
        ("adapter_config.json", '"lora_dropout": NaN'),
    ),
    "adapter with an infinite alpha": Fault(
        lambda f: (f / "adapter_config.json").write_text(
            (f / "adapter_config.json").read_text().replace('"lora_alpha": 8', '"lora_alpha": 1e400')
        ),
        ("adapter_config.json", "1e400"),
    ),
    "adapter with an alpha beyond all": Fault(adapter_config(lora_alpha=10**400), ("floating-point number",)),
    "adapter with a rank beyond all": Fault(adapter_config(r=10**9), ("adapter_config.json", "1000000000")),
    "adapter with a rank for one beyond all": Fault(
        adapter_config(rank_pattern={"q_proj": 10**9}), ("rank_pattern", "1000000000")
    ),
    "adapter of very many layers": Fault(
        adapter_config(layer_replication=[[0, 10**9]]), ("layer_replication", "1000000000")
    ),
    "adapter of endless iterations": Fault(
        adapter_config(init_lora_weights="pissa_niter_1000000000"), ("init_lora_weights", "1000000000 iterations")
    ),
    "adapter of a huge prompt": Fault(
        adapter_config(peft_type="PROMPT_TUNING", num_virtual_tokens=8000, token_dim=8000), ("64000000 values",)
    ),
    "adapter with another model": Fault(adapter_config(peft_type="SHADOW", shadow_model="who/model"), ("who/model",)),
    "adapter with other adapters": Fault(
        adapter_config(peft_type="XLORA", adapters={"one": "/etc/one"}), ("adapters", "/etc/one")
    ),
    "adapter with a number for modules": Fault(adapter_config(modules_to_save=10**9), ("modules_to_save", "a list")),
    "adapter with a list for a module": Fault(adapter_config(modules_to_save=[[]]), ("modules_to_save", "a list")),
    "adapter with text for its ranks": Fault(adapter_config(rank_pattern="q_proj"), ("rank_pattern", "an object")),
    "adapter with a module to import": Fault(
        adapter_config(megatron_config={"x": 1}, megatron_core="antigravity"), ("megatron_core", "antigravity")
    ),
    "adapter with endless targets": Fault(adapter_config(target_modules="(.*)*x"), ("target_modules", "can be empty")),
    "adapter with slow targets": Fault(
        adapter_config(target_modules=r"([a-z_.0-9]+)+!"), ("target_modules", "100000 steps", "in a list")
    ),
    "adapter with slow exclusions": Fault(adapter_config(exclude_modules=r".*.*.*.*.*!"), ("exclude_modules", "steps")),
    "adapter with slow ranks": Fault(adapter_config(rank_pattern={r"(\w|\w)+!": 4}), ("rank_pattern", "steps")),
    "adapter with slow alphas": Fault(adapter_config(alpha_pattern={r"(\w+\.?)+!": 4}), ("alpha_pattern", "steps")),
    "adapter with slow modules to save": Fault(
        adapter_config(modules_to_save=[r"([a-z]+_?)+(\.|\w)*!"]), ("modules_to_save", "steps")
    ),
    "adapter with slow layers": Fault(
        adapter_config(layers_to_transform=[0], layers_pattern=r"(.|\w|[a-z])+!"), ("layers_pattern", "steps")
    ),
    "adapter of 100000 targets": Fault(
        adapter_config(target_modules=[f"layers.{n}.q_proj" for n in range(100_000)]), ("100000 names", "10000")
    ),
    "adapter of many patterns": Fault(
        adapter_config(rank_pattern={f"layers.{n}.q_proj": 4 for n in range(2_000)}), ("2000 patterns", "1000")
    ),
}
"""Faults of adapter_config.json."""

ADAPTERS: dict[str, Fault] = {
    "adapter with another r": Fault(adapter_config(r=8), ("8", "4")),
    "adapter for modules that are not there": Fault(adapter_config(target_modules=["nothing"]), ("nothing",)),
    "adapter weights missing": Fault(lambda folder: first(folder).unlink(), ("adapter_model.safetensors",)),
    "adapter tensor missing": Fault(tensors(lambda held: held.pop(min(held))), ("lora_A",)),
    "adapter tensor extra": Fault(
        tensors(lambda h: h.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)})), ("lm_head",)
    ),
    "adapter tensor of another shape": Fault(tensors(lambda h: h.update({min(h): torch.ones(4, 7)})), ("[4, 7]",)),
    "adapter with NaN": Fault(tensors(lambda h: h[min(h)].fill_(float("nan"))), ("lora_A", "NaN")),
    "adapter with Inf": Fault(tensors(lambda h: h[min(h)].fill_(float("inf"))), ("lora_A", "inf")),
    "adapter of integers": Fault(tensors(lambda h: h.update({min(h): h[min(h)].int()})), ("lora_A", "int")),
}
"""Tensors of an adapter that do not fit its config or its base."""
