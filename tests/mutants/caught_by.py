"""Which check catches which mutant."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.core import test_request_ids as requests
from tests.core import test_versions as versions
from tests.crash import test_lost_replies as lost
from tests.crash.operations import OPERATIONS
from tests.faults import test_empty_directories as empty
from tests.files import test_root as root
from tests.lifetime import test_merging as merging
from tests.lifetime import test_rollback_of_pauses as pauses
from tests.log import test_expiry as expiry
from tests.log import test_gaps as gaps
from tests.log import test_heartbeats as heartbeats
from tests.log import test_outcomes as outcomes
from tests.log import test_races as races
from tests.log import test_unknown_saves as saves
from tests.log import test_voids as voids
from tests.mutants import checks
from tests.mutants.checks import Check, given, name_of, patched, seeds, small_files

SUBMIT = next(operation for operation in OPERATIONS if operation.name == "submit")
SLICE = seeds(range(12))
"""As many seeds as it takes: what a seed meets changes with every change of the code."""


def on_disk(test: Callable[[Path], object]) -> Check:
    """A test that takes a directory."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            test(Path(directory))

    run.__name__ = name_of(test)
    return run


CAUGHT_BY: dict[str, Check] = {
    "no floor check after the link": patched(
        races.test_a_writer_that_slept_through_trims_removes_its_ghost_and_commits_once
    ),
    "no floor check by readers": patched(races.test_a_reader_with_an_old_state_does_not_take_a_trimmed_log_for_its_end),
    "damage is believed below the floor": patched(
        races.test_a_reader_that_stands_on_a_ghost_does_not_take_the_true_history_for_damage
    ),
    "floor written after the first deletion": SLICE,
    "floor before the snapshot is durable": SLICE,
    "a gap in the log is its end": given(gaps.test_the_first_entry_of_all_can_be_missing),
    "empty directories stay away": given(empty.test_whoever_writes_makes_them_again, lambda: empty.WAYS[0]),
    "a pool is wherever its path leads": on_disk(
        root.test_a_copy_is_another_pool_also_under_the_inode_of_one_that_was_removed
    ),
    "a pool that is gone has free names": on_disk(root.test_a_pool_that_was_removed_is_not_made_again),
    "own-entry check left out": checks.a_lost_reply_is_no_lost_race,
    "our own staged name is taken for a failure": given(
        lost.test_a_name_that_is_taken_by_ourselves_is_no_failure, SUBMIT
    ),
    "what is not understood is void": given(voids.test_an_entry_that_a_newer_strawq_wrote_is_not_void_for_an_older_one),
    "a repair that is torn ends all repair": given(voids.test_a_repair_that_is_torn_is_repaired_again),
    "whose log it is not looked at": checks.a_foreign_header_is_refused,
    "the answers about a pool stay on the branch that is left": given(
        requests.test_a_repeat_is_answered_on_the_branch_that_another_rollback_made
    ),
    "the time of a checkpoint is content": given(
        requests.test_a_repeat_after_a_lost_reply_gives_the_first_answer_and_changes_nothing, "checkpoint"
    ),
    "a ghost goes before its floor is durable": patched(
        races.test_no_entry_goes_for_a_floor_that_a_power_cut_could_take_back
    ),
    "ask-by-identity left out": patched(races.test_a_writer_that_slept_after_its_commit_finds_it_by_identity),
    "forgotten answers are guessed": patched(
        races.test_a_writer_that_slept_longer_than_the_pool_remembers_says_that_it_does_not_know
    ),
    "expiry by wall clock": checks.an_observer_whose_wall_clock_steps_takes_nobody_for_dead,
    "a sleeping observer counts its own sleep": checks.an_observer_that_slept_takes_nobody_for_dead,
    "an unreadable heartbeat counts as stillness": given(
        expiry.test_an_observer_whose_mount_is_sick_takes_nobody_for_dead
    ),
    "a garbled heartbeat counts as stillness": given(
        expiry.test_one_wrong_look_at_the_end_of_a_lease_takes_nobody_for_dead, b"\0" * 60
    ),
    "heartbeats wait for the log": given(
        heartbeats.test_a_commit_that_hangs_for_longer_than_a_lease_does_not_stop_the_heart
    ),
    "an observer that is not heard counts": given(
        heartbeats.test_a_mount_that_takes_no_heartbeat_for_longer_than_a_lease_costs_nobody_the_session, "full", True
    ),
    "a rollback ends a pause": given(pauses.test_a_pause_holds_over_a_rollback_and_is_acknowledged_anew),
    "a consumer's batch may lose a group": checks.a_group_is_dropped_out_of_a_batch_of_nobody,
    "a batch that lost a group comes again": checks.a_group_is_dropped_out_of_a_batch_of_nobody,
    "attempt not checked on commit": checks.an_old_attempt_of_the_same_process_is_fenced,
    "session not checked on commit": checks.a_report_under_anothers_lease_is_fenced,
    "branch not checked": checks.a_worker_of_a_branch_that_was_left_is_fenced,
    "completion accepted twice": SLICE,
    "rows may follow anything": given(
        saves.test_other_rows_do_not_follow_and_the_saved_ones_go_on, saves.unknown_save, "complete"
    ),
    "receipts forgotten": checks.a_late_completion_is_told_that_it_had_counted,
    "batch redelivery without a new number": SLICE,
    "pause not looked at": checks.a_pause_admits_nothing,
    "a group that is taken back stays ready": checks.a_group_that_is_taken_back_is_work_again_and_in_no_batch,
    "a full queue keeps complete groups": checks.a_full_queue_leases_complete_groups,
    "a full queue keeps what was begun": checks.a_full_queue_leases_what_was_begun,
    "a word opens the way back": given(versions.test_a_version_goes_back_only_through_a_rollback),
    "a seal is not looked at": SLICE,
    "a batch may be smaller at any time": SLICE,
    "archives hold nothing": SLICE,
    "leases survive a rollback": SLICE,
    "epoch refusal left out": SLICE,
    "roots from before the epoch closed": SLICE,
    "collection on a position that is not durable": checks.collection_and_a_power_cut_leave_every_reference_readable,
    "collection does not look twice at heartbeats": given(
        expiry.test_collection_spares_the_heartbeat_of_a_process_that_is_just_joining
    ),
    "inline objects not moved before a trim": SLICE,
    "a move into a closed epoch counts": small_files(
        merging.test_a_merger_that_slept_through_a_collection_writes_again_in_a_young_epoch
    ),
    "objects move back": small_files(merging.test_a_move_names_what_is_there_and_goes_forward_only),
    "records move away from their tensors": small_files(merging.test_records_do_not_move_away_from_their_tensors),
    "an object that has ended is moved": small_files(
        merging.test_what_ends_between_the_copy_and_the_commit_is_not_brought_back
    ),
    "a reader does not ask where an object is now": small_files(
        merging.test_a_reader_with_an_old_handle_is_served_from_the_new_place
    ),
    "fsync of data left out": SLICE,
    "fsync of an object's directory left out": SLICE,
    "fsync of the log's directory left out": given(races.test_what_is_acknowledged_survives_a_power_cut_at_any_call),
    "published behind a name that is not durable": patched(
        outcomes.test_nothing_is_published_behind_an_entry_that_a_power_cut_can_take
    ),
    "answers from entries that are not durable": SLICE,
    "snapshot before its entries are durable": checks.a_snapshot_stands_on_entries_that_a_power_cut_leaves,
    "not decided again after a lost race": given(races.test_the_loser_of_a_race_decides_again_on_what_the_winner_did),
    "undo left out after a lost race": SLICE,
    "a failed look at the floor says that nothing happened": given(
        outcomes.test_a_floor_that_cannot_be_read_after_the_publish_leaves_the_outcome_unknown, 5
    ),
    "a doubtful name says that nothing happened": given(
        outcomes.test_a_name_that_is_taken_and_cannot_be_read_leaves_the_outcome_unknown
    ),
    "decided on a catch-up that failed": patched(
        outcomes.test_a_reader_that_failed_half_way_does_not_decide_on_what_it_saw
    ),
    "digest not checked on read": checks.a_flipped_bit_of_an_object_is_damage,
    "entry digest not checked": given(races.test_one_flipped_bit_anywhere_in_an_entry_is_never_accepted),
    "rename over the name instead of exclusive publish": SLICE,
    "cursor committed apart from its tasks": checks.cursor_and_prompts_move_together_whenever_the_producer_dies,
}
