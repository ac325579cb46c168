"""What trains with `load_at_prepare`: each trainer with LoRA and in full, compared with its own plain run, bit for bit.

Rank scripts import it. accelerate refuses FSDP on the CPU, so `tell_accelerate` tells it that the gloo ranks are
devices; everything else is the engines' own.

``python tests/sharding/trainer_matrix.py`` prints the table anew; paste it into docs/fsdp.md, which
``test_load_at_prepare.py`` compares.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fsdp_cases import plain, whole

from safe_loading import load_at_prepare

WHAT = ("full", "LoRA", "QLoRA")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "accelerate")
STEPS = 4
# How a script gets the model: as ever; in the block of load_at_prepare; with the adapter attached by the script, not by
# TRL; and so, wrapped by hand.
ATTACHED = ("attached", "by hand")
MESH: Any = None  # of models that are wrapped by hand


class Case(NamedTuple):
    """One row of the table."""

    trainer: str
    what: str  # what trains: everything ("full"), "LoRA", or "QLoRA" over a base in 4 bits
    checkpoints: str  # FULL, SHARDED, or "none", with which a run is not resumed
    version: int = 2

    @property
    def lora(self) -> bool:
        """Whether an adapter trains."""
        return self.what != "full"

    def __str__(self) -> str:
        return f"{self.trainer} {self.what} {self.checkpoints} {self.version}"


# Under Trainer, accelerate splits FSDP1's LoRA layers into units of their own (peft's policy): the squares of the
# gradients are added up in another order, and so the norms differ in the last bit, by which the gradients are clipped.
OTHER_NORMS = [
    *(f"{trainer} LoRA none 1" for trainer in TRAINERS if trainer != "accelerate"),
    *(f"{trainer} QLoRA none 1" for trainer in ("Trainer", "Seq2SeqTrainer")),
]
# FSDP1 saves no state on the CPU: torch's state_dict() of it reads memory that it has freed.
CASES = [
    *itertools.starmap(Case, itertools.product(TRAINERS, WHAT, ("FULL", "SHARDED"))),
    *(Case(trainer, what, "none", 1) for trainer in TRAINERS for what in WHAT),
]
# of trl, each given a folder
NAMED = [
    Case(f"{kind}Trainer", what, "none")
    for kind in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
    for what in WHAT[:2]
]
BY_HAND = [
    *(Case(trainer, "full", "FULL") for trainer in TRAINERS),
    *(Case(trainer, "LoRA", "FULL") for trainer in TRAINERS if trainer != "DPOTrainer"),
    *(Case(trainer, "QLoRA", "FULL") for trainer in ("Trainer", "Seq2SeqTrainer", "accelerate")),
    *(Case(trainer, "full", "none", 1) for trainer in ("Trainer", "accelerate")),
    *(Case("accelerate", what, "none", 1) for what in ("LoRA", "QLoRA")),
]


def tell_accelerate() -> None:
    """Tell accelerate that these processes have devices."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    first = PartialState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        fresh = not self._shared_state
        first(self, *args, **options)
        if fresh:
            self.distributed_type, self.device = DistributedType.MULTI_GPU, torch.device("cpu")

    PartialState.__init__ = init  # type: ignore[method-assign]  # for the life of a test's process


def save_base(folder: Path) -> None:
    """Save what the trainers start from: a decoder, and a tokenizer beside it."""
    from fsdp_cases import llama, reference, save
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(251)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save(reference(lambda: llama(num_hidden_layers=2, pad_token_id=0, eos_token_id=1)), folder)
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1").save_pretrained(folder)


def rows() -> list[dict[str, Any]]:
    numbers = [[(7 * row + column) % 200 + 2 for column in range(16)] for row in range(16)]
    return [{"input_ids": each, "labels": each} for each in numbers]


def arguments(case: Case, kind: Any, folder: Path, **options: Any) -> Any:
    state = {} if case.checkpoints == "none" else {"state_dict_type": f"{case.checkpoints}_STATE_DICT"}
    of_version = {"sync_module_states": False} if case.version == 1 else {}
    config = {"version": case.version, **state, **of_version, **options.pop("fsdp_config", {})}
    chosen = {"max_steps": STEPS, "save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(), "seed": 3}
    return kind(output_dir=str(folder), fsdp=True, fsdp_config=config, **{**chosen, **quiet, **options})


def lora(case: Case) -> Any:
    from peft import LoraConfig

    # TRL refuses adapters of the head, from whose weight it computes the loss
    head = [] if case.trainer in ("SFTTrainer", "DPOTrainer") else ["lm_head"]
    saved = ["embed_tokens"]
    if case.what == "QLoRA":
        return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return LoraConfig(r=4, target_modules=["q_proj", *head], modules_to_save=saved, task_type="CAUSAL_LM")


def load(case: Case, base: Path, *, road: str) -> Any:
    """The model as a script loads it, with the line that is added to it, or wrapped by hand."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from safe_loading import meta_model, wrap_fsdp_meta_safe

    # FSDP1 wants the packed weights in the dtype of the others
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.float32)
    options = {"quantization_config": nf4} if case.what == "QLoRA" else {}
    if road == "by hand":
        model: Any = meta_model(base, attn_implementation="eager", **options)
        model = get_peft_model(model, lora(case)) if case.lora else model
        return wrap_fsdp_meta_safe(model, base, version=case.version, mesh=MESH)
    with load_at_prepare() if road == "block" else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", **options)
    return get_peft_model(model, lora(case)) if case.lora and road == "attached" else model


def make_trainer(case: Case, base: Path, folder: Path, *, road: str, **options: Any) -> Any:
    """The trainer of a script; TRL's attach the adapter themselves."""
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.manual_seed(11)
    model = load(case, base, road=road)
    data = Dataset.from_list(rows())
    tokenizer = AutoTokenizer.from_pretrained(base)
    if case.trainer in ("Trainer", "Seq2SeqTrainer"):
        seq2seq = case.trainer == "Seq2SeqTrainer"
        kind, of = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if seq2seq else (Trainer, TrainingArguments)
        options |= {"predict_with_generate": True, "generation_max_length": 18} if seq2seq else {}
        if case.lora and road not in ATTACHED:
            model = get_peft_model(model, lora(case))
        args = arguments(case, of, folder, **options)
        return kind(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(4)))
    # under FSDP1 TRL's 16-bit adapters of a packed base become 32 bits wide again, which only autocast takes
    mixed = case.what == "QLoRA" and case.version == 1
    options = {"bf16": mixed, "activation_checkpointing": False, **options}
    adapter = lora(case) if case.lora and road not in ATTACHED else None
    if case.trainer == "SFTTrainer":
        args = arguments(case, SFTConfig, folder, **options)
        return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
    pairs = [
        {"prompt": f"t{n + 2} t9", "chosen": f"t{n + 3} t{n + 4}", "rejected": f"t{n + 5} t7 t8"} for n in range(16)
    ]
    args = arguments(case, DPOConfig, folder, **options)
    data = Dataset.from_list(pairs)
    return DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=adapter)


def run_trainer(case: Case, base: Path, folder: Path, *, road: str, resume: str | None = None, **options: Any) -> Any:
    trainer = make_trainer(case, base, folder, road=road, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def history(trainer: Any) -> list[Any]:
    """What each step logged."""
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def weights(model: Any) -> dict[str, torch.Tensor]:
    """All parameters, whole; those that peft copied and does not train included."""
    if type(model).__name__ != "FullyShardedDataParallel":
        return {plain(name): whole(parameter).detach().clone() for name, parameter in model.named_parameters()}
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {plain(name): parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() ^ other.keys())
    return names + [name for name in one.keys() & other.keys() if not torch.equal(bits(one[name]), bits(other[name]))]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What is compared: packed codes in a floating dtype may look like a NaN, which equals nothing."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def accelerate_with_fsdp(case: Case, **options: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=case.version,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        state_dict_type=None if case.checkpoints == "none" else f"{case.checkpoints}_STATE_DICT",
        use_orig_params=True if case.version == 1 else None,
    )
    return Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, **options)


def loop(case: Case, base: Path, folder: Path, *, road: str, steps: Iterator[int], save_at: int = -1) -> Any:
    """A loop of one's own around accelerate: what it logged, and the model."""
    from accelerate.state import AcceleratorState
    from peft import get_peft_model

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(11)
    accelerator = accelerate_with_fsdp(case)
    model = load(case, base, road=road).train()
    if case.lora and road not in ATTACHED:
        model = get_peft_model(model, lora(case))
    if case.version == 1:
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    model, optimizer = (
        accelerator.prepare(model, optimizer) if case.version == 2 else (model, accelerator.prepare(optimizer))
    )
    first = next(steps)
    if first:
        accelerator.load_state(str(folder / "state"))
    batches = torch.tensor([row["input_ids"] for row in rows()]).reshape(STEPS, 2, 2, 16)
    logged = []
    for step in (first, *steps):
        batch = batches[step][accelerator.process_index].to(accelerator.device)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        logged.append((float(loss), float(whole(norm))))
        if step + 1 == save_at:
            accelerator.save_state(str(folder / "state"))
    return logged, model


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).nan_to_num().abs().max()) for name in one)


def compared(logged: Any, own: Any, wanted: dict[str, torch.Tensor], have: dict[str, torch.Tensor]) -> dict[str, Any]:
    largest = largest_difference(wanted, have)
    return {"steps": len(own), "log": logged == own, "weights": differing(wanted, have), "largest": largest}


def outcome(case: Case, base: Path, folder: Path) -> dict[str, Any]:
    """What differs between a plain run, a run with `load_at_prepare`, and one that is resumed from its checkpoint."""
    saves = case.checkpoints != "none"
    if case.trainer == "accelerate":
        logged, model = loop(case, base, folder, road="plain", steps=iter(range(STEPS)))
        wanted = weights(model)
        own, model = loop(case, base, folder, road="block", steps=iter(range(STEPS)), save_at=2 if saves else -1)
        found = compared(logged, own, wanted, weights(model))
        if saves:
            rest, model = loop(case, base, folder, road="block", steps=iter(range(2, STEPS)))
            found |= {"resumed log": logged[2:] == rest, "resumed": differing(wanted, weights(model))}
        return found
    trainer = run_trainer(case, base, folder / "plain", road="plain")
    wanted, logged = weights(trainer.model), history(trainer)
    options = {"save_strategy": "steps", "save_steps": 2} if saves else {}
    trainer = run_trainer(case, base, folder / "lean", road="block", **options)
    own = history(trainer)
    found = compared(logged, own, wanted, weights(trainer.model))
    if saves:
        checkpoint = str(folder / "lean" / "checkpoint-2")
        trainer = run_trainer(case, base, folder / "lean", road="block", resume=checkpoint)
        found |= {"resumed log": logged == history(trainer), "resumed": differing(wanted, weights(trainer.model))}
    return found


def by_hand(case: Case, base: Path, folder: Path) -> dict[str, Any]:
    """What differs between a plain run and one with a model that was wrapped by hand."""
    found = []
    for road in ATTACHED:
        if case.trainer == "accelerate":
            logged, model = loop(case, base, folder, road=road, steps=iter(range(STEPS)))
        else:
            trainer = run_trainer(case, base, folder / road, road=road)
            logged, model = history(trainer), trainer.model
        found.append((logged, weights(model)))
    (logged, wanted), (own, have) = found
    return compared(logged, own, wanted, have)


def by_name(case: Case, base: Path, folder: Path) -> dict[str, Any]:
    """What differs between a plain run and one in the block, of a trainer of trl that loads its models itself."""
    found = []
    for around in (contextlib.nullcontext(), load_at_prepare()):
        trainer = trainer_of_folder(case, base, folder / str(len(found)), around)
        found.append((history(trainer), weights(trainer.model), hasattr(trainer.model, "fsdp_report")))
    (logged, wanted, _), (own, have, is_ours) = found
    return compared(logged, own, wanted, have) | {"ours": is_ours}


def trainer_of_folder(case: Case, base: Path, folder: Path, around: contextlib.AbstractContextManager[None]) -> Any:
    """A trainer that was given the folder of its model, after it trained; its reference is of that folder, too."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    kind = case.trainer.removesuffix("Trainer")
    sampled = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1} if kind in ("GRPO", "RLOO") else {}
    data: list[dict[str, Any]] = [
        {"prompt": f"t{n + 2} t9", "chosen": f"t{n + 3} t{n + 4}", "rejected": f"t{n + 5} t7 t8"} for n in range(16)
    ]
    if kind == "KTO":
        data = [
            {"prompt": each["prompt"], "completion": each["chosen"], "label": n % 2 == 0} for n, each in enumerate(data)
        ]
    columns = {"GRPO": ["prompt"], "RLOO": ["prompt"], "Reward": ["chosen", "rejected"], "SFT": ["chosen"]}
    data = [{name: each[name] for name in columns.get(kind, each)} for each in data]
    data = [{"text": each["chosen"]} for each in data] if kind == "SFT" else data
    task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    loading = {"activation_checkpointing": False, "model_init_kwargs": {"attn_implementation": "eager"}}
    args = arguments(case, getattr(trl, f"{kind}Config"), folder, bf16=False, **loading, **sampled)
    with around:
        trainer = getattr(trl, f"{kind}Trainer")(
            str(base),
            args=args,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type=task) if case.lora else None,
            **({"reward_funcs": lengths} if sampled else {}),
        )
    trainer.train()
    return trainer


def lengths(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def table() -> str:
    """The table for the documentation: what the tests hold equal."""
    lines = ["| | FSDP2, FULL | FSDP2, SHARDED | FSDP1 |", "| --- | --- | --- | --- |"]
    for trainer, what in itertools.product(TRAINERS, WHAT):
        cells = []
        for checkpoints, version in (("FULL", 2), ("SHARDED", 2), ("none", 1)):
            name = str(Case(trainer, what, checkpoints, version))
            equal = "equal, resumed" if version == 2 else "equal, not resumed"
            cells.append("norms in another order" if name in OTHER_NORMS else equal)
        name = "accelerate's `prepare`" if trainer == "accelerate" else f"`{trainer}`"
        lines.append(f"| {name}, {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
