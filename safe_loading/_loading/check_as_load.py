"""The load's own check of a folder, on a model on meta, as findings of ``check_checkpoint``; no base is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safe_loading._checkpoint.adapter_folder import read_adapter
from safe_loading._checkpoint.faults import fault
from safe_loading._checkpoint.hub import Resolved, base_files
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._checkpoint.tokenizer_ids import rows_of, tokenizer_findings, words_in
from safe_loading._core.log import quiet
from safe_loading._core.names import method_name
from safe_loading._core.protocols import ModelClass
from safe_loading._core.report import Finding, errors_of
from safe_loading._model.layout.ties import untied_finding
from safe_loading._model.meta_model import class_in_config, class_to_build
from safe_loading._model.quantized.on_disk import plain_all_the_same
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.rank_devices import rank_devices
from safe_loading.errors import CheckpointError, CheckpointNotFound, SafeLoadingError

from .base_model import base_config, built_on_meta
from .inject import prepare
from .load import BaseOnDisk, LoadOptions, check_before_load
from .sources import BaseRequest, other_base_findings, resolve_base
from .starts import builds_on_meta, random_start

_SAVE_AGAIN = "save it again with `save_pretrained`, copy or download the whole folder again, or correct its config"
# of a quantization; the check finds all others itself
_OF_CODES = ("decoded-wrongly", "status-differs", "skips-differ")


class LoadCheck(NamedTuple):
    """The answer of the load's check: the model that it was asked with, and its findings."""

    by: str  # "LlamaForCausalLM on meta", or "headers alone: " and why no model was built
    findings: list[Finding]


def check_model(opened: ModelFolder) -> LoadCheck:
    """Check the folder of a model as a load does, which has the class of its config and no adapter."""

    if "_diffusers_version" in (opened.config or {}):
        return LoadCheck("headers alone: its class is one of diffusers", [])
    unknown: list[str] = []

    def check() -> LoadCheck:
        config = base_config(opened.path, {}, opened.config)
        auto_class = class_to_build(config, None, trust_remote_code=False)
        if class_in_config(config, trust_remote_code=False) is None:
            unknown.extend(config.architectures or [])
        base = Resolved(str(opened.path), opened.path, None)
        return _answer(check_before_load(base, [], _options(auto_class), opened))

    answer = _asked(opened.path, check)
    # of the class that was assumed, where a load takes auto_class= for another
    if unknown and errors_of(answer.findings):
        return LoadCheck(f"headers alone: transformers has no {' or '.join(unknown)}, which its config names", [])
    return answer


def check_adapter(opened: ModelFolder, base_model: str | os.PathLike[str] | None) -> LoadCheck:
    """Check the folder of an adapter as a load does, with the base that it names or another one.

    The adapter is read, and attached to the base on meta. Nothing is downloaded.
    """

    def check() -> LoadCheck:
        facts = read_adapter(Resolved(str(opened.path), opened.path, None), folder=opened)
        adapter = prepare("default", facts, is_trainable=False, dtype=None)
        start = random_start(adapter.config, adapter.file)
        errors = [*errors_of(adapter.findings), *start]
        if base_model is None and not facts.config.get("base_model_name_or_path"):
            return LoadCheck("headers alone: it names no base; pass base_model=", errors)
        try:
            base = resolve_base(BaseRequest(base_model), facts, base_files({}), {"local_files_only": True})
        except CheckpointNotFound:
            if base_model is not None:
                raise
            return LoadCheck("headers alone: the base that it names is not on this machine; pass base_model=", errors)
        answer = _answer(checked := check_before_load(base, [adapter], _options(None)))
        if checked.built_as is not None and not builds_on_meta(adapter.config):
            method = method_name(adapter.config.peft_type)
            answer = answer._replace(by=f"{answer.by}, where {method} cannot be attached")
        own = {} if facts.header is None else facts.header.tensors
        of_base = checked.opened.read_checkpoint()
        rows, other = max(rows_of(own), rows_of(of_base.tensors)), other_base_findings([adapter], of_base)
        return answer._replace(
            findings=[
                *answer.findings,
                *start,
                *other,
                *tokenizer_findings(facts.path, rows, known=words_in(base.folder)),
            ]
        )

    return _asked(opened.path, check)


def _options(auto_class: ModelClass | None) -> LoadOptions:
    """Return the options of a load without any."""
    return LoadOptions(
        devices=rank_devices("cpu"),
        dtype="auto",
        adapter_dtype=None,
        is_trainable=False,
        auto_class=auto_class,
        active="default",
        strict=True,
        base_kwargs={},
    )


def _answer(base: BaseOnDisk) -> LoadCheck:
    findings = [untied_finding(base.resolved.folder, pair) for pair in base.untied]
    findings += [finding for finding in base.findings if finding.code in _OF_CODES]
    if getattr(base.config, "quantization_config", None) is not None and not plain_all_the_same(base.opened):
        return LoadCheck("headers alone: a quantizer makes the modules during the load", findings)
    if base.built_as is None:
        with contextlib.suppress(ImportError):  # of a package that another machine has
            built_on_meta(base.auto_class, base.opened, "auto", {})  # what it raises here, a load raises too
        return LoadCheck("headers alone: its class cannot be built on meta", findings)
    return LoadCheck(f"{base.built_as} on meta", findings)


@tensors_on_host()
def _asked(folder: Path, check: Callable[[], LoadCheck]) -> LoadCheck:
    """Return the answer of a check, with its errors as findings."""
    try:
        with quiet():
            return check()
    except SafeLoadingError as error:
        lines = error.problems or [str(error)]
        fixed = isinstance(error, CheckpointError) and bool(error.problems)
    except Exception as error:  # whatever an engine raises about this folder, a load would raise too
        lines, fixed = [f"{type(error).__name__}: {error}"], True
    fix = _SAVE_AGAIN if fixed else ""
    return LoadCheck("a load", [fault("load-refused", folder, f"a load refuses it: {line}", fix) for line in lines])
