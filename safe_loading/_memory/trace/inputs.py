"""The inputs of a traced step."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from transformers import GenerationMixin, PreTrainedModel

from safe_loading._core.engines import drops_full_masks
from safe_loading._core.names import method_name
from safe_loading._core.thread_patches import patched
from safe_loading._model.peft_layers import base_of
from safe_loading._model.text_config import text_config
from safe_loading.errors import ArgumentError, TraceError

from .known_values import KnownValues
from .step_tensors import Inputs, is_packed, tensor_of

_KINDS = ("Sequence", "Image", "Audio", "Video")
_ONE_LABEL_PER_ROW = (
    *(f"For{kind}Classification" for kind in _KINDS),
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
# beside ``labels`` or in their place, of heads that answer questions or tell whether a text follows another
_TARGETS_OF_ROWS = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label")
_NUMBERS_FOR_EACH_CLASS = ("regression", "multi_label_classification")
_VISION_CONFIGS = ("vision_config", "encoder")  # where a config may describe the images
_OF_TASKS = ("POLY", "MULTITASK_PROMPT_TUNING")  # methods of peft that are told the task of each row
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ENGINES = ("transformers", "peft", "torch")
_MOST_WRAPPERS = 8  # around one another; ends the search should a model contain itself


def forward_arguments(model: torch.nn.Module) -> dict[str, bool]:
    """Return the arguments of the model's forward by name, and whether each is required.

    Where a forward takes ``**kwargs``, the arguments of that which it passes them to are included: of the class that it
    derives from, and of the model inside it, but for those that it passes by itself. Where one of them takes none, no
    others can be passed.
    """
    names: dict[str, bool] = {}
    passed: set[str] = set()  # by a forward itself, beside its **kwargs, which may then not hold them
    caches = False
    for _ in range(_MOST_WRAPPERS):
        for forward in _forwards(model):
            parameters = inspect.signature(forward).parameters
            for name, parameter in parameters.items():
                if parameter.kind not in _VARIADIC and name not in passed:
                    names.setdefault(name, parameter.default is inspect.Parameter.empty)
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                return names
            passed |= _passed_beside_others(forward) - names.keys()
        has_cache = hasattr(text_config(getattr(model, "config", None)), "use_cache")
        caches |= has_cache and "use_cache" not in passed | _passed_beside_others(engine_base(model).forward)
        inner = _inner_model(model)
        if inner is None:
            break
        model = inner
    if caches:
        names.setdefault("use_cache", False)  # every forward takes **kwargs, and the model inside them this
    return names


def _forwards(model: torch.nn.Module) -> Iterator[Callable[..., object]]:
    """Yield the model's forward, and those of its users' classes and their first base of an engine, if they take more.

    What a class of an engine calls is its own affair: the arguments that one of them drops are named by none above it,
    but for a forward that says that it passes them on to its base.
    """
    first: Any = getattr(model.forward, "__func__", None)
    yield model.forward
    for cls in type(model).__mro__:
        own = vars(cls).get("forward")
        if own is None or cls is torch.nn.Module:
            continue
        if own is not first:
            yield functools.partial(own, model)
        if is_of_engine(cls) and not any(map(_is_of_base, _calls_with_others(own))):
            return


def _passed_beside_others(forward: Callable[..., object]) -> set[str]:
    """Return the arguments that a forward names in calls to which it passes its ``**kwargs``, too."""
    return {keyword.arg for call in _calls_with_others(forward) for keyword in call.keywords if keyword.arg is not None}


def _calls_with_others(forward: Callable[..., object]) -> list[ast.Call]:
    """Return the calls to which a forward passes its ``**kwargs``."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):  # no source, or none of a function by itself
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if any(keyword.arg is None for keyword in call.keywords)]


def _is_of_base(call: ast.Call) -> bool:
    """Whether a call is that of ``super().forward``."""
    name = call.func
    if not isinstance(name, ast.Attribute) or name.attr != "forward" or not isinstance(name.value, ast.Call):
        return False
    return isinstance(name.value.func, ast.Name) and name.value.func.id == "super"


def is_of_engine(cls: type) -> bool:
    """Whether a class is an engine's, and not its user's."""
    return cls.__module__.partition(".")[0] in _ENGINES


def _inner_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the model that a model passes its arguments to: a head's base, or the model in a wrapper."""
    # transformers' base_model is the model under a head; PeftModel's is the tuner, whose `model` is the base
    inner = getattr(model, "base_model", None)
    if isinstance(inner, torch.nn.Module) and inner is not model:
        deeper = getattr(inner, "model", None)
        return deeper if isinstance(deeper, torch.nn.Module) else inner
    outermost = engine_model(model)
    if outermost is not model:
        return outermost
    children = list(model.children())
    return children[0] if len(children) == 1 and not isinstance(model, PreTrainedModel) else None


def engine_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost model of transformers or peft in a user's wrappers; the model itself if there is none."""
    engine_models = (m for m in model.modules() if isinstance(m, PreTrainedModel) or hasattr(m, "get_base_model"))
    return next(engine_models, model)


def engine_base(model: torch.nn.Module) -> Any:
    """Return the model of transformers in a user's wrappers, without an adapter of peft around it."""
    return base_of(engine_model(model))


def takes_targets(model: torch.nn.Module) -> bool:
    """Whether a model's forward takes labels, of any name, for a loss of its own."""
    return not forward_arguments(model).keys().isdisjoint(("labels", "return_loss", *_TARGETS_OF_ROWS))


def assume_padding_token(model: torch.nn.Module) -> bool:
    """Give a classifier of texts on meta a padding token where its config has none, and return whether it had none.

    Whoever runs several rows must do so, and does it once the tokenizer is there.
    """
    config = text_config(getattr(model, "config", None))
    if not type(model).__name__.endswith("ForSequenceClassification") or getattr(config, "pad_token_id", 0) is not None:
        return False
    config.pad_token_id = 0
    return True


class StepInputs:
    """Makes the input tensors of a step, with known values where they are integers.

    The user's own tensors replace those that would be made: their shape and dtype count, and the values of integers
    that are not on meta, such as the positions of images in a text. The device is the one on which a user would put the
    inputs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        values: KnownValues,
        device: torch.device,
        user_inputs: Inputs | None,
        *,
        padding_free: bool = False,
    ) -> None:
        self.names = forward_arguments(model)
        outermost = engine_model(model)
        self._base: torch.nn.Module = engine_base(model)
        self._class_name = type(self._base).__name__
        adapter = getattr(outermost, "active_peft_config", None)
        # with which peft's forward takes no positions
        self.has_prompts = bool(getattr(adapter, "is_prompt_learning", False))
        self._invocation: list[int] | None = getattr(adapter, "alora_invocation_tokens", None)
        self._has_tasks = method_name(getattr(adapter, "peft_type", "")) in _OF_TASKS
        self._config: object = getattr(outermost, "config", None)
        self._is_encoder_decoder = bool(getattr(self._config, "is_encoder_decoder", False))
        # of a Sequential around a model, which calls it with one argument by position
        self._only_input = "input" if list(self.names) == ["input"] and outermost is not model else None
        self._device = device
        self._values = values
        self._user_inputs = user_inputs or {}
        self._padding_free = padding_free
        if padding_free:
            self._refuse_one_row()

    def _refuse_one_row(self) -> None:
        """Refuse to put all texts in one row where the model cannot tell them apart, or the caller has rows."""
        if self._user_inputs:
            raise ArgumentError("padding_free=True: inputs= are rows of your own; leave one of the two out.")
        if "position_ids" not in self.names or self.has_prompts or self.classifies or self._is_encoder_decoder:
            raise ArgumentError(
                f"padding_free=True: {self._class_name} does not take texts one after the other in one row, told apart "
                f"by position_ids; leave it out."
            )

    def tokens(self, *shape: int) -> torch.Tensor:
        """Return token ids, a mask or labels: integers of the value 1."""
        fake = torch.empty(shape, dtype=torch.long, device=self._device)
        # 1 is a valid id, in a mask it hides nothing, and as a label it is not ignored, as -100 would be
        self._values.fill(fake, 1)
        return fake

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside, experts of a mixture compute as ``generate()`` lets them on an accelerator, token by token.

        It copies the weights of each token's experts and multiplies them in one batch (``batched_mm``), where a prompt
        is sorted by experts (``grouped_mm``).
        """
        switch: Any = getattr(self._base, "_optimize_model_for_decode", None)
        with contextlib.ExitStack() as stack:
            if switch is not None and self._device.index is not None:
                # it asks for the type of the model's device, which is the host's here
                with patched(type(self._base), "device", torch.device("cuda")):
                    stack.enter_context(switch())
            yield

    def with_encoded_images(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a prompt's arguments with the encoder's output in place of its images, as ``generate()`` passes them.

        Newer transformers encode images before they run the model.
        """
        base: Any = self._base
        mixin: Any = GenerationMixin
        knows = getattr(base, "_supports_mm_encoder_outputs", None)
        has_own = getattr(type(base), "generate", None) is not mixin.generate  # as a classifier has none
        if knows is None or has_own or not knows() or not {"image", "video"} & {*base.input_modalities}:
            return arguments
        encoded: dict[str, Any] = base._prepare_multimodal_encoder_kwargs_for_generation({**arguments})
        return encoded

    def of_next_token(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model that ``generate()`` runs after the prompt: the base if peft's prompts are in the cache."""
        return self._base if self.has_prompts else model

    @property
    def generates(self) -> bool:
        """Whether the model is one of tokens that ``generate()`` of transformers runs."""
        can_generate = getattr(self._base, "can_generate", None)
        tokens = "input_ids" in self.names and "inputs_embeds" not in self._user_inputs
        return callable(can_generate) and bool(can_generate()) and tokens

    @property
    def classifies(self) -> bool:
        """Whether the model answers once for each row, with or without a decoder that could write."""
        return self._class_name.endswith(_ONE_LABEL_PER_ROW)

    def positions(
        self, ids: torch.Tensor, mask: torch.Tensor | None, others: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the positions that ``generate()`` gives each row; None for a model whose forward takes none."""
        if self.has_prompts or "position_ids" not in inspect.signature(self._base.forward).parameters:
            return None
        masked = {} if mask is None else {"attention_mask": mask}
        prepare: Any = getattr(self._base, "_prepare_position_ids_for_generation", None)  # since transformers 5.3
        if prepare is not None:
            positions: torch.Tensor = prepare(ids, {**others, **masked})
            return positions
        counted = self.tokens(*ids.shape) if mask is None else mask
        return (counted.long().cumsum(-1) - 1).masked_fill_(counted == 0, 1)

    def special_tokens(self) -> list[torch.Tensor]:
        """Return the ids of the special tokens, which ``generate()`` puts on the device."""
        config = getattr(self._base, "generation_config", None)
        names = ["bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"]
        ids = (getattr(config, name, None) for name in names)
        return [self.tokens(len(each) if isinstance(each, (list, tuple)) else 1) for each in ids if each is not None]

    @property
    def ends(self) -> bool:
        """Whether ``generate()`` looks for an end in each row."""
        return getattr(getattr(self._base, "generation_config", None), "eos_token_id", None) is not None

    def drops_mask(self, mask: torch.Tensor) -> bool:
        """Return whether ``generate()`` leaves a mask out, because nothing is hidden by it."""
        # what is made here is all ones, even where that is too large to be known
        made_here = "attention_mask" not in self._user_inputs
        return drops_full_masks() and (made_here or self._values.are_all(mask, 1))

    def rows(self, rows: int) -> int:
        """Return how many rows a batch has: as many as the user's tokens, else `rows`."""
        return self._token_shape(rows, 1)[0]

    def batch(self, rows: int, columns: int) -> dict[str, Any]:
        """Return the arguments of a forward pass over `columns` tokens in each of `rows` rows."""
        batch: dict[str, Any] = {name: recursively_apply(self._faked, each) for name, each in self._user_inputs.items()}
        shape = self._token_shape(rows, columns)
        token_inputs = {"input_ids": shape, "attention_mask": shape} if "input_ids" in self.names else {}
        if self._padding_free:
            batch["position_ids"] = torch.empty(shape, dtype=torch.long, device=self._device)
            self._values.count_anew(batch["position_ids"], columns)
        if self._padding_free or is_packed(self._user_inputs):  # for which collators make no mask
            token_inputs.pop("attention_mask", None)
        labels = tensor_of(self._user_inputs, "labels")
        # of labels with more dimensions, such as MusicGen's of several codebooks, the model alone makes that text
        if self._is_encoder_decoder and (labels is None or self.classifies or labels.dim() == len(shape)):
            token_inputs["decoder_input_ids"] = self._decoder_shape(shape[0], columns)
        for name, size in token_inputs.items():
            embeds = name.replace("input_ids", "inputs_embeds")
            if name in self.names and name not in batch and embeds not in batch:
                batch[name] = self.tokens(*size)
        if self._only_input is not None and self._only_input not in batch:
            batch[self._only_input] = self.tokens(*shape)
        if self._has_tasks and "task_ids" not in batch:
            batch["task_ids"] = self.tokens(shape[0]) - 1  # the first task
        if "input_ids" in batch:
            self._end_with_eos(batch["input_ids"])
            self._begin_with_invocation(batch["input_ids"])
        # a model of text and images gets images only where its forward requires them
        takes_images = "input_ids" not in self.names or self.names.get("pixel_values")
        if "pixel_values" in self.names and takes_images and "pixel_values" not in batch:
            batch["pixel_values"] = self._images(rows)
        if "input_features" in self.names and "input_ids" not in self.names and "input_features" not in batch:
            batch["input_features"] = self._sound(rows)
        return batch

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the user's as one of the step."""
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._values.take_input(fake, tensor)
        return fake

    def targets(self, rows: int, columns: int) -> dict[str, Any]:
        """Return the arguments that the loss compares with, but those that the user passes."""
        shape = self._token_shape(rows, columns)
        wanted = [name for name in ("labels", *_TARGETS_OF_ROWS) if name in self.names]
        made: dict[str, Any] = {
            name: self._labels(shape, columns) if name == "labels" else self.tokens(shape[0])
            for name in wanted
            if name not in self._user_inputs
        }
        return made | ({"return_loss": True} if "return_loss" in self.names else {})  # of pictures and their texts

    def _labels(self, shape: tuple[int, ...], columns: int) -> torch.Tensor:
        """Return the labels: one a row for classifiers of whole inputs, else one a token."""
        if self.classifies:
            return self._labels_of_rows(shape[0])
        return self.tokens(*(self._decoder_shape(shape[0], columns) if self._is_encoder_decoder else shape))

    def _decoder_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the user's text for the decoder, or of the labels, from which the model makes that text."""
        names = ("decoder_input_ids",) if self.classifies else ("decoder_input_ids", "labels")
        given = (tensor_of(self._user_inputs, name) for name in names)
        return next((tuple(tensor.shape) for tensor in given if tensor is not None), (rows, columns))

    def _labels_of_rows(self, rows: int) -> torch.Tensor:
        """Return the class of each row, or a number for each class where the loss compares numbers."""
        classes = getattr(self._config, "num_labels", 0)
        # transformers takes one class without a type for a number to be met, such as a reward
        problem = getattr(self._config, "problem_type", None) or ("regression" if classes == 1 else "")
        if problem not in _NUMBERS_FOR_EACH_CLASS or self._class_name.endswith("ForMultipleChoice"):
            return self.tokens(rows)
        is_one_number = problem == "regression" and classes == 1
        return torch.empty((rows,) if is_one_number else (rows, classes), device=self._device)

    def _token_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the user's tokens, else the workload's."""
        ids, embeds = (tensor_of(self._user_inputs, name) for name in ("input_ids", "inputs_embeds"))
        if ids is not None:
            return tuple(ids.shape)
        if embeds is not None:
            return tuple(embeds.shape[:-1])
        if self._class_name.endswith("ForMultipleChoice"):
            raise TraceError(
                f"{self._class_name}: a workload does not say how many choices a question has. Pass the tokens, for "
                f"example inputs={{'input_ids': torch.ones({rows}, choices, {columns}, dtype=torch.long)}}."
            )
        return (1, rows * columns) if self._padding_free else (rows, columns)

    def _end_with_eos(self, tokens: torch.Tensor) -> None:
        """End each text as a tokenizer does, for classifiers that read the decoder's state at that token."""
        eos = getattr(self._config, "eos_token_id", None)
        eos = eos[0] if isinstance(eos, (list, tuple)) else eos
        reads_end = self._is_encoder_decoder and self.classifies
        if reads_end and eos is not None and "input_ids" not in self._user_inputs:
            self._values.set_last(tokens, eos)

    def _begin_with_invocation(self, tokens: torch.Tensor) -> None:
        """Begin each text with the tokens that turn an aLoRA on: it computes from there on, so at most all of it."""
        if self._invocation and "input_ids" not in self._user_inputs:
            self._values.set_first(tokens, self._invocation)

    def _sound(self, rows: int) -> torch.Tensor:
        """Return spectrograms of the one length that Whisper takes: two frames for each position of its encoder."""
        bands, positions = (getattr(self._config, name, None) for name in ("num_mel_bins", "max_source_positions"))
        if not isinstance(bands, int) or not isinstance(positions, int):
            raise TraceError(
                f"The config of {self._class_name} does not say how long its sounds are. Pass them, for example "
                f"inputs={{'input_features': torch.empty({rows}, frames, bands, device='meta')}}."
            )
        return self._numbers(rows, bands, 2 * positions)

    def _images(self, rows: int) -> torch.Tensor:
        inner_configs = (getattr(self._config, name, None) for name in _VISION_CONFIGS)
        config = next((inner for inner in inner_configs if hasattr(inner, "image_size")), self._config)
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if size is None:
            raise TraceError(
                f"The config of {self._class_name} does not say how large its images are. Pass them, for example "
                f"inputs={{'pixel_values': torch.empty({rows}, {channels}, height, width, device='meta')}}."
            )
        height, width = (size, size) if isinstance(size, int) else size
        return self._numbers(rows, channels, height, width)

    def _numbers(self, *shape: int) -> torch.Tensor:
        """Return images or sounds in the dtype of the weights, which most convolutions demand."""
        dtypes = (p.dtype for p in self._base.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
        return torch.empty(shape, dtype=next(dtypes, None), device=self._device)
