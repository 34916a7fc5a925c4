"""Tests that a merge does not wait for, and for each what the merge runs in its place.

A row is a prefix of test ids and one test that stays in the merge and fails if the same thing breaks. conftest marks what matches as
`slow`. Tests marked `slow` where they stand are the long forms of a test beside them and need no row.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Set
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NIGHTLY = {
    # A family in every layout: the merge has one family per mechanism (Qwen3-MoE, DeepSeek-V3, Qwen3-Next, gpt-oss).
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf0-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf1-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf5-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf4-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf7-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf6-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf8-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf3-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf10-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf6-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf11-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf12-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf13-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf14-",
    "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf15-": "tests/models/test_megatron_names.py::test_names_and_shapes_equal_megatrons[hf14-",
    "tests/launch/test_hybrid.py::test_other_families_agree_after_updates": "tests/mrl/training/test_family_matrix.py::test_trains_as_transformers_computes[deepseek_v3-one",
    "tests/launch/test_hybrid.py::test_engines_trainer_and_export_agree_after_updates[cp2-ep2-to-dp2": "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-cp2-tp2-ep2",
    # A layout of one mechanism: the merge has its smallest and its largest.
    "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-pp2]": "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-pp2-vpp2]",
    "tests/mrl/training/test_layouts.py::test_layout[deepseek_v3-pp2-vpp2": "tests/mrl/training/test_layouts.py::test_layout[deepseek_v3-tp2-ep2",
    "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[tp-ep": "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[ep-dp",
    "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[pp": "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[ep-dp",
    "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-tp2-dp2-recompute": "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-dp2-ep2-one",
    "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-dp2-lora": "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-dp2-ep2-one",
    "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-tp2-ep2": "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-cp2-tp2-ep2",
    # One mechanism more over what a test that stays runs without it: adapters or bfloat16, and the device's test on a CPU.
    "tests/mrl/training/test_replay.py::test_every_layout_takes_the_routes_it_is_given[qwen3_moe-tp2-pp2-ep2-adapters": "tests/mrl/training/test_replay.py::test_every_layout_takes_the_routes_it_is_given[qwen3_moe-tp2-pp2-vpp2-ep2",
    "tests/mrl/training/test_replay.py::test_given_routes_are_others_and_the_reference_takes_them_too[qwen3_moe-lora": "tests/mrl/training/test_replay.py::test_given_routes_are_others_and_the_reference_takes_them_too[qwen3_moe-None",
    "tests/mrl/training/test_lora.py::test_a_step_is_the_full_step_restricted[bfloat16": "tests/mrl/training/test_lora.py::test_a_step_is_the_full_step_restricted[float32",
    "tests/mrl/training/test_worker.py::test_offload_frees_memory_and_changes_nothing[bfloat16": "tests/mrl/training/test_worker.py::test_offload_frees_memory_and_changes_nothing[float32",
    "tests/gpu/test_training.py::test_a_step_and_what_is_lent_and_off_loaded[cpu": "tests/mrl/training/test_worker.py::test_offload_frees_memory_and_changes_nothing[float32",
    # Thirty losses in every layout; the policy's loss beside the reference stays in three.
    "tests/mrl/algorithms/test_on_megatron.py::test_layouts_and_microbatches_change_nothing[({'tp': 2": "tests/mrl/algorithms/test_on_megatron.py::test_the_reference_beside_the_policy[{'tp': 2",
    "tests/mrl/algorithms/test_on_megatron.py::test_layouts_and_microbatches_change_nothing[({'pp': 2": "tests/mrl/algorithms/test_on_megatron.py::test_the_reference_beside_the_policy[{'pp': 2",
    "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'tp': 2": "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'ep': 2",
    "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'pp': 2": "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'ep': 2",
    "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[ep2-off-bf16": "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[tp2ep2-off-fp32",
    "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[ep2-selective-fp32": "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[pp2-full-fp32",
    "tests/mrl/capacity/test_real_saving.py::test_a_checkpoint_has_the_bytes_that_are_planned[bfloat16": "tests/mrl/capacity/test_real_saving.py::test_a_checkpoint_has_the_bytes_that_are_planned[float32",
    "tests/mrl/rollout/test_split_prompts.py::test_a_split_or_preempted_prompt_has_the_tokens_of_a_whole_one[tp2": "tests/mrl/rollout/test_split_prompts.py::test_a_split_or_preempted_prompt_has_the_tokens_of_a_whole_one[tp1",
    "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=1, pp=1": "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=2, pp=1, ep=2, dp=1, cp=1, etp=1, vpp=1)-1-au",
    "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=1, pp=2, ep=1, dp=1, cp=1, etp=1, vpp=1)-1-dist": "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=2, pp=1, ep=2, dp=1, cp=1, etp=1, vpp=1)-2-dist",
    "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=2, pp=1, ep=2, dp=1, cp=1, etp=1, vpp=1)-2-nixl": "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=1, pp=2, ep=1, dp=1, cp=1, etp=1, vpp=1)-1-nixl",
    "tests/resharding/test_planned.py::test_every_slot_ends_with_its_bytes_of_which_only_the_plans_cross_nodes[Layout(tp=1": "tests/resharding/test_planned.py::test_every_slot_ends_with_its_bytes_of_which_only_the_plans_cross_nodes[Layout(tp=2, pp=1",
    # The stand-in of Transformer Engine: one layout and the fused attention stay.
    "tests/mrl/training/test_transformer_engine.py::test_layout[qwen3_moe-one": "tests/mrl/training/test_transformer_engine.py::test_layout[qwen3_moe-tp2-ep2",
    "tests/mrl/training/test_transformer_engine.py::test_layout[deepseek_v3": "tests/mrl/training/test_transformer_engine.py::test_layout[qwen3_moe-tp2-ep2",
    "tests/mrl/training/test_transformer_engine.py::test_layout[qwen3_next": "tests/mrl/training/test_transformer_engine.py::test_layout[qwen3_moe-tp2-ep2",
    "tests/mrl/training/test_transformer_engine.py::test_bfloat16_takes_the_fused_attention[deepseek_v3": "tests/mrl/training/test_transformer_engine.py::test_bfloat16_takes_the_fused_attention[qwen3_moe",
    "tests/mrl/training/test_transformer_engine.py::test_a_checkpoint_of_one_spec_goes_on_in_the_other[('local'": "tests/mrl/training/test_transformer_engine.py::test_a_checkpoint_of_one_spec_goes_on_in_the_other[('transformer_engine'",
    # Deaths: the merge has the pure worlds and one real death of each kind of process.
    "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 1": "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 0, rename]",
    "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 0, half": "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 0, rename]",
    "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 0, manifest": "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 0, rename]",
    "tests/mrl/training/test_killed_ranks.py::test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other[rank 0, renamed": "tests/mrl/training/test_checkpoint_kills.py::test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint[beside training",
    "tests/launch/test_engine_over_nodes.py::test_paused_requests_continue": "tests/launch/test_engine_over_nodes.py::test_an_engine_over_two_nodes_agrees_and_a_lost_worker_of_its_second_is_named",
    "tests/launch/test_stream.py::test_a_killed_stream_goes_on": "tests/mrl/loops/test_random_deaths.py::test_each_prompt_once_over_twenty_random_deaths[shared",
    "tests/launch/test_soak.py::test_a_kill_a_pause_and_a_full_disk_change_no_bit": "tests/launch/test_kills.py::test_every_kind_of_process_killed_in_some_phase",
    "tests/launch/test_replaced_engines.py::test_a_run_waits_for_the_one_in_the_place_of_its_only_engine": "tests/launch/test_kills.py::test_every_kind_of_process_killed_in_some_phase",
    "tests/launch/test_two_machines.py": "tests/launch/test_cluster.py::test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look[raylet",
    "tests/launch/test_overdue.py::test_a_raylet_that_stands_still": "tests/launch/test_cluster.py::test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look[raylet",
    "tests/mrl/training/test_checkpoint_kills.py::test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint[at once": "tests/mrl/training/test_checkpoint_kills.py::test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint[beside training",
    "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[first": "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[middle",
    "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[module": "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[middle",
    "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[last": "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[finish",
    "tests/launch/test_disk.py::test_a_disk_without_space": "tests/launch/test_train.py::test_sigterm_to_the_process_group_saves_and_leaves_nothing",
    "tests/launch/test_placement.py::test_every_engine_sees_its_slots_gpus_on_two_nodes": "tests/launch/test_placement.py::test_every_engine_sees_its_slots_gpus_on_one_node",
    "tests/launch/test_cluster.py::test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look[gcs": "tests/launch/test_cluster.py::test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look[raylet",
    "tests/launch/test_deaths.py::test_a_worker_that_is_really_killed[monitor": "tests/launch/test_deaths.py::test_a_worker_that_is_really_killed[kill",
    "tests/launch/test_ppo.py": "tests/mrl/loops/test_on_policy.py::test_while_only_the_critic_learns_the_engine_is_still_measured",
    "tests/launch/test_rollout_workers.py::test_two_nodes_have": "tests/mrl/loops/test_worker_thread.py::test_groups_are_those_of_the_driver_and_come_from_the_engines_that_it_would_ask",
    "tests/launch/test_rollout_workers.py::test_episodes_in_workers": "tests/launch/test_rollout_workers.py::test_a_policy_survives",
    "tests/launch/test_ray_node.py::test_preflight_names_the_bad_node": "tests/launch/test_preflight.py::test_one_bad_node_is_named_with_its_fault",
    # Whole programs: the merge has one run on policy, one stream, one of episodes, one tuning, and what only they show.
    "tests/launch/test_slurm.py::test_a_warned_job": "tests/launch/test_train.py::test_sigterm_to_the_process_group_saves_and_leaves_nothing",
    "tests/launch/test_agents.py::test_rows_with_and_without_an_environment": "tests/launch/test_agents.py::test_episodes_are_trained_on_policy",
    "tests/launch/test_tune_ranks.py::test_ranks_meet_where_nobody_else_gets_to_and_finish_their_step[told": "tests/launch/test_tune_ranks.py::test_ranks_meet_where_nobody_else_gets_to_and_finish_their_step[killed",
    "tests/launch/test_rollout_workers.py::test_a_stream_survives": "tests/launch/test_rollout_workers.py::test_a_policy_survives",
    "tests/launch/test_evaluate.py::test_rates_of_a_real_engine": "tests/launch/test_evaluate.py::test_a_run_takes_the_rows_whose_solve_rates_were_measured",
    "tests/launch/test_evaluate.py::test_stop_texts": "tests/mrl/rollout/test_sampling.py::test_stop_texts_end_a_response_that_keeps_them",
    "tests/launch/test_hybrid.py::test_engines_trainer_and_export_agree_after_updates[tp2-ep2-to-1": "tests/launch/test_hybrid.py::test_engines_trainer_and_export_agree_after_updates[ep2-dp2-to-2-offloaded",
    "tests/launch/test_hybrid.py::test_engines_trainer_and_export_agree_after_updates[pp2-to-2": "tests/launch/test_hybrid.py::test_engines_trainer_and_export_agree_after_updates[ep2-dp2-to-2-offloaded",
    "tests/launch/test_preferences.py::test_the_best_and_the_worst": "tests/launch/test_preferences.py::test_worse_responses_are_made_and_judged",
    "tests/launch/test_distillation.py": "tests/mrl/training/test_distillation.py::test_an_update_has_the_gradient_of_whole_logits",
    "tests/configs/test_shrunken.py": "tests/configs/test_recipes.py::test_recipe_fits_its_hardware_and_can_be_trained",
    # Published formats: every format's folder is read in tests/mrl/training/test_hf_folder.py; runs over them are the night's.
    "tests/launch/test_float8.py": "tests/resharding/vllm/test_quantised.py::test_brought_by_boxes_whole_and_read_from_a_folder_are_the_same_to_the_last_bit",
    # Kinds of reward models: the merge stops and resumes the plain one.
    "tests/resharding/vllm/test_folder_loader.py::test_the_text_beside_images_is_read[qwen3_5-": "tests/resharding/vllm/test_folder_loader.py::test_the_text_beside_images_is_read[qwen3_5_moe-",
    # The same at a larger size, or over the stand-in, of what the fast part has.
    "tests/mrl/training/test_host_state.py::test_so_it_is_with_transformer_engines_adam": "tests/mrl/training/test_host_state.py::test_an_update_in_pieces_is_the_whole_one_to_the_last_bit[bfloat16-ep2",
    "tests/mrl/training/test_host_state.py::test_an_update_in_pieces_is_the_whole_one_to_the_last_bit[float32-ep2": "tests/mrl/training/test_host_state.py::test_an_update_in_pieces_is_the_whole_one_to_the_last_bit[bfloat16-ep2",
    "tests/mrl/training/test_hf_export.py::test_an_export_takes_the_memory_of_one_file[gpt_oss": "tests/mrl/training/test_hf_export.py::test_an_export_takes_the_memory_of_one_file[qwen3_moe",
    "tests/resharding/test_plan.py::test_one_rank_plans_a_real_model_in_time": "tests/resharding/test_plan.py::test_qwen3_235b_on_64_gpus_moves_what_arithmetic_says",
    "tests/launch/test_benchmarks_run.py": "tests/resharding/test_bench.py::test_both_modes_move_the_same_bytes",
}  # fmt: skip
"""Prefix of ids -> prefix of the id of a test that stays."""


def is_nightly(test_id: str) -> bool:
    """Return True if a merge does not wait for the test."""
    return test_id.startswith(tuple(NIGHTLY))


@dataclasses.dataclass(frozen=True, slots=True)
class Kinds:
    """Markers that a test file names."""

    integration: bool
    is_whole: bool
    """All are integration tests."""
    slow: bool


@functools.cache
def kinds_in(file: Path) -> Kinds:
    """Read which markers a file names."""
    text, name = (
        file.read_text(),
        file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name,
    )
    return Kinds(
        integration="mark.integration" in text,
        is_whole=re.search(r"^pytestmark = .*mark\.integration", text, re.MULTILINE) is not None,
        slow="mark.slow" in text or any(test_id.startswith(name) for test_id in NIGHTLY),
    )


def is_left_out(file: Path, markers: str) -> bool:
    """Return True if an expression of markers, as the Makefile has them, leaves out every test of a file."""
    kinds = kinds_in(file)
    if "not integration" in markers:
        return kinds.is_whole
    return (markers.startswith("integration") and not kinds.integration) or (
        markers.startswith("slow") and not kinds.slow
    )


def hidden_markers(file: Path, markers: Set[str]) -> list[str]:
    """Return those of a test's markers that its file does not name, so that `is_left_out` would not see them."""
    return [marker for marker in sorted(markers) if not getattr(kinds_in(file), marker)]
