"""Settings for all tests, and the session that those with Spark share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest
from hypothesis import HealthCheck, settings
from pyspark.sql import SparkSession

from statelog.rpc.tls import TlsIdentity, new_identity

pytest.register_assert_rewrite(
    "statelog.testing.contracts",
    "tests.bucket_contract",
    "tests.contract.log_contract",
    "tests.contract.table_contract",
    "tests.queries.spark_files_contract",
)

# Time limits per example would make tests depend on what else the machine does.
settings.register_profile("statelog", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("statelog")

_REPOSITORY = str(Path(__file__).parents[1])
if _REPOSITORY not in sys.path:
    sys.path.insert(0, _REPOSITORY)
# Workers and drivers in processes of their own import the tests' processors from here.
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (_REPOSITORY, *os.environ.get("PYTHONPATH", "").split(os.pathsep)) if part
)
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _jvm_options() -> str:
    from tests.jvm import jvm_options

    return " ".join(jvm_options(os.environ.get("STATELOG_TEST_CLASSES", "")))


os.environ.setdefault("JDK_JAVA_OPTIONS", _jvm_options())


_SLOW = (
    "tests/azure",
    "tests/benchmarks",
    "tests/cluster",
    "tests/conversions",
    "tests/docs",
    "tests/examples",
    "tests/hdfs",
    "tests/kafka",
    "tests/model",
    "tests/packaging",
    "tests/s3",
    "tests/s3a",
    "tests/soak",
    "tests/spark",
    "tests/coordinator/test_crash_points.py",
    "tests/coordinator/test_kill_points.py",
    "tests/coordinator/test_materialization.py::test_the_log_and_what_is_kept_of_it_stay_bounded",
    "tests/coordinator/test_retention.py::test_five_thousand_checkpoints",
    "tests/coordinator/test_retention.py::test_the_mode_is_switched_in_every_order",
    "tests/tables/test_rocksdb_table.py::test_a_death_while_a_run_is_applied",
    "tests/tasks/test_uploads.py::test_a_changeset_in_parts_is_the_same_changeset",
)
"""Left out by ``./dev test --quick``: random stories, queries, thousands of checkpoints, processes that are killed."""


_EXTENDED = (
    "tests/conversions/test_conversions.py::test_columns_and_keys_reach_processors_as_spark_gives_them[frames]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[keyed-after-across]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[keyed-after-off]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[keyed-after-within]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[keyed-before-off, only",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[keyed-before-off]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[keyed-before-within]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[unkeyed-after-across]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[unkeyed-before-off]",
    "tests/coordinator/test_crash_points.py::test_a_process_dies_at_every_store_operation[unkeyed-before-within]",
    "tests/coordinator/test_kill_points.py::test_a_process_is_killed_at_every_store_operation[keyed-across-driver-before]",
    "tests/coordinator/test_kill_points.py::test_a_process_is_killed_at_every_store_operation[keyed-across-task-after]",
    "tests/coordinator/test_kill_points.py::test_a_process_is_killed_at_every_store_operation[unkeyed-within-driver-after]",
    "tests/coordinator/test_kill_points.py::test_a_process_is_killed_at_every_store_operation[unkeyed-within-driver-before]",
    "tests/coordinator/test_kill_points.py::test_a_process_is_killed_at_every_store_operation[unkeyed-within-task-before]",
    "tests/coordinator/test_retention.py::test_five_thousand_checkpoints_leave_a_bounded_number_of_files[off]",
    "tests/coordinator/test_retention.py::test_five_thousand_checkpoints_leave_a_bounded_number_of_files[within]",
    "tests/history/test_query_history.py::test_any_story[3",
    "tests/history/test_query_history.py::test_any_story[4",
    "tests/history/test_query_history.py::test_any_story[5",
    "tests/history/test_query_history.py::test_any_story[6",
    "tests/history/test_query_history.py::test_any_story[7",
    "tests/history/test_query_history.py::test_any_story[8",
    "tests/history/test_query_history.py::test_any_story[9",
    "tests/joins/test_asof_join.py::test_batches_and_state_are_those_of_the_model[inner-True]",
    "tests/joins/test_asof_join.py::test_batches_and_state_are_those_of_the_model[left-False]",
    "tests/joins/test_interval_join.py::test_batches_with_a_condition_are_those_of_the_model[anti]",
    "tests/joins/test_interval_join.py::test_batches_with_a_condition_are_those_of_the_model[inner]",
    "tests/joins/test_interval_join.py::test_batches_with_a_condition_are_those_of_the_model[right]",
    "tests/joins/test_interval_join.py::test_batches_with_a_condition_are_those_of_the_model[semi]",
    "tests/joins/test_interval_join.py::test_batches_with_a_timeout_are_those_of_the_model[anti]",
    "tests/joins/test_interval_join.py::test_batches_with_a_timeout_are_those_of_the_model[right]",
    "tests/kafka/test_reading.py::test_a_driver_that_is_killed_within_a_batch[JVM",
    "tests/log/test_seen_files.py::test_a_log_that_remembers_says_the_same[across-0]",
    "tests/log/test_seen_files.py::test_a_log_that_remembers_says_the_same[across-2]",
    "tests/log/test_seen_files.py::test_a_log_that_remembers_says_the_same[off-1]",
    "tests/log/test_seen_files.py::test_a_log_that_remembers_says_the_same[off-2]",
    "tests/log/test_seen_files.py::test_a_log_that_remembers_says_the_same[within-0]",
    "tests/log/test_seen_files.py::test_a_log_that_remembers_says_the_same[within-1]",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[1",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[3]",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[4]",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[6]",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[7]",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[8]",
    "tests/model/test_hosts_and_actions.py::test_nothing_is_lost_when_subtasks_move_from_host_to_host[9]",
    "tests/model/test_state_model.py::TestAllTables",
    "tests/model/test_state_model.py::TestMemoryTable",
    "tests/model/test_state_model.py::TestRocksTable",
    "tests/queries/test_branch.py::test_a_branch_goes_on_from_each_retained_checkpoint[1-objects]",
    "tests/queries/test_branch.py::test_a_branch_goes_on_from_each_retained_checkpoint[3-inline]",
    "tests/queries/test_branch.py::test_a_branch_goes_on_from_each_retained_checkpoint[5-objects]",
    "tests/queries/test_chains.py::test_nothing_is_lost_whatever_tools_do_to_a_query_and_its_branches[2]",
    "tests/queries/test_chains.py::test_nothing_is_lost_whatever_tools_do_to_a_query_and_its_branches[3]",
    "tests/queries/test_fall_back.py::test_a_query_goes_on_from_its_newest_whole_checkpoint[inline-False]",
    "tests/queries/test_fall_back.py::test_a_query_goes_on_from_its_newest_whole_checkpoint[objects-False]",
    "tests/reading/test_changes.py::test_a_reader_of_changes_stopped_at_any_request_reads_exactly[6]",
    "tests/reading/test_changes_with_before.py::test_a_reader_stopped_at_any_request_reads_exactly[6]",
    "tests/reading/test_consumer.py::test_a_consumer_has_every_change_of_a_query_that_forgets_as_fast_as_it_can[5]",
    "tests/reading/test_consumer_with_before.py::test_a_consumer_knows_what_was_before_every_change[1]",
    "tests/reading/test_consumer_with_before.py::test_a_consumer_knows_what_was_before_every_change[2]",
    "tests/reading/test_consumer_with_before.py::test_a_consumer_knows_what_was_before_every_change[3]",
    "tests/reading/test_consumer_with_before.py::test_a_consumer_stopped_at_any_request_is_right_or_is_told",
    "tests/reading/test_delete_orphans.py::test_nothing_is_lost_in_a_random_story[1]",
    "tests/reading/test_delete_orphans.py::test_nothing_is_lost_in_a_random_story[2]",
    "tests/reading/test_delete_orphans.py::test_nothing_is_lost_in_a_random_story[3]",
    "tests/reading/test_delete_orphans.py::test_nothing_is_lost_in_a_random_story[4]",
    "tests/reading/test_delete_orphans.py::test_nothing_is_lost_in_a_random_story[5]",
    "tests/reading/test_lines.py::test_the_history_of_a_key_has_no_state_that_was_taken_back[long ago",
    "tests/reading/test_pins.py::test_a_query_stopped_at_any_request_deletes_nothing_that_a_pin_holds[inline]",
    "tests/reading/test_pins.py::test_a_reader_stopped_at_any_request_reads_exactly_or_is_told[objects]",
    "tests/reading/test_pins.py::test_a_reader_whose_pin_expires_at_any_request_is_told[inline-by name]",
    "tests/reading/test_pins.py::test_a_reader_whose_pin_expires_at_any_request_is_told[inline-verify]",
    "tests/reading/test_pins.py::test_a_reader_whose_pin_expires_at_any_request_is_told[objects-by batch]",
    "tests/reading/test_verify.py::test_a_query_that_deletes_meanwhile_is_not_damaged[inline]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[apart-agg-True]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[apart-aggregate",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[apart-process-False]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[apart-reduce",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[counts-aggregate",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[counts-reduce",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sessions-agg-False]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sessions-aggregate",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sessions-process-True]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sessions-reduce-True]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sliding-agg-True]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sliding-aggregate",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sliding-process-False]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[sliding-reduce-False]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[tumbling-agg-",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[tumbling-aggregate-False]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[tumbling-process-True]",
    "tests/reading/test_windows.py::test_the_open_windows_of_every_checkpoint[tumbling-reduce",
    "tests/s3/test_branches.py::test_a_branch_goes_on_elsewhere_until_it_needs_no_parent[bucket-inline]",
    "tests/s3/test_branches.py::test_a_branch_goes_on_elsewhere_until_it_needs_no_parent[bucket-objects]",
    "tests/s3/test_branches.py::test_a_branch_goes_on_elsewhere_until_it_needs_no_parent[directory-objects]",
    "tests/s3/test_branches.py::test_a_branch_goes_on_elsewhere_until_it_needs_no_parent[other bucket-inline]",
    "tests/s3/test_branches.py::test_a_branch_goes_on_elsewhere_until_it_needs_no_parent[other folder-inline]",
    "tests/s3/test_branches.py::test_a_branch_goes_on_elsewhere_until_it_needs_no_parent[other folder-objects]",
    "tests/s3a/test_queries.py::test_a_query_with_hadoop_s_credentials_survives_its_driver[abort-durable-2-False]",
    "tests/s3a/test_queries.py::test_spark_s_file_sink_and_a_clock_that_comes_and_goes[abort]",
    "tests/spark/dropin/test_migrated.py::test_a_migration_that_dies_at_any_write_is_repeated[after]",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[event time with a delay, in pandas",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[event time, a batch with rows was begun]",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[event time, a batch without",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[expiry, with a heartbeat]",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[many entries]",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[states in pandas mode]",
    "tests/spark/dropin/test_migrated.py::test_every_later_batch_is_the_same[timers of processing time]",
    "tests/spark/dropin/test_same_as_spark.py::test_every_batch_is_as_recorded[event time with a delay, in pandas",
    "tests/spark/dropin/test_same_as_spark.py::test_every_batch_is_as_recorded[into a native",
    "tests/spark/dropin/test_same_as_spark.py::test_every_batch_is_as_recorded[into a second operator]",
    "tests/spark/dropin/test_same_as_spark.py::test_every_batch_is_as_recorded[states in pandas mode]",
    "tests/spark/dropin/test_same_as_spark.py::test_every_batch_is_as_recorded[states that their own init deletes]",
    "tests/spark/test_aggregates.py::test_a_stream_by_time_returns_what_spark_returns[update]",
    "tests/spark/test_aggregates.py::test_values_and_types_are_those_of_spark[keys1-True]",
    "tests/spark/test_asynchronous_progress.py::test_batches_that_spark_would_repeat_as_one_are_planned_anew",
    "tests/spark/test_asynchronous_progress.py::test_kills_at_any_step_lose_nothing",
    "tests/spark/test_basics.py::test_any_parallelism_at_every_start[RocksDB table]",
    "tests/spark/test_basics.py::test_any_parallelism_at_every_start[all at once]",
    "tests/spark/test_basics.py::test_any_parallelism_at_every_start[memory table]",
    "tests/spark/test_basics.py::test_any_parallelism_at_every_start[much merging]",
    "tests/spark/test_basics.py::test_any_parallelism_at_every_start[object log]",
    "tests/spark/test_basics.py::test_any_parallelism_at_every_start[uploads]",
    "tests/spark/test_change_source.py::test_a_stream_goes_on_after_restarts[list]",
    "tests/spark/test_change_source.py::test_a_stream_goes_on_after_restarts[map]",
    "tests/spark/test_change_source.py::test_a_stream_tells_what_was_before",
    "tests/spark/test_changing_operators.py::test_a_crash_in_the_first_batch_of_an_added_operator[None]",
    "tests/spark/test_changing_operators.py::test_a_crash_in_the_first_batch_of_an_added_operator[durable]",
    "tests/spark/test_clock.py::test_batches_without_data_can_be_switched_off[watermark of its own]",
    "tests/spark/test_clock.py::test_heartbeat_may_come_and_go[1]",
    "tests/spark/test_clock.py::test_timers_fire_in_a_batch_without_data[watermark of its own]",
    "tests/spark/test_decimal_aggregates.py::test_keys_over_a_restart[False]",
    "tests/spark/test_decimal_aggregates.py::test_many_stories",
    "tests/spark/test_executors.py::test_a_killed_worker_leaves_its_files",
    "tests/spark/test_executors.py::test_a_restart_with_another_parallelism_fetches_once",
    "tests/spark/test_executors.py::test_an_executor_killed_within_a_batch_is_replaced_in_it",
    "tests/spark/test_executors.py::test_an_executor_that_comes_gets_subtasks_that_stay",
    "tests/spark/test_executors.py::test_only_the_subtasks_of_a_killed_executor_move",
    "tests/spark/test_executors.py::test_operators_without_keys_stay_too",
    "tests/spark/test_executors.py::test_subtasks_stay_where_their_files_are",
    "tests/spark/test_executors.py::test_the_calls_of_all_this_were_encrypted",
    "tests/spark/test_executors.py::test_the_doctor_asks_every_executor",
    "tests/spark/test_executors.py::test_the_late_ack_of_a_lost_executors_task_is_refused",
    "tests/spark/test_executors.py::test_the_placement_table_is_cached_while_the_query_runs",
    "tests/spark/test_executors.py::test_the_state_is_exact_after_all_of_it",
    "tests/spark/test_executors.py::test_workers_that_spark_ends_when_they_are_idle_leave_their_files",
    "tests/spark/test_initial_tables.py::test_every_kind_is_loaded_once_whatever_happens_to_the_first_batch[False]",
    "tests/spark/test_joins.py::test_outer_joins_return_each_row_without_a_match_once[left]",
    "tests/spark/test_key_types.py::test_a_key_is_what_spark_groups_by[false-, id",
    "tests/spark/test_key_types.py::test_a_key_is_what_spark_groups_by[false-, named_struct",
    "tests/spark/test_key_types.py::test_a_key_is_what_spark_groups_by[true-, id",
    "tests/spark/test_kills.py::test_a_driver_killed_around_the_log_entry_loses_nothing[driver-last-ack-across]",
    "tests/spark/test_kills.py::test_a_driver_killed_around_the_log_entry_loses_nothing[jvm-durable-across]",
    "tests/spark/test_kills.py::test_a_worker_killed_at_a_step_loses_nothing[acked-8388608]",
    "tests/spark/test_kills.py::test_a_worker_killed_at_a_step_loses_nothing[acking-0]",
    "tests/spark/test_kills.py::test_a_worker_killed_at_a_step_loses_nothing[materializing-0]",
    "tests/spark/test_kills.py::test_local_files_of_a_killed_executor_are_removed",
    "tests/spark/test_locations.py::test_a_damaged_upload_is_an_error_that_names_it[delete]",
    "tests/spark/test_locations.py::test_a_damaged_upload_is_an_error_that_names_it[truncate]",
    "tests/spark/test_locations.py::test_a_torn_tail_is_no_error[zeros]",
    "tests/spark/test_locations.py::test_an_older_copy_of_the_state_is_an_error_and_rewind_repairs_it[2]",
    "tests/spark/test_locations.py::test_missing_log_files_are_an_error_that_says_so[across-missing2]",
    "tests/spark/test_locations.py::test_missing_log_files_are_an_error_that_says_so[within-missing3]",
    "tests/spark/test_lossless_casts.py::test_there_and_back_by_spark_every_value_is_what_it_was[America/New_York]",
    "tests/spark/test_lost_disk.py::test_a_task_is_repeated_elsewhere_and_its_subtask_stays_there",
    "tests/spark/test_misuse.py::test_a_dataframe_kept_from_an_earlier_batch_is_refused[before]",
    "tests/spark/test_misuse.py::test_a_last_batch_that_was_not_read_is_told_at_the_end_and_stops_the_next_start[limit",
    "tests/spark/test_misuse.py::test_an_action_that_reads_a_part_stops_the_next_batch[limit]",
    "tests/spark/test_misuse.py::test_an_action_that_reads_a_part_stops_the_next_batch[take]",
    "tests/spark/test_misuse.py::test_renumbered_partitions_are_refused_and_a_repartition_helps[two unions]",
    "tests/spark/test_repeated_batches.py::test_an_operator_that_runs_twice_in_every_batch_counts_once[memory]",
    "tests/spark/test_repeated_batches.py::test_of_two_different_actions_the_later_is_the_state[uploaded]",
    "tests/spark/test_savepoints.py::test_a_source_of_several_operators_is_gone_on_from_file_by_file",
    "tests/spark/test_savepoints.py::test_an_older_batch_is_gone_on_from_file_by_file[1-3]",
    "tests/spark/test_savepoints.py::test_an_older_batch_is_gone_on_from_file_by_file[2-10]",
    "tests/spark/test_savepoints.py::test_an_older_batch_is_gone_on_from_file_by_file[2-3]",
    "tests/spark/test_savepoints.py::test_timers_watermark_and_operator_state_are_saved_as_of_one_batch[spark.sql.maxPlan",
    "tests/spark/test_schema_evolution.py::test_a_state_may_change_its_fields[memory]",
    "tests/spark/test_schema_evolution.py::test_a_state_may_change_its_fields[rocksdb]",
    "tests/spark/test_source_names.py::test_another_query_goes_on_with_a_clock_or_without[branch",
    "tests/spark/test_source_names.py::test_another_query_goes_on_with_a_clock_or_without[savepoint-a heartbeat-a",
    "tests/spark/test_source_names.py::test_another_query_goes_on_with_a_clock_or_without[savepoint-a heartbeat-p",
    "tests/spark/test_source_names.py::test_another_query_goes_on_with_a_clock_or_without[savepoint-processing time-p",
    "tests/spark/test_source_names.py::test_every_operator_runs_and_goes_on[Spark's watermark]",
    "tests/spark/test_source_names.py::test_every_operator_runs_and_goes_on[a TTL and a heartbeat]",
    "tests/spark/test_source_names.py::test_every_operator_runs_and_goes_on[a heartbeat]",
    "tests/spark/test_source_names.py::test_every_operator_runs_and_goes_on[a name of other characters]",
    "tests/spark/test_source_names.py::test_every_operator_runs_and_goes_on[windows]",
    "tests/spark/test_time_zones.py::test_processors_see_the_clock_of_the_session[+2-transformWithState]",
    "tests/spark/test_time_zones.py::test_processors_see_the_clock_of_the_session[GMT+2-transformWithState]",
    "tests/spark/test_time_zones.py::test_processors_see_the_clock_of_the_session[PST-transformWithStateInPandas]",
    "tests/spark/test_time_zones.py::test_processors_see_the_clock_of_the_session[Z-transformWithStateInPandas]",
    "tests/spark/test_windows.py::test_windows_are_those_of_spark[sliding]",
    "tests/spark/test_windows.py::test_windows_are_those_of_spark[tumbling]",
    "tests/spark/test_write_ahead.py::test_a_repeated_batch_gives_the_sink_the_same_rows[uploaded]",
)
"""Left out by ``./dev test``: combinations of which others are in it, and the long story of several executors."""


_LONGEST = (
    "tests/spark/test_executors.py",
    "tests/spark/test_kills.py",
    "tests/spark/dropin/test_same_as_spark.py",
    "tests/spark/",
    "tests/kafka/",
    "tests/hdfs/",
    "tests/s3a/",
    "tests/cluster/",
    "tests/examples/",
    "tests/docs/",
    "tests/model/",
    "tests/soak/",
)
"""The first tests to run: of the processes none waits long for the last file of another."""


def pytest_report_header() -> str:
    return f"pyspark: {pyspark.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {
        item: min((at for at, name in enumerate(_LONGEST) if item.nodeid.startswith(name)), default=99)
        for item in items
    }
    items.sort(key=order.__getitem__)
    for item in items:
        if item.nodeid.startswith(_SLOW):
            item.add_marker("slow")
        if item.nodeid.startswith(_EXTENDED):
            item.add_marker("extended")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from tests.jars import KAFKA, S3A, spark_jars
    from tests.spark.support import make_session

    os.environ["SPARK_LOCAL_DIRS"] = str(tmp_path_factory.mktemp("spark-local"))
    session = make_session(settings=spark_jars(KAFKA, S3A))
    yield session
    session.stop()


@pytest.fixture(name="configured")
def make_configured(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Sets what a session is configured with until the end of a test."""
    names: list[str] = []

    def configure(name: str, value: str) -> None:
        names.append(name)
        spark.conf.set(name, value)

    yield configure
    for name in names:
        spark.conf.unset(name)


@pytest.fixture(scope="session")
def tls_identity() -> TlsIdentity:
    return new_identity()


@pytest.fixture(params=["clear", "tls"])
def identity(request: pytest.FixtureRequest) -> TlsIdentity | None:
    """The server's for TLS: each test runs without and with it."""
    return None if request.param == "clear" else request.getfixturevalue("tls_identity")
