"""Started by simulated_cuda.pth in every Python process: once torch is imported, its values are computed if wanted."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Runs `install` at the end of torch's own import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            import simulated_cuda_values

            simulated_cuda_values.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


if os.environ.get("SIMCUDA_VALUES"):
    sys.meta_path.insert(0, _AfterTorch())
