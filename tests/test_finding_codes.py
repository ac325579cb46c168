"""Every code of a finding is made on purpose and mended: by an example of its page, or by a test that is named here."""

from __future__ import annotations

import ast
from pathlib import Path

import finding_codes as table
import pytest

if not table.DOCS.is_dir():
    pytest.skip("the tests run without the project's docs", allow_module_level=True)

TESTS = Path(__file__).parent
DOCTOR = "commands/test_doctor.py::"
VERIFY = "merging/test_verify_merge.py::"
VERIFY_MISTAKES = "merging/test_verify_merge_mistakes.py::"
POSITIONS = "model/test_positions.py::test_rows_beyond_the_positions_are_told_and_shorter_ones_are_not"
VERIFY_CODES = "merging/test_verify_merge_codes.py::"
VERSIONS, DEVICES, DISKS = (
    f"{DOCTOR}test_versions_are_judged",
    f"{DOCTOR}test_hidden_devices_and_too_many_ranks_are_told",
    f"{DOCTOR}test_places_are_judged",
)
# What a page cannot show in a few lines: two GPUs, another user or process, other engines or disks, bases in fp8.
MADE_BY_TESTS = {
    "audit.md": {
        "SL116": "memory/test_audit_model.py::test_a_context_elsewhere",
        "SL117": "memory/test_audit_model.py::test_one_unit_of_fsdp",
        "SL124": "memory/test_audit_model.py::test_what_layers_in_8_bits_keep_under_checkpointing",
        "SL148": "loading/test_load_onto_sharded_base.py::"
        "test_what_was_attached_after_any_fsdp_is_told_unless_a_hook_may_reduce_it",
    },
    "checkpoints.md": {
        "pattern-order": "loading/test_load_advice.py::"
        "test_patterns_that_were_sorted_are_put_into_the_order_of_the_training",
        "base-differs": "loading/test_sources.py::test_a_raw_base_in_the_place_of_a_merged_one_is_told",
        "base-holds-start": "loading/test_sources.py::"
        "test_a_base_that_has_what_a_start_took_out_of_it_is_told_and_the_rest_is_not",
        "hash-unknown": "checkpoint/test_published_hashes.py::test_files_that_nobody_published_are_named",
        "manifest": "checkpoint/test_published_hashes.py::test_a_manifest_of_another_kind_is_an_error",
        "not-signed": "checkpoint/test_signer.py::"
        "test_files_that_nobody_signed_are_errors_until_they_are_removed_or_signed",
        "signature-differs": "checkpoint/test_signer.py::test_another_key_is_an_error_and_the_publishers_own_is_passed",
        "signature-verified": "checkpoint/test_signer.py::test_the_key_that_signed_is_said",
        "signature-not-verified": "checkpoint/test_published_hashes.py::"
        "test_a_manifest_is_compared_and_said_to_be_unverified",
        "tokenizer-beyond-rows": "loading/test_vocabularies.py::test_a_tokenizer_with_words_beyond_the_rows_is_told",
        "trained-beside": "loading/test_other_writers.py::"
        "test_weights_beside_an_adapter_are_told_and_run_once_the_base_has_them",
        "changed": "checkpoint/test_checkpoint_index.py::"
        "test_files_that_changed_since_their_headers_were_read_are_refused",
        "not-a-folder": "checkpoint/test_checkpoint_index.py::"
        "test_folders_that_are_not_there_or_hold_nothing_are_not_found",
        "half-checkpoint": "checkpoint/test_trainer_folder.py::"
        "test_a_save_that_was_killed_is_named_with_the_last_whole_one",
        "packed-statistics": "loading/test_packed_folders.py::test_a_damaged_folder_is_refused_by_name_in_every_verb",
        "unreadable": "loading/test_check_checkpoint.py::test_a_folder_that_cannot_be_listed_is_a_finding",
    },
    "loading.md": {
        "expert-packing-unknown": "loading/test_expert_layouts.py::"
        "test_the_order_in_which_unsloth_packed_experts_is_asked_for",
        "adapter-not-sharded": "loading/test_load_onto_sharded_base.py::"
        "test_an_adapter_on_a_base_that_fsdp_has_sharded_is_trained_alone_and_told",
        "base-differs": "loading/test_sources.py::test_a_raw_base_in_the_place_of_a_merged_one_is_told",
        "base-holds-start": "loading/test_sources.py::"
        "test_a_base_that_has_what_a_start_took_out_of_it_is_told_and_the_rest_is_not",
        "no-tensors": "memory/test_audit_users_models.py::test_a_method_that_adapts_no_layer",
        "tokenizer-ids": "loading/test_check_as_load.py::test_a_tokenizer_with_words_beyond_the_rows_is_an_error",
        "tokenizer-beyond-rows": "loading/test_vocabularies.py::test_a_tokenizer_with_words_beyond_the_rows_is_told",
        "trained-beside": "loading/test_other_writers.py::"
        "test_weights_beside_an_adapter_are_told_and_run_once_the_base_has_them",
        "adapter-named-as-module": "loading/test_load_adapter_on_rank.py::"
        "test_an_adapter_with_the_name_of_modules_is_told_as_peft_saves_others_without_them",
        "current-device": "loading/test_contexts_on_cuda.py::test_the_device_of_a_rank_is_made_current",
        "expert-factors-widened": "loading/test_experts.py::test_scalings_that_16_bits_would_round_widen_the_factors",
        "fused-layout-unknown": "loading/test_expert_layouts.py::test_square_experts_without_a_version_are_refused",
        "lora-dropout-ignored": "loading/test_experts.py::"
        "test_dropout_is_a_finding_and_refused_where_it_would_be_trained_with",
        "codes-reordered": "merging/test_merge_packed.py::test_codes_in_the_order_for_cpus_are_named_and_saved_right",
        "status-differs": "loading/test_compressed_bases.py::test_codes_under_another_status_are_decoded",
        "codes-as-values": "loading/test_compressed_decode.py::"
        "test_codes_that_no_name_of_the_config_reaches_are_refused",
        "decoded-wrongly": "loading/test_compressed_decode.py::test_each_layer_is_decoded_by_its_own_group",
        "skips-differ": "loading/test_packed_modules.py::test_skips_under_older_names_are_those_of_the_headers",
        "shared-tensor-differs": "loading/test_methods.py::"
        "test_projections_that_differ_from_the_shared_ones_are_refused",
    },
    "merge_checkpoint.md": {
        "base-differs": "loading/test_sources.py::test_a_raw_base_in_the_place_of_a_merged_one_is_told",
        "base-holds-start": "loading/test_sources.py::"
        "test_a_base_that_has_what_a_start_took_out_of_it_is_told_and_the_rest_is_not",
        "modules-of-adapter": "merging/test_merge_lora_checkpoint_modules.py::"
        "test_the_modules_that_were_trained_with_an_adapter_come_along",
        "trained-beside": "loading/test_other_writers.py::"
        "test_weights_beside_an_adapter_are_told_and_run_once_the_base_has_them",
        "trained-on-packed": "merging/test_merge_packed.py::test_an_adapter_of_a_packed_base_is_told_of_the_two_merges",
        **dict.fromkeys(
            ("requantized", "update-lost"),
            "merging/test_merge_lora_checkpoint_codes.py::test_an_update_that_rounding_loses_is_told_and_dequantized_it_is_kept",
        ),
        "begun-anew": "merging/test_merge_lora_checkpoint_killed.py::"
        "test_an_edited_record_means_to_begin_anew_and_is_told_once",
        "base-class-chosen": "loading/test_old_names.py::test_the_class_is_the_one_that_has_the_adapters_modules",
        "base-untied": "model/test_ties.py::test_a_merge_of_one_of_two_weights_that_the_config_ties_changes_that_one",
    },
    "memory.md": {"context-too-long": POSITIONS},
    "planning.md": {
        "context-too-long": POSITIONS,
        "base-untied": "model/test_ties.py::test_a_load_and_a_plan_say_that_the_files_hold_two_weights",
        "status-differs": "loading/test_compressed_bases.py::test_codes_under_another_status_are_decoded",
        "skips-differ": "loading/test_packed_modules.py::test_skips_under_older_names_are_those_of_the_headers",
        "class-assumed": "model/test_meta_model.py::"
        "test_a_class_taken_by_the_type_of_the_model_is_a_finding_that_its_name_ends",
        "sizes-ignored": "model/test_meta_model.py::"
        "test_a_vocabulary_that_a_class_would_ignore_is_planned_with_a_finding_and_not_loaded",
        "quantization-assumed": "model/test_weights_dtype.py::test_a_quantized_name_without_a_quantization_is_told",
        "dtype-assumed": "model/test_weights_dtype.py::test_the_advice_of_an_assumed_dtype_taken",
        "loaded-by-trainer": "memory/test_trl_trainers.py::test_the_advice_about_a_trainers_dtype_taken",
    },
    "merging.md": {
        "trained-on-packed": "merging/test_merge_packed.py::test_an_adapter_of_a_packed_base_is_told_of_the_two_merges",
        "codes-reordered": "merging/test_merge_packed.py::test_codes_in_the_order_for_cpus_are_named_and_saved_right",
        "update-lost": "merging/test_fp8_merge.py::test_the_report_says_what_rounding_to_codes_lost",
    },
    "verify_merge.md": {
        "update-twice": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "update-scaled": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "update-transposed": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "values-swapped": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "values-differ": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "merged-not-finite": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "merged-shape": f"{VERIFY_MISTAKES}test_a_mistake_is_named",
        "values-narrowed": f"{VERIFY}test_a_merge_in_16_bits_that_is_stored_in_32_is_told",
        "merged-missing": f"{VERIFY}test_missing_and_extra_tensors",
        "merged-extra": f"{VERIFY}test_missing_and_extra_tensors",
        "merged-left-out": f"{VERIFY.replace('merge.py', 'merge_threads.py')}"
        "test_what_the_class_does_not_read_and_a_save_has_lost",
        "merged-dtype": f"{VERIFY}test_another_dtype_of_the_output_is_judged_in_it",
        "merged-unchecked": f"{VERIFY_CODES}test_codes_without_their_scales_are_unchecked_and_not_ok",
        "merged-config": f"{VERIFY}test_the_files_beside_the_weights",
        "merged-files-lost": f"{VERIFY}test_the_files_beside_the_weights",
        "merged-files-changed": f"{VERIFY_MISTAKES}test_a_file_beside_the_weights_that_changed_is_named",
        "merged-tokenizer-ids": f"{VERIFY.replace('merge.py', 'merge_tokenizers.py')}test_other_ids_are_named",
        "merged-tokenizer-of-base": f"{VERIFY}test_the_files_beside_the_weights",
    },
    "doctor.md": {
        "engine-missing": VERSIONS,
        "engine-too-old": VERSIONS,
        "engine-untested": VERSIONS,
        "engine-advisory": VERSIONS,
        "engine-known": VERSIONS,
        "engine-broken": f"{DOCTOR}test_a_torch_that_cannot_be_imported_is_told",
        "devices-hidden": DEVICES,
        "too-few-devices": DEVICES,
        "devices-renumbered": f"{DOCTOR}test_renumbered_devices_are_told",
        "stray-context": f"{DOCTOR}test_a_process_on_two_gpus_is_a_stray",
        "not-writable": f"{DOCTOR}test_an_output_that_cannot_be_written_is_told",
        "no-exchange": DISKS,
        "little-room": DISKS,
        "network-disk": DISKS,
        "small-shared-memory": DISKS,
    },
}
PAGES = [path.name for path in sorted(table.DOCS.glob("*.md")) if table.rows(path.name)]


@pytest.mark.parametrize("page", PAGES)
def test_every_code_is_made_on_its_page_or_by_a_test(page: str) -> None:
    codes = {row.code for row in table.rows(page)}
    by_tests = MADE_BY_TESTS.get(page, {})
    made = codes & table.made(page).keys()
    assert not codes - made - by_tests.keys(), f"make these on purpose, and mend them, at the end of docs/{page}"
    assert not made & by_tests.keys(), "made on the page, so no test needs to be named"
    assert by_tests.keys() <= codes


@pytest.mark.parametrize("page", MADE_BY_TESTS)
def test_the_tests_that_make_a_code_exist_and_name_it(page: str) -> None:
    for code, test in MADE_BY_TESTS[page].items():
        file, _, name = test.partition("::")
        source = (TESTS / file).read_text(encoding="utf-8")
        assert name in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}, test
        assert code in source, test


def test_a_code_that_is_only_in_a_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "| code | severity | what it means | what to do |\n| --- | --- | --- | --- |\n"
    rows += "| `a-made` | error | [this](x.md) | that |\n| `b-not` | info | more | {py:class}`~safe_loading.X` |\n"
    block = '```python\nshow({"a-made": ("do()", "mend()"), "b-not": ("x", "y")})\n```\n\n```text\na-made: said\n```\n'
    (tmp_path / "page.md").write_text(rows + "\n" + block)
    monkeypatch.setattr(table, "DOCS", tmp_path)
    assert table.rows("page.md") == [
        table.Row("a-made", "page.md", "error", "this", "that"),
        table.Row("b-not", "page.md", "info", "more", "`X`"),
    ]
    assert table.made("page.md") == {"a-made": table.Example("do()", "mend()")}


def test_the_command_ships_what_the_pages_say() -> None:
    shipped = table.SHIPPED.read_text(encoding="utf-8")
    assert shipped == table.shipped(), "run python -m tests.finding_codes --write"
