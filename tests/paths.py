"""Tests that `make test` adds to the quick set: one real path of every ability.

An entry is a file, a test of it with all its cases, or one case, as pytest names them below
`tests/`. The other slow tests belong to `make test-all`. `test_architecture.py` holds that every
entry exists and every package with slow tests has a path.
"""

from __future__ import annotations

FEATURES = (
    "prompts in chunks",
    "prefixes shared",
    "preemption",
    "drafts",
    "grammar",
    "KV int8",
    "adapters",
)
PATHS: dict[str, tuple[str, ...]] = {
    "the default model": (
        "engine/test_default_model.py",
        "kernels_cpu/test_default_model_on_cpu.py::test_greedy",
        "models/test_real_models.py::test_greedy[smollm2-135m]",
        "loader/test_real_models.py::test_a_catalog_model",
        "loader/test_download.py",
        "text/test_real_vocabularies.py::test_qwen_equals_its_class_in_transformers",
        "text/test_real_vocabularies.py::test_gemma_equals_transformers",
    ),
    "every family of models": (
        "models/test_against_transformers.py::test_greedy_mixed",
        "models/test_on_the_cpu_kernels.py::"
        "test_greedy_tokens_alone_behind_a_prefix_and_beside_others",
        "models/test_descriptions.py",
        "models/test_latent.py::test_every_file_against_transformers",
        "roofline/test_described.py::test_a_published_config_is_planned[llama-3.1-8b]",
    ),
    "every format of weights": (
        "models/test_formats.py",
        "models/test_quantised_checkpoints.py::test_answers_without_torch",
        "models/test_quantised_checkpoints.py::test_mixtures",
        "loader/test_gguf_greedy.py::test_64_of_64_tokens[llama]",
        "loader/test_mxfp4_answers.py",
    ),
    "features of a row and a step": (
        *(
            f"models/test_features.py::test_feature[{family}-{feature}]"
            for family in ("llama", "qwen3_next")
            for feature in FEATURES
        ),
        "worker/test_worker.py",
        "worker/test_decode_step.py",
        "worker/test_sampling_in_worker.py",
        "worker/test_verification.py::test_lookup_changes_no_answer",
        "worker/test_draft_model.py::test_no_answer_changes",
        "worker/test_adapters.py::test_equal_to_merged_weights",
        "worker/test_bans.py::test_the_prompt_does_not_begin_a_word",
        "worker/test_features_together.py",
        "worker/test_vectors_of_arrays.py::test_vectors",
        "kernels_cpu/test_program.py::test_what_is_fused",
        "kernels_cpu/test_program.py::test_adapters_are_records_of_the_program",
        "kernels_cpu/test_program.py::test_after_a_fork",
        "kernels/test_row_invariance.py::test_linear",
    ),
    "ranks and stages": (
        "worker/test_ranks_of_workers.py::test_the_bits_of_one_worker",
        "worker/test_interpreted_ranks.py::test_the_reference_over_ranks[library-qwen3_moe-sparse]",
        "worker/test_stages_of_workers.py::test_the_bits_of_one_worker",
        "server/test_server_ranks.py::test_two_hosts_answer_as_one_process",
    ),
    "tiers of the context cache": (
        "worker/test_disk.py::test_another_process_reads_what_one_wrote",
        "worker/test_disk.py::test_what_is_damaged_is_dropped",
        "worker/test_remote.py::test_another_machine_finds_what_one_wrote",
        "worker/test_seal.py::test_a_sealed_block_comes_back_and_says_nothing",
        "worker/test_lines.py::test_blocks_come_as_they_are",
        "worker/test_transfer.py",
    ),
    "several models in one server": (
        "server/test_server_several.py::test_each_answers_as_a_server_of_its_own",
    ),
    "recommending": (
        "engine/test_ranker.py",
        "server/test_server_recommend.py",
        "server/test_recommend_movielens.py",
    ),
    "the engine from Python": (
        "engine/test_llm.py::test_every_executor_and_depth_gives_the_same",
        "engine/test_llm.py::test_chat_renders_the_template",
        "engine/test_async_engine.py::test_streams_what_the_worker_says",
        "engine/test_async_engine.py::test_many_at_once_each_get_their_own",
        "engine/test_async_engine.py::test_abort_storm",
        "engine/test_adapters_in_engine.py::test_asyncio",
        "engine/test_structured_output.py::test_every_executor_and_depth",
        "engine/test_embeddings.py::test_minilm_is_its_reference",
        "engine/test_embeddings.py::test_a_model_that_writes_embeds",
        "engine/test_kv_events.py",
        "engine/test_sleep.py::test_waking_up_is_no_restart",
        "engine/test_without_torch.py::test_everything_but_adapters",
    ),
    "one kill of each process": (
        "engine/test_supervision.py::test_kill_under_64_streams",
        "engine/test_supervision.py::test_a_hung_step_is_ended_and_shows_its_stack",
        "engine/test_supervision.py::test_no_process_outlives_its_parent",
        "engine/test_hearing_engine.py::test_a_sound_outlives_its_process_once",
        "server/test_server_faults.py::test_kill_of_the_api_process_takes_the_engine_with_it",
        "server/test_server_batch_client.py::test_a_batch_lives_through_kill_9",
        "server/test_server_ranks.py::test_a_leader_that_is_killed_is_named",
        "route/test_route_kills.py",
        "faults/test_faults.py::test_a_fault",
    ),
    "each route, by its own client": (
        "server/test_server_openai.py",
        "server/test_server_process.py",
        "server/test_server_messages.py::test_the_official_client",
        "server/test_server_responses.py::test_the_official_client_reads_the_stream",
        "server/test_server_responses.py::test_background_work_and_its_end",
        "server/test_server_structured.py::test_a_schema_whole_and_streamed",
        "server/test_server_structured.py::test_a_real_model_answers_in_a_form",
        "server/test_server_calls_model.py::test_an_agents_loop_ends_with_the_right_result",
        "server/test_server_clients.py::test_langchain_on_the_default_model",
        "server/test_server_infill.py::test_the_default_model_speaks_ollama",
        "server/test_server_embeddings.py::test_the_official_client",
        "server/test_server_adapters.py::test_the_life_of_adapters",
        "server/test_server_control.py::test_a_real_engine_gives_its_memory_back",
        "server/test_server_bad_files.py::test_templates_that_do_harm",
        "server/test_server_hostile.py::test_what_is_no_http_is_refused",
        "server/test_server_hostile.py::test_a_thousand_connections_that_send_nothing",
        "server/test_page_browser.py::test_a_chat_is_typed_streamed_and_measured",
        "server/test_page_talks.py::test_a_reload_loses_nothing",
        "server/test_page_files.py::test_a_dropped_text_goes_with_the_message",
        "server/test_page_markdown.py::test_a_table_has_its_columns_alone",
        "server/test_page_access.py::test_the_model_is_chosen_by_keyboard",
        *(
            f"agents/test_agents.py::test_the_loop_ends_with_the_tools_result[{client}]"
            for client in ("anthropic", "openai_agents", "pydantic_ai")
        ),
    ),
    "sound": (
        "media/test_audio.py",
        "speech/test_real.py::test_tokens_are_those_of_transformers",
        "speech/test_whisper_lane.py::test_all_answer_as_alone",
        "engine/test_spoken.py::test_an_engine_that_ends_while_it_speaks",
        "server/test_server_several_ears.py::test_each_is_chosen_by_its_names",
        "server/test_server_hearing.py::test_files_in_every_form",
        "server/test_server_hearing.py::test_a_session_with_openais_client",
        "server/test_server_hearing.py::test_a_stream_of_a_file",
        "server/test_server_parakeet.py::test_files_and_streams",
        "server/test_page_speaks.py",
        "cli/test_cli_speak.py::test_a_file",
    ),
    "pictures": (
        "media/test_pictures.py",
        "worker/test_picture_encoder.py::test_rows_and_logits_are_those_of_transformers",
        "engine/test_mutual_pictures_in_engine.py",
    ),
    "several servers": (
        "route/test_gateway.py::test_a_prefix_stays_with_its_replica",
        "route/test_gateway.py::test_a_stream_goes_on_where_its_client_stands",
        "route/test_picker_envoy.py::test_the_answer_decides_and_a_prefix_stays",
        "route/test_replay_live.py",
    ),
    "the command line": (
        "cli/test_cli_commands.py",
        "cli/test_against_a_server.py::test_generate_reports_what_the_server_counted",
        "cli/test_cli_cache.py::test_blocks_go_to_another_folder_and_are_forgotten",
        "cli/test_cli_keys.py",
        "cli/test_cli_replay.py::test_an_answer_is_recorded_and_proved_again",
        "cli/test_cli_roofline_hearing.py::test_the_command",
        "cli/test_top.py::test_once_against_a_real_server_and_none",
        "docs/test_examples.py::test_a_program",
        "docs/test_examples.py::test_a_command"
        "[docs/cli.md headrace plan MODEL --devices 8xH100 --command vllm]",
        "docs/test_examples.py::test_a_command"
        "[docs/split.md headrace simulate MODEL --replicas 4 --prefill 2 --handover pays]",
    ),
    "the bench, the roofline and the planner": (
        "bench/test_harness.py::test_latencies_are_found",
        "bench/test_harness.py::test_the_folder_of_a_run",
        "bench/test_questions.py::test_the_search_finds_the_largest_load",
        "bench/test_questions.py::test_commands",
        "bench/test_mlperf.py::test_scenarios",
        "bench/test_mlperf_hearing.py::test_performance",
        "bench/test_offline.py::test_the_commands_keep_what_they_measure",
        "bench/test_operators.py",
        "bench/test_disk.py::test_a_killed_run_is_recovered",
        "bench/test_simulation.py::test_plan_command",
        "roofline/test_machine.py::test_the_default_models_steps",
    ),
    "the factory and what it ships": (
        "factory/test_factory_build.py::test_a_build_ends_in_a_signed_profile",
        "factory/test_factory_build.py::test_again_nothing_runs",
        "factory/test_factory_image.py::test_what_is_in_the_image",
        "factory/test_factory_registry.py::test_the_command_line_ships",
        "factory/test_factory_rings.py::test_the_command_line_promotes_and_goes_back",
        "factory/test_factory_serve.py::test_a_server_keeps_to_its_profile",
        "factory/test_factory_tamper.py::test_every_file_of_the_store_is_held_to_its_bytes",
        "factory/test_factory_kills.py::test_killed_in_every_stage_the_same_build_ends_in_the_same",
        "factory/test_factory_panels.py::test_a_server_maps_what_came_from_a_registry",
        "factory/test_factory_withdrawn.py",
        "factory/test_fleet_page.py::test_in_a_browser",
        "quantise/test_command.py::test_a_gguf_is_made_smaller_and_reported[q4_k]",
        "quantise/test_command.py::test_a_folder_keeps_all_its_files[w4a16-g32]",
        "quantise/test_convert.py::test_transformers_computes_the_same_from_the_folder[Llama]",
        "quantise/test_statistic.py::test_a_killed_process_goes_on",
        "factory/test_fleet_store.py::test_every_line_is_a_row_or_refused",
        "deploy/test_lock.py",
        "deploy/test_observability.py",
        "deploy/test_picker_manifest.py",
        "deploy/test_ray.py",
    ),
    "what is seen of a server": (
        "obs/test_spans.py::test_a_real_server_sends_the_true_times",
        "obs/test_spans.py::test_a_request_becomes_a_tree_under_the_callers_span",
    ),
    "foreign programs": (
        "programs/test_real_programs.py::test_a_picture_is_read_back",
        "programs/test_real_programs.py::test_speech_is_found_in_a_recording",
        "programs/test_exports.py",
        "server/test_server_voices.py::test_a_text_is_read_back",
        "programs/test_inspection.py::test_real_pickles_of_torch_are_refused",
    ),
    "GPU kernels without a GPU": (
        "kernels_triton/test_whole_models.py::test_greedy_equals_the_reference_path",
        "kernels_triton/test_attention.py::test_equals_reference",
        "kernels_triton/test_product_packed.py::test_equals_float64",
        "kernels_triton/test_product_fp8.py::test_equals_the_product_of_the_codes",
        "kernels_triton/test_moe.py::test_equals_reference",
        "kernels_triton/test_states.py::test_recur",
        "kernels_triton/test_latents.py::test_queries_to_latents_and_back",
        "kernels_triton/test_sampling.py::test_draws_as_the_reference",
        "kernels_triton/test_driver.py",
        "kernels_triton/test_interpreter.py",
        "kernels_triton/test_scripts.py::test_kernels_of_a_model_compile_without_faults",
    ),
    "processes and time as they are": (
        "bench/test_gated_load.py",
        "bench/test_hearing.py",
        "bench/test_lies.py",
        "bench/test_load.py",
        "bench/test_peer_scripts.py",
        "bench/test_simulated_failures.py",
        "engine/test_context_cache.py",
        "engine/test_drafts_of_held_rows.py",
        "engine/test_ranks.py",
        "engine/test_seeds.py",
        "engine/test_split.py",
        "engine/test_split_faults.py",
        "engine/test_split_hostile.py",
        "factory/test_factory_workflow.py",
        "kernels/test_cuda_graphs.py",
        "kernels_cpu/test_memory_of_a_start.py",
        "loader/test_kept_panels.py",
        "roofline/test_planner.py",
        "server/batches/test_server_batches.py",
        "server/test_server_chat_pictures.py",
        "server/test_server_chat_sounds.py",
        "server/test_server_loop.py",
        "server/test_server_trust.py",
        "speech/test_decoding.py",
        "text/test_template.py",
    ),
    "other processors": ("kernels_cpu/test_frozen_records.py",),
}
"""Real paths by ability."""


ALL = frozenset(path for paths in PATHS.values() for path in paths)
FILES = frozenset(path.partition("::")[0] for path in ALL)


def is_path(name: str) -> bool:
    """Whether a test belongs to a path; `name` is pytest's, below `tests/`."""
    return bool({name, name.partition("[")[0], name.partition("::")[0]} & ALL)
