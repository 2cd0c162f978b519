"""nnU-Net 2D for so many processor seconds, in its own environment; called by benchmarks/roots.py.

    .venv-nnunet/bin/python benchmarks/peers/nnunet.py MASKS SECONDS

The folders are those of its own environment variables. Planning, preprocessing, augmentation, network, loss and
prediction are its own, as it configures itself; all photographs are for training ("all"). Its learning rate falls by
epochs, so that their number must be known: the first steps are timed, and an epoch is a twentieth of what fits. Prints
a line of JSON: the steps, and the seconds they took.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from nnunetv2.experiment_planning.plan_and_preprocess_api import extract_fingerprints, plan_experiments, preprocess
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

NUM_EPOCHS = 20
PROCESSES = "nnUNet_n_proc_DA"


def main(masks: str, budget_s: float) -> None:
    torch.set_num_threads(1)
    os.environ[PROCESSES] = "1"  # its planner takes this as a number of threads, and 0 is none
    extract_fingerprints([1], num_processes=1)
    plan_experiments([1])
    preprocess([1], configurations=("2d",), num_processes=[1])
    os.environ[PROCESSES] = "0"  # augmentation in this process, whose seconds are counted
    prepared, raw = (Path(os.environ[name]) / "Dataset001_Roots" for name in ("nnUNet_preprocessed", "nnUNet_raw"))
    plans = json.loads((prepared / "nnUNetPlans.json").read_text())
    plans["continue_training"] = False
    trainer = nnUNetTrainer(
        plans, "2d", "all", json.loads((raw / "dataset.json").read_text()), device=torch.device("cpu")
    )
    trainer.disable_checkpointing = True
    trainer.num_epochs = NUM_EPOCHS
    trainer.initialize()
    trainer.on_train_start()
    began_s = time.process_time()
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        trainer.train_step(next(trainer.dataloader_train))
        num_steps += 1

    trainer.network.train()
    trainer.lr_scheduler.step(0)
    step()
    warm_s = time.process_time()
    step()
    step_s = time.process_time() - warm_s
    per_epoch = max(round((budget_s - (time.process_time() - began_s)) / step_s / NUM_EPOCHS), 1)
    for epoch in range(NUM_EPOCHS):
        trainer.lr_scheduler.step(epoch)
        for _ in range(per_epoch):
            if time.process_time() - began_s < budget_s:
                step()
    taken_s = time.process_time() - began_s
    predict(trainer, raw / "imagesTs", masks)
    batch, patch = (trainer.configuration_manager.batch_size, list(trainer.configuration_manager.patch_size))
    print(json.dumps({"steps": num_steps, "seconds": taken_s, "batch_size": batch, "patch": patch}))


def predict(trainer: nnUNetTrainer, images: Path, masks: str) -> None:
    trainer.set_deep_supervision_enabled(False)
    trainer.network.eval()
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.manual_initialization(
        trainer.network,
        trainer.plans_manager,
        trainer.configuration_manager,
        [trainer.network.state_dict()],
        trainer.dataset_json,
        type(trainer).__name__,
        trainer.inference_allowed_mirroring_axes,
    )
    Path(masks).mkdir(parents=True, exist_ok=True)
    predictor.predict_from_files_sequential(str(images), masks)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
