"""Hot swap: write another adapter's values into a loaded adapter's tensors, so that compiled graphs stay valid."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import check_hotswap_configs_compatible
from torch.distributed.tensor import DTensor, distribute_tensor

from safe_loading._checkpoint.adapter_config import factors_of_other_rank
from safe_loading._checkpoint.faults import fault
from safe_loading._core.interrupts import undone_on_error
from safe_loading._core.log import quiet
from safe_loading._core.names import method_name, without_peft_prefix
from safe_loading._core.report import Finding, errors_of, one_for_all_layers
from safe_loading._model.peft_layers import merged_adapters
from safe_loading.errors import AdapterError

from .adapter_values import Adapter
from .attach import Attached
from .inject import refusal
from .match import saved_module_dtype
from .old_names import with_new_names
from .peft_config import of_pattern
from .slots import AdapterSlot, adapter_slots, route, saved_tensors
from .starts import starts_on_base

# Fields of a LoRA's config after which peft builds other layers, whose tensors may be the same.
_BUILT_INTO_LAYERS = (
    "arrow_config",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
_TOKENS = "alora_invocation_tokens"


@dataclasses.dataclass(frozen=True)
class StagedSwap:
    """A checked swap whose new values are on the device already, next to the old ones."""

    adapter: Adapter
    config: LoraConfig
    slots: dict[str, AdapterSlot]  # the loaded adapter's tensors, by key
    values: dict[str, torch.Tensor]  # their new values, by key
    padded: bool  # whether the new rank is the smaller one
    findings: list[Finding]
    renamed: dict[str, str]  # {key on disk: key used}


def stage_swap(model: PeftModel, adapter: Adapter, *, dtype: torch.dtype | None) -> StagedSwap:
    """Check that an adapter can replace the loaded ``adapter.name``, and move its values to the device.

    It is refused where the two differ in more than values, rank and scaling. Until the swap is committed, the new
    adapter takes its size in device memory in addition. The model is unchanged.
    """
    name, config = adapter.name, adapter.config
    base = model.get_base_model()
    file = adapter.renamed(base)
    config = with_new_names(config, file.old_names, base)
    try:
        check_hotswap_configs_compatible(model.peft_config[name], config)
    except ValueError as error:
        raise AdapterError(
            f"{adapter.facts.source!r} cannot be swapped into adapter {name!r}: {str(error).rstrip('.')}. Load it "
            f"under another name."
        ) from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{adapter.facts.source!r} is {method_name(config.peft_type)}; peft can hot-swap LoRA only.")
    # Both go through peft's mapping, so that their keys can be compared.
    with quiet():
        old = route(model, name, saved_tensors(model, name))
        new = route(model, name, file.tensors)
    slots = adapter_slots(model, old.tensors)
    findings = [*adapter.findings, *file.findings, *_differences(adapter, slots, new.tensors, dtype)]
    saved = (
        saved_module_dtype(adapter.file, slots[key], new.tensors[key])
        for key in sorted(slots.keys() & new.tensors.keys())
    )
    findings += one_for_all_layers(itertools.chain.from_iterable(saved))
    errors = [finding.problem for finding in errors_of(findings)]
    # A smaller rank is filled with zeros, up to the rank of the loaded tensors.
    padded = any(key in slots and slots[key].tensor.shape != value.shape for key, value in new.tensors.items())
    errors += [*new.missing, *_unsupported(model, adapter, config, padded), *_other_rank(adapter)]
    if errors:
        raise refusal([adapter], f"the loaded adapter {name!r}", errors)
    filled = {key: _filled(model, key, value, slots[key].tensor.shape) for key, value in new.tensors.items()}
    values = {key: _as_split(value.to(slots[key].tensor), slots[key].tensor) for key, value in filled.items()}
    return StagedSwap(adapter, config, slots, values, padded, findings, file.renamed)


def commit_swap(model: PeftModel, staged: StagedSwap) -> Attached:
    """Overwrite the loaded adapter's values and scaling in place.

    Not by peft's ``hotswap_adapter_from_state_dict``: it finds the tensors of an adapter by its name anywhere in a key,
    and fills those of all others with zeros whose names contain it ("de" in "base_model", "foo" in "foobar").
    """
    name, config = staged.adapter.name, staged.config
    old_config = model.peft_config[name]
    # On the host: the new values are on the device already, and it may have no room for a third copy.
    old_values = {key: slot.tensor.detach().to("cpu", copy=True) for key, slot in staged.slots.items()}
    old_scalings = [(layer, layer.scaling[name]) for layer in _layers(model) if name in layer.scaling]

    def undo() -> None:
        with torch.no_grad():
            for key, value in old_values.items():
                staged.slots[key].tensor.copy_(value)
        for layer, scaling in old_scalings:
            layer.scaling[name] = scaling
        model.peft_config[name] = old_config

    with undone_on_error(undo):  # Ctrl-C included: otherwise half of each adapter would be left
        with torch.no_grad():
            for key, value in staged.values.items():
                staged.slots[key].tensor.copy_(value)
        _set_scalings(model, name, config)
        config.inference_mode = old_config.inference_mode
        if staged.padded:
            _describe_padded(config, old_config)
        model.peft_config[name] = config
    return Attached.of(model, staged.findings, [slot.tensor for slot in staged.slots.values()], staged.renamed)


def _layers(model: PeftModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _set_scalings(model: PeftModel, name: str, config: LoraConfig) -> None:
    """Give each layer the scaling of the config; peft matches its patterns with the names of factors, in vain."""
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or name not in layer.scaling:
            continue
        path = without_peft_prefix(path)
        if (parameter := getattr(layer, "parameter_name", None)) is not None:  # peft matches the parameter's own name
            path = f"{path.replace('.base_layer', '')}.{parameter}"
        rank = of_pattern(config.rank_pattern, path, config.r)
        alpha = of_pattern(config.alpha_pattern, path, config.lora_alpha)
        scaling: object = layer.scaling[name]
        value = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        if isinstance(scaling, torch.Tensor):  # of peft's prepare_model_for_compiled_hotswap
            scaling.fill_(value)
        else:
            layer.scaling[name] = value


def _filled(model: PeftModel, key: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a factor with zeros up to the rank that it has in the model; other values as they are.

    Each fused expert, and each group of a convolution, has rows of its own in lora_A.
    """
    if value.shape == shape:
        return value
    path, is_a, _ = key.partition(".lora_A.")
    if not is_a:
        return torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), 0, shape[1] - value.shape[1]))
    layer = model.get_submodule(path)
    base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
    parts = getattr(layer, "num_experts", 1) * getattr(base, "groups", 1)
    each = torch.unflatten(value, 0, (parts, -1))
    missing = shape[0] // parts - each.shape[1]
    return torch.nn.functional.pad(each, (*(0, 0) * (value.dim() - 1), 0, missing)).flatten(0, 1)


def _as_split(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a value split over ranks as a tensor of the model is; peft has done so where the ranks are the same."""
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def _describe_padded(config: LoraConfig, loaded: PeftConfig) -> None:
    """Make the config describe the tensors as they are now: padded to the loaded rank, with the scaling unchanged."""
    # The scaling is lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA, and save_pretrained writes both numbers.
    settings, rank = vars(config), vars(loaded)["r"]  # lora_alpha is declared an int, and may be any number
    ratio = rank / config.r
    settings["lora_alpha"] = config.lora_alpha * (math.sqrt(ratio) if config.use_rslora else ratio)
    settings["r"] = rank


def _unsupported(model: PeftModel, adapter: Adapter, config: LoraConfig, padded: bool) -> list[str]:
    """Return the reasons why peft could not do this swap right."""
    problems = []
    if adapter.name in merged_adapters(model):
        problems.append(f"adapter {adapter.name!r} is merged into the base. Call model.unmerge_adapter() first.")
    configs = (config, model.peft_config[adapter.name])
    patterns = any(getattr(each, name, None) for each in configs for name in ("rank_pattern", "alpha_pattern"))
    problems += [*_other_layers(*configs), *_other_start(*configs)]
    if padded and patterns:
        problems.append("the ranks differ and one of the configs has patterns. Load it under another name.")
    if padded and any(getattr(each, "use_bdlora", None) for each in configs):  # the rows of each block stand together
        problems.append("the ranks differ and the factors have blocks (use_bdlora). Load it under another name.")
    # its hotswap_adapter ends in an AttributeError for these
    if any(adapter.name in layer.lora_embedding_A for layer in _layers(model)):
        problems.append("peft cannot swap a LoRA on an embedding. Load it under another name.")
    return problems


def _other_layers(new: LoraConfig, loaded: PeftConfig) -> list[str]:
    """Return a problem when the loaded adapter's layers compute otherwise than the new one's, with tensors as many."""
    of_new, of_loaded = (each.to_dict() for each in (new, loaded))
    different = [name for name in _BUILT_INTO_LAYERS if of_new.get(name) != of_loaded.get(name)]
    if (of_new.get(_TOKENS) is None) != (of_loaded.get(_TOKENS) is None):  # which ones, each pass reads in the config
        different.append(_TOKENS)
    if not different:
        return []
    values = ", ".join(f"{name} is {of_new.get(name)!r}, not {of_loaded.get(name)!r}" for name in different)
    return [f"the layers of the loaded adapter compute otherwise: {values}. Load it under another name."]


def _other_start(new: LoraConfig, loaded: PeftConfig) -> list[str]:
    """Return a problem when the new adapter starts on another base than the loaded one."""
    if not (starts_on_base(new) or starts_on_base(loaded)):
        return []
    # What such a start takes out of the base depends on these, and the loaded adapter has taken out its own.
    names = ("init_lora_weights", "kasa_config", "r", "lora_alpha", "rank_pattern", "alpha_pattern")
    different = [name for name in names if getattr(new, name, None) != getattr(loaded, name, None)]
    if not different:
        return []
    values = ", ".join(f"{name} is {getattr(new, name)!r}, not {getattr(loaded, name)!r}" for name in different)
    return [
        f"the start of one of the two changes the base's weights, and they differ: {values}. Load it onto a new base"
    ]


def _other_rank(adapter: Adapter) -> list[str]:
    """Return a problem for each factor whose rank is not the config's, because the scaling would be wrong for it."""
    config = adapter.facts.config
    shapes = {key: tuple(tensor.shape) for key, tensor in adapter.tensors.items()}
    return [
        f"{adapter.file}: {key} has rank {rank}, and r in adapter_config.json is {config['r']}"
        for key, rank in factors_of_other_rank(config, shapes).items()
    ]


def _differences(
    adapter: Adapter, slots: dict[str, AdapterSlot], new: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> list[Finding]:
    findings = []
    for key in sorted(slots.keys() | new.keys()):
        where = f"{adapter.file}: {key}"
        if key not in new:
            message = "the loaded adapter has this tensor, the new one does not"
            fix = "load it under another name; peft would fill the rest with zeros"
            findings.append(fault("adapter-key-missing", where, message, fix))
            continue
        if key not in slots:
            fix = "load it under another name"
            findings.append(fault("adapter-key-unexpected", where, "the loaded adapter has no such tensor", fix))
            continue
        old, value = slots[key].tensor, new[key]
        new_dtype = slots[key].dtype or dtype or value.dtype
        if new_dtype != old.dtype:
            message = f"the new adapter is {new_dtype}, the loaded one {old.dtype}; writing it would round it"
            fix = f"pass adapter_dtype={old.dtype}, or load it under another name"
            findings.append(fault("adapter-dtype", where, message, fix))
        if not _fits(key, old.shape, value.shape):
            message = f"the loaded adapter has {list(old.shape)}, the new one {list(value.shape)}"
            findings.append(fault("shape-mismatch", where, message, "load it under another name"))
    return findings


def _fits(key: str, old: torch.Size, new: torch.Size) -> bool:
    """Return whether it can be copied: the same shape, or a smaller rank, which zeros fill up."""
    if old == new:
        return True
    # The rank is the first dimension of lora_A and the second of lora_B.
    rank = 0 if ".lora_A." in key else 1 if ".lora_B." in key else None
    if rank is None or len(old) != len(new) or new[rank] > old[rank]:
        return False
    return all(o == n for dim, (o, n) in enumerate(zip(old, new, strict=True)) if dim != rank)
