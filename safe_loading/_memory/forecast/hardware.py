"""What a GPU takes beside the tensors: its context, and the scratch of cuBLAS. Imports no torch."""

from __future__ import annotations

from safe_loading._core.report import KiB, MiB

# Measured after a training step, by nvidia-smi less torch.cuda.memory_reserved(): context, kernels, cuBLAS's handles.
_MEASURED = {(7, 5): (int(140.875 * MiB), "measured on a Tesla T4, 69 runs of torch 2.10 and 2.14")}
_ALLOWANCE = 512 * MiB


def context_of(capability: tuple[int, int]) -> tuple[int, str]:
    """Return the bytes of the CUDA context on a GPU of this compute capability, and where the figure comes from."""
    return _MEASURED.get(capability, (_ALLOWANCE, "an allowance: it was not measured on this GPU"))


def workspaces_of(capability: tuple[int, int], *, training: bool) -> tuple[int, ...]:
    """Return the bytes that cuBLAS keeps for each of its handles (``getChosenWorkspaceSize`` of CUDABlas.cpp).

    There is one handle a thread, and the backward pass runs in a thread of its own.
    """
    size = 32 * MiB if capability[0] in (9, 10) else 2 * 4096 * KiB + 8 * 16 * KiB
    return (size, size) if training else (size,)
