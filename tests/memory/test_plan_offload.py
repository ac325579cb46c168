"""What is offloaded against everything that could be."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import infer_auto_device_map
from test_plan_search import apart, instance
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from safe_loading import DeviceMapInfeasible, Workload, meta_model, plan_device_map
from safe_loading._memory.plan import offload as offloads
from safe_loading._memory.plan import offload_search
from safe_loading._memory.plan.layer_groups import Puzzle
from safe_loading._memory.plan.map_keys import device_of
from safe_loading._memory.plan.module_tree import cut_model
from safe_loading._memory.plan.offload import Away, OffloadPlan, Piece, Split, offload
from safe_loading._memory.plan.offloaded_units import split_paths

GONE = -1


class Case:
    """Groups that do not fit on the devices, and what each of them is when it is offloaded."""

    def __init__(self, seed: int, most: int = 5) -> None:
        draw = random.Random(f"offload {seed}")
        self.blocks, self.together, self.limits = instance(seed, most)
        self.limits = self.limits[:3]
        self.away = []
        for number, block in enumerate(self.blocks):
            kept = draw.randint(0, block.resident) // 4
            weights = block.resident - kept
            times = draw.choice([1, 1, 1, 0, 2])
            pieces, left = [], weights
            for part in range(draw.choice([0, 0, 2, 3])):
                size = draw.randint(0, left)
                expert = draw.random() < 0.4
                moved = size // 2 if expert else size * times
                pieces.append(Piece(f"{number}.{part}", size, draw.randint(size // 2, size), moved, expert))
                left -= size
            moved = left * times + sum(piece.moved for piece in pieces)
            self.away.append(Away(weights, kept, block.transient + draw.randint(0, 3), moved, tuple(pieces)))
        self.hosts = draw.choice([[100], [draw.randint(0, 20), 100], [draw.randint(0, 25)]])

    @property
    def puzzle(self) -> Puzzle:
        return Puzzle(self.blocks, self.together, self.limits)

    def best(self) -> tuple[int, int] | None:
        """Return the fewest bytes that can be moved, with the fewest crossings, of all placements there are."""
        found = []
        for homes, parts in self.placements():
            used = [home for home in homes if home != GONE]
            for main in {min(used)} if used else ():
                if self.keeps(homes, parts, main):
                    runs = [main if home == GONE else home for home in homes]
                    crossings = sum(a != b for a, b in itertools.pairwise(runs))
                    found.append((self.moved(homes, parts), crossings))
        return min(found, default=None)

    def placements(self) -> Iterator[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]:
        """Yield every way of placing whole groups, with every way in which those on the main device may leave."""
        first, free = apart(self.together)
        count = len(self.blocks)
        for homes in itertools.product([GONE, *range(len(self.limits))], repeat=count):
            if any(homes[block] != homes[root] for block, root in first.items()):
                continue
            stays = [home for block, home in enumerate(homes) if home != GONE and block not in free]
            if len([home for home, _ in itertools.groupby(stays)]) > len(set(stays)) or set(homes) == {GONE}:
                continue
            main = min(home for home in homes if home != GONE)
            ways: dict[int, list[tuple[tuple[int, int], ...]]] = {}
            for root in {first.get(block, block) for block in range(count)} - free:
                members = [block for block in range(count) if first.get(block, block) == root]
                pieces = [(block, number) for block in members for number in range(len(self.away[block].pieces))]
                # a block in parts takes its input from where it is
                if homes[root] == main and pieces and (root == 0 or homes[root - 1] in (main, GONE)):
                    ways[root] = [
                        subset for size in range(len(pieces) + 1) for subset in itertools.combinations(pieces, size)
                    ]
            for chosen in itertools.product(*ways.values()):
                if sum(map(self.is_split, chosen)) <= 1:
                    parts: dict[int, tuple[int, ...]] = {}
                    for block, number in itertools.chain(*chosen):
                        parts[block] = (*parts.get(block, ()), number)
                    yield homes, parts

    def is_split(self, subset: Sequence[tuple[int, int]]) -> bool:
        """Return whether a block leaves in part otherwise than with all of its experts."""
        if not subset:
            return False
        first, _ = apart(self.together)
        root = first.get(subset[0][0], subset[0][0])
        own = [block for block in range(len(self.blocks)) if first.get(block, block) == root]
        experts = [(b, n) for b in own for n, piece in enumerate(self.away[b].pieces) if piece.is_expert]
        return list(subset) != experts

    def moved(self, homes: Sequence[int], parts: dict[int, tuple[int, ...]]) -> int:
        whole = sum(away.moved for away, home in zip(self.away, homes, strict=True) if home == GONE)
        return whole + sum(self.away[block].pieces[n].moved for block, own in parts.items() for n in own)

    def keeps(self, homes: Sequence[int], parts: dict[int, tuple[int, ...]], main: int) -> bool:
        """Return whether every limit is kept."""
        for device, limit in enumerate(self.limits):
            resident, transient = 0, [0]
            for block, home in enumerate(homes):
                gone = [self.away[block].pieces[n] for n in parts.get(block, ())]
                if home == device:
                    resident += self.blocks[block].resident - sum(piece.bytes for piece in gone)
                    staging = max((piece.staging for piece in gone), default=0)
                    transient.append(self.blocks[block].transient + staging)
                elif home == GONE and device == main:
                    resident += self.away[block].resident
                    transient.append(self.away[block].transient)
            if resident + max(transient) > limit or (device in homes and not limit):
                return False
        first, _ = apart(self.together)
        shared: dict[int, int] = {}  # what shares a device shares a host
        for block, home in enumerate(homes):
            if home == GONE:
                root = first.get(block, block)
                shared[root] = shared.get(root, 0) + self.away[block].bytes
        sizes = [*shared.values()]
        sizes += [self.away[block].pieces[n].bytes for block, own in parts.items() for n in own]
        if len(self.hosts) == 1 or sum(sizes) <= self.hosts[0]:
            return sum(sizes) <= self.hosts[0]
        return any(
            sum(one) <= self.hosts[0] and sum(sizes) - sum(one) <= self.hosts[1]
            for count in range(len(sizes) + 1)
            for one in itertools.combinations(sizes, count)
        )

    def holds(self, split: Split) -> bool:
        """Return whether a placement is one of all, and moves and stores what it says."""
        count = len(self.limits)
        homes = tuple(GONE if device >= count else device for device in split.device_of)
        parts: dict[int, tuple[int, ...]] = {}
        for path in split.pieces:
            block, number = map(int, path.split("."))
            parts[block] = tuple(sorted((*parts.get(block, ()), number)))
        assert (homes, parts) in list(self.placements())
        stored = [away.bytes for away, home in zip(self.away, homes, strict=True) if home == GONE]
        stored += [self.away[block].pieces[n].bytes for block, own in parts.items() for n in own]
        assert (split.moved, split.bytes) == (self.moved(homes, parts), sum(stored))
        for host, room in enumerate(self.hosts):
            whole = [a.bytes for a, device in zip(self.away, split.device_of, strict=True) if device == count + host]
            single = [path for path, number in split.pieces.items() if number == count + host]
            pieces = [self.away[int(path.split(".")[0])].pieces[int(path.split(".")[1])].bytes for path in single]
            assert sum(whole) + sum(pieces) <= room
        return self.keeps(homes, parts, min(home for home in homes if home != GONE))


def check(seeds: range) -> tuple[int, int, int]:
    """Return how many of these cases were offloaded, with several runs, and with single modules."""
    offloaded = several = single = 0
    for seed in seeds:
        case = Case(seed)
        if case.puzzle.fits():
            continue
        expected = case.best()
        for objective in ("balance", "fill"):
            split = offload(case.puzzle, case.away, case.hosts, objective)
            assert (split and (split.moved, split.crossings)) == expected, seed
            if split is not None:
                assert not split.bounds
                assert case.holds(split), seed
        if split is not None:
            offloaded += 1
            runs = [key for key, _ in itertools.groupby(device >= len(case.limits) for device in split.device_of)]
            several += sum(runs) > 1
            single += bool(split.pieces)
    return offloaded, several, single


BOUNDS = {
    offloads.STATES: ("MOST_STATES", "_WIDEST"),
    offloads.PARTS: ("_MOST_PARTS",),
    offloads.PINNINGS: ("MOST_PINNINGS",),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_an_offload_that_is_not_the_best_says_where_the_search_ended(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a bound so narrow that many answers are wrong: none of those is silent."""
    for name in BOUNDS[bound]:
        monkeypatch.setattr(offload_search if name == "_WIDEST" else offloads, name, 1)
    worse = 0
    for seed in range(300):
        case = Case(seed)
        if case.puzzle.fits():
            continue
        plan = OffloadPlan(case.puzzle, case.away, case.hosts, "fill")
        split = plan.solve()
        if (split and (split.moved, split.crossings)) != case.best():
            assert bound in plan.bounds, seed
            worse += 1
    assert worse > 1


def test_hosts_that_take_what_leaves_in_few_ways_only_are_said_to_be_filled_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds: set[str] = set()
    assert offloads.onto_hosts([3, 5, 4], [7, 5], bounds) == [0, 1, 0]
    assert not bounds
    monkeypatch.setattr(offloads, "_MOST_SUMS", 2)
    assert offloads.onto_hosts([3, 5, 4], [7, 5], bounds) is None
    assert bounds == {offloads.SUMS}


@pytest.mark.parametrize("hundred", range(2))
def test_what_is_offloaded_moves_the_fewest_bytes_of_all(hundred: int) -> None:
    offloaded, several, single = check(range(100 * hundred, 100 * hundred + 100))
    assert offloaded > 20
    assert several > 2
    assert single > 2


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2, 40))
def test_what_is_offloaded_moves_the_fewest_bytes_of_many_more(hundred: int) -> None:
    check(range(100 * hundred, 100 * hundred + 100))


def llama(**sizes: int) -> LlamaConfig:
    shape: Any = {"num_hidden_layers": 6, "num_attention_heads": 8, "dtype": "bfloat16", **sizes}
    return LlamaConfig(**shape)


SMALL = llama(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
WIDE = llama(vocab_size=100_000, hidden_size=512, intermediate_size=2048)


@pytest.mark.parametrize("workload", [Workload.weights_only(), Workload.generate(1, 64)], ids=lambda w: w.kind)
def test_both_ends_of_a_model_are_offloaded(workload: Workload) -> None:
    plan = plan_device_map(WIDE, {0: "160MB", "cpu": "1GB"}, offload="cpu", workload=workload)
    assert plan.verified
    assert {path for path, device in plan.items() if device == "cpu"} == {"model.embed_tokens", "lm_head"}
    assert plan.moved_bytes == plan.offloaded_bytes == 2 * 100_000 * 512 * 2


def test_a_card_that_is_too_small_to_run_what_is_offloaded_stays_empty() -> None:
    plan = plan_device_map(WIDE, {0: "1MB", 1: "160MB", "cpu": "1GB"}, offload="cpu")
    assert plan.verified
    assert set(plan.values()) == {1, "cpu"}


def test_accelerates_example_of_a_fallback_has_a_plan() -> None:
    # test_infer_auto_device_map_with_fallback_allocation of accelerate: the first module is too large for the card
    linears = [nn.Linear(10, 4), nn.Linear(4, 4), nn.Linear(4, 8)]
    inner = nn.Sequential(OrderedDict((f"linear{number + 1}", module) for number, module in enumerate(linears)))
    model = nn.Sequential(OrderedDict([("module", inner)]))
    plan = plan_device_map(model, {0: 256}, offload="cpu", inputs={"input": torch.empty(1, 10)})
    assert plan == {"module.linear1": "cpu", "module.linear2": 0, "module.linear3": "cpu"}
    # what linear1 takes while it runs leaves no byte
    assert plan.devices[0].used == 256
    with pytest.raises(DeviceMapInfeasible, match=r"Every choice of blocks, embeddings and heads .* 176 B at once"):
        plan_device_map(model, {0: 255}, offload="cpu")


@pytest.mark.parametrize("limits", [{0: 0, "cpu": "1GB"}, {0: 0, 1: 0, "cpu": "1GB"}, {0: 0}, {0: 0, "disk": None}])
@pytest.mark.parametrize("workload", [None, Workload.generate(1, 16)])
def test_cards_without_room_leave_everything_to_the_host(limits: Any, workload: Workload | None) -> None:
    """accelerate does the same, and the host then runs the model."""
    offloaded: Any = "disk" if "disk" in limits else "cpu"
    plan = plan_device_map(SMALL, limits, offload=offloaded, workload=workload)
    assert dict(plan) == {"": "cpu"}
    assert plan.verified
    assert plan.moved_bytes == 0
    model = meta_model(SMALL)
    theirs = infer_auto_device_map(model, {0: 0, "cpu": 10**9}, no_split_module_classes=model._no_split_modules)
    assert set(theirs.values()) == {"cpu"}
    with pytest.raises(DeviceMapInfeasible):
        plan_device_map(SMALL, {0: 0, "cpu": "1GB"}, offload="never")


def test_a_disk_without_a_limit_is_said_to_have_none() -> None:
    with pytest.raises(DeviceMapInfeasible, match="Offloading to cpu 1 B, disk without a limit does not make it fit"):
        plan_device_map(SMALL, {0: 100, "cpu": 1}, offload="disk")


def test_a_refusal_says_what_the_host_would_need() -> None:
    with pytest.raises(
        DeviceMapInfeasible, match=r"cpu 95.4 MiB does not make it fit. Every choice .* 195.3 MiB there"
    ):
        plan_device_map(WIDE, {0: "160MB", "cpu": "100MB"}, offload="cpu")
    assert plan_device_map(WIDE, {0: "160MB", "cpu": "195.4MiB"}, offload="cpu").ok


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.down(self.up(values)))


class MixtureLayer(nn.Module):
    """Experts that are modules of their own, as in models with code in their repository."""

    def __init__(self, width: int, experts: int, *, reads_weights: bool) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList([Expert(width) for _ in range(experts)])
        self.reads_weights = reads_weights

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.attention(values)
        for expert in cast("Sequence[Expert]", self.experts):
            if self.reads_weights:
                values = values + functional.linear(functional.linear(values, expert.up.weight), expert.down.weight)
            else:
                values = values + expert(values)
        return values


class Mixture(nn.Module):
    def __init__(self, *, reads_weights: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_experts_per_tok=2)
        self.layers = nn.ModuleList([MixtureLayer(8, 16, reads_weights=reads_weights) for _ in range(3)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def test_experts_leave_first_since_few_of_them_are_called_for() -> None:
    model, expert = Mixture(), 2 * 8 * 32 * 4
    whole = sum(parameter.nbytes for parameter in model.parameters())
    # room for all but some experts, and one matrix that passes through
    for gone in (1, 7, 16, 20):
        limits = {0: whole - gone * expert + expert // 2, "cpu": 10**6}
        plan = plan_device_map(model, limits, offload="cpu", inputs={"values": torch.empty(1, 8)})
        assert plan.verified
        assert plan.offloaded_bytes == gone * expert
        assert all(".experts" in path for path, device in plan.items() if device == "cpu")
        assert plan.moved_bytes == gone * expert * 2 // 16
        assert plan.devices[0].used == limits[0]


def test_experts_whose_weights_the_layer_reads_itself_cannot_leave() -> None:
    model = Mixture(reads_weights=True)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(DeviceMapInfeasible, match="Kept on one device, because an operation there met tensors of two"):
        plan_device_map(model, {0: whole * 9 // 10}, offload="cpu", inputs={"values": torch.empty(1, 8)})


class Pooled(nn.Module):
    """Layers, and attention of torch at the end, which reads the weights of a module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MixtureLayer(8, 2, reads_weights=False) for _ in range(4)])
        self.pool = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return cast("torch.Tensor", self.pool(values, values, values)[0])


@pytest.mark.parametrize("room", [0.3, 0.6, 0.95])
def test_a_module_that_reads_the_weights_of_one_inside_it_stays_and_others_leave(room: float) -> None:
    model = Pooled()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    limits = {0: int(whole * room), "cpu": 10**6}
    plan = plan_device_map(model, limits, offload="cpu", inputs={"values": torch.empty(1, 3, 8)})
    assert plan.verified, plan.reason
    assert "cpu" in plan.values()
    assert {device for path, device in plan.items() if path.startswith("pool")} == {0}


class ReadsInside(nn.Module):
    """A layer that multiplies with the weight of its linear layer, and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 100)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + values @ self.linear.weight.t() @ self.linear.weight


@pytest.mark.parametrize("missing", [10_000, 50_000])
def test_layers_of_one_class_that_read_weights_inside_them_all_stay(missing: int) -> None:
    """One of them that cannot leave says it for all of them, however many there are."""
    layers = [ReadsInside() for _ in range(60)]
    linears = [linear for _ in range(6) for linear in (nn.Linear(8, 200), nn.Linear(200, 8))]
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*layers), linears=nn.Sequential(*linears)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    limits = {0: whole - missing, "cpu": 10**6}
    plan = plan_device_map(model, limits, offload="cpu", inputs={"input": torch.empty(1, 8)})
    assert plan.verified, plan.reason
    assert {path.partition(".")[0] for path, device in plan.items() if device == "cpu"} == {"linears"}
    (finding,) = plan.findings
    assert finding.code == "merged-blocks"
    assert finding.message.startswith("is not offloaded, nor are 59 more of its class: ")
    with pytest.raises(DeviceMapInfeasible, match=r"met tensors of two: layers\.\d+ and 59 more of its class\."):
        plan_device_map(model, {0: "100KB"}, offload="cpu", inputs={"input": torch.empty(1, 8)})


def test_a_weight_that_is_computed_from_others_leaves_with_them() -> None:
    """As of the convolution of Wav2Vec2's positions, whose weight torch computes from two tensors inside it."""
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))
    model = nn.Sequential(nn.Linear(16, 16), conv, nn.Linear(16, 16))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for room in (70, 80, 90):
        limits = {0: whole * room // 100, "cpu": 10**6}
        plan = plan_device_map(model, limits, offload="cpu", inputs={"input": torch.empty(8, 16)})
        assert plan.verified, plan.reason
        assert not any(path.startswith("1.") for path in plan)


def test_a_model_that_is_one_block_leaves_in_part_with_a_place_for_the_rest() -> None:
    model = Mixture()
    tree = cut_model(model, keep_whole=[""])
    split = Split((0,), 0, 0, 0, {"layers.1.experts": 1})
    places = split_paths(tree, split, [0, "cpu"])
    named = [name for name, _ in model.named_parameters()]
    assert {name: device_of(name, places) for name in named} == {
        name: "cpu" if name.startswith("layers.1.experts.") else 0 for name in named
    }


def test_saved_buffers_leave_with_the_weights_if_asked() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64)))
    model[1][1].register_buffer("scratch", torch.zeros(5), persistent=False)
    inputs = {"input": torch.empty(4, 8)}
    whole = plan_device_map(model, {0: 10**6}).devices[0]
    limits = {0: whole.used - 1, "cpu": 10**6}
    rows = {}
    for with_buffers in (False, True):
        plan = plan_device_map(
            model, limits, offload="cpu", no_split_modules=["Sequential"], inputs=inputs, offload_buffers=with_buffers
        )
        assert plan.verified
        assert plan.facts.offload_buffers is with_buffers
        rows[with_buffers] = {use.device: use for use in plan.devices}
        assert plan["1"] == "cpu"
        assert plan.verify()
    saved = 2 * 64 * 4 + 8  # a mean, a variance and a counter
    assert rows[False]["cpu"].buffers == 0
    assert rows[True]["cpu"].buffers == saved
    assert rows[False][0].buffers - rows[True][0].buffers == saved
