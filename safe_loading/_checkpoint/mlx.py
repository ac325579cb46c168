"""Adapters of MLX (``mlx_lm.lora``), told and turned into the config of a LoRA of peft. Imports no torch.

Its ``adapters.safetensors`` holds ``lora_a`` (columns, rank) and ``lora_b`` (rank, rows) of each layer, which add
``scale * (lora_a @ lora_b).T`` to the weight: peft's factors, transposed, with ``lora_alpha = scale * rank``. A DoRA
has the magnitudes ``m`` (rows) as well, by which it multiplies the rows of the sum, over their norms, as peft does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from safe_loading._core.protocols import JsonObject

MLX_WEIGHTS = "adapters.safetensors"
MLX_FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[ab])")
MLX_MAGNITUDE = ".m"  # the end of a name
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
    magnitudes = [f"{path}{MLX_MAGNITUDE}" for path in _paths(shapes)] if kind == "dora" else []
    dims = dict.fromkeys(magnitudes, 1) | {name: 2 for name in shapes if MLX_FACTOR.fullmatch(name)}
    wrong = [name for name, shape in shapes.items() if len(shape) != dims.get(name)]
    if wrong:
        problems.append(
            f"it is an adapter of MLX with {len(wrong)} tensors that are no factors of a linear layer, such as "
            f"{wrong[0]!r:.200}; {_FUSE}"
        )
    without = [name.removesuffix(MLX_MAGNITUDE) for name in magnitudes if name not in shapes]
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
        "target_modules": _paths(shapes),
        "use_dora": _kind_of(config) == "dora",
    }


def _kind_of(config: Mapping[str, object]) -> object:
    return config.get("fine_tune_type", "dora" if config.get("use_dora") else "lora")


def _paths(names: Iterable[str]) -> list[str]:
    """Return the paths of the layers that have factors, each once."""
    return list(dict.fromkeys(match["path"] for name in names if (match := MLX_FACTOR.fullmatch(name))))
