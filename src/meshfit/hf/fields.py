"""The fields of transformers' ``TrainingArguments``: which are taken over, left, or refused."""

import dataclasses
from typing import Any

from meshfit.errors import JobError

TAKEN = """
    output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm bf16 fp16 gradient_checkpointing
    torch_compile logging_steps logging_strategy eval_strategy eval_steps save_strategy save_steps
    save_total_limit load_best_model_at_end metric_for_best_model greater_is_better seed use_cpu
    dataloader_num_workers remove_unused_columns label_names train_sampling_strategy length_column_name
    report_to run_name project disable_tqdm resume_from_checkpoint
""".split()  # noqa: SIM905

LEFT = """
    average_tokens_across_devices gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode
    use_cache torch_empty_cache_steps tf32 logging_first_step log_on_each_node logging_nan_inf_filter
    logging_dir include_num_input_tokens_seen log_level log_level_replica prediction_loss_only
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps save_only_model save_on_each_node
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision trackio_space_id
    trackio_bucket_id trackio_static_space_id restore_callback_states_from_checkpoint accelerator_config
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics do_train do_eval
    do_predict local_rank full_determinism enable_jit_checkpoint
""".split()  # noqa: SIM905
"""How the original runs, not what it trains."""

INSTEAD = {
    "fsdp": 'Trainer(..., plan="fsdp") shards over all devices',
    "fsdp_config": 'Trainer(..., plan="fsdp recompute=full offload=optimizer"), say',
    "deepspeed": 'Trainer(..., plan="zero=3") shards as ZeRO 3 does',
    "parallelism_config": 'Trainer(..., plan="fsdp tp=2 cp=2"), say',
    "label_smoothing_factor": "compute_loss_func= with F.cross_entropy(..., label_smoothing=)",
    "auto_find_batch_size": "a smaller per_device_train_batch_size, with gradient_accumulation_steps",
    "data_seed": "seed is of the order of samples, too",
    "dataloader_drop_last": "leave the last samples out of train_dataset: the last batch may be smaller",
    "push_to_hub": "trainer.save_model(folder) writes what push_to_hub takes",
    "bf16_full_eval": "bf16 is of evaluations, too",
    "fp16_full_eval": "fp16 is of evaluations, too",
    "eval_delay": "eval_steps",
    "eval_on_start": "trainer.evaluate() before trainer.train()",
    "batch_eval_metrics": "compute_metrics on the whole data set",
    "include_for_metrics": "compute_metrics with predictions and labels",
    "use_liger_kernel": 'Trainer(..., plan="... compile=block")',
}


def refuse_fields(args: Any) -> None:
    """What is set and would not be done."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in TAKEN or field.name in LEFT or not value or value == field.default:
            continue
        instead = INSTEAD.get(field.name, "leave it out, or use meshfit.fit, which may have it by another name")
        raise JobError(f"TrainingArguments({field.name}={value!r}) is not taken over", instead)
