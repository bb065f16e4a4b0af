"""Every case that was once silently wrong or broken, and what happens to it now.

    python benchmarks/truth.py
    python benchmarks/truth.py --only A5        # one item, or all of a letter

Each line is an item: what was wrong, what happens now, and PASS if the tests that show it pass. Lines that need a GPU
run cells of ``benchmarks/nccl.py`` there, and print NOT RUN without one, which is no PASS. Exits with 0 if all lines
pass, 1 if one fails, 4 if all that could run passed and some could not.
"""

import argparse
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

ITEMS: tuple[tuple[str, str, str, list[str]], ...] = (
    (
        "A1",
        "packed rows (position_ids that restart) were kept apart under context= and pipeline= only",
        "kept apart under every plan: use_cache, which makes transformers ignore them, is off in training, with a note",
        ["tests/test_masks.py::test_packed_rows_are_kept_apart_under_every_plan"],
    ),
    (
        "A1 proof",
        "the proof of a context plan saw two samples, at 1e-5: a mask of other samples could be lost",
        "1e-6 in fp64 on up to eight samples, with padding and restarts put in; a lost mask is refused",
        [
            "tests/test_masks.py::test_masks_of_the_data_are_exact_where_sequences_are_cut",
            "tests/test_masks.py::test_a_plan_that_loses_a_mask_is_refused",
        ],
    ),
    (
        "A2",
        "F1 and AUROC of torchmetrics, and functions that are no means, depended on the plan",
        "one value under every plan: states merged, or whole batches gathered",
        ["tests/test_metrics.py"],
    ),
    (
        "A3",
        "Parquet or JSONL files with different columns: rows of one file got the labels of another",
        "refused with both file names and the differing columns; columns are matched by name",
        [
            "tests/test_data_sources.py::test_files_of_different_columns_are_refused",
            "tests/test_data_sources.py::test_lines_of_different_keys_are_refused",
            "tests/test_data_sources.py::test_columns_are_matched_by_name_and_types_by_value",
        ],
    ),
    (
        "A4",
        "buffers written from the batch (EMA codebooks, running sums) were each rank's own, without a word",
        "updated once a step from the whole batch, weights and buffers equal to one device; named in the notes",
        [
            "tests/test_buffers.py::test_weights_and_buffers_are_those_of_one_device",
            "tests/test_buffers.py::test_where_weights_are_cut",
        ],
    ),
    (
        "A4 passes",
        "microbatches wrote buffers one after another: counters and spectral norm advanced several times a step",
        "all microbatches read the step's beginning; written once a step",
        ["tests/test_buffers.py::test_where_microbatches_go_forward_twice"],
    ),
    (
        "A4 refused",
        "updates that cannot be combined (variance, queue, random draws) trained another model",
        "refused before training with the buffer's name; buffers=local allows them",
        [
            "tests/test_buffers.py::test_what_cannot_be_combined_is_known_before",
            "tests/test_buffers.py::test_a_refusal_names_the_buffer_and_the_remedy",
            "tests/test_buffers.py::test_plans_that_do_not_step_like_one_device_refuse_it",
        ],
    ),
    (
        "A4 probes",
        "probes and evaluations advanced buffers that are written in eval mode too",
        "left as they were, under every plan",
        [
            "tests/test_buffers.py::test_evaluation_leaves_buffers_as_they_were",
            "tests/test_buffers.py::test_a_step_that_is_not_taken_leaves_them_too",
        ],
    ),
    (
        "A5a",
        "f = MyFunction.apply bound at import: everything before it got a zero gradient under pipeline and branch",
        "Functions are watched below Function.apply, however they are called: weights equal one device",
        [
            "tests/test_lost_gradients.py::test_a_function_bound_when_its_file_was_read_has_its_gradient",
            "tests/test_lost_gradients.py::test_a_bound_function_is_recorded_as_one_call",
            "tests/test_lost_gradients.py::test_a_gradient_that_no_step_made_is_not_recorded_as_none",
            "tests/test_torch_private.py::test_functions_are_watched_however_they_are_called",
        ],
    ),
    (
        "A5b",
        "a Function whose backward calls autograd.grad (adjoint solvers) lost gradients under shard and offload",
        "they reach the exchange: weights equal one device under zero=1, 2, 3, offload=parameters, recompute, pipeline",
        [
            "tests/test_lost_gradients.py::test_gradients_that_a_function_asks_autograd_for_reach_the_shards",
            "tests/test_lost_gradients.py::test_and_under_other_plans",
        ],
    ),
    (
        "A5 guard",
        "a parameter whose gradient a plan loses moved by weight decay alone, without a word",
        "stopped in the first step by the parameter's name; what is zero on one device too passes",
        [
            "tests/test_lost_gradients.py::test_a_lost_gradient_stops_the_run_by_its_name",
            "tests/test_lost_gradients.py::test_a_gradient_that_is_zero_on_one_device_too_passes",
        ],
    ),
    (
        "A5 numbers",
        "a router's counts, read from tensors, became constants under pipeline: weights 7 % off",
        "the module that uses them is taken as a whole",
        ["tests/test_record.py::test_numbers_that_a_module_reads_from_tensors_are_not_taken_for_constants"],
    ),
    (
        "A6",
        "contrastive and other losses over the batch: a warning, then another training (33 % off)",
        "computed over the whole batch, outputs gathered with gradients; refused beside staleness and local steps",
        [
            "tests/test_batch_loss.py::test_trains_like_one_device",
            "tests/test_batch_loss.py::test_other_losses",
            "tests/test_batch_loss.py::test_a_loss_that_draws_random_numbers",
            "tests/test_batch_loss.py::test_the_second_forward_is_the_first_one_again",
            "tests/test_batch_loss.py::test_outputs_of_several_kinds",
            "tests/test_batch_loss.py::test_where_ranks_share_samples",
            "tests/test_batch_loss.py::test_refused_beside_steps_of_ones_own",
        ],
    ),
    (
        "A6 gather",
        "an all_gather with gradients had to be written by hand in step=",
        "meshfit.gather(tensor) gives one device's gradients; a step without it is refused with the remedy",
        [
            "tests/test_batch_loss.py::test_gather_in_a_step",
            "tests/test_batch_loss.py::test_gather_alone_gives_back_its_argument",
            "tests/test_batch_loss.py::test_gather_is_refused_where_it_cannot_work",
            "tests/test_batch_loss.py::test_a_step_is_refused_with_the_remedy",
            "tests/test_batch_loss.py::test_a_models_own_loss_is_refused_with_the_remedy",
            "tests/test_batch_loss.py::test_outputs_that_cannot_be_gathered_are_refused",
        ],
    ),
    (
        "A6 valid",
        "the validation loss of such a batch depended on the plan",
        "gathered per batch: the same under every plan",
        ["tests/test_batch_loss.py::test_evaluated_like_one_device"],
    ),
    (
        "A7a",
        "verify said no to an ordinary ResNet: fp32 rounding beyond a fixed limit",
        "it measures how far one device is from itself, raises a limit tenfold at most, and repeats in fp64: equal",
        [
            "tests/test_verify.py::test_rounding_that_a_training_magnifies_is_told_from_a_bug_in_fp64",
            "tests/test_verify.py::test_a_residual_network_is_equal_and_biases_before_batchnorm_are_rounding",
            "tests/test_verify.py::test_a_limit_is_raised_by_what_was_measured_tenfold_at_most",
        ],
    ),
    (
        "A7b",
        "verify could say yes wrongly: a noisy p.1 also left out p.10 and its optimizer state",
        "tensors are left out by exact name, only where their gradient is measured to be rounding",
        [
            "tests/test_verify.py::test_a_tensor_is_left_out_by_its_whole_name",
            "tests/test_verify.py::test_what_is_rounding_on_one_device_must_be_small_under_the_plan",
            "tests/test_verify.py::test_zero_on_both_is_compared_and_rounding_of_zero_is_not",
        ],
    ),
    (
        "A7c",
        "a bug could hide where rounding is large, or in one small tensor",
        "fp64 finds it; the first step's gradients are compared tensor by tensor",
        [
            "tests/test_verify.py::test_a_bug_is_found_where_rounding_is_as_large",
            "tests/test_verify.py::test_the_wrong_gradient_of_one_small_tensor_is_found",
        ],
    ),
    (
        "A7d",
        "verify named a tensor, not where the difference begins",
        "it names the first module that differs; where modules are taken apart, the first parameter",
        [
            "tests/test_verify.py::test_the_first_module_whose_output_differs_is_named",
            "tests/test_verify.py::test_the_last_module_whose_gradient_is_wrong_is_the_first_in_backward",
            "tests/test_verify.py::test_where_modules_are_taken_apart_a_parameter_is_named",
        ],
    ),
    (
        "A7e",
        "what could not be told was called different; an error had the exit code of an answer",
        "undecided is an answer (exit 3) with its reason; errors are 2",
        [
            "tests/test_verify.py::test_a_training_that_is_not_equal_to_itself_cannot_be_decided",
            "tests/test_verify.py::test_where_fp64_cannot_be_run_it_is_undecided",
            "tests/test_verify.py::test_random_numbers_that_cannot_be_turned_off_leave_it_undecided",
            "tests/test_cli.py::test_verify_says_when_it_cannot_tell",
            "tests/test_cli.py::test_no_error_of_verify_looks_like_an_answer",
        ],
    ),
    (
        "A7f",
        "verify left functional dropout on under pipeline, and said not equal",
        "dropout is off wherever the model is recorded, copied or sent",
        [
            "tests/test_verify.py::test_functional_dropout_is_off_under_every_plan",
            "tests/test_verify.py::test_batchnorms_that_the_user_froze_stay_so",
        ],
    ),
    (
        "A8a",
        "the probe of a loss took exceptions and random numbers for a mean over samples; tolerated 1e-3",
        "fp64, 1e-6, value and gradient, the same random numbers on both sides; the user's errors are raised",
        ["tests/test_objective.py"],
    ),
    (
        "A8b",
        "with a fused optimizer on a GPU a skipped step advanced the schedule",
        "the schedule goes on once the device has said that the step was taken",
        [
            "tests/test_update.py::test_a_skipped_step_does_not_advance_the_schedule",
            "tests/test_update.py::test_a_constant_factor_is_applied_on_a_device_too",
        ],
    ),
    (
        "A8c",
        "a pinned tensor and an event were kept for every step of the history",
        "both are released when the step is read, one step later at most",
        ["tests/test_update.py::test_a_reading_lets_go_of_the_device_once_it_is_read"],
    ),
    (
        "A9",
        'out="s3://..." wrote into a local folder "s3:"',
        "URLs as out= are refused with the remedy; resume= still reads buckets",
        ["tests/test_fit.py::test_a_wrong_question_is_one_clear_error_before_any_process_starts"],
    ),
    (
        "A10",
        "bubble verdict 'idle 82 %' beside bars of 47 %: a slow first step on one side only",
        "the first step is left out on both sides; verdict and bars have one base",
        ["tests/test_observe_verdict.py::test_a_slow_first_step_is_on_neither_side"],
    ),
    (
        "A11a",
        "a truncated tar opened with fewer samples",
        "every cut before the end-of-archive marker is told",
        ["tests/test_data_sources.py::test_a_tar_that_is_cut_short_is_told_wherever_it_is_cut"],
    ),
    (
        "A11b",
        'on_bad="skip" did nothing where a table is converted',
        "such rows are left out, listed and limited to 1 %",
        [
            "tests/test_data_sources.py::test_rows_that_cannot_be_converted_are_skipped_and_listed",
            "tests/test_data_sources.py::test_rows_of_groups_without_a_value_are_skipped_too",
        ],
    ),
    (
        "A11c",
        "values of in-memory data changed in place were not noticed on resume",
        "the fingerprint hashes the values; the resume is refused",
        ["tests/test_data_exact.py::test_values_in_memory_changed_in_place_are_noticed_on_resume"],
    ),
    (
        "A11d",
        "uint64 over 2^63 wrapped",
        "refused by column in tables, kept as torch.uint64 in arrays and memory",
        ["tests/test_data_sources.py::test_whole_numbers_above_int64_are_refused"],
    ),
    (
        "A12",
        "data sets and transforms that draw random numbers saw other pixels under other ranks and in every run",
        "all generators are seeded from seed, epoch and sample; what cannot be seeded is refused or noted",
        ["tests/test_data_random.py"],
    ),
    (
        "A13",
        "srun -N2 -n2 python train.py: two unrelated trainings, without a word",
        "refused with the torchrun command filled with the real numbers (SLURM, MPI, pods); one process still trains",
        ["tests/test_twins.py"],
    ),
    (
        "A14",
        "the report advised more microbatches for a model with BatchNorm, where that is another training",
        "another schedule is advised instead; advice that changes the training says so",
        [
            "tests/test_observe_verdict.py::test_more_microbatches_are_not_advised_where_batchnorm_would_see_others",
            "tests/test_observe_verdict.py::test_a_run_says_whether_it_has_batchnorms",
            "tests/test_observe_verdict.py::test_advice_that_makes_another_training_says_so",
        ],
    ),
    (
        "flow",
        "data-dependent control flow under zero=3: gloo aborted, blocks were mixed up",
        "ranks serve each other's gathers: exact in training, evaluate and predict",
        ["tests/test_control_flow.py", "tests/test_shard_models.py::test_ranks_may_use_different_units"],
    ),
    (
        "B stages",
        "'a module that is spread over stages was called as one', and 'Shell' object is not iterable",
        "what is decided ahead needs no parameters; modules handed to functions belong to the stage",
        ["tests/test_odd_models.py::test_stages_of_odd_models"],
    ),
    (
        "B embedding",
        "tensor: IndexError for an embedding called with a shape",
        "it is left whole, and the plan works",
        ["tests/test_odd_models.py::test_tensor_takes_an_embedding_that_is_given_a_shape"],
    ),
    (
        "B lists",
        "expert: raw error for a ModuleList with None or one module twice",
        "None is passed over; one module twice is said",
        [
            "tests/test_odd_models.py::test_a_list_beside_the_experts_may_hold_none",
            "tests/test_odd_models.py::test_one_module_twice_in_a_list_is_said",
        ],
    ),
    (
        "B kv-cache",
        "recompute=full filled a key-value cache twice",
        "the cache is off in training; one that the step asks for is handed in as it was",
        ["tests/test_odd_models.py::test_a_block_computed_again_does_not_fill_its_cache_twice"],
    ),
    (
        "B values",
        "'decides by values of its own activations' whenever real tensors were needed",
        "the reason says inputs, activations, buffers or random numbers, and where",
        ["tests/test_odd_models.py::test_the_reason_names_the_values_that_decide"],
    ),
    (
        "B copied",
        "'the model cannot be copied' where it can",
        "models with computed tensors are copied and train; a copy that fails gives its own error",
        [
            "tests/test_odd_models.py::test_a_model_with_computed_tensors_can_be_copied",
            "tests/test_worker_groups.py::test_a_model_that_cannot_be_copied_is_refused_with_its_own_reason",
        ],
    ),
    (
        "B complex",
        "an internal complex-against-float error as the reason",
        "complex weights stay complex in trials, and train under context= and pipeline=",
        ["tests/test_odd_models.py::test_complex_weights"],
    ),
    (
        "B experts",
        "'no experts' for slices of one parameter in a batched product",
        "the refusal names the parameter and the product",
        ["tests/test_odd_models.py::test_experts_of_one_batched_product_are_said"],
    ),
    (
        "B recurrent",
        "'has no sequence' for state-space, hybrid and recurrent models",
        "names the layer, loop or scan that carries a state, and the plan that works",
        ["tests/test_odd_models.py::test_a_recurrence_is_said_to_be_one"],
    ),
    (
        "B encoder",
        "torch's own encoder could not be evaluated under pipeline: in eval mode it skips its submodules",
        "its fast path is off where ranks hold parts",
        ["tests/test_evaluate.py::test_torchs_fast_path_is_not_taken_where_ranks_hold_parts"],
    ),
    (
        "B targets",
        "float targets into F.cross_entropy on data=2: IndexError from the probe",
        "PyTorch's own error about the target's dtype, from the line that raised it",
        ["tests/test_batch_loss.py::test_float_targets_are_refused_in_torchs_own_words"],
    ),
    (
        "B meta",
        "a model on the meta device: raw traceback",
        "refused: names the tensor without values and what to do",
        ["tests/test_batch_loss.py::test_a_model_on_the_meta_device_is_refused"],
    ),
    (
        "B stop",
        "SIGTERM or Ctrl-C while ranks start: 'ends after this step, saved', then trains to the end",
        "ends at once, nothing saved, no orphan, exit 143 or 130",
        [
            "tests/test_graceful_stop.py::test_a_signal_while_it_starts_ends_it_at_once",
            "tests/test_graceful_stop.py::test_a_file_made_while_it_starts_ends_it_after_a_step",
        ],
    ),
    (
        "B hang",
        "a stopped or sleeping rank: 604 s of silence, then a healthy rank is blamed",
        "reported within a minute with its stack; the final error names the rank that stalled, also under torchrun",
        ["tests/test_stalls.py"],
    ),
    (
        "B block cache",
        "trimming the block cache removed another writer's temporary file, and the run ended",
        "what others write is left alone",
        [
            "tests/test_data_cloud.py::test_trimming_leaves_what_others_are_writing",
            "tests/test_data_cloud.py::test_the_cache_is_bounded_and_checked",
        ],
    ),
    (
        "B disk",
        "a full disk for metrics ended the training; deleted checkpoints were called intact",
        "said once, training goes on; the checkpoint before is looked at",
        ["tests/test_full_disk.py"],
    ),
    (
        "B manifest",
        "a re-signed manifest: endless loops and raw exceptions",
        "checked when read: an error that says what cannot be",
        ["tests/test_checkpoint_faults.py::test_a_manifest_that_was_signed_again_is_looked_at"],
    ),
    (
        "B joiner",
        'a joiner with the key that sends {"job": 5} ended the run',
        "every message is checked; it is refused alone and the run goes on",
        ["tests/test_join.py::test_one_that_makes_no_sense_is_refused_alone"],
    ),
    (
        "B files",
        "idle connections to a rank's port: at 256 descriptors the rank aborts",
        "ranks raise their limit of open files as far as they may",
        ["tests/test_launch.py::test_a_rank_may_open_as_many_files_as_it_can"],
    ),
    (
        "B sqlite",
        "SQLite paths with # ? % opened another file, writable",
        "the path is quoted and opened read-only",
        ["tests/test_data_sql.py::test_paths_of_sqlite_may_hold_any_sign"],
    ),
    (
        "B s3",
        "S3 over an http endpoint by environment failed; 403 was tried six times",
        "plain http endpoints work; lasting 4xx answers are asked for once",
        ["tests/test_data_cloud.py::test_answers_that_stay_are_not_asked_for_again"],
    ),
    (
        "B trackers",
        "an exception in Track ended the training; Track('mlflow', project=...) raised",
        "told once, training goes on; project= is MLflow's experiment",
        ["tests/test_track.py::test_a_tracker_that_fails_is_told_once_and_training_goes_on"],
    ),
    (
        "B arguments",
        "shuffle='no', out=5, seed='a': accepted or a raw TypeError",
        "every argument is checked before anything starts, with one error",
        ["tests/test_fit.py::test_a_wrong_question_is_one_clear_error_before_any_process_starts"],
    ),
    (
        "B predict",
        "predict(model, (x1, x2)) dropped x2",
        "all inputs are passed where the model needs them; what can be read both ways is refused",
        ["tests/test_evaluate.py::test_no_input_is_dropped_as_a_target"],
    ),
    (
        "B words",
        "fsdp=2, ddp, tp=2 listed 26 keys; data=2,shard=2 was 'not a number'",
        "one line: 'in meshfit that is shard=2'; 'write spaces between words'",
        ["tests/test_plan.py"],
    ),
    (
        "B parquet",
        "time64, ns timestamps, corrupt pages, structs, maps: raw Arrow errors",
        "times are microseconds where exact; the rest is an error that names file and column",
        [
            "tests/test_data_sources.py::test_times_are_microseconds_and_nested_columns_are_named",
            "tests/test_data_sources.py::test_corrupt_parquet_pages_name_the_file",
        ],
    ),
    (
        "B csv",
        "CSV with semicolons became one column",
        "refused, with delimiter= as the remedy",
        ["tests/test_data_sources.py::test_csv_of_another_delimiter_is_no_single_column"],
    ),
    (
        "GPU order",
        "nothing checked the order in which ranks issue collectives and messages",
        "one sequence on all ranks of a communicator, and all completes if every operation blocks",
        ["tests/test_order_checker.py", "tests/test_order_ranks.py"],
    ),
    (
        "GPU 3.9",
        "LOCAL_RANK defaulted to 0: all ranks of a host took cuda:0 under srun or MPI",
        "taken from the launcher's own variables; refused where nobody says it",
        [
            "tests/test_twins.py::test_a_rank_takes_its_own_gpu",
            "tests/test_twins.py::test_a_place_that_is_none_is_refused",
        ],
    ),
)
"""(item, what was wrong, what happens now, tests that show it)"""

ON_GPU: tuple[tuple[str, str, str, list[str]], ...] = (
    (
        "GPU 3.1",
        "pipelines of three or more stages could not start on NCCL",
        "every rank makes every communicator, in one order: all schedules at 3 and 4 ranks",
        ["--worlds", "3,4", "--only", "pipeline="],
    ),
    (
        "GPU 3.2",
        "messages went to wrong peers behind it",
        "ranks of the two-rank group; weights equal one device",
        ["--worlds", "3", "--only", "pipeline=3"],
    ),
    (
        "GPU 3.3",
        "every evaluation of a pipeline made new communicators and never destroyed them",
        "made once a run, reused, destroyed at its end",
        ["--worlds", "2", "--only", "evaluat"],
    ),
    (
        "GPU 3.6",
        "receives posted ahead on separate communicators: 1f1b hung in its first step",
        "one order of messages for all ranks, also with CUDA_DEVICE_MAX_CONNECTIONS=1",
        ["--worlds", "2", "--only", "one queue"],
    ),
)
"""(item, what was wrong, what happens now, arguments of nccl.py)"""


class Outcomes:
    """A pytest plugin that keeps what became of each test."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid].append(report.outcome)

    def passed(self, test: str) -> bool:
        """Whether ``test`` (with all its parameters), or all of a file, ran and passed. Skipped tests show nothing."""
        inside = (f"{test}[", f"{test}::")
        found = {o for name, some in self.of.items() if name == test or name.startswith(inside) for o in some}
        return found - {"skipped"} == {"passed"}


def show(item: str, was: str, now: str, verdict: str) -> None:
    width = 56
    left, right = textwrap.wrap(was, width) or [""], textwrap.wrap(now, width) or [""]
    for i in range(max(len(left), len(right))):
        cells = [column[i] if i < len(column) else "" for column in (left, right)]
        print(
            f"{item if i == 0 else '':13} {cells[0]:{width}}  {cells[1]:{width}}  {verdict if i == 0 else ''}".rstrip()
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="items that begin so")
    only = parser.parse_args().only
    items = [row for row in ITEMS if row[0].startswith(only)]
    outcomes = Outcomes()
    if tests := sorted({test for *_, some in items for test in some}):
        pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *tests], plugins=[outcomes])
    print()
    verdicts = []
    for item, was, now, tests in items:
        verdicts.append("PASS" if all(map(outcomes.passed, tests)) else "FAIL")
        show(item, was, now, verdicts[-1])
    for item, was, now, arguments in (row for row in ON_GPU if row[0].startswith(only)):
        verdict = "NOT RUN"
        if torch.cuda.is_available():
            ran = subprocess.run(
                [sys.executable, str(ROOT / "benchmarks" / "nccl.py"), *arguments], cwd=ROOT, check=False
            )
            verdict = "PASS" if ran.returncode == 0 else "FAIL"
        verdicts.append(verdict)
        show(item, was, now, verdict)
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("PASS", "FAIL", "NOT RUN"))
    print(f"\n{len(verdicts)} items: {counts}")
    return 1 if "FAIL" in verdicts else 4 if "NOT RUN" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
