"""Adapters of MLX (``mlx_lm.lora``), told and turned into the config of a LoRA of peft. Imports no torch.

Its ``adapters.safetensors`` holds ``lora_a`` (columns, rank) and ``lora_b`` (rank, rows) of each layer, which add
``scale * (lora_a @ lora_b).T`` to the weight: peft's factors, transposed, with ``lora_alpha = scale * rank``. Those of
an embedding, (ids, rank) and (rank, width), add ``scale * lora_a @ lora_b``, and are peft's, transposed, too. A DoRA
has the magnitudes ``m`` (rows) as well, by which it multiplies the rows of the sum, over their norms, as peft does.

The experts of a mixture are one layer, ``switch_mlp``, with ``lora_a`` (experts, rank, columns), in older releases
(experts * rank, columns), and ``lora_b`` (experts, rows, rank): peft's factors of one expert after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from safe_loading._core.protocols import JsonObject

MLX_WEIGHTS = "adapters.safetensors"
_FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[ab])")
_MAGNITUDE = ".m"  # the end of a name
_EXPERTS = re.compile(r"(?P<block>.+)\.switch_mlp\.(?P<projection>gate_proj|up_proj|down_proj)")
# Mixtral's files call the projections otherwise, and MLX's model calls all of them alike.
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EMBEDDING = re.compile(r"(.+\.)?(\w*embed\w*|wte)")
_FUSE = "fuse it with mlx_lm.fuse, and pass the folder that this writes as the model"


def is_mlx(config: Mapping[str, object]) -> bool:
    """Return whether an adapter_config.json is MLX's."""
    return "peft_type" not in config and isinstance(config.get("lora_parameters"), Mapping)


def mlx_problems(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the problems of an adapter of MLX that is to be read as a LoRA of peft, each with a way around it."""
    kind = _kind_of(config)
    if kind not in ("lora", "dora"):
        return [f"it is an adapter of MLX, with fine_tune_type {kind!r:.80}; {_FUSE}"]
    found = config.get("lora_parameters")
    parameters: Mapping[str, object] = found if isinstance(found, Mapping) else {}
    numbers = [parameters.get(name) for name in ("rank", "scale")]
    if not all(type(number) in (int, float) for number in numbers) or type(numbers[0]) is not int or numbers[0] < 1:
        return [f"it is an adapter of MLX, with the rank and scale {numbers}, which must be numbers; {_FUSE}"]
    rank, scale, alpha = *numbers, parameters.get("alpha")
    problems = []
    # Until 2024, the scale was multiplied by alpha / rank; "fine_tune_type" came later.
    if "fine_tune_type" not in config and alpha is not None and alpha != rank:
        problems.append(
            f"it is an adapter of MLX whose lora_parameters have both a scale ({scale}) and an alpha ({alpha}), which "
            f"releases of mlx_lm read differently; write the scale that it was trained with, {scale} or "
            f"{scale} * {alpha} / {rank}, and remove alpha"
        )
    magnitudes = [f"{path}{_MAGNITUDE}" for path in _layers(shapes)] if kind == "dora" else []
    wrong = [name for name in shapes if name not in magnitudes and not _is_factor(name, shapes)]
    wrong += [name for name in magnitudes if len(shapes.get(name, (0,))) != 1]
    if wrong:
        problems.append(
            f"it is an adapter of MLX with {len(wrong)} tensors that are no factors of a layer, such as "
            f"{wrong[0]!r:.200}; {_FUSE}"
        )
    without = [name.removesuffix(_MAGNITUDE) for name in magnitudes if name not in shapes]
    if without:
        problems.append(
            f"it is a DoRA of MLX, and lacks the magnitudes (m) of {len(without)} layers, such as {without[0]!r:.200}; "
            f"copy adapters.safetensors again, or {_FUSE}"
        )
    return problems


def peft_config_of(config: JsonObject, shapes: Mapping[str, Sequence[int]]) -> JsonObject:
    """Return the config of the LoRA of peft that an adapter of MLX without problems is."""
    parameters = config["lora_parameters"]
    rank, scale = parameters["rank"], parameters["scale"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("model"),
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": parameters.get("dropout") or 0.0,
        "target_modules": [path for layer in _layers(shapes) for path in _paths_of(layer, shapes)],
        "use_dora": _kind_of(config) == "dora",
    }


def is_of_experts(name: str) -> bool:
    """Return whether a tensor holds the factors of all experts of a layer."""
    match = _FACTOR.fullmatch(name)
    return match is not None and _EXPERTS.fullmatch(match["path"]) is not None


def peft_keys(name: str, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the keys that peft has for a tensor of an adapter without problems: one, or one for each expert."""
    match = _FACTOR.fullmatch(name)
    if match is None:
        return [f"{name.removesuffix(_MAGNITUDE)}.lora_magnitude_vector"]
    factor = match["factor"].upper()
    if _EMBEDDING.fullmatch(match["path"]):
        return [f"{match['path']}.lora_embedding_{factor}"]
    return [f"{path}.lora_{factor}.weight" for path in _paths_of(match["path"], shapes)]


def _kind_of(config: Mapping[str, object]) -> object:
    return config.get("fine_tune_type", "dora" if config.get("use_dora") else "lora")


def _layers(names: Iterable[str]) -> list[str]:
    """Return the paths of the layers that have factors, as MLX calls them, each once."""
    return list(dict.fromkeys(match["path"] for name in names if (match := _FACTOR.fullmatch(name))))


def _paths_of(layer: str, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the paths of a layer as the base's files have them: one, or one for each expert."""
    match = _EXPERTS.fullmatch(layer)
    if match is None:
        return [layer]
    block, projection = match["block"], match["projection"]
    if block.endswith(".block_sparse_moe"):
        projection = _OF_MIXTRAL[projection]
    return [f"{block}.experts.{n}.{projection}" for n in range(shapes[f"{layer}.lora_b"][0])]


def _is_factor(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a tensor has the dimensions of a factor of its layer."""
    match, shape = _FACTOR.fullmatch(name), shapes[name]
    if match is None or not is_of_experts(name):
        return match is not None and len(shape) == 2
    right = shapes.get(f"{match['path']}.lora_b", ())
    if match["factor"] == "b" or len(right) != 3:
        return len(right) == 3
    experts, _, rank = right
    return tuple(shape[:-1]) in ((experts, rank), (experts * rank,))
