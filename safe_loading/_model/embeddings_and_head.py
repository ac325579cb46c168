"""The input embeddings of a model, and its head: the layer that computes the logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from safe_loading._core.names import ancestors


class EmbeddingsAndHead(NamedTuple):
    """The two modules, a tuner's layer included; None where the model has no such module, or cannot say which it is."""

    embeddings: torch.nn.Module | None
    head: torch.nn.Module | None

    @property
    def weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Their weights; of a tuner's layer, the weight of the layer that it wraps."""
        return _weight(self.embeddings), _weight(self.head)

    @property
    def own_weights(self) -> tuple[torch.Tensor | None, ...]:
        """The base's own weights: of a module of which adapters have copies, that of the module itself."""
        return tuple(_weight(getattr(module, "original_module", module)) for module in self)


def embeddings_and_head_of(model: object) -> EmbeddingsAndHead:
    """Return the embeddings and the head of a transformers model, and None twice for any other object."""
    return EmbeddingsAndHead(_ask(model, "get_input_embeddings"), _ask(model, "get_output_embeddings"))


def tied_head_of(model: torch.nn.Module) -> str | None:
    """Return the name of a head that has the embeddings' weight; None where there is none."""
    found = embeddings_and_head_of(model)
    embeddings, head = found.weights
    if head is None or embeddings is not head:
        return None
    return next((name for name, module in model.named_modules() if module is found.head), None)


def tied_ends_of(model: object) -> EmbeddingsAndHead | None:
    """Return the head and the embeddings that config and class tie it to, whether or not they hold it tied now.

    None where nothing ties the head. The flag ``tie_word_embeddings`` alone does not decide: some classes never tie
    (CPM-Ant), and where configs are nested, it is the one of the class that counts (Qwen3-VL). The embeddings are those
    of the pair and not always the input's: the head of T5Gemma is tied to the decoder's, and its encoder has others.
    """
    embeddings, head = embeddings_and_head_of(model)
    expand: Callable[..., Mapping[str, str]] | None = getattr(model, "get_expanded_tied_weights_keys", None)
    if head is None or expand is None or not isinstance(model, torch.nn.Module):
        return None
    paths = dict(model.named_modules(remove_duplicate=False))
    names = {f"{path}.weight" for path, module in paths.items() if module is head}
    try:
        pairs = expand(all_submodels=True).items()
    except ValueError:  # a pattern of the class matches no parameter, because a tuner renamed it
        return None
    others = {name for pair in pairs if names.intersection(pair) for name in pair} - names
    partners = [module for path, module in paths.items() if f"{path}.weight" in others]
    if not others:
        return None
    return EmbeddingsAndHead(embeddings if embeddings in partners or not partners else partners[0], head)


def modules_read_past(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules around input embeddings that a model outside of them calls by itself, past their forward.

    So do models of images and texts, which put the features of images among the embedded tokens.
    """
    found: set[torch.nn.Module] = set()
    for outer in model.modules():
        kind: Any = type(outer)
        if not _calls_embeddings(kind):
            continue
        embeddings = _ask(outer, "get_input_embeddings")
        path = next((name for name, module in outer.named_modules() if module is embeddings), "")
        found.update(outer.get_submodule(name) for name in ancestors(path) if name not in ("", path))
    return found


@functools.cache
def _calls_embeddings(model: type[Any]) -> bool:
    try:
        return "get_input_embeddings()" in inspect.getsource(inspect.unwrap(model.forward))
    except (OSError, TypeError):  # no source
        return False


def computes_by_tie_flag(model: torch.nn.Module) -> bool:
    """Return whether a forward pass depends on ``tie_word_embeddings`` itself, and not only on which weights are tied.

    UMT5, Switch Transformers and Udop scale what they hand to the head when the flag is true, so it must stay true when
    the weights are taken apart. transformers leaves two weights apart that a checkpoint holds with different values.
    """
    for kind in {type(module) for module in model.modules()}:
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None and "tie_word_embeddings" in code.co_names:
            return True
    return False


def _ask(model: object, method: str) -> torch.nn.Module | None:
    get: Callable[[], object] | None = getattr(model, method, None)
    try:
        module = get() if get is not None else None
    except (NotImplementedError, AttributeError, TypeError):  # transformers raises for CLIP, Wav2Vec2, ...
        return None
    return module if isinstance(module, torch.nn.Module) else None


def _weight(module: torch.nn.Module | None) -> torch.Tensor | None:
    if module is not None and "token_adapter" in module._modules:  # whose weight is computed anew at each use
        module = getattr(module, "original_module", module)
    try:
        weight = getattr(getattr(module, "base_layer", module), "weight", None)
    except IndexError:  # peft 0.18 asks for the active copy of a wrapper that has none yet
        weight = getattr(getattr(module, "original_module", None), "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None
