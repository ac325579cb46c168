"""The scans of state-space models while a step is traced: the allocations of their CUDA kernels, without the kernels.

Without the packages mamba_ssm and causal_conv1d transformers runs a reference that computes one token after the other,
keeps every state, and takes minutes to trace. What the kernels allocate and keep is taken from mamba_ssm 2
(``ops/selective_scan_interface.py``, ``csrc/selective_scan/selective_scan.cpp``) and causal_conv1d
(``csrc/causal_conv1d.cpp``). transformers computes the scans of Mamba-2 in chunks too, so they are traced as they are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn import functional

from safe_loading._core.thread_patches import patched

_CHUNK = 2048  # tokens for which the scan keeps one state
_Gradients = tuple[torch.Tensor | None, ...]


@contextlib.contextmanager
def scan_stand_ins(model: torch.nn.Module, *, fused: bool = True) -> Iterator[tuple[str, ...]]:
    """Inside, the scans of Mamba's layers allocate as CUDA's kernels do; yield the kinds of those layers.

    Not `fused`, a layer calls its projections, as it does where mamba_ssm is not installed, with the adapters on them.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    kinds = []
    with contextlib.ExitStack() as stack:
        for file in files:
            # the scan of the first generation alone is computed token by token
            if not hasattr(file, "mamba_selective_scan"):
                continue
            kinds.append(file.__name__.rpartition("modeling_")[2])
            for name, function in _FUNCTIONS.items():
                if hasattr(file, name) and (fused or function is not _inner_fn):
                    stack.enter_context(patched(file, name, function))
        yield tuple(sorted(kinds))


def _with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scan(
    u: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, z: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the output, the states of each chunk, and the gated output."""
    gated = None if z is None else torch.empty_like(z)
    out = torch.empty_like(delta)
    chunks = -(-u.shape[2] // _CHUNK)
    states = torch.empty((u.shape[0], u.shape[1], chunks, 2 * a.shape[1]), dtype=a.dtype, device=u.device)
    return out, states, out if gated is None else gated


def _scan_gradients(u: torch.Tensor, delta: torch.Tensor, weights: tuple[torch.Tensor | None, ...]) -> list[Any]:
    """Allocate the gradients of a scan's inputs: u, delta, A, B, C, D and delta's bias."""
    a, b, c, d, bias = weights
    made = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a) if a is not None else None]
    in_float32 = [torch.zeros_like(t, dtype=torch.float32) for t in (b, c) if t is not None]
    of_bias = [None if t is None else torch.zeros_like(t) for t in (d, bias)]
    cast = [x.to(t.dtype) for x, t in zip(in_float32, (b, c), strict=True) if t is not None]
    return [*made, *cast, *of_bias]


class _ScanContext(Protocol):
    """The state that the functions below keep from the forward pass for the backward pass."""

    saved_tensors: tuple[Any, ...]
    norms: tuple[bool, bool, bool]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ScanContext,
        u: torch.Tensor,
        delta: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        z: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u, delta, b, c = map(_with_unit_stride, (u, delta, b, c))
        z = None if z is None else _with_unit_stride(z)
        out, states, gated = _scan(u, delta, a, z)
        ctx.save_for_backward(u, delta, a, b, c, d, z, bias, states, None if z is None else out)
        return gated, states[:, :, -1, 1::2]

    @staticmethod
    def backward(ctx: _ScanContext, *grads: torch.Tensor) -> _Gradients:
        u, delta, a, b, c, d, z, bias, _, _ = ctx.saved_tensors
        gradient = _with_unit_stride(grads[0])
        of_gate = None if z is None else torch.empty_like(z)
        made = _scan_gradients(u, delta, (a, b, c, d, bias))
        del gradient
        return (*made[:6], of_gate, made[6])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ScanContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if 1 not in (x.stride(1), x.stride(2)):
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: _ScanContext, *grads: torch.Tensor) -> _Gradients:
        x, weight, bias = ctx.saved_tensors
        gradient = torch.empty_like(x)
        return gradient, *_through_float32(weight, bias)


class _MambaInner(torch.autograd.Function):
    """A whole layer after its first projection; the convolution and the time steps are computed again."""

    @staticmethod
    def forward(
        ctx: _ScanContext,
        xz: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        x_weight: torch.Tensor,
        dt_weight: torch.Tensor,
        out_weight: torch.Tensor,
        out_bias: torch.Tensor | None,
        a: torch.Tensor,
        d: torch.Tensor,
        bias: torch.Tensor,
        norms: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        x_weight, dt_weight, out_weight = map(_autocast, (x_weight, dt_weight, out_weight))
        xz = _with_unit_stride(xz)
        x, z = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        projected, delta = _time_steps(convolved, x_weight, dt_weight, norms[2])
        rank, size = dt_weight.shape[1], a.shape[1]
        b = _by_state(projected[:, rank : rank + size], x, norms[0])
        c = _by_state(projected[:, -size:], x, norms[1])
        out, states, gated = _scan(convolved, delta, a, z)
        del convolved, delta
        saved = (xz, conv_weight, conv_bias, projected, x_weight, dt_weight, out_weight, out_bias)
        ctx.save_for_backward(*saved, a, b, c, d, bias, states, out)
        ctx.norms = norms
        return functional.linear(gated.transpose(1, 2), out_weight, out_bias)

    @staticmethod
    def backward(ctx: _ScanContext, *grads: torch.Tensor) -> _Gradients:
        xz, conv_weight, conv_bias, projected, x_weight, dt_weight, out_weight, out_bias, *rest = ctx.saved_tensors
        a, b, c, d, bias, _, out = rest
        x = xz.chunk(2, dim=1)[0]
        rows, inner, length = x.shape
        rank, size = dt_weight.shape[1], a.shape[1]
        convolved = torch.empty_like(x)
        delta = (dt_weight @ projected[:, :rank].t()).reshape(inner, rows, length).transpose(0, 1)
        of_xz = torch.empty_like(xz)
        gradient = grads[0].reshape(rows * length, -1).t()
        # read by the kernel, and alive until the layer is done, as all that `backward` names
        _of_out = (out_weight.t() @ gradient).reshape(inner, rows, length).transpose(0, 1)
        gated = torch.empty_like(out)
        of_u, of_delta, of_a, of_b, of_c, of_d, of_bias = _scan_gradients(convolved, delta, (a, b, c, d, bias))
        of_out_weight = gradient @ gated.transpose(1, 2).reshape(rows * length, inner)
        of_out_bias = None if out_bias is None else gradient.sum(1)
        of_projected = torch.empty_like(projected)
        for part, start in ((of_b, rank), (of_c, projected.shape[1] - size)):
            of_projected[:, start : start + size] = part.transpose(2, 3).reshape(rows * length, size)
        flat = of_delta.transpose(0, 1).reshape(inner, rows * length)
        of_dt_weight = flat @ projected[:, :rank]
        of_projected[:, :rank] = flat.t() @ dt_weight
        of_x_weight = of_projected.t() @ convolved.transpose(1, 2).reshape(rows * length, inner)
        back = of_u.transpose(0, 1).reshape(inner, rows * length)
        torch.addmm(back, x_weight.t(), of_projected.t(), out=back)
        of_convolution = _through_float32(conv_weight, conv_bias)
        weights = (*of_convolution, of_x_weight, of_dt_weight, of_out_weight, of_out_bias)
        return (of_xz, *weights, of_a, of_d, of_bias, None)


def _through_float32(*weights: torch.Tensor | None) -> _Gradients:
    """Allocate gradients that a kernel sums in float32, and casts when all are there."""
    sums = [None if weight is None else torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    return tuple(
        None if total is None or weight is None else total.to(weight.dtype)
        for total, weight in zip(sums, weights, strict=True)
    )


def _autocast(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else weight


def _time_steps(
    convolved: torch.Tensor, x_weight: torch.Tensor, dt_weight: torch.Tensor, norm: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, inner, length = convolved.shape
    projected = functional.linear(convolved.transpose(1, 2).reshape(rows * length, inner), x_weight)
    steps = projected[:, : dt_weight.shape[1]]
    steps = steps.clone() if norm else steps
    return projected, (dt_weight @ steps.t()).reshape(inner, rows, length).transpose(0, 1)


def _by_state(part: torch.Tensor, x: torch.Tensor, norm: bool) -> torch.Tensor:
    """Return a part of the projection as (rows, 1, states, tokens), contiguous."""
    part = part.clone() if norm else part
    return part.reshape(x.shape[0], x.shape[2], -1).transpose(1, 2).unsqueeze(1).contiguous()


# torch does not type `apply`
_apply_scan: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _SelectiveScan.apply
_apply_convolution: Callable[..., torch.Tensor] = _Convolution.apply
_apply_inner: Callable[..., torch.Tensor] = _MambaInner.apply


def _inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    a: torch.Tensor,
    *rest: object,
    delta_bias: torch.Tensor,
    **options: object,
) -> torch.Tensor:
    norms = tuple(options.get(f"{name}_rms_weight") is not None for name in ("b", "c", "dt"))
    d = next(
        tensor for tensor in rest if isinstance(tensor, torch.Tensor)
    )  # B and C are None: they depend on the input
    weights = (conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias)
    return _apply_inner(xz, *weights, a, d, delta_bias, norms)


def _scan_fn(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    D: torch.Tensor | None = None,  # noqa: N803 - the kernel's own name
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    return_last_state: bool = False,
    **_: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    out, state = _apply_scan(hidden_states, dt, a, b, c, D, z, delta_bias)
    return (out, state) if return_last_state else out


def _convolution_fn(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: object, **__: object
) -> torch.Tensor:
    return _apply_convolution(hidden_states, weight, bias)


def _one_output(*tensors: torch.Tensor, **_: object) -> torch.Tensor:
    """One token: the state is updated in place."""
    return torch.empty_like(tensors[0])


def _one_output_of_state(_: torch.Tensor, hidden_states: torch.Tensor, *__: object, **___: object) -> torch.Tensor:
    return torch.empty_like(hidden_states)


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "mamba_inner_fn": _inner_fn,
    "mamba_selective_scan": _scan_fn,
    "mamba_selective_state_update": _one_output_of_state,
    "causal_conv1d_fn": _convolution_fn,
    "causal_conv1d_update": _one_output,
}
