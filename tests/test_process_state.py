"""What the package changes in the process: every patch is of one thread, and what cannot be so stands here."""

from __future__ import annotations

import ast
from pathlib import Path

import safe_loading

PACKAGE = Path(safe_loading.__file__).parent

# What changes something that other threads see, by how it is called.
OF_THE_PROCESS = {
    "catch_warnings",
    "chdir",
    "destroy_process_group",
    "disable",
    "disable_progress_bar",
    "enable_progress_bar",
    "filterwarnings",
    "fork_rng",
    "init_process_group",
    "manual_seed",
    "redirect_stdout",
    "manual_seed_all",
    "seed",
    "set_default_device",
    "set_default_dtype",
    "set_device",
    "set_grad_enabled",
    "set_num_threads",
    "set_rng_state",
    "set_threshold",
    "set_verbosity",
    "set_verbosity_error",
    "setLevel",
    "setrecursionlimit",
    "signal",
    "simplefilter",
    "umask",
    "use_deterministic_algorithms",
}
REASONS = {
    "_checkpoint/signer.py: redirect_stdout": "model-signing prints into JSON; other prints go to stderr too",
    "_commands/answer.py: setLevel": "a command is a process of its own",
    "_core/collector.py: set_threshold": "a full collection comes later; docs/reliability.md",
    "_core/interrupts.py: signal": "Ctrl-C waits for what is undone; the main thread's alone",
    "_core/log.py: setLevel": "the package's own logger, once",
    "_core/progress.py: disable_progress_bar": "transformers has one switch for its bars; a bar more or less",
    "_core/progress.py: enable_progress_bar": "transformers has one switch for its bars; a bar more or less",
    "_demo/__init__.py: catch_warnings": "a demonstration is a process of its own",
    "_demo/__init__.py: disable": "a demonstration is a process of its own",
    "_demo/__init__.py: simplefilter": "a demonstration is a process of its own",
    "_demo/fsdp.py: destroy_process_group": "a demonstration is a process of its own",
    "_demo/fsdp.py: init_process_group": "a demonstration is a process of its own",
    "_demo/load.py: catch_warnings": "a demonstration is a process of its own",
    "_demo/load.py: destroy_process_group": "a demonstration is a process of its own",
    "_demo/load.py: init_process_group": "a demonstration is a process of its own",
    "_demo/load.py: simplefilter": "a demonstration is a process of its own",
    "_demo/plan.py: setLevel": "a demonstration is a process of its own",
    "_memory/trace/sharded_step.py: destroy_process_group": "spread= has a process group; docs/reliability.md",
    "_memory/trace/sharded_step.py: init_process_group": "spread= has a process group; docs/reliability.md",
    "_merging/disk/write_files.py: set_num_threads": "of threads that start during a merge; docs/reliability.md",
    "_merging/weights/update.py: set_num_threads": "of the merge's own threads; docs/reliability.md",
    "_merging/weights/variants.py: manual_seed": "of a generator of its own",
    "_model/formats/convertible.py: set_default_dtype": "torch has one default dtype; docs/reliability.md",
    "_model/torch_state.py: set_default_dtype": "torch has one default dtype; docs/reliability.md",
    "_model/torch_state.py: set_grad_enabled": "torch keeps it for each thread",
    "_model/torch_state.py: set_rng_state": "after an interruption, of a verb that drew from the process's generator",
    "_output/stage.py: signal": "SIGTERM undoes an output; the main thread's alone",
    "_ranks/device_guard.py: set_default_dtype": "torch has one default dtype; docs/reliability.md",
    "_ranks/own_generators.py: manual_seed": "of generators of a block's own",
    "_ranks/own_generators.py: seed": "of generators of a block's own",
    "_ranks/own_generators.py: set_rng_state": "of generators of a block's own",
    "_sharding/fsdp1.py: set_grad_enabled": "torch keeps it for each thread",
    "_sharding/new_values.py: manual_seed": "inside own_copy_of_generators: of the block's own",
    "_sharding/new_values.py: set_rng_state": "inside own_copy_of_generators: of the block's own",
}
# Attributes of classes that stay replaced; what replaces them tells whom it is for.
REPLACED_CLASSES = {
    "_model/formats/fp8.py: setattr(finegrained_fp8.FP8Experts, name, function)": "takes off wraps; one stays",
    "_sharding/packed_chunks.py: setattr(DTensor, name, _for_packed(getattr(DTensor, name), answer))": (
        "passes all but packed parts through"
    ),
    "_sharding/split_at_prepare.py: setattr(Accelerator, '_prepare_tp', past_split_models)": (
        "passes all others through"
    ),
    "_sharding/prepare.py: setattr(Accelerator, 'prepare', prepare)": "passes all others through",
}
# Why an engine is patched in this thread, and no mode of torch does it.
PATCHED = {
    "_core/log.py": "logging has one level for an engine",
    "_loading/load_base.py": "transformers asks the environment that accelerate sets",
    "_loading/fused_parameters.py": "peft converts by a table of its own",
    "_loading/peft_config.py": "peft refuses a module of Mamba by a function of a module",
    "_loading/into_place.py": "transformers has one function that loads weights, and no hook in it",
    "_memory/audit/packed_rows.py": "transformers makes masks by functions of a module",
    "_memory/trace/attention_kernels.py": "transformers finds its kernels in a table",
    "_memory/trace/cuda_autocast.py": "autocast asks for a CUDA tensor, and function modes are off in recomputations",
    "_memory/trace/cuda_paths.py": "functions that are composed of these switch function modes off",
    "_memory/trace/flat_sharded_step.py": "FSDP1 resizes storages and compares addresses outside the dispatcher",
    "_memory/trace/fused_lm_head.py": "trl's kernels of its head are functions of a module",
    "_memory/trace/function_mode.py": "FakeTensor.tolist calls item() for each; backward() switches function modes off",
    "_memory/trace/inputs.py": "transformers asks for the type of the model's device",
    "_memory/trace/scan_kernels.py": "names of kernels that transformers has imported",
    "_memory/trace/sharded_step.py": "FSDP2 resizes storages outside the dispatcher",
    "_memory/trace/trace_step.py": "transformers asks whether a tensor is a fake one",
    "_memory/trace/zero3_fetching.py": "functions that are composed of linear() switch function modes off",
    "_model/attention_names.py": "transformers asks for packages that a plan does not need",
    "_model/zero3.py": "transformers asks whether a config of DeepSpeed is alive, and no argument says no",
    "_model/formats/four_bit.py": "bitsandbytes decodes some widths wrongly on the CPU, inside peft's merge",
    "_model/formats/bitnet.py": "functions that a trace would compile",
    "_model/formats/fbgemm.py": "kernels that this machine may lack",
    "_model/formats/compressed_tensors.py": "transformers decodes by a method of its operation, of one group for all",
    "_model/formats/fp8.py": "transformers decodes by a method of its operation, and takes no block for it",
    "_model/formats/fp8_kernels.py": "kernels that this machine may lack",
    "_model/quantized/stand_ins.py": "peft unpacks weights by a function of a module",
    "_model/layout/layout.py": "a class's own from_pretrained is asked for its key_mapping, and is to load nothing",
    "_model/quantized/patterns.py": "transformers compiles each pattern for each module",
    "_ranks/own_generators.py": "torch.random is functions of one generator; draws are taken by a mode",
    "_sharding/load_at_prepare.py": "the caller's own from_pretrained is to read no weights",
    "_sharding/weightless.py": "transformers initializes a model before from_pretrained gives it back",
}


def calls() -> list[tuple[str, str, ast.Call]]:
    """Return every call in the package: its file, the name that is called, and the call."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                found.append((file.relative_to(PACKAGE).as_posix(), name, node))
    return found


def test_what_other_threads_see_has_a_reason() -> None:
    found = {f"{file}: {name}" for file, name, _ in calls() if name in OF_THE_PROCESS}
    assert sorted(found) == sorted(REASONS)


def test_every_patch_is_of_one_thread_and_has_a_reason() -> None:
    assert sorted({file for file, name, _ in calls() if name in ("patched", "patched_item")}) == sorted(PATCHED)
    sources = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    assert [file.name for file, source in sources.items() if "unittest" in source] == []


def test_no_attribute_of_a_class_or_module_is_set_otherwise() -> None:
    """An instance's is: its owner is a variable, and no name of an engine's class or module."""
    set_ = {f"{file}: {ast.unparse(node)}" for file, name, node in calls() if name == "setattr" and of_engine(node)}
    assert set_ == set(REPLACED_CLASSES)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            written = [ast.unparse(target) for target in targets if isinstance(target, (ast.Attribute, ast.Subscript))]
            engines = ("torch.", "transformers.", "peft.", "accelerate.", "os.environ", "functional.", "nn.")
            assert [target for target in written if target.startswith(engines)] == [], file


def of_engine(call: ast.Call) -> bool:
    names = ast.unparse(call.args[0]).split(".")
    return any(name[:1].isupper() for name in names) or names[0] in ("torch", "transformers", "peft")
