"""``Workload``: the work that a model will be asked to do, so that its memory can be counted. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from safe_loading.errors import ArgumentError

from .arguments import set_fields, written
from .optimizer_rules import ALIASES, OPTIMIZERS, OptimizerRule
from .training_args import PairLoss, step_of
from .workload_problems import SOUGHT, checked_numbers, is_count

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import TrainingArguments

# "evaluate" is what a training runs in between, of which a trace makes a step of its own
Kind = Literal["weights_only", "generate", "train", "evaluate"]
Reference = Literal["model", "adapter_off"]


@dataclass(frozen=True, repr=False)
class Workload:
    """The work that a model is asked to do. Make one with `weights_only`, `generate` or `train`; see there.

    Attributes:
        kind: ``"weights_only"``, ``"generate"`` or ``"train"``.
        batch_size: Rows of a batch; of a micro-batch on one device when training; 0 where a search is to find it.
        sequence_length: Tokens of a row; the context length when generating; 0 where a search is to find it.
        decode_steps: Steps of one token each after the prompt.
        reference: The reference whose forward pass belongs to the step: a ``"model"``, or the ``"adapter_off"``.
        new_tokens: Tokens that are written after the prompt, up to the last; 0 where `decode_steps` says how many.
        gradient_checkpointing: Whether layers keep their inputs only and are computed again; or how, as for `train`.
        optimizer: A name of ``OPTIMIZERS``, or a ``torch.optim`` class.
        adapter: A ``peft`` config, or the folder of an adapter; only what it trains is trained.
        autocast: ``"bfloat16"`` or ``"float16"`` when the forward pass runs under ``torch.autocast``.
        gradient_accumulation_steps: Micro-batches whose gradients are summed before the optimizer steps.
        labels: Whether the model computes its own loss from labels; otherwise the loss is the mean of its outputs.
        activation_offload: Whether the forward pass runs under ``torch.autograd.graph.save_on_cpu``.
        use_cache: Whether the model fills its cache in training too.
        fused_lm_head: Whether trl's fused LM head computes the loss, without logits; or ``"liger"``.
        pair_loss: The loss of trl's ORPO or CPO, of pairs of preferences; None for the model's own.
        completion_length: Of GRPO: tokens of each row that were generated, the last ones; 0 for other trainings.
        steps_per_generation: Of GRPO: micro-batches that the model itself generates at once; 0 where vLLM does.
        old_log_probs: Of GRPO: whether the policy scores the samples before it is trained on them.
        do_sample: Whether tokens are drawn by their probabilities, which are then kept beside the scores.
        eval_batch_size: Rows of a batch of the evaluation between steps; 0 where there is none.
        label_smoothing: Whether the Trainer smoothes the labels, and computes the loss from logits.
        padding_free: Whether the rows of a batch lie one after the other in one row, told apart by their positions.
        router_aux_loss_coef: The weight of the loss of a mixture's routers; 0.0 leaves that to the model's config.
        model_init_kwargs: The options with which the trainer loads a model that it is given by name, if it does.
    """

    kind: Kind
    batch_size: int = 0
    sequence_length: int = 0
    decode_steps: int = 0
    gradient_checkpointing: bool | Mapping[str, Any] = False
    optimizer: str | type = "none"
    adapter: PeftConfig | str | os.PathLike[str] | None = None
    autocast: str | None = None
    gradient_accumulation_steps: int = 1
    labels: bool = True
    activation_offload: bool = False
    use_cache: bool = False
    fused_lm_head: bool | Literal["liger"] = False
    new_tokens: int = 0
    reference: Reference | None = None
    completion_length: int = 0
    steps_per_generation: int = 0
    old_log_probs: bool = False
    do_sample: bool = False
    eval_batch_size: int = 0
    label_smoothing: bool = False
    padding_free: bool = False
    pair_loss: PairLoss | None = None
    router_aux_loss_coef: float | None = 0.0
    model_init_kwargs: Mapping[str, Any] | None = None

    @staticmethod
    def weights_only() -> Workload:
        """The weights and buffers, and nothing run."""
        return Workload("weights_only")

    @staticmethod
    def generate(
        batch_size: int | None,
        context_length: int | None,
        *,
        decode_steps: int = 1,
        autocast: str | None = None,
        adapter: PeftConfig | str | os.PathLike[str] | None = None,
        new_tokens: int = 0,
        do_sample: bool = False,
    ) -> Workload:
        """A prompt of `context_length` tokens, then one step of one token, with the model's own cache.

        The prompt is read in one forward pass of ``batch_size x context_length`` tokens, and as in ``generate()`` only
        the last position's logits are computed where the model can do that. The decode step that follows has the whole
        prompt in its cache, whose memory is what the model's cache class takes: for a ``DynamicCache`` that is
        ``context_length`` positions after the prompt, and ``context_length + 1`` after the step, twice while a
        layer's keys are concatenated. To plan for a conversation that ends at N tokens, give N; or give the prompt and
        `new_tokens`, and a forecast tells the peak of the prompt from that of the end (`MemoryForecast.phases`).

        Args:
            batch_size: Rows of the batch, beams included; None where a search is to find it.
            context_length: Tokens of each row: all that the cache will hold; None where a search is to find it.
            decode_steps: How many steps of one token follow the prompt, at most 256.
            autocast: ``"bfloat16"`` or ``"float16"`` to run under ``torch.autocast``.
            adapter: A ``peft`` config or the folder of an adapter that is attached, unmerged.
            new_tokens: How many tokens are written after a prompt of `context_length`, as ``max_new_tokens`` says to
                ``generate()``: the last of them is written with a cache of all the others. `decode_steps` does not
                count then. Not for models that read a prompt with an encoder.
            do_sample: As for ``generate()``: the probabilities of each token are there until the next one's.

        Raises:
            ArgumentError: A number that is not a positive integer, or an unknown dtype.
        """
        return _checked(
            Workload(
                "generate",
                cast("int", batch_size),
                cast("int", context_length),
                decode_steps=decode_steps,
                autocast=autocast,
                adapter=adapter,
                new_tokens=new_tokens,
                do_sample=do_sample,
            )
        )

    @staticmethod
    def train(
        batch_size: int | None,
        sequence_length: int | None,
        gradient_checkpointing: bool | Mapping[str, Any] = False,
        optimizer: str | type = "adamw",
        adapter: PeftConfig | str | os.PathLike[str] | None = None,
        *,
        autocast: str | None = None,
        gradient_accumulation_steps: int = 1,
        labels: bool = True,
        activation_offload: bool = False,
        use_cache: bool = False,
        fused_lm_head: bool | Literal["liger"] = False,
        reference: Reference | None = None,
        completion_length: int = 0,
        steps_per_generation: int = 0,
        old_log_probs: bool = False,
        eval_batch_size: int = 0,
        label_smoothing: bool = False,
        padding_free: bool = False,
        pair_loss: PairLoss | None = None,
        router_aux_loss_coef: float | None = 0.0,
        model_init_kwargs: Mapping[str, Any] | None = None,
    ) -> Workload:
        """A steady-state training step (optimizer state already allocated): forward, loss, backward, optimizer.

        Without an adapter the parameters with ``requires_grad`` are trained: all of them, in a model made from a
        config. Gradients are None when the step begins, as after ``zero_grad(set_to_none=True)``.

        Args:
            batch_size: Rows of a micro-batch on one device; None where a search is to find it.
            sequence_length: Tokens of each row; None where a search is to find it.
            gradient_checkpointing: Whether the model's ``gradient_checkpointing_enable()`` is called; or with which
                options, of ``{"use_reentrant": True, "every_n_layers": 2}``.
            optimizer: ``"adamw"`` (fused, as the Trainer's), ``"adamw_foreach"``, ``"adam"``, ``"adamw_8bit"`` (with
                32 bits for embeddings, as the Trainer's), ``"paged_adamw_8bit"``, ``"paged_adamw_32bit"``, ``"lion"``
                (in the dtype of the parameters), ``"sgd"``, ``"sgd_momentum"``, ``"adagrad"``, ``"rmsprop"`` (with
                weight decay ``"sgd_decayed"``, ``"sgd_momentum_decayed"``, ``"rmsprop_decayed"``),
                ``"adafactor"``, ``"none"``; others by the Trainer's names, such as ``"lion_8bit"``,
                ``"paged_lion_32bit"``, ``"ademamix"`` and ``"schedule_free_adamw"``; or a class such as
                ``torch.optim.AdamW``, made with its default options. Of a paged optimizer only what is in no page is
                counted, and of ``"adamw_torch_8bit"`` and ``"adamw_torch_4bit"`` their state alone.
            adapter: A ``peft`` config or the folder of an adapter: attached, and only what it trains is trained.
            autocast: ``"bfloat16"`` or ``"float16"`` to run the forward pass under ``torch.autocast``, and copy what it
                returns to float32, as accelerate and the Trainer's ``bf16=True`` do.
            gradient_accumulation_steps: From 2 on, the gradients of the first micro-batch stay while the next runs.
            labels: Whether the model computes its own loss from labels.
            activation_offload: Whether what is saved for the backward pass goes to the host until then, as in
                ``torch.autograd.graph.save_on_cpu``. It sends everything that autograd saves, weights included.
            use_cache: Whether the model fills its cache as it is trained, which its output then holds. The Trainer
                switches that off; in a loop of your own, ``model(**batch)`` does it unless
                ``model.config.use_cache`` is False or the model checkpoints.
            fused_lm_head: Whether the loss is computed by trl's fused LM head, as in its trainers for SFT, DPO, KTO and
                GRPO since trl 1.16: in tiles, so that no logits are made. Needs trl, whose code is run. ``"liger"`` is
                Liger's fused linear cross entropy, by the chunks of its source, where Liger has one for the model.
            reference: The reference of DPO, KTO or GRPO, which runs without a graph after the model: ``"model"`` is a
                copy of the base on the same device, as ``ref_model=``; ``"adapter_off"`` the base itself, as trl does
                with an adapter. None where its log-probabilities were computed before, or there is none. A pair of
                preferences is two rows; of KTO's rows with other completions the longest counts as well.
            completion_length: Of GRPO, as `grpo` makes it: the last tokens of each row, which were generated.
            steps_per_generation: Of GRPO, as for `grpo`.
            old_log_probs: Of GRPO: whether the model scores them before it is trained on them.
            eval_batch_size: Rows of a batch of the evaluation that runs between steps, beside the optimizer's state:
                ``per_device_eval_batch_size``, which is 8 where the Trainer is told nothing. 0 for none. The logits
                that a ``compute_metrics`` collects are not counted.
            label_smoothing: Whether the loss is that of the Trainer's ``label_smoothing_factor``, which takes the
                logarithms of all logits. With ``fused_lm_head=True`` as trl's ``SFTTrainer`` computes it.
            padding_free: Whether the rows of a batch lie one after the other in one row without a mask, told apart by
                position_ids, as trl's ``packing=True`` and ``padding_free=True`` have them, and transformers'
                ``DataCollatorWithFlattening``.
            pair_loss: ``"orpo"``, ``"cpo"`` or ``"cpo_without_nll"`` (``cpo_alpha=0``): the loss of trl's trainer of
                that name, whose code is run, from all logits of pairs. A pair is two rows.
            router_aux_loss_coef: As in trl's configs, for mixtures whose loss also balances their experts. None takes
                the coefficient of the model's config; 0.0 leaves it to the config whether the logits of routers stay.
            model_init_kwargs: As in trl's configs, for a forecast or plan of a folder or hub id, which trl's trainers
                load themselves (``dtype``, ``quantization_config``, ...). An option of the forecast goes before.

        Raises:
            ArgumentError: A number that is not a positive integer, or an unknown name.
        """
        return _checked(
            Workload(
                "train",
                cast("int", batch_size),
                cast("int", sequence_length),
                gradient_checkpointing=gradient_checkpointing,
                optimizer=ALIASES.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer,
                adapter=adapter,
                autocast=autocast,
                gradient_accumulation_steps=gradient_accumulation_steps,
                labels=labels,
                activation_offload=activation_offload,
                use_cache=use_cache,
                fused_lm_head=fused_lm_head,
                reference=reference,
                completion_length=completion_length,
                steps_per_generation=steps_per_generation,
                old_log_probs=old_log_probs,
                eval_batch_size=eval_batch_size,
                label_smoothing=label_smoothing,
                padding_free=padding_free,
                pair_loss=pair_loss,
                router_aux_loss_coef=router_aux_loss_coef,
                model_init_kwargs=model_init_kwargs,
            )
        )

    @staticmethod
    def grpo(
        batch_size: int | None,
        prompt_length: int,
        completion_length: int,
        gradient_checkpointing: bool | Mapping[str, Any] = False,
        optimizer: str | type = "adamw",
        adapter: PeftConfig | str | os.PathLike[str] | None = None,
        *,
        steps_per_generation: int | None = None,
        old_log_probs: bool = False,
        reference: Reference | None = None,
        autocast: str | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> Workload:
        """A step of GRPO in trl since 1.16: samples are generated, scored in micro-batches, and trained on.

        It is a training step of ``prompt_length + completion_length`` tokens a row by trl's fused LM head.

        Args:
            batch_size: Rows of a micro-batch on one device (``per_device_train_batch_size``); each is one completion.
                None where a search is to find it.
            prompt_length: Tokens of the longest prompt.
            completion_length: Tokens of the longest completion (``max_completion_length``).
            gradient_checkpointing: As for `train`; what runs without a graph is not checkpointed.
            optimizer: As for `train`.
            adapter: As for `train`.
            steps_per_generation: Micro-batches that the model generates at once, as in ``GRPOConfig``. None takes trl's
                default, those of one optimizer step; 0 is for vLLM, with which the model generates none.
            old_log_probs: Whether the samples are scored by the policy too: with vLLM they are, and where samples are
                used for more than one optimizer step.
            reference: As for `train`; None with ``beta=0.0``, which is trl's default.
            autocast: As for `train`.
            gradient_accumulation_steps: As for `train`.

        Raises:
            ArgumentError: A number that is not a positive integer, or an unknown name.
        """
        numbers = {"prompt_length": prompt_length, "completion_length": completion_length}
        wrong = [f"{name}={value!r}" for name, value in numbers.items() if not is_count(value)]
        if wrong:
            raise ArgumentError("Workload.grpo needs integers, 1 or more:", wrong)
        return Workload.train(
            batch_size,
            prompt_length + completion_length,
            gradient_checkpointing,
            optimizer,
            adapter,
            autocast=autocast,
            gradient_accumulation_steps=gradient_accumulation_steps,
            fused_lm_head=True,
            reference=reference,
            completion_length=completion_length,
            steps_per_generation=gradient_accumulation_steps if steps_per_generation is None else steps_per_generation,
            old_log_probs=old_log_probs,
        )

    @staticmethod
    def from_training_args(
        args: TrainingArguments,
        sequence_length: int | None = None,
        adapter: PeftConfig | str | os.PathLike[str] | None = None,
    ) -> Workload:
        """The step that a Trainer runs with these arguments, or a trainer of trl's with its config.

        Micro-batches, precision, checkpointing, the optimizer, smoothed labels and the evaluation are those of the
        arguments, defaults included: with trl for example bfloat16, checkpointing, and its fused LM head. A pair of
        preferences is two rows. `Spread.from_training_args` reads how the job is spread (``fsdp=``, ``deepspeed=``).
        A folder or hub id is then counted as trl loads it, in float32 where ``model_init_kwargs`` names no dtype.

        Args:
            args: ``TrainingArguments``, or trl's ``SFTConfig``, ``DPOConfig``, ``KTOConfig``, ``RewardConfig``,
                ``GRPOConfig``, ``RLOOConfig``, ``ORPOConfig`` or ``CPOConfig``.
            sequence_length: Tokens of the longest row; by default the ``max_length`` of trl's configs. Of GRPO and RLOO
                those of prompt and completion, which their configs do not say.
            adapter: As for `train`. With one the reference of DPO, KTO, GRPO and RLOO is the base without it, and else
                a copy of the model: ``.replace(reference="adapter_off")`` for a model that has its adapter already.

        Raises:
            ArgumentError: An argument that no workload expresses, such as ``torch_compile=True``; an optimizer that is
                not known; or no length.
        """
        return Workload.train(**step_of(args, sequence_length, adapter))

    @property
    def generated_rows(self) -> int:
        """The rows of GRPO that the model generates at once on one device."""
        return self.batch_size * self.steps_per_generation

    @property
    def rollout(self) -> Workload:
        """The generation of GRPO's samples, as a workload of its own."""
        return Workload.generate(
            self.generated_rows,
            self.sequence_length - self.completion_length,
            new_tokens=self.completion_length,
            autocast=self.autocast,
            adapter=self.adapter,
            do_sample=True,
        )

    @property
    def context_length(self) -> int:
        """``sequence_length``, under the name that it has when generating."""
        return self.sequence_length

    @property
    def rule(self) -> OptimizerRule | None:
        """The rule for the optimizer's state; None for a class, whose step is traced to find the state."""
        return OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else None

    def replace(self, **changes: Any) -> Workload:
        """Return the same workload with some fields changed, checked again."""
        return _checked(dataclasses.replace(self, **changes))

    def require_sizes(self) -> None:
        """Refuse a workload of which a size is still to be found."""
        if self.kind == "weights_only":
            return
        for name, verb in SOUGHT.items():
            if getattr(self, name) == 0:
                raise ArgumentError(f"{self} leaves {name} open: pass a number, or let {verb} find it.")

    def facts(self) -> dict[str, object]:
        """Return the fields as JSON has them; of an adapter's config those that were set, beside its class."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.optimizer, type):
            facts["optimizer"] = f"{self.optimizer.__module__}.{self.optimizer.__qualname__}"
        if isinstance(self.adapter, os.PathLike):
            facts["adapter"] = os.fspath(self.adapter)
        elif self.adapter is not None and not isinstance(self.adapter, str):
            facts["adapter"] = {"config": type(self.adapter).__name__, **set_fields(self.adapter)}
            facts["adapter"] = json.loads(json.dumps(facts["adapter"], default=repr))  # what JSON lacks is its text
        return facts

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> Workload:
        """Return the workload whose `facts` these are, also after JSON.

        Only classes of ``peft`` and ``torch.optim`` are looked up; any other stays the text that names it.
        """
        values = dict(facts)
        if isinstance(values.get("adapter"), Mapping):
            fields = dict(values["adapter"])
            values["adapter"] = _class_in("peft", fields.pop("config"))(**fields)
        package, _, name = str(values.get("optimizer")).rpartition(".")
        if package.split(".")[:2] == ["torch", "optim"]:
            values["optimizer"] = _class_in("torch.optim", name)
        return Workload(**values)

    def __str__(self) -> str:
        """Return the call that makes it, with an adapter's kind and rank in place of all its fields."""
        if self.adapter is None or isinstance(self.adapter, (str, os.PathLike)):
            return repr(self)
        fields = vars(self.adapter)  # PeftConfig declares no rank, since some kinds of adapters have none
        rank = f"r={fields['r']}" if "r" in fields else ""
        return f"{repr(dataclasses.replace(self, adapter=None))[:-1]}, adapter={type(self.adapter).__name__}({rank}))"

    def __repr__(self) -> str:
        """Return the call that makes it, without the arguments that have their default."""
        words = []
        made_by = "train" if self.kind == "evaluate" else self.kind
        for name, parameter in inspect.signature(getattr(Workload, made_by)).parameters.items():
            value = getattr(self, name)
            value = None if value == 0 and name in (*SOUGHT, "context_length") else value
            if value is not parameter.default and value != parameter.default:
                words.append(f"{name}={value.__name__ if isinstance(value, type) else written(value)}")
        return f"Workload.{made_by}({', '.join(words)})"


def require_workload(given: object, such_as: str) -> Workload:
    """Return the workload that an argument is, or raise `ArgumentError` with one such as this."""
    if isinstance(given, Workload):
        return given
    if hasattr(given, "per_device_train_batch_size"):
        raise ArgumentError(f"workload is a {type(given).__name__}: pass Workload.from_training_args(args).")
    raise ArgumentError(f"workload={given!r:.80}: pass a Workload, for example {such_as}.")


def _class_in(package: str, name: str) -> type[Any]:
    """Return a class of peft or of torch.optim by its name, or raise `ArgumentError`."""
    found = getattr(importlib.import_module(package), name, None)
    if not isinstance(found, type) or (package == "peft" and not name.endswith("Config")):
        raise ArgumentError(f"{package} has no such class: {name!r:.80}.")
    return found


def _checked(workload: Workload) -> Workload:
    return dataclasses.replace(workload, **checked_numbers(workload))
