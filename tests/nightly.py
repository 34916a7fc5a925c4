"""Tests that a merge does not wait for, and for each what the merge runs in its place.

A row is a prefix of test ids and one test that stays in the merge and fails if the same thing breaks. conftest marks what matches as
`slow`. Tests marked `slow` where they stand are the long forms of a test beside them and need no row.
"""

NIGHTLY = {
    # A family in every layout: the merge has one family per mechanism (Qwen3-MoE, DeepSeek-V3, Qwen3-Next, gpt-oss).
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf0-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf1-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf5-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf4-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf7-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf6-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf8-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf3-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf10-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf6-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf11-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf12-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf2-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf13-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf14-",
    "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf15-": "tests/models/test_megatron_names.py::test_names_shapes_and_coordinates_equal_megatrons[hf14-",
    "tests/launch/test_hybrid.py::test_other_families_agree_after_updates": "tests/mrl/training/test_family_matrix.py::test_trains_as_transformers_computes[deepseek_v3-one",
    "tests/launch/test_hybrid.py::test_engines_trainer_and_export_agree_after_updates[cp2-ep2-to-dp2": "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-cp2-tp2-ep2",
    # A layout of one mechanism: the merge has its smallest and its largest.
    "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-pp2]": "tests/mrl/training/test_layouts.py::test_layout[qwen3_moe-pp2-vpp2]",
    "tests/mrl/training/test_layouts.py::test_layout[deepseek_v3-pp2-vpp2": "tests/mrl/training/test_layouts.py::test_layout[deepseek_v3-tp2-ep2",
    "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[tp-ep": "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[ep-dp",
    "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[pp": "tests/mrl/training/test_critic.py::test_every_layout_computes_the_same[ep-dp",
    "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-tp2-dp2-recompute": "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-dp2-ep2-one",
    "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-dp2-lora": "tests/mrl/training/test_overlap.py::test_the_sums_are_the_same[qwen3_moe-dp2-ep2-one",
    "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'tp': 2": "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'ep': 2",
    "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'pp': 2": "tests/mrl/algorithms/test_on_megatron.py::test_the_one_update_of_a_step_needs_no_pass_before_it[({'ep': 2",
    "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[ep2-off-bf16": "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[tp2ep2-off-fp32",
    "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[ep2-selective-fp32": "tests/mrl/capacity/test_real_memory.py::test_every_category_is_within_five_per_cent[pp2-full-fp32",
    "tests/mrl/capacity/test_real_saving.py::test_a_checkpoint_has_the_bytes_that_are_planned[bfloat16": "tests/mrl/capacity/test_real_saving.py::test_a_checkpoint_has_the_bytes_that_are_planned[float32",
    "tests/mrl/rollout/test_split_prompts.py::test_a_split_or_preempted_prompt_has_the_tokens_of_a_whole_one[tp2": "tests/mrl/rollout/test_split_prompts.py::test_a_split_or_preempted_prompt_has_the_tokens_of_a_whole_one[tp1",
    "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=1, pp=1": "tests/resharding/test_pools.py::test_separate_pools_get_every_byte_and_one_receivers_error_stops_all[Layout(tp=2, pp=1, ep=2, dp=1, cp=1, etp=1, vpp=1)-1-au",
    "tests/resharding/test_pools.py::test_the_peer_lane_crosses_two_nodes_with_the_plans_bytes[Layout(tp=1": "tests/resharding/test_pools.py::test_the_peer_lane_crosses_two_nodes_with_the_plans_bytes[Layout(tp=2",
    "tests/resharding/test_planned.py::test_every_slot_ends_with_its_manifests_bytes[tp2-pp2": "tests/resharding/test_planned.py::test_every_slot_ends_with_its_manifests_bytes[tp2-ep2",
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
    "tests/launch/test_soak.py::test_a_kill_a_pause_and_a_full_disk_change_no_bit": "tests/launch/test_kills.py::test_every_kind_of_process_killed_in_some_phase",
    "tests/launch/test_replaced_engines.py::test_a_run_waits_for_the_one_in_the_place_of_its_only_engine": "tests/launch/test_kills.py::test_every_kind_of_process_killed_in_some_phase",
    "tests/launch/test_two_machines.py": "tests/launch/test_slurm.py::test_a_warned_job_on_two_nodes_saves_requeues_resumes_and_completes",
    "tests/launch/test_overdue.py::test_a_raylet_that_stands_still": "tests/launch/test_cluster.py::test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look[raylet",
    "tests/mrl/training/test_checkpoint_kills.py::test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint[at once": "tests/mrl/training/test_checkpoint_kills.py::test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint[beside training",
    "tests/launch/test_environment_nodes.py::test_what_a_lost_node_had_is_lost": "tests/launch/test_reward_group.py::test_a_group_of_nodes_answers_as_one_pool_and_a_lost_node_is_named",
    "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[first": "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[middle",
    "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[module": "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[middle",
    "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[last": "tests/resharding/vllm/test_plugin.py::test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit[finish",
    "tests/launch/test_disk.py::test_a_disk_without_space": "tests/launch/test_disk.py::test_a_rank_that_cannot_write_does_not_stop_training",
    "tests/launch/test_placement.py::test_every_engine_sees_its_slots_gpus_on_two_nodes": "tests/launch/test_placement.py::test_every_engine_sees_its_slots_gpus_on_one_node",
    # Readers of published formats: every format's folder is read in tests/mrl/training/test_hf_folder.py; one is trained and served.
    "tests/launch/test_float8.py::test_published_float8_weights_are_trained_and_served[none": "tests/launch/test_float8.py::test_published_float8_weights_are_trained_and_served[fp8_block",
    "tests/launch/test_float8.py::test_published_float8_delta_nets": "tests/launch/test_float8.py::test_published_float8_weights_are_evaluated_as_they_are",
    # Kinds of reward models: the merge stops and resumes the plain one.
    "tests/mrl/loops/tuning/test_tune.py::test_heads_stopped": "tests/mrl/loops/tuning/test_tune.py::test_a_reward_model_stopped_and_resumed_is_the_same_to_the_bit",
    "tests/mrl/loops/tuning/test_tune.py::test_distributions_stopped": "tests/mrl/loops/tuning/test_tune.py::test_a_reward_model_stopped_and_resumed_is_the_same_to_the_bit",
    "tests/mrl/loops/tuning/test_tune.py::test_step_scores_stopped": "tests/mrl/loops/tuning/test_tune.py::test_a_reward_model_stopped_and_resumed_is_the_same_to_the_bit",
    "tests/launch/test_judge_servers.py::test_a_tuned_process_reward_model": "tests/launch/test_judge_servers.py::test_a_served_reward_model_scores_as_transformers",
    # Programs that measure: the merge runs one.
    "tests/launch/test_benchmarks_run.py": "tests/resharding/test_bench.py::test_both_modes_move_the_same_bytes",
}  # fmt: skip
"""Prefix of ids -> prefix of the id of a test that stays."""


def is_nightly(test_id: str) -> bool:
    """Return True if a merge does not wait for the test."""
    return test_id.startswith(tuple(NIGHTLY))
