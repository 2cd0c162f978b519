"""What a LightningModule, its data module and its callbacks may override, and what a run makes of it: one list.

A test compares the list with Lightning's own classes, so that nothing of a new version is passed over. Called by the
Task, when it builds the module. Imports nothing of Lightning.
"""

from __future__ import annotations

from typing import Any

from shoal.errors import ConfigError


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Called, or read, as Lightning's trainer does.
OBEYED = _split(
    """
    training_step validation_step forward configure_model configure_optimizers configure_callbacks setup teardown
    prepare_data train_dataloader val_dataloader state_dict load_state_dict on_save_checkpoint on_load_checkpoint
    on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end on_train_batch_start
    on_train_batch_end on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step
    on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end on_validation_batch_start
    on_validation_batch_end on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer lr_scheduler_step
    automatic_optimization optimizers lr_schedulers manual_backward toggle_optimizer untoggle_optimizer
    toggled_optimizer backward optimizer_step optimizer_zero_grad configure_gradient_clipping clip_gradients
    """
)
# Of no effect on a fit of Lightning's, or the same without a trainer.
HARMLESS = _split(
    """
    CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE save_hyperparameters hparams
    hparams_initial remove_ignored_hparams current_epoch global_step global_rank local_rank trainer logger loggers print
    fabric device_mesh device dtype on_gpu cpu cuda to type float double half freeze unfreeze strict_loading
    example_input_array load_from_checkpoint from_datasets name state_key to_onnx to_tensorrt to_torchscript
    test_step predict_step test_dataloader predict_dataloader on_test_start on_test_end on_test_epoch_start
    on_test_epoch_end on_test_batch_start on_test_batch_end on_test_model_eval on_test_model_train on_predict_start
    on_predict_end on_predict_epoch_start on_predict_epoch_end on_predict_batch_start on_predict_batch_end
    on_predict_model_eval on_sanity_check_start on_sanity_check_end on_exception
    """
)
# Refused where they are overridden, with what to do instead.
REFUSED = {
    "log": "name the values as the record is to have them",
    "log_dict": "name the values as the record is to have them",
    "all_gather": "log the value: a record has the mean over all ranks",
    "configure_sharded_model": "call it configure_model",
    "on_validation_model_eval": "set the modes in on_validation_start",
    "on_validation_model_train": "set the modes in on_train_batch_start",
    "on_validation_model_zero_grad": "leave it out: a run frees its gradients itself",
}
# Overridden, they take a part of the step, and the module takes its steps itself, as with manual optimization.
OF_STEP = _split(
    """
    backward optimizer_step optimizer_zero_grad on_before_zero_grad configure_gradient_clipping clip_gradients
    """
)
# Callbacks of Lightning's own: those that only show something have no effect, and others need more of its trainer.
_OBEYED_CALLBACKS = _split("Callback EarlyStopping LambdaCallback WeightAveraging EMAWeightAveraging")
_SHOWING_CALLBACKS = _split(
    """
    ModelSummary RichModelSummary ProgressBar TQDMProgressBar RichProgressBar LearningRateMonitor DeviceStatsMonitor
    ThroughputMonitor
    """
)
_REMEDIES = {
    "Checkpoint": "leave it out: `checkpoint` of the spec saves, and `stop.convergence` keeps the best network",
    "StochasticWeightAveraging": "use WeightAveraging, or say average=0.999",
    "Timer": "say stop.wall_s=3600",
    "GradientAccumulationScheduler": "say parallel.accumulate=4",
}


def is_lightnings(owner: object) -> bool:
    """Whether this class or function is Lightning's own."""
    return str(owner.__module__).startswith(("pytorch_lightning.", "lightning."))


def is_overridden(owner: object, name: str) -> bool:
    """Whether it has a method of its own of this name, and not Lightning's."""
    method = getattr(owner, name, None)
    return method is not None and not is_lightnings(method)


def check_overridden(module: Any) -> None:
    """Raises ConfigError for what a run would do otherwise than the module says."""
    for name, remedy in REFUSED.items():
        if is_overridden(module, name):
            raise ConfigError("task", type(module).__name__, f"has a {name} of its own, which is not called", remedy)


def read_callbacks(module: Any) -> list[Any]:
    """The callbacks of the module that are called. Raises ConfigError for those that need more than a run has."""
    returned = module.configure_callbacks() if is_overridden(module, "configure_callbacks") else []
    found = []
    for each in returned if isinstance(returned, (list, tuple)) else [returned]:
        names = [base.__name__ for base in type(each).__mro__ if is_lightnings(base)]
        if names[0] in _OBEYED_CALLBACKS:
            found.append(each)
        elif not _SHOWING_CALLBACKS.intersection(names):
            remedy = next((_REMEDIES[name] for name in names if name in _REMEDIES), "leave it out, or write a Callback")
            problem = f"gives a {names[0]}, which needs more of Lightning's trainer than a run has"
            raise ConfigError("configure_callbacks", type(each).__name__, problem, remedy)
    return found
