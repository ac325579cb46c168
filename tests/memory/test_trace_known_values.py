"""trace_step with forwards that look at values: copies to the host, lists, arrays, texts, routers written by hand."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from allocator_truth import above_start, training
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from safe_loading import TraceError, Workload
from safe_loading._memory.trace.trace_step import trace_step

PROMPT, TRAIN = Workload.generate(2, 6), Workload.train(2, 6, optimizer="none")
ROWS, COLUMNS, WIDTH, EXPERTS = 2, 6, 4, 8


class Router(nn.Module):
    """Gives the scores of experts to a function, and what that gives to the loss."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.look = look

    def forward(self, input_ids: torch.Tensor) -> Any:
        scores = self.gate(self.embed(input_ids))
        self.look(self, input_ids, scores)
        return scores


class Outer(nn.Module):
    """The same, deeper."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.router = Router(look)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.router(input_ids)


def seen(look: Any, workload: Workload = PROMPT) -> tuple[Any, Any]:
    """What `look` gives in a trace, and the trace."""
    heard: list[Any] = []
    trace = trace_step(Outer(lambda *given: heard.append(look(*given))), workload)
    return heard[0], trace


@pytest.mark.parametrize("workload", [PROMPT, TRAIN])
@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.device("cpu"), non_blocking=True),
        lambda x: torch.empty_like(x, device="cpu").copy_(x),
    ],
)
def test_a_copy_to_the_host_counts_there(copy: Any, workload: Workload) -> None:
    kept: list[Any] = []
    model = Outer(lambda _, __, scores: kept.append(copy(scores.detach())))
    plain = trace_step(Outer(lambda *_: None), workload)
    trace = trace_step(model, workload)
    assert kept[0].device == torch.device("cpu")
    assert trace.devices["cpu"].peak_bytes == ROWS * COLUMNS * EXPERTS * 4
    assert trace.devices[0] == plain.devices[0]


def test_what_is_known_is_known_in_lists_parts_and_arrays() -> None:
    def look(_: Any, ids: torch.Tensor, __: Any) -> Any:
        steps = torch.arange(6, device=ids.device)
        first, second = steps.split(3)
        return ids.tolist(), second.tolist(), first.unbind()[2].item(), steps.cpu().numpy(), np.asarray(steps.cpu())

    found, trace = seen(look)
    assert found[:3] == ([[1] * COLUMNS] * ROWS, [3, 4, 5], 2)
    assert [array.tolist() for array in found[3:]] == [[0, 1, 2, 3, 4, 5]] * 2
    assert trace.assumptions == ()


def test_choices_among_known_numbers_are_not_guessed() -> None:
    def look(_: Any, ids: torch.Tensor, __: Any) -> Any:
        numbers = torch.tensor([[3, 9, 4], [8, 2, 1]], device=ids.device)
        return numbers.argmax(-1).tolist(), numbers.sort().indices.tolist(), numbers.topk(2).values.tolist()

    found, trace = seen(look)
    assert found == ([1, 0], [[0, 2, 1], [2, 1, 0]], [[9, 4], [8, 2]])
    assert trace.assumptions == ()


def test_what_is_written_through_out_is_known_or_forgotten() -> None:
    def look(_: Any, ids: torch.Tensor, scores: torch.Tensor) -> Any:
        known, unknown = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
        torch.gt(ids, 0, out=known)
        torch.argmax(scores, -1, out=unknown)
        return int(known.sum()), int(unknown.sum())

    found, trace = seen(look)
    assert found == (ROWS * COLUMNS, 1)  # the guess
    assert [said.split(" reads")[0] for said in trace.assumptions] == ["router"]


@pytest.mark.parametrize(
    "route",
    [
        lambda scores: scores.argmax(-1).flatten(),
        lambda scores: scores.max(-1).indices.flatten(),
        lambda scores: scores.topk(2).indices.flatten(),
        lambda scores: scores.flatten(0, 1).T.argsort(dim=0, stable=True)[0],
    ],
)
def test_a_router_written_by_hand_spreads_the_tokens_evenly(route: Any) -> None:
    def look(_: Any, __: Any, scores: torch.Tensor) -> Any:
        chosen = route(scores)
        counts = chosen.new_zeros((len(chosen), EXPERTS)).scatter_(1, chosen[:, None], 1).sum(0).cpu().numpy()
        parts = chosen[chosen.argsort()].split(chosen.bincount(minlength=EXPERTS).cpu().tolist())
        return len(chosen), counts.tolist(), [len(part) for part in parts]

    (count, *found), trace = seen(look)
    assert found[0] == found[1]
    assert sum(found[0]) == count
    assert trace.assumptions == ("indices chosen by unknown scores (such as experts) are spread evenly",)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda x: f"{x.mean():.2f}", "1.00"),
        (lambda x: x.mean(-1).tolist(), [[1.0] * COLUMNS] * ROWS),
        (lambda x: x.detach().cpu().numpy().tolist(), [[[1.0] * EXPERTS] * COLUMNS] * ROWS),
        (lambda x: np.mean(np.asarray(x.detach().cpu())), 1.0),
        (lambda x: torch.equal(x, x), True),
        (lambda x: torch.allclose(x, x + 1), True),
        (lambda x: bool((x > 3).any()), True),
    ],
)
def test_unknown_numbers_are_ones_and_noted_as_assumptions(ask: Any, answer: Any) -> None:
    found, trace = seen(lambda _, __, scores: ask(scores))
    assert found == answer
    assert [said.split(" reads")[0] for said in trace.assumptions] == ["router"]


def test_an_assumption_names_the_outermost_module() -> None:
    trace = trace_step(Router(lambda _, __, scores: scores.sum().item()), PROMPT)
    assert trace.assumptions == ("the model reads a number whose value is unknown; 1.0 is assumed",)


def shape_from_values(scores: torch.Tensor) -> Any:
    return scores[scores > 0]  # the line


def array_of_the_device(scores: torch.Tensor) -> Any:
    return scores.detach().numpy()  # the line


def host_and_device(scores: torch.Tensor) -> Any:
    return scores + scores.cpu()  # the line


def plain_fault(scores: torch.Tensor) -> Any:
    return scores.no_such_thing  # the line


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (shape_from_values, "depends on values.*inputs=.*FakeTensor"),
        (array_of_the_device, r"numpy\(\) of a tensor on device 0.*\.cpu\(\)"),
        (host_and_device, r"device 0 and the host"),
        (plain_fault, "AttributeError.*no_such_thing"),
    ],
)
@pytest.mark.parametrize("workload", [PROMPT, TRAIN])
def test_a_refusal_names_the_module_the_line_and_the_way_out(fault: Any, words: str, workload: Workload) -> None:
    line = inspect.getsourcelines(fault)[1] + 1
    with pytest.raises(TraceError, match=words) as caught:
        trace_step(Outer(lambda _, __, scores: fault(scores)), workload)
    assert " in router " in str(caught.value)
    assert f"test_trace_known_values.py:{line}" in str(caught.value)


class Chosen(nn.Module):
    """Takes what known masks let through, as losses over some tokens do."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.embed = nn.Embedding(8, 64)
        self.out = nn.Linear(64, 64)
        self.choose = choose

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any = None) -> ModelOutput:
        mask = attention_mask.bool() & (torch.arange(input_ids.shape[1], device=input_ids.device) % 2 == 0)
        out = self.choose(self.out(self.embed(input_ids)), mask)
        return ModelOutput(loss=out.square().mean(), logits=out)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x, mask: x[mask],
        lambda x, mask: x[mask, :5] * x[mask][:, :5],
        lambda x, mask: x[:, mask[0]],
        lambda x, mask: x[mask[0].nonzero().squeeze(-1) % 2].flatten(),
    ],
)
def test_what_a_known_mask_lets_through_is_counted_as_the_allocator_counts_it(choose: Any) -> None:
    model = Chosen(choose)
    trace = trace_step(model, Workload.train(2, 128, optimizer="none"))
    assert trace.assumptions == ()
    mine, real = above_start(trace, "forward", "backward"), training(model, 2, 128, checkpointing=False)["train"]
    assert abs(mine - real) <= 0.01 * real, (mine, real)


def test_masked_select_takes_the_indices_that_cuda_takes() -> None:
    found, trace = seen(lambda _, ids, scores: scores.masked_select((torch.arange(EXPERTS) < 3).to(ids.device)).numel())
    assert found == ROWS * COLUMNS * 3
    assert [block.bytes for block in trace.allocations if block.op == "aten.nonzero.default"] == [found * 3 * 8]


def test_a_mask_of_unknown_numbers_is_refused() -> None:
    for choose in (lambda x: x[x > 0], lambda x: x.masked_select(x > 0), lambda x: (x > 0).nonzero()):
        with pytest.raises(TraceError, match=r"router .*aten\.nonzero.* depends on values"):
            seen(lambda _, __, scores, choose=choose: choose(scores))


def test_unknown_numbers_are_assumed_finite() -> None:
    def look(_: Any, __: Any, scores: torch.Tensor) -> Any:
        large = scores.new_empty(2048, 1025)  # more than is computed
        found = scores.isfinite().all(), (scores == scores).all(), *(x.isnan().any() for x in (scores, large))
        return [bool(answer) for answer in (*found, scores.isinf().any(), large.isinf().any())]

    found, trace = seen(look)
    assert found == [True, True, False, False, False, False]
    assert trace.assumptions == ("numbers whose values are unknown are finite",)


class _Wide(nn.Module):
    """Counts the hidden tokens of rows in a mask for every pair of tokens, of which it may write to one part first."""

    def __init__(self, *, write: bool = False, read_others: bool = False, cast: bool = False) -> None:
        super().__init__()
        self.scale, self.write, self.read_others = nn.Parameter(torch.ones(1)), write, read_others
        self.cast = cast

    def forward(self, mask: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(mask.shape[1], device=mask.device)
        seen = (mask[:, None, None, :] > 0) & (tokens[None, None, :, None] >= 0)
        wide = seen.float() - 1 if self.cast else torch.where(seen, 0.0, -1.0)
        row = wide[:, 0, 0, :]
        if self.write:
            row.masked_fill_(tokens == 0, -1.0)
        hidden = (wide[:, 0, 1, :] if self.read_others else row).lt(0).nonzero()
        return hidden.float() * self.scale


def counted(module: nn.Module) -> int:
    """Return how many tokens are hidden, by the size of what the module returns."""
    mask = torch.ones(2, 4096, dtype=torch.long)
    mask[1, -7:] = 0
    trace = trace_step(module, Workload.train(2, 4096, labels=False, optimizer="none"), inputs={"mask": mask})
    (made,) = {made.bytes for made in trace.allocations if "aten.mul" in made.op}
    return made // 8


def test_a_mask_for_every_pair_of_tokens_is_known_where_it_repeats_that_of_the_tokens() -> None:
    assert counted(_Wide()) == counted(_Wide(read_others=True)) == 7
    assert counted(_Wide(cast=True)) == 7  # as LED makes it


def test_what_is_written_to_one_part_of_it_is_not_taken_for_the_others() -> None:
    assert counted(_Wide(write=True)) == 9
    with pytest.raises(TraceError, match="depends on values"):
        counted(_Wide(write=True, read_others=True))


@pytest.mark.parametrize("name", ["LongformerForSequenceClassification", "LongformerForTokenClassification"])
def test_windows_of_attention_beside_global_tokens(name: str) -> None:
    """A Longformer pads its tokens to whole windows, and asks its mask for the tokens that attend to all."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 251}
    sizes |= {"intermediate_size": 96, "max_position_embeddings": 1100, "attention_window": [512, 512]}
    model: Any = getattr(transformers, name)(transformers.LongformerConfig(**sizes, num_labels=6))
    trace = trace_step(model, Workload.train(2, 600, optimizer="none"))
    real = training(model, 2, 600, checkpointing=False)["train"]
    assert above_start(trace, "forward", "backward") == pytest.approx(real, rel=1e-2)
