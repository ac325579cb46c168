"""Every fault of a folder against every verb that reads one: refused at once, by name, and nothing is changed.

A seeded sample runs by default, in which every fault meets a verb and every verb a fault; all pairs with ``-m ''``.

A new fault goes into `faults.folders`, into the group of those that concern the same verbs. A new verb goes into
`OF_A_BASE` or `OF_AN_ADAPTER`, and into the tuples of what it reads. A pair that is rightly no refusal goes into
`ACCEPTED`, with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import folders
from faults.folders import Fault
from models import save_adapter, save_llama
from peft import PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

import safe_loading as s
from safe_loading import Workload

SECONDS = 60  # a guard against a hang, far above what the slowest machine needs
SAMPLE = 60
LIMIT = {0: "1GiB"}
GENERATE, TRAIN = Workload.generate(1, 8), Workload.train(1, 8)


class Good:
    """A sound base and adapter, and models made of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = save_llama(root / "base")
        self.adapter = save_adapter(root / "adapter", self.base)
        self.plain: Any = AutoModelForCausalLM.from_pretrained(self.base)
        self.peft = s.load_peft_on_rank(self.base, self.adapter)
        self.out = root / "out"

    def peft_on_meta(self) -> Any:
        return get_peft_model(s.meta_model(self.base), PeftConfig.from_pretrained(self.adapter), low_cpu_mem_usage=True)


def check(folder: Path) -> None:
    report = s.check_checkpoint(folder)
    if not report.ok:
        raise s.CheckpointError("\n".join(map(str, report.findings)))


Verb = Callable[[Good, Path], tuple[Any, Callable[[], Any]]]
# From the good ones and the path of a bad folder: the caller's model, which a refusal must not change (None if there is
# none), and the call.
OF_A_BASE: dict[str, Verb] = {
    "load_peft_on_rank": lambda g, f: (None, lambda: s.load_peft_on_rank(f, g.adapter)),
    "merge_lora_checkpoint": lambda g, f: (None, lambda: s.merge_lora_checkpoint(f, g.adapter, g.out)),
    "check_checkpoint": lambda g, f: (None, lambda: check(f)),
    "wrap_fsdp_meta_safe": lambda g, f: (m := s.meta_model(f), lambda: s.wrap_fsdp_meta_safe(m, f)),
    "plan_device_map": lambda g, f: (None, lambda: s.plan_device_map(f, LIMIT)),
    "meta_model": lambda g, f: (None, lambda: s.meta_model(f)),
    "predict_memory": lambda g, f: (None, lambda: s.predict_memory(f, GENERATE)),
    "audit_model": lambda g, f: (None, lambda: s.audit_model(f, TRAIN)),
    "largest_micro_batch": lambda g, f: (None, lambda: s.largest_micro_batch(f, TRAIN, 2**30)),
    "fewest_ranks": lambda g, f: (None, lambda: s.fewest_ranks(f, TRAIN, 2**30, s.Spread.fsdp2(1))),
}
OF_AN_ADAPTER: dict[str, Verb] = {
    "load_peft_on_rank": lambda g, f: (g.plain, lambda: s.load_peft_on_rank(g.plain, f)),
    "load_adapter_on_rank": lambda g, f: (g.peft, lambda: s.load_adapter_on_rank(g.peft, f, "two")),
    "hot swap": lambda g, f: (g.peft, lambda: s.load_adapter_on_rank(g.peft, f, "default", hotswap=True)),
    "merge_lora_checkpoint": lambda g, f: (None, lambda: s.merge_lora_checkpoint(g.base, f, g.out)),
    "check_checkpoint": lambda g, f: (None, lambda: check(f)),
    "wrap_fsdp_meta_safe": lambda g, f: (m := g.peft_on_meta(), lambda: s.wrap_fsdp_meta_safe(m, g.base, adapters=f)),
    "predict_memory": lambda g, f: (None, lambda: s.predict_memory(f, GENERATE)),
    "plan_device_map": lambda g, f: (
        None,
        lambda: s.plan_device_map(g.base, LIMIT, workload=GENERATE.replace(adapter=f)),
    ),
    "audit_model": lambda g, f: (None, lambda: s.audit_model(g.base, TRAIN.replace(adapter=f))),
}
# Which verbs read what. Verbs that need no weights read configs and headers only; whether tensors fit a model is found
# by those that load them.
NEEDS_WEIGHTS = (
    "load_peft_on_rank",
    "merge_lora_checkpoint",
    "check_checkpoint",
    "wrap_fsdp_meta_safe",
    "plan_device_map",
)
LOADS = ("load_peft_on_rank", "merge_lora_checkpoint", "wrap_fsdp_meta_safe")
NEEDS_CONFIG = tuple(verb for verb in OF_A_BASE if verb not in ("check_checkpoint", "wrap_fsdp_meta_safe"))
ATTACHES = ("load_peft_on_rank", "load_adapter_on_rank", "hot swap", "merge_lora_checkpoint", "wrap_fsdp_meta_safe")
# Pairs that are not refused, and why.
ACCEPTED = {
    # a tensor outside the layers may be a head for another task: a finding of the load, copied by the merge
    ("extra tensor", "load_peft_on_rank"),
    ("extra tensor", "merge_lora_checkpoint"),
    # the merge writes what it does not touch as it was, and FSDP trains the two weights of the files, as a load does
    ("tied by the config, not on disk", "load_peft_on_rank"),
    ("tied by the config, not on disk", "merge_lora_checkpoint"),
    ("tied by the config, not on disk", "wrap_fsdp_meta_safe"),
    # only the config names them, and a swap takes the tensors of the file
    ("adapter for modules that are not there", "hot swap"),
    ("adapter for modules that are not there", "wrap_fsdp_meta_safe"),
    # only peft knows peft's methods, and the check does not import it
    ("adapter of no method", "check_checkpoint"),
    # the memory is that of any other start
    *(
        ("adapter with a start of random numbers", verb)
        for verb in ("predict_memory", "plan_device_map", "audit_model")
    ),
    # taken for a model without a config.json
    ("adapter config missing", "predict_memory"),
}


def pairs() -> Iterator[tuple[str, str, str, Fault]]:
    groups: list[tuple[str, dict[str, Fault], Any]] = [
        ("base", folders.WEIGHTS, NEEDS_WEIGHTS),
        ("base", folders.INDEXES, NEEDS_WEIGHTS),
        ("base", folders.CONTENTS, LOADS),
        ("base", folders.CONFIGS, NEEDS_CONFIG),
        ("adapter", folders.WEIGHTS, tuple(OF_AN_ADAPTER)),
        ("adapter", folders.ADAPTERS, ATTACHES),
        ("adapter", folders.ADAPTER_CONFIGS, tuple(OF_AN_ADAPTER)),
    ]
    for kind, faults, verbs in groups:
        for name, fault in faults.items():
            yield from ((kind, name, verb, fault) for verb in verbs if (name, verb) not in ACCEPTED)


def sampled() -> list[Any]:
    every = list(pairs())
    order = random.Random(7).sample(range(len(every)), len(every))
    chosen: set[int] = set()
    seen: set[tuple[str, str]] = set()
    for number in order:
        kind, name, verb, _ = every[number]
        if (kind, name) not in seen or (kind, verb) not in seen or len(chosen) < SAMPLE:
            chosen.add(number)
        seen |= {(kind, name), (kind, verb)}
    return [
        pytest.param(*pair, id="-".join(pair[:3]), marks=[] if number in chosen else [pytest.mark.slow])
        for number, pair in enumerate(every)
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Good]:
    root = tmp_path_factory.mktemp("good")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('meeting')}/here", rank=0, world_size=1
    )
    yield Good(root)
    dist.destroy_process_group()


def state_of(model: Any) -> str:
    """A hash of every parameter and buffer, and of the names and classes of all modules."""
    if model is None:
        return ""
    digest = hashlib.sha256(repr([(name, type(module)) for name, module in model.named_modules()]).encode())
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        digest.update(f"{name} {tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        if not tensor.is_meta:
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def attempt(good: Good, folder: Path, verb: Verb, before: list[Any]) -> None:
    """Call the verb, after adding to `before` the model and what everything looks like before the call."""
    model, call = verb(good, folder)
    before.append((model, state_of(model), files_of(good.root), files_of(folder)))
    call()


def files_of(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*"))


CAPABILITIES_3, READ_ANYTHING = 0x20080522, 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of linux/capability.h


@contextmanager
def no_more_than_its_owner() -> Iterator[None]:
    """Take away root's right to read every file, so that a fault of permissions is one for root as well."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        yield
        return
    head = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)  # of this thread
    capabilities = (ctypes.c_uint32 * 6)()
    library = ctypes.CDLL(None)
    library.capget(head, capabilities)
    fewer = (ctypes.c_uint32 * 6)(*capabilities)
    fewer[0] &= ~READ_ANYTHING
    library.capset(head, fewer)
    try:
        yield
    finally:
        library.capset(head, capabilities)


def hang(*_: object) -> None:
    raise AssertionError(f"no answer after {SECONDS} seconds")


@pytest.mark.parametrize(("kind", "name", "verb", "fault"), sampled())
def test_it_is_refused_by_name_and_nothing_is_changed(
    good: Good, tmp_path: Path, kind: str, name: str, verb: str, fault: Fault
) -> None:
    folder = tmp_path / "case" / "model"
    shutil.copytree(good.base if kind == "base" else good.adapter, folder)
    fault.change(folder)
    handler = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    before: list[Any] = []
    try:
        with pytest.raises(s.SafeLoadingError) as caught, no_more_than_its_owner():
            attempt(good, folder, (OF_A_BASE if kind == "base" else OF_AN_ADAPTER)[verb], before)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    text = str(caught.value)
    assert [word for word in (str(folder), *fault.words) if word not in text] == [], text
    for model, state, good_files, files in before:  # empty where meta_model refused to make the model to wrap
        assert state_of(model) == state
        assert files_of(good.root) == good_files
        assert files_of(folder) == files
