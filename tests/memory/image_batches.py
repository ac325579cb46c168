"""Batches with images for the tiny models of tests/tiny_models.py: what each model's processor would return.

The number of image tokens in a row is what the model itself makes of the images. Pixels are ones, since some models
take an image of zeros for padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

ROWS = 2
TEXT = 8  # tokens of a row beside those of its image
Batch = dict[str, torch.Tensor]


def _field(config: Any, names: str, default: Any = None) -> Any:
    found = next((value for name in names.split() if (value := getattr(config, name, None)) is not None), default)
    return found[0] if isinstance(found, (list, tuple)) else found


def _vision(model: Any) -> Any:
    return _field(model.config, "vision_config encoder", model.config)


def _image(model: Any, *leading: int) -> torch.Tensor:
    vision = _vision(model)
    size = _field(vision, "image_size", 32)
    return torch.ones(*leading, _field(vision, "num_channels in_channels in_chans", 3), size, size)


def _patches(model: Any) -> Batch:
    """Patches of images of 4 x 4 patches, one after the other, and how many there are in each direction."""
    vision = _vision(model)
    grid = torch.tensor([[1, 4, 4]] * ROWS)
    channels, patch = _field(vision, "num_channels in_channels in_chans", 3), _field(vision, "patch_size")
    frames = _field(vision, "temporal_patch_size patch_temporal", 1)
    count = int(grid.prod(-1).sum())
    pixels = torch.ones(count, channels * frames * patch * patch)
    kind = model.config.model_type
    if kind in ("kimi_k25", "paddleocr_vl"):
        pixels = pixels.view(count, channels, patch, patch)
    if kind == "inkling2":
        merge = _field(vision, "spatial_merge_size")
        pixels = torch.ones(count, merge * patch, merge * patch, channels)  # its grid is of merged patches
    return {"pixel_values": pixels, "image_grid_thw": grid}


def _tiles(model: Any) -> Batch:
    """Tiles of images, as many as the model cuts from an image of its own size."""
    size = _field(_vision(model), "image_size")
    sizes = torch.tensor([[size, size]] * ROWS)
    tiles = image_size_to_num_patches([size, size], model.config.image_grid_pinpoints, size)
    return {"pixel_values": _image(model, ROWS, tiles), "image_sizes": sizes}


def _masked_tiles(model: Any) -> Batch:
    pixels = _image(model, ROWS, 1)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, :, 0], dtype=torch.bool)}


def _rows_of_patches(model: Any) -> Batch:
    vision = _vision(model)
    width = 3 * _field(vision, "patch_size") ** 2
    return {
        "pixel_values": torch.ones(ROWS, 16, width),
        "spatial_shapes": torch.tensor([[4, 4]] * ROWS),
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
    }


def _placed_patches(model: Any) -> Batch:
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(ROWS, -1, -1).contiguous()
    return {
        "pixel_values": torch.ones(ROWS, 36, 3 * _field(_vision(model), "patch_size") ** 2),
        "image_position_ids": places,
    }


def _strip(model: Any) -> Batch:
    """The patches of all images side by side in one strip, as MiniCPM-V takes them."""
    patch = _field(_vision(model), "patch_size")
    return {
        "pixel_values": torch.ones(1, 3, patch, patch * 16 * ROWS),
        "target_sizes": torch.tensor([[4, 4]] * ROWS, dtype=torch.int32),
    }


def _crossed(model: Any) -> Batch:
    tiles = _field(_vision(model), "max_num_tiles")
    return {
        "pixel_values": _image(model, ROWS, 1, tiles),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(ROWS, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(ROWS, TEXT, 1, tiles, dtype=torch.long),
    }


def _flattened(model: Any) -> Batch:
    """Patches with the numbers of their row and column before them."""
    return {"flattened_patches": torch.ones(ROWS, 16, 2 + _field(_vision(model), "patch_embed_hidden_size"))}


def _with_questions(model: Any) -> Batch:
    return {"pixel_values": _image(model, ROWS), "qformer_input_ids": torch.full((ROWS, TEXT), 5)}


# of models whose images are no (rows, channels, height, width), by model type, and by an argument that tells
RECIPES: dict[str, Callable[[Any], Batch]] = {
    "idefics": lambda model: {
        "pixel_values": _image(model, ROWS, 1),
        "image_attention_mask": torch.ones(ROWS, TEXT, 1, dtype=torch.long),
    },
    "granite_docling": lambda model: {
        "pixel_values": _image(model, ROWS, 1),
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
    },
    "instructblip": _with_questions,
    "instructblipvideo": lambda model: {**_with_questions(model), "pixel_values": _image(model, ROWS, 4)},
    "llava_next": _tiles,
    "llava_next_video": _tiles,
    "llava_onevision": _tiles,
    "llava": lambda model: {"pixel_values": _image(model, ROWS)},
    "mllama": _crossed,
    "fuyu": lambda model: {"pixel_values": torch.ones(ROWS, 16, 3 * model.config.patch_size**2)},
    "pix2struct": _flattened,
    "kosmos-2.5": _flattened,
}
BY_ARGUMENT: dict[str, Callable[[Any], Batch]] = {
    "image_position_ids": _placed_patches,
    "image_grid_thw": _patches,
    "target_sizes": _strip,
    "spatial_shapes": _rows_of_patches,
    "pixel_attention_mask": _masked_tiles,
}


def image_batch(model: Any) -> Batch:
    """Return a batch of two rows, each of a text around an image."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    recipe = RECIPES.get(config.model_type) or next(
        (recipe for name, recipe in BY_ARGUMENT.items() if name in takes), None
    )
    batch = {"pixel_values": _image(model, ROWS)} if recipe is None else recipe(model)
    if recipe is None and "image_sizes" in takes:
        batch["image_sizes"] = torch.tensor([[*batch["pixel_values"].shape[-2:]]] * ROWS)
    if "image_merge_sizes" in takes:
        batch["image_merge_sizes"] = torch.tensor([2] * ROWS)
    count = _features(model, batch)
    ids = torch.full((ROWS, count + TEXT), 5)
    token = _field(config, "image_token_id image_token_index", 10)
    ids[:, 2 : 2 + count] = token
    batch |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask"):
        if name in takes:
            batch[name] = (ids == token).int()
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.full((ROWS, TEXT), 5)
    return batch


def _features(model: Any, batch: Batch) -> int:
    """Return how many tokens of a row stand for its image."""
    inner = [module for module in model.modules() if hasattr(module, "get_image_features")]
    if not inner:
        return getattr(model.config, "latent_query_num", 0)
    get: Any = inner[-1].get_image_features  # the others hand their arguments on
    takes = inspect.signature(get).parameters
    with torch.no_grad():
        found = get(**{name: tensor for name, tensor in batch.items() if name in takes}, return_dict=True)
    features = [getattr(found, name, None) for name in ("pooler_output", "last_hidden_state")]
    found = next((part for part in features if part is not None), found)
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts) // ROWS
