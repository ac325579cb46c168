"""Quantization formats: each is a file and a row of the registry, under a name that transformers knows."""

from __future__ import annotations

import importlib
import pkgutil

from safe_loading._checkpoint.base_config import QUANTIZERS
from safe_loading._model import formats
from safe_loading._model.formats.format import Format
from safe_loading._model.formats.registry import FORMATS, STORED
from safe_loading._model.formats.stored import StoredCodes

MODULES = [
    importlib.import_module(f"{formats.__name__}.{found.name}") for found in pkgutil.iter_modules(formats.__path__)
]
DEFINED = [value for module in MODULES for value in vars(module).values()]


def test_every_format_of_a_file_is_in_the_registry() -> None:
    assert {value.method: value for value in DEFINED if isinstance(value, Format)} == FORMATS
    assert {value.kind: value for value in DEFINED if isinstance(value, StoredCodes)} == STORED
    assert len(FORMATS) > 8


def test_transformers_knows_the_method_of_every_format() -> None:
    assert set(FORMATS) <= QUANTIZERS


def test_codes_that_are_merged_into_are_read() -> None:
    assert [each.method for each in FORMATS.values() if each.merged_on_disk and not each.read_on_disk] == []
