"""A limit on how many modules and parameters a model is built of: on meta, too, each is an object of some kilobytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from safe_loading.errors import CheckpointError

# Kimi K2, with a module for each of its 384 experts in 61 layers, has about 120 000 modules and 70 000 parameters.
MOST_REGISTERED = 250_000


@contextmanager
def module_limit(config_class: str, most: int = MOST_REGISTERED) -> Iterator[None]:
    """While a model is built from a config, refuse one of more modules and parameters than any model has.

    Which counts of a config become loops, and which are multiplied, only the class of the model knows: so the modules
    are counted as torch registers them. Those of other threads are not.
    """
    thread, registered = threading.get_ident(), 0

    def count(*_: object) -> None:
        nonlocal registered
        if threading.get_ident() != thread:
            return
        registered += 1
        if registered > most:
            raise CheckpointError(
                f"This {config_class} makes more than {most} modules and parameters, and no published model has so "
                f"many. Correct the counts in config.json, or save the model again with `save_pretrained`."
            )

    with ExitStack() as hooks:
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            hooks.callback(register(count).remove)
        yield
