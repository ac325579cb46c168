"""Our merge in the place of ``merge_and_unload``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peft.tuners.tuners_utils import BaseTuner

from safe_loading import merge_lora_inplace

WORDS = r"merge_and_unload"


def replace(note_call: Callable[[], None]) -> None:
    """Put ours in the place of peft's; ``note_call`` is called when it is used."""

    def merge_and_unload(
        self: Any, progressbar: bool = False, safe_merge: bool = False, adapter_names: Any = None
    ) -> Any:
        note_call()
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        return merge_lora_inplace(self, adapter_names=names, check_finite=safe_merge, progress=progressbar)

    replaced: Any = BaseTuner
    replaced.merge_and_unload = merge_and_unload
