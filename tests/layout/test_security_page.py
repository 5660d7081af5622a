"""Every promise of docs/security.md about who can do what is held by tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

HELD_BY = {
    "Stored bytes are data: they determine the state, and nothing else.": [
        "runs/test_stored_bytes.py::test_damaged_files_of_every_kind",
    ],
    "**Anyone who can read the location** can read all state, including its keys and values, the stored output of"
    " batches, and the locations of parents and branches.": [
        "reading/test_read_state.py::test_every_state_is_read_as_of_a_checkpoint",
        "convert/test_type_json.py::test_the_columns_of_stored_output_are_those_that_it_was_written_with",
        "coordinator/test_parent_objects.py::test_the_parent_is_named_as_long_as_an_object_of_it_is_needed",
    ],
    "**Anyone who can write to the location** can change the state and what its readers see, can stop the query, and"
    " can make it delete the location's own objects.": [
        "runs/test_stored_bytes.py::test_damaged_files_of_every_kind",
        "coordinator/test_inventory.py::test_what_only_a_replaced_entry_names_is_needed_no_more",
    ],
    "These limits apply:": [],
    "They cannot run code: nothing is unpickled, and no module is imported because a stored document names it.": [
        "convert/test_type_json.py::test_the_class_of_a_user_defined_type_is_neither_unpickled_nor_imported",
        "convert/test_type_json.py::test_stored_output_with_another_description_runs_no_code",
        "runs/test_arrow_messages.py::test_a_schema_of_types_whose_values_are_elsewhere_is_refused",
    ],
    "Columns of stored output may have Spark's own types.": [
        "convert/test_type_json.py::test_every_type_of_sparks_comes_back",
    ],
    "User-defined types are taken only from the running program.": [
        "convert/test_type_json.py::test_the_columns_of_stored_output_are_those_that_it_was_written_with",
        "convert/test_type_json.py::test_stored_output_with_another_description_runs_no_code",
    ],
    "A document may name objects of operators, log files and pins, in the folders where these belong.": [
        "log/test_stored_names.py::test_objects_of_operators_and_logs_are_read",
        "log/test_stored_names.py::test_the_name_of_a_pin",
    ],
    "Other names are refused in every document: log, pin, savepoint, or a host's local files.": [
        "log/test_stored_names.py::test_an_entry_that_names_another_object_is_refused",
        "log/test_stored_names.py::test_an_identity_that_leads_elsewhere_is_refused",
        "log/test_stored_names.py::test_a_pin_that_names_another_object_is_refused",
        "log/test_stored_names.py::test_a_file_of_a_manifest_that_is_elsewhere_is_refused",
        "local/test_materializer.py::test_a_job_that_names_files_elsewhere_is_begun_again",
        "runs/test_stored_bytes.py::test_damaged_files_of_every_kind",
    ],
    "An object at another location is read if a document names it as an object of a parent.": [
        "log/test_stored_names.py::test_objects_of_operators_and_logs_are_read",
        "storage/test_links.py::test_a_link_is_read_at_its_location_and_other_names_at_the_own",
    ],
    "Nothing is written or deleted there except one object: the pin that is marked as this branch's.": [
        "storage/test_links.py::test_only_own_objects_are_deleted",
        "coordinator/test_parent_objects.py::test_a_pin_of_somebody_else_stays",
        "coordinator/test_parent_objects.py::test_an_object_that_is_no_pin_stays",
        "coordinator/test_parent_objects.py::test_an_entry_whose_pin_is_no_name_of_a_pin_is_refused",
    ],
    "Restoring a savepoint writes Spark's files only below the new `checkpointLocation`.": [
        "log/test_stored_names.py::test_a_batch_of_a_manifest_that_is_no_number_is_refused",
        "log/test_stored_names.py::test_a_file_of_a_manifest_that_is_elsewhere_is_refused",
        "spark/test_other_file_systems.py::test_no_name_leads_out_of_the_location",
    ],
    "A document, block or file that does not match its own description raises a `CorruptionError`.": [
        "runs/test_stored_bytes.py::test_many_damaged_files",
        "log/test_stored_names.py::test_numbers_that_no_writer_writes_are_refused",
        "runs/test_arrow_messages.py::test_a_value_outside_of_its_buffer_is_refused",
    ],
    "Reading it takes only the memory that its bytes fill, whatever size it declares.": [
        "runs/test_arrow_messages.py::test_a_buffer_that_declares_more_than_it_has_takes_no_memory",
        "runs/test_arrow_messages.py::test_a_block_that_is_larger_than_its_footer_says_takes_no_memory",
        "runs/test_arrow_messages.py::test_a_run_that_is_longer_than_its_object_takes_no_memory",
        "runs/test_stored_bytes.py::test_damaged_files_of_every_kind",
    ],
    "Keys, values and names appear in terminals, logs, messages and pages without control characters: these are"
    " escaped, in JSON with JSON's own escapes.": [
        "tools/cli/test_hostile_texts.py::test_no_command_writes_control_characters",
        "tools/cli/test_hostile_texts.py::test_json_has_the_values_as_they_are",
        "tools/cli/test_hostile_texts.py::test_the_page_has_neither_markup_nor_control_characters_of_theirs",
        "core/test_log_fields.py::test_a_record_is_one_line_whatever_the_texts_in_it",
        "core/test_shown.py::test_keys_values_and_errors_have_none",
    ],
    "**Anyone who can reach the driver's port** can connect, but gets no answer without the secret.": [
        "rpc/test_handshake.py::test_wrong_secret_is_not_answered",
        "rpc/test_handshake.py::test_call_without_handshake_is_not_answered",
    ],
    "Bytes that are not a valid call cause a statelog error.": [
        "rpc/test_calls.py::test_a_malformed_request_is_answered_with_an_error_of_statelog",
        "rpc/test_calls.py::test_any_bytes_leave_the_server_as_it_was",
    ],
    "Anyone who knows the secret can call the driver as a task does.": [
        "rpc/test_calls.py::test_calls_and_payloads_arrive",
    ],
    "**Anyone who can use the checkpoint page** can read what it shows, and look up keys.": [
        "tools/pages/test_ui.py::test_keys_and_their_histories_are_found",
    ],
    "Visits change nothing at the location.": [
        "tools/pages/test_ui.py::test_nothing_else_is_served",
        "tools/pages/test_ui.py::test_a_visit_leaves_the_location_as_it_is",
    ],
    "Markup in keys and values is shown as text, and scripts in them do not run.": [
        "tools/pages/test_ui.py::test_html_in_keys_and_values_is_text",
        "tools/pages/test_ui.py::test_the_page_is_served_with_a_strict_policy",
    ],
}
"""The sentences of the section, each with the tests that fail if it is not true."""


def sentences() -> list[str]:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    [section] = re.findall(r"^## Who can do what\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    paragraphs = [" ".join(part.split()).removeprefix("- ") for part in re.split(r"\n\n|\n(?=- )", section.strip())]
    return [one for paragraph in paragraphs for one in re.split(r"(?<=[.:]) (?=[A-Z*])", paragraph)]


def test_every_sentence_is_held_by_tests() -> None:
    assert sentences() == list(HELD_BY)


def test_the_tests_exist() -> None:
    for name in {name for names in HELD_BY.values() for name in names}:
        path, _, function = name.partition("::")
        tree = ast.parse((REPOSITORY / "tests" / path).read_text())
        assert function in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, name
