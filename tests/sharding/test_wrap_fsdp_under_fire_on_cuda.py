"""A rank is killed, raises or hangs while NCCL sends weights: the others raise, and say who it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
LIMIT = 4  # seconds, for the rank that hangs
# how many ranks there are, which comes to grief and how, and in which call of the stream of bytes
CASES = {
    "killed while it receives": (2, 1, "kill", "write"),
    "rank 0 killed while it sends": (2, 0, "kill", "read"),
    "raises while it receives": (2, 1, "raise", "write"),
    "hangs while it receives": (2, 1, "hang", "write"),
    "one of three killed while it receives": (3, 2, "kill", "write"),
}

SCRIPT = """
    import functools, signal, time, warnings
    warnings.simplefilter("ignore")
    import torch.distributed.fsdp
    from transformers import LlamaConfig, LlamaForCausalLM
    from safe_loading import device_for_rank, meta_model, wrap_fsdp_meta_safe
    from safe_loading._sharding import scatter
    from torchrun import fork_ranks, held_store

    limit, cases = float(sys.argv[1]), json.loads(sys.argv[2])
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    config = LlamaConfig(**sizes)
    whole, on_meta = LlamaForCausalLM(config), meta_model(config, LlamaForCausalLM)

    def fire(kind):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise MemoryError("no room for a shard")
        time.sleep(60)

    def arm(kind, method):
        real, count = getattr(scatter._ByteStream, method), iter(range(10**6))
        def counted(*arguments, **options):
            if next(count) == 2:
                fire(kind)
            return real(*arguments, **options)
        setattr(scatter._ByteStream, method, counted)

    def rank_main(victim, kind, method, rank):
        torch.cuda._is_in_bad_fork = lambda: False  # no device was used before the fork
        os.environ["LOCAL_RANK"] = str(rank)
        torch.accelerator.set_device_index(device_for_rank())
        scatter.BLOCK_BYTES = 4096  # several blocks, so that a rank can come to grief between two of them
        if rank == victim:
            arm(kind, method)
        started, found = time.monotonic(), {"error": None, "text": ""}
        try:
            wrap_fsdp_meta_safe(whole if rank == 0 else on_meta, timeout=limit if kind == "hang" else 60)
        except BaseException as error:
            found = {"error": type(error).__name__, "text": str(error)}
        return {**found, "seconds": time.monotonic() - started, "contexts": contexts()}

    with held_store() as port:
        for name, (world, victim, kind, method) in cases.items():
            main = functools.partial(rank_main, victim, kind, method)
            hanging = victim if kind == "hang" else None
            ranks = fork_ranks(port, name, world, main, hanging=hanging, backend="cpu:gloo,cuda:nccl")
            report(**{name: {**ranks, "victim": victim, "kind": kind}})
"""


@pytest.fixture(scope="module")
def found(simulated_cuda: CudaRunner) -> dict[str, Any]:
    return simulated_cuda.run(SCRIPT, args=[str(LIMIT), json.dumps(CASES)], env={"SIMCUDA_VALUES": "all"})


@pytest.mark.parametrize("name", CASES)
def test_the_other_ranks_raise_and_name_the_rank_and_its_cause(found: dict[str, Any], name: str) -> None:
    facts = found[name]
    victim = facts["victim"]
    for rank, each in enumerate(facts["ranks"]):
        if rank == victim:
            continue
        assert each is not None, f"rank {rank} hangs"
        assert each["seconds"] < LIMIT + 26
        assert each["contexts"] == [rank]
        if facts["kind"] == "hang":
            assert each["error"] == "RankTimeout", each
            assert f"for rank {victim}" in each["text"] or "for all ranks" in each["text"], each
        else:
            ended = f"process {facts['pids'][victim]}) ended"
            assert each["error"] == "RankError", each
            assert ("MemoryError: no room for a shard" if facts["kind"] == "raise" else ended) in each["text"], each
            assert f"Rank {victim} (host " in each["text"], each
